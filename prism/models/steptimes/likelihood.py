"""The exact likelihood of step times: a level for each run, an AR(1) drift, white noise.

The precision of an AR(1) series is tridiagonal, and so it stays when white noise is observed on
top: likelihood, levels and drift take O(n) (Rue and Held, Gaussian Markov Random Fields, 2005,
ch. 2). Steps that are missing have no observation; gaps are longer steps of the drift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dpttrf, dpttrs
from scipy.optimize import minimize

from prism.common.arrays import Array
from prism.models.steptimes.spread import Spread, simulate_body

N_REPEATS = 100  # simulated repetitions behind an interval
LEVEL = 0.9  # of intervals
_CELLS = 3_000_000  # simulated steps at most, some seconds
_LEAST_REPEATS = 20  # however long the series is
_RATIOS = (1e-3, 0.03, 1.0)  # drift over white variance, and
_TAUS = 6  # memories from one step to the run's length, where a search may begin
_SHARES = np.append(0.0, 2.0 ** np.arange(-4.0, 4.25, 0.25))  # of levels, over a first estimate
_NO_DRIFT = 1e-8  # of the white variance
_FEW_MISSING = 0.01  # of the steps, whose lack widens an interval by half as much: not simulated


@dataclass(frozen=True)
class Observed:
    """Runs as the likelihood takes them."""

    # [position, run] relative deviations, 0 where there is none; 1 where there is one, else 0
    y: Array
    known: Array
    gap_s: Array  # [position - 1] time from each position to the next [s]
    # whether the runs' mean was taken out at each position: a degree of freedom of each
    centred: bool

    @classmethod
    def of(cls, body: Array, elapsed_s: Array, by_step: bool = False) -> "Observed":
        """Take runs; with `by_step` what they have in common at a step is not noise."""
        some = np.isfinite(body)
        if by_step:
            several = (some.sum(axis=1) > 1)[:, None]
            mean = np.nansum(body, axis=1, keepdims=True) / np.maximum(some.sum(axis=1), 1)[:, None]
            body, some = body - mean, some & several
        y = np.where(some, body, 0.0)[:, some.any(axis=0)]
        known = some[:, some.any(axis=0)].astype(np.float64)
        return cls(np.asfortranarray(y), np.asfortranarray(known), np.diff(elapsed_s), by_step)

    @property
    def dof(self) -> float:
        """Values less the means that are estimated from them."""
        n = float(self.known.sum())
        return n * self.kept if self.centred else n - 1.0

    @property
    def kept(self) -> float:
        """Share of the runs' degrees of freedom that is left."""
        n_runs = self.y.shape[1]
        return 1.0 - 1.0 / n_runs if self.centred else 1.0


@dataclass(frozen=True)
class Solved:
    """Sums over a run under S, the covariance of drift and unit white noise, and the drift."""

    logdet: float  # of S, all runs
    # [run] 1' S^-1 1, 1' S^-1 y, y' S^-1 y
    ones: Array
    along: Array
    squares: Array
    # [position, run] mean of the drift given y with level 0, and what a level of 1 takes from it
    drift: Array
    per_level: Array
    # [run] variance of the last drift given y and the level. Where runs all have all steps, and so
    # are alike in it, this and `per_level` are of one.
    last: Array


