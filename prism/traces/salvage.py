"""Profiler JSON as bytes, and the events that can be saved from a broken file.

Valid files take one call of the decoder. Broken ones (truncated, bare NaN, unescaped quotes,
control characters, a damaged gzip stream) are split at event boundaries and decoded event by
event; what was repaired and what was lost is counted. Only the fields that prism uses are kept.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE, read_bytes, unpack

Scalar = str | int | float | None

SHORTER = "what is recorded: fewer steps, or no stacks and shapes"
"""What to do with a file that takes too much memory."""

_ARGS = {
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "dtype": "dtype",
    "group_size": "Group size",
    "group_name": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "input_dims": "Input Dims",
    "input_type": "Input type",
}


class Args(msgspec.Struct, rename=_ARGS, gc=False):
    """The arguments of an event that prism reads."""

    correlation: Scalar = None
    stream: Scalar = None
    bytes: Scalar = None
    collective: Scalar = None
    in_elements: Scalar = None
    dtype: Scalar = None
    group_size: Scalar = None
    group_name: Scalar = None
    group_ranks: msgspec.Raw = msgspec.Raw()
    input_dims: msgspec.Raw = msgspec.Raw()
    input_type: msgspec.Raw = msgspec.Raw()
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
    """The argument of a runtime call that prism reads."""

    correlation: Scalar = None


class Distributed(msgspec.Struct):
    """Who wrote the trace."""

    rank: Scalar = None
    world_size: Scalar = None


class TraceFile(msgspec.Struct, rename="camel"):
    """A profiler's file."""

    trace_events: list[Event] | None = None
    distributed_info: Distributed | None = None
    base_time_nanoseconds: Scalar = None


@dataclass
class RawTrace:
    """Events of one file, with what had to be repaired.

    Attributes
    ----------
    events : list of Event
        In the file's order.
    rank, world_size, base_time_ns : int or None
        From the header, None where it does not tell.
    n_mended, n_dropped : int
        Events that were repaired, and events that were lost.
    notes : list of str
        The same in words, for users.
    """

    events: list[Event]
    rank: int | None = None
    world_size: int | None = None
    base_time_ns: int | None = None
    n_mended: int = 0
    n_dropped: int = 0
    notes: list[str] = field(default_factory=list)


_DECODER = msgspec.json.Decoder(TraceFile | list[Event])
_EVENT = msgspec.json.Decoder(Event)
_EVENTS = msgspec.json.Decoder(list[Event])
_ARGUMENTS = msgspec.json.Decoder(Args)
_CALL = msgspec.json.Decoder(CallArgs)
_NO_ARGS = Args()


def arguments(event: Event) -> Args:
    """Decode an event's arguments; none where they are missing or no object."""
    try:
        return _ARGUMENTS.decode(event.args) if event.args else _NO_ARGS
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_ARGS


def correlation(event: Event) -> Any:
    """Correlation id of a runtime call as recorded."""
    try:
        return _CALL.decode(event.args).correlation if event.args else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_events(path: Path) -> RawTrace:
    """Read the events of one profiler file."""
    return decode_events(read_bytes(path, str(path), MOST_TRACE), str(path))


def decode_events(data: bytes, where: str) -> RawTrace:
    """Decode a profiler file's content; `where` is its name for messages."""
    notes: list[str] = []
    data, damage = unpack(data, where, MOST_TRACE)
    sizes.check_size(where, {"bytes of events": (len(data), sizes.EVENT_BYTE)}, SHORTER)
    if damage:
        notes.append(f"the gzip stream {damage}; what came before was read")
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        notes.append("a byte order mark was skipped")
    with no_collection():
        try:
            found = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            trace = _salvage(data)
        else:
            if isinstance(found, list):
                trace = RawTrace(found)
                notes.append("a bare list of events, without the header that names the rank")
            else:
                trace = _with_header(found)
    if not trace.events:
        raise PrismError(
            f"{where}: found no trace events{_lost(trace)}; expected a PyTorch profiler's "
            'JSON with "traceEvents"; export one with torch.profiler\'s export_chrome_trace'
        )
    trace.notes = notes + trace.notes
    return trace


def _with_header(found: TraceFile) -> RawTrace:
    """Events and header of a file that decoded as a whole."""
    info = found.distributed_info or Distributed()
    return RawTrace(
        found.trace_events or [],
        as_int(info.rank, 0),
        as_int(info.world_size, 1),
        as_int(found.base_time_nanoseconds, 0, 1 << 63),
    )


