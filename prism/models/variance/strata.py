"""Least squares of a crossed table (column, replica, step, microbatch), stratum by stratum.

Effects of position, worker, step and (worker, step) are taken out as fixed; what each stratum
leaves gives a matrix of mean products over columns and the coefficients of its expectation.
Missing cells are left out of the sums and counted in the degrees of freedom; with none missing
these are the balanced formulas. Left out: weights for cells of unequal size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc, stdtrit

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEMON_Z = 5.0
"""Robust standard deviations from the stage's median."""
LEMON_SLOWER = 0.03
"""Smallest slowdown worth a name; a healthy body has a CV of 1-2 %."""
LEMON_PROBABILITY = 1e-5
"""Chance of a healthy worker, which raises the limit where few workers tell the scale."""
PRIOR_SCALE, PRIOR_DF = 0.01, 2.0
"""Body of a healthy cluster, worth two workers, so that two that agree by chance do not make a
lemon of the third."""
OWN_SCALE = 10
"""Workers that are enough to tell a scale; with fewer, stages and op_kinds are pooled."""


class Strata(NamedTuple):
    """Least-squares effects and mean products; the expectations are on the scale of one cell."""

    level: Array
    """[column, replica] mean of each worker (nan: no data)."""
    position: Array
    """[column, microbatch] effect of the position, of mean zero."""
    position_p: Array
    """[column] p-value of the F-test of no position effect."""
    position_noise: Array
    """[column] variance of a position's estimate, in units of the residual's variance."""
    step: Array
    """[column, step] effect of the step."""
    rank_step: Array
    """[column, replica, step] what a worker and step have left."""
    rest: Array
    """[column, replica, step, microbatch] what a cell has left; 0 where missing."""
    present: Mask
    """[column, replica, step, microbatch] where there are data."""
    rest_products: Array
    """[column, column] E = S_rest."""
    rest_df: Array
    """[column, column] degrees of freedom."""
    cell_products: Array
    """[column, column] E = S_rank_step + per_cell S_rest."""
    cell_df: Array
    per_cell: Array
    """[column, column] mean of 1 / microbatches of a (worker, step)."""
    step_products: Array
    """[column, column] E = S_step + per_step (S_rank_step + per_cell S_rest)."""
    step_df: Array
    per_step: Array
    """[column]"""
    level_error: Array
    """[column, replica, replica] covariance of `level`, in units of a cell's variance."""


def take_apart(table: Array) -> Strata:
    """Take a table apart.

    Parameters
    ----------
    table : ndarray
        [column, replica, step, microbatch] log durations; nan where missing.
    """
    present = np.isfinite(table)
    whole = bool(present.all())
    count = present.sum(axis=3)  # [column, replica, step]
    filled = table if whole else np.where(present, table, 0.0)
    cell = filled.sum(axis=3) / np.maximum(count, 1)
    rest = filled - cell[..., None]
    rest[~present] = 0.0
    position, noise, position_ss, position_df = _fit_position(rest, present, count, whole)
    cell = cell - np.where(present, position[:, None, None, :], 0.0).sum(3) / np.maximum(count, 1)
    rest = np.where(present, filled - cell[..., None] - position[:, None, None, :], 0.0)
    flat = rest.reshape(rest.shape[0], -1)
    rest_df, per_cell = _rest_counts(present, count, whole)
    rest_products = (flat @ flat.T) / np.maximum(rest_df, 1.0)
    ratio = np.divide(position_ss, np.diag(rest_products) * np.maximum(position_df, 1.0),
                      out=np.zeros(flat.shape[0]), where=np.diag(rest_products) > 0.0)  # fmt: skip
    p = np.where(position_df > 0, fdtrc(np.maximum(position_df, 1.0),
                                        np.maximum(np.diag(rest_df), 1.0), ratio), 1.0)  # fmt: skip
    two = _two_way(cell, count > 0)
    return Strata(
        two.level, position, p, noise, two.step, two.rest, rest, present, rest_products, rest_df,
        two.products, two.df, per_cell, two.step_products, two.step_df, two.per_step,
        two.level_error,
    )  # fmt: skip


