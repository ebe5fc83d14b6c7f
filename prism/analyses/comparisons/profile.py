"""A profile against a job: class by class, what was measured of a step and what is predicted.

Which of what the user named is the profile and which the job, and the result. Left out: how time is
split by class (`prism.analyses.comparisons.classes`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

import prism
from prism.analyses.comparisons.classes import (
    IDLE,
    LINKS,
    measured_times,
    merged,
    predicted_times,
)
from prism.common.errors import PrismError, option
from prism.common.results import (
    Columns,
    Field,
    Result,
    pack_figures,
    pack_texts,
    read_figures,
    read_texts,
)
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.models.changes.find import choose_steps
from prism.traces import Recording, Trace, find_recording, read_trace
from prism.traces.looks import what_is
from prism.traces.table import KERNEL_FORMATS

if TYPE_CHECKING:
    import pandas as pd

KIND = "class_comparison"
_TAKES = (
    "compare takes a profile and a job (a trace with kernels of PyTorch's profiler, Nsight Systems "
    "or Chakra, then a job file or a shipped job's name), two results, or two files of step times"
)


def read_profile(a: Any, b: Any, step_range: str | None) -> tuple[Trace, Job] | None:
    """Read a profile and a job; None where results or step times are to be compared.

    Raises PrismError: one of both is there, but not the other.
    """
    first, second = _recording(a, _is_job(b)), _recording(b, False)
    if _is_profile(first):
        assert first is not None
        if second is not None or isinstance(b, xr.Dataset):
            raise PrismError(f"{_name(b)}: {_what(b, second)}, but {a} is a profile; {_TAKES}")
        return read_trace(first, step_range), b if isinstance(b, Job) else load_job(b)
    if _is_job(a) and _is_profile(second):
        raise PrismError(f"{_name(a)}: is a job; the profile comes first: compare {b} {_name(a)}")
    if _is_job(b) and not _is_job(a):
        raise PrismError(f"{_name(a)}: {_what(a, first)}, but {_name(b)} is a job; {_TAKES}")
    if step_range is not None:
        raise PrismError(f"{option('step_range')}: is of a profile, and {_name(a)} is none")
    return None


def _is_profile(recording: Recording | None) -> bool:
    return (
        recording is not None
        and recording.reader is not None
        and recording.reader.name in KERNEL_FORMATS
    )


def _what(given: Any, recording: Recording | None) -> str:
    """Say what was given in place of a profile or a job."""
    if recording is not None:
        return f"is {recording.reader.what if recording.reader else what_is(recording.files[0])}"
    is_path = isinstance(given, str | os.PathLike)
    return "is a result" if not is_path or Path(given).exists() else "no such file or folder"


def _recording(what: Any, must: bool) -> Recording | None:
    """Find what a path holds; None for results, jobs, and, unless it must be one, no recording."""
    if not isinstance(what, str | os.PathLike) or _is_job(what):
        return None
    path = Path(what)
    if not path.exists() or path.suffix == ".nc" or (path / "result.nc").exists():
        return None
    try:
        return find_recording(path)
    except PrismError:  # said by whoever reads it
        if must:
            raise
        return None


def _is_job(what: Any) -> bool:
    if isinstance(what, Job):
        return True
    if not isinstance(what, str | os.PathLike):
        return False
    return str(what) in shipped_jobs() or Path(what).suffix in (".yaml", ".yml")


def _name(what: Any) -> str:
    """Name an input in a message."""
    if isinstance(what, str | os.PathLike):
        return str(what)
    return str(getattr(what, "source", "the result" if isinstance(what, xr.Dataset) else "the job"))


def refuse(given: Mapping[str, Any]) -> None:
    """Refuse options that say nothing about a profile and a job."""
    for argument, value in given.items():
        if value is not None and value != {}:
            raise PrismError(
                f"{option(argument)}: is of results and step times, not of a profile and a job; "
                "leave it out"
            )


def compare_classes(
    trace: Trace, job: Job, skip: int | None = None, steps: str | None = None
) -> ClassComparison:
    """Compare a profile's time by class with a job's; `skip` and `steps` choose steps.

    Raises PrismError: no step has kernels, or the job's kernels are not known.
    """
    measured = measured_times(choose_steps(trace, skip, steps))
    if measured is None:
        raise PrismError(f"{trace.source}: no step with kernels in it; {_TAKES}")
    n_ranks = int(trace.meta.get("world_size", len(measured.ranks)))
    found = merged(measured, predicted_times(job, measured.ranks, n_ranks))
    measured, predicted = found
    names = [
        name for name in dict.fromkeys([*measured.seconds, *predicted.seconds])
        if name == IDLE or measured.kernels.get(name) or any(x.seconds.get(name) for x in found)
    ]  # fmt: skip
    rows = [{
        "name": name, **_times(*(times.seconds.get(name, 0.0) for times in found)),
        "kernels": None if name == IDLE else measured.kernels.get(name, 0.0),
    } for name in names]  # fmt: skip
    period = _times(measured.period, predicted.period)
    figures = {"steps": measured.n_steps, "ranks": len(measured.ranks)}
    attrs = {
        "kind": KIND, "prism_version": prism.__version__, "trace": trace.source,
        "job_name": job.name, "world_size": n_ranks, "job_world_size": job.world_size,
    }  # fmt: skip
    parts = [
        CLASSES.pack(rows), pack_figures(FIGURES, figures), pack_figures(TIMES, period, "period_"),
        pack_texts(notes=trace.notes),
    ]  # fmt: skip
    return ClassComparison(xr.merge(parts).assign_attrs(attrs))


def _times(measured: float, predicted: float) -> dict[str, float | None]:
    """Set two times beside each other, with their ratio; see `TIMES`."""
    ratio = predicted / measured if measured > 0.0 else None
    return {"measured": measured, "predicted": predicted, "ratio": ratio}


FIGURES = Field("steps", "count", "steps measured"), Field("ranks", "count", "ranks measured")
TIMES = (
    Field("measured", "s", "time of a step as measured"),
    Field("predicted", "s", "time of a step as predicted"),
    Field("ratio", "1", "predicted over measured"),
)
CLASSES = Columns("class", (
    Field("name", "text", title="class"),
    *TIMES,
    Field("kernels", "1", "device activities per step"),
))  # fmt: skip


class ClassComparison(Result):
    """A step's time by class of kernels, measured in a profile and predicted of a job."""

    _needs = ("period_measured",)

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        data = self.dataset
        return {
            "trace": str(self.attrs["trace"]), "job": str(self.attrs["job_name"]),
            **read_figures(FIGURES, data), "period": read_figures(TIMES, data, "period_"),
            "classes": CLASSES.rows(data), "notes": read_texts(data, "notes"),
        }  # fmt: skip

    @cached_property
    def classes(self) -> pd.DataFrame:
        """Time by class [s], which adds up to the period."""
        return CLASSES.frame(self.figures()["classes"])


def has_links(figures: Mapping[str, Any]) -> bool:
    """Tell whether a comparison holds communication."""
    return any(row["name"] in LINKS for row in figures["classes"])
