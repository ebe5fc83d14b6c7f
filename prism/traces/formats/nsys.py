"""Nsight Systems exports (SQLite) of one or several ranks, as the events of Kineto traces.

A rank is a process on a device: a file may hold several. Kernels, copies, fills, runtime calls and
NVTX ranges become events of the same meaning, so that what follows is one path for both. Steps are
NVTX ranges named like steps. Files are opened read-only and read in pieces, so that large ones need
no more memory than their numbers. nsys does not name the message sizes and groups of collectives.

References
----------
.. [1] Nsight Systems User Guide, "SQLite Schema Reference",
   https://docs.nvidia.com/nsight-systems/UserGuide/index.html
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast
from urllib.parse import quote

import msgspec
import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.kineto.events import Args, Event, RawTrace
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.rank import RankTrace, read_rank
from prism.traces.kineto.stepmarks import (
    NamedRanges,
    candidates,
    compile_pattern,
    find_steps,
    no_such_step,
)
from prism.traces.table import Trace

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_PIECE = 1 << 16  # rows fetched at a time
_AGAIN = "export it again: nsys export --type sqlite --force-overwrite true REPORT.nsys-rep"
_COPY = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_WAIT_EVENT = 2  # CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT
_PUSH_POP, _START_END = 59, 60  # types of ranges, as ENUM_NSYS_EVENT_TYPE names them
_PROCESS = ~np.int64((1 << 24) - 1)  # bits of a serialised thread id that tell its process
_COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")


class _Tables:
    """The tables of one open export."""

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self.connection, self.source = connection, source
        self.columns: dict[str, list[str]] = {}
        for table, column in connection.execute(
            "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c "
            "WHERE t.type = 'table'"
        ):
            self.columns.setdefault(table, []).append(column)

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 where there is no such table."""
        if table not in self.columns:
            return 0
        return int(self.connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])

    def integers(self, table: str, names: Sequence[str], where: str = "1") -> pd.DataFrame:
        """Columns of whole numbers, -1 where a cell is empty or the column is missing.

        ``grid`` and ``block`` are three numbers in one: X may have 31 bits, the others 16.
        """
        if table not in self.columns:
            return pd.DataFrame(columns=list(names), dtype=np.int64)
        known = self.columns[table]
        cells = {name: f'"{name}"' if name in known else "-1" for name in names}
        for name in {"grid", "block"} & set(names):
            if {f"{name}{axis}" for axis in "XYZ"} <= set(known):
                cells[name] = f'("{name}X" << 32) | ("{name}Y" << 16) | "{name}Z"'
        # CAST: a cell of SQLite may hold anything, whatever its column was declared as
        parts = [f'CAST(IFNULL({x}, -1) AS INTEGER) AS "{name}"' for name, x in cells.items()]
        query = f'SELECT {", ".join(parts)} FROM "{table}" WHERE {where}'
        pieces = pd.read_sql_query(query, self.connection, chunksize=_PIECE)
        return pd.concat(list(pieces), ignore_index=True).astype(np.int64)

    def texts(self, table: str, name: str, where: str = "1") -> list[str | None]:
        """One column of texts [row], None where a cell is empty; none without the column."""
        if name not in self.columns.get(table, ()):
            return []
        rows = self.connection.execute(f'SELECT "{name}" FROM "{table}" WHERE {where}')
        return [None if text is None else str(text) for (text,) in rows]

    def strings(self, table: str, ids: pd.Series) -> list[str]:
        """Texts of a column of identifiers, "" where one is unknown."""
        found: dict[int, str] = {}
        is_there = ids.name in self.columns.get(table, ())
        if is_there and {"id", "value"} <= set(self.columns.get("StringIds", ())):
            found = dict(self.connection.execute(
                f'SELECT id, value FROM StringIds WHERE id IN (SELECT "{ids.name}" FROM "{table}")'
            ))  # fmt: skip
        return [str(found.get(i, "")) for i in ids]


