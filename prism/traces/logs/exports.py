"""Step times in tables that trackers export: W&B's chart or history, MLflow's metrics.

References
----------
.. [1] W&B, CSV of a chart: `Step`, then `RUN - METRIC` with `__MIN` and `__MAX`; history of a run:
   `_step`, `_timestamp`, `_runtime` and a column for each metric
.. [2] MLflow (Apache-2.0), MetricsPlotPanel: `run_id,key,value,step,timestamp`, the last in ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.traces.choose import (
    IS_MEAN,
    PER_SECOND,
    RUN_COLUMNS,
    check_column,
    chosen_rows,
    known_name,
    list_values,
    several_columns,
    unit_of,
)
from prism.traces.file import RecordedFile
from prism.traces.logs.lines import Entry
from prism.traces.logs.runs import in_order, rows_of_run, split_runs
from prism.traces.rawtable import RawTable
from prism.traces.steps import StepTimes
from prism.traces.table import LONGEST_S, SHORTEST_S

Array = NDArray[np.float64]
Index = NDArray[np.int64]
_MLFLOW = {"run_id", "key", "value", "step", "timestamp"}
_HISTORY, _CHART, _ENDS = "_step", "Step", ("__MIN", "__MAX")
_STEPS = ("trainer/global_step", "global_step", "iteration", "_step")  # the tool's own before W&B's
_CLOCKS = ("_timestamp", "_runtime")


def is_export(file: RecordedFile) -> bool:
    """Tell a tracker's table by its columns."""
    names = file.columns
    return _MLFLOW <= set(names) or _HISTORY in names or bool(_chart_columns(names))


def _chart_columns(names: Sequence[str]) -> list[str]:
    """Columns of a chart's values: a run and a metric each."""
    known = set(names)
    return [name for name in names if _CHART in known and " - " in name and f"{name}__MIN" in known]


def read_export(
    files: Sequence[RecordedFile], column: str | None = None, where: Mapping[str, str] | None = None
) -> StepTimes:
    """Read step times; `column` is the metric, `where` chooses rows or a run."""
    table, where = files[0].table, dict(where or {})
    wanted = None if "run" in table.columns else where.pop("run", None)
    for name in where:
        check_column(table, name, "--where")
    rows = chosen_rows(table, where)
    kind = _mlflow if _MLFLOW <= set(table.columns) else _history
    kind = _chart if _chart_columns(table.columns) else kind
    metric, parts, notes = kind(table, column, rows)
    entries = [e for part in parts for e in _entries(table, metric, rows, *part)]
    if not entries:
        raise PrismError(f"{table.source}: {metric} is empty in these rows; expected step times")
    named, said = split_runs(entries, table.source)
    runs = np.array([name for name, _ in named])
    keep = rows_of_run(runs, wanted, table.source)
    kept = [e for (_, e), k in zip(named, keep, strict=True) if k]
    times = in_order(
        runs[keep], np.array([e.step for e in kept]), np.array([e.value for e in kept]),
        np.array([e.clock for e in kept]), IS_MEAN.get(known_name(metric) or "", False), metric,
        table.source,
    )  # fmt: skip
    return replace(times, notes=(*notes, *said, *times.notes))


# values [row], step column, clock [row; s], run of each row
_Part = tuple[Array, str, Array, Sequence[str]]
_Found = tuple[str, list[_Part], list[str]]


def _mlflow(table: RawTable, column: str | None, rows: Index) -> _Found:
    """Find the rows of one metric, by run."""
    keys = np.asarray(table.texts("key").astype(str))
    metric = _metric(table, list(dict.fromkeys(keys[rows])), column)
    values = np.where(keys == metric, table.numbers("value"), np.nan)
    runs = list(map(str, table.texts("run_id")))
    runs = runs if len({runs[row] for row in rows}) > 1 else [""] * len(runs)
    return metric, [(values, "step", 1e-3 * table.numbers("timestamp"), runs)], []


def _chart(table: RawTable, column: str | None, rows: Index) -> _Found:
    """Find the column of each run; a point may be the mean of several."""
    names = [name.rpartition(" - ")[::2] for name in _chart_columns(table.columns)]
    metric = _metric(table, list(dict.fromkeys(name for _, name in names)), column)
    no_clock = np.full(len(table.frame), np.nan)
    parts: list[_Part] = []
    binned = 0
    runs = [run for run, name in names if name == metric]
    for run in runs:
        low, high = (table.numbers(f"{run} - {metric}{end}") for end in _ENDS)
        binned += int((low[rows] != high[rows])[np.isfinite(low[rows])].sum())
        label = run if len(runs) > 1 else ""
        values = table.numbers(f"{run} - {metric}")
        parts.append((values, _CHART, no_clock, [label] * no_clock.size))
    note = f"{binned} values are means of several by the chart (__MIN is not __MAX): their spread "
    note += "is too small; export the history of the run, or more points"
    return metric, parts, [note] * bool(binned)


def _history(table: RawTable, column: str | None, rows: Index) -> _Found:
    """Find the metric in a run's history, where each has rows of its own."""
    names = table.columns
    metric = _metric(table, [n for n in names if not n.startswith("_")], column)
    step = next(name for name in _STEPS if name in names)
    clocks = [table.numbers(name) for name in _CLOCKS if name in names]
    clock = clocks[0] if clocks else np.full(len(table.frame), np.nan)
    label = next((name for name in RUN_COLUMNS if name in names), None)
    runs = list(map(str, table.texts(label))) if label else [""] * len(table.frame)
    return metric, [(table.numbers(metric), step, clock, runs)], []


def _metric(table: RawTable, names: Sequence[str], column: str | None) -> str:
    """Choose the metric that is the step time."""
    if column is not None:
        if column in names and unit_of(column) is not None:
            return column
        raise PrismError(
            f"{table.source}: --column {column}: expected a metric whose name has a unit; found "
            f"{list_values(list(names))}"
        )
    found = [name for name in names if known_name(name)]
    found = found or [name for name in names if unit_of(name) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise several_columns(table, "step time", found, "")
    raise PrismError(
        f"{table.source}: no metric is a step time: {list_values(list(names))}; expected one such "
        f"as {list_values(list(IS_MEAN)[:3])}, or one whose name ends with its unit"
    )


def _entries(
    table: RawTable, metric: str, rows: Index, values: Array, step: str, clock: Array,
    runs: Sequence[str],
) -> list[Entry]:  # fmt: skip
    """Entries of the rows that have a value."""
    seconds = values / PER_SECOND[str(unit_of(metric))]
    rows = rows[np.isfinite(values[rows])]
    bad = rows[(seconds[rows] < SHORTEST_S) | (seconds[rows] > LONGEST_S)]
    if bad.size:
        raise PrismError(
            f"{table.locate(int(bad[0]))}: {metric} is {values[bad[0]]:g}, expected "
            f"{SHORTEST_S:g} to {LONGEST_S:g} s"
        )
    steps = table.integers(step, -1)
    return [
        Entry(int(steps[row]), float(seconds[row]), 0, float(clock[row]), (str(runs[row]), ""))
        for row in rows if steps[row] >= 0
    ]  # fmt: skip
