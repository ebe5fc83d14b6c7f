"""Distributions of the random multipliers, and the quantile tables the engine draws from.

Every effect of prism has mean 1, so that a nominal duration stays the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism.common.errors import PrismError
from prism.distributions.tables import (
    N_CELLS,
    occasional_table,
    quadrature,
    table_of_quantiles,
    tail_panels,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from prism.distributions.families import Function

    Array = NDArray[np.float64]

# What the numbers in `Distribution.params` mean, in order; also the schema of a library file.
PARAM_NAMES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "lognormal": ("cv",),
    "normal": ("cv",),
    "gamma": ("cv",),
    "uniform": ("lo", "hi"),
    "bounded_body": ("cv", "gpd_shape"),
    "bounded_body_lemons": (
        "body_cv", "gpd_shape", "lemon_fraction", "lo", "hi", "max_slowdown",
    ),
    "mixture": (),  # the weights, as many as there are parts
    "empirical": (),  # knots instead
}  # fmt: skip
_TIP = 1e-6  # probability of the outermost values of a distribution that is kept as quantiles
_TAIL = np.geomspace(_TIP, 1e-3, 31)
_TAILED = np.unique(np.concatenate([np.linspace(0.0, 1.0, 513), _TAIL, 1.0 - _TAIL]))
POSITIVE = 1e-9  # a duration is never negative: lower bound before a power is taken


class Moments(NamedTuple):
    """Standard deviation of X**p / E[X**p], and the normalisation E[X**p]."""

    std: float
    norm: float


@dataclass(frozen=True)
class Distribution:
    """One distribution, X = loc + scale * Z with Z the standard member of its family.

    Use the constructors of this module (`lognormal`, `empirical`, ...): they set mean 1.
    Distributions are immutable, hashable and hold plain floats only; equal distributions are equal
    keys.
    """

    family: str
    params: tuple[float, ...] = ()
    parts: tuple[Distribution, ...] = ()
    knots_q: tuple[float, ...] = ()
    knots_x: tuple[float, ...] = ()
    loc: float = 0.0
    scale: float = 1.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept, as knots are many; without text, whose hash each process has
        return hash((self.params, self.parts, self.knots_q, self.knots_x, self.loc, self.scale))

    @property
    def mean(self) -> float:
        """Mean [1]."""
        return _moments(self, 1.0)[0]

    @property
    def std(self) -> float:
        """Standard deviation [1]."""
        return _moments(self, 1.0)[1]

    @property
    def cv(self) -> float:
        """Coefficient of variation std / mean [1]."""
        return self.std / self.mean

    def cdf(self, x: ArrayLike) -> Array:
        """Probability of a value up to x."""
        z = (np.asarray(x, dtype=np.float64) - self.loc) / self.scale
        if self.parts:
            weighted = (w * part.cdf(z) for w, part in zip(self.weights, self.parts, strict=True))
            return np.asarray(sum(weighted))
        if self.family == "empirical":
            return np.asarray(np.interp(z, self.knots_x, self.knots_q))
        return np.asarray(_standard(self.family)[0](self.params, z))

    def ppf(self, q: ArrayLike) -> Array:
        """Quantile of probability q, the inverse of `cdf`."""
        probability = np.asarray(q, dtype=np.float64)
        if self.parts:
            z = _invert_mixture(self, probability)
        elif self.family == "empirical":
            z = np.asarray(np.interp(probability, self.knots_q, self.knots_x))
        else:
            z = _standard(self.family)[1](self.params, probability)
        return np.asarray(self.loc + self.scale * z)

    @property
    def weights(self) -> tuple[float, ...]:
        """Probabilities of the parts of a mixture [1]."""
        if self.family == "bounded_body_lemons":
            return (1.0 - self.params[2], self.params[2])[: len(self.parts)]
        return self.params

    def power_moments(self, power: float) -> Moments:
        """Moments of X**power / E[X**power], the multiplier that a loading makes of this one."""
        norm, std = _moments(self, float(power))
        return Moments(std / norm, norm)

    def times(self, factor: float) -> Distribution:
        """Distribution of factor * X, factor > 0 (used for the parts of a mixture)."""
        return replace(self, loc=self.loc * factor, scale=self.scale * factor)

    def scaled_to(self, cv: float) -> Distribution:
        """Distribution of the same shape with mean 1 and this coefficient of variation.

        Parametric families are rebuilt with the new cv; others are stretched about their mean, also
        below 0, which whoever draws from them refuses.
        """
        if cv == 0.0 or self.std == 0.0:
            return constant()
        if self.family in CONSTRUCTORS and self.family != "bounded_body_lemons":
            return CONSTRUCTORS[self.family](cv, *self.params[1:])
        ratio, mean = _checked_cv(cv) / self.cv, self.mean
        loc, scale = 1.0 + ratio * (self.loc / mean - 1.0), ratio * self.scale / mean
        return replace(self, loc=loc, scale=scale)

    def spread_by(self, factor: float) -> Distribution:
        """Distribution of mean 1 with its spread multiplied, in a form that a file can hold.

        A family with a constructor is rebuilt at the new CV; ranks' distribution moves its body,
        its lemons and its limit; of others the quantiles move, as far as nothing takes negative
        time.
        """
        if self.std == 0.0 or factor == 1.0:
            return self
        if factor == 0.0:
            return constant()
        if self.family == "bounded_body_lemons":
            p = dict(zip(PARAM_NAMES[self.family], self.params, strict=True))
            moved = {name: 1.0 + factor * (p[name] - 1.0) for name in ("lo", "hi", "max_slowdown")}
            return self.with_params(body_cv=factor * p["body_cv"], **moved)
        if self.family in CONSTRUCTORS:
            return self.scaled_to(factor * self.cv)
        q = np.array(self.knots_q) if self.knots_q else _TAILED
        # a mixture's ends may be infinite
        values = self.ppf(q if self.knots_q else np.clip(q, _TIP, 1.0 - _TIP))
        table = empirical(q.tolist(), np.maximum(values, 0.0).tolist())
        deviations = table.ppf(q) - 1.0
        values = np.maximum(1.0 + factor * self.cv / table.cv * deviations, 1e-6)
        return empirical(q.tolist(), np.maximum.accumulate(values).tolist())

    def with_params(self, **changes: float) -> Distribution:
        """Distribution of the same family with some of its parameters (`PARAM_NAMES`) changed."""
        names = PARAM_NAMES[self.family]
        unknown = sorted(set(changes) - set(names))
        if unknown or self.family not in CONSTRUCTORS:
            wrong = ", ".join(unknown) or "to change"
            raise PrismError(
                f"distribution {self.family}: no parameter {wrong}; it has {', '.join(names)}"
            )
        values = dict(zip(names, self.params, strict=True)) | changes
        return CONSTRUCTORS[self.family](**values)


def constant() -> Distribution:
    """Return the distribution that is always 1: an effect switched off."""
    return Distribution("constant", loc=1.0, scale=1.0)


def lognormal(cv: float) -> Distribution:
    """Return a lognormal distribution with mean 1."""
    return Distribution("lognormal", (_checked_cv(cv),)) if cv else constant()


def normal(cv: float) -> Distribution:
    """Return a normal distribution with mean 1."""
    return Distribution("normal", (cv,), loc=1.0, scale=_checked_cv(cv)) if cv else constant()


def gamma(cv: float) -> Distribution:
    """Gamma with mean 1, shape 1/cv**2."""
    return Distribution("gamma", (_checked_cv(cv),)) if cv else constant()


def uniform(lo: float, hi: float) -> Distribution:
    """Uniform on [lo, hi]; its mean is (lo + hi) / 2, so it serves as a part of a mixture."""
    if not 0.0 < lo <= hi:
        raise PrismError(f"uniform: got lo = {lo:g}, hi = {hi:g}; expected 0 < lo <= hi")
    return Distribution("uniform", (lo, hi))


def bounded_body(cv: float, gpd_shape: float) -> Distribution:
    """Return a normal bulk with a bounded generalised Pareto tail from its 90 % quantile; mean 1.

    Shape -0.15 puts the bound 5.1 bulk standard deviations above the median. Coles, An Introduction
    to Statistical Modeling of Extreme Values, 2001, section 4.2.
    """
    if not -0.5 <= gpd_shape < 0.0:
        raise PrismError(f"gpd_shape = {gpd_shape:g}, expected -0.5 <= shape < 0: a bounded tail")
    if not cv:
        return constant()
    z_mean, z_std = _moments(Distribution("bounded_body", (0.0, gpd_shape)), 1.0)
    scale = _checked_cv(cv) / z_std
    return Distribution("bounded_body", (cv, gpd_shape), loc=1.0 - scale * z_mean, scale=scale)


def mixture(weights: Sequence[float], distributions: Sequence[Distribution]) -> Distribution:
    """Mixture, scaled as a whole to mean 1; parts may have any mean (`Distribution.times`)."""
    total = math.fsum(weights)
    if (
        len(weights) != len(distributions)
        or not distributions
        or min(weights) < 0.0
        or total <= 0.0
    ):
        raise PrismError(
            f"mixture: {len(weights)} weights (each >= 0) for {len(distributions)} distributions"
        )
    distribution = Distribution(
        "mixture", tuple(w / total for w in weights), parts=tuple(distributions)
    )
    return replace(distribution, scale=1.0 / distribution.mean)


def occasional(distribution: Distribution, share: float) -> Distribution:
    """Return what a `share` of draws has, over its mean over all draws; the others have 0."""
    if share == 1.0:
        return distribution
    parts = Distribution("constant", loc=0.0), distribution.times(1.0 / share)
    return Distribution("occasional", (1.0 - share, share), parts)


def bounded_body_lemons(
    body_cv: float,
    gpd_shape: float = -0.15,
    lemon_fraction: float = 0.0,
    lo: float = 1.06,
    hi: float = 1.2,
    max_slowdown: float = math.inf,
) -> Distribution:
    """Distribution of GPUs: a bounded body, and a fraction of lemons uniform on [lo, hi]; mean 1.

    lo, hi and max_slowdown are relative to the body's mean. Slower GPUs than max_slowdown are
    taken out of a cluster before a job starts, so lemons end there.
    """
    if not 0.0 <= lemon_fraction < 1.0:
        raise PrismError(f"lemon_fraction = {lemon_fraction:g}, expected 0 <= fraction < 1")
    if max_slowdown <= 1.0:
        raise PrismError(f"max_slowdown = {max_slowdown:g}, expected more than 1")
    top = min(hi, max_slowdown)
    body, lemons = bounded_body(body_cv, gpd_shape), uniform(min(lo, top), top)
    distribution = Distribution(
        "bounded_body_lemons",
        (body_cv, gpd_shape, lemon_fraction, lo, hi, max_slowdown),
        parts=(body, lemons) if lemon_fraction else (body,),
    )
    return replace(distribution, scale=1.0 / distribution.mean)


def empirical(q: Sequence[float], values: Sequence[float]) -> Distribution:
    """Quantile distribution: `values` at probabilities `q` (0 to 1), linear between; mean 1."""
    probabilities = tuple(float(p) for p in q)
    points = tuple(float(v) for v in values)
    rising = all(b > a for a, b in pairwise(probabilities))
    ordered = all(b >= a for a, b in pairwise(points))
    if len(points) != len(probabilities) or len(points) < 2 or not rising or not ordered:
        raise PrismError("empirical: q must rise, values must not fall, both equally long")
    if probabilities[0] != 0.0 or probabilities[-1] != 1.0 or points[0] < 0.0 or points[-1] <= 0.0:
        raise PrismError("empirical: q must run from 0 to 1 and values must be positive")
    distribution = Distribution("empirical", knots_q=probabilities, knots_x=points)
    return replace(distribution, scale=1.0 / distribution.mean)


# family -> constructor from its PARAM_NAMES
CONSTRUCTORS: dict[str, Callable[..., Distribution]] = {
    "lognormal": lognormal,
    "normal": normal,
    "gamma": gamma,
    "bounded_body": bounded_body,
    "bounded_body_lemons": bounded_body_lemons,
}


def _checked_cv(cv: float) -> float:
    if not (math.isfinite(cv) and cv >= 0.0):
        raise PrismError(f"cv = {cv:g}, expected a finite number of at least 0")
    return cv


def _standard(family: str) -> tuple[Function, Function]:
    from prism.distributions.families import STANDARD

    return STANDARD[family]


def _invert_mixture(distribution: Distribution, q: Array) -> Array:
    """Bisect the parts' joint cdf, between the smallest and the largest of their quantiles."""
    standard = replace(distribution, loc=0.0, scale=1.0)
    quantiles = np.stack([part.ppf(q) for part in distribution.parts])
    lo, hi = quantiles.min(axis=0), quantiles.max(axis=0)
    for _ in range(44):
        middle = 0.5 * (lo + hi)
        below = standard.cdf(middle) < q
        lo, hi = np.where(below, middle, lo), np.where(below, hi, middle)
    return np.asarray(0.5 * (lo + hi))


