"""Chakra execution traces of one or several ranks, to the tables that Kineto traces give.

Protobuf (``.et``) and the JSON that chakra_trace_link writes. Device nodes are kernels and
collectives; durations are whole microseconds, and those below one are counted. Where nodes have
start times they lie on a timeline, else only their durations are known. Dependencies are left out:
edges are inferred from times, as for other traces.

A protobuf file is messages, each behind its length: the first of metadata, the others of nodes. The
format has no magic number; what tells it from other bytes is that the first two are such messages,
field by field.

References
----------
.. [1] MLCommons Chakra, schema/protobuf/et_def.proto, https://github.com/mlcommons/chakra
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.common.text import format_count
from prism.traces.file import RecordedFile
from prism.traces.kernelnames import collective_kind, is_communication_kernel
from prism.traces.kineto.events import SHORTER, Args, Event, RawTrace
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.messages import number, numbers, whole
from prism.traces.kineto.rank import RankTrace, Steps, read_rank
from prism.traces.kineto.stepmarks import NamedRanges, compile_pattern, find_steps, no_such_step
from prism.traces.protobuf import fields, last_fields, read_varint
from prism.traces.table import Trace

_RANK = re.compile(r"\.(\d{1,7})\.(?:et|json)(?:\.gz)?$")  # <name>.<rank>.et, as simulators want it
_JSON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_NODES = 3  # shown where a file has no others

_NODE_TYPES = {4: "COMP", 5: "COMM_SEND", 6: "COMM_RECV", 7: "COMM_COLL"}  # of a device
_COLLECTIVES = {
    0: "all_reduce", 1: "all_reduce", 2: "all_gather", 3: "all_gather", 4: "broadcast",
    5: "broadcast", 6: "all_to_all", 7: "reduce_scatter", 8: "reduce_scatter", 9: "all_reduce",
}  # fmt: skip
"""Op kind by Chakra's CollectiveCommType; reductions and gathers as `kernelnames` has them."""

_NODE = {
    1: (0,), 2: (2,), 3: (0,), 4: (0, 2), 5: (0, 2), 6: (0,), 7: (0,), 8: (2,), 9: (2,), 10: (2,),
    11: (2,),
}  # fmt: skip
"""Wire types that the fields of a node may have: id, name, type, dependencies (packed or not),
start, duration, inputs, outputs, attributes, storage."""
_NUMBERS = {3: "type", 6: "start", 7: "duration"}
_ATTRIBUTES = 10
_VALUES: dict[int, Callable[[Any], Any]] = {
    **dict.fromkeys((7, 9), lambda x: x - (1 << 64) * (x >> 63)), 11: int, 13: int,
    **dict.fromkeys((15, 17), lambda x: x >> 1 ^ -(x & 1)), 27: bool, 29: bytes.decode,
}  # fmt: skip
"""How to read the value of an attribute, by its field."""
_WANTED = {
    name.encode(): name
    for name in (
        "is_cpu_op", "comm_type", "comm_size", "pg_name", "stream", "rank", "world_size",
    )
}  # fmt: skip


def is_chakra(file: RecordedFile) -> bool:
    """Tell an execution trace by its messages, or JSON by its schema without profiler's events."""
    if file.kind != "json":
        return file.kind in ("text", "binary") and _is_proto(file.head)
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
        about, nodes, cut = _decode(data, source)
        if cut:
            n = format_count(len(nodes), "node")
            notes.append(f"the file ends inside a message: {n} before were read")
    marked = any("is_cpu_op" in node for node in nodes)
    device = [
        node for node in nodes
        if node["type"] in _NODE_TYPES and not node.get("is_cpu_op", marked)
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
            "are whole microseconds, and shorter kernels read 0"
        )
    steps = _steps(host, pattern, timed, source)
    named = _RANK.search(file.path.name)
    told = {name: whole(about.get(name)) for name in ("rank", "world_size")}
    if told["rank"] < 0 and named:
        told["rank"] = int(named[1])
    known: dict[str, Any] = {name: found for name, found in told.items() if found >= 0}
    events = [_event(node, timed) for node in device]
    rank = read_rank(RawTrace(events, **known, notes=notes), steps)
    if not len(rank.table):
        raise PrismError(f"{source}: no device node has a duration that can be true")
    if not timed:
        rank.table[["start", "step"]] = np.nan, -1
    return rank


