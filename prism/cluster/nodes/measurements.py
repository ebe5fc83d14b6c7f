"""What the columns of a burn-in table measure: a time or a rate, of what work, and of which GPU.

A measurement is one column, beside a column that tells the GPUs apart, or one column per GPU of a
node: SuperBench's ``benchmark:parameters/metric:rank``, and names with ``gpu0``, ``rank_0`` or a
number at the end.

References
----------
.. [1] microsoft/superbenchmark, docs/user-tutorial/benchmarks: metrics and units; data-diagnosis:
   ``benchmark/return_code``, other than 0 where a benchmark failed
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from prism.common.errors import PrismError
from prism.traces.choose import check_column, is_mostly_numbers
from prism.traces.columns import UNITS, meaning, several_columns
from prism.traces.file import RawTable

_RATES = set(
    "flop flops kflops mflops gflops tflops pflops gflop tflop pflop ops iops giops gops tops "
    "throughput bandwidth bw busbw algbw mbps gbps tbps mbs gbs tbs tps ips qps fps".split()
)
_TIMES = set("time times steptime latency lat duration overhead cost".split())
_TIMES |= {word for unit in ("s", "ms", "us", "ns") for word in UNITS[unit]}
_SPREADS = set("std stdev stddev var variance cv pct percent ratio".split())

_RANK = re.compile(r"(?<=.):(\d{1,5})$")
_GPU = re.compile(
    r"(?<![a-z0-9])(?:local_?rank|gpu|rank|device|dev|cuda|xpu|card)[ _#:\[-]?(\d{1,5})\]?"
    r"(?![a-z0-9])", re.I,
)  # fmt: skip
_NUMBER = re.compile(r"(?<=\D)[_.\[ -](\d{1,3})\]?$")

_KINDS = {
    "network": r"[nr]ccl|oneccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|busbw|algbw|"
    r"(?<![a-z])(ib|nic|rdma|roce)(?![a-z])|infiniband|network|ethernet",
    "": r"(?<![a-z])cpu|[hd](2|to)[hd](?<!d2d)(?<!dtod)|pcie|numa|launch|overhead|overlap|disk|fio|"
    r"storage|inference|nvlink|p2p|gpu\d*_to_gpu|gpu-burn|correctness",
    "compute": r"gemm|mat_?mul|flops?(?![a-z])|(?<![a-z])([gt]?i?ops|mm)(?![a-z])|conv|attention|"
    r"blas|cudnn|hpl|step_?time|train",
    "memory": r"hbm|mem|stream|triad|copy|d2d|dtod|dram|bandwidth|bw|[gmt]bp?s",
}
"""What a name is of, by the first that fits; times of hosts, of links in a node, of none."""
_TYPICAL = {
    "compute": (r"gemm|mat_?mul|flops?(?![a-z])", r"bf16|bfloat16", r"fp16|float16|half",
                r"(?<![a-z])tc(?![a-z])|tensor|xdlops", r"^gemm-flops"),
    "memory": ("hbm|d2d|dtod|dram|stream", "triad", "copy", "double", "bw|bandwidth|[gt]bp?s"),
    "network": ("all_?reduce", "busbw"),
}  # fmt: skip
"""What one of several measurements is preferred by, in this order."""
_SHOWN = 12


class Measurement(NamedTuple):
    """One thing that was measured."""

    name: str
    columns: dict[str, str]
    """Column by GPU; of "" alone where a column of the table, or none, says the GPU."""

    @property
    def benchmark(self) -> str:
        """What stands before the metric; "" without any."""
        return self.name.rpartition("/")[0]


def find_measurements(table: RawTable, names: Sequence[str]) -> dict[str, Measurement]:
    """Find the measurements among columns of numbers, those of one GPU each put together."""
    families: dict[str, dict[str, str]] = {}
    loose: dict[str, dict[str, str]] = {}
    for name in names:
        if not is_mostly_numbers(table, name):
            continue
        plain = name.removesuffix(":0")  # a rank that says nothing where the metric names a GPU
        by_name = list(_GPU.finditer(plain))
        found = by_name[0] if len(by_name) == 1 and not _RANK.search(plain) else _RANK.search(name)
        if found is not None:
            stem = plain[: found.start()] + plain[found.end() :]
            stem = re.sub(r"([_ /.-])[_ .-]+", r"\1", stem).strip("_ :/.-")
            families.setdefault(stem or "gpu", {})[found[1]] = name
        elif (found := _NUMBER.search(name)) or name.isdecimal():
            stem, number = (name[: found.start()], found[1]) if found else ("gpu", name)
            loose.setdefault(stem, {})[number] = name
        else:
            families.setdefault(name, {})[""] = name
    for stem, columns in loose.items():
        indices = sorted(map(int, columns))
        # a number at the end may be a size: GPUs are counted from 0 or 1
        if len(indices) > 1 and indices == list(range(indices[0], indices[0] + len(indices))) \
                and indices[0] < 2 and stem not in families:  # fmt: skip
            families[stem] = columns
        else:
            families |= {name: {"": name} for name in columns.values()}
    return {
        stem: Measurement(stem, {"": columns["0"]} if set(columns) == {"0"} else columns)
        for stem, columns in families.items()
    }


def is_time(name: str) -> bool | None:
    """Tell a time, of which more is slower, from a rate; None where a name says neither."""
    found = meaning(name)
    if found.kind in ("statistic", "clock") or _SPREADS & set(_words(name)):
        return None
    if found.kind == "rate":
        return False
    for part in (name.rpartition("/")[2], name):
        words = _words(part)
        for word in reversed(words):
            if word in _RATES:
                return False
            if word in _TIMES and (len(words) > 1 or "/" in name):
                return True
    return None


def kind_of(name: str) -> str:
    """Say what a measurement is of: compute, memory, network, or "" for other things."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, lower)), "")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())