@lru_cache
def _nodes(with_kink: bool) -> tuple[Array, Array]:
    """Nodes and weights of a mean over all probabilities, also where a bounded body ends."""
    from prism.distributions.families import BODY_THRESHOLD

    kink = [BODY_THRESHOLD] if with_kink else []
    return quadrature(np.unique(np.append(tail_panels(), kink)), 12)


@lru_cache(maxsize=4096)
def _moments(distribution: Distribution, power: float) -> tuple[float, float]:
    """Mean and standard deviation of X**power."""
    if distribution.family == "constant":
        return distribution.loc**power, 0.0
    if distribution.parts:
        return _mixture_moments(distribution, power)
    if distribution.family == "empirical":
        q, weights = quadrature(np.asarray(distribution.knots_q), 6)
    else:
        q, weights = _nodes(distribution.family == "bounded_body")
    x = distribution.ppf(q)
    if power != 1.0:
        x = np.maximum(x, POSITIVE) ** power
    total = weights.sum()
    mean = float(weights @ x / total)
    return mean, math.sqrt(weights @ (x - mean) ** 2 / total)


def _mixture_moments(distribution: Distribution, power: float) -> tuple[float, float]:
    shifted = [
        replace(
            part,
            loc=distribution.loc + distribution.scale * part.loc,
            scale=distribution.scale * part.scale,
        )
        for part in distribution.parts
    ]
    moments = [_moments(part, power) for part in shifted]
    mean = math.fsum(w * m[0] for w, m in zip(distribution.weights, moments, strict=True))
    parts = zip(distribution.weights, moments, strict=True)
    return mean, math.sqrt(sum(w * (s * s + (m - mean) ** 2) for w, (m, s) in parts))


@lru_cache(maxsize=256)  # programs of one job differ in few of them
def quantile_table(distribution: Distribution, power: float = 1.0) -> NDArray[np.float32]:
    """Table [3072, 2] of Y = X**power / E[X**power] - 1, see `table_of_quantiles`.

    Of what only some draws have, see `occasional_table`.
    """
    moments = distribution.power_moments(power)
    if moments.std == 0.0:
        return np.zeros((N_CELLS, 2), dtype=np.float32)

    def multiplier(q: Array) -> Array:
        x = distribution.ppf(q)
        return (np.maximum(x, POSITIVE) ** power if power != 1.0 else x) / moments.norm - 1.0

    if distribution.family == "occasional" and power == 1.0:
        one, share = distribution.parts[1], distribution.params[1]
        return occasional_table(one.ppf, one.std, share)
    low = -1.0 if float(distribution.ppf(np.zeros(1))[0]) > -1e-9 else -math.inf
    return table_of_quantiles(multiplier, moments.std, low)
