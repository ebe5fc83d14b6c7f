"""One quantity of two samples compared: figures, intervals, sample sizes, shift by quantile.

All of it uses the same resamples (`prism.common.resampling`).
"""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import t

from prism.common.arrays import Array, Flags, Index
from prism.common.resampling import (
    FAR,
    FIGURES,
    LEVELS,
    SHIFT_LEVELS,
    Distance,
    Pairing,
    Resampled,
    Sample,
    distance,
    in_blocks,
    resample,
)

LEVEL = 0.05
POWERS = (0.8, 0.9)
_N = len(FIGURES)
_EXACT = 1e-12  # relative; what differs by less is rounding
_LEAST = {"clusters": 2.0, "runs": 2.0, "steps": 20.0}
_MOST = 1e9  # units; beyond, nobody measures


class Gate(NamedTuple):
    """Error of the mean of B over that of A, as a gate takes it."""

    error: float  # of the logarithm of their ratio
    dof: float
    spread_from: str  # runs of A, or the units of both


class Quantity(NamedTuple):
    """A comparison of one quantity."""

    a: Sample
    b: Sample
    pairing: Pairing
    figures: dict[str, Array]  # [figure, ...] by name; NaN where a figure is not tested
    shift: dict[str, Array]  # [level] difference of quantiles [s], with its simultaneous 95 % band
    ks: Distance
    between_share: float | None  # of the variance of the mean that is between runs
    gate: Gate


class ComparedPart(NamedTuple):
    """What one side adds to the error of B less A; or what all pairs do."""

    deviations: Array  # [resample, column]
    share_error: Array  # [level]
    units: int  # independent
    n: int  # runs, clusters or steps: what sample sizes count


def compare_quantity(
    a: Sample, b: Sample, pairing: Pairing, effect: float, seed: int, shared: float = 0.0
) -> Quantity:
    """Compare two samples; shared [1]: variance of the difference that the units do not show."""
    a, b = in_blocks(a, b, pairing)
    # the same draws where units are paired
    of_a, of_b = (
        resample(x, np.random.default_rng([seed, 12, 0 if pairing else k]))
        for k, x in enumerate((a, b))
    )
    parts, _ = _parts(a, b, of_a, of_b, pairing)
    return Quantity(
        a, b, pairing, compare_figures(a, b, of_a, of_b, pairing, effect, shared),
        _shift(of_a.own, of_b.own, parts, seed), distance(a, b, pairing, seed),
        _between_share(a, b, float(_error(parts)[0][0])),
        _gate(a, b, of_a, of_b, pairing, shared),
    )  # fmt: skip


def _gate(
    a: Sample, b: Sample, of_a: Resampled, of_b: Resampled, pairing: Pairing, shared: float
) -> Gate:
    """Find the error of a ratio of means if B is another measurement of what A is.

    Its runs then vary as those of A do: s^2 (1/R_A + 1/R_B), with R_A - 1 degrees of freedom. Where
    A has no runs, each side varies as it does.
    """
    scales = of_a.own[:1], of_b.own[:1]  # means: those of steps that are all alike have no spread
    parts, _ = _parts(a, b, of_a, of_b, pairing, scales)
    variance, dof = (float(x[0]) for x in _error(parts))
    if a.kind != "runs":
        return Gate(float(np.sqrt(variance + shared)), dof, "both")
    of_runs = float((of_a.deviations[:, 0] / of_a.own[0]).var())
    n_b = b.n_units if b.kind == "runs" else 1
    # of runs that are shorter than those of A, their own steps may say more
    of_b_runs = of_runs * a.n_units / n_b
    within = float((of_b.deviations[:, 0] / of_b.own[0]).var()) if b.kind == "steps" else 0.0
    return Gate(float(np.sqrt(of_runs + max(of_b_runs, within))), a.n_units - 1.0, "runs of A")


