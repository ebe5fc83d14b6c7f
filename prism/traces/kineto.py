"""PyTorch-profiler (Kineto) traces of one or several ranks, to the tidy table.

Rows are device activities and ``launch_gap``: stretches in which a rank's GPU idles on all
streams because the host had not launched. Collectives are matched over the ranks present and the
ranks' clocks aligned on them; recorded durations, waiting included, stay as they are and the
transfer stands beside them. Left out: CPU ops as rows, memory, Python stacks, clock drift.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.launchgaps import launch_gaps
from prism.common.text import format_share
from prism.traces.collectives import Matched, Members, match_collectives
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.kinetorank import RankTrace, read_rank
from prism.traces.rankfiles import read_each
from prism.traces.ranknotes import about_job, notes_of
from prism.traces.salvage import read_events
from prism.traces.table import Trace, impossible_durations, make_trace

Floats = NDArray[np.float64]

EXTRA_COLUMNS = (
    "launch", "launch_end", "thread", "correlation", "op", "shape", "copy_back", "group_size",
    "collective", "transfer",
)  # fmt: skip
"""Columns of a Kineto table beyond the common ones: start and end of the launching call [s], its
host thread, correlation id, innermost host op around it, launch grid and block, whether the call
waits for a copy to pageable memory, ranks in the group, number of the matched collective (-1) and
its transfer [s]."""


def read_kineto(paths: Sequence[str | Path], found: Collection[Path] = ()) -> Trace:
    """Read the profiler's files of one job, one file a rank."""
    files = [Path(path) for path in paths]
    if not files:
        raise PrismError("no profiler file given; name a trace, or a folder of one file a rank")
    ranks, files, notes = _read_files(files, found)
    return join_ranks(ranks, files, notes, "kineto")


def join_ranks(ranks: list[RankTrace], files: list[Path], notes: list[str], format: str) -> Trace:
    """Put the ranks of one job together: numbers, clocks, collectives, launch gaps.

    Parameters
    ----------
    files : list of Path
        [rank] where it was read from; one file may hold several ranks.
    """
    alone = len(set(files)) == 1
    source = str(files[0]) if alone else f"{files[0].parent} ({len(files)} ranks)"
    numbers = _number_ranks(ranks, files, notes)
    starts = _common_clock(ranks)
    members = _members(ranks, starts)
    matched = match_collectives(members, len(ranks))
    _check_together(ranks, files, starts, matched)
    tables, meta_ranks = [], []
    row = 0
    for idx, rank in enumerate(ranks):
        n_mine = int((members.rank_idx == idx).sum())
        mine = slice(row, row + n_mine)
        row += n_mine
        shift = starts[idx] + matched.offset[idx]
        columns, about = _rank_table(rank, numbers[idx], shift, matched, mine)
        tables.append(columns)
        meta_ranks.append(about)
    origin = min((float(np.nanmin(t["start"])) for t in tables), default=0.0)
    columns = {name: _join([table[name] for table in tables]) for name in tables[0]}
    for name in ("start", "launch", "launch_end"):
        columns[name] = columns[name] - origin
    for about in meta_ranks:
        _shift(about, origin)
    meta = {"ranks": meta_ranks, **about_job(ranks, members, matched)}
    notes += notes_of(ranks, meta, format)
    return make_trace(columns, source, format, notes, meta)


def _read_files(
    files: Sequence[Path], found: Collection[Path]
) -> tuple[list[RankTrace], list[Path], list[str]]:
    """Read each file; return what was read, from which files, and notes."""
    done, left_out = read_each(files, found, _read_file)
    notes: list[str] = []
    for path, rank in done:
        said = [*rank.notes, *drop_impossible(rank)]
        notes += [f"{path.name}: {note}" for note in said] if len(files) > 1 else said
    return [rank for _, rank in done], [path for path, _ in done], [*notes, *left_out]


def _read_file(path: Path) -> RankTrace:
    """Read one file; refuse one without device activities."""
    rank = read_rank(read_events(path))
    if rank.start.size:
        return rank
    broken = f" ({rank.n_bad:,} without a time)" if rank.n_bad else ""
    raise PrismError(
        f"{path}: holds {rank.n_host_events:,} host events but no device activity{broken}; "
        "expected kernels, copies or fills of a GPU; profile with "
        "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
    )


