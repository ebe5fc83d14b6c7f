"""Estimates of one component after the other from the strata of a crossed table.

What remains when lower strata are subtracted is the component; its scores and limits go with it.
A step that comes out negative is pooled into the stratum below; left out: other negative estimates,
which are cut at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from prism.models.variance.effects import (
    Column,
    Component,
    Limits,
    build_effect,
    content_effect,
    excess_kurtosis,
    factor_limits,
    make_component,
    rank_limits,
    standardise,
    stratum_limits,
    with_limits,
)
from prism.models.variance.factors import Memory, split_factor, step_memory
from prism.models.variance.intervals import pooled_df
from prism.models.variance.strata import Strata, find_lemons

Array = NDArray[np.float64]
Groups = Sequence[NDArray[np.int64]]

LEAST_EXPECTED = 2.0 / 3.0
"""A short trace of a slow drift shows little of its variance; it is not blown up further."""


APART = 0.5
"""Correlation between stages below which one draw for a whole replica describes it worse."""


class Lemon(NamedTuple):
    """A worker far slower than its peers."""

    stage: int
    replica: int
    slowdown: dict[str, float]
    """op_kind to duration over the body's mean."""


def separable(strata: Strata) -> tuple[Strata, list[str]]:
    """Give what one replica or one microbatch cannot tell apart to the simpler effect."""
    if strata.rest.shape[3] < 2 or not np.diag(strata.rest_df).any():
        note = (
            "one microbatch per worker and step: rank_step and content are not separable; all of "
            "it is counted as content and residual"
        )
        return strata._replace(
            rest=np.where(strata.present, strata.rank_step[..., None], 0.0),
            rank_step=np.zeros_like(strata.rank_step),
            rest_products=strata.cell_products,
            rest_df=strata.cell_df,
            per_cell=np.ones_like(strata.per_cell),
        ), [note]
    if not np.diag(strata.cell_df).any():
        note = (
            "one dp replica: rank effects and the stages' own times are not separable, nor "
            "rank_step and step; counted as stages' times and step"
        )
        return strata._replace(
            cell_products=strata.per_cell * strata.rest_products, cell_df=strata.rest_df
        ), [note]
    return strata, []


def pool_negative_step(strata: Strata) -> Strata:
    """Pool the steps with rank_step where workers are slow in turn, so that their sum varies less.

    Workers that compete for the same cores take turns: their means differ more within a step than
    from step to step, and the step's component comes out negative. Cut at zero alone, it leaves
    rank_step the whole difference, and a worker a larger variance than it shows.

    Notes
    -----
    With the component at its bound 0, both strata measure ``S_rtm + M S_rt``; their products
    pooled by degrees of freedom are the restricted maximum likelihood estimate. The step counts as
    negative where it is so over all columns together, each in units of its own mean square.

    References
    ----------
    Thompson, Ann. Math. Stat. 33 (1962) 273 (pooling the violator).
    """
    cell, df, step_df = strata.cell_products, strata.cell_df, strata.step_df
    if strata.rest.shape[1] < 2 or not strata.rank_step.any() or not np.diag(step_df).any():
        return strata
    scale = np.sqrt(np.outer(strata.per_step, strata.per_step))
    above = strata.step_products / scale
    size = np.diag(cell)
    excess = np.divide(np.diag(above) - size, size, out=np.zeros(size.size), where=size > 0.0)
    if excess.sum() >= 0.0:
        return strata
    pooled = (df * cell + step_df * above) / np.maximum(df + step_df, 1.0)
    return strata._replace(cell_products=pooled, cell_df=df + step_df)


