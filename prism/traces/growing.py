"""A log that is still being written: whole lines only, of one run, rotation and restarts included.

What was read before a log was rotated or cut is kept.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prism.common.errors import PrismError, named
from prism.common.files import check_file
from prism.traces.file import RecordedFile
from prism.traces.readers import Recording, find_reader, read_step_times
from prism.traces.steps import StepTimes

_TOTAL = re.compile(rb"(epoch\s+\d+,\s+)?\b(?:iteration|step)\s+\d+\s*/\s*(\d{1,15})\b", re.I)
_TAIL = 1 << 20  # bytes at the end in which the last step's line is
_HEAD = 256  # bytes that a log goes on having, unless it was rotated


class Reading(NamedTuple):
    """What a log holds at a moment."""

    times: StepTimes  # of the one run that is going on, each step once, ascending
    total: int | None  # steps of the run, where its lines say so
    written_s: float  # when it was last written [s since 1970-01-01 UTC]

    @property
    def written(self) -> datetime:
        """When it was last written, in local time."""
        return datetime.fromtimestamp(self.written_s).astimezone()

    @property
    def begun(self) -> datetime:
        """When the run would have begun without any pause, in local time."""
        seconds = float(self.times.seconds.mean()) * count_done(self.times)[1]
        return self.written - timedelta(seconds=seconds)

    def length(self, given: int | None, usual: int | None) -> int:
        """Give the steps of the run: those given, else the log's, else the usual ones."""
        found = given or self.total or usual
        if found is None:
            raise PrismError(
                f"{self.times.source}: names no number of steps; {named('steps')} N says how many "
                "the run has"
            )
        return found

    def figures(self) -> dict[str, Any]:
        """When and of what the steps were written."""
        written = self.written.isoformat(timespec="seconds")
        return {"reading": {"written": written} | self.times.taken}


class _WholeLines(RecordedFile):
    """A text file without its last line, where that has no end yet."""

    @cached_property
    def text(self) -> bytes:
        """Lines that have an end."""
        text = super().text
        return text[: text.rfind(b"\n") + 1]


class GrowingLog:
    """A log, to be read again and again; `options` are those of `read_step_times`."""

    def __init__(self, path: str | Path, pattern: str | None = None, **options: Any) -> None:
        self.path, self._pattern, self._options = Path(path), pattern, options
        self._file: tuple[int, int] | None = None
        self._head, self._size = b"", 0
        self._last: StepTimes | None = None
        self._before: StepTimes | None = None

    def read(self) -> Reading:
        """Read what is there now; raises PrismError where that is no log of step times."""
        check_file(self.path, str(self.path))
        at = self.path.stat()
        file = _WholeLines(self.path)
        same = self._file in (None, (at.st_dev, at.st_ino)) and at.st_size >= self._size
        if not same or not file.head.startswith(self._head):
            self._before = self._last
        self._file, self._size = (at.st_dev, at.st_ino), at.st_size
        self._head = file.head[:_HEAD]
        reader = find_reader(file, self._pattern)
        times = read_step_times(Recording(str(self.path), (file,), reader), **self._options)
        is_log = reader is not None and reader.name == "log"
        if np.unique(times.run).size > 1 and not is_log:
            names = ", ".join(map(str, np.unique(times.run)[:4]))
            raise PrismError(
                f"{self.path}: steps of several runs ({names}, ...); expected those of the run "
                f"that is going on: --where run={times.run[-1]}"
            )
        self._last = _one_run(times, self._before)
        totals = [*_TOTAL.finditer(file.text[-_TAIL:])]
        total = int(totals[-1][2]) + bool(totals[-1][1]) if totals else None  # NeMo's: the last
        return Reading(self._last, total, at.st_mtime)


def count_done(times: StepTimes) -> tuple[int, int]:
    """Count the steps of a run before its first measured one, and all that are done."""
    number, k = np.unique(times.step), times.mean_over
    each = max(1.0, k / float(np.median(np.diff(number)))) if number.size > 1 else 1.0
    first, own = int(number[0]), int(k / each)  # means of steps may be numbered one by one
    begun = 0 if first == 0 else own  # numbers count from 0, or are of the last step done
    return int(max(first - begun, 0) * each), int((number[-1] - begun + own) * each)


def read_log(log: str | Path | Reading, **options: Any) -> Reading:
    """Read a log once, unless it was."""
    return log if isinstance(log, Reading) else GrowingLog(log, **options).read()


def _one_run(times: StepTimes, before: StepTimes | None) -> StepTimes:
    """Keep the last value of each step, up to the last run's last; what came before is its past."""
    notes = list(times.notes)
    restarts = np.unique(times.run).size - 1
    if restarts:
        notes.append("runs of this log are one run and its restarts: of each step the last counts")
    seconds, step = times.seconds, times.step
    last = int(step[times.run == times.run[-1]].max())
    if before is not None and before.mean_over == times.mean_over:
        seconds, step = np.r_[before.seconds, seconds], np.r_[before.step, step]
    seconds, step = seconds[step <= last], step[step <= last]
    steps, place = np.unique(step[::-1], return_index=True)
    return replace(
        times, seconds=seconds[::-1][place], step=steps, run=np.full(steps.size, ""),
        notes=tuple(notes),
    )  # fmt: skip
