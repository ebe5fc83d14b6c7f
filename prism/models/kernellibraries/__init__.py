"""Distributions of kernels and collectives where a recording has no steps to make a model of.

A library of distributions and figures from a trace without steps, from a table of kernels' moments,
or from output of nccl-tests. Reading the files is `prism.traces`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.models.kernellibraries.collectives import library_of_collectives
from prism.models.kernellibraries.moments import library_of_moments, library_of_trace, why_no_model
from prism.traces.formats.hta import KernelMoments
from prism.traces.formats.nccltests import BandwidthTests

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "library_of_collectives",
    "library_of_moments",
    "library_of_table",
    "library_of_trace",
    "why_no_model",
]


def library_of_table(measured: KernelMoments | BandwidthTests, source: str) -> xr.Dataset:
    """Make a library of a recording that holds kernels' moments, or tests of collectives."""
    if isinstance(measured, KernelMoments):
        return library_of_moments(measured)
    return library_of_collectives(measured, source)
