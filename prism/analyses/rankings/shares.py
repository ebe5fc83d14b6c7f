"""Sampling for `prism rank`: pick-freeze runs, spent where shares are uncertain.

Evaluations are blocks of 64 steps, one cluster each. Kernel classes that a first one and the bound
from the critical path agree to make next to nothing stay with it; every other input starts with a
few, and those whose interval is wider than asked for are doubled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prism import engine
from prism.analyses.rankings.rarestalls import RareStalls, find_rare_stalls
from prism.common.attribution import (
    Array,
    ClusterControl,
    Estimate,
    PickFreeze,
    Resamples,
    Variance,
    match_spread,
    partial_variances,
    resample_runs,
    run_variance,
    share_interval,
)
from prism.simulation.causes import (
    Input,
    Residuals,
    nominal_seconds,
    partition,
    step_spread,
    swap_keys,
)
from prism.simulation.classops import ClassOps
from prism.simulation.draws import cluster_times
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program
from prism.simulation.steps import Progress, Run, run_each

PILOT_BLOCKS = 4
NEGLIGIBLE = 5e-4  # share of the variance below which the answer names no number
MAX_BLOCKS = 1024
BUDGET = 60_000_000_000  # op-samples of pick-freeze runs, about a minute on two cores
HALF_WIDTH, WIDE_HALF_WIDTH = 0.03, 0.06  # of shares below one half, and above
MIN_CONTROL, MAX_CONTROL = 128, 2048  # clusters of each run whose quiet times are a control
CONTROL_HALF_WIDTH = 0.01  # of the share between clusters, as far as the control tells it


def _none() -> Array:
    return np.empty((0, engine.LANES))


@dataclass
class Shares:
    """Runs and shares of one input."""

    entry: Input
    ab: Array = field(default_factory=_none)
    ba: Array = field(default_factory=_none)
    first: Estimate = Estimate(0.0, 0.0, 0.0)
    total: Estimate = Estimate(0.0, 0.0, 0.0)
    variances: tuple[float, float] = (0.0, 0.0)  # first and total order [s^2]
    bound: float = np.inf  # of its total order, from the critical path [s^2]

    @property
    def is_persistent(self) -> bool:
        """Tell whether it is drawn once per cluster: all that clusters' means differ by."""
        return engine.RANK in self.entry.streams

    @property
    def is_wide(self) -> bool:
        """Tell whether the interval is wider than asked for."""
        target = HALF_WIDTH if self.total.value < 0.5 else WIDE_HALF_WIDTH
        return max(self.total.half_width, self.first.half_width) > target


