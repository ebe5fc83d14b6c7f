"""Collectives and transfers between ranks, timed on every one of them.

All ranks meet at a barrier before each call, so that what is timed holds little waiting; what is
left shows in the slowest rank's time beside the fastest one's. A transfer between two ranks is half
of a message there and back. Left out: collectives beside compute, and those of part of the ranks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from prism.common.errors import PrismError
from prism.measuring.samples import Case, Samples, load_samples, save_samples
from prism.measuring.session import Plan, Progress, run_session
from prism.measuring.timers import Block, Call
from prism.measuring.torchlib import DTYPES

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
SIZES = {"cpu": ("4KiB", "256KiB", "4MiB"), "cuda": ("4KiB", "1MiB", "32MiB", "256MiB")}

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9,
          "kib": 2**10, "mib": 2**20, "gib": 2**30}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read a message's size [byte].

    Examples
    --------
    >>> parse_size("4KiB"), parse_size("1.5MB"), parse_size("100")
    (4096, 1500000, 100)
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise PrismError(f"--size {text}: expected bytes with a unit, such as 4KiB, 1MB or 1MiB")
    return int(float(found.group(1)) * unit)


def collective_cases(
    messages: Sequence[tuple[str, int]], ranks: int, backend: str, dtype: str, tier: str
) -> list[Case]:
    """One case for each op and message size; sizes are cut to what divides over the ranks.

    Over the network torchrun says how many ranks a node has, else each has its own.
    """
    cases: dict[str, Case] = {}
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if tier == "network" else 1
    for op, wanted in messages:
        step = DTYPES[dtype] * (ranks if op != "p2p" else 1)
        n_bytes = max(step, wanted // step * step)
        label = f"{op}/{n_bytes}B/{ranks}-{backend}"
        settings = {
            "op": op, "bytes": n_bytes, "ranks": ranks, "backend": backend, "dtype": dtype,
            "tier": tier, "nodes": nodes,
        }  # fmt: skip
        cases.setdefault(label, Case(label, op, 0.0, float(n_bytes), settings))
    return list(cases.values())


class RankBench:
    """Runs a measurement's collectives as one of their ranks."""

    def __init__(self, cases: Sequence[Case], rank: int, torch: Any, device: str) -> None:
        self.torch, self.dist, self.rank, self.device = torch, torch.distributed, rank, device
        self.ranks = int(self.dist.get_world_size())
        # figures travel apart from what is measured, and on the processor
        self.side = self.dist.new_group(backend="gloo") if device == "cuda" else None
        self.calls = [self._call(case) for case in cases]
        self.halves = [0.5 if case.family == "p2p" else 1.0 for case in cases]

    def _call(self, case: Case) -> Call:
        """Make the buffers of a case, and what is timed."""
        s, torch, dist = case.settings, self.torch, self.dist
        dtype = getattr(torch, s["dtype"])
        n = int(s["bytes"]) // DTYPES[s["dtype"]]
        whole = torch.zeros(n, dtype=dtype, device=self.device)
        if s["op"] == "p2p":
            return lambda: self._there_and_back(whole)
        if s["op"] == "all_reduce":
            return lambda: dist.all_reduce(whole)
        part = torch.zeros(n // self.ranks, dtype=dtype, device=self.device)
        if s["op"] == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part)
        if s["op"] == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole)
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole)

    def _there_and_back(self, message: Any) -> None:
        """Send from the first rank to the last and back; ranks between them rest."""
        last = self.ranks - 1
        if self.rank == 0:
            self.dist.send(message, last)
            self.dist.recv(message, last)
        elif self.rank == last:
            self.dist.recv(message, 0)
            self.dist.send(message, 0)

    def offered(self, case: int) -> str:
        """Try a case once; what the backend says if it does not have it."""
        try:
            self.calls[case]()
            if self.device == "cuda":
                self.torch.cuda.synchronize()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        return ""

    def block(self, case: int, n: int) -> Block:
        """Make n calls, each after a barrier, and bring all ranks' times together."""
        call = self.calls[case]
        own, at = self._timed(call, n) if self.device == "cpu" else self._events(call, n)
        times = self.torch.from_numpy(own * self.halves[case])
        every = [self.torch.empty_like(times) for _ in range(self.ranks)]
        self.dist.all_gather(every, times, group=self.side)
        table = np.stack([values.numpy() for values in every])
        if self.halves[case] != 1.0:
            table = table[:1]  # a message is timed by the one that sends it first
        return Block(table.min(axis=0), at, table.max(axis=0))

    def _timed(self, call: Call, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Durations and begins by the processor's clock [s]."""
        now, barrier = time.perf_counter_ns, self.dist.barrier
        begin, end = np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            barrier()
            begin[i] = now()
            call()
            end[i] = now()
        return (end - begin) * 1e-9, begin * 1e-9

    def _events(self, call: Call, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Durations by events on the stream that waits for the collective [s]."""
        cuda = self.torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        own, at = np.empty(n), np.empty(n)
        for i in range(n):
            self.dist.barrier()
            at[i] = time.perf_counter()
            first.record()
            call()
            last.record()
            last.synchronize()
            own[i] = first.elapsed_time(last) * 1e-3
        return own, at

    def agree(self, value: float) -> float:
        """Give the first rank's value to all."""
        shared = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.broadcast(shared, 0, group=self.side)
        return float(shared[0])


def measure_rank(spec: dict[str, Any], rank: int, torch: Any, progress: Progress | None) -> None:
    """Take part in a measurement as one rank; the first keeps the samples in ``spec["file"]``."""
    samples = load_samples(spec["file"]) if spec["resume"] else _fresh(spec)
    bench = RankBench(samples.cases, rank, torch, spec["device"])
    refused = {i: why for i in range(len(samples.cases)) if (why := bench.offered(i))}
    if refused:
        if len(refused) == len(samples.cases):
            raise PrismError(f"{spec['backend']} has none of these collectives: {refused[0]}")
        notes = [f"{samples.cases[i].label}: left out: {why}" for i, why in refused.items()]
        cases = tuple(c for i, c in enumerate(samples.cases) if i not in refused)
        samples = Samples.empty("collective", cases, samples.attrs | {"notes": notes})
        bench = RankBench(cases, rank, torch, spec["device"])
    plan = Plan(**spec["plan"])

    def keep(now: Samples) -> None:
        save_samples(now, spec["file"])

    run_session(bench, samples, plan, progress, keep if rank == 0 else None)


def _fresh(spec: dict[str, Any]) -> Samples:
    """Return samples of a measurement's cases, without a call."""
    cases = tuple(
        Case(label, family, flop, n_bytes, settings)
        for label, family, flop, n_bytes, settings in spec["cases"]
    )
    return Samples.empty("collective", cases, spec["attrs"])
