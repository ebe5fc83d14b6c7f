"""Ranks of one job put together: clocks aligned, collectives matched, launch gaps, one tidy table.

Rows are device activities and ``launch_gap``: stretches in which a rank's GPU idles on all
streams because the host had not launched. Collectives are matched over the ranks present and the
ranks' clocks, their drift too, aligned on them; recorded durations, waiting included, stay as they
are and the transfer stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.launchgaps import launch_gaps
from prism.common.text import format_count, format_share
from prism.traces.file import RecordedFile
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.kineto.collectives import Matched, Members, match_collectives
from prism.traces.kineto.events import no_collection
from prism.traces.kineto.notes import about_job, notes_of, once
from prism.traces.kineto.periods import mark_by_rhythm, periods_of
from prism.traces.kineto.rank import RankTrace
from prism.traces.table import COLUMNS, Trace, impossible_durations, make_trace

Floats = NDArray[np.float64]

EXTRA_COLUMNS = (
    "launch", "launch_end", "thread", "correlation", "op", "shape", "copy_back", "group_size",
    "collective", "transfer",
)  # fmt: skip
"""Columns of a Kineto table beyond the common ones: start and end of the launching call [s], its
host thread, correlation id, innermost host op around it, launch grid and block, whether the call
waits for a copy to pageable memory, ranks in the group, number of the matched collective (-1) and
its transfer [s]."""


def read_ranks(
    files: Sequence[RecordedFile], read: Callable[[RecordedFile], list[RankTrace]], format: str
) -> Trace:
    """Read each file by `read`; of those that were found in a folder, broken ones are left out."""
    ranks: list[RankTrace] = []
    of: list[RecordedFile] = []
    told: list[tuple[str, str]] = []
    lost: list[PrismError] = []
    for file in files:
        try:
            with no_collection():
                found = read(file)
        except PrismError as error:
            if file.named or len(files) == 1:
                raise
            lost.append(error)
            continue
        said = [note for rank in found for note in [*rank.notes, *drop_impossible(rank)]]
        told += [(file.path.name, note) for note in dict.fromkeys(said)]
        ranks += found
        of += [file] * len(found)
    if not ranks:
        raise lost[0]
    notes = [*once(told, len(set(of))), *(f"left out: {error}" for error in lost)]
    return join_ranks(ranks, of, notes, format)


def join_ranks(
    ranks: list[RankTrace], files: list[RecordedFile], notes: list[str], format: str
) -> Trace:
    """Put the ranks of one job together; `files` says where each was read from."""
    first = files[0].path
    source = (
        str(first)
        if len(set(files)) == 1
        else f"{first.parent} ({format_count(len(files), 'rank')})"
    )
    numbers = _number_ranks(ranks, files, notes)
    if not all(np.isfinite(rank.start).all() for rank in ranks):
        return _without_times(ranks, numbers, source, notes, format)
    starts = _common_clock(ranks)
    mark_by_rhythm(ranks, starts)
    members = _members(ranks, starts)
    matched = match_collectives(members, starts)
    _check_together(ranks, files, starts, matched)
    clocks = [_Clock(*c) for c in zip(1.0 + matched.drift, starts + matched.offset, strict=True)]
    origin = min(float(clock(rank.start).min()) for clock, rank in zip(clocks, ranks, strict=True))
    tables, meta_ranks = [], []
    for idx, (rank, clock) in enumerate(zip(ranks, clocks, strict=True)):
        mine = members.rank_idx == idx
        gaps, clock = _launch_gaps(rank), clock._replace(origin=origin)
        tables.append(_rank_table(rank, gaps, clock, matched, mine, numbers[idx]))
        meta_ranks.append(_about(rank, gaps, clock, numbers[idx]))
    columns = {
        name: _join([table[name] for table in tables])
        for name in (*COLUMNS, *EXTRA_COLUMNS) if name in tables[0]
    }  # fmt: skip
    meta = {"ranks": meta_ranks, **about_job(ranks, members, matched)}
    trace = make_trace(columns, source, format, [], meta)
    notes = notes + notes_of(ranks, meta)
    meta["periods"] = periods_of(trace.ops, notes)
    return replace(trace, notes=tuple(notes), meta=meta)


def _without_times(
    ranks: list[RankTrace], numbers: list[int], source: str, notes: list[str], format: str
) -> Trace:
    """Put the durations of all ranks into one table, where nothing says when they ran."""
    sizes = [rank.duration.size for rank in ranks]
    n = sum(sizes)
    columns: dict[str, Any] = {
        **{name: _join([rank.columns[name] for rank in ranks]) for name in ranks[0].columns},
        "rank": np.repeat(numbers, sizes),
        "duration": np.concatenate([rank.duration for rank in ranks]) * 1e-6,
        **{name: np.full(n, np.nan) for name in ("launch", "launch_end", "transfer")},
        "collective": np.full(n, -1, np.int64),
    }
    notes.append(
        "nodes have no start times: durations are known, and neither steps nor what waits for what"
    )
    return make_trace(columns, source, format, notes, {"ranks": [], "n_ranks": len(ranks)})


def drop_impossible(rank: RankTrace) -> list[str]:
    """Take activities out whose duration cannot be true; say how many."""
    notes = []
    if rank.n_bad:
        notes.append(f"{rank.n_bad:,} device activities without a valid time dropped")
    if not np.isfinite(rank.start).all():
        return notes
    stream, names = rank.columns["stream"], rank.columns["name"]
    order = np.lexsort((rank.start, stream))
    bad = np.zeros(order.size, dtype=np.bool_)
    # activities of one stream run one after the other
    follows = stream[order[1:]] == stream[order[:-1]]
    over = rank.start[order[:-1]] + rank.duration[order[:-1]] - rank.start[order[1:]]
    bad[order[:-1]] = follows & (over > 1e3) & (over > 0.5 * rank.duration[order[:-1]])
    bad |= impossible_durations(
        rank.step, 1e-6 * rank.start, 1e-6 * rank.duration, pd.factorize(names)[0], [stream],
        stream >= 0,
    )  # fmt: skip
    n_bad = int(bad.sum())
    if n_bad and n_bad < bad.size:
        share = rank.duration[bad].sum() / rank.duration.sum()
        shown = ", ".join(name[:60] for name in dict.fromkeys(names[bad][:3]))
        notes.append(
            f"{n_bad:,} of {bad.size:,} device activities dropped: their durations "
            f"({format_share(share, 2)} of all time) run over what follows on their stream or "
            f"over their step: {shown}{', ...' if n_bad > 3 else ''}"
        )
        for name in ("start", "duration", "launch", "launch_end", "step"):
            setattr(rank, name, getattr(rank, name)[~bad])
        rank.columns = {name: values[~bad] for name, values in rank.columns.items()}
    return notes


def _number_ranks(ranks: list[RankTrace], files: list[RecordedFile], notes: list[str]) -> list[int]:
    """Rank number of each file; those that do not tell take the free numbers in file order."""
    taken: dict[int, str] = {}
    for rank, file in zip(ranks, files, strict=True):
        if rank.rank is None:
            continue
        if rank.rank in taken:
            raise PrismError(
                f"{file.source}: is of rank {rank.rank}, as {taken[rank.rank]} is; expected one "
                "file a rank; give the files of one recording"
            )
        taken[rank.rank] = file.source
    free = (number for number in range(len(ranks) + len(taken)) if number not in taken)
    numbers = [next(free) if rank.rank is None else rank.rank for rank in ranks]
    n_unknown = sum(rank.rank is None for rank in ranks)
    if n_unknown:
        which = "rank 0" if len(ranks) == 1 else "numbered in the order of the files"
        notes.append(f"{n_unknown} of {format_count(len(ranks), 'file')} without a rank: {which}")
    return numbers


def _check_together(
    ranks: list[RankTrace], files: list[RecordedFile], starts: Floats, matched: Matched
) -> None:
    """Refuse ranks of different jobs, or recorded at different times."""
    sizes = {rank.world_size: file.source for rank, file in zip(ranks, files, strict=True)}
    sizes.pop(None, None)
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise PrismError(
            f"{second}: is of a job of {b} ranks, {first} of one of {a}; expected files of one "
            "recording; name those of one job"
        )
    spans = [
        (at + float(rank.start.min()) * 1e-6, at + float((rank.start + rank.duration).max()) * 1e-6)
        for rank, at in zip(ranks, starts, strict=True)
    ]
    for i in range(1, len(ranks)):
        apart = max(spans[i][0] - spans[0][1], spans[0][0] - spans[i][1])
        if not matched.aligned_on[i] and apart > 0.0:
            raise PrismError(
                f"{files[i].source}: shares no collective with {files[0].source}, and was recorded "
                "at another time; expected files of one recording, made together on all ranks"
            )


def _common_clock(ranks: list[RankTrace]) -> Floats:
    """Origin [s] of each rank's times against the first rank's."""
    base = np.array([rank.base_time_ns - ranks[0].base_time_ns for rank in ranks])
    origin = np.array([rank.origin_us - ranks[0].origin_us for rank in ranks])
    return np.asarray(base * 1e-9 + origin * 1e-6)


def _collectives(rank: RankTrace) -> NDArray[np.int64]:
    """Rows of a rank that are collectives."""
    kinds, idx = np.unique(rank.columns["op_kind"], return_inverse=True)
    return np.flatnonzero(np.isin(kinds, list(COLLECTIVES))[idx])


def _members(ranks: list[RankTrace], starts: Floats) -> Members:
    """Rows of all collectives, rank by rank and in the rows' order."""
    key: list[tuple[str, str, float]] = []
    parts: list[tuple[NDArray[Any], ...]] = []
    for idx, rank in enumerate(ranks):
        c, rows = rank.columns, _collectives(rank)
        for i in rows:
            # what a rank puts into an all-to-all or a transfer need not be what others put in
            symmetric = c["op_kind"][i] not in ("all_to_all", "transfer")
            size = float(c["bytes"][i]) if symmetric and c["bytes"][i] >= 0 else -1.0
            key.append((c["op_kind"][i], c["group"][i], size))
        start = rank.start[rows] * 1e-6 + starts[idx]
        end = start + rank.duration[rows] * 1e-6
        parts.append((np.full(rows.size, idx), rank.step[rows], start, end))
    rank_idx, *columns = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Members(rank_idx, key, *columns)


