"""Step times in TensorBoard's event files.

A file is records: a length, its checksum, a message, its checksum. Records of several files of one
folder follow each other by their clock; steps that a later one has again are a restart. Checksums
are not verified: a record that is cut or no message ends the file, with a note.

References
----------
.. [1] TensorFlow (Apache-2.0), core/lib/io/record_writer.cc, core/util/event.proto,
   core/framework/summary.proto and tensor.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.traces.columns import meaning, take
from prism.traces.file import RecordedFile
from prism.traces.logs.runs import in_order, split_runs, to_seconds, wanted_run
from prism.traces.protobuf import fields, last_fields
from prism.traces.steps import StepTimes

_VERSION = b"brain.Event:"  # in the first record
_FIRST = 64  # bytes of that record at most
_HEAD, _TAIL = 12, 4  # bytes of length and checksum before a message, of the checksum behind
_FORMATS = {1: "<f", 2: "<d"}  # of a tensor, by its type
_Row = tuple[int, float, str, float]  # step, clock [s], name, value


def is_events(file: RecordedFile) -> bool:
    """Tell an event file by its first record."""
    return _VERSION in file.head[_HEAD : _HEAD + _FIRST]


def read_events(
    files: Sequence[RecordedFile], column: str | None = None,
    where: Mapping[str, str] | None = None, unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:  # fmt: skip
    """Read the step times of a run; `column` chooses among scalars, `where` a run by its name."""
    source, per_step = files[0].source, per_step or {}
    wanted = wanted_run(source, where)
    parts, notes = [], []
    for file in files:
        scalars, cut = _read_file(file.read_text(MOST_TRACE), column)
        parts.append(pd.DataFrame(scalars, columns=["step", "clock", "tag", "value"]))
        if cut:
            notes.append(f"{file.source}: ends inside a record; what is before was read")
    found = sorted((part for part in parts if len(part)), key=lambda part: part["clock"].iloc[0])
    if not found:
        what = "no scalar is a step time" if column is None else f"--column: no scalar {column!r}"
        raise PrismError(
            f"{source}: {what}; expected one such as iteration-time, or one whose name ends with "
            "its unit; Megatron writes its with --log-timers-to-tensorboard"
        )
    entries = pd.concat(found, ignore_index=True)
    taken = take(source, sorted(entries["tag"].unique()), column, unit, per_step)
    entries = entries[entries["tag"] == taken.column]
    entries = entries.assign(
        seconds=taken.seconds(entries["value"].to_numpy(), per_step.get(taken.of, 1.0))
    )
    for row in entries.itertuples():
        to_seconds(row.seconds, f"{source}, step", row.step)
    entries, said = split_runs(entries, source, wanted)
    return in_order(entries, taken, source, [*notes, *said])


def _records(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split a file into its messages, and say which is whole."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        end = at + _HEAD + size
        yield data[at + _HEAD : end], end + _TAIL <= len(data)
        at = end + _TAIL


def _read_file(data: bytes, column: str | None) -> tuple[list[_Row], bool]:
    """Read the scalars that may be step times; say whether the file is cut."""
    found: list[_Row] = []
    for message, is_whole in _records(data):
        if not is_whole:
            return found, True
        try:
            found += _scalars(message, column)
        except (ValueError, struct.error, AttributeError, TypeError):
            return found, True
    return found, False


def _scalars(message: bytes, column: str | None) -> Iterator[_Row]:
    """Scalars of an event that may be step times."""
    event = last_fields(message)
    (clock,) = struct.unpack("<d", event[1]) if 1 in event else (float("nan"),)
    for at, _, part in fields(event.get(5, b"")):
        if at != 1:
            continue
        summary = last_fields(part)
        name = summary.get(1, b"").decode("utf-8", "replace")
        layout, content = "<f", summary.get(2, b"")
        if 8 in summary:  # a tensor, of one float or double: bytes, or numbers packed or not
            tensor = last_fields(summary[8])
            layout = _FORMATS.get(tensor.get(1, 0), "")
            content = next((tensor[i] for i in (4, 5, 6) if i in tensor), b"")
        is_scalar = layout and len(content) == struct.calcsize(layout)
        if is_scalar and (name == column if column else meaning(name).kind != "none"):
            yield event.get(2, 0), clock, name, struct.unpack(layout, content)[0]
