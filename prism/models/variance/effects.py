"""One random effect of a crossed table: spread per column, intervals, scores.

An effect is one draw shared by all columns times a loading per column. Its variance is a
difference of mean products (expected mean squares), its scores the weighted mean of what the
columns show, scaled to unit variance, so that the distribution of the effect has the component's
variance. Left out: a second draw behind the same stratum; `explained` says when it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from prism.models.variance.factors import Split, explained_share, leading_signs
from prism.models.variance.intervals import (
    chi_square_interval,
    difference_interval,
    heavier_df,
    pooled_df,
    workers_df,
)

Array = NDArray[np.float64]
Index = NDArray[np.int64]


VAGUE_DF = 30.0
"""Degrees of freedom below which a loading's square is no chi-square (coverage by simulation)."""


class Column(NamedTuple):
    """Which op a column of the table holds."""

    op_kind: str
    stage: int
    chunk: int = 0
    name: str = ""  # where several ops of this kind make up a microbatch


class Spread(NamedTuple):
    """A component over the columns of one op_kind, as standard deviations of log duration."""

    std: float
    lo: float
    hi: float
    share: float
    """Share of the variance of the op_kind, lemons apart."""


class Limits(NamedTuple):
    """Estimate and limits of a variance: [group], a group being a column or an op_kind."""

    value: Array
    low: Array
    high: Array
    df: Array


@dataclass(frozen=True)
class Component:
    """A random effect: ``effect[column] = loadings[column] * scale * score``.

    `std` is its standard deviation of log duration, ``abs(loadings) * scale``, with limits
    `ci_lo` and `ci_hi` (nan where the table cannot tell); `scores` have unit variance (rank:
    [column, replica], nan for lemons; step: [step]; rank_step: [replica, step]; content:
    [replica, step, microbatch]; nan where nothing was seen); `explained` is the share of the
    stratum's variance (as correlations) that its first eigenvector carries; `df` the effective
    degrees of freedom over all columns.
    """

    name: str
    std: Array
    loadings: Array
    scale: float
    scores: Array
    explained: float
    ci_lo: Array
    ci_hi: Array
    df: float


def group_columns(columns: Sequence[Column]) -> dict[str, Index]:
    """Columns of every op_kind, in order of appearance."""
    kinds = list(dict.fromkeys(column.op_kind for column in columns))
    return {
        kind: np.array([j for j, column in enumerate(columns) if column.op_kind == kind])
        for kind in kinds
    }


def column_groups(n: int) -> list[Index]:
    """Every column as a group of its own."""
    return [np.array([j]) for j in range(n)]


def stratum_limits(
    upper: Array, upper_df: Array, lower: Array, lower_df: Array, groups: Sequence[Index],
    level: float,
) -> Limits:  # fmt: skip
    """Limits of the mean over each group of ``diag(upper - lower)``.

    Parameters
    ----------
    upper, lower : ndarray
        [column, column] mean products, times their coefficients.
    upper_df, lower_df : ndarray
        [column] degrees of freedom of the diagonals.
    """
    q = np.empty((2, len(groups)))
    df = np.empty((2, len(groups)))
    for which, (products, own) in enumerate(((upper, upper_df), (lower, lower_df))):
        for g, members in enumerate(groups):
            block = products[np.ix_(members, members)]
            q[which, g] = np.trace(block) / members.size
            df[which, g] = pooled_df(block, float(own[members].mean()))
    low, high = difference_interval(q[0], df[0], q[1], df[1], level)
    return Limits(q[0] - q[1], low, high, df[0])


