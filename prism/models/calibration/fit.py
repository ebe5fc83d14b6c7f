"""`prism fit --calibrate`: a job calibrated to the steps that one or several of its sizes took.

Two sizes carry about two means and three spreads. So what is fitted is a factor on compute and one
on communication, the spread of a step and between runs, and how often the job stalls; all else is
the library's, and the report says how much of each figure is. Left out: the parts themselves (the
other modules here).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from scipy.optimize import brentq

from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.common.means import poisson_interval
from prism.common.text import format_count, format_share, percent_change
from prism.distributions.library import Library, load_library
from prism.jobs.job import Job
from prism.models.calibration.model import (
    MeasuredSize,
    StepSetting,
    calibrated_to_dataset,
    with_factors,
    with_spreads,
    with_steps,
)
from prism.models.calibration.predict import Predicted, draw_steps, predict_size, prepare_quiet
from prism.models.calibration.scales import (
    COMMUNICATION_PRIOR,
    COMPUTE_PRIOR,
    MODEL_ERROR,
    RATIOS,
    Scales,
    fit_scales,
)
from prism.models.calibration.sizes import Size, measure_size
from prism.models.calibration.spreads import Factor, StepSpread, fit_between, fit_within, memory_s
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.traces import StepTimes
from prism.workload.build import build_workload, nominal_step

if TYPE_CHECKING:
    import xarray as xr

# -------------------------------------------------------------------------------- the report
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

    `drawn` [cluster, 64]: steps of each size, predicted over the calibrated library [s].
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
            f"{format_share(0.1 * min(b.log_std, COMMUNICATION_PRIOR), 2)} for each tenth of the "
            "step"
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
        low, high = poisson_interval(n)
        out.append(f"stalls: only {n} measured; 90 % interval of the rate: "
                   f"{low / n:.2g} to {high / n:.2g} times it")  # fmt: skip
    return out


Drawn = TypeVar("Drawn")
SHAPE_KNOTS = 1025
_MOVES = 3  # of the range of ratios that means are predicted over


def calibrate(
    measured: Sequence[tuple[Job, StepTimes]],
    attrs: dict[str, Any],
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":
    """Bring the library of jobs to measured step times."""
    context = make_context(seed, threads)
    base = _base_library([job for job, _ in measured])
    # with one length from which a delay is a stall
    shortest_s = max(measure_size(job, times, seed).stall_from_s for job, times in measured)
    sizes = [measure_size(job, times, seed, shortest_s) for job, times in measured]
    count = _Count(len(sizes) * (2 + len(RATIOS)), progress)
    found = _fit(sizes, base, context, count)
    again = [count.done(draw_steps(s.job, found.library, context)) for s in sizes]
    report = report_of(sizes, again, found, base)
    kept = [
        MeasuredSize(s.label, s.job.world_size, s.job.parallelism.microbatches, s.n, s.steps_s)
        for s in sizes
    ]
    largest = max(sizes, key=lambda s: s.job.world_size).job
    blocks = ("model", "parallelism", "cluster", "run")
    job = {name: getattr(largest, name).model_dump(mode="json", exclude_none=True)
           for name in blocks}  # fmt: skip
    return calibrated_to_dataset(found.library, kept, report, job, attrs)


class _Count:
    """Counts simulations."""

    def __init__(self, whole: int, progress: Progress | None) -> None:
        self.n, self.whole, self.progress = 0, whole, progress

    def done(self, value: Drawn) -> Drawn:
        """Count one, and hand it on."""
        self.n += 1
        self.whole = max(self.n, self.whole)
        if self.progress is not None:
            self.progress(self.n, self.whole)
        return value


def _base_library(jobs: Sequence[Job]) -> Library:
    """Return the library that all jobs name."""
    names = {job.variability.library for job in jobs}
    for job in jobs:
        if job.variability.model is not None:
            raise PrismError(
                f"{job.source}: variability.model: a job that is calibrated starts from a library, "
                "not from a fitted trace; leave the model out"
            )
        if job.variability.dependence != "full":
            raise PrismError(
                f"{job.source}: variability.dependence: none; expected full, since what is fitted "
                "is what steps share"
            )
    if len(names) > 1 or None in names:
        said = ", ".join(f"{job.name}: {job.variability.library or 'none'}" for job in jobs)
        raise PrismError(
            f"--calibrate: expected jobs over one library, got {said}; set variability.library"
        )
    library = load_library(str(names.pop()))
    if "nominal/compute_time_factor" in library:
        raise PrismError(
            f"{jobs[0].source}: variability.library: {library.name} is calibrated already; start "
            "from the library it was made of"
        )
    return library


def _fit(sizes: Sequence[Size], base: Library, context: RunContext, count: _Count) -> Calibrated:
    """Fit the spread between runs, means over it, and the spread within runs."""
    steps = [prepare_quiet(s.job, base, context.seed) for s in sizes]

    def predict(library: Library) -> list[Predicted]:
        return [count.done(predict_size(step, library, context)) for step in steps]

    first = predict(base)
    between = fit_between(sizes, first)
    spread = fit_within(sizes, first)
    # what waits for noise takes longer: means come after spreads
    library = with_spreads(base, between.value, spread.library.value)
    own, clusters = [between.value * p.between for p in first], [p.clusters for p in first]
    ratios = RATIOS
    for _ in range(_MOVES):
        settings = [with_factors(library, 1.0, float(np.exp(r))) for r in ratios]
        found = [[size.mean_s for size in predict(setting)] for setting in settings]
        means = list(np.array(found).T)
        scales = fit_scales(sizes, means, own, clusters, ratios)
        ratio = float(np.log(scales.communication.value / scales.compute.value))
        if ratios[0] <= ratio <= ratios[-1]:
            break
        ratios = RATIOS + ratio  # beyond, a straight line is only a guess
    library = with_factors(library, scales.compute.value, scales.communication.value)
    nominal = np.mean([
        nominal_step(build_workload(s.job, library), s.job.parallelism) / s.mean_s for s in sizes
    ])  # fmt: skip
    setting = StepSetting(
        pooled_shape(sizes), spread.relative, spread.fixed_s * float(nominal),
        memory_s(sizes, spread), *stall_rates(sizes), np.concatenate([s.stall_s for s in sizes]),
    )  # fmt: skip
    return Calibrated(scales, between, spread, setting, with_steps(library, setting))


def pooled_shape(sizes: Sequence[Size]) -> Array:
    """Mean of the sizes' quantiles of steps' deviations [quantile], unit standard deviation."""
    q = (np.arange(SHAPE_KNOTS) + 0.5) / SHAPE_KNOTS
    rows = [np.quantile(s.shape, q) for s in sizes if s.within > 0.0]
    if not rows:
        return np.zeros(1)
    shape = np.mean(rows, axis=0)
    shape = shape - shape.mean()
    return np.asarray(shape / shape.std())


def stall_rates(sizes: Sequence[Size]) -> tuple[float, float]:
    """Stalls per hour of a job, and of each of its nodes: the most likely, neither below 0 [1/h].

    Sizes of equal nodes cannot tell the two apart; then all are the nodes', so that a larger job
    stalls more often.
    """
    hours = np.array([s.exposure_s for s in sizes]) / 3600.0
    counts = np.array([s.stalls for s in sizes])
    nodes = np.array([float(s.job.n_nodes) for s in sizes])
    if counts.sum() == 0.0 or hours.sum() <= 0.0:
        return 0.0, 0.0
    if np.ptp(nodes) == 0.0:
        return 0.0, float(counts.sum() / (hours @ nodes))
    # the most likely rates give the counted number: one share of it is left to find, by job
    by_job = hours * counts.sum() / hours.sum()
    by_node = hours * nodes * counts.sum() / (hours @ nodes)

    def slope(share: float) -> float:
        """Differentiate the log likelihood; the slope falls with the share."""
        seen = counts > 0.0
        expected = share * by_job[seen] + (1.0 - share) * by_node[seen]
        return float(counts[seen] @ ((by_job - by_node)[seen] / expected))

    if slope(0.0) <= 0.0:
        share = 0.0
    else:
        share = 1.0 if slope(1.0) >= 0.0 else float(brentq(slope, 0.0, 1.0))
    whole = float(counts.sum())
    return share * whole / float(hours.sum()), (1.0 - share) * whole / float(hours @ nodes)
