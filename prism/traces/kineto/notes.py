"""What a user should know of how the ranks of a trace were put together, in words and numbers.

Ranks present and missing, collectives matched, clocks moved, steps marked or not. Left out: what
each file's reader had to say of it (kineto.py, nsys.py, chakra.py).
"""

from __future__ import annotations

from typing import Any

from prism.common.text import format_count, format_duration
from prism.traces.kineto.collectives import Matched, Members
from prism.traces.kineto.rank import RankTrace

_FOUND_BY = {
    "optimizer": "no ProfilerStep marks: steps are found by the optimizer's annotations",
    "kernels": "no marks of steps: steps are the period in which the same kernels come again",
    "": "no marks of steps, and no kernels that repeat: all of it is taken as one step",
}


def about_job(ranks: list[RankTrace], members: Members, matched: Matched) -> dict[str, Any]:
    """Sum up the trace as a whole."""
    world = [rank.world_size for rank in ranks if rank.world_size is not None]
    n_collectives = int(matched.collective.max(initial=-1)) + 1
    return {
        "n_ranks": len(ranks),
        "device": next((rank.device for rank in ranks if rank.device), ""),
        "world_size": max(world, default=len(ranks)),
        "clock_offset_s": [float(x) for x in matched.offset],
        "clock_drift": [float(x) for x in matched.drift],
        "clock_aligned_on": [int(x) for x in matched.aligned_on],
        "n_collectives_recorded": len(members.key),
        "n_collectives_matched": n_collectives,
        "n_members_unmatched": int((matched.collective < 0).sum()),
    }


def notes_of(ranks: list[RankTrace], meta: dict[str, Any]) -> list[str]:
    """Say what a user should know of how the trace was read."""
    notes = []
    n_recorded, n_ranks, world = (
        meta["n_collectives_recorded"], meta["n_ranks"], meta["world_size"],
    )  # fmt: skip
    if n_ranks == world == 1:
        pass
    elif n_ranks == 1 and n_recorded:
        notes.append(
            f"1 of {format_count(world, 'rank')} traced: the others enter through the waiting in "
            "its "
            f"{n_recorded:,} collectives, whose durations include it; give the other ranks' files "
            "to separate it"
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


def once(said: list[tuple[str, str]], n_files: int) -> list[str]:
    """Name the files with each note of theirs; what all of them say is said once.

    Examples
    --------
    >>> once([("a", "x"), ("b", "x"), ("b", "y")], 2)
    ['x', 'b: y']
    """
    files: dict[str, list[str]] = {}
    for file, note in said:
        files.setdefault(note, []).append(file)
    notes = []
    for note, of in files.items():
        shown = ", ".join(of[:3]) + (f" and {len(of) - 3} more" if len(of) > 3 else "")
        notes.append(note if len(set(of)) == n_files else f"{shown}: {note}")
    return notes
