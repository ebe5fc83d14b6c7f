"""An answer in a terminal: what was found, tables, assumptions; a screen of it unless all is asked.

Nothing in a name is markup.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from prism.common.text import format_duration, one_line
from prism.present.cells import Cell, Column, Table, words

if TYPE_CHECKING:
    from prism.present.answer import Answer

WIDTH = 110  # widest line of running text [columns]
WIDEST = 10_000  # more than any table has [columns]
NAME = 12  # of names no more than this is kept together where a terminal is too narrow [columns]
SPACE, BREAK = "\ue000", "\n"
"""Between words that stay together, as rich breaks at no-break spaces; where a line may end."""


def render(answer: Answer, details: bool = False) -> RenderableType:
    """Lay out an answer; tables that are details are left out and counted unless asked for."""
    parts: list[RenderableType] = [Text.assemble((one_line(answer.subject), "bold"), answer.head)]
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
    parts: list[RenderableType] = [Text(one_line(table.title), style="bold")] if table.title else []
    if table.rows:
        parts.append(_Whole(table))
    return parts + [_Line(note) for note in table.notes]


def _lay(table: Table, error: str, name: int = WIDEST) -> RichTable:
    """Lay out head and rows; a number keeps its unit, and its error behind `error`.

    Names of more than `name` columns are broken.
    """
    headed = any(column.title or column.group for column in table.columns)
    gap = 1 if name < WIDEST else 2 if len(table.columns) > 3 else 3
    rich = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=headed)
    cells = [
        [_cell(cell, column, error) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    for k, (title, column) in enumerate(zip(_titles(table.columns), table.columns, strict=True)):
        least = max((len(word) for row in cells for word in row[k].split(" ")), default=0)
        least = least if column.right else min(least, name)
        least = max([least, *map(len, title.split())])
        rich.add_column(
            Text(title), justify="right" if column.right else "left", overflow="fold",
            min_width=least, width=least if error == BREAK and column.right else None,
        )  # fmt: skip
    for row in cells:
        rich.add_row(*map(Text, row))
    return rich


def _cell(cell: Cell, column: Column, error: str) -> str:
    """Write a cell."""
    if not column.right:
        return one_line(words(cell))
    return (
        one_line(words(cell)).replace(" ± ", f"{error}± ").replace(" ", SPACE).replace(BREAK, " ")
    )


class _Whole(NamedTuple):
    """A table of which no number and no word is cut.

    Where a terminal is too narrow, errors stand below their numbers; then long names are broken;
    then it runs over.
    """

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for error, name in ((SPACE, WIDEST), (BREAK, WIDEST), (BREAK, NAME)):
            rich = _lay(self.table, error, name)
            gaps = rich.padding[1] * (len(rich.columns) - 1)
            least = gaps + sum(column.min_width or 0 for column in rich.columns)
            wide = options.update(max_width=max(least, options.max_width))
            lines = [*Segment.split_lines(console.render(rich, wide))]
            if max(map(Segment.get_line_length, lines), default=0) <= options.max_width:
                break
        for line in lines:
            yield from (part._replace(text=part.text.replace(SPACE, " ")) for part in line)
            yield Segment.line()


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
        kept = one_line(self.text).replace(" %", f"{SPACE}%").replace(" ± ", f"{SPACE}±{SPACE}")
        width = min(WIDTH, options.max_width)
        lines = textwrap.wrap(kept, width, subsequent_indent="  ", break_on_hyphens=False)
        yield Text("\n".join(lines).replace(SPACE, " "))
