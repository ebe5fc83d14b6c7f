"""A library from the durations of a trace's kernels, where the trace holds no steps.

Each kernel's durations are held against the mean of those with the same launch shape or message,
else sizes would pass for variability. Left out: effects that kernels share, and what waits for
what, for which steps are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prism.distributions.distribution import Distribution
from prism.distributions.samples import sample_distribution
from prism.models.kernellibraries.pack import kernel_library
from prism.models.kerneltrace.table import CLASS, KERNEL, KernelRow, kernel_durations, pool
from prism.traces.table import Trace

if TYPE_CHECKING:
    import xarray as xr

_NOT_IDENTIFIABLE = (
    "effects that kernels share (step, rank): nothing says which kernels are of one step",
    "a step's time: what waits for what is not known; a job's own graph is needed (prism show "
    "--jobs)",
)


def why_no_model(trace: Trace) -> str | None:
    """Say why a trace of kernels is no model of steps; None where it is one.

    A trace of PyTorch's without any mark is one step.
    """
    if not trace.has_kernels or trace.format == "kineto":
        return None
    ops = trace.ops
    if not np.isfinite(ops["start"].to_numpy()).all():
        return "the trace has no start times, so neither steps nor what waits for what"
    if not all(about["steps"] for about in trace.meta["ranks"]):
        return "nothing in the trace marks steps"
    launched = (ops["step"] >= 0).any()
    return None if launched else "no kernel of the trace was launched in a step"


def library_of_trace(trace: Trace, reason: str) -> xr.Dataset:
    """Make a library of a trace's kernels."""
    table = kernel_durations(trace)
    table = table[(table["measure"] != "host") & table["duration"].notna() & ~table["again"]]
    total = float(table["duration"].sum()) or 1.0
    report: dict[str, Any] = {
        "inputs": [trace.source],
        "why_no_model": reason,
        "not_identifiable": list(_NOT_IDENTIFIABLE),
        "warnings": [f"a library of kernels, not a model of steps: {reason}"],
        "notes": list(trace.notes),
    }
    kernels, classes = pool(table, KERNEL, total), pool(table, CLASS, total)
    return kernel_library(kernels, classes, _distribution, "empirical", report, trace.source)


def _distribution(row: KernelRow) -> Distribution:
    return sample_distribution(row.samples, row.cv if np.isfinite(row.cv) else None)
