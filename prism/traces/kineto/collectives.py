"""Collectives matched over the ranks of a trace, and the ranks' clocks brought together.

Members of one collective end together, so the offset of two clocks is the commonest difference
of the ends of ops of the same kind, size and group, and matched ops overlap in time. The transfer
of a matched collective runs from its last arrival to its end. Left out: clock drift within a
trace, and point-to-point transfers in groups of more than two, whose peers are not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WINDOW_S = 1e-3
"""Ends of one collective differ by less than this over ranks [s]; the largest difference found
in the public traces that tests read is 0.33 ms, of a 64 ms all-gather."""

_SHARE = 0.1
"""Ends of a long collective may differ by this share of its duration: a ring passes the last
piece on from rank to rank."""

_FAR_S = 0.1
"""Ends this far apart are of different collectives, however long [s]."""

_MOST = 2_000
"""Members of one rank that vote on the clock's offset: the vote compares them pairwise."""


@dataclass(frozen=True)
class Members:
    """Collectives of all ranks, one row a recorded kernel [row]."""

    rank_idx: NDArray[np.int64]
    """Which rank's, by its place in the recording."""
    key: list[tuple[str, str, float]]
    """Op kind, group and, where all members must agree on it, size."""
    step: NDArray[np.int64]
    start: Floats
    end: Floats
    """On a common origin, before alignment [s]."""


@dataclass(frozen=True)
class Matched:
    """What belongs together."""

    offset: Floats
    """[rank] to be added to a rank's times [s]."""
    aligned_on: NDArray[np.int64]
    """[rank] pairs of collectives the offset rests on."""
    collective: NDArray[np.int64]
    """[row] number of the collective, -1 unmatched."""
    transfer: Floats
    """[row] from the last arrival to the own end [s]; not-a-number where unmatched."""


def match_collectives(members: Members, n_ranks: int) -> Matched:
    """Match the collectives of several ranks and align the ranks' clocks."""
    numbers: dict[tuple[str, str, float], int] = {}
    key = np.array([numbers.setdefault(k, len(numbers)) for k in members.key], dtype=np.int64)
    offset, aligned_on = np.zeros(n_ranks), np.zeros(n_ranks, dtype=np.int64)
    aligned = [0]
    waiting = list(range(1, n_ranks))
    while waiting:
        votes = {r: _offset(members, key, offset, aligned, r) for r in waiting}
        best = max(waiting, key=lambda r: votes[r][1])
        offset[best], aligned_on[best] = votes[best]
        waiting.remove(best)
        aligned.append(best)
    start = members.start + offset[members.rank_idx]
    end = members.end + offset[members.rank_idx]
    collective = _cluster(members, key, start, end)
    transfer = np.full(start.size, np.nan)
    rows = np.flatnonzero(collective >= 0)
    last = np.full(collective.max(initial=-1) + 1, -np.inf)
    np.maximum.at(last, collective[rows], start[rows])
    since_last = np.maximum(0.0, end[rows] - last[collective[rows]])
    transfer[rows] = np.minimum(since_last, members.end[rows] - members.start[rows])
    return Matched(offset, aligned_on, collective, transfer)


def _offset(
    members: Members, key: NDArray[np.int64], offset: Floats, aligned: list[int], rank: int
) -> tuple[float, int]:
    """Clock offset [s] of `rank` against the aligned ranks, and the pairs that vote for it."""
    mine = np.flatnonzero(members.rank_idx == rank)[:_MOST]
    best = (0.0, 0)
    for other in aligned:
        theirs = np.flatnonzero(members.rank_idx == other)[:_MOST]
        same = key[mine][:, None] == key[theirs][None, :]
        same &= members.step[mine][:, None] == members.step[theirs][None, :]
        i, j = np.nonzero(same)
        if not i.size:
            continue
        lag = np.sort(members.end[theirs][j] + offset[other] - members.end[mine][i])
        n_near = np.searchsorted(lag, lag + 2.0 * _WINDOW_S, side="right") - np.arange(lag.size)
        top = np.flatnonzero(n_near == n_near.max())
        at = top[np.argmin(np.abs(lag[top]))]
        if n_near[at] > best[1] and (n_near[at] > 1 or lag.size == 1):
            best = (float(np.median(lag[at : at + n_near[at]])), int(n_near[at]))
        if best[1] >= min(mine.size, theirs.size):
            break
    return best


def _cluster(
    members: Members, key: NDArray[np.int64], start: Floats, end: Floats
) -> NDArray[np.int64]:
    """Find the collective that each row belongs to, -1 where nobody overlaps it."""
    collective = np.full(key.size, -1, dtype=np.int64)
    n_made = 0
    for k in np.unique(key):
        rows = np.flatnonzero(key == k)
        rows = rows[np.argsort(end[rows], kind="stable")]
        if members.key[rows[0]][0] == "transfer" and not _pairs(members, rows):
            continue
        present = np.unique(members.rank_idx[rows]).size
        for i, first in enumerate(rows):
            if collective[first] >= 0:
                continue
            group, ranks = [first], {int(members.rank_idx[first])}
            for row in rows[i + 1 :]:
                if len(ranks) == present:
                    break
                if end[row] - end[first] > max(_WINDOW_S, _SHARE * (end[row] - start[row])):
                    if end[row] - end[first] > _FAR_S:
                        break
                    continue
                rank = int(members.rank_idx[row])
                if start[row] < end[first] and collective[row] < 0 and rank not in ranks:
                    group.append(row)
                    ranks.add(rank)
            if len(group) > 1:
                collective[group] = n_made
                n_made += 1
    return collective


def _pairs(members: Members, rows: NDArray[np.int64]) -> bool:
    """Whether transfers can only be between two ranks."""
    named = members.key[rows[0]][1] != ""
    return named and np.unique(members.rank_idx[rows]).size == 2