_OF_GAP: dict[str, Any] = {
    "op_kind": "launch_gap", "kernel_class": "host", "name": "launch gap", "copy_back": False,
    **dict.fromkeys(("group", "op", "shape"), ""),
    **dict.fromkeys(("stream", "thread", "correlation", "group_size", "collective"), -1),
    **dict.fromkeys(("bytes", "launch", "launch_end", "transfer"), np.nan),
}  # fmt: skip


class _Clock(NamedTuple):
    """How a rank's times become those of the trace."""

    rate: float
    shift: float
    origin: float = 0.0

    def __call__(self, us: Any) -> Any:
        """Turn times of the rank [us] into times of the trace [s]."""
        return us * 1e-6 * self.rate + self.shift - self.origin


class _Gaps(NamedTuple):
    """Launch gaps [gap] of a rank [us], and the share of its time without device activity."""

    start: Floats
    duration: Floats
    step: NDArray[np.int64]
    idle_share: float


def _rank_table(
    rank: RankTrace, gaps: _Gaps, clock: _Clock, matched: Matched, mine: NDArray[np.bool_],
    number: int,
) -> dict[str, Any]:  # fmt: skip
    """Columns of one rank, launch gaps included."""
    n, rows = rank.start.size, _collectives(rank)
    collective, transfer = np.full(n, -1, dtype=np.int64), np.full(n, np.nan)
    collective[rows] = matched.collective[mine]
    transfer[rows] = matched.transfer[mine]
    columns = rank.columns | {
        "launch": clock(rank.launch), "launch_end": clock(rank.launch_end),
        "collective": collective, "transfer": transfer,
    }  # fmt: skip
    return {
        name: np.r_[values, np.full(gaps.start.size, _OF_GAP[name], values.dtype)]
        for name, values in columns.items()
    } | {
        "rank": np.full(n + gaps.start.size, number, dtype=np.int64),
        "step": np.r_[rank.step, gaps.step],
        "start": clock(np.r_[rank.start, gaps.start]),
        "duration": np.r_[rank.duration, gaps.duration] * 1e-6,
    }


