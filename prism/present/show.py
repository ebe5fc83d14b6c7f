"""``prism show``: what a file or a shipped name holds, as data and as a view.

A job is shown resolved with the source of every value, a library with its entries and their
sources, a result or a model with its summary, a trace with its kinds of op
(`prism.present.traceshow`). Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from prism.common.errors import PrismError
from prism.common.files import read_netcdf, told_broken
from prism.common.resultfiles import KINDS, kind_of
from prism.common.text import format_share
from prism.present.terminal import render
from prism.present.views.job import job_view
from prism.present.views.tables import bold, table_view

if TYPE_CHECKING:
    import xarray as xr

Description = tuple[dict[str, Any], RenderableType]


def describe(
    what: str,
    overrides: Sequence[str] = (),
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    step_range: str | None = None,
) -> Description:
    """Describe a file, or a job or library that ships with prism.

    A file's suffix tells jobs (.yaml, .yml) and netCDF (.nc); recordings are told by content.

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

    Returns
    -------
    tuple of dict and rich.console.RenderableType
        The same things for scripts and for people.

    Raises
    ------
    PrismError
        If it is none of these.
    """
    from prism.distributions.library import library_names
    from prism.jobs.jobspec.yaml import shipped_jobs

    path = Path(what)
    is_netcdf = path.suffix == ".nc" or (what in library_names() and what not in shipped_jobs())
    kind = None
    if not is_netcdf and what not in shipped_jobs() and path.suffix not in (".yaml", ".yml"):
        kind = _recording_kind(path)
    if (column is not None or where) and kind != "step_times":
        raise PrismError(
            f"{what}: --column and --where choose among step times, which this is not; leave them "
            "out"
        )
    if step_range is not None and kind != "trace":
        raise PrismError(
            f"{what}: --step-range names ranges of a profiler's trace, which this is not; leave it "
            "out"
        )
    if not is_netcdf and kind is None:
        return _describe_job(what, overrides)
    if overrides:
        raise PrismError(f"{what}: --set changes keys of a job; this is not one, leave it out")
    if is_netcdf:
        return _describe_netcdf(what)
    if kind in ("kernels", "collectives"):
        from prism.present.views.library import describe_table

        return describe_table(what)
    from prism.present.traceshow import describe_step_times, describe_trace

    if kind == "trace":
        return describe_trace(what, step_range)
    return describe_step_times(what, column, where)


def _recording_kind(path: Path) -> str | None:
    """Say which kind of recording a file or folder is; None for all else, a job's name included."""
    if not path.exists():
        return None
    from prism.traces.kinds import recording_kind

    return recording_kind(str(path))


def describe_jobs() -> Description:
    """Describe the jobs that ship with prism."""
    from prism.jobs.job import load_job
    from prism.jobs.jobspec.yaml import shipped_jobs

    rows = []
    for name in shipped_jobs():
        job = load_job(name)
        layout = job.parallelism
        sizes = {key: getattr(layout, key) for key in ("tp", "cp", "pp", "vpp", "dp", "ep")}
        rows.append(
            {
                "job": name,
                "gpus": job.world_size,
                "device": None if job.model.durations else str(job.cluster.device),
                "layout": " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1),
                "microbatches": layout.microbatches,
                "data_parallel": layout.data_parallel,
                "schedule": layout.schedule,
            }
        )
    view = table_view("Jobs that ship with prism", rows, right=("gpus", "microbatches"))
    return {"jobs": rows}, view


def describe_libraries() -> Description:
    """Describe the distribution sets that ship with prism."""
    from prism.distributions.library import library_names, load_library

    rows = []
    for library in map(load_library, library_names()):
        row = {"library": library.name, "device": library.device, "entries": len(library.entries)}
        rows.append({**row, "date": library.date})
    view = table_view("Libraries that ship with prism", rows, right=("entries",))
    return {"libraries": rows}, view


