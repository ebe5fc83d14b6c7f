"""Collectives matched over the ranks of a trace, and the ranks' clocks brought together.

Members of one collective end together. So the differences of two ranks' ends of the same kind,
size and group gather at the offset of their clocks, and a line through them over time gives the
drift. Ranks are aligned one by one, each on the aligned rank that it shares most with. On one
clock, members are those that overlap and end together. The transfer of a matched collective runs
from its last arrival to its end. Left out: point-to-point transfers in groups of more than two,
whose peers are not recorded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Index

_WINDOW_S = 1e-3
"""Ends of one collective differ by less than this over ranks [s]; the largest difference found
in the public traces that tests read is 0.33 ms, of a 64 ms all-gather."""

_SHARE = 0.1
"""Ends of a long collective may differ by this share of its duration: a ring passes the last
piece on from rank to rank."""

_FAR_S = 0.1  # ends this far apart are of different collectives, however long
_WIDTHS_S = (20e-6, 200e-6, 2.0 * _WINDOW_S)
"""Windows in which differences of ends may gather: the one that shows it best is taken [s]."""
_CHANCE = 1e-4  # with less probability differences of unrelated ends gather as densely
_BLOCK = 64  # collectives in a row that are compared with all of the other rank's
_TRIES = 3  # aligned ranks that a rank is compared with before it counts as unrelated
_SIGNIFICANT = 4.0  # standard errors from which a drift counts
_LEAST_S = 1e-6
"""A drift counts where it moves the clock by more over the recording [s]: some profilers round."""
_MOST_OPEN = 256  # collectives of one kind, size and group that can be in progress at once


@dataclass(frozen=True)
class Matched:
    """What belongs together."""

    offset: Array  # [rank] to be added to a rank's times [s], and
    drift: Array  # [rank] this share of the time since the rank's recording began
    aligned_on: Index  # [rank] pairs of collectives that these rest on
    collective: Index  # [row] number of the collective, -1 unmatched
    transfer: Array  # [row] from the last arrival to the own end [s]; NaN where unmatched


def match_collectives(members: pd.DataFrame, begin: Array) -> Matched:
    """Match the collectives of ranks whose recordings start at `begin` [s], and align clocks.

    `members`: collectives of all ranks, one row a recorded kernel: rank_idx (by its place in the
    recording), op_kind, group, size (where all members must agree on it), step, start and end (on a
    common origin, before alignment [s]).
    """
    key = members.groupby(["op_kind", "group", "size"], sort=False).ngroup().to_numpy(np.int64)
    rank, start, end = (members[name].to_numpy() for name in ("rank_idx", "start", "end"))
    length = end - start
    offset, drift, aligned_on, root = _align(rank, key, members["step"].to_numpy(), end, begin)
    end = end + offset[rank] + drift[rank] * (end - begin[rank])
    start = start + offset[rank] + drift[rank] * (start - begin[rank])
    # a transfer is between two ranks: in unnamed or larger groups nobody says between which
    most = np.where(members["op_kind"] != "transfer", begin.size, 2 * (members["group"] != ""))
    collective = _cluster(rank, key * begin.size + root[rank], most, start, end)
    rows = np.flatnonzero(collective >= 0)
    last = np.full(collective.max(initial=-1) + 1, -np.inf)
    np.maximum.at(last, collective[rows], start[rows])
    transfer = np.full(start.size, np.nan)
    transfer[rows] = np.clip(end[rows] - last[collective[rows]], 0.0, length[rows])
    return Matched(offset, drift, aligned_on, collective, transfer)


def _align(
    rank_idx: Index, key: Index, step: Index, end: Array, begin: Array
) -> tuple[Array, Array, Index, Index]:
    """Find each rank's offset, drift, pairs they rest on, and the rank it is aligned to [rank]."""
    n_ranks = begin.size
    offset, drift = np.zeros(n_ranks), np.zeros(n_ranks)
    aligned_on, root = np.zeros(n_ranks, dtype=np.int64), np.arange(n_ranks)
    step = np.unique(step, return_inverse=True)[1]
    cell = np.unique(key * (step.max(initial=0) + 1) + step, return_inverse=True)[1]
    there = np.zeros((n_ranks, cell.max(initial=-1) + 1), dtype=np.float32)
    there[rank_idx, cell] = 1.0
    shared, tries = there @ there.T, np.full(n_ranks, _TRIES)
    end = end.copy()
    rows = [np.flatnonzero(rank_idx == r) for r in range(n_ranks)]
    rows = [mine[np.argsort(end[mine], kind="stable")] for mine in rows]
    aligned, waiting = [0], list(range(1, n_ranks))
    while waiting:
        among = shared[np.ix_(aligned, waiting)]
        i, j = np.unravel_index(np.argmax(among), among.shape)
        to, rank = aligned[i], waiting[j]
        if among[i, j]:
            mine, theirs = rows[rank], rows[to]
            found = _line_between(key, cell, end, mine, theirs, begin[rank])
            if found is None:
                shared[to, rank] = 0.0
                tries[rank] -= 1
                if not tries[rank]:
                    shared[:, rank] = 0.0
                continue
            offset[rank], drift[rank], aligned_on[rank] = found
            root[rank] = root[to]
            end[mine] += offset[rank] + drift[rank] * (end[mine] - begin[rank])
        waiting.remove(rank)
        aligned.append(rank)
    return offset, drift, aligned_on, root


