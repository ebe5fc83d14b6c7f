"""How well a predicted distribution agrees with measured values, in figures.

Distances between samples, errors of mean and percentiles, what a measured sample of this size can
tell at all (effective n, error of its p95), and the floor: how far two parts of the measurement lie
apart. Values are positive times, in seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.signal import correlate
from scipy.special import betainc, ndtri
from scipy.stats import kstwo, t, wasserstein_distance

from prism.common.arrays import Array, Index
from prism.common.resampling import (
    FIGURES,
    LEAST_STEPS,
    Sample,
    in_blocks,
    ks_distance,
    resample,
)

N_BOOTSTRAP = 1_000
"""Resamples behind the errors of measured figures: known to 1/sqrt(2000) = 2 % of themselves."""
LEVEL, POWER = 0.05, 0.8
_BOOTSTRAP_CELLS = 20_000_000  # values drawn at most; fewer resamples of a longer sample
_SEED = 20_250_101  # of those resamples: the same data gives the same error
_MEMORIES = np.geomspace(0.5, 512.0, 41)  # lags over which a correlation may decay by 1/e
_LEVEL = 0.1  # correlation is taken for real where chance alone shows as much less often
_MOST_LAGS = 1_024
_ROUNDS = 8  # of correcting a correlation for its own mean; it settles in two or three


def compare(
    measured: ArrayLike,
    predicted: ArrayLike,
    steps: ArrayLike | None = None,
    runs: Sequence[Hashable] | NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Compare a predicted distribution [N] s with measured values [n] s.

    `steps` number the measured values, with gaps or without, in the order given where None: the
    effective n and the error of p95 depend on them alone. Values of different `runs` count as
    independent.

    Gives ``n_measured``; ``n_effective`` (see `effective_n`); ``ks``, two-sample;
    ``ks_critical_5pct``, exact for one sample of n independent values against a known distribution;
    ``ks_aligned``, both divided by their median first; ``wasserstein`` [s]; ``mean_error``,
    ``p50_error``, ``p95_error``, ``p99_error`` (predicted / measured - 1); ``p95_error_same_n``,
    with the p95 that n values of the prediction would show on average; ``p95_measured_se``,
    relative; ``cv_ratio`` (predicted / measured). None where there is no answer: a ratio to the CV
    of a constant sample, the error of a single value.

    Raises ValueError: a sample is empty or not finite, or the lengths differ.
    """
    errors = measured_errors(measured, steps, runs)
    return compare_to(measured, predicted, errors)


class MeasuredErrors(NamedTuple):
    """What a measured sample can tell: standard errors of its figures."""

    n: int
    n_effective: float  # independent values that tell as much about the mean
    runs: int
    dof: float  # of the errors
    relative: dict[str, float | None]  # standard errors of `FIGURES`; None where not known
    untested: frozenset[str]  # percentiles that so few values do not reach

    def detectable(self, name: str, more: float = 0.0) -> float | None:
        """Relative error of a prediction that a 5 % test finds in 80 % of cases.

        more [1] is what the prediction itself is uncertain by.
        """
        error = self.relative[name]
        if error is None or name in self.untested:
            return None
        wide = float(t.isf(LEVEL / 2, self.dof) + t.isf(1.0 - POWER, self.dof))
        return float(np.expm1(wide * np.hypot(error, more)))

    def interval(self, name: str, found: float | None, more: float = 0.0) -> list[float] | None:
        """95 % interval of predicted over measured, less 1, that came out as found."""
        error = self.relative[name]
        if error is None or name in self.untested or found is None or found <= -1.0:
            return None
        wide = float(t.isf(LEVEL / 2, self.dof) * np.hypot(error, more))
        return [float(np.expm1(np.log1p(found) + end)) for end in (-wide, wide)]


