"""What a result becomes on a page.

What turns a kind of result into a section is named in `prism.common.resultfiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from prism.present.answer import Answer, Picture
from prism.present.terminal import render_table

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

    def __post_init__(self) -> None:
        """Refuse a result whose texts are none; raises TypeError."""
        for text in (*self.answers, *self.warnings, *sum(self.facts, ())):
            if not isinstance(text, str):
                raise TypeError(f"{text!r} where a text belongs")


def section_of(answer: Answer) -> Section:
    """Make a section of an answer."""
    parts = [part for table in answer.tables for part in ("", *render_table(table))]
    return Section(
        title=answer.title,
        subject=answer.subject,
        question=answer.question,
        answers=tuple(found.text for found in answer.findings),
        pictures=answer.pictures,
        facts=tuple((label, fact.text) for label, fact in answer.facts),
        view=Group(*parts),
        captions=(answer.title,),
        warnings=answer.warnings,
        numbers=answer.figures,
    )