@dataclass
class Sampler:
    """Runs of one program under two independent seeds, and with single inputs swapped.

    `program` has ops of one kernel class each; `quiet` is the same step with fewer ops.
    """

    program: Program
    quiet: Program
    seed: int
    threads: int
    progress: Progress | None = None
    a: Array = field(default_factory=_none)
    b: Array = field(default_factory=_none)
    effects: list[Array] = field(default_factory=lambda: [_none(), _none()])  # of a, b
    first: tuple[Array, Array] = (_none(), _none())  # times and effects of `quiet`, where run
    bounds: Array = field(default_factory=lambda: np.empty(0))  # of the first inputs' variance
    whole: float = 0.0  # variance of the run that gave them [s^2]
    slope: float = 0.0  # of a step over the step effect [s]
    control: ClusterControl | None = None
    rare: RareStalls | None = None  # where stalls are: the program is then that without them
    done: int = 0
    planned: int = 0

    def __post_init__(self) -> None:
        self.other = int(np.random.SeedSequence([self.seed, 4]).generate_state(1, np.uint64)[0])

    def set_rare_stalls_apart(self) -> None:
        """Run without stalls where they are rare; what they add is measured apart."""
        self.rare = find_rare_stalls(self.program, (self.seed, self.other))
        if self.rare is not None:
            self.program, self.first = self.rare.calm, (_none(), _none())

    def run(self, runs: Sequence[Run]) -> list[tuple[Array, Array]]:
        """Return step times [s] and step effects [block, lane] of each run."""
        before = self.done

        def report(done: int, _: int) -> None:
            self.done = before + done
            if self.progress is not None:
                self.progress(self.done, max(self.done, self.planned))

        found = run_each(runs, self.threads, progress=report)
        return [(run[0].astype(np.float64), run[1].astype(np.float64)) for run in found]

    def extend(self, inputs: Sequence[Shares], n: int) -> None:
        """Bring the two runs that everything is compared with, and inputs' own, to n clusters."""
        more = range(len(self.a), n)
        swapped = [shares for shares in inputs if self.rare_of(shares.entry) is None]
        runs: list[Run] = [(self.program, more, seed) for seed in (self.seed, self.other)]
        for shares in swapped:
            for base, other in ((self.seed, self.other), (self.other, self.seed)):
                runs.append((self.program, more, swap_keys(shares.entry, base, other)))
        drawn = self.run(runs)
        (a, in_a), (b, in_b) = drawn[:2]
        matched = self._match(a, in_a, in_b)
        moved = [self.slope * (new - old) for new, old in zip(matched, (in_a, in_b), strict=True)]
        self.a = np.concatenate([self.a, a + moved[0]])
        self.b = np.concatenate([self.b, b + moved[1]])
        self.effects = [np.concatenate(p) for p in zip(self.effects, matched, strict=True)]
        for shares, (ab, _), (ba, _) in zip(swapped, drawn[2::2], drawn[3::2], strict=True):
            own = moved[::-1] if engine.STEP in shares.entry.streams else moved
            shares.ab = np.concatenate([shares.ab, ab + own[0]])
            shares.ba = np.concatenate([shares.ba, ba + own[1]])
        for shares in inputs:
            if (rare := self.rare_of(shares.entry)) is not None:  # swapped runs say nothing of them
                rare.measure(shares.entry, self.a[:n], self.b[:n], self.run)
                shares.ab, shares.ba = self.a[:n], self.b[:n]

    def _match(self, steps: Array, *effects: Array) -> Sequence[Array]:
        """Step effects of both runs, with the spread that they were drawn with in each cluster.

        What steps follow of it goes along: shares need not wait until chance evens it out.
        """
        std = step_spread(self.program)
        if self.rare is not None or std == 0.0:
            return effects
        if self.slope == 0.0:
            drawn = self.first if len(self.first[0]) else (steps, effects[0])
            y, x = (z - z.mean(axis=1, keepdims=True) for z in drawn)
            self.slope = float((x * y).sum() / (x * x).sum())
        return match_spread(effects, std)

    def misses(self, shares: Shares) -> bool:
        """Tell whether an input's clusters are alike though others are not: rare slow GPUs."""
        if not shares.is_persistent or self.control is None or self.control.variance == 0.0:
            return False
        return all(np.ptp(times[: len(shares.ab)]) == 0.0 for times in self.control.times)

    def rare_of(self, entry: Input) -> RareStalls | None:
        """Return the runs that tell of an input where it is rare stalls."""
        return self.rare if engine.STALL in entry.streams else None

    @property
    def runs(self) -> tuple[Array, ...]:
        """The two independent runs."""
        return self.a, self.b

    @property
    def variance(self) -> Variance:
        """Variance of a step."""
        own, added = run_variance(self.runs, self.control), self.added
        if added is None or not added.size:
            return own
        return Variance(own.within + float(added.mean()), own.between)

    @property
    def added(self) -> Array | None:
        """Variance by rare stalls, which the runs lack [cluster]."""
        return None if self.rare is None else self.rare.added

    def estimate(self, shares: Shares, drawn: Resamples) -> None:
        """Update an input's shares from its runs, as `drawn` from as many clusters as it has.

        The first order of what is drawn once per cluster is the variance between clusters; only
        its interactions are left to the swapped runs.
        """
        n, between = len(shares.ab), shares.is_persistent
        first, total = partial_variances(self._compared(shares))
        if (rare := self.rare_of(shares.entry)) is not None:
            first, total = rare.first, rare.total
        if between:
            first, total = np.zeros(n), total - first
        own = self.variance.between if between else 0.0
        shares.variances = own + float(first.mean()), own + float(total.mean())
        shares.first, shares.total = (share_interval(x, drawn, between) for x in (first, total))

    def settle(self, shares: Shares) -> bool:
        """Settle an input whose first cluster and bound are next to nothing; tell whether it is.

        The bound rests on more clusters, the runs on no assumption about the residual's tail.
        """
        first, total = (float(x[0]) for x in partial_variances(self._compared(shares)))
        if max(shares.bound, total) > NEGLIGIBLE * self.whole:
            return False
        shares.variances = first, total
        whole = self.whole or np.inf
        shares.first = Estimate(first / whole, -NEGLIGIBLE, NEGLIGIBLE)
        shares.total = Estimate(total / whole, 0.0, NEGLIGIBLE)
        return True

    def _compared(self, shares: Shares) -> PickFreeze:
        """Return the runs that an input's own are compared with, and those."""
        n = len(shares.ab)
        return PickFreeze(self.a[:n], shares.ab, self.b[:n], shares.ba)

    def resample(self, m: int) -> Resamples:
        """Resample the runs for what their first m clusters tell."""
        return resample_runs(m, self.a, self.b, self.seed, self.control, self.added)

    def extend_control(self) -> ClusterControl:
        """Bring quiet times to as many clusters as the share between clusters asks for."""
        seeds = self.seed, self.other
        times = list(self.control.times) if self.control else [np.zeros(0) for _ in seeds]
        n = max(MIN_CONTROL, len(self.a), times[0].size)
        while True:
            for i, key in enumerate(seeds):
                more = cluster_times(self.quiet, range(times[i].size, n), key, self.threads)
                times[i] = np.concatenate([times[i], more.astype(np.float64)])
            self.control = ClusterControl(tuple(times))
            variance = run_variance(self.runs, self.control)
            share = variance.between / (variance.total or 1.0)
            error = 2.0 * share * (1.0 - share) * self.control.error
            if error <= CONTROL_HALF_WIDTH or n >= MAX_CONTROL:
                return self.control
            asked = n * (error / CONTROL_HALF_WIDTH) ** 2
            n = engine.LANES * math.ceil(max(n + 1, min(MAX_CONTROL, asked)) / engine.LANES)


