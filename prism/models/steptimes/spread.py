"""The spread of step times by time scale: clock, white, slow drift, run effect.

The variance of means over b steps is `V(b) = s_c^2/b^2 + s_w^2/b + s_d^2 h(b, tau) + s_run^2`: an
error of the clock that the next step takes back, white noise, an AR(1) drift with its time in
seconds, and what a whole run differs by. The distribution, its measurement and its simulation. Left
out: the fit (`prism.models.steptimes.spreadfit`); stalls and work by step, taken out before.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.signal import lfilter, savgol_filter

Array = NDArray[np.float64]

MIN_BLOCKS = 4  # of a run behind a variance of block means
WINDOW = 101  # steps of the neighbourhood a step is held against, and work is smoothed over


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
    dof : float64 [row]
        Independent squares behind each of these.
    between : float
        Variance of the means of runs; not-a-number for one run.
    n_runs, n_steps : int
        Runs, and steps of a run.
    """

    length: NDArray[np.int64]
    n_blocks: NDArray[np.int64]
    within: Array
    dof: Array
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

    Notes
    -----
    With the operator S that makes the work from the mean over R runs, a run keeps x_r - S x_mean:
    of the variance of its block means 1 - (2 a - c)/R, a and c the shares that S and S'S keep of a
    block's mean of white noise.
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
    kept = np.ones(lengths.size)
    if profile_share is not None:
        once, twice = (_smoothed_share(lengths, min(WINDOW, n), power) for power in (1, 2))
        p, q = profile_share, 1.0 - profile_share
        kept -= (2.0 * (p + q * once) - (p**2 + 2.0 * p * q * once + q**2 * twice)) / n_runs
    seen = np.isfinite(within)  # long blocks may be whole in no run
    blocks = n // lengths
    dof = (blocks - 1) * n_runs * kept
    return BlockVariances(
        lengths[seen], blocks[seen], (within / kept)[seen], dof[seen], between, n_runs, n
    )  # fmt: skip


def _smoothed_share(lengths: NDArray[np.int64], window: int, power: int) -> Array:
    """Share of the variance of block means of white noise that smoothing keeps [length].

    Notes
    -----
    (1/b) sum over |d| < b of (b - |d|) k(d): for once, k is the window, for twice the window with
    itself.
    """
    kernel = np.full(window, 1.0 / window)
    if power == 2:
        kernel = np.convolve(kernel, kernel)
    d = np.abs(np.arange(kernel.size) - kernel.size // 2)
    return np.array([float(kernel @ np.maximum(0.0, 1.0 - d / b)) for b in lengths])


def common_part(mean: Array, share: float, size: float = np.inf) -> Array:
    """Split what runs have in common from the noise of their mean [position].

    Parameters
    ----------
    mean : float64 [position]
        Over runs.
    """
    window = min(WINDOW, mean.size - 1 + mean.size % 2)  # odd
    near = mean
    if np.isfinite(size):
        middle = median_filter(mean, window, mode="mirror")
        near = np.clip(mean, middle - size, middle + size)
    smooth = savgol_filter(near, window, min(1, window - 1))  # a line at the ends, else the mean
    return np.asarray(smooth + share * (mean - smooth))


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
