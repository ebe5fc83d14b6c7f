"""Sampling for `prism rank`: pick-freeze runs, spent where shares are uncertain.

Evaluations are blocks of 64 steps, one cluster each. What has a stream of its own is redrawn in the
step as it is, a kernel class in ops of one class each. Kernel classes that a first cluster and the
bound from the critical path agree to make next to nothing stay with it; every other input starts
with a few, and those whose interval is wider than asked for are doubled.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prism import engine
from prism.common.arrays import Array
from prism.common.attribution import (
    ClusterControl,
    Estimate,
    PickFreeze,
    Resamples,
    Variance,
    partial_variances,
    recurrence,
    resample_runs,
    run_variance,
    share_interval,
)
from prism.simulation.classops import ClassOps
from prism.simulation.draws import cluster_times
from prism.simulation.effects import hold_effect
from prism.simulation.execution.context import RunContext
from prism.simulation.program import Program
from prism.simulation.steps import Run, run_each
from prism.simulation.variance_inputs import (
    Input,
    Residuals,
    nominal_seconds,
    stall_bound,
    swap_keys,
)

PILOT_BLOCKS = 4
NEGLIGIBLE = 5e-4  # share of the variance below which the answer names no number
MAX_BLOCKS = 1024
BUDGET = 60_000_000_000  # op-samples of pick-freeze runs, about a minute on two cores
HALF_WIDTH, WIDE_HALF_WIDTH = 0.03, 0.06  # of shares below one half, and above
MIN_CONTROL, MAX_CONTROL = 128, 2048  # clusters of each run whose quiet times are a control
CONTROL_HALF_WIDTH = 0.01  # of the share between clusters, as far as the control tells it
RARE, OFTEN = 0.02, 0.25  # stalls per step below which more are drawn, and how many then


def _none() -> Array:
    return np.empty((0, engine.LANES))


@dataclass
class RunPair:
    """Two independent runs of a program, which runs with single inputs swapped are compared to."""

    program: Program
    a: Array = field(default_factory=_none)
    b: Array = field(default_factory=_none)


@dataclass
class Shares:
    """Runs and shares of one input."""

    entry: Input
    pair: RunPair
    ab: Array = field(default_factory=_none)
    ba: Array = field(default_factory=_none)
    first: Estimate = Estimate(0.0, 0.0, 0.0)
    total: Estimate = Estimate(0.0, 0.0, 0.0)
    variances: tuple[float, float] = (0.0, 0.0)  # first and total order [s^2]
    lasting: float = math.nan  # share of what it does that stays in every step of a cluster
    in_few: float = math.nan  # share of its variance in the steps that it moves most
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

    @property
    def runs(self) -> PickFreeze:
        """The four runs, of as many clusters as it has."""
        n = len(self.ab)
        return PickFreeze(self.pair.a[:n], self.ab, self.pair.b[:n], self.ba)


@dataclass
class Sampler:
    """Runs of a step under two independent seeds, and with single inputs swapped.

    `split` is the step in ops of one kernel class each; `first` its times [cluster, lane] under the
    first seed, where they are known.
    """

    program: Program
    split: Program
    context: RunContext
    first: Array = field(default_factory=_none)
    bounds: Array = field(default_factory=lambda: np.empty(0))  # of the first inputs' variance
    whole: float = 0.0  # variance of the run that gave them [s^2]
    control: ClusterControl | None = None
    stall_delays: Array | None = None  # [cluster, lane] s, where stalls are rare; then none are run
    done: int = 0
    planned: int = 0

    def __post_init__(self) -> None:
        other = np.random.SeedSequence([self.context.seed, 4]).generate_state(1, np.uint64)
        self.seeds = self.context.seed, int(other[0])
        self.often = _with_frequent_stalls(self.program)
        programs = [self.program, self.split]
        if self.often is not None:
            self.stall_delays, self.first = _none(), _none()
            programs = [hold_effect(program, "stall") for program in programs]
        self.step = RunPair(programs[0], self.first)
        self.classes = RunPair(programs[1]) if self.split is not self.program else self.step

    def run(self, runs: Sequence[Run]) -> list[Array]:
        """Return step times [block, lane] of each run [s]."""
        before = self.done

        def report(done: int, _: int) -> None:
            self.done = before + done
            self.context.report(self.done, max(self.done, self.planned))

        found = run_each(runs, replace(self.context, progress=report))
        return [run[0].astype(np.float64) for run in found]

    def shares(self, entry: Input) -> Shares:
        """Begin an input."""
        return Shares(entry, self.step if entry.owns is None else self.classes)

    def extend(self, inputs: Sequence[Shares], n: int, both: bool = True) -> None:
        """Bring runs and inputs' own to n clusters; of one of the two seeds alone if not both."""
        rare = [s for s in inputs if self.is_rare(s.entry)]
        swapped = [s for s in inputs if not self.is_rare(s.entry)]
        seeds = self.seeds, self.seeds[::-1]
        runs: list[tuple[RunPair | Shares, str, Run]] = []
        for pair in {id(pair): pair for pair in (self.step, *(s.pair for s in swapped))}.values():
            for name, (seed, _) in list(zip("ab", seeds, strict=True))[: 1 + both]:
                have = len(getattr(pair, name))
                runs.append((pair, name, (pair.program, range(have, max(n, have)), seed)))
        for s in swapped:
            for name, keys in list(zip(("ab", "ba"), seeds, strict=True))[: 1 + both]:
                more, swap = range(len(getattr(s, name)), n), swap_keys(s.entry, *keys)
                runs.append((s, name, (s.pair.program, more, swap)))
        found = self.run([run for *_, run in runs])
        for (owner, name, _), times in zip(runs, found, strict=True):
            setattr(owner, name, np.concatenate([getattr(owner, name), times]))
        for s in rare:
            assert self.often is not None and self.stall_delays is not None
            more = range(len(self.stall_delays), n)
            (stalled,) = self.run([(self.often, more, self.context.seed)])
            delays = stalled - self.step.a[len(self.stall_delays) : n]
            self.stall_delays = np.concatenate([self.stall_delays, delays])
            s.ab = s.ba = self.stall_delays  # as many clusters

    def split_again(self, split: Callable[[list[str]], ClassOps], inputs: Sequence[Shares]) -> None:
        """Run inputs that are left in ops of their own, and all other classes together."""
        left = [s for s in inputs if s.entry.owns is not None]
        if not left or self.classes is self.step:
            return
        program, owner = split([s.entry.name for s in left])
        if self.often is not None:
            program = hold_effect(program, "stall")
        pair = RunPair(program)
        for s in left:
            names = self.program.classes  # the call effect stands behind them
            index = names.index(s.entry.name) if s.entry.name in names else len(names)
            s.entry = replace(s.entry, owns=owner == index)
            s.pair, s.ab, s.ba = pair, _none(), _none()

    def is_rare(self, entry: Input) -> bool:
        """Tell whether an input is stalls that no run meets."""
        return self.stall_delays is not None and engine.STALL in entry.streams

    def misses(self, shares: Shares) -> bool:
        """Tell whether an input's clusters are alike though others are not: rare slow GPUs."""
        if not shares.is_persistent or self.control is None or self.control.variance == 0.0:
            return False
        return all(np.ptp(times[: len(shares.ab)]) == 0.0 for times in self.control.times)

    @property
    def runs(self) -> tuple[Array, ...]:
        """Runs that tell the variance: those of an estimate, else the two independent ones."""
        return (self.step.a,) if len(self.first) else (self.step.a, self.step.b)

    @property
    def variance(self) -> Variance:
        """Variance of a step."""
        own, added = run_variance(self.runs, self.control), self.added
        return Variance(own.within + (0.0 if added is None else float(added.mean())), own.between)

    @property
    def added(self) -> Array | None:
        """Variance by rare stalls, which the runs lack [cluster]; see `stall_moments`."""
        if self.stall_delays is None or not self.stall_delays.size:
            return None
        return stall_moments(self.program, self.stall_delays)[1]

    def estimate(self, shares: Shares, drawn: Resamples) -> None:
        """Update an input's shares from its runs, as `drawn` from as many clusters as it has.

        The first order of what is drawn once per cluster is the variance between clusters; only
        its interactions are left to the swapped runs.
        """
        n, between = len(shares.ab), shares.is_persistent
        if (added := self.added) is not None and self.is_rare(shares.entry):
            first = total = added
            shares.lasting, shares.in_few = 0.0, 1.0
        else:
            first, total = partial_variances(shares.runs)
            shares.lasting, shares.in_few = recurrence(shares.runs)
        if between:
            first, total = np.zeros(n), total - first
        own = self.variance.between if between else 0.0
        shares.variances = own + float(first.mean()), own + float(total.mean())
        shares.first, shares.total = (share_interval(x, drawn, between) for x in (first, total))

    def settle(self, shares: Shares) -> bool:
        """Settle an input whose first cluster and bound are next to nothing; tell whether it is.

        The bound uses more clusters, the runs make no assumption about the residual's tail.
        """
        runs = shares.runs
        total = 0.5 * float(((runs.a - runs.ab) ** 2).mean())
        if total > NEGLIGIBLE * self.whole:
            return False
        shares.variances = 0.0, total
        shares.first = Estimate(0.0, -NEGLIGIBLE, NEGLIGIBLE)
        shares.total = Estimate(total / (self.whole or np.inf), 0.0, NEGLIGIBLE)
        return True

    def resample(self, m: int) -> Resamples:
        """Resample the runs for what their first m clusters tell."""
        return resample_runs(m, self.runs, self.context.seed, self.control, self.added)

    def extend_control(self) -> None:
        """Bring quiet times to as many clusters as the share between clusters asks for."""
        seeds = self.seeds[: len(self.runs)]
        times = list(self.control.times) if self.control else [np.zeros(0) for _ in seeds]
        n = max(MIN_CONTROL, len(self.runs[0]), times[0].size)
        while True:
            for i, key in enumerate(seeds):
                more = cluster_times(self.program, range(times[i].size, n), self.context.under(key))
                times[i] = np.concatenate([times[i], more.astype(np.float64)])
            self.control = ClusterControl(tuple(times))
            variance = run_variance(self.runs, self.control)
            share = variance.between / (variance.total or 1.0)
            error = 2.0 * share * (1.0 - share) * self.control.error
            if error <= CONTROL_HALF_WIDTH or n >= MAX_CONTROL:
                return
            asked = n * (error / CONTROL_HALF_WIDTH) ** 2
            n = engine.LANES * math.ceil(max(n + 1, min(MAX_CONTROL, asked)) / engine.LANES)