def _parts(
    a: Sample, b: Sample, of_a: Resampled, of_b: Resampled, pairing: Pairing,
    by: tuple[Array | float, Array | float] = (1.0, 1.0),
) -> tuple[list[ComparedPart], list[ComparedPart]]:  # fmt: skip
    """Take apart the error of B less A, each divided by its scale; and what a plan is based on.

    One run against several is taken to vary as those do, or as its blocks do where that is more;
    the difference varies as s^2 (1 + 1/R), as in a prediction.
    """
    first, second = -of_a.deviations / by[0], of_b.deviations / by[1]
    n_a, n_b = (x.values.size if x.kind == "steps" else x.n_units for x in (a, b))
    error = np.maximum(of_a.share_error, of_b.share_error)
    if pairing:
        parts = [ComparedPart(first + second, error, a.n_units, n_a)]
        return parts, parts
    parts = [ComparedPart(first, of_a.share_error, a.n_units, n_a),
             ComparedPart(second, of_b.share_error, b.n_units, n_b)]  # fmt: skip
    if a.kind == b.kind:
        return parts, parts
    if "clusters" in (a.kind, b.kind):
        return parts, []
    many, one = parts if a.kind == "runs" else parts[::-1]
    wide = np.sqrt(many.units) * np.roll(many.deviations, 1, axis=0)  # other draws than theirs
    more = wide.var(axis=0) > one.deviations.var(axis=0)
    both = many.deviations + np.where(more, wide, one.deviations)
    return [ComparedPart(both, error, many.units, many.n)], [many, many]


def compare_figures(
    a: Sample, b: Sample, of_a: Resampled, of_b: Resampled, pairing: Pairing, effect: float,
    shared: float,
) -> dict[str, Array]:  # fmt: skip
    """Test each figure, and say what it takes to see an effect."""
    value_a, value_b = of_a.own[:_N], of_b.own[:_N]
    extra = np.where(np.isin(FIGURES, ("std", "cv")), 0.0, shared)
    absolute = _error(_parts(a, b, of_a, of_b, pairing)[0])[0][:_N]
    absolute = np.sqrt(absolute + extra * (0.5 * (value_a + value_b)) ** 2)
    with np.errstate(all="ignore"):  # what is divided by zero is not known
        parts, plan = _parts(a, b, of_a, of_b, pairing, (of_a.own, of_b.own))
        variance, dof = (x[:_N] for x in _error(parts))
        error, ratio = np.sqrt(variance + extra), np.log(value_b / value_a)
        p_value = 2.0 * t.sf(np.abs(ratio) / error, dof)
        p_value = np.where(error > _EXACT, p_value, np.abs(ratio) <= _EXACT)
        needed = _needed(plan, _LEAST[b.kind if a.kind == "steps" else a.kind], extra, effect)
        limit, ends = t.isf(LEVEL / 2, dof), np.array([-1.0, 1.0])
        difference = value_b - value_a
        tested = {
            "difference_ci": difference[:, None] + ends * (limit * absolute)[:, None],
            "relative": np.expm1(ratio),
            "relative_ci": np.expm1(ratio[:, None] + ends * (limit * error)[:, None]),
            "p_value": p_value,
            "detectable": np.expm1(error * (limit + t.isf(1.0 - POWERS[0], dof))),
            "needed": needed,
        }
    known = (value_a > 0.0) & (value_b > 0.0)
    known[1:4] &= _reached(parts)[:3]
    for values in tested.values():
        values[~known] = np.nan
    return {"value": np.stack([value_a, value_b], axis=1), "difference": difference, **tested}


def _error(parts: list[ComparedPart]) -> tuple[Array, Array]:
    """Variance of the difference, and its degrees of freedom (Welch) [column]."""
    of_parts = np.array([part.deviations.var(axis=0) for part in parts])
    dofs = np.array([[part.units - 1.0] for part in parts])
    variance = of_parts.sum(axis=0)
    squares = (of_parts**2 / dofs).sum(axis=0)
    dof = np.divide(variance**2, squares, out=np.ones_like(variance), where=squares > 0.0)
    return variance, dof


def _reached(parts: list[ComparedPart]) -> Flags:
    """Say which quantiles have an interval within the samples [level]."""
    room = np.minimum(LEVELS, 1.0 - LEVELS)
    return np.asarray(FAR * np.max([part.share_error for part in parts], axis=0) <= room)


