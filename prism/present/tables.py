"""Tables and findings of an answer from what a result declares; knows nothing of analyses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prism.common.results import Columns, Field
from prism.present.answer import Finding
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Table,
    change,
    count,
    delay,
    number,
    share,
    words,
)

Row = Mapping[str, Any]
_BY_UNIT = {"text": "text", "flag": "flag", "count": "count", "s": "duration"}


def write(field: Field, row: Row) -> Cell:
    """Write a field of a row, with half of its 95 % interval where it has one; none as nothing."""
    value, bounds = row.get(field.name), row.get(f"{field.name}_ci") if field.interval else None
    if value is None:
        return None
    low, high = bounds or (0.0, 0.0)
    half = None if bounds is None else 0.5 * (high - low)
    match field.form or _BY_UNIT.get(field.unit, "number"):
        case "text":
            return str(value)
        case "flag":
            return "yes" if value else "no"
        case "count":
            return count(value)
        case "share":
            return share(value, half)
        case "duration":
            return delay(value, half)
        case "change":
            return change(value, bounds and (low, high))
        case "gain":  # a reduction, as the change that it is
            return Figure(value, words(change(-value, bounds and (-high, -low))))
        case "number":
            return number(value, ".4g")
        case form:
            raise ValueError(f"{field.name}: no form {form!r}")


def lay_out(
    title: str,
    columns: Columns,
    rows: Sequence[Row],
    names: Iterable[str] = (),
    notes: tuple[str, ...] = (),
    details: bool = False,
) -> Table:
    """Lay rows of a result out as a table: the first field, then those named or all with a title.

    Fields that no row has are left out.
    """
    known = {field.name: field for field in columns.fields}
    key = [] if columns.numbered else [columns.fields[0]]
    chosen = [known[name] for name in names] or [f for f in columns.fields if f.title]
    has = [f for f in chosen if f not in key and any(row.get(f.name) is not None for row in rows)]
    shown = [*key, *has]
    heads = tuple(
        Column(field.title, field.group, right=field.unit not in ("text", "flag"))
        for field in shown
    )
    cells = tuple(tuple(write(field, row) for field in shown) for row in rows)
    return Table(title, heads, cells, notes, details)


class Rule(NamedTuple):
    """A finding that a result may give."""

    # see `prism.present.answer.Finding`
    code: str
    severity: str
    # of a result, or of the mapping of its figures: true where that gives it
    when: Callable[[Any], object]
    text: str  # with the names of its figures in braces, which the code may have too
    # figures of a result by name, as they are written
    figures: Callable[[Any], Mapping[str, Cell]] = lambda result: {}
    capital: bool = True  # whether the text is to begin with one


def find(result: Any, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """Give what a result says by some rules, in their order."""
    out = []
    for rule in rules:
        if rule.when(result):
            shown = {name: words(cell) for name, cell in rule.figures(result).items()}
            code, text = (x.format(**shown) for x in (rule.code, rule.text))
            begin = text[:1].upper() if rule.capital else text[:1]
            out.append(Finding(code, begin + text[1:], rule.severity))
    return tuple(out)
