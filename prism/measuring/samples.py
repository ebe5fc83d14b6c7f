"""What was measured, call by call, and its file.

A case is one kernel of one size, or one collective of one size; its samples are the durations of
its calls, with when each began and in which block of calls. The file holds them all, with the
machine, its state and how it was measured, so that a measurement can be gone on with and looked at
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, wrap_corrupt_file, write_netcdf

if TYPE_CHECKING:
    import xarray as xr

KIND = "measurement"


@dataclass(frozen=True)
class MeasuredCase:
    """One thing to measure."""

    label: str  # unique in a measurement, such as ``gemm/512x512x512/float32``
    family: str  # ``gemm``, ``attention``, ``memory``, or the collective's op_kind
    flop: float = 0.0  # of one call
    bytes: float = 0.0  # memory traffic or message of one call
    # what it is made from: sizes, number format, pass
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Samples:
    """Durations of every case's calls, in the order of the calls."""

    kind: str
    cases: tuple[MeasuredCase, ...]
    seconds: list[Array]
    at: list[Array]
    block: list[Index]
    slowest: list[Array]  # equal to `seconds` where no ranks meet
    attrs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, kind: str, cases: tuple[MeasuredCase, ...], attrs: Mapping[str, Any]) -> Samples:
        """Return samples without a call."""
        none: list[Array] = [np.zeros(0) for _ in cases]
        blocks = [np.zeros(0, np.int64) for _ in cases]
        return cls(kind, cases, none, list(none), blocks, list(none), dict(attrs))

    def add(self, case: int, seconds: Array, at: Array, slowest: Array, block: int) -> None:
        """Append one block of calls."""
        self.seconds[case] = np.append(self.seconds[case], seconds)
        self.at[case] = np.append(self.at[case], at)
        self.slowest[case] = np.append(self.slowest[case], slowest)
        self.block[case] = np.append(self.block[case], np.full(seconds.size, block))

    def counts(self) -> list[int]:
        """Count the calls of every case."""
        return [values.size for values in self.seconds]


def to_dataset(samples: Samples) -> xr.Dataset:
    """Labelled arrays of samples: dims sample and case."""
    import xarray as xr

    idx = np.repeat(np.arange(len(samples.cases)), samples.counts())

    def column(parts: list[Any], name: str, units: str) -> tuple[str, Any, dict[str, str]]:
        values = np.concatenate(parts) if parts else np.zeros(0)
        return "sample", values, {"long_name": name, "units": units}

    data = {
        "case_idx": ("sample", idx, {"long_name": "which case", "units": "1"}),
        "duration": column(samples.seconds, "duration of the call", "s"),
        "slowest": column(samples.slowest, "longest duration over the call's ranks", "s"),
        "at": column(samples.at, "begin of the call since the measurement's", "s"),
        "block": column(samples.block, "block of calls", "1"),
        "flop": ("case", [c.flop for c in samples.cases], {"long_name": "work", "units": "flop"}),
        "bytes": (
            "case",
            [c.bytes for c in samples.cases],
            {"long_name": "memory traffic, or message", "units": "byte"},
        ),
    }
    labels = np.array([c.label for c in samples.cases], dtype=object)
    attrs = {
        "kind": KIND,
        "measured": samples.kind,
        "cases": json.dumps([[c.label, c.family, dict(c.settings)] for c in samples.cases]),
        "about": json.dumps(samples.attrs),
    }
    return xr.Dataset(data, {"case": labels}, attrs)


def from_dataset(dataset: xr.Dataset) -> Samples:
    """Return the samples of a dataset that `to_dataset` made."""
    rows = json.loads(dataset.attrs["cases"])
    flop, traffic = dataset["flop"].values, dataset["bytes"].values
    cases = tuple(
        MeasuredCase(label, family, float(flop[i]), float(traffic[i]), settings)
        for i, (label, family, settings) in enumerate(rows)
    )
    idx = dataset["case_idx"].values

    def split(name: str) -> list[Any]:
        values = dataset[name].values
        return [values[idx == i] for i in range(len(cases))]

    return Samples(
        str(dataset.attrs["measured"]), cases, split("duration"), split("at"), split("block"),
        split("slowest"), json.loads(dataset.attrs["about"]),
    )  # fmt: skip


def save_samples(samples: Samples, path: str | os.PathLike[str]) -> None:
    """Write samples to netCDF, whole or not at all."""
    write_netcdf(to_dataset(samples), path)


def load_samples(path: str | os.PathLike[str]) -> Samples:
    """Read what `save_samples` wrote."""
    expected = "the samples that prism measure wrote (NAME.samples.nc)"
    dataset = read_netcdf(path, expected)
    if dataset.attrs.get("kind") != KIND:
        raise PrismError(f"{path}: holds no samples of prism measure; expected NAME.samples.nc")
    with wrap_corrupt_file(path, expected):
        return from_dataset(dataset)
