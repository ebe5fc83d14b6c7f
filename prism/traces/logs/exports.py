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

import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import (
    RUN_COLUMNS,
    check_column,
    chosen_rows,
    seconds_of,
)
from prism.traces.columns import step_column, take
from prism.traces.file import RecordedFile
from prism.traces.logs.runs import in_order, split_runs
from prism.traces.steps import StepTimes
from prism.traces.table import LONGEST_S, SHORTEST_S

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
