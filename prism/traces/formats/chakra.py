"""Chakra execution traces of one or several ranks, to the tables that Kineto traces give.

Protobuf (``.et``) and the JSON that chakra_trace_link writes. Device nodes are kernels and
collectives; durations are whole microseconds, and those below one are counted. Where nodes have
start times they lie on a timeline, else only their durations are known. Left out: dependencies
(edges are inferred from times, as for other traces), memory nodes, host nodes as ops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.common.text import format_count
from prism.traces.file import RecordedFile
from prism.traces.formats.chakraproto import COLLECTIVES, NODE_TYPES, decode, is_proto
from prism.traces.kernelnames import collective_kind, is_communication_kernel
from prism.traces.kineto.events import SHORTER, Args, Event, RawTrace
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.messages import number, numbers, whole
from prism.traces.kineto.rank import RankTrace, Steps, read_rank
from prism.traces.kineto.stepmarks import NamedRanges, compile_pattern, find_steps, no_such_step
from prism.traces.table import Trace

_RANK = re.compile(r"\.(\d{1,7})\.(?:et|json)(?:\.gz)?$")  # <name>.<rank>.et, as simulators want it
_JSON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
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
            notes.append(
                f"the file ends inside a message: {format_count(len(nodes), 'node')} before were "
                "read"
            )
    marked = any("is_cpu_op" in node for node in nodes)
    device = [
        node for node in nodes
        if node["type"] in NODE_TYPES and not node.get("is_cpu_op", marked)
    ]  # fmt: skip
    host = [node for node in nodes if node.get("is_cpu_op", marked)]
    if not device:
        shown = ", ".join(repr(str(node["name"])[:40]) for node in host[:_HOST_NODES])
        raise PrismError(
            f"{source}: {format_count(len(nodes), 'node')} and none of a device"
            + (f" (host nodes such as {shown})" if shown else "")
            + "; link host and device traces first: chakra_trace_link, then chakra_converter"
        )
    # protobuf has no empty number: starts that are all 0 were never written
    starts = numbers([node["start"] for node in device])
    timed = bool(np.isfinite(starts).all()) and float(starts.max()) > 0.0
    zero = [node for node in device if node["duration"] <= 0]
    if zero and not as_json:
        notes.append(
            f"{len(zero):,} of {format_count(len(device), 'device node')} of length 0: durations "
            "are "
            "whole "
            "microseconds, and shorter kernels read 0"
        )
    steps = _steps(host, pattern, timed, source)
    named = _RANK.search(file.path.name)
    number = _known(about.get("rank"))
    if number is None and named:
        number = int(named[1])
    events = [_event(node, timed) for node in device]
    raw = RawTrace(events, number, _known(about.get("world_size")), notes=notes)
    rank = read_rank(raw, steps)
    if not rank.start.size:
        raise PrismError(f"{source}: no device node has a duration that can be true")
    if not timed:
        rank.start[:], rank.step[:] = np.nan, -1
    return rank


def _event(node: dict[str, Any], timed: bool) -> Event:
    """Make the event that Kineto would write of a device's node."""
    name, kind = str(node["name"]), NODE_TYPES[node["type"]]
    if kind == "COMP":
        cat = f"gpu_{name[:6].lower()}" if name.startswith(("Memcpy", "Memset")) else "kernel"
        args = Args(stream=whole(node.get("stream"), 0))
    else:
        told = "send"
        if kind == "COMM_COLL":
            told = COLLECTIVES.get(whole(node.get("comm_type"))) or collective_kind(name)
        cat, size = "communication", node.get("comm_size", -1)
        # where no stream is recorded, collectives run beside the kernels
        args = Args(
            stream=whole(node.get("stream"), 1), collective=told or "all_reduce", dtype="byte",
            in_elements=size if number(size) >= 0.0 else None, group_name=node.get("pg_name"),
        )  # fmt: skip
    start = node["start"] if timed else 0.0
    return Event(name, cat, "X", start, node["duration"], None, cast(msgspec.Raw, args))


def _steps(
    host: list[dict[str, Any]], pattern: re.Pattern[str] | None, timed: bool, source: str
) -> Steps:
    """Find the steps that host nodes with a time mark."""
    if not timed:
        if pattern is not None:
            raise PrismError(
                f"{source}: --step-range {pattern.pattern}: its nodes have no start times, so that "
                "none marks a step; leave it out"
            )
        return []
    marks = [node for node in host if node["duration"] > 0 and number(node["start"]) > 0.0]
    label, labels = pd.factorize(np.array([str(node["name"]) for node in marks], dtype=object))
    begins, lasts = (numbers([node[key] for node in marks]) for key in ("start", "duration"))
    ranges = NamedRanges(list(labels), label, begins, begins + lasts)
    steps = find_steps(ranges, pattern)[0]
    if pattern is not None and not steps:
        raise no_such_step(ranges, pattern, source, "host node with a time")
    return steps


def _known(value: Any) -> int | None:
    """Whole number from 0, None where there is none."""
    found = whole(value)
    return found if found >= 0 else None


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
