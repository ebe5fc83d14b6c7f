"""Which of several candidates is better, and by how much: paired differences on the same draws.

All run under one seed, block by block: a block is one cluster draw and 64 steps, drawn alike for
all of them, so that differences vary far less than times do::

    sampler = Sampler(context)
    a, b = Candidate(program=program), Candidate(program=smaller, work=0.75)
    left = select([a, b], ["p50", "p95"], 0.001, sampler, budget=8e9)  # until the order is clear
    difference(b, a, "p95").share, difference(b, a, "p95").is_clear

A candidate without a program takes what else `Sampler.extend` of a subclass puts into its times.

References
----------
.. [1] Branke, Chick and Schmidt (2007), "Selecting a selection procedure",
   doi:10.1287/mnsc.1070.0721: sampling until the probability of a good selection is high
   (section 3.3), and its lower bound (section 3.1).
.. [2] Serfling (1980), "Approximation Theorems of Mathematical Statistics",
   doi:10.1002/9780470316481, section 8.1: L-statistics and their influence curves.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import stdtr, stdtrit

from prism import engine
from prism.common.arrays import Array
from prism.common.attribution import ClusterControl, control_slope
from prism.simulation.draws import Lowered, cluster_times
from prism.simulation.execution.context import RunContext
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks

C = TypeVar("C", bound="Candidate")
QUANTILES: dict[str, float | None] = {
    "p50": 0.5,
    "p95": 0.95,
    "p99": 0.99,
    "mean": None,
    "time_to_train": 0.95,
    "carbon": None,
}
"""Measures of a candidate, and their quantiles: of steps [s], of runs [s], of carbon [kg]."""
LEVEL = 0.95  # of intervals
ERROR = 0.05  # probability that a rival of the best is left behind
WINDOW, MOST_WINDOW = 0.5, 0.05  # of probability, on both sides of a quantile
FIRST_BLOCKS = 8  # cluster draws that every program is run on
LEAST_COST = 400_000  # op-samples that a block costs at least, whatever it holds
QUIET_SAMPLES = 140_000_000  # op-samples of the quiet times of one program
QUIET_BATCHES = 1, 8  # of 64 cluster draws each
MOST_SLOPE = 1.25  # of a cluster draw's mean step over its quiet time


@dataclass(eq=False, kw_only=True)
class Candidate:
    """A program: its simulated steps, and its quiet times on many more cluster draws.

    In a quiet step nothing is random but the ranks: rare slow GPUs, which few cluster draws hardly
    meet, are met there at little cost.
    """

    program: Program | None = None
    work: float = 1.0  # tokens of a step over those of the job's
    runs: Callable[[Array, Array], Array] | None = None  # steps, step effects [s, 1] -> runs [s]
    kg_per_s: float = 0.0  # CO2e, of the measure carbon
    slope: float = 0.0  # of the draws' mean steps over their quiet times
    cost: int = 0  # op-samples of a block, once it has run
    quiet: Array = field(default_factory=lambda: np.empty(0))  # [many cluster draws] s
    times: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))  # [draw, lane] s
    effects: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))
    _known: dict[tuple[str, int, float, float], Array] = field(default_factory=dict, repr=False)

    @property
    def n(self) -> int:
        """Cluster draws so far."""
        return len(self.times)

    def samples(self, measure: str, n: int | None = None) -> Array:
        """Return steps, or runs, on the first n cluster draws, for the same work [draw, lane]."""
        steps = spread(self.times[:n], self.quiet, self.slope)
        if measure == "time_to_train":
            assert self.runs is not None
            effects = np.tile(self.effects[:n], steps.shape[1] // self.effects.shape[1])
            steps = self.runs(steps, effects)
        if measure == "carbon":
            steps = self.kg_per_s * steps
        return steps / self.work

    def values(self, measure: str, n: int | None = None) -> Array:
        """Return one value per cluster draw, whose mean is the figure for the same work [s]."""
        key = measure, self.n if n is None else n, self.slope, self.kg_per_s
        if key not in self._known:
            self._known[key] = pseudo_values(self.samples(measure, n), QUANTILES[measure])
        return self._known[key]

    def figure(self, measure: str) -> float:
        """Return the figure of all samples, for the same work [s]."""
        q, samples = QUANTILES[measure], self.samples(measure)
        return float(samples.mean() if q is None else np.quantile(samples, q))


def spread(times: Array, quiet: Array, slope: float) -> Array:
    """Give simulated times[draw, lane] the places of many more cluster draws, by quiet times.

    The first ones of `quiet` are the simulated draws. The slope, which programs share, is held
    within what is possible: a draw's mean follows its quiet time one to one at most, but for what
    shared noise multiplies, and rare stalls in few draws would make it anything.
    """
    n, slope = times.shape[0], float(np.clip(slope, 0.0, MOST_SLOPE))
    if slope == 0.0 or quiet.size < 2 * n:
        return times
    others = quiet[: quiet.size - quiet.size % n].reshape(-1, n)
    moved = times[:, None, :] + slope * (others - others[0]).T[:, :, None]
    return np.ascontiguousarray(moved.reshape(n, -1))


def fit_slope(candidates: Sequence[Candidate]) -> float:
    """Find how far the draws' mean steps follow their quiet times, alike for all candidates."""
    known = [c for c in candidates if c.n > 1 and c.quiet.size and np.ptp(c.quiet) > 0.0]
    if not known:
        return 0.0
    n = min(min(c.n, c.quiet.size) for c in known)
    known.sort(key=lambda c: c.times[:n].tobytes())  # in any order the same bits
    quiet = tuple(c.quiet / c.work for c in known)
    return control_slope([c.times[:n] / c.work for c in known], ClusterControl(quiet))


