"""Step times in what trackers keep: TensorBoard's event files, exported tables, histories in JSON.

An event file is records: a length, its checksum, a message, its checksum. Records of several files
of one folder follow each other by their clock; steps that a later one has again are a restart.
Checksums are not verified: a record that is cut or no message ends the file, with a note. Hugging
Face's Trainer keeps no more than the mean of a run, unless a callback adds times.

References
----------
.. [1] TensorFlow (Apache-2.0), core/lib/io/record_writer.cc, core/util/event.proto,
   core/framework/summary.proto and tensor.proto
.. [2] W&B, CSV of a chart: its x axis (`Step` or a metric), then `RUN - METRIC` with `__MIN` and
   `__MAX`; history of a run:
   `_step`, `_timestamp`, `_runtime` and a column for each metric
.. [3] TensorBoard, CSV of a scalar: `Wall time,Step,Value`; which scalar is not in it
.. [4] MLflow (Apache-2.0), MetricsPlotPanel: `run_id,key,value,step,timestamp`, the last in ms
.. [5] transformers (Apache-2.0), trainer.py, log, and trainer_utils.py, speed_metrics
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.common.files import MOST_TRACE
from prism.common.text import format_count
from prism.traces.choose import (
    RUN_COLUMNS,
    check_column,
    chosen_rows,
    seconds_of,
)
from prism.traces.columns import meaning, step_column, take
from prism.traces.file import RecordedFile
from prism.traces.logs.lines import read_log
from prism.traces.logs.runs import in_order, split_runs, to_seconds, wanted_run
from prism.traces.logs.tools import Tool
from prism.traces.protobuf import fields, last_fields
from prism.traces.steps import StepTimes, read_table_times
from prism.traces.table import LONGEST_S, SHORTEST_S

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


# --------------------------------------------------------------- tables that trackers export
_MLFLOW = {"run_id", "key", "value", "step", "timestamp"}
_SCALARS = {"Wall time", "Step", "Value"}
_HISTORY, _ENDS = "_step", ("__MIN", "__MAX")
_CLOCKS = ("_timestamp", "_runtime", "Wall time")


def is_export(file: RecordedFile) -> bool:
    """Tell a tracker's table by its columns."""
    names = set(file.columns)
    whole = _MLFLOW <= names or _SCALARS <= names or _HISTORY in names
    return whole or bool(_chart_columns(file.columns))


