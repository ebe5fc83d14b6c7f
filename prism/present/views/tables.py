"""Tables and lists of a terminal's answers, built from plain mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]


def table_view(title: str, rows: Sequence[Json], right: Sequence[str] = ()) -> RenderableType:
    """Lay out records, one row each, with the keys of the first as the head."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for key in rows[0] if rows else ():
        name = key.replace("_", " ")
        table.add_column(name, justify="right" if key in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else plain_text(value) for value in row.values()))
    return Group(bold(title), "", table)


def bold(title: str, rest: str = "") -> Text:
    """Write a title, and what follows it; nothing in either is markup."""
    return Text.assemble((title, "bold"), rest)


def rows_view(rows: Sequence[tuple[str, str]]) -> Table:
    """Lay out label and text, side by side."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    for label, text in rows:
        table.add_row(label, text)
    return table


def lines_view(title: str, lines: Sequence[str] | None) -> list[RenderableType]:
    """List remarks under a title; nothing where there are none."""
    return ["", bold(title), *(Text(f"- {line}") for line in lines)] if lines else []


def plain_text(value: Any) -> str:
    """Write a value as it would stand in a job file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(plain_text(item) for item in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
