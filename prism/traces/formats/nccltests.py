"""Output of nccl-tests (or rccl-tests): who took part in a test, and at which bus bandwidth.

Text of one test or of many: a file, or a folder with a file per node or per pair of nodes; lines
may carry the prefix of pdsh, clush or mpirun. rccl-tests' JSON and CSV, an object or a row for each
result, are read too. A test that does not say its name is an all-reduce where its bus carries what
an all-reduce's does. Hosts come from the list of devices that the tests
print, else from the prefix, else from the file's name.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prism.common.errors import PrismError
from prism.traces.file import RecordedFile
from prism.traces.table import LONGEST_S, SHORTEST_S

_MOST_BUS = 1e6  # GB/s; no link has as much
_MPI = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")
_PREFIX = re.compile(r"^([\w.-]+): ?(?=\s*(?:#|\d+\s|$))")
_DEVICE = re.compile(
    r"\bRank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\b(?:.*?\]\s*(.*\S))?"
)
_MOMENT = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_TIMES = {"cputime": "time"}  # heads of columns by their other names
_BROKEN = (ValueError, KeyError, TypeError, OverflowError, RecursionError, StopIteration, csv.Error)
_CLOSE = 0.02  # share by which a ratio of bandwidths is one
_TEST = re.compile(r"\b(\w+)_perf\b")
_WORDS = re.compile(
    r"(?:^|[_.-]+)(?:nccl|rccl|tests?|perf|busbw|bandwidth|pairs?|out|all_?reduce|all_?gather|"
    r"reduce_?scatter|send_?recv|all_?to_?all|broadcast)(?=[_.-]|$)",
    re.IGNORECASE,
)


@dataclass
class BandwidthTest:
    """One run of one test."""

    where: str
    """Where its table starts, as ``file:line``."""
    name: str = ""
    """The test without ``_perf``, such as ``all_reduce``; empty where the output does not say."""
    hosts: tuple[str, ...] = ()
    """Who took part, in the order of ranks."""
    n_gpus: int = 0
    """Ranks of the test; 0 where the output does not list them."""
    bus: dict[tuple[int, int], float] = field(default_factory=dict)
    """Bus bandwidth [GB/s] by message size [byte] and column (0 out of place, 1 in place)."""
    time: dict[tuple[int, int], float] = field(default_factory=dict)
    """Duration [s] by message size [byte] and column, where the table tells it."""
    device: str = ""
    """Product name of its GPUs, where the output lists them."""


@dataclass(frozen=True)
class BandwidthTests:
    """The tests of a file or folder, and what was left out."""

    tests: tuple[BandwidthTest, ...]
    notes: tuple[str, ...]


def is_nccl_tests(text: bytes) -> bool:
    """Tell output of nccl-tests by its table with a bus bandwidth."""
    return re.search(rb"\bsize\b.*\balgbw\s+busbw\b", text) is not None


def is_rccl(text: bytes) -> bool:
    """Tell rccl-tests' JSON or CSV by its names in the first line."""
    first = text[:4096].lstrip().partition(b"\n")[0]
    return all(name in first for name in (b"busBw", b"algBw", b"inPlace"))


def read_nccl_tests(files: Sequence[RecordedFile]) -> BandwidthTests:
    """Read the tests, in the order of the files."""
    tests: list[BandwidthTest] = []
    notes: list[str] = []
    alone = 0
    for file in files:
        parse = _parse_rccl if is_rccl(file.head) else _parse
        for test in parse(file.text or file.read_text(), file.source, file.path.name):
            if test.bus:
                test.name = test.name or _name_by_ratio(test)
                tests.append(test)
            else:
                alone += test.n_gpus == 1
                notes.append(f"left out: {test.where}: a test without results; did it fail?")
    if not tests and alone > 1:
        raise PrismError(
            f"{files[0].source}: each of {alone} processes tested its own GPU: nccl-tests was "
            "built without MPI; build it with MPI=1, or give one process all GPUs with -g"
        )
    if not tests:
        more = f" ({'; '.join(notes[:3])})" if notes else ""
        raise PrismError(
            f"{files[0].source}: no table of bandwidths{more}; expected output of nccl-tests, "
            "whose lines below `size count type redop root time algbw busbw` hold numbers"
        )
    return BandwidthTests(tuple(tests), tuple(notes))


