"""A kernel trace step by step: what each rank's host issued, and when it ran on the device.

A step is the ordered list of host events of one rank: launches of device activities and calls that
wait for the device. Steps are aligned event by event, so that one step can be explained by the
others. Left out: CPU work between the calls, which is the time from one call to the next.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LONG = 20_000
"""Events from which sequences that differ are aligned by count of occurrence instead of by the
longest common subsequence, whose cost grows with the square of the length."""


_SHORTEST_S = 1e-9
"""A step whose device time is shorter [s] holds none: no clock tells less."""


class KernelKey(NamedTuple):
    """What makes two device activities or host events the same kernel."""

    op_kind: str
    kernel_class: str
    name: str
    shape: str


HOST = KernelKey("host", "host", "host issue", "")
"""The host's time between two calls."""


@dataclass(frozen=True)
class StepView:
    """Host events of one rank in one step, in the host's order [event]; times in seconds."""

    rank: int
    step: int
    begin: float  # of the step on this rank's host
    row: Ints  # of the trace's table, -1 for a call that only waits
    key: Ints  # index into the trace's kernel keys
    name: Ints  # the same of the first kernel of this name, whatever its launch shape
    stream: Ints
    thread: Ints
    start: Floats  # on the device; not a number for a call that only waits
    end: Floats
    call: Floats  # the host's; not a number where the launch was not recorded
    call_end: Floats
    blocks: NDArray[np.bool_]  # whether the call returns only when its own activity has ended
    sync: NDArray[np.str_]  # stream_sync, device_sync, event_sync or ""
    sync_stream: Ints  # the stream such a call waits for, -1 unknown
    collective: Ints  # number of the one matched over ranks, -1 for none
    transfer: Floats  # its duration from the last arrival
    carried: dict[int, float]  # per stream, when the last activity of earlier steps ends
    waits: list[tuple[int, int]]  # recorded ones: event waited for, event that waits

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """[event] Whether the event is a device activity."""
        return self.row >= 0

    @cached_property
    def issued(self) -> Floats:
        """[event] From when on the device can begin [s]: the call's end, or start if it blocks."""
        return np.where(self.blocks, self.call, self.call_end)

    @cached_property
    def seconds(self) -> Floats:
        """[event] Duration on the device [s]."""
        return self.end - self.start

    def span(self) -> float:
        """First start to last end of the device activities [s]."""
        return float(np.nanmax(self.end) - np.nanmin(self.start))


