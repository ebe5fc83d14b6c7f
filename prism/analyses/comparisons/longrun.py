"""How far the mean of an autocorrelated series may be off.

The long-run variance as the mean square of the first few cosine coefficients of the series, so that
a t distribution with as many degrees of freedom holds; how many there may be, and what the last of
them miss, comes from a spectrum of white noise, a clock's error and a slow drift.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct

Array = NDArray[np.float64]

MOST = 0.4  # times n^(2/3): cosines of a white series (Lazarus et al., section 4)
FEWEST = 4  # cosines; with fewer a t interval is of little use
_KEPT = 0.85  # of the spectrum at zero that its mean over the cosines used must hold
_GAIN = 4.0  # twice the log-likelihood that a drift must gain to be believed
_ROUNDS = 40  # of the multiplicative updates
_BINS = 40
_MEMORIES = 20


class LongRun(NamedTuple):
    """Contributions to a mean's error."""

    parts: Array  # [cosine, series] independent; squares add up to the variance of the mean
    dof: Array  # [series] of that variance
    cosines: NDArray[np.int64]  # [series] it rests on; parts beyond are 0


def long_run(series: Array) -> LongRun:
    """Estimate the variance of the means of series [n, series] in time order.

    Equal-weighted cosines: Omega = (1/B) sum over j = 1..B of L_j^2, L_j the j-th coefficient of
    the orthonormal cosine transform; the variance of the mean is Omega / n and its t statistic has
    B degrees of freedom [1]_. B is the largest at which the mean of the fitted spectrum over the
    B cosines is at least 0.85 of what it is at zero, and that share is then divided out. Where
    few values carry a series (rare stalls), its variance is worth 2 n / (kurtosis - 1) squares
    however many cosines there are, and that many degrees of freedom count.

    References
    ----------
    .. [1] Lazarus, Lewis, Stock and Watson (2018), "HAR inference: recommendations for practice",
       doi:10.1080/07350015.2018.1506926.
    """
    n, n_series = series.shape
    if n < 3:
        return LongRun(np.full((1, n_series), np.inf), np.ones(n_series), np.ones(n_series, int))
    centred = series - series.mean(axis=0)
    lines = dct(centred, type=2, norm="ortho", axis=0)[1:]
    most = int(np.clip(MOST * n ** (2.0 / 3.0), min(FEWEST, n - 1), n - 1))
    parts, used = np.zeros((most, n_series)), np.zeros(n_series, np.int64)
    shares = _shares(lines**2, most)
    for k, share in enumerate(shares.T):
        enough = np.flatnonzero(share >= _KEPT)
        b = max(int(enough[-1]) + 1 if enough.size else 0, min(FEWEST, most))
        used[k] = b
        parts[:b, k] = lines[:b, k] / np.sqrt(b * share[b - 1] * n)
    return LongRun(parts, np.minimum(used, moment_dof(centred)), used)


def moment_dof(values: Array) -> Array:
    """Degrees of freedom of the sample variance of each column [column] (Satterthwaite)."""
    n = values.shape[0]
    squares = values * values
    square, fourth = squares.mean(axis=0), (squares * squares).mean(axis=0)
    kurtosis = np.divide(fourth, square**2, out=np.full(square.shape, 3.0), where=square > 0.0)
    return np.asarray(np.clip(2.0 * n / np.maximum(kurtosis - 1.0, 1e-9), 1.0, None))


def _shares(power: Array, most: int) -> Array:
    """Mean of the fitted spectrum over the first B cosines over its value at zero [B, series]."""
    n, n_series = power.shape[0] + 1, power.shape[1]
    out = np.ones((most, n_series))
    varies = power.any(axis=0)
    if n < 4 * FEWEST or not varies.any():
        return out
    frequency = np.pi * np.arange(1, n) / n
    edges = np.unique(np.r_[np.arange(12), np.geomspace(12, n - 1, _BINS).astype(int)])
    edges = edges[edges < n - 1]
    counts = np.diff(np.r_[edges, n - 1]).astype(np.float64)
    lines = np.add.reduceat(power[:, varies], edges, axis=0) / counts[:, None]
    middle = np.add.reduceat(frequency, edges) / counts
    memories = np.geomspace(0.7, n / 6.0, _MEMORIES)  # in steps; a slower drift is a trend
    weight, gain = _fit(lines, counts, np.stack([_shape(middle, m) for m in memories]))
    best = gain.argmax(axis=0)
    for column, k in enumerate(np.flatnonzero(varies)):
        g = int(best[column])
        if gain[g, column] < _GAIN:
            continue
        memory, parts = float(memories[g]), weight[g, :, column]
        spectrum = _shape(np.r_[0.0, frequency[:most]], memory) @ parts
        mean = np.cumsum(spectrum[1:]) / np.arange(1, most + 1)
        out[:, k] = np.minimum(1.0, mean / spectrum[0])
    return out


def _shape(frequency: Array, memory: float) -> Array:
    """Spectra of white noise, a clock's error and an AR(1) drift [frequency, part]."""
    r = np.exp(-1.0 / memory)
    turn = 1.0 - np.cos(frequency)
    drift = 1.0 / (1.0 + 2.0 * r * turn / (1.0 - r) ** 2)  # 1 at zero
    return np.stack([np.ones_like(turn), turn, drift], axis=-1)


def _fit(power: Array, counts: Array, shapes: Array) -> tuple[Array, Array]:
    """Fit non-negative weights to spectral lines by likelihood, for each memory.

    From power [bin, series], lines in each bin and shapes [memory, bin, part]: weights [memory,
    part, series], and twice the log-likelihood over that without a drift [memory, series].

    The square of a cosine coefficient is chi-squared around the spectrum, so twice the
    log-likelihood is -(log S + I/S). The updates are those of non-negative matrix factorisation
    under the Itakura-Saito divergence, which never lose likelihood (Fevotte et al. 2009,
    doi:10.1162/neco.2008.04-08-771).
    """
    scale = counts @ power / counts.sum()
    lines, c = np.maximum(power / scale, 1e-12), counts[:, None]

    def fitted(shape: Array) -> tuple[Array, Array]:
        turned = shape.transpose(0, 2, 1)
        weight = np.full((*turned.shape[:2], power.shape[1]), 1.0 / turned.shape[1])
        for _ in range(_ROUNDS):
            spectrum = shape @ weight
            weight = weight * np.sqrt(
                turned @ (c * lines / spectrum**2) / (turned @ (c / spectrum))
            )
        spectrum = shape @ weight
        return weight, -(c * (np.log(spectrum) + lines / spectrum)).sum(axis=1)

    weight, likelihood = fitted(shapes)
    return weight * scale, likelihood - fitted(shapes[:1, :, :2])[1]
