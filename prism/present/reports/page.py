"""The page: results, grouped by what they are about, as one HTML file without script or network."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import prism
from prism.common.errors import PrismError
from prism.common.files import atomic_write
from prism.common.netcdf import told_broken
from prism.common.resultfiles import KINDS
from prism.common.text import visible
from prism.present.answer import Answer, Picture, Table, words
from prism.present.reports.estimates import overlays, summary_table
from prism.present.reports.figures import to_svg
from prism.present.reports.inputs import differences, inputs_of, job_values, made_by
from prism.present.reports.read import Found, read_results

if TYPE_CHECKING:
    from jinja2 import Template

ESTIMATES = ("estimate", "steps_estimate")
MOST_BYTES = 2_000_000
"""A page larger than this is reported: it no longer goes through every mail [bytes]."""
WIDE = 560
"""Width from which a picture has a row of its own [points]."""
SPACE = "\N{NO-BREAK SPACE}"
SHORT_ANSWERS = 2
"""Sentences of each result in the answer of a page of several."""


@dataclass
class Part:
    """A result on the page."""

    name: str
    found: Found
    label: str
    pictures: list[dict[str, Any]]
    made_by: list[tuple[str, str]]
    differs: Table | None = None

    @property
    def answer(self) -> Answer:
        """What it says."""
        return self.found.answer


@dataclass
class Subject:
    """Results about one job or recording, and what went into them."""

    name: str
    title: str
    parts: list[Part] = field(default_factory=list)
    inputs: Any = None
    first: Part | None = None


def report(
    results: object,
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> str:
    """Make one self-contained HTML page from results.

    Parameters
    ----------
    results : path or xarray.Dataset, or a sequence of these
        What ``-o`` of any command wrote (a folder, its result.nc, a model of ``prism fit``), or
        what the function of the same name returned.
    path : path, optional
        Where to write it; nowhere where None.
    title : str, optional
        Of the page; made of what it is about where None.

    Returns
    -------
    str
        The page.

    Raises
    ------
    PrismError
        A result is missing, foreign or broken, or the page cannot be written.

    Examples
    --------
    >>> import prism
    >>> page = prism.report(prism.estimate("pipeline-8x32", replicates=64, seed=1), "report.html")
    >>> page[:15]
    '<!DOCTYPE html>'
    """
    if path is not None:
        check_page(path)
    return make_page(read_results(results), path, title)


def check_page(path: str | os.PathLike[str]) -> None:
    """Refuse a name that a page cannot have, before any work is done for it."""
    file = Path(path)
    if file.is_dir():
        raise PrismError(f"{path}: is a folder; -o takes the page's file here: {file}/report.html")
    if file.suffix.lower() not in (".html", ".htm"):
        raise PrismError(f"{path}: expected a name that ends in .html, such as {file.name}.html")


def make_page(
    found: Sequence[Found],
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> str:
    """Lay results out as a page, and write it where a path is given; see `report`."""
    parts = _parts(found)
    subjects = _subjects(parts)
    estimates = [part for part in parts if part.found.kind in ESTIMATES]
    several = len(estimates) > 1
    figures = {part.label: part.answer.figures for part in estimates}
    both = {part.label: part.found.result for part in estimates}
    html = _template("page.html.jinja").render(
        title=title or _title(subjects, parts),
        subjects=subjects,
        parts=parts,
        n_answers=SHORT_ANSWERS,
        summary=summary_table(figures) if several else None,
        estimates=estimates,
        overlays=_drawn(overlays(both), "all", "the estimates") if several else [],
        warnings=sum(len(part.answer.warnings) for part in parts),
        version=prism.__version__,
    )
    html = visible(re.sub(r"\n\s*\n+", "\n", html))
    if path is not None:
        with atomic_write(path) as temporary:
            temporary.write_text(html, encoding="utf-8")
    return html


def render_cell(answer: Answer) -> str:
    """Lay an answer out for a notebook: what a terminal shows, as HTML."""
    return visible(_template("cell.html.jinja").render(answer=answer))


def render_answer(answer: Answer, name: str) -> str:
    """Lay an answer out as a part of a page, with its pictures; `name` begins their ids."""
    drawn = _drawn(answer.pictures, name, answer.subject)
    return visible(_template("answer.html.jinja").render(answer=answer, pictures=drawn))


def render_messages(lines: Sequence[str], title: str) -> str:
    """Lay messages out as a part of a page, as its warnings are."""
    warned = _template("tables.html.jinja").module.warned  # type: ignore[attr-defined]
    return visible(str(warned(lines, title)))


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("prism.present.reports", "templates"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"tidy": _tidy, "words": words, "head": _head}
    return environment.get_template(name)


def _parts(found: Sequence[Found]) -> list[Part]:
    """Lay each result out."""
    parts = []
    for i, item in enumerate(found, 1):
        answer, name = item.answer, f"r{i}"
        command = f"prism {KINDS[item.kind].command}"
        with told_broken(item.file, "a whole result, with what it was made by"):
            made = made_by(item.result, answer.figures, item.file, command)
        pictures = _drawn(answer.pictures, name, item.file)
        parts.append(Part(name, item, _label(item, found), pictures, made))
    return parts


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


def _label(item: Found, found: Sequence[Found]) -> str:
    """Name a result by its subject; with its file where several are about that."""
    same = [other for other in found if other.answer.subject == item.answer.subject]
    estimates = [other for other in same if other.kind in ESTIMATES]
    name = str(item.answer.subject)
    if len(estimates) < 2 or item.kind not in ESTIMATES:
        return name
    return f"{name} ({_short(item.file, [other.file for other in estimates])})"


def _short(file: str, files: Sequence[str]) -> str:
    """Return the end of a path that tells it from the others: a long one fits no legend."""
    ends = [PurePath(other).parts for other in files]
    own = PurePath(file).parts
    for n in range(1, len(own)):
        if sum(parts[-n:] == own[-n:] for parts in ends) == 1:
            return str(PurePath(*own[-n:]))
    return file


def _drawn(pictures: Sequence[Picture], name: str, file: str) -> list[dict[str, Any]]:
    """Draw pictures, each with ids of its own."""
    out = []
    for i, picture in enumerate(pictures, 1):
        with told_broken(file, f"a whole result: {picture.title.lower()} cannot be drawn"):
            svg = to_svg(picture, f"{name}-f{i}")
        wide = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) > WIDE  # type: ignore[index]
        out.append({"picture": picture, "svg": svg, "wide": wide})
    return out


def _subjects(parts: Sequence[Part]) -> list[Subject]:
    """Put results of one subject together, in the order given."""
    known: dict[str, Subject] = {}
    for part in parts:
        text = str(part.answer.subject)
        subject = known.setdefault(text, Subject(f"s{len(known) + 1}", text))
        subject.parts.append(part)
    for subject in known.values():
        for part in subject.parts:
            with told_broken(part.found.file, "a whole result, with its job"):
                if job_values(part.found.result) is None:
                    continue
                if subject.first is None:
                    subject.first, subject.inputs = part, inputs_of(part.found.result)
                else:
                    first = subject.first.found
                    part.differs = differences(part.found.result, first.result, first.file)
    return list(known.values())


def _title(subjects: Sequence[Subject], parts: Sequence[Part]) -> str:
    """Name a page by what it is about."""
    names = [subject.title for subject in subjects]
    if len(parts) == 1:
        return f"{names[0]}: {parts[0].answer.title[0].lower()}{parts[0].answer.title[1:]}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}: how long, how likely, and why"
