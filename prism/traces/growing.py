"""A log that is still being written: whole lines only, of one run, rotation and restarts included.

What was read before is kept, also where a log was rotated or cut: a look reads the new lines, with
some before them that must say again what is known; where they do not, the whole file is read. So a
long file is read in pieces, and may be larger than what is read at once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from prism.common.errors import PrismError, option
from prism.common.files import GZIP, check_file
from prism.traces.file import HEAD, RecordedFile
from prism.traces.logs import say_skipped, settings_in
from prism.traces.readers import Recording, find_reader, read_step_times
from prism.traces.steps import StepTimes

_TOTAL = re.compile(rb"(epoch\s+\d+,\s+)?\b(?:iteration|step)\s+\d+\s*/\s*(\d{1,15})\b", re.I)
_TAIL = 1 << 20  # bytes at the end in which the last step's line is
_HEAD = 256  # bytes that a log goes on having, unless it was rotated
_PIECE = 32 << 20  # bytes at a time: some 300 MB of lines, taken apart
_AGAIN = 1 << 14, 1 << 20
"""Bytes before new ones that are read again: 90 lines of Megatron's, or where these have no step
times as much as is looked at for the last one."""


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
                f"{self.times.source}: names no number of steps; {option('steps')} N says how many "
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


class _Piece(RecordedFile):
    """Some lines of a text file, by themselves."""

    def __init__(self, path: Path, text: bytes, first_line: int) -> None:
        super().__init__(path)
        self.head, self.whole, self.first_line = text[:HEAD], text, first_line

    def read_text(self, most: int = 0) -> bytes:
        """Its lines."""
        return self.whole


class GrowingLog:
    """A log, to be read again and again; `options` are those of `read_step_times`."""

    def __init__(self, path: str | Path, pattern: str | None = None, **options: Any) -> None:
        self.path, self._pattern, self._options = Path(path), pattern, options
        self._file: tuple[int, int] | None = None
        self._head, self._size = b"", 0
        self._end, self._lines = 0, 0  # bytes and lines that were read
        self._settings = b""  # lines that say what all others are
        self._total: int | None = None
        self._last: StepTimes | None = None
        self._before: StepTimes | None = None

    def read(self) -> Reading:
        """Read what is there now; raises PrismError where that is no log of step times."""
        check_file(self.path, str(self.path))
        at = self.path.stat()
        file = _WholeLines(self.path)
        same = self._file in (None, (at.st_dev, at.st_ino)) and at.st_size >= self._size
        if not same or not file.head.startswith(self._head):
            self._before, self._end = self._last, 0
        self._file, self._size = (at.st_dev, at.st_ino), at.st_size
        self._head = file.head[:_HEAD]
        times = self._go_on()
        if times is None:
            times, text = _one_run(self._read(file), self._before), file.text
            self._settings, self._total = self._settings_of(file), _total(text)
            self._end, self._lines = len(text), text.count(b"\n")
        self._last = times
        return Reading(times, self._total, at.st_mtime)

    def _read(self, file: RecordedFile) -> StepTimes:
        """Read a file, or a piece of it."""
        reader = find_reader(file, self._pattern)
        times = read_step_times(Recording(str(self.path), (file,), reader), **self._options)
        is_log = reader is not None and reader.name == "log"
        if np.unique(times.run).size > 1 and not is_log:
            names = ", ".join(map(str, np.unique(times.run)[:4]))
            raise PrismError(
                f"{self.path}: steps of several runs ({names}, ...); expected those of the run "
                f"that is going on: --where run={times.run[-1]}"
            )
        return times

    def _settings_of(self, file: RecordedFile) -> bytes:
        """Give the lines of a file that each piece of it needs."""
        if file.columns:
            return file.head[: file.head.find(b"\n") + 1]
        return settings_in(file.text)

    def _go_on(self) -> StepTimes | None:
        """Read what is new in pieces; None where they cannot be read without the whole file."""
        times, text = self._last, b""
        with self.path.open("rb") as file:
            if file.read(len(GZIP)) == GZIP:
                return None
            end, lines = self._end, self._lines
            if not end and self._size > _PIECE:
                text = self._lines_at(file, 0)
                piece = _Piece(self.path, text, 1)
                try:
                    times = _one_run(self._read(piece), self._before)
                except PrismError:
                    return None
                self._settings, self._total = self._settings_of(piece), _total(text)
                end, lines = len(text), text.count(b"\n")
            if not end or times is None:
                return None
            while text := self._lines_at(file, end):
                new = self._append(file, times, text, end, lines)
                if new is None:
                    return None
                times, end, lines = new, end + len(text), lines + text.count(b"\n")
                self._total = _total(text) or self._total
        self._end, self._lines = end, lines
        return times

    def _lines_at(self, file: BinaryIO, begin: int) -> bytes:
        """Read whole lines from a place on, as many as are read at a time."""
        file.seek(begin)
        text = file.read(_PIECE)
        return text[: text.rfind(b"\n") + 1]

    def _append(
        self, file: BinaryIO, times: StepTimes, text: bytes, end: int, lines: int
    ) -> StepTimes | None:
        """Add the steps of new lines; None where lines before them do not say what is known."""
        for size in _AGAIN:
            begin = max(end - size, 0)
            file.seek(begin)
            again = file.read(end - begin)
            if begin:
                again = again[again.find(b"\n") + 1 :]
            first = lines - again.count(b"\n") - self._settings.count(b"\n") + 1
            try:
                known = self._read(_Piece(self.path, self._settings + again, first))
                new = self._read(_Piece(self.path, self._settings + again + text, first))
            except PrismError:
                continue
            if _says(times, _one_run(known, None)) and _alike(times, new):
                return _with_notes(_one_run(new, times), times)
        return None


def _total(text: bytes) -> int | None:
    """Find the steps of the run, where the last lines of a text say them."""
    totals = [*_TOTAL.finditer(text[-_TAIL:])]
    return int(totals[-1][2]) + bool(totals[-1][1]) if totals else None  # NeMo's: the last


def _alike(times: StepTimes, others: StepTimes) -> bool:
    """Whether values are of one kind."""
    return times.taken == others.taken and times.mean_over == others.mean_over


def _says(times: StepTimes, again: StepTimes) -> bool:
    """Whether values, read again, are those that are known of the last steps."""
    at = np.searchsorted(times.step, again.step)
    if not _alike(times, again) or at[-1] != times.step.size - 1:
        return False
    same = (times.step[at] == again.step) & (times.seconds[at] == again.seconds)
    return bool(same.all())


def count_done(times: StepTimes) -> tuple[int, int]:
    """Count the steps of a run before its first measured one, and all that are done."""
    number, k = times.step, times.mean_over
    apart = np.diff(number)
    if not (apart > 0).all():
        number = np.unique(number)
        apart = np.diff(number)
    each = max(1.0, k / float(np.median(apart))) if number.size > 1 else 1.0
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
    early = slice(0, 0)
    if before is not None and before.mean_over == times.mean_over:
        early = slice(0, int(np.searchsorted(before.step, step.min())))
        seconds = np.r_[before.seconds[early.stop :], seconds]
        step = np.r_[before.step[early.stop :], step]
    seconds, step = seconds[step <= last], step[step <= last]
    steps, place = np.unique(step[::-1], return_index=True)
    seconds = seconds[::-1][place]
    if early.stop:
        assert before is not None
        seconds, steps = np.r_[before.seconds[early], seconds], np.r_[before.step[early], steps]
    return replace(
        times, seconds=seconds, step=steps, run=np.full(steps.size, ""), notes=tuple(notes),
    )  # fmt: skip


def _with_notes(times: StepTimes, before: StepTimes) -> StepTimes:
    """Add what was said before of other lines of the same file; counts are then of the first."""
    skipped = tuple(sorted({*before.skipped, *times.skipped}))
    said = {say_skipped(found.skipped) for found in (before, times) if found.skipped}
    notes = {
        re.sub(r"\d+", "0", note): note for note in (*times.notes, *before.notes)
        if note not in said
    }  # fmt: skip
    told = [say_skipped(skipped)] if skipped else []
    return replace(times, notes=(*notes.values(), *told), skipped=skipped)