@dataclass(frozen=True)
class KernelSteps:
    """All steps of a kernel trace."""

    keys: list[KernelKey]  # what the events' `key` counts
    steps: list[int]  # in which every rank has device activities, in order
    ranks: list[int]
    views: dict[tuple[int, int], StepView]  # by step and rank

    def bounds(self) -> tuple[Floats, Floats, Floats]:
        """First begin on a host, first start and last end on a device of each step, [step] s."""
        of_step = [[self.views[step, rank] for rank in self.ranks] for step in self.steps]
        return (
            np.array([min(v.begin for v in views) for views in of_step]),
            np.array([min(float(np.nanmin(v.start)) for v in views) for views in of_step]),
            np.array([max(float(np.nanmax(v.end)) for v in views) for views in of_step]),
        )

    def spans(self) -> Floats:
        """First start to last end of the device activities over all ranks, [step] s."""
        _, start, end = self.bounds()
        return end - start

    def typical(self) -> int:
        """Find the step of median span."""
        order = np.argsort(self.spans(), kind="stable")
        return self.steps[int(order[(len(order) - 1) // 2])]


def split_steps(trace: Trace) -> KernelSteps:
    """Cut a kernel trace into steps."""
    keys, key = kernel_keys(trace)
    ops = trace.ops
    views: dict[tuple[int, int], StepView] = {}
    abouts = {int(about["rank"]): about for about in trace.meta["ranks"]}
    of_rank = ops["rank"].to_numpy()
    on_device = ops["op_kind"].to_numpy() != "launch_gap"
    step = ops["step"].to_numpy()
    for rank, about in abouts.items():
        mine = on_device & (of_rank == rank)
        for number in np.unique(step[mine]):
            if number >= 0:
                rows = np.flatnonzero(mine & (step == number))
                view = _view(trace, rows, key, keys, rank, int(number), about)
                if view.span() > _SHORTEST_S and np.nansum(view.end - view.start) > 0.0:
                    views[int(number), rank] = view
    ranks = sorted(abouts)
    steps = sorted({s for s, _ in views if all((s, rank) in views for rank in ranks)})
    if not steps:
        raise PrismError(
            f"{trace.source}: no step has device time on all {format_count(len(ranks), 'rank')}; "
            "expected "
            "traces of the same steps; give one rank, or files of one recording"
        )
    return KernelSteps(keys, steps, ranks, views)


def kernel_keys(trace: Trace) -> tuple[list[KernelKey], Ints]:
    """List the kernels of a trace, and the index [row] of each row's."""
    if not trace.has_kernels:
        raise PrismError(
            f"{trace.source}: is a {trace.format} table; expected a profiler's trace, which has "
            "kernels and streams"
        )
    ops = trace.ops
    columns = [ops[name].astype(str).to_numpy() for name in ("op_kind", "kernel_class", "name")]
    shape = ops["shape"].astype(str).to_numpy().copy()
    communicates = np.isin(columns[0], list(COLLECTIVES))
    size = ops["bytes"].to_numpy()
    # a collective's grid says nothing and a copy has none: the size of the message does
    named = (communicates | (shape == "")) & np.isfinite(size)
    shape[named] = [f"{int(value)} byte" for value in size[named]]
    numbers: dict[KernelKey, int] = {}
    rows = zip(*columns, shape, strict=True)
    key = np.array([numbers.setdefault(KernelKey(*row), len(numbers)) for row in rows], np.int64)
    return list(numbers), key


def _view(
    trace: Trace, rows: Ints, key: Ints, keys: list[KernelKey], rank: int, step: int, about: Any
) -> StepView:
    """Host events of one rank in one step."""
    ops = trace.ops
    table = {
        name: ops[name].to_numpy()[rows]
        for name in (
            "start", "duration", "launch", "launch_end", "stream", "thread", "copy_back",
            "collective", "transfer",
        )
    }  # fmt: skip
    first = float(np.nanmin(np.r_[table["launch"], table["start"]]))
    begin = next((a for s, a, _ in about["steps"] if s == step), first)
    until = min((a for _, a, _ in about["steps"] if a > begin), default=np.inf)
    calls = about["calls"]
    chosen = [
        i for i, kind in enumerate(calls["kind"])
        if kind != "stream_wait" and begin <= calls["start"][i] < until
    ]  # fmt: skip
    n = len(chosen)
    nothing = np.full(n, np.nan)
    sync = np.array([calls["kind"][i] for i in chosen], dtype="U11")
    sync_stream = np.array([calls["stream"][i] for i in chosen], dtype=np.int64)

    def both(name: str, calls_column: Any) -> Any:
        return np.r_[table[name], np.array(calls_column, dtype=table[name].dtype)]

    call = both("launch", [calls["start"][i] for i in chosen])
    start = both("start", nothing)
    order = np.lexsort((start, np.where(np.isfinite(call), call, start)))
    own = np.r_[key[rows], _sync_keys(sync, keys)][order]
    view = StepView(
        rank,
        step,
        min(begin, first),
        np.r_[rows, np.full(n, -1)][order],
        own,
        _names(keys)[own],
        both("stream", np.full(n, -1))[order],
        both("thread", [calls["thread"][i] for i in chosen])[order],
        start[order],
        np.r_[table["start"] + table["duration"], nothing][order],
        call[order],
        both("launch_end", [calls["end"][i] for i in chosen])[order],
        both("copy_back", np.zeros(n))[order],
        np.r_[np.full(rows.size, "", dtype="U11"), sync][order],
        np.r_[np.full(rows.size, -1), sync_stream][order],
        both("collective", np.full(n, -1))[order],
        both("transfer", nothing)[order],
        _carried(trace, rank, step),
        [],
    )
    view.waits.extend(_recorded_waits(view, calls, begin, until))
    return view


def _names(keys: list[KernelKey]) -> Ints:
    """First key of the same name [key], whatever the launch shape."""
    first: dict[tuple[str, str, str], int] = {}
    return np.array([first.setdefault(key[:3], i) for i, key in enumerate(keys)], dtype=np.int64)


def _sync_keys(sync: NDArray[np.str_], keys: list[KernelKey]) -> Ints:
    """Give each synchronising call [call] its key; new ones are added to `keys`."""
    found = []
    for kind in sync:
        made = HOST._replace(name=str(kind))
        if made not in keys[-8:]:  # kinds of calls are last, and three
            keys.append(made)
        found.append(len(keys) - 1 - keys[::-1].index(made))
    return np.array(found, dtype=np.int64)


def _carried(trace: Trace, rank: int, step: int) -> dict[int, float]:
    """Find when each stream's last activity of earlier steps ends [s]."""
    ops = trace.ops
    earlier = (ops["rank"].to_numpy() == rank) & (ops["step"].to_numpy() < step)
    earlier &= ops["op_kind"].to_numpy() != "launch_gap"
    ends = (ops["start"] + ops["duration"]).to_numpy()[earlier]
    streams = ops["stream"].to_numpy()[earlier]
    return {int(s): float(ends[streams == s].max()) for s in np.unique(streams)}


def _recorded_waits(
    view: StepView, calls: Any, begin: float, until: float
) -> list[tuple[int, int]]:
    """Pairs of events (waited for, waiting) that the trace itself names."""
    waits = []
    call = np.where(np.isfinite(view.call), view.call, np.inf)
    for i, kind in enumerate(calls["kind"]):
        at, recorded = calls["start"][i], calls["recorded"][i]
        if kind != "stream_wait" or recorded is None or not begin <= at < until:
            continue
        waiting = np.flatnonzero((view.stream == calls["stream"][i]) & (call > at))
        awaited = np.flatnonzero((view.stream == calls["on_stream"][i]) & (call < recorded))
        if waiting.size and awaited.size and awaited[-1] < waiting[0]:
            waits.append((int(awaited[-1]), int(waiting[0])))
    return waits


def align(a: StepView, b: StepView) -> Ints:
    """Find the event of `b` that corresponds to each event of `a`.

    Returns
    -------
    array of int
        [event of a] index into `b`, -1 where there is no counterpart.

    Notes
    -----
    Longest common subsequence of (stream, kernel key) in the host's order, and between its blocks
    that of (stream, kernel name), as launch shapes may follow the data; for very long steps that
    differ, the n-th occurrence of each.
    """
    mine = list(zip(a.stream.tolist(), a.key.tolist(), strict=True))
    theirs = list(zip(b.stream.tolist(), b.key.tolist(), strict=True))
    if mine == theirs:
        return np.arange(len(mine))
    found = np.full(len(mine), -1, dtype=np.int64)
    if max(len(mine), len(theirs)) <= _LONG:
        my_names = list(zip(a.stream.tolist(), a.name.tolist(), strict=True))
        their_names = list(zip(b.stream.tolist(), b.name.tolist(), strict=True))
        i = j = 0
        for block in _blocks(mine, theirs):
            for part in _blocks(my_names[i : block.a], their_names[j : block.b]):
                at, there = i + part.a, j + part.b
                found[at : at + part.size] = np.arange(there, there + part.size)
            i, j = block.a + block.size, block.b + block.size
            found[block.a : i] = np.arange(block.b, j)
        return found
    places: dict[Any, list[int]] = {}
    for i, event in enumerate(theirs):
        places.setdefault(event, []).append(i)
    used: dict[Any, int] = {}
    for i, event in enumerate(mine):
        n = used.get(event, 0)
        used[event] = n + 1
        if n < len(places.get(event, ())):
            found[i] = places[event][n]
    return found


def _blocks(a: list[Any], b: list[Any]) -> list[difflib.Match]:
    """Blocks that two sequences have in common, in order, the last one empty and at their ends."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