@contextmanager
def _opened(path: Path, source: str) -> Iterator[_Tables]:
    """Open an export for reading alone; databases without kernels are refused."""
    connection: sqlite3.Connection | None = None
    try:
        # immutable: no lock and no journal beside a file that may lie where nothing can be written
        address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        connection = sqlite3.connect(address, uri=True)
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        tables = _Tables(connection, source)
        _check(tables)
        yield tables
    except (sqlite3.Error, pd.errors.DatabaseError, OverflowError, UnicodeError) as error:
        raise PrismError(
            f"{source}: the SQLite file is broken or cut short ({error.__cause__ or error}); copy "
            f"it again, or {_AGAIN}"
        ) from error
    finally:
        if connection is not None:
            connection.close()


def _check(tables: _Tables) -> None:
    known, shown = tables.columns.get(_KERNELS, []), ", ".join(sorted(tables.columns)[:5]) or "none"
    missing = {"start", "end", "streamId"} - set(known)
    if known and missing:
        raise PrismError(
            f"{tables.source}: {_KERNELS} lacks {', '.join(sorted(missing))}; expected the columns "
            f"that nsys export writes; {_AGAIN}"
        )
    if tables.count(_KERNELS):
        return
    why = (
        f"no table {_KERNELS} (its tables: {shown}); expected an export of Nsight Systems (nsys "
        "export --type sqlite) of a run with nsys profile --trace=cuda,nvtx"
    )
    if known:
        why = (
            f"{_KERNELS} has no rows: nothing ran on a GPU while nsys recorded; record longer, or "
            "check --capture-range and --delay"
        )
    elif tables.count(_GRAPHS):
        why = "holds CUDA graphs as wholes and no kernels; record with --cuda-graph-trace=node"
    raise PrismError(f"{tables.source}: {why}")


def read_nsys(files: Sequence[RecordedFile], step_range: str | None = None) -> Trace:
    """Read exports of one job."""
    pattern = compile_pattern(step_range)

    def read_file(file: RecordedFile) -> list[RankTrace]:
        with _opened(file.path, file.source) as tables:
            return _read_file(tables, pattern)

    return read_ranks(files, read_file, "nsys")


def _read_file(file: _Tables, pattern: re.Pattern[str] | None) -> list[RankTrace]:
    """Read the ranks of one file."""
    device, host = _device(file), _host(file)
    kernels = device[device["cat"] == "kernel"]
    owners = sorted(set(zip(kernels["deviceId"], kernels["globalPid"], strict=True)))
    epoch = file.integers("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"]
    base = max(int(epoch.iloc[0]), 0) if epoch.size else 0
    gpus = dict.fromkeys(g for g in file.texts("TARGET_INFO_GPU", "name") if g)
    notes = [f"recorded on {', '.join(gpus)}"] * bool(gpus)
    if n_graphs := file.count(_GRAPHS):
        notes.append(
            f"{n_graphs:,} CUDA graphs recorded as wholes, their kernels are not here; record with "
            "--cuda-graph-trace=node"
        )
    ranks, n_taken, found = [], 0, False
    for (gpu, pid), number in zip(owners, _rank_numbers(file, owners), strict=True):
        mine = device[(device["deviceId"] == gpu) & (device["globalPid"] == pid)]
        around = host[host["globalPid"] == pid] if pid >= 0 else host
        n_taken += len(mine)
        times = pd.concat([mine["start"], around["start"][around["cat"] == "cuda_runtime"]])
        origin = int(times[times >= 0].min()) if (times >= 0).any() else 0
        steps = find_steps(_named(around, origin), pattern)
        events = [*_events(mine, origin), *_events(around[around["cat"] != ""], origin)]
        rank = read_rank(RawTrace(events, number, None, base + origin), steps)
        found = found or bool(steps)
        ranks += [rank] * bool(len(rank.table))
    if n_taken < len(device):
        lost = len(device) - n_taken
        notes.append(f"{lost:,} copies and fills on devices without kernels skipped")
    if not ranks:
        raise PrismError(f"{file.source}: no kernel has a valid time; export it again")
    if len(owners) > 1 and "MPI_RANKS" not in file.columns:
        notes.append(f"{len(owners)} processes in one file: ranks are numbered by device")
    if not found:
        ranges = _named(host, 0)
        if pattern is not None:
            raise no_such_step(ranges, pattern, file.source, "NVTX range")
        there = candidates(ranges)
        notes.append(
            f"no NVTX range is named like a step; --step-range NAME takes another: {there}"
            if there
            else "no NVTX ranges; mark steps with torch.cuda.nvtx.range_push('step') and "
            "range_pop()"
        )
    ranks[0].notes += notes
    return ranks