def _needed(plan: list[ComparedPart], least: float, extra: Array, effect: float) -> Array:
    """Fewest runs, clusters or steps a side that see an effect [figure, power].

    Standard errors shrink as one over the square root of their number, and of a percentile the
    interval has to be within the sample. Infinite beyond `_MOST`, NaN without a plan.
    """
    if not plan:
        return np.full((_N, len(POWERS)), np.nan)
    n_now, units = np.array([[[[part.n]], [[part.units]]] for part in plan]).swapaxes(0, 1)
    per_unit = n_now * np.array([part.deviations[:, :_N].var(axis=0) for part in plan])[:, :, None]
    per_unit[0] += n_now[0] * extra[:, None]
    reach = np.zeros(_N)
    reach[1:4] = np.max([part.n * (FAR * part.share_error[:3] / (1.0 - LEVELS[:3])) ** 2
                         for part in plan], axis=0)  # fmt: skip
    low = np.log(np.maximum(least, reach))[:, None] * np.ones(len(POWERS))
    high = np.full(low.shape, np.log(_MOST))
    for _ in range(40):  # halving
        middle = 0.5 * (low + high)
        each, units_then = per_unit / np.exp(middle), units / n_now * np.exp(middle)
        variance = each.sum(axis=0)
        dof = variance**2 / (each**2 / np.maximum(1.0, units_then - 1.0)).sum(axis=0)
        # `t.isf` checks its arguments for ten times as long
        limit = -stdtrit(dof, LEVEL / 2) - stdtrit(dof, 1.0 - np.array(POWERS))
        more = limit * np.sqrt(variance) > np.log1p(effect)
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    n = np.ceil(np.exp(high) * (1.0 - 1e-9))
    return np.where(n < _MOST, n, np.inf)


def _shift(own_a: Array, own_b: Array, parts: list[ComparedPart], seed: int) -> dict[str, Array]:
    """Difference of quantiles with a band that holds all of it in 95 % of cases.

    Its half width is the 95 % quantile of the largest deviation over the levels in standard errors,
    over the t scale of these errors.
    """
    deviations = np.sum([part.deviations for part in parts], axis=0)[:, _N:]
    variance, dof = (x[_N:] for x in _error(parts))
    known = _reached(parts)[3:]
    scale, half = np.sqrt(variance), np.full(SHIFT_LEVELS.size, np.nan)
    if known.any():
        unit = np.divide(deviations, scale, out=np.zeros_like(deviations), where=scale > 0.0)
        largest = np.abs(unit[:, known]).max(axis=1)
        fewest, rng = dof[known].min(), np.random.default_rng([seed, 13])
        largest /= np.sqrt(rng.chisquare(fewest, largest.size) / fewest)
        half[known] = np.quantile(largest, 1.0 - LEVEL) * scale[known]
    at_a, shift = own_a[_N:], own_b[_N:] - own_a[_N:]
    return {"quantile_a": at_a, "shift": shift, "shift_lo": shift - half, "shift_hi": shift + half}


def _between_share(a: Sample, b: Sample, variance: float) -> float | None:
    """Share of the variance of the mean that is between runs, given all of it [s^2]."""
    if a.kind != "runs" or b.kind != "runs" or variance <= 0.0:
        return None
    if min(a.values.size / a.n_units, b.values.size / b.n_units) < _LEAST["steps"]:
        return None
    return float(np.clip(1.0 - (_within(a) + _within(b)) / variance, 0.0, 1.0))


def _within(runs: Sample) -> float:
    """Variance of the mean if runs did not differ, work that all share at a step left out [s^2]."""
    own = runs.values - _means(runs.values, runs.unit)
    own = own - _means(own, np.unique(runs.step, return_inverse=True)[1])
    single = Sample(own, np.zeros(own.size, np.int64), np.arange(own.size), "steps")  # end to end
    blocks = in_blocks(single, single, None)[0]
    sums = np.bincount(blocks.unit, own)
    lost = (1.0 - 1.0 / runs.n_units) * (1.0 - blocks.missed)
    return float(sums @ sums) / own.size**2 / lost


def _means(values: Array, group: Index) -> Array:
    """Mean of the group that each value is of."""
    return np.asarray((np.bincount(group, values) / np.bincount(group))[group])


def shared_variance(a: Sample, b: Sample, pairing: Pairing) -> float:
    """Variance of the relative difference of mean steps from replicates within clusters [1].

    Simulated runs are made of the simulated steps, whose noise within clusters they share.
    """
    of_a, of_b = ((x.values - _means(x.values, x.unit)) / x.values.mean() for x in (a, b))
    if pairing and of_a.size == of_b.size:
        return float(np.var(of_b - of_a) / of_a.size)
    return float(np.var(of_a) / of_a.size + np.var(of_b) / of_b.size)


def holm(p_values: Array) -> Array:
    """Adjust p-values so that the chance of any false one is at most their level; NaN stay so.

    References
    ----------
    Holm (1979), "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6, 65.
    """
    order = np.argsort(p_values)  # NaN last
    left = np.isfinite(p_values).sum() - np.arange(p_values.size)
    out = np.empty(p_values.size)
    out[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * np.maximum(left, 1)))
    return out
