"""The registry of readers: what a recording is, found by its content and never by its name.

A reader tells by a file's first bytes or columns whether the file is its own (`sniff`), and reads
what is (`read`). `find_recording` asks them in order, once for each file; the files that it opened
are those that are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prism.common.errors import PrismError, option
from prism.traces.file import RecordedFile
from prism.traces.formats.chakra import is_chakra, read_chakra
from prism.traces.formats.hta import is_hta, is_nsys_sum, read_hta, read_nsys_sum
from prism.traces.formats.nccltests import is_nccl_json, is_nccl_tests, is_rccl, read_nccl_tests
from prism.traces.formats.nsys import read_nsys
from prism.traces.kineto.join import read_kineto
from prism.traces.logs import (
    EXAMPLE,
    TOOLS,
    is_events,
    is_export,
    is_history,
    is_log,
    pattern_tool,
    read_events,
    read_export,
    read_history,
    read_log,
)
from prism.traces.looks import is_table, what_is
from prism.traces.steps import StepTimes, is_step_table, read_table_times
from prism.traces.table import Trace
from prism.traces.tidy import is_tidy, read_pipeline, read_tidy

PathLike = str | os.PathLike[str]
Holds = Literal["trace", "step_times", "kernels", "collectives"]

_USE = {
    "step_times": "use it where step times are asked for, as in `prism validate JOB --measured`",
    "kernels": "prism fit makes a library of kernels of it, prism show lists it",
    "collectives": "prism fit makes a library of latency and bandwidth of it, prism show lists it",
}
"""Where what is no trace is of use."""


_PROFILE = re.compile(
    rb'"(?:traceEvents|ph|schemaVersion|deviceProperties|distributedInfo|displayTimeUnit)"'
)


@dataclass(frozen=True)
class Reader:
    """One format."""

    name: str
    what: str  # what a file of it is, in words
    holds: Holds
    sniff: Callable[[RecordedFile], bool]
    read: Callable[..., Any]  # takes the files, and those options that are named in `options`
    several: bool = False  # whether a recording may be several files
    options: tuple[str, ...] = ()


READERS = (
    Reader("chakra", "a Chakra execution trace", "trace", is_chakra, read_chakra, True,
           ("step_range",)),
    Reader("log", "a log of step times", "step_times",
           lambda f: is_log(f.head if f.kind == "json" else f.text), read_log, options=("where",)),
    Reader("nccl-tests", "output of nccl-tests or rccl-tests", "collectives",
           lambda f: is_rccl(f.head) or is_nccl_json(f.head) or is_nccl_tests(f.text),
           read_nccl_tests, True),
    Reader("kineto", "profiler JSON", "trace",
           lambda f: f.kind == "json" and _PROFILE.search(f.head) is not None, read_kineto, True),
    Reader("nsys", "an Nsight Systems export", "trace", lambda f: f.kind == "sqlite", read_nsys,
           True, ("step_range",)),
    Reader("tensorboard", "TensorBoard's events", "step_times", is_events, read_events, True,
           ("column", "where", "unit", "per_step")),
    Reader("history", "a history of steps", "step_times", is_history, read_history,
           options=("column", "where", "unit", "per_step")),
    Reader("nsys-sum", "a table of kernels by nsys stats", "kernels", is_nsys_sum, read_nsys_sum),
    Reader("hta", "a table of kernels by HTA", "kernels", lambda f: is_hta(f.columns), read_hta),
    Reader("pipeline", "a pipeline trace", "trace", lambda f: "optype" in f.columns,
           lambda files: read_pipeline(files[0].table)),
    Reader("tidy", "a table of ops", "trace", lambda f: is_tidy(f.columns),
           lambda files: read_tidy(files[0].table)),
    Reader("export", "a table of a tracker", "step_times", is_export, read_export,
           options=("column", "where", "unit", "per_step")),
    Reader("steps", "a table of step times", "step_times", is_step_table, read_table_times,
           options=("column", "where", "unit", "per_step")),
)  # fmt: skip
"""All formats, in the order in which they are asked."""


@dataclass(frozen=True)
class Recording:
    """What a user named: a file, the files of several ranks, or a folder of these."""

    source: str  # as the user named it
    files: tuple[RecordedFile, ...]  # those that are read
    reader: Reader | None  # None where no reader knows the one file, which may still be a table
    notes: tuple[str, ...] = ()  # files of a folder that were left out

    @property
    def holds(self) -> Holds | None:
        """What it holds; None where no reader knows it."""
        return None if self.reader is None else self.reader.holds

    def has_steps(self, column: str | None) -> bool:
        """Whether it holds step times, or is a table of which the user names the column."""
        return self.holds == "step_times" or (self.reader is None and column is not None)

    def read(self, **options: Any) -> Any:
        """Read it with the options that were given; one that its format has not is refused."""
        assert self.reader is not None
        given = {name: value for name, value in options.items() if value not in (None, {})}
        for name in given:
            if name not in self.reader.options:
                of = " or ".join(r.what for r in READERS if name in r.options)
                raise PrismError(
                    f"{self.source}: is {self.reader.what}, and {option(name)} is of {of}; leave "
                    "it out"
                )
        found = self.reader.read(self.files, **given)
        return replace(found, notes=(*found.notes, *self.notes)) if self.notes else found


def find_reader(file: RecordedFile, pattern: str | None = None) -> Reader | None:
    """Find the reader of a file, or make that of a log whose step times a pattern finds."""
    if pattern is None:
        return next((reader for reader in READERS if reader.sniff(file)), None)
    read = partial(read_log, own=pattern_tool(pattern))
    if file.kind not in ("text", "json"):
        raise PrismError(
            f"{file.source}: {option('pattern')} reads lines, and this is {what_is(file)}"
        )
    return Reader(
        "log", "a log of step times", "step_times", lambda _: True, read, options=("where",)
    )


def unknown_format(what: RecordedFile | PathLike) -> PrismError:
    """Say that no reader knows a file: what it looks like, what would be read, what is known."""
    file = what if isinstance(what, RecordedFile) else RecordedFile(Path(what))
    tools = ", ".join(dict.fromkeys(["MLPerf", *(tool.name for tool in TOOLS)]))
    others = ", ".join(reader.what for reader in READERS if reader.name != "log")
    return PrismError(
        f"{file.source}: is {what_is(file)}: no format that prism knows. Step times are read from "
        f"lines by {option('pattern')} {EXAMPLE}, or from a table with the columns step, step_s. "
        f"Known are logs of {tools}; {others}"
    )


def find_recording(what: PathLike | Sequence[PathLike], pattern: str | None = None) -> Recording:
    """Find what a file, several files or a folder hold.

    `pattern` is a regular expression that finds step times in the lines of the one file: with a
    group ``s``, ``ms``, ``rate`` (steps per second) or ``elapsed`` (since the start), and ``step``.
    """
    given = [what] if isinstance(what, str | os.PathLike) else list(dict.fromkeys(what))
    if not given:
        raise PrismError("no trace was named; expected a file or a folder")
    source = str(given[0]) + (f" and {len(given) - 1} more" if len(given) > 1 else "")
    files: list[RecordedFile] = []
    for path in map(Path, given):
        files += _files_in(path) if path.is_dir() else [RecordedFile(path)]
    if pattern is not None:
        if len(files) != 1:
            raise PrismError(f"{source}: {option('pattern')} reads one file; name one")
        return Recording(source, (files[0],), find_reader(files[0], pattern))
    readers: dict[RecordedFile, Reader | None] = {}
    notes = []
    for file in files:
        try:
            readers[file] = find_reader(file)
            if readers[file] is None and file.kind == "binary":
                raise unknown_format(file)
        except PrismError as error:
            if len(files) == 1 or file.named:
                raise
            notes.append(f"left out: {error}")
    reader = next((r for r in READERS if r.several and r in readers.values()), None)
    if reader is not None:
        mine = tuple(file for file, found in readers.items() if found is reader)
        others = {file: found for file, found in readers.items() if found is not reader}
        _check_others(others, reader, mine[0])
        notes = [f"{file.source}: not {reader.what}, left out" for file in others] + notes
        return Recording(source, mine, reader, tuple(notes))
    if len(readers) == 1:
        file, reader = next(iter(readers.items()))
        return Recording(source, (file,), reader, tuple(notes))
    if not readers:
        raise PrismError(f"{source}: no file there is a recording: {'; '.join(notes[:3])}")
    names = ", ".join(file.path.name for file in list(readers)[:5])
    raise PrismError(
        f"{source}: {len(readers)} tables or texts ({names}), and a recording is one of these, or "
        "a profiler's files of several ranks; name one file, or join them into one (step times by "
        "a column run)"
    )


def _files_in(folder: Path) -> list[RecordedFile]:
    """List the files of a folder without the hidden ones, 10 behind 9."""
    try:
        files = [f for f in folder.iterdir() if f.is_file() and not f.name.startswith(".")]
    except OSError as error:
        raise PrismError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not files:
        raise PrismError(f"{folder}: the folder holds no files; expected the trace of each rank")
    by_number = {
        f: [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", f.name)] for f in files
    }
    return [RecordedFile(f, named=False) for f in sorted(files, key=lambda f: by_number[f])]


def _check_others(
    others: Mapping[RecordedFile, Reader | None], reader: Reader, first: RecordedFile
) -> None:
    """Refuse files of another profiler, and files that a user named and that are none."""
    for file, found in others.items():
        rival = found is not None and found.several and found.holds == reader.holds
        if rival or file.named:
            is_what = f"is {found.what}" if found is not None else f"is not {reader.what}"
            raise PrismError(
                f"{file.source}: {is_what}, but {first.source} is {reader.what}; a recording is "
                "of one profiler; name the files of one"
            )


def holds(path: str) -> Holds | None:
    """Say what a file or folder holds; None where it is no recording or cannot be read."""
    is_parquet = False
    try:
        is_parquet = Path(path).is_file() and RecordedFile(path).kind == "parquet"
        return find_recording(path).holds
    except PrismError:
        if is_parquet:  # it can be nothing else
            raise
        return None


def read_trace(
    what: PathLike | Sequence[PathLike] | Recording, step_range: str | None = None
) -> Trace:
    """Read a trace of any format."""
    found = what if isinstance(what, Recording) else find_recording(what)
    if found.reader is None:
        raise unknown_format(found.files[0])
    if found.reader.name == "steps":
        return read_tidy(found.files[0].table)  # which says what it lacks
    if found.holds != "trace":
        raise PrismError(
            f"{found.source}: is {found.reader.what}, not a trace of ops; {_USE[str(found.holds)]}"
        )
    trace: Trace = found.read(step_range=step_range)
    return trace


def read_step_times(
    what: PathLike | Recording,
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    unit: str | None = None,
    per_step: Mapping[str, float] | None = None,
    pattern: str | None = None,
) -> StepTimes:
    """Read measured step times.

    `column` (scalar, metric) is chosen, and the rows by `where`; `unit` is its unit where the name
    has none. `per_step` are ``samples`` and ``tokens`` of a step, where the caller knows them:
    rates of these are read. `pattern` is that of `find_recording`, where `what` is a path.
    """
    found = what if isinstance(what, Recording) else find_recording(what, pattern)
    if found.holds == "step_times":
        assert found.reader is not None
        known = per_step if "per_step" in found.reader.options else None
        times: StepTimes = found.read(column=column, where=where, unit=unit, per_step=known)
    elif found.reader is None and (column is None or not is_table(found.files[0])):
        raise unknown_format(found.files[0])
    elif (
        len(found.files) > 1
        or found.files[0].kind not in ("text", "parquet")
        or (column is None and found.holds in ("kernels", "collectives"))
    ):
        raise PrismError(
            f"{found.source}: is {found.reader.what if found.reader else 'no table'}; expected "
            "step times: a CSV or parquet table, or the log of a trainer"
        )
    else:  # a column of another table
        times = read_table_times(found.files, column, where, unit, per_step)
    return replace(times, notes=(*times.notes, times.said))
