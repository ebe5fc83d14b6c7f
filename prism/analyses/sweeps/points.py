"""One setting of a sweep, and the bench that runs it.

All run under one seed, so that differences are paired, and are compared for the same tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.analyses.placements.clusters import spread
from prism.analyses.placements.selection import QUANTILES, Difference, pseudo_values, student
from prism.analyses.sweeps.pointtasks import (
    Ideal,
    Start,
    find_ideal,
    find_steps,
    library_of,
    run_ideals,
    run_steps,
    share,
)
from prism.cluster.devices import DEVICES
from prism.common.attribution import ClusterControl, control_slope
from prism.common.errors import PrismError
from prism.jobs.job import Job
from prism.simulation.execution.tasks import is_remote, n_threads
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.steps import Exposed, Progress, find_exposed, warm_up
from prism.workload.build import build_workload
from prism.workload.memory import Memory

Array = NDArray[np.float64]
MEASURES = ("p50", "p95", "mean")
QUIET_GPUS = 1 << 21
QUIET_BATCHES = 1, 4
"""GPUs drawn for the quiet times of one setting; least and most batches of 64 clusters that is."""
KEPT_STEPS = 48
"""Settings kept ready to run; others are built again when they go on."""


@dataclass(eq=False)
class Point:
    """A setting: its job, what a step of it takes at least, its simulated steps."""

    setting: dict[str, str]  # values of the keys that differ
    job: Job
    group: tuple[str, ...] = ()  # what was varied by hand; layouts are chosen within it
    own: bool = False  # whether it is the job as it is
    work: float = 1.0  # tokens of a step over those of the job's
    memory: Memory | None = None
    least: float = 0.0  # seconds that a step takes at least, see `least_seconds`
    ideal: float | None = None  # the step with every effect at 1 [s]; None where not needed
    times: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))  # [cluster, lane] s
    quiet: Array = field(default_factory=lambda: np.empty(0))  # nothing random but ranks [many] s
    slope: float = 1.0  # of the clusters' mean steps over their quiet times
    exposed: Exposed = Exposed(0.0, 0.0)  # communication
    model_flop: float = 0.0  # useful work of a step
    n_draws: int = 0  # op-samples of a step
    done: bool = False  # whether it was simulated as long as any

    @property
    def n(self) -> int:
        """Clusters so far."""
        return len(self.times)

    def same_work(self, n: int | None = None) -> Array:
        """Return steps on the first n clusters, for the tokens of one step of the job [s].

        They are spread over all clusters whose quiet times are known: slow GPUs are rare, and few
        clusters hardly meet them, see `prism.analyses.placements.clusters.spread`.
        """
        return np.asarray(spread(self.times[:n], self.quiet, self.slope) / self.work)

    def values(self, measure: str, n: int | None = None) -> Array:
        """One value per cluster, whose mean is the figure for the same work [s]."""
        return pseudo_values(self.same_work(n), QUANTILES.get(measure))

    def figure(self, measure: str) -> float:
        """Figure of the simulated steps for the same work [s]."""
        values = self.same_work()
        q = QUANTILES.get(measure)
        return float(values.mean() if q is None else np.quantile(values, q))

    @property
    def mfu(self) -> float | None:
        """Model flop per second and GPU over the device's peak [1]; None without a model."""
        if self.model_flop <= 0.0 or self.n == 0:
            return None
        peak = DEVICES[self.job.cluster.device].bf16_flop_per_s * self.job.world_size
        return self.model_flop / float(self.times.mean()) / peak


