"""How many units or steps it takes to see an effect of a given size, and what a sample can see.

Power of the very t test that the comparison makes, with its degrees of freedom; errors shrink as
one over the square root of the number of units or steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import nct, norm, t

from prism.analyses.comparisons.errors import Kind
from prism.analyses.comparisons.longrun import FEWEST, MOST

LEVEL = 0.05
POWERS = (0.8, 0.9)
LEAST = {"clusters": 2, "runs": 2, "steps": 20}
MANY = 10**9  # units; beyond, nobody measures
_NORMAL_FROM = 300.0  # degrees of freedom


class Side(NamedTuple):
    """What one unit or step contributes on one side.

    `stretch` multiplies the variance where errors of shares are so many times as large: the error
    of a percentile grows faster than that of the share below it, and is not known (inf) where that
    reaches beyond the sample.
    """

    variance: float  # of the figure's logarithm, times the units or steps it rests on
    dof: float  # of that variance
    n: int  # units or steps
    stretch: Callable[[float], float] | None = None

    def variance_with(self, n: int) -> float:
        """Variance of the figure's logarithm with n units or steps."""
        if self.variance == 0.0:
            return 0.0
        wider = 1.0 if self.stretch is None else self.stretch(float(np.sqrt(self.n / n)))
        return self.variance / n * wider


def needed(sides: list[Side], kind: Kind, effect: float, power: float) -> int | None:
    """Fewest units or steps on each side that see an effect with this probability."""
    low, high = LEAST[kind], LEAST[kind]
    while power_at(sides, kind, effect, high) < power:
        low, high = high, 2 * high
        if high > MANY:
            return None
    while high - low > max(1, low // 500):
        middle = (low + high) // 2
        seen = power_at(sides, kind, effect, middle) >= power
        low, high = (low, middle) if seen else (middle, high)
    return low if power_at(sides, kind, effect, low) >= power else high


def power_at(sides: list[Side], kind: Kind, effect: float, n: int) -> float:
    """Probability that a two-sided test at 5 % sees an effect with n units or steps a side."""
    variances = np.array([side.variance_with(n) for side in sides])
    total = float(variances.sum())
    if total <= 0.0:
        return 1.0
    if not np.isfinite(total):
        return 0.0
    dofs = np.array([_dof(side, kind, n) for side in sides])
    dof = float(total**2 / (variances**2 / dofs).sum())
    shift = float(np.log1p(effect) / np.sqrt(total))
    if dof >= _NORMAL_FROM:
        return float(norm.sf(float(norm.isf(LEVEL / 2)) - shift))
    limit = float(t.isf(LEVEL / 2, dof))
    return float(nct.sf(limit, dof, shift)) if shift < limit + 8.0 else 1.0


def detectable(variance: float, dof: float, power: float = POWERS[0]) -> float:
    """Smallest relative effect that a test with this error sees with this probability."""
    if not np.isfinite(variance):
        return float("inf")
    return float(np.expm1(np.sqrt(variance) * (t.isf(LEVEL / 2, dof) + t.isf(1.0 - power, dof))))


def _dof(side: Side, kind: Kind, n: int) -> float:
    """Degrees of freedom with n units or steps."""
    if kind == "steps":
        most = max(float(FEWEST), MOST * n ** (2.0 / 3.0))
        return max(float(min(FEWEST, side.dof)), float(min(side.dof * n / side.n, most)))
    return float(max(1.0, side.dof * (n - 1.0) / max(1.0, side.n - 1.0)))
