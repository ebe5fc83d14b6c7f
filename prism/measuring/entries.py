"""From samples to a library: distributions with their sources, over a set that has the rest.

Every case becomes a distribution of its own (``kernel/...``) and a mean duration; cases of a class
together make the entry that a job's kernels use (``residual/gemm_small``, ...), and tables of
durations by size; where the device is one that a job can name, what its links reach. What is not
measured is carried over from a base set and says so. Left out: effects between GPUs, steps and
microbatches, which kernels measured alone do not show.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from prism.cluster.nccl import bus_factor, solve_link
from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.distributions.distribution import Distribution
from prism.distributions.kerneltables import KernelFit, KernelTable, fit_kernel
from prism.distributions.library import Entry, Library, library_names, load_library
from prism.distributions.ranges import TABLE_AXES
from prism.distributions.samples import sample_distribution
from prism.jobs.devices import DEVICES, device_key
from prism.measuring.samples import MeasuredCase, Samples
from prism.workload.kernelcost import GEMM_LARGE_S, KINDS, NUMBER_BYTES
from prism.workload.kernels import MESSAGE_BYTES

DEFAULT_BASE = "h100-healthy"
GENERATOR = "prism measure"
CARRIED = "carried over from "
_LEAST = 0.05  # of the mean: no multiplier of a pooled distribution is smaller
_HALF = ("bfloat16", "float16")  # the data sheet's rate is that of 16-bit numbers
_SHORT = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32", "float64": "fp64"}
_LONG = {"dim": "head_dim"}  # sizes of tables, where they have another name
ATTENTION_AXES = ("batch", "heads", "seq", "dim")
FEWEST = 20  # calls below which a case gives no distribution


@dataclass(frozen=True)
class _Row:
    """One case with what was measured of it."""

    case: MeasuredCase
    seconds: Array

    @property
    def mean(self) -> float:
        return float(self.seconds.mean())

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


def base_library(output: str | os.PathLike[str] | None, base: str | None, device: str) -> Library:
    """Return the set that a measurement is laid over.

    The file itself where it is a library already, so that kinds measured one after another come
    together; else `base`, else the healthy set of the device, else that of H100.
    """
    if base is None and output is not None and Path(output).is_file():
        return _same_machine(load_library(output), output, device)
    own = f"{device_key(device)}-healthy"
    library = load_library(base or (own if own in library_names() else DEFAULT_BASE))
    carried = {
        name: entry
        if entry.source.startswith(CARRIED)
        else replace(entry, source=f"{CARRIED}{library.name}: {entry.source}")
        for name, entry in library.entries.items()
    }
    if device_key(library.device) == device_key(device):
        return replace(library, entries=carried)
    kernels = {**_of_device(library.tables, library, device),
               **_of_device(library.kernels, library, device)}  # fmt: skip
    return replace(library, entries=carried, tables={}, kernels=kernels)


def _of_device(
    tables: Mapping[str, KernelTable | KernelFit], library: Library, device: str
) -> dict[str, KernelTable | KernelFit]:
    """Another device's kernels by the ratio of the data sheets; none without one."""
    mine, theirs = (DEVICES.get(device_key(name)) for name in (device, library.device))
    out: dict[str, KernelTable | KernelFit] = {}
    if mine is None or theirs is None:
        return out
    for name, table in tables.items():
        kind, *rest = name.split("/")
        if kind not in KINDS:
            continue
        ratio = theirs.memory_bytes_per_s / mine.memory_bytes_per_s
        if KINDS[kind].residual != "residual/memory":
            dtype = next((part for part in rest if part in NUMBER_BYTES), "bf16")
            if not mine.flop_per_s(dtype):
                continue
            ratio = theirs.flop_per_s(dtype) / mine.flop_per_s(dtype)
        text = f"assumption, {CARRIED}{library.name} by the data sheets: {table.source}"
        out[name] = table.scaled(ratio, text)
    return out


def _same_machine(library: Library, path: str | os.PathLike[str], device: str) -> Library:
    """Return a library that measurements of this device may be added to."""
    named = device_key(device) or device
    if library.attrs.get("generator") == GENERATOR and library.device != named:
        raise PrismError(
            f"{path}: holds measurements of {library.device}, this is {named}; choose another -o "
            f"(--base {path} takes over what is not measured here)"
        )
    return library


