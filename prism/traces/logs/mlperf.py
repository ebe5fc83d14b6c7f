"""Step times in MLPerf's `:::MLLOG` lines: each value over the steps that the clock says."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.logs.lines import marked_lines, to_seconds
from prism.traces.steps import StepTimes

MLLOG = b":::MLLOG"
"""What marks a line."""

_MARK = re.compile(MLLOG)
_STEP_TIMES = ("train_step_timing", "train_step_time")  # names in MLPerf's tracked_stats


def _names(run: NDArray[np.int64]) -> NDArray[np.str_]:
    """Name the runs of a log; "" where it holds one."""
    return run.astype(np.str_) if run.any() else np.full(run.size, "")


class _Stat(NamedTuple):
    """One `tracked_stats` line that holds a step time."""

    run: int
    seconds: float
    clock: float  # [s]
    progress: float  # steps, samples or tokens so far; not-a-number where the line has none


def read_mlperf(text: bytes, source: str) -> StepTimes:
    """Read MLPerf's lines; every `run_start` after a step time starts a new run."""
    stats: list[_Stat] = []
    settings: dict[str, float] = {}
    others: set[str] = set()
    run = broken = 0
    column = ""
    for number, line in marked_lines(text, _MARK):
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
            seconds = to_seconds(value[column], source, number)
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
    notes = [f"each value covers {format_count(mean_over, 'step')} ({how})"]
    if mean_over > 1:
        notes[0] += "; the spread of single steps is larger, by about its square root"
    if broken:
        notes.append(f"{broken} broken :::MLLOG lines were skipped")
    return StepTimes(
        seconds,
        step,
        _names(run),
        source,
        column,
        mean_over,
        tuple(notes),
        "s",
        "as MLPerf's logs have",
    )


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
