"""Lemons: workers far slower than their peers, found before anything is fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from prism.common.arrays import Array, Flags
from prism.common.means import finite_mean, median
from prism.models.variance.effects import Column

LEMON_PROBABILITY = 1e-5  # chance of a healthy worker beyond the limit, where its body is normal
LEMON_SLOWER = 0.035  # smallest slowdown worth a name: 112 burnt-in GPUs were all within it
PRIOR_SCALE, PRIOR_DF = 0.01, 4.0
"""CV of a healthy body, worth four workers, so that two that agree by chance do not make a lemon
of the third (false alarms and power: experiments/checks/components.py)."""


class Lemon(NamedTuple):
    """A worker far slower than its peers."""

    stage: int
    replica: int
    slowdown: dict[str, float]  # op_kind to duration over the body's mean


def find_lemons(table: Array, columns: Sequence[Column]) -> tuple[tuple[Lemon, ...], Flags]:
    """Find workers far slower than their peers of the same stage.

    `table` [column, replica, step, microbatch] log durations; nan where missing.

    Returns `body` [column, replica] whether there are durations, of no lemon.

    A worker's deviation is the mean over its ops of the difference to the replicas' median. The
    scale is the first quartile of the differences between peers (Qn), all stages together, and at
    least the error of the deviations; a healthy body counts as four more workers. The limit is
    Student's t. The centre is the lower median, so that of two workers the slow one is the lemon.

    References
    ----------
    Rousseeuw and Croux, J. Am. Stat. Assoc. 88 (1993) 1273 (Qn, factor 2.2219).
    """
    seen = np.asarray(np.isfinite(table).any(axis=(2, 3)))
    n_replicas = seen.shape[1]
    stages = np.array([column.stage for column in columns])
    names = sorted(set(stages.tolist()))
    cells = finite_mean(table, 3)
    apart = cells - median(cells, 1, keepdims=True)
    by_stage = np.stack([finite_mean(apart[stages == s], 0) for s in names])
    gap = finite_mean(by_stage, 2)  # [stage, replica]
    centre = np.nanquantile(gap, 0.5, axis=1, method="lower", keepdims=True)
    gap = gap - centre
    apart_by = difference_quantile([row[np.isfinite(row)] for row in gap], 0.25)
    if apart_by is None:
        return (), seen
    n_steps = np.maximum(np.isfinite(by_stage).sum(axis=2), 1)
    variance = finite_mean((by_stage - finite_mean(by_stage, 2)[..., None]) ** 2, 2)
    error = math.sqrt(float(np.nanmedian(variance / n_steps)))
    robust = max(2.2219 * apart_by, error)
    df = (n_replicas - 1.0) * len(names)
    scale = math.sqrt((PRIOR_DF * PRIOR_SCALE**2 + df * robust**2) / (PRIOR_DF + df))
    limit = max(-scale * stdtrit(PRIOR_DF + df, LEMON_PROBABILITY), np.log1p(LEMON_SLOWER))
    slow = [(names[i], int(r)) for i, r in np.argwhere(gap > limit)]
    body = seen.copy()
    for stage, replica in slow:
        body[stages == stage, replica] = False
    level = finite_mean(apart, 2)
    away = level - finite_mean(np.where(body, level, np.nan), 1)[:, None]
    lemons = []
    for stage, replica in slow:
        kinds = dict.fromkeys(c.op_kind for c in columns if c.stage == stage)
        rows = {k: [j for j, c in enumerate(columns) if c[:2] == (k, stage)] for k in kinds}
        lemons.append(Lemon(stage, replica, {
            k: float(np.exp(np.nanmean(away[members, replica])))
            for k, members in rows.items() if seen[members, replica].any()
        }))  # fmt: skip
    return tuple(lemons), body


def difference_quantile(rows: Sequence[Array], q: float) -> float | None:
    """Lower quantile of the absolute differences of all pairs within rows; None without a pair.

    Halved until the numbers end, counting pairs as near as that: none of them is kept.
    """
    rows = [np.sort(row) for row in rows if row.size > 1]
    if not rows:
        return None
    rank = 1 + int(q * (sum(row.size * (row.size - 1) // 2 for row in rows) - 1))

    def near(most: float) -> int:
        return sum(
            int(np.searchsorted(row, row + most, side="right").sum())
            - row.size * (row.size + 1) // 2
            for row in rows
        )

    low, high = 0.0, max(float(row[-1] - row[0]) for row in rows)
    if near(low) >= rank:
        return low
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (low, middle) if near(middle) >= rank else (middle, high)
    return high