def _fit_position(
    rest: Array, present: Mask, count: NDArray[np.int64], whole: bool
) -> tuple[Array, Array, Array, Array]:
    """Fit positions [column, microbatch] inside cells; noise, sum of squares and df [column]."""
    n_columns, n_microbatches = rest.shape[0], rest.shape[3]
    if whole:
        n_cells = rest.shape[1] * rest.shape[2]
        position = rest.mean(axis=(1, 2))
        square = n_cells * np.sum(position**2, axis=1)
        noise = np.full(n_columns, (1.0 - 1.0 / n_microbatches) / n_cells)
        return position, noise, square, np.full(n_columns, n_microbatches - 1.0)
    seen = present.reshape(n_columns, -1, n_microbatches).astype(np.float64)
    weight = seen / np.sqrt(np.maximum(count.reshape(n_columns, -1, 1), 1.0))
    normal = np.einsum("jm,mn->jmn", seen.sum(axis=1), np.eye(n_microbatches))
    normal -= np.matmul(weight.transpose(0, 2, 1), weight)
    right = rest.sum(axis=(1, 2))
    inverse = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    position = np.einsum("jmn,jn->jm", inverse, right)
    df = np.round(np.einsum("jmn,jnm->j", inverse, normal))
    noise = np.trace(inverse, axis1=1, axis2=2) / n_microbatches
    return position, noise, np.sum(position * right, axis=1), df


def _rest_counts(present: Mask, count: NDArray[np.int64], whole: bool) -> tuple[Array, Array]:
    """Degrees of freedom of products of cell residuals, and mean 1 / cell size, per column pair.

    With projections P_j = I - 1 1'/n_j over what column j has in a cell, tr(P_j P_k) is
    ``n_jk - n_jk/n_j - n_jk/n_k + n_jk^2/(n_j n_k)``; fitting positions takes 1/cells of it.
    """
    n_columns, _, _, n_microbatches = present.shape
    n_cells = count[0].size
    if whole:
        df = (n_cells - 1.0) * (n_microbatches - 1.0)
        return np.full((n_columns,) * 2, df), np.full((n_columns,) * 2, 1.0 / n_microbatches)
    seen = present.reshape(n_columns, n_cells, n_microbatches).transpose(1, 0, 2).astype(np.float64)
    both = np.matmul(seen, seen.transpose(0, 2, 1))  # [cell, column, column]
    size = np.maximum(seen.sum(axis=2), 1.0)
    share = 1.0 / size
    trace = both * (1.0 - share[:, :, None] - share[:, None, :]) + both**2 * (
        share[:, :, None] * share[:, None, :]
    )
    cells = np.maximum(np.sum(both > 0.0, axis=0), 1.0)
    overlap = both * share[:, :, None] * share[:, None, :]
    return trace.sum(axis=0) * (1.0 - 1.0 / cells), overlap.sum(axis=0) / cells


class _TwoWay(NamedTuple):
    level: Array
    step: Array
    rest: Array
    products: Array
    df: Array
    step_products: Array
    step_df: Array
    per_step: Array
    level_error: Array


def _two_way(cell: Array, seen: Mask) -> _TwoWay:
    """Fit worker + step to cells [column, replica, step], each of weight one."""
    n_columns, n_replicas, n_steps = cell.shape
    if seen.all():
        level = cell.mean(axis=2)
        step = cell.mean(axis=1) - level.mean(axis=1, keepdims=True)
        per_step = np.full(n_columns, 1.0 / n_replicas)
        error = np.broadcast_to(np.eye(n_replicas) / n_steps, (n_columns, n_replicas, n_replicas))
    else:
        level, step, per_step, error = _unbalanced(cell, seen)
    rest = np.where(seen, cell - level[:, :, None] - step[:, None, :], 0.0)
    flat, mask = rest.reshape(n_columns, -1), seen.reshape(n_columns, -1).astype(np.float64)
    n_seen, n_rows, n_used = mask.sum(1), seen.any(axis=2).sum(1), seen.any(axis=1).sum(1)
    own_df = np.maximum(n_seen - n_rows - n_used + 1.0, 0.0)
    share = np.sqrt(own_df / np.maximum(n_seen, 1.0))
    df = (mask @ mask.T) * np.outer(share, share)
    step_df = np.sqrt(np.outer(*(np.maximum(n_used - 1.0, 0.0),) * 2))
    level = np.where(seen.any(axis=2), level, np.nan)
    return _TwoWay(
        level, step, rest, (flat @ flat.T) / np.maximum(df, 1.0), df,
        (step @ step.T) / np.maximum(step_df, 1.0), step_df, per_step, error,
    )  # fmt: skip


