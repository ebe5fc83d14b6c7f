"""A step that has been played: every op's end, and what each op waited for last.

One structure for steps of simulated jobs, replayed pipeline traces and kernel traces: ops of one
replica as a template, ends by replica. Starts follow from the ends of predecessors, and so does the
chain of ops that decided when something began. Left out: where the ends come from
(`prism.analyses.timelines.jobs`, `prism.analyses.timelines.traces`), and what waits are called
(`waits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.launchgaps import LaunchGaps

COMPUTE, COMMUNICATION, TRANSFER, HOST, JOIN = (
    "compute", "communication", "transfer", "host", "join",
)  # fmt: skip
"""Streams of a rank; ops of the last are no work, but where others meet."""


class PlayedOp(NamedTuple):
    """One op of every replica, or of all replicas together."""

    op_kind: str
    stream: str
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


class Row(NamedTuple):
    """A rank or group of ranks that a timeline shows: a stage of a replica, a rank of its group."""

    replica: int
    stage: int
    member: int


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
    label: dict[str, Any] = field(default_factory=dict)  # which replicate or measured step, notes
    origin: float = 0.0  # when ops begin that wait for nothing [s]
    between: str = "bubble"  # what waiting for another row of the same replica is called
    gaps: Callable[[Row], LaunchGaps] | None = None  # launch gaps of a row, where traces show them

    @property
    def n_replicas(self) -> int:
        """Replicas."""
        return int(self.end.shape[0])

    @cached_property
    def _latest(self) -> dict[int, tuple[float, int]]:
        return {}

    def _last_of_all(self, op: int, prefer: int) -> tuple[float, int]:
        """Latest end of a local op over the replicas, and whose; the asking one's where it ties."""
        if op not in self._latest:
            replica = int(np.argmax(self.end[:, op]))
            self._latest[op] = float(self.end[replica, op]), replica
        end, replica = self._latest[op]
        return end, prefer if float(self.end[prefer, op]) == end else replica

    @cached_property
    def _bound(self) -> dict[tuple[int, int], Binding]:
        return {}

    def binding(self, op: int, replica: int) -> Binding:
        """Return when an op of a replica began, and what it waited for last."""
        if (op, replica) in self._bound:
            return self._bound[op, replica]
        info, best = self.ops[op], Binding(self.origin, -1, replica, 0.0)
        for k, p in enumerate(info.preds):
            if k > 0 and info.only >= 0 and info.only != replica:
                break
            who = replica
            if info.is_global and not self.ops[p].is_global:
                end, who = self._last_of_all(p, replica)
            else:
                end = float(self.end[replica, p])
            lag = info.lags[k] if info.lags else 0.0
            if end + lag > best.start or best.op < 0:
                best = Binding(end + lag, p, who, lag)
        self._bound[op, replica] = best
        return best

    def start(self, op: int, replica: int) -> float:
        """Return when an op of a replica began [s]."""
        return self.binding(op, replica).start

    def path(self) -> list[tuple[int, int, float, float]]:
        """List the critical path from the end: op, replica, start, end [s]; lags are gaps."""
        found, op, replica = [], self.final, 0
        while op >= 0:
            before = self.binding(op, replica)
            found.append((op, replica, before.start, float(self.end[replica, op])))
            op, replica = before.op, before.replica
        return found

    @cached_property
    def seconds(self) -> NDArray[Any]:
        """Seconds of every op of a step without lags, [replica, op]."""
        return durations(self.ops, self.end)

    def rows(self) -> list[Row]:
        """All rows, replica by replica."""
        sizes = self.n_replicas, self.n_stages, self.n_members
        return [Row(*place) for place in product(*map(range, sizes))]


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
