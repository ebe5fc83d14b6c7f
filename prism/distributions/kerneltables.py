"""Measured rates of kernels over their sizes, as a library holds them beside its entries.

A table is a grid of sizes; between its points the logarithm of the rate is linear in the logarithms
of the sizes, and beyond them the rate is that of the border.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
_MARK = "table"  # attribute of a table's variable: its name


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


def add_tables(dataset: xr.Dataset, tables: Mapping[str, KernelTable]) -> None:
    """Write tables into a library's dataset: logarithms of rates to 1e-4, which is 0.01 %."""
    for name, table in tables.items():
        key = name.replace("/", "_")
        dims = [f"{key}_{axis}" for axis in table.axes]
        for dim, grid in zip(dims, table.axes.values(), strict=True):
            dataset.coords[dim] = (dim, np.asarray(grid, np.float64), {"units": "1"})
        about = {"long_name": f"rate of {name}", "units": table.units, "source": table.source}
        dataset[f"{key}_log_rate"] = (
            dims, np.rint(np.log(table.rate) * 1e4).astype(np.int32), {_MARK: name, **about},
        )  # fmt: skip
        dataset[f"{key}_log_rate"].encoding = {"zlib": True, "complevel": 9, "shuffle": True}


def read_tables(dataset: xr.Dataset) -> dict[str, KernelTable]:
    """Return the tables that `add_tables` wrote, by name."""
    out = {}
    for key, variable in dataset.data_vars.items():
        if _MARK not in variable.attrs:
            continue
        prefix = str(key).removesuffix("log_rate")
        axes = {
            str(dim).removeprefix(prefix): np.asarray(dataset[dim].values, np.float64)
            for dim in variable.dims
        }
        rate = np.exp(np.asarray(variable.values, np.float64) * 1e-4)
        units, source = (str(variable.attrs.get(key, "")) for key in ("units", "source"))
        out[str(variable.attrs[_MARK])] = KernelTable(axes, rate, units, source)
    return out