def choose_measurement(
    table: RawTable,
    known: dict[str, Measurement],
    column: str | None,
    kind: str,
    groups: str,
    alone: Sequence[str] = (),
) -> tuple[Measurement, list[str]]:
    """Find the measurement of a kind of work, with notes; `groups` are rows to be chosen among.

    Of the measurements whose name tells a time from a rate, and those `alone`, it is the only one,
    the only one of its kind, or the most typical of these.

    Raises
    ------
    PrismError
        There is none, there are several, or the name that was given tells neither.
    """
    if column is not None:
        return _named(table, known, column), []
    found = [name for name in known if is_time(name) is not None or name in alone]
    if not found:
        stem = next((m.name for m in known.values() if len(m.columns) > 1), "")
        way = f"; if {stem} is one, say its unit, as in --column {stem}_tflops" * bool(stem)
        raise PrismError(
            f"{table.source}: neither slowdowns nor measurements among the columns "
            f"{table.listing}; expected `node, slowdown`, or a time or rate per GPU whose name "
            f"ends with its unit, such as gemm_ms or gemm_tflops{way}"
        )
    wanted = "compute" if kind == "everything" else kind
    mine = [name for name in found if kind_of(name) == wanted]
    best = _most_typical(mine, wanted) if len(found) > 1 else found
    if len(best) == 1 and is_time(best[0]) is not None:
        others = [name for name in found if name != best[0]]
        notes = []
        if others:
            notes.append(
                f"{best[0]} is taken for {wanted}, of {len(found)} measurements; --column takes "
                f"another: {_listed(others, 4)}"
            )
        return known[best[0]], notes
    shown = _listed(best if len(best) > 1 else found, _SHOWN)
    raise several_columns(table.source, "measurement", [shown], groups)


def _named(table: RawTable, known: dict[str, Measurement], column: str) -> Measurement:
    """Take the measurement that was named, as it is called or with a unit behind that."""
    stem = column.rpartition("_")[0]
    found = known.get(column)
    if found is None and column in table.columns:
        found = Measurement(column, {"": column})
    if found is None and stem in known and is_time(column) is not None:
        found = known[stem]._replace(name=column)
    if found is None:
        check_column(table, column, "--column", list(known))
        raise AssertionError
    if is_time(column) is None:
        raise PrismError(
            f"{table.source}: the name of column {column!r} does not say whether more is slower "
            f"or faster; say it with a unit, such as --column {column}_ms or {column}_tflops"
        )
    return found


def _most_typical(names: Sequence[str], kind: str) -> list[str]:
    """Narrow measurements of one kind down to those that are most like a training step."""
    best = list(names)
    for pattern in _TYPICAL.get(kind, ()):
        best = [name for name in best if re.search(pattern, name.lower())] or best
    # of messages and matrices the largest
    size = {name: max(map(int, re.findall(r"\d{3,18}", name)), default=0) for name in best}
    return [name for name in best if size[name] == max(size.values())]


def _listed(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:80] for name in names[:most]) + more
