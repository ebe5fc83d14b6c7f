"""Memory of step scores at gapped step numbers: exponential correlation and white noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.models.variance.draws import N_DRAWS

Array = NDArray[np.float64]

NOT_WHITE = 3.84
"""5 % point of chi-square with 1 degree of freedom. The length means nothing without the share,
so no chi-square is exact; white scores pass in 1 to 6 % of simulated tables (six layouts)."""
FEW = 8
"""Steps below which no memory is looked for."""
LONGEST = 0.5
"""Of the steps' span: a longer memory looks like a drift. With a third, intervals hold a true
variance in 65 % of the cases where the memory is that long; with all of it estimates are 26 % high
(300 simulated series of eight kinds)."""


class Memory(NamedTuple):
    """How step scores remember each other: ``share exp(-|distance| / steps)``, the rest white."""

    steps: float
    share: float
    variance: float
    """Marginal variance of the scores over their sample variance."""
    draws: Array
    """[draw] of it: lengths and shares as likely as they are, a chi-square each."""


def step_memory(
    scores: Array, steps: NDArray[np.int64], rng: np.random.Generator, n_draws: int = N_DRAWS
) -> Memory | None:
    """Correlation length of scores at gapped step numbers, by restricted likelihood.

    Parameters
    ----------
    scores : ndarray
        [step] scores.
    steps : ndarray
        [step] step numbers, different from each other.
    """
    if scores.size < FEW or not np.ptp(scores) > 0.0:
        return None
    lengths, shares = _grid(steps)
    square, fit = _likelihood(scores, steps, lengths, shares)  # [share, length]
    n = scores.size
    sample = float(np.sum((scores - scores.mean()) ** 2))
    best = np.unravel_index(int(np.argmax(fit)), fit.shape)
    if fit[best] + (n - 1) * np.log(sample) + np.log(n) < NOT_WHITE:
        return None
    share, length = float(shares[best[0]]), float(lengths[best[1]])
    likely = np.exp(0.5 * (fit - fit[best])).ravel()
    cell = rng.choice(likely.size, n_draws, p=likely / likely.sum())
    drawn = square.ravel()[cell] / rng.chisquare(n - 1, n_draws)
    return Memory(length, share, float(square[best]) / sample, drawn * (n - 1) / sample)


def _grid(steps: NDArray[np.int64]) -> tuple[Array, Array]:
    """Lengths and shares among which the most likely is looked for."""
    number = np.sort(steps).astype(np.float64)
    gap, span = float(np.min(np.diff(number))), float(number[-1] - number[0])
    return np.geomspace(0.5 * gap, max(LONGEST * span, gap), 24), np.linspace(0.1, 1.0, 10)


def _likelihood(
    scores: Array, steps: NDArray[np.int64], lengths: Array, shares: Array
) -> tuple[Array, Array]:
    """Squares about the mean, and twice the log restricted likelihood, [share, length].

    By a Kalman filter, which has a memory in the form of an exponential for its state: time in
    proportion to the steps. The mean is that of generalised least squares: a series of ones goes
    through the same filter.
    """
    order = np.argsort(steps)
    share = shares[:, None]
    keep = np.exp(-np.diff(steps[order], prepend=steps[order[0]])[:, None] / lengths)
    shape = (shares.size, lengths.size)
    state, one = np.zeros(shape), np.zeros(shape)  # expected of the scores, of the ones
    open_ = np.broadcast_to(share, shape)  # variance of the state
    squares, crossed, told, log_det = np.zeros((4, *shape))
    for score, phi in zip(scores[order], keep, strict=True):
        state, one = phi * state, phi * one
        open_ = phi**2 * open_ + share * (1.0 - phi**2)
        variance = np.maximum(open_ + 1.0 - share, 1e-9)
        gain, miss, missed = open_ / variance, score - state, 1.0 - one
        state, one, open_ = state + gain * miss, one + gain * missed, open_ * (1.0 - gain)
        squares += miss**2 / variance
        crossed += miss * missed / variance
        told += missed**2 / variance
        log_det += np.log(variance)
    square = squares - crossed**2 / told
    return square, -(scores.size - 1) * np.log(square) - log_det - np.log(told)
