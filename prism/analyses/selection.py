"""Selecting the best of several programs by paired differences on common random numbers.

Programs run under the same seed, block by block: a block is one cluster draw and 64 steps, drawn
alike for all of them, so that differences vary far less than times do.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from prism import engine
from prism.analyses.rankings.target import Target
from prism.common.attribution import ClusterControl, control_slope
from prism.simulation.draws import Lowered, cluster_times
from prism.simulation.program import Program
from prism.simulation.steps import Progress, run_blocks

Array = NDArray[np.float64]
QUANTILES: dict[str, float | None] = {
    "p50": 0.5,
    "p95": 0.95,
    "p99": 0.99,
    "mean": None,
    "time_to_train": 0.95,
}
ERROR = 0.05  # probability that a rival of the best is left behind
WINDOW, MOST_WINDOW = 0.5, 0.05  # of probability, on both sides of a quantile
FIRST_BLOCKS = 8  # cluster draws that every program is run on
LEAST_COST = 400_000  # op-samples that a block costs at least, whatever it holds
QUIET_SAMPLES = 140_000_000  # op-samples of the quiet times of one program
QUIET_BATCHES = 1, 8  # of 64 cluster draws each
MOST_SLOPE = 1.25  # of a cluster draw's mean step over its quiet time


@dataclass(eq=False, kw_only=True)
class Arm:
    """A candidate: its simulated steps, and its quiet times on many more cluster draws.

    In a quiet step nothing is random but the ranks: rare slow GPUs, which few cluster draws hardly
    meet, are met there at little cost.
    """

    program: Program | None = None
    work: float = 1.0  # tokens of a step over those of the job's
    target: Target | None = None  # of ``time_to_train``
    slope: float = 0.0  # of the draws' mean steps over their quiet times
    cost: int = 0  # op-samples of a block, once it has run
    quiet: Array = field(default_factory=lambda: np.empty(0))  # [many cluster draws] s
    times: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))  # [draw, lane] s
    effects: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))

    @property
    def n(self) -> int:
        """Cluster draws so far."""
        return len(self.times)

    def samples(self, measure: str, n: int | None = None) -> Array:
        """Return steps, or runs, on the first n cluster draws, for the same work [draw, lane]."""
        steps = spread(self.times[:n], self.quiet, self.slope)
        if measure == "time_to_train":
            assert self.target is not None
            effects = np.tile(self.effects[:n], steps.shape[1] // self.effects.shape[1])
            steps = self.target.times(steps, effects)
        return steps / self.work

    def values(self, measure: str, n: int | None = None) -> Array:
        """Return one value per cluster draw, whose mean is the figure for the same work [s]."""
        return pseudo_values(self.samples(measure, n), QUANTILES[measure])

    def figure(self, measure: str) -> float:
        """Return the figure of all samples, for the same work [s]."""
        q, samples = QUANTILES[measure], self.samples(measure)
        return float(samples.mean() if q is None else np.quantile(samples, q))


def spread(times: Array, quiet: Array, slope: float) -> Array:
    """Give simulated times[draw, lane] the places of many more cluster draws, by quiet times.

    The first ones of `quiet` are the simulated draws. As in
    `prism.common.attribution.spread_clusters`, under a slope that programs share. It is held within
    what is possible: a draw's mean follows its quiet time one to one at most, but for what shared
    noise multiplies, and rare stalls in few draws would make it anything.
    """
    n, slope = times.shape[0], float(np.clip(slope, 0.0, MOST_SLOPE))
    if slope == 0.0 or quiet.size < 2 * n:
        return times
    others = quiet[: quiet.size - quiet.size % n].reshape(-1, n)
    moved = times[:, None, :] + slope * (others - others[0]).T[:, :, None]
    return np.ascontiguousarray(moved.reshape(n, -1))


def fit_slope(arms: Sequence[Arm]) -> float:
    """Find how far the draws' mean steps follow their quiet times, alike for all arms."""
    known = [arm for arm in arms if arm.n > 1 and arm.quiet.size and np.ptp(arm.quiet) > 0.0]
    if not known:
        return 0.0
    n = min(min(arm.n, arm.quiet.size) for arm in known)
    known.sort(key=lambda arm: arm.times[:n].tobytes())  # in any order the same bits
    quiet = tuple(arm.quiet / arm.work for arm in known)
    return control_slope([arm.times[:n] / arm.work for arm in known], ClusterControl(quiet))


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
    """Paired difference of two arms' figures: mean, its standard error, cluster draws."""

    mean: float
    error: float  # NaN for one draw
    n: int

    def probability_below(self, delta: float) -> float:
        """Return the probability that it is at most delta, by Student's t about the mean."""
        if not self.error > 0.0:
            return float(self.mean <= delta)
        return float(stdtr(self.n - 1, (delta - self.mean) / self.error))


def difference(a: Arm, b: Arm, measure: str) -> Difference:
    """Figure of a less that of b for the same work [s], over the draws that both have run on."""
    n = min(a.n, b.n)
    d = a.values(measure, n) - b.values(measure, n)
    return Difference(float(d.mean()), standard_error(d), n)


