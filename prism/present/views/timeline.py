"""What `prism timeline` prints: each step with who decided it, and what its rows waited for.

Built from the mapping that the JSON is made of, as in `prism.present.views`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from prism.analyses.timelines.waits import CAUSES
from prism.common.text import format_count, format_share
from prism.present.views.tables import lines_view, rows_view, table_view

Json = Mapping[str, Any]

MOST_LINES = 24
"""Rows of a step that are printed; the JSON has all."""


def timeline_view(summary: Json) -> RenderableType:
    """Lay out a timeline's summary.

    Parameters
    ----------
    summary : mapping
        What ``summarize_timeline`` returns.
    """
    parts: list[RenderableType] = []
    if "seed" in summary:  # of a trace nothing is drawn
        replicates = format_count(summary["replicates"])
        parts += [f"{summary['source']}, {replicates} step replicates, seed {summary['seed']}", ""]
    for step in summary["steps"]:
        parts += [Text(step["title"], style="bold"), "", rows_view(_about(step)), ""]
        parts += [_rows(step), ""]
    shown = f"{format_count(summary['events'])} events, {format_count(summary['flows'])} messages"
    parts += [shown, *lines_view("Notes", summary["notes"])]
    return Group(*parts)


def _about(step: Json) -> list[tuple[str, str]]:
    """Who decided a step, and what lies on its critical path."""
    total = step["step_time"]
    path = sorted(step["critical_path"].items(), key=lambda item: -item[1])
    told = ", ".join(
        f"{kind} {format_share(s / total, 2)}" for kind, s in path if s >= 5e-4 * total
    )
    several = any("replica " in row["label"] for row in step["rows"])
    return [("decided by", _decided(step["decided_by"], several)), ("critical path", told)]


def _decided(by: Json, n_replicas: bool) -> str:
    """Say which rank or stage has most of the critical path."""
    share = f"with {format_share(by['share_of_path'], 2)} of the step on the critical path"
    if "rank" in by:
        return f"rank {by['rank']}, {share}"
    place = f"stage {by['stage']}, " if by["stages"] > 1 else ""
    if not n_replicas:
        return (place or "its only stage, ") + share
    more = by["replicas_on_path"] - 1
    others = f", which runs through {more:,} more replica{'s' if more > 1 else ''}" if more else ""
    return f"replica {by['replica']}, {place}{share}{others}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def _rows(step: Json) -> RenderableType:
    """Seconds of a step's rows: computing, and waiting by cause."""
    rows = step["rows"]
    causes = [c for c in CAUSES if any(c in row["waits"] for row in rows)]
    heads = {"transfer": "transfers", "communication": "collectives", "replica": "other replicas",
             "rank": "other ranks", "group": "its group"}  # fmt: skip
    table = []
    for row in rows[:MOST_LINES]:
        line = {"": row["label"] + (f" ({row['role']})" if row["role"] else "")}
        line["computes"] = _percent(row["busy_share"])
        for cause in causes:
            share = row["waits"].get(cause, {"share": 0.0})["share"]
            line[heads.get(cause, cause)] = _percent(share) if share >= 5e-4 else "-"
        table.append(line)
    title = "Share of the step that each row computes, and waits for what"
    if len(rows) > MOST_LINES:
        title += f" ({MOST_LINES} of {len(rows)} rows)"
    return table_view(title, table, [key for key in table[0] if key])
