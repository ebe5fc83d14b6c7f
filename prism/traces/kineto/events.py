"""Profiler JSON as bytes, and the events that can be saved from a broken file.

Valid files take one call of the decoder. Broken ones are split at event boundaries and decoded
event by event: what is truncated, bare NaN, control characters and bytes that are no text are put
right, all else is dropped; both are counted. PyTorch writes such files: names of Python frames that
are no UTF-8 or hold control characters or quotes (pytorch issues 121219, 130622, 136180, 146900),
where a name with quotes ends nobody can say. Only the fields that prism uses are kept.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE, read_bytes, unpack
from prism.common.text import format_count
from prism.traces.file import COPY_AGAIN

Scalar = str | int | float | None

SHORTER = "what is recorded: fewer steps, or no stacks and shapes"
"""What to do with a file that takes too much memory."""

_ARGS = {
    "collective": "Collective name", "in_elements": "In msg nelems", "dtype": "dtype",
    "group_name": "Process Group Name", "group_ranks": "Process Group Ranks",
    "input_dims": "Input Dims", "input_type": "Input type", "inputs": "Concrete Inputs",
}  # fmt: skip


class Args(msgspec.Struct, rename=_ARGS, gc=False):
    """The arguments of an event that prism reads."""

    correlation: Scalar = None
    stream: Scalar = None
    bytes: Scalar = None
    collective: Scalar = None
    in_elements: Scalar = None
    dtype: Scalar = None
    group_name: Scalar = None
    group_ranks: msgspec.Raw = msgspec.Raw()
    input_dims: msgspec.Raw = msgspec.Raw()
    input_type: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    wait_on_stream: Scalar = None
    wait_on_cuda_event_record_corr_id: Scalar = None


class Event(msgspec.Struct, gc=False):
    """One event of the trace; flow and metadata events leave most fields out.

    The arguments stay bytes: most events' are never needed, and decoded they would take half of
    the memory.
    """

    name: Scalar = None
    cat: Scalar = None
    ph: Scalar = None
    ts: Scalar = None
    dur: Scalar = None
    tid: Scalar = None
    args: msgspec.Raw = msgspec.Raw()


class CallArgs(msgspec.Struct, gc=False):
    """The argument of a runtime call that prism reads; of these there are most."""

    correlation: Scalar = None


class TraceFile(msgspec.Struct, rename="camel"):
    """A profiler's file."""

    trace_events: list[Event] | None = None
    device_properties: list[dict[str, Any]] | None = None
    distributed_info: dict[str, Any] | None = None
    base_time_nanoseconds: Scalar = None


@dataclass
class RawTrace:
    """Events of one file, with what had to be repaired, in words too."""

    events: list[Event]
    rank: int | None = None
    world_size: int | None = None
    base_time_ns: int | None = None
    n_mended: int = 0
    n_dropped: int = 0
    notes: list[str] = field(default_factory=list)
    cut: bool = False  # whether the end of the file is missing
    device: str = ""  # product name


_DECODER = msgspec.json.Decoder(TraceFile | list[Event])
_EVENT = msgspec.json.Decoder(Event)
_EVENTS = msgspec.json.Decoder(list[Event])
_ARGUMENTS = msgspec.json.Decoder(Args)
_CALL = msgspec.json.Decoder(CallArgs)
NO_ARGS = Args()


def arguments(event: Event) -> Args:
    """Decode an event's arguments; none where they are missing or no object."""
    raw: Any = event.args
    if isinstance(raw, Args):  # of another profiler
        return raw
    try:
        return _ARGUMENTS.decode(raw) if raw else NO_ARGS
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NO_ARGS


