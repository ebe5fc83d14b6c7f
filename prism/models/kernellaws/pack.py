"""A library of kernels as a file: its entries, and the report that ``prism fit`` prints.

For each kernel a distribution of mean 1 (``kernel/CLASS/NAME``) and its mean (``mean/CLASS/NAME``
in seconds). The file is one that `prism.distributions.library.load_library` reads. Left out: where
distributions come from (samples.py, moments.py, collectives.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism.distributions.distribution import Distribution
from prism.distributions.library import Entry, Library, to_dataset

if TYPE_CHECKING:
    import xarray as xr

KIND = "library"
"""Attribute ``kind`` of the files."""

MOST_KERNELS = 1_500
"""Kernels that get entries of their own, those that take longest; a library's file stays small."""


@dataclass(frozen=True)
class KernelLaw:
    """One kernel, or one class of kernels.

    Attributes
    ----------
    name, kernel_class, op_kind, measure : str
        What it is, and what its durations are (see `prism.models.kerneltrace.laws.MEASURES`).
    n : int
        Durations behind it.
    mean : float
        Mean duration [s].
    law : Distribution
        Of the duration over the mean of its kind, mean 1.
    family : str
        How the distribution was made, in a word or two.
    cv, p99_p50 : float
        As observed; not a number where unknown.
    share : float
        Of all kernels' time [1].
    """

    name: str
    kernel_class: str
    op_kind: str
    measure: str
    n: int
    mean: float
    law: Distribution
    family: str
    cv: float
    p99_p50: float
    share: float


def make_library(
    entries: Sequence[Entry], report: dict[str, Any], source: str, device: str = ""
) -> xr.Dataset:
    """Put entries and a report into one dataset, as `prism.save` writes it."""
    named = {entry.name: entry for entry in entries}
    dataset = to_dataset(Library(source, device, named))
    dataset["report"] = ((), json.dumps(report), {"units": "1", "long_name": "what a fit found"})
    dataset.attrs |= {"kind": KIND, "inputs": source}
    return dataset


def kernel_library(
    kernels: Sequence[KernelLaw], classes: Sequence[KernelLaw], report: dict[str, Any], source: str,
    device: str = "",
) -> xr.Dataset:  # fmt: skip
    """Make a library of kernels, the longest first, and of their classes."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.share)
    entries: dict[str, Entry] = {}
    for kernel in ordered[:MOST_KERNELS]:
        label = f"{kernel.kernel_class}/{kernel.name}".replace("\n", " ")
        if f"kernel/{label}" in entries:  # the same name, measured otherwise
            label = f"{label} ({kernel.measure})"
        told = f"{source}, {kernel.n:,} durations ({kernel.measure})"
        entries[f"kernel/{label}"] = Entry(
            f"kernel/{label}", told, "duration over its mean", law=kernel.law, n=kernel.n
        )
        entries[f"mean/{label}"] = Entry(
            f"mean/{label}", told, "mean duration", number=kernel.mean, units="s", n=kernel.n
        )
    for row in classes:
        name = f"class/{row.kernel_class}"
        told = f"{source}, {row.n:,} durations of the class, each over its kernel's mean"
        entries[name] = Entry(name, told, "duration over its kernel's mean", law=row.law, n=row.n)
    if len(ordered) > MOST_KERNELS:
        report["notes"] = [
            *report["notes"],
            f"{len(ordered) - MOST_KERNELS:,} kernels of {len(ordered):,}, those that take least, "
            "have no entry of their own; their classes have",
        ]
    report["kernels"] = [_row(kernel) for kernel in ordered]
    report["classes"] = [_row(row) for row in classes]
    return make_library(list(entries.values()), report, source, device)


def _row(kernel: KernelLaw) -> dict[str, Any]:
    """One line of the report."""
    return {
        "name": kernel.name, "kernel_class": kernel.kernel_class, "op_kind": kernel.op_kind,
        "measure": kernel.measure, "n": kernel.n, "mean": kernel.mean,
        "cv": kernel.cv if math.isfinite(kernel.cv) else None,
        "p99_p50": kernel.p99_p50 if math.isfinite(kernel.p99_p50) else None,
        "law": kernel.family, "ks": None, "step_share": kernel.share,
    }  # fmt: skip