def _line_between(
    key: Index, cell: Index, end: Array, mine: Index, theirs: Index, begin: float
) -> tuple[float, float, int] | None:
    """Offset at `begin`, drift and pairs that bring ends of `mine` onto those of `theirs`."""
    found = _gathered(cell[mine], end[mine], cell[theirs], end[theirs])
    if found is None:
        return None
    when, lag = found
    middle, reach = float(np.median(when)), max(float(np.ptp(when)), _WINDOW_S)
    until = max(middle - end[mine[0]], end[mine[-1]] - middle)
    low = min(end[mine[0]], end[theirs[0]])
    band = 2.0 * (max(end[mine[-1]], end[theirs[-1]]) - low) + _FAR_S
    theirs = theirs[np.lexsort((end[theirs], key[theirs]))]
    place, ends, keys = key[theirs] * band + end[theirs] - low, end[theirs], key[theirs]
    while (
        True
    ):  # outwards over twice the time at each turn: what the line foretells is then little off
        offset, drift = _line(when - begin, lag)
        near = mine[np.abs(end[mine] - middle) <= reach]
        correction = offset + drift * (end[near] - begin)
        at = np.searchsorted(place, key[near] * band + end[near] + correction - low)
        beside = np.clip([at - 1, at], 0, theirs.size - 1)
        apart = ends[beside] - end[near]
        off = np.where(keys[beside] == key[near], np.abs(apart - correction), np.inf)
        nearest = np.argmin(off, axis=0), np.arange(near.size)
        kept = off[nearest] <= _WINDOW_S
        when, lag = end[near][kept], apart[nearest][kept]
        if not when.size:
            return None
        if reach > until:
            return (*_line(when - begin, lag), when.size)
        reach *= 2.0


def _gathered(
    my_cell: Index, my_end: Array, their_cell: Index, their_end: Array
) -> tuple[Array, Array] | None:
    """Find the ends whose distances to the other rank's gather, and these distances."""
    order = np.argsort(their_cell, kind="stable")
    first, last = (np.searchsorted(their_cell[order], my_cell, side) for side in ("left", "right"))
    common = np.flatnonzero(last > first)
    found, most = None, -np.log(_CHANCE)
    if max(my_cell.size, their_cell.size) == 1:  # what else could it be
        most = -np.inf
    for share in (0.5, 0.25, 0.75, 0.05, 0.95):  # one of the ranks may be recorded longer
        at = max(0, int(share * common.size) - _BLOCK // 2)
        block = common[at : at + _BLOCK]
        n = last[block] - first[block]
        i = np.repeat(block, n)
        j = order[np.repeat(first[block] - np.cumsum(n) + n, n) + np.arange(i.size)]
        by = np.argsort(their_end[j] - my_end[i])
        i, lag = i[by], (their_end[j] - my_end[i])[by]
        for width in _WIDTHS_S:
            n_in = np.searchsorted(lag, lag + width, side="right") - np.arange(lag.size)
            top = np.flatnonzero(n_in == n_in.max())
            at = top[np.argmin(np.abs(lag[top]))]
            # as many or more beside the first by chance: Chernoff's bound of Poisson's tail, of
            # twice the mean density, which differences of even ends have in their middle
            more = n_in[at] - 1
            mean = 2.0 * (lag.size - n_in[at]) * width / max(float(np.ptp(lag)), width) + 1e-9
            score = more * np.log(max(more, 1) / mean) - more + mean - np.log(lag.size)
            if score > most:
                won = slice(at, at + n_in[at])
                found, most = (my_end[i[won]], lag[won]), score
        if common.size <= _BLOCK or (found is not None and found[0].size > 0.9 * block.size):
            break
    return found


def _line(time: Array, lag: Array) -> tuple[float, float]:
    """Robust line: offset at 0, and drift where it is significant, else 0.

    The drift is the median slope of pairs half of the points apart.
    """
    order = np.argsort(time)
    half = time.size // 2
    early, late = order[:half], order[time.size - half :]
    apart = time[late] - time[early]
    slopes = (lag[late] - lag[early])[apart > 0.0] / apart[apart > 0.0]
    drift = float(np.median(slopes)) if slopes.size >= 10 else 0.0
    moved = abs(drift) * float(np.ptp(time))
    error = 1.86 * _mad(slopes) / np.sqrt(slopes.size) if slopes.size else 0.0  # of the median
    if abs(drift) < _SIGNIFICANT * error or moved < max(_LEAST_S, _mad(lag - drift * time)):
        drift = 0.0
    return float(np.median(lag - drift * time)), drift


def _mad(x: Array) -> float:
    """Median distance from the median."""
    return float(np.median(np.abs(x - np.median(x)))) if x.size else 0.0


def _cluster(rank: Index, key: Index, most: Index, start: Array, end: Array) -> Index:
    """Find the collective that each row belongs to, -1 where nobody overlaps it."""
    collective = np.arange(key.size)
    order = np.lexsort((end, key))
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        present = np.unique(rank[rows]).size
        if not 2 <= present <= most[rows[0]]:
            continue
        room = np.clip(_SHARE * (end[rows] - start[rows]), _WINDOW_S, _FAR_S)
        far = room.max()
        under_way: deque[tuple[int, float, set[int]]] = deque(maxlen=_MOST_OPEN)
        columns = (x.tolist() for x in (rows, rank[rows], start[rows], end[rows], room))
        for row, of, begin, until, near in zip(*columns, strict=True):
            while under_way and until - under_way[0][1] > far:
                under_way.popleft()
            for group in under_way:
                first, its_end, ranks = group
                if begin < its_end and until - its_end <= near and of not in ranks:
                    collective[row] = first
                    ranks.add(of)
                    if len(ranks) == present:
                        under_way.remove(group)
                    break
            else:
                under_way.append((row, until, {of}))
    _, number, size = np.unique(collective, return_inverse=True, return_counts=True)
    found = np.cumsum(size > 1) - 1
    return np.where(size[number] > 1, found[number], -1)
