"""Settings of a sweep, and which of them are simulated for how long.

All run under one seed, so that differences are paired, and are compared for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from prism.analyses.differences import FIRST_BLOCKS, Candidate, Sampler, select
from prism.analyses.placements.screen import Screen
from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.distributions.library import load_library
from prism.jobs.devices import DEVICES
from prism.jobs.job import Job
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.program import Program, ideal_program
from prism.simulation.steps import Exposed, find_exposed
from prism.workload.build import build_workload
from prism.workload.carbon import footprint
from prism.workload.energy import mean_power

TOLERANCE = 0.001  # share of a figure that does not matter
MOST_SAMPLES = 100e9
"""Op-samples of a sweep beyond the first cluster draws of each setting: some minutes."""
BUILT = 100  # of a sweep's progress, when all its settings are checked [1/1000]
KEPT_STEPS = 48  # settings kept ready to run; others are built again when they go on


@dataclass(eq=False, kw_only=True)
class Point(Candidate):
    """A setting: its job, its step without noise, its simulated steps."""

    setting: dict[str, str]  # values of the keys that differ
    job: Job
    group: tuple[str, ...] = ()  # what was varied by hand; layouts are chosen within it
    own: bool = False  # whether it has the job's own layout
    is_job: bool = False  # whether it is the job as it is
    memory: dict[str, Any] | None = None  # see `memory_figures`
    fits: bool = True  # whether it is likely to, so that it may be chosen
    slope: float = 1.0  # until it is fitted
    least: float = 0.0  # seconds that a step takes at least, see `least_seconds`
    ideal: float | None = None  # the step with every effect at 1 [s]; None where not needed
    exposed: Exposed = Exposed(0.0, 0.0)  # communication
    model_flop: float = 0.0  # useful work of a step
    gpu_power: float | None = None  # mean of a GPU [W]; None where it is not known
    time_to_train: dict[str, Any] | None = None  # see `run_spread`; None where nobody asked
    runs_by_cluster: Array = field(default_factory=lambda: np.empty(0))  # mean runs [draw] s
    p_done: float | None = None  # by the run's deadline [1]; None where nobody asked
    done: bool = False  # whether it was simulated as long as any

    @property
    def bound(self) -> float:
        """Seconds that the mean step takes at least, for the same work."""
        return (self.least if self.ideal is None else self.ideal) / self.work

    @property
    def mfu(self) -> float | None:
        """Model flop per second and GPU over the device's peak [1]; None without a model."""
        if self.model_flop <= 0.0 or self.n == 0:
            return None
        peak = DEVICES[self.job.cluster.device].flop_per_s(self.job.parallelism.precision)
        peak *= self.job.world_size
        return self.model_flop / float(self.times.mean()) / peak

    def of_run(self, objective: str) -> float:
        """Figure of the run that settings are sorted by under an objective: the less the better."""
        if objective == "time_to_train":
            return float(self.runs_by_cluster.mean()) if self.runs_by_cluster.size else np.inf
        return -(self.p_done or 0.0) if objective == "done_by" else 0.0

    def values(self, measure: str, n: int | None = None) -> Array:
        """See `Candidate.values`; of time_to_train the mean run."""
        return self.runs_by_cluster if measure == "time_to_train" else super().values(measure, n)

    def take_steps(self, other: Point) -> None:
        """Take what was simulated of a setting with the same steps."""
        own = ("setting", "job", "group", "own", "is_job")
        vars(self).update({key: x for key, x in vars(other).items() if key not in own})


@dataclass
class Bench(Sampler):
    """Where settings are run: the latest of them are kept ready."""

    def __post_init__(self) -> None:
        self._prepared = lru_cache(KEPT_STEPS)(lambda point: prepare(point.job, self.context.seed))

    def step(self, point: Candidate) -> Prepared:
        """Return a setting ready to run."""
        return self._prepared(point)

    def program(self, candidate: Candidate) -> Program:
        """Return what a setting runs."""
        return self.step(candidate).program

    def find_ideal(self, point: Point) -> None:
        """Find a setting's step with every effect at 1."""
        step = self.step(point)
        program = ideal_program(step.program)
        point.ideal = float(Screen(program, self.context).times([program])[0])
        point.model_flop = 0.0 if step.workload is None else step.workload.model_flop

    def look_closer(self, point: Point, n: int) -> None:
        """Find a setting's exposed communication and power on its first n cluster draws."""
        step, times = self.step(point), point.times[:n]
        point.exposed = find_exposed(step, times, self.context)
        point.gpu_power = mean_power(point.job, step.workload, float(times.mean()))
        if point.gpu_power is not None:
            point.kg_per_s = footprint(point.job).kg_per_s(point.gpu_power * point.job.world_size)

    def tell(self) -> None:
        """Report what is done, of what remains once all settings are checked."""
        share = min(0.99, self.done / self.planned)
        self.context.report(BUILT + round((1000 - BUILT) * share), 1000)


