"""A file of a recording: what it is by its first bytes, its text, its table, each read once."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Literal

from prism.common.errors import PrismError
from prism.common.files import GZIP, MOST_TEXT, check_file, read_bytes, unpack
from prism.common.pipes import held
from prism.traces.rawtable import RawTable, header_of, parquet_columns, read_csv, read_parquet

COPY_AGAIN = "the end of the file is missing: copy it again"

Kind = Literal["parquet", "sqlite", "json", "text", "binary"]

_HEAD = 1 << 16  # enough for what tells the kinds apart
_JSON = re.compile(rb"\{|\[\s*(?:\{|\]|$)")  # not the `[` of a log: a rank, a time of day
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

    Parameters
    ----------
    path : Path
    source : str, optional
        As the user named it, for messages.
    named : bool
        Whether a user named it; else it was found in a folder, and may prove to be no recording.
    """

    def __init__(self, path: str | Path, source: str = "", named: bool = True) -> None:
        self.path, self.source, self.named = held(path), source or str(path), named

    @cached_property
    def head(self) -> bytes:
        """The first bytes, unpacked where they are gzipped, without a byte-order mark."""
        check_file(self.path, self.source)
        try:
            with self.path.open("rb") as file:
                head = file.read(_HEAD)
            if head.startswith(GZIP):
                # what can be had: a stream that is cut short may still be salvaged
                head = zlib.decompressobj(31).decompress(head, _HEAD)
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
        if not text:
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
        """Names of a table's columns; of a text, what its first line would name."""
        if self.kind == "parquet":
            return parquet_columns(self.path, self.source)
        return header_of(self.head)[0] if self.kind == "text" else []

    @cached_property
    def table(self) -> RawTable:
        """The table; raises PrismError where it is none, broken, without rows."""
        twice = sorted(name for name, n in Counter(self.columns).items() if n > 1 and name)
        if twice:
            raise PrismError(
                f"{self.source}: two columns are called {twice[0][:60]!r}; rename one of them"
            )
        if self.kind == "parquet":
            table = RawTable(read_parquet(self.path, self.source), self.source)
        elif self.kind == "text":
            table = read_csv(self.text, self.source)
        else:
            raise PrismError(f"{self.source}: is {self.kind}; expected a CSV or parquet table")
        if table.frame.empty:
            raise PrismError(f"{self.source}: has columns ({table.listing}) and no rows")
        return table