def solve(seen: Observed, ratio: float, tau_s: float) -> Solved:
    """Solve for a drift of `ratio` times the variance of the white noise.

    With Q the precision of the drift and W = diag(known): S^-1 = W - W (Q + W)^-1 W, and
    log det S = log det (Q + W) - log det Q. Runs that all have all steps share one factor.
    """
    y, w = seen.y, seen.known
    n, n_runs = y.shape
    if ratio <= _NO_DRIFT:
        none = np.zeros((n, n_runs))
        return Solved(
            0.0, w.sum(axis=0), y.sum(axis=0), np.einsum("ij,ij->j", y, y), none, none,
            np.zeros(n_runs),
        )  # fmt: skip
    x = seen.gap_s / tau_s
    fresh = -np.expm1(-2.0 * x)  # variance of what is new after a gap
    diagonal, side = np.ones(n), np.zeros(n)
    diagonal[1:] = 1.0 / fresh
    diagonal[:-1] += np.exp(-2.0 * x) / fresh
    side[:-1] = -np.exp(-x) / fresh
    whole = bool(w.all())
    if whole:
        found, rows = diagonal / ratio + 1.0, side / ratio
        right = np.ones((n, n_runs + 1), order="F")
        right[:, :-1] = y
    else:
        found = np.tile(diagonal / ratio, n_runs) + w.ravel("F")
        rows = np.tile(side / ratio, n_runs)
        right = np.column_stack([y.ravel("F"), w.ravel("F")])
    pivots, below, _ = dpttrf(found, rows[: max(rows.size - 1, 1)], overwrite_d=1, overwrite_e=1)
    out, _ = dpttrs(pivots, below, right, overwrite_b=1)
    if whole:
        drift, per_level = out[:, :-1], out[:, -1:]
    else:
        drift, per_level = (out[:, k].reshape((n, n_runs), order="F") for k in (0, 1))
    times = n_runs if whole else 1
    logdet = times * float(np.log(pivots).sum())
    logdet += n_runs * (n * math.log(ratio) + float(np.log(fresh).sum()))
    left = y - w * drift
    return Solved(
        logdet, (w - w * per_level).sum(axis=0), left.sum(axis=0), np.einsum("ij,ij->j", y, left),
        drift, per_level, 1.0 / pivots[n - 1 :: n],
    )  # fmt: skip


def _profile(seen: Observed, ratio: float, tau_s: float) -> tuple[float, float, float]:
    """Give -2 log restricted likelihood, up to a constant, with its white and run variances.

    Given the drift, levels m with variances v + s^2 / ones; v is searched around its estimate by
    the variance of the levels, which is the best one where runs are equally long.
    """
    s = solve(seen, ratio, tau_s)
    level, single = s.along / s.ones, 1.0 / s.ones
    within = max(float((s.squares - s.along * level).sum()), 0.0)  # rounding of huge values
    n_runs = level.size
    share = np.zeros(1)
    if n_runs > 1:
        white = within / max(seen.dof - seen.kept * (n_runs - 1.0), 1.0)
        spread = float((level**2).sum() / (n_runs - 1.0) if seen.centred else level.var(ddof=1))
        middle = spread / max(white, 1e-300) - float(single.mean())
        middle = max(middle, 1e-3 / float(s.ones.mean()))
        share = middle * _SHARES
    weight = 1.0 / (share[:, None] + single)
    mean = 0.0 if seen.centred else (weight @ level / weight.sum(axis=1))[:, None]
    square = (within + (weight * (level - mean) ** 2).sum(axis=1)) / seen.dof
    cost = seen.dof * np.log(np.maximum(square, 1e-300))
    cost += seen.kept * (s.logdet + np.log1p(share[:, None] * s.ones).sum(axis=1))
    if not seen.centred:
        cost += np.log(weight.sum(axis=1))
    best = int(cost.argmin())
    return float(cost[best]), float(square[best]), float(share[best] * square[best])


def fit_spread(seen: Observed, start: Spread | None = None) -> Spread:
    """Find the most likely spread (restricted likelihood); 0 is a possible part.

    `start`: where the search may begin too.
    """
    length = float(seen.gap_s.sum())
    low = np.log([_NO_DRIFT, seen.gap_s.min(initial=length)])
    high = np.log([1.0 / _NO_DRIFT, length])  # a longer memory is one with the run effect

    def cost(x: Array) -> float:
        inside = np.clip(x, low, high)  # outside the walls rise, so that the search comes back
        return _profile(seen, *np.exp(inside))[0] + float(((x - inside) ** 2).sum())

    begins = [(math.log(r), t) for r in _RATIOS for t in np.linspace(low[1], high[1], _TAUS)]
    if start is not None and min(start.drift, start.white) > 0.0:
        begins = begins[:: len(_RATIOS)]
        begins.append((2.0 * math.log(start.drift / start.white), math.log(start.tau_s)))
    first = min(np.array(begins), key=cost)
    simplex = first + np.array([[0.0, 0.0], [0.7, 0.0], [0.0, -0.7]])
    options = {"initial_simplex": simplex, "xatol": 0.2, "fatol": 0.02}  # a tenth of an error
    x = minimize(cost, first, method="Nelder-Mead", options=options).x
    ratio, tau_s = (float(v) for v in np.exp(np.clip(x, low, high)))
    found, flat = _profile(seen, ratio, tau_s), _profile(seen, 0.0, 1.0)
    if found[0] >= flat[0]:
        found, ratio, tau_s = flat, 0.0, 0.0
    _, white, run = found
    return Spread(math.sqrt(white), math.sqrt(ratio * white), tau_s, math.sqrt(run))


