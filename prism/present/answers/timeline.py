"""The answer of a timeline: who decides each step, and what its rows wait for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism import plots
from prism.analyses.timeline import summarize_timeline
from prism.analyses.timelines.waits import CAUSES
from prism.common.text import format_count, format_share
from prism.present.answer import (
    Answer,
    Cell,
    Column,
    Errors,
    Finding,
    Picture,
    Table,
    lines_table,
    share,
)

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

MOST_ROWS = 12
"""Rows of a step that are shown by default, those whose replicas decide first."""
SMALL, SMALL_ON_PATH = 5e-4, 5e-3
"""Shares of a step that are left out below, of waits and of the critical path [1]."""


def timeline_answer(result: xr.Dataset) -> Answer:
    """Make the answer of a timeline."""
    numbers = summarize_timeline(result)
    source = Path(str(numbers["source"])).name
    head = ""
    if "seed" in numbers:  # of a trace nothing is drawn
        head = f", {format_count(numbers['replicates'], 'step replicate')}, seed {numbers['seed']}"
    shown = max(3, MOST_ROWS // len(numbers["steps"]) * 2)
    picture = Picture(
        "timeline", f"Ops of a step of {source} over time", lambda: plots.plot_gantt(result),
        "Ops by kind, waits hatched, the critical path outlined.",
        Errors("none: single steps are shown", "as in the estimate or recording they are from"),
    )  # fmt: skip
    return Answer(
        title="Timeline of a step",
        subject=source,
        head=head,
        question=f"When does every op of a step of {source} run, and what does it wait for?",
        findings=tuple(_decides(step) for step in numbers["steps"]),
        tables=(
            *(table for step in numbers["steps"] for table in _rows(step, shown)),
            *(lines_table("Notes", numbers["notes"]),) * bool(numbers["notes"]),
        ),
        figures=numbers,
        pictures=(picture,),
    )


def _decides(step: Json) -> Finding:
    """Say which rank or stage has most of a step's critical path, and what lies on it."""
    total, by = step["step_time"], step["decided_by"]
    path = sorted(step["critical_path"].items(), key=lambda item: -item[1])
    ops = ", ".join(
        f"{kind} {format_share(s / total, 2)}" for kind, s in path if s >= SMALL * total
    )
    part = format_share(by["share_of_path"], 2)
    text = f"{step['title']}. {part} of its critical path is on {_place(step)}; by kind of op: "
    return Finding("decided_by", f"{text}{ops}.", "answer")


def _place(step: Json) -> str:
    by = step["decided_by"]
    if "rank" in by:
        return f"rank {by['rank']}"
    parts = []
    if any("replica " in row["label"] for row in step["rows"]):
        parts.append(f"replica {by['replica']}")
    if by["stages"] > 1:
        parts.append(f"stage {by['stage']}")
    text = " ".join(parts) or "its only stage"
    more = by["replicas_on_path"] - 1
    return text + (f" (it runs through {format_count(more + 1, 'replica')})" if more > 0 else "")


def _rows(step: Json, shown: int) -> list[Table]:
    """Lay out what a step's rows compute and wait for; details have the rows left out."""
    rows = step["rows"]
    causes = [
        cause for cause in CAUSES
        if any(row["waits"].get(cause, {"share": 0.0})["share"] >= SMALL for row in rows)
    ]  # fmt: skip
    heads = (Column(CAUSES[cause], "waits for") for cause in causes)
    columns = (Column(right=False), Column("computes"), *heads)
    cells = tuple(_row(row, causes) for row in rows)
    title = step["title"].partition(":")[0]
    if len(cells) <= shown:
        return [Table(f"{title}, share of its time", columns, cells)]
    notes = (f"{shown} of {format_count(len(cells), 'row')}: --details lists all",)
    return [
        Table(f"{title}, share of its time", columns, cells[:shown], notes),
        Table(f"{title}, further rows", columns, cells[shown:], details=True),
    ]


def _row(row: Json, causes: list[str]) -> tuple[Cell, ...]:
    name = row["label"] + (f" ({row['role']})" if row["role"] else "")
    waits = [row["waits"].get(cause, {"share": 0.0})["share"] for cause in causes]
    return name, share(row["busy_share"]), *(share(x) if x >= SMALL else None for x in waits)
