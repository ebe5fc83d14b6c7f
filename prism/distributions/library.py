"""The shipped library: laws and figures of a device, each with its source, in one netCDF file.

A set such as `h100-healthy` holds two kinds of entries: laws (multipliers of mean 1, parametric or
quantile tables) and figures (efficiencies, rates, loadings); also a measured table of GEMM
throughput where the device has one. Files are written by experiments/library/build.py. Left out:
what an effect multiplies (prism/simulation/variability.py) and where the fits come from (that
build).
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.files import read_netcdf, told_broken, write_netcdf
from prism.common.shipped import data_path
from prism.distributions.law import (
    CONSTRUCTORS,
    PARAM_NAMES,
    Law,
    constant,
    empirical,
    lognormal,
    mixture,
)

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]

SCHEMA = 1  # of the file; raised when a reader of an older file would go wrong
MIXTURE = "lognormal_mixture"  # how a mixture is named in a file
_EXPECTED = "a library of distributions"
MAX_BYTES = 16 * 2**20  # a set is far below 1 MB: anything larger is not one


@dataclass(frozen=True)
class Entry:
    """One line of a library: a law of mean 1 or a figure, and where it comes from."""

    name: str
    source: str
    long_name: str = ""
    law: Law | None = None
    number: float = math.nan
    units: str = "1"
    n: int = 0  # observations behind a fitted entry; 0 for a figure taken from a text
    device: str = ""  # what it was measured on, where that is another device than the set's

    @property
    def kind(self) -> str:
        """Return "law" or "scalar"."""
        return "scalar" if self.law is None else "law"

    @property
    def mean(self) -> float:
        """Mean of the law, or the figure itself."""
        return self.number if self.law is None else self.law.mean

    @property
    def std(self) -> float:
        """Standard deviation of the law; 0 for a figure."""
        return 0.0 if self.law is None else self.law.std


@dataclass(frozen=True)
class GemmTable:
    """Measured throughput of matrix products over their size, for one device.

    Attributes
    ----------
    flop
        Work of one product, ascending [bins; flop].
    throughput
        Median throughput over the shapes of that size [bins; flop/s].
    """

    flop: Array
    throughput: Array
    source: str = ""


@dataclass(frozen=True)
class Library:
    """The laws and figures of one set; look-ups by entry name."""

    name: str
    device: str
    entries: Mapping[str, Entry]
    date: str = ""
    gemm: GemmTable | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __contains__(self, entry: str) -> bool:
        """Say whether there is such an entry."""
        return entry in self.entries

    def entry(self, name: str) -> Entry:
        """Return the whole line of an entry."""
        if name not in self.entries:
            near = difflib.get_close_matches(name, list(self.entries), n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise PrismError(f"library {self.name}: no entry {name!r}{hint}")
        return self.entries[name]

    def law(self, name: str) -> Law:
        """Return the law of an entry, mean 1."""
        law = self.entry(name).law
        if law is None:
            raise PrismError(f"library {self.name}: {name!r} is a figure, not a law; use value()")
        return law

    def value(self, name: str) -> float:
        """Return the figure of an entry, in the entry's units (SI)."""
        entry = self.entry(name)
        if entry.law is not None:
            raise PrismError(f"library {self.name}: {name!r} is a law, not a figure; use law()")
        return entry.number

    def source(self, name: str) -> str:
        """Return where an entry comes from."""
        return self.entry(name).source


def library_names() -> list[str]:
    """Names of the shipped sets, sorted."""
    return sorted(path.stem for path in data_path("distributions").glob("*.nc"))


def load_library(name_or_path: str | os.PathLike[str]) -> Library:
    """Read a set by its shipped name ("h100-healthy") or from a netCDF file.

    Raises
    ------
    PrismError
        No such set or file, or not a library file.
    """
    path = library_path(os.fspath(name_or_path))
    if path.stat().st_size > MAX_BYTES:
        size = path.stat().st_size / 2**20
        raise PrismError(f"{path}: {size:.0f} MB is too large for a library; got another file?")
    stat = path.stat()
    return _read_library(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=8)
