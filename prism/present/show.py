"""``prism show``: what a file or a shipped name holds, as an answer.

A job is shown resolved with the source of every value, a library with its entries and their
sources, a result or a model with its summary, a trace with its kinds of op
(`prism.present.traceshow`). Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism import plots
from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, told_broken
from prism.common.resultfiles import KINDS, kind_of
from prism.common.text import format_count
from prism.present.answer import (
    Answer,
    Cell,
    Column,
    Errors,
    Figure,
    Finding,
    Picture,
    Table,
    count,
    pairs_table,
    share,
)

if TYPE_CHECKING:
    import xarray as xr

    from prism.distributions.library import Entry


def describe(
    what: str,
    overrides: Sequence[str] = (),
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    step_range: str | None = None,
    unit: str | None = None,
    skip: int | None = None,
    steps: str | None = None,
) -> Answer:
    """Describe a file, or a job or library that ships with prism.

    A file's suffix tells jobs (.yaml, .yml) and netCDF (.nc); recordings are sniffed.

    Parameters
    ----------
    what : str
        A path, or the name of a shipped job or library.
    overrides : sequence of str
        ``key=value`` settings of a job.
    column : str, optional
        The duration, in a table of step times with several.
    where : mapping of str to str, optional
        The rows to keep of such a table.
    step_range : str, optional
        What the ranges of a profiler's trace that are steps are called.
    unit : str, optional
        That of `column`, where its name has none.
    skip : int, optional
        First steps of a trace, or of each run of step times, to leave out.
    steps : str, optional
        ``A:B``, the numbers of the first and the last step of these.

    Returns
    -------
    Answer
        Its figures are the JSON of the command.

    Raises
    ------
    PrismError
        If it is none of these.
    """
    from prism.distributions.library import library_names
    from prism.jobs.jobspec.yaml import shipped_jobs
    from prism.models.changes.find import choose_steps
    from prism.traces import find_recording, read_step_times, read_trace

    path = Path(what)
    if (path / "result.nc").is_file():  # the folder that a command wrote
        path = path / "result.nc"
        what = str(path)
    is_netcdf = path.suffix == ".nc" or (what in library_names() and what not in shipped_jobs())
    found = None
    is_job = what in shipped_jobs() or path.suffix in (".yaml", ".yml")
    if not is_netcdf and not is_job and path.exists():
        found = find_recording(what)
    kind = None if found is None else found.holds
    if (column is not None or unit is not None or where) and kind != "step_times":
        raise PrismError(
            f"{what}: --column, --unit and --where choose among step times, which this is not; "
            "leave them out"
        )
    if (skip is not None or steps is not None) and kind not in ("step_times", "trace"):
        raise PrismError(
            f"{what}: --skip and --steps choose steps of a trace or of step times, which this is "
            "not; leave them out"
        )
    if step_range is not None and kind != "trace":
        raise PrismError(
            f"{what}: --step-range names ranges of a profiler's trace, which this is not; leave it "
            "out"
        )
    if not is_netcdf and kind is None:
        from prism.jobs.job import load_job
        from prism.present.answers.job import job_answer

        return job_answer(load_job(what, overrides))
    if overrides:
        raise PrismError(f"{what}: --set changes keys of a job; this is not one, leave it out")
    if is_netcdf:
        return _describe_netcdf(what)
    if kind in ("kernels", "collectives"):
        return _describe_table(what)  # by its one reader: fit
    from prism.present.traceshow import describe_step_times, describe_trace

    if kind == "trace":
        whole = read_trace(found or what, step_range)
        return describe_trace(choose_steps(whole, skip, steps))
    times = read_step_times(found or what, column, where, unit)
    return describe_step_times(choose_steps(times, skip, steps))


def describe_jobs() -> Answer:
    """Describe the jobs that ship with prism."""
    from prism.jobs.job import load_job
    from prism.jobs.jobspec.yaml import shipped_jobs

    rows: list[dict[str, Any]] = []
    for job in map(load_job, shipped_jobs()):
        layout = job.parallelism
        sizes = {key: getattr(layout, key) for key in ("tp", "cp", "pp", "vpp", "dp", "ep")}
        rows.append({
            "job": job.name, "gpus": job.world_size,
            "device": None if job.model.durations else str(job.cluster.device),
            "layout": " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1),
            "microbatches": layout.microbatches, "data_parallel": layout.data_parallel,
            "schedule": layout.schedule,
        })  # fmt: skip
    return _listed("Jobs that ship with prism", "jobs", rows)


def describe_libraries() -> Answer:
    """Describe the distribution sets that ship with prism."""
    from prism.distributions.library import library_names, load_library

    rows: list[dict[str, Any]] = [
        {"library": library.name, "device": library.device, "entries": len(library.entries),
         "date": library.date}
        for library in map(load_library, library_names())
    ]  # fmt: skip
    return _listed("Libraries that ship with prism", "libraries", rows)


def _listed(title: str, key: str, rows: list[dict[str, Any]]) -> Answer:
    """Make the answer of a list of what ships with prism, a column for each key."""
    columns = tuple(
        Column("GPUs" if name == "gpus" else name.replace("_", " "), right=isinstance(value, int))
        for name, value in rows[0].items()
    )
    cells = tuple(
        tuple(count(value) if isinstance(value, int) else value for value in row.values())
        for row in rows
    )
    table = Table("", columns, cells)
    return Answer(title=title, subject=title, tables=(table,), figures={key: rows})


def _describe_table(what: str) -> Answer:
    """Describe a table of kernels, or output of nccl-tests, by the library it makes."""
    from prism.models.fit import fit
    from prism.present.answers.fit import fit_answer

    answer = fit_answer(fit(what))
    kind = "collectives" if "collectives" in answer.figures else "kernels"
    return replace(answer, figures={**answer.figures, "kind": kind})


def _describe_netcdf(what: str) -> Answer:
    from prism.common.shipped import data_path
    from prism.distributions.library import library_names

    path = Path(what)
    if not path.exists() and what in library_names():
        path = data_path("distributions") / f"{what}.nc"
    if not path.exists():
        raise PrismError(f"{what}: no such file; prism show --libraries lists names")
    expected = "what a command of prism wrote; write it again"
    dataset = read_netcdf(path, expected)
    kind = kind_of(dataset)
    with told_broken(path, expected):
        if kind is not None:
            return _describe_result(path, kind, dataset)
        if "family" in dataset:
            return _describe_library(path)
    raise PrismError(
        f"{what}: holds {', '.join(sorted(map(str, dataset.variables))[:5]) or 'nothing'}; "
        "expected a result, a model of prism fit, or a library of distributions"
    )


def _describe_result(path: Path, kind: str, result: xr.Dataset) -> Answer:
    """Describe a result or a model as the command that wrote it does."""
    answer: Answer = KINDS[kind].answer(result)
    numbers = answer.json()
    if KINDS[kind].is_model:
        found = {"kind": "model", "model_kind": kind, "summary": numbers}
        return replace(answer, subject=f"{path}, {kind} model of {answer.subject}", figures=found)
    if kind not in ("simulation", "estimate"):
        shown = "result" if kind == "steps_estimate" else kind
        return replace(answer, figures={"kind": shown, "summary": numbers})
    known = ("kind", "job", "job_sources", "engine", "warnings", "wall_seconds")
    provenance = {key: value for key, value in result.attrs.items() if key not in known}
    rows: list[tuple[str, Cell]] = [(key, str(value)) for key, value in provenance.items()]
    tables = (*answer.tables, pairs_table("Provenance", rows, details=True))
    found = {"kind": "result", "summary": numbers, "provenance": provenance}
    return replace(answer, tables=tables, figures=found)


def _describe_library(path: Path) -> Answer:
    from prism.distributions.library import load_library

    library = load_library(path)
    rows = [_entry(entry) for entry in library.entries.values()]
    basis = {
        row["entry"]: "assumption" if row["source"].startswith("assumption") else "data"
        for row in rows
    }
    assumed = sum(what == "assumption" for what in basis.values())
    text = f"Assumptions: {assumed} of {format_count(len(rows), 'entry')}; the others rest on data."
    spreads = tuple(
        (row["entry"], row["law"], share(row["cv"]),
         Figure(row["p99_p50"], f"{row['p99_p50']:.3f}"), count(row["n"]), basis[row["entry"]])
        for row in rows if row["law"] is not None
    )  # fmt: skip
    numbers = tuple(
        (row["entry"], Figure(row["mean"], f"{row['mean']:.4g} {row['units']}".removesuffix(" 1")),
         count(row["n"]), basis[row["entry"]])
        for row in rows if row["law"] is None
    )  # fmt: skip
    name, law, what = (
        Column(head, right=False) for head in ("multiplier of mean 1", "distribution", "basis")
    )
    heads = name, law, Column("CV"), Column("p99/p50"), Column("n"), what
    found: dict[str, Any] = {"kind": "library", "library": library.name, "entries": rows}
    tables = [
        Table("Distributions", heads, spreads),
        Table("Numbers", (replace(name, title="entry"), Column("value"), Column("n"), what),
              numbers, details=True),
    ]  # fmt: skip
    if library.tables:
        found["tables"] = {
            name: {"sizes": {axis: grid.tolist() for axis, grid in table.axes.items()},
                   "rate": table.rate.tolist(), "units": table.units, "source": table.source}
            for name, table in library.tables.items()
        }  # fmt: skip
        columns = (
            replace(name, title="kernel"),
            Column("sizes"),
            Column("best rate"),
            Column("source", right=False),
        )
        kernels = tuple(
            (kind, " x ".join(str(n) for n in table.rate.shape),
             Figure(float(table.rate.max()), f"{table.rate.max():.4g} {table.units}"),
             "assumption" if table.source.startswith("assumption") else "data")
            for kind, table in library.tables.items()
        )  # fmt: skip
        tables.append(Table("Kernel tables", columns, kernels))
    pictures: tuple[Picture, ...] = ()
    if any(kind.startswith("gemm/") for kind in library.tables):
        title = "Throughput of matrix products by size"
        errors = Errors("none: nothing is drawn at random", "one session's measurements")
        note = "Points: measured products of all shapes. Lines: square products, as jobs read them."
        pictures = (Picture("products", title, lambda: plots.plot_library(library), note, errors),)
    sources: list[tuple[str, Cell]] = [(row["entry"], row["source"]) for row in rows]
    return Answer(
        title="Library of distributions",
        subject=library.name,
        head=f": {library.device}, {library.date}".rstrip(", "),
        findings=(Finding("assumptions", text),) * bool(assumed),
        tables=(
            *(table for table in tables if table.rows),
            pairs_table("Sources", sources, details=True),
        ),
        figures=found,
        pictures=pictures,
    )


def _entry(entry: Entry) -> dict[str, Any]:
    law = entry.law
    return {
        "entry": entry.name, "law": None if law is None else law.family,
        "mean": float(entry.mean), "units": entry.units,
        "cv": None if law is None else float(law.cv),
        "p99_p50": None if law is None else float(law.ppf(0.99) / law.ppf(0.5)),
        "n": entry.n or None, "source": entry.source,
    }  # fmt: skip
