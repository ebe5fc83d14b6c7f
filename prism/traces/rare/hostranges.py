"""NVTX ranges of an Nsight Systems export: what a thread was doing when it launched a kernel.

Push-and-pop ranges nest within a thread, so that the innermost one around a time is found from the
last that began before it. Ranges of PyTorch (``emit_nvtx``) carry sequence numbers and sizes behind
the op's name, which are cut off. Left out: start-and-end ranges as ops (they may mark steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.traces.kernelnames import op_role
from prism.traces.kineto.stepmarks import NamedRanges
from prism.traces.rare.nsystables import Ints, NsysFile

_PUSH_POP, _START_END = 59, 60  # numbers of the types where the file does not name them
PROCESS = ~np.int64((1 << 24) - 1)
"""Bits of a serialised thread id that tell its process."""


class Host(NamedTuple):
    """What is known of a launch from the ranges around it."""

    op: str = ""
    optimizer: bool = False
    collectives: tuple[str, ...] = ()


@dataclass
class HostRanges:
    """Ranges [range] of a file or a process, times in ns as recorded.

    Attributes
    ----------
    start, end, thread, pid : array
    nests : array of bool
        Whether the range is one of a thread's stack.
    label : array of int
        Index into `labels`.
    labels : sequence of str
    """

    start: Ints
    end: Ints
    thread: Ints
    pid: Ints
    nests: NDArray[np.bool_]
    label: Ints
    labels: Sequence[str]
    hosts: list[Host] = field(default_factory=lambda: [Host()])
    _host: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def size(self) -> int:
        """Number of ranges."""
        return int(self.start.size)

    def of_process(self, pid: int) -> HostRanges:
        """Ranges of one process, by thread and start; all of them where it is unknown."""
        mine = self.pid == pid if pid >= 0 else np.ones(self.size, np.bool_)
        rows = np.flatnonzero(mine)
        rows = rows[np.lexsort((-self.end[rows], self.start[rows], self.thread[rows]))]
        return HostRanges(
            self.start[rows], self.end[rows], self.thread[rows], self.pid[rows], self.nests[rows],
            self.label[rows], self.labels,
        )  # fmt: skip

    def named(self, origin: int | None) -> NamedRanges:
        """Give all ranges with times in us from an origin, as `find_steps` takes them."""
        zero = origin or 0
        return NamedRanges(
            self.labels, self.label, (self.start - zero) / 1e3, (self.end - zero) / 1e3
        )

    @cached_property
    def _stack(self) -> tuple[Ints, Ints]:
        """[range] the range around it, -1 none; and the thread's stack rows in order."""
        rows = np.flatnonzero(self.nests)
        parent = np.full(self.size, -1, np.int64)
        host = np.zeros(self.size, np.int64)
        numbers: dict[tuple[int, int], int] = {}
        stack: list[int] = []
        ends, threads = self.end.tolist(), self.thread.tolist()
        starts, labels = self.start.tolist(), self.label.tolist()
        at = -1
        for row in rows.tolist():
            if threads[row] != at:
                stack, at = [], threads[row]
            while stack and ends[stack[-1]] <= starts[row]:
                stack.pop()
            outer = stack[-1] if stack else -1
            parent[row] = outer
            key = (int(host[outer]) if outer >= 0 else 0, labels[row])
            if key not in numbers:
                numbers[key] = len(self.hosts)
                self.hosts.append(_inside(self.hosts[key[0]], self.labels[labels[row]]))
            host[row] = numbers[key]
            stack.append(row)
        self._host = host
        return parent, rows

    def around(self, thread: Ints, time: Ints) -> Ints:
        """Innermost range of a thread at a time [call], -1 where there is none."""
        parent, rows = self._stack
        found = np.full(thread.size, -1, np.int64)
        for of in np.unique(self.thread[rows]):
            mine = rows[self.thread[rows] == of]
            asked = np.flatnonzero(thread == of)
            place = np.searchsorted(self.start[mine], time[asked], side="right") - 1
            inner = np.where(place >= 0, mine[np.maximum(place, 0)], -1)
            while True:
                over = (inner >= 0) & (self.end[inner] < time[asked])
                if not over.any():
                    break
                inner = np.where(over, parent[inner], inner)
            found[asked] = inner
        return found

    def host_of(self, ranges: Ints) -> Ints:
        """Index into `hosts` of what is known at some ranges [call]; 0 is nothing."""
        if not self.size:
            return np.zeros(ranges.size, np.int64)
        _ = self._stack
        return np.where(ranges >= 0, self._host[np.maximum(ranges, 0)], 0)


def _inside(outer: Host, label: str) -> Host:
    """Say what is known inside a range, from what is known around it."""
    op = label.split(", seq")[0].split(", op_id")[0].strip()
    role = op_role(op)
    if role == "communication" or label.startswith(("nccl", "rccl")):
        return Host(op, outer.optimizer, (op, *outer.collectives))
    return Host(op, outer.optimizer or bool(role), outer.collectives)


def read_ranges(file: NsysFile) -> HostRanges:
    """Read the NVTX ranges of a file; none where it has none."""
    table = "NVTX_EVENTS"
    types = {name: i for i, name in file.labels("ENUM_NSYS_EVENT_TYPE").items()}
    push = types.get("NvtxPushPopRange", _PUSH_POP)
    both = types.get("NvtxStartEndRange", _START_END)
    known = file.columns(table)
    if not {"start", "end"} <= set(known):
        empty = np.zeros(0, np.int64)
        return HostRanges(empty, empty, empty, empty, empty.astype(bool), empty, [])
    where = '"end" IS NOT NULL' + (f" AND eventType IN ({push}, {both})" * ("eventType" in known))
    c = file.integers(table, ["start", "end", "eventType", "globalTid", "textId"], where)
    texts = file.texts(table, "text", where) or [None] * c["start"].size
    strings = file.strings(np.unique(c["textId"]).tolist())
    names = [
        text if text is not None else strings.get(i, "")
        for text, i in zip(texts, c["textId"].tolist(), strict=True)
    ]
    codes, labels = pd.factorize(np.array(names, dtype=object))
    nests = (c["eventType"] != both) & (c["end"] >= c["start"])
    pid = c["globalTid"] & PROCESS
    return HostRanges(c["start"], c["end"], c["globalTid"], pid, nests, codes, list(labels))
