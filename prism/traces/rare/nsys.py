"""Nsight Systems exports (SQLite) of one or several ranks, to the tables that Kineto traces give.

A rank is a process on a device: a file may hold several. Kernels, copies and fills take their
launch from the runtime call of the same correlation id, their op from the innermost NVTX range
around it, their step from NVTX ranges named like steps. Left out: message sizes and groups of
collectives (nsys does not name them), CPU samples, metrics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.kernelnames import classify, collective_kind, is_communication_kernel
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.rank import CALLS, Calls, RankTrace, step_of
from prism.traces.kineto.stepmarks import candidates, compile_pattern, find_steps, no_such_step
from prism.traces.rare.hostranges import PROCESS, HostRanges, read_ranges
from prism.traces.rare.nsystables import KERNELS, Ints, NsysFile, open_nsys
from prism.traces.table import Trace

Floats = NDArray[np.float64]

_COPY = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_CATEGORIES = ("kernel", "memcpy", "memset")
_WAIT_EVENT = 2  # CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT


@dataclass
class _Device:
    """Device activities of a file [activity], in ns as recorded."""

    category: Ints
    name: Ints  # index into names
    names: list[str]
    shape: Ints  # index into shapes
    shapes: list[str]
    columns: dict[str, Ints]

    def of(self, name: str) -> Ints:
        return self.columns[name]


@dataclass
class _Calls:
    """Runtime calls of a file [call], in ns as recorded."""

    columns: dict[str, Ints]
    names: dict[int, str]
    pid: Ints
    syncs: dict[str, Ints]
    """What CUPTI adds to calls that wait [sync]: correlation, stream, and of an event's wait the
    stream and the correlation of its record; -1 unknown."""


def read_nsys(files: Sequence[RecordedFile], step_range: str | None = None) -> Trace:
    """Read exports of one job."""
    pattern = compile_pattern(step_range)

    def read_file(file: RecordedFile) -> list[RankTrace]:
        with open_nsys(file.path, file.source) as tables:
            return _read_file(tables, pattern)

    return read_ranks(files, read_file, "nsys")


def _read_file(file: NsysFile, pattern: re.Pattern[str] | None) -> list[RankTrace]:
    """Read the ranks of one file."""
    device = _device(file)
    calls = _calls(file)
    ranges = read_ranges(file)
    notes = _told(file)
    start, end = device.of("start"), device.of("end")
    bad = (end < start) | (start < 0)
    pid, gpu = device.of("globalPid"), device.of("deviceId")
    kernels = device.category == 0
    owners = sorted({(int(g), int(p)) for g, p in zip(gpu[kernels], pid[kernels], strict=True)}
                    if np.unique(pid).size * np.unique(gpu).size > 1
                    else {(int(gpu[0]), int(pid[0]))})  # fmt: skip
    numbers = _rank_numbers(file, owners)
    epoch = file.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"]
    base = int(epoch[0]) if epoch.size and epoch[0] > 0 else 0
    ranks, covered = [], np.zeros(start.size, np.bool_)
    for (g, p), number in zip(owners, numbers, strict=True):
        mine = (gpu == g) & (pid == p)
        covered |= mine
        ranks.append(_rank(device, mine & ~bad, calls, ranges, p, number, base, pattern))
        ranks[-1].n_bad = int((mine & bad).sum())
    lost = int((~covered).sum())
    if lost:
        notes.append(f"{lost:,} copies and fills on devices without kernels skipped")
    if not any(rank.start.size for rank in ranks):
        raise PrismError(f"{file.source}: no kernel has a valid time; export it again")
    if len(owners) > 1 and numbers[0] is not None and "MPI_RANKS" not in file.tables:
        notes.append(f"{len(owners)} processes in one file: ranks are numbered by device")
    if not any(rank.steps for rank in ranks):
        notes.append(_no_steps(ranges, pattern, file.source))
    ranks = [rank for rank in ranks if rank.start.size]
    ranks[0].notes += notes
    return ranks


def _rank_numbers(file: NsysFile, owners: list[tuple[int, int]]) -> list[int | None]:
    """Rank of each device and process, None where nothing tells."""
    table = file.integers("MPI_RANKS", ["globalPid", "rank"])
    of_pid = dict(zip(table["globalPid"].tolist(), table["rank"].tolist(), strict=True))
    pids = [pid for _, pid in owners]
    if len(set(pids)) == len(pids) and all(of_pid.get(pid, -1) >= 0 for pid in pids):
        return [of_pid[pid] for pid in pids]
    return [None] if len(owners) == 1 else list(range(len(owners)))


def _no_steps(ranges: HostRanges, pattern: re.Pattern[str] | None, source: str) -> str:
    """Say which ranges there are; raises PrismError where a pattern was given."""
    if pattern is not None:
        raise no_such_step(ranges.named(None), pattern, source, "NVTX range")
    there = candidates(ranges.named(None))
    return (
        f"no NVTX range is named like a step; --step-range NAME takes another: {there}"
        if there
        else "no NVTX ranges; mark steps with torch.cuda.nvtx.range_push('step') and range_pop()"
    )


def _device(file: NsysFile) -> _Device:
    """Read kernels, copies and fills."""
    common = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]
    # the fullest name of a kernel that the file has
    known = set(file.columns(KERNELS))
    named = next(
        (n for n in ("demangledName", "shortName", "mangledName", "name") if n in known), ""
    )
    has_shapes = {f"{what}{axis}" for what in ("grid", "block") for axis in "XYZ"} <= known
    grid = ["grid", "block"] if has_shapes else []
    kernel = file.integers(KERNELS, [*common, *([named] if named else []), *grid])
    copy = file.integers("CUPTI_ACTIVITY_KIND_MEMCPY", [*common, "bytes", "copyKind", "srcKind",
                                                        "dstKind"])  # fmt: skip
    fill = file.integers("CUPTI_ACTIVITY_KIND_MEMSET", [*common, "bytes"])
    parts = (kernel, copy, fill)
    n = [part["start"].size for part in parts]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in common}
    columns["bytes"] = np.r_[np.full(n[0], -1), copy["bytes"], fill["bytes"]]
    back = (copy["copyKind"] == 2) & (copy["dstKind"] == 0)
    columns["back"] = np.r_[np.zeros(n[0], np.int64), back, np.zeros(n[2], np.int64)]
    codes, values = pd.factorize(kernel[named] if named else np.full(n[0], -1))
    strings = file.strings(values.tolist())
    names = [strings.get(int(i), "") for i in values]
    kinds, of_kind = pd.factorize(copy["copyKind"] << 16 | copy["srcKind"] + 1 << 8
                                  | copy["dstKind"] + 1)  # fmt: skip
    copies = [_copy_name(int(k) >> 16, (int(k) >> 8 & 255) - 1, (int(k) & 255) - 1)
              for k in of_kind]  # fmt: skip
    at = len(names)
    name = np.r_[codes, kinds + at, np.full(n[2], at + len(copies))].astype(np.int64)
    shape, shapes = _shapes(kernel["grid"], kernel["block"]) if grid else (np.zeros(n[0]), [""])
    return _Device(
        np.repeat(np.arange(3), n),
        name,
        [*names, *copies, "Memset (Device)"],
        np.r_[shape, np.full(n[1] + n[2], len(shapes))].astype(np.int64),
        [*shapes, ""],
        columns,
    )


def _copy_name(kind: int, source: int, target: int) -> str:
    """Name a copy as Kineto does."""
    known = _MEMORY.get(source, "Unknown"), _MEMORY.get(target, "Unknown")
    return f"Memcpy {_COPY.get(kind, 'Unknown')} ({known[0]} -> {known[1]})"


def _shapes(grid: Ints, block: Ints) -> tuple[NDArray[np.int64], list[str]]:
    """Index of each kernel's launch shape, and the shapes as text."""
    grids, of_grid = pd.factorize(grid)
    blocks, of_block = pd.factorize(block)
    codes, pairs = pd.factorize(grids * np.int64(max(1, of_block.size)) + blocks)
    shapes = [(of_grid[p // of_block.size], of_block[p % of_block.size]) for p in pairs.tolist()]
    return codes, [f"{_axes(int(g))} {_axes(int(b))}" for g, b in shapes]


def _axes(packed: int) -> str:
    """Write three numbers that stand in one as Kineto does."""
    return f"[{packed >> 32},{packed >> 16 & 0xFFFF},{packed & 0xFFFF}]"


def _calls(file: NsysFile) -> _Calls:
    """Read the runtime calls in order of correlation."""
    columns = file.integers(
        "CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "end", "globalTid", "correlationId", "nameId"]
    )
    names = file.strings(np.unique(columns["nameId"]).tolist())
    return _Calls(columns, names, columns["globalTid"] & PROCESS, _syncs(file))


def _syncs(file: NsysFile) -> dict[str, Ints]:
    """Read which stream each synchronising call waits for, and where its event was recorded."""
    sync = file.integers(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        ["correlationId", "globalPid", "streamId", "syncType", "eventId"],
    )
    event = file.integers(
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT", ["correlationId", "globalPid", "streamId", "eventId"]
    )
    sync["on_stream"] = np.full(sync["streamId"].size, -1)
    sync["record"] = sync["on_stream"].copy()
    waits = np.flatnonzero(sync["syncType"] == _WAIT_EVENT)
    if waits.size and event["eventId"].size:
        # an event is recorded again and again: the last record before the wait counts
        by = ["globalPid", "eventId"]
        wait = pd.DataFrame({n: sync[n][waits] for n in (*by, "correlationId")} | {"row": waits})
        record = pd.DataFrame(event).assign(record=event["correlationId"])
        found = pd.merge_asof(
            wait.sort_values("correlationId"), record.sort_values("correlationId"),
            on="correlationId", by=by, allow_exact_matches=False,
        ).dropna(subset="record")  # fmt: skip
        rows = found["row"].to_numpy()
        sync["on_stream"][rows] = found["streamId"].to_numpy(np.int64)
        sync["record"][rows] = found["record"].to_numpy(np.int64)
    return sync


def _rank(
    device: _Device, mine: NDArray[np.bool_], calls: _Calls, ranges: HostRanges, pid: int,
    number: int | None, base_ns: int, pattern: re.Pattern[str] | None,
) -> RankTrace:  # fmt: skip
    """Columns of one process on one device."""
    rows = np.flatnonzero(mine)
    own = np.flatnonzero(calls.pid == pid) if pid >= 0 else np.arange(calls.pid.size)
    c = {name: values[own] for name, values in calls.columns.items()}
    here = ranges.of_process(pid)
    start_ns, end_ns = device.of("start")[rows], device.of("end")[rows]
    origin = int(min((int(x.min()) for x in (start_ns, c["start"]) if x.size), default=0))
    start, duration = (start_ns - origin) / 1e3, (end_ns - start_ns) / 1e3
    order = np.argsort(c["correlationId"], kind="stable")
    sorted_ids = c["correlationId"][order]
    wanted = device.of("correlationId")[rows]
    place = np.minimum(np.searchsorted(sorted_ids, wanted), max(sorted_ids.size - 1, 0))
    hit = (sorted_ids[place] == wanted) & (wanted >= 0) if sorted_ids.size else wanted < -1
    call = np.where(hit, order[place] if order.size else 0, -1)
    launch, launch_end = (_taken(c[name], call, origin) for name in ("start", "end"))
    threads, _ = pd.factorize(c["globalTid"])
    around = here.around(
        np.where(call >= 0, c["globalTid"][call] if c["globalTid"].size else -1, -1),
        np.where(call >= 0, c["start"][call] if c["start"].size else -1, -1),
    )
    steps, _ = find_steps(here.named(origin), pattern)
    when = np.where(np.isfinite(launch), launch, start)
    return RankTrace(
        number, None, base_ns, origin / 1e3,
        _describe(device, rows, here, around)
        | {
            "stream": device.of("streamId")[rows],
            "correlation": wanted,
            "thread": np.where(call >= 0, threads[call] if threads.size else -1, -1),
            "copy_back": device.of("back")[rows].astype(bool),
        },
        start, duration, launch, launch_end, step_of(when, steps), steps,
        _waits(c, calls, pid, threads, origin), int(own.size + here.size), 0, True, [],
    )  # fmt: skip


def _taken(values: Ints, at: NDArray[np.int64], origin: int) -> Floats:
    """Take the times [activity; us] of the calls at some places, not a number where none is."""
    if not values.size:
        return np.full(at.size, np.nan)
    return np.where(at >= 0, (values[np.maximum(at, 0)] - origin) / 1e3, np.nan)


def _describe(
    device: _Device, rows: NDArray[np.int64], ranges: HostRanges, around: NDArray[np.int64]
) -> dict[str, Any]:
    """Columns of names and classes; each different kernel in each different range once."""
    host = ranges.host_of(around)  # index into ranges.hosts
    name = device.name[rows]
    codes, different = pd.factorize(name * np.int64(len(ranges.hosts)) + host)
    first = np.zeros(different.size, np.int64)
    first[codes[::-1]] = np.arange(codes.size)[::-1]
    found = []
    for pair, row in zip(different.tolist(), rows[first].tolist(), strict=True):
        kernel = device.names[pair // len(ranges.hosts)]
        category = _CATEGORIES[int(device.category[row])]
        at = ranges.hosts[pair % len(ranges.hosts)]
        if category == "kernel" and is_communication_kernel(kernel):
            kinds = [k for k in map(collective_kind, (*at.collectives, kernel)) if k]
            kind = next((k for k in kinds if k != "transfer"), "transfer")
            found.append((kind, kind if kind != "transfer" else "p2p", kernel, at.op))
        else:
            found.append((*classify(kernel, at.op, at.optimizer, category), kernel, at.op))
    table = np.array(found, dtype=object).reshape(-1, 4)
    columns = dict(zip(("op_kind", "kernel_class", "name", "op"), table[codes].T, strict=True))
    size = device.of("bytes")[rows]
    return {
        **columns,
        "bytes": np.where(size >= 0, size, np.nan),
        "group": np.full(rows.size, "", dtype=object),
        "group_size": np.full(rows.size, -1),
        "shape": np.array(device.shapes, dtype=object)[device.shape[rows]],
    }


def _waits(c: dict[str, Ints], calls: _Calls, pid: int, threads: Any, origin: int) -> Calls:
    """Host calls that wait, or make a stream wait, in order of time."""
    kinds = {
        i: next((kind for pattern, kind in CALLS if pattern.search(text)), "")
        for i, text in calls.names.items()
    }
    waiting = [i for i, kind in kinds.items() if kind and kind != "event_record"]
    rows = np.flatnonzero(np.isin(c["nameId"], waiting))
    rows = rows[np.lexsort((c["end"][rows], c["start"][rows]))]
    syncs = calls.syncs
    mine = np.flatnonzero(syncs["globalPid"] == pid)
    at = dict(zip(syncs["correlationId"][mine].tolist(), mine.tolist(), strict=True))
    detail = [at.get(i, -1) for i in c["correlationId"][rows].tolist()]
    told = {n: [int(syncs[n][i]) if i >= 0 else -1 for i in detail]
            for n in ("streamId", "on_stream", "record")}  # fmt: skip
    begun = (
        dict(zip(c["correlationId"].tolist(), c["start"].tolist(), strict=True))
        if mine.size
        else {}
    )
    recorded = [(begun[r] - origin) / 1e3 if r in begun else float("nan") for r in told["record"]]
    return Calls(
        [kinds[i] for i in c["nameId"][rows].tolist()],
        ((c["start"][rows] - origin) / 1e3).tolist(),
        ((c["end"][rows] - origin) / 1e3).tolist(),
        np.asarray(threads)[rows].tolist(),
        [s if s < 1 << 31 else -1 for s in told["streamId"]],
        told["on_stream"],
        recorded,
    )


def _told(file: NsysFile) -> list[str]:
    """Say what the file holds that is not taken, and on which GPU it was recorded."""
    notes = []
    gpus = [g for g in file.texts("TARGET_INFO_GPU", "name") if g]
    if gpus:
        notes.append(f"recorded on {', '.join(dict.fromkeys(gpus))}")
    graphs = file.count("CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
    if graphs:
        notes.append(
            f"{graphs:,} CUDA graphs recorded as wholes, their kernels are not here; record with "
            "--cuda-graph-trace=node"
        )
    return notes
