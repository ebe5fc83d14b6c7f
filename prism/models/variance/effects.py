"""One random effect of a crossed table: spread and loading per column, scores.

An effect is one draw shared by all columns times a loading per column. Its variance is a
difference of mean products (expected mean squares), its scores the weighted mean of what the
columns show, scaled to unit variance, so that the distribution of the effect has the component's
variance. Left out: a second draw behind the same stratum; `explained` says when it matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prism.common.arrays import Array
from prism.models.variance.factors import explained_share, leading_signs


class Column(NamedTuple):
    """Which op a column of the table holds."""

    op_kind: str
    stage: int
    chunk: int = 0
    name: str = ""  # where several ops of this kind make up a microbatch


class EffectSpread(NamedTuple):
    """A component over the columns of one op_kind, as standard deviations of log duration."""

    std: float
    lo: float
    hi: float
    share: float  # share of the variance of the op_kind, lemons apart


@dataclass(frozen=True)
class Component:
    """A random effect: ``effect[column] = loadings[column] * scale * score``.

    `std` is its standard deviation of log duration, ``abs(loadings) * scale``; `scores` have unit
    variance (step: [step]; rank_step: [replica, step]; content: [replica, step, microbatch]; nan
    where nothing was seen); `explained` is the share of the stratum's variance (as correlations)
    that its first eigenvector carries.
    """

    name: str
    std: Array
    loadings: Array
    scale: float
    scores: Array
    explained: float


def build_effect(name: str, covariance: Array, raw: Array, total: Array) -> Component:
    """Make an effect of a stratum's covariance matrix and what its columns show.

    `covariance` [column, column] estimated covariance; negative variances count as none. `raw`
    [column, ...] what each column shows, nan where nothing. `total` [column] variance of `raw`,
    noise included.
    """
    signed = leading_signs(covariance) * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    positive = np.where(total > 0.0, total, np.inf)
    # with no effect at all the scores are the noise's: harmless, their scale is zero
    weight = (signed if signed.any() else np.sqrt(total)) / positive
    return make_component(name, signed, weigh(raw, weight), explained_share(covariance))


def make_component(name: str, signed: Array, scores: Array, explained: float) -> Component:
    """Normalise signed standard deviations [column] to the first that is not zero."""
    nonzero = np.flatnonzero(signed)
    first = float(signed[nonzero[0]]) if nonzero.size else 0.0
    loadings = signed / first if first else np.ones(signed.size)
    scores = scores if first >= 0.0 else -scores
    return Component(name, np.abs(signed), loadings, abs(first), scores, explained)


def content_scores(signed: Array, own: Array, raw: Array) -> Array:
    """Scores of the factor behind cells: columns weigh by how well they show it.

    `signed` [column] standard deviation of the factor, with its sign. `own` [column] variance of
    what each column has of its own. `raw` [column, replica, step, microbatch] what cells show; nan
    where nothing.
    """
    least = np.maximum(own, 0.01 * (signed**2 + own))
    safe = np.where(least > 0.0, least, np.inf)
    return weigh(raw, (signed if signed.any() else np.sqrt(least)) / safe)


def weigh(raw: Array, weight: Array) -> Array:
    """Weighted sum over columns [column, ...], of unit mean square; nan where one is."""
    return standardise(np.asarray(weight @ raw.reshape(len(raw), -1)).reshape(raw.shape[1:]))


def standardise(score: Array) -> Array:
    """Bring scores to mean 0 and mean square 1; nan stays, and constants become 0."""
    known = score[np.isfinite(score)]
    if not known.size:
        return score
    score = score - known.mean()
    square = float(known.var())
    return np.asarray(score / np.sqrt(square) if square > 0.0 else score * 0.0)


def excess_kurtosis(scores: Array) -> float:
    """Excess kurtosis of what is finite, 0 where nothing varies."""
    known = scores[np.isfinite(scores)]
    square = np.square(known - known.mean()) if known.size else np.zeros(1)
    mean = float(square.mean())
    return float(np.mean(square**2) / mean**2 - 3.0) if mean > 0.0 else 0.0


def share_of(part: Array, whole: Array) -> Array:
    """Part over whole, 0 where there is nothing."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0.0)
