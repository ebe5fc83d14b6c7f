"""The answer of a timeline: who decides each step, and what its rows wait for."""

from __future__ import annotations

from pathlib import Path

from prism.analyses.timeline import Timeline
from prism.analyses.timelines.waits import CAUSES
from prism.common.text import format_count, format_share
from prism.present.answer import Answer
from prism.present.cells import Cell, Column, Json, Table, lines_table, share
from prism.present.tables import Rule, find

MOST_ROWS = 12  # rows of a step that are shown by default, those whose replicas decide first
MOST_WAITS = 20  # waits of a step that are listed by whom they are for, the longest
SMALL = 5e-4  # shares of a step that are left out below [1]
NONE = {"share": 0.0}  # wait of a row that has none of a cause


def timeline_answer(result: Timeline) -> Answer:
    """Make the answer of a timeline."""
    numbers = result.figures()
    source, steps = Path(str(numbers["source"])).name, numbers["steps"]
    head = ""
    if "seed" in numbers:  # of a trace nothing is drawn
        head = f", {format_count(numbers['replicates'], 'step replicate')}, seed {numbers['seed']}"
    shown = max(3, MOST_ROWS // len(steps) * 2)
    return Answer(
        title="Timeline of a step",
        subject=source,
        head=head,
        question=f"When does every op of a step of {source} run, and what does it wait for?",
        findings=tuple(found for step in steps for found in find(step, RULES)),
        tables=(
            *(table for step in steps for table in (*_rows(step, shown), _waits(step))),
            *(lines_table("Notes", numbers["notes"]),) * bool(numbers["notes"]),
        ),
        figures=numbers,
    )


def _decides(step: Json) -> dict[str, Cell]:
    """Say which rank or stage has most of a step's critical path, and what lies on it."""
    path = sorted(step["critical_path"].items(), key=lambda item: -item[1])
    total, least = step["step_time"], SMALL * step["step_time"]
    return {
        "title": step["title"], "place": _place(step),
        "part": format_share(step["decided_by"]["share_of_path"], 2),
        "ops": ", ".join(f"{kind} {format_share(s / total, 2)}" for kind, s in path if s >= least),
    }  # fmt: skip


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


RULES = (
    Rule("decided_by", "answer", lambda step: True,
         "{title}. {part} of its critical path is on {place}; by kind of op: {ops}.", _decides,
         capital=False),
)  # fmt: skip
"""What is found of each step."""


def _rows(step: Json, shown: int) -> list[Table]:
    """Lay out what a step's rows compute and wait for; details have the rows left out."""
    causes = [
        cause for cause in CAUSES
        if any(row["waits"].get(cause, NONE)["share"] >= SMALL for row in step["rows"])
    ]  # fmt: skip
    heads = (Column(CAUSES[cause][0], "waits for") for cause in causes)
    columns = (Column(right=False), Column("computes"), *heads)
    cells: list[tuple[Cell, ...]] = []
    for row in step["rows"]:
        waits = (row["waits"].get(cause, NONE)["share"] for cause in causes)
        name = row["label"] + (f" ({row['role']})" if row["role"] else "")
        shares = (share(x) if x >= SMALL else None for x in waits)
        cells.append((name, share(row["busy_share"]), *shares))
    title, few, rest = _title(step), tuple(cells[:shown]), tuple(cells[shown:])
    if not rest:
        return [Table(f"{title}, share of its time", columns, few)]
    notes = (f"{shown} of {format_count(len(cells), 'row')}: --details lists all",)
    return [
        Table(f"{title}, share of its time", columns, few, notes),
        Table(f"{title}, further rows", columns, rest, details=True),
    ]


def _waits(step: Json) -> Table:
    """List who waits longest for whom."""
    longest = sorted(step["waits"], key=lambda wait: -wait["seconds"])[:MOST_WAITS]
    columns = (Column("who", right=False), Column("waits for", right=False),
               Column("cause", right=False), Column("share of the step"))  # fmt: skip
    cells = tuple((x["row"], x["for"], CAUSES[x["cause"]][0], share(x["share"])) for x in longest)
    left = len(step["waits"]) - len(longest)
    notes = (f"{format_count(left, 'shorter wait')} in summary.json",) if left else ()
    return Table(f"{_title(step)}, longest waits", columns, cells, notes, details=True)


def _title(step: Json) -> str:
    return str(step["title"]).partition(":")[0]