def _rank_numbers(file: _Tables, owners: list[tuple[int, int]]) -> list[int | None]:
    """Rank of each device and process, None where nothing tells."""
    of_pid = dict(file.integers("MPI_RANKS", ["globalPid", "rank"]).itertuples(index=False))
    pids = [pid for _, pid in owners]
    if len(set(pids)) == len(pids) and all(of_pid.get(pid, -1) >= 0 for pid in pids):
        return [of_pid[pid] for pid in pids]
    return [None] if len(owners) == 1 else list(range(len(owners)))


def _named(host: pd.DataFrame, origin: int) -> NamedRanges:
    """Give ranges with times in us from an origin."""
    ranges = host[host["is_range"]]
    label, labels = pd.factorize(ranges["label"])
    start, end = ((ranges[name].to_numpy() - origin) / 1e3 for name in ("start", "end"))
    return NamedRanges(list(labels), label, start, end)


def _events(rows: pd.DataFrame, origin: int) -> Iterable[Event]:
    """Rows of `_device` or `_host` as the events that Kineto writes, times in us from an origin."""
    ts = ((rows["start"] - origin) / 1e3).where(rows["start"] >= 0)
    dur = (rows["end"] - rows["start"]) / 1e3
    return (
        # arguments that need no decoding
        Event(name, cat, "X", start, duration, thread, cast(msgspec.Raw, args))
        for name, cat, start, duration, thread, args in zip(
            rows["name"], rows["cat"], ts, dur, rows["globalTid"], rows["args"], strict=True
        )
    )


def _device(file: _Tables) -> pd.DataFrame:
    """Read kernels, copies and fills."""
    # the fullest name of a kernel that the file has
    texts = ("demangledName", "shortName", "mangledName", "name")
    named = next((name for name in texts if name in file.columns[_KERNELS]), "name")
    kernel = file.integers(_KERNELS, [*_COMMON, named, "grid", "block"])
    kernel["cat"], kernel["name"] = "kernel", file.strings(_KERNELS, kernel[named])
    kernel["args"] = [
        Args(correlation=c, stream=s, grid=_axes(g), block=_axes(b))
        for c, s, g, b in _rows(kernel, "correlationId", "streamId", "grid", "block")
    ]
    kinds = ("copyKind", "srcKind", "dstKind")
    copy = file.integers("CUPTI_ACTIVITY_KIND_MEMCPY", [*_COMMON, "bytes", *kinds])
    copy["cat"], copy["name"] = "gpu_memcpy", [_copy_name(*row) for row in _rows(copy, *kinds)]
    fill = file.integers("CUPTI_ACTIVITY_KIND_MEMSET", [*_COMMON, "bytes"])
    fill["cat"], fill["name"] = "gpu_memset", "Memset (Device)"
    for table in (copy, fill):
        table["args"] = [
            Args(correlation=c, stream=s, bytes=b if b >= 0 else None)
            for c, s, b in _rows(table, "correlationId", "streamId", "bytes")
        ]
    columns = [*_COMMON, "cat", "name", "args"]
    return pd.concat([x[columns] for x in (kernel, copy, fill)]).assign(globalTid=None)


def _rows(table: pd.DataFrame, *names: str) -> Iterable[tuple[int, ...]]:
    """Go through some columns of whole numbers, row by row."""
    return zip(*(table[name].tolist() for name in names), strict=True)


