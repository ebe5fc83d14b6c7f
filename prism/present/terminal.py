"""An answer in a terminal: what was found, tables, assumptions; a screen of it unless all is asked.

Nothing in a name is markup.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from prism.common.text import format_duration
from prism.present.answer import Answer, Cell, Column, Table, words

WIDTH = 110
"""Widest line of running text [columns]."""
WIDEST = 10_000
"""More than any table has [columns]."""
SPACE = "\N{NO-BREAK SPACE}"


def render(answer: Answer, details: bool = False) -> RenderableType:
    """Lay out an answer; tables that are details are left out and counted unless asked for."""
    parts: list[RenderableType] = [Text.assemble((answer.subject, "bold"), answer.head)]
    if answer.findings:
        parts += ["", *(_Line(f"- {found.text}") for found in answer.findings)]
    hidden = []
    for table in answer.tables:
        if table.details and not details:
            hidden.append(table.title)
            continue
        parts += ["", *render_table(table)]
    if answer.assumptions:
        parts += ["", Text("Assumptions", style="bold")]
        parts += [_Line(f"- {text}") for text in answer.assumptions]
    end = [f"--details adds: {', '.join(hidden)}"] if hidden else []
    if answer.figures.get("wall_seconds") is not None:
        end.append(f"elapsed {format_duration(answer.figures['wall_seconds'], 0.1)}")
    if end:
        parts += ["", _Line("; ".join(end))]
    return Group(*parts)


def render_table(table: Table) -> list[RenderableType]:
    """Lay out a table: title, head and rows, then its notes."""
    parts: list[RenderableType] = [Text(table.title, style="bold")] if table.title else []
    if table.rows:
        headed = any(column.title or column.group for column in table.columns)
        gap = 2 if len(table.columns) > 3 else 3
        rich = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=headed)
        for k, (title, column) in enumerate(
            zip(_titles(table.columns), table.columns, strict=True)
        ):
            kept = [word for row in table.rows for word in _cell(row[k], column).split(" ")]
            rich.add_column(
                Text(title), justify="right" if column.right else "left", overflow="fold",
                min_width=max(map(len, [*kept, *title.split()]), default=0),
            )  # fmt: skip
        for row in table.rows:
            cells = zip(row, table.columns, strict=True)
            rich.add_row(*(Text(_cell(cell, column)) for cell, column in cells))
        parts.append(_Whole(rich))
    return parts + [_Line(note) for note in table.notes]


def _cell(cell: Cell, column: Column) -> str:
    """Write a cell; a number keeps its unit and its error."""
    return words(cell).replace(" ", SPACE) if column.right else words(cell)


class _Whole(NamedTuple):
    """A table of which no number and no word is cut: too wide for a terminal, it runs over."""

    table: RichTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = Measurement.get(console, options.update(max_width=WIDEST), self.table).minimum
        wide = options.update(max_width=max(least, options.max_width))
        for part in console.render(self.table, wide):
            yield part._replace(text=part.text.replace(SPACE, " "))


def _titles(columns: tuple[Column, ...]) -> list[str]:
    """Write heads of two lines where columns are grouped: the group's name over its first."""
    grouped = any(column.group for column in columns)
    titles, last = [], ""
    for column in columns:
        above = column.group if column.group != last else ""
        titles.append(f"{above}\n{column.title}" if grouped else column.title)
        last = column.group
    return titles


class _Line(NamedTuple):
    """Text that breaks at the width of a screen; a number keeps its unit and its error."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = self.text.replace(" %", f"{SPACE}%").replace(" ± ", f"{SPACE}±{SPACE}")
        width = min(WIDTH, options.max_width)
        lines = textwrap.wrap(kept, width, subsequent_indent="  ", break_on_hyphens=False)
        yield Text("\n".join(lines).replace(SPACE, " "))
