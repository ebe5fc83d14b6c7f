"""Typed results: the figures of an analysis as arrays and tables whose columns are declared once.

From the fields of a table come the variables of its netCDF file with their units, the columns of
its DataFrame, the keys of its JSON and the columns of its table on a screen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import xarray as xr


class Field(NamedTuple):
    """A column of a result's table, or a figure of a result."""

    name: str  # of the variable of the Dataset, the column of the DataFrame and the key of the JSON
    # of the value: ``s``, ``1``, ``W``; ``text``, ``flag`` and ``count`` are words, truth and whole
    # numbers
    unit: str = "1"
    about: str = ""  # what it is, in full
    # over its column on a screen, and over that and its neighbours
    title: str = ""
    group: str = ""
    # how a screen writes it, see `prism.present.tables.write`; by its unit where empty
    form: str = ""
    # whether its 95 % interval stands beside it: ``NAME_ci`` in the Dataset and the JSON,
    # ``NAME_low`` and ``NAME_high`` in the DataFrame
    interval: bool = False

    def pack(self, values: Sequence[Any]) -> np.ndarray:
        """Put values into an array; None is "" of words, -1 of truth and counts, else NaN."""
        import numpy as np

        none, kind = {"text": ("", object), "flag": (-1, np.int8), "count": (-1, np.int64)}.get(
            self.unit, (math.nan, np.float64)
        )
        return np.array([none if value is None else value for value in values], dtype=kind)

    def unpack(self, value: Any) -> Any:
        """Give a value of `pack` as JSON has it."""
        if self.unit == "text":
            return str(value) or None
        if self.unit in ("flag", "count"):
            kind = bool if self.unit == "flag" else int
            return None if value < 0 else kind(value)
        return float(value) if math.isfinite(value) else None

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of its variable."""
        units = {"text": "", "flag": "1", "count": "1"}.get(self.unit, self.unit)
        found = {"units": units, "long_name": self.about}
        return {name: text for name, text in found.items() if text}


BOUND = "bound"  # dimension of intervals: low, high


@dataclass(frozen=True)
class Columns:
    """The columns of a table of results, whose rows lie along a dimension of the Dataset."""

    dim: str  # the dimension
    # in the order of the JSON. The first names the rows, and its values are the coordinate.
    fields: tuple[Field, ...]
    numbered: bool = False  # rows have numbers and no names: the first field is one like the others
    prefix: str = ""  # of the names of variables, where another table's would be the same

    def _variable(self, field: Field) -> str:
        named = not self.numbered and field is self.fields[0]
        return self.dim if named else f"{self.prefix}{field.name}"

    def pack(self, rows: Iterable[Mapping[str, Any]]) -> xr.Dataset:
        """Lay rows, as JSON has them, into a Dataset; fields that no row has are left out."""
        import xarray as xr

        rows = list(rows)
        found: dict[str, Any] = {}
        for field in self.fields:
            name, ci = self._variable(field), f"{field.name}_ci"
            if any(field.name in row for row in rows):
                found[name] = (self.dim, field.pack([r.get(field.name) for r in rows]), field.attrs)
            if field.interval and any(row.get(ci) for row in rows):
                bounds = [row.get(ci) or [math.nan, math.nan] for row in rows]
                about = field._replace(about=f"95 % interval: {field.about}").attrs
                found[f"{name}_ci"] = ((self.dim, BOUND), bounds, about)
        return xr.Dataset(found)

    def rows(self, dataset: xr.Dataset) -> list[dict[str, Any]]:
        """Give the rows as JSON has them."""
        columns: dict[str, list[Any]] = {}
        for field in self.fields:
            name = self._variable(field)
            if name not in dataset.variables:
                continue
            values = [field.unpack(value) for value in dataset[name].values]
            columns[field.name] = values
            if field.interval:
                bounds = dataset.get(f"{name}_ci")
                known = [None] * len(values) if bounds is None else bounds.values.tolist()
                columns[f"{field.name}_ci"] = [
                    pair if pair and all(map(math.isfinite, pair)) else None for pair in known
                ]
        names = list(columns)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def frame(self, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """Give rows as a table, indexed by their names; `attrs` have units and texts of columns."""
        import pandas as pd

        columns: dict[str, Any] = {}
        for field in self.fields:
            if not any(field.name in row for row in rows):
                continue
            columns[field.name] = [row.get(field.name) for row in rows]
            if field.interval:
                bounds = [row.get(f"{field.name}_ci") or (math.nan, math.nan) for row in rows]
                low, high = zip(*bounds, strict=True)
                columns |= {f"{field.name}_low": low, f"{field.name}_high": high}
        found = pd.DataFrame(columns)
        if columns and not self.numbered:
            found = found.set_index(self.fields[0].name)
        found.attrs["fields"] = {field.name: field._asdict() for field in self.fields}
        return found


def pack_figures(
    fields: Iterable[Field], figures: Mapping[str, Any], prefix: str = ""
) -> xr.Dataset:
    """Lay single figures into a Dataset, under names with a prefix; missing ones are left out."""
    import xarray as xr

    known = [field for field in fields if field.name in figures]
    return xr.Dataset({prefix + f.name: ((), f.pack([figures[f.name]])[0], f.attrs) for f in known})


def read_figures(fields: Iterable[Field], dataset: xr.Dataset, prefix: str = "") -> dict[str, Any]:
    """Give single figures as JSON has them."""
    names = {field: prefix + field.name for field in fields}
    return {f.name: f.unpack(dataset[n].item()) for f, n in names.items() if n in dataset}


def pack_texts(**texts: Sequence[str]) -> xr.Dataset:
    """Lay lists of texts, such as warnings, into a Dataset, each along a dimension of its name."""
    import xarray as xr

    return xr.Dataset({}, {name: list(lines) for name, lines in texts.items() if lines})


def read_texts(dataset: xr.Dataset, name: str) -> list[str]:
    """Give a list of texts; empty where there is none."""
    return [str(text) for text in dataset[name].values] if name in dataset.coords else []


@dataclass(frozen=True, repr=False, eq=False)
class Result(ABC):
    """A result of prism: typed tables over an `xarray.Dataset`.

    Variables of the Dataset are attributes, as labelled arrays (``result.step_time``); the tables
    of a kind of result are DataFrames (``result.causes``), their columns with units in
    ``table.attrs["fields"]``.

    Examples
    --------
    >>> import prism
    >>> result = prism.simulate("pipeline-8x32", replicates=64, seed=1)
    >>> result.step_time.size, result.parts.attrs["fields"]["mean_share"]["about"]
    (64, 'share of the mean step')
    """

    dataset: xr.Dataset
    _needs: ClassVar[tuple[str, ...]] = ()  # variables that no Dataset of an old version has

    def to_xarray(self) -> xr.Dataset:
        """Give the Dataset behind the result, as it is saved."""
        return self.dataset

    @property
    def attrs(self) -> dict[Any, Any]:
        """What says how it was made: job, call, seed, versions."""
        return self.dataset.attrs

    @property
    def sizes(self) -> Mapping[Any, int]:
        """Lengths of the dimensions of its arrays."""
        return self.dataset.sizes

    def is_whole(self) -> bool:
        """Tell whether its Dataset has what its tables are made of, not one of an old version."""
        return all(name in self.dataset for name in self._needs)

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Give all figures, as the command's JSON has them but for findings and warnings."""

    def __getattr__(self, name: str) -> xr.DataArray:
        if name.startswith("_") or name == "dataset":
            raise AttributeError(name)
        if name in self.dataset.variables:
            return self.dataset[name]
        if hasattr(self.dataset, name):
            raise AttributeError(f"{name} is of the Dataset: result.to_xarray().{name}")
        known = ", ".join(sorted(self._public()))
        raise AttributeError(f"no {name} in this {type(self).__name__}; it has {known}")

    def __getitem__(self, name: str) -> xr.DataArray:
        return self.dataset[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __contains__(self, name: object) -> bool:
        return name in self.dataset

    def _public(self) -> set[str]:
        own = {name for name in object.__dir__(self) if not name.startswith("_")}
        return own | set(map(str, self.dataset.variables))

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._public()})

    def __repr__(self) -> str:
        name = self.dataset.attrs.get("job_name") or self.dataset.attrs.get("source") or ""
        of = f" of {name}" if name else ""
        return f"<{type(self).__name__}{of}: {', '.join(sorted(self._public()))}>"

    def _repr_html_(self) -> str:
        from prism.common.resultfiles import answer

        return str(answer(self)._repr_html_())
