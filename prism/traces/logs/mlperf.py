"""Step times in MLPerf's `:::MLLOG` lines: each value over the steps that the clock says."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.logs.runs import marked_lines, rows_of_run, to_seconds
from prism.traces.steps import StepTimes

MLLOG = b":::MLLOG"
"""What marks a line."""

_STEP_TIMES = ("train_step_timing", "train_step_time")  # names in MLPerf's tracked_stats


def read_mlperf(text: bytes, source: str, wanted: str | None) -> StepTimes:
    """Read MLPerf's lines; every `run_start` after a step time starts a new run."""
    rows: list[tuple[int, float, float, float]] = []
    settings: dict[str, float] = {}
    others: dict[str, None] = {}
    run = broken = 0
    column = ""
    for number, line in marked_lines(text, re.compile(MLLOG)):
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


def _step_numbers(
    stats: pd.DataFrame, settings: dict[str, float], mean_over: int
) -> NDArray[np.int64]:
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