def pseudo_values(samples: Array, q: float | None) -> Array:
    """Turn a figure of samples[draw, lane] into a mean over cluster draws [draw].

    For a quantile the mean of the order statistics within q +- `WINDOW` (1 - q) (or q, if that is
    less) is taken. To first order it is a mean of influence values, of each step held within the
    two ends of that window, over the window's probability [2]_. Where two programs share their
    draws, these differ as little as the steps do; indicators of steps beyond a quantile, which the
    plain sample quantile is made of, do not.
    """
    if q is None:
        return np.asarray(samples.mean(axis=1))
    width = min(WINDOW * min(q, 1.0 - q), MOST_WINDOW)
    pooled = np.sort(samples, axis=None)
    low, high = np.quantile(pooled, [q - width, q + width])
    inside = pooled[round((q - width) * pooled.size) : round((q + width) * pooled.size)]
    middle = float(inside.mean()) if inside.size else 0.5 * float(low + high)
    held = np.clip(samples, low, high).mean(axis=1) / (2.0 * width)
    return np.asarray(middle + held - held.mean())


class Difference(NamedTuple):
    """Paired difference of two candidates' figures, for the same work."""

    mean: float  # [s]
    error: float  # standard error of the mean [s]; NaN for one draw
    share: float  # of the figure that is subtracted [1]
    share_error: float  # its standard error
    n: int  # cluster draws

    @property
    def half_widths(self) -> tuple[float, float]:
        """Half of the 95 % intervals [s] and of the share, by Student's t; NaN for one draw."""
        t = float(stdtrit(self.n - 1, 0.5 + LEVEL / 2.0)) if self.n > 1 else math.nan
        return t * self.error, t * self.share_error

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval leaves zero out."""
        return abs(self.share) > self.half_widths[1]

    def probability_below(self, delta: float) -> float:
        """Return the probability that it is at most delta, by Student's t about the mean."""
        if not self.error > 0.0:
            return float(self.mean <= delta)
        return float(stdtr(self.n - 1, (delta - self.mean) / self.error))


def difference(a: Candidate, b: Candidate, measure: str) -> Difference:
    """Figure of a less that of b for the same work, over the draws that both have run on."""
    n = min(a.n, b.n)
    mine, base = a.values(measure, n), b.values(measure, n)
    d, level = mine - base, float(base.mean())
    share = float(d.mean()) / level
    # of a ratio, to first order
    share_error = standard_error(d - share * base) / level
    return Difference(float(d.mean()), standard_error(d), share, share_error, n)


