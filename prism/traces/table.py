"""The tidy table of ops, to which every reader of traces comes.

One row per recorded op or kernel: what it is, where and when it ran, how long it was recorded.
Recorded durations of collectives and transfers include waiting; they are kept as recorded. Also
here: what every reader does at the border, dropping and counting rows that cannot be true.
Left out: separating transfers from waiting, and everything statistical.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count, format_duration, format_share

OP_KINDS = (
    "forward", "backward", "backward_weight", "recompute", "transfer", "all_reduce", "all_gather",
    "reduce_scatter", "all_to_all", "broadcast", "optimizer", "launch_gap", "data_load", "compute",
    "memory", "other",
)  # fmt: skip
"""What an op can be."""

_DEFAULTS: dict[str, Any] = {
    "op_kind": "other", "kernel_class": "", "name": "", "rank": 0, "dp_rank": 0, "stage": 0,
    "chunk": 0, "microbatch": -1, "step": -1, "start": np.nan, "duration": np.nan, "group": "",
    "stream": -1, "bytes": np.nan,
}  # fmt: skip

COLUMNS = tuple(_DEFAULTS)
"""Columns of the tidy table, in order."""

TEXT_COLUMNS = tuple(name for name, value in _DEFAULTS.items() if isinstance(value, str))
INTEGER_COLUMNS = tuple(name for name, value in _DEFAULTS.items() if isinstance(value, int))

KERNEL_FORMATS = ("kineto", "nsys", "chakra")
"""Formats whose rows are device activities: kernels, copies and fills, by stream."""

LEFT_OUT = -2
"""Step of activities whose step the user left out: they still occupy the device."""

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
    source: str
    """The recording as the user named it."""
    format: str
    """``pipeline``, ``tidy``, or one of `KERNEL_FORMATS`."""
    notes: tuple[str, ...] = ()
    """What was dropped, repaired or counted, for the user."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What else the format knows; JSON-able."""

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
    """Build a trace from columns, sorted by step, rank and start.

    Parameters
    ----------
    columns : mapping of str to array_like
        [row] values by column name; at least ``duration`` [s]. Those left out take their defaults;
        names beyond `COLUMNS` follow them in the order given.
    """
    n = len(columns["duration"])
    made: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        if isinstance(default, str):
            made[name] = _categories(columns.get(name, default), n)
            continue
        kind = np.int64 if isinstance(default, int) else np.float64
        values = np.asarray(columns[name]) if name in columns else np.full(n, default)
        made[name] = values.astype(kind)
    made |= {name: values for name, values in columns.items() if name not in _DEFAULTS}
    ops = pd.DataFrame(made)
    order = np.lexsort((made["start"], made["rank"], made["step"]))
    if (np.diff(order) != 1).any():
        ops = ops.take(order)
    ops.index = pd.RangeIndex(n)
    return Trace(ops, source, format, tuple(notes), dict(meta or {}))


def _categories(values: Any, n: int) -> pd.Categorical:
    """Turn texts [row], or one text for all rows, into categories of str."""
    if isinstance(values, str):
        return pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), [values])
    if isinstance(values, pd.Categorical):
        return values.remove_unused_categories()
    return pd.Categorical([str(value) for value in values])


SHORTEST_S, LONGEST_S, LATEST_S = 1e-9, 1e9, 1e10
"""Of a step, of a step or op, of a start [s]: what is beyond was written in another unit."""
LONGEST_WAIT_S = 1800.0
"""No op of a training job waits longer: torch.distributed's default timeout of a process group."""


class Fault(NamedTuple):
    """One thing that can be wrong with a row."""

    what: str
    """Says what is wrong, with what was expected; for notes and errors."""
    rows: NDArray[np.bool_]
    """[row] True where it is."""
    limit: float = FEW
    """Share of rows at which it is an error; 1.0 where rows are dropped however many they are."""
    spare: int = 0
    """Unreadable rows up to this number are never an error, however small the table."""


def sound_rows(
    faults: Sequence[Fault], locate: Callable[[int], str], source: str
) -> tuple[NDArray[np.bool_], list[str]]:
    """Find the rows [row] without a fault, and a note for each fault that occurs.

    A row counts for the first fault it has; `locate` says where a row stands.

    Raises
    ------
    PrismError
        If a fault has more than few rows, or no row is sound.
    """
    n = faults[0].rows.size
    sound = np.ones(n, dtype=np.bool_)
    notes = []
    for what, rows, limit, spare in faults:
        bad = np.flatnonzero(rows & sound)
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
    step: NDArray[np.int64],
    start: NDArray[np.float64],
    duration: NDArray[np.float64],
    kind_idx: NDArray[np.integer[Any]],
    worker: Sequence[NDArray[Any]] = (),
    compute: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
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
        same_kind = kind_idx == kind_idx[row]
        serial = compute if compute is not None and compute[row] else same_kind
        until = _next_start(int(row), step, start, serial, worker)
        result[row] = duration[row] > min(until - start[row], LONGEST_WAIT_S)
    return result


def _next_start(
    row: int, step: NDArray[np.int64], start: NDArray[np.float64], serial: NDArray[np.bool_],
    worker: Sequence[NDArray[Any]],
) -> float:  # fmt: skip
    """When the worker starts the next serial op, or the next step [s]; inf if neither is there."""
    mine = np.isfinite(start)
    for column in worker:
        mine &= column == column[row]
    later = mine & serial & (step == step[row]) & (start > start[row])
    until = float(start[later].min(initial=np.inf))
    after = mine & (step > step[row])
    if not after.any():
        return until
    begins = float(start[after & (step == step[after].min())].min())
    # clocks that begin anew in every step say nothing of the next one
    return min(until, begins) if begins > start[row] else until


def time_faults(start: NDArray[np.float64], duration: NDArray[np.float64]) -> list[Fault]:
    """List starts and durations [row; s] that are no times; an empty cell is another fault."""
    return [
        Fault(
            f"the duration is not between 0 and {LONGEST_S:g} s",
            (duration < 0.0) | (duration > LONGEST_S),
        ),
        Fault(f"the start is more than {LATEST_S:g} s from 0", np.abs(start) > LATEST_S),
    ]


def impossible_fault(
    step: NDArray[np.int64], start: NDArray[np.float64], duration: NDArray[np.float64],
    name: pd.Categorical, worker: Sequence[NDArray[Any]], compute: NDArray[np.bool_],
) -> Fault:  # fmt: skip
    """Make the fault of rows that `impossible_durations` finds, which it names."""
    bad = impossible_durations(step, start, duration, name.codes, worker, compute)
    rows = np.flatnonzero(bad)
    shown = ", ".join(
        f"{name[row]} of {format_duration(float(duration[row]))} in step {step[row]}"
        for row in rows[:3]
    )
    more = f" and {rows.size - 3:,} more" if rows.size > 3 else ""
    what = f"the duration is longer than the step and runs over what follows: {shown}{more}"
    return Fault(what, bad, limit=1.0)
