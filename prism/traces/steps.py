"""Measured step times and run totals: from CSV or parquet, or from logs.

A file that holds several durations, jobs or systems is refused until the user says which, since
pooled they would look like spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import (
    ALL,
    RUN_COLUMNS,
    check_column,
    check_groups,
    chosen_rows,
    groups_among,
    is_mostly_numbers,
    list_values,
    seconds_of,
)
from prism.traces.columns import Taken, meaning, step_column, take, unit_per_second
from prism.traces.file import RawTable, RecordedFile
from prism.traces.table import FEW, LONGEST_S, SHORTEST_S, Fault, sound_rows

_MEAN_OVER = ("mean_over", "n_avg")
_NO_STEP = -(2**62)
_RISING = 8  # values that rise by chance in 1 of 40,320 cases


@dataclass(frozen=True)
class StepTimes:
    """Measured step times of one job on one system, possibly of several runs."""

    seconds: Array  # step times [n; s]
    step: NDArray[np.int64]  # number of the step within its run [n]
    run: NDArray[np.str_]  # name of the run [n]; "" where the file tells of none
    source: str  # the file as the user named it
    column: str  # the column, or what the log calls the value
    mean_over: int = 1  # 1 for true per-step values; else each value is the mean of this many steps
    notes: tuple[str, ...] = ()  # what was dropped, assumed or counted, for the user
    unit: str = "s"  # that in which the values are written
    why: str = ""  # how column and unit were found
    skipped: tuple[int, ...] = ()  # lines of a log without a step number or a value

    @property
    def taken(self) -> dict[str, str]:
        """What was read as step times: column, unit, why."""
        return {"column": self.column, "unit": self.unit, "why": self.why}

    @property
    def said(self) -> str:
        """The same in words, which are among the notes of what was read."""
        return say_taken(self.taken)


def say_taken(taken: Mapping[str, str]) -> str:
    """Say in words what was read as step times."""
    return f"step times are {taken['column']!r}, in {taken['unit']} ({taken['why']})"


def read_table_times(
    files: Sequence[RecordedFile],
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
) -> StepTimes:
    """Read step times from a table."""
    table, where = files[0].table, dict(where or {})
    rows, names = chosen_rows(table, where), table.columns
    if column is None:
        names = [name for name in names if is_mostly_numbers(table, name)]
    groups = groups_among(table, rows, {"step", *where})
    if column is not None:
        check_column(table, column, "--column")
    per_step = per_step or {}
    taken = take(table.source, names, column, unit, per_step, table.columns, groups)
    check_groups(table, taken.column, where, rows)
    count = step_column(table.columns)
    if count in (None, taken.column):
        count, step = None, np.zeros(len(table.frame), np.int64)
    else:
        step = table.integers(count, _NO_STEP)
    seconds = seconds_of(table, taken, table.numbers(taken.column), per_step, step)
    label, run = _runs(table)
    found = pd.DataFrame({"run": run, "step": step, "seconds": seconds}).iloc[rows]
    if files[0].kind == "json":  # other records are of evaluations and the like
        found = found.dropna(subset="seconds")
    return _in_order(table, taken, found, where, count, label)


def _runs(table: RawTable) -> tuple[str | None, Any]:
    """Find the column that tells runs apart, and its names [row]; "" without one."""
    label = next((name for name in RUN_COLUMNS if name in table.columns), None)
    return label, table.texts(label).astype(str) if label else ""


def is_step_table(file: RecordedFile) -> bool:
    """Say whether a table has a duration or a rate by its name, or counts steps."""
    # steps without a unit are step times still: their reader says what is wrong
    found = map(meaning, file.columns)
    return step_column(file.columns) is not None or any(
        m.kind in ("duration", "rate") or (m.unit and m.kind in ("mean", "statistic"))
        for m in found
    )


def total_per_run(times: StepTimes) -> dict[str, float]:
    """Sum the steps of each run."""
    totals = pd.Series(times.seconds * times.mean_over).groupby(times.run, sort=False).sum()
    return {str(run): float(total) for run, total in totals.items()}


def read_totals(spec: str, where: Mapping[str, str] | None = None) -> dict[str, float]:
    """Read the measured total of each run; one that did not finish has none."""
    source, colon, column = str(spec).rpartition(":")
    if not colon or not source or not column:
        raise PrismError(
            f"{spec}: expected FILE:COLUMN, the table of totals and its column, such as "
            "runs.csv:train_time_s"
        )
    table = RecordedFile(source).table
    check_column(table, column, "--totals")
    chosen = {name: value for name, value in (where or {}).items() if name in table.columns}
    rows = chosen_rows(table, chosen)
    label, run = _runs(table)
    if label is None and rows.size > 1:
        raise PrismError(
            f"{source}: has {rows.size} totals and no column run or run_id; found "
            f"{table.listing}; add one"
        )
    seconds = table.numbers(column) / unit_per_second(column, table.source)
    totals = pd.DataFrame({"run": run, "seconds": seconds}).iloc[rows].dropna(subset="seconds")
    bad = totals[~((totals["seconds"] > 0.0) & (totals["seconds"] < np.inf))]
    twice = totals[totals.duplicated("run")]
    if len(bad):
        raise PrismError(
            f"{table.locate(int(bad.index[0]))}: {column} is {bad['seconds'].iloc[0]:g}, expected "
            "a number above 0"
        )
    if len(twice):
        groups = groups_among(table, rows, set(chosen))
        way = f"; choose with --where COLUMN=VALUE ({groups})" * bool(groups)
        raise PrismError(
            f"{table.locate(int(twice.index[0]))}: run {twice['run'].iloc[0]} has a second total; "
            f"expected one row per run{way}"
        )
    if totals.empty:
        raise PrismError(f"{source}: column {column} is empty; expected a total per run")
    return {str(name): float(x) for name, x in zip(totals["run"], totals["seconds"], strict=True)}


def _in_order(
    table: RawTable, taken: Taken, found: pd.DataFrame, where: Mapping[str, str],
    count: str | None, label: str | None,
) -> StepTimes:  # fmt: skip
    """Check and sort the rows found; `count` numbers the steps, `label` tells runs apart."""
    column, seconds = taken.column, found["seconds"]
    taken.check_size(seconds.to_numpy(), table.source)
    rises = found.groupby("run")["seconds"].agg(
        lambda run: len(run) >= _RISING and (run.diff()[1:] > 0).all()
    )
    if taken.unsaid and rises.all():  # among n! orders chance has one
        raise PrismError(
            f"{table.source}: column {column!r} rises from row to row: a time since the start, not "
            "durations; expected a column of the differences, as step_s"
        )
    mean_over = _mean_over(table, found.index)
    faults = [
        # the first of a series of differences has none
        Fault(f"{column} is empty", seconds.isna(), spare=len(rises)),
        Fault(
            f"{column} is not within {SHORTEST_S:g} and {LONGEST_S:g} s; is its unit right?",
            ~seconds.between(SHORTEST_S, LONGEST_S),
        ),
    ]
    if count is not None:
        faults.append(Fault("step is empty, expected a number", found["step"] == _NO_STEP, spare=1))
        faults.append(_repeated(table, {column, count, *RUN_COLUMNS, *where}, found,
                                ALL in where.values()))  # fmt: skip
    if label:
        faults.append(Fault(f"{label} is empty, expected a name", found["run"] == "", spare=1))
    keep, notes = sound_rows(faults, lambda row: table.locate(int(found.index[row])), table.source)
    found = found[keep]
    by = [pd.factorize(found["run"])[0]]  # runs stay in the order of the file
    found = found.iloc[np.lexsort([found["step"], *by] if count is not None else by)]
    run, step = found["run"].to_numpy(np.str_), found["step"].to_numpy()
    if count is None:
        step = found.groupby("run").cumcount().to_numpy()
    elif mean_over == 1 and taken.is_mean:
        mean_over = usual_gap(run, step)
    return StepTimes(
        found["seconds"].to_numpy(), step, run, table.source, column, mean_over,
        (*notes, *covers(mean_over)), taken.unit, taken.why,
    )  # fmt: skip


def usual_gap(run: NDArray[np.str_], step: NDArray[np.int64]) -> int:
    """Find the usual difference of successive step numbers; 1 where there is none."""
    sizes, counts = np.unique(np.diff(step)[run[1:] == run[:-1]], return_counts=True)
    return int(sizes[np.argmax(counts)]) if sizes.size else 1


def covers(n_steps: int) -> list[str]:
    """Note of values that are means of steps."""
    return [
        f"each value is the mean of {format_count(n_steps, 'step')}: the spread of single steps is "
        f"larger, by about sqrt({n_steps}) = {np.sqrt(n_steps):.2g} where steps are independent"
    ] * (n_steps > 1)


def _mean_over(table: RawTable, rows: pd.Index) -> int:
    """Read how many steps each value covers; all values alike."""
    name = next((name for name in _MEAN_OVER if name in table.columns), None)
    if name is None:
        return 1
    values = np.unique(table.integers(name, 1)[rows])
    if values.size > 1 or values[0] < 1:
        raise PrismError(
            f"{table.source}: {name}, the steps that each value covers, is "
            f"{list_values(list(map(str, values)))}; expected one number of at least 1; "
            f"choose with --where {name}={values[-1]}"
        )
    return int(values[0])


def _repeated(table: RawTable, known: set[str], found: pd.DataFrame, pooled: bool) -> Fault:
    """Find steps that a run has twice: copies, or what a column that is not known tells apart."""
    what, keys = "the run has this step twice", found[["run", "step"]]
    again = keys.duplicated() & (found["step"] != _NO_STEP)
    if pooled or not again.any():
        return Fault(what, again & False)
    frame = table.frame.loc[found.index].astype(str)
    others = again & ~frame.duplicated()
    if others.mean() >= FEW:
        split = [
            name
            for name in table.columns
            if name not in known
            and 1 < frame[name].nunique() <= len(found) / 2
            and not keys.assign(value=frame[name]).duplicated().any()
        ]
        way = "add a column run that identifies the run"
        if split:
            way = f"choose with --where COLUMN=VALUE ({', '.join(split)} distinguish them)"
        raise PrismError(f"{table.locate(int(others.idxmax()))}: {what}; {way}")
    return Fault(what, again, limit=1.0)