def _read_library(path: Path, version: tuple[int, int, int]) -> Library:
    """Read a file once for as long as it stays the same."""
    dataset = read_netcdf(path, _EXPECTED)
    if dataset.attrs.get("prism_schema") != f"library-{SCHEMA}":
        found = dataset.attrs.get("prism_schema", "none")
        raise PrismError(
            f"{path}: expected a prism library (schema library-{SCHEMA}), got schema {found}; "
            "shipped sets: " + ", ".join(library_names())
        )
    with told_broken(path, _EXPECTED):
        return from_dataset(dataset, path.stem)


def library_path(text: str) -> Path:
    """File of a shipped set or of a path.

    Raises
    ------
    PrismError
        There is neither.
    """
    folder = data_path("distributions")
    shipped = folder / f"{text}.nc"
    if os.sep not in text and shipped.is_file():
        return shipped
    path = Path(text)
    if path.is_file():
        return path
    names = library_names()
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.3) or names
    raise PrismError(
        f"library {text!r}: neither a shipped set nor a file; "
        + (f"did you mean {' or '.join(near)}?" if near else f"no sets in {folder}")
    )


def from_dataset(dataset: xr.Dataset, name: str = "") -> Library:
    """Library of a dataset that `to_dataset` made."""
    columns = {str(key): np.asarray(dataset[key].values) for key in dataset.data_vars}
    entries: dict[str, Entry] = {}
    for i, label in enumerate(np.asarray(dataset["entry"].values)):
        family = str(columns["family"][i])
        law = None
        if family != "scalar":
            params = columns["params"][i]
            knots = columns["quantile_probability"][i], columns["quantile_value"][i]
            law = _law_from_file(
                family,
                [float(v) for v in params[~np.isnan(params)]],
                *([float(v) for v in k[~np.isnan(k)]] for k in knots),
            )
        entries[str(label)] = Entry(
            name=str(label),
            law=law,
            number=float(columns["mean"][i]) if law is None else math.nan,
            n=int(columns["n"][i]),
            **{key: str(columns[key][i]) for key in ("source", "long_name", "units", "device")},
        )
    gemm = None
    if "gemm_throughput" in columns:
        variable = dataset["gemm_throughput"]
        gemm = GemmTable(
            np.asarray(dataset["gemm_flop"].values, dtype=np.float64),
            np.asarray(variable.values, dtype=np.float64),
            str(variable.attrs.get("source", "")),
        )
    attrs = {str(key): value for key, value in dataset.attrs.items()}
    return Library(
        name=name or str(attrs.get("name", "")),
        device=str(attrs.get("device", "")),
        entries=entries,
        date=str(attrs.get("date", "")),
        gemm=gemm,
        attrs=attrs,
    )


def _law_from_file(
    family: str, params: Sequence[float], q: Sequence[float], values: Sequence[float]
) -> Law:
    """Rebuild a law from a row of the file."""
    if family == "constant":
        return constant()
    if family == "empirical":
        return empirical(q, values)
    if family == MIXTURE:
        parts = [lognormal(cv).times(m) for m, cv in zip(params[1::3], params[2::3], strict=True)]
        return mixture(params[::3], parts)
    if family not in CONSTRUCTORS:
        known = ", ".join([*CONSTRUCTORS, MIXTURE, "empirical"])
        raise PrismError(f"library: law {family!r} is not known; known: {known}")
    return CONSTRUCTORS[family](*params)


def _law_to_file(law: Law | None) -> tuple[str, list[float], list[tuple[float, float]]]:
    """Family, parameters, and (probability, value) knots: a row of the file."""
    if law is None:
        return "scalar", [], []
    if law.family == "mixture":
        if law.loc or any(part.family != "lognormal" or part.loc for part in law.parts):
            raise PrismError("library: only mixtures of lognormal laws can be written to a file")
        rows = zip(law.weights, law.parts, strict=True)
        return MIXTURE, [v for w, p in rows for v in (w, p.scale * law.scale, p.params[0])], []
    values = [law.loc + law.scale * x for x in law.knots_x]
    return law.family, list(law.params), list(zip(law.knots_q, values, strict=True))