def _unbalanced(cell: Array, seen: Mask) -> tuple[Array, Array, Array, Array]:
    """Workers and steps by normal equations where some (worker, step) are missing."""
    design = seen.astype(np.float64)
    n_columns, _, n_steps = cell.shape
    known = np.where(seen, cell, 0.0)
    per_row = np.maximum(design.sum(axis=2), 1.0)
    per_column = design.sum(axis=1)
    scaled = design / per_row[:, :, None]
    normal = np.einsum("jt,tu->jtu", per_column, np.eye(n_steps))
    normal -= np.matmul(design.transpose(0, 2, 1), scaled)
    inverse = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    right = known.sum(axis=1) - np.einsum("jrt,jr->jt", scaled, known.sum(axis=2))
    step = np.einsum("jtu,ju->jt", inverse, right)
    used = per_column > 0.0
    n_used = np.maximum(used.sum(axis=1, keepdims=True), 1.0)
    step = np.where(used, step - np.sum(step * used, axis=1, keepdims=True) / n_used, 0.0)
    level = (known.sum(axis=2) - np.einsum("jrt,jt->jr", design, step)) / per_row
    trace = np.trace(inverse, axis1=1, axis2=2) / np.maximum(n_used[:, 0] - 1.0, 1.0)
    error = np.einsum("jr,rs->jrs", 1.0 / per_row, np.eye(cell.shape[1]))
    error = error + np.matmul(scaled, np.matmul(inverse, scaled.transpose(0, 2, 1)))
    return level, step, trace, error


def find_lemons(
    level: Array, noise: Array, kinds: NDArray[np.int64], stages: NDArray[np.int64]
) -> dict[tuple[int, int], dict[int, float]]:
    """Find workers far slower than their peers of the same stage and op_kind.

    Parameters
    ----------
    level : ndarray
        [column, replica] mean log durations, nan where missing.
    noise : ndarray
        [column] standard error of these means, which the scale cannot be below.
    kinds, stages : ndarray
        [column] number of the op_kind and of the stage; chunks of a stage are averaged.

    Notes
    -----
    The scale is the first quartile of the absolute differences between peers (Qn), of one column
    where it has ten replicas, else pooled over stages, and over op_kinds too where the workers
    are still fewer, with a healthy body as a prior worth two workers. The limit is 5 scales,
    or more where few workers tell the scale (Student's t at 1e-5), and at least 3 %. The centre
    is the lower median, so that of two workers the slow one is the lemon.

    References
    ----------
    Rousseeuw and Croux, J. Am. Stat. Assoc. 88 (1993) 1273 (Qn, factor 2.2219).
    """
    n_replicas = level.shape[1]
    if n_replicas < 2:
        return {}
    groups: dict[tuple[int, int], Array] = {}
    for kind, stage in sorted({(int(k), int(s)) for k, s in zip(kinds, stages, strict=True)}):
        chunks = level[(kinds == kind) & (stages == stage)]
        centre = np.nanquantile(chunks, 0.5, axis=1, method="lower", keepdims=True)
        groups[kind, stage] = np.asarray((chunks - centre).mean(axis=0))
    first, second = np.triu_indices(n_replicas, 1)
    apart = {key: np.abs(gap[first] - gap[second]) for key, gap in groups.items()}
    found: dict[tuple[int, int], dict[int, float]] = {}
    for key, gap in groups.items():
        peers = _peers(key, list(groups), n_replicas)
        differences = np.concatenate([apart[peer] for peer in peers])
        df = (n_replicas - 1.0) * len({stage for _, stage in peers})
        least = float(np.mean(noise[(kinds == key[0]) & (stages == key[1])]))
        limit = _lemon_limit(differences, df, least)
        for slow in np.flatnonzero(gap > max(limit, np.log1p(LEMON_SLOWER))):
            replica = int(slow)
            found[key[1], replica] = {
                k: float(other[replica]) for (k, s), other in groups.items() if s == key[1]
            }
    return found


def _peers(
    key: tuple[int, int], groups: list[tuple[int, int]], n_replicas: int
) -> list[tuple[int, int]]:
    """Choose the (op_kind, stage) whose workers tell the scale: as few as there are enough."""
    alike = [other for other in groups if other[0] == key[0]]
    if n_replicas >= OWN_SCALE:
        return [key]
    return alike if (n_replicas - 1) * len(alike) >= OWN_SCALE else groups


def _lemon_limit(differences: Array, df: float, noise: float) -> float:
    """Deviation beyond which a worker is no part of the body."""
    differences = differences[np.isfinite(differences)]
    if differences.size == 0:
        return float("inf")
    robust = 2.2219 * float(np.quantile(differences, 0.25, method="lower"))
    total = PRIOR_DF + df
    scale = np.sqrt((PRIOR_DF * PRIOR_SCALE**2 + df * max(robust, noise) ** 2) / total)
    return float(scale * max(LEMON_Z, -stdtrit(total, LEMON_PROBABILITY)))