def correlation(event: Event) -> Scalar:
    """Decode the correlation id of a runtime call."""
    raw: Any = event.args
    try:
        return raw.correlation if isinstance(raw, Args) else _CALL.decode(raw).correlation
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_events(path: Path) -> RawTrace:
    """Read the events of one profiler file."""
    where = str(path)
    notes: list[str] = []
    data, damage = unpack(read_bytes(path, where, MOST_TRACE), where, MOST_TRACE)
    sizes.check_size(where, {"bytes of events": (len(data), sizes.EVENT_BYTE)}, SHORTER)
    if damage:
        notes.append(f"the gzip stream {damage}; what came before was read")
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        notes.append("a byte order mark was skipped")
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        trace = _salvage(data)
    else:
        if isinstance(found, list):
            notes.append("a bare list of events, without the header that names the rank")
            found = TraceFile(found)
        info = found.distributed_info or {}
        trace = RawTrace(
            found.trace_events or [], as_int(info.get("rank"), 0),
            as_int(info.get("world_size"), 1),
            as_int(found.base_time_nanoseconds, 0, 1 << 63),
        )  # fmt: skip
        if found.device_properties:
            trace.device = str(found.device_properties[0].get("name") or "")
    trace.cut |= bool(damage)
    if not trace.events:
        lost = f" ({trace.n_dropped} broken ones)" if trace.n_dropped else ""
        raise PrismError(
            f"{where}: found no trace events{lost}; expected a PyTorch profiler's "
            'JSON with "traceEvents"; '
            + (COPY_AGAIN if trace.cut else "export one with torch.profiler's export_chrome_trace")
        )
    trace.notes = notes + trace.notes
    return trace


def as_int(value: Any, least: int, below: int = 1 << 31) -> int | None:
    """Whole number of a decoded value, None where it is none or out of bounds."""
    try:
        found = None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and least <= found < below else None


_BOUNDARY = re.compile(rb'[\[,]\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s)"\s*:)')
_BARE = re.compile(rb"([:\[,]\s*)(?:-?NaN|-?Infinity|-?nan|-?inf)\b")
_LENIENT = json.JSONDecoder(strict=False)  # takes control characters inside texts
_CHUNK = 512


def _salvage(data: bytes) -> RawTrace:
    """Split at event boundaries and keep every event that decodes."""
    starts = [m.end() for m in _BOUNDARY.finditer(data) if m.end() < len(data)]
    trace = RawTrace([], cut=data.rstrip()[-1:] not in (b"]", b"}"))
    if not starts:
        return trace
    _read_header(data[: starts[0]] + b" " + data[starts[-1] :], trace)
    starts.append(len(data))
    for first in range(0, len(starts) - 1, _CHUNK):
        bounds = starts[first : first + _CHUNK + 1]
        # events of a sound stretch decode together, an order of magnitude faster than apart
        body = data[bounds[0] : bounds[-1]].rstrip().rstrip(b",")
        try:
            trace.events.extend(_EVENTS.decode(b"[" + body + b"]"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            for begin, end in itertools.pairwise(bounds):
                _salvage_one(data[begin:end].rstrip().rstrip(b",").rstrip(), trace)
    counts = ((trace.n_mended, "repaired"), (trace.n_dropped, "unreadable and dropped"))
    told = [f"{format_count(n, 'event')} {what}" for n, what in counts if n]
    words = " and ".join(told) or "every whole event could be read"
    trace.notes.append(
        f"the JSON is broken: {words} ({format_count(len(trace.events), 'event')} kept)"
    )
    return trace


def _salvage_one(piece: bytes, trace: RawTrace) -> None:
    """Decode one event, bare NaN as null, bad bytes and what stands behind it left out."""
    try:
        trace.events.append(_EVENT.decode(piece))
        return
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = _BARE.sub(rb"\1null", piece).decode("utf-8", "replace")
    try:
        found, end = _LENIENT.raw_decode(text)
        trace.events.append(_EVENT.decode(msgspec.json.encode(found)))
    except (ValueError, RecursionError, msgspec.MsgspecError):
        trace.n_dropped += 1
    else:
        trace.n_mended += not piece.startswith(text[:end].encode())
        rest = text[end:].lstrip()  # the end of the list, or what another event was
        trace.n_dropped += bool(rest) and not rest.startswith("]")


def _read_header(text: bytes, trace: RawTrace) -> None:
    """Rank, world size and clock base from what surrounds the events."""
    info = re.search(rb'"distributedInfo"\s*:\s*\{(.*)', text, re.DOTALL)
    begin = info.start(1) if info else len(text)
    for name in ("rank", "world_size"):
        found = re.search(rb'"%s"\s*:\s*(\d{1,9})\b' % name.encode(), text[begin:])
        setattr(trace, name, int(found[1]) if found else None)
    base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b', text)
    trace.base_time_ns = int(base[1]) if base else None
