"""Step times in the logs of trainers: lines of `TOOLS`, MLPerf's `:::MLLOG`.

Lines are read whatever a launcher, a logger or grep has put before them. Evaluations, checkpoints
and every other time in a log are left out.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from prism.common.arrays import Index
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import list_values
from prism.traces.columns import Taken
from prism.traces.file import RecordedFile
from prism.traces.logs.patterns import in_time
from prism.traces.logs.runs import (
    by_clock,
    in_order,
    rows_of_run,
    split_runs,
    to_seconds,
    wanted_run,
)
from prism.traces.logs.tools import NEVER, TOOLS, Tool
from prism.traces.looks import what_is
from prism.traces.steps import StepTimes

_MLLOG = b":::MLLOG"  # marks MLPerf's lines
_STEP_TIMES = ("train_step_timing", "train_step_time")  # names in MLPerf's tracked_stats

_RATES = ("rate", "per_s")
_VALUES = ("s", "ms", *_RATES)
_MOST_STEPS = 1e15
_LONGEST = 30_000  # characters of a line that are looked at
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}  # of numbers for readers
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_CLOCK = re.compile(
    r"\[?(?:(\d{4})-?)?(\d{2})-?(\d{2})[ T](\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?"
    r"(?:Z|[+-]\d{2}:?\d{2})?\]?"
)
_BEFORE = re.compile(r"\s*((?:[^\s:|]{1,200}:)+)")
_FILE = re.compile(r"[^\[<]*([./][^\[<]*[A-Za-z]|[A-Za-z][^\[<]*[./])")  # no rank, no address
_BATCH = re.compile(r"\bglobal[ _]batch[ _]size ?[:=]\s*(\d{1,12})\b")
_NUMBER = re.compile(r"\d+\.?\d*(e[+-]?\d+)?")
_NO_NUMBER = re.compile(r"[+-]*(?:nan|inf)", re.I)
_TIME_OF_DAY = re.compile(r"\d:\d\d:\d\d")  # in what `_CLOCK` finds, and faster
_INTERVAL = re.compile(rb"^\W*log_interval \.+ (\d{1,9})\s*$", re.MULTILINE)


def is_log(text: bytes) -> bool:
    """Say whether a text is one of the logs that are known."""
    return _MLLOG in text or any(tool.is_in(text) for tool in TOOLS)


def settings_in(text: bytes) -> bytes:
    """Give the lines that say of all others what they are of: samples of a step, the interval."""
    found = [_batch_in(tool, text) for tool in TOOLS] + [_interval_in(text)]
    ends = (
        (text.rfind(b"\n", 0, at.start(1)) + 1, text.find(b"\n", at.end(1)) + 1)
        for at in found if at
    )  # fmt: skip
    return b"".join(dict.fromkeys(text[begin:end] for begin, end in ends))


def _batch_in(tool: Tool, text: bytes) -> re.Match[bytes] | None:
    """Find the samples of a step, where a tool's logs say them."""
    has_it = tool.batch != NEVER.encode() and b"batch_size" in text
    return re.search(tool.batch, text) if has_it else None


def _interval_in(text: bytes) -> re.Match[bytes] | None:
    """Find the steps from one line to the next, among a job's arguments."""
    at = text.find(b"log_interval")
    return None if at < 0 else _INTERVAL.search(text, text.rfind(b"\n", 0, at) + 1)


def say_skipped(lines: Sequence[int]) -> str:
    """Say which lines have no value."""
    return (
        f"{format_count(len(lines), 'line')} skipped: no step number, or none for its time; line "
        f"{list_values([str(line) for line in lines])}"
    )


def read_log(
    files: Sequence[RecordedFile], where: Mapping[str, str] | None = None, own: Tool | None = None
) -> StepTimes:
    """Read the step times of a log; `where` may choose a run, `own` is a tool of this log alone."""
    text, source = files[0].text or files[0].read_text(), files[0].source
    wanted = wanted_run(source, where)
    if _MLLOG in text and own is None:
        return _read_mlperf(text, source, wanted)
    damaged = []
    there = [tool for tool in TOOLS if tool.is_in(text)]
    there = [tool for tool in there if not tool.many] or there  # a bar is beside them
    for tool in there if own is None else [own]:
        with in_time(tool, len(text)):
            entries, without = _entries(text, tool, source, files[0].first_line)
        notes = []
        if entries.empty and not tool.mark:
            raise PrismError(
                f"{source}: {tool.name} {tool.line}: no line has all of it; the file is "
                f"{what_is(files[0])}"
            )
        if entries.empty:
            damaged.append(
                f"{format_count(len(without), 'line')} like those of {tool.name}, none with a step "
                f"and its time; expected {tool.sample!r}"
            )
            continue
        without = without if tool.mark else []
        if without:
            notes.append(say_skipped(without))
        if others := dict.fromkeys(t.name for t in there if t.name != tool.name):
            notes.append(f"lines of {tool.name} are read, not those of {', '.join(others)}")
        found = _to_times(entries, tool, text, source, wanted, notes)
        return replace(found, skipped=tuple(without))
    raise PrismError(f"{source}: {'; '.join(damaged)}")