def estimate_content(
    strata: Strata, groups: Groups, level: float
) -> tuple[Component, Array, Limits, Limits]:
    """Split what cells have left into shared content and residuals [column, ...]."""
    products, df = strata.rest_products, float(np.diag(strata.rest_df).mean())
    split = split_factor(products, df)
    cell_size = 1.0 / float(np.diag(strata.per_cell).mean())
    content = content_effect(split, products, strata.rest, strata.present)
    shared = split.loadings.reshape(-1, 1, 1, 1) * content.scores
    own = np.where(strata.present, strata.rest - shared, np.nan)
    residual = np.stack([standardise(column) for column in own])
    heavy = np.array([excess_kurtosis(column, cell_size) for column in residual])
    heavy_content = np.full(len(residual), excess_kurtosis(content.scores, cell_size))
    n, total = float(np.isfinite(content.scores).sum()), np.diag(products)
    content_limits = factor_limits(
        split.loadings**2, total, split.shared_error, True, heavy_content, n, groups, level
    )
    residual_limits = factor_limits(
        split.own, total, split.own_error, False, heavy, n, groups, level
    )
    every = [np.arange(len(residual))]
    overall = factor_limits(
        split.loadings**2, total, split.shared_error, True, heavy_content, n, every, level
    )
    content = with_limits(content, content_limits, float(overall.df[0]))
    return content, residual, content_limits, residual_limits


def estimate_rank_step(strata: Strata, groups: Groups, level: float) -> tuple[Component, Limits]:
    """Estimate what one worker and step have of their own."""
    noise = strata.per_cell * strata.rest_products
    cell_df, rest_df = np.diag(strata.cell_df), np.diag(strata.rest_df)
    limits = stratum_limits(strata.cell_products, cell_df, noise, rest_df, groups, level)
    if min(strata.rest.shape[1], strata.rest.shape[3]) < 2:
        limits = limits._replace(low=limits.low + np.nan, high=limits.high + np.nan)
    raw = np.where(strata.present.any(axis=3), strata.rank_step, np.nan)
    total = np.diag(strata.cell_products)
    effect = build_effect("rank_step", strata.cell_products - noise, raw, total)
    df = pooled_df(strata.cell_products, float(cell_df.mean()))
    return with_limits(effect, limits, df), limits


def drifts_apart(strata: Strata, columns: Sequence[Column], effect: Component) -> bool:
    """Tell whether each stage's workers have a rank_step of their own, not one per replica."""
    stages = np.array([column.stage for column in columns])
    other = stages[:, None] != stages[None, :]
    covariance = strata.cell_products - strata.per_cell * strata.rest_products
    alike = float(np.outer(effect.std, effect.std)[other].sum())
    return alike > 0.0 and float(covariance[other].sum()) < APART * alike


def estimate_step(
    strata: Strata, numbers: NDArray[np.int64], groups: Groups, level: float
) -> tuple[Component, Limits, Memory | None]:
    """Estimate what all workers have in a step, and its memory."""
    noise = strata.cell_products * np.sqrt(np.outer(strata.per_step, strata.per_step))
    products, step_df = strata.step_products, np.diag(strata.step_df)
    raw = np.where(strata.present.any(axis=(1, 3)), strata.step, np.nan)
    total = np.diag(products)
    effect = build_effect("step", products - noise, raw, total)
    seen = np.isfinite(effect.scores)
    memory = step_memory(effect.scores[seen], numbers[seen]) if effect.scale > 0.0 else None
    if memory is not None:
        memory = memory._replace(expected=max(memory.expected, LEAST_EXPECTED))
        products = products / memory.expected
        step_df = np.minimum(step_df, memory.df)
        effect = build_effect("step", products - noise, raw, total)
        # white noise of the estimates is no part of the effect
        real = float(np.sum(effect.std**2) / np.trace(products))
        memory = memory._replace(share=min(1.0, memory.share / max(real, 0.1)))
    limits = stratum_limits(products, step_df, noise, np.diag(strata.cell_df), groups, level)
    df = pooled_df(products, float(step_df.mean()))
    return with_limits(effect, limits, df), limits, memory


def split_lemons(
    strata: Strata, columns: Sequence[Column], kinds: dict[str, NDArray[np.int64]]
) -> tuple[tuple[Lemon, ...], NDArray[np.bool_]]:
    """Find lemons, and who belongs to the body [column, replica]."""
    names = list(kinds)
    kind_idx = np.array([names.index(column.op_kind) for column in columns])
    stages = np.array([column.stage for column in columns])
    level = strata.level
    error = np.diagonal(strata.level_error, axis1=1, axis2=2).mean(axis=1)
    noise = np.sqrt(error * np.diag(strata.cell_products))
    found = find_lemons(level, noise, kind_idx, stages)
    body = np.isfinite(level)
    for stage, replica in found:
        body[stages == stage, replica] = False
    _keep_a_body(found, body, level, stages)
    lemons = []
    for (stage, replica), _ in sorted(found.items()):
        slowdown = {}
        for name, members in kinds.items():
            rows = members[stages[members] == stage]
            centre = np.nanmean(np.where(body[rows], level[rows], np.nan), axis=1)
            if rows.size and np.isfinite(level[rows, replica]).all():
                slowdown[name] = float(np.exp(np.mean(level[rows, replica] - centre)))
        lemons.append(Lemon(stage, replica, slowdown))
    return tuple(lemons), body


