"""Chakra execution traces of one or several ranks, to the tables that Kineto traces give.

Protobuf (``.et``) and the JSON that chakra_trace_link writes. Device nodes are kernels and
collectives; durations are whole microseconds, and those below one are counted. Where nodes have
start times they lie on a timeline, else only their durations are known. Left out: dependencies
(edges are inferred from times, as for other traces), memory nodes, host nodes as ops.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.traces.chakraproto import COLLECTIVES, NODE_TYPES, decode
from prism.traces.content import find_kind, read_text
from prism.traces.kernelnames import COLLECTIVES as COLLECTIVE_KINDS
from prism.traces.kernelnames import classify, collective_kind, is_communication_kernel
from prism.traces.kineto import drop_impossible, join_ranks
from prism.traces.kinetorank import Calls, RankTrace, step_of
from prism.traces.messages import number, whole
from prism.traces.rankfiles import read_each
from prism.traces.salvage import SHORTER, once
from prism.traces.stepmarks import NamedRanges, compile_pattern, find_steps, no_such_step
from prism.traces.table import Trace, make_trace

_RANK = re.compile(r"\.(\d{1,7})\.(?:et|json)(?:\.gz)?$")  # <name>.<rank>.et, as simulators want it
_JSON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_LONGEST_US = 1e12  # 11.6 days: no recording lasts as long
_HOST_NODES = 3  # shown where a file has no others


def read_chakra(
    paths: Sequence[str | Path], found: Collection[Path] = (), step_range: str | None = None
) -> Trace:
    """Read execution traces of one job, one file a rank."""
    pattern = compile_pattern(step_range)
    done, left_out = read_each(paths, found, lambda path: _read_file(path, pattern))
    files, ranks = [path for path, _ in done], [rank for _, rank in done]
    timed = all(rank.start.size and np.isfinite(rank.start).all() for rank in ranks)
    told = [
        (path.name, note)
        for path, rank in done
        for note in [*rank.notes, *(drop_impossible(rank) if timed else [])]
    ]
    notes = [*once(told, len(files)), *left_out]
    if timed:
        return join_ranks(ranks, files, notes, "chakra")
    return _without_times(ranks, files, notes)


def _read_file(path: Path, pattern: re.Pattern[str] | None) -> RankTrace:
    """Read the nodes of one file."""
    source = str(path)
    data = read_text(path, source, MOST_TRACE)
    sizes.check_size(source, {"bytes of nodes": (len(data), sizes.EVENT_BYTE)}, SHORTER)
    as_json = find_kind(path, source) == "json"
    read = _json_nodes(data, source) if as_json else _proto_nodes(data, source)
    nodes, about, notes = read
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
    return _rank(device, host, about, notes, path, pattern)


def _proto_nodes(
    data: bytes, source: str
) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Nodes, attributes of the file and notes."""
    version, about, nodes, cut = decode(data, source)
    notes = [f"the file ends inside a message: {len(nodes):,} nodes before it were read"] * cut
    return nodes, {"version": version, **about}, notes


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
    schema: Any = None
    nodes: list[_JsonNode] = []


def _json_nodes(data: bytes, source: str) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
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
    return nodes, {"version": str(file.schema or "")}, []


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


def _describe(device: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns of names, classes and messages."""
    n = len(device)
    rows = []
    for node in device:
        name = str(node["name"])
        size, group = node.get("comm_size", -1), str(node.get("pg_name", ""))
        kind = NODE_TYPES[node["type"]]
        if kind == "COMM_COLL":
            told = COLLECTIVES.get(whole(node.get("comm_type")))
            op = told or collective_kind(name) or "all_reduce"
            rows.append((op, op if op != "transfer" else "p2p", name, number(size), group))
        elif kind != "COMP":
            rows.append(("transfer", "p2p", name, number(size), group))
        else:
            category = "memcpy" if name.startswith("Memcpy") else "kernel"
            category = "memset" if name.startswith("Memset") else category
            rows.append((*classify(name, "", False, category), name, np.nan, ""))
    names = ("op_kind", "kernel_class", "name", "bytes", "group")
    columns: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    columns["bytes"] = np.array([b if b >= 0 else np.nan for b in columns["bytes"]])
    # where no stream is recorded, collectives run beside the kernels
    stream = [
        whole(node.get("stream"), 1 if kind in COLLECTIVE_KINDS else 0)
        for node, kind in zip(device, columns["op_kind"], strict=True)
    ]
    return {
        **columns, "stream": stream, "correlation": [-1] * n, "thread": [-1] * n, "op": [""] * n,
        "shape": [""] * n, "copy_back": [False] * n, "group_size": [-1] * n,
    }  # fmt: skip


def _without_times(ranks: list[RankTrace], files: list[Path], notes: list[str]) -> Trace:
    """Put the durations of all ranks into one table, where nothing says when they ran."""
    taken = {rank.rank for rank in ranks if rank.rank is not None}
    free = (number for number in range(len(ranks) * 2) if number not in taken)
    columns: dict[str, Any] = {
        name: [value for rank in ranks for value in rank.columns[name]]
        for name in ("op_kind", "kernel_class", "name", "stream", "bytes", "group", "shape", "op",
                     "group_size", "correlation", "thread", "copy_back")
    }  # fmt: skip
    numbers = [next(free) if rank.rank is None else rank.rank for rank in ranks]
    sizes = [rank.duration.size for rank in ranks]
    n = sum(sizes)
    columns |= {
        "rank": np.repeat(numbers, sizes),
        "duration": np.concatenate([rank.duration for rank in ranks]) * 1e-6,
        **{name: np.full(n, np.nan) for name in ("launch", "launch_end", "transfer")},
        "collective": np.full(n, -1, np.int64),
    }
    notes.append(
        "nodes have no start times: durations are known, and neither steps nor what waits for what"
    )
    source = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(ranks)} ranks)"
    return make_trace(columns, source, "chakra", notes, {"ranks": [], "n_ranks": len(ranks)})
