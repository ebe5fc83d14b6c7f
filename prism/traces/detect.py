"""Traces of any format, told apart by content and never by name.

JSON goes to the profiler reader, one trace of as many ranks as there are files; a table with an
optype is a pipeline trace, any other with ops a tidy table. Left out: step times (steps.py),
which are refused here with a word about where they belong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prism.errors import PrismError
from prism.traces.content import find_kind, read_table, read_text
from prism.traces.logs import is_log
from prism.traces.pipeline import is_pipeline, read_pipeline
from prism.traces.table import Trace
from prism.traces.tidy import UNITS, is_tidy, read_tidy

PathLike = str | os.PathLike[str]


def read_trace(paths: PathLike | Sequence[PathLike]) -> Trace:
    """Read a trace of any format.

    Parameters
    ----------
    paths : str, path, or sequence of them
        One CSV or parquet table (pipeline or tidy); or profiler JSON: one file, several files or
        a folder of them, each a rank of one trace. Text may be gzipped.

    Returns
    -------
    Trace
        The tidy table and what was noted on the way.

    Raises
    ------
    PrismError
        If nothing there is a trace, or it is broken; the message says where and what to do.
    """
    given: list[PathLike] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise PrismError("no trace was named; expected a file or a folder")
    source = str(given[0]) + (f" and {len(given) - 1} more" if len(given) > 1 else "")
    files: list[Path] = []
    for path in given:
        files += _folder(Path(path)) if Path(path).is_dir() else [Path(path)]
    kinds = {}
    left_out = []
    for file in files:
        try:
            kinds[file] = find_kind(file, str(file))
        except PrismError as error:
            if len(files) == 1 or file in map(Path, given):
                raise
            left_out.append(str(error))
    ranks = [file for file, kind in kinds.items() if kind == "json"]
    if ranks:
        others = [file for file, kind in kinds.items() if kind != "json"]
        return _read_ranks(ranks, others, left_out, {Path(path) for path in given})
    if len(kinds) == 1:
        trace = _read_one(next(iter(kinds)))
        return replace(trace, source=source) if len(files) == 1 else trace
    if not kinds:
        raise PrismError(f"{source}: no file there is a trace: {'; '.join(left_out[:3])}")
    names = ", ".join(file.name for file in list(kinds)[:5])
    raise PrismError(
        f"{source}: {len(kinds)} tables or texts ({names}) and no profiler JSON; a trace is one "
        "table, or JSON files of several ranks; name one file"
    )


def _folder(folder: Path) -> list[Path]:
    """List the files of a folder, without the hidden ones."""
    try:
        files = sorted(
            file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")
        )
    except OSError as error:
        raise PrismError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not files:
        raise PrismError(f"{folder}: the folder holds no files; expected the trace of each rank")
    return files


def _read_ranks(
    ranks: list[Path], others: list[Path], left_out: list[str], named: set[Path]
) -> Trace:
    """Read profiler JSON; other files of its folder are left out with a note."""
    from prism.traces.kineto import read_kineto

    mixed = [file for file in others if file in named]
    if mixed:
        raise PrismError(
            f"{mixed[0]}: is not JSON, but {ranks[0]} is; a trace is one table, or JSON files of "
            "several ranks"
        )
    trace = read_kineto(ranks, found=set(ranks) - named)
    notes = [f"{file}: not JSON, left out" for file in others]
    notes += [f"left out: {reason}" for reason in left_out]
    return replace(trace, notes=(*trace.notes, *notes)) if notes else trace


def _read_one(path: Path) -> Trace:
    """Read a table."""
    source = str(path)
    kind = find_kind(path, source)
    text = read_text(path, source) if kind == "text" else None
    if text is not None and is_log(text):
        raise PrismError(
            f"{source}: is a log of step times, not a trace of ops; use it where step times are "
            "asked for, as in `prism validate JOB --measured`"
        )
    table = read_table(path, source, kind, text)
    if is_pipeline(table.columns):
        return read_pipeline(table)
    times = [name for name in table.columns if name.rpartition("_")[2] in UNITS and "_" in name]
    if times and not is_tidy(table.columns):
        raise PrismError(
            f"{source}: is no trace: it lacks optype, op_kind or name; found "
            f"{table.listing}; if {times[0]} are step times, use the file where those "
            "are asked for"
        )
    return read_tidy(table)
