"""Lines of a log read into entries: step, value, clock, and who wrote the line."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from prism.common.errors import PrismError
from prism.traces.logs.tools import Tool
from prism.traces.table import LONGEST_S, SHORTEST_S

_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_CLOCK = re.compile(
    r"\[?(?:(\d{4})-?)?(\d{2})-?(\d{2})[ T](\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?"
    r"(?:Z|[+-]\d{2}:?\d{2})?\]?"
)
_BEFORE = re.compile(r"\s*((?:[^\s:|]{1,200}:)+)")
_FILE = re.compile(r"(?=[^\[<]*[A-Za-z])[^\[<]*[./][^\[<]*")  # no `[rank0]`, no address
_BATCH = re.compile(r"\bglobal[ _]batch[ _]size ?[:=]\s*(\d{1,12})\b")


class Entry(NamedTuple):
    """One line of step times."""

    step: int
    value: float  # [s], or work per second
    line: int
    clock: float  # [s]; not-a-number where the line has none
    writer: tuple[str, str] = "", ""  # file that grep names, rank or host that a launcher names
    total: int = 0  # steps the job is set to; 0: not said
    batch: int = 0  # samples of a step; 0: not said
    unit: str = "s"  # that the line writes


def marked_lines(text: bytes, mark: re.Pattern[bytes]) -> Iterator[tuple[int, str]]:
    """Go through the lines with a mark, with their numbers; a progress bar's each by itself."""
    for number, line in enumerate(io.BytesIO(text), start=1):
        if mark.search(line):
            for part in _COLOUR.sub(b"", line).split(b"\r"):
                if mark.search(part):
                    yield number, part.decode("utf-8", errors="replace")


def to_seconds(value: object, source: str, line: int, unit: float = 1.0) -> float:
    """Check one value; `unit` is in seconds."""
    try:
        seconds = unit * float(value) if isinstance(value, str | int | float) else float("nan")
    except (ValueError, OverflowError):
        seconds = float("nan")
    if isinstance(value, bool) or not SHORTEST_S <= seconds <= LONGEST_S:
        raise PrismError(
            f"{source}:{line}: the step time is {str(value)[:40]!r}, expected {SHORTEST_S:g} "
            f"to {LONGEST_S:g} s; take the line out if the log was damaged there"
        )
    return seconds


def read_entries(text: bytes, tool: Tool, source: str) -> tuple[list[Entry], int]:
    """Read the lines of a tool; the number of those that are damaged, too."""
    found: list[Entry] = []
    damaged = 0
    for number, line in marked_lines(text, tool.mark):
        match = tool.line.search(line)
        if match is None:
            damaged += 1
            continue
        parts = match.groupdict()
        value = parts["value"].replace(",", "") if tool.is_rate else parts["value"]
        batch = _BATCH.search(line)
        found.append(Entry(
            int(parts["step"]),
            to_seconds(value, source, number, 1e-3 if parts.get("unit") == "ms" else 1.0),
            number, _clock(line), _writer(line[: match.start()]),
            int(parts.get("total") or 0), int(batch[1]) if batch else 0, parts.get("unit") or "s",
        ))  # fmt: skip
    return _without_line_numbers(found), damaged


def _clock(line: str) -> float:
    """Return the first time of day in a line [s]; without a year, one of the year 2000."""
    found = _CLOCK.search(line)
    if found is None:
        return float("nan")
    year, *rest, part = found.groups()
    try:
        moment = datetime(int(year or 2000), *map(int, rest), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        return float("nan")
    return moment.timestamp() + float(f"0.{part or 0}")


def _writer(before: str) -> tuple[str, str]:
    """Find what grep and launchers put before a line: its file, its rank or host."""
    found = _BEFORE.match(_CLOCK.sub("", before))
    names = found[1].rstrip(":").split(":") if found else []
    names = [name for i, name in enumerate(names) if not (i and name.isdigit())]  # grep -n
    is_file = bool(names) and re.search(
        r"^[^\[<]*([./][^\[<]*[A-Za-z]|[A-Za-z][^\[<]*[./])", names[0]
    )
    return (names[0], ":".join(names[1:])) if is_file else ("", ":".join(names))


def _without_line_numbers(entries: list[Entry]) -> list[Entry]:
    """Take line numbers by `grep -n` out of the writers: a rank writes more than one line."""
    writers = Counter(e.writer[1] for e in entries)
    if all(name.isdigit() for name in writers) and set(writers.values()) == {1}:
        return [e._replace(writer=(e.writer[0], "")) for e in entries]
    return entries
