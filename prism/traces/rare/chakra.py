"""Chakra execution traces of one or several ranks, to the tables that Kineto traces give.

Protobuf (``.et``) and the JSON that chakra_trace_link writes. Device nodes are kernels and
collectives; durations are whole microseconds, and those below one are counted. Where nodes have
start times they lie on a timeline, else only their durations are known. Left out: dependencies
(edges are inferred from times, as for other traces), memory nodes, host nodes as ops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.traces.file import RecordedFile
from prism.traces.kernelnames import COLLECTIVES as COLLECTIVE_KINDS
from prism.traces.kernelnames import classify, collective_kind, is_communication_kernel
from prism.traces.kineto.events import SHORTER
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.messages import number, whole
from prism.traces.kineto.rank import Calls, RankTrace, as_columns, step_of
from prism.traces.kineto.stepmarks import NamedRanges, compile_pattern, find_steps, no_such_step
from prism.traces.rare.chakraproto import COLLECTIVES, NODE_TYPES, decode, is_proto
from prism.traces.table import Trace

_RANK = re.compile(r"\.(\d{1,7})\.(?:et|json)(?:\.gz)?$")  # <name>.<rank>.et, as simulators want it
_JSON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_LONGEST_US = 1e12  # 11.6 days: no recording lasts as long
_HOST_NODES = 3  # shown where a file has no others


def is_chakra(file: RecordedFile) -> bool:
    """Tell an execution trace by its messages, or JSON by its schema without profiler's events."""
    if file.kind != "json":
        return file.kind in ("text", "binary") and is_proto(file.head)
    return re.search(rb'"schema"\s*:\s*"', file.head) is not None and (
        b'"traceEvents"' not in file.head
    )


def read_chakra(files: Sequence[RecordedFile], step_range: str | None = None) -> Trace:
    """Read execution traces of one job, one file a rank."""
    pattern = compile_pattern(step_range)
    return read_ranks(files, lambda file: [_read_file(file, pattern)], "chakra")


def _read_file(file: RecordedFile, pattern: re.Pattern[str] | None) -> RankTrace:
    """Read the nodes of one file."""
    source, as_json = file.source, file.kind == "json"
    data = file.read_text(MOST_TRACE)
    sizes.check_size(source, {"bytes of nodes": (len(data), sizes.EVENT_BYTE)}, SHORTER)
    notes = []
    about: dict[str, Any] = {}
    if as_json:
        nodes = _json_nodes(data, source)
    else:
        about, nodes, cut = decode(data, source)
        if cut:
            notes.append(f"the file ends inside a message: {len(nodes):,} nodes before were read")
    marked = any("is_cpu_op" in node for node in nodes)
    device = [
        node for node in nodes
        if node["type"] in NODE_TYPES and not node.get("is_cpu_op", marked)
    ]  # fmt: skip
    host = [node for node in nodes if node.get("is_cpu_op", marked)]
    if not device:
        shown = ", ".join(str(node["name"])[:40] for node in host[:_HOST_NODES])
        raise PrismError(
            f"{source}: {len(nodes):,} nodes and none of a device"
            + (f" (host nodes such as {shown})" if shown else "")
            + "; link host and device traces first: chakra_trace_link, then chakra_converter"
        )
    zero = [node for node in device if node["duration"] <= 0]
    if zero and not as_json:
        notes.append(
            f"{len(zero):,} of {len(device):,} device nodes last 0: durations are whole "
            "microseconds, and shorter kernels read 0"
        )
    return _rank(device, host, about, notes, file.path, pattern)


class _JsonNode(msgspec.Struct, gc=False):
    name: Any = None
    cat: Any = None
    ts: Any = None
    inclusive_dur: Any = None
    exclusive_dur: Any = None
    dur: Any = None
    stream: Any = None
    tid: Any = None


class _JsonFile(msgspec.Struct):
    nodes: list[_JsonNode] = []


