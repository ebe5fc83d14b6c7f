"""Which column and which rows of a table the user means.

A wide table holds several durations, and several jobs or systems: those not chosen among are an
error that lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.traces.columns import Taken, counts_among
from prism.traces.file import RawTable

RUN_COLUMNS = ("run", "run_id")  # names of the column that tells runs apart

ALL = "*"  # value of --where that takes all rows: the column is known not to matter

_SHOWN = 8


def rows_in_name(
    source: str, where: Mapping[str, str] | None = None, told: str = ""
) -> tuple[str, dict[str, str]]:
    """Split ``FILE[key=value,...]`` into the file and the rows to keep, added to `where`.

    The brackets are a choice only where no file has that name; `told` is what messages start with.
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


def check_column(
    table: RawTable, name: str, option: str, names: Sequence[str] | None = None
) -> None:
    """Refuse a name that the table lacks, with the nearest it has."""
    names = table.columns if names is None else names
    if name not in names:
        raise PrismError(
            f"{table.source}: {option}: no column {name!r}; {_near(name, names, 0.5)}found "
            f"{list_values(list(names))}"
        )


def _near(word: str, known: Sequence[str], cutoff: float) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}? " if near else ""


def chosen_rows(table: RawTable, where: Mapping[str, str]) -> Index:
    """Return the rows in which the columns have the values."""
    keep = np.ones(len(table.frame), dtype=np.bool_)
    for name, wanted in where.items():
        check_column(table, name, "--where")
        if wanted == ALL:
            continue
        values = table.texts(name)
        texts = list(values.categories)
        equal = np.asarray(values.categories == wanted)
        if not equal.any():
            equal = np.array([_is_alike(text, wanted) for text in texts], np.bool_)
        if not equal.any():
            raise PrismError(
                f"{table.source}: --where {name}={wanted}: no row has it; "
                f"{_near(wanted, texts, 0.4)}values: {list_values(texts)}"
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


def seconds_of(
    table: RawTable, taken: Taken, values: Array, per_step: Mapping[str, float],
    steps: Index,
) -> Array:  # fmt: skip
    """Step times [row; s] of the values that were taken; `steps` number the rows."""
    each, so_far = counts_among(table.columns, taken.of)
    if each:
        return taken.seconds(values, np.prod([table.numbers(name) for name in each], axis=0))
    if taken.of in per_step or so_far is None:
        return taken.seconds(values, per_step.get(taken.of, 1.0))
    counts = table.numbers(so_far)
    known = np.isfinite(counts)
    gain, gap = np.diff(counts[known]), np.diff(steps[known])
    use = (gain > 0.0) & (gap > 0)
    return taken.seconds(values, float(np.median(gain[use] / gap[use])) if use.any() else np.nan)


def is_mostly_numbers(table: RawTable, name: str) -> bool:
    """Say whether at least half of the filled cells are numbers, so that others are errors."""
    n_numbers = table.coerced(name).count()
    return table.is_numeric(name) or bool(0 < table.frame[name].count() <= 2 * n_numbers)


def groups_among(table: RawTable, rows: Index, but: set[str]) -> str:
    """List text columns with some few values in these rows, with the values; "" without any."""
    groups = []
    for name in table.columns:
        series = table.frame[name]
        known = name in but or name in RUN_COLUMNS
        if known or table.is_numeric(name) or series.dtype.kind in "bmM":
            continue
        values = list(table.texts(name)[rows].remove_unused_categories().categories)
        # as many values as rows: a remark or a file name, not a group (few rows can be both)
        if len(values) > 1 and (2 * len(values) <= rows.size or len(values) <= 3):
            groups.append(f"{name}: {list_values(values)}")
    return "; ".join(groups)


def check_groups(table: RawTable, column: str, where: Mapping[str, str], rows: Index) -> None:
    """Refuse rows of several jobs or systems."""
    groups = groups_among(table, rows, {column, "step", *where})
    if groups:
        raise PrismError(
            f"{table.source}: holds several groups, which pooled would look like spread: {groups}; "
            f"choose with --where COLUMN=VALUE ({ALL} takes all)"
        )
