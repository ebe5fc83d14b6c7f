"""Ranks of one job put together: clocks aligned, collectives matched, launch gaps, one tidy table.

Rows are device activities and ``launch_gap``: stretches in which a rank's GPU idles on all
streams because the host had not launched. Collectives are matched over the ranks present and the
ranks' clocks, their drift too, aligned on them; recorded durations, waiting included, stay as they
are and the transfer stands beside them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.launchgaps import launch_gaps
from prism.common.text import format_count, format_duration, format_share
from prism.traces.file import COPY_AGAIN, RecordedFile
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.kineto.collectives import Matched, match_collectives
from prism.traces.kineto.events import read_events
from prism.traces.kineto.periods import mark_by_rhythm, number_alike, periods_of
from prism.traces.kineto.rank import RankTrace, read_rank
from prism.traces.table import COLUMNS, Trace, impossible_durations, make_trace

EXTRA_COLUMNS = (
    "launch", "launch_end", "thread", "shape", "copy_back", "collective", "transfer",
)  # fmt: skip
"""Columns of a Kineto table beyond the common ones: start and end of the launching call [s], its
host thread, launch grid and block, whether the call waits for a copy to pageable memory, number of
the matched collective (-1) and its transfer [s]."""


def read_kineto(files: Sequence[RecordedFile]) -> Trace:
    """Read the profiler's files of one job, one file a rank."""
    return read_ranks(files, _read_file, "kineto")


def _read_file(file: RecordedFile) -> list[RankTrace]:
    """Read one file; refuse one without device activities."""
    rank = read_rank(read_events(file.path))
    if len(rank.table):
        return [rank]
    broken = f" ({rank.n_bad:,} without a time)" if rank.n_bad else ""
    more = "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
    raise PrismError(
        f"{file.source}: holds {format_count(rank.n_host_events, 'host event')} but no "
        f"device activity{broken}; expected kernels, copies or fills of a GPU; "
        f"{COPY_AGAIN if rank.cut else more}"
    )


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
            with _no_collection():
                found = read(file)
        except PrismError as error:
            if file.named or len(files) == 1:
                raise
            lost.append(error)
            continue
        said = [note for rank in found for note in [*rank.notes, *_drop_impossible(rank)]]
        told += [(file.path.name, note) for note in dict.fromkeys(said)]
        ranks += found
        of += [file] * len(found)
    if not ranks:
        raise lost[0]
    notes = [*_once(told, len(set(of))), *(f"left out: {error}" for error in lost)]
    return _join(ranks, of, notes, format)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the garbage collector off while a million small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _join(
    ranks: list[RankTrace], files: list[RecordedFile], notes: list[str], format: str
) -> Trace:
    """Put the ranks of one job together; `files` says where each was read from."""
    first = files[0].path
    source, several = str(first), f"{first.parent} ({format_count(len(files), 'rank')})"
    source = several if len(set(files)) > 1 else source
    numbers = _number_ranks(ranks, files, notes)
    if any(rank.table["start"].isna().any() for rank in ranks):
        tables = [
            rank.table.assign(
                rank=number, duration=rank.table["duration"] * 1e-6, launch=np.nan,
                launch_end=np.nan, transfer=np.nan, collective=-1,
            )
            for rank, number in zip(ranks, numbers, strict=True)
        ]  # fmt: skip
        notes.append(
            "nodes have no start times: durations are known, and neither steps nor what waits for "
            "what"
        )
        return _trace(tables, source, format, notes, {"ranks": [], "n_ranks": len(ranks)})
    base = np.array([rank.base_time_ns - ranks[0].base_time_ns for rank in ranks])
    origins = np.array([rank.origin_us - ranks[0].origin_us for rank in ranks])
    starts = np.asarray(base * 1e-9 + origins * 1e-6)  # of each rank's times [s]
    for rank in ranks:
        if not rank.steps:
            mark_by_rhythm(rank)
    number_alike(ranks, starts)
    members = _members(ranks, starts)
    matched = match_collectives(members, starts)
    _check_together(ranks, files, starts, matched)
    clocks = [_Clock(*c) for c in zip(1.0 + matched.drift, starts + matched.offset, strict=True)]
    origin = min(
        float(clock(rank.table["start"]).min()) for clock, rank in zip(clocks, ranks, strict=True)
    )
    tables, meta_ranks = [], []
    for idx, (rank, clock) in enumerate(zip(ranks, clocks, strict=True)):
        clock = clock._replace(origin=origin)
        table = _with_launch_gaps(rank)
        rows, mine = _collectives(rank), members["rank_idx"] == idx
        table[["collective", "transfer"]] = -1, np.nan
        table.loc[rows, "collective"] = matched.collective[mine]
        table.loc[rows, "transfer"] = matched.transfer[mine]
        times = {name: clock(table[name]) for name in ("start", "launch", "launch_end")}
        tables.append(table.assign(rank=numbers[idx], duration=table["duration"] * 1e-6, **times))
        calls = rank.calls.assign(
            **{name: clock(rank.calls[name]) for name in ("start", "end", "recorded")}
        )
        meta_ranks.append({
            "rank": numbers[idx],
            "calls": calls.replace({np.nan: None}).to_dict("list"),
            "steps": [[step, clock(a), clock(b)] for step, a, b in rank.steps],
        })  # fmt: skip
    world = [rank.world_size for rank in ranks if rank.world_size is not None]
    meta = {
        "ranks": meta_ranks, "n_ranks": len(ranks), "world_size": max(world, default=len(ranks)),
        "device": next((rank.device for rank in ranks if rank.device), ""),
        "clock_offset_s": matched.offset.tolist(), "clock_drift": matched.drift.tolist(),
        "clock_aligned_on": matched.aligned_on.tolist(),
        "n_collectives_matched": int(matched.collective.max(initial=-1)) + 1,
        "n_members_unmatched": int((matched.collective < 0).sum()),
    }  # fmt: skip
    notes = notes + _notes_of(ranks, meta, len(members))
    trace = _trace(tables, source, format, notes, meta)
    periods = periods_of(trace.ops, notes)
    return replace(trace, notes=tuple(notes), meta=meta | {"periods": periods})


