"""Steps as periods of the device: from the end of one step's work to the end of the next one's.

The host may run ahead by more than a step, so its marks say which step an activity is of and not
when that step takes place. A step whose begin is not known, as nothing of the step before was
recorded, has no period; neither has one that the recording broke off.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.fft import fft, ifft, next_fast_len

from prism.common.arrays import Array, Flags, Index
from prism.traces.kineto.rank import RankTrace, issued


def mark_by_rhythm(rank: RankTrace) -> None:
    """Give a rank without marks the steps in which its kernels repeat."""
    table = rank.table
    when = issued(table)
    order = np.lexsort((table["start"], when))
    kernel = table.groupby(["name", "stream"], sort=False).ngroup().to_numpy(np.int64)
    is_optimizer = (table["op_kind"] == "optimizer").to_numpy()
    ends = _ends_of_steps(kernel[order], is_optimizer[order])
    if ends.size < 2:
        return
    number = np.searchsorted(ends, np.argsort(order))
    table["step"] = np.where(number < ends.size, number, -1)
    bounds = np.r_[when[order], np.inf][np.r_[0, ends + 1]]
    bounds[0] = max(bounds[0], float(table["start"].min()))
    rank.steps = [(k, bounds[k], bounds[k + 1]) for k in range(ends.size)]
    rank.marks = "kernels"


_TRIED = 100  # distances that are looked at more closely

_ALIKE = 0.8
"""Share of the activities that are the same one period later: 1 in three real traces, whose layers
reach .22 to .64, and .90 or .81 where 5 or 10 % of each step's kernels are others."""


