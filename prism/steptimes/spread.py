"""The spread of step times by time scale: clock, white, slow drift, run effect.

The variance of means over b steps is `V(b) = s_c^2/b^2 + s_w^2/b + s_d^2 h(b, tau) + s_run^2`: an
error of the clock that the next step takes back, white noise, an AR(1) drift with its time in
seconds, and what a whole run differs by. Fitted by weighted least squares, all parts at least 0,
with intervals from simulated repetitions. Left out: stalls and work by step, taken out before.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d
from scipy.optimize import nnls
from scipy.signal import lfilter

Array = NDArray[np.float64]

N_REPEATS = 200  # simulated repetitions behind an interval
LEVEL = 0.9  # of intervals
MIN_BLOCKS = 4  # of a run behind a variance of block means
MIN_STEPS = 60  # of a run, below which a slow drift cannot be told from white noise
_TAUS = 24  # memories that are tried, from some steps to twice the run
_CELLS = 20_000_000  # simulated steps at most
WINDOW = 101  # steps of the neighbourhood a step is held against, and work is smoothed over
_GRID = 1.3  # of memories, about: what an interval is at least wide by
_ROUNDS = 4  # of weighting by the fitted variances; settles in two or three


@dataclass(frozen=True)
class Spread:
    """Relative spread of steps by time scale; 0 is the step at the mean.

    Attributes
    ----------
    clock, white, drift, run : float
        Standard deviations [1]: of the clock's error, of a single step's own noise, of the slow
        drift, between runs.
    tau_s : float
        Memory of the drift [s]; 0 without drift.
    """

    clock: float = 0.0
    white: float = 0.0
    drift: float = 0.0
    tau_s: float = 0.0
    run: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Figures by name."""
        return asdict(self)


@dataclass(frozen=True)
class BlockVariances:
    """Measured variances of block means.

    Attributes
    ----------
    length : int64 [row]
        Steps of a block.
    n_blocks : int64 [row]
        Blocks of a run.
    within : float64 [row]
        Variance of the block means of a run around their mean, averaged over runs.
    between : float
        Variance of the means of runs; not-a-number for one run.
    n_runs, n_steps : int
        Runs, and steps of a run.
    """

    length: NDArray[np.int64]
    n_blocks: NDArray[np.int64]
    within: Array
    between: float
    n_runs: int
    n_steps: int


