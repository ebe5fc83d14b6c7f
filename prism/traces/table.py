"""The tidy table of ops, to which every reader of traces comes.

One row per recorded op or kernel: what it is, where and when it ran, how long it was recorded.
Recorded durations of collectives and transfers include waiting; they are kept as recorded. Also
here: what every reader does at the border, dropping and counting rows that cannot be true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share

OP_KINDS = (
    "forward", "backward", "backward_weight", "recompute", "transfer", "all_reduce", "all_gather",
    "reduce_scatter", "all_to_all", "broadcast", "optimizer", "launch_gap", "data_load", "compute",
    "memory", "other",
)  # fmt: skip
"""What an op can be."""

DEFAULTS: dict[str, Any] = {
    "op_kind": "other", "kernel_class": "", "name": "", "rank": 0, "dp_rank": 0, "stage": 0,
    "chunk": 0, "microbatch": -1, "step": -1, "start": np.nan, "duration": np.nan, "group": "",
    "stream": -1, "bytes": np.nan,
}  # fmt: skip

COLUMNS = tuple(DEFAULTS)  # columns of the tidy table, in order

KERNEL_FORMATS = ("kineto", "nsys", "chakra")
"""Formats whose rows are device activities: kernels, copies and fills, by stream."""

LEFT_OUT = -2  # step of activities whose step the user left out: they still occupy the device

FEW = 0.01
"""Share of wrong rows below which they are dropped and counted; more of them are an error."""


@dataclass(frozen=True)
class Trace:
    """What ran where and for how long, from one recording of any format."""

    ops: pd.DataFrame
    """The tidy table, sorted by step, rank and start; `COLUMNS` come first and in that order,
    columns of the format's own may follow. Text columns are categories of str. Seconds for start
    and duration (start is not-a-number where only durations were recorded); -1 where an index does
    not apply or is unknown."""
    source: str  # the recording as the user named it
    format: str  # ``pipeline``, ``tidy``, or one of `KERNEL_FORMATS`
    notes: tuple[str, ...] = ()  # what was dropped, repaired or counted, for the user
    meta: dict[str, Any] = field(default_factory=dict)  # what else the format knows; JSON-able

    def __post_init__(self) -> None:
        assert tuple(self.ops.columns[: len(COLUMNS)]) == COLUMNS, list(self.ops.columns)

    @property
    def chosen(self) -> pd.DataFrame:
        """Rows of all steps but those that were left out, and outside of all steps."""
        return self.ops[self.ops["step"] != LEFT_OUT]

    @property
    def has_kernels(self) -> bool:
        """Whether rows are a profiler's device activities."""
        return self.format in KERNEL_FORMATS


def make_trace(
    columns: Mapping[str, Any],
    source: str,
    format: str,
    notes: Sequence[str] = (),
    meta: Mapping[str, Any] | None = None,
) -> Trace:
    """Build a trace from columns, at least ``duration`` [s], sorted by step, rank and start.

    Those left out take their defaults; names beyond `COLUMNS` follow them in the order given.
    """
    n = len(columns["duration"])
    made: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        values = columns.get(name, default)
        if not isinstance(default, str):
            kind = np.int64 if isinstance(default, int) else np.float64
            made[name] = np.broadcast_to(values, n).astype(kind)
        elif isinstance(values, str):
            made[name] = pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), [values])
        elif isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
            made[name] = pd.Categorical(values).remove_unused_categories()
        else:
            made[name] = pd.Categorical([str(value) for value in values])
    made |= {name: values for name, values in columns.items() if name not in DEFAULTS}
    ops = pd.DataFrame(made).sort_values(["step", "rank", "start"], ignore_index=True)
    return Trace(ops, source, format, tuple(notes), dict(meta or {}))


SHORTEST_S, LONGEST_S, LATEST_S = 1e-9, 1e9, 1e10
"""Of a step, of a step or op, of a start [s]: what is beyond was written in another unit."""
LONGEST_WAIT_S = 1800.0
"""No op of a training job waits longer: torch.distributed's default timeout of a process group."""


class Fault(NamedTuple):
    """One thing that can be wrong with a row."""

    what: str  # says what is wrong, with what was expected; for notes and errors
    rows: Flags | pd.Series  # [row] True where it is
    limit: float = FEW  # share of rows at which it is an error; 1.0: dropped however many they are
    spare: int = 0  # unreadable rows up to this number are never an error, however small the table


def sound_rows(
    faults: Sequence[Fault], locate: Callable[[int], str], source: str
) -> tuple[Flags, list[str]]:
    """Find the rows [row] without a fault, and a note for each fault that occurs.

    A row counts for the first fault it has; `locate` says where a row stands. A fault of more than
    few rows is an error.
    """
    n = faults[0].rows.size
    sound = np.ones(n, dtype=np.bool_)
    notes = []
    for what, rows, limit, spare in faults:
        bad = np.flatnonzero(np.asarray(rows) & sound)
        if not bad.size:
            continue
        where = locate(int(bad[0]))
        if bad.size > spare and limit < 1.0 and bad.size >= limit * n:
            raise PrismError(
                f"{where}: {what}; so in {bad.size:,} of {format_count(n, 'row')}, and up to "
                f"{format_share(limit)} are dropped; correct the rows or remove them"
            )
        notes.append(f"{bad.size:,} of {format_count(n, 'row')} dropped: {what} (first at {where})")
        sound[bad] = False
    if not sound.any():
        raise PrismError(f"{source}: no row is left: {'; '.join(notes)}")
    return sound, notes


def impossible_durations(
    step: Index,
    start: Array,
    duration: Array,
    kind_idx: NDArray[np.integer[Any]],
    worker: Sequence[NDArray[Any]] = (),
    compute: Flags | None = None,
) -> Flags:
    """Find durations [row] that a worker's own later ops contradict.

    A duration is impossible if it exceeds the time in which the step's ops began and ten times the
    median of its kind, and either runs over the worker's next op of this kind, or of `compute`
    (what a worker runs one after the other, whatever the kind), or over what it does in the next
    step, or exceeds `LONGEST_WAIT_S`. A stall at the end of a step delays what comes after it, and
    so is kept however long it is. `worker` holds the columns that together tell who ran it.
    """
    result = np.zeros(step.size, dtype=np.bool_)
    known = pd.DataFrame({"kind": kind_idx, "start": start, "duration": duration}).dropna()
    begun = known["start"].groupby(step[known.index])
    span = begun.transform("max") - begun.transform("min")
    usual = known["duration"].groupby(known["kind"]).transform("median")
    longest = np.maximum(span.where(span > 0.0, np.inf), 10.0 * usual)  # one op has no span
    for row in known.index[known["duration"] > longest]:
        mine = np.logical_and.reduce([np.isfinite(start), *(c == c[row] for c in worker)])
        serial = compute if compute is not None and compute[row] else kind_idx == kind_idx[row]
        later = start[mine & serial & (step == step[row]) & (start > start[row])]
        after = mine & (step > step[row])
        following = step[after].min(initial=np.iinfo(np.int64).max)
        begins = start[after & (step == following)].min(initial=np.inf)
        # clocks that begin anew in every step say nothing of the next one
        until = min(later.min(initial=np.inf), begins if begins > start[row] else np.inf)
        result[row] = duration[row] > min(until - start[row], LONGEST_WAIT_S)
    return result