def _parse(text: bytes, source: str, file_name: str) -> list[BandwidthTest]:
    """Find the runs in a text; each prefix is a stream of its own."""
    streams: dict[str, list[BandwidthTest]] = {}
    names: dict[str, str] = {}
    # columns of bandwidths and times, from the right, where none is ever blank
    columns: dict[str, dict[str, list[int]]] = {}
    for prefix, line, where in _lines(text, source):
        line = _MOMENT.sub("", line)
        runs = streams.setdefault(prefix, [])
        if named := _TEST.search(line):
            names[prefix] = named[1].lower()
        device = _DEVICE.search(line)
        words = line.lstrip("# ").removesuffix("timestamp").split()
        words = [_TIMES.get(word, word) for word in words]
        header = "busbw" in words and "size" in words
        if "nThread" in line or ((device or header) and (not runs or runs[-1].bus)):
            runs.append(BandwidthTest(where))
            columns[prefix] = {"busbw": [], "time": []}
        if not runs:
            continue
        run = runs[-1]
        run.name = run.name or names.get(prefix, "")
        if device:
            run.hosts = tuple(dict.fromkeys((*run.hosts, device[1])))
            run.n_gpus += 1
            run.device = run.device or device[2] or ""
        elif header:
            run.where = where
            columns[prefix] = {
                name: [i - len(words) for i, word in enumerate(words) if word == name]
                for name in ("busbw", "time")
            }
        elif re.fullmatch(r"[0-9]{1,15}", words[0] if words else ""):
            _take_row(run, words, **columns[prefix])
    for prefix, runs in streams.items():
        for run in runs:
            run.hosts = run.hosts or ((prefix,) if prefix else split_hosts(file_name))
    return [run for runs in streams.values() for run in runs]


def _parse_rccl(text: bytes, source: str, file_name: str) -> list[BandwidthTest]:
    """Read rccl-tests' results: a JSON object a line, or rows of a CSV."""
    found: dict[tuple[str, int], BandwidthTest] = {}
    lines = text.decode("utf-8", "replace").splitlines()
    heads = None if lines[0].lstrip().startswith(("{", "[")) else next(csv.reader(lines[:1]))
    for number, line in enumerate(lines, start=1):
        try:
            row = (
                json.loads(line.strip().strip("[],")) if heads is None
                else dict(zip(heads, next(csv.reader([line])), strict=True))
            )  # fmt: skip
            size, place = int(row["size"]), int(row["inPlace"])
            gpus, bus, seconds = int(row["gpus"]), float(row["busBw"]), 1e-6 * float(row["time"])
        except _BROKEN:
            continue  # a head, or a line that was cut
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(row.get("name", ""))).lower()
        run = found.setdefault((name, gpus), BandwidthTest(f"{source}:{number}", name))
        run.n_gpus, run.hosts = gpus, split_hosts(file_name)
        if 0.0 < bus <= _MOST_BUS and SHORTEST_S <= seconds <= LONGEST_S:
            run.bus[size, place], run.time[size, place] = bus, seconds
    return list(found.values())


def _name_by_ratio(test: BandwidthTest) -> str:
    """Name a test by what its bus carries: 2 (n - 1) / n of the message is an all-reduce's."""
    ratios = [1e9 * bus * test.time[key] / key[0] for key, bus in test.bus.items()
              if key in test.time and key[0] > 0]  # fmt: skip
    if not ratios or test.n_gpus < 3:  # of two GPUs it is 1, as a broadcast's
        return ""
    whole = 2.0 * (test.n_gpus - 1) / test.n_gpus
    return "all_reduce" if abs(statistics.median(ratios) / whole - 1.0) < _CLOSE else ""


def _lines(text: bytes, source: str) -> Iterator[tuple[str, str, str]]:
    """Give each line's prefix, the rest of it, and where it stands."""
    for number, raw in enumerate(io.BytesIO(text), start=1):
        line = _MPI.sub("", raw.decode("utf-8", "replace").rstrip("\r\n"))
        found = _PREFIX.match(line)
        prefix = found.group(1) if found else ""
        yield prefix, line[found.end() :] if found else line, f"{source}:{number}"


def _take_row(run: BandwidthTest, words: list[str], busbw: list[int], time: list[int]) -> None:
    def number_at(column: int) -> float:
        try:
            return float(words[column])
        except (ValueError, IndexError):
            return 0.0

    for place, column in enumerate(busbw):
        bandwidth, key = number_at(column), (int(words[0]), place)
        if 0.0 < bandwidth <= _MOST_BUS:
            run.bus[key] = bandwidth
            seconds = 1e-6 * number_at(time[place]) if place < len(time) else 0.0
            if SHORTEST_S <= seconds <= LONGEST_S:
                run.time[key] = seconds


def split_hosts(file_name: str) -> tuple[str, ...]:
    """Read the node, or two that are alike but for their digits, out of the name of a file.

    Examples
    --------
    >>> split_hosts("all_reduce_node-017_node-018.txt"), split_hosts("nccl-node017.out")
    (('node-017', 'node-018'), ('node017',))
    """
    stem = re.sub(r"(?:\.(?:txt|log|out|gz|err|stdout))+$", "", file_name, flags=re.IGNORECASE)
    stem = _WORDS.sub("", stem).strip("_.- ") or stem
    for separator in re.finditer(r"(?:[_.\s-]+(?:vs|to|and|with)[_.\s-]+|[,+]|[_\s-]+)", stem):
        halves = stem[: separator.start()], stem[separator.end() :]
        shapes = {re.sub(r"\d+", "0", half) for half in halves}
        if len(shapes) == 1 and all(re.search(r"\d", half) for half in halves):
            return halves
    return (stem,)