def drop_impossible(rank: RankTrace) -> list[str]:
    """Take activities out whose duration cannot be true; say how many."""
    stream = np.array(rank.columns["stream"], dtype=np.int64)
    kinds = pd.factorize(np.array(rank.columns["name"], dtype=object))[0]
    order = np.lexsort((rank.start, stream))
    bad = np.zeros(order.size, dtype=np.bool_)
    # activities of one stream run one after the other
    follows = stream[order[1:]] == stream[order[:-1]]
    over = rank.start[order[:-1]] + rank.duration[order[:-1]] - rank.start[order[1:]]
    bad[order[:-1]] = follows & (over > 1e3) & (over > 0.5 * rank.duration[order[:-1]])
    bad |= impossible_durations(
        rank.step, 1e-6 * rank.start, 1e-6 * rank.duration, kinds, [stream], stream >= 0
    )
    notes = []
    if rank.n_bad:
        notes.append(f"{rank.n_bad:,} device activities without a valid time dropped")
    n_bad = int(bad.sum())
    if n_bad and n_bad < bad.size:
        share = rank.duration[bad].sum() / rank.duration.sum()
        names = dict.fromkeys(rank.columns["name"][i] for i in np.flatnonzero(bad)[:3])
        notes.append(
            f"{n_bad:,} of {bad.size:,} device activities dropped: their durations "
            f"({format_share(share, 2)} of all time) run over what follows on their stream or "
            f"over their step: "
            f"{', '.join(name[:60] for name in names)}{', ...' if n_bad > 3 else ''}"
        )
        _keep(rank, ~bad)
    return notes


def _keep(rank: RankTrace, rows: NDArray[np.bool_]) -> None:
    """Keep some activities of a rank."""
    for name in ("start", "duration", "launch", "launch_end", "step"):
        setattr(rank, name, getattr(rank, name)[rows])
    kept = np.flatnonzero(rows)
    rank.columns = {name: [v[i] for i in kept] for name, v in rank.columns.items()}


def _number_ranks(ranks: list[RankTrace], files: list[Path], notes: list[str]) -> list[int]:
    """Rank number of each file; those that do not tell take the free numbers in file order."""
    taken: dict[int, Path] = {}
    for rank, path in zip(ranks, files, strict=True):
        if rank.rank is None:
            continue
        if rank.rank in taken:
            raise PrismError(
                f"{path}: is of rank {rank.rank}, as {taken[rank.rank]} is; expected one file a "
                "rank; give the files of one recording"
            )
        taken[rank.rank] = path
    free = (number for number in range(len(ranks) + len(taken)) if number not in taken)
    numbers = [next(free) if rank.rank is None else rank.rank for rank in ranks]
    n_unknown = sum(rank.rank is None for rank in ranks)
    if n_unknown:
        which = "rank 0" if len(ranks) == 1 else "numbered in the order of the files"
        notes.append(f"{n_unknown} of {len(ranks)} files name no rank: {which}")
    return numbers


def _check_together(
    ranks: list[RankTrace], files: list[Path], starts: list[float], matched: Matched
) -> None:
    """Refuse ranks of different jobs, or recorded at different times."""
    sizes = {rank.world_size: path for rank, path in zip(ranks, files, strict=True)}
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
                f"{files[i]}: shares no collective with {files[0]}, and was recorded at another "
                "time; expected files of one recording, made together on all ranks"
            )


def _common_clock(ranks: list[RankTrace]) -> list[float]:
    """Origin [s] of each rank's times against the first rank's."""
    first = ranks[0]
    return [
        (rank.base_time_ns - first.base_time_ns) * 1e-9 + (rank.origin_us - first.origin_us) * 1e-6
        for rank in ranks
    ]


def _members(ranks: list[RankTrace], starts: list[float]) -> Members:
    """Rows of all collectives, rank by rank and in the rows' order."""
    key: list[tuple[str, str, float]] = []
    parts: list[tuple[NDArray[Any], ...]] = []
    for idx, rank in enumerate(ranks):
        c = rank.columns
        rows = np.array([i for i, k in enumerate(c["op_kind"]) if k in COLLECTIVES], dtype=np.int64)
        for i in rows:
            # what a rank puts into an all-to-all or a transfer need not be what others put in
            symmetric = c["op_kind"][i] not in ("all_to_all", "transfer")
            size = c["bytes"][i] if symmetric and c["bytes"][i] >= 0 else -1.0
            key.append((c["op_kind"][i], c["group"][i], size))
        start = rank.start[rows] * 1e-6 + starts[idx]
        parts.append(
            (
                np.full(rows.size, idx, dtype=np.int64),
                rank.step[rows],
                start,
                start + rank.duration[rows] * 1e-6,
                np.array(c["group_size"], dtype=np.int64)[rows],
            )
        )
    rank_idx, step, start, end, size = (np.concatenate(x) for x in zip(*parts, strict=True))
    return Members(rank_idx, key, step, start, end, size)