def standard_error(values: Array) -> float:
    """Return the standard error of a mean over cluster draws; NaN for one draw."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else math.nan


def probability_best(
    best: Candidate, candidates: Sequence[Candidate], measure: str, tolerance: float
) -> float:
    """Probability that none is better than the best one by more than a share of its figure.

    The product over candidates of the probability that the paired difference, which has Student's t
    distribution, is at most that: a lower bound where differences are positively correlated, as
    those to one candidate are (Slepian's inequality, PGS_Slep of [1]_).
    """
    delta = tolerance * best.figure(measure)
    rivals = (c for c in candidates if c is not best and min(c.n, best.n) > 1)
    each = (difference(best, rival, measure).probability_below(delta) for rival in rivals)
    return math.prod(each, start=1.0)


@dataclass
class Sampler:
    """Runs candidates under one seed, and counts."""

    context: RunContext
    n_quiet: int = 0  # cluster draws whose quiet times are found, once a candidate has run
    done: int = 0  # cluster draws over all candidates
    planned: int = 0  # about
    lowered: Lowered = field(default_factory=Lowered)

    def program(self, candidate: Candidate) -> Program:
        """Return what a candidate runs."""
        assert candidate.program is not None
        return candidate.program

    def extend(self, candidate: Candidate, n: int) -> None:
        """Bring a candidate to n cluster draws."""
        if n <= candidate.n:
            return
        program, more = self.program(candidate), range(candidate.n, n)
        times, effects = run_blocks(program, more, self.context.quiet)[:2]
        if candidate.n == 0:
            self._begin(candidate, program)
        candidate.times = np.concatenate([candidate.times, times.astype(np.float64)])
        candidate.effects = np.concatenate([candidate.effects, effects.astype(np.float64)])
        self.done += len(more)
        self.tell()

    def _begin(self, candidate: Candidate, program: Program) -> None:
        """Find what a block of a candidate costs, and its quiet times."""
        candidate.cost = max(LEAST_COST, program.n_draws * engine.LANES)
        batches = int(np.clip(QUIET_SAMPLES // candidate.cost, *QUIET_BATCHES))
        self.n_quiet = self.n_quiet or batches * engine.LANES
        if (program.ranks.tables >= 0).any():
            clusters = range(self.n_quiet)
            quiet = cluster_times(program, clusters, self.context, self.lowered)
            candidate.quiet = quiet.astype(np.float64)

    def tell(self) -> None:
        """Report what is done, and about how much there is to do."""
        self.context.report(self.done, max(self.done, self.planned))


def select(
    candidates: Sequence[C], measures: Sequence[str], tolerance: float, sampler: Sampler, *,
    budget: float, most: int = sys.maxsize,
) -> list[C]:  # fmt: skip
    """Run candidates on more and more cluster draws, those alone that may yet be the best.

    One is left behind while another one, the best or on the frontier of the measures, is as good
    but for the tolerance with probability 1 - `ERROR` over the number of candidates, by every
    measure; see [1]_.

    `budget`, `most`: op-samples of all beyond the first draws, and cluster draws of a candidate, at
    most.

    Returns the best by each measure, the frontier between them, and those that may yet be better.
    """
    for candidate in candidates:
        sampler.extend(candidate, min(FIRST_BLOCKS, most))
    slope = fit_slope(candidates)
    for candidate in candidates:
        candidate.slope = slope
    while True:
        front, rivals = _contenders(candidates, measures, tolerance)
        left = [*front, *rivals]
        n = min(candidate.n for candidate in left)
        n = min(most, n + max(n // 2, 4))
        cost = sum(max(0, n - candidate.n) * candidate.cost for candidate in left)
        if not rivals or cost == 0 or cost > budget:
            return left
        budget -= cost
        for candidate in left:
            sampler.extend(candidate, n)


def _contenders(
    candidates: Sequence[C], measures: Sequence[str], tolerance: float
) -> tuple[list[C], list[C]]:
    """Find those that no other beats in every measure, and those that may yet belong there."""
    longest = max(candidates, key=lambda c: c.n)
    figures = np.array([[difference(c, longest, m).mean for m in measures] for c in candidates])
    front = [candidates[i] for i in pareto(figures)]
    delta = {m: tolerance * longest.figure(m) for m in measures}
    sure = 1.0 - ERROR / max(1, len(candidates) - 1)

    def behind(one: C, best: C) -> bool:
        return all(difference(best, one, m).probability_below(delta[m]) >= sure for m in measures)

    rest = (c for c in candidates if c not in front)
    return front, [c for c in rest if not any(behind(c, best) for best in front)]


def pareto(figures: Array) -> list[int]:
    """Choose the rows that no other beats in every figure[row, measure], by the first measure.

    Examples
    --------
    >>> pareto(np.array([[1.0, 3.0], [2.0, 2.0], [2.5, 2.5], [3.0, 1.0]]))
    [0, 1, 3]
    """
    found = []
    for i, row in enumerate(figures):
        if not ((figures <= row).all(axis=1) & (figures < row).any(axis=1)).any():
            found.append(i)
    return sorted(found, key=lambda i: (figures[i, 0], figures[i, -1]))
