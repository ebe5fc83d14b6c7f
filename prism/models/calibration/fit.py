"""`prism fit --calibrate`: a job calibrated to the steps that one or several of its sizes took.

Two sizes carry about two means and three spreads. So what is fitted is a factor on compute and one
on communication, the spread of a step and between runs, and how often the job stalls; all else is
the library's, and the report says how much of each figure is. Left out: the parts themselves (the
other modules here).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from prism.common.errors import PrismError
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
from prism.models.calibration.report import Calibrated, report_of
from prism.models.calibration.scales import RATIOS, fit_scales
from prism.models.calibration.sizes import Size, measure_size
from prism.models.calibration.spreads import fit_between, fit_within, memory_s
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.traces import StepTimes
from prism.workload.build import build_workload, nominal_step

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
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
    sizes = measure_sizes(measured, seed)
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


def measure_sizes(measured: Sequence[tuple[Job, StepTimes]], seed: int) -> list[Size]:
    """Take all sizes apart, with one length from which a delay is a stall."""
    alone = [measure_size(job, times, seed) for job, times in measured]
    shortest_s = max(size.stall_from_s for size in alone)
    return [measure_size(job, times, seed, shortest_s) for job, times in measured]


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
