"""Step times in the logs of trainers: lines of `prism.traces.logs.tools`, MLPerf's `:::MLLOG`.

A value may be the mean over several steps: over the log interval (the difference of successive step
numbers), MLPerf's over what the clock between two lines says. A log with several runs, or a run
that was restarted, comes apart into runs. Left out: evaluations, checkpoints, and every other time
in a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.columns import Taken
from prism.traces.file import RecordedFile
from prism.traces.logs.lines import Entry, read_entries
from prism.traces.logs.mlperf import MLLOG, read_mlperf
from prism.traces.logs.runs import (
    by_clock,
    check_one_job,
    in_order,
    rows_of_run,
    split_runs,
)
from prism.traces.logs.tools import TOOLS, Tool
from prism.traces.steps import StepTimes


def is_log(text: bytes) -> bool:
    """Say whether a text is one of the logs that are known."""
    return MLLOG in text or any(tool.mark.search(text) for tool in TOOLS)


def read_log(files: Sequence[RecordedFile], where: Mapping[str, str] | None = None) -> StepTimes:
    """Read the step times of a log; `where` may choose a run."""
    text, source = files[0].text, files[0].source
    where = dict(where or {})
    wanted = where.pop("run", None)
    if where:
        name = next(iter(where))
        raise PrismError(
            f"{source}: --where {name}: a log has no column {name}; expected --where run=NAME, or "
            "leave it out"
        )
    if MLLOG in text:
        times = read_mlperf(text, source)
        keep = rows_of_run(times.run, wanted, source)
        return replace(
            times, seconds=times.seconds[keep], step=times.step[keep], run=times.run[keep]
        )
    return _read_tool(text, source, wanted)


def _read_tool(text: bytes, source: str, wanted: str | None) -> StepTimes:
    """Read the lines of the first tool that has any."""
    damaged = []
    for tool in TOOLS:
        if not tool.mark.search(text):
            continue
        entries, n_damaged = read_entries(text, tool, source)
        if entries:
            notes = [
                f"{format_count(n_damaged, 'line')} with a step time and no step number skipped"
            ]
            notes = notes * bool(n_damaged)
            others = {t.name for t in TOOLS if t.name != tool.name and t.mark.search(text)}
            if others:
                notes.append(f"lines of {tool.name} are read, not those of {', '.join(others)}")
            return _to_times(entries, tool, text, source, wanted, notes)
        damaged.append(
            f"{format_count(n_damaged, 'line')} like those of {tool.name}, none with a step and "
            "its "
            "time; "
            f"expected {tool.sample!r}"
        )
    raise PrismError(f"{source}: {'; '.join(damaged)}")


def _to_times(
    entries: list[Entry], tool: Tool, text: bytes, source: str, wanted: str | None, notes: list[str]
) -> StepTimes:
    """Turn the lines of one tool into step times."""
    named, found = split_runs(entries, source)
    runs = np.array([name for name, _ in named])
    keep = rows_of_run(runs, wanted, source)
    runs, entries = runs[keep], [e for (_, e), k in zip(named, keep, strict=True) if k]
    notes = [*found, *check_one_job(runs, entries, source), *notes]
    step, clock = np.array([e.step for e in entries]), np.array([e.clock for e in entries])
    seconds, is_mean = np.array([e.value for e in entries]), tool.is_mean
    what = Taken(tool.what, entries[0].unit, f"as {tool.name} writes it", 1.0)
    batch = tool.batch.search(text) if tool.batch else None
    if batch is not None:
        seconds = int(batch[1]) / seconds
    elif tool.is_rate:
        seconds, is_mean = by_clock(runs, step, clock), True
        what = replace(what, column="time between lines", why=f"{tool.name} writes a rate")
        use = np.isfinite(seconds) & (seconds > 0.0)
        if 2 * use.sum() < use.size or not use.any():
            raise PrismError(
                f"{source}:{entries[0].line}: {tool.name} writes a rate, and the log has neither "
                f"the samples of a step nor the time of most lines; expected {tool.sample!r}; the "
                "tool's TensorBoard files hold step times"
            )
        notes.append(
            "step times are the time between lines, evaluations and checkpoints included; "
            f"{format_count(int((~use).sum()), 'line')} without one before"
        )
        runs, step, seconds, clock = runs[use], step[use], seconds[use], clock[use]
    times = in_order(runs, step, seconds, clock, is_mean, what, source, text)
    return replace(times, notes=(*notes, *times.notes))
