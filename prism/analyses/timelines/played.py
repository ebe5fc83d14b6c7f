"""A step that has been played: every op's end, and what each op waited for last.

One structure for steps of simulated jobs, replayed pipeline traces and kernel traces: ops of one
replica as a template, ends by replica. Starts follow from the ends of predecessors, and so does the
chain of ops that decided when something began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.arrays import Index
from prism.common.launchgaps import LaunchGaps


class Stream(StrEnum):
    """Streams of a rank, from top to bottom; those with names of their own come below the waits."""

    COMPUTE = "compute"
    WAITING = "waiting"
    COMMUNICATION = "communication"
    TRANSFER = "transfer"
    HOST = "host"
    JOIN = "join"  # of no work: where others meet


class PlayedOp(NamedTuple):
    """One op of every replica, or of all replicas together."""

    op_kind: str
    stream: Stream
    name: str
    stages: tuple[int, ...]  # that take part, in every replica it belongs to
    preds: tuple[int, ...]
    is_global: bool = False
    member: int = -1  # rank within its stage's group, -1: all of them
    microbatch: int = -1
    chunk: int = -1
    shown: tuple[int, ...] = ()  # stages whose tracks show it; those that take part where empty
    only: int = -1  # the one replica that waits for more than the first predecessor, -1: all do
    classes: tuple[tuple[str, float], ...] = ()  # kernel classes and their shares of its time
    lags: tuple[float, ...] = ()  # seconds after each predecessor; none where empty
    track: str = ""  # name of a stream of its own

    @property
    def label(self) -> str:
        """Its kind, microbatch and chunk, or what it was recorded as."""
        if self.track:
            return self.name or self.op_kind
        text = self.op_kind if self.microbatch >= 0 or not self.name else self.name
        text += f" {self.microbatch}" if self.microbatch >= 0 else ""
        return text + (f" chunk {self.chunk}" if self.chunk > 0 else "")

    def is_shown(self, stage: int) -> bool:
        """Whether a stage's tracks show it."""
        return stage in (self.shown or self.stages)


class Row(NamedTuple):
    """A rank or group of ranks that a timeline shows: a stage of a replica, a rank of its group."""

    replica: int
    stage: int
    member: int


class Link(NamedTuple):
    """An op of a chain, in which each one decided when the one before it in the list began."""

    op: int
    replica: int
    start: float  # [s]
    end: float  # [s]
    lag: float  # before its start, from the end of what it waited for [s]


class Binding(NamedTuple):
    """What an op waited for last."""

    start: float  # of the op [s]
    op: int  # that ended last, -1: it waited for nothing
    replica: int  # of that op; the asking one where it is global
    lag: float  # from its end to the start [s]


@dataclass(frozen=True)
class PlayedStep:
    """Ends of all ops of one step."""

    ops: tuple[PlayedOp, ...]  # predecessors come first
    end: NDArray[Any]  # [replica, op] s; equal over replicas for global ops
    final: int  # op at whose end the step is over; global, or of the only replica
    step_time: float  # s; later than the final op's end by what stopped the whole job
    n_stages: int
    n_members: int = 1  # ranks of each stage that are distinguished
    nominal: NDArray[Any] | None = None  # [replica, op] s, with all effects at 1
    gaps: Callable[[Row], LaunchGaps] | None = None  # launch gaps of a row, where traces show them
    ranks: tuple[int, ...] = ()  # number of each stage's rank, where stages are ranks of a profile
    label: dict[str, Any] = field(default_factory=dict)  # which replicate or measured step
    notes: tuple[str, ...] = ()

    @property
    def n_replicas(self) -> int:
        """Replicas."""
        return int(self.end.shape[0])

    @cached_property
    def _latest(self) -> Index:
        """Replica in which each op ends last."""
        return np.asarray(self.end.argmax(axis=0))

    @cached_property
    def _bound(self) -> dict[tuple[int, int], Binding]:
        return {}

    def binding(self, op: int, replica: int) -> Binding:
        """Return when an op of a replica began, and what it waited for last."""
        if (op, replica) in self._bound:
            return self._bound[op, replica]
        info, best = self.ops[op], Binding(0.0, -1, replica, 0.0)
        for k, p in enumerate(info.preds):
            if k > 0 and info.only >= 0 and info.only != replica:
                break
            who, end = replica, self.end[replica, p]
            if info.is_global and not self.ops[p].is_global and end < self.end[self._latest[p], p]:
                who, end = int(self._latest[p]), self.end[self._latest[p], p]
            lag = info.lags[k] if info.lags else 0.0
            start = float(end) + lag
            if start > best.start or best.op < 0:
                best = Binding(start, p, who, lag)
        self._bound[op, replica] = best
        return best

    def start(self, op: int, replica: int) -> float:
        """Return when an op of a replica began [s]."""
        return self.binding(op, replica).start

    def chain(self, op: int, replica: int) -> Iterator[Link]:
        """Walk back from an op of a replica through what each one waited for last."""
        while op >= 0:
            start, before, whose, lag = self.binding(op, replica)
            yield Link(op, replica, start, float(self.end[replica, op]), lag)
            op, replica = before, whose

    @cached_property
    def path(self) -> list[Link]:
        """The critical path from the end; lags are gaps."""
        return list(self.chain(self.final, 0))

    def rows(self) -> list[Row]:
        """All rows, replica by replica."""
        sizes = self.n_replicas, self.n_stages, self.n_members
        return [Row(*place) for place in product(*map(range, sizes))]

    def row_label(self, row: Row) -> str:
        """Name a row."""
        if self.ranks:
            return f"rank {self.ranks[row.stage]}"
        parts = [f"replica {row.replica}"] if self.n_replicas > 1 else []
        parts += [f"stage {row.stage}"] if self.n_stages > 1 or not parts else []
        parts += [f"rank {row.member}"] if self.n_members > 1 else []
        return " ".join(parts)


def durations(ops: tuple[PlayedOp, ...], end: NDArray[Any]) -> NDArray[Any]:
    """Seconds of every op, [replica, op], from ends of a step without lags."""
    out = np.array(end)
    for i, op in enumerate(ops):
        if op.preds:
            before = end[:, list(op.preds)]
            apart = np.array([op.is_global and not ops[p].is_global for p in op.preds])
            before = np.where(apart, before.max(axis=0, keepdims=True), before)
            out[:, i] -= before.max(axis=1)
    return out
