"""Generic tidy tables of ops: one row per op, times with their unit in the column's name.

Required are a duration and what the op is (op_kind or name); every other column of the tidy table
is optional. The same table written by prism reads back unchanged. Left out: guessing what a
kernel is from its name (kernels come through kineto.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.columns import unit_per_second
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.rawtable import RawTable
from prism.traces.table import (
    COLUMNS,
    INTEGER_COLUMNS,
    OP_KINDS,
    TEXT_COLUMNS,
    Fault,
    Trace,
    impossible_fault,
    make_trace,
    sound_rows,
    time_faults,
)

UNITS = ("s", "ms", "us", "ns")
"""Suffixes of a time's column; of longer units an op's duration is an error."""

OPTYPES = {
    "forward-compute": ("forward", "compute"),
    "backward-compute": ("backward", "compute"),
    "forward-send": ("transfer", "p2p"),
    "forward-recv": ("transfer", "p2p"),
    "backward-send": ("transfer", "p2p"),
    "backward-recv": ("transfer", "p2p"),
    "layernorm-grads-all-reduce": ("all_reduce", "layernorm_all_reduce"),
    "embedding-grads-all-reduce": ("all_reduce", "embedding_all_reduce"),
    "grads-reduce-scatter": ("reduce_scatter", "dp_reduce_scatter"),
    "optimizer-clip-main-grad": ("all_reduce", "world_all_reduce"),
    "optimizer": ("optimizer", "optimizer"),
    "params-all-gather": ("all_gather", "dp_all_gather"),
}
"""Op of a production job's trace (pipeline.py): (op_kind, kernel_class)."""

MOST_MICROBATCHES = 65_535
"""Largest number of a microbatch in a table of fewer rows: models have room for all below it."""

_DEFAULT = {"rank": 0, "dp_rank": 0, "stage": 0, "chunk": 0}  # the rest is -1 where empty


def is_tidy(columns: list[str]) -> bool:
    """Say whether a table with these columns says what an op is."""
    return "op_kind" in columns or "name" in columns


def read_tidy(table: RawTable) -> Trace:
    """Turn a generic table into the tidy table."""
    if not is_tidy(table.columns):
        raise PrismError(
            f"{table.source}: lacks op_kind and name; found {table.listing}; expected "
            "one of them beside a duration column such as duration_s; if it holds step times, use "
            "it where those are asked for"
        )
    duration = _time(table, "duration")
    if duration is None:
        like = next((name for name in table.columns if name.startswith("dur")), "")
        hint = f"; is it {like}? rename it" if like else ""
        raise PrismError(
            f"{table.source}: lacks a duration; found {table.listing}; expected one of "
            f"{', '.join('duration_' + unit for unit in UNITS)}{hint}"
        )
    start = _time(table, "start")
    columns: dict[str, Any] = {"duration": duration}
    if start is not None:
        columns["start"] = start
    for name in INTEGER_COLUMNS:
        if name in table.columns:
            columns[name] = table.integers(name, _DEFAULT.get(name, -1))
    for name in TEXT_COLUMNS:
        if name in table.columns:
            columns[name] = table.texts(name)
    if "bytes" in table.columns:
        columns["bytes"] = table.numbers("bytes")
    given = "op_kind" if "op_kind" in columns else "name"
    notes = name_ops(columns, given) + _name_replicas(columns)
    keep, dropped = sound_rows(_faults(columns, table), table.locate, table.source)
    columns = {name: values[keep] for name, values in columns.items()}
    ignored = [name for name in table.columns if not _is_known(name)]
    if ignored:
        notes.append(f"columns that no op has were ignored: {', '.join(ignored)}")
    if start is None:
        notes.append("durations only: no start column, so what ran at the same time is unknown")
    return make_trace(columns, table.source, "tidy", dropped + notes)


def to_tidy(trace: Trace) -> pd.DataFrame:
    """Write a trace as a generic tidy table, with units in the names."""
    ops = trace.ops[list(COLUMNS)]
    return ops.rename(columns={"start": "start_s", "duration": "duration_s"})


def _is_known(column: str) -> bool:
    """Say whether the tidy table has such a column."""
    stem, _, unit = column.rpartition("_")
    return column in COLUMNS or (stem in ("start", "duration") and unit in UNITS)


