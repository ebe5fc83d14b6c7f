"""The page: results, grouped by what they are about, as one HTML file without script or network."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import prism
from prism.common.errors import PrismError
from prism.common.files import atomic_write
from prism.common.netcdf import wrap_corrupt_file
from prism.common.resultfiles import KINDS, dataset_of, kind_of, load_dataset
from prism.common.results import Result
from prism.common.text import format_duration, visible
from prism.distributions.library import library_names, library_path
from prism.jobs.job import flatten
from prism.plots.base import style
from prism.present.answer import Answer, Picture
from prism.present.answers.job import job_table, value_text
from prism.present.cells import Column, Json, Table
from prism.present.reports.estimates import overlays, summary_table
from prism.present.reports.html import template
from prism.present.show import describe

if TYPE_CHECKING:
    import xarray as xr

# ------------------------------------------------------------------------------------ inputs

LONGEST_VALUE = 200  # of a key, in characters
MOST_DIFFERENCES = 16  # values listed in which a job differs from another of its name


@dataclass(frozen=True)
class Inputs:
    """What a job was made of."""

    source: str  # its file, or the shipped name
    given: Table  # by the job, a preset or the command line
    defaults: Table | None
    library: tuple[Table, ...]  # of its library or model, with their sources
    notes: tuple[str, ...]  # what is not known


def job_values(result: xr.Dataset) -> dict[str, Any] | None:
    """Return the blocks of a result's job; None where it has none, as from a recording."""
    try:
        values = json.loads(result.attrs["job"])
    except (KeyError, ValueError):
        return None
    if not isinstance(values, dict) or "parallelism" not in values or "call" not in result.attrs:
        return None
    values.pop("name", None)
    values.pop("source", None)
    if (values.get("model") or {}).get("durations") is not None:
        # the sizes say nothing where the durations are given
        values["model"] = {"durations": values["model"]["durations"]}
    return values


def inputs_of(result: xr.Dataset) -> Inputs | None:
    """Lay out the job of a result; None where it has none."""
    values = job_values(result)
    if values is None:
        return None
    name, sources = str(result.attrs.get("job_name", "")), result.attrs.get("job_sources")
    source = str(json.loads(result.attrs["job"]).get("source") or name)
    beside = f"{Path(source).parent}{os.sep}" if os.sep in source else ""
    known = {key: place.removeprefix(beside) for key, place in _loaded(sources).items()}
    table = job_table(f"Values of {name}, each with its source", values, known)
    notes, defaults = [], None
    if sources is None:
        notes.append("the sources of values were not recorded by the version that made this result")
        rows = tuple(row[:2] for row in table.rows)
        given = replace(table, columns=table.columns[:2], rows=rows)
    else:
        left = tuple(row for row in table.rows if row[-1] == "default")
        given = replace(table, rows=tuple(row for row in table.rows if row[-1] != "default"))
        defaults = replace(table, title=f"Defaults of {name}", rows=left) if left else None
    library, more = _library(result, values)
    return Inputs(source, given, defaults, library, (*notes, *more))


def differences(result: xr.Dataset, first: xr.Dataset, file: str) -> Table | None:
    """Lay out the values of a job that differ from those of another result of the same job."""
    here, there = (dict(flatten(job_values(found) or {})) for found in (result, first))
    keys = [key for key in dict.fromkeys([*here, *there]) if here.get(key) != there.get(key)]
    if not keys:
        return None
    shown = keys if len(keys) <= MOST_DIFFERENCES else keys[: MOST_DIFFERENCES - 1]
    rows = tuple(
        (key, *(value_text(side.get(key), LONGEST_VALUE) for side in (here, there)))
        for key in shown
    )
    more = len(keys) - len(shown)
    columns = tuple(Column(title, right=False) for title in ("key", "here", f"in {file}"))
    notes = (f"and {more:,} more",) if more else ()
    return Table(f"Different from {file}", columns, rows, notes)


def _library(result: xr.Dataset, values: Json) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """Lay out the library of a job if it ships with prism; a path in a result is never opened."""
    variability = values.get("variability") or {}
    name = variability.get("model") or variability.get("library")
    if name is None:
        return (), ("no library: the job gives its durations and effects itself",)
    if variability.get("model") is not None or name not in library_names():
        return (), (f"a report opens no file that a result names: prism show {name} lists it",)
    kept = str(result.attrs.get("library_sha256") or "")
    if not kept:
        return (), (f"which library {name} this result was made with is not known",)
    now = hashlib.sha256(library_path(str(name)).read_bytes()).hexdigest()
    if now != kept:
        return (), (
            f"library {name} has changed since this result was made, so that its entries are not "
            f"listed (sha256 {now[:12]}, then {kept[:12]})",
        )
    return describe(str(name)).tables, ()


