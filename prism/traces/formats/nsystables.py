"""Tables of an Nsight Systems export (SQLite), as columns of numbers and texts.

Files are opened read-only and read in pieces, so that large ones need no more memory than their
numbers. Columns that a version of nsys does not write come out as -1. Left out: what the rows mean
(nsys.py), samples of the CPU, operating-system calls and metrics.

References
----------
.. [1] Nsight Systems User Guide, "SQLite Schema Reference",
   https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError

Ints = NDArray[np.int64]

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_PIECE = 1 << 16  # rows fetched at a time
_AT_ONCE = 500  # identifiers in one query: SQLite takes 999 or more
_PACKED = {
    "grid": '("gridX" << 32) | ("gridY" << 16) | "gridZ"',
    "block": '("blockX" << 32) | ("blockY" << 16) | "blockZ"',
}
"""Columns that are three numbers in one: X may have 31 bits, the others 16."""
_AGAIN = "export it again: nsys export --type sqlite --force-overwrite true REPORT.nsys-rep"


class NsysFile:
    """One open export."""

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self._connection = connection
        self.source = source
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(row[0]) for row in rows}

    def columns(self, table: str) -> list[str]:
        """Names of a table's columns; none where there is no such table."""
        if table not in self.tables:
            return []
        return [str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')]

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 where there is no such table."""
        if table not in self.tables:
            return 0
        return int(self._connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])

    def integers(self, table: str, names: Sequence[str], where: str = "") -> dict[str, Ints]:
        """Columns of whole numbers [row], -1 where a cell is empty or the column is missing."""
        known = self.columns(table)
        if not known:
            return {name: np.zeros(0, np.int64) for name in names}
        there = [name for name in names if name in known or name in _PACKED]
        # CAST: a cell of SQLite may hold anything, whatever its column was declared as
        cells = [f'"{name}"' if name in known else _PACKED[name] for name in there]
        parts = [f"CAST(IFNULL({cell}, -1) AS INTEGER)" for cell in cells] or ["0"]
        query = f'SELECT {", ".join(parts)} FROM "{table}"' + (f" WHERE {where}" if where else "")
        cursor = self._connection.execute(query)
        pieces = [np.zeros((0, len(parts)), np.int64)]
        while rows := cursor.fetchmany(_PIECE):
            pieces.append(np.array(rows, dtype=np.int64))
        whole = np.concatenate(pieces)
        found = {name: np.ascontiguousarray(whole[:, i]) for i, name in enumerate(there)}
        return {n: found[n] if n in found else np.full(len(whole), -1) for n in names}

    def texts(self, table: str, name: str, where: str = "") -> list[str | None]:
        """One column of texts [row]; None where a cell is empty or the column is missing."""
        if name not in self.columns(table):
            return [None] * self.count(table) if not where else []
        query = f'SELECT "{name}" FROM "{table}"' + (f" WHERE {where}" if where else "")
        return [None if row[0] is None else str(row[0]) for row in self._connection.execute(query)]

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts by identifier, those that are asked for; unknown ones are left out."""
        if not {"id", "value"} <= set(self.columns("StringIds")):
            return {}
        wanted = sorted({int(i) for i in ids if i >= 0})
        found: dict[int, str] = {}
        for first in range(0, len(wanted), _AT_ONCE):
            part = wanted[first : first + _AT_ONCE]
            marks = ",".join("?" * len(part))
            query = f"SELECT id, value FROM StringIds WHERE id IN ({marks})"
            found |= {int(i): str(text) for i, text in self._connection.execute(query, part)}
        return found

    def labels(self, table: str) -> dict[int, str]:
        """Names of an enumeration by their number."""
        if not {"id", "name"} <= set(self.columns(table)):
            return {}
        rows = self._connection.execute(f'SELECT id, name FROM "{table}"')
        return {int(i): str(name) for i, name in rows if i is not None}


@contextmanager
def open_nsys(path: Path, source: str) -> Iterator[NsysFile]:
    """Open an export for reading alone."""
    connection: sqlite3.Connection | None = None
    try:
        # immutable: no lock and no journal beside a file that may lie where nothing can be written
        address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(address, uri=True)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        file = NsysFile(connection, source)
        _check(file)
        yield file
    except (sqlite3.Error, OverflowError, UnicodeError) as error:
        raise PrismError(
            f"{source}: the SQLite file is broken or cut short ({error}); copy it again, or "
            f"{_AGAIN}"
        ) from error
    finally:
        if connection is not None:
            connection.close()


def _check(file: NsysFile) -> None:
    """Refuse databases without kernels."""
    known = file.columns(KERNELS)
    missing = {"start", "end", "streamId"} - set(known)
    if known and missing:
        raise PrismError(
            f"{file.source}: {KERNELS} lacks {', '.join(sorted(missing))}; expected the columns "
            f"that nsys export writes; {_AGAIN}"
        )
    if file.count(KERNELS):
        return
    if known:
        raise PrismError(
            f"{file.source}: {KERNELS} has no rows: nothing ran on a GPU while nsys recorded; "
            "record longer, or check --capture-range and --delay"
        )
    if file.count("CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
        raise PrismError(
            f"{file.source}: holds CUDA graphs as wholes and no kernels; record with "
            "--cuda-graph-trace=node"
        )
    shown = ", ".join(sorted(file.tables)[:5]) or "none"
    raise PrismError(
        f"{file.source}: no table {KERNELS} (its tables: {shown}); expected an export of Nsight "
        "Systems (nsys export --type sqlite) of a run with nsys profile --trace=cuda,nvtx"
    )