def _json_nodes(data: bytes, source: str) -> list[dict[str, Any]]:
    """Nodes of a linked trace in JSON, as those of protobuf."""
    try:
        file = msgspec.json.decode(data, type=_JsonFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PrismError(
            f"{source}: the JSON of the Chakra execution trace is broken or cut short ({error}); "
            "copy it again"
        ) from error
    nodes = []
    for node in file.nodes:
        name, on_device = str(node.name or ""), _JSON_DEVICE.get(str(node.cat or ""))
        times = (node.exclusive_dur, node.inclusive_dur, node.dur)
        duration = next((d for d in map(number, times) if d == d and d >= 0.0), 0.0)
        kind = collective_kind(name) if is_communication_kernel(name) else ""
        made: dict[str, Any] = {
            "name": name, "type": (7 if kind else 4) if on_device else 4, "start": number(node.ts),
            "duration": duration, "is_cpu_op": on_device is None, "tid": node.tid,
        }  # fmt: skip
        if node.stream is not None:
            made["stream"] = node.stream
        nodes.append(made)
    return nodes


def _rank(
    device: list[dict[str, Any]], host: list[dict[str, Any]], about: Mapping[str, Any],
    notes: list[str], path: Path, pattern: re.Pattern[str] | None,
) -> RankTrace:  # fmt: skip
    """Columns of one file's device nodes."""
    start = np.array([node["start"] for node in device], dtype=np.float64)
    duration = np.array([node["duration"] for node in device], dtype=np.float64)
    # protobuf has no empty number: starts that are all 0 were never written
    timed = start.size > 0 and bool(np.isfinite(start).all()) and float(start.max()) > 0.0
    origin = 0.0
    sane = (duration >= 0.0) & (duration < _LONGEST_US)
    if timed:
        middle = float(np.median(start))
        sane &= np.abs(start - middle) < _LONGEST_US
        origin = float(start[sane].min()) if sane.any() else 0.0
    bad = int((~sane).sum())
    device = [node for node, ok in zip(device, sane.tolist(), strict=True) if ok]
    start = start[sane] - origin if timed else np.full(int(sane.sum()), np.nan)
    duration = duration[sane]
    if not device:
        raise PrismError(f"{path}: no device node has a duration that can be true")
    if pattern is not None and not timed:
        raise PrismError(
            f"{path}: --step-range {pattern.pattern}: its nodes have no start times, so that none "
            "marks a step; leave it out"
        )
    ranges = _host_ranges(host, origin)
    steps = find_steps(ranges, pattern)[0] if timed else []
    if pattern is not None and not steps:
        raise no_such_step(ranges, pattern, str(path), "host node with a time")
    named = _RANK.search(path.name)
    nothing = np.full(start.size, np.nan)
    where = step_of(start, steps) if timed else np.full(start.size, -1, np.int64)
    return RankTrace(
        whole(about.get("rank"), int(named[1])) if named else _known(about.get("rank")),
        _known(about.get("world_size")), 0, origin, _describe(device), start, duration, nothing,
        nothing.copy(), where, steps, Calls(), len(host), bad, bool((duration % 1.0).any()), notes,
    )  # fmt: skip


def _host_ranges(host: list[dict[str, Any]], origin: float) -> NamedRanges:
    """Host nodes with a time, as named ranges [us] from an origin."""
    marks = [node for node in host if node["duration"] > 0 and number(node["start"]) > 0.0]
    labels: dict[str, int] = {}
    label = [labels.setdefault(str(node["name"]), len(labels)) for node in marks]
    begins = np.array([node["start"] for node in marks], dtype=np.float64) - origin
    lasts = np.array([node["duration"] for node in marks], dtype=np.float64)
    return NamedRanges(list(labels), np.array(label, np.int64), begins, begins + lasts)


def _known(value: Any) -> int | None:
    """Whole number from 0, None where there is none."""
    found = whole(value)
    return found if found >= 0 else None


def _describe(device: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Columns of names, classes and messages."""
    rows = []
    for node in device:
        name = str(node["name"])
        n_bytes, group = number(node.get("comm_size", -1)), str(node.get("pg_name", ""))
        if NODE_TYPES[node["type"]] == "COMP":
            category = "memcpy" if name.startswith("Memcpy") else "kernel"
            category = "memset" if name.startswith("Memset") else category
            kind, kernel_class = classify(name, "", False, category)
            n_bytes, group = np.nan, ""
        else:
            kind = "transfer"
            if NODE_TYPES[node["type"]] == "COMM_COLL":
                told = COLLECTIVES.get(whole(node.get("comm_type")))
                kind = told or collective_kind(name) or "all_reduce"
            kernel_class = kind if kind != "transfer" else "p2p"
        # where no stream is recorded, collectives run beside the kernels
        stream = whole(node.get("stream"), 1 if kind in COLLECTIVE_KINDS else 0)
        n_bytes = n_bytes if n_bytes >= 0 else np.nan
        rows.append((kind, kernel_class, name, stream, n_bytes, group, -1, -1, -1, "", "", False))
    return as_columns(rows)
