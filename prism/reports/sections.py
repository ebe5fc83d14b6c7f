"""What a result becomes on a page, and which kinds of result there are.

`KINDS` is the one list: a kind of result, the command that writes it, and what turns it into a
section. A new command adds a line there. Left out: how they are laid out (`prism.reports.page`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType

from prism.reports.figures import Picture

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """One result in words, figures, pictures and tables.

    Attributes
    ----------
    title : str
        What kind of answer it is, in some words.
    subject : str
        The job, or the recording, that it is about; results of one subject stand together.
    question : str
        What was asked.
    answers : tuple of str
        The answer in words, what matters most first.
    pictures : tuple of Picture
        What there is to see.
    facts : tuple of tuple of str and str
        A few figures that stand out: label and text.
    view : rich.console.RenderableType
        What the command prints: the tables.
    captions : tuple of str
        Captions of those tables of the view that have no heading above them.
    warnings : tuple of str
        What the result warns of.
    numbers : mapping
        The summary that all this is made of.
    """

    title: str
    subject: str
    question: str
    answers: tuple[str, ...]
    pictures: tuple[Picture, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    view: RenderableType = Group()
    captions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    numbers: Json | None = None


class Kind(NamedTuple):
    """A kind of result: who writes it, and the function ``module:name`` that makes a section."""

    command: str
    maker: str

    def make(self, result: xr.Dataset) -> Section:
        """Make a section of a result."""
        module, _, name = self.maker.partition(":")
        make: Callable[[Any], Section] = getattr(import_module(module), name)
        return make(result)


_PLACE = "prism.reports."
KINDS = {
    "estimate": Kind("prism estimate", f"{_PLACE}estimates:estimate_section"),
    "steps_estimate": Kind("prism estimate", f"{_PLACE}estimates:estimate_section"),
    "ranking": Kind("prism rank", f"{_PLACE}analyses:ranking_section"),
    "placement": Kind("prism place", f"{_PLACE}analyses:placement_section"),
    "sweep": Kind("prism sweep", f"{_PLACE}analyses:sweep_section"),
    "validation": Kind("prism validate", f"{_PLACE}measured:validation_section"),
    "comparison": Kind("prism compare", f"{_PLACE}compared:comparison_section"),
    "replay": Kind("prism replay", f"{_PLACE}measured:replay_section"),
    "trace": Kind("prism fit", f"{_PLACE}measured:model_section"),
    "calibrated": Kind("prism fit", f"{_PLACE}measured:model_section"),
    "steps": Kind("prism fit", f"{_PLACE}measured:model_section"),
}
"""Kinds of result that a page can show, by the attribute ``kind`` of the file."""


def kind_of(result: xr.Dataset) -> str | None:
    """Tell the kind of a result; None where it is none of `KINDS`.

    Estimates and rankings have no attribute ``kind``, and are told by what they hold.
    """
    kind = result.attrs.get("kind")
    if kind is not None:
        return str(kind) if str(kind) in KINDS else None
    if "job" not in result.attrs:
        return None
    if "total_order" in result:
        return "ranking"
    return "estimate" if "step_time" in result else None
