"""A file of a recording: what it is by its first bytes, its text, its table, each read once.

Tables are CSV (commas, semicolons or tabs) or parquet, as pandas frames; a decimal comma is
refused.
"""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.common.files import GZIP, MOST_TEXT, check_file, read_bytes, unpack
from prism.common.pipes import held

COPY_AGAIN = "the end of the file is missing: copy it again"

Kind = Literal["parquet", "sqlite", "json", "text", "binary"]

HEAD = 1 << 16  # enough for what tells the kinds apart
_LOOKED_AT = 200  # lines that tell what a text is
_JSON = re.compile(rb"\{|\[\s*(?:\{|\]|$)")  # not the `[` of a log: a rank, a time of day
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_BOM = b"\xef\xbb\xbf"
_ALIEN = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x89HDF": "an HDF5 or netCDF file; `prism show` lists what is in it",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it first",
    b"\xfd7zXZ": "an xz file; unpack it first",
    b"BZh": "a bzip2 file; unpack it first",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}


class RecordedFile:
    """One file; its name plays no part in what it holds.

    `source` is its name for messages; one that is not `named` by a user was found in a folder, and
    may prove to be no recording.
    """

    first_line = 1  # number of the first line of its text

    def __init__(self, path: str | Path, source: str = "", named: bool = True) -> None:
        self.path, self.source, self.named = held(path), source or str(path), named

    @cached_property
    def head(self) -> bytes:
        """The first bytes, unpacked where they are gzipped, without a byte-order mark."""
        check_file(self.path, self.source)
        try:
            with self.path.open("rb") as file:
                head = file.read(HEAD)
            if head.startswith(GZIP):
                # what can be had: a stream that is cut short may still be salvaged
                head = zlib.decompressobj(31).decompress(head, HEAD)
        except zlib.error as error:
            raise PrismError(
                f"{self.source}: the gzip stream is damaged; copy the file again"
            ) from error
        except OSError as error:
            raise PrismError(f"{self.source}: cannot be read: {error.strerror or error}") from error
        return head.removeprefix(_BOM)

    @cached_property
    def kind(self) -> Kind:
        """What its first bytes say; raises PrismError where it is missing, empty or an archive."""
        for magic, what in _ALIEN.items():
            if self.head.startswith(magic):
                raise PrismError(f"{self.source}: is {what}")
        if self.head.startswith(b"PAR1"):
            return "parquet"
        if self.head.startswith(b"SQLite format 3\x00"):
            return "sqlite"
        text = self.head.lstrip()
        if not self.lines:
            raise PrismError(f"{self.source}: is empty; expected a trace, a table or a log")
        if _JSON.match(text):
            return "json"
        return "binary" if b"\0" in text else "text"

    def read_text(self, most: int = MOST_TEXT) -> bytes:
        """Read it unpacked, without a byte-order mark; refused beyond ``most`` bytes."""
        data, damage = unpack(read_bytes(self.path, self.source, most), self.source, most)
        if damage:
            raise PrismError(f"{self.source}: the gzip stream {damage}; copy the file again")
        return data.removeprefix(_BOM)

    @cached_property
    def text(self) -> bytes:
        """Its whole text; empty for a file of another kind."""
        return self.read_text() if self.kind == "text" else b""

    @cached_property
    def columns(self) -> list[str]:
        """Names of a table's columns; of a text, what its first line may name."""
        if self.kind == "parquet":
            with _opened(self.path, self.source) as pieces:
                return _flat(pieces.schema_arrow)
        if self.kind == "json":
            return list(dict.fromkeys(key for record in self.records for key in record))
        return header_of(self.head)[0] if self.kind == "text" and self._has_header() else []

    def _has_header(self) -> bool:
        """Whether the first line of a text may name columns: no row, no line of a log."""
        first, *rest = self.lines
        alike = bool(rest) and re.sub(r"\d+", "0", rest[0]) == re.sub(r"\d+", "0", first) != first
        delimiter = header_of(self.head)[1]
        n = first.count(delimiter)
        rows = sum(line.count(delimiter) >= n if n else is_number(line) for line in rest)
        return not alike and 3 * rows >= len(rest) and not _CLOCK.search(first)

    @cached_property
    def lines(self) -> list[str]:
        """The first lines that are not blank."""
        text = self.head.decode("utf-8", "replace")
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()][:_LOOKED_AT]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Rows of a JSON, of which the last may still be written; none where it is one object."""
        with suppress(PrismError):
            rows = json_rows(self.read_text(), self.source, growing=True)
            return rows if len(rows) > 1 else []
        return []

    @cached_property
    def table(self) -> RawTable:
        """The table; raises PrismError where it is none, broken, without rows."""
        twice = sorted(name for name, n in Counter(self.columns).items() if n > 1 and name)
        if twice:
            raise PrismError(
                f"{self.source}: two columns are called {twice[0][:60]!r}; rename one of them"
            )
        if self.kind == "parquet":
            with _opened(self.path, self.source) as pieces:
                rows = pieces.read(columns=_flat(pieces.schema_arrow))
                table = RawTable(rows.to_pandas(ignore_metadata=True), self.source)
        elif self.kind == "text":
            table = read_csv(self.text, self.source)
        elif self.kind == "json":
            rows = self.records or json_rows(self.read_text(), self.source)
            table = RawTable(pd.DataFrame(rows), self.source)
        else:
            raise PrismError(
                f"{self.source}: is {self.kind}; expected a CSV or parquet table, or JSON rows"
            )
        if table.frame.empty:
            raise PrismError(f"{self.source}: has columns ({table.listing}) and no rows")
        return table


# since 3.1 pandas reads numbers exactly by itself and warns of the argument
_OLD_PANDAS = tuple(int(part) for part in pd.__version__.split(".")[:2]) < (3, 1)
_EXACT: dict[str, Any] = {"float_precision": "round_trip"} if _OLD_PANDAS else {}
# never numbers: runs 01 and 1 are two, and an op may be called 1e3
_TEXTS = ("run", "run_id", "op_kind", "optype", "kernel_class", "name", "group")
_MISSING = ("", "nan", "na", "n/a", "null", "none")
_LARGEST_INTEGER = 2.0**53  # whole numbers above it are not exact in float64


@dataclass(frozen=True)
class RawTable:
    """A table as it stands in a file, before its columns mean anything."""

    frame: pd.DataFrame
    source: str
    text: bytes = b""  # the CSV itself, to find line numbers in; empty for parquet
    delimiter: str = ","

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [str(name) for name in self.frame.columns]

    @property
    def listing(self) -> str:
        """Names of the columns as text, not too long."""
        text = ", ".join(self.columns)
        return text if len(text) <= 400 else text[:400] + " ..."

    def locate(self, row: int) -> str:
        """Say where a row (from 0) stands: ``file:line`` for a CSV."""
        lines = io.StringIO(self.text.decode("utf-8"), newline="")
        reader = csv.reader(lines, delimiter=self.delimiter)
        left, line = row + 1, 1  # the header comes first
        try:
            for cells in reader:
                if cells and (len(cells) > 1 or cells[0].strip()):
                    if left == 0:
                        return f"{self.source}:{line}"
                    left -= 1
                line = reader.line_num + 1
        except csv.Error:
            pass
        return f"{self.source}: row {row + 1}"

    def is_numeric(self, column: str) -> bool:
        """Say whether a column was stored as numbers, not as texts or truth values."""
        series, is_bool = self.frame[column], pd.api.types.is_bool_dtype
        return pd.api.types.is_numeric_dtype(series) and not is_bool(series)

    def coerced(self, column: str) -> pd.Series:
        """Return a column as numbers [row]; not-a-number where a cell is anything else."""
        series = self.frame[column]
        if not self.is_numeric(column):
            series = series.astype(object)
            series = series.where(~series.map(lambda cell: isinstance(cell, bool)))
            try:
                series = pd.to_numeric(series, errors="coerce")
            except (TypeError, ValueError):
                series = series.map(lambda _: np.nan)
        return pd.Series(series.to_numpy(np.float64, na_value=np.nan))

    def numbers(self, column: str) -> Array:
        """Return a column as numbers [row]; not-a-number where a cell is empty."""
        values: Array = self.coerced(column).to_numpy()
        if self.is_numeric(column):
            return values
        cells = self.frame[column].astype(object)
        bad = [row for row in np.flatnonzero(np.isnan(values)) if not _is_missing(cells.iloc[row])]
        if bad:
            more = f" ({len(bad)} such cells)" if len(bad) > 1 else ""
            cell = str(cells.iloc[bad[0]])[:40]
            hint = "; use a point as decimal mark" if re.fullmatch(r"-?\d+,\d+", cell) else ""
            raise PrismError(
                f"{self.locate(int(bad[0]))}: {column} is {cell!r}, expected a number{more}{hint}"
            )
        return values

    def integers(self, column: str, missing: int) -> Index:
        """Return a column as whole numbers [row], ``missing`` where a cell is empty."""
        values = self.numbers(column)
        empty = np.isnan(values)
        whole = np.where(empty, 0.0, values)
        bad = np.flatnonzero((whole != np.rint(whole)) | (np.abs(whole) > _LARGEST_INTEGER))
        if bad.size:
            raise PrismError(
                f"{self.locate(int(bad[0]))}: {column} is {values[bad[0]]:g}, "
                "expected a whole number"
            )
        result: Index = whole.astype(np.int64)
        result[empty] = missing
        return result

    def texts(self, column: str) -> pd.Categorical:
        """Return a column as categories of str [row]; "" where a cell is empty."""
        codes, cells = pd.factorize(self.frame[column])  # -1, a missing cell, is the last
        names = np.array([*map(as_text, cells), ""], dtype=object)
        inverse, categories = pd.factorize(names, sort=True)
        found = pd.Categorical.from_codes(inverse[codes], list(categories))
        return found.remove_unused_categories()


def as_text(cell: object) -> str:
    """Write a cell as a user would name it: 40 for 40.0, no spaces around it."""
    if isinstance(cell, str):
        return cell.strip()
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def is_number(cell: str) -> bool:
    """Say whether a cell of a text is a number."""
    try:
        float(cell.strip().strip('"').replace(",", "."))
    except ValueError:
        return False
    return True


def _is_missing(cell: object) -> bool:
    """Say whether a cell holds no value, or a word for none."""
    if isinstance(cell, str):
        return cell.strip().lower() in _MISSING
    return cell is None or cell is pd.NA or cell is pd.NaT or cell != cell


@contextmanager
def _opened(path: Path, source: str) -> Iterator[Any]:
    """Open a parquet file; what fails while it is read is said of the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PrismError(
            f"{source}: reading parquet needs pyarrow: pip install 'pyarrow>=17', or "
            "save the table as CSV"
        ) from error
    try:
        # not from a path: a folder of pieces, or a name with `=`, would read as partitions
        with path.open("rb") as file:
            yield pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, MemoryError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise PrismError(
            f"{source}: the parquet file is broken or cut short ({reason}); copy it again"
        ) from error


