"""The distribution of what a replica takes that is not simulated, from times that were.

A replica's own work over that of a typical one is ``m(level) + s(level) e``: m rises with the level
through means of `KNOTS` bins, s is a straight line, and the distribution of e is pooled over
replicas and clusters. Lasting differences that the level does not tell are drawn anew in every
step.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Array = NDArray[np.float64]
Features = NDArray[np.float32] | NDArray[np.float64]
Curve = Callable[[Array], Array]
KNOTS = 12  # of the mean time of a replica by its level
TAIL = 0.05  # share of the noise that its tail is fitted on
JOIN = 0.001  # share of the noise that is read from a smooth tail
LEFT = 20  # values beyond which a tail that is not smooth is read from a distribution
ABOVE = 660  # values above which that distribution is fitted
END = 6.4  # normal score at which the noise ends: chance 8e-11, of 1e6 replicas 8e-5
CELLS = 4096  # of the noise's table
MISS = 3.0  # mean square of a smooth tail's misses [sampling error] up to which it holds
TOLD = 0.5  # share of the noise's variance from which on microbatches stand for it
BEND = 0.1  # share of the longest microbatches, which delay a step less than in proportion
NEAR = 64  # groups of like microbatches within which what they leave open is alike


def by_level(level: Array, ratio: Array) -> tuple[Array, Array, Array]:
    """Mean and spread [1] of replicas of like level, at knots [s]."""
    from scipy.optimize import isotonic_regression  # slow to load, and of sampled jobs alone

    bins = np.array_split(np.argsort(level, kind="stable"), KNOTS)
    knot = np.array([level[i].mean() for i in bins])
    mean = np.asarray(isotonic_regression([ratio[i].mean() for i in bins]).x)
    centred = ratio - np.interp(level, knot, mean)[:, None]
    std = np.array([centred[i].std() for i in bins])
    if np.ptp(knot) > 1e-9 * knot[-1]:
        std = np.maximum(np.polyval(np.polyfit(knot, std, 1), knot), 0.5 * std.min())
    else:
        knot = knot[0] + 1e-9 * max(abs(knot[0]), 1e-30) * np.arange(knot.size)
        std[:] = std.mean()
        mean[:] = mean.mean()
    return knot, mean, np.maximum(std, 1e-12)


def noise_table(noise: Array) -> tuple[float, float, Array]:
    """Tabulate the log of ascending noise's cdf: its first point, the points' distance, values."""
    n = noise.size
    q = (np.arange(n) + 0.5) / n
    end, tail = _tail(noise, q)
    score = np.linspace(ndtri(end), END, 512)
    beyond = np.maximum.accumulate(tail(score))
    beyond += float(np.interp(end, q, noise)) - beyond[0]
    body = q < end
    x = np.maximum.accumulate(np.concatenate([noise[body], beyond]))
    log_q = np.concatenate([np.log(q[body]), np.log(ndtr(score))])
    grid = np.linspace(x[int(JOIN * n)], x[-1] + 1e-12, CELLS)
    values = np.interp(grid, x, log_q)
    values[-1] = 0.0
    return float(grid[0]), float(grid[1] - grid[0]), values


def _tail(noise: Array, q: Array) -> tuple[float, Curve]:
    """Probability where the tail of the noise begins, and its quantiles by normal score.

    Quadratic in the normal score if the data follow that within their sampling error: near-normal
    sums do, and at 1 - 1e-6 of 66,000 values it has half the error of a generalised Pareto tail.
    Else the noise is no such distribution (lengths of sequences have steps), and a generalised
    Pareto distribution of its last values goes on, by probability-weighted moments and never
    heavier than exponential.
    """
    last, i = 1.0 - LEFT / noise.size, q > 1.0 - TAIL
    weight = np.sqrt((1.0 - q[i]) / TAIL)
    smooth = np.polynomial.Polynomial.fit(ndtri(q[i]), noise[i], 2, w=weight)
    at = np.geomspace(TAIL / 2.0, 1.0 - last, 12)
    steep = smooth(-ndtri(at / 1.5)) - smooth(-ndtri(at * 1.5))  # of a factor 2.25 in 1 - q
    error = np.abs(steep) / np.log(2.25) / np.sqrt(at * noise.size)
    least = 1e-9 * max(float(noise.std()), 1e-30)  # where values are alike there is no error
    miss = (smooth(-ndtri(at)) - np.interp(1.0 - at, q, noise)) / np.maximum(error, least)
    if np.mean(miss**2) < MISS:
        return 1.0 - JOIN, smooth
    start = 1.0 - min(0.1 * TAIL, ABOVE / noise.size)
    above = noise[q > start]
    above = above - above[0]
    n = above.size
    if above[-1] == 0.0:  # all alike: nothing to extrapolate from
        return last, lambda score: np.full_like(score, noise[-1])
    first, second = above.mean(), float((n - 1 - np.arange(n)) @ above) / (n - 1) / n
    shape = min(2.0 - first / (first - 2.0 * second), -1e-3)
    scale = first * (1.0 - shape)

    def pareto(score: Array) -> Array:
        p = ndtr(-score) / (1.0 - start)
        return np.asarray(np.interp(start, q, noise) + scale / shape * (p**-shape - 1.0))

    return last, pareto


def widen(noise: Array, told: Features, drawn: Features) -> Array:
    """Let many draws of the microbatches stand for the few of a pilot; ascending.

    Who is the slowest of thousands is decided where a pilot has few values, while most of the
    noise [n] often follows from how long the microbatches are, of which millions cost little.
    `told` [n, feature] is of the microbatches behind each, `drawn` [m, feature] of other draws.
    What comes back [m] is what the microbatches tell of each draw, a plane over the features that
    bends where the longest `BEND` begin, and what they leave open, taken from noise whose
    microbatches are alike; the noise itself where they tell less than `TOLD` of its variance.
    """
    one: Array = np.column_stack([told, np.ones(noise.size)]).astype(np.float64)
    line = np.linalg.lstsq(one, noise, rcond=None)[0]
    known = one @ line
    if drawn.size == 0 or np.var(noise - known) > (1.0 - TOLD) * np.var(noise):
        return np.sort(noise)
    edge = float(np.quantile(known, 1.0 - BEND))
    long = known > edge
    bend = np.polyfit(known[long], (noise - known)[long], 1)
    known = np.where(long, known + np.polyval(bend, known), known)
    order = np.argsort(known, kind="stable")
    open_, known = (noise - known)[order], known[order]
    far = drawn @ line[:-1] + line[-1]
    far = np.where(far > edge, far + np.polyval(bend, far), far)
    rng = np.random.Generator(np.random.Philox(0))
    width = max(1, noise.size // NEAR)
    at = np.searchsorted(known, far) - width // 2
    at = np.clip(at, 0, noise.size - width) + rng.integers(0, width, far.size)
    return np.sort(far + open_[at])