def _about(rank: RankTrace, gaps: _Gaps, clock: _Clock, number: int) -> dict[str, Any]:
    """Say of a rank in ``meta``: its steps and the host calls that wait."""
    calls = asdict(rank.calls)
    for name in ("start", "end", "recorded"):
        calls[name] = [clock(x) if x == x else None for x in calls[name]]
    return {
        "rank": number, "idle_share": gaps.idle_share, "calls": calls,
        "steps": [[step, clock(a), clock(b)] for step, a, b in rank.steps],
    }  # fmt: skip


def _launch_gaps(rank: RankTrace) -> _Gaps:
    """Stretches without device activity that the host is the reason for.

    Notes
    -----
    An idle stretch is the host's if the activity that ends it was issued after it began
    (`launch_gaps`). The stretch belongs to that activity's step.
    """
    issued = np.where(rank.columns["copy_back"], rank.launch, rank.launch_end)
    end = rank.start + rank.duration
    gaps = launch_gaps(rank.start, end, issued)
    span = float(end.max() - rank.start.min())
    share = gaps.idle / span if span > 0 else 0.0
    return _Gaps(gaps.begin, gaps.end - gaps.begin, rank.step[gaps.ended_by], share)


def _join(parts: list[NDArray[Any]]) -> Any:
    """One column of several ranks; text as categories."""
    joined = np.concatenate(parts)
    if joined.dtype != object:
        return joined
    codes, values = pd.factorize(joined)
    return pd.Categorical.from_codes(codes, [str(v) for v in values])