def _ends_of_steps(kernel: Index, optimizer: Flags) -> Index:
    """Find the last activity of every step in the order of launch; empty where nothing repeats.

    `kernel` numbers them from 0 [activity]; a step ends after the last activity of an optimizer.
    """
    period = _period(kernel)
    rows = np.flatnonzero(optimizer)
    # shorter stretches lie between the parts of one optimizer's work
    ends = rows[np.r_[np.diff(rows) > period // 2, True]] if rows.size else rows
    if not period or ends.size > 1:
        return ends if period else rows[:0]
    return _once_a_period(kernel, period)


def _period(kernel: Index) -> int:
    """Find the shortest distance at which nearly all activities are the same; 0: none."""
    if kernel.max(initial=0) == 0:
        return 0
    half = kernel.size // 2
    # a direction by chance for each kernel: their autocorrelation is the share that is the same
    directions = np.random.default_rng(0).uniform(0.0, 2.0 * np.pi, kernel.max(initial=0) + 1)
    spectrum = fft(np.exp(1j * directions[kernel]), next_fast_len(2 * kernel.size))
    alike = ifft(np.abs(spectrum) ** 2).real[1 : half + 1] / (kernel.size - np.arange(1, half + 1))
    near = np.flatnonzero(alike > alike.max(initial=0.0) - 0.05)[:_TRIED] + 1
    share = np.array([(kernel[lag:] == kernel[:-lag]).mean() for lag in near.tolist()])
    if share.max(initial=0.0) < _ALIKE:
        return 0
    return int(near[np.argmax(share >= share.max() - 0.01)])


def _once_a_period(kernel: Index, period: int) -> Index:
    """Activities before the kernel that comes most evenly once a period."""
    counts = np.bincount(kernel)
    evenly: dict[float, Index] = {}
    for k in np.flatnonzero(np.abs(counts - kernel.size / period) <= 1.0):
        rows = np.flatnonzero(kernel == k)
        if rows.size > 1:
            evenly.setdefault(float(np.abs(np.diff(rows) - period).max()), rows)
    rows = evenly[min(evenly)] if evenly else np.zeros(0, np.int64)
    return rows[rows > 0] - 1


def number_alike(ranks: list[RankTrace], starts: Array) -> None:
    """Count steps whose marks do not, as ranks may begin to record in different ones.

    Ranks wait for each other, so their ends of the same steps differ by their clocks alone.
    """
    counted = [i for i, rank in enumerate(ranks) if rank.marks in ("optimizer", "kernels")]
    ends = [
        (starts[i] + 1e-6 * ranks[i].end.groupby(ranks[i].table["step"]).max().loc[0:]).to_numpy()
        for i in counted
    ]
    ahead = [_shift(ends[0], of) for of in ends]
    for i, shift in zip(counted, ahead, strict=True):
        step, shift = ranks[i].table["step"], shift - min(ahead)
        ranks[i].table["step"] = step.where(step < 0, step + shift)
        ranks[i].steps = [(number + shift, a, b) for number, a, b in ranks[i].steps]


def _shift(a: Array, b: Array) -> int:
    """By how many steps `b` begins after `a`; where their ends do not tell, by the clocks."""
    if min(a.size, b.size) < 2:
        return 0
    by_clock = round((b[0] - a[0]) / max(float(np.median(np.diff(a))), _RESOLUTION_S))
    least = 1 + min(a.size, b.size) // 2  # of few steps any would agree
    costs = {}
    for shift in range(least - b.size, a.size - least + 1):
        first, second = a[max(0, shift) :], b[max(0, -shift) :]
        n = min(first.size, second.size)
        costs[shift] = max(float(np.ptp(second[:n] - first[:n])), _RESOLUTION_S)
    best = min(costs, key=lambda shift: (costs[shift], abs(shift - by_clock)))
    return by_clock if costs.get(by_clock, np.inf) < _CLEARLY * costs[best] else best


_RESOLUTION_S = 5e-6  # ends that agree as well do not tell
_CLEARLY = 3.0
"""What ranks' ends tell counts against their clocks where they agree this many times better."""


def periods_of(ops: pd.DataFrame, notes: list[str]) -> list[tuple[int, float, float]]:
    """Find number, begin and end [s] of each step of which both are known; the only one's span.

    What is unfinished becomes step -1; the notes say what has no period.
    """
    device = ops[ops["op_kind"] != "launch_gap"]
    end = device["start"] + device["duration"]
    table = pd.DataFrame({
        "rank": device["rank"], "step": device["step"], "start": device["start"], "end": end,
        "name": device["name"].astype(str) + " " + device["stream"].astype(str),
    })  # fmt: skip
    inside = table[table["step"] >= 0]
    if inside.empty:
        return []
    unfinished = _unfinished(inside)
    if unfinished is not None:
        ops.loc[ops["step"] == unfinished, "step"] = -1
        inside = inside[inside["step"] != unfinished]
        notes.append(f"step {unfinished} left out: the recording ends before it does")
    n_ranks = table["rank"].nunique()
    of_step = inside.groupby("step").agg({"end": "max", "start": "min", "rank": "nunique"})
    of_step = of_step[of_step["rank"] == n_ranks]
    numbers, ends = of_step.index.tolist(), of_step["end"].tolist()
    if not numbers:
        return []
    known = dict(zip(numbers, ends, strict=True))
    before = _end_before(table, numbers[0], inside)
    if before is not None:
        known[numbers[0] - 1] = before
    found = [(k, known[k - 1], known[k]) for k in numbers if known.get(k - 1, np.inf) < known[k]]
    if not found and len(numbers) == 1:
        notes.append(
            "one step: its time is from the first start to the last end of its device activities"
        )
        return [(numbers[0], float(of_step["start"].iloc[0]), ends[0])]
    lost = [k for k in numbers if k not in {row[0] for row in found}]
    if lost:
        shown = ", ".join(map(str, lost[:5])) + (", ..." if len(lost) > 5 else "")
        which = "step" if len(lost) == 1 else "steps"
        notes.append(
            f"{which} {shown} without a period, left out: a step lasts from the end of the one "
            "before, which was not recorded"
        )
    return found


def _unfinished(inside: pd.DataFrame) -> int | None:
    """Find the last step if what ends all the others is missing from it."""
    in_order = inside.sort_values("end", kind="stable")
    last = in_order.groupby(["rank", "step"])["name"].last().unstack("step")
    number = last.columns[-1]
    others = last.drop(columns=number)
    if others.shape[1] < 2:
        return None
    for rank, names in others.iterrows():
        if names.dropna().nunique() != 1:
            continue
        ending = inside[(inside["rank"] == rank) & (inside["name"] == names.dropna().iloc[0])]
        counts = ending.groupby("step").size()
        if counts.get(number, 0) < counts.drop(number, errors="ignore").min():
            return int(number)
    return None


def _end_before(table: pd.DataFrame, first: int, inside: pd.DataFrame) -> float | None:
    """Find when the step before the first one ended, if what ends that one ran before it, too."""
    ends = []
    for rank, rows in inside[inside["step"] == first].groupby("rank"):
        at, final = rows["start"].min(), rows.loc[rows["end"].idxmax(), "name"]
        earlier = table[(table["rank"] == rank) & (table["step"] < 0) & (table["start"] < at)]
        if earlier.empty or earlier.loc[earlier["end"].idxmax(), "name"] != final:
            return None
        ends.append(float(earlier["end"].max()))
    return max(ends)