def _trace(
    tables: list[pd.DataFrame], source: str, format: str, notes: list[str], meta: dict[str, Any]
) -> Trace:
    """Build the trace of the ranks' tables; text as categories."""
    whole = pd.concat(tables, ignore_index=True)
    whole = whole[[name for name in (*COLUMNS, *EXTRA_COLUMNS) if name in whole]]
    texts = ("op_kind", "kernel_class", "name", "group", "shape")
    columns = whole.astype(dict.fromkeys(texts, "category")).to_dict("series")
    return make_trace(columns, source, format, notes, meta)


def _drop_impossible(rank: RankTrace) -> list[str]:
    """Take activities out whose duration cannot be true; say how many."""
    notes = []
    if rank.n_bad:
        notes.append(f"{rank.n_bad:,} device activities without a valid time dropped")
    table = rank.table
    if table["start"].isna().any():
        return notes
    stream, start, duration, step = (
        table[name].to_numpy() for name in ("stream", "start", "duration", "step")
    )
    order = np.lexsort((start, stream))
    bad = np.zeros(order.size, dtype=np.bool_)
    # activities of one stream run one after the other
    follows = stream[order[1:]] == stream[order[:-1]]
    over = start[order[:-1]] + duration[order[:-1]] - start[order[1:]]
    bad[order[:-1]] = follows & (over > 1e3) & (over > 0.5 * duration[order[:-1]])
    bad |= impossible_durations(
        step, 1e-6 * start, 1e-6 * duration, pd.factorize(table["name"])[0], [stream], stream >= 0
    )  # fmt: skip
    n_bad = int(bad.sum())
    if n_bad and n_bad < bad.size:
        share = duration[bad].sum() / duration.sum()
        shown = ", ".join(name[:60] for name in dict.fromkeys(table["name"][bad][:3]))
        notes.append(
            f"{n_bad:,} of {bad.size:,} device activities dropped: their durations "
            f"({format_share(share, 2)} of all time) run over what follows on their stream or "
            f"over their step: {shown}{', ...' if n_bad > 3 else ''}"
        )
        rank.table = table[~bad].reset_index(drop=True)
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
    ranks: list[RankTrace], files: list[RecordedFile], starts: Array, matched: Matched
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
        (at + float(rank.table["start"].min()) * 1e-6, at + float(rank.end.max()) * 1e-6)
        for rank, at in zip(ranks, starts, strict=True)
    ]
    for i in range(1, len(ranks)):
        apart = max(spans[i][0] - spans[0][1], spans[0][0] - spans[i][1])
        if not matched.aligned_on[i] and apart > 0.0:
            raise PrismError(
                f"{files[i].source}: shares no collective with {files[0].source}, and was recorded "
                "at another time; expected files of one recording, made together on all ranks"
            )


def _collectives(rank: RankTrace) -> Index:
    """Rows of a rank that are collectives."""
    return np.flatnonzero(rank.table["op_kind"].isin(COLLECTIVES))


