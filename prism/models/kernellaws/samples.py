"""A library from the durations of a trace's kernels, where the trace holds no steps.

Each kernel's durations are held against the mean of those with the same launch shape or message,
else sizes would pass for variability. Left out: effects that kernels share, and what waits for
what, for which steps are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.distributions.distribution import constant
from prism.models.kernellaws.pack import KernelLaw, kernel_library
from prism.models.kerneltrace.laws import MEASURES, measured_durations
from prism.models.kerneltrace.steps import kernel_keys
from prism.simulation.tracemodel.model import sample_law
from prism.traces.table import Trace

if TYPE_CHECKING:
    import xarray as xr

Floats = NDArray[np.float64]

ONE_STEP = "the trace holds one step, and two are needed to learn how steps vary"
_FEW = 20  # durations below which a kernel's tail is not reported
_NOT_IDENTIFIABLE = (
    "effects that kernels share (step, rank): nothing says which kernels are of one step",
    "a step's time: what waits for what is not known; a job's own graph is needed (prism show "
    "--jobs)",
)


def why_no_model(trace: Trace) -> str | None:
    """Say why a trace of kernels is no model of steps; None where it is one.

    PyTorch's traces always name their steps: one with fewer than two is an error of its own.
    """
    if not trace.has_kernels or trace.format == "kineto":
        return None
    ops = trace.ops
    if not np.isfinite(ops["start"].to_numpy()).all():
        return "the trace has no start times, so neither steps nor what waits for what"
    steps = np.unique(ops["step"].to_numpy())
    n = int((steps >= 0).sum())
    marked = all(about["steps"] for about in trace.meta["ranks"])
    if not marked:
        return "nothing in the trace marks steps"
    if n > 1:
        return None
    return ONE_STEP if n else "no kernel of the trace was launched in a step"


def library_of_trace(trace: Trace, reason: str) -> xr.Dataset:
    """Make a library of a trace's kernels."""
    keys, key = kernel_keys(trace)
    measure, duration = measured_durations(trace.ops)
    collective = trace.ops["collective"]
    # a matched collective is one transfer, whatever number of ranks recorded it
    again = (collective.duplicated() & (collective >= 0)).to_numpy() & (measure == 1)
    own = (measure != MEASURES.index("host")) & ~again & np.isfinite(duration)
    key, measure, duration = key[own], measure[own], duration[own]
    relative = _relative(key, measure, duration)
    names: dict[tuple[str, str, str, int], int] = {}
    pairs, of_pair = np.unique(key * len(MEASURES) + measure, return_inverse=True)
    group_of = []
    for pair in pairs.tolist():
        k = keys[pair // len(MEASURES)]
        label = (k.name, k.kernel_class, k.op_kind, pair % len(MEASURES))
        group_of.append(names.setdefault(label, len(names)))
    group = np.array(group_of, np.int64)[of_pair]
    total = float(duration.sum()) or 1.0
    rows = [
        _law(*label[:3], MEASURES[label[3]], duration[at], relative[at], total)
        for label, at in zip(names, _parts(group, len(names)), strict=True)
    ]
    of_class: dict[str, int] = {}
    class_of = np.array([of_class.setdefault(k[1], len(of_class)) for k in names], np.int64)
    classes = [
        _law(name, name, "", "", duration[at], relative[at], total)
        for name, at in zip(of_class, _parts(class_of[group], len(of_class)), strict=True)
    ]
    report: dict[str, Any] = {
        "inputs": [trace.source],
        "why_no_model": reason,
        "not_identifiable": list(_NOT_IDENTIFIABLE),
        "warnings": [f"a library of kernels, not a model of steps: {reason}"],
        "notes": list(trace.notes),
    }
    return kernel_library(rows, classes, report, trace.source)


def _relative(key: NDArray[np.int64], measure: NDArray[np.int64], duration: Floats) -> Floats:
    """Durations over the mean of those of the same shape; not a number where there is no other."""
    by = pd.Series(duration).groupby([key, measure])
    mean, n = by.transform("mean").to_numpy(), by.transform("count").to_numpy()
    known = (n > 1) & (mean > 0.0)
    return np.where(known, duration / np.where(known, mean, 1.0), np.nan)


def _parts(group: NDArray[np.int64], n: int) -> list[NDArray[np.int64]]:
    """Rows of each of n groups."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.searchsorted(group[order], np.arange(1, n)))


def _law(
    name: str, kernel_class: str, op_kind: str, measure: str, duration: Floats, relative: Floats,
    total: float,
) -> KernelLaw:  # fmt: skip
    """Describe one kernel by its durations and those over their shape's mean."""
    mean = float(duration.mean())
    values = relative[np.isfinite(relative)]
    if not values.size and duration.size > 1 and mean > 0.0:  # no shape comes twice
        values = duration / mean
    cv = p99 = float("nan")
    if values.size > 1:
        cv = float(values.std(ddof=1))
    if values.size >= _FEW:
        middle, high = np.quantile(values, [0.5, 0.99])
        p99 = float(high / middle) if middle > 0.0 else p99
    law = sample_law(values) if values.size > 1 else constant()
    family = "empirical" if law.std > 0.0 else "constant"
    share = float(duration.sum()) / total
    return KernelLaw(
        name, kernel_class, op_kind, measure, duration.size, mean, law, family, cv, p99, share
    )
