"""Pipeline schedules as data: played, drawn, and written as CSV.

For every stage an ordered list of actions: the forward (F), the backward (B) or the weight half of
a split backward (W) of one model chunk for one microbatch, as `prism.jobs.scheduleorders` generates
them. Durations of single ops, transfers between stages and
the collectives of data parallelism are not part of it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import NamedTuple

from prism.common.errors import PrismError
from prism.jobs.pipelineshape import Action, Schedule, VirtualStages, play_rows
from prism.jobs.scheduleorders import SCHEDULES, make_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "Slots",
    "action_times",
    "format_schedule",
    "make_schedule",
    "play_schedule",
    "schedule_to_csv",
]


class Slots(NamedTuple):
    """Durations of a chunk's actions, in any one unit."""

    forward: float = 1.0
    backward: float = 2.0
    """A whole backward; its input half takes what the weight half leaves."""
    weight: float = 1.0


def action_times(schedule: Schedule, slots: Slots) -> list[list[float]]:
    """Duration of every action, per stage in program order."""
    schedule = Schedule(schedule)
    rows = []
    for stage, row in enumerate(schedule):
        split = schedule.split_of(stage)
        times = {"F": slots.forward, "B": slots.backward, "W": slots.weight}
        rows.append(
            [
                slots.backward - slots.weight
                if a.kind == "B" and (a.chunk, a.microbatch) in split
                else times[a.kind]
                for a in row
            ]
        )
    return rows


def play_schedule(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
) -> list[list[float]]:
    """Start time of every action when stages run as early as they can.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    forward, backward, weight : float
        Duration of every F, of every whole backward and of a weight half, in any one unit (see
        `Slots`); transfers take no time.

    Returns
    -------
    list of list of float
        Per stage, in program order.

    Raises
    ------
    PrismError
        If the schedule deadlocks; the message names what every stuck stage waits for.
    """
    schedule = Schedule(schedule)
    virtual_stages = schedule.virtual_stages
    lengths = action_times(schedule, Slots(forward, backward, weight))
    ends: dict[tuple[str, int, int], float] = {}
    starts: list[list[float]] = [[] for _ in schedule]
    clock = [0.0] * len(schedule)

    def play(stage: int, heads: list[int]) -> bool:
        action = schedule[stage][heads[stage]]
        inputs = _inputs(action, stage, virtual_stages)
        if any(key not in ends for key in inputs):
            return False
        starts[stage].append(max([clock[stage], *(ends[key] for key in inputs)]))
        clock[stage] = starts[stage][-1] + lengths[stage][heads[stage]]
        virtual = virtual_stages.virtual(stage, action.chunk)
        ends[action.kind, virtual, action.microbatch] = clock[stage]
        return True

    if not play_rows(schedule, play):
        stuck = [s for s, row in enumerate(schedule) if len(starts[s]) < len(row)]
        waits = "; ".join(
            f"stage {s} waits before {_describe(schedule[s][len(starts[s])])}" for s in stuck[:4]
        )
        raise PrismError(
            f"schedule: deadlock: {waits}. An F needs the previous virtual stage's F, a B its own "
            "F and the next virtual stage's B, a W its own B; reorder the rows accordingly"
        )
    return starts


def schedule_to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV, one row per stage.

    Returns
    -------
    str
        Cells ``<virtual stage><kind><microbatch>``, such as ``8F3``; where the virtual stages lie
        is `VirtualStages`. The backward of a split pair is written ``I``. This is the
        compute-only CSV of torch.distributed.pipelining, whose stage index is the virtual stage.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    schedule = Schedule(schedule)
    virtual_stages = schedule.virtual_stages
    for stage, row in enumerate(schedule):
        split = schedule.split_of(stage)
        writer.writerow(
            f"{virtual_stages.virtual(stage, a.chunk)}{action_letter(a, split)}{a.microbatch}"
            for a in row
        )
    return out.getvalue()


def format_schedule(schedule: Schedule, backward_slots: int = 2) -> str:
    """Draw a schedule as text, time to the right and one row per stage.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    backward_slots : int
        Slots a whole backward takes, a forward (and a W) taking one. The default is the usual
        ratio.

    Returns
    -------
    str
        Cells ``F3`` (``F3.1``: microbatch 3 of chunk 1; ``I3``: the input half of a split
        backward), ``-`` while an action goes on, ``.`` while the stage idles; a last line gives
        makespan and idle share.
    """
    schedule, slots = Schedule(schedule), Slots(backward=float(backward_slots))
    starts, lengths = play_schedule(schedule, *slots), action_times(schedule, slots)
    chunked = schedule.n_chunks > 1
    end = max(int(s[-1] + length[-1]) for s, length in zip(starts, lengths, strict=True))
    grid = [["."] * end for _ in schedule]
    letters = set()
    for stage, row in enumerate(schedule):
        split = schedule.split_of(stage)
        for action, start, slot in zip(row, starts[stage], lengths[stage], strict=True):
            letter, length = action_letter(action, split), int(slot)
            letters.add(letter)
            label = f"{letter}{action.microbatch}" + (f".{action.chunk}" if chunked else "")
            grid[stage][int(start) : int(start) + length] = [label] + ["-"] * (length - 1)
    width = max(len(cell) for row_cells in grid for cell in row_cells)
    name = len(str(len(schedule) - 1))
    text = [
        f"stage {stage:>{name}} | " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip()
        for stage, cells in enumerate(grid)
    ]
    idle = 1.0 - sum(map(sum, lengths)) / (end * len(schedule))
    each = {"F": 1, "B": backward_slots, "I": backward_slots - 1, "W": 1}
    shown = ", ".join(f"{letter} {n}" for letter, n in each.items() if letter in letters)
    text.append(f"{end} slots ({shown}), idle {idle:.1%}")
    return "\n".join(text)


def _inputs(action: Action, stage: int, stages: VirtualStages) -> list[tuple[str, int, int]]:
    """Keys (kind, virtual stage, microbatch) of the actions this one reads from."""
    own, microbatch = stages.virtual(stage, action.chunk), action.microbatch
    source = stages.source_of(action, stage)
    inputs = [] if source is None else [(str(action.kind), source, microbatch)]
    if action.kind != "F":
        inputs.append(("F" if action.kind == "B" else "B", own, microbatch))
    return inputs


def action_letter(action: Action, split: Iterable[tuple[int, int]]) -> str:
    """Write the kind of an action: the input half of a split backward is I."""
    return "I" if action.kind == "B" and (action.chunk, action.microbatch) in split else action.kind


def _describe(action: Action) -> str:
    """Name an action in a message."""
    return f"{action.kind} of chunk {action.chunk}, microbatch {action.microbatch}"