def block_lengths(n: int) -> NDArray[np.int64]:
    """Lengths of blocks looked at: about two for each doubling, at least four blocks of a run."""
    longest = max(1, n // MIN_BLOCKS)
    return np.unique(np.rint(2.0 ** np.arange(0.0, np.log2(longest) + 1e-9, 0.5)).astype(np.int64))


def block_variances(body: Array, profile_share: float | None = None) -> BlockVariances:
    """Variances of block means of runs.

    Parameters
    ----------
    body : float64 [position, run]
        Relative deviations; not-a-number where there is none.
    profile_share : float, optional
        How much of each position's mean over runs has been taken out as work by step, which takes
        its part of the runs' own noise with it; what is slow is taken out whole.
    """
    n, n_runs = body.shape
    lengths = block_lengths(n)
    known = np.isfinite(body)
    sums = np.vstack([np.zeros(n_runs), np.cumsum(np.where(known, body, 0.0), axis=0)])
    counts = np.vstack([np.zeros(n_runs), np.cumsum(known, axis=0)])
    within = np.empty(lengths.size)
    for k, b in enumerate(lengths):
        edges = np.arange(n // b + 1) * b
        total, count = np.diff(sums[edges], axis=0), np.diff(counts[edges], axis=0)
        full = count >= 0.5 * b
        means = np.where(full, total / np.maximum(count, 1), np.nan)
        with_two = full.sum(axis=0) >= 2
        variances = np.nanvar(means[:, with_two], axis=0, ddof=1)
        within[k] = variances.mean() if variances.size else np.nan
    run_means = sums[-1] / np.maximum(counts[-1], 1)
    between = float(run_means.var(ddof=1)) if n_runs > 1 else np.nan
    if profile_share is not None:
        share = profile_share + (1.0 - profile_share) * np.minimum(1.0, lengths / WINDOW)
        within = within / (1.0 - (2.0 * share - share**2) / n_runs)
    seen = np.isfinite(within)  # long blocks may be whole in no run
    return BlockVariances(
        lengths[seen], (n // lengths)[seen], within[seen], between, n_runs, n
    )  # fmt: skip


def drift_mean_variance(length: NDArray[np.int64] | int, rate: float) -> Array:
    """Variance of the mean of b values of a unit AR(1) series, `rate` = step / tau.

    Notes
    -----
    (n (1 + r)/(1 - r) - 2 r (1 - r^n)/(1 - r)^2) / n^2 with r = exp(-rate).
    """
    n = np.asarray(length, dtype=np.float64)
    if rate <= 0.0:
        return np.ones_like(n)
    r, gap = np.exp(-rate), -np.expm1(-rate)
    exact = (n * (1.0 + r) / gap + 2.0 * r * np.expm1(-rate * n) / gap**2) / n**2
    slow = 1.0 - rate * n / 3.0 + (rate * n) ** 2 / 12.0  # where the difference loses digits
    return np.asarray(np.where(rate * n < 1e-4, slow, exact))


def model_variances(spread: Spread, length: NDArray[np.int64] | int, step_s: float) -> Array:
    """V(b) of a model [block length], the run effect left out."""
    b = np.asarray(length, dtype=np.float64)
    out = spread.clock**2 / b**2 + spread.white**2 / b
    if spread.drift > 0.0:
        out = out + spread.drift**2 * drift_mean_variance(b.astype(np.int64), step_s / spread.tau_s)
    return np.asarray(out)


def fit_spread(blocks: BlockVariances, step_s: float) -> Spread:
    """Find the parts that give the measured variances.

    Parameters
    ----------
    blocks : BlockVariances
    step_s : float
        Mean step [s].

    Notes
    -----
    The variance of m block means around their mean is m/(m - 1) (V(b) - V(m b)), the run effect
    cancels; that of run means is V(n) + s_run^2. Each is weighted by the inverse of its own error.
    """
    b, m = blocks.length, blocks.n_blocks
    dof = (m - 1) * blocks.n_runs
    taus: list[float] = [0.0]
    if blocks.n_steps >= MIN_STEPS:
        taus += list(step_s * np.geomspace(4.0, 2.0 * blocks.n_steps, _TAUS))
    best, best_cost = Spread(), np.inf
    for tau in taus:
        parts = [1.0 / b**2.0, 1.0 / b.astype(np.float64)]
        ends = [1.0 / (m * b) ** 2.0, 1.0 / (m * b)]
        last = [1.0 / blocks.n_steps**2.0, 1.0 / blocks.n_steps]
        if tau > 0.0:
            parts.append(drift_mean_variance(b, step_s / tau))
            ends.append(drift_mean_variance(m * b, step_s / tau))
            last.append(float(drift_mean_variance(blocks.n_steps, step_s / tau)))
        design = (np.stack(parts) - np.stack(ends)).T * (m / (m - 1.0))[:, None]
        wanted, errors = blocks.within, np.sqrt(2.0 / dof)
        if blocks.n_runs > 1:
            design = np.column_stack([design, np.zeros(b.size)])
            design = np.vstack([design, [*last, 1.0]])
            wanted = np.append(wanted, blocks.between)
            errors = np.append(errors, np.sqrt(2.0 / (blocks.n_runs - 1)))
        found, cost = _weighted(design, wanted, errors)
        # one more memory to choose must be worth it
        cost += 0.0 if tau == 0.0 else _PENALTY
        if cost < best_cost:
            best, best_cost = _as_spread(found, tau, blocks.n_runs > 1), cost
    return best


_PENALTY = 2.0  # in squared errors: what a drift that is not there gains by chance


def _weighted(design: Array, wanted: Array, errors: Array) -> tuple[Array, float]:
    """Least squares with parts at least 0, errors relative to the fitted values."""
    size = np.maximum(wanted, 1e-300)
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        weight = 1.0 / (errors * size)
        found, _rest = nnls(design * weight[:, None], wanted * weight)
        fitted = design @ found
        size = np.maximum(fitted, 1e-6 * float(fitted.max(initial=0.0)) + 1e-300)
    # likelihood of mean squares, up to a constant: wishart's dof (log v + s / v)
    cost = float((2.0 / errors**2) @ (np.log(size) + wanted / size)) / 1.0
    return found, cost


def _as_spread(found: Array, tau: float, several: bool) -> Spread:
    sd = np.sqrt(found)
    drift = float(sd[2]) if tau > 0.0 else 0.0
    run = float(sd[-1]) if several else 0.0
    return Spread(float(sd[0]), float(sd[1]), drift, tau if drift > 0.0 else 0.0, run)


def simulate_body(
    spread: Spread, shape: tuple[int, int], step_s: float, rng: np.random.Generator
) -> Array:
    """Draw relative deviations of steps, [position, run]: all parts normal."""
    n, n_runs = shape
    out = spread.white * rng.standard_normal(shape)
    if spread.clock > 0.0:
        # the clock's error at each boundary enters one step and leaves the next
        edge = rng.standard_normal((n + 1, n_runs))
        out += spread.clock / np.sqrt(2.0) * np.diff(edge, axis=0)
    if spread.drift > 0.0:
        out += spread.drift * ar1(shape, step_s / spread.tau_s, rng)
    return np.asarray(out + spread.run * rng.standard_normal(n_runs))


def ar1(shape: tuple[int, int], rate: float, rng: np.random.Generator) -> Array:
    """Draw unit AR(1) series [position, run], stationary from the first value on."""
    r = float(np.exp(-rate))
    shocks = rng.standard_normal(shape)
    shocks[1:] *= np.sqrt(-np.expm1(-2.0 * rate))
    return np.asarray(lfilter([1.0], [1.0, -r], shocks, axis=0))


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
            smooth = uniform_filter1d(mean, min(WINDOW, mean.size), mode="mirror")
            body = body - (smooth + profile_share * (mean - smooth))[:, None]
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


__all__ = [
    "BlockVariances", "Spread", "ar1", "block_variances", "fit_spread", "intervals",
    "model_variances", "repeat_fit", "replace", "simulate_body",
]  # fmt: skip