def no_drift_p_value(seen: Observed, spread: Spread) -> float:
    """P-value of no drift by the likelihood ratio.

    A chi-square of 2 for size and memory. It is large: without a drift 95 % of simulated series
    (100 steps of one run to 2,000 of three) gain 3.1 to 4.4, of 6.0.
    """
    if spread.drift <= 0.0:
        return 1.0
    ratio = (spread.drift / max(spread.white, 1e-4 * spread.drift)) ** 2
    gain = _profile(seen, 0.0, 1.0)[0] - _profile(seen, ratio, spread.tau_s)[0]
    return float(np.exp(-0.5 * max(gain, 0.0)))


def repeat_fits(
    spread: Spread, body: Array, elapsed_s: Array, by_step: bool, seed: int, repeats: int
) -> list[Spread]:
    """Fits of simulated measurements with the same steps missing, when `spread` is the truth."""
    rng = np.random.default_rng(seed)
    missing = np.isnan(body)
    missing &= missing.mean() > _FEW_MISSING
    out = []
    for _ in range(min(repeats, max(_LEAST_REPEATS, _CELLS // body.size))):
        drawn = simulate_body(spread, elapsed_s, body.shape[1], rng)
        drawn[missing] = np.nan
        out.append(fit_spread(Observed.of(drawn, elapsed_s, by_step), spread))
    return out


def intervals(spread: Spread, repeats: Sequence[Spread]) -> dict[str, tuple[float, float]]:
    """90 % interval of each part.

    Basic bootstrap of the logarithm where the part is there: theta^2 / q. Where it may be 0, up to
    what repetitions show.
    """
    out = {}
    tail = 0.5 * (1.0 - LEVEL)
    for name, value in spread.as_dict().items():
        again = np.array([getattr(r, name) for r in repeats])
        low, high = (float(q) for q in np.quantile(again, [tail, 1.0 - tail]))
        if value > 0.0 and low > 0.0:
            out[name] = value**2 / high, value**2 / low
        else:
            out[name] = 0.0, max(high, 2.0 * value - low)
    return out


@dataclass(frozen=True)
class State:
    """Joint normal distribution of a run's relative level and its last drift."""

    mean: Array  # [2]
    root: Array  # [2, 2] lower triangular root of their covariance

    def draw(self, z: Array) -> Array:
        """Draw [n, 2] from standard normal numbers of that shape."""
        return np.asarray(self.mean + z @ self.root.T)


def state_given(body: Array, elapsed_s: Array, spread: Spread, level_sd: float) -> State:
    """Distribution of level and last drift given one run's deviations [position].

    `level_sd`: of the level before anything was measured, mean 0 [1].
    """
    known = np.isfinite(body)
    y = np.where(known, body, 0.0)[:, None]
    seen = Observed(y, known.astype(np.float64)[:, None], np.diff(elapsed_s), False)
    white = max(spread.white, 1e-4 * spread.drift, 1e-9)  # any noise is above rounding
    s = solve(seen, (spread.drift / white) ** 2, max(spread.tau_s, 1e-300))
    sd = 1.0 / math.sqrt(1.0 / level_sd**2 + float(s.ones[0]) / white**2)
    level = sd**2 * float(s.along[0]) / white**2
    taken = float(s.per_level[-1, 0])
    mean = np.array([level, float(s.drift[-1, 0]) - taken * level])
    return State(mean, np.array([[sd, 0.0], [-taken * sd, white * math.sqrt(float(s.last[0]))]]))


def own_noise(body: Array, elapsed_s: Array, spread: Spread) -> Array:
    """Give deviations less their run's level and the most likely drift [value]."""
    known = np.isfinite(body)
    seen = Observed(np.where(known, body, 0.0), known.astype(np.float64), np.diff(elapsed_s), False)
    ratio = (spread.drift / spread.white) ** 2 if spread.white > 0.0 else 0.0
    s = solve(seen, ratio, max(spread.tau_s, 1e-300))
    level = s.along / np.maximum(s.ones, 1e-300)
    return np.asarray((body - level - (s.drift - s.per_level * level))[known])
