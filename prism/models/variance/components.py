"""Variance components of log durations of a pipeline: position, rank, step, content, residual.

A complete trace is a crossed table (column, replica, step, microbatch), a column being one
op_kind of one stage and chunk. Components come from expected mean squares, with intervals. Left
out: memory from microbatch to microbatch, interactions with the position, and spread shared by a
node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_share
from prism.models.variance.anova import (
    Lemon,
    drifts_apart,
    estimate_content,
    estimate_rank,
    estimate_rank_step,
    estimate_step,
    pool_negative_step,
    position_limits,
    separable,
    split_lemons,
)
from prism.models.variance.effects import (
    Column,
    Component,
    Limits,
    Spread,
    column_groups,
    first_limits,
    group_columns,
)
from prism.models.variance.shrinkage import restore_cells
from prism.models.variance.strata import Strata, take_apart

Array = NDArray[np.float64]

POSITION_P = 0.01
"""Positions are kept where the F-test of none has a p-value below this."""
MOSTLY_WHOLE = 0.5
"""Share of cells that all columns must have for the others to be left out of content."""
EXPLAINED_ENOUGH = 0.8
"""Share of a stratum that one shared draw should carry."""
__all__ = [
    "Column",
    "Component",
    "Components",
    "Lemon",
    "Spread",
    "fit_components",
]


@dataclass(frozen=True)
class Components:
    """What makes log durations differ.

    ``y[column, r, t, m] = mean + position[m] + rank[r] + step[t] + rank_step[r, t]
    + content[r, t, m] + residual``; `mean` [column] is the body's (lemons apart), `position`
    [column, microbatch] is 0 where not significant, `rank` [column, replica] is shrunk towards 0
    for the body and as measured for lemons. The random ones are `Component`; `residual_std`
    [column] has limits `residual_lo`, `residual_hi`. `by_op_kind` is pooled over stages.
    `step_correlation_steps` is None where memory over steps is not significant;
    `step_correlation_share` is the share of the step's variance that has it.
    """

    columns: tuple[Column, ...]
    steps: NDArray[np.int64]
    mean: Array
    position: Array
    position_p: Array
    rank: Array
    lemons: tuple[Lemon, ...]
    rank_effect: Component
    step: Component
    rank_step: Component
    rank_step_apart: bool
    """Whether rank_step is drawn by stage, not once for a replica."""
    content: Component
    residual_std: Array
    residual_lo: Array
    residual_hi: Array
    residual: Array
    """[column, replica, step, microbatch] standardised; nan where missing."""
    by_op_kind: dict[str, dict[str, Spread]]
    step_correlation_steps: float | None
    step_correlation_share: float
    step_variance_seen: float
    """Mean variance of the step within these steps over its marginal one; 1 without memory."""
    warnings: tuple[str, ...]


def fit_components(
    log_seconds: Array,
    columns: Sequence[Column],
    steps: NDArray[np.int64],
    *,
    level: float = 0.9,
) -> Components:
    """Estimate the variance components of a crossed table.

    Parameters
    ----------
    log_seconds : ndarray
        [column, replica, step, microbatch] log of durations in seconds; nan where missing.
    steps : ndarray
        [step] step numbers; they may have gaps.

    Notes
    -----
    With M microbatches, R replicas and T steps, mean products over columns have the expectations
    ``rtm: S_rtm``, ``rt: S_rtm + M S_rt``, ``t: S_rtm + M S_rt + R M S_t`` and
    ``r: S_rtm + M S_rt + T M S_r``; with missing cells the coefficients are effective counts.
    ``S_rtm = l l' + diag(residual)`` is split by one common factor. Memory over steps makes a
    sample's variance too small and its degrees of freedom fewer; both are corrected.

    References
    ----------
    Searle, Casella, McCulloch, Variance Components (1992), chapters 4 and 5.
    """
    table = np.asarray(log_seconds, dtype=np.float64)
    numbers = np.asarray(steps, dtype=np.int64)
    _check(table, columns, numbers, level)
    strata, notes = separable(take_apart(table))
    strata = pool_negative_step(strata)
    kinds = group_columns(columns)
    groups = column_groups(len(columns)) + list(kinds.values())
    whole = _whole_cells(table)
    cells = strata if whole is table else separable(take_apart(whole))[0]
    content, _, content_limits, residual_limits = estimate_content(cells, groups, level)
    step, step_limits, memory = estimate_step(strata, numbers, groups, level)
    rank_step, cell_limits = estimate_rank_step(strata, groups, level)
    lemons, body = split_lemons(strata, columns, kinds)
    mean, rank, rank_effect, rank_spread = estimate_rank(strata, body, columns, groups, level)
    keep = strata.position_p < POSITION_P
    position = np.where(keep[:, None], strata.position, 0.0)
    worker = np.nan_to_num(strata.level - mean[:, None] - rank)
    fixed = worker[:, :, None] + (strata.position - position)[:, None, :]
    limits = {
        "position": position_limits(strata, keep, groups, level),
        "rank": rank_spread,
        "step": step_limits,
        "rank_step": cell_limits,
        "content": content_limits,
        "residual": residual_limits,
    }
    by_op_kind = _spreads(limits, list(kinds))
    effects = (step, rank_step, content)
    residual_only = first_limits(residual_limits, len(columns))
    content, residual = restore_cells(
        strata, content, residual_only.value, (rank_step, step), fixed
    )
    return Components(
        columns=tuple(columns),
        steps=numbers,
        mean=mean,
        position=position,
        position_p=strata.position_p,
        rank=rank,
        lemons=lemons,
        rank_effect=rank_effect,
        step=step,
        rank_step=rank_step,
        rank_step_apart=drifts_apart(strata, columns, rank_step),
        content=content,
        residual_std=np.sqrt(residual_only.value),
        residual_lo=np.sqrt(residual_only.low),
        residual_hi=np.sqrt(residual_only.high),
        residual=residual,
        by_op_kind=by_op_kind,
        step_correlation_steps=memory.steps if memory else None,
        step_correlation_share=memory.share if memory else 0.0,
        step_variance_seen=memory.expected if memory else 1.0,
        warnings=tuple(notes) + _warn(by_op_kind, effects, strata),
    )


def _whole_cells(table: Array) -> Array:
    """Leave out cells that some column lacks, where most cells are whole.

    Content and residual are distinguished by a small difference of products; those of other cells
    for each pair of columns differ by more than that.
    """
    seen = np.isfinite(table)
    whole = seen.all(axis=0)
    some = seen.any(axis=0)
    if whole.sum() < MOSTLY_WHOLE * some.sum() or (whole == some).all():
        return table
    return np.asarray(np.where(whole, table, np.nan))


def _check(table: Array, columns: Sequence[Column], steps: NDArray[np.int64], level: float) -> None:
    """Refuse what is no table, and tables too small to tell anything."""
    if table.ndim != 4 or table.shape[0] != len(columns) or table.shape[2] != steps.size:
        raise ValueError(
            f"log_seconds {table.shape} is not [column, replica, step, microbatch] for "
            f"{len(columns)} columns and {steps.size} steps"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"level {level} is not between 0 and 1")
    if np.isinf(table).any():
        raise ValueError("log_seconds holds infinite values; leave out durations of zero")
    seen = np.isfinite(table)
    used = seen.any(axis=(0, 1, 3)).sum()
    most = seen.sum(axis=3).max(initial=0)
    replicas = seen.any(axis=(0, 2, 3)).sum()
    if used < 2 or (replicas < 2 and most < 2):
        raise PrismError(
            f"variance components: found {used} steps, {replicas} dp replicas and at most {most} "
            "microbatches per step; at least 2 steps, and 2 replicas or 2 microbatches, are "
            "needed; use a longer trace, or give step times instead"
        )
    for column, present in zip(columns, seen, strict=True):
        if not present.any():
            raise PrismError(
                f"variance components: no durations of {column.op_kind} on stage {column.stage}, "
                f"chunk {column.chunk}; leave this column out"
            )


def _spreads(limits: dict[str, Limits], kinds: list[str]) -> dict[str, dict[str, Spread]]:
    """Tabulate standard deviations, limits and shares; the last groups are the op_kinds."""
    out: dict[str, dict[str, Spread]] = {}
    for g, kind in enumerate(kinds, start=-len(kinds)):
        variance = {name: max(float(limit.value[g]), 0.0) for name, limit in limits.items()}
        total = sum(variance.values())
        out[kind] = {
            name: Spread(
                float(np.sqrt(variance[name])),
                float(np.sqrt(limit.low[g])),
                float(np.sqrt(limit.high[g])),
                variance[name] / total if total > 0.0 else 0.0,
            )
            for name, limit in limits.items()
        }
    return out


def _warn(
    by_op_kind: dict[str, dict[str, Spread]], effects: Sequence[Component], strata: Strata
) -> tuple[str, ...]:
    """Say what the table cannot tell."""
    out = []
    for kind, spreads in by_op_kind.items():
        vague = [n for n, s in spreads.items() if n != "position" and s.lo <= 0.0]
        if vague:
            out.append(f"{kind}: {', '.join(vague)} not distinguishable from 0")
    for effect in effects:
        if effect.scale > 0.0 and effect.explained < EXPLAINED_ENOUGH:
            out.append(
                f"{effect.name}: the first eigenvector carries {format_share(effect.explained, 2)} "
                f"of the correlations between columns (below {format_share(EXPLAINED_ENOUGH)}); "
                "one shared draw with a loading per column describes it only roughly"
            )
    missing = float(np.mean(~strata.present))
    if missing > 0.0:
        out.append(f"{format_share(missing, 2)} of the cells are missing and were skipped")
    if strata.rest.shape[0] < 3:
        out.append("fewer than three columns: content and residual are separated by assumption")
    return tuple(out)
