"""Measured durations of kernels by their sizes, as a library holds them beside its entries.

A `KernelTable` is a grid of sizes; between its points the logarithm of the rate is linear in the
logarithms of the sizes, and beyond them the rate is that of the border. A `KernelFit` is a sum of
products of powers of the sizes, for kernels of which fewer shapes were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from prism.common.arrays import Array

if TYPE_CHECKING:
    import xarray as xr

_MARK = "table"  # attribute of a table's variable: its name
_GRIDS, _FITS = "kernel", "kernel_fit"  # the same of a kernel's grid; prefix of what fits are in
_ROUNDS = 20  # of the weights of a fit
_MARGIN = 1e-9  # of a size at the end of what was measured: rounding


@dataclass(frozen=True)
class KernelTable:
    """Rate of one kind of kernel by size, for one device."""

    axes: Mapping[str, Array]  # sizes by name, each ascending and above 0
    rate: Array  # above 0 [*axes; units]
    units: str = "flop/s"
    source: str = ""

    def __call__(self, **sizes: float) -> float:
        """Rate at some sizes [units]; sizes that the table does not tell apart are passed over."""
        cells = [self._cell(name, sizes[name]) for name in self.axes]
        total = 0.0
        for corner in product((0, 1), repeat=len(cells)):
            weight = 1.0
            for (_, part), side in zip(cells, corner, strict=True):
                weight *= part if side else 1.0 - part
            if weight:
                here = tuple(i + side for (i, _), side in zip(cells, corner, strict=True))
                total += weight * float(self._log_rate[here])
        return float(np.exp(total))

    def seconds(self, flop: float = 0.0, **sizes: float) -> float:
        """Duration [s]; `flop` of matrix products follows from their sizes."""
        work = flop or 2.0 * sizes["m"] * sizes["n"] * sizes["k"]
        return work / self(flop=work, **sizes)

    def covers(self, **sizes: float) -> bool:
        """Whether the sizes given lie inside what was measured."""
        ends = {axis: (float(grid[0]), float(grid[-1])) for axis, grid in self.axes.items()}
        return _inside(ends, sizes)

    def scaled(self, ratio: float, source: str) -> KernelTable:
        """Return the table of a relative, `ratio` times as long."""
        return replace(self, rate=np.asarray(self.rate) / ratio, source=source)

    def _cell(self, name: str, size: float) -> tuple[int, float]:
        """Grid point below a size, and the way to the next one [0 to 1]."""
        grid = self._log_axes[name]
        at = min(max(float(np.log(max(size, 1e-300))), float(grid[0])), float(grid[-1]))
        i = min(int(np.searchsorted(grid, at, side="right")) - 1, max(grid.size - 2, 0))
        return i, (at - float(grid[i])) / float(grid[i + 1] - grid[i]) if grid.size > 1 else 0.0

    @cached_property
    def _log_axes(self) -> dict[str, Array]:
        return {name: np.log(np.asarray(grid, np.float64)) for name, grid in self.axes.items()}

    @cached_property
    def _log_rate(self) -> Array:
        return np.log(np.asarray(self.rate, np.float64))


def _inside(ends: Mapping[str, tuple[float, float]], sizes: Mapping[str, float]) -> bool:
    return all(
        low * (1.0 - _MARGIN) <= sizes[name] <= high * (1.0 + _MARGIN)
        for name, (low, high) in ends.items()
        if name in sizes
    )


@dataclass(frozen=True)
class FitTerm:
    """One part of a kernel's duration: a coefficient times powers of its sizes."""

    coefficient: float  # 0 or more [s]
    powers: Mapping[str, float] = field(default_factory=dict)  # exponents by size, above 0


@dataclass(frozen=True)
class KernelFit:
    """Duration of one kind of kernel by size, for one device: a sum of terms that never fall."""

    terms: tuple[FitTerm, ...]
    ends: Mapping[str, tuple[float, float]]  # lowest and highest measured of each size
    source: str = ""
    n: int = 0  # kernels behind it
    sd: float = 0.0  # of the logarithm of predicted over measured

    def seconds(self, **sizes: float) -> float:
        """Duration [s]; sizes that no term names are passed over."""
        total = 0.0
        for term in self.terms:
            part = term.coefficient
            for name, power in term.powers.items():
                size = sizes[name]
                part *= size if power == 1.0 else size**power
            total += part
        return total

    def covers(self, **sizes: float) -> bool:
        """Whether the sizes given lie inside what was measured."""
        return _inside(self.ends, sizes)

    def scaled(self, ratio: float, source: str) -> KernelFit:
        """Return the fit of a relative, `ratio` times as long."""
        terms = tuple(replace(term, coefficient=term.coefficient * ratio) for term in self.terms)
        return replace(self, terms=terms, source=source)