def build_library(samples: Samples, base: Library, name: str) -> Library:
    """Lay what was measured over a base set."""
    rows = [
        _Row(case, samples.seconds[i])
        for i, case in enumerate(samples.cases)
        if samples.seconds[i].size >= FEWEST
    ]
    machine = samples.attrs["machine"]
    story = _story(samples)
    entries = dict(base.entries)
    for row in rows:
        entries |= _case_entries(row, story, machine["device"])
    entries |= _class_entries(rows, story, machine["device"])
    entries |= _nominal(rows, story, machine)
    attrs = {
        "title": f"measured on {machine['device']}",
        "generator": GENERATOR,
        **{k: v for k, v in base.attrs.items() if k.startswith("measured_")},
        f"measured_{samples.kind}": _provenance(samples),
    }
    key = device_key(machine["device"])
    return Library(
        name,
        key or machine["device"],
        entries,
        samples.attrs["date"],
        {**base.tables, **product_tables(rows, story)},
        attrs,
        {**base.kernels, **kernel_durations(rows, story)},
    )


def _story(samples: Samples) -> str:
    """Say in a line where a number comes from."""
    about, machine = samples.attrs, samples.attrs["machine"]
    threads = (
        f", {format_count(about['threads'], 'thread')}" if machine["device_kind"] == "cpu" else ""
    )
    return (
        f"measured: prism measure {samples.kind} on {machine['device']}{threads}, torch "
        f"{machine['torch']}, {about['date']}"
    )


def _provenance(samples: Samples) -> str:
    """Everything about a measurement but its samples, as JSON."""
    import json

    return json.dumps({key: samples.attrs[key] for key in sorted(samples.attrs)})


def _case_entries(row: _Row, story: str, device: str) -> dict[str, Entry]:
    """Distribution and mean of one case."""
    n, name = row.seconds.size, f"kernel/{row.case.label}"
    distribution = sample_distribution(row.seconds)
    return {
        name: Entry(name, story, "duration over its mean", distribution, n=n, device=device),
        f"{name}/mean_s": Entry(
            f"{name}/mean_s", story, "mean duration", number=row.mean, units="s", n=n,
            device=device,
        ),
    }  # fmt: skip


def _class_entries(rows: Sequence[_Row], story: str, device: str) -> dict[str, Entry]:
    """Distributions of the classes that a job's kernels use."""
    of_class: dict[str, list[_Row]] = {}
    for row in rows:
        of_class.setdefault(entry_name(row.case, row.mean), []).append(row)
    found = {}
    for name, members in of_class.items():
        distribution, n = pooled_distribution([row.seconds for row in members])
        text = f"{format_count(len(members), 'case')}"
        found[name] = Entry(
            name,
            f"{story}: {text}, median CV",
            "duration over its mean",
            distribution,
            n=n,
            device=device,
        )
    return found


def entry_name(case: MeasuredCase, seconds: float) -> str:
    """Library entry of a case's residual, as `prism.workload.kernels` asks for it."""
    if case.family == "gemm":
        return "residual/gemm_large" if seconds >= GEMM_LARGE_S else "residual/gemm_small"
    if case.family in ("attention", "memory", "p2p"):
        return f"residual/{case.family}"
    size = next(name for limit, name in MESSAGE_BYTES if case.bytes < limit)
    return f"residual/{case.settings.get('tier', 'nvlink')}_{size}"


def pooled_distribution(parts: Sequence[Array]) -> tuple[Distribution, int]:
    """Distribution of mean 1 of several cases, and the calls behind it.

    Notes
    -----
    Values are standardised by case and pooled; the CV is the median over cases, so that one
    disturbed size does not decide it (as in the shipped sets).
    """
    kept = [x for x in parts if x.std() > 0.0] or list(parts)
    cv = float(np.median([x.std() / x.mean() for x in kept]))
    z = np.concatenate([(x - x.mean()) / (x.std() or 1.0) for x in kept])
    return sample_distribution(np.maximum(1.0 + cv * z, _LEAST)), int(z.size)


def product_tables(rows: Sequence[_Row], story: str) -> dict[str, KernelTable]:
    """Median rates of products: by sizes where all combinations are there, or by work."""
    own = [r for r in rows if r.case.family == "gemm" and r.case.settings["dtype"] in _HALF]
    table = _table(own, TABLE_AXES["gemm"], 2, story)
    return {} if table is None else {"gemm/bf16": table}


def kernel_durations(rows: Sequence[_Row], story: str) -> dict[str, KernelTable | KernelFit]:
    """Attention by backend over sizes, or work where some are missing; copies by bytes.

    By the names that kernels are looked up by, such as ``attention/cudnn/bf16/causal/forward``.
    """
    kinds: dict[str, list[_Row]] = {}
    for row in rows:
        settings = row.case.settings
        if row.case.family == "attention":
            number = _SHORT[settings["dtype"]]
            name = f"attention/{settings['backend']}/{number}/causal/{settings['way']}"
            kinds.setdefault(name, []).append(row)
    made = {name: _table(own, ATTENTION_AXES, 1, story) for name, own in kinds.items()}
    out: dict[str, KernelTable | KernelFit] = {
        name: replace(table, axes={_LONG.get(axis, axis): x for axis, x in table.axes.items()})
        for name, table in made.items()
        if table is not None
    }
    copies = [row for row in rows if row.case.settings.get("op") == "copy"]
    if copies:
        out["memory/copy"] = _copy(copies, story)
    return out


