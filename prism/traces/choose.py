"""Which column and which rows of a table the user means.

A wide table holds several durations, and several jobs or systems: those not chosen among are an
error that lists them. The unit of a duration is the last word of its
column's name, or the whole name. Left out: reading the values (steps.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.traces.rawtable import RawTable

PER_SECOND = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "msec"), 1e3), **dict.fromkeys(("us", "usec"), 1e6),
    "ns": 1e9, "min": 1.0 / 60.0, "h": 1.0 / 3600.0,
}  # fmt: skip
"""Last word of a column's name: how many of that unit are one second."""

_OTHER_WORDS = ("min", "h")
"""Units that alone are no name of a duration: a minimum, a height."""

_UNIT = re.compile(r"(.+)(?:\((\w+)\)| in (\w+))")  # other than behind an underscore

_RATE = re.compile(r".*(?:\b|_)(?:per[ _]|/)(?:s|secs?|seconds?)")
_OF_RATE = "divide the tokens or samples of a step by it, as a column step_s"

IS_MEAN = {
    "iteration-time": True,  # Megatron-LM (BSD-3), Megatron Bridge, Primus
    "elapsed time per iteration (ms)": True,  # the same in their logs
    "time_metrics/end_to_end(s)": True,  # torchtitan (BSD-3)
    "train_step_timing in s": False,  # NeMo (Apache-2.0)
    "perf/step_time_seconds": False,  # MaxText (Apache-2.0)
    "perf/iteration_time_ms": False,
}
"""Names of step times in trackers, [s] where they have no unit: whether a value is the mean over
the steps since the one before."""

RUN_COLUMNS = ("run", "run_id")
"""Names of the column that tells runs apart."""

ALL = "*"
"""Value of --where that takes all rows: the column is known not to matter."""

_SHOWN = 8


def rows_in_name(
    source: str, where: Mapping[str, str] | None = None, told: str = ""
) -> tuple[str, dict[str, str]]:
    """Split ``FILE[key=value,...]`` into the file and the rows to keep.

    The brackets are a choice only where no file has that name; `where` are rows chosen beside it,
    `told` is what messages start with.
    """
    path, bracket, inside = source.partition("[")
    if not bracket or Path(source).exists():
        return source, dict(where or {})
    pairs = [part.partition("=") for part in inside.removesuffix("]").split(",")]
    if not inside.endswith("]") or not all(key and equals for key, equals, _ in pairs):
        raise PrismError(
            f"{told}{source}: expected FILE[column=value,...], such as "
            "steps.parquet[system=a,round=v1]"
        )
    chosen = dict(where or {})
    for key, value in ((key.strip(), value.strip()) for key, _, value in pairs):
        if chosen.setdefault(key, value) != value:
            raise PrismError(
                f"{told}{source}: {key} is to be {chosen[key]} and {value}; a row has one value, "
                "leave one out"
            )
    return path, chosen


