"""Least squares of a crossed table (column, replica, step, microbatch), stratum by stratum.

Effects of position, worker, step and (worker, step) are taken out as fixed; what each stratum
leaves gives a matrix of mean products over columns and the coefficients of its expectation. Cells
that some column lacks are left out; with none missing these are the balanced formulas. Left out:
weights for cells of unequal size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prism.common.arrays import Array, Flags


class Strata(NamedTuple):
    """Least-squares effects and mean products; the expectations are on the scale of one cell."""

    seen: Flags  # [replica, step, microbatch] cells of which all columns have data
    position: Array  # [column, microbatch] effect of the position, of mean zero
    position_noise: float  # variance of a position's estimate, in units of the residual's variance
    step: Array  # [column, step] effect of the step; 0 where nothing was seen
    rank_step: Array  # [column, replica, step] what a worker and step have left
    rest: Array  # [column, replica, step, microbatch] what a cell has left; 0 where missing
    rest_products: Array  # [column, column] E = S_rest
    rest_df: float
    cell_products: Array  # [column, column] E = S_rank_step + per_cell S_rest
    cell_df: float
    per_cell: float  # mean of 1 / microbatches of a (worker, step)
    step_products: Array  # [column, column] E = S_step + per_step (S_rank_step + per_cell S_rest)
    step_df: float
    per_step: float


def decompose(table: Array, seen: Flags) -> Strata:
    """Take a table apart.

    `table` [column, replica, step, microbatch] log durations. `seen` [replica, step, microbatch]
    cells to use, finite in every column.
    """
    count = np.maximum(seen.sum(axis=2), 1)  # [replica, step]
    filled = np.where(seen, table, 0.0)
    cell = filled.sum(axis=3) / count
    rest = np.where(seen, filled - cell[..., None], 0.0)
    weight = seen.reshape(-1, seen.shape[2]) / np.sqrt(count.reshape(-1, 1))
    normal = np.diag(seen.sum(axis=(0, 1)).astype(np.float64)) - weight.T @ weight
    inverse = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    position = rest.sum(axis=(1, 2)) @ inverse
    position_df = round(float(np.sum(inverse * normal)))
    shift = position[:, None, None, :] * seen
    cell = cell - shift.sum(axis=3) / count
    rest = np.where(seen, filled - cell[..., None] - shift, 0.0)
    used = np.asarray(seen.any(axis=2))
    rest_df = float(seen.sum() - used.sum() - position_df)
    step, own, cell_df, per_step = _two_way(cell, used)
    n_steps = int(used.any(axis=0).sum())
    return Strata(
        seen, position, float(np.trace(inverse)) / seen.shape[2], step, own, rest,
        _mean_products(rest, rest_df), rest_df, _mean_products(own, cell_df), cell_df,
        float((used / count).sum() / max(used.sum(), 1)),
        _mean_products(step, n_steps - 1.0), n_steps - 1.0, per_step,
    )  # fmt: skip


def _mean_products(values: Array, df: float) -> Array:
    flat = values.reshape(len(values), -1)
    return np.asarray(flat @ flat.T / max(df, 1.0))


def _two_way(cell: Array, used: Flags) -> tuple[Array, Array, float, float]:
    """Fit worker + step to cells [column, replica, step], each of weight one.

    Returns `step`, `rest` [column, step], and [column, replica, step]. `df`, `per_step`: degrees of
    freedom of the rest; variance of a step's estimate, in units of a cell's.
    """
    design = used.astype(np.float64)
    per_row = np.maximum(design.sum(axis=1), 1.0)
    known, some = cell * used, used.any(axis=0)
    normal = np.diag(design.sum(axis=0)) - (design / per_row[:, None]).T @ design
    inverse = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    right = known.sum(axis=1) - (known.sum(axis=2) / per_row) @ design
    step = right @ inverse
    step = np.where(some, step - step[:, some].mean(axis=1, keepdims=True), 0.0)
    level = (known.sum(axis=2) - step @ design.T) / per_row
    rest = np.where(used, cell - level[:, :, None] - step[:, None, :], 0.0)
    fitted = used.any(axis=1).sum() + round(float(np.sum(inverse * normal)))
    per_step = float(np.trace(inverse)) / max(some.sum() - 1.0, 1.0)
    return step, rest, float(used.sum() - fitted), per_step


def separable(s: Strata) -> tuple[Strata, list[str]]:
    """Give what one replica or one microbatch cannot tell apart to the simpler effect."""
    if s.rest_df < 1.0:
        note = (
            "one microbatch per worker and step: rank_step and content are not separable; all of "
            "it is counted as content and residual"
        )
        return s._replace(
            rest=np.where(s.seen, s.rank_step[..., None], 0.0),
            rank_step=np.zeros_like(s.rank_step),
            rest_products=s.cell_products, rest_df=s.cell_df, per_cell=1.0,
        ), [note]  # fmt: skip
    if s.cell_df < 1.0:
        note = (
            "one dp replica: rank effects and the stages' own times are not separable, nor "
            "rank_step and step; counted as stages' times and step"
        )
        return s._replace(cell_products=s.per_cell * s.rest_products, cell_df=s.rest_df), [note]
    return s, []


def pool_negative_step(s: Strata) -> Strata:
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
    if not s.rank_step.any() or s.step_df < 1.0 or s.per_step <= 0.0:
        return s
    above, size = s.step_products / s.per_step, np.diag(s.cell_products)
    excess = np.divide(np.diag(above) - size, size, out=np.zeros(size.size), where=size > 0.0)
    if excess.sum() >= 0.0:
        return s
    df = s.cell_df + s.step_df
    pooled = (s.cell_df * s.cell_products + s.step_df * above) / df
    return s._replace(cell_products=pooled, cell_df=df)