def to_dataset(library: Library) -> xr.Dataset:
    """Labelled arrays of a library, as its file holds them: dims entry, param, quantile."""
    import xarray as xr

    rows = list(library.entries.values())
    laws = [_law_to_file(row.law) for row in rows]
    n_params = max((len(params) for _, params, _ in laws), default=0)
    n_knots = max((len(knots) for _, _, knots in laws), default=0)
    params = np.full((len(rows), max(n_params, 1)), np.nan)
    knots = np.full((len(rows), max(n_knots, 1), 2), np.nan)
    for i, (_, law_params, law_knots) in enumerate(laws):
        params[i, : len(law_params)] = law_params
        if law_knots:
            knots[i, : len(law_knots)] = law_knots

    def text(values: list[str]) -> NDArray[np.object_]:
        return np.array(values, dtype=object)

    families = [family for family, _, _ in laws]
    legend = "; ".join(f"{name}: {', '.join(p)}" for name, p in PARAM_NAMES.items() if p)
    legend += f"; {MIXTURE}: weight, mean, cv of every part"
    one = "entry"
    dataset = xr.Dataset(
        {
            "family": (one, text(families), {"long_name": "family of the law, or scalar"}),
            "params": ((one, "param"), params, {"long_name": legend}),
            "quantile_probability": ((one, "quantile"), knots[..., 0], {"long_name": "knots"}),
            "quantile_value": ((one, "quantile"), knots[..., 1], {"long_name": "values at knots"}),
            "mean": (one, [row.mean for row in rows], {"long_name": "mean, or the figure"}),
            "std": (one, [row.std for row in rows], {"long_name": "standard deviation"}),
            "n": (one, [row.n for row in rows], {"long_name": "observations behind it"}),
        },
        coords={one: text([row.name for row in rows])},
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
    for key in ("source", "long_name", "units", "device"):
        what = {"long_name": f"{key} of the entry", "units": "1"}
        dataset[key] = (one, text([getattr(row, key) for row in rows]), what)
    if library.gemm is not None:
        _add_gemm(dataset, library.gemm)
    return dataset


def _add_gemm(dataset: xr.Dataset, gemm: GemmTable) -> None:
    flop = {"long_name": "work of one matrix product", "units": "flop"}
    dataset.coords["gemm_flop"] = ("gemm_flop", gemm.flop, flop)
    dataset["gemm_throughput"] = (
        "gemm_flop",
        gemm.throughput,
        {"long_name": "median measured throughput", "units": "flop/s", "source": gemm.source},
    )


def save_library(library: Library, path: str | os.PathLike[str]) -> None:
    """Write a library to netCDF; a file of that name is replaced only once the new one is whole."""
    write_netcdf(to_dataset(library), path)


def format_library(library: Library) -> str:
    """Table of a library for a terminal: entry, law or figure, spread, n, source."""
    lines = [f"{library.name}: {library.device}, {library.date}".rstrip(", "), ""]
    width = max((len(name) for name in library.entries), default=5)
    for row in library.entries.values():
        if row.law is None:
            what = f"{row.number:.6g} {row.units if row.units != '1' else ''}".strip()
        else:
            p99, p50 = row.law.ppf([0.99, 0.5])
            spread = f"cv {100 * row.law.cv:.3g} % p99/p50 {p99 / p50:.3f}"
            what = f"{_law_to_file(row.law)[0]} {spread}" + (f" n {row.n:,}" if row.n else "")
        lines.append(f"{row.name:<{width}}  {what:<52}  {row.source}")
    if library.gemm is not None:
        low, high = library.gemm.throughput.min() / 1e12, library.gemm.throughput.max() / 1e12
        bins = library.gemm.flop.size
        lines.append(f"{'measured GEMM':<{width}}  {bins} sizes, {low:.3g} to {high:.3g} TFLOP/s")
    return "\n".join(lines)
