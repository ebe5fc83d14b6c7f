"""Output of nccl-tests (or rccl-tests): who took part in a test, and at which bus bandwidth.

Text of one test or of many: a file, or a folder with a file per node or per pair of nodes; lines
may carry the prefix of pdsh, clush or mpirun. Hosts come from the list of devices that the tests
print, else from the prefix, else from the file's name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.table import LONGEST_S, SHORTEST_S

_MOST_BUS = 1e6  # GB/s; no link has as much
_MPI = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")
_PREFIX = re.compile(r"^([\w.-]+): ?(?=\s*(?:#|\d+\s|$))")
_DEVICE = re.compile(r"\bRank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\b")
_TEST = re.compile(r"\b(\w+)_perf\b")
_WORDS = re.compile(
    r"(?:^|[_.-]+)(?:nccl|rccl|tests?|perf|busbw|bandwidth|pairs?|out|all_?reduce|all_?gather|"
    r"reduce_?scatter|send_?recv|all_?to_?all|broadcast)(?=[_.-]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class BandwidthTest:
    """One run of one test."""

    hosts: tuple[str, ...]
    """Who took part, in the order of ranks."""
    n_gpus: int
    """Ranks of the test; 0 where the output does not list them."""
    name: str
    """The test without ``_perf``, such as ``all_reduce``; empty where the output does not say."""
    bus: Mapping[tuple[int, int], float]
    """Bus bandwidth [GB/s] by message size [byte] and column (0 out of place, 1 in place)."""
    where: str
    """Where its table starts, as ``file:line``."""
    time: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Duration [s] by message size [byte] and column, where the table tells it."""


@dataclass(frozen=True)
class BandwidthTests:
    """The tests of a file or folder, and what was left out."""

    tests: tuple[BandwidthTest, ...]
    notes: tuple[str, ...]


def is_nccl_tests(text: bytes) -> bool:
    """Tell whether a text is output of nccl-tests: it has a table with a bus bandwidth."""
    return re.search(rb"\bsize\b.*\balgbw\s+busbw\b", text) is not None


def read_nccl_tests(files: Sequence[RecordedFile]) -> BandwidthTests:
    """Read the tests, in the order of the files."""
    tests: list[BandwidthTest] = []
    notes: list[str] = []
    for file in files:
        for test in _parse(file.text, file.source, file.path.name):
            if test.bus:
                tests.append(test)
            else:
                notes.append(f"left out: {test.where}: a test without results; did it fail?")
    if not tests:
        more = f" ({'; '.join(notes[:3])})" if notes else ""
        raise PrismError(
            f"{files[0].source}: no table of bandwidths{more}; expected output of nccl-tests, "
            "whose lines below `size count type redop root time algbw busbw` hold numbers"
        )
    return BandwidthTests(tuple(tests), tuple(notes))


@dataclass
class _Run:
    """What has been read of one run so far."""

    where: str
    name: str = ""
    hosts: dict[str, None] = field(default_factory=dict)
    n_gpus: int = 0
    columns: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    bus: dict[tuple[int, int], float] = field(default_factory=dict)
    time: dict[tuple[int, int], float] = field(default_factory=dict)


def _parse(text: bytes, source: str, file_name: str) -> list[BandwidthTest]:
    """Find the runs in a text; each prefix is a stream of its own."""
    streams: dict[str, list[_Run]] = {}
    names: dict[str, str] = {}
    for prefix, line, where in _lines(text, source):
        runs = streams.setdefault(prefix, [])
        named = _TEST.search(line)
        if named:
            names[prefix] = named.group(1).lower()
        device = _DEVICE.search(line)
        words = line.lstrip("# ").split()
        header = "busbw" in words and "size" in words
        if "nThread" in line or ((device or header) and (not runs or runs[-1].bus)):
            runs.append(_Run(where))
        if not runs:
            continue
        run = runs[-1]
        run.name = run.name or names.get(prefix, "")
        if device:
            run.hosts[device.group(1)] = None
            run.n_gpus += 1
        elif header:
            run.where = where
            run.columns = tuple(i - len(words) for i, word in enumerate(words) if word == "busbw")
            run.times = tuple(i - len(words) for i, word in enumerate(words) if word == "time")
        else:
            _take_row(run, words)
    return [
        BandwidthTest(
            tuple(run.hosts) or ((prefix,) if prefix else split_hosts(file_name)),
            run.n_gpus, run.name, run.bus, run.where, run.time,
        )
        for prefix, runs in streams.items() for run in runs
    ]  # fmt: skip


def _lines(text: bytes, source: str) -> Iterator[tuple[str, str, str]]:
    """Give each line's prefix, the rest of it, and where it stands."""
    for number, raw in enumerate(io.BytesIO(text), start=1):
        line = _MPI.sub("", raw.decode("utf-8", "replace").rstrip("\r\n"))
        found = _PREFIX.match(line)
        prefix = found.group(1) if found else ""
        yield prefix, line[found.end() :] if found else line, f"{source}:{number}"


def _take_row(run: _Run, words: Sequence[str]) -> None:
    """Add a line of numbers; columns are counted from the right, where none is ever blank."""
    if not run.columns or not re.fullmatch(r"[0-9]{1,15}", words[0] if words else ""):
        return
    for place, column in enumerate(run.columns):
        bandwidth = _number_at(words, column)
        if not 0.0 < bandwidth <= _MOST_BUS:
            continue
        run.bus[int(words[0]), place] = bandwidth
        seconds = 1e-6 * _number_at(words, run.times[place]) if place < len(run.times) else 0.0
        if SHORTEST_S <= seconds <= LONGEST_S:
            run.time[int(words[0]), place] = seconds


def _number_at(words: Sequence[str], column: int) -> float:
    """Give the number in a column; 0 where there is none."""
    try:
        return float(words[column])
    except (ValueError, IndexError):
        return 0.0


def split_hosts(file_name: str) -> tuple[str, ...]:
    """Read the node, or the two nodes, out of the name of a file.

    Names of two nodes are alike but for their digits.

    Examples
    --------
    >>> split_hosts("all_reduce_node-017_node-018.txt"), split_hosts("3-17.log")
    (('node-017', 'node-018'), ('3', '17'))
    >>> split_hosts("nccl-node017.out"), split_hosts("rack2-gpu7.txt")
    (('node017',), ('rack2-gpu7',))
    """
    stem = re.sub(r"(?:\.(?:txt|log|out|gz|err|stdout))+$", "", file_name, flags=re.IGNORECASE)
    stem = _WORDS.sub("", stem).strip("_.- ") or stem
    for separator in re.finditer(r"(?:[_.\s-]+(?:vs|to|and|with)[_.\s-]+|[,+]|[_\s-]+)", stem):
        halves = stem[: separator.start()], stem[separator.end() :]
        shapes = {re.sub(r"\d+", "0", half) for half in halves}
        if len(shapes) == 1 and all(re.search(r"\d", half) for half in halves):
            return halves
    return (stem,)
