"""Step times in the logs of trainers: Megatron's lines and MLPerf's `:::MLLOG` lines.

A value may be the mean over several steps: Megatron's over its log interval (the difference of
successive step numbers), MLPerf's over what the clock between two lines says. A log with several
runs, or a run that was restarted, comes apart into runs. Left out: evaluations, checkpoints, and
every other time in a log.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.steps import StepTimes
from prism.traces.table import LONGEST_S, SHORTEST_S

_MLLOG = b":::MLLOG"
_ELAPSED = b"elapsed time per iteration ("
_MEGATRON = re.compile(
    r"\biteration\s+(\d{1,15})\s*/.*?elapsed time per iteration \((ms|s)\):\s*([^\s|]*)"
)
_INTERVAL = re.compile(rb"^\W*log_interval \.+ (\d{1,9})\s*$", re.MULTILINE)
_STEP_TIMES = ("train_step_timing", "train_step_time")  # names in MLPerf's tracked_stats


def is_log(text: bytes) -> bool:
    """Say whether a text is one of the logs that are known."""
    return _MLLOG in text or _ELAPSED in text


def read_log(files: Sequence[RecordedFile]) -> StepTimes:
    """Read the step times of a Megatron or MLPerf log."""
    read = _read_mlperf if _MLLOG in files[0].text else _read_megatron
    return read(files[0].text, files[0].source)


def _lines(text: bytes, marks: tuple[bytes, ...]) -> Iterator[tuple[int, str]]:
    """Go through the lines that hold one of the marks, with their numbers."""
    for number, line in enumerate(io.BytesIO(text), start=1):
        if any(mark in line for mark in marks):
            yield number, line.decode("utf-8", errors="replace")


def _to_seconds(value: object, source: str, line: int, unit: float = 1.0) -> float:
    """Check one value; `unit` is in seconds."""
    try:
        seconds = unit * float(value) if isinstance(value, str | int | float) else np.nan
    except (ValueError, OverflowError):
        seconds = np.nan
    if isinstance(value, bool) or not SHORTEST_S <= seconds <= LONGEST_S:
        raise PrismError(
            f"{source}:{line}: the step time is {str(value)[:40]!r}, expected {SHORTEST_S:g} "
            f"to {LONGEST_S:g} s; take the line out if the log was damaged there"
        )
    return seconds


def _read_megatron(text: bytes, source: str) -> StepTimes:
    """Read Megatron's lines; a step number that goes back starts a new run."""
    rows: list[tuple[int, int, float, int]] = []  # run, step, seconds, line
    twice = restarts = cut = 0
    for number, line in _lines(text, (_ELAPSED,)):
        found = _MEGATRON.search(line)
        if found is None:
            cut += 1
            continue
        step = int(found[1])
        seconds = _to_seconds(found[3], source, number, 1e-3 if found[2] == "ms" else 1.0)
        if rows and step <= rows[-1][1]:
            if step == rows[-1][1] and seconds == rows[-1][2]:
                twice += 1
                continue
            restarts += 1
        rows.append((restarts, step, seconds, number))
    if not rows:
        raise PrismError(
            f"{source}: {cut} lines have an elapsed time and none a step with its time; "
            "expected 'iteration 10/ 1000 | ... elapsed time per iteration (ms): 5837.9 | ...'"
        )
    run, steps, values, lines = (list(column) for column in zip(*rows, strict=True))
    interval, notes = _interval(np.array(run), np.array(steps), text)
    if twice:
        notes.append(f"{twice} lines that repeat the one before were skipped")
    if cut:
        notes.append(f"{cut} lines with an elapsed time and no step number were skipped")
    if restarts:
        where = next(i for i in range(len(rows)) if rows[i][0] == 1)
        notes.append(
            f"the step number goes back {restarts} times (first at {source}:{lines[where]}): "
            f"read as {restarts + 1} runs, named 0 to {restarts}"
        )
    return StepTimes(
        np.array(values), np.array(steps), _names(np.array(run)), source,
        "elapsed time per iteration", interval, tuple(notes),
    )  # fmt: skip


def _names(run: NDArray[np.int64]) -> NDArray[np.str_]:
    """Name the runs of a log; "" where it holds one."""
    return run.astype(np.str_) if run.any() else np.full(run.size, "")


