"""A resolved job in a terminal: every value with where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable

from prism.common.text import format_duration
from prism.jobs.job import flatten
from prism.present.answer import Column, Table
from prism.present.views.tables import bold, plain_text

Json = Mapping[str, Any]

DURATION_KEYS = {
    "run.deadline",
    "run.checkpoint.interval",
    "run.evaluation.duration",
    *(f"run.failures.{key}" for key in ("detection", "restart", "repair")),
    *(f"variability.effects.fail_slow.{key}" for key in ("duration", "detection")),
}


def job_view(name: str, values: Json, sources: Mapping[str, str]) -> RenderableType:
    """Lay out a resolved job: every key, its value, and where the value came from."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    block = None
    for key, value in flatten(values):
        if block is not None and key.split(".")[0] != block:
            table.add_section()
            table.add_row("", "", "")
        block = key.split(".")[0]
        text = format_duration(value) if key in DURATION_KEYS and value else plain_text(value)
        table.add_row(key, text, _source(key, sources))
    return Group(bold(name), "", table)


def job_table(title: str, values: Json, sources: Mapping[str, str]) -> Table:
    """Lay out a resolved job: every key, its value, and where the value came from."""
    rows = []
    for key, value in flatten(values):
        text = format_duration(value) if key in DURATION_KEYS and value else plain_text(value)
        rows.append((key, text, _source(key, sources)))
    columns = tuple(Column(title, right=False) for title in ("key", "value", "from"))
    return Table(title, columns, tuple(rows))


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Find where a key, or the nearest key above it, came from."""
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        found = sources.get(".".join(parts[:n]))
        if found is not None:
            return found
    return "default"
