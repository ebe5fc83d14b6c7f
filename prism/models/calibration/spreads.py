"""How much steps vary beyond the library, and how much of the library's spread is there.

Between runs: one factor on the library's rank effect, from the variance of runs' means. Within a
run: one factor on what the library says of single steps (own noise, microbatches, calls), and what
all ranks share in a step, `s^2 + (d / T)^2` for a step of T seconds: a share of the step, and a
time that is the same in any step. Each factor has the library's value as its prior, so what
measurements do not tell stays the library's, and the posterior's width says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from prism.common.arrays import Array
from prism.models.calibration.predict import Predicted
from prism.models.calibration.sizes import Size

_GRID = np.linspace(-6.0, 6.0, 481)  # logs of factors
_MODEL_ERROR = 0.1  # of a predicted spread, relative
_MOST_VALUES = 20.0  # independent values a spread counts as: beyond, the model's error rules
_SAME = 1e-3  # weight of preferring a share of the step to a fixed time, where nothing tells


@dataclass(frozen=True)
class Factor:
    """A factor on the library's figure."""

    value: float
    log_std: float  # posterior standard deviation of its logarithm
    # share of the prior's variance that is left: 1 where the measurements tell nothing [1]
    library_share: float

    @property
    def ci(self) -> tuple[float, float]:
        """90 % interval."""
        edge = float(np.exp(1.645 * self.log_std))
        return self.value / edge, self.value * edge


def prior_loss(x: Array | float) -> Any:
    """Minus log prior of the log of a factor: Student-t with 3 degrees of freedom and unit scale.

    A factor of e either way is nothing unusual, and one of 50 not impossible: hand-picked machines
    vary far less than fleets.
    """
    return 2.0 * np.log1p(np.asarray(x) ** 2 / 3.0)


def posterior(loss: Array) -> Factor:
    """Factor from its loss (minus log posterior) over the grid of logarithms."""
    mean, std = _moments(loss)
    _, prior = _moments(prior_loss(_GRID))
    return Factor(float(np.exp(mean)), std, min(1.0, (std / prior) ** 2))


def _moments(loss: Array) -> tuple[float, float]:
    weight = np.exp(-(loss - loss.min()))
    weight /= weight.sum()
    mean = float(weight @ _GRID)
    return mean, float(np.sqrt(weight @ (_GRID - mean) ** 2))


def fit_between(sizes: Sequence[Size], predicted: Sequence[Predicted]) -> Factor:
    """Factor on the library's rank effect, from the variances of runs' means.

    The variance of R means is chi-square with R - 1 degrees of freedom around
    `f^2 between^2 + noise`, fewer where clusters' means have heavier tails than a normal
    distribution: the relative variance of a variance of n values is `2 / (n - 1) + excess / n`. The
    predicted variance is itself of some clusters, as many as were drawn.
    """
    loss = prior_loss(_GRID)
    for size, p in zip(sizes, predicted, strict=True):
        if size.n_runs < 2 or p.between <= 0.0:
            continue
        counts = (size.n_runs, p.clusters)
        error = sum(2.0 / (n - 1.0) + p.excess / n for n in counts) + 4.0 * _MODEL_ERROR**2
        dof = 2.0 / error
        expected = np.exp(2.0 * _GRID) * p.between**2 + size.between_noise
        loss = loss + 0.5 * dof * (np.log(expected) + size.between / expected)
    return posterior(loss)


@dataclass(frozen=True)
class StepSpread:
    """Spread of single steps."""

    library: Factor  # on the library's spreads within a run
    relative: float  # what all ranks share, as a share of the step [1]
    fixed_s: float  # the same, as a time whatever the step's length [s]
    own: tuple[float, ...]  # what the library says of each size before the factor [1]

    def cv(self, step_s: float) -> float:
        """Spread of the step effect of a step of given duration [s] [1]."""
        return float(np.hypot(self.relative, self.fixed_s / step_s))


def fit_within(sizes: Sequence[Size], predicted: Sequence[Predicted]) -> StepSpread:
    """Split the measured spread of steps into the library's and what all ranks share.

    The measured variance of size j is chi-square around
    `f^2 within_j^2 + s^2 + (d / T_j)^2`, the log of f as in `prior_loss`. Sizes of one step
    length cannot tell s from d, and s is taken. The most likely f, s and d together are given, so
    that their sum is what was measured; the width of f is that of its profile.
    """
    own = np.array([p.within for p in predicted])
    length = np.array([s.mean_s for s in sizes])
    wanted = np.maximum([s.within for s in sizes], 1e-9) ** 2
    n = np.clip([s.within_n for s in sizes], 1.0, _MOST_VALUES)
    dof = 2.0 / (2.0 / n + 4.0 * _MODEL_ERROR**2)  # a spread off by x: its variance by 2 x
    scale = float(wanted.mean())
    unit = scale * float((length**2).mean())

    def loss(x: Array) -> tuple[float, Array]:
        """Minus log posterior, and its gradient."""
        parts = np.stack([np.exp(2.0 * x[0]) * own**2, scale + 0.0 * own, unit / length**2])
        variance = parts[0] + x[1] * parts[1] + x[2] * parts[2] + 1e-18
        fit = 0.5 * float(dof @ (np.log(variance) + wanted / variance))
        slope = parts @ (0.5 * dof * (1.0 - wanted / variance) / variance)
        slope[0] = 2.0 * slope[0] + 4.0 * x[0] / (3.0 + x[0] ** 2)  # `prior_loss`'s own
        slope[2] += _SAME
        return fit + float(prior_loss(x[0])) + _SAME * float(x[2]), slope

    bounds = [(_GRID[0], _GRID[-1]), (0.0, None), (0.0, None)]
    starts = ([0.0, 0.5, 0.1], [-1.0, 0.1, 0.5], [-3.0, 0.9, 0.0])
    found = min(
        (minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B") for start in starts),
        key=lambda r: float(r.fun),
    )

    def least(at: float) -> float:
        """Loss of the best shared parts with the factor's log held."""
        held = [(at, at), *bounds[1:]]
        rest = minimize(loss, [at, *found.x[1:]], jac=True, bounds=held, method="L-BFGS-B")
        return float(rest.fun)

    coarse = _GRID[::4]
    width = posterior(np.interp(_GRID, coarse, [least(at) for at in coarse]))
    f, s, d = np.exp(found.x[0]), np.sqrt(scale * found.x[1]), np.sqrt(unit * found.x[2])
    return StepSpread(replace(width, value=float(f)), float(s), float(d), tuple(own.tolist()))


def memory_s(sizes: Sequence[Size], spread: StepSpread) -> float:
    """Correlation time of the step effect that gives long sums their measured variance [s].

    An AR(1) of variance v and memory tau over steps of T seconds adds v T coth(T / 2 tau) to a long
    sum for every second, v T at least; what the library's own noise gives is taken off first. The
    sizes' memories are weighted by their steps.
    """
    rows = []
    for size, own in zip(sizes, spread.own, strict=True):
        shared = spread.cv(size.mean_s) ** 2
        if shared > 0.0:
            library = (spread.library.value * own) ** 2
            slow_s = (size.within**2 * size.slow_s - library * size.mean_s) / shared
            longer = slow_s > size.mean_s
            tau_s = 0.5 * size.mean_s / math.atanh(size.mean_s / slow_s) if longer else 0.0
            rows.append((size.n, tau_s))
    if not rows:
        return 0.0
    weight, tau = np.array(rows).T
    return float(weight @ tau / weight.sum())
