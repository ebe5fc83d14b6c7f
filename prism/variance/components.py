"""Variance components of log durations of a pipeline: position, rank, step, content, residual.

A complete trace is a crossed table (column, replica, step, microbatch), a column being one
op_kind of one stage and chunk. Components come from expected mean squares, with intervals; a
synthetic table of the same structure serves parametric bootstraps. Left out: memory from
microbatch to microbatch, interactions with the position, and spread shared by a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from prism.errors import PrismError
from prism.variance.anova import (
    Lemon,
    estimate_content,
    estimate_rank,
    estimate_rank_step,
    estimate_step,
    position_limits,
    separable,
    split_lemons,
)
from prism.variance.effects import (
    Column,
    Component,
    Limits,
    Spread,
    column_groups,
    first_limits,
    group_columns,
)
from prism.variance.shrinkage import restore_cells
from prism.variance.strata import Strata, take_apart

Array = NDArray[np.float64]

POSITION_P = 0.01
"""Positions are kept where the F-test of none has a p-value below this."""
EXPLAINED_ENOUGH = 0.8
"""Share of a stratum that one shared draw should carry."""
__all__ = [
    "Column",
    "Component",
    "Components",
    "Lemon",
    "Spread",
    "fit_components",
    "residual_scores",
    "sample_components",
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
    """Mean variance of the step within these steps over that of the law; 1 without memory."""
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
    columns : sequence of Column
        op_kind, stage and chunk of each column.
    steps : ndarray
        [step] step numbers; they may have gaps.
    level : float
        Probability of the intervals.

    Returns
    -------
    Components
        With warnings on what the table cannot tell.

    Raises
    ------
    PrismError
        If the table is too small: it needs 2 steps, and 2 replicas or 2 microbatches.

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
    kinds = group_columns(columns)
    groups = column_groups(len(columns)) + list(kinds.values())
    content, _, content_limits, residual_limits = estimate_content(strata, groups, level)
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
                f"{effect.name}: the first eigenvector carries {100.0 * effect.explained:.0f} % "
                f"of the correlations between columns (below {100.0 * EXPLAINED_ENOUGH:.0f} %); "
                "one shared draw with a loading per column describes it only roughly"
            )
    missing = float(np.mean(~strata.present))
    if missing > 0.0:
        out.append(f"{100.0 * missing:.2g} % of the cells are missing and were left out")
    if strata.rest.shape[0] < 3:
        out.append("fewer than three columns: content and residual are told apart by assumption")
    return tuple(out)


def residual_scores(components: Components, op_kind: str | None = None) -> Array:
    """Pool standardised residuals, for a law of the residual.

    Parameters
    ----------
    components : Components
        From `fit_components`.
    op_kind : str, optional
        Only the columns of this op_kind; all where None.

    Returns
    -------
    ndarray
        [value] residuals over their column's standard deviation, nan left out.
    """
    keep = [op_kind is None or column.op_kind == op_kind for column in components.columns]
    pooled = components.residual[np.array(keep)]
    return np.asarray(pooled[np.isfinite(pooled)])


def sample_components(
    components: Components,
    n_steps: int,
    rng: np.random.Generator,
    steps: NDArray[np.int64] | None = None,
    *,
    law: str = "empirical",
) -> Array:
    """Draw a synthetic table with the structure of a fit.

    Parameters
    ----------
    components : Components
        From `fit_components`; means, positions and ranks are kept as they are.
    n_steps : int
        Steps to draw.
    rng : numpy.random.Generator
        Source of randomness.
    steps : ndarray, optional
        [step] step numbers, which matter for the memory over steps; 0, 1, 2, ... where None.
    law : str
        "empirical": scores are drawn from the fitted ones, smoothed; "normal".

    Returns
    -------
    ndarray
        [column, replica, step, microbatch] log of durations in seconds.

    Notes
    -----
    Empirical scores are ``(x + h z) / sqrt(1 + h^2)``, x drawn from the standardised scores, z
    normal, h = 1.06 n^-0.2. Step scores with memory are normal ones with that correlation,
    brought to the same law by their ranks.
    """
    if law not in ("empirical", "normal"):
        raise ValueError(f"law {law!r} is neither 'empirical' nor 'normal'")
    numbers = np.arange(n_steps) if steps is None else np.asarray(steps, dtype=np.int64)
    if numbers.size != n_steps:
        raise ValueError(f"{numbers.size} step numbers for {n_steps} steps")
    n_columns, n_replicas, _, n_microbatches = components.residual.shape
    cells = (n_replicas, n_steps, n_microbatches)
    empirical = law == "empirical"
    step = _step_scores(components, numbers, rng, empirical)
    cell = _draw(components.rank_step.scores, cells[:2], rng, empirical)
    content = _draw(components.content.scores, cells, rng, empirical)
    out = np.stack([
        _draw(own, cells, rng, empirical) * std
        for own, std in zip(components.residual, components.residual_std, strict=True)
    ])  # fmt: skip
    shape = (n_columns, 1, 1, 1)
    for effect, score in (
        (components.step, step[:, None]),
        (components.rank_step, cell[:, :, None]),
        (components.content, content),
    ):
        if effect.scale > 0.0:
            out += (effect.loadings * effect.scale).reshape(shape) * score
    level = components.mean[:, None] + components.rank
    out += level[:, :, None, None] + components.position[:, None, None, :]
    return out


def _known(scores: Array) -> Array:
    """Flatten scores, missing ones left out."""
    flat = scores.ravel()
    seen = np.isfinite(flat)
    return flat if seen.all() else flat[seen]


def _bandwidth(n: int) -> float:
    """Normal-reference bandwidth for scores of unit variance (Silverman 1986, section 3.4.2)."""
    return float(1.06 * n**-0.2)


def _draw(
    scores: Array, shape: tuple[int, ...], rng: np.random.Generator, empirical: bool
) -> Array:
    """Draw independent scores of unit variance."""
    normal = rng.standard_normal(shape)
    known = _known(scores)
    if not empirical or known.size < 2:
        return normal
    width = _bandwidth(known.size)
    picked = known[rng.integers(0, known.size, shape)]
    return np.asarray((picked + width * normal) / np.sqrt(1.0 + width**2))


def _step_scores(
    components: Components, numbers: NDArray[np.int64], rng: np.random.Generator, empirical: bool
) -> Array:
    """Draw step scores with the fitted memory."""
    length = components.step_correlation_steps
    if length is None:
        return _draw(components.step.scores, (numbers.size,), rng, empirical)
    distance = np.abs(numbers[:, None] - numbers[None, :])
    share = components.step_correlation_share
    correlation = share * np.exp(-distance / length) + (1.0 - share + 1e-9) * np.eye(numbers.size)
    normal = np.linalg.cholesky(correlation) @ rng.standard_normal(numbers.size)
    known = np.sort(_known(components.step.scores))
    if not empirical or known.size < 2:
        return np.asarray(normal)
    width = _bandwidth(known.size)
    at = (np.arange(known.size) + 0.5) / known.size

    def turn(z: Array) -> Array:
        # smoothing by z itself keeps the memory, which white noise would weaken
        return np.asarray(np.interp(ndtr(z), at, known) + width * z)

    grid = turn(ndtri((np.arange(2000) + 0.5) / 2000))
    return np.asarray((turn(normal) - grid.mean()) / grid.std())
