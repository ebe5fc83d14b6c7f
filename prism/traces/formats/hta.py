"""Kernel tables of Holistic Trace Analysis and `nsys stats`: moments by kernel and rank.

What ``get_gpu_kernel_breakdown`` returns as its second table, saved as CSV or parquet. It holds
moments, not durations. Rows called ``others`` are sums of kernels and describe none: they count in
the time alone.

References
----------
.. [1] Holistic Trace Analysis, hta/analyzers/breakdown_analysis.py,
   https://github.com/facebookresearch/HolisticTraceAnalysis
.. [2] Nsight Systems, reports cuda_gpu_kern_sum and cuda_gpu_sum of `nsys stats --format csv`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.columns import PER_SECOND
from prism.traces.file import RawTable, RecordedFile, read_csv
from prism.traces.kernelnames import is_communication_kernel
from prism.traces.table import LONGEST_S

OTHERS = "others"  # name of the rows in which HTA sums up the kernels that take least

_MOMENT = re.compile(
    r"(sum|mean|max|min|std|stddev|count)(?:\s*[(_\[]\s*(ns|us|ms|s)[)\]]?)?$", re.I
)
_NSYS = re.compile(
    rb'^"?Time ?\(%\)"?,"?Total Time(?: \(\w+\))?"?,"?(?:Instances|Count)"?,'
    rb'.*\b(?:Name|Operation)"?\r?$',
    re.MULTILINE,
)
_NSYS_NAMES = {
    "total time": "sum", "avg": "mean", "average": "mean", "minimum": "min", "maximum": "max",
    "instances": "count", "operation": "name",
}  # fmt: skip
_SHORTEST_NS = 500.0
"""No kernel of a GPU is shorter than its launch takes: a table in ns whose usual kernel is so much
shorter holds the trace's own microseconds under HTA's label of ns."""


@dataclass(frozen=True)
class KernelMoments:
    """Moments of kernels' durations [row; s], one row a kernel and rank."""

    source: str
    name: list[str]
    kernel_type: list[str]  # HTA's: COMPUTATION, COMMUNICATION or MEMORY
    rank: Index
    n: Index  # kernels, from sum and mean where the table does not count them
    total: Array
    mean: Array
    std: Array
    most: Array
    notes: tuple[str, ...]


def is_hta(columns: Iterable[str]) -> bool:
    """Tell whether a table with these columns is HTA's table of kernels."""
    names = [str(name).strip() for name in columns]
    return {"name", "kernel_type"} <= set(names) and {"sum", "mean"} <= set(_moments(names))


def is_nsys_sum(file: RecordedFile) -> bool:
    """Tell what `nsys stats` prints of kernels by the names of its columns."""
    return _NSYS.search(file.text) is not None


def read_nsys_sum(files: Sequence[RecordedFile]) -> KernelMoments:
    """Read the table of kernels among what `nsys stats --format csv` prints."""
    text, source = files[0].text, files[0].source
    begin = _NSYS.search(text)
    at = begin.start() if begin else 0
    rows = re.split(rb"\r?\n\s*\r?\n", text[at:], maxsplit=1)[0]
    table = read_csv(b"\n" * text.count(b"\n", 0, at) + rows, source)
    frame = pd.DataFrame({_as_hta(name): table.frame[name] for name in table.columns})
    names = frame["name"].astype(str).str.removeprefix("[CUDA ").str.removesuffix("]")
    kinds = ["COMMUNICATION" if is_communication_kernel(name) else "" for name in names]
    table = replace(table, frame=frame.assign(name=names, kernel_type=kinds))
    return _read(table, "nsys export --type sqlite REPORT gives durations and steps", 0.0)


def _as_hta(name: str) -> str:
    """Name a column of `nsys stats` as HTA would."""
    plain, bracket, unit = name.lower().partition(" (")
    return _NSYS_NAMES.get(plain, plain) + bracket + unit


def _moments(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Column and unit ("" where it has none) by moment."""
    found = {}
    for name in names:
        match = _MOMENT.match(name.strip())
        if match:
            found[match[1].lower().replace("stddev", "std")] = (name, (match[2] or "").lower())
    return found


def read_hta(files: Sequence[RecordedFile]) -> KernelMoments:
    """Read a table of kernels by HTA."""
    return _read(
        files[0].table, "save the table as get_gpu_kernel_breakdown returns it", _SHORTEST_NS
    )


def _read(table: RawTable, way: str, shortest_ns: float) -> KernelMoments:
    """Read a table; its moments are not to be negative or impossible."""
    source = table.source
    columns = _moments(table.columns)
    missing = [name for name in ("std", "min", "max") if name not in columns]
    if missing:
        raise PrismError(
            f"{source}: no column {' and '.join(missing)} beside sum and mean; found "
            f"{table.listing}; {way}"
        )
    values = {name: table.numbers(column) for name, (column, _) in columns.items()}
    names, mean = table.texts("name").astype(str), values["mean"]
    unit, notes = columns["mean"][1] or columns["sum"][1], []
    kernels = mean[(names != OTHERS) & np.isfinite(mean)]
    usual = float(np.median(kernels)) if kernels.size else np.inf
    if not unit:
        unit = "us"
        notes.append("the columns name no unit: read as us, that of profilers' traces")
    elif unit == "ns" and usual < shortest_ns:
        unit = "us"
        notes.append(
            f"labelled ns, but the usual kernel would last {usual:.3g} ns, less than any launch: "
            "read as us, as HTA labels the trace's own microseconds"
        )
    scale = PER_SECOND[unit]
    _check(table, values, scale)
    count = values.get("count", np.rint(values["sum"] / np.maximum(mean, 1e-300)))
    return KernelMoments(
        source, list(map(str, names)), list(map(str, table.texts("kernel_type"))),
        table.integers("rank", 0) if "rank" in table.columns else np.zeros(len(names), np.int64),
        np.maximum(1, count).astype(np.int64), values["sum"] / scale, mean / scale,
        np.nan_to_num(values["std"]) / scale, values["max"] / scale, tuple(notes),
    )  # fmt: skip


def _check(table: RawTable, values: dict[str, Array], scale: float) -> None:
    """Refuse moments that no durations have."""
    low, mean, high = values["min"], values["mean"], values["max"]
    near = 1.0 + 1e-6
    with np.errstate(over="ignore"):  # of what the first of them refuses
        faults = {
            f"sum, mean, min and max are to be within {LONGEST_S:g} s": ~(
                np.abs(values["sum"] + low + mean + high) <= LONGEST_S * scale
            ),
            "a duration is negative": (low < 0.0) | (values["std"] < 0.0) | ~(mean > 0.0),
            "min, mean and max are not in order": (low > mean * near) | (mean > high * near),
            "the standard deviation is above the maximum": values["std"] > high * near,
            "the sum is less than the mean": values["sum"] * near < mean,
            "the sum is of more kernels than can be counted": values["sum"] > 2.0**53 * mean,
        }
    for what, rows in faults.items():
        bad = np.flatnonzero(rows)
        if bad.size:
            raise PrismError(
                f"{table.locate(int(bad[0]))}: {what}; so in {bad.size:,} of "
                f"{format_count(mean.size, 'row')}; save the table again as HTA returns it"
            )