def made_by(result: xr.Dataset, numbers: Json, file: str, command: str) -> list[tuple[str, str]]:
    """Say how a result was made: label and text, what is not known left out."""
    attrs = result.attrs
    rows = [("file", file), ("made by", f"{command}, prism {attrs.get('prism_version', '')}")]
    source, versions = str(attrs.get("source_sha256") or ""), attrs.get("versions")
    if source:
        rows.append(("hash of prism's source files", source))
    seed = attrs.get("seed", numbers.get("seed"))
    if seed is not None:
        rows.append(("seed", str(seed)))
    call = _loaded(attrs.get("call"))
    asked = {key: value for key, value in call.items() if key != "seed" and value is not None}
    if isinstance(asked.get("deadline"), float):
        asked["deadline"] = format_duration(asked["deadline"])
    if asked:
        rows.append(
            (
                "asked for",
                ", ".join(f"{k} = {value_text(v, LONGEST_VALUE)}" for k, v in asked.items()),
            )
        )
    if versions:
        rows.append(("with", ", ".join(f"{k} {v}" for k, v in _loaded(versions).items())))
    if attrs.get("library_sha256"):
        rows.append(("library's sha256", str(attrs["library_sha256"])))
    seconds = numbers.get("wall_seconds", attrs.get("wall_seconds"))
    if seconds is not None:
        rows.append(("wall time", format_duration(float(seconds), 0.1)))
    return rows


def _loaded(text: Any) -> dict[str, Any]:
    """Read a mapping from an attribute; an empty one where there is none."""
    try:
        found = json.loads(str(text))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


ESTIMATES = ("estimate", "steps_estimate")
MOST_BYTES = 2_000_000
"""A page larger than this is reported: it no longer goes through every mail [bytes]."""
WIDE = 7.8  # width from which a picture has a row of its own [inch]
SHORT_ANSWERS = 2  # sentences of each result in the answer of a page of several


@dataclass
class Section:
    """A result on the page: where it was read or how it is called, its kind, and what it says."""

    name: str  # of its place on the page
    file: str
    kind: str  # one of `KINDS`
    result: xr.Dataset
    answer: Answer
    label: str = ""
    pictures: list[dict[str, Any]] = field(default_factory=list)
    made_by: list[tuple[str, str]] = field(default_factory=list)
    differs: Table | None = None


@dataclass
class Subject:
    """Results about one job or recording, and what went into them."""

    name: str
    title: str
    parts: list[Section] = field(default_factory=list)
    inputs: Inputs | None = None
    first: Section | None = None


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
    return make_page(read_parts(results), path, title)


def read_parts(results: object) -> list[Section]:
    """Read results and make their answers; PrismError names one that is none, broken or twice."""
    import xarray as xr

    one = isinstance(results, str | os.PathLike | Result | xr.Dataset)
    listed: Sequence[object] = [results] if one else list(results)  # type: ignore[call-overload]
    if not listed:
        raise PrismError("no result: expected output folders (-o DIR), result.nc files or models")
    parts, seen = [], set()
    for i, item in enumerate(listed, 1):
        if isinstance(item, Result | xr.Dataset):
            parts.append(_part(i, f"result {i}", dataset_of(item)))
            continue
        if not isinstance(item, str | os.PathLike):
            raise PrismError(f"result {i}: {item!r}: expected a path or a result")
        folder = Path(item)
        path = (folder / "result.nc" if folder.is_dir() else folder).resolve()
        if path in seen:
            raise PrismError(f"{item}: is given twice; leave one out")
        seen.add(path)
        parts.append(_part(i, str(item), load_dataset(item)))
    return parts


def _part(number: int, file: str, result: xr.Dataset) -> Section:
    kind = kind_of(result)
    if kind is None:
        raise PrismError(f"{file}: no result of prism; expected what a command writes by -o")
    with wrap_corrupt_file(file, f"a result; write it again by prism {KINDS[kind].command}"):
        try:
            return Section(f"r{number}", file, kind, result, KINDS[kind].answer(result))
        except PrismError as error:
            raise PrismError(f"{file}: {error}") from error