def _rank_table(
    rank: RankTrace, number: int, shift: float, matched: Matched, mine: slice
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of one rank, launch gaps included, and what is said of it in ``meta``."""
    n = rank.start.size
    c = rank.columns
    rows = np.array([i for i, k in enumerate(c["op_kind"]) if k in COLLECTIVES], dtype=np.int64)
    collective, transfer = np.full(n, -1, dtype=np.int64), np.full(n, np.nan)
    collective[rows] = matched.collective[mine]
    transfer[rows] = matched.transfer[mine]
    gap_start, gap, gap_step, idle = _launch_gaps(rank)
    m = gap.size
    table: dict[str, Any] = {
        "op_kind": [*c["op_kind"], *["launch_gap"] * m],
        "kernel_class": [*c["kernel_class"], *["host"] * m],
        "name": [*c["name"], *["launch gap"] * m],
        "rank": np.full(n + m, number, dtype=np.int64),
        "step": np.r_[rank.step, gap_step],
        "start": np.r_[rank.start, gap_start] * 1e-6 + shift,
        "duration": np.r_[rank.duration, gap] * 1e-6,
        "group": [*c["group"], *[""] * m],
        "stream": np.r_[np.array(c["stream"], dtype=np.int64), np.full(m, -1)],
        "bytes": np.r_[c["bytes"], np.full(m, np.nan)],
        "launch": np.r_[rank.launch * 1e-6 + shift, np.full(m, np.nan)],
        "launch_end": np.r_[rank.launch_end * 1e-6 + shift, np.full(m, np.nan)],
        "thread": np.r_[np.array(c["thread"], dtype=np.int64), np.full(m, -1)],
        "correlation": np.r_[np.array(c["correlation"], dtype=np.int64), np.full(m, -1)],
        "op": [*c["op"], *[""] * m],
        "shape": [*c["shape"], *[""] * m],
        "copy_back": np.r_[np.array(c["copy_back"], dtype=np.bool_), np.zeros(m, np.bool_)],
        "group_size": np.r_[np.array(c["group_size"], dtype=np.int64), np.full(m, -1)],
        "collective": np.r_[collective, np.full(m, -1)],
        "transfer": np.r_[transfer, np.full(m, np.nan)],
    }
    calls = rank.calls
    about = {
        "rank": number,
        "idle_share": idle,
        "steps": [[s, a * 1e-6 + shift, b * 1e-6 + shift] for s, a, b in rank.steps],
        "calls": {
            "kind": calls.kind,
            "thread": calls.thread,
            "stream": calls.stream,
            "on_stream": calls.on_stream,
            "start": [x * 1e-6 + shift for x in calls.start],
            "end": [x * 1e-6 + shift for x in calls.end],
            "recorded": [x * 1e-6 + shift if x == x else None for x in calls.recorded],
        },
    }
    return table, about


def _launch_gaps(rank: RankTrace) -> tuple[Floats, Floats, NDArray[np.int64], float]:
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
    return gaps.begin, gaps.end - gaps.begin, rank.step[gaps.ended_by], share


def _join(parts: list[Any]) -> Any:
    """One column of several ranks; text as categories."""
    if isinstance(parts[0], list):
        flat = [value for part in parts for value in part]
        codes, values = pd.factorize(np.array(flat, dtype=object))
        return pd.Categorical.from_codes(codes, [str(v) for v in values])
    return np.concatenate(parts)


def _shift(about: dict[str, Any], origin: float) -> None:
    """Count a rank's times from the first activity of the trace."""
    about["steps"] = [[s, a - origin, b - origin] for s, a, b in about["steps"]]
    calls = about["calls"]
    for name in ("start", "end", "recorded"):
        calls[name] = [None if x is None else x - origin for x in calls[name]]
