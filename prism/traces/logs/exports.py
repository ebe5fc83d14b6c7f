"""Step times in tables that trackers export: W&B's, MLflow's, TensorBoard's.

References
----------
.. [1] W&B, CSV of a chart: its x axis (`Step` or a metric), then `RUN - METRIC` with `__MIN` and
   `__MAX`; history of a run:
   `_step`, `_timestamp`, `_runtime` and a column for each metric
.. [2] TensorBoard, CSV of a scalar: `Wall time,Step,Value`; which scalar is not in it
.. [3] MLflow (Apache-2.0), MetricsPlotPanel: `run_id,key,value,step,timestamp`, the last in ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import (
    RUN_COLUMNS,
    check_column,
    chosen_rows,
    duration_column,
    seconds_of,
)
from prism.traces.columns import STEP_COLUMNS, Taken, step_column
from prism.traces.file import RecordedFile
from prism.traces.logs.lines import Entry
from prism.traces.logs.runs import in_order, rows_of_run, split_runs
from prism.traces.rawtable import RawTable
from prism.traces.steps import StepTimes
from prism.traces.table import LONGEST_S, SHORTEST_S

Array = NDArray[np.float64]
Index = NDArray[np.int64]
_MLFLOW = {"run_id", "key", "value", "step", "timestamp"}
_SCALARS = {"Wall time", "Step", "Value"}
_HISTORY, _ENDS = "_step", ("__MIN", "__MAX")
_CLOCKS = ("_timestamp", "_runtime")


def is_export(file: RecordedFile) -> bool:
    """Tell a tracker's table by its columns."""
    names = set(file.columns)
    whole = _MLFLOW <= names or _SCALARS <= names or _HISTORY in names
    return whole or bool(_chart_columns(file.columns))


def _chart_columns(names: Sequence[str]) -> list[str]:
    """Columns of a chart's values: a metric each, most often after its run."""
    known = set(names)
    return [name for name in names if all(f"{name}{end}" in known for end in _ENDS)]


class _Call(NamedTuple):
    """What a user asks for, and the rows that are meant."""

    rows: Index
    column: str | None
    unit: str | None
    per_step: Mapping[str, float]

    def take(self, table: RawTable, names: Sequence[str]) -> Taken:
        """Choose the metric that is the step time."""
        return duration_column(table, list(names), self.column, self.unit, self.per_step)


class _Part(NamedTuple):
    """Values of a metric."""

    seconds: Array  # [row]
    step: Index  # [row]; below 0 where there is none
    clock: Array  # [row; s]
    runs: Sequence[str]  # [row]


