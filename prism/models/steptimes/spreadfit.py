"""Fit the spread by time scale to variances of block means; how well it is known.

Weighted least squares, all parts at least 0. A drift counts where it makes the variances likelier
than noise without one does in all but 5 % of simulated series of the same size; where it does not,
the largest that the variances leave open is found too. Intervals come from simulated repetitions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from prism.models.steptimes.spread import (
    BlockVariances,
    Spread,
    block_variances,
    common_part,
    drift_mean_variance,
    simulate_body,
)

Array = NDArray[np.float64]

N_REPEATS = 200  # simulated repetitions behind an interval
LEVEL = 0.9  # of intervals
FALSE_DRIFT = 0.05  # chance of finding a drift where there is none
MIN_STEPS = 60  # of a run, below which a slow drift is not identifiable from white noise
APART = 0.25  # of a run: a drift with a longer memory is confounded with what runs differ by
_TAUS = 24  # memories that are tried, from some steps to twice the run
_CELLS = 20_000_000  # simulated steps at most
_GRID = 1.3  # of memories, about: what an interval is at least wide by
_ROUNDS = 4  # of weighting by the fitted variances; settles in two or three
_NULLS = 500  # simulated series without drift: 5 % to 1 %
_NULL_CELLS = 2**15  # steps of one of them at most; what is found by chance hardly changes beyond
_NULL_RUNS = 16  # of one of them at most, for the same reason
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)  # of the clock in a step's variance, in these series
_HALVINGS = 12  # of the interval in which a bound is looked for: to 0.1 %


@dataclass(frozen=True)
class _Laws:
    """What parts of unit variance give for each measured variance.

    Attributes
    ----------
    taus : float64 [memory]
        Memories that are tried [step].
    flat : float64 [row, part]
        Clock, white and, of several runs, the run effect.
    drift : float64 [memory, row]
    """

    taus: Array
    flat: Array
    drift: Array


def _laws(blocks: BlockVariances) -> _Laws:
    """Lay out the parts for the sizes of these blocks."""
    return _laws_of(
        tuple(map(int, blocks.length)), tuple(map(int, blocks.n_blocks)), blocks.n_runs,
        blocks.n_steps,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _laws_of(
    length: tuple[int, ...], n_blocks: tuple[int, ...], n_runs: int, n_steps: int
) -> _Laws:
    """As `_laws`, once for each size.

    Notes
    -----
    The variance of m block means around their mean is m/(m - 1) (V(b) - V(m b)), the run effect
    cancels; that of run means is V(n) + s_run^2. Each is weighted by the inverse of its own error.
    """
    b, m = np.array(length), np.array(n_blocks)
    taus = np.geomspace(4.0, 2.0 * n_steps, _TAUS) if n_steps >= MIN_STEPS else np.empty(0)

    def variances(n: NDArray[np.int64]) -> Array:
        """V(n) of unit clock, white and drifts, [part, row]."""
        slow = [drift_mean_variance(n, 1.0 / tau) for tau in taus]
        return np.array([1.0 / n**2.0, 1.0 / n, *slow])

    rows = (variances(b) - variances(m * b)) * m / (m - 1.0)
    flat, drift = rows[:2], rows[2:]
    if n_runs > 1:
        last = variances(np.array([n_steps]))
        flat, drift = np.hstack([flat, last[:2]]), np.hstack([drift, last[2:]])
        flat = np.vstack([flat, np.append(np.zeros(b.size), 1.0)])
    return _Laws(taus, flat.T, drift)


@dataclass(frozen=True)
class _Found:
    """Variances of the parts [part], the drift last, and how unlikely they make the measured."""

    parts: Array
    tau: float
    cost: float

    def spread(self, step_s: float, several: bool) -> Spread:
        """Give standard deviations by name."""
        sd = np.sqrt(self.parts)
        drift = float(sd[-1]) if self.tau > 0.0 else 0.0
        return Spread(
            float(sd[0]), float(sd[1]), drift, self.tau * step_s if drift > 0.0 else 0.0,
            float(sd[2]) if several else 0.0,
        )  # fmt: skip


def _measured(blocks: BlockVariances) -> tuple[Array, Array]:
    """Variances of block means, and of run means if there are several; relative errors [row]."""
    wanted, dof = blocks.within, blocks.dof
    if blocks.n_runs > 1:
        wanted, dof = np.append(wanted, blocks.between), np.append(dof, blocks.n_runs - 1.0)
    return wanted, np.sqrt(2.0 / dof)


def _weighted(design: Array, wanted: Array, errors: Array, given: Array) -> tuple[Array, float]:
    """Least squares with parts at least 0, errors relative to the fitted values.

    `given` [row] is there whatever the parts are.
    """
    size = np.maximum(wanted, 1e-300)
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        weight = 1.0 / (errors * size)
        found, _rest = nnls(design * weight[:, None], (wanted - given) * weight)
        fitted = design @ found + given
        size = np.maximum(fitted, 1e-6 * float(fitted.max(initial=0.0)) + 1e-300)
    # likelihood of mean squares, up to a constant: wishart's dof (log v + s / v)
    return found, float((2.0 / errors**2) @ (np.log(size) + wanted / size))


def _candidates(blocks: BlockVariances) -> tuple[_Found, _Found]:
    """Fit without drift, and with the drift that makes the variances most likely."""
    laws, (wanted, errors) = _laws(blocks), _measured(blocks)
    none = np.zeros(wanted.size)
    parts, cost = _weighted(laws.flat, wanted, errors, none)
    flat = best = _Found(parts, 0.0, cost)
    for tau, row in zip(laws.taus, laws.drift, strict=True):
        parts, cost = _weighted(np.column_stack([laws.flat, row]), wanted, errors, none)
        if cost < best.cost and parts[-1] > 0.0:
            best = _Found(parts, float(tau), cost)
    return flat, best


def fit_spread(blocks: BlockVariances, step_s: float) -> Spread:
    """Find the parts that give the measured variances.

    Notes
    -----
    Variances of blocks of different lengths come from the same steps: their likelihood counts what
    is seen once several times, so how much of it a drift must gain to count is simulated.
    """
    flat, best = _candidates(blocks)
    if flat.cost - best.cost <= _least_gain(flat, best, blocks):
        best = flat
    return best.spread(step_s, blocks.n_runs > 1)


def own_noise(blocks: BlockVariances) -> tuple[float, float]:
    """Find the clock's error and a step's own noise [1] beside the most likely drift.

    Whether that drift counts makes next to no difference to them.
    """
    best = _candidates(blocks)[1].spread(1.0, blocks.n_runs > 1)
    return best.clock, best.white


def _least_gain(flat: _Found, best: _Found, blocks: BlockVariances) -> float:
    """Gain that noise without drift stays below, of series like these; 0 where none is gained."""
    if best is flat:
        return 0.0
    size = float(flat.parts[0] + flat.parts[1])
    share = float(flat.parts[0]) / size if size > 0.0 else 0.0
    return critical_gain(blocks.n_steps, blocks.n_runs, share)


def critical_gain(n_steps: int, n_runs: int, clock_share: float) -> float:
    """Gain of likelihood by a drift that all but 5 % of series without one stay below."""
    n = round(2.0 ** (round(4.0 * math.log2(min(n_steps, _NULL_CELLS))) / 4.0))
    runs = min(n_runs, _NULL_RUNS, max(1, _NULL_CELLS // n))
    share = max(s for s in _SHARES if s <= max(clock_share, 0.0))
    return _critical_gain(n, runs, share)


@lru_cache(maxsize=256)
def _critical_gain(n_steps: int, n_runs: int, clock_share: float) -> float:
    rng = np.random.default_rng([n_steps, n_runs])
    noise = Spread(clock=math.sqrt(clock_share), white=math.sqrt(1.0 - clock_share))
    gains = []
    for _ in range(_NULLS):
        blocks = block_variances(simulate_body(noise, (n_steps, n_runs), 1.0, rng))
        flat, best = _candidates(blocks)
        gains.append(flat.cost - best.cost)
    return float(np.quantile(gains, 1.0 - FALSE_DRIFT))


def allowed_drift(blocks: BlockVariances, step_s: float) -> list[Spread]:
    """Find the largest drift that the variances leave open, for each memory [memory].

    Notes
    -----
    What makes the variances less likely than the best fit by the gain that chance stays below is
    ruled out: 95 %, of one side.
    """
    laws, (wanted, errors) = _laws(blocks), _measured(blocks)
    flat, best = _candidates(blocks)
    size = max(float(flat.parts[0] + flat.parts[1]), 1e-300)
    share = float(flat.parts[0]) / size
    most = best.cost + critical_gain(blocks.n_steps, blocks.n_runs, share)
    out = []
    for tau, row in zip(laws.taus, laws.drift, strict=True):
        if tau > APART * blocks.n_steps:
            break

        def at(variance: float, row: Array = row, tau: float = float(tau)) -> _Found:
            parts, cost = _weighted(laws.flat, wanted, errors, variance * row)
            return _Found(np.append(parts, variance), tau, cost)

        low, high = 0.0, 1e-6 * size
        while high < 1e3 * size and at(high).cost <= most:
            low, high = high, 4.0 * high
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if at(middle).cost <= most else (low, middle)
        out.append(at(low).spread(step_s, blocks.n_runs > 1))
    return out


def repeat_fit(
    spread: Spread, shape: tuple[int, int], step_s: float, profile_share: float | None, seed: int,
    repeats: int = N_REPEATS,
) -> list[Spread]:  # fmt: skip
    """Fits of simulated measurements of the same shape, when `spread` is the truth."""
    rng = np.random.default_rng(seed)
    n = max(20, min(repeats, _CELLS // (shape[0] * shape[1])))
    out = []
    for _ in range(n):
        body = simulate_body(spread, shape, step_s, rng)
        if profile_share is not None:
            mean = body.mean(axis=1) - body.mean()
            body = body - common_part(mean, profile_share)[:, None]
        out.append(fit_spread(block_variances(body, profile_share), step_s))
    return out


def intervals(spread: Spread, repeats: Sequence[Spread]) -> dict[str, tuple[float, float]]:
    """90 % interval of each part.

    Notes
    -----
    Basic bootstrap of the logarithm where the part is there: theta^2 / q. Where it was not found,
    up to what repetitions of its absence show.
    """
    out = {}
    tail = 0.5 * (1.0 - LEVEL)
    for name, value in spread.as_dict().items():
        again = np.array([getattr(r, name) for r in repeats])
        low, high = np.quantile(again, [tail, 1.0 - tail])
        if value > 0.0 and low > 0.0:
            edge = math.sqrt(_GRID) if name == "tau_s" else 1.0
            out[name] = (value**2 / float(high) / edge, value**2 / float(low) * edge)
        else:
            out[name] = (0.0, max(float(high), 2.0 * value - float(low)))
    return out