def rank_limits(
    upper: Array, upper_df: Array, lower: Array, lower_df: Array, stages: Index,
    groups: Sequence[Index], level: float,
) -> Limits:  # fmt: skip
    """Limits of the workers' body variance; stages have different workers, chunks the same.

    Parameters
    ----------
    upper, upper_df : ndarray
        [column] mean square of the body and its degrees of freedom.
    lower, lower_df : ndarray
        [column, column] mean products of their noise, times their coefficients; [column].
    stages : ndarray
        [column] stage.
    """
    q = np.zeros((2, len(groups)))
    df = np.zeros((2, len(groups)))
    for g, members in enumerate(groups):
        known = members[upper_df[members] > 0.0]
        if known.size == 0:
            continue
        block = lower[np.ix_(known, known)]
        q[:, g] = upper[known].mean(), np.trace(block) / known.size
        same = stages[known][:, None] == stages[known][None, :]
        # between stages only the noise is shared: a replica's microbatches pass them all
        moving = np.where(same, np.sqrt(np.outer(upper[known], upper[known])), block)
        df[:, g] = (
            workers_df(moving, upper_df[known]), pooled_df(block, float(lower_df[known].mean()))
        )  # fmt: skip
    low, high = difference_interval(
        q[0], np.maximum(df[0], 1.0), q[1], np.maximum(df[1], 1.0), level
    )
    unknown = df[0] < 1.0
    return Limits(q[0] - q[1], np.where(unknown, np.nan, low), np.where(unknown, np.nan, high),
                  df[0])  # fmt: skip


def factor_limits(
    value: Array, total: Array, error: Array, shared: bool, kurtosis: Array, n: float,
    groups: Sequence[Index], level: float,
) -> Limits:  # fmt: skip
    """Limits of the mean over each group of squared loadings or of own variances.

    Parameters
    ----------
    value, total, error : ndarray
        [column] variances, those of content and residual together, and the sampling covariance
        [column, column] of the first, for normal data.
    kurtosis : ndarray
        [column] excess kurtosis of what is squared.
    """
    size = len(groups)
    mean, variance, heavy = np.empty(size), np.empty(size), np.empty(size)
    for g, members in enumerate(groups):
        mean[g] = value[members].mean()
        variance[g] = max(float(error[np.ix_(members, members)].mean()), 0.0)
        weight = value[members] / members.size
        sum_square = weight.sum() ** 2 * kurtosis[0] if shared else weight**2 @ kurtosis[members]
        heavy[g] = float(sum_square)
    safe = np.where(mean > 0.0, mean, 1.0)
    variance = np.maximum(variance, 1e-12 * safe**2)
    df = np.maximum(heavier_df(2.0 * safe**2 / variance, heavy / safe**2, n), 0.1)
    low, high = chi_square_interval(mean, np.maximum(df, 1.0), level)
    # a chi-square never reaches zero; a share of the total, as Fisher's z, does
    whole = np.array([max(float(total[members].mean()), 1e-300) for members in groups])
    share = np.minimum(mean / whole, 0.999)
    error_z = np.sqrt(2.0 / df) * safe / whole / (1.0 - share**2)
    half = -ndtri(0.5 * (1.0 - level)) * error_z
    z_low = whole * np.maximum(np.tanh(np.arctanh(share) - half), 0.0)
    z_high = whole * np.tanh(np.arctanh(share) + half)
    vague, large = df < VAGUE_DF, share >= 0.5
    # of a large share the total's own error decides, and that is a chi-square; loadings of
    # little data are often too large by chance, so they get the wider of the two
    wider = vague & large & shared
    low = np.where(vague & ~large, z_low, np.where(wider, np.minimum(low, z_low), low))
    high = np.where(vague & ~large, z_high, np.where(wider, np.maximum(high, z_high), high))
    return Limits(mean, low, high, df)


def excess_kurtosis(scores: Array, cell_size: float) -> float:
    """Excess kurtosis of draws seen as differences from the mean of a cell of this size.

    Centring dilutes it by ``sum w^4 / (sum w^2)^2``, w the weights of a difference.
    """
    flat = scores.ravel()
    seen = np.isfinite(flat)
    square = np.square(flat if seen.all() else flat[seen])
    mean = float(square.mean()) if square.size else 0.0
    if mean <= 0.0 or cell_size < 2.0:
        return 0.0
    own = 1.0 - 1.0 / cell_size
    dilution = (own**4 + (cell_size - 1.0) / cell_size**4) / own**2
    return float((square @ square / square.size / mean**2 - 3.0) / dilution)


