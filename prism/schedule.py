"""Pipeline schedules as data: for every stage, an ordered list of actions.

An action is the forward (F), the backward (B) or the weight part of a split backward (W)
of one model chunk for one microbatch. Generated here: GPipe, 1F1B, interleaved 1F1B, and the
sequential order of a job without a pipeline; any other comes from a CSV of actions.
Durations, transfers between stages and the collectives of data parallelism are not part of it.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import Literal, NamedTuple, cast

from prism.errors import PrismError

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One chunk's work for one microbatch on the stage whose list it stands in."""

    kind: Kind
    """F forward, B backward (only its input half where a W follows), W weight gradient."""
    chunk: int
    """Model chunk of the stage, from 0; its virtual stage is ``chunk * n_stages + stage``."""
    microbatch: int
    """Microbatch, from 0."""


Schedule = tuple[tuple[Action, ...], ...]
"""Per stage, its actions in program order."""

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""Schedules that :func:`make_schedule` generates."""

_NOT_MODELLED = {"zb-h1": "1f1b", "zb-v": "interleaved"}
_CELL = re.compile(r"(\d+)(F|B|I|W)(\d+)")
# torch lists communication and (un)sharding too; here they follow from the actions and the job
_IMPLIED = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def make_schedule(name: str, n_stages: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """Generate a schedule.

    Parameters
    ----------
    name : str
        ``gpipe``, ``1f1b`` or ``interleaved``. With one stage all of them are sequential: every
        microbatch runs forward through its chunks and back.
    n_stages, n_microbatches, n_chunks : int
        Pipeline stages (pp_size), microbatches per replica and step, model chunks per stage
        (vpp_size); each >= 1.

    Returns
    -------
    Schedule
        One tuple of actions per stage, complete and free of deadlock.

    Raises
    ------
    PrismError
        If the name is unknown, a count is below one, or the schedule forbids the counts.

    Notes
    -----
    1F1B: stage s of p starts with min(m, p - 1 - s) forwards. Interleaved: chunks advance in
    groups of p microbatches; the warm-up is 2 (p - 1 - s) + (v - 1) p forwards, as in
    Megatron-LM. Interleaved with one chunk is 1F1B.

    References
    ----------
    Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., arXiv:2104.04473, section 2.2;
    Megatron-LM, ``core/pipeline_parallel/schedules.py``.
    """
    _check_counts(name, n_stages, n_microbatches, n_chunks)
    if n_stages == 1:
        return (_sequential(n_microbatches, n_chunks),)
    if name == "interleaved" and n_chunks > 1:
        return tuple(
            _interleaved(stage, n_stages, n_microbatches, n_chunks) for stage in range(n_stages)
        )
    if name == "gpipe":
        warmup = [n_microbatches] * n_stages
    else:
        warmup = [min(n_microbatches, n_stages - 1 - stage) for stage in range(n_stages)]
    forward = [Action("F", 0, microbatch) for microbatch in range(n_microbatches)]
    backward = [Action("B", 0, microbatch) for microbatch in range(n_microbatches)]
    return tuple(_one_forward_one_backward(forward, backward, n) for n in warmup)


def check_schedule(schedule: Schedule, source: str = "schedule") -> None:
    """Check that a schedule does everything once and can run to its end.

    Parameters
    ----------
    schedule : Schedule
        Every stage must hold F and B of every (chunk, microbatch), and W of all or none.
    source : str
        Name for messages.

    Raises
    ------
    PrismError
        If an action is missing or repeated, or if the stages wait for each other in a circle.
    """
    if not schedule or not any(schedule):
        raise PrismError(f"{source}: no actions; expected one row of actions per stage")
    n_chunks = 1 + max(action.chunk for row in schedule for action in row)
    n_microbatches = 1 + max(action.microbatch for row in schedule for action in row)
    kinds = sorted({"F", "B"} | {action.kind for row in schedule for action in row})
    expected = (
        f"expected {', '.join(kinds)} of {n_chunks} chunks x {n_microbatches} microbatches, each "
        f"once: {len(kinds) * n_chunks * n_microbatches} actions a stage"
    )
    for stage, row in enumerate(schedule):
        action, count = Counter(row).most_common(1)[0] if row else (None, 0)
        if action is not None and count > 1:
            raise PrismError(f"{source}: stage {stage} repeats {_describe(action)}; {expected}")
        if len(row) != len(kinds) * n_chunks * n_microbatches:
            present = set(row)
            missing = next(
                action
                for microbatch in range(n_microbatches)
                for chunk in range(n_chunks)
                for kind in kinds
                if (action := Action(cast(Kind, kind), chunk, microbatch)) not in present
            )
            raise PrismError(f"{source}: stage {stage} lacks {_describe(missing)}; {expected}")
    play_schedule(schedule, source=source)


def play_schedule(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    source: str = "schedule",
) -> list[list[float]]:
    """Start time of every action when stages run as early as they can.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    forward, backward, weight : float
        Duration of every F, B and W, in any one unit; transfers take no time.
    source : str
        Name for messages.

    Returns
    -------
    list of list of float
        Per stage, in program order.

    Raises
    ------
    PrismError
        If the schedule deadlocks; the message names what every stuck stage waits for.
    """
    n_stages = len(schedule)
    n_chunks = 1 + max(action.chunk for row in schedule for action in row)
    duration = {"F": forward, "B": backward, "W": weight}
    ends: dict[tuple[str, int, int], float] = {}
    starts: list[list[float]] = [[] for _ in schedule]
    clock = [0.0] * n_stages
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(schedule):
            while len(starts[stage]) < len(row):
                action = row[len(starts[stage])]
                inputs = _inputs(action, stage, n_stages, n_chunks)
                if any(key not in ends for key in inputs):
                    break
                start = max([clock[stage], *(ends[key] for key in inputs)])
                starts[stage].append(start)
                clock[stage] = start + duration[action.kind]
                virtual = action.chunk * n_stages + stage
                ends[action.kind, virtual, action.microbatch] = clock[stage]
                moved = True
    stuck = [s for s, row in enumerate(schedule) if len(starts[s]) < len(row)]
    if stuck:
        waits = "; ".join(
            f"stage {s} waits before {_describe(schedule[s][len(starts[s])])}" for s in stuck[:4]
        )
        raise PrismError(
            f"{source}: deadlock: {waits}. An F needs the previous virtual stage's F, a B its own "
            "F and the next virtual stage's B, a W its own B; reorder the rows accordingly"
        )
    return starts


def schedule_to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV, one row per stage.

    Returns
    -------
    str
        Cells ``<virtual stage><kind><microbatch>``, such as ``8F3``; the virtual stage is
        ``chunk * n_stages + stage``. The backward of a split pair is written ``I``.
        This is the compute-only CSV of torch.distributed.pipelining, whose stage index is the
        virtual stage in the looped placement.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    n_stages = len(schedule)
    for stage, row in enumerate(schedule):
        split = {(action.chunk, action.microbatch) for action in row if action.kind == "W"}
        cells = []
        for kind, chunk, microbatch in row:
            letter = "I" if kind == "B" and (chunk, microbatch) in split else kind
            cells.append(f"{chunk * n_stages + stage}{letter}{microbatch}")
        writer.writerow(cells)
    return out.getvalue()


def schedule_from_csv(text: str, source: str = "schedule.csv") -> Schedule:
    """Read a schedule from CSV and check it.

    Parameters
    ----------
    text : str
        One row per stage, cells as :func:`schedule_to_csv` writes them. Empty cells (idle
        slots), lines that start with ``#`` and torch's communication cells (``0SEND_F1``,
        ``2UNSHARD``, ...) carry no information here and are passed over.
    source : str
        Name of the file, for messages.

    Raises
    ------
    PrismError
        If a cell is not an action, a virtual stage stands in the wrong row, or the schedule is
        incomplete or deadlocks.
    """
    lines = [
        (number, line)
        for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    rows = [
        tuple(
            action
            for column, cell in enumerate(next(csv.reader([line])), start=1)
            if (action := _parse_cell(cell.strip(), stage, len(lines), source, number, column))
        )
        for stage, (number, line) in enumerate(lines)
    ]
    schedule = tuple(rows)
    check_schedule(schedule, source)
    return schedule


def format_schedule(schedule: Schedule, backward_slots: int = 2) -> str:
    """Draw a schedule as text, time to the right and one row per stage.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    backward_slots : int
        Slots a backward takes, a forward (and a W) taking one. The default is the usual ratio.

    Returns
    -------
    str
        Cells ``F3`` (``F3.1``: microbatch 3 of chunk 1), ``-`` while an action goes on, ``.``
        while the stage idles; a last line gives makespan and idle share.
    """
    starts = play_schedule(schedule, backward=float(backward_slots))
    chunked = any(action.chunk for row in schedule for action in row)
    slots = {"F": 1, "B": backward_slots, "W": 1}
    end = max(int(s[-1]) + slots[row[-1].kind] for s, row in zip(starts, schedule, strict=True))
    grid = [["."] * end for _ in schedule]
    busy = 0
    for stage, row in enumerate(schedule):
        for action, start in zip(row, starts[stage], strict=True):
            label = f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if chunked else "")
            length = slots[action.kind]
            grid[stage][int(start) : int(start) + length] = [label] + ["-"] * (length - 1)
            busy += length
    width = max(len(cell) for row_cells in grid for cell in row_cells)
    name = len(str(len(schedule) - 1))
    text = [
        f"stage {stage:>{name}} | " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip()
        for stage, cells in enumerate(grid)
    ]
    idle = 1.0 - busy / (end * len(schedule))
    text.append(f"{end} slots (F 1, B {backward_slots}), idle {idle:.1%}")
    return "\n".join(text)


def _check_counts(name: str, n_stages: int, n_microbatches: int, n_chunks: int) -> None:
    """Refuse counts that the schedule cannot have."""
    if name in _NOT_MODELLED:
        raise PrismError(
            f"schedule {name} is not modelled yet; nearest supported: {_NOT_MODELLED[name]}"
        )
    if name not in SCHEDULES:
        raise PrismError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    counts = {"stages": n_stages, "microbatches": n_microbatches, "chunks": n_chunks}
    for what, count in counts.items():
        if count < 1:
            raise PrismError(f"schedule {name}: {what} = {count}; expected at least 1")
    if n_stages == 1 or n_chunks == 1:
        return
    if name != "interleaved":
        raise PrismError(
            f"schedule {name} has one chunk per stage, got {n_chunks}; use interleaved, or vpp: 1"
        )
    if n_microbatches % n_stages:
        below = n_microbatches // n_stages * n_stages
        valid = f"{below} or {below + n_stages}" if below else f"{n_stages}"
        raise PrismError(
            f"schedule interleaved: microbatches = {n_microbatches} is not a multiple of the "
            f"{n_stages} stages; use {valid} microbatches, or 1f1b with vpp: 1"
        )


def _sequential(n_microbatches: int, n_chunks: int) -> tuple[Action, ...]:
    """Every microbatch forward through the chunks and back, one after the other."""
    actions: list[Action] = []
    for microbatch in range(n_microbatches):
        actions += [Action("F", chunk, microbatch) for chunk in range(n_chunks)]
        actions += [Action("B", chunk, microbatch) for chunk in reversed(range(n_chunks))]
    return tuple(actions)


def _interleaved(
    stage: int, n_stages: int, n_microbatches: int, n_chunks: int
) -> tuple[Action, ...]:
    """One stage of Megatron's interleaved 1F1B; microbatches are a multiple of stages."""
    group = n_stages * n_chunks
    forward: list[Action] = []
    backward: list[Action] = []
    for k in range(n_microbatches * n_chunks):
        chunk = k % group // n_stages
        microbatch = k // group * n_stages + k % n_stages
        forward.append(Action("F", chunk, microbatch))
        backward.append(Action("B", n_chunks - 1 - chunk, microbatch))
    warmup = 2 * (n_stages - 1 - stage) + (n_chunks - 1) * n_stages
    return _one_forward_one_backward(forward, backward, min(warmup, len(forward)))


