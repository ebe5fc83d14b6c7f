"""Libraries: distributions and figures of a device, each with its source, in one netCDF file.

The shipped ones, such as `h100-healthy`, are written by experiments/library/build.py.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, wrap_corrupt_file, write_netcdf
from prism.common.shipped import data_path
from prism.distributions.distribution import (
    CONSTRUCTORS,
    PARAM_NAMES,
    Distribution,
    constant,
    empirical,
    lognormal,
    mixture,
)
from prism.distributions.kerneltables import (
    KernelFit,
    KernelTable,
    add_kernels,
    add_tables,
    read_kernels,
    read_tables,
)
from prism.distributions.ranges import (
    check_distribution,
    check_kernels,
    check_params,
    check_tables,
    figure_range,
    used_part,
)

if TYPE_CHECKING:
    import xarray as xr


SCHEMA = 1  # of the file; raised when a reader of an older file would go wrong
MIXTURE = "lognormal_mixture"  # how a mixture is named in a file
_EXPECTED = "a library of distributions"
_TEXTS = ("source", "long_name", "units", "device")  # of an entry, each a variable of the file
MAX_BYTES = 16 * 2**20  # a set is far below 1 MB: anything larger is not one


@dataclass(frozen=True)
class Entry:
    """One line of a library: a distribution of mean 1 or a figure, and where it comes from."""

    name: str
    source: str
    long_name: str = ""
    distribution: Distribution | None = None
    number: float = 1.0  # of a figure; a distribution has mean 1
    units: str = "1"
    n: int = 0  # observations behind a fitted entry; 0 for a figure taken from a text
    device: str = ""  # what it was measured on, where that is another device than the set's

    @property
    def mean(self) -> float:
        """Mean of the distribution, or the figure itself."""
        return self.number if self.distribution is None else self.distribution.mean

    @property
    def std(self) -> float:
        """Standard deviation of the distribution; 0 for a figure."""
        return 0.0 if self.distribution is None else self.distribution.std


@dataclass(frozen=True)
class Library:
    """The distributions, figures and kernel tables of one set; look-ups by name."""

    name: str
    device: str
    entries: Mapping[str, Entry]
    date: str = ""
    tables: Mapping[str, KernelTable] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, KernelTable | KernelFit] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What cluster a shipped set is of, such as "healthy"; "" of any other."""
        return self.name.partition("-")[2] if self.name in library_names() else ""

    def __contains__(self, entry: str) -> bool:
        """Whether there is such an entry."""
        return entry in self.entries

    def entry(self, name: str) -> Entry:
        """Whole line of an entry."""
        if name not in self.entries:
            near = difflib.get_close_matches(name, list(self.entries), n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise PrismError(f"library {self.name}: no entry {name!r}{hint}")
        return self.entries[name]

    def distribution(self, name: str) -> Distribution:
        """Distribution of an entry, mean 1."""
        distribution = self.entry(name).distribution
        if distribution is None:
            raise PrismError(
                f"library {self.name}: {name!r} is a figure, not a distribution; use value()"
            )
        return distribution

    def value(self, name: str) -> float:
        """Figure of an entry, in the entry's units (SI)."""
        entry = self.entry(name)
        if entry.distribution is not None:
            raise PrismError(
                f"library {self.name}: {name!r} is a distribution, not a figure; use distribution()"
            )
        return entry.number

    def source(self, name: str) -> str:
        """Where an entry comes from."""
        return self.entry(name).source


def library_names() -> list[str]:
    """Names of the shipped sets, sorted."""
    return sorted(path.stem for path in data_path("distributions").glob("*.nc"))


def load_library(name_or_path: str | os.PathLike[str]) -> Library:
    """Read a set by its shipped name ("h100-healthy") or from a netCDF file.

    Parameters
    ----------
    name_or_path : str or path
        Name of a shipped set, or a file that ``prism fit`` or ``prism measure`` wrote.

    Returns
    -------
    Library
        ``entries`` by name, each with its source; ``distribution(name)`` gives one of mean 1,
        ``value(name)`` a figure in the entry's units.

    Raises
    ------
    PrismError
        No such set or file, or not a library file.

    Examples
    --------
    >>> import prism
    >>> library = prism.load_library("h100-healthy")
    >>> library.value("rank/node_share"), round(library.distribution("rank").cv, 4)
    (0.08, 0.0077)
    """
    path = library_path(os.fspath(name_or_path))
    stat = path.stat()
    if stat.st_size > MAX_BYTES:
        size = stat.st_size / 2**20
        raise PrismError(f"{path}: {size:.0f} MB is too large for a library; got another file?")
    return _read_library(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=16)  # all shipped ones
def _read_library(path: Path, version: tuple[int, int, int]) -> Library:
    """Read a file once for as long as it stays the same."""
    dataset = read_netcdf(path, _EXPECTED)
    if dataset.attrs.get("prism_schema") != f"library-{SCHEMA}":
        found, names = dataset.attrs.get("prism_schema", "none"), ", ".join(library_names())
        raise PrismError(
            f"{path}: expected a prism library (schema library-{SCHEMA}), got schema {found}; "
            f"shipped sets: {names}"
        )
    with wrap_corrupt_file(path, _EXPECTED):
        return from_dataset(dataset, path.stem)


def library_path(text: str) -> Path:
    """File of a shipped set or of a path."""
    folder = data_path("distributions")
    shipped = folder / f"{text}.nc"
    if os.sep not in text and shipped.is_file():
        return shipped
    path = Path(text)
    if path.is_file():
        return path
    names = library_names()
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or names
    way_out = f"did you mean {' or '.join(near)}?" if near else f"no sets in {folder}"
    raise PrismError(f"library {text!r}: neither a shipped set nor a file; {way_out}")


def from_dataset(dataset: xr.Dataset, name: str) -> Library:
    """Library of a dataset that `to_dataset` made; ValueError where a figure cannot be."""
    columns = {str(key): np.asarray(dataset[key].values) for key in dataset.data_vars}
    numbers = columns["params"], columns["quantile_probability"], columns["quantile_value"]
    entries: dict[str, Entry] = {}
    for i, label in enumerate(map(str, dataset["entry"].values)):
        mean, std = float(columns["mean"][i]), float(columns["std"][i])
        try:
            distribution = _distribution_from_file(
                str(columns["family"][i]), *(used_part(x[i]) for x in numbers)
            )
            if distribution is not None:
                check_distribution(distribution, mean, std)
        except (PrismError, ValueError) as error:
            raise ValueError(f"{label}: {error}") from error
        if distribution is None:
            figure_range(label).check(label, mean)
        entries[label] = Entry(
            name=label,
            distribution=distribution,
            number=mean if distribution is None else 1.0,
            n=int(columns["n"][i]),
            **{key: str(columns[key][i]) for key in _TEXTS},
        )
    attrs = {str(key): value for key, value in dataset.attrs.items()}
    device, date = (str(attrs.get(key, "")) for key in ("device", "date"))
    tables = read_tables(dataset)
    check_tables(tables)
    kernels = read_kernels(dataset)
    check_kernels(kernels)
    return Library(name, device, entries, date, tables, attrs, kernels)


def _distribution_from_file(
    family: str, params: list[float], q: list[float], values: list[float]
) -> Distribution | None:
    """Rebuild a distribution from a row of the file: parameters, knots' probabilities, values."""
    check_params(family, params)
    if family == "scalar":
        return None
    if family == "constant":
        return constant()
    if family == "empirical":
        return empirical(q, values)
    if family == MIXTURE:
        parts = [lognormal(cv).times(m) for m, cv in zip(params[1::3], params[2::3], strict=True)]
        return mixture(params[::3], parts)
    if family not in CONSTRUCTORS:
        known = ", ".join([*CONSTRUCTORS, MIXTURE, "empirical"])
        raise ValueError(f"unknown distribution {family!r}; known: {known}")
    return CONSTRUCTORS[family](*params)


def _distribution_to_file(
    distribution: Distribution | None,
) -> tuple[str, list[float], list[tuple[float, float]]]:
    """Family, parameters, and (probability, value) knots: a row of the file."""
    if distribution is None:
        return "scalar", [], []
    if distribution.family == "mixture":
        if distribution.loc or any(
            part.family != "lognormal" or part.loc for part in distribution.parts
        ):
            raise PrismError("library: only mixtures of lognormals can be written to a file")
        rows = zip(distribution.weights, distribution.parts, strict=True)
        return (
            MIXTURE,
            [v for w, p in rows for v in (w, p.scale * distribution.scale, p.params[0])],
            [],
        )
    values = [distribution.loc + distribution.scale * x for x in distribution.knots_x]
    return (
        distribution.family,
        list(distribution.params),
        list(zip(distribution.knots_q, values, strict=True)),
    )


def to_dataset(library: Library) -> xr.Dataset:
    """Labelled arrays of a library, as its file holds them: entries by parameters and knots."""
    import xarray as xr

    rows = list(library.entries.values())
    distributions = [_distribution_to_file(row.distribution) for row in rows]
    n_params = max((len(params) for _, params, _ in distributions), default=0)
    n_knots = max((len(knots) for _, _, knots in distributions), default=0)
    params = np.full((len(rows), max(n_params, 1)), np.nan)
    knots = np.full((len(rows), max(n_knots, 1), 2), np.nan)
    for i, (_, distribution_params, distribution_knots) in enumerate(distributions):
        params[i, : len(distribution_params)] = distribution_params
        if distribution_knots:
            knots[i, : len(distribution_knots)] = distribution_knots
    families = np.array([family for family, _, _ in distributions], object)
    legend = "; ".join(f"{name}: {', '.join(p)}" for name, p in PARAM_NAMES.items() if p)
    legend += f"; {MIXTURE}: weight, mean, cv of every part"
    one = "entry"
    dataset = xr.Dataset(
        {
            "family": (one, families, {"long_name": "family of the distribution, or scalar"}),
            "params": ((one, "param"), params, {"long_name": legend}),
            "quantile_probability": ((one, "quantile"), knots[..., 0], {"long_name": "knots"}),
            "quantile_value": ((one, "quantile"), knots[..., 1], {"long_name": "values at knots"}),
            "mean": (one, [row.mean for row in rows], {"long_name": "mean, or the figure"}),
            "std": (one, [row.std for row in rows], {"long_name": "standard deviation"}),
            "n": (one, [row.n for row in rows], {"long_name": "observations behind it"}),
        },
        coords={one: np.array([row.name for row in rows], object)},
        attrs={
            "prism_schema": f"library-{SCHEMA}",
            "name": library.name,
            "device": library.device,
            "date": library.date,
            **{k: v for k, v in library.attrs.items() if k not in ("prism_schema", "name")},
        },
    )
    for variable in dataset.data_vars.values():
        variable.attrs.setdefault("units", "1")
    dataset["mean"].attrs["units"] = dataset["std"].attrs["units"] = "see the variable units"
    for key in _TEXTS:
        what = {"long_name": f"{key} of the entry", "units": "1"}
        dataset[key] = (one, np.array([getattr(row, key) for row in rows], object), what)
    add_tables(dataset, library.tables)
    add_kernels(dataset, library.kernels)
    return dataset


def save_library(library: Library, path: str | os.PathLike[str]) -> None:
    """Write a library to netCDF; a file of that name is replaced only once the new one is whole."""
    write_netcdf(to_dataset(library), path)
