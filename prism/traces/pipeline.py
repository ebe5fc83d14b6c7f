"""Per-op traces of production pipeline jobs: one row per compute op, transfer or collective.

Columns dp_rank, stage, rank, step, optype, start_ts, duration [s], seq_id, mc, mb_id; one worker
is traced per tensor-parallel group. Checks that each worker has one place, and tells which
workers and ops are missing from steps. Left out: which send belongs to which receive.

References
----------
Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025;
the format is that of its artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.rawtable import RawTable
from prism.traces.table import Fault, Trace, make_trace, sound_rows
from prism.traces.tidy import OPTYPES, name_ops, op_faults

Ints = NDArray[np.int64]

_WHERE = ("rank", "dp_rank", "stage", "step")
_INDICES = {name: name for name in _WHERE} | {
    "seq_id": "seq_id", "mc": "chunk", "mb_id": "microbatch"
}  # fmt: skip
"""Columns of whole numbers, and what the tidy table calls them."""
_ABSENT = -(2**62)  # stands for an empty cell in a column that must be filled
_PLACES = 12  # workers listed in a note


def is_pipeline(columns: Iterable[str]) -> bool:
    """Say whether a table with these columns is a pipeline trace."""
    return "optype" in set(columns)


def read_pipeline(table: RawTable) -> Trace:
    """Turn a pipeline trace into the tidy table."""
    wanted = (*_INDICES, "optype", "start_ts", "duration")
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
        **{name: table.integers(column, _ABSENT) for column, name in _INDICES.items()},
    }  # fmt: skip
    notes = name_ops(columns, "name")
    classes = columns["kernel_class"]
    compute = classes.isin(["compute"])
    empty = np.isnan(columns["start"]) | np.isnan(columns["duration"])
    for name in _INDICES.values():
        absent = columns[name] == _ABSENT
        if name in _WHERE:
            empty |= absent
        else:  # empty for ops they do not apply to
            columns[name][absent] = -1
    faults = [
        Fault("a cell is empty, expected a number", empty, spare=1),
        *op_faults(columns, compute),
        Fault("step is negative", columns["step"] < 0),
        Fault(
            "mb_id is missing or negative for a compute op", compute & (columns["microbatch"] < 0)
        ),
        _repeated(columns, table),
    ]
    keep, dropped = sound_rows(faults, table.locate, table.source)
    columns = {name: values[keep] for name, values in columns.items()}
    _check_places(columns, table.source)
    notes = [*dropped, *notes, *_missing_work(columns)]
    columns["microbatch"] = _microbatch(columns, compute[keep])
    del columns["seq_id"]
    return make_trace(columns, table.source, "pipeline", notes)


def _repeated(columns: dict[str, Any], table: RawTable) -> Fault:
    """Find rows that say again what an earlier one said; the same op at two times is an error."""
    optype = columns["name"]
    keys = [columns[name] for name in ("step", "rank", "seq_id", "chunk", "microbatch")]
    order = np.lexsort((*keys, optype.codes))
    same = np.ones(order.size - 1, dtype=np.bool_)
    for values in (*keys, optype.codes):
        in_order = values[order]
        same &= in_order[1:] == in_order[:-1]
    again = np.zeros(order.size, dtype=np.bool_)
    again[order[1:][same]] = True  # lexsort is stable: the first of them stays
    if not again.any():
        return Fault("the row occurs twice", again)
    copies = table.frame.duplicated().to_numpy()
    known = np.array([name in OPTYPES for name in optype.categories])[optype.codes]
    again &= known | copies  # what else an unknown op is distinguished by is not known
    if not copies[again].all():
        what = (
            "the same op (step, rank, optype, seq_id, mc, mb_id) occurs with other values; "
            "are two traces in one file?"
        )
        return Fault(what, again)
    return Fault("the row occurs twice", again, limit=1.0)


def _check_places(index: dict[str, Any], source: str) -> None:
    """Refuse workers with two places."""
    columns = [index[name] for name in ("rank", "dp_rank", "stage")]
    code = np.zeros_like(columns[0])
    for column in columns:  # far faster than unique rows
        values, at = np.unique(column, return_inverse=True)
        code = code * values.size + at
    _, rows = np.unique(code, return_index=True)
    places = np.stack([column[rows] for column in columns], axis=1)
    rank, first = np.unique(places[:, 0], return_index=True)
    if rank.size < len(places):
        twice = next(i for i in range(len(places)) if i not in first)
        (_, dp_a, stage_a), (worker, dp_b, stage_b) = places[twice - 1], places[twice]
        raise PrismError(
            f"{source}: rank {worker} has two places: dp_rank {dp_a} stage {stage_a}, and dp_rank "
            f"{dp_b} stage {stage_b}; expected one per rank; are two traces in one file?"
        )


def _missing_work(index: dict[str, Any]) -> list[str]:
    """Note workers missing from steps, and steps in which a worker has fewer ops than usual."""
    steps, step_idx = np.unique(index["step"], return_inverse=True)
    ranks, rank_idx = np.unique(index["rank"], return_inverse=True)
    n_ops = np.bincount(step_idx * ranks.size + rank_idx, minlength=steps.size * ranks.size)
    n_ops = n_ops.reshape(steps.size, ranks.size)
    notes = []
    absent = n_ops == 0
    if absent.any():
        places = [f"rank {ranks[r]} in step {steps[s]}" for s, r in np.argwhere(absent)]
        more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        notes.append(
            f"{int(absent.any(axis=1).sum())} of {format_count(steps.size, 'step')} without all "
            "workers, kept: "
            f"{', '.join(places[:_PLACES])}{more}"
        )
    present = np.where(absent, np.nan, n_ops)
    fewer = present < np.nanmedian(present, axis=0)
    if fewer.any():
        step, rank = np.argwhere(fewer)[0]
        notes.append(
            f"{int(fewer.sum())} worker-steps have fewer ops than that worker usually has (first: "
            f"rank {ranks[rank]} in step {steps[step]}, {format_count(n_ops[step, rank], 'op')})"
        )
    return notes


def _microbatch(index: dict[str, Any], compute: NDArray[np.bool_]) -> Ints:
    """Return mb_id of compute ops, and of others the ordinal where the optype repeats."""
    optype = index["name"]
    microbatch = np.where(compute, index["microbatch"], -1)
    _, step_idx = np.unique(index["step"], return_inverse=True)
    ranks, rank_idx = np.unique(index["rank"], return_inverse=True)
    worker_step = step_idx * ranks.size + rank_idx
    for code in range(len(optype.categories)):
        rows = np.flatnonzero((optype.codes == code) & ~compute)
        if rows.size and np.bincount(worker_step[rows]).max() > 1:
            microbatch[rows] = index["seq_id"][rows]
    return microbatch