def _chart_columns(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Run ("" without one) and metric of the columns of a chart's values."""
    known = set(names)
    return {
        name: name.rpartition(" - ")[::2]
        for name in names if all(f"{name}{end}" in known for end in _ENDS)
    }  # fmt: skip


def read_export(
    files: Sequence[RecordedFile], column: str | None = None,
    where: Mapping[str, str] | None = None, unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:  # fmt: skip
    """Read step times; `column` is the metric, `where` chooses rows or a run."""
    table, where, per_step = files[0].table, dict(where or {}), per_step or {}
    names, source = table.columns, table.source
    wanted = None if "run" in names else where.pop("run", None)
    rows, chart, is_mlflow = chosen_rows(table, where), _chart_columns(names), _MLFLOW <= set(names)
    clock = next((table.numbers(name) for name in _CLOCKS if name in names), np.nan)
    label = next((name for name in RUN_COLUMNS if name in names), None)
    run = table.texts(label).astype(str) if label else ""
    if chart:
        metrics, clock = [metric for _, metric in chart.values()], np.nan
    elif is_mlflow:
        keys, clock = table.texts("key").astype(str), 1e-3 * table.numbers("timestamp")
        metrics = list(keys[rows])
    else:
        metrics = [name for name in names if not name.startswith("_")]
    metrics = list(dict.fromkeys(metrics))
    if column is not None:
        check_column(table, column, "--column", metrics)
    taken = take(source, metrics, column, unit, per_step, names)
    # one column of values, or of a chart one for each run
    columns = {taken.column: run}
    if is_mlflow:
        columns = {"value": run}
    elif chart:
        columns = {name: of for name, (of, metric) in chart.items() if metric == taken.column}
    counts = step_column(names)
    step = table.integers(counts, -1) if counts else np.arange(len(table.frame))
    parts, n_binned = [], 0
    for name, file in columns.items():
        values = table.numbers(name)
        if is_mlflow:
            values = np.where(keys == taken.column, values, np.nan)
        if chart:  # a point may be the mean of several
            low, high = (table.numbers(f"{name}{end}")[rows] for end in _ENDS)
            n_binned += int((low != high)[np.isfinite(low)].sum())
        seconds = seconds_of(table, taken, values, per_step, step)
        made = {"step": step, "seconds": seconds, "clock": clock, "file": file}
        parts.append(pd.DataFrame(made).iloc[rows].dropna(subset="seconds"))
    entries = pd.concat(parts)
    bad = entries[(entries["seconds"] < SHORTEST_S) | (entries["seconds"] > LONGEST_S)]
    if len(bad):
        raise PrismError(
            f"{table.locate(int(bad.index[0]))}: {taken.column} is a step of "
            f"{bad['seconds'].iloc[0]:g} s, expected {SHORTEST_S:g} to {LONGEST_S:g} s"
        )
    entries = entries[entries["step"] >= 0]
    if entries.empty:
        raise PrismError(f"{source}: {taken.column} is empty in these rows; expected step times")
    entries, said = split_runs(entries, source, wanted)
    notes = [
        f"{format_count(n_binned, 'value')}: means of several by the chart (__MIN is not __MAX): "
        "their spread is too small; export the history of the run, or more points"
    ] * bool(n_binned)
    return in_order(entries, taken, source, [*notes, *said])


# ------------------------------------------------------------------------- histories in JSON
_ELAPSED = ("elapsed", "elapsed_time", "elapsed_s", "time_elapsed", "timestamp", "wall_time")
_STEPS = re.compile(rb"['\"]global_step['\"]: (\d+)")
_RUNTIME = re.compile(rb"['\"]train_runtime['\"]: ['\"]?([\d.]+)")
_RATE = re.compile(rb"['\"]train_steps_per_second['\"]: ['\"]?([\d.]+)")


class _Lines(RecordedFile):
    """The records of a JSON, one a line."""

    def __init__(self, file: RecordedFile) -> None:
        super().__init__(file.path, file.source, file.named)
        self.text = "\n".join(map(json.dumps, file.records)).encode()


def is_history(file: RecordedFile) -> bool:
    """Tell a Trainer's state, results or output; or JSON with steps, a clock and no durations."""
    text = file.head if file.kind == "json" else file.text
    if b'"log_history"' in text or _RUNTIME.search(text):
        return True
    return file.kind == "json" and not _has_times(file) and _clock_of(file) is not None


def _has_times(file: RecordedFile) -> bool:
    return any(meaning(name).kind == "duration" for name in file.columns)


def _clock_of(file: RecordedFile) -> Tool | None:
    """Make the tool of lines with a step and a clock; None where they have none."""
    step = step_column(file.columns)
    clock = next((name for name in _ELAPSED if name in file.columns), None)
    if step is None or clock is None:
        return None
    return Tool(
        "the history",
        b'"',
        (b'"',),
        rf'\{{(?=.*"{step}": (?P<step>\d+)).*"{clock}": "?(?P<elapsed>[^",}}]+)',
        "time between lines",
        f'{{"{step}": 10, "{clock}": 57.3}}',
        is_mean=True,
        is_rate=True,
    )


def read_history(
    files: Sequence[RecordedFile], column: str | None = None,
    where: Mapping[str, str] | None = None, unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:  # fmt: skip
    """Read the steps of a history, whose entries have a time of a step or since the start."""
    file = files[0]
    if column is not None or _has_times(file):
        return read_table_times(files, column, where, unit, per_step)
    tool = _clock_of(file)
    if tool is not None:
        return read_log([_Lines(file)], where, tool)
    text = file.text or file.read_text()
    steps, runtime, rate = (part.search(text) for part in (_STEPS, _RUNTIME, _RATE))
    mean = float(runtime[1]) / max(int(steps[1]), 1) if runtime and steps else 0.0
    mean = mean or (1.0 / max(float(rate[1]), 1e-9) if rate else 0.0)
    told = f", but their mean in the run: {mean:.4g} s (train_runtime over steps)" if mean else ""
    raise PrismError(
        f"{file.source}: Hugging Face's Trainer wrote no step times{told}. The bar in its standard "
        "error has them, and so has LLaMA-Factory's trainer_log.jsonl; or add elapsed_time to its "
        "log_history by a callback"
    )