def _with_frequent_stalls(program: Program) -> Program | None:
    """Return a program in which stalls are met where they are too rare to be; else None."""
    rate, stalls = stall_bound(program)[0], program.stalls
    if not 0.0 < rate < RARE:
        return None
    more = np.minimum(stalls.probability * OFTEN / rate, 0.5)  # where few groups have all of them
    return replace(program, stalls=stalls._replace(probability=more))


def stall_moments(program: Program, delays: Array) -> tuple[Array, Array]:
    """Mean delay by rare stalls [s] and the variance that they bring [s^2], by cluster.

    From delays of steps with many of them: where the number N of stalls in a step is binomial over
    n groups with mean m, and each delays by D, E d = m E D and E d^2 = m E D^2 + m^2 (1 - 1/n)
    (E D)^2. Of those too rare for two in a step, only E D^2 remains. Left out: what stalls change
    in the shares of other inputs.
    """
    often = _with_frequent_stalls(program)
    assert often is not None
    rate, m = stall_bound(program)[0], stall_bound(often)[0]
    groups = int(np.count_nonzero(program.stalls.probability)) * program.graph.n_replicas
    if program.stalls.entity == engine.JOB_STALL or groups == 0:
        groups = 1
    part, pairs = rate / m, (1.0 - 1.0 / groups) * float(delays.mean()) ** 2
    return part * delays.mean(axis=1), part * ((delays**2).mean(axis=1) - pairs)


