"""A library of kernels as a file: its entries, and the report that ``prism fit`` prints.

For each kernel a distribution of mean 1 (``kernel/CLASS/NAME``) and its mean (``mean/CLASS/NAME``
in seconds). The file is one that `prism.distributions.library.load_library` reads. Left out: where
distributions come from (samples.py, moments.py, collectives.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from prism.common.text import format_count
from prism.distributions.distribution import Distribution
from prism.distributions.library import Entry, Library, to_dataset
from prism.models.kerneltrace.table import KernelRow

if TYPE_CHECKING:
    import xarray as xr

KIND = "library"  # attribute ``kind`` of the files

MOST_KERNELS = 1_500
"""Kernels that get entries of their own, those that take longest; a library's file stays small."""


def make_library(entries: Sequence[Entry], report: dict[str, Any], source: str) -> xr.Dataset:
    """Put entries and a report into one dataset, as `prism.save` writes it."""
    named = {entry.name: entry for entry in entries}
    dataset = to_dataset(Library(source, "", named))
    dataset["report"] = ((), json.dumps(report), {"units": "1", "long_name": "what a fit found"})
    dataset.attrs |= {"kind": KIND, "inputs": source}
    return dataset


def kernel_library(
    kernels: Sequence[KernelRow],
    classes: Sequence[KernelRow],
    distribution: Callable[[KernelRow], Distribution],
    family: str,
    report: dict[str, Any],
    source: str,
) -> xr.Dataset:
    """Make a library of kernels and of their classes, each with the distribution of its row."""
    ordered = sorted(kernels, key=lambda row: -row.share)
    distributions = {id(row): distribution(row) for row in (*ordered, *classes)}
    entries: dict[str, Entry] = {}
    for row in ordered[:MOST_KERNELS]:
        label = f"{row.kernel_class}/{row.name}".replace("\n", " ")
        if f"kernel/{label}" in entries:  # the same name, measured otherwise
            label = f"{label} ({row.measure})"
        told = f"{source}, {format_count(row.n, 'duration')} ({row.measure})"
        entries[f"kernel/{label}"] = Entry(
            f"kernel/{label}",
            told,
            "duration over its mean",
            distribution=distributions[id(row)],
            n=row.n,
        )
        entries[f"mean/{label}"] = Entry(
            f"mean/{label}", told, "mean duration", number=row.mean, units="s", n=row.n
        )
    for row in classes:
        name = f"class/{row.kernel_class}"
        told = (
            f"{source}, {format_count(row.n, 'duration')} of the class, each over its kernel's mean"
        )
        what = "duration over its kernel's mean"
        entries[name] = Entry(name, told, what, distribution=distributions[id(row)], n=row.n)
    if len(ordered) > MOST_KERNELS:
        report["notes"] = [
            *report["notes"],
            f"{format_count(len(ordered) - MOST_KERNELS, 'kernel')} of {len(ordered):,}, those "
            "that take least, "
            "have no entry of their own; their classes have",
        ]
    for name, rows in (("kernels", ordered), ("classes", classes)):
        report[name] = [
            row.report(family if distributions[id(row)].std > 0.0 else "constant") for row in rows
        ]
    return make_library(list(entries.values()), report, source)
