"""Numbers and words in tables: each number with its unit, digits as many as its error leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from prism.common.text import (
    format_count,
    format_duration,
    format_like,
    format_share,
    percent_change,
)

Json = Mapping[str, Any]


class Figure(NamedTuple):
    """A number and how it is written; the text of one that is not known says so."""

    value: float | None  # as in the JSON: SI units, shares and probabilities as ratios
    text: str  # with its unit


Cell = str | Figure | None  # what stands in a table: words, a number, or nothing


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the title over it and its neighbours, whether flush right."""

    title: str = ""
    group: str = ""
    right: bool = True


@dataclass(frozen=True)
class Table:
    """A table of an answer."""

    title: str
    # the first names the rows. No head is shown where no column has a title.
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()  # what its columns mean, and what was left out
    details: bool = False  # whether a terminal shows it with ``--details`` only

    def __post_init__(self) -> None:
        for cell in (cell for row in self.rows for cell in row):
            if not (cell is None or isinstance(cell, str | Figure)):  # of a spoilt result
                raise TypeError(f"{self.title}: {cell!r} is neither text nor a figure")


def pairs_table(title: str, rows: list[tuple[str, Cell]], details: bool = False) -> Table:
    """Lay out labels and what belongs to each, side by side."""
    columns = (Column(right=False), Column(right=False))
    return Table(title, columns, tuple(rows), details=details)


def lines_table(title: str, lines: Iterable[str] | None, details: bool = False) -> Table:
    """List remarks under a title, one a row."""
    return Table(title, (Column(right=False),), tuple((x,) for x in lines or ()), details=details)


# ------------------------------------------------------------------------ numbers as figures
def count(value: float | None, noun: str = "") -> Cell:
    """Write a count of something, named in the singular; nothing where it is None."""
    return None if value is None else Figure(value, format_count(value, noun))


def share(value: float | None, half: float | None = None) -> Cell:
    """Write a share or a probability in percent: three digits, below 0.1 % only that it is.

    Digits are as many as half of its 95 % interval leaves, where that is given.
    """
    if value is None:
        return None
    return Figure(value, format_share(value, half=half or 0.0))


def number(value: float | None, form: str) -> Cell:
    """Write a number as a format has it; nothing where it is None."""
    return None if value is None else Figure(value, f"{value:{form}}")


def spread(figures: Mapping[str, float]) -> Cell:
    """Write the CV of step times with half of its 95 % interval; nothing of a single step."""
    if figures.get("n") == 1:
        return None
    half = 1.96 * figures.get("cv_se", 0.0)
    more = f" ± {format_share(half, 2)}" if half > 0.0 else ""
    return Figure(figures["cv"], format_share(figures["cv"]) + more)


def duration(seconds: float | None, fine: float | None = None, like: float | None = None) -> Cell:
    """Write a duration, to a smallest difference and in the unit of another one where given [s]."""
    if seconds is None:
        return None
    if like is not None:
        assert fine is not None
        return Figure(seconds, format_like(seconds, like, fine))
    return Figure(seconds, format_duration(seconds, fine))


def brief(seconds: float) -> Figure:
    """Write a duration of four digits, such as a kernel's [s]."""
    return Figure(seconds, format_duration(float(f"{seconds:.4g}")))


def delay(seconds: float, half: float | None) -> Cell:
    """Write a difference of times with half of its 95 % interval, 0 where it is within that [s]."""
    if not half or half < 1e-6 * abs(seconds):  # of rounding
        return duration(seconds)
    fine = max(0.0999 * half, 60.0) if half >= 120.0 else 0.0999 * half  # minutes of minutes
    text = "0" if abs(seconds) <= half else format_duration(seconds, fine)
    return Figure(seconds, f"{text} ± {format_duration(half, fine)}")


def error(seconds: float | None, like: float) -> Cell:
    """Write an error or a spread with two digits, in the unit of what it belongs to [s]."""
    if seconds is None:
        return None
    return duration(seconds, 0.0999 * seconds if seconds > 0 else 1e-3 * abs(like), like)


def half_width(standard_error: float | None, n: int) -> float | None:
    """Half of the 95 % interval of a mean over n independent units (Student's t), where known."""
    from scipy.special import stdtrit

    return None if standard_error is None else float(stdtrit(n - 1, 0.975)) * standard_error


def change(value: float | None, interval: tuple[float, float] | None = None) -> Cell:
    """Write a relative change in percent, with half of its 95 % interval."""
    return None if value is None else Figure(value, percent_change(value, interval))


def words(cell: Cell) -> str:
    """Give the text of a cell."""
    return cell.text if isinstance(cell, Figure) else cell or ""
