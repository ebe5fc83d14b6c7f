"""Steps as periods of the device: from the end of one step's work to the end of the next one's.

The host may run ahead by more than a step, so its marks say which step an activity is of and not
when that step takes place. A step whose begin is not known, as nothing of the step before was
recorded, has no period; neither has one that the recording broke off.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.traces.kineto.rank import RankTrace, issued
from prism.traces.kineto.rhythm import ends_of_steps


def mark_by_rhythm(rank: RankTrace) -> None:
    """Give a rank without marks the steps in which its kernels repeat."""
    table = rank.table
    when = issued(table)
    order = np.lexsort((table["start"], when))
    kernel = table.groupby(["name", "stream"], sort=False).ngroup().to_numpy(np.int64)
    is_optimizer = (table["op_kind"] == "optimizer").to_numpy()
    ends = ends_of_steps(kernel[order], is_optimizer[order])
    if ends.size < 2:
        return
    number = np.searchsorted(ends, np.argsort(order))
    table["step"] = np.where(number < ends.size, number, -1)
    bounds = when[order][np.r_[0, np.minimum(ends + 1, order.size - 1)]]
    bounds = np.where(np.isfinite(bounds), bounds, float(table["start"].min()))
    rank.steps = [(k, bounds[k], bounds[k + 1]) for k in range(ends.size)]
    rank.marks = "kernels"


def number_alike(ranks: list[RankTrace], starts: NDArray[np.float64]) -> None:
    """Count steps whose marks do not by time, as ranks may begin to record in different ones."""
    counted = [i for i, rank in enumerate(ranks) if rank.marks in ("optimizer", "kernels")]
    ends = {
        i: starts[i] + 1e-6 * ranks[i].end.groupby(ranks[i].table["step"]).max().loc[0:]
        for i in counted
    }
    period = np.median([np.median(np.diff(of)) for of in ends.values() if len(of) > 1] or [0.0])
    if len(counted) < 2 or period <= 0.0:
        return
    first = min(float(of.iloc[0]) for of in ends.values() if len(of))
    for i, of in ends.items():
        ahead = round((float(of.iloc[0]) - first) / period) if len(of) else 0
        step = ranks[i].table["step"]
        ranks[i].table["step"] = step.where(step < 0, step + ahead)
        ranks[i].steps = [(number + ahead, a, b) for number, a, b in ranks[i].steps]


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