def _flat(schema: Any) -> list[str]:
    """Names of the columns that are no lists or structures."""
    import pyarrow

    return [field.name for field in schema if not pyarrow.types.is_nested(field.type)]


def header_of(data: bytes) -> tuple[list[str], str]:
    """Names in the first line of a text that is not blank, and what separates them."""
    parts = (line for part in io.BytesIO(data) for line in part.splitlines())
    header = next((line for line in parts if line.strip()), b"").decode("utf-8", "replace")
    delimiter = max(",;\t", key=header.count)  # the first where none occurs
    try:
        names = next(csv.reader([header], delimiter=delimiter), [])
    except csv.Error:  # what pandas makes of it says more
        names = []
    return [name.strip() for name in names], delimiter


def json_rows(data: bytes, source: str, growing: bool = False) -> list[dict[str, Any]]:
    """Read rows of JSON: an object per line, a list of objects, or an object of them by name.

    Inner objects add to a column's name (``a/b``), a place in a list comes last (``a:0``). Of a
    Trainer's state the steps are rows. The last line of a `growing` file may be cut off.
    """
    if b'"traceEvents"' in data[:HEAD]:
        raise PrismError(f"{source}: is a profiler's trace; expected rows of a table")
    rows: list[Any] = []
    text = data.decode("utf-8", "replace")
    try:
        whole = json.loads(text)
        if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
            rows = [row for row in whole["log_history"] if isinstance(row, dict) and "loss" in row]
        elif isinstance(whole, dict) and len(whole) == 1 and isinstance([*whole.values()][0], list):
            rows = [*whole.values()][0]
        elif isinstance(whole, dict) and all(isinstance(row, dict) for row in whole.values()):
            rows = [{"node": name} | row for name, row in whole.items()]
        else:
            rows = whole if isinstance(whole, list) else [whole]
    except (ValueError, RecursionError):
        lines = [(n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
        for number, line in lines:
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if growing and number == lines[-1][0]:
                    break
                raise PrismError(
                    f"{source}:{number}: is no JSON; expected an object per line, or a list of them"
                ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise PrismError(f"{source}: is JSON of other things than objects; expected one per row")
    return [dict(_cells(row)) for row in rows]


def _cells(value: Any, name: str = "", place: str = "") -> Iterator[tuple[str, Any]]:
    """Give the cells of a row of JSON by the names of their columns."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _cells(inner, f"{name}/{key}" if name else str(key), place)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _cells(inner, name, place or f":{i}")
    else:
        yield name + place, value


def read_csv(data: bytes, source: str) -> RawTable:
    """Read a CSV with commas, semicolons or tabs; its first line names the columns."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PrismError(
            f"{source}:{line}: is not UTF-8 text; save the file as UTF-8, or check that it is whole"
        ) from error
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise PrismError(f"{source}:{line}: holds a NUL character; expected text")
    names, delimiter = header_of(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(data), sep=delimiter, index_col=False, keep_default_na=False,
                na_values=[""], low_memory=False, dtype=dict.fromkeys(_TEXTS, str), **_EXACT,
            )  # fmt: skip
    except (ValueError, pd.errors.ParserWarning, OverflowError) as error:
        reason = str(error).strip()
        found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason)
        why = f": cannot be read as CSV: {reason}"
        if found:
            why = f":{found[2]}: {found[3]} cells, expected {found[1]} as in the header; quote "
            why += "cells that hold the separator"
        elif "Length of header" in reason:
            why = f": rows have more cells than the {len(names)} names of the header; name every "
            why += "column in the first line"
        elif "EOF inside string" in reason:
            why = ": a quote opens and never closes; is the file whole?"
        raise PrismError(f"{source}{why}") from error
    named = [not str(name).startswith("Unnamed: ") for name in frame.columns]
    frame = frame.loc[:, named]  # a row number, or what a separator at the end makes
    frame.columns = [str(name).strip() for name in frame.columns]
    return RawTable(frame, source, data, delimiter)