def _marked_lines(
    text: bytes, mark: re.Pattern[bytes], first: int = 1
) -> Iterator[tuple[int, str]]:
    """Go through the lines with a mark, with their numbers; a progress bar's each by itself."""
    for number, line in enumerate(io.BytesIO(text), start=first):
        if mark.search(line):
            if b"\r" not in line and b"\x1b" not in line:
                yield number, line.decode("utf-8", errors="replace")
                continue
            for part in _COLOUR.sub(b"", line).split(b"\r"):
                if mark.search(part):
                    yield number, part.decode("utf-8", errors="replace")


def _entries(
    text: bytes, tool: Tool, source: str, first: int = 1
) -> tuple[pd.DataFrame, list[int]]:
    """Read the lines of a tool; the numbers of those that are damaged, too."""
    found: list[tuple[Any, ...]] = []
    bars: list[tuple[int, bool]] = []
    damaged: list[int] = []
    pattern, other = re.compile(tool.line), re.compile(tool.other)
    has_other, values = tool.other != NEVER, [x for x in _VALUES if x in pattern.groupindex]
    for number, whole in _marked_lines(text, re.compile(tool.mark), first):
        line = whole[:_LONGEST]
        if has_other and other.search(line):
            continue
        matches = pattern.finditer(line) if tool.many else [pattern.search(line)]
        for match in matches:
            parts = {} if match is None else match.groupdict()
            step = parts.get("step") or str(len(found) + 1)
            number_of = _count(step)
            name = next((x for x in values if parts.get(x) is not None), "")
            value = parts[name] if name else "1"
            if match is None or number_of is None or _NO_NUMBER.match(value or ""):
                damaged.append(number)
                continue
            bars.append((int(parts.get("bar") or -1), "e" not in step))
            at = line.find("global")
            batch = None if at < 0 else _BATCH.search(line, at)
            clock, elapsed = _clock(line), parts.get("elapsed")
            if elapsed and (np.isnan(clock) or not tool.mark):
                clock = _since(elapsed)
            found.append((
                number_of, _seconds(name, value or "", source, number), number, clock,
                *_writer(line[: match.start()]), _count(parts.get("total") or "") or 0,
                int(batch[1]) if batch else 0, "ms" if parts.get("ms") else "s",
            ))  # fmt: skip
    names = ["step", "seconds", "line", "clock", "file", "rank", "total", "batch", "unit"]
    entries = pd.DataFrame(found, columns=names)
    if entries["rank"].is_unique and all(map(str.isdigit, entries["rank"])):
        entries["rank"] = ""  # numbers of lines by grep: a rank writes more than one
    if tool.many and len(entries):  # evaluations have bars too, of fewer steps
        entries = entries[entries["total"] == entries["total"].max()].reset_index(drop=True)
        entries = entries[entries["step"].diff() != 0].assign(unit="s", rank="")
    bar, exact = np.array(bars, np.int64).reshape(-1, 2).T
    if exact.all() and (bar >= 0).all():
        entries = _whole_steps(entries.assign(bar=bar))
    elif not exact.all() and (bar >= 0).all():  # a bar's own count where 10950 is 1.1e+4
        step = entries["step"].to_numpy()
        ahead = int(np.median((step - bar)[exact == 1])) if exact.any() else 0
        entries["step"] = bar + ahead
    return entries.reset_index(drop=True), damaged


def _whole_steps(entries: pd.DataFrame) -> pd.DataFrame:
    """Add up what is written for each microbatch: lines that count on within a step."""
    own = entries[entries["bar"].diff() != 0]  # a bar is shown again and again
    steps = own.groupby((own["step"].diff() != 0).cumsum())
    size = steps["bar"].transform("size")
    usual = int(size.median()) if len(own) else 1
    if usual < 2 or (own["bar"].diff() < 0).sum() > len(own) / 10:
        return entries
    added = own.assign(seconds=steps["seconds"].transform("sum"), parts=usual)
    return added[size == usual].groupby(added["step"].diff().ne(0).cumsum()).tail(1)