def check_column(table: RawTable, name: str, option: str) -> None:
    """Refuse a name that the table lacks, with the nearest it has."""
    if name not in table.columns:
        near = difflib.get_close_matches(name, table.columns, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PrismError(
            f"{table.source}: {option}: no column {name!r}; {hint}found {table.listing}"
        )


def per_second(table: RawTable, column: str) -> float:
    """Say how many of the column's unit are one second."""
    unit = unit_of(column)
    if is_rate(column):
        raise PrismError(f"{table.source}: column {column!r} is a rate, not a time; {_OF_RATE}")
    if unit is None:
        units = ", ".join(unit for unit in PER_SECOND if unit not in _OTHER_WORDS)
        raise PrismError(
            f"{table.source}: the name of column {column!r} has no unit; rename it so that it ends "
            f"with one after an underscore, such as {column}_s or {column}_ms, or to the unit "
            f"alone: {units}"
        )
    return PER_SECOND[unit]


def unit_of(column: str) -> str | None:
    """Find the unit in a column's name: its last word, `(s)`, ` in s`; None where there is none."""
    if known_name(column) == "iteration-time":
        return "s"
    if is_rate(column):
        return None
    found = _UNIT.fullmatch(column.lower())
    before, _, unit = column.lower().rpartition("_")
    before, unit = (found[1], found[2] or found[3]) if found else (before, unit)
    known = unit in PER_SECOND and (before or unit not in _OTHER_WORDS)
    return unit if known else None


def is_rate(column: str) -> bool:
    """Tell tokens_per_s, samples/sec and the like: no duration."""
    return known_name(column) is None and _RATE.fullmatch(column.lower()) is not None


def known_name(name: str) -> str | None:
    """Find the step time that a name means, folders of a tracker before it or not."""
    lower = f"/{name.strip().lower()}"
    return next((known for known in IS_MEAN if lower.endswith(f"/{known}")), None)


def chosen_rows(table: RawTable, where: Mapping[str, str]) -> NDArray[np.int64]:
    """Return the rows in which the columns have the values."""
    keep = np.ones(len(table.frame), dtype=np.bool_)
    for name, wanted in where.items():
        if wanted == ALL:
            continue
        values = table.texts(name)
        equal = np.asarray(values.categories == wanted)
        if not equal.any():
            equal = np.array([_is_alike(text, wanted) for text in values.categories], np.bool_)
        if not equal.any():
            near = difflib.get_close_matches(wanted, list(values.categories), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PrismError(
                f"{table.source}: --where {name}={wanted}: no row has it; {hint}values: "
                f"{list_values(list(values.categories))}"
            )
        keep &= equal[values.codes]
    if not keep.any():
        options = " ".join(f"--where {name}={value}" for name, value in where.items())
        raise PrismError(f"{table.source}: {options}: no row has all of these; leave one out")
    return np.flatnonzero(keep)


def _is_alike(text: str, wanted: str) -> bool:
    """Compare a cell with what the user typed, as numbers or without regard to case."""
    try:
        return text.lower() == wanted.lower() or float(text) == float(wanted)
    except ValueError:
        return False


def list_values(values: list[str]) -> str:
    """List some values and count the others."""
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(value[:60] for value in values[:_SHOWN]) + more


def duration_column(
    table: RawTable, column: str | None, where: Mapping[str, str], rows: NDArray[np.int64]
) -> str:
    """Find the one duration, or refuse with the candidates."""
    if column is not None:
        check_column(table, column, "--column")
        per_second(table, column)
        return column
    found = [
        name
        for name in table.columns
        if unit_of(name) is not None and _is_mostly_numbers(table, name)
    ]
    known = [name for name in found if known_name(name)]
    if len(found) == 1 or len(known) == 1:
        return (known or found)[0]
    if not found:
        rates = [name for name in table.columns if is_rate(name)]
        hint = f"; {rates[0]} is a rate: {_OF_RATE}" if rates else ""
        raise PrismError(
            f"{table.source}: no duration among the columns {table.listing}; expected "
            "one whose name ends with its unit, such as step_s or step_ms, or is one, such as "
            f"seconds; the first line of a CSV names the columns{hint}"
        )
    raise several_columns(table, "step time", found, groups_among(table, rows, {"step", *where}))


def several_columns(table: RawTable, what: str, found: list[str], groups: str) -> PrismError:
    """Error for columns of which each may be meant; `groups` are to be chosen among too."""
    return PrismError(
        f"{table.source}: several columns may be the {what}: {', '.join(found)}; choose one with "
        "--column NAME" + f", and rows with --where COLUMN=VALUE ({groups})" * bool(groups)
    )


def _is_mostly_numbers(table: RawTable, name: str) -> bool:
    """Say whether at least half of the filled cells are numbers, so that others are errors."""
    series = table.frame[name]
    if pd.api.types.is_bool_dtype(series):
        return False
    if pd.api.types.is_numeric_dtype(series):
        return True
    try:
        n_numbers = int(pd.to_numeric(series.astype(object), errors="coerce").notna().sum())
    except (TypeError, ValueError):
        return False
    return n_numbers > 0 and 2 * n_numbers >= int(series.notna().sum())


def groups_among(table: RawTable, rows: NDArray[np.int64], but: set[str]) -> str:
    """List text columns with some few values in these rows, with the values; "" without any."""
    groups = []
    for name in table.columns:
        series = table.frame[name]
        known = name in but or name in RUN_COLUMNS
        if known or pd.api.types.is_numeric_dtype(series) or series.dtype.kind in "bmM":
            continue
        values = list(table.texts(name)[rows].remove_unused_categories().categories)
        # as many values as rows: a remark or a file name, not a group (few rows can be both)
        if len(values) > 1 and (2 * len(values) <= rows.size or len(values) <= 3):
            groups.append(f"{name}: {list_values(values)}")
    return "; ".join(groups)


def check_groups(
    table: RawTable, column: str, where: Mapping[str, str], rows: NDArray[np.int64]
) -> None:
    """Refuse rows of several jobs or systems."""
    groups = groups_among(table, rows, {column, "step", *where})
    if groups:
        raise PrismError(
            f"{table.source}: holds several groups, which pooled would look like spread: {groups}; "
            f"choose with --where COLUMN=VALUE ({ALL} takes all)"
        )