def _keep_a_body(
    found: dict[tuple[int, int], dict[int, float]], body: NDArray[np.bool_], level: Array,
    stages: NDArray[np.int64],
) -> None:  # fmt: skip
    """Take the least slow lemons back where a column has no body, as of two that differ in kind."""
    for stage in sorted({stage for stage, _ in found}):
        rows = np.flatnonzero(stages == stage)
        slow = sorted(
            (replica for s, replica in found if s == stage),
            key=lambda replica: float(np.nansum(list(found[stage, replica].values()))),
        )
        for replica in slow:
            if body[rows].any(axis=1).all():
                break
            del found[stage, replica]
            body[rows, replica] = np.isfinite(level[rows, replica])


def estimate_rank(
    strata: Strata, body: NDArray[np.bool_], columns: Sequence[Column],
    groups: Groups, level: float,
) -> tuple[Array, Array, Component, Limits]:  # fmt: skip
    """Means of the body [column], ranks [column, replica], their effect and its limits."""
    n_body = body.sum(axis=1)
    mean = np.where(body, strata.level, 0.0).sum(axis=1) / np.maximum(n_body, 1)
    raw = np.where(np.isfinite(strata.level), strata.level - mean[:, None], 0.0)
    inside = np.where(body, raw, 0.0)
    df = np.maximum(n_body - 1.0, 0.0)
    centre = body / np.maximum(n_body, 1)[:, None]
    own_error = np.diagonal(strata.level_error, axis1=1, axis2=2)
    spread_error = np.sum(own_error * body, axis=1) - np.maximum(n_body, 1) * np.einsum(
        "jr,jrs,js->j", centre, strata.level_error, centre
    )
    coefficient = np.sqrt(spread_error / np.maximum(df, 1.0))
    noise = strata.cell_products * np.outer(coefficient, coefficient)
    stages = np.array([column.stage for column in columns])
    mean_square = np.sum(inside**2, axis=1) / np.maximum(df, 1.0)
    limits = rank_limits(mean_square, df, noise, np.diag(strata.cell_df), stages, groups, level)
    n_columns = len(columns)
    pooled = np.zeros(n_columns)
    for members, value in zip(groups[n_columns:], limits.value[n_columns:], strict=True):
        pooled[members] = max(float(value), 0.0)
    error = own_error * np.diag(strata.cell_products)[:, None]
    spread = pooled[:, None]
    shrink = np.divide(spread, spread + error, out=np.zeros(raw.shape), where=spread > 0.0)
    rank = np.where(body, raw * shrink, raw)
    scores = np.full(raw.shape, np.nan)
    for members in groups[n_columns:]:
        scores[members] = standardise(np.where(body[members], inside[members], np.nan))
    std = np.sqrt(np.maximum(limits.value[:n_columns], 0.0))
    effect = make_component("rank", std, scores, 1.0)
    return mean, rank, with_limits(effect, limits, float(df.sum())), limits


def position_limits(
    strata: Strata, keep: NDArray[np.bool_], groups: Groups, level: float
) -> Limits:
    """Mean square of the positions that are kept; normal limits, columns moving together."""
    noise = strata.position_noise * np.diag(strata.rest_products)
    square = np.where(keep, np.maximum(np.mean(strata.position**2, axis=1) - noise, 0.0), 0.0)
    n = max(strata.position.shape[1], 1)
    error = np.where(keep, np.sqrt((4.0 * square * noise + 2.0 * noise**2) / n), 0.0)
    value = np.array([square[members].mean() for members in groups])
    half = -float(ndtri(0.5 * (1.0 - level))) * np.array([error[g].mean() for g in groups])
    return Limits(value, np.maximum(value - half, 0.0), value + half, np.full(value.size, np.nan))
