"""One setting of a sweep: its job, what it must take at least, its simulated steps.

All settings run under the same seed: clusters, steps and microbatches are drawn alike, so that
differences are paired. Where settings do unequal work, times are compared for the same number of
tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from prism import engine
from prism.analyses.placements.clusters import spread
from prism.analyses.placements.selection import QUANTILES, pseudo_values
from prism.analyses.sweeps.pointtasks import (
    Ideal,
    find_ideal,
    find_start,
    run_ideals,
    run_steps,
    share,
)
from prism.cluster.devices import DEVICES
from prism.common.attribution import ClusterControl, control_slope
from prism.common.errors import PrismError
from prism.distributions.library import Library, load_library
from prism.jobs.job import Job
from prism.simulation.execution.tasks import Shared, is_remote, n_threads
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.steps import Exposed, Progress, find_exposed, run_blocks, warm_up
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
    """A setting.

    Attributes
    ----------
    setting : dict of str to str
        Values of the keys that differ.
    job : Job
    group : tuple of str
        What was varied by hand; layouts are chosen within it.
    own : bool
        Whether it is the job as it is.
    work : float
        Tokens of a step over those of the job's [1].
    memory : Memory or None
    least : float
        Seconds that a step takes at least, see `least_seconds`.
    ideal : float or None
        The step with every effect at 1 [s]; None where it was not needed.
    times : float64 [cluster, lane]
        Simulated steps [s].
    quiet : float64 [many clusters]
        Steps with nothing random but the ranks [s]; empty where those do not vary.
    slope : float
        Of the clusters' mean steps over their quiet times [1].
    exposed : Exposed
        Exposed communication.
    model_flop : float
        Useful work of a step [flop].
    n_draws : int
        Op-samples of a step [1].
    done : bool
        Whether it was simulated as long as any.
    """

    setting: dict[str, str]
    job: Job
    group: tuple[str, ...] = ()
    own: bool = False
    work: float = 1.0
    memory: Memory | None = None
    least: float = 0.0
    ideal: float | None = None
    times: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))
    quiet: Array = field(default_factory=lambda: np.empty(0))
    slope: float = 1.0
    exposed: Exposed = Exposed(0.0, 0.0)
    model_flop: float = 0.0
    n_draws: int = 0
    done: bool = False

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


class Difference(NamedTuple):
    """Paired relative difference of two settings' figures, its standard error, clusters."""

    change: float
    error: float
    n: int


