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

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.traces.rawtable import RawTable
from prism.traces.table import Fault, Trace, impossible_fault, make_trace, sound_rows, time_faults

Ints = NDArray[np.int64]

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
"""optype of the trace: (op_kind, kernel_class)."""

_REQUIRED = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id")
_ABSENT = -(2**62)  # stands for an empty cell in a column that must be filled
_PLACES = 12  # workers listed in a note


def is_pipeline(columns: Iterable[str]) -> bool:
    """Say whether a table with these columns is a pipeline trace."""
    return "optype" in set(columns)


def read_pipeline(table: RawTable) -> Trace:
    """Turn a pipeline trace into the tidy table."""
    wanted = (*_REQUIRED, "optype", "start_ts", "duration")
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise PrismError(
            f"{table.source}: a pipeline trace (it has optype) lacks {', '.join(missing)}; found "
            f"{table.listing}; add the columns, or write a tidy table with op_kind and "
            "duration_s"
        )
    optype = table.texts("optype")
    start, duration = table.numbers("start_ts"), table.numbers("duration")
    index = {name: table.integers(name, _ABSENT) for name in _REQUIRED}
    for name in ("seq_id", "mc", "mb_id"):  # empty for ops they do not apply to
        index[name][index[name] == _ABSENT] = -1
    op_kind, kernel_class, unknown = _classify(optype)
    compute = kernel_class.codes == kernel_class.categories.get_loc("compute")

    keep, notes = sound_rows(
        [*_faults(index, compute, optype, start, duration), _repeated(index, optype, table)],
        table.locate,
        table.source,
    )
    index = {name: values[keep] for name, values in index.items()}
    optype, op_kind, kernel_class = optype[keep], op_kind[keep], kernel_class[keep]
    _check_places(index, table.source)
    notes += unknown + _missing_work(index)
    columns = {
        "op_kind": op_kind,
        "kernel_class": kernel_class,
        "name": optype,
        "rank": index["rank"],
        "dp_rank": index["dp_rank"],
        "stage": index["stage"],
        "chunk": index["mc"],
        "microbatch": _microbatch(index, optype, compute[keep]),
        "step": index["step"],
        "start": start[keep],
        "duration": duration[keep],
    }
    return make_trace(columns, table.source, "pipeline", notes)


def _classify(optype: pd.Categorical) -> tuple[pd.Categorical, pd.Categorical, list[str]]:
    """Look up op_kind and kernel_class of every row, and note the optypes not known."""
    names = list(optype.categories)
    made = []
    for part in (0, 1):
        labels = [OPTYPES.get(name, ("other", ""))[part] for name in names]
        kinds = sorted({*labels, "compute"})
        codes = np.array([kinds.index(label) for label in labels])[optype.codes]
        made.append(pd.Categorical.from_codes(codes, kinds))
    strange = [name for name in names if name not in OPTYPES]
    notes = []
    if strange:
        n = int(np.isin(optype.codes, [names.index(name) for name in strange]).sum())
        shown = ", ".join(repr(name) for name in strange[:5])
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        notes.append(f"{n:,} ops of unknown optype ({shown}{more}) kept as op_kind other")
    return made[0], made[1], notes


def _faults(
    index: dict[str, Ints],
    compute: NDArray[np.bool_],
    optype: pd.Categorical,
    start: NDArray[np.float64],
    duration: NDArray[np.float64],
) -> list[Fault]:
    """List what can be wrong with rows by themselves."""
    empty = np.isnan(start) | np.isnan(duration)
    negative = np.zeros(start.size, dtype=np.bool_)
    for name in ("dp_rank", "stage", "rank", "step"):
        empty |= index[name] == _ABSENT
        negative |= index[name] < 0
    return [
        Fault("a cell is empty, expected a number", empty, spare=1),
        Fault("dp_rank, stage, rank or step is negative", negative),
        *time_faults(start, duration),
        Fault("mb_id is missing or negative for a compute op", compute & (index["mb_id"] < 0)),
        impossible_fault(
            index["step"],
            start,
            duration,
            optype,
            [index[name] for name in ("dp_rank", "stage", "rank")],
            compute,
        ),
    ]


def _repeated(index: dict[str, Ints], optype: pd.Categorical, table: RawTable) -> Fault:
    """Find rows that say again what an earlier one said; the same op at two times is an error."""
    keys = [index[name] for name in ("step", "rank", "seq_id", "mc", "mb_id")]
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


def _check_places(index: dict[str, Ints], source: str) -> None:
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


def _missing_work(index: dict[str, Ints]) -> list[str]:
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
            f"{int(absent.any(axis=1).sum())} of {steps.size} steps lack workers and are kept: "
            f"{', '.join(places[:_PLACES])}{more}"
        )
    present = np.where(absent, np.nan, n_ops)
    fewer = present < np.nanmedian(present, axis=0)
    if fewer.any():
        step, rank = np.argwhere(fewer)[0]
        notes.append(
            f"{int(fewer.sum())} worker-steps have fewer ops than that worker usually has (first: "
            f"rank {ranks[rank]} in step {steps[step]}, {n_ops[step, rank]} ops)"
        )
    return notes


def _microbatch(index: dict[str, Ints], optype: pd.Categorical, compute: NDArray[np.bool_]) -> Ints:
    """Return mb_id of compute ops, and of others the ordinal where the optype repeats."""
    microbatch = np.where(compute, index["mb_id"], -1)
    _, step_idx = np.unique(index["step"], return_inverse=True)
    ranks, rank_idx = np.unique(index["rank"], return_inverse=True)
    worker_step = step_idx * ranks.size + rank_idx
    for code in range(len(optype.categories)):
        rows = np.flatnonzero((optype.codes == code) & ~compute)
        if rows.size and np.bincount(worker_step[rows]).max() > 1:
            microbatch[rows] = index["seq_id"][rows]
    return microbatch
