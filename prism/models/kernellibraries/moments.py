"""A library of kernels: from a table of their moments, or from durations of a trace without steps.

Of moments, a kernel's distribution is the lognormal of its mean and standard deviation, pooled over
ranks: of the families with two moments the one whose durations are positive and lean to the right.
Left out: the tail beyond what the longest duration says, what the sizes of launches add to the
spread of moments, and effects that kernels share.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from prism.common.text import format_share
from prism.distributions.distribution import Distribution, constant, lognormal
from prism.distributions.samples import sample_distribution
from prism.models.kernellibraries.pack import kernel_library
from prism.models.kerneltrace.table import CLASS, KERNEL, KernelRow, kernel_durations, pool
from prism.traces.formats.hta import OTHERS, KernelMoments
from prism.traces.kernelnames import classify, collective_kind
from prism.traces.table import Trace

if TYPE_CHECKING:
    import xarray as xr

_WIDEST = 30.0  # CV beyond which a lognormal says nothing
_SURPRISE = 2.0  # times the expected: a longest duration beyond gets a warning
_NOT_IDENTIFIABLE = (
    "the shape of a kernel's distribution: only its mean, spread, minimum and maximum are known; "
    "lognormals are assumed",
    "spread at one launch shape: a kernel's durations are pooled over its shapes",
    "effects that kernels share, and a step's time: the table has neither steps nor order",
)


def library_of_moments(moments: KernelMoments) -> xr.Dataset:
    """Make a library of a table of kernels."""
    total = float(moments.total.sum())
    columns = ("name", "n", "mean", "std", "total", "most")
    table = pd.DataFrame({name: getattr(moments, name) for name in columns})
    pairs = zip(moments.kernel_type, moments.name, strict=True)
    table[["op_kind", "kernel_class", "measure"]] = [_kind(*pair) for pair in pairs]
    others = table["name"] == OTHERS
    kernels, longest = [], []
    for (name, *what), rows in table[~others].groupby(list(KERNEL), sort=False):
        row = _pooled((name, *what), rows, total)
        kernels.append(row)
        longest.append((row.share, name, _over_expected(row, float(rows["most"].max()))))
    notes = list(moments.notes)
    if others.any():
        share = float(table["total"][others].sum()) / total if total > 0.0 else 0.0
        notes.append(
            f"rows named {OTHERS} are sums of several kernels ({format_share(share)} of the "
            "time): skipped; num_kernels=1000 and duration_ratio=1 of get_gpu_kernel_breakdown "
            "leave none"
        )
    told = [
        "moments alone, no durations: distributions are lognormals of each kernel's mean and spread"
    ]
    for _, name, ratio in sorted((x for x in longest if x[2] > _SURPRISE), reverse=True)[:3]:
        told.append(
            f"{name[:60]}: its longest lasts {ratio:.3g} times what a lognormal of its spread "
            "would: stalls or several shapes, which the distribution lacks"
        )
    report: dict[str, Any] = {
        "inputs": [moments.source],
        "why_no_model": "a table of moments has neither steps nor durations",
        "ranks": int(np.unique(moments.rank).size),
        "not_identifiable": list(_NOT_IDENTIFIABLE),
        "warnings": told,
        "notes": notes,
    }
    family = "lognormal of 2 moments"
    return kernel_library(kernels, _classes(kernels), _lognormal, family, report, moments.source)


def _kind(kernel_type: str, name: str) -> tuple[str, str, str]:
    """Op kind and class of a kernel, and what its durations are."""
    if kernel_type.upper().startswith("COMM"):
        op_kind = collective_kind(name) or "transfer"
        return op_kind, "p2p" if op_kind == "transfer" else op_kind, "includes waiting"
    category = next((c for c in ("memcpy", "memset") if name.lower().startswith(c)), "kernel")
    return *classify(name, "", False, category), "kernel"


def _lognormal(row: KernelRow) -> Distribution:
    return lognormal(row.cv) if 0.0 < row.cv <= _WIDEST else constant()


def _pooled(label: tuple[str, ...], rows: pd.DataFrame, total: float) -> KernelRow:
    """Pool a kernel over ranks.

    Mean and variance of all durations: sums of squares within ranks and between their means.
    """
    name, kernel_class, op_kind, measure = label
    n = int(rows["n"].sum())
    mean = float(rows["total"].sum()) / n
    squares = float(
        ((rows["n"] - 1) * rows["std"] ** 2 + rows["n"] * (rows["mean"] - mean) ** 2).sum()
    )
    cv = math.sqrt(squares / (n - 1)) / mean if n > 1 else math.nan
    share = n * mean / total if total > 0.0 else 0.0
    row = KernelRow(name, kernel_class, op_kind, measure, n, mean, cv, math.nan, share, np.zeros(0))
    middle, high = _lognormal(row).ppf(np.array([0.5, 0.99]))
    return replace(row, p99_p50=float(high / middle) if high > middle else math.nan)


def _over_expected(row: KernelRow, longest: float) -> float:
    """Longest duration [s] over what is expected of the distribution; 0 without spread.

    Of n durations the longest lies about the quantile 1 - 1/(2 n), its median.
    """
    distribution = _lognormal(row)
    if distribution.std == 0.0:
        return 0.0
    return longest / (float(distribution.ppf(np.array([1.0 - 0.5 / row.n]))[0]) * row.mean)


def _classes(kernels: list[KernelRow]) -> list[KernelRow]:
    """Pool the relative spread of each class's kernels, weighted by their number."""
    found = []
    for name in dict.fromkeys(row.kernel_class for row in kernels):
        mine = [row for row in kernels if row.kernel_class == name]
        n = sum(row.n for row in mine)
        known = [row for row in mine if math.isfinite(row.cv)]
        weight = sum(row.n - 1 for row in known)
        squares = sum((row.n - 1) * row.cv**2 for row in known)
        cv = math.sqrt(squares / weight) if weight else math.nan
        mean, share = sum(row.mean * row.n for row in mine) / n, sum(row.share for row in mine)
        found.append(KernelRow(name, name, "", "", n, mean, cv, math.nan, share, np.zeros(0)))
    return found


# ------------------------------------------------------------------------------ of durations
# Each kernel's durations are held against the mean of those with the same launch shape or message,
# else sizes would pass for variability.
_WITHOUT_STEPS = (
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
        "not_identifiable": list(_WITHOUT_STEPS),
        "warnings": [f"a library of kernels, not a model of steps: {reason}"],
        "notes": list(trace.notes),
    }
    kernels, classes = pool(table, KERNEL, total), pool(table, CLASS, total)
    return kernel_library(kernels, classes, _distribution, "empirical", report, trace.source)


def _distribution(row: KernelRow) -> Distribution:
    return sample_distribution(row.samples, row.cv if np.isfinite(row.cv) else None)
