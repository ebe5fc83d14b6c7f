"""What a calibration says: each figure with its interval and how much is the library's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.common.text import format_count, format_share, percent_change
from prism.distributions.library import Library
from prism.models.calibration.model import StepSetting
from prism.models.calibration.scales import COMMUNICATION_PRIOR, COMPUTE_PRIOR, MODEL_ERROR, Scales
from prism.models.calibration.sizes import Size
from prism.models.calibration.spreads import Factor, StepSpread

Array = NDArray[np.float64]
MOSTLY = 0.7  # share of the prior's variance from which a figure is said to be the library's
_OFF = 0.03  # of a mean that is fitted: beyond, the sizes contradict each other
_TAIL_OFF = 0.05  # of a p95
_FEW_RUNS = 3
_FEW_STALLS = 10
_FAR = 3.0  # prior standard deviations


@dataclass(frozen=True)
class Calibrated:
    """What a calibration found."""

    scales: Scales
    between: Factor
    spread: StepSpread
    setting: StepSetting
    library: Library


def report_of(
    sizes: Sequence[Size], drawn: Sequence[Array], found: Calibrated, base: Library
) -> dict[str, Any]:
    """Collect what a calibration found, as plain values.

    Parameters
    ----------
    drawn : sequence of float64 [cluster, 64]
        Steps of each size, predicted over the calibrated library [s].
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
            "rank": {
                "cv": found.library.distribution("rank").cv if "rank" in found.library else 0.0
            },
            "step": {"cv": found.spread.cv(max(sizes, key=lambda x: x.job.world_size).mean_s)},
        },
        "stalls": {
            "n": int(sum(x.stalls for x in sizes)),
            "job_rate_per_hour": s.job_rate, "node_rate_per_hour": s.node_rate,
            "mean_s": float(lengths.mean()) if lengths.size else None,
            "longest_s": float(lengths.max()) if lengths.size else None,
        },
        "not_identifiable": _not_identifiable(sizes, found),
        "warnings": [*_unlikely(found), *_warnings(sizes, drawn, found)],
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


def _not_identifiable(sizes: Sequence[Size], found: Calibrated) -> list[str]:
    """Say what these sizes cannot tell."""
    out = []
    b = found.scales.communication
    if b.library_share > MOSTLY:
        few = "these sizes spend" if len(sizes) > 1 else "one size spends"
        out.append(
            f"communication: {format_share(b.library_share, 2)} the library's; {few} one share of "
            "the step on it, so where it takes another, the mean may be off by "
            f"{format_share(_sensitivity(found.scales), 2)} for each tenth of the step"
        )
    if found.between.library_share > MOSTLY:
        out.append(
            f"between runs: {format_share(found.between.library_share, 2)} the library's; "
            f"measured runs, total: {sum(s.n_runs for s in sizes)}, too few to show how much runs "
            "differ"
        )
    else:
        out.append(
            "between cluster draws: runs on the same nodes differ less than allocations do; the "
            "factor holds for runs on such nodes as those measured"
        )
    out.append(
        "between GPUs, microbatches, kernels: their proportions, and what waits for what, are "
        "the library's; needs a trace of ops"
    )
    lengths = [s.mean_s for s in sizes]
    if max(lengths) < 1.5 * min(lengths):
        out.append(
            "spread of a step: whether a share of it or a fixed time, since no two sizes differ "
            "much in length; assumed a share"
        )
    if not sum(s.stalls for s in sizes):
        hours = sum(s.exposure_s for s in sizes) / 3600.0
        out.append(f"stalls: none in {hours:.3g} h; below {3.0 / hours:.3g} per hour at 95 %")
    elif len({s.job.n_nodes for s in sizes}) == 1:
        out.append("stalls: whether by job or by node, from one size; assumed by node")
    out.append("failures, checkpoints, evaluations: step times do not hold them")
    return out


def _sensitivity(scales: Scales) -> float:
    """Change of the log mean for one standard error of the communication factor and a tenth."""
    return 0.1 * min(scales.communication.log_std, COMMUNICATION_PRIOR)


def _unlikely(found: Calibrated) -> list[str]:
    """Say which factor is so far from the library's that something else is wrong."""
    priors = {"kernels": (found.scales.compute, COMPUTE_PRIOR),
              "messages": (found.scales.communication, COMMUNICATION_PRIOR)}  # fmt: skip
    return [
        f"{name} take {f.value:.3g} times what the library says, and {np.exp(_FAR * prior):.2g} "
        "times either way would be much: are the step times in the unit that their column says, "
        "and of this job?"
        for name, (f, prior) in priors.items()
        if abs(float(np.log(f.value))) > _FAR * prior
    ]


def _warnings(sizes: Sequence[Size], drawn: Sequence[Array], found: Calibrated) -> list[str]:
    """List what is estimated from few data, and what does not fit together."""
    out = []
    for size, steps in zip(sizes, drawn, strict=True):
        row = _size(size, steps)
        if abs(row["p50_error"]) > _OFF:
            why = "no two factors fit all sizes" if len(sizes) > 1 else (
                "the factors that would fit it are too far from the library's"
            )  # fmt: skip
            out.append(
                f"{size.label}: the calibrated job's median step is "
                f"{percent_change(row['p50_error'])} from the measured one; {why}: does the job "
                "say what was run?"
            )
        elif abs(row["p95_error"]) > _TAIL_OFF:
            out.append(
                f"{size.label}: the calibrated job's p95 is {percent_change(row['p95_error'])} "
                "from the measured one: what varies here is not in the model, or the job's own "
                "effects override what was measured"
            )
        if size.n_runs < _FEW_RUNS:
            few = "one run" if size.n_runs == 1 else format_count(size.n_runs, "run")
            out.append(f"{size.label}: only {few}, {_FEW_RUNS} or more needed for the spread "
                       "between runs")  # fmt: skip
        own = size.job.variability.effects.model_dump(exclude_none=True)
        names = [name for name in ("rank", "step", "stall", "residual") if name in own]
        if names:
            out.append(
                f"{size.label}: the job sets its own {', '.join(names)} effect, which overrides "
                "what is measured here"
            )
    n = int(sum(size.stalls for size in sizes))
    if 0 < n < _FEW_STALLS:
        low, high = _poisson_interval(n)
        out.append(f"stalls: only {n} measured; 90 % interval of the rate: "
                   f"{low / n:.2g} to {high / n:.2g} times it")  # fmt: skip
    return out


def _poisson_interval(n: int) -> tuple[float, float]:
    """90 % interval of a Poisson mean after n events (Garwood)."""
    from scipy.stats import chi2

    return float(chi2.ppf(0.05, 2 * n) / 2.0), float(chi2.ppf(0.95, 2 * n + 2) / 2.0)