def least_seconds(job: Job) -> float:
    """Seconds that a step takes at least, by what its stages compute.

    A stage computes all its microbatches one after the other. Before its first forward the earlier
    stages do theirs of a first chunk, and after its last backward they do one backward of it, where
    no weight gradients fill that time; then the optimizer follows: a bound for every schedule,
    which communication only lengthens.
    """
    library = job.variability.library
    workload = build_workload(job, None if library is None else load_library(library))
    chunks = {id(chunk): chunk for row in workload.chunks for chunk in row}  # most are alike
    whole = {i: sum(k.duration for k in (*c.forward, *c.backward)) for i, c in chunks.items()}
    before, found = 0.0, 0.0
    for stage, row in enumerate(workload.chunks):
        each = [whole[id(chunk)] for chunk in row]
        after = workload.optimizer[stage].duration if workload.optimizer else 0.0
        found = max(found, before + sum(each) * job.parallelism.microbatches + after)
        before += sum(k.duration for k in row[0].forward) if job.parallelism.splits else each[0]
    return found


def simulate_points(
    points: Sequence[Point], bench: Bench, clusters: int, objective: str, skip: bool
) -> dict[Point, str]:
    """Simulate settings as far as they may be among the best; returns what is wrong with some.

    With `skip` those are left out whose mean step is surely beyond the least p95. Settings that are
    not likely to fit are compared with, and beat none.
    """
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    wrong: dict[Point, str] = {}
    first = min(FIRST_BLOCKS, clusters)
    bench.planned = first * len(points) + 2 * clusters * len(groups)  # the best one and the own
    for group in groups.values():
        run = _screen(group, bench, first, skip, wrong)
        if run:
            _run_on(run, bench, clusters, objective, MOST_SAMPLES / len(groups))
    bench.context.report(1000, 1000)
    return wrong


def _screen(
    points: Sequence[Point], bench: Bench, clusters: int, skip: bool, wrong: dict[Point, str]
) -> list[Point]:
    """Simulate settings a little, those with the least bounds first; returns which."""
    limit, spread, run = np.inf, 0.0, []
    queue = [(not point.own, point.bound, i) for i, point in enumerate(points)]
    heapify(queue)
    while queue:
        other, bound, i = heappop(queue)
        point = points[i]
        # no mean is below the ideal step (a maximum is convex, Jensen), no median further below
        # the mean than a standard deviation, and p95 by 0.23 of one (Cantelli)
        if skip and other and bound * (1.0 - spread) > limit:
            break
        try:
            if point.ideal is None:
                bench.find_ideal(point)
                heappush(queue, (other, point.bound, i))
                continue
            bench.extend(point, clusters)
        except PrismError as error:  # what only shows when it is built
            wrong[point] = str(error)
            continue
        bench.look_closer(point, 1)
        run.append(point)
        if not point.fits:
            continue
        steps = point.samples("p95")
        limit = min(limit, float(np.quantile(steps, 0.95)))
        spread = max(spread, float(steps.std() / steps.mean()))
    return run


def _run_on(
    points: Sequence[Point], bench: Bench, clusters: int, objective: str, budget: float
) -> None:
    """Run those settings on that may be among the best, and the job's own."""
    measures = tuple(dict.fromkeys(("p50", "p95", objective)))
    may_win = [p for p in points if p.fits] or points
    best = select(may_win, measures, TOLERANCE, bench, budget=budget, most=clusters)
    left = [p for p in points if p in best or p.own or p.n == clusters]
    if sum((clusters - p.n) * p.cost for p in left) > budget:
        clusters = max(p.n for p in left)
    for point in left:
        bench.extend(point, clusters)
        point.done = True
        bench.look_closer(point, point.n)