def sample_shares(
    sampler: Sampler, inputs: list[Input], split: Callable[[list[str]], ClassOps] | None = None
) -> list[Shares]:
    """First and total order of all inputs, with more clusters where intervals are wide.

    An input's interval narrows as its own runs grow; the variance that it is a share of is that of
    the longest runs of all. `split` gives ops of some classes, once others are settled.
    """
    out = [sampler.shares(entry) for entry in inputs]
    alive = [s for s in out if not s.entry.is_constant]
    sampler.planned += 2 * PILOT_BLOCKS * (1 + len(alive))
    for shares, bound in zip(out, sampler.bounds, strict=False):
        shares.bound = bound
    small = [s for s in alive if s.bound <= NEGLIGIBLE * sampler.whole]
    sampler.extend(small, 1, both=False)
    settled = [id(s) for s in small if sampler.settle(s)]
    alive = [s for s in alive if id(s) not in settled]
    if settled and split is not None:
        sampler.split_again(split, alive)
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
        cost = engine.LANES * n * sum(s.pair.program.n_draws for s in wide)
        if not wide or n > MAX_BLOCKS or spent + cost > BUDGET:
            break
        spent += cost
        sampler.planned += n * (len(wide) + 1)
    if sum(not s.entry.is_constant for s in out) == 1 and alive:  # what varies is its alone
        alive[0].first = alive[0].total = Estimate(1.0, 1.0, 1.0)
        alive[0].variances = (sampler.variance.total,) * 2
    return out


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
