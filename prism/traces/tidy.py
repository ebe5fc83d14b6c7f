"""Tables of ops, one row per op: generic ones, and those of production pipeline jobs.

Generic ones have times with their unit in the column's name. Required are a duration and what the
op is (op_kind or name); every other column of the tidy table is optional. Those of pipeline jobs
have a row per compute op, transfer or collective, in the columns dp_rank, stage, rank, step,
optype, start_ts, duration [s], seq_id, mc, mb_id; one worker is traced per tensor-parallel group.

References
----------
Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025;
the format of pipeline jobs is that of its artifact.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Flags
from prism.common.errors import PrismError
from prism.common.text import format_count, format_duration
from prism.traces.choose import list_values
from prism.traces.columns import PER_SECOND
from prism.traces.file import RawTable
from prism.traces.kernelnames import COLLECTIVES
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

_UNITS = ("s", "ms", "us", "ns")
"""Suffixes of a time's column; of longer units an op's duration is an error."""

_OPTYPES = {
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
"""Op of a pipeline job's trace: (op_kind, kernel_class)."""

_MOST_MICROBATCHES = 65_535
"""Largest number of a microbatch in a table of fewer rows: models have room for all below it."""

_WHERE = ("rank", "dp_rank", "stage", "step")
_ORDER = {"seq_id": "seq_id", "mc": "chunk", "mb_id": "microbatch"}
"""Columns that are empty for ops they do not apply to, and what the tidy table calls them."""
_ABSENT = -(2**62)  # stands for an empty cell in a column that must be filled


def is_tidy(columns: Iterable[str]) -> bool:
    """Say whether a table with these columns says what an op is."""
    return bool({"op_kind", "name"} & set(columns))


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
            f"{', '.join('duration_' + unit for unit in _UNITS)}{hint}"
        )
    columns: dict[str, Any] = {
        name: table.texts(name) if isinstance(default, str)
        else table.integers(name, default) if isinstance(default, int)
        else table.numbers(name)
        for name, default in DEFAULTS.items() if name in table.columns
    } | {"duration": duration, "start": np.nan if start is None else start}  # fmt: skip
    notes = _name_ops(columns, "op_kind" if "op_kind" in columns else "name")
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
        *_op_faults(ops, ~ops["op_kind"].isin(COLLECTIVES).to_numpy()),
    ]
    if start is not None:
        # without starts, equal rows are ops that took the same time
        again = table.frame.duplicated() & np.isfinite(ops["start"])
        faults.append(Fault("the row occurs twice", again, limit=1.0))
    keep, dropped = sound_rows(faults, table.locate, table.source)
    known = {*COLUMNS, *(f"{stem}_{unit}" for stem in ("start", "duration") for unit in _UNITS)}
    ignored = [name for name in table.columns if name not in known]
    if ignored:
        notes.append(f"columns that no op has were ignored: {', '.join(ignored)}")
    if start is None:
        notes.append("durations only: no start column, so what ran at the same time is unknown")
    return make_trace(ops[keep], table.source, "tidy", dropped + notes)


def _time(table: RawTable, stem: str) -> Array | None:
    """Return the column that starts with ``stem`` and ends with a unit [s], None without one."""
    found = {f"{stem}_{unit}": unit for unit in _UNITS if f"{stem}_{unit}" in table.columns}
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


def _name_ops(columns: dict[str, Any], given: str) -> list[str]:
    """Fill in op_kind, kernel_class and name from one of them, and note the kinds not known."""
    labels: pd.Categorical = columns[given]
    columns.setdefault("name", labels)
    known = {kind: (kind, "") for kind in OP_KINDS} | _OPTYPES
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


def _op_faults(ops: pd.DataFrame, compute: Flags) -> list[Fault]:
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
            f"the microbatch is above {_MOST_MICROBATCHES:,} and the number of rows",
            ops["microbatch"] > max(len(ops), _MOST_MICROBATCHES),
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