def build_effect(name: str, covariance: Array, raw: Array, total: Array) -> Component:
    """Make an effect of a stratum's covariance matrix and what its columns show.

    Parameters
    ----------
    covariance : ndarray
        [column, column] estimated covariance; negative variances count as none.
    raw : ndarray
        [column, ...] what each column shows, nan where nothing.
    total : ndarray
        [column] variance of `raw`, noise included.
    """
    signed = leading_signs(covariance) * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    positive = np.where(total > 0.0, total, np.inf)
    # with no effect at all the scores are the noise's: harmless, their scale is zero
    weight = (signed if signed.any() else np.sqrt(total)) / positive
    return make_component(name, signed, weigh(raw, weight), explained_share(covariance))


def content_effect(
    split: Split, products: Array, rest: Array, present: NDArray[np.bool_]
) -> Component:
    """Make the effect of the work itself: the factor behind what single cells have left."""
    raw = rest if present.all() else np.where(present, rest, np.nan)
    scores = content_scores(split.loadings, split.own, np.diag(products), raw)
    return make_component("content", split.loadings, scores, explained_share(products))


def content_scores(signed: Array, own: Array, total: Array, raw: Array) -> Array:
    """Scores of the factor behind cells: columns weigh by how well they show it.

    Parameters
    ----------
    signed : ndarray
        [column] standard deviation of the factor, with its sign.
    own, total : ndarray
        [column] variances of what each column has of its own, and of all it shows.
    raw : ndarray
        [column, replica, step, microbatch] what cells show; nan where nothing.
    """
    least = np.maximum(own, 0.01 * total)
    safe = np.where(least > 0.0, least, np.inf)
    weight = (signed if signed.any() else np.sqrt(least)) / safe
    return weigh(raw, weight)


def weigh(raw: Array, weight: Array) -> Array:
    """Weighted sum over columns [column, ...] of what is seen, of unit mean square."""
    seen = np.isfinite(raw)
    flat = raw.reshape(raw.shape[0], -1)
    if seen.all():
        return standardise((weight @ flat).reshape(raw.shape[1:]))
    known = seen.reshape(flat.shape)
    total = np.abs(weight) @ known
    score = weight @ np.where(known, flat, 0.0) / np.where(total > 0.0, total, 1.0)
    return standardise(np.where(total > 0.0, score, np.nan).reshape(raw.shape[1:]))


def standardise(score: Array) -> Array:
    """Bring scores to mean 0 and mean square 1; nan stays, and constants become 0."""
    seen = np.isfinite(score)
    if not seen.any():
        return score
    known = score if seen.all() else score[seen]
    score = score - known.mean()
    square = float(np.mean(known**2) - known.mean() ** 2)
    return np.asarray(score / np.sqrt(square) if square > 0.0 else score * 0.0)


def make_component(name: str, signed: Array, scores: Array, explained: float) -> Component:
    """Normalise signed standard deviations [column] to the first that is not zero."""
    nonzero = np.flatnonzero(signed)
    first = float(signed[nonzero[0]]) if nonzero.size else 0.0
    none = np.full(signed.size, np.nan)
    return Component(
        name=name,
        std=np.abs(signed),
        loadings=signed / first if first else np.ones(signed.size),
        scale=abs(first),
        scores=scores if first >= 0.0 else -scores,
        explained=explained,
        ci_lo=none,
        ci_hi=none,
        df=float("nan"),
    )


def first_limits(limits: Limits, n: int) -> Limits:
    """Keep the first n groups."""
    return Limits(*(part[:n] for part in limits))


def with_limits(component: Component, limits: Limits, df: float) -> Component:
    """Set the limits of the columns, which are the first groups."""
    own = first_limits(limits, component.std.size)
    return replace(component, ci_lo=np.sqrt(own.low), ci_hi=np.sqrt(own.high), df=df)