def _describe_job(what: str, overrides: Sequence[str]) -> Description:
    """Describe a resolved job."""
    from prism.jobs.job import layer_split, load_job, provenance
    from prism.present.views.links import describe_links, links_view

    job = load_job(what, overrides)
    values = job.model_dump(mode="json", exclude={"name", "source"})
    if job.model.durations is not None:
        # the sizes say nothing where the durations are given
        values["model"] = {"durations": values["model"]["durations"]}
    sources = provenance(job)
    split = layer_split(job) if job.model.durations is None else []
    found = {
        "kind": "job",
        "job": job.name,
        "world_size": job.world_size,
        "layer_split": split,
        "values": values,
        "sources": sources,
    }
    view = job_view(f"{job.name}: {job.world_size:,} GPUs", values, sources)
    if job.model.durations is None:
        links = describe_links(job)
        found["links"] = links
        view = Group(view, "", links_view(links))
    if split:
        runs = ", ".join(f"{n} of {layers}" for layers, n in _runs(split))
        view = Group(view, "", f"model chunks by layers, in virtual-stage order: {runs}")
    return found, view


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Count equal neighbours: value and how many."""
    return [(value, len(list(equal))) for value, equal in groupby(numbers)]


def _describe_netcdf(what: str) -> Description:
    """Describe a result, a model or a library."""
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


def _describe_result(path: Path, kind: str, result: xr.Dataset) -> Description:
    """Describe a result or a model as the command that wrote it does."""
    known = KINDS[kind]
    numbers = known.figures(result)
    if known.answer:
        view: RenderableType = render(known.call("answer", result), details=True)
    else:
        view = known.call("view", numbers)
    if known.is_model:
        found = {"kind": "model", "model_kind": kind, "summary": numbers}
        return found, Group(bold(str(path), f": {kind} model"), view)
    if kind not in ("simulation", "estimate"):
        return {"kind": "result" if kind == "steps_estimate" else kind, "summary": numbers}, view
    shown = ("kind", "job", "job_sources", "engine", "warnings", "wall_seconds")
    provenance = {key: value for key, value in result.attrs.items() if key not in shown}
    rows = [{"attribute": key, "value": str(value)} for key, value in provenance.items()]
    view = Group(view, "", table_view("Provenance", rows))
    return {"kind": "result", "summary": numbers, "provenance": provenance}, view


def _describe_library(path: Path) -> Description:
    """Describe a set of distributions."""
    from prism.distributions.library import load_library

    library = load_library(path)
    rows = []
    for entry in library.entries.values():
        law = entry.law
        row: dict[str, Any] = {"entry": entry.name, "law": None if law is None else law.family}
        row |= {"mean": float(entry.mean), "units": entry.units}
        row |= {"cv": None if law is None else float(law.cv)}
        row |= {"p99_p50": None if law is None else float(law.ppf(0.99) / law.ppf(0.5))}
        rows.append({**row, "n": entry.n or None, "source": entry.source})
    title = f"Library {library.name}: {library.device}, {library.date}".rstrip(", ")
    view: RenderableType = table_view(title, [_library_row(row) for row in rows], right=("n",))
    found: dict[str, Any] = {"kind": "library", "library": library.name, "entries": rows}
    if library.gemm is not None:
        pairs = zip(library.gemm.flop, library.gemm.throughput, strict=True)
        found["gemm"] = [{"flop": float(x), "flop_per_s": float(y)} for x, y in pairs]
        gemm = f"Measured matrix products: {len(found['gemm'])} sizes, {library.gemm.source}"
        view = Group(view, "", gemm)
    return found, view


def _library_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten an entry to what fits a screen: a law by its spread, a figure by its value."""
    if row["law"] is None:
        value = f"{row['mean']:.4g}" + (f" {row['units']}" if row["units"] != "1" else "")
    else:
        value = f"CV {format_share(row['cv'])}, p99/p50 {row['p99_p50']:.3f}"
    what = {"entry": row["entry"], "law": row["law"] or "figure", "value": value}
    return {**what, "n": row["n"], "source": row["source"]}
