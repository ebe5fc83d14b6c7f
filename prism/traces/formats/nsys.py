"""Nsight Systems exports (SQLite) of one or several ranks, as the events of Kineto traces.

A rank is a process on a device: a file may hold several. Kernels, copies, fills, runtime calls and
NVTX ranges become events of the same meaning, so that what follows is one path for both. Steps are
NVTX ranges named like steps. Left out: message sizes and groups of collectives (nsys does not
name them), CPU samples, metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import cast

import msgspec
import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.formats.nsystables import KERNELS, NsysFile, open_nsys
from prism.traces.kineto.events import Args, Event, RawTrace
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.rank import RankTrace, read_rank
from prism.traces.kineto.stepmarks import (
    NamedRanges,
    candidates,
    compile_pattern,
    find_steps,
    no_such_step,
)
from prism.traces.table import Trace

_COPY = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_WAIT_EVENT = 2  # CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT
_PUSH_POP, _START_END = 59, 60  # numbers of the types of ranges where the file does not name them
_PROCESS = ~np.int64((1 << 24) - 1)  # bits of a serialised thread id that tell its process
_COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")


def read_nsys(files: Sequence[RecordedFile], step_range: str | None = None) -> Trace:
    """Read exports of one job."""
    pattern = compile_pattern(step_range)

    def read_file(file: RecordedFile) -> list[RankTrace]:
        with open_nsys(file.path, file.source) as tables:
            return _read_file(tables, pattern)

    return read_ranks(files, read_file, "nsys")


def _read_file(file: NsysFile, pattern: re.Pattern[str] | None) -> list[RankTrace]:
    """Read the ranks of one file."""
    device, host = _device(file), _host(file)
    kernels = device[device["cat"] == "kernel"]
    owners = sorted(set(zip(kernels["deviceId"], kernels["globalPid"], strict=True)))
    epoch = file.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"]
    base = int(epoch[0]) if epoch.size and epoch[0] > 0 else 0
    notes, ranks, n_taken, found = _told(file), [], 0, False
    for (gpu, pid), number in zip(owners, _rank_numbers(file, owners), strict=True):
        mine = device[(device["deviceId"] == gpu) & (device["globalPid"] == pid)]
        around = host[host["globalPid"] == pid] if pid >= 0 else host
        n_taken += len(mine)
        times = pd.concat([mine["start"], around["start"][around["cat"] == "cuda_runtime"]])
        origin = int(times[times >= 0].min()) if (times >= 0).any() else 0
        steps = find_steps(_named(around, origin), pattern)[0]
        events = [*_events(mine, origin), *_events(around[around["cat"] != ""], origin)]
        rank = read_rank(RawTrace(events, number, None, base + origin), steps)
        found = found or bool(steps)
        ranks += [rank] * bool(rank.start.size)
    if n_taken < len(device):
        lost = len(device) - n_taken
        notes.append(f"{lost:,} copies and fills on devices without kernels skipped")
    if not ranks:
        raise PrismError(f"{file.source}: no kernel has a valid time; export it again")
    if len(owners) > 1 and "MPI_RANKS" not in file.tables:
        notes.append(f"{len(owners)} processes in one file: ranks are numbered by device")
    if not found:
        notes.append(_no_steps(_named(host, 0), pattern, file.source))
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


def _no_steps(ranges: NamedRanges, pattern: re.Pattern[str] | None, source: str) -> str:
    """Say which ranges there are; raises PrismError where a pattern was given."""
    if pattern is not None:
        raise no_such_step(ranges, pattern, source, "NVTX range")
    there = candidates(ranges)
    return (
        f"no NVTX range is named like a step; --step-range NAME takes another: {there}"
        if there
        else "no NVTX ranges; mark steps with torch.cuda.nvtx.range_push('step') and range_pop()"
    )


def _named(host: pd.DataFrame, origin: int) -> NamedRanges:
    """Give ranges with times in us from an origin."""
    ranges = host[host["is_range"]]
    label, labels = pd.factorize(ranges["label"])
    start, end = ((ranges[name].to_numpy() - origin) / 1e3 for name in ("start", "end"))
    return NamedRanges(list(labels), label, start, end)


def _events(rows: pd.DataFrame, origin: int) -> Iterable[Event]:
    """Rows of `_device` or `_host` as the events that Kineto writes, times in us from an origin."""
    ts = ((rows["start"] - origin) / 1e3).where(rows["start"] >= 0)
    dur = (rows["end"] - rows["start"]) / 1e3
    return (
        # arguments that need no decoding
        Event(name, cat, "X", start, duration, thread, cast(msgspec.Raw, args))
        for name, cat, start, duration, thread, args in zip(
            rows["name"], rows["cat"], ts, dur, rows["globalTid"], rows["args"], strict=True
        )
    )


def _device(file: NsysFile) -> pd.DataFrame:
    """Read kernels, copies and fills."""
    # the fullest name of a kernel that the file has
    known = set(file.columns(KERNELS))
    texts = ("demangledName", "shortName", "mangledName", "name")
    named = next((name for name in texts if name in known), "name")
    has_shapes = {f"{what}{axis}" for what in ("grid", "block") for axis in "XYZ"} <= known
    shape = ["grid", "block"] if has_shapes else []
    kernel = pd.DataFrame(file.integers(KERNELS, [*_COMMON, named, *shape]))
    kernel["cat"], kernel["name"] = "kernel", _texts(file, kernel[named])
    kernel = kernel.assign(**dict.fromkeys({"grid", "block"} - set(shape), -1))
    kernel["args"] = [
        Args(correlation=c, stream=s, grid=_axes(g), block=_axes(b))
        for c, s, g, b in zip(
            kernel["correlationId"], kernel["streamId"], kernel["grid"], kernel["block"],
            strict=True,
        )
    ]  # fmt: skip
    kinds = ["copyKind", "srcKind", "dstKind"]
    copy = pd.DataFrame(file.integers("CUPTI_ACTIVITY_KIND_MEMCPY", [*_COMMON, "bytes", *kinds]))
    copy["cat"] = "gpu_memcpy"
    copy["name"] = [_copy_name(*row) for row in copy[kinds].itertuples(index=False)]
    fill = pd.DataFrame(file.integers("CUPTI_ACTIVITY_KIND_MEMSET", [*_COMMON, "bytes"]))
    fill["cat"], fill["name"] = "gpu_memset", "Memset (Device)"
    for table in (copy, fill):
        table["args"] = [
            Args(correlation=c, stream=s, bytes=b if b >= 0 else None)
            for c, s, b in zip(
                table["correlationId"], table["streamId"], table["bytes"], strict=True
            )
        ]
    columns = [*_COMMON, "cat", "name", "args"]
    return pd.concat([x[columns] for x in (kernel, copy, fill)]).assign(globalTid=None)


def _texts(file: NsysFile, ids: pd.Series) -> list[str]:
    """Texts by their identifiers, "" where one is unknown."""
    strings = file.strings(ids.unique().tolist())
    return [strings.get(i, "") for i in ids]


@cache
def _copy_name(kind: int, source: int, target: int) -> str:
    """Name a copy as Kineto does."""
    known = _MEMORY.get(source, "Unknown"), _MEMORY.get(target, "Unknown")
    return f"Memcpy {_COPY.get(kind, 'Unknown')} ({known[0]} -> {known[1]})"


@cache
def _axes(packed: int) -> msgspec.Raw:
    """Write three numbers that stand in one as Kineto does; empty where they are unknown."""
    if packed < 0:
        return msgspec.Raw()
    return msgspec.Raw(f"[{packed >> 32},{packed >> 16 & 0xFFFF},{packed & 0xFFFF}]".encode())


def _host(file: NsysFile) -> pd.DataFrame:
    """Read runtime calls, NVTX ranges, and what CUPTI adds to calls that wait."""
    call = pd.DataFrame(
        file.integers(
            "CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "end", "globalTid", "correlationId", "nameId"]
        )
    )
    call["cat"], call["name"] = "cuda_runtime", _texts(file, call["nameId"])
    call["args"] = [Args(correlation=c) for c in call["correlationId"]]
    call["globalPid"] = call["globalTid"] & _PROCESS
    parts = [x.assign(is_range=x["cat"].isin(("", "user_annotation")))
             for x in (call, _ranges(file), _syncs(file))]  # fmt: skip
    columns = ["start", "end", "globalTid", "globalPid", "cat", "name", "args", "is_range"]
    found = pd.concat([x.reindex(columns=[*columns, "label"]) for x in parts])
    return found.reset_index(drop=True)


def _ranges(file: NsysFile) -> pd.DataFrame:
    """Read the NVTX ranges; of a category those that nest in a thread, which ops are inside of."""
    table = "NVTX_EVENTS"
    types = {name: i for i, name in file.labels("ENUM_NSYS_EVENT_TYPE").items()}
    push = types.get("NvtxPushPopRange", _PUSH_POP)
    both = types.get("NvtxStartEndRange", _START_END)
    known = file.columns(table)
    where = '"end" IS NOT NULL' + (f" AND eventType IN ({push}, {both})" * ("eventType" in known))
    names = ["start", "end", "eventType", "globalTid", "textId"]
    if not {"start", "end"} <= set(known):
        table = where = ""
    rows = pd.DataFrame(file.integers(table, names, where))
    texts = file.texts(table, "text", where) or [None] * len(rows)
    registered = _texts(file, rows["textId"])
    rows["label"] = [x if t is None else t for t, x in zip(texts, registered, strict=True)]
    # PyTorch (emit_nvtx) puts sequence numbers and sizes behind an op's name
    rows["name"] = [x.split(", seq")[0].split(", op_id")[0].strip() for x in rows["label"]]
    nests = (rows["eventType"] != both) & (rows["end"] >= rows["start"])
    rows["cat"] = np.where(nests, "user_annotation", "")
    return rows.assign(globalPid=rows["globalTid"] & _PROCESS, args=msgspec.Raw())


def _syncs(file: NsysFile) -> pd.DataFrame:
    """Read which stream each synchronising call waits for, and where its event was recorded."""
    by = ["globalPid", "eventId"]
    sync = pd.DataFrame(
        file.integers(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            ["start", "end", "correlationId", "streamId", "syncType", *by],
        )
    )
    event = pd.DataFrame(
        file.integers("CUPTI_ACTIVITY_KIND_CUDA_EVENT", ["correlationId", "streamId", *by])
    )
    event = event.assign(record=event["correlationId"]).rename(columns={"streamId": "on_stream"})
    # an event is recorded again and again: the last record before the wait counts
    waits = sync[sync["syncType"] == _WAIT_EVENT].reset_index(names="row")
    found = pd.merge_asof(
        waits.sort_values("correlationId"), event.sort_values("correlationId"),
        on="correlationId", by=by, allow_exact_matches=False,
    ).dropna(subset="record").set_index("row")  # fmt: skip
    sync = sync.join(found[["on_stream", "record"]].astype(np.int64)).fillna(-1).astype(np.int64)
    sync["args"] = [
        Args(correlation=c, stream=s if s < 1 << 31 else -1, wait_on_stream=on,
             wait_on_cuda_event_record_corr_id=record)
        for c, s, on, record in zip(
            sync["correlationId"], sync["streamId"], sync["on_stream"], sync["record"], strict=True
        )
    ]  # fmt: skip
    return sync.assign(cat="cuda_sync", name="", globalTid=-1)


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