def _interval(
    run: NDArray[np.int64], step: NDArray[np.int64], text: bytes
) -> tuple[int, list[str]]:
    """Find the steps that each value covers."""
    gaps = np.diff(step)[np.diff(run) == 0]
    if gaps.size:
        sizes, counts = np.unique(gaps, return_counts=True)
        interval = int(sizes[np.argmax(counts)])
        notes = []
        if sizes.size > 1:
            notes.append(
                f"successive values are {', '.join(map(str, sizes[:5]))} steps apart; each is "
                f"taken as the mean of {interval}, as most are"
            )
    else:
        found = _INTERVAL.search(text)
        interval = max(int(found[1]), 1) if found else 1
        notes = [] if found else ["only one value: the log interval is taken as 1"]
    if interval > 1:
        notes.append(
            f"each value is the mean of {interval} steps: the spread of single steps is larger, "
            f"by about sqrt({interval}) = {np.sqrt(interval):.2g} where steps are independent"
        )
    return interval, notes


class _Stat(NamedTuple):
    """One `tracked_stats` line that holds a step time."""

    run: int
    seconds: float
    clock: float  # [s]
    progress: float  # steps, samples or tokens so far; not-a-number where the line has none


def _read_mlperf(text: bytes, source: str) -> StepTimes:
    """Read MLPerf's lines; every `run_start` after a step time starts a new run."""
    stats: list[_Stat] = []
    settings: dict[str, float] = {}
    others: set[str] = set()
    run = broken = 0
    column = ""
    for number, line in _lines(text, (_MLLOG,)):
        event = _event(line)
        if event is None:
            broken += 1
            continue
        key, value = event.get("key"), event.get("value")
        if key == "run_start" and stats and stats[-1].run == run:
            run += 1
        elif key in ("global_batch_size", "max_sequence_length"):
            settings[str(key)] = _plain(value)
        elif key == "tracked_stats" and isinstance(value, dict):
            column = column or next((name for name in _STEP_TIMES if name in value), "")
            if not column or column not in value:
                others.update(map(str, value))
                continue
            seconds = _to_seconds(value[column], source, number)
            stats.append(_Stat(run, seconds, *_clock_and_count(event)))
    if not stats:
        had = f"tracked_stats has {', '.join(sorted(others)[:8])}" if others else "no tracked_stats"
        raise PrismError(
            f"{source}: MLPerf log without step times: {had}; expected "
            f"{' or '.join(_STEP_TIMES)}; results without them give run totals only"
        )
    return _mlperf_times(stats, settings, column, broken, source)


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


def _mlperf_times(
    stats: list[_Stat], settings: dict[str, float], column: str, broken: int, source: str
) -> StepTimes:
    """Make step numbers, and find how many each value covers."""
    run = np.array([stat.run for stat in stats])
    seconds = np.array([stat.seconds for stat in stats])
    same_run = np.diff(run) == 0
    mean_over, how = _steps_per_value(stats, seconds, same_run)
    step = _step_numbers(np.array([stat.progress for stat in stats]), run, settings, mean_over)
    notes = [f"each value covers {mean_over} step{'s' if mean_over > 1 else ''} ({how})"]
    if mean_over > 1:
        notes[0] += "; the spread of single steps is larger, by about its square root"
    if broken:
        notes.append(f"{broken} broken :::MLLOG lines were skipped")
    return StepTimes(seconds, step, _names(run), source, column, mean_over, tuple(notes))


def _steps_per_value(
    stats: list[_Stat], seconds: NDArray[np.float64], same_run: NDArray[np.bool_]
) -> tuple[int, str]:
    """Compare the clock between two lines with the value: a mean of n steps takes n of it."""
    ratio = np.diff([stat.clock for stat in stats])[same_run] / seconds[1:][same_run]
    ratio = ratio[np.isfinite(ratio)]
    if not ratio.size:
        return 1, "assumed: no clock to check it"
    median = float(np.median(ratio))  # evaluations lie in a minority of the gaps
    return min(max(round(median), 1), 1_000_000), f"the clock between values is {median:.3g} of one"


def _step_numbers(
    count: NDArray[np.float64], run: NDArray[np.int64], settings: dict[str, float], mean_over: int
) -> NDArray[np.int64]:
    """Turn counts of tokens or samples into steps; ordinals where they are none."""
    batch = settings.get("global_batch_size", np.nan)
    tokens = batch * settings.get("max_sequence_length", np.nan)
    grows = bool((np.diff(count)[np.diff(run) == 0] > 0).all())
    if grows and np.isfinite(count).all():
        for unit in (tokens, batch):
            if unit > 0 and (count % unit == 0).all():
                return np.asarray(count / unit, dtype=np.int64)
        if count.size > 1 and np.median(np.diff(count)) == mean_over:  # already steps
            return np.asarray(count, dtype=np.int64)
    first = np.flatnonzero(np.r_[True, np.diff(run) != 0])
    ordinal = np.arange(run.size) - np.repeat(first, np.diff(np.r_[first, run.size]))
    return np.asarray(ordinal * mean_over, dtype=np.int64)
