"""The one form in which every analysis answers: what a terminal, JSON, a page and a notebook show.

A function of `prism.present.answers` makes it from a result; renderers know nothing of analyses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from prism.present.cells import Figure, Json, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType


class Finding(NamedTuple):
    """What an analysis found."""

    code: str  # what kind of finding it is, the same for every job
    text: str  # a sentence or two
    severity: str = "info"  # ``answer``, ``advice``, ``info`` or ``warning``


class Errors(NamedTuple):
    """Both errors of a picture in words: of the draws, and of the data behind them."""

    monte_carlo: str
    data: str


@dataclass(frozen=True)
class Picture:
    """A plot to be drawn."""

    stem: str  # of the file it is written to
    title: str  # what it shows
    draw: Callable[[], Axes]  # draws it; its axes
    note: str  # how it is to be read
    errors: Errors  # how far what it shows may be off


@dataclass(frozen=True)
class Answer:
    """What an analysis answers."""

    title: str  # what kind of answer it is
    subject: str  # the job or recording that it is about
    head: str = ""  # size of the input and of the sample, and the seed: what follows the subject
    question: str = ""  # what was asked
    findings: tuple[Finding, ...] = ()  # the answer in words, what matters most first
    tables: tuple[Table, ...] = ()
    figures: Json = field(default_factory=dict)  # all numbers, the JSON of the command
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    facts: tuple[tuple[str, Figure], ...] = ()  # some figures that stand out
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a result whose texts are none; raises TypeError."""
        for text in (*self.warnings, *self.assumptions, *(found.text for found in self.findings)):
            if not isinstance(text, str):
                raise TypeError(f"{text!r} where a text belongs")

    def json(self) -> dict[str, Any]:
        """Give the figures with findings, warnings and assumptions: the JSON of the command."""
        out = dict(self.figures)
        if self.findings:
            out["findings"] = [found._asdict() for found in self.findings]
        if self.assumptions:
            out["assumptions"] = list(self.assumptions)
        return out | {"warnings": list(self.warnings)}

    def __rich__(self) -> RenderableType:
        from prism.present.terminal import render

        return render(self)

    def _repr_html_(self) -> str:
        from prism.present.reports.html import render_cell

        return render_cell(self)

    def __repr__(self) -> str:
        return f"<Answer: {self.title} of {self.subject}>"
