"""Per-op traces of production pipeline jobs: one row per compute op, transfer or collective.

Columns dp_rank, stage, rank, step, optype, start_ts, duration [s], seq_id, mc, mb_id; one worker
is traced per tensor-parallel group.

References
----------
Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025;
the format is that of its artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.rawtable import RawTable
from prism.traces.table import DEFAULTS, Fault, Trace, make_trace, sound_rows
from prism.traces.tidy import OPTYPES, name_ops, op_faults

_WHERE = ("rank", "dp_rank", "stage", "step")
_ORDER = {"seq_id": "seq_id", "mc": "chunk", "mb_id": "microbatch"}
"""Columns that are empty for ops they do not apply to, and what the tidy table calls them."""
_ABSENT = -(2**62)  # stands for an empty cell in a column that must be filled
_PLACES = 12  # workers listed in a note


def is_pipeline(columns: Iterable[str]) -> bool:
    """Say whether a table with these columns is a pipeline trace."""
    return "optype" in set(columns)


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
    notes = name_ops(columns, "name")
    ops = pd.DataFrame({**DEFAULTS, **columns})
    compute = (ops["kernel_class"] == "compute").to_numpy()
    empty = ops[["start", "duration"]].isna().any(axis=1) | (ops[[*_WHERE]] == _ABSENT).any(axis=1)
    faults = [
        Fault("a cell is empty, expected a number", empty, spare=1),
        *op_faults(ops, compute),
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
    again &= ops["name"].isin(OPTYPES) | copies  # what else distinguishes unknown ops is not known
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
        more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        notes.append(
            f"{int(absent.any(axis=1).sum())} of {format_count(len(n_ops), 'step')} without all "
            f"workers, kept: {', '.join(places[:_PLACES])}{more}"
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