def fit_kernel(
    powers: Sequence[Mapping[str, float]],
    sizes: Mapping[str, ArrayLike],
    seconds: ArrayLike,
    source: str = "",
    share: ArrayLike | None = None,
) -> KernelFit:
    """Fit the terms' coefficients, 0 or more, to measured durations, in relative error.

    `share` is how much each row counts; all the same where it is not given.
    """
    columns = {name: np.asarray(values, np.float64) for name, values in sizes.items()}
    measured = np.asarray(seconds, np.float64)
    found = fit_terms(term_values(powers, columns, measured.size), measured, share)
    terms = tuple(
        FitTerm(_rounded(float(c)), dict(term))
        for c, term in zip(found, powers, strict=True)
        if c > 0.0
    )
    ends = {name: (float(x.min()), float(x.max())) for name, x in columns.items()}
    error = np.log(term_values([t.powers for t in terms], columns, measured.size)
                   @ [t.coefficient for t in terms] / measured)  # fmt: skip
    counts = None if share is None else np.asarray(share, np.float64)
    mean = float(np.average(error, weights=counts))
    sd = float(np.sqrt(np.average((error - mean) ** 2, weights=counts)))
    return KernelFit(terms, ends, source, measured.size, _rounded(sd))


def term_values(powers: Sequence[Mapping[str, float]], sizes: Mapping[str, Array], n: int) -> Array:
    """Products of powers of sizes, of which a duration is the sum [n, terms]."""
    out = np.ones((n, len(powers)))
    for i, term in enumerate(powers):
        for name, power in term.items():
            out[:, i] *= sizes[name] ** power
    return out


def fit_terms(
    design: Array, seconds: Array, share: ArrayLike | None = None, least: ArrayLike = 0.0
) -> Array:
    """Coefficients, `least` or more, with the least squared logarithm of predicted over measured.

    Weights of later rounds turn the relative error into that of the logarithm, whose mean is 0
    unless a coefficient stands at its `least`.
    """
    from scipy.optimize import nnls

    scale = np.maximum(design.max(axis=0), 1e-300)
    counts = np.sqrt(np.ones_like(seconds) if share is None else np.asarray(share, np.float64))
    low = np.broadcast_to(np.asarray(least, np.float64), design.shape[1:]) * scale
    known = design / scale @ low
    weights, found = 1.0 / seconds, low
    for _ in range(_ROUNDS):
        of_row = weights * counts
        found = low + nnls(design / scale * of_row[:, None], (seconds - known) * of_row)[0]
        ratio = np.maximum(design / scale @ found / seconds, 1e-3)
        off = np.abs(ratio - 1.0) > 1e-6
        weights = np.where(off, np.log(ratio) / np.where(off, ratio - 1.0, 1.0), 1.0) / seconds
    error = np.log(np.maximum(design / scale @ found / seconds, 1e-3))
    centre = float(np.exp(-np.average(error, weights=counts**2)))
    return np.asarray(np.maximum(found * centre, low) / scale)


def _rounded(value: float) -> float:
    """Six digits: the same bytes on every machine."""
    return float(f"{value:.6g}")


def add_tables(
    dataset: xr.Dataset, tables: Mapping[str, KernelTable], mark: str = _MARK, prefix: str = ""
) -> None:
    """Write tables into a library's dataset: logarithms of rates to 1e-4, which is 0.01 %."""
    for name, table in tables.items():
        key = prefix + name.replace("/", "_")
        dims = [f"{key}_{axis}" for axis in table.axes]
        for dim, grid in zip(dims, table.axes.values(), strict=True):
            dataset.coords[dim] = (dim, np.asarray(grid, np.float64), {"units": "1"})
        about = {"long_name": f"rate of {name}", "units": table.units, "source": table.source}
        dataset[f"{key}_log_rate"] = (
            dims, np.rint(np.log(table.rate) * 1e4).astype(np.int32), {mark: name, **about},
        )  # fmt: skip
        dataset[f"{key}_log_rate"].encoding = {"zlib": True, "complevel": 9, "shuffle": True}


