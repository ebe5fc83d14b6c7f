"""Selecting the best of several programs by paired batches: those that cannot be best drop out.

Programs are run under the same seed, block by block: a block is one cluster and 64 steps, drawn
alike for all of them, so that differences vary far less than times do.

References
----------
.. [1] Kim and Nelson (2001), "A fully sequential procedure for indifference-zone selection in
   simulation", doi:10.1145/502109.502111.
.. [2] Kim and Nelson (2006), "On the asymptotic validity of fully sequential selection procedures
   for steady-state simulation", doi:10.1287/opre.1060.0281: variances updated along the way.
.. [3] Serfling (1980), "Approximation Theorems of Mathematical Statistics",
   doi:10.1002/9780470316481, section 8.1: L-statistics and their influence curves.
.. [4] Branke, Chick and Schmidt (2007), "Selecting a selection procedure",
   doi:10.1287/mnsc.1070.0721, section 3.1: bounds of the probability of a good selection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from prism import engine
from prism.analyses.placements.clusters import spread
from prism.analyses.rankings.target import Target
from prism.common.attribution import ClusterControl, control_slope
from prism.simulation.program import Program
from prism.simulation.steps import Progress, run_blocks

Array = NDArray[np.float64]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "time_to_train": 0.95}
OBJECTIVES = ("p50", "p95", "p99", "mean", "time_to_train")
ERROR = 0.05  # of the procedure: probability of a wrong elimination
WINDOW, MOST_WINDOW = 0.5, 0.05  # of probability, on both sides of a quantile
FIRST_BLOCKS = 10  # clusters that every program is run on; Kim and Nelson (2001), section 5
NEXT_BLOCKS = 4  # clusters added at a time, or a quarter of those there are


@dataclass
class Arm:
    """A program with its steps so far, and its quiet times on many clusters."""

    program: Program
    quiet: Array = field(default_factory=lambda: np.empty(0))  # [many clusters]
    times: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))  # [cluster, lane]
    effects: Array = field(default_factory=lambda: np.empty((0, engine.LANES)))

    @property
    def n(self) -> int:
        """Clusters so far."""
        return len(self.times)


@dataclass
class Objective:
    """What is to be small: a figure of the step [s], or the p95 of the run."""

    name: str
    target: Target  # of the run; used for ``time_to_train`` alone
    slope: float = 0.0  # of clusters' mean steps over their quiet times

    def steps(self, arm: Arm, n: int) -> Array:
        """Return steps on the first n clusters, spread over all quiet ones [cluster, lane]."""
        return spread(arm.times[:n], arm.quiet, self.slope)

    def values(self, arm: Arm, n: int) -> Array:
        """Return steps, or runs, on the first n clusters [cluster, lane]."""
        steps = self.steps(arm, n)
        if self.name != "time_to_train":
            return steps
        effects = np.tile(arm.effects[:n], steps.shape[1] // arm.effects.shape[1])
        return self.target.times(steps, effects)

    def fit_slope(self, arms: Sequence[Arm]) -> None:
        """Find how far clusters' means follow their quiet times, alike for all arms."""
        quiet = [arm.quiet for arm in arms]
        # small jobs run on more clusters than their quiet times are found of
        n = min(*(arm.n for arm in arms), *(q.size for q in quiet))
        self.slope = 0.0
        if n > 1 and quiet[0].size and max(float(np.ptp(q)) for q in quiet) > 0.0:
            self.slope = control_slope([a.times[:n] for a in arms], ClusterControl(tuple(quiet)))

    def pseudo_values(self, arm: Arm, n: int) -> Array:
        """One value per cluster, whose mean is the figure; see `pseudo_values`."""
        return pseudo_values(self.values(arm, n), QUANTILES.get(self.name))


def pseudo_values(values: Array, q: float | None) -> Array:
    """Turn a figure of values[cluster, lane] into a mean over clusters [cluster].

    For a quantile the mean of the order statistics within q +- `WINDOW` (1 - q) (or q, if that is
    less) is taken. To first order it is a mean of influence values, of each step held within the
    two ends of that window, over the window's probability [3]_. Where two programs share their
    draws, these differ as little as the steps do; indicators of steps beyond a quantile, which the
    plain sample quantile is made of, do not.
    """
    if q is None:
        return np.asarray(values.mean(axis=1))
    width = min(WINDOW * min(q, 1.0 - q), MOST_WINDOW)
    pooled = np.sort(values, axis=None)
    low, high = np.quantile(pooled, [q - width, q + width])
    inside = pooled[round((q - width) * pooled.size) : round((q + width) * pooled.size)]
    middle = float(inside.mean()) if inside.size else 0.5 * float(low + high)
    held = np.clip(values, low, high).mean(axis=1) / (2.0 * width)
    return np.asarray(middle + held - held.mean())


class Difference(NamedTuple):
    """Paired difference of two programs' figures: mean, its standard error, clusters."""

    mean: float
    error: float
    n: int


def difference(objective: Objective, a: Arm, b: Arm) -> Difference:
    """Figure of a less that of b, over the clusters that both have run on."""
    n = min(a.n, b.n)
    d = objective.pseudo_values(a, n) - objective.pseudo_values(b, n)
    return Difference(float(d.mean()), float(d.std(ddof=1) / np.sqrt(n)), n)


class Selection(NamedTuple):
    """The arm chosen, and how likely none of the others is better by more than the tolerance."""

    best: int
    p_correct: float


