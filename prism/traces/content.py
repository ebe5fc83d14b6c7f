"""What a file holds, found by its content, and tables as pandas frames.

Formats: parquet, JSON, and text (a CSV or a log), each text also gzipped and with a byte-order
mark. Commas, semicolons and tabs separate cells; a decimal comma is refused. Left out: what the
columns mean (pipeline.py, tidy.py, steps.py) and everything inside JSON (kineto.py).
"""

from __future__ import annotations

import csv
import io
import re
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.files import GZIP, MOST_TEXT, check_file, read_bytes, unpack
from prism.traces.protosniff import is_chakra

Kind = Literal["parquet", "json", "text", "sqlite", "chakra"]

_HEAD = 1 << 16  # enough for what tells the kinds apart
_BOM = b"\xef\xbb\xbf"
_SQLITE = b"SQLite format 3\x00"
KIND_NAMES = {
    "parquet": "a parquet table",
    "json": "JSON",
    "text": "text",
    "sqlite": "an SQLite file",
    "chakra": "a Chakra execution trace",
}
"""What a file is, in words."""
_ALIEN = {
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x89HDF": "an HDF5 or netCDF file; `prism show` lists what is in it",
    b"\x28\xb5\x2f\xfd": "a zstd file; unpack it first",
    b"\xfd7zXZ": "an xz file; unpack it first",
    b"BZh": "a bzip2 file; unpack it first",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
# since 3.1 pandas reads numbers exactly by itself and warns of the argument
_OLD_PANDAS = tuple(int(part) for part in pd.__version__.split(".")[:2]) < (3, 1)
_EXACT: dict[str, Any] = {"float_precision": "round_trip"} if _OLD_PANDAS else {}
# never numbers: runs 01 and 1 are two, and an op may be called 1e3
_TEXTS = ("run", "run_id", "op_kind", "optype", "kernel_class", "name", "group")
_MISSING = ("", "nan", "na", "n/a", "null", "none")
_LARGEST_INTEGER = 2.0**53  # whole numbers above it are not exact in float64


def find_kind(path: Path, source: str) -> Kind:
    """Say what a file holds.

    Parameters
    ----------
    path : Path
        The file; its name plays no part.
    source : str
        The file as the user named it, for messages.

    Returns
    -------
    str
        ``parquet``, ``sqlite``, ``chakra`` (length-delimited protobuf messages, the first of
        metadata, the second of a node), ``json`` (the first character is a brace or a bracket) or
        ``text``.

    Raises
    ------
    PrismError
        If there is no such file, or it is empty or binary.
    """
    head = _head(path, source)
    text = head.removeprefix(_BOM)
    for magic, what in _ALIEN.items():
        if head.startswith(magic):
            raise PrismError(f"{source}: is {what}")
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(_SQLITE):
        return "sqlite"
    if is_chakra(head):
        return "chakra"
    if not text.strip():
        raise PrismError(f"{source}: is empty; expected a trace, a table or a log")
    if text.lstrip()[:1] in (b"{", b"["):
        return "json"
    if b"\0" in text:
        raise PrismError(
            f"{source}: is binary; expected a CSV or parquet table, profiler JSON, an Nsight "
            "Systems or Chakra trace, or a log"
        )
    return "text"


def read_text(path: Path, source: str, most: int = MOST_TEXT) -> bytes:
    """Read a text file, unpacked where it is gzipped, without a byte-order mark.

    Raises
    ------
    PrismError
        If it cannot be read, has more than ``most`` bytes, or its gzip stream is broken.
    """
    data, damage = unpack(read_bytes(path, source, most), source, most)
    if damage:
        raise PrismError(f"{source}: the gzip stream {damage}; copy the file again")
    return data.removeprefix(_BOM)


def read_head(path: Path, source: str) -> bytes:
    """Read the first bytes of a file, unpacked where it is gzipped."""
    return _head(path, source).removeprefix(_BOM)


def _head(path: Path, source: str) -> bytes:
    check_file(path, source)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        # what can be had: a stream that is cut short may still be salvaged
        return zlib.decompressobj(31).decompress(head, _HEAD) if head.startswith(GZIP) else head
    except zlib.error as error:
        raise PrismError(f"{source}: the gzip stream is damaged; copy the file again") from error
    except OSError as error:
        raise PrismError(f"{source}: cannot be read: {error.strerror or error}") from error


def is_chakra_json(path: Path) -> bool:
    """Tell whether a JSON file begins as an execution trace: a schema, and no profiler's events."""
    head = read_head(path, str(path))
    return re.search(rb'"schema"\s*:\s*"', head) is not None and b'"traceEvents"' not in head


def _check_text(data: bytes, source: str) -> None:
    """Refuse what is not UTF-8 text."""
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


@dataclass(frozen=True)
class RawTable:
    """A table as it stands in a file, before its columns mean anything."""

    frame: pd.DataFrame
    source: str
    text: bytes = b""
    """The CSV itself, to find line numbers in; empty for parquet."""
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
        if self.text:
            lines = io.StringIO(self.text.decode("utf-8"), newline="")
            reader = csv.reader(lines, delimiter=self.delimiter)
            left = row + 1  # the header comes first
            line = 1
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

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Return a column as numbers [row]; not-a-number where a cell is empty.

        Raises
        ------
        PrismError
            If a cell is something else than a number.
        """
        series = self.frame[column]
        if pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series):
            values: NDArray[np.float64] = series.to_numpy(dtype=np.float64, na_value=np.nan)
            return values
        text = series.astype(object)
        try:
            values = pd.to_numeric(text, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        except (TypeError, ValueError):
            values = np.full(len(text), np.nan)
        asked = np.flatnonzero(np.isnan(values) | text.map(lambda cell: isinstance(cell, bool)))
        bad = [row for row in asked if not _is_missing(text.iloc[row])]
        if bad:
            more = f" ({len(bad)} such cells)" if len(bad) > 1 else ""
            cell = str(text.iloc[bad[0]])[:40]
            hint = "; use a point as decimal mark" if re.fullmatch(r"-?\d+,\d+", cell) else ""
            raise PrismError(
                f"{self.locate(int(bad[0]))}: {column} is {cell!r}, expected a number{more}{hint}"
            )
        return values

    def integers(self, column: str, missing: int) -> NDArray[np.int64]:
        """Return a column as whole numbers [row], ``missing`` where a cell is empty.

        Raises
        ------
        PrismError
            If a cell is something else than a whole number.
        """
        values = self.numbers(column)
        empty = np.isnan(values)
        whole = np.where(empty, 0.0, values)
        bad = np.flatnonzero((whole != np.rint(whole)) | (np.abs(whole) > _LARGEST_INTEGER))
        if bad.size:
            raise PrismError(
                f"{self.locate(int(bad[0]))}: {column} is {values[bad[0]]:g}, "
                "expected a whole number"
            )
        result: NDArray[np.int64] = whole.astype(np.int64)
        result[empty] = missing
        return result

    def texts(self, column: str) -> pd.Categorical:
        """Return a column as categories of str [row]; "" where a cell is empty."""
        series = self.frame[column]
        if not isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(object).where(series.notna(), "").map(as_text)
            return pd.Categorical(series)
        names = np.array([as_text(name) for name in series.cat.categories] + [""], dtype=object)
        codes = series.cat.codes.to_numpy()  # -1, a missing cell, is the last name
        categories, inverse = np.unique(names, return_inverse=True)
        return pd.Categorical.from_codes(
            inverse[codes], list(categories)
        ).remove_unused_categories()


def as_text(cell: object) -> str:
    """Write a cell as a user would name it: 40 for 40.0."""
    if isinstance(cell, float | np.floating) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def _is_missing(cell: object) -> bool:
    """Say whether a cell holds no value, or a word for none."""
    if isinstance(cell, str):
        return cell.strip().lower() in _MISSING
    return cell is None or cell is pd.NA or cell is pd.NaT or cell != cell


def read_table(path: Path, source: str, kind: Kind, text: bytes | None = None) -> RawTable:
    """Read a CSV or a parquet file.

    Parameters
    ----------
    path, source
        The file, and how the user named it.
    kind : str
        What :func:`find_kind` said: ``parquet`` or ``text``.
    text : bytes, optional
        What :func:`read_text` returned, where it has been read already.

    Raises
    ------
    PrismError
        If the table is broken, has no rows, or two columns of one name; for parquet also where
        pyarrow is not installed.
    """
    if kind == "parquet":
        table = _read_parquet(path, source)
    elif kind == "text":
        table = _read_csv(read_text(path, source) if text is None else text, source)
    else:
        raise PrismError(f"{source}: is {KIND_NAMES[kind]}; expected a CSV or parquet table")
    names = table.columns
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PrismError(f"{source}: two columns are called {twice[0][:60]!r}; rename one of them")
    if table.frame.empty:
        raise PrismError(f"{source}: has columns ({table.listing}) and no rows")
    return table


def _read_parquet(path: Path, source: str) -> RawTable:
    """Read a parquet file whole."""
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
            pieces = pyarrow.parquet.ParquetFile(file)
            flat = [f.name for f in pieces.schema_arrow if not pyarrow.types.is_nested(f.type)]
            frame = pieces.read(columns=flat).to_pandas(ignore_metadata=True)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, MemoryError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise PrismError(
            f"{source}: the parquet file is broken or cut short ({reason}); copy it again"
        ) from error
    return RawTable(frame, source)


def _read_csv(data: bytes, source: str) -> RawTable:
    """Read a CSV with commas, semicolons or tabs; its first line names the columns."""
    _check_text(data, source)
    parts = (line for part in io.BytesIO(data) for line in part.splitlines())
    header = next((line for line in parts if line.strip()), b"").decode("utf-8")
    delimiter = max(",;\t", key=header.count)  # the first where none occurs
    try:
        names = next(csv.reader([header], delimiter=delimiter), [])
    except csv.Error as error:
        raise PrismError(f"{source}:1: the header cannot be read: {error}") from error
    names = [name.strip() for name in names]
    twice = sorted({name for name in names if names.count(name) > 1 and name})
    if twice:
        raise PrismError(
            f"{source}:1: two columns are called {twice[0][:60]!r}; rename one of them"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(
                io.BytesIO(data),
                sep=delimiter,
                index_col=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
                **_EXACT,
                dtype=dict.fromkeys(_TEXTS, str),
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
        raise PrismError(_csv_message(str(error), source, len(names))) from error
    except (ValueError, OverflowError) as error:
        raise PrismError(f"{source}: cannot be read as CSV: {error}") from error
    named = [not str(name).startswith("Unnamed: ") for name in frame.columns]
    frame = frame.loc[:, named]  # a row number, or what a separator at the end makes
    frame.columns = [str(name).strip() for name in frame.columns]
    return RawTable(frame, source, data, delimiter)


def _csv_message(reason: str, source: str, n_columns: int) -> str:
    """Say where a CSV goes wrong."""
    found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason)
    if found:
        expected, line, saw = found.groups()
        return (
            f"{source}:{line}: {saw} cells, expected {expected} as in the header; quote cells "
            "that hold the separator"
        )
    if "Length of header" in reason:
        return (
            f"{source}: rows have more cells than the {n_columns} names of the header; "
            "name every column in the first line"
        )
    if "EOF inside string" in reason:
        return f"{source}: a quote opens and never closes; is the file whole?"
    return f"{source}: cannot be read as CSV: {reason.strip()}"