def read_tables(dataset: xr.Dataset, mark: str = _MARK) -> dict[str, KernelTable]:
    """Return the tables that `add_tables` wrote, by name."""
    out = {}
    for key, variable in dataset.data_vars.items():
        if mark not in variable.attrs:
            continue
        prefix = str(key).removesuffix("log_rate")
        axes = {
            str(dim).removeprefix(prefix): np.asarray(dataset[dim].values, np.float64)
            for dim in variable.dims
        }
        rate = np.exp(np.asarray(variable.values, np.float64) * 1e-4)
        units, source = (str(variable.attrs.get(key, "")) for key in ("units", "source"))
        out[str(variable.attrs[mark])] = KernelTable(axes, rate, units, source)
    return out


def add_kernels(dataset: xr.Dataset, kernels: Mapping[str, KernelTable | KernelFit]) -> None:
    """Write kernels' durations into a library's dataset: grids one by one, all fits together."""
    grids = {name: table for name, table in kernels.items() if isinstance(table, KernelTable)}
    fits = {name: fit for name, fit in kernels.items() if isinstance(fit, KernelFit)}
    add_tables(dataset, grids, _GRIDS, f"{_GRIDS}_")
    if not fits:
        return
    sizes = sorted({size for fit in fits.values() for size in _sizes(fit)})
    ends = np.full((len(fits), len(sizes), 2), np.nan)
    owner, coefficients, powers = [], [], []
    for i, fit in enumerate(fits.values()):
        for name, (low, high) in fit.ends.items():
            ends[i, sizes.index(name)] = low, high
        for term in fit.terms:
            owner.append(i)
            coefficients.append(term.coefficient)
            powers.append([term.powers.get(name, 0.0) for name in sizes])
    one, term_dim, size_dim = _FITS, f"{_FITS}_term", f"{_FITS}_size"
    rows = list(fits.values())
    columns = {
        "source": ((one,), np.array([fit.source for fit in rows], object), "source"),
        "n": ((one,), np.array([fit.n for fit in rows], np.int32), "kernels behind it"),
        "sd": ((one,), np.array([fit.sd for fit in rows]), "sd of log predicted over measured"),
        "ends": ((one, size_dim, f"{_FITS}_end"), ends, "lowest, highest measured"),
        "coefficient": ((term_dim,), np.array(coefficients), "coefficient of a term [s]"),
        "power": ((term_dim, size_dim), np.array(powers), "power of a size in a term"),
    }
    dataset.coords[one] = (one, np.array(list(fits), object))
    dataset.coords[term_dim] = (
        term_dim, np.array(owner, np.int32), {"long_name": "fit of a term, from 0"},
    )  # fmt: skip
    dataset.coords[size_dim] = (size_dim, np.array(sizes, object))
    for key, (dims, values, what) in columns.items():
        dataset[f"{_FITS}_{key}"] = (dims, values, {"long_name": what, "units": "1"})
        if values.dtype != object:
            dataset[f"{_FITS}_{key}"].encoding = {"zlib": True, "complevel": 9, "shuffle": True}


def _sizes(fit: KernelFit) -> set[str]:
    return {*fit.ends, *(name for term in fit.terms for name in term.powers)}


def read_kernels(dataset: xr.Dataset) -> dict[str, KernelTable | KernelFit]:
    """Return the durations that `add_kernels` wrote, by name."""
    out: dict[str, KernelTable | KernelFit] = {
        name: replace(table, axes={k.removeprefix(f"{_GRIDS}_"): x for k, x in table.axes.items()})
        for name, table in read_tables(dataset, _GRIDS).items()
    }
    if _FITS not in dataset:
        return out
    get = {
        key: np.asarray(dataset[f"{_FITS}_{key}"].values)
        for key in ("source", "n", "sd", "ends", "term", "coefficient", "power")
    }
    sizes = [str(name) for name in dataset[f"{_FITS}_size"].values]
    for i, name in enumerate(map(str, dataset[_FITS].values)):
        terms = tuple(
            FitTerm(float(get["coefficient"][j]),
                 {size: float(p) for size, p in zip(sizes, get["power"][j], strict=True) if p})
            for j in np.flatnonzero(get["term"] == i)
        )  # fmt: skip
        ends = {
            size: (float(low), float(high))
            for size, (low, high) in zip(sizes, get["ends"][i], strict=True)
            if low == low
        }
        out[name] = KernelFit(
            terms, ends, str(get["source"][i]), int(get["n"][i]), float(get["sd"][i])
        )
    return out