def _one_forward_one_backward(
    forward: list[Action], backward: list[Action], n_warmup: int
) -> tuple[Action, ...]:
    """Warm-up forwards, then pairs of one forward and one backward, then what is left."""
    actions = forward[:n_warmup]
    steady = len(forward) - n_warmup
    for k in range(steady):
        actions += [forward[n_warmup + k], backward[k]]
    return tuple(actions + backward[steady:])


def _inputs(action: Action, stage: int, n_stages: int, n_chunks: int) -> list[tuple[str, int, int]]:
    """Keys (kind, virtual stage, microbatch) of the actions this one reads from."""
    virtual = action.chunk * n_stages + stage
    if action.kind == "F":
        return [("F", virtual - 1, action.microbatch)] if virtual else []
    if action.kind == "W":
        return [("B", virtual, action.microbatch)]
    inputs = [("F", virtual, action.microbatch)]
    if virtual + 1 < n_stages * n_chunks:
        inputs.append(("B", virtual + 1, action.microbatch))
    return inputs


def _describe(action: Action) -> str:
    """Name an action in a message."""
    return f"{action.kind} of chunk {action.chunk}, microbatch {action.microbatch}"


def _parse_cell(
    cell: str, stage: int, n_stages: int, source: str, line: int, column: int
) -> Action | None:
    """One CSV cell as an action; None for cells without information."""
    if not cell or _IMPLIED.fullmatch(cell):
        return None
    where = f"{source}:{line}: column {column}"
    match = _CELL.fullmatch(cell)
    if match is None:
        raise PrismError(
            f"{where}: {cell!r} is not an action; expected <virtual stage><F, B, I or W>"
            "<microbatch>, such as 0F3"
        )
    virtual, microbatch = int(match[1]), int(match[3])
    if max(virtual, microbatch) > 1_000_000:
        raise PrismError(f"{where}: {cell!r} is out of range; expected indices below 1000000")
    if virtual % n_stages != stage:
        raise PrismError(
            f"{where}: virtual stage {virtual} stands in row {stage} of {n_stages}; only the "
            f"looped placement (row = virtual stage modulo {n_stages}) is modelled: move it to "
            f"row {virtual % n_stages}"
        )
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "B", "W": "W"}
    return Action(kinds[match[2]], virtual // n_stages, microbatch)