def _members(ranks: list[RankTrace], starts: Array) -> pd.DataFrame:
    """Rows of all collectives, rank by rank and in the rows' order."""
    columns = ["rank_idx", "op_kind", "group", "bytes", "step", "start", "end"]
    table = pd.concat([
        rank.table.assign(
            rank_idx=i, start=1e-6 * rank.table["start"] + at, end=1e-6 * rank.end + at
        ).loc[_collectives(rank), columns]
        for i, (rank, at) in enumerate(zip(ranks, starts, strict=True))
    ])  # fmt: skip
    # what a rank puts into an all-to-all or a transfer need not be what others put in
    symmetric = ~table["op_kind"].isin(["all_to_all", "transfer"]) & (table["bytes"] >= 0)
    return table.assign(size=table["bytes"].where(symmetric, -1.0))


_OF_GAP: dict[str, Any] = {
    "op_kind": "launch_gap", "kernel_class": "host", "name": "launch gap", "copy_back": False,
    "group": "", "shape": "", "stream": -1, "thread": -1,
    **dict.fromkeys(("bytes", "launch", "launch_end"), np.nan),
}  # fmt: skip


class _Clock(NamedTuple):
    """How a rank's times become those of the trace."""

    rate: float
    shift: float
    origin: float = 0.0

    def __call__(self, us: Any) -> Any:
        """Turn times of the rank [us] into times of the trace [s]."""
        return us * 1e-6 * self.rate + self.shift - self.origin


def _with_launch_gaps(rank: RankTrace) -> pd.DataFrame:
    """Add the stretches without device activity that the host is the reason for.

    Each belongs to the step of the activity that ends it.
    """
    table = rank.table
    issued = table["launch"].where(table["copy_back"], table["launch_end"])
    gaps = launch_gaps(table["start"].to_numpy(), rank.end.to_numpy(), issued.to_numpy())
    rows = pd.DataFrame({
        "start": gaps.begin, "duration": gaps.end - gaps.begin,
        "step": table["step"].to_numpy()[gaps.ended_by],
    }).assign(**_OF_GAP)  # fmt: skip
    return pd.concat([table, rows], ignore_index=True)


_FOUND_BY = {
    "optimizer": "no ProfilerStep marks: steps are found by the optimizer's annotations",
    "kernels": "no marks of steps: steps are the period in which the same kernels come again",
    "": "no marks of steps, and no kernels that repeat: all of it is taken as one step",
}


def _notes_of(ranks: list[RankTrace], meta: dict[str, Any], n_recorded: int) -> list[str]:
    """Say what a user should know of how the trace was read."""
    notes = []
    n_ranks, world = meta["n_ranks"], meta["world_size"]
    if n_ranks == world == 1:
        pass
    elif n_ranks == 1 and n_recorded:
        notes.append(
            f"1 of {format_count(world, 'rank')} traced: the others enter through the waiting in "
            f"its {n_recorded:,} collectives, whose durations include it; give the other ranks' "
            "files to separate it"
        )
    elif n_recorded:
        spread = max(abs(x) for x in meta["clock_offset_s"])
        drift = max(abs(x) for x in meta["clock_drift"])
        moved = f"moved by up to {format_duration(spread)}" if spread >= 1e-6 else "agree"
        moved += f", drift up to {1e6 * drift:.2g} ppm" if drift else ""
        notes.append(
            f"{n_ranks} of {format_count(world, 'rank')} traced: "
            f"{meta['n_collectives_matched']:,} collectives "
            f"matched over ranks, {meta['n_members_unmatched']:,} of {n_recorded:,} recorded ones "
            f"unmatched; clocks {moved}"
        )
        lost = sum(n == 0 for n in meta["clock_aligned_on"][1:])
        if lost:
            notes.append(
                f"{format_count(lost, 'rank')} without a collective of the others: clocks not "
                "aligned"
            )
        if world > n_ranks:
            notes.append(
                "ranks not traced enter through the waiting in collectives: transfers count "
                "from the last arrival of those traced"
            )
    notes += [_FOUND_BY[m] for m in dict.fromkeys(rank.marks for rank in ranks) if m in _FOUND_BY]
    n_outside = sum(int((rank.table["step"] < 0).sum()) for rank in ranks)
    if n_outside:
        notes.append(f"{n_outside:,} device activities launched outside all steps: step -1")
    n_lone = sum(int(rank.table["launch"].isna().sum()) for rank in ranks)
    if n_lone:
        notes.append(f"{n_lone:,} device activities without their launching call")
    if any(rank.origin_us > 2.0**50 and (rank.table["start"] % 1.0 != 0.0).any() for rank in ranks):
        notes.append("start times are resolved to 0.25 us only (epoch microseconds as floats)")
    return notes


def _once(said: list[tuple[str, str]], n_files: int) -> list[str]:
    """Name the files with each note of theirs; what all of them say is said once."""
    notes = []
    for note in dict.fromkeys(note for _, note in said):
        of = [file for file, other in said if other == note]
        shown = ", ".join(of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
        notes.append(note if len(set(of)) == n_files else f"{shown}: {note}")
    return notes