def difference(point: Point, other: Point, measure: str) -> Difference:
    """Compare two settings on the clusters that both ran on, for the same work [1]."""
    n = min(point.n, other.n)
    mine, base = point.values(measure, n), other.values(measure, n)
    d = (mine - base) / float(base.mean())
    error = float(d.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return Difference(float(d.mean()), error, n)


def probability_best(best: Point, others: Sequence[Point], measure: str, tolerance: float) -> float:
    """Probability that none of the others is better by more than a share of the figure.

    As in `prism.analyses.placements.selection.probability_within`.
    """
    rivals = (p for p in others if p is not best and min(p.n, best.n) > 1)
    each = (student(tolerance, difference(best, rival, measure)) for rival in rivals)
    return math.prod(each, start=1.0)


def least_seconds(job: Job) -> float:
    """Seconds that a step takes at least, by what its stages compute.

    A stage computes all its microbatches one after the other. Before its first forward the earlier
    stages do theirs of a first chunk, and after its last backward they do one backward of it, where
    no weight gradients fill that time; then the optimizer follows: a bound for every schedule,
    which communication only lengthens.
    """
    if job.variability.model is not None:
        return 0.0
    workload, before, found = build_workload(job, library_of(job)), 0.0, 0.0
    for stage, row in enumerate(workload.chunks):
        each = [sum(k.duration for k in (*chunk.forward, *chunk.backward)) for chunk in row]
        after = workload.optimizer[stage].duration if workload.optimizer else 0.0
        found = max(found, before + sum(each) * job.parallelism.microbatches + after)
        before += sum(k.duration for k in row[0].forward) if job.parallelism.splits else each[0]
    return found


def fit_slope(points: Sequence[Point]) -> None:
    """Find how far the clusters' mean steps follow their quiet times, alike for all settings."""
    known = [p for p in points if p.n > 1 and p.quiet.size and np.ptp(p.quiet) > 0.0]
    if not known:
        return
    n = min(point.n for point in known)
    times = [point.times[:n] / point.work for point in known]
    quiet = tuple(point.quiet / point.work for point in known)
    slope = control_slope(times, ClusterControl(quiet))
    for point in known:
        point.slope = slope


class Bench:
    """Where settings are run: one seed, some threads, the latest of them kept ready.

    The GPUs of the largest setting say on how many clusters quiet times are found.
    """

    def __init__(
        self, seed: int, threads: int, progress: Progress | None = None, n_gpus: int = 1
    ) -> None:
        self.seed, self.threads, self.progress = seed, threads, progress
        batches = int(np.clip(QUIET_GPUS // (n_gpus * engine.LANES), *QUIET_BATCHES))
        self.n_quiet = batches * engine.LANES
        self.simulated = 0  # clusters over all settings
        self._steps: OrderedDict[Point, Prepared] = OrderedDict()
        self._ideals: dict[Point, Ideal | str] = {}  # foreseen
        self._warm = False

    def step(self, point: Point) -> Prepared:
        """Return a setting ready to run."""
        if point not in self._steps:
            self._steps[point] = prepare(point.job, self.seed)
        self._steps.move_to_end(point)
        if len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)
        return self._steps[point]

    def find_ideal(self, point: Point) -> float:
        """Find a setting's step with every effect at 1, for the same work [s]."""
        if point.ideal is None:
            self.foresee_ideals([point])
            found = self._ideals.pop(point, None) or find_ideal(self.step(point), self.threads)
            if isinstance(found, str):
                raise PrismError(found)
            point.ideal, point.model_flop, point.n_draws = found
        return point.ideal / point.work

    def foresee_ideals(self, points: Sequence[Point]) -> None:
        """Find at once, on workers, what `find_ideal` is going to be asked for, first of all now.

        As many as there are threads, and only if the first is not known: which ones a sweep comes
        to in the end depends on those before.
        """
        if not is_remote() or points[0].ideal is not None or points[0] in self._ideals:
            return
        new = [p for p in points if p.ideal is None and p not in self._ideals]
        new = new[: 2 * n_threads(self.threads)]
        found = run_ideals([share(point.job, self.seed) for point in new])
        self._ideals |= dict(zip(new, found, strict=True))

    def find_exposed(self, point: Point) -> None:
        """Find a setting's exposed communication of all its steps, as an estimate does."""
        point.exposed = find_exposed(self.step(point), point.times, self.seed, self.threads)

    def extend(self, point: Point, n: int) -> None:
        """Bring a setting to n clusters."""
        if wrong := self.extend_all([point], n):
            raise PrismError(wrong[point])

    def foresee_steps(self, points: Sequence[Point], n: int) -> None:
        """Run at once, on workers, what `extend` is going to be asked for; errors come then."""
        if is_remote():
            self.extend_all([p for p in points if not isinstance(self._ideals.get(p), str)], n)

    def extend_all(self, points: Sequence[Point], n: int) -> dict[Point, str]:
        """Bring settings to n clusters, all at once where there are workers; returns what fails."""
        wrong: dict[Point, str] = {}
        short = [point for point in points if point.n < n]
        runs: Iterable[tuple[Array, Start] | str]
        if is_remote():
            shared = [share(point.job, self.seed) for point in short]
            runs = run_steps(shared, [range(point.n, n) for point in short], self.n_quiet)
        else:
            runs = (self._run(point, n) for point in short)
        for point, found in zip(short, runs, strict=True):
            if isinstance(found, str):
                wrong[point] = found
                continue
            if point.n == 0:
                point.quiet, point.exposed = found[1]
            self.simulated += len(found[0])
            point.times = np.concatenate([point.times, found[0].astype(np.float64)])
        return wrong

    def _run(self, point: Point, n: int) -> tuple[Array, Start]:
        step = self.step(point)
        if not self._warm:
            warm_up(step.program, self.seed)
            self._warm = True
        return find_steps(step, range(point.n, n), self.seed, self.threads, self.n_quiet)