def standard_error(values: Array) -> float:
    """Return the standard error of a mean over cluster draws; NaN for one draw."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else math.nan


def probability_best(best: Arm, arms: Sequence[Arm], measure: str, tolerance: float) -> float:
    """Probability that no arm is better than one by more than a share of its figure, or less.

    The product over arms of the probability that the paired difference, which has Student's t
    distribution, is at most that: a lower bound where differences are positively correlated, as
    those to one arm are (Slepian's inequality, PGS_Slep of [1]_).
    """
    delta = tolerance * best.figure(measure)
    rivals = (arm for arm in arms if arm is not best and min(arm.n, best.n) > 1)
    each = (difference(best, arm, measure).probability_below(delta) for arm in rivals)
    return math.prod(each, start=1.0)


@dataclass
class Runner:
    """Runs arms under one seed, and counts."""

    seed: int
    threads: int
    progress: Progress | None = None
    n_quiet: int = 0  # cluster draws whose quiet times are found, once an arm has run
    done: int = 0  # cluster draws over all arms
    planned: int = 0  # about
    lowered: Lowered = field(default_factory=Lowered)

    def program(self, arm: Arm) -> Program:
        """Return what an arm runs."""
        assert arm.program is not None
        return arm.program

    def extend(self, arm: Arm, n: int) -> None:
        """Bring an arm to n cluster draws."""
        if n <= arm.n:
            return
        program, more = self.program(arm), range(arm.n, n)
        times, effects = run_blocks(program, more, self.seed, self.threads)[:2]
        if arm.n == 0:
            self._begin(arm, program)
        arm.times = np.concatenate([arm.times, times.astype(np.float64)])
        arm.effects = np.concatenate([arm.effects, effects.astype(np.float64)])
        self.done += len(more)
        self.tell()

    def _begin(self, arm: Arm, program: Program) -> None:
        """Find what a block of an arm costs, and its quiet times."""
        arm.cost = max(LEAST_COST, program.n_draws * engine.LANES)
        batches = int(np.clip(QUIET_SAMPLES // arm.cost, *QUIET_BATCHES))
        self.n_quiet = self.n_quiet or batches * engine.LANES
        if (program.ranks.tables >= 0).any():
            clusters = range(self.n_quiet)
            quiet = cluster_times(program, clusters, self.seed, self.threads, self.lowered)
            arm.quiet = quiet.astype(np.float64)

    def tell(self) -> None:
        """Report what is done, and about how much there is to do."""
        if self.progress is not None:
            self.progress(self.done, max(self.done, self.planned))


def select(
    arms: Sequence[Arm], measures: Sequence[str], tolerance: float, runner: Runner, *,
    budget: float, most: int = sys.maxsize,
) -> list[Arm]:  # fmt: skip
    """Run arms on more and more cluster draws, those alone that may yet be the best.

    An arm is left behind while another one, the best or on the frontier of the measures, is
    as good but for the tolerance with probability 1 - `ERROR` over the number of arms, by every
    measure; see [1]_.

    Parameters
    ----------
    budget, most : float, int
        Op-samples of all arms beyond the first draws, and cluster draws of an arm, at most.

    Returns
    -------
    list of Arm
        The best by each measure, the frontier between them, and those that may yet be better.
    """
    for arm in arms:
        runner.extend(arm, min(FIRST_BLOCKS, most))
    slope = fit_slope(arms)
    for arm in arms:
        arm.slope = slope
    while True:
        front, rivals = _contenders(arms, measures, tolerance)
        left = [*front, *rivals]
        n = min(arm.n for arm in left)
        n = min(most, n + max(n // 2, 4))
        cost = sum(max(0, n - arm.n) * arm.cost for arm in left)
        if not rivals or cost == 0 or cost > budget:
            return left
        budget -= cost
        for arm in left:
            runner.extend(arm, n)


def _contenders(
    arms: Sequence[Arm], measures: Sequence[str], tolerance: float
) -> tuple[list[Arm], list[Arm]]:
    """Find the arms that no other beats in every measure, and those that may yet belong there."""
    longest = max(arms, key=lambda arm: arm.n)
    known: dict[tuple[Arm, str, int], Array] = {}

    def apart(a: Arm, b: Arm, measure: str) -> Difference:
        n = min(a.n, b.n)
        for arm in (a, b):
            if (arm, measure, n) not in known:
                known[arm, measure, n] = arm.values(measure, n)
        d = known[a, measure, n] - known[b, measure, n]
        return Difference(float(d.mean()), standard_error(d), n)

    figures = np.array([[apart(arm, longest, m).mean for m in measures] for arm in arms])
    front = [arms[i] for i in pareto(figures)]
    delta = {m: tolerance * longest.figure(m) for m in measures}
    sure = 1.0 - ERROR / max(1, len(arms) - 1)

    def behind(arm: Arm, best: Arm) -> bool:
        return all(apart(best, arm, m).probability_below(delta[m]) >= sure for m in measures)

    return front, [a for a in arms if a not in front and not any(behind(a, b) for b in front)]


def pareto(figures: Array) -> list[int]:
    """Choose the rows that no other beats in all figures[row, measure], by the first measure.

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