@cache
def _copy_name(kind: int, source: int, target: int) -> str:
    """Name a copy as Kineto does."""
    known = _MEMORY.get(source, "Unknown"), _MEMORY.get(target, "Unknown")
    return f"Memcpy {_COPY.get(kind, 'Unknown')} ({known[0]} -> {known[1]})"


@cache
def _axes(packed: int) -> msgspec.Raw:
    """Write three numbers that stand in one as Kineto does; empty where they are unknown."""
    if packed < 0:
        return msgspec.Raw()
    return msgspec.Raw(f"[{packed >> 32},{packed >> 16 & 0xFFFF},{packed & 0xFFFF}]".encode())


def _host(file: _Tables) -> pd.DataFrame:
    """Read runtime calls, NVTX ranges, and what CUPTI adds to calls that wait."""
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    call = file.integers(table, ["start", "end", "globalTid", "correlationId", "nameId"])
    call["cat"], call["name"] = "cuda_runtime", file.strings(table, call["nameId"])
    call["args"] = [Args(correlation=c) for c in call["correlationId"].tolist()]
    call["globalPid"] = call["globalTid"] & _PROCESS
    parts = [x.assign(is_range=x["cat"].isin(("", "user_annotation")))
             for x in (call, _ranges(file), _syncs(file))]  # fmt: skip
    columns = ["start", "end", "globalTid", "globalPid", "cat", "name", "args", "is_range"]
    found = pd.concat([x.reindex(columns=[*columns, "label"]) for x in parts])
    return found.reset_index(drop=True)


def _ranges(file: _Tables) -> pd.DataFrame:
    """Read the NVTX ranges; of a category those that nest in a thread, which ops are inside of."""
    table = "NVTX_EVENTS"
    known = set(file.columns.get(table, ()))
    where = '"end" IS NOT NULL'
    if "eventType" in known:
        where += f" AND eventType IN ({_PUSH_POP}, {_START_END})"
    if not {"start", "end"} <= known:
        table, where = "", "1"
    rows = file.integers(table, ["start", "end", "eventType", "globalTid", "textId"], where)
    texts = file.texts(table, "text", where) or [None] * len(rows)
    registered = file.strings(table, rows["textId"])
    rows["label"] = [x if t is None else t for t, x in zip(texts, registered, strict=True)]
    # PyTorch (emit_nvtx) puts sequence numbers and sizes behind an op's name
    rows["name"] = [x.split(", seq")[0].split(", op_id")[0].strip() for x in rows["label"]]
    nests = (rows["eventType"] != _START_END) & (rows["end"] >= rows["start"])
    rows["cat"] = np.where(nests, "user_annotation", "")
    return rows.assign(globalPid=rows["globalTid"] & _PROCESS, args=msgspec.Raw())


def _syncs(file: _Tables) -> pd.DataFrame:
    """Read which stream each synchronising call waits for, and where its event was recorded."""
    by, kind = ["globalPid", "eventId"], "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
    sync = file.integers(kind, ["start", "end", "correlationId", "streamId", "syncType", *by])
    event = file.integers("CUPTI_ACTIVITY_KIND_CUDA_EVENT", ["correlationId", "streamId", *by])
    event = event.assign(record=event["correlationId"]).rename(columns={"streamId": "on_stream"})
    # an event is recorded again and again: the last record before the wait counts
    waits = sync[sync["syncType"] == _WAIT_EVENT].reset_index(names="row")
    found = pd.merge_asof(
        waits.sort_values("correlationId"), event.sort_values("correlationId"),
        on="correlationId", by=by, allow_exact_matches=False,
    ).dropna(subset="record").set_index("row")  # fmt: skip
    sync = sync.join(found[["on_stream", "record"]].astype(np.int64)).fillna(-1).astype(np.int64)
    sync["args"] = [
        Args(correlation=c, stream=s if s < 1 << 31 else -1, wait_on_stream=on,
             wait_on_cuda_event_record_corr_id=record)
        for c, s, on, record in _rows(sync, "correlationId", "streamId", "on_stream", "record")
    ]  # fmt: skip
    return sync.assign(cat="cuda_sync", name="", globalTid=-1)
