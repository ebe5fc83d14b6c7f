"""Which settings of a sweep are run, and for how long: bounds first, then paired halving.

No step is shorter than what its stages compute one after the other, and none is shorter in the
mean than with every effect at 1 (a maximum is convex, Jensen). A quantile may lie below the mean:
p50 by a standard deviation at most, p95 by 0.23 of one (Cantelli). Layouts that such a bound puts
beyond the least p95, taking their spread for the widest simulated yet, are not simulated. The
others run on a few clusters, then on twice as many while they are not surely worse, in p50 and in
p95, than some other.

References
----------
.. [1] Jamieson and Talwalkar (2016), arXiv:1502.07943: successive halving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from prism import engine
from prism.analyses.sweeps.points import Bench, Point, fit_slope
from prism.common.errors import PrismError

FIRST_CLUSTERS = 8
"""Clusters that every simulated setting runs on."""
ERROR = 0.05
"""Probability of a wrong elimination, over all settings of a round."""
MOST_SAMPLES = 100e9
"""Op-samples after which no round of halving is begun: two minutes on one core."""

BUILT = 100
"""Of a sweep's progress, when all its settings are built [1/1000]."""


def search(
    points: Sequence[Point], bench: Bench, clusters: int, objective: str, skip: bool
) -> dict[int, str]:
    """Simulate settings as far as they may be among the best."""
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    progress = _Progress(bench, len(points))
    wrong: dict[Point, str] = {}
    for group in groups.values():
        wrong |= _screen(group, bench, min(FIRST_CLUSTERS, clusters), skip, progress)
        fit_slope(group)
    for i, group in enumerate(groups.values()):
        _halve(group, bench, clusters, objective, MOST_SAMPLES / len(groups))
        progress.share(0.5 + 0.5 * (i + 1) / len(groups))
    return {i: wrong[point] for i, point in enumerate(points) if point in wrong}


class _Progress:
    """Tells what is done, screening and halving as a half each."""

    def __init__(self, bench: Bench, n_points: int) -> None:
        self.bench, self.n_points, self.done = bench, n_points, 0

    def one(self) -> None:
        self.done += 1
        self.share(0.5 * min(1.0, self.done / self.n_points))

    def share(self, share: float) -> None:
        if self.bench.progress is not None:
            self.bench.progress(BUILT + round((1000 - BUILT) * share), 1000)


def _screen(
    points: Sequence[Point], bench: Bench, clusters: int, skip: bool, progress: _Progress
) -> dict[Point, str]:
    """Find the ideal step of settings, and simulate a little those that may be among the best."""
    limit, best, spread = np.inf, np.inf, 0.0
    wrong: dict[Point, str] = {}

    def simulate(point: Point) -> None:
        nonlocal limit, spread
        bench.extend(point, clusters)
        if skip:
            steps = point.same_work()
            limit = min(limit, point.figure("p95"))
            spread = max(spread, float(steps.std() / steps.mean()))

    def is_beyond(bound: float) -> bool:
        """Whether no quantile of a step whose mean is at least the bound can be the least."""
        return bound * (1.0 - spread) > limit

    ordered = sorted(points, key=lambda point: (not point.own, point.least / point.work))
    if not skip:
        bench.foresee_steps(ordered, clusters)
    for i, point in enumerate(ordered):
        if point.own or not is_beyond(point.least / point.work):
            bench.foresee_ideals([p for p in ordered[i:] if not is_beyond(p.least / p.work)])
            try:
                ideal = bench.find_ideal(point)
                if point.own or ideal < best:
                    best = min(best, ideal)
                    simulate(point)
            except PrismError as error:  # what only shows when it is built
                wrong[point] = str(error)
        if point.n or point.ideal is None:
            progress.one()

    def bound(point: Point) -> float:
        return point.least / point.work if point.ideal is None else bench.find_ideal(point)

    # the widest spread grows on the way, and may bring back what was left out under a narrower one
    while left := [p for p in ordered if p.n == 0 and p not in wrong and not is_beyond(bound(p))]:
        point = min(left, key=bound)
        try:
            if not is_beyond(bench.find_ideal(point)):
                simulate(point)
                progress.one()
        except PrismError as error:
            wrong[point] = str(error)
    return wrong


def _halve(
    points: Sequence[Point], bench: Bench, clusters: int, objective: str, budget: float
) -> None:
    """Run those on that may be on the frontier; the job's own setting with them."""
    alive = [point for point in points if point.n]
    measures = tuple(dict.fromkeys(("p50", "p95", objective)))
    while alive:
        n = min(point.n for point in alive)
        values = np.stack([[point.values(m) for point in alive] for m in measures])
        keep = possibly_best(values)
        alive = [p for p, kept in zip(alive, keep, strict=True) if kept or p.own]
        more = min(clusters, 2 * n)
        cost = sum(p.n_draws for p in alive) * (more - n) * engine.LANES
        budget -= cost
        if more == n or budget < 0.0:
            break
        bench.extend_all(alive, more)
    for point in alive:
        point.done = True
        bench.find_exposed(point)


def possibly_best(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which settings are not surely worse than some other, by values[measure, setting, cluster].

    Surely: the mean of the paired differences is beyond the Student quantile of `ERROR` over the
    number of settings, by each measure. Where nothing varies a difference is sure.
    """
    n_points, n = values.shape[1:]
    if n < 2 or n_points < 2:
        return np.ones(n_points, bool)
    quantile = stats.t.ppf(1.0 - ERROR / (n_points - 1), n - 1)
    beaten = np.zeros(n_points, bool)
    for i in np.argsort(values.mean(axis=(0, 2))):  # the best first: they beat most of the others
        left = np.flatnonzero(~beaten)
        apart = values[:, left] - values[:, i : i + 1]
        error = apart.std(axis=2, ddof=1) / np.sqrt(n)
        beaten[left] = (apart.mean(axis=2) > quantile * error).all(axis=0)
    return ~beaten


def pareto(figures: NDArray[np.float64]) -> list[int]:
    """Choose the settings that no other beats in all figures[setting, measure], by the first one.

    Examples
    --------
    >>> pareto(np.array([[1.0, 3.0], [2.0, 2.0], [2.5, 2.5], [3.0, 1.0]]))
    [0, 1, 3]
    """
    found = []
    for i, row in enumerate(figures):
        others = np.delete(figures, i, axis=0)
        if not ((others <= row).all(axis=1) & (others < row).any(axis=1)).any():
            found.append(i)
    return sorted(found, key=lambda i: (figures[i, 0], figures[i, -1]))
