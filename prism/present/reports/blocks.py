"""What a terminal is shown, as parts of a page: paragraphs, lists and tables.

The views that commands print are walked once more, so that the page and the terminal cannot
disagree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

_GAP = re.compile(r" {2,}")


@dataclass(frozen=True)
class Cell:
    """A cell of a table's head: its text, the columns and rows it spans, whether flush right."""

    text: str
    columns: int = 1
    rows: int = 1
    right: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a page.

    Attributes
    ----------
    kind : str
        ``heading``, ``paragraph``, ``list`` or ``table``.
    text : str
        A heading, a paragraph, or a table's caption.
    items : tuple of str
        Of a list.
    head : tuple of tuple of Cell
        Rows of a table's head; none where it has none.
    rows : tuple of tuple of str
        Of a table; the first cell names the row.
    right : tuple of bool
        Which columns of a table are flush right.
    links : tuple of str
        Where the names of a table's rows lead, as ids of this page; none where empty.
    """

    kind: str
    text: str = ""
    items: tuple[str, ...] = ()
    head: tuple[tuple[Cell, ...], ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[bool, ...] = field(default=())
    links: tuple[str, ...] = ()


def blocks_of(view: RenderableType, captions: Sequence[str] = ()) -> list[Block]:
    """Turn what a terminal is shown into parts of a page."""
    found = [block for block in map(_block, _flatten(view)) if block is not None]
    joined = [
        block
        for kind, run in groupby(found, key=lambda block: block.kind)
        for block in ([_joined(list(run))] if kind == "list" else run)
    ]
    out: list[Block] = []
    given = iter(captions)
    for block in joined:
        if block.kind == "table":
            above = out.pop().text if out and out[-1].kind == "heading" else next(given, "")
            block = replace(block, text=above)
        out.append(block)
    return out


def leave_out(blocks: Sequence[Block], told: Collection[str]) -> list[Block]:
    """Leave out sentences that the page has elsewhere, and headings with nothing below."""
    said = {tidy(sentence) for sentence in told}
    kept = []
    for block in blocks:
        if block.kind == "list":
            block = replace(block, items=tuple(i for i in block.items if i not in said))
        if block.kind == "list" and not block.items:
            continue
        if block.kind == "paragraph" and (block.text in said or block.text.startswith("in all ")):
            continue
        kept.append(block)
    return [
        block
        for i, block in enumerate(kept)
        if block.kind != "heading" or (i + 1 < len(kept) and kept[i + 1].kind != "heading")
    ]


def _flatten(view: RenderableType) -> Iterator[RenderableType]:
    """Walk nested groups in order."""
    if isinstance(view, Group):
        for part in view.renderables:
            yield from _flatten(part)
    else:
        yield view


def _block(part: RenderableType) -> Block | None:
    """Turn one text or table into a part of a page; None where it is empty."""
    if isinstance(part, RichTable):
        return _table(part)
    text = part if isinstance(part, Text) else Text(str(part))
    plain = tidy(text.plain)
    if not plain:
        return None
    if plain.startswith("- "):
        return Block("list", items=(plain[2:],))
    whole = [span for span in text.spans if span.start == 0 and span.end == len(text.plain)]
    bold = str(text.style) == "bold" or any(str(span.style) == "bold" for span in whole)
    return Block("heading" if bold else "paragraph", text=plain)


def _joined(run: Sequence[Block]) -> Block:
    return Block("list", items=tuple(item for block in run for item in block.items))


def tidy(text: str) -> str:
    """Put text on one line, each number kept with its unit."""
    plain = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
    return plain.replace(" %", "\N{NO-BREAK SPACE}%").replace(
        " ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
    )


def _text(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _cell(text: object) -> str:
    return tidy(_text(text))


def _table(table: RichTable) -> Block:
    """Turn a table; lines that only keep blocks apart are left out."""
    columns: list[list[str]] = []
    right: tuple[bool, ...] = ()
    titles: list[str] = []
    for column in table.columns:
        cells = [_text(cell) for cell in column.cells]
        apart = [_GAP.split(cell.strip()) for cell in cells]
        n = len(apart[0]) if apart else 1
        if n > 1 and all(len(parts) == n for parts in apart):  # figures aligned by spaces
            columns += [[tidy(parts[i]) for parts in apart] for i in range(n)]
            right, titles = right + (True,) * n, [*titles, str(column.header), *[""] * (n - 1)]
        else:
            columns.append([tidy(cell) for cell in cells])
            right, titles = (*right, column.justify == "right"), [*titles, str(column.header)]
    rows = tuple(row for row in zip(*columns, strict=True) if any(row))
    head = _head(titles, right) if table.show_header and any(titles) else ()
    return Block("table", head=head, rows=rows, right=right)


def _head(titles: Sequence[str], right: Sequence[bool]) -> tuple[tuple[Cell, ...], ...]:
    """Lay out a head; ``above`` over ``one`` and an empty line over ``two`` are one group."""
    groups: list[list[int]] = []
    for i, title in enumerate(titles):
        follows = title.startswith("\n") and groups and "\n" in titles[groups[-1][0]]
        if follows and not titles[groups[-1][0]].startswith("\n"):
            groups[-1].append(i)
        else:
            groups.append([i])
    two = any(len(group) > 1 for group in groups)
    top: list[Cell] = []
    below: list[Cell] = []
    for group in groups:
        first = titles[group[0]]
        if len(group) == 1:
            top.append(Cell(_cell(first), rows=1 + two, right=right[group[0]]))
            continue
        above, _, rest = first.partition("\n")
        top.append(Cell(_cell(above), columns=len(group)))
        names = [rest, *(titles[i] for i in group[1:])]
        below += [Cell(_cell(n), right=right[i]) for n, i in zip(names, group, strict=True)]
    return (tuple(top), tuple(below)) if two else (tuple(top),)