def read_export(
    files: Sequence[RecordedFile], column: str | None = None,
    where: Mapping[str, str] | None = None, unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:  # fmt: skip
    """Read step times; `column` is the metric, `where` chooses rows or a run."""
    table, where = files[0].table, dict(where or {})
    wanted = None if "run" in table.columns else where.pop("run", None)
    for name in where:
        check_column(table, name, "--where")
    rows, names = chosen_rows(table, where), set(table.columns)
    kind = _mlflow if _MLFLOW <= names else _scalars if _SCALARS <= names else _history
    kind = _chart if _chart_columns(table.columns) else kind
    taken, parts, notes = kind(table, _Call(rows, column, unit, per_step or {}))
    entries = [e for part in parts for e in _entries(table, taken.column, rows, part)]
    if not entries:
        raise PrismError(
            f"{table.source}: {taken.column} is empty in these rows; expected step times"
        )
    named, said = split_runs(entries, table.source)
    runs = np.array([name for name, _ in named])
    keep = rows_of_run(runs, wanted, table.source)
    kept = [e for (_, e), k in zip(named, keep, strict=True) if k]
    times = in_order(
        runs[keep], np.array([e.step for e in kept]), np.array([e.value for e in kept]),
        np.array([e.clock for e in kept]), taken.is_mean, taken, table.source,
    )  # fmt: skip
    return replace(times, notes=(*notes, *said, *times.notes))


_Found = tuple[Taken, list[_Part], list[str]]


def _steps(table: RawTable, name: str | None) -> Index:
    """Numbers of the steps [row]; the row's own without such a column."""
    return np.arange(len(table.frame)) if name is None else table.integers(name, -1)


def _mlflow(table: RawTable, call: _Call) -> _Found:
    """Find the rows of one metric, by run."""
    keys = np.asarray(table.texts("key").astype(str))
    taken = call.take(table, list(dict.fromkeys(keys[call.rows])))
    values = np.where(keys == taken.column, table.numbers("value"), np.nan)
    seconds = taken.seconds(values, call.per_step.get(taken.of, 1.0))
    runs = list(map(str, table.texts("run_id")))
    runs = runs if len({runs[row] for row in call.rows}) > 1 else [""] * len(runs)
    clock = 1e-3 * table.numbers("timestamp")
    return taken, [_Part(seconds, _steps(table, "step"), clock, runs)], []


def _scalars(table: RawTable, call: _Call) -> _Found:
    """Find the values of the one scalar, which the table does not name."""
    taken = call.take(table, table.columns)
    seconds = taken.seconds(table.numbers(taken.column))
    clock = table.numbers("Wall time")
    return taken, [_Part(seconds, _steps(table, "Step"), clock, [""] * clock.size)], []


def _chart(table: RawTable, call: _Call) -> _Found:
    """Find the column of each run; a point may be the mean of several."""
    names = {name: name.rpartition(" - ")[::2] for name in _chart_columns(table.columns)}
    taken = call.take(table, list(dict.fromkeys(metric for _, metric in names.values())))
    no_clock = np.full(len(table.frame), np.nan)
    step = _steps(table, step_column(table.columns))
    parts: list[_Part] = []
    binned = 0
    mine = {name: run for name, (run, metric) in names.items() if metric == taken.column}
    for name, run in mine.items():
        low, high = (table.numbers(f"{name}{end}")[call.rows] for end in _ENDS)
        binned += int((low != high)[np.isfinite(low)].sum())
        label = run if len(mine) > 1 else ""
        seconds = taken.seconds(table.numbers(name), call.per_step.get(taken.of, 1.0))
        parts.append(_Part(seconds, step, no_clock, [label] * no_clock.size))
    note = f"{format_count(binned, 'value')}: means of several by the chart (__MIN is not __MAX): "
    note += "their spread "
    note += "is too small; export the history of the run, or more points"
    return taken, parts, [note] * bool(binned)


def _history(table: RawTable, call: _Call) -> _Found:
    """Find the metric in a run's history, where each has rows of its own."""
    names = table.columns
    taken = call.take(table, [n for n in names if not n.startswith("_")])
    step = _steps(table, next(name for name in STEP_COLUMNS if name in names))
    clocks = [table.numbers(name) for name in _CLOCKS if name in names]
    clock = clocks[0] if clocks else np.full(len(table.frame), np.nan)
    label = next((name for name in RUN_COLUMNS if name in names), None)
    runs = list(map(str, table.texts(label))) if label else [""] * len(table.frame)
    return taken, [_Part(seconds_of(table, taken, call.per_step, step), step, clock, runs)], []


def _entries(table: RawTable, metric: str, rows: Index, part: _Part) -> list[Entry]:
    """Entries of the rows that have a value."""
    rows = rows[~np.isnan(part.seconds[rows])]
    bad = rows[(part.seconds[rows] < SHORTEST_S) | (part.seconds[rows] > LONGEST_S)]
    if bad.size:
        raise PrismError(
            f"{table.locate(int(bad[0]))}: {metric} is a step of {part.seconds[bad[0]]:g} s, "
            f"expected {SHORTEST_S:g} to {LONGEST_S:g} s"
        )
    return [
        Entry(int(part.step[row]), float(part.seconds[row]), 0, float(part.clock[row]),
              (str(part.runs[row]), ""))
        for row in rows if part.step[row] >= 0
    ]  # fmt: skip