def _event(node: dict[str, Any], timed: bool) -> Event:
    """Make the event that Kineto would write of a device's node."""
    name, kind = str(node["name"]), _NODE_TYPES[node["type"]]
    if kind == "COMP":
        cat = f"gpu_{name[:6].lower()}" if name.startswith(("Memcpy", "Memset")) else "kernel"
        args = Args(stream=whole(node.get("stream"), 0))
    else:
        told = "send"
        if kind == "COMM_COLL":
            told = _COLLECTIVES.get(whole(node.get("comm_type"))) or collective_kind(name)
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
    steps = find_steps(ranges, pattern)
    if pattern is not None and not steps:
        raise no_such_step(ranges, pattern, source, "host node with a time")
    return steps


class _JsonNode(msgspec.Struct, gc=False):
    name: Any = None
    cat: Any = None
    ts: Any = None
    inclusive_dur: Any = None
    exclusive_dur: Any = None
    dur: Any = None
    stream: Any = None


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
        name, on_device = str(node.name or ""), node.cat in _JSON_DEVICE
        times = (node.exclusive_dur, node.inclusive_dur, node.dur)
        duration = next((d for d in map(number, times) if d == d and d >= 0.0), 0.0)
        is_collective = on_device and is_communication_kernel(name) and collective_kind(name)
        nodes.append({
            "name": name, "type": 7 if is_collective else 4, "start": number(node.ts),
            "duration": duration, "is_cpu_op": not on_device, "stream": node.stream,
        })  # fmt: skip
    return nodes


def _messages(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split a file into its messages, each with its length before it, and say which is whole."""
    at = 0
    while at < len(data):
        try:
            size, start = read_varint(data, at)
        except (IndexError, ValueError):
            yield b"", False
            return
        at = start + size
        yield data[start:at], at <= len(data)


def _is_proto(head: bytes) -> bool:
    """Tell whether a file that begins with these bytes is a Chakra execution trace."""
    messages = _messages(head)
    meta, is_whole = next(messages, (b"", False))
    node, node_is_whole = next(messages, (b"", False))
    n = 0
    try:
        if not is_whole or any(f not in (1, 2) or wire != 2 for f, wire, _ in fields(meta)):
            return False
        for field, wire, _ in fields(node):
            if wire not in _NODE.get(field, ()):
                return False
            n += 1
    except ValueError:
        return n >= 2 and not node_is_whole
    return n >= 2


def _decode(data: bytes, source: str) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """Attributes of a file, its nodes, and whether its end lacks."""
    about: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = []
    cut = False
    for message, is_whole in _messages(data):
        if not is_whole:
            cut = True
            break
        try:
            if about is None:
                about = dict(_attributes(v for field, _, v in fields(message) if field == 2))
            else:
                nodes.append(_node(message))
        except (ValueError, TypeError, AttributeError) as error:
            raise PrismError(
                f"{source}: a message of the Chakra execution trace cannot be decoded ({error}); "
                "expected mlcommons/chakra's et_def.proto; write it again by chakra_converter"
            ) from error
    if about is None or not nodes:
        raise PrismError(
            f"{source}: a Chakra execution trace that ends before its first node; copy it again"
        )
    return about, nodes, cut


def _node(message: bytes) -> dict[str, Any]:
    """Fields of a node that prism reads."""
    node: dict[str, Any] = {"name": "", "type": 0, "start": 0, "duration": 0}
    attributes = []
    for field, wire, value in fields(message):
        if field == _ATTRIBUTES:
            attributes.append(value)
        elif field == 2:
            node["name"] = value.decode("utf-8")
        elif field in _NUMBERS and wire == 0:
            node[_NUMBERS[field]] = value
    return node | dict(_attributes(attributes))


def _attributes(messages: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Name and value of the attributes that prism reads."""
    for message in messages:
        # the name comes first, and most are not wanted
        if message[:1] == b"\x0a" and message[2 : 2 + message[1]] not in _WANTED:
            continue
        found = last_fields(message)
        name = _WANTED.get(found.get(1, b""), "")
        value = [read(found[field]) for field, read in _VALUES.items() if field in found]
        if name and value:
            yield name, value[0]
