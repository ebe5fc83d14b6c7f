"""Files of fitted models: what is common to their kinds.

Distributions lie in the table of a library's file (`prism.distributions.library`), the rest is
arrays with units, JSON texts and attributes; ``kind`` and ``schema`` say how to read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, wrap_corrupt_file
from prism.distributions.distribution import Distribution
from prism.distributions.library import Entry, Library, from_dataset, to_dataset
from prism.distributions.ranges import NON_NEGATIVE, Range

if TYPE_CHECKING:
    import xarray as xr

Model = TypeVar("Model")


class Spec(NamedTuple):
    """An array of a model's file."""

    dims: tuple[str, ...]
    units: str
    long_name: str
    allowed: Range = NON_NEGATIVE


class Scalar(NamedTuple):
    """A value of a model's file that is an attribute."""

    read: Callable[[Any], Any]
    allowed: Range = NON_NEGATIVE


@dataclass(frozen=True)
class ModelFile:
    """How models of one kind lie in a file."""

    kind: str  # attribute of the file
    schemas: tuple[int, ...]  # versions that are understood, the one that is written last
    arrays: Mapping[str, Spec]
    what: str  # what such a model is, and
    command: str  # what makes one

    def lay_out(
        self, arrays: Mapping[str, Any], distributions: Mapping[str, Distribution],
        texts: Mapping[str, tuple[Any, str]], coords: Mapping[str, Any], attrs: Mapping[str, Any],
    ) -> xr.Dataset:  # fmt: skip
        """Lay arrays, distributions by name, and JSON values with what they are into a dataset."""
        import xarray as xr

        found = xr.Dataset()
        if distributions:
            entries = {
                name: Entry(name, self.what, distribution=distribution)
                for name, distribution in distributions.items()
            }
            found = to_dataset(Library("", "", entries)).drop_attrs(deep=False)
        for name, spec in self.arrays.items():
            about = {"units": spec.units, "long_name": spec.long_name}
            found[name] = (spec.dims, np.asarray(arrays[name]), about)
        for name, (value, text) in texts.items():
            found[name] = ((), json.dumps(value), {"units": "1", "long_name": text})
        plain = {k: int(v) if isinstance(v, bool) else v for k, v in attrs.items()}
        last = {"kind": self.kind, "schema": self.schemas[-1]}
        return found.assign_coords(coords).assign_attrs(plain | last)

    def check(self, dataset: xr.Dataset, source: str) -> int:
        """Give the schema of a file of this kind; another kind or version raises PrismError."""
        kind, schema = (dataset.attrs.get(k) for k in ("kind", "schema"))
        if kind != self.kind or schema not in self.schemas:
            raise PrismError(
                f"{source}: kind {kind!r}, schema {schema}; expected {self.what} of schema "
                f"{' or '.join(map(str, self.schemas))}; fit again: {self.command}"
            )
        return int(schema)

    def distributions(self, dataset: xr.Dataset) -> dict[str, Distribution]:
        """Distributions of a file by name."""
        entries = from_dataset(dataset, self.kind).entries
        return {
            name: entry.distribution
            for name, entry in entries.items()
            if entry.distribution is not None
        }

    def values(self, dataset: xr.Dataset) -> dict[str, Any]:
        """Arrays of a file by name; ValueError where one has other dimensions, or cannot be."""
        for name, spec in self.arrays.items():
            if dataset[name].dims != spec.dims:
                raise ValueError(f"{name} is by {dataset[name].dims}, not by {spec.dims}")
            spec.allowed.check(name, dataset[name].values)
        return {name: np.asarray(dataset[name].values) for name in self.arrays}

    def scalars(self, dataset: xr.Dataset, scalars: Mapping[str, Scalar]) -> dict[str, Any]:
        """Attributes of a file by name; ValueError where one cannot be."""
        found = {name: scalar.read(dataset.attrs[name]) for name, scalar in scalars.items()}
        for name, value in found.items():
            if not isinstance(value, str):
                scalars[name].allowed.check(name, value)
        return found

    def load(self, path: str | Path, rebuild: Callable[[xr.Dataset, str], Model]) -> Model:
        """Read a file and rebuild its model; PrismError where it is missing or something else."""
        if not Path(path).is_file():
            raise PrismError(f"{path}: no such model; {self.command} makes one")
        expected = f"{self.what}: {self.command}"
        with wrap_corrupt_file(path, expected):
            return rebuild(read_netcdf(path, expected), str(path))


def json_of(dataset: xr.Dataset, name: str, kind: type = dict) -> Any:
    """Value of a JSON text of a file; ValueError where it is not of its kind."""
    value = json.loads(str(dataset[name].values))
    if not isinstance(value, kind):
        raise ValueError(f"{name}: {value!r:.60} where a {kind.__name__} belongs")
    return value