def measured_errors(
    measured: ArrayLike,
    steps: ArrayLike | None = None,
    runs: Sequence[Hashable] | NDArray[Any] | None = None,
) -> MeasuredErrors:
    """Find what a measured sample can tell, from resamples of its runs or of one run's values.

    Of one run blocks are drawn where values remember each other; otherwise, and of fewer than
    `LEAST_STEPS`, values, and the variance found is made n/n_effective times as large. p95
    and p99 are not tested where a 95 % interval of the share below them leaves the sample
    (Woodruff 1952): below some 75 values.
    """
    x = _sample(measured, "measured")
    n = x.size
    of, n_effective = _runs(runs, n), effective_n(x, steps, runs)
    n_runs = int(np.unique(of).size)
    known: dict[str, float | None] = dict.fromkeys(FIGURES)
    units = float(n_runs) if n_runs > 1 else n_effective
    if n < 2 or units <= 1.0:
        return MeasuredErrors(n, n_effective, n_runs, 0.0, known, frozenset())
    order = np.lexsort((_steps(steps, n), of))
    if n_runs > 1:
        unit = np.unique(of[order], return_inverse=True)[1]
        sample = Sample(x[order], unit, np.arange(n), "runs")
    else:
        sample = Sample(x[order], np.arange(n), np.arange(n), "steps", 1.0 - n_effective / n)
    if n_runs == 1 and n >= LEAST_STEPS and n_effective < n:
        sample = in_blocks(sample, sample, None)[0]
        units = min(units, float(sample.n_units))
    n_resamples = int(min(N_BOOTSTRAP, max(50, _BOOTSTRAP_CELLS // n)))
    found = resample(sample, np.random.default_rng(_SEED), n_resamples)
    for k, name in enumerate(FIGURES):
        if found.own[k] > 0.0:
            known[name] = float(found.deviations[:, k].std() / found.own[k])
    return MeasuredErrors(n, n_effective, n_runs, units - 1.0, known, found.unreached())


def compare_to(measured: ArrayLike, predicted: ArrayLike, errors: MeasuredErrors) -> dict[str, Any]:
    """Compare, see `compare`, with errors of the measured sample that are known."""
    x, y = _sample(measured, "measured"), _sample(predicted, "predicted")
    return {
        "n_measured": errors.n,
        "n_effective": errors.n_effective,
        "ks": ks_distance(x, y),
        "ks_critical_5pct": ks_critical(x.size),
        "ks_aligned": _ks_aligned(x, y),
        "wasserstein": float(wasserstein_distance(x, y)),
        "mean_error": _relative(float(y.mean()), float(x.mean())),
        **{
            f"p{percentile}_error": _relative(
                float(np.quantile(y, percentile / 100.0)), float(np.quantile(x, percentile / 100.0))
            )
            for percentile in (50, 95, 99)
        },
        "p95_error_same_n": _relative(
            expected_quantile(y, 0.95, x.size), float(np.quantile(x, 0.95))
        ),
        "p95_measured_se": errors.relative["p95"],
        "cv_ratio": _cv_ratio(y, x),
    }


def floor(training: ArrayLike, measured: ArrayLike) -> dict[str, Any]:
    """Tell how far two parts of one measurement lie apart: no model fitted on one can do better.

    ``ks_floor``, two-sample; ``p95_floor`` and ``mean_floor``, the size of the relative difference
    to the measured part; ``cv_ratio_floor`` (training / measured).
    """
    x, y = _sample(measured, "measured"), _sample(training, "training")
    p95 = _relative(float(np.quantile(y, 0.95)), float(np.quantile(x, 0.95)))
    mean = _relative(float(y.mean()), float(x.mean()))
    return {
        "ks_floor": ks_statistic(x, y),
        "p95_floor": None if p95 is None else abs(p95),
        "mean_floor": None if mean is None else abs(mean),
        "cv_ratio_floor": _cv_ratio(y, x),
    }


def expected_quantile(values: ArrayLike, p: float, n: int) -> float:
    """Mean quantile of samples of n of these values, in numpy's linear definition.

    The k-th smallest of n values is the law's quantile at a Beta(k, n + 1 - k) draw. With few
    values the sample p95 lies well below the law's: for 11 normal ones at 1.32 standard deviations,
    not 1.64, so that even the true distribution seems too slow by their difference. David and
    Nagaraja, Order Statistics (2003), section 2.1.
    """
    x = np.sort(_sample(values, "values"))
    at = p * (n - 1)
    low = min(int(at), max(n - 2, 0))
    grid = np.linspace(0.0, 1.0, x.size + 1)

    def order_statistic(k: int) -> float:
        return float(np.diff(betainc(k, n + 1 - k, grid)) @ x)

    if n == 1:
        return float(x.mean())
    share = at - low
    return (1.0 - share) * order_statistic(low + 1) + share * order_statistic(low + 2)


def bootstrap_p_value(ks: float, null: ArrayLike) -> float:
    """Chance of a statistic at least this large where the model is true, from B repetitions.

    ``(1 + #{null >= ks}) / (1 + B)``: never 0, and valid for any B. Davison and Hinkley, Bootstrap
    Methods and their Application (1997), equation 4.11.

    Examples
    --------
    >>> bootstrap_p_value(0.3, [0.1, 0.2, 0.3])
    0.5
    """
    values = np.asarray(null, dtype=np.float64).ravel()
    return float((1 + np.count_nonzero(values >= ks)) / (1 + values.size))


def ks_statistic(first: ArrayLike, second: ArrayLike) -> float:
    """Largest distance between the distribution functions of two samples (Kolmogorov-Smirnov).

    Examples
    --------
    >>> ks_statistic([1.0, 2.0], [2.0, 3.0])
    0.5
    """
    return ks_distance(_sample(first, "first"), _sample(second, "second"))


def ks_critical(n: int, level: float = 0.05) -> float:
    """Distance that n independent values exceed with this probability if they follow it."""
    return float(kstwo.ppf(1.0 - level, n))


def effective_n(
    values: ArrayLike,
    steps: ArrayLike | None = None,
    runs: Sequence[Hashable] | NDArray[Any] | None = None,
) -> float:
    """Count how many independent values tell as much about the mean as these, 1 to n.

    Steps may have gaps, and are 0..n-1 where None; only pairs of one run can be correlated. ``n /
    (1 + sum over pairs i != j of rho(|t_i - t_j|) / n)``, which is n / (1 + 2 sum rho) for
    consecutive steps. rho comes from the products of pairs at each distance in step number (in
    units of the typical gap), corrected for the estimated mean, through a smooth curve ``share *
    exp(-distance / memory)``: white noise plus something slow. It is taken for 0 where white noise
    would show as much in one of ten to twenty cases; among few values a weak correlation cannot be
    seen, and n_effective is then an upper bound.
    """
    x = _sample(values, "values")
    n = x.size
    deviation = x - x.mean()
    variance = float(np.mean(deviation**2))
    if n < 4 or variance <= (1e-12 * max(1e-300, float(np.abs(x).max()))) ** 2:
        return float(n)
    products, pairs = _pair_products(deviation, _steps(steps, n), _runs(runs, n))
    known = pairs > 0
    lag = np.flatnonzero(known).astype(np.float64)
    if not lag.size:
        return float(n)
    pairs = pairs[known]
    raw = products[known] / pairs / variance
    return n / _inflation(raw, pairs, lag, n)


def _inflation(raw: Array, pairs: Array, lag: Array, n: int) -> float:
    """How many times more the mean varies than with independent values.

    ``raw`` [lag] are mean products over the variance, ``pairs`` [lag] how many each holds.
    """
    inflation = 1.0
    for _ in range(_ROUNDS):
        # deviations are from the sample's own mean, which takes its variance out of all of them
        lost = min(0.5, inflation / n)
        rho = raw * (1.0 - lost) + lost
        curve = _smooth(rho, pairs, lag)
        before, inflation = inflation, float(1.0 + 2.0 * (pairs @ curve) / n)
        if abs(inflation - before) < 1e-3 * before:
            break
    return float(np.clip(inflation, 1.0, n))


def _smooth(rho: Array, pairs: Array, lag: Array) -> Array:
    """Fit share * exp(-lag / memory) to correlations [lag]; zero where chance would do."""
    shape = np.exp(-lag / _MEMORIES[:, None])
    # a correlation of white noise has the variance 1 / pairs
    score, size = shape @ (pairs * rho), shape**2 @ pairs
    gain = np.maximum(score, 0.0) ** 2 / size
    best = int(gain.argmax())
    # one-sided, and as good as an independent test for each factor of four in the lags
    n_tests = max(1.0, 0.5 * float(np.log2(lag.size)))
    if gain[best] < ndtri(1.0 - _LEVEL / n_tests) ** 2:
        return np.zeros(lag.size)
    share = min(1.0, float(score[best] / size[best]))
    return np.asarray(share * shape[best])


def _pair_products(deviation: Array, steps: Index, runs: Index) -> tuple[Array, Array]:
    """Sum the products of pairs of one run [lag], and count them, lags in typical gaps.

    Lag 0 holds what lies nearer than half a gap. Beyond half of the longest run no lag is looked
    at: there the estimated mean has taken what could be seen.
    """
    order = np.lexsort((steps, runs))
    deviation, gaps, ends = deviation[order], np.diff(steps[order]), np.diff(runs[order]) != 0
    inside = gaps[~ends & (gaps > 0)]
    gap = float(np.median(inside)) if inside.size else 1.0
    longest = int(np.bincount(runs).max())
    n_lags = max(2, min(longest // 2, _MOST_LAGS) + 1)
    # one grid for all: runs, and values too far apart to pair up, as far apart as the lags reach
    reached = np.rint(np.cumsum(np.where(ends, 0, gaps)) / gap).astype(np.int64)
    moves = np.minimum(np.diff(np.r_[0, reached]), n_lags)
    moves[ends] = n_lags
    cell = np.r_[0, np.cumsum(moves)]
    total: Array = np.bincount(cell, deviation).astype(np.float64)
    count: Array = np.bincount(cell).astype(np.float64)
    products = _autocorrelate(total, n_lags)
    pairs = np.asarray(np.rint(_autocorrelate(count, n_lags)))
    # within a cell: each pair once, and no value with itself
    products[0] = 0.5 * (products[0] - deviation @ deviation)
    pairs[0] = 0.5 * (pairs[0] - deviation.size)
    return products, pairs


def _autocorrelate(values: Array, n_lags: int) -> Array:
    """Sum the products of values a lag apart [lag]."""
    found = correlate(values, values, method="fft")[values.size - 1 :][:n_lags]
    return np.pad(found, (0, n_lags - found.size))


def _ks_aligned(x: Array, y: Array) -> float | None:
    """KS distance after both were divided by their median."""
    middle_x, middle_y = float(np.median(x)), float(np.median(y))
    if middle_x == 0.0 or middle_y == 0.0:
        return None
    # in single precision equal shapes stay equal, whatever the rounding of the scale
    return ks_statistic(np.float32(x / middle_x), np.float32(y / middle_y))


def _cv_ratio(y: Array, x: Array) -> float | None:
    """Coefficient of variation of y over that of x."""
    cv_y, cv_x = _cv(y), _cv(x)
    return None if cv_x is None or cv_y is None or cv_x == 0.0 else cv_y / cv_x


def _cv(values: Array) -> float | None:
    """Coefficient of variation; None for fewer than two values or mean zero, 0 if constant."""
    mean = float(values.mean())
    if values.size < 2 or mean == 0.0:
        return None
    # the rounding of a mean is no spread
    return 0.0 if np.ptp(values) == 0.0 else float(values.std(ddof=1) / abs(mean))


def _relative(found: float, wanted: float) -> float | None:
    """Return found / wanted - 1, None where nothing can be relative to it."""
    return found / wanted - 1.0 if wanted != 0.0 else None


def _sample(values: ArrayLike, name: str) -> Array:
    """Return the values as a vector, refusing what has no distribution."""
    sample = np.asarray(values, dtype=np.float64).ravel()
    if not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"{name}: expected at least one value, all of them finite")
    return sample


def _steps(steps: ArrayLike | None, n: int) -> Index:
    """Return step numbers [n]."""
    if steps is None:
        return np.arange(n)
    numbers = np.asarray(steps).ravel().astype(np.int64)
    if numbers.size != n:
        raise ValueError(f"steps: {numbers.size} numbers for {n} values")
    return numbers


def _runs(runs: Sequence[Hashable] | NDArray[Any] | None, n: int) -> Index:
    """Return a number per run [n]."""
    if runs is None:
        return np.zeros(n, dtype=np.int64)
    labels = np.asarray(runs).ravel()
    if labels.size != n:
        raise ValueError(f"runs: {labels.size} labels for {n} values")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
