"""Output of nccl-tests (or rccl-tests): who took part in a test, and at which bus bandwidth.

Text of one test or of many: a file, or a folder with a file per node or per pair of nodes; lines
may carry the prefix of pdsh, clush or mpirun. The JSON of nccl-tests (`-J FILE`), and rccl-tests'
JSON and CSV, an object or a row for each result, are read too. A test that does not say its name is
named by its file, or by what its bus carries. Hosts come from the list of devices that the tests
print, else from the prefix, else from the file's name.

References
----------
.. [1] nccl-tests (BSD-3), src/util.cu: jsonOutputInit, writeDeviceReport, writeBenchmarkLineBody
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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
_BETWEEN = re.compile(r"[\s,]*")
_CLOSE = 0.02  # share by which a ratio of bandwidths is one
_REDUCES = {"sum", "prod", "min", "max", "avg", "mulsum"}
_NCCL_JSON = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"start_time":')
_RESULTS = re.compile(r'"results":\s*\[')
_FAILURE = re.compile(r"Test (?:NCCL|CUDA) failure.*|Invalid number of GPUs.*|Out of memory.*")
_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast")
_TEST = re.compile(r"\b(\w+)_perf\b")
_WORDS = re.compile(
    r"(?:^|[_.-]+)(?:nccl|rccl|tests?|perf|busbw|bandwidth|pairs?|out|all_?reduce|all_?gather|"
    r"reduce_?scatter|send_?recv|all_?to_?all|broadcast)(?=[_.-]|$)",
    re.IGNORECASE,
)


@dataclass
class BandwidthTest:
    """One run of one test."""

    where: str  # where its table starts, as ``file:line``
    name: str = ""
    """The test without ``_perf``, such as ``all_reduce``; empty where the output does not say."""
    hosts: tuple[str, ...] = ()  # who took part, in the order of ranks
    n_gpus: int = 0  # ranks of the test; 0 where the output does not list them
    bus: dict[tuple[int, int], float] = field(default_factory=dict)
    """Bus bandwidth [GB/s] by message size [byte] and column (0 out of place, 1 in place)."""
    time: dict[tuple[int, int], float] = field(default_factory=dict)
    """Duration [s] by message size [byte] and column, where the table tells it."""
    device: str = ""  # product name of its GPUs, where the output lists them
    reduces: bool = False  # whether its operation adds up
    failure: str = ""  # what went wrong, in the output's words


@dataclass(frozen=True)
class BandwidthTests:
    """The tests of a file or folder, and what was left out."""

    tests: tuple[BandwidthTest, ...]
    notes: tuple[str, ...]


def is_nccl_tests(text: bytes) -> bool:
    """Tell output of nccl-tests by its table with a bus bandwidth, or by its first lines."""
    return re.search(rb"\bsize\b.*\balgbw\s+busbw\b|# nThread \d+ nGpus \d+ ", text) is not None


def is_nccl_json(head: bytes) -> bool:
    """Tell nccl-tests' own JSON by its first keys."""
    return _NCCL_JSON.match(head) is not None


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
        parse = _parse
        if is_rccl(file.head) or is_nccl_json(file.head):
            parse = _parse_rccl if is_rccl(file.head) else _parse_json
        for test in parse(file.text or file.read_text(), file.source, file.path.name):
            if test.bus:
                test.name = test.name or _name_by_file(file.path.name) or _name_by_ratio(test)
                tests.append(test)
                continue
            alone += test.n_gpus == 1 and not test.failure
            why = "its bus carries nothing: one GPU alone" if test.n_gpus == 1 else "did it fail?"
            why = f"it failed: {test.failure}" if test.failure else why
            notes.append(f"left out: {test.where}: a test without results; {why}")
    if not tests and alone:
        who = f"each of {alone} processes" if alone > 1 else "one process"
        raise PrismError(
            f"{files[0].source}: {who} tested its own GPU alone, and no bus carried anything; "
            "build nccl-tests with MPI=1 and start it by mpirun, or give one process all GPUs by -g"
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
    failure = _FAILURE.search(text.decode("utf-8", "replace"))
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
            run.failure = failure[0] if failure else ""
    return [run for runs in streams.values() for run in runs]


def _parse_json(text: bytes, source: str, file_name: str) -> list[BandwidthTest]:
    """Read nccl-tests' JSON; of one that was cut the results before the end."""
    config = _mend(text.decode("utf-8", "replace"))
    settings = config.get("config")
    settings = settings if isinstance(settings, dict) else {}
    devices = [d for d in _listed(settings, "devices") if isinstance(d, dict)]
    name = _TEST.search(" ".join(map(str, _listed(config, "args"))))
    run = BandwidthTest(source, name[1].lower() if name else "")
    run.hosts = tuple(dict.fromkeys(str(d.get("hostname")) for d in devices))
    run.hosts = run.hosts or split_hosts(file_name)
    run.device = str(devices[0].get("device_info", "")) if devices else ""
    each = [settings.get(key) for key in ("nthreads", "ngpus")]
    run.n_gpus = len(devices) * math.prod(n for n in each if isinstance(n, int))
    run.failure = "; ".join(map(str, _listed(config, "errors")))
    for row in _listed(config, "results"):
        for place, key in enumerate(("out_of_place", "in_place")):
            with suppress(*_BROKEN, AttributeError):
                cell, size = row[key], int(row["size"])
                _take(run, size, place, cell["bus_bw"], cell.get("time", cell.get("cpu_time")))
                run.reduces |= row.get("redop") in _REDUCES
    return [run]


def _listed(found: dict[str, Any], key: str) -> list[Any]:
    """List what a key has, where that is a list."""
    values = found.get(key)
    return values if isinstance(values, list) else []


def _mend(text: str) -> dict[str, Any]:
    """Decode an object; of one that was cut what precedes its results, and those that are whole."""
    with suppress(ValueError, RecursionError):
        return dict(json.loads(text))
    begin, rows, found = _RESULTS.search(text), [], {}
    if begin is not None:
        with suppress(ValueError, RecursionError):
            found = json.loads(text[: begin.start()].rstrip().rstrip(",") + "}")
        at = begin.end()
        with suppress(ValueError, RecursionError):
            while between := _BETWEEN.match(text, at):
                row, at = json.JSONDecoder().raw_decode(text, between.end())
                rows.append(row)
    return {**found, "results": rows}


def _take(run: BandwidthTest, size: int, place: int, bus: Any, time_us: Any) -> None:
    """Keep a result, where it is one."""
    if 0.0 < float(bus) <= _MOST_BUS:
        run.bus[size, place] = float(bus)
        if SHORTEST_S <= 1e-6 * float(time_us or 0.0) <= LONGEST_S:
            run.time[size, place] = 1e-6 * float(time_us)


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
            gpus, bus, time_us = int(row["gpus"]), float(row["busBw"]), float(row["time"])
        except _BROKEN:
            continue  # a head, or a line that was cut
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(row.get("name", ""))).lower()
        run = found.setdefault((name, gpus), BandwidthTest(f"{source}:{number}", name))
        run.n_gpus, run.hosts = gpus, split_hosts(file_name)
        _take(run, size, place, bus, time_us)
    return list(found.values())


