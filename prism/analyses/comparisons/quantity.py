"""One quantity of two samples compared: figures, their differences, KS, and the shift by quantile.

Every figure has an interval of its own at 95 %, and a p-value that Holm's step-down corrects for
all figures of the comparison together. Left out: reading (`prism.analyses.comparisons.inputs`), and
words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from prism.analyses.comparisons.distance import Distance, distance
from prism.analyses.comparisons.errors import (
    Error,
    Pairing,
    Sample,
    errors_of_both,
    errors_of_sides,
    independent_error,
    is_borrowed,
    paired_error,
    within_of_difference,
)
from prism.analyses.comparisons.figures import (
    FIGURES,
    PERCENTILES,
    figures_of,
    influences,
    leave_one_out,
    quantile_influences,
    shares_below,
    slopes,
)
from prism.analyses.comparisons.longrun import long_run
from prism.analyses.comparisons.power import LEVEL, POWERS, Side, detectable, needed

Array = NDArray[np.float64]

Stretch = Callable[[float], float]
Stretches = dict[str, Stretch]

SHIFT_LEVELS = np.linspace(0.02, 0.98, 33)
_DRAWS = 2_000  # behind the simultaneous band: its critical value to 1 %
_EXACT = 1e-12  # relative; what differs by less is rounding


@dataclass(frozen=True)
class Quantity:
    """A comparison of one quantity."""

    a: Sample
    b: Sample
    pairing: Pairing
    figures: dict[str, dict[str, Any]]  # by figure: a, b, difference [s, for the CV 1], `_TESTED`
    ks: Distance
    n_effective: tuple[float, float]  # independent steps that would tell as much about the mean
    shift: dict[str, Array]  # [level] difference of quantiles [s], with its simultaneous 95 % band
    between_share: float | None  # of the mean's error that goes with whole runs


def compare_quantity(
    a: Sample, b: Sample, pairing: Pairing, effect: float, seed: int,
    shared: Array | None = None,
) -> Quantity:  # fmt: skip
    """Compare two samples; shared [1]: variance of the difference that the units do not show."""
    tested = compare_figures(a, b, pairing, effect, shared)
    of_a, of_b, relative = tested.of_a, tested.of_b, tested.relative
    between = None
    if "steps" not in (a.kind, b.kind) and pairing is None and relative.variance[0] > 0.0:
        between = float(np.clip(1.0 - relative.within[0] / relative.variance[0], 0.0, 1.0))
    return Quantity(
        a, b, pairing, tested.figures,
        distance(a, b, pairing, cosines_of(a, b, of_a, of_b, pairing), seed),
        _effective(a, b, of_a, of_b, pairing), _shift(a, b, pairing, seed), between,
    )  # fmt: skip


class Tested(NamedTuple):
    """Figures with their tests, the influence values [n, figure] behind them, and their error."""

    figures: dict[str, dict[str, Any]]
    of_a: Array
    of_b: Array
    relative: Error


def compare_figures(
    a: Sample, b: Sample, pairing: Pairing, effect: float, shared: Array | None = None
) -> Tested:
    """Test each figure; parameters as of `compare_quantity`."""
    value_a, value_b = figures_of(a.values), figures_of(b.values)
    shares = _share_errors(a, b, pairing, PERCENTILES)
    of_a, of_b = influences(a.values, shares[0]), influences(b.values, shares[1])
    known = np.isfinite(of_a[0]) & np.isfinite(of_b[0]) & (value_a > 0.0) & (value_b > 0.0)
    of_a, of_b = (np.nan_to_num(x) for x in (of_a, of_b))
    of_a, of_b = (leave_one_out(x.values, x.unit, of) for x, of in ((a, of_a), (b, of_b)))
    if pairing is None:
        own, borrowed = errors_of_sides(a, b, of_a, of_b), is_borrowed(a, b)
        relative = independent_error(own, (1.0, 1.0), borrowed)
        absolute = independent_error(own, (value_a, value_b), borrowed)
    else:
        own = None
        relative = paired_error(a, b, of_a, of_b, pairing)
        absolute = paired_error(a, b, of_a * value_a, of_b * value_b, pairing)
    if shared is not None:
        extra = np.array([name not in ("std", "cv") for name in FIGURES]) * float(shared[0])
        relative = relative._replace(variance=relative.variance + extra)
        middle = 0.5 * (value_a + value_b)
        absolute = absolute._replace(variance=absolute.variance + extra * middle**2)
    sides = _sides(a, b, own, relative, pairing, shares)
    figures = {}
    for k, name in enumerate(FIGURES):
        found = {"a": float(value_a[k]), "b": float(value_b[k])}
        found["difference"] = found["b"] - found["a"]
        figures[name] = found | (
            _tested(k, found, relative, absolute, sides, a.kind, effect)
            if known[k] else dict.fromkeys(_TESTED)
        )  # fmt: skip
    return Tested(figures, of_a, of_b, relative)


_TESTED = ("difference_ci", "relative", "relative_ci", "p_value", "detectable", "needed")


def _tested(
    k: int, found: dict[str, float], relative: Error, absolute: Error, sides: list[list[Side]],
    kind: Any, effect: float,
) -> dict[str, Any]:  # fmt: skip
    """Interval, p-value and what it takes to see an effect, of one figure."""
    ratio = float(np.log(found["b"] / found["a"]))
    error, dof = float(np.sqrt(relative.variance[k])), float(relative.dof[k])
    reach = float(t.isf(LEVEL / 2, dof))
    half = reach * float(np.sqrt(absolute.variance[k]))
    if error <= _EXACT:  # nothing varies: what differs, differs
        p_value = 1.0 if abs(ratio) <= _EXACT else 0.0
    else:
        p_value = float(2.0 * t.sf(abs(ratio) / error, dof))
    plan = None
    if sides[k]:
        plan = {f"{power:g}": needed(sides[k], kind, effect, power) for power in POWERS}
    return {
        "difference_ci": [found["difference"] - half, found["difference"] + half],
        "relative": float(np.expm1(ratio)),
        "relative_ci": [float(np.expm1(ratio - reach * error)),
                        float(np.expm1(ratio + reach * error))],
        "p_value": p_value, "detectable": detectable(error**2, dof), "needed": plan,
    }  # fmt: skip


def _share_errors(a: Sample, b: Sample, pairing: Pairing, levels: Array) -> tuple[Array, Array]:
    """Give standard errors of the shares below the quantiles of either side [level]."""
    shares = (shares_below(a.values, levels), shares_below(b.values, levels))
    return errors_of_both(a, b, *shares, pairing, floor=levels is PERCENTILES)


def _effective(
    a: Sample, b: Sample, of_a: Array, of_b: Array, pairing: Pairing
) -> tuple[float, float]:
    """How many independent steps would tell as much about either mean."""
    errors = errors_of_both(a, b, of_a[:, :1], of_b[:, :1], pairing)
    first, second = (
        float(min(x.values.size, of[:, 0].var() / max(float(error[0]) ** 2, 1e-300)))
        for x, of, error in ((a, of_a, errors[0]), (b, of_b, errors[1]))
    )
    return first, second


def _sides(
    a: Sample, b: Sample, own: tuple[Error, Error] | None, relative: Error, pairing: Pairing,
    shares: tuple[Array, Array],
) -> list[list[Side]]:  # fmt: skip
    """Say what one unit or step contributes, by figure; nothing where the kinds do not mix."""
    of_a, of_b = (_stretches(x.values, e) for x, e in zip((a, b), shares, strict=True))

    def each(error: Error, n: int, stretches: Stretches) -> list[Side]:
        return [
            Side(v * n, d, n, stretches.get(name))
            for name, v, d in zip(FIGURES, error.variance, error.dof, strict=True)
        ]

    if own is None:
        n = max(a.n_units, b.n_units) if pairing == "cluster" else a.values.size
        both = {name: _wider(of_a[name], of_b[name]) for name in of_a}
        return [[side] for side in each(relative, n, both)]
    first, second = (
        each(error, x.values.size if x.kind == "steps" else x.n_units, stretches)
        for x, error, stretches in zip((a, b), own, (of_a, of_b), strict=True)
    )
    if is_borrowed(a, b):
        many = first if a.kind == "runs" else second
        return [[side, side] for side in many]
    if a.kind != b.kind:
        return [[] for _ in FIGURES]
    return [list(pair) for pair in zip(first, second, strict=True)]


def _stretches(values: Array, error: Array) -> Stretches:
    """Say by percentile how its error grows where the shares' errors do.

    With fewer runs the interval of quantiles behind an error widens, at p95 and p99 into the tail.
    """
    here = slopes(values, PERCENTILES, error)

    def stretch(k: int, wider: float) -> float:
        n = values.size / wider**2
        there = slopes(values, PERCENTILES[[k]], wider * error[[k]], n)[0]
        if here[k] <= 0.0:
            return 1.0
        return float((there / here[k]) ** 2) if np.isfinite(there) else float("inf")

    names = [name for name in FIGURES if name.startswith("p")]
    return {name: partial(stretch, k) for k, name in enumerate(names)}


def _wider(first: Stretch, second: Stretch) -> Stretch:
    return lambda wider: max(first(wider), second(wider))


def cosines_of(a: Sample, b: Sample, of_a: Array, of_b: Array, pairing: Pairing) -> tuple[int, int]:
    """Cosines that single runs allow, by the figure that allows fewest."""
    if pairing == "step":
        n = int(long_run(of_b[:, :2] - of_a[:, :2]).cosines.min())
        return n, n
    first, second = (
        int(long_run(of[:, :2]).cosines.min()) if x.kind == "steps" else 0
        for x, of in ((a, of_a), (b, of_b))
    )
    return first, second


def _shift(a: Sample, b: Sample, pairing: Pairing, seed: int) -> dict[str, Array]:
    """Difference of quantiles with a band that holds all of it in 95 % of cases.

    The largest deviation over the levels, in standard errors, is drawn by giving each independent
    contribution a normal weight of its own (a multiplier bootstrap), over the error's own t scale.
    """
    errors = _share_errors(a, b, pairing, SHIFT_LEVELS)
    of_a, of_b = (
        quantile_influences(x.values, SHIFT_LEVELS, error)
        for x, error in zip((a, b), errors, strict=True)
    )
    known = np.isfinite(of_a[0]) & np.isfinite(of_b[0])
    at_a, at_b = (np.quantile(x.values, SHIFT_LEVELS) for x in (a, b))
    shift = at_b - at_a
    half = np.full(SHIFT_LEVELS.size, np.nan)
    if known.any():
        of_a, of_b = of_a[:, known], of_b[:, known]
        if pairing is None:
            own = errors_of_sides(a, b, of_a, of_b, floor=False)
            error = independent_error(own, (1.0, 1.0), is_borrowed(a, b))
        else:
            error = paired_error(a, b, of_a, of_b, pairing)
        scale = np.sqrt(error.variance)
        rng = np.random.default_rng([seed, 12])
        unit = np.divide(error.parts, scale, out=np.zeros_like(error.parts), where=scale > 0.0)
        largest = np.abs(rng.standard_normal((_DRAWS, unit.shape[0])) @ unit).max(axis=1)
        dof = max(1.0, float(np.median(error.dof)))
        largest /= np.sqrt(rng.chisquare(dof, _DRAWS) / dof)
        half[known] = float(np.quantile(largest, 1.0 - LEVEL)) * scale
    return {"level": SHIFT_LEVELS, "a": at_a, "shift": shift, "lo": shift - half,
            "hi": shift + half}  # fmt: skip


def holm(p_values: list[float]) -> list[float]:
    """Adjust p-values so that the chance of any false one is at most their level.

    References
    ----------
    Holm (1979), "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6, 65.

    Examples
    --------
    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values)
    order = np.argsort(p)
    out = np.empty(p.size)
    out[order] = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    return [float(x) for x in np.minimum(1.0, out)]


def shared_variance(a: Sample, b: Sample, pairing: Pairing) -> Array:
    """Variance of the relative difference of mean steps from replicates within clusters [1].

    Simulated runs rest on the steps that were simulated, whose noise within clusters is in all of
    them alike.
    """
    of_a, of_b = ((x.values / x.values.mean() - 1.0)[:, None] for x in (a, b))
    return within_of_difference(a, b, of_a, of_b, pairing)
