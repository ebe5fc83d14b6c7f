"""A library from a table of kernels' moments, where the durations themselves are not there.

A kernel's distribution is the lognormal of its mean and standard deviation, pooled over ranks: of
the families with two moments the one whose durations are positive and lean to the right. Left out:
the tail beyond what the longest duration says, and what the sizes of launches add to the spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common.text import format_share
from prism.distributions.distribution import constant, lognormal
from prism.models.kernellaws.pack import KernelLaw, kernel_library
from prism.traces.hta import OTHERS, KernelMoments
from prism.traces.kernelnames import classify, collective_kind

if TYPE_CHECKING:
    import xarray as xr

_WIDEST = 30.0  # CV beyond which a lognormal says nothing
_NOT_IDENTIFIABLE = (
    "the shape of a kernel's distribution: only its mean, spread, minimum and maximum are known; "
    "lognormals are assumed",
    "spread at one launch shape: a kernel's durations are pooled over its shapes",
    "effects that kernels share, and a step's time: the table has neither steps nor order",
)


def library_of_moments(moments: KernelMoments) -> xr.Dataset:
    """Make a library of a table of kernels."""
    names = np.array(moments.name, dtype=object)
    kinds = np.array(moments.kernel_type, dtype=object)
    total = float(moments.total.sum())
    left = names == OTHERS
    rows, warnings = [], []
    for kind, name in dict.fromkeys(zip(kinds[~left], names[~left], strict=True)):
        at = np.flatnonzero((names == name) & (kinds == kind))
        row, longest = _pooled(moments, at, str(kind), str(name), total)
        rows.append(row)
        if longest > 0.0:
            warnings.append((row.share, str(name), longest))
    classes = _classes(rows, total)
    notes = list(moments.notes)
    if left.any():
        share = float(moments.total[left].sum()) / total if total > 0.0 else 0.0
        notes.append(
            f"rows named {OTHERS} are sums of several kernels ({format_share(share)} of the "
            "time): skipped; num_kernels=1000 and duration_ratio=1 of get_gpu_kernel_breakdown "
            "leave none"
        )
    told = [
        "moments alone, no durations: distributions are lognormals of each kernel's mean and spread"
    ]
    for _, name, longest in sorted(warnings, reverse=True)[:3]:
        told.append(
            f"{name[:60]}: its longest lasts {longest:.3g} times what a lognormal of its spread "
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
    return kernel_library(rows, classes, report, moments.source)


def _pooled(
    moments: KernelMoments, at: NDArray[np.int64], kind: str, name: str, total: float
) -> tuple[KernelLaw, float]:
    """Pool a kernel over ranks; also its longest over a lognormal's, 0 where that is no surprise.

    Notes
    -----
    Mean and variance of all durations: sums of squares within ranks and between their means.
    """
    n, mean, std = moments.n[at], moments.mean[at], moments.std[at]
    count = int(n.sum())
    pooled = float(moments.total[at].sum()) / count
    squares = float(((n - 1) * std**2 + n * (mean - pooled) ** 2).sum())
    cv = float(np.sqrt(squares / (count - 1))) / pooled if count > 1 else float("nan")
    if kind.upper().startswith("COMM"):
        op_kind = collective_kind(name) or "transfer"
        kernel_class, measure = op_kind if op_kind != "transfer" else "p2p", "includes waiting"
    else:
        category = next((c for c in ("memcpy", "memset") if name.lower().startswith(c)), "kernel")
        op_kind, kernel_class = classify(name, "", False, category)
        measure = "kernel"
    spread = np.isfinite(cv) and 0.0 < cv <= _WIDEST
    law = lognormal(cv) if spread else constant()
    longest = 0.0
    p99 = float("nan")
    if spread:
        p50, high = law.ppf(np.array([0.5, 0.99]))
        p99 = float(high / p50)
        # of n durations the longest lies about the quantile 1 - 1/n
        expected = float(law.ppf(np.array([1.0 - 0.5 / count]))[0]) * pooled
        ratio = float(moments.most[at].max()) / expected
        longest = ratio if ratio > 2.0 else 0.0
    share = float(moments.total[at].sum()) / total if total > 0.0 else 0.0
    family = "lognormal of 2 moments" if spread else "constant"
    return (
        KernelLaw(name, kernel_class, op_kind, measure, count, pooled, law, family, cv, p99, share),
        longest,
    )


def _classes(rows: list[KernelLaw], total: float) -> list[KernelLaw]:
    """Pool the relative spread of each class's kernels, weighted by their number."""
    found = []
    for name in dict.fromkeys(row.kernel_class for row in rows):
        mine = [row for row in rows if row.kernel_class == name]
        n = sum(row.n for row in mine)
        known = [row for row in mine if np.isfinite(row.cv)]
        weight = sum(row.n - 1 for row in known)
        cv = (sum((row.n - 1) * row.cv**2 for row in known) / weight) ** 0.5 if weight else np.nan
        spread = bool(np.isfinite(cv)) and 0.0 < cv <= _WIDEST
        seconds = sum(row.mean * row.n for row in mine)
        law = lognormal(float(cv)) if spread else constant()
        family = "lognormal of 2 moments" if spread else "constant"
        share = sum(row.share for row in mine)
        found.append(
            KernelLaw(
                name, name, "", "", n, seconds / n, law, family, float(cv), float("nan"), share
            )
        )
    return found