def sample_shares(sampler: Sampler, inputs: list[Input]) -> list[Shares]:
    """First and total order of all inputs, with more clusters where intervals are wide.

    An input's interval narrows as its own runs grow; the variance that it is a share of is that of
    the longest runs of all.
    """
    sampler.set_rare_stalls_apart()
    out = [Shares(entry) for entry in inputs]
    alive = [s for s in out if not s.entry.is_constant]
    sampler.planned += 2 * PILOT_BLOCKS * (1 + len(alive))
    for shares, bound in zip(out, sampler.bounds, strict=False):
        shares.bound = bound
    sampler.extend(alive, 1)
    alive = [s for s in alive if not sampler.settle(s)]
    n, wide, spent = PILOT_BLOCKS, alive, 0
    while True:
        sampler.extend(wide, n)
        if not wide:
            break
        sampler.extend_control()
        drawn = {m: sampler.resample(m) for m in {len(s.ab) for s in alive}}
        for shares in alive:
            sampler.estimate(shares, drawn[len(shares.ab)])
        wide = [s for s in alive if (s.is_wide or sampler.misses(s)) and len(s.ab) == n]
        n *= 2
        cost = n * (len(wide) + 1) * sampler.program.n_draws * engine.LANES
        if not wide or n > MAX_BLOCKS or spent + cost > BUDGET:
            break
        spent += cost
        sampler.planned += n * (len(wide) + 1)
    if sum(not s.entry.is_constant for s in out) == 1 and alive:  # what varies is its alone
        alive[0].first = alive[0].total = Estimate(1.0, 1.0, 1.0)
        alive[0].variances = (sampler.variance.total,) * 2
    return out


def list_inputs(step: Prepared, residuals: Residuals, ops: ClassOps) -> list[Input]:
    """List the inputs of a job, or of a fitted trace."""
    drawn = "call" if step.workload is not None else "rank_step"
    name = "expert" if step.job.parallelism.ep > 1 else drawn
    return partition(step.program, residuals, ops.owner, name)


def tracked_variances(program: Program, residuals: Residuals) -> Program:
    """Return a program whose path also adds up the residuals' variances [s^2], behind the classes.

    Notes
    -----
    Where an op is on the critical path, the step follows its residual one to one; so the mean over
    steps of the variance on the path bounds a class's total-order variance from above (Poincare's
    inequality, exact where the path never changes) where residuals are normal. Of heavy tails the
    largest of many varies by more: alone it decides nothing (`Sampler.settle`).

    References
    ----------
    Lamboni et al. (2013), "Derivative-based global sensitivity measures: general links with Sobol'
    indices and numerical tests", doi:10.1016/j.matcom.2013.02.002.
    """
    mean = nominal_seconds(program)[:, None]
    rate = np.divide(residuals.classes, mean, out=np.zeros_like(residuals.classes), where=mean > 0)
    shares = np.concatenate([program.shares, rate.astype(np.float32)], axis=1)
    names = program.classes + tuple(f"{c} variance" for c in program.classes)
    return replace(program, shares=np.ascontiguousarray(shares), classes=names)