def _name_by_file(file_name: str) -> str:
    """Name a test by its file, such as ``all-gather_16.txt``."""
    plain = re.sub(r"[\W_]", "", file_name.lower())
    return next((name for name in _NAMES if name.replace("_", "") in plain), "")


def _name_by_ratio(test: BandwidthTest) -> str:
    """Name a test by what its bus carries of the message: 2 (n - 1) / n is an all-reduce's.

    Of one that adds up (n - 1) / n is a reduce-scatter's.
    """
    ratios = [1e9 * bus * test.time[key] / key[0] for key, bus in test.bus.items()
              if key in test.time and key[0] > 0]  # fmt: skip
    if not ratios or test.n_gpus < 3:  # of two GPUs it is 1, as a broadcast's
        return ""
    part, ratio = (test.n_gpus - 1) / test.n_gpus, statistics.median(ratios)
    if abs(ratio / part - 2.0) < 2.0 * _CLOSE:
        return "all_reduce"
    close = abs(ratio - part) < min(_CLOSE, 0.3 / test.n_gpus)  # of one of a reduce it is 1
    return "reduce_scatter" if test.reduces and close else ""


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

    run.reduces |= not _REDUCES.isdisjoint(words)
    for place, column in enumerate(busbw):
        time_us = number_at(time[place]) if place < len(time) else 0.0
        _take(run, int(words[0]), place, number_at(column), time_us)


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