def _copy(rows: Sequence[_Row], story: str) -> KernelFit:
    """Duration of a copy by its bytes, with a fixed time where there are several sizes."""
    n_bytes = np.array([row.case.bytes for row in rows])
    seconds = np.array([float(np.median(row.seconds)) for row in rows])
    n = len(set(n_bytes))
    terms: list[dict[str, float]] = [{}] * (n > 1) + [{"bytes": 1.0}]
    return fit_kernel(terms, {"bytes": n_bytes}, seconds, f"{story}: {format_count(n, 'size')}")


def _table(rows: Sequence[_Row], axes: Sequence[str], least: int, story: str) -> KernelTable | None:
    """Median rates over sizes, or over work where combinations are missing; None of a single one.

    An axis has `least` sizes or more.
    """
    if not rows:
        return None
    by_size: dict[tuple[float, ...], list[float]] = {}
    by_work: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        own_rate = row.case.flop / float(np.median(row.seconds))
        size = tuple(float(row.case.settings[axis]) for axis in axes)
        by_size.setdefault(size, []).append(own_rate)
        by_work.setdefault((row.case.flop,), []).append(own_rate)
    grids = [sorted(set(column)) for column in zip(*by_size, strict=True)]
    whole = len(by_size) == math.prod(map(len, grids)) and min(map(len, grids)) >= least
    found, names = (by_size, axes) if whole else (by_work, ("flop",))
    if len(found) < 2:
        return None
    grids = [sorted(set(column)) for column in zip(*found, strict=True)]
    rate = np.array([float(np.median(found[key])) for key in product(*grids)])
    return KernelTable(
        dict(zip(names, map(np.array, grids), strict=True)),
        rate.reshape([len(grid) for grid in grids]),
        source=f"{story}: {format_count(len(found), 'size')}",
    )


def _nominal(rows: Sequence[_Row], story: str, machine: Mapping[str, Any]) -> dict[str, Entry]:
    """Give what links reach of the data sheet's rates, where there is one for the device.

    NVLink's share is the best bus bandwidth of an all-reduce. The network's, and the latency of its
    hop, are those with which a job's collective takes as long as the smallest and the largest
    message did, of the op with the highest rate.
    """
    device = DEVICES.get(device_key(machine["device"]))
    if device is None:
        return {}
    found: dict[str, Entry] = {}
    tiers: dict[str, list[_Row]] = {"nvlink": [], "network": []}
    for row in rows:
        tiers.get(row.case.settings.get("tier", ""), []).append(row)

    def entry(name: str, number: float, text: str, what: str, units: str = "1") -> None:
        found[f"nominal/{name}"] = Entry(
            f"nominal/{name}", f"{story}: {text}", what, number=number, units=units,
            device=machine["device"],
        )  # fmt: skip

    share = "share of the data sheet's rate"
    sums = [row for row in tiers["nvlink"] if row.case.family == "all_reduce"]
    if sums:
        bus = bus_factor("all_reduce", int(sums[0].case.settings["ranks"]))
        rate, peak = max(bus * r.case.bytes / r.median for r in sums), device.nvlink_bytes_per_s
        text = f"best of the sizes over {peak:.4g} of the data sheet"
        entry("nvlink_efficiency", min(rate / peak, 1.0), text, share)
    solved = []
    for op in dict.fromkeys(row.case.family for row in tiers["network"]):
        own = sorted((r.case.bytes, r.median, r) for r in tiers["network"] if r.case.family == op)
        if own[0][0] < own[-1][0]:
            settings = own[0][2].case.settings
            ranks = int(settings["ranks"]) if op != "p2p" else 2
            nodes = int(settings.get("nodes", ranks)) if op != "p2p" else 2
            ends = [(n_bytes, seconds) for n_bytes, seconds, _ in (own[0], own[-1])]
            solved.append((*solve_link(op, ranks, max(1, nodes), *ends), op))
    if solved:
        rate, hop_s, op = max(solved)
        peak = device.network_bytes_per_s
        text = f"largest {op} over {peak:.4g} of the data sheet"
        entry("network_efficiency", min(rate / peak, 1.0), text, share)
        entry("network_hop_s", hop_s, f"smallest {op}", "latency of a hop", "s")
    return found