def difference(point: Point, other: Point, measure: str) -> Difference:
    """Compare two settings on the clusters that both ran on, for the same work."""
    n = min(point.n, other.n)
    mine, base = point.values(measure, n), other.values(measure, n)
    scale = float(base.mean())
    d = (mine - base) / scale
    error = float(d.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return Difference(float(d.mean()), error, n)


def probability_best(best: Point, others: Sequence[Point], measure: str, tolerance: float) -> float:
    """Probability that none of the others is better by more than a share of the figure.

    Notes
    -----
    The product over the others of Student's t of the paired difference, as in
    `prism.analyses.placements.selection.probability_within`.
    """
    p = 1.0
    for other in others:
        if other is best or min(other.n, best.n) < 2:
            continue
        d = difference(best, other, measure)
        if d.error == 0.0:
            p *= float(d.change <= tolerance)
        else:
            p *= float(stats.t.cdf((tolerance - d.change) / d.error, d.n - 1))
    return p


def least_seconds(job: Job, library: Library | None) -> float:
    """Seconds that a step takes at least, by what its stages compute.

    Notes
    -----
    A stage computes all its microbatches one after the other. Before its first forward the earlier
    stages do theirs of a first chunk, and after its last backward they do one backward of it, where
    no weight gradients fill that time; then the optimizer follows: a bound for every schedule,
    which communication only lengthens.
    """
    if job.variability.model is not None:
        return 0.0
    workload, before, found = build_workload(job, library), 0.0, 0.0
    splits = job.parallelism.splits
    for stage, row in enumerate(workload.chunks):
        each = [sum(k.duration for k in (*chunk.forward, *chunk.backward)) for chunk in row]
        after = workload.optimizer[stage].duration if workload.optimizer else 0.0
        found = max(found, before + sum(each) * job.parallelism.microbatches + after)
        before += sum(k.duration for k in row[0].forward) if splits else each[0]
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


class Libraries:
    """Distribution sets by name, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, Library] = {}

    def of(self, job: Job) -> Library | None:
        """Return the library of a job."""
        name = job.variability.library
        if name is None:
            return None
        if name not in self._known:
            self._known[name] = load_library(name)
        return self._known[name]


class Bench:
    """Where settings are run: one seed, some threads, the latest of them kept ready.

    Parameters
    ----------
    progress : callable, optional
    n_gpus : int
        Of the largest setting; it says on how many clusters quiet times are found.
    libraries : Libraries, optional
        Those read already.
    """

    def __init__(
        self,
        seed: int,
        threads: int,
        progress: Progress | None = None,
        n_gpus: int = 1,
        libraries: Libraries | None = None,
    ) -> None:
        self.libraries = libraries or Libraries()
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
            self._steps[point] = prepare(point.job, self.seed, self.libraries.of(point.job))
        self._steps.move_to_end(point)
        if len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)
        return self._steps[point]

    def find_ideal(self, point: Point) -> float:
        """Find a setting's step with every effect at 1, for the same work [s]."""
        if point.ideal is None:
            self.foresee_ideals([point])
            found = self._ideals.pop(point, None)
            found = found or find_ideal(self.step(point), self.threads)
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
        settings = [self._shared(point) for point in new]
        self._ideals |= dict(zip(new, run_ideals(settings), strict=True))

    def find_exposed(self, point: Point) -> None:
        """Find a setting's exposed communication of all its steps, as an estimate does."""
        point.exposed = find_exposed(self.step(point), point.times, self.seed, self.threads)

    def extend(self, point: Point, n: int) -> None:
        """Bring a setting to n clusters."""
        if point.n >= n:
            return
        if is_remote():
            wrong = self.extend_all([point], n)
            if wrong:
                raise PrismError(wrong[point])
            return
        step = self.step(point)
        if not self._warm:
            warm_up(step.program, self.seed)
            self._warm = True
        times, *_ = run_blocks(step.program, range(point.n, n), self.seed, self.threads)
        if point.n == 0:
            start = find_start(step, times, self.seed, self.threads, self.n_quiet)
            point.quiet, point.exposed = start
        self._add(point, times.astype(np.float64))

    def foresee_steps(self, points: Sequence[Point], n: int) -> None:
        """Run at once, on workers, what `extend` is going to be asked for; errors come then."""
        if is_remote():
            self.extend_all([p for p in points if not isinstance(self._ideals.get(p), str)], n)

    def extend_all(self, points: Sequence[Point], n: int) -> dict[Point, str]:
        """Bring settings to n clusters, all at once where there are workers; returns what fails."""
        wrong: dict[Point, str] = {}
        if not is_remote():
            for point in points:
                self.extend(point, n)
            return wrong
        short = [point for point in points if point.n < n]
        spans = [range(point.n, n) for point in short]
        settings = [self._shared(point) for point in short]
        for point, found in zip(short, run_steps(settings, spans, self.n_quiet), strict=True):
            if isinstance(found, str):
                wrong[point] = found
                continue
            if point.n == 0:
                point.quiet, point.exposed = found[1]
            self._add(point, found[0])
        return wrong

    def _add(self, point: Point, times: Array) -> None:
        self.simulated += len(times)
        point.times = np.concatenate([point.times, times])

    def _shared(self, point: Point) -> Shared:
        return share(point.job, self.libraries.of(point.job), self.seed)
