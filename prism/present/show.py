"""``prism show``: what a file or a shipped name holds, as an answer.

A job is shown resolved with the source of every value, a library with its entries and their
sources, a result or a model with its summary, a trace with its kinds of op
(`prism.present.traceshow`). Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism import plots
from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, wrap_corrupt_file
from prism.common.resultfiles import KINDS, kind_of
from prism.common.text import format_count
from prism.distributions.kerneltables import KernelFit, KernelTable
from prism.present.answer import Answer, Errors, Finding, Picture
from prism.present.cells import Cell, Column, Figure, Table, count, pairs_table, share

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
    pattern: str | None = None,
) -> Answer:
    """Describe a file, or a job or library that ships with prism.

    A file's suffix tells jobs (.yaml, .yml) and netCDF (.nc); recordings are sniffed. `overrides`
    are of a job; `column`, `where` and `unit` choose from a table of step times, `pattern` finds
    them in a log, `step_range` names the steps of a profile. `skip` leaves out first steps, of each
    run of step times, and `steps` all but ``A:B`` by number.
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
        found = find_recording(what, pattern)
    kind = None if found is None else "step_times" if found.has_steps(column) else found.holds
    chosen = any(name is not None for name in (column, unit, pattern)) or where
    if chosen and kind != "step_times":
        raise PrismError(
            f"{what}: --column, --unit, --pattern and --where choose among step times, which this "
            "is not; leave them out"
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
        rows.append({
            "job": job.name, "gpus": job.world_size,
            "device": None if job.model.durations else str(job.cluster.device),
            "layout": layout.sizes,
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
    with wrap_corrupt_file(path, expected):
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
    known = ("kind", "job", "job_sources", "wall_seconds")
    provenance = {
        key: value for key, value in result.attrs.items()
        if key not in known and not key.startswith("engine_")
    }  # fmt: skip
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
        (row["entry"], row["distribution"], share(row["cv"]),
         Figure(row["p99_p50"], f"{row['p99_p50']:.3f}"), count(row["n"]), basis[row["entry"]])
        for row in rows if row["distribution"] is not None
    )  # fmt: skip
    numbers = tuple(
        (row["entry"], Figure(row["mean"], f"{row['mean']:.4g} {row['units']}".removesuffix(" 1")),
         count(row["n"]), basis[row["entry"]])
        for row in rows if row["distribution"] is None
    )  # fmt: skip
    name, distribution, what = (
        Column(head, right=False) for head in ("multiplier of mean 1", "distribution", "basis")
    )
    heads = name, distribution, Column("CV"), Column("p99/p50"), Column("n"), what
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
    kernels = {**library.tables, **library.kernels}
    if library.kernels:
        found["kernels"] = {kind: _kernel(table) for kind, table in library.kernels.items()}
    tables.append(_kernels_table(kernels))
    pictures: list[Picture] = []
    for kind, (title, note) in _DRAWN.items():
        if any(name.startswith(f"{kind}/") for name in kernels):
            draw = partial(plots.plot_library, library, kind)
            errors = Errors("none: nothing is drawn at random", "those of the kernels' tables")
            pictures.append(Picture(_STEMS[kind], title, draw, note, errors))
    sources: list[tuple[str, Cell]] = [(row["entry"], row["source"]) for row in rows]
    whence: list[tuple[str, Cell]] = [(kind, table.source) for kind, table in kernels.items()]
    return Answer(
        title="Library of distributions",
        subject=library.name,
        head=f": {library.device}, {library.date}".rstrip(", "),
        findings=(Finding("assumptions", text),) * bool(assumed),
        tables=(
            *(table for table in tables if table.rows),
            pairs_table("Sources", sources, details=True),
            *[pairs_table("Sources of kernels", whence, details=True)] * bool(whence),
        ),
        figures=found,
        pictures=tuple(pictures),
    )


_DRAWN = {
    "gemm": (
        "Throughput of matrix products by size",
        "Points: measured products of all shapes. Lines: square products, as jobs read them.",
    ),
    "attention": (
        "Throughput of causal attention by sequence",
        "bfloat16, 32 heads and 8 of keys, of 128; 32,768 tokens. Full lines: forward; dashed: "
        "backward, with the products that it repeats.",
    ),
}
_STEMS = {"gemm": "products", "attention": "attention"}
_PASSES = ("causal", "full", "forward", "backward", "deterministic", "latent")


def _kernel(table: KernelTable | KernelFit) -> dict[str, Any]:
    """Figures of a kernel: rows behind it, range of its sizes, spread of its error, source."""
    if isinstance(table, KernelTable):
        ends = {name: [float(grid[0]), float(grid[-1])] for name, grid in table.axes.items()}
        return {"rows": table.rate.size, "sizes": ends, "sd": None, "source": table.source}
    ends = {name: list(limits) for name, limits in table.ends.items()}
    terms = [{"seconds": term.coefficient, "powers": dict(term.powers)} for term in table.terms]
    return {"rows": table.n, "sizes": ends, "sd": table.sd, "source": table.source, "terms": terms}


def _kernels_table(kernels: Mapping[str, KernelTable | KernelFit]) -> Table:
    """One row a kernel, its masks and passes together."""
    groups: dict[str, list[str]] = {}
    for name in kernels:
        parts = [part for part in name.split("/") if part not in _PASSES]
        groups.setdefault("/".join(parts), []).append(name)
    rows: list[tuple[Cell, ...]] = []
    for group, names in groups.items():
        each = [_kernel(kernels[name]) for name in names]
        assumed = sum(one["source"].startswith("assumption") for one in each)
        sds = [one["sd"] for one in each if one["sd"]]
        rows.append((
            group, count(len(names)), count(sum(one["rows"] for one in each)),
            _ranges([one["sizes"] for one in each]), share(max(sds)) if sds else None,
            "data" if not assumed else "assumption" if assumed == len(each) else "both",
        ))  # fmt: skip
    columns = (
        Column("kernel", right=False), Column("passes"), Column("rows"),
        Column("sizes", right=False), Column("sd"), Column("basis", right=False),
    )  # fmt: skip
    notes = (
        "rows: measured kernels, or points of a grid; sd: largest of the logarithm of fitted over "
        "measured, none where a grid is interpolated; passes: with masks",
    )
    return Table("Kernels by shape", columns, tuple(rows), notes)


def _ranges(sizes: Sequence[Mapping[str, Sequence[float]]]) -> str:
    """Range of each size over some kernels; sizes that always follow another are left out."""
    names = [n for n in dict.fromkeys(n for one in sizes for n in one) if n not in _FOLLOW]
    out = []
    for name in names:
        ends = [one[name] for one in sizes if name in one]
        low, high = min(x[0] for x in ends), max(x[1] for x in ends)
        out.append(f"{name} {_short(low)}" + f"-{_short(high)}" * (high > low))
    return ", ".join(out)


def _short(size: float) -> str:
    """Write a size with three digits."""
    unit = next((unit for unit in (1e9, 1e6, 1e3) if size >= max(unit, 1e4)), 1.0)
    return f"{size / unit:.{3 if unit > 1.0 else 4}g}{_UNITS[unit]}"


_UNITS = {1e9: "G", 1e6: "M", 1e3: "k", 1.0: ""}


_FOLLOW = ("kv_heads", "v_head_dim")


def _entry(entry: Entry) -> dict[str, Any]:
    distribution = entry.distribution
    return {
        "entry": entry.name, "distribution": None if distribution is None else distribution.family,
        "mean": float(entry.mean), "units": entry.units,
        "cv": None if distribution is None else float(distribution.cv),
        "p99_p50": None if distribution is None
        else float(distribution.ppf(0.99) / distribution.ppf(0.5)),
        "n": entry.n or None, "source": entry.source,
    }  # fmt: skip
