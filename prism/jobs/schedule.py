"""Pipeline schedules as data: played, drawn, and written as CSV.

Transfers between stages and the collectives of data parallelism are not part of it.
"""

from __future__ import annotations

from typing import NamedTuple

from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
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
    backward: float = 2.0  # a whole backward; its input half takes what the weight half leaves
    weight: float = 1.0


def action_times(schedule: Schedule, slots: Slots) -> list[list[float]]:
    """Duration of every action, per stage in program order."""
    forward, backward, weight = slots
    times = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    return [[times[letter] for letter in row] for row in schedule.letters]


def play_schedule(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0
) -> list[list[float]]:
    """Start time of every action when stages run as early as they can, per stage in program order.

    Durations are those of `Slots`; transfers take no time. A deadlock is an error that names what
    every stuck stage waits for.
    """
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
        heads = [(s, schedule[s][len(starts[s])]) for s in stuck[:4]]
        waits = "; ".join(
            f"stage {s} waits before {a.kind} of chunk {a.chunk}, microbatch {a.microbatch}"
            for s, a in heads
        )
        raise PrismError(
            f"schedule: deadlock: {waits}. An F needs the previous virtual stage's F, a B its own "
            "F and the next virtual stage's B, a W its own B; reorder the rows accordingly"
        )
    return starts


def schedule_to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV, one row per stage, cells ``<virtual stage><kind><microbatch>``.

    This is the compute-only CSV of torch.distributed.pipelining, whose stage index is the virtual
    stage; the input half of a split backward is ``I``.
    """
    virtual = schedule.virtual_stages.virtual
    text = ""
    for stage, rows in enumerate(zip(schedule, schedule.letters, strict=True)):
        cells = (f"{virtual(stage, a.chunk)}{k}{a.microbatch}" for a, k in zip(*rows, strict=True))
        text += ",".join(cells) + "\n"
    return text


def format_schedule(schedule: Schedule, columns: int | None = None) -> str:
    """Draw a schedule as text, time to the right and one row per stage.

    Where it is wider than `columns`, the rows go on below, behind a blank line.

    Cells are ``F3`` (``F3.1``: microbatch 3 of chunk 1; ``I3``: the input half of a split
    backward), ``-`` while an action goes on, ``.`` while the stage idles; a last line gives
    makespan and idle share.
    """
    slots = Slots()
    starts, lengths = play_schedule(schedule, *slots), action_times(schedule, slots)
    chunked = schedule.n_chunks > 1
    end = max(int(s[-1] + length[-1]) for s, length in zip(starts, lengths, strict=True))
    grid = [["."] * end for _ in schedule]
    letters = schedule.letters
    for row, cells in enumerate(grid):
        actions = zip(schedule[row], letters[row], starts[row], lengths[row], strict=True)
        for action, letter, start, length in actions:
            label = f"{letter}{action.microbatch}" + (f".{action.chunk}" if chunked else "")
            cells[int(start) : int(start + length)] = [label] + ["-"] * (int(length) - 1)
    width = max(len(cell) for cells in grid for cell in cells)
    name = len(str(len(schedule) - 1))
    fit = end if columns is None else max(1, (columns - len("stage  | ") - name) // (width + 1))
    text = []
    for first in range(0, end, fit):
        text += [""] * (first > 0)
        for stage, cells in enumerate(grid):
            shown = " ".join(f"{cell:<{width}}" for cell in cells[first : first + fit])
            text.append(f"stage {stage:>{name}} | {shown.rstrip()}")
    idle = 1.0 - sum(map(sum, lengths)) / (end * len(schedule))
    each = {"F": 1, "B": 2, "I": 1, "W": 1}
    used = {letter for row in letters for letter in row}
    shown = ", ".join(f"{letter} {n}" for letter, n in each.items() if letter in used)
    text.append(f"{format_count(end, 'slot')} ({shown}), idle {format_share(idle)}")
    return "\n".join(text)


def _inputs(action: Action, stage: int, stages: VirtualStages) -> list[tuple[str, int, int]]:
    """Keys (kind, virtual stage, microbatch) of the actions this one reads from."""
    own, microbatch = stages.virtual(stage, action.chunk), action.microbatch
    source = stages.source_of(action, stage)
    inputs = [] if source is None else [(str(action.kind), source, microbatch)]
    if action.kind != "F":
        inputs.append(("F" if action.kind == "B" else "B", own, microbatch))
    return inputs