def as_int(value: Any, least: int, below: int = 1 << 31) -> int | None:
    """Whole number of a decoded value, None where it is none or out of bounds."""
    try:
        found = None if value is None else int(value)
    except (ValueError, OverflowError):
        return None
    return found if found is not None and least <= found < below else None


def _lost(trace: RawTrace) -> str:
    """Say how many broken events there were, for a message."""
    return f" ({trace.n_dropped} broken ones)" if trace.n_dropped else ""


def once(said: list[tuple[str, str]], n_files: int) -> list[str]:
    """Name the files with each note of theirs; what all of them say is said once.

    Examples
    --------
    >>> once([("a", "x"), ("b", "x"), ("b", "y")], 2)
    ['x', 'b: y']
    """
    files: dict[str, list[str]] = {}
    for file, note in said:
        files.setdefault(note, []).append(file)
    notes = []
    for note, of in files.items():
        shown = ", ".join(of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
        notes.append(note if len(set(of)) == n_files else f"{shown}: {note}")
    return notes


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch the garbage collector off while a million small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_BOUNDARY = re.compile(rb'[\[,]\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s)"\s*:)')
_BARE = re.compile(rb"([:\[,]\s*)(?:-?NaN|-?Infinity|-?nan|-?inf)\b")
_CONTROL = re.compile(rb"[\x00-\x1f]")
_TEXT = re.compile(
    rb'("(?:name|cat)"\s*:\s*")(.*?)"(?=\s*(?:,\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp)"\s*:|\}))',
    re.DOTALL,
)
_QUOTE = re.compile(rb'(?<!\\)"')
_CHUNK = 512


def _salvage(data: bytes) -> RawTrace:
    """Split at event boundaries and keep every event that decodes."""
    edges = [match.end() for match in _BOUNDARY.finditer(data)]
    starts = [match for match in edges if match < len(data)]
    trace = RawTrace([])
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
            _salvage_each(data, bounds, trace)
    counts = []
    if trace.n_mended:
        counts.append(f"{trace.n_mended:,} events were repaired")
    if trace.n_dropped:
        counts.append(f"{trace.n_dropped:,} events could not be read and were dropped")
    words = " and ".join(counts) or "every whole event could be read"
    trace.notes.append(f"the JSON is broken: {words} ({len(trace.events):,} events kept)")
    return trace


def _salvage_each(data: bytes, bounds: list[int], trace: RawTrace) -> None:
    """Decode the events between `bounds` one at a time, as they are or repaired."""
    for i in range(len(bounds) - 1):
        piece = data[bounds[i] : bounds[i + 1]].rstrip().rstrip(b",").rstrip()
        event, mended = _decode_piece(piece)
        if event is None:
            trace.n_dropped += 1
        else:
            trace.events.append(event)
            trace.n_mended += mended


def _decode_piece(piece: bytes) -> tuple[Event | None, bool]:
    """Decode one event; the second value says whether it had to be repaired."""
    end = _end_of_list(piece)
    for candidate, mended in ((piece, False), (piece[:end], False), (_mend(piece[:end]), True)):
        try:
            return _EVENT.decode(candidate), mended
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return None, True


def _end_of_list(piece: bytes) -> int:
    """Find where the event ends if the file's end, or the stump of an event, hangs on to it."""
    match = re.search(rb'\}\s*(?:\]\s*(?:[,}]|$)|,\s*(?:\{\s*(?:"\w*"?\s*)?)?$)', piece)
    return match.start() + 1 if match else len(piece)


def _mend(piece: bytes) -> bytes:
    """Bare NaN to null, quotes inside a name escaped, control characters and bad bytes out."""
    piece = _CONTROL.sub(b" ", _BARE.sub(rb"\1null", piece))
    piece = _TEXT.sub(lambda m: m[1] + _QUOTE.sub(lambda _: b'\\"', m[2]) + b'"', piece)
    return piece.decode("utf-8", "replace").encode()


def _read_header(text: bytes, trace: RawTrace) -> None:
    """Rank, world size and clock base from what surrounds the events."""
    info = re.search(rb'"distributedInfo"\s*:\s*\{(.*)', text, re.DOTALL)
    if info:
        rank = re.search(rb'"rank"\s*:\s*(\d{1,9})\b', info[1])
        world = re.search(rb'"world_size"\s*:\s*(\d{1,9})\b', info[1])
        trace.rank = int(rank[1]) if rank else None
        trace.world_size = int(world[1]) if world else None
    base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b', text)
    trace.base_time_ns = int(base[1]) if base else None
