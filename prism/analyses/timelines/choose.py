"""Which rows of a step a timeline shows.

By default all where they are few, else the replica that decides, the slowest, a typical one and the
fastest; or what is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from prism.analyses.timelines.played import PlayedStep, Row, Stream, durations
from prism.common.arrays import Array
from prism.common.errors import PrismError, option

MOST_ROWS = 64  # rows that are all shown; of more, those of some replicas
MOST_OPS = 40_000  # ops of a step that are shown unless more is asked for; one replica always is


class Wanted(NamedTuple):
    """What a user asks for; None: everything, or what is worth seeing."""

    replicas: tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


class Chosen(NamedTuple):
    """Rows that are shown, roles of replicas, and what was left out in words."""

    rows: list[Row]
    roles: dict[int, str]
    note: str


def choose_rows(step: PlayedStep, wanted: Wanted, of_rank: dict[int, Row] | None) -> Chosen:
    """Choose the rows of a step; those of replicas with a role come first."""
    roles, everyone = find_roles(step), step.rows()
    rows = everyone
    if wanted.ranks is not None:
        if of_rank is None:
            raise PrismError(
                f"a trace without numbers of ranks; choose with {option('replicas')} and "
                f"{option('stages')}"
            )
        _check("ranks", wanted.ranks, of_rank)
        asked = {of_rank[rank] for rank in wanted.ranks}
        rows = [row for row in rows if row in asked]
    if wanted.stages is not None:
        _check("stages", wanted.stages, range(step.n_stages))
        rows = [row for row in rows if row.stage in wanted.stages]
    if wanted.replicas is not None:
        _check("replicas", wanted.replicas, range(step.n_replicas))
        rows = [row for row in rows if row.replica in wanted.replicas]
    elif wanted.ranks is None:
        keep = _few_replicas(step, roles, rows)
        rows = [row for row in rows if row.replica in keep]
    place = {replica: i for i, replica in enumerate(roles)}
    rows = sorted(rows, key=lambda row: (place.get(row.replica, len(place)), row))
    if not rows:
        raise PrismError(
            f"no rank is in each of {option('ranks')}, {option('replicas')} and "
            f"{option('stages')}; widen one of them"
        )
    left, of = len(everyone) - len(rows), "ranks" if step.ranks else "rows"
    note = f"{left:,} of {len(everyone):,} {of} are left out" if left else ""
    return Chosen(rows, roles, note)


def _check(name: str, asked: Sequence[int], there: Collection[int]) -> None:
    for number in sorted(set(asked) - set(there)):
        n = max(there, default=-1) + 1
        raise PrismError(f"--{name} {number}: there are {n:,}, 0 to {n - 1:,}")


def find_roles(step: PlayedStep) -> dict[int, str]:
    """Name replicas worth seeing: the one that decides, the slowest, a typical one, the fastest.

    The one that decides has most of the critical path; slow and fast are by the seconds that a
    replica's busiest stage computes.
    """
    if step.n_replicas == 1:
        return {}
    order = np.argsort(_busiest(step), kind="stable")
    slowest, middle, fastest = (int(order[i]) for i in (-1, (order.size - 1) // 2, 0))
    roles = {deciding_row(step)[0]: "decides"}
    roles[slowest] = "decides, slowest" if slowest in roles else "slowest"
    if step.n_replicas > 2:
        roles.setdefault(middle, "typical")
    roles.setdefault(fastest, "fastest")
    return roles


def _busiest(step: PlayedStep) -> Array:
    """Seconds that the busiest stage of each replica computes, [replica]."""
    total, seconds = np.zeros((step.n_replicas, step.n_stages)), durations(step.ops, step.end)
    for i, op in enumerate(step.ops):
        if op.stream == Stream.COMPUTE and not op.is_global and op.member <= 0:
            total[:, op.stages[0]] += seconds[:, i]
    return np.asarray(total.max(axis=1))


def deciding_row(step: PlayedStep) -> tuple[int, int, float]:
    """Return replica and stage with most seconds on the critical path, and how many those are."""
    seconds: dict[tuple[int, int], float] = {}
    for link in step.path:
        info = step.ops[link.op]
        if not info.is_global and info.stream not in (Stream.JOIN, Stream.TRANSFER):
            place = link.replica, info.stages[0]
            seconds[place] = seconds.get(place, 0.0) + max(0.0, link.end - max(link.start, 0.0))
    (replica, stage), most = max(seconds.items(), key=lambda x: x[1], default=((0, 0), 0.0))
    return replica, stage, most


def _few_replicas(step: PlayedStep, roles: dict[int, str], rows: Sequence[Row]) -> set[int]:
    """Return all replicas where they are few, else those with a role."""
    n = step.n_replicas if len(rows) <= MOST_ROWS else max(1, len(roles))
    stages = {row.stage for row in rows}
    ops = sum(len(stages.intersection(op.stages)) for op in step.ops if op.stream != Stream.JOIN)
    n = min(n, max(1, MOST_OPS // max(1, ops)))
    return set(range(n)) if n == step.n_replicas else set(list(roles)[:n])