def _seconds(name: str, text: str, source: str, number: int) -> float:
    """Read the value of a line [s], or a rate; ``11.6K`` and ``1,160`` as they stand."""
    plain = text.replace(",", "") if name in _RATES else text
    try:
        value = _number(plain)
        value = 1.0 / value if name == "rate" else value
    except (ValueError, ZeroDivisionError):
        return to_seconds(text, source, number)
    return to_seconds(value, source, number, 1e-3 if name == "ms" else 1.0)


def _number(text: str) -> float:
    """Read a number for readers: ``11.6K``, ``2.60k``."""
    if text[-1:].isdecimal():
        return float(text)
    return _SUFFIXES.get(text[-1:].upper(), 1.0) * float(text.rstrip("kKMBG"))


def _count(text: str) -> int | None:
    """Read a whole number for readers; None where it is none, or no count of steps."""
    try:
        value = int(text) if text.isdecimal() else _number(text.replace(",", ""))
    except ValueError:
        return None
    return round(value) if 0.0 <= value < _MOST_STEPS else None


def _clock(line: str) -> float:
    """Return the first time of day in a line [s]; without a year, one of the year 2000."""
    found = _CLOCK.search(line) if _TIME_OF_DAY.search(line) else None
    if found is None:
        return float("nan")
    year, *rest, part = found.groups()
    try:
        moment = datetime(int(year or 2000), *map(int, rest), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError:
        return float("nan")
    return moment.timestamp() + float(f"0.{part or 0}")


def _since(elapsed: str) -> float:
    """Read a time since the start [s]: a number, or as Python writes it."""
    plain = elapsed.replace(",", "").strip()
    try:
        return float(plain) if _NUMBER.fullmatch(plain) else pd.Timedelta(plain).total_seconds()
    except ValueError:
        return float("nan")


def _writer(before: str) -> tuple[str, str]:
    """Find what grep and launchers put before a line: its file, its rank or host."""
    if ":" not in before:
        return "", ""
    found = _BEFORE.match(_CLOCK.sub("", before))
    names = found[1].rstrip(":").split(":") if found else []
    names = [name for i, name in enumerate(names) if not (i and name.isdigit())]  # grep -n
    is_file = bool(names) and _FILE.match(names[0])
    return (names[0], ":".join(names[1:])) if is_file else ("", ":".join(names))


def _to_times(
    entries: pd.DataFrame, tool: Tool, text: bytes, source: str, wanted: str | None,
    notes: list[str],
) -> StepTimes:  # fmt: skip
    """Turn the lines of one tool into step times."""
    entries, said = split_runs(entries, source, wanted)
    unit, why = entries["unit"].iloc[0], f"as {tool.name} writes it"
    what = Taken(tool.what, unit, why, is_mean=tool.is_mean)
    batch = _batch_in(tool, text)
    if batch is not None:
        entries["seconds"] = int(batch[1]) / entries["seconds"]
    elif tool.is_rate:
        entries["seconds"] = by_clock(entries)
        what = replace(what, column="time between lines", why=f"{tool.name} writes no step time",
                       is_mean=True)  # fmt: skip
        use = np.isfinite(entries["seconds"]) & (entries["seconds"] > 0.0)
        if not tool.mark and (2 * use.sum() < use.size or not use.any()):
            raise PrismError(
                f"{source}:{entries['line'][0]}: {tool.name} {tool.line}: finds no time of a step, "
                "and no time of day or since the start that rises with it in most lines; expected "
                "a group s, ms, rate or elapsed"
            )
        if 2 * use.sum() < use.size or not use.any():
            raise PrismError(
                f"{source}:{entries['line'][0]}: {tool.name} writes no step time, and the log has "
                "neither the samples of a step nor the time of most lines; expected "
                f"{tool.sample!r}; the tool's TensorBoard files hold step times"
            )
        notes.append(
            "step times are the time between lines, evaluations and checkpoints included; "
            f"{format_count(int((~use).sum()), 'line')} without one before"
        )
        if (entries["clock"] % 1.0 == 0.0).all():
            apart = entries["step"].diff().median()
            notes.append(
                "the clock has whole seconds: their rounding alone gives values a standard "
                f"deviation of {np.sqrt(1 / 6) / apart:.2g} s"
            )
        entries = entries[use]
    if "parts" in entries:
        each = int(entries["parts"].iloc[0])
        notes.append(f"a step has {each} lines, of a microbatch each: their times are added")
    if tool.many:
        notes.append("tqdm smooths what its bar shows: the spread of single steps is larger")
    interval = _interval_in(text)
    return in_order(entries, what, source, [*said, *notes], interval and int(interval[1]))


def _read_mlperf(text: bytes, source: str, wanted: str | None) -> StepTimes:
    """Read MLPerf's lines, each value over the steps that the clock says.

    Every `run_start` after a step time starts a new run.
    """
    rows: list[tuple[int, float, float, float]] = []
    settings: dict[str, float] = {}
    others: dict[str, None] = {}
    run = broken = 0
    column = ""
    for number, line in _marked_lines(text, re.compile(_MLLOG)):
        event = _event(line)
        if event is None:
            broken += 1
            continue
        key, value = event.get("key"), event.get("value")
        if key == "run_start" and rows and rows[-1][0] == run:
            run += 1
        elif key in ("global_batch_size", "max_sequence_length"):
            settings[str(key)] = _plain(value)
        elif key == "tracked_stats" and isinstance(value, dict):
            column = column or next((name for name in _STEP_TIMES if name in value), "")
            if not column or column not in value:
                others |= dict.fromkeys(map(str, value))
                continue
            seconds = to_seconds(value[column], source, number)
            rows.append((run, seconds, *_clock_and_count(event)))
    if not rows:
        had = f"tracked_stats has {', '.join(sorted(others)[:8])}" if others else "no tracked_stats"
        raise PrismError(
            f"{source}: MLPerf log without step times: {had}; expected "
            f"{' or '.join(_STEP_TIMES)}; results without them give run totals only"
        )
    stats = pd.DataFrame(rows, columns=["run", "seconds", "clock", "count"])
    # a mean of n steps takes n of it by the clock; evaluations lie in a minority of the gaps
    ratio = (stats.groupby("run")["clock"].diff() / stats["seconds"]).dropna()
    mean_over, how = 1, "assumed: no clock to check it"
    if ratio.size:
        median = float(ratio.median())
        mean_over = min(max(round(median), 1), 1_000_000)
        how = f"the clock between values is {median:.3g} of one"
    notes = [f"each value covers {format_count(mean_over, 'step')} ({how})"]
    if mean_over > 1:
        notes[0] += "; the spread of single steps is larger, by about its square root"
    if broken:
        notes.append(f"{broken} broken :::MLLOG lines were skipped")
    stats["step"] = _step_numbers(stats, settings, mean_over)
    stats["run"] = stats["run"].astype(str) if run else ""
    stats = stats[rows_of_run(stats["run"], wanted, source)]
    return StepTimes(
        stats["seconds"].to_numpy(), stats["step"].to_numpy(), stats["run"].to_numpy(np.str_),
        source, column, mean_over, tuple(notes), "s", "as MLPerf's logs have",
    )  # fmt: skip


def _event(line: str) -> dict[str, Any] | None:
    """Decode the JSON of a line; None where it is broken."""
    try:
        event = json.loads(line[line.index(":::MLLOG") + 8 :])
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _plain(value: object) -> float:
    """Return a number, or not-a-number for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else np.nan  # type: ignore[arg-type]


def _clock_and_count(event: dict[str, Any]) -> tuple[float, float]:
    """Return the time of a line [s] and its count of steps, samples or tokens."""
    metadata = event.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    count = next((metadata[key] for key in ("step", "samples_count") if key in metadata), None)
    return _plain(event.get("time_ms")) * 1e-3, _plain(count)


def _step_numbers(stats: pd.DataFrame, settings: dict[str, float], mean_over: int) -> Index:
    """Turn counts of tokens or samples into steps; ordinals where they are none."""
    batch = settings.get("global_batch_size", np.nan)
    tokens = batch * settings.get("max_sequence_length", np.nan)
    count, by_run = stats["count"].to_numpy(), stats.groupby("run")
    if np.isfinite(count).all() and (by_run["count"].diff().dropna() > 0).all():
        for unit in (tokens, batch):
            if unit > 0 and (count % unit == 0).all():
                return np.asarray(count / unit, dtype=np.int64)
        if count.size > 1 and np.median(np.diff(count)) == mean_over:  # already steps
            return np.asarray(count, dtype=np.int64)
    return np.asarray(by_run.cumcount() * mean_over, dtype=np.int64)
