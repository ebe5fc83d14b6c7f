"""Answers and messages as HTML, laid out by the templates of a page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from prism.common.text import visible
from prism.present.cells import Table, words

if TYPE_CHECKING:
    from jinja2 import Template

    from prism.present.answer import Answer

SPACE = "\N{NO-BREAK SPACE}"


def render_cell(answer: Answer) -> str:
    """Lay an answer out for a notebook: what a terminal shows, as HTML."""
    return visible(template("cell.html.jinja").render(answer=answer))


def render_messages(lines: Sequence[str], title: str) -> str:
    """Lay messages out as a part of a page, as its warnings are."""
    warned = template("tables.html.jinja").module.warned  # type: ignore[attr-defined]
    return visible(str(warned(lines, title)))


@cache
def template(name: str) -> Template:
    """Load a template of `prism/present/reports/templates`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("prism.present.reports", "templates"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"tidy": _tidy, "words": words, "head": _head}
    return environment.get_template(name)


def _tidy(text: str) -> str:
    """Put text on one line, each number kept with its unit."""
    plain = " ".join(text.split())
    return plain.replace(" %", f"{SPACE}%").replace(" ± ", f"{SPACE}±{SPACE}")


def _head(table: Table) -> list[list[dict[str, Any]]]:
    """Lay out a table's head: one row of cells, or two where columns are grouped."""
    if not any(column.title or column.group for column in table.columns):
        return []
    two = any(column.group for column in table.columns)
    top: list[dict[str, Any]] = []
    below: list[dict[str, Any]] = []
    for group, columns in groupby(table.columns, key=lambda column: column.group):
        cells = [{"text": c.title, "columns": 1, "rows": 1, "right": c.right} for c in columns]
        if group:
            top.append({"text": group, "columns": len(cells), "rows": 1, "right": False})
            below += cells
        else:
            top += [cell | {"rows": 1 + two} for cell in cells]
    return [top, below] if two else [top]
