"""What went into a result, with sources: the job's values, the library's entries, versions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.common.text import format_duration
from prism.distributions.library import library_names, library_path
from prism.jobs.job import flatten
from prism.present.answers.job import job_table, value_text
from prism.present.cells import Column, Table
from prism.present.show import describe

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

LONGEST_VALUE = 200  # of a key, in characters
MOST_DIFFERENCES = 16
"""Values listed in which a job differs from another of its name."""


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
