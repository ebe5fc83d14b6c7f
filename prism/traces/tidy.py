"""Generic tidy tables of ops: one row per op, times with their unit in the column's name.

Required are a duration and what the op is (op_kind or name); every other column of the tidy table
is optional. A table of op_kind, start_s and duration_s that prism writes reads back unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count, format_duration
from prism.traces.columns import PER_SECOND
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.rawtable import RawTable
from prism.traces.table import (
    COLUMNS,
    DEFAULTS,
    LATEST_S,
    LONGEST_S,
    OP_KINDS,
    Fault,
    Trace,
    impossible_durations,
    make_trace,
    sound_rows,
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
    duration, start = _time(table, "duration"), _time(table, "start")
    if duration is None:
        like = next((name for name in table.columns if name.startswith("dur")), "")
        hint = f"; is it {like}? rename it" if like else ""
        raise PrismError(
            f"{table.source}: lacks a duration; found {table.listing}; expected one of "
            f"{', '.join('duration_' + unit for unit in UNITS)}{hint}"
        )
    columns: dict[str, Any] = {
        name: table.texts(name) if isinstance(default, str)
        else table.integers(name, default) if isinstance(default, int)
        else table.numbers(name)
        for name, default in DEFAULTS.items() if name in table.columns
    } | {"duration": duration, "start": np.nan if start is None else start}  # fmt: skip
    notes = name_ops(columns, "op_kind" if "op_kind" in columns else "name")
    ops = pd.DataFrame({**DEFAULTS, **columns})
    if "rank" in columns and "dp_rank" not in columns:
        ops["dp_rank"] = ops.groupby("stage")["rank"].rank("dense").astype(np.int64) - 1
        if ops["dp_rank"].any():
            of_each = "of each stage " if "stage" in columns else ""
            notes.append(
                f"no dp_rank column: the ranks {of_each}were taken as dp replicas, in order"
            )
    faults = [
        Fault("the duration is empty, expected a number", ops["duration"].isna(), spare=1),
        *op_faults(ops, ~ops["op_kind"].isin(COLLECTIVES).to_numpy()),
    ]
    if start is not None:
        # without starts, equal rows are ops that took the same time
        again = table.frame.duplicated() & np.isfinite(ops["start"])
        faults.append(Fault("the row occurs twice", again, limit=1.0))
    keep, dropped = sound_rows(faults, table.locate, table.source)
    known = {*COLUMNS, *(f"{stem}_{unit}" for stem in ("start", "duration") for unit in UNITS)}
    ignored = [name for name in table.columns if name not in known]
    if ignored:
        notes.append(f"columns that no op has were ignored: {', '.join(ignored)}")
    if start is None:
        notes.append("durations only: no start column, so what ran at the same time is unknown")
    return make_trace(ops[keep], table.source, "tidy", dropped + notes)


def _time(table: RawTable, stem: str) -> NDArray[np.float64] | None:
    """Return the column that starts with ``stem`` and ends with a unit [s], None without one."""
    found = {f"{stem}_{unit}": unit for unit in UNITS if f"{stem}_{unit}" in table.columns}
    if len(found) > 1:
        raise PrismError(f"{table.source}: has {' and '.join(found)}; expected one; drop the other")
    if not found and stem in table.columns:
        raise PrismError(
            f"{table.source}: column {stem} has no unit; rename it to {stem}_s, {stem}_ms, "
            f"{stem}_us or {stem}_ns"
        )
    for name, unit in found.items():
        return table.numbers(name) / PER_SECOND[unit]
    return None


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
    near = {
        name: difflib.get_close_matches(name, OP_KINDS, n=1, cutoff=0.7) for name in strange[:5]
    }
    shown = ", ".join(
        repr(name[:60]) + (f" (did you mean {found[0]}?)" if found else "")
        for name, found in near.items()
    )
    more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
    n_ops = format_count(int(labels.isin(strange).sum()), "op")
    return [f"{n_ops} whose {given} is unknown kept as op_kind other: {shown}{more}"]


def _relabel(labels: pd.Categorical, new: Sequence[str]) -> pd.Categorical:
    """Put new names, which may coincide, in the place of the categories."""
    codes, names = pd.factorize(np.array(new, dtype=object), sort=True)
    return pd.Categorical.from_codes(codes[labels.codes], list(names))


def op_faults(ops: pd.DataFrame, compute: NDArray[np.bool_]) -> list[Fault]:
    """List what can be wrong with an op's row in any table; `compute` as `impossible_durations`."""
    places = ops[["rank", "dp_rank", "stage"]]
    step, start, duration = (ops[name].to_numpy() for name in ("step", "start", "duration"))
    kind_idx = ops["name"].cat.codes.to_numpy()
    workers = [places[name].to_numpy() for name in places]
    impossible = impossible_durations(step, start, duration, kind_idx, workers, compute)
    rows = ops[impossible]
    shown = ", ".join(
        f"{name} of {format_duration(seconds)} in step {number}"
        for name, seconds, number in rows[["name", "duration", "step"]][:3].itertuples(index=False)
    )
    more = f" and {len(rows) - 3:,} more" if len(rows) > 3 else ""
    return [
        Fault(
            f"the microbatch is above {MOST_MICROBATCHES:,} and the number of rows",
            ops["microbatch"] > max(len(ops), MOST_MICROBATCHES),
        ),
        Fault("rank, dp_rank or stage is negative", (places < 0).any(axis=1)),
        Fault(
            f"the duration is not between 0 and {LONGEST_S:g} s",
            (duration < 0.0) | (duration > LONGEST_S),
        ),
        Fault(f"the start is more than {LATEST_S:g} s from 0", np.abs(start) > LATEST_S),
        Fault(
            f"the duration is longer than the step and runs over what follows: {shown}{more}",
            impossible, limit=1.0,
        ),
    ]  # fmt: skip
