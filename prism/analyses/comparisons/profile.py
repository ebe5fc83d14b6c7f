"""A profile against a job: class by class, what was measured of a step and what is predicted.

Which of what the user named is the profile and which the job, and the result. Left out: how time is
split by class (`prism.analyses.comparisons.classes`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

import prism
from prism.analyses.comparisons.classes import (
    IDLE,
    LINKS,
    measured_times,
    merged,
    predicted_times,
)
from prism.common.errors import PrismError, named
from prism.common.results import Columns, Field, Result
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

    Raises
    ------
    PrismError
        One of both is there, but not the other.
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
        raise PrismError(f"{named('step_range')}: is of a profile, and {_name(a)} is none")
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
                f"{named(argument)}: is of results and step times, not of a profile and a job; "
                "leave it out"
            )


def compare_classes(
    trace: Trace, job: Job, skip: int | None = None, steps: str | None = None
) -> ClassComparison:
    """Compare a profile's time by class with a job's; `skip` and `steps` choose steps.

    Raises
    ------
    PrismError
        No step has kernels, or the job's kernels are not known.
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
    seconds = {"units": "s"}
    data = {
        side: ("class", np.array([times.seconds.get(name, 0.0) for name in names]), seconds)
        for side, times in (("measured", measured), ("predicted", predicted))
    }
    kernels = np.array([measured.kernels.get(name, 0.0) for name in names])
    attrs = {
        "kind": KIND, "prism_version": prism.__version__, "trace": trace.source,
        "job_name": job.name, "n_steps": measured.n_steps, "n_ranks": len(measured.ranks),
        "world_size": n_ranks, "job_world_size": job.world_size,
        "measured_period": measured.period, "predicted_period": predicted.period,
        "notes": json.dumps(list(trace.notes)),
    }  # fmt: skip
    data["kernels"] = ("class", kernels, {"units": "1", "long_name": "device activities per step"})
    return ClassComparison(xr.Dataset(data, coords={"class": names}, attrs=attrs))


CLASSES = Columns("class", (
    Field("name", "text", title="class"),
    Field("measured", "s", "time of a step as measured"),
    Field("predicted", "s", "time of a step as predicted"),
    Field("ratio", "1", "predicted over measured"),
    Field("kernels", "1", "device activities per step"),
))  # fmt: skip


class ClassComparison(Result):
    """A step's time by class of kernels, measured in a profile and predicted of a job."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return _figures(self.dataset)

    @cached_property
    def classes(self) -> pd.DataFrame:
        """Time by class [s], which adds up to the period."""
        return CLASSES.frame(self.figures()["classes"])


def _figures(dataset: xr.Dataset) -> dict[str, Any]:
    rows = []
    for name in dataset["class"].values.tolist():
        row = dataset.sel({"class": name})
        measured, predicted = float(row["measured"]), float(row["predicted"])
        rows.append({
            "name": str(name), "measured": measured, "predicted": predicted,
            "ratio": predicted / measured if measured > 0.0 else None,
            "kernels": None if name == IDLE else float(row["kernels"]),
        })  # fmt: skip
    attrs = dataset.attrs
    measured, predicted = (float(attrs[f"{x}_period"]) for x in ("measured", "predicted"))
    return {
        "trace": str(attrs["trace"]), "job": str(attrs["job_name"]),
        "steps": int(attrs["n_steps"]), "ranks": int(attrs["n_ranks"]),
        "period": {"measured": measured, "predicted": predicted, "ratio": predicted / measured},
        "classes": rows, "notes": json.loads(attrs["notes"]),
    }  # fmt: skip


def has_links(figures: Mapping[str, Any]) -> bool:
    """Tell whether a comparison holds communication."""
    return any(row["name"] in LINKS for row in figures["classes"])
