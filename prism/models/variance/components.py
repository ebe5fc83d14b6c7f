"""Variance components of log durations of a pipeline: position, rank, step, content, residual.

A complete trace is a crossed table (column, replica, step, microbatch), a column being one
op_kind of one stage and chunk. Lemons are set aside first; components come from expected mean
squares, intervals from pivotal draws. Left out: memory from microbatch to microbatch, interactions
with the position, and spread shared by a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
from prism.models.variance.draws import N_DRAWS
from prism.models.variance.effects import Column, Component, EffectSpread, share_of
from prism.models.variance.estimates import Estimates, Parts
from prism.models.variance.lemons import Lemon, find_lemons
from prism.models.variance.strata import decompose, pool_negative_step, separable

EXPLAINED_ENOUGH = 0.8  # share of a stratum that one shared draw should carry
__all__ = ["Column", "Component", "Components", "Lemon", "EffectSpread", "fit_components"]


@dataclass(frozen=True)
class Components:
    """What makes log durations differ.

    ``y[column, r, t, m] = mean + position[m] + rank[r] + step[t] + rank_step[r, t]
    + content[r, t, m] + residual``; `mean` [column] is the body's (lemons apart), `position`
    [column, microbatch] and `rank` [column, replica] are shrunk towards 0 by their noise, lemons
    are as measured. The random ones are `Component`; `by_op_kind` is pooled over stages.
    `step_correlation_steps` is None where memory over steps is not significant;
    `step_correlation_share` is the share of the step's variance that has it.
    """

    columns: tuple[Column, ...]
    steps: Index
    mean: Array
    position: Array
    rank: Array
    lemons: tuple[Lemon, ...]
    step: Component
    rank_step: Component
    rank_step_apart: bool  # whether rank_step is drawn by stage, not once for a replica
    content: Component
    residual_std: Array
    residual: Array  # [column, replica, step, microbatch] standardised; nan where missing
    by_op_kind: dict[str, dict[str, EffectSpread]]
    step_correlation_steps: float | None
    step_correlation_share: float
    warnings: tuple[str, ...]


def fit_components(
    log_seconds: Array, columns: Sequence[Column], steps: Index, n_draws: int = N_DRAWS
) -> Components:
    """Estimate the variance components of a crossed table.

    `log_seconds` [column, replica, step, microbatch] log of durations in seconds; nan where
    missing. `steps` [step] step numbers; they may have gaps. `n_draws`: draws behind the limits; 1
    where nobody reads them.

    With M microbatches, R replicas and T steps, mean products over columns have the expectations
    ``rtm: S_rtm``, ``rt: S_rtm + M S_rt``, ``t: S_rtm + M S_rt + R M S_t`` and
    ``r: S_rtm + M S_rt + T M S_r``; with missing cells the coefficients are effective counts.
    ``S_rtm = l l' + diag(residual)`` is split by one common factor. Memory over steps makes a
    sample's variance too small; the likelihood that finds it gives the marginal one.

    References
    ----------
    Searle, Casella, McCulloch, Variance Components (1992), chapters 4 and 5.
    """
    table = np.asarray(log_seconds, dtype=np.float64)
    numbers = np.asarray(steps, dtype=np.int64)
    _check(table, columns, numbers)
    lemons, body = find_lemons(table, columns)
    strata, notes = separable(decompose(table, _common_cells(table, body)))
    if min(strata.rest_df, strata.cell_df) <= 0.0:
        raise PrismError(
            "variance components: too few microbatches are complete to separate effects; "
            "use a longer trace, or give step times instead"
        )
    s = pool_negative_step(strata)
    estimates = Estimates(table, tuple(columns), body, s, n_draws)
    parts: dict[str, Parts] = {}
    position, parts["position"] = estimates.positions()
    step, parts["step"], step_share, memory = estimates.step(numbers)
    rank_step, parts["rank_step"], covariance = estimates.rank_step(known=not notes)
    mean, rank, parts["rank"] = estimates.ranks(position)
    # what the means of a few cells show is in part the cells' own
    taken = (step_share[:, None] * s.step)[:, None, :] + (
        share_of(rank_step.std**2, np.diag(s.cell_products))[:, None, None] * s.rank_step
    )
    taken = (mean[:, None] + rank)[..., None] + taken
    cells = table - taken[..., None] - position[:, None, None, :]
    content, parts["content"], residual, parts["residual"] = estimates.contents(
        np.where(s.seen, cells, np.nan)
    )
    by_op_kind = estimates.spreads(parts)
    return Components(
        columns=tuple(columns), steps=numbers, mean=mean, position=position, rank=rank,
        lemons=lemons, step=step, rank_step=rank_step,
        rank_step_apart=_drifts_apart(columns, covariance, rank_step), content=content,
        residual_std=np.sqrt(parts["residual"].value), residual=residual, by_op_kind=by_op_kind,
        step_correlation_steps=memory.steps if memory else None,
        step_correlation_share=memory.share if memory else 0.0,
        warnings=(*notes, *_warn(by_op_kind, (step, rank_step, content), table)),
    )  # fmt: skip


def _common_cells(table: Array, body: Flags) -> Flags:
    """Cells [replica, step, microbatch] of all columns, of replicas without a lemon.

    A single such replica could not tell rank_step from the step: then lemons, whose level is an
    effect of its own, stay.
    """
    seen = np.asarray(np.isfinite(table).all(axis=0))
    healthy = np.asarray(body.all(axis=0) & seen.any(axis=(1, 2)))
    if healthy.sum() > 1:
        seen = seen & healthy[:, None, None]
    if seen.any(axis=(0, 2)).sum() < 2:
        raise PrismError(
            "variance components: fewer than 2 steps have a microbatch that all ops of a replica "
            f"were recorded of; {format_share(float(np.mean(~np.isfinite(table))), 2)} of the "
            "durations are missing; use a trace with fewer gaps, or give step times instead"
        )
    return seen


def _check(table: Array, columns: Sequence[Column], steps: Index) -> None:
    """Refuse what is no table, and tables too small to tell anything."""
    if table.ndim != 4 or table.shape[0] != len(columns) or table.shape[2] != steps.size:
        raise ValueError(
            f"log_seconds {table.shape} is not [column, replica, step, microbatch] for "
            f"{len(columns)} columns and {format_count(steps.size, 'step')}"
        )
    if np.isinf(table).any():
        raise ValueError("log_seconds holds infinite values; leave out durations of zero")
    seen = np.isfinite(table)
    used = seen.any(axis=(0, 1, 3)).sum()
    most = seen.sum(axis=3).max(initial=0)
    replicas = seen.any(axis=(0, 2, 3)).sum()
    if used < 2 or (replicas < 2 and most < 2):
        raise PrismError(
            f"variance components: found {format_count(used, 'step')}, "
            f"{format_count(replicas, 'dp replica')} and at most {most} "
            "microbatches per step; at least 2 steps, and 2 replicas or 2 microbatches, are "
            "needed; use a longer trace, or give step times instead"
        )
    for column, present in zip(columns, seen, strict=True):
        if not present.any():
            raise PrismError(
                f"variance components: no durations of {column.op_kind} on stage {column.stage}, "
                f"chunk {column.chunk}; leave this column out"
            )


def _drifts_apart(columns: Sequence[Column], covariance: Array, effect: Component) -> bool:
    """Tell whether stages drift apart: their rank_step is nearer to independent than to shared."""
    stages = np.array([column.stage for column in columns])
    other = stages[:, None] != stages
    alike = float(np.outer(effect.std, effect.std)[other].sum())
    return alike > 0.0 and float(covariance[other].sum()) < 0.5 * alike


def _warn(
    by_op_kind: dict[str, dict[str, EffectSpread]], effects: Sequence[Component], table: Array
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
    missing = float(np.mean(~np.isfinite(table)))
    if missing > 0.0:
        out.append(f"{format_share(missing, 2)} of the cells are missing and were skipped")
    if len(table) < 3:
        out.append("fewer than three columns: content and residual are separated by assumption")
    return tuple(out)
