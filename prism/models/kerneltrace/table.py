"""How long the kernels of a trace take, and how that varies.

A collective matched over ranks counts with its transfer, one that is not with what was recorded,
labelled so. Durations are compared with those of the same launch grid, else sizes would pass for
variability. Left out: separating effects, which is what a fit does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from prism.common.arrays import Array
from prism.models.kerneltrace.steps import kernel_keys
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import LEFT_OUT, Trace

KERNEL, CLASS = ("name", "kernel_class", "op_kind", "measure"), ("kernel_class",)
"""By what durations are put together."""

_FEW = 20  # durations below which a kernel's tail is not reported


@dataclass(frozen=True)
class KernelRow:
    """One kernel, or one class of kernels."""

    name: str
    kernel_class: str
    op_kind: str
    measure: str
    """What the durations are: ``kernel``, its own; ``transfer``, a collective's from its last
    arrival; ``includes waiting``, a collective's as recorded, because the other ranks were not
    traced or not matched; ``host``, idle time before a launch."""
    n: int  # durations behind it; a matched collective's counts once
    mean: float  # s
    cv: float  # of durations over the mean of their launch shape; NaN: unknown
    p99_p50: float  # the same
    share: float  # of the time
    samples: Array  # durations over the mean of their launch shape, as far as known

    def report(self, family: str, name: str = "") -> dict[str, Any]:
        """One line of a fit's report; `family` is how its distribution was made."""
        return {
            "name": name or self.name, "kernel_class": self.kernel_class, "op_kind": self.op_kind,
            "measure": self.measure, "n": self.n, "mean": self.mean,
            "cv": self.cv if math.isfinite(self.cv) else None,
            "p99_p50": self.p99_p50 if math.isfinite(self.p99_p50) else None,
            "distribution": family, "ks": None, "step_share": self.share,
        }  # fmt: skip


def kernel_table(trace: Trace) -> list[KernelRow]:
    """Kernels of a trace, launch gaps among them, with their share of all ranks' time."""
    ops = trace.chosen
    by_rank = ops["rank"]
    end, start = ops["start"] + ops["duration"], ops["start"]
    total = float((end.groupby(by_rank).max() - start.groupby(by_rank).min()).sum())
    return pool(kernel_durations(trace), KERNEL, total)


def kernel_durations(trace: Trace) -> pd.DataFrame:
    """List each activity's duration, and over the mean of its shape (`relative`).

    ``again`` marks a collective that another rank recorded, too; ``square`` is the squared relative
    deviation, corrected for the shape's own mean.
    """
    keys, key = kernel_keys(trace)
    ops = trace.chosen
    key = key[(trace.ops["step"] != LEFT_OUT).to_numpy()]
    kind, transfer = ops["op_kind"].astype(str).to_numpy(), ops["transfer"].to_numpy()
    communicates = np.isin(kind, list(COLLECTIVES))
    matched = communicates & np.isfinite(transfer)
    table = pd.DataFrame([keys[k][:3] for k in key], columns=["op_kind", "kernel_class", "name"])
    table["measure"] = measure = np.select(
        [matched, communicates, kind == "launch_gap"], ["transfer", "includes waiting", "host"],
        "kernel",
    )  # fmt: skip
    table["duration"] = duration = np.where(matched, transfer, ops["duration"])
    table["again"] = ops["collective"].duplicated().to_numpy() & matched
    of_shape = table["duration"].mask(table["again"]).groupby([key, measure])
    n, mean = of_shape.transform("count").to_numpy(), of_shape.transform("mean").to_numpy()
    known = (n > 1) & (mean > 0.0) & ~table["again"].to_numpy()
    table["relative"] = np.where(known, duration / np.where(known, mean, 1.0), np.nan)
    table["square"] = (table["relative"] - 1.0) ** 2 * n / np.maximum(n - 1, 1)
    return table


def pool(table: pd.DataFrame, by: Sequence[str], total: float) -> list[KernelRow]:
    """Put durations together by kernel or class, those that take longest first."""
    rows = []
    for group, of_group in table.groupby(list(by), sort=False):
        label = dict.fromkeys(KERNEL, "") | dict(zip(by, group, strict=True))
        label["name"] = label["name"] or label["kernel_class"]
        once = of_group[~of_group["again"]]
        samples, cv, p99_p50 = _spread(once)
        rows.append(KernelRow(
            **label, n=len(once), mean=float(once["duration"].mean()), cv=cv, p99_p50=p99_p50,
            share=float(of_group["duration"].sum()) / total if total > 0.0 else math.nan,
            samples=samples,
        ))  # fmt: skip
    return sorted(rows, key=lambda row: -row.share)


def _spread(rows: pd.DataFrame) -> tuple[Array, float, float]:
    """Durations over those of their shape, their coefficient of variation, and p99 over p50."""
    known = rows["relative"].notna()
    samples, square = rows["relative"][known].to_numpy(), rows["square"][known].to_numpy()
    mean = rows["duration"].mean()
    if not samples.size and len(rows) > 1 and mean > 0.0:  # no shape comes twice
        samples = (rows["duration"] / mean).to_numpy()
        square = (samples - 1.0) ** 2 * len(rows) / (len(rows) - 1)
    cv = float(np.sqrt(square.mean())) if square.size else math.nan
    if samples.size < _FEW:
        return samples, cv, math.nan
    middle, high = np.quantile(samples, [0.5, 0.99])
    return samples, cv, float(high / middle) if middle > 0.0 else math.nan
