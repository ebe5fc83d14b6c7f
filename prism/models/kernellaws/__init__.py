"""Distributions of kernels and collectives where a recording has no steps to make a model of.

A library of distributions and figures from a trace without steps, from a table of kernels' moments,
or from output of nccl-tests. Reading the files is `prism.traces`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prism.models.kernellaws.collectives import library_of_collectives
from prism.models.kernellaws.moments import library_of_moments
from prism.models.kernellaws.samples import ONE_STEP, library_of_trace, why_no_model
from prism.traces.hta import read_hta

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "ALONE",
    "ONE_STEP",
    "library_of_collectives",
    "library_of_moments",
    "library_of_table",
    "library_of_trace",
    "why_no_model",
]

ALONE = {
    "step_times": "step times come in one file, and {n} were given; put the runs into one table "
    "with a column run",
    "kernels": "a table of kernels comes alone, and {n} inputs were given; join them into one",
    "collectives": "output of nccl-tests comes in one file or folder, and {n} inputs were given",
}
"""What is said where inputs of a kind (`recording_kind`) that come alone are several."""


def library_of_table(path: str | Path, kind: str) -> xr.Dataset:
    """Make a library of a file of kind ``kernels`` or ``collectives``, see `recording_kind`."""
    if kind == "collectives":
        return library_of_collectives(path)
    return library_of_moments(read_hta(path))
