"""Traces of any format, distinguished by content and never by name.

Profilers' files (JSON, Nsight Systems SQLite, Chakra) are one trace of as many ranks as there are
files; a table with an optype is a pipeline trace, any other with ops a tidy table. Left out: step
times (steps.py), tables of kernels and of collectives, refused here with a word about where they
belong.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prism.common.errors import PrismError
from prism.traces.content import find_kind, is_chakra_json, read_table, read_text
from prism.traces.hta import is_hta
from prism.traces.logs import is_log
from prism.traces.nccltests import is_nccl_tests
from prism.traces.pipeline import is_pipeline, read_pipeline
from prism.traces.table import Trace
from prism.traces.tidy import UNITS, is_tidy, read_tidy

PathLike = str | os.PathLike[str]


RANK_FORMATS = {
    "kineto": "JSON",
    "nsys": "Nsight Systems export",
    "chakra": "Chakra execution trace",
}
"""Formats that come as one file a rank, and what each file is."""


def rank_format(path: Path, kind: str) -> str | None:
    """Say which of `RANK_FORMATS` a file of this kind is, None for all others."""
    if kind == "json":
        return "chakra" if is_chakra_json(path) else "kineto"
    return {"sqlite": "nsys", "chakra": "chakra"}.get(kind)


def read_trace(paths: PathLike | Sequence[PathLike], step_range: str | None = None) -> Trace:
    """Read a trace of any format."""
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
    formats = {file: rank_format(file, kind) for file, kind in kinds.items()}
    ranks = [file for file, name in formats.items() if name]
    if ranks:
        others = [file for file, name in formats.items() if not name]
        _check_one_format(ranks, formats, source)
        named = {Path(path) for path in given}
        return _read_ranks(formats[ranks[0]], ranks, others, left_out, named, step_range)
    if step_range is not None:
        raise PrismError(
            f"{source}: --step-range {step_range}: names ranges of an Nsight Systems or Chakra "
            "trace; a table has a column step, leave it out"
        )
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


def _check_one_format(ranks: list[Path], formats: dict[Path, str | None], source: str) -> None:
    """Refuse files of different profilers."""
    first = formats[ranks[0]]
    other = next((file for file in ranks if formats[file] != first), None)
    if other is not None:
        raise PrismError(
            f"{other}: is of {RANK_FORMATS[str(formats[other])]}, but {ranks[0]} of "
            f"{RANK_FORMATS[str(first)]}; the ranks of a trace come from one profiler; name the "
            "files of one"
        )


def _read_ranks(
    format: str | None,
    ranks: list[Path],
    others: list[Path],
    left_out: list[str],
    named: set[Path],
    step_range: str | None,
) -> Trace:
    """Read a profiler's files; other files of its folder are left out with a note."""
    what = RANK_FORMATS[str(format)]
    mixed = [file for file in others if file in named]
    if mixed:
        raise PrismError(
            f"{mixed[0]}: is not {what}, but {ranks[0]} is; a trace is one table, or files of "
            "several ranks by one profiler"
        )
    found = set(ranks) - named
    if format == "kineto":
        from prism.traces.kineto import read_kineto

        if step_range is not None:
            raise PrismError(
                f"{ranks[0]}: --step-range {step_range}: PyTorch's profiler marks steps itself "
                "(ProfilerStep); leave it out, and call prof.step() after each step"
            )
        trace = read_kineto(ranks, found=found)
    elif format == "nsys":
        from prism.traces.nsys import read_nsys

        trace = read_nsys(ranks, found, step_range)
    else:
        from prism.traces.chakra import read_chakra

        trace = read_chakra(ranks, found, step_range)
    notes = [f"{file}: not {what}, left out" for file in others]
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
    if text is not None and is_nccl_tests(text):
        raise PrismError(
            f"{source}: is output of nccl-tests, not a trace of ops; prism fit makes a library of "
            "latency and bandwidth of it, prism show lists it"
        )
    table = read_table(path, source, kind, text)
    if is_hta(table.columns):
        raise PrismError(
            f"{source}: is a table of kernels (mean, std, min, max by HTA), not a trace of ops; "
            "prism fit makes a library of kernels of it, prism show lists it"
        )
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