@dataclass
class Runner:
    """Runs arms under one seed, and counts."""

    seed: int
    threads: int
    progress: Progress | None = None
    done: int = 0
    planned: int = 0

    def extend(self, arm: Arm, n: int) -> None:
        """Bring an arm to n clusters."""
        if not (more := range(arm.n, n)):
            return
        times, effects, _, _ = run_blocks(arm.program, more, self.seed, self.threads)
        arm.times = np.concatenate([arm.times, times.astype(np.float64)])
        arm.effects = np.concatenate([arm.effects, effects.astype(np.float64)])
        self.done += len(more)
        if self.progress is not None:
            self.progress(self.done, max(self.done, self.planned))


def select(
    arms: Sequence[Arm], objective: Objective, tolerance: float, budget: int, runner: Runner
) -> Selection:
    """Run arms until one is left, all others being worse or within the tolerance.

    After r clusters i drops out where its mean exceeds that of some l by more than
    ``max(0, delta/2 (h^2 S_il^2 / (delta^2 r) - 1))``, S_il^2 the variance of their difference,
    ``h^2 = (r - 1) ((2 a / (k - 1))^(-2/(r - 1)) - 1)`` [1]_, variances updated as in [2]_.
    """
    spent = sum(max(0, FIRST_BLOCKS - arm.n) for arm in arms)
    for arm in arms:
        runner.extend(arm, max(arm.n, FIRST_BLOCKS))
    objective.fit_slope(arms)
    alive, r = list(range(len(arms))), FIRST_BLOCKS
    while True:
        values = np.stack([objective.pseudo_values(arms[i], r) for i in alive])
        delta = tolerance * float(values.mean(axis=1).min())
        keep = _survivors(values, delta, len(arms))
        alive = [i for i, kept in zip(alive, keep, strict=True) if kept]
        more = max(NEXT_BLOCKS, r // 4)
        if len(alive) == 1 or spent + more * len(alive) > budget:
            break
        for i in alive:
            spent += max(0, r + more - arms[i].n)
            runner.extend(arms[i], max(arms[i].n, r + more))
        r += more
    values = np.stack([objective.pseudo_values(arms[i], r) for i in alive])
    best = alive[int(values.mean(axis=1).argmin())]
    return _confirm(arms, best, objective, tolerance, budget - spent, runner)


def _confirm(
    arms: Sequence[Arm], best: int, objective: Objective, tolerance: float, budget: int,
    runner: Runner,
) -> Selection:  # fmt: skip
    """Go on with the chosen arm and those that may yet be better, until that is improbable."""
    while True:
        n = arms[best].n
        delta = tolerance * float(objective.pseudo_values(arms[best], n).mean())
        within = _each_within(objective, arms, best, delta)
        p = float(within.prod())
        if p >= 1.0 - ERROR:
            return Selection(best, p)
        doubts = [best, *np.flatnonzero(within < 1.0 - ERROR / len(arms)).tolist()]
        n += max(NEXT_BLOCKS, n // 2)
        cost = sum(max(0, n - arms[i].n) for i in doubts)
        if cost > budget:
            return Selection(best, p)
        budget -= cost
        for i in doubts:
            runner.extend(arms[i], n)
        best = min(doubts, key=lambda i: float(objective.pseudo_values(arms[i], n).mean()))


def _survivors(values: Array, delta: float, n_arms: int) -> NDArray[np.bool_]:
    """Which of the arms may still be best, [arm], from their values [arm, cluster]."""
    k, r = values.shape
    if n_arms == 1:
        return np.ones(k, bool)
    h2 = (r - 1) * ((2.0 * ERROR / (n_arms - 1)) ** (-2.0 / (r - 1)) - 1.0)
    mean = values.mean(axis=1)
    apart = values[:, None, :] - values[None, :, :]
    variance = apart.var(axis=2, ddof=1)
    slack = np.maximum(0.0, 0.5 * (h2 * variance / (max(delta, 1e-300) * r) - delta))
    worse = mean[:, None] - mean[None, :]
    later = np.tri(k, k=-1, dtype=bool)
    beaten = (worse > slack) | ((worse == 0.0) & (slack == 0.0) & later)
    return np.asarray(~beaten.any(axis=1))


def probability_within(objective: Objective, arms: Sequence[Arm], best: int, delta: float) -> float:
    """Probability that no arm is better than the chosen one by more than delta, or less than it.

    The product over arms of the probability that the difference, which has Student's t law about
    the paired one, is at most delta: a lower bound where differences are positively correlated, as
    those to one arm are (Slepian's inequality, PGS_Slep of [4]_).
    """
    return float(np.prod(_each_within(objective, arms, best, delta)))


def _each_within(objective: Objective, arms: Sequence[Arm], best: int, delta: float) -> Array:
    """Probability of each arm that it is not better than the chosen one by more than delta."""
    out = np.ones(len(arms))
    for i, arm in enumerate(arms):
        if i != best:
            d = min(_chains(objective, arms, arms[best], arm), key=lambda d: d.error)
            out[i] = student(delta, d)
    return out


def _chains(objective: Objective, arms: Sequence[Arm], a: Arm, b: Arm) -> Iterator[Difference]:
    """Figure of a less that of b, over those that both have run on, and through others.

    One that was like b while b ran, and went on, tells more of b than its own few clusters.
    """
    yield difference(objective, a, b)
    for other in arms:
        if other is not a and other.n > b.n:
            first, last = difference(objective, a, other), difference(objective, other, b)
            error = float(np.hypot(first.error, last.error))
            yield Difference(first.mean + last.mean, error, min(first.n, last.n))


def student(delta: float, d: Difference) -> float:
    """Probability that a difference is at most delta."""
    if d.error == 0.0:
        return float(d.mean <= delta)
    return float(stats.t.cdf((delta - d.mean) / d.error, d.n - 1))