def read_pipeline(table: RawTable) -> Trace:
    """Turn a pipeline trace into the tidy table."""
    wanted = (*_WHERE, *_ORDER, "optype", "start_ts", "duration")
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise PrismError(
            f"{table.source}: a pipeline trace (it has optype) lacks {', '.join(missing)}; found "
            f"{table.listing}; add the columns, or write a tidy table with op_kind and "
            "duration_s"
        )
    columns: dict[str, Any] = {
        "name": table.texts("optype"), "start": table.numbers("start_ts"),
        "duration": table.numbers("duration"),
        **{name: table.integers(name, _ABSENT) for name in _WHERE},
        **{name: table.integers(column, -1) for column, name in _ORDER.items()},
    }  # fmt: skip
    notes = _name_ops(columns, "name")
    ops = pd.DataFrame({**DEFAULTS, **columns})
    compute = (ops["kernel_class"] == "compute").to_numpy()
    empty = ops[["start", "duration"]].isna().any(axis=1) | (ops[[*_WHERE]] == _ABSENT).any(axis=1)
    faults = [
        Fault("a cell is empty, expected a number", empty, spare=1),
        *_op_faults(ops, compute),
        Fault("step is negative", ops["step"] < 0),
        Fault("mb_id is missing or negative for a compute op", compute & (ops["microbatch"] < 0)),
        _repeated(ops, table),
    ]
    keep, dropped = sound_rows(faults, table.locate, table.source)
    ops, compute = ops[keep], compute[keep]
    _check_places(ops, table.source)
    notes = [*dropped, *notes, *_missing_work(ops)]
    # of other ops the ordinal, where one comes several times in a step
    n_alike = ops.groupby(["name", "step", "rank"], observed=True)["step"].transform("size")
    repeats = n_alike.groupby(ops["name"], observed=True).transform("max") > 1
    microbatch = np.select([compute, repeats], [ops["microbatch"], ops["seq_id"]], -1)
    ops = ops.assign(microbatch=microbatch).drop(columns="seq_id")
    return make_trace(ops, table.source, "pipeline", notes)


def _repeated(ops: pd.DataFrame, table: RawTable) -> Fault:
    """Find rows that say again what an earlier one said; the same op at two times is an error."""
    again = ops.duplicated(["name", "step", "rank", "seq_id", "chunk", "microbatch"])
    if not again.any():
        return Fault("the row occurs twice", again)
    copies = table.frame.duplicated()
    again &= ops["name"].isin(_OPTYPES) | copies  # what else distinguishes unknown ops is not known
    if not copies[again].all():
        what = (
            "the same op (step, rank, optype, seq_id, mc, mb_id) occurs with other values; "
            "are two traces in one file?"
        )
        return Fault(what, again)
    return Fault("the row occurs twice", again, limit=1.0)


def _check_places(ops: pd.DataFrame, source: str) -> None:
    """Refuse workers with two places."""
    places = ops[["rank", "dp_rank", "stage"]].drop_duplicates().sort_values("rank", kind="stable")
    again = places[places.duplicated("rank", keep=False)]
    if len(again):
        (worker, dp_a, stage_a), (_, dp_b, stage_b) = again[:2].itertuples(index=False)
        raise PrismError(
            f"{source}: rank {worker} has two places: dp_rank {dp_a} stage {stage_a}, and dp_rank "
            f"{dp_b} stage {stage_b}; expected one per rank; are two traces in one file?"
        )


def _missing_work(ops: pd.DataFrame) -> list[str]:
    """Note workers missing from steps, and steps in which a worker has fewer ops than usual."""
    n_ops = ops.groupby(["step", "rank"]).size().unstack(fill_value=0)
    notes = []
    absent = n_ops == 0
    if absent.any(axis=None):
        pairs = absent.stack()
        places = [f"rank {rank} in step {step}" for step, rank in pairs.index[pairs]]
        notes.append(
            f"{int(absent.any(axis=1).sum())} of {format_count(len(n_ops), 'step')} without all "
            f"workers, kept: {list_values(places)}"
        )
    present = n_ops.where(~absent)
    fewer = (present < present.median()).stack()
    if fewer.any():
        step, rank = fewer.idxmax()
        notes.append(
            f"{int(fewer.sum())} worker-steps have fewer ops than that worker usually has (first: "
            f"rank {rank} in step {step}, {format_count(n_ops.loc[step, rank], 'op')})"
        )
    return notes
