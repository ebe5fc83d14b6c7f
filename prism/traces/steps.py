"""Measured step times and run totals: from CSV or parquet, or from logs.

What a column's name means is in columns.py. A file that holds several durations, jobs or systems is
refused until the user says which, since pooled they would look like spread. Left out: any
statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import (
    ALL,
    RUN_COLUMNS,
    check_column,
    check_groups,
    chosen_rows,
    duration_column,
    groups_among,
    is_mostly_numbers,
    list_values,
    seconds_of,
)
from prism.traces.columns import Taken, meaning, step_column, unit_per_second
from prism.traces.file import RecordedFile
from prism.traces.rawtable import RawTable
from prism.traces.table import FEW, LONGEST_S, SHORTEST_S, Fault, sound_rows

_MEAN_OVER = ("mean_over", "n_avg")
_NO_STEP = -(2**62)
_RISING = 8  # values that rise by chance in 1 of 40,320 cases


@dataclass(frozen=True)
class StepTimes:
    """Measured step times of one job on one system, possibly of several runs."""

    seconds: NDArray[np.float64]
    """Step times [n; s]."""
    step: NDArray[np.int64]
    """Number of the step within its run [n]."""
    run: NDArray[np.str_]
    """Name of the run [n]; "" where the file tells of none."""
    source: str
    """The file as the user named it."""
    column: str
    """The column, or what the log calls the value."""
    mean_over: int = 1
    """1 for true per-step values; else each value is the mean of this many steps."""
    notes: tuple[str, ...] = ()
    """What was dropped, assumed or counted, for the user."""
    unit: str = "s"
    """That in which the values are written."""
    why: str = ""
    """How column and unit were found."""

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
    for name in where:
        check_column(table, name, "--where")
    rows, count = chosen_rows(table, where), step_column(table.columns)
    names = [name for name in table.columns if is_mostly_numbers(table, name)]
    names = table.columns if column is not None else names
    groups = groups_among(table, rows, {"step", *where})
    taken = duration_column(table, names, column, unit, per_step or {}, groups)
    check_groups(table, taken.column, where, rows)
    count = count if count != taken.column else None
    return _from_table(table, taken, where, rows, count, per_step or {})


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
    names, first, idx = np.unique(times.run, return_index=True, return_inverse=True)
    totals = np.bincount(idx, weights=times.seconds * times.mean_over, minlength=names.size)
    return {str(names[i]): float(totals[i]) for i in np.argsort(first, kind="stable")}


def read_totals(spec: str, where: Mapping[str, str] | None = None) -> dict[str, float]:
    """Read the measured total of each run."""
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
    seconds = table.numbers(column)[rows] / unit_per_second(column, table.source)
    run_column = next((name for name in RUN_COLUMNS if name in table.columns), None)
    if run_column is None and rows.size > 1:
        raise PrismError(
            f"{source}: has {rows.size} totals and no column run or run_id; found "
            f"{table.listing}; add one"
        )
    runs = table.texts(run_column)[rows].astype(str) if run_column else np.array([""])
    totals: dict[str, float] = {}
    for row, run, total in zip(rows, runs, seconds, strict=True):
        if np.isnan(total):
            continue  # a run that did not finish has none
        if not 0.0 < total < np.inf:
            raise PrismError(
                f"{table.locate(int(row))}: {column} is {total:g}, expected a number above 0"
            )
        if str(run) in totals:
            groups = groups_among(table, rows, set(chosen))
            raise PrismError(
                f"{table.locate(int(row))}: run {run} has a second total; expected one row per run"
                + f"; choose with --where COLUMN=VALUE ({groups})" * bool(groups)
            )
        totals[str(run)] = float(total)
    if not totals:
        raise PrismError(f"{source}: column {column} is empty; expected a total per run")
    return totals


def _from_table(
    table: RawTable, taken: Taken, where: Mapping[str, str], rows: NDArray[np.int64],
    count: str | None, per_step: Mapping[str, float],
) -> StepTimes:  # fmt: skip
    """Check and sort the chosen rows; `count` is the column that numbers the steps."""
    column, has_step = taken.column, count is not None
    step = np.zeros(len(table.frame), np.int64)
    if count is not None:
        step = table.integers(count, _NO_STEP)
    seconds, step = seconds_of(table, taken, per_step, step)[rows], step[rows]
    run_column = next((name for name in RUN_COLUMNS if name in table.columns), None)
    run = (
        table.texts(run_column)[rows].astype(str) if run_column else np.full(rows.size, "")
    ).astype(np.str_)
    taken.check_size(seconds, table.source)
    if taken.unsaid and _rises(seconds, run):
        raise PrismError(
            f"{table.source}: column {column!r} rises from row to row: a time since the start, not "
            "durations; expected a column of the differences, as step_s"
        )
    mean_over = _mean_over(table, rows)
    n_runs = np.unique(run).size
    faults = [
        # the first of a series of differences has none
        Fault(f"{column} is empty", np.isnan(seconds), spare=n_runs),
        Fault(
            f"{column} is not within {SHORTEST_S:g} and {LONGEST_S:g} s; is its unit right?",
            ~((seconds >= SHORTEST_S) & (seconds <= LONGEST_S)),
        ),
    ]
    if has_step:
        faults.append(Fault("step is empty, expected a number", step == _NO_STEP, spare=1))
        faults.append(_repeated(table, {column, str(count)}, where, rows, run, step))
    if run_column:
        faults.append(Fault(f"{run_column} is empty, expected a name", run == "", spare=1))
    keep, notes = sound_rows(faults, lambda row: table.locate(int(rows[row])), table.source)
    seconds, step, run = seconds[keep], step[keep], run[keep]
    _, first, run_idx = np.unique(run, return_index=True, return_inverse=True)
    place = first[run_idx]  # runs stay in the order of the file
    order = np.lexsort((step, place)) if has_step else np.argsort(place, kind="stable")
    seconds, step, run, place = seconds[order], step[order], run[order], place[order]
    if not has_step:
        begins = np.flatnonzero(np.r_[True, np.diff(place) != 0])
        step = np.arange(place.size) - np.repeat(begins, np.diff(np.r_[begins, place.size]))
    elif mean_over == 1 and taken.is_mean:
        mean_over = usual_gap(run, step)
    if mean_over > 1:
        notes.append(
            f"each value is the mean of {format_count(mean_over, 'step')}: the spread of single "
            "steps is larger, "
            f"by about sqrt({mean_over}) where steps are independent"
        )
    return StepTimes(
        seconds, step, run, table.source, column, mean_over, tuple(notes), taken.unit, taken.why
    )


def _rises(seconds: NDArray[np.float64], run: NDArray[np.str_]) -> bool:
    """Whether values of every run rise throughout: among n! orders chance has one."""
    runs = [seconds[run == name] for name in dict.fromkeys(run)]
    return all(values.size >= _RISING and bool((np.diff(values) > 0).all()) for values in runs)


def usual_gap(run: NDArray[np.str_], step: NDArray[np.int64]) -> int:
    """Find the usual difference of successive step numbers; 1 where there is none."""
    sizes, counts = np.unique(np.diff(step)[run[1:] == run[:-1]], return_counts=True)
    return int(sizes[np.argmax(counts)]) if sizes.size else 1


def _mean_over(table: RawTable, rows: NDArray[np.int64]) -> int:
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


def _repeated(
    table: RawTable,
    chosen: set[str],
    where: Mapping[str, str],
    rows: NDArray[np.int64],
    run: NDArray[np.str_],
    step: NDArray[np.int64],
) -> Fault:
    """Find steps that a run has twice: copies, or what another column would tell apart."""
    keys = pd.DataFrame({"run": run, "step": step})
    again = keys.duplicated().to_numpy() & (step != _NO_STEP)
    if not again.any() or ALL in where.values():
        return Fault("the run has this step twice", np.zeros_like(again))
    frame = table.frame.iloc[rows].astype(str)
    others = again & ~frame.duplicated().to_numpy()
    if others.mean() >= FEW:
        taken = {*chosen, *RUN_COLUMNS, *where}
        split = [
            name
            for name in table.columns
            if name not in taken
            and 1 < frame[name].nunique() <= rows.size / 2
            and not keys.assign(value=frame[name].to_numpy()).duplicated().any()
        ]
        way = "add a column run that identifies the run"
        if split:
            way = f"choose with --where COLUMN=VALUE ({', '.join(split)} distinguish them)"
        first = int(rows[np.flatnonzero(others)[0]])
        raise PrismError(f"{table.locate(first)}: the run has this step twice; {way}")
    return Fault("the run has this step twice", again, limit=1.0)