def check_page(path: str | os.PathLike[str]) -> None:
    """Refuse a name that a page cannot have, before any work is done for it."""
    file = Path(path)
    if file.is_dir():
        raise PrismError(f"{path}: is a folder; -o takes the page's file here: {file}/report.html")
    if file.suffix.lower() not in (".html", ".htm"):
        raise PrismError(f"{path}: expected a name that ends in .html, such as {file.name}.html")


def make_page(
    parts: Sequence[Section],
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> str:
    """Lay results out as a page, and write it where a path is given; see `report`."""
    for part in parts:
        command = f"prism {KINDS[part.kind].command}"
        part.label = _label(part, parts)
        with wrap_corrupt_file(part.file, "a whole result, with what it was made by"):
            part.made_by = made_by(part.result, part.answer.figures, part.file, command)
        part.pictures = _drawn(part.answer.pictures, part.file)
    subjects = _subjects(parts)
    estimates = [part for part in parts if part.kind in ESTIMATES]
    several = len(estimates) > 1
    figures = {part.label: part.answer.figures for part in estimates}
    both = {part.label: part.result for part in estimates}
    html = template("page.html.jinja").render(
        title=title or _title(subjects, parts),
        subjects=subjects,
        parts=parts,
        n_answers=SHORT_ANSWERS,
        summary=summary_table(figures) if several else None,
        estimates=estimates,
        overlays=_drawn(overlays(both), "the estimates") if several else [],
        warnings=sum(len(part.answer.warnings) for part in parts),
        version=prism.__version__,
    )
    html = visible(re.sub(r"\n\s*\n+", "\n", html))
    if path is not None:
        with atomic_write(path) as temporary:
            temporary.write_text(html, encoding="utf-8")
    return html


def render_answer(answer: Answer) -> str:
    """Lay an answer out as a part of a page, with its pictures."""
    drawn = _drawn(answer.pictures, answer.subject)
    return visible(template("answer.html.jinja").render(answer=answer, pictures=drawn))


def _label(part: Section, parts: Sequence[Section]) -> str:
    """Name a result by its subject; with its file where several estimates are about that."""
    name = str(part.answer.subject)
    files = [p.file for p in parts if p.answer.subject == name and p.kind in ESTIMATES]
    several = len(files) > 1 and part.kind in ESTIMATES
    return f"{name} ({_short(part.file, files)})" if several else name


def _short(file: str, files: Sequence[str]) -> str:
    """Return the end of a path that tells it from the others: a long one fits no legend."""
    ends = [PurePath(other).parts for other in files]
    own = PurePath(file).parts
    for n in range(1, len(own)):
        if sum(parts[-n:] == own[-n:] for parts in ends) == 1:
            return str(PurePath(*own[-n:]))
    return file


def _drawn(pictures: Sequence[Picture], file: str) -> list[dict[str, Any]]:
    """Draw pictures as images that a page holds: sharp at any size, text as text, and small."""
    out = []
    for picture in pictures:
        buffer = BytesIO()
        with (
            wrap_corrupt_file(file, f"a whole result: {picture.title.lower()} cannot be drawn"),
            style(),
        ):
            figure = picture.draw().get_figure(root=True)
            assert figure is not None
            # nothing but the picture, so that the same result gives the same bytes
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(buffer, format="svg", metadata=nothing)
        image = "data:image/svg+xml," + quote(buffer.getvalue(), safe=" ,;:/=()*+-.")
        out.append({"picture": picture, "image": image, "wide": figure.get_figwidth() > WIDE})
    return out


def _subjects(parts: Sequence[Section]) -> list[Subject]:
    """Put results of one subject together, in the order given."""
    known: dict[str, Subject] = {}
    for part in parts:
        text = str(part.answer.subject)
        subject = known.setdefault(text, Subject(f"s{len(known) + 1}", text))
        subject.parts.append(part)
    for subject in known.values():
        for part in subject.parts:
            with wrap_corrupt_file(part.file, "a whole result, with its job"):
                if job_values(part.result) is None:
                    continue
                if subject.first is None:
                    subject.first, subject.inputs = part, inputs_of(part.result)
                else:
                    first = subject.first
                    part.differs = differences(part.result, first.result, first.file)
    return list(known.values())


def _title(subjects: Sequence[Subject], parts: Sequence[Section]) -> str:
    """Name a page by what it is about."""
    names = [subject.title for subject in subjects]
    if len(parts) == 1:
        return f"{names[0]}: {parts[0].answer.title[0].lower()}{parts[0].answer.title[1:]}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}: how long, how likely, and why"
