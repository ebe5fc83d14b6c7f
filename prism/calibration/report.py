"""What a calibration says of itself: each figure with its interval and how much is the library's.

Left out: how it looks in a terminal (`prism.modelviews`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.calibration.model import StepSetting
from prism.calibration.scales import COMMUNICATION_PRIOR, COMPUTE_PRIOR, MODEL_ERROR, Scales
from prism.calibration.sizes import Size
from prism.calibration.spreads import Factor, StepSpread
from prism.library import Library

Array = NDArray[np.float64]
MOSTLY = 0.7  # share of the prior's variance from which a figure is said to be the library's
_OFF = 0.03  # of a mean that is fitted: beyond, the sizes contradict each other
_FEW_RUNS = 3


@dataclass(frozen=True)
class Found:
    """What a calibration found."""

    scales: Scales
    between: Factor
    spread: StepSpread
    setting: StepSetting
    library: Library


def report_of(
    sizes: Sequence[Size], drawn: Sequence[Array], found: Found, base: Library
) -> dict[str, Any]:
    """Collect what a calibration found, as plain values.

    Parameters
    ----------
    sizes : sequence of Size
    drawn : sequence of float64 [cluster, 64]
        Steps of each size, predicted over the calibrated library [s].
    found : Found
    base : Library
        What it started from.
    """
    s = found.setting
    lengths = s.stall_s
    return {
        "inputs": [x.source for x in sizes],
        "library": base.name,
        "sizes": [_size(x, y) for x, y in zip(sizes, drawn, strict=True)],
        "factors": {
            "compute": _factor(found.scales.compute),
            "communication": _factor(found.scales.communication),
            "between_runs": _factor(found.between),
            "within_run": _factor(found.spread.library),
        },
        "scales": {
            "covariance": found.scales.covariance.tolist(), "model_error": MODEL_ERROR,
            "prior_covariance": np.diag([COMPUTE_PRIOR**2, COMMUNICATION_PRIOR**2]).tolist(),
        },
        "step": {
            "relative": s.relative, "fixed_s": found.spread.fixed_s,
            "correlation_time_s": s.memory_s,
        },
        "kernels": [],  # step times hold none
        "effects": {
            "rank": {"cv": found.library.law("rank").cv if "rank" in found.library else 0.0},
            "step": {"cv": found.spread.cv(max(sizes, key=lambda x: x.job.world_size).mean_s)},
        },
        "stalls": {
            "n": int(sum(x.stalls for x in sizes)),
            "job_rate_per_hour": s.job_rate, "node_rate_per_hour": s.node_rate,
            "mean_s": float(lengths.mean()) if lengths.size else None,
            "longest_s": float(lengths.max()) if lengths.size else None,
        },
        "not_identifiable": _not_identifiable(sizes, found),
        "warnings": _warnings(sizes, drawn),
        "notes": [],
    }  # fmt: skip


def _factor(f: Factor) -> dict[str, Any]:
    return {"value": f.value, "ci": list(f.ci), "library_share": f.library_share}


def _size(size: Size, drawn: Array) -> dict[str, Any]:
    """Measured and predicted figures of one size."""
    measured, predicted = np.quantile(size.steps_s, [0.5, 0.95]), np.quantile(drawn, [0.5, 0.95])
    job = size.job
    return {
        "job": job.name, "measured": size.source, "n": size.n, "runs": size.n_runs,
        "world_size": job.world_size, "nodes": job.n_nodes,
        "microbatches": job.parallelism.microbatches,
        "p50": float(measured[0]), "p95": float(measured[1]),
        "predicted_p50": float(predicted[0]), "predicted_p95": float(predicted[1]),
        "p50_error": float(predicted[0] / measured[0] - 1.0),
        "p95_error": float(predicted[1] / measured[1] - 1.0),
        "within_run_cv": size.within,
        "between_runs_cv": None if size.n_runs < 2 else float(np.sqrt(size.between)),
    }  # fmt: skip


def _not_identifiable(sizes: Sequence[Size], found: Found) -> list[str]:
    """Say what these sizes cannot tell."""
    out = []
    b = found.scales.communication
    if b.library_share > MOSTLY:
        out.append(
            f"communication: {b.library_share:.0%} the library's; these sizes spend about the same "
            "share of the step on it, so where it takes another, the mean may be off by "
            f"{100 * _sensitivity(found.scales):.1f} % for each tenth of the step"
        )
    if found.between.library_share > MOSTLY:
        out.append(
            f"between runs: {found.between.library_share:.0%} the library's; "
            f"{sum(s.n_runs for s in sizes)} measured runs hardly show how much runs differ"
        )
    else:
        out.append(
            "between clusters: runs on the same nodes differ less than clusters do; the factor is "
            "right for runs on such nodes as those measured"
        )
    out.append(
        "between GPUs, microbatches, kernels: their proportions, and who waits for whom, are the "
        "library's; needs a trace of ops"
    )
    lengths = [s.mean_s for s in sizes]
    if max(lengths) < 1.5 * min(lengths):
        out.append(
            "spread of a step: these sizes take about as long, so it is taken as a share of the "
            "step, not as a time that all steps have"
        )
    if not sum(s.stalls for s in sizes):
        hours = sum(s.exposure_s for s in sizes) / 3600.0
        out.append(f"stalls: none in {hours:.3g} h; below {3.0 / hours:.3g} per hour at 95 %")
    elif len({s.job.n_nodes for s in sizes}) == 1:
        out.append("stalls: by job or by node cannot be told from one size; taken by node")
    out.append("failures, checkpoints, evaluations: step times do not hold them")
    return out


def _sensitivity(scales: Scales) -> float:
    """Change of the log mean for one standard error of the communication factor and a tenth."""
    return 0.1 * min(scales.communication.log_std, COMMUNICATION_PRIOR)


def _warnings(sizes: Sequence[Size], drawn: Sequence[Array]) -> list[str]:
    """Say what rests on little, and what does not fit together."""
    out = []
    for size, steps in zip(sizes, drawn, strict=True):
        error = float(np.median(steps)) / size.p50_s - 1.0
        if abs(error) > _OFF:
            out.append(
                f"{size.label}: the calibrated job's median step is {error:+.1%} from the measured "
                "one; no two factors bring all sizes together: do the jobs say what was run?"
            )
        if 1 < size.n_runs < _FEW_RUNS:
            out.append(f"{size.label}: {size.n_runs} runs")
    return out