def _time(table: RawTable, stem: str) -> NDArray[np.float64] | None:
    """Return the column that starts with ``stem`` and ends with a unit [s], None without one."""
    found = [f"{stem}_{unit}" for unit in UNITS if f"{stem}_{unit}" in table.columns]
    if len(found) > 1:
        raise PrismError(f"{table.source}: has {' and '.join(found)}; expected one; drop the other")
    if not found:
        if stem in table.columns:
            raise PrismError(
                f"{table.source}: column {stem} has no unit; rename it to {stem}_s, {stem}_ms, "
                f"{stem}_us or {stem}_ns"
            )
        return None
    return table.numbers(found[0]) / unit_per_second(found[0], table.source)


def name_ops(columns: dict[str, Any], given: str) -> list[str]:
    """Fill in op_kind, kernel_class and name from one of them, and note the kinds not known."""
    labels: pd.Categorical = columns[given]
    columns.setdefault("name", labels)
    known = {kind: (kind, "") for kind in OP_KINDS} | OPTYPES
    names = list(labels.categories)
    kinds, classes = zip(*(known.get(name, ("other", "")) for name in names), strict=True)
    columns["op_kind"] = _relabel(labels, kinds)
    columns.setdefault("kernel_class", _relabel(labels, classes))
    strange = [name for name in names if name not in known]
    if not strange:
        return []
    n = int(np.isin(labels.codes, [names.index(name) for name in strange]).sum())
    shown = ", ".join(repr(name[:60]) + _suggest(name) for name in strange[:5])
    more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
    return [
        f"{format_count(n, 'op')} whose {given} is unknown kept as op_kind other: {shown}{more}"
    ]


def _name_replicas(columns: dict[str, Any]) -> list[str]:
    """Take the ranks of each stage as dp replicas, where no column says which they are."""
    rank = columns.get("rank")
    if rank is None or rank.size == 0 or "dp_rank" in columns:
        return []
    stage = columns.get("stage", np.zeros_like(rank))
    _, place = np.unique(stage, return_inverse=True)
    workers, worker = np.unique(place * (rank.max() + 1) + rank, return_inverse=True)
    on = workers // (rank.max() + 1)
    replica = np.arange(workers.size) - np.searchsorted(on, on)
    if not replica.any():
        return []
    columns["dp_rank"] = replica[worker].astype(np.int64)
    of_each = "of each stage " if "stage" in columns else ""
    return [f"no dp_rank column: the ranks {of_each}were taken as dp replicas, in order"]


def _suggest(name: str) -> str:
    """Name the op_kind that was perhaps meant."""
    near = difflib.get_close_matches(name, OP_KINDS, n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def _relabel(labels: pd.Categorical, new: Sequence[str]) -> pd.Categorical:
    """Put new names, which may coincide, in the place of the categories."""
    kinds = sorted(set(new))
    codes = np.array([kinds.index(name) for name in new])[labels.codes]
    return pd.Categorical.from_codes(codes, kinds)


def _faults(columns: dict[str, Any], table: RawTable) -> list[Fault]:
    """List what can be wrong with rows."""
    n = columns["duration"].size
    columns = {"start": np.full(n, np.nan), "step": np.full(n, -1), **columns}
    kinds = columns["op_kind"]
    waits = [kind in COLLECTIVES for kind in kinds.categories]
    faults = [
        Fault("the duration is empty, expected a number", np.isnan(columns["duration"]), spare=1),
        *op_faults(columns, ~np.array(waits, np.bool_)[kinds.codes]),
    ]
    if np.isfinite(columns["start"]).any():
        # without starts, equal rows are ops that took the same time
        again = table.frame.duplicated().to_numpy() & np.isfinite(columns["start"])
        faults.append(Fault("the row occurs twice", again, limit=1.0))
    return faults


def op_faults(columns: dict[str, Any], compute: NDArray[np.bool_]) -> list[Fault]:
    """List what can be wrong with an op's row in any table; `compute` as `impossible_durations`."""
    worker = [columns[name] for name in ("rank", "dp_rank", "stage") if name in columns]
    start, duration = columns["start"], columns["duration"]
    microbatch = columns.get("microbatch", np.zeros_like(duration))
    return [
        Fault(
            f"the microbatch is above {MOST_MICROBATCHES:,} and the number of rows",
            microbatch > max(duration.size, MOST_MICROBATCHES),
        ),
        Fault(
            "rank, dp_rank or stage is negative",
            np.any([index < 0 for index in worker], axis=0) if worker else np.zeros_like(compute),
        ),
        *time_faults(start, duration),
        impossible_fault(columns["step"], start, duration, columns["name"], worker, compute),
    ]
