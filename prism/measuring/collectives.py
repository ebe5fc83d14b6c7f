"""Collectives and transfers between ranks as cases, and one rank's part in measuring them.

All ranks meet at a barrier before each call, so that what is timed holds little waiting; what is
left shows in the slowest rank's time beside the fastest one's. A transfer between two ranks is half
of a message there and back. Left out: collectives beside compute, and those of part of the ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from prism.common.errors import PrismError
from prism.measuring.machine import DTYPES
from prism.measuring.samples import MeasuredCase, Samples
from prism.measuring.session import (
    Bench,
    Block,
    Call,
    Keep,
    Plan,
    Progress,
    make_timer,
    run_session,
)

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
) -> list[MeasuredCase]:
    """One case for each op and message size; sizes are cut to what divides over the ranks.

    Over the network torchrun says how many ranks a node has, else each has its own.
    """
    cases: dict[str, MeasuredCase] = {}
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if tier == "network" else 1
    for op, wanted in messages:
        step = DTYPES[dtype] * (ranks if op != "p2p" else 1)
        n_bytes = max(step, wanted // step * step)
        label = f"{op}/{n_bytes}B/{ranks}-{backend}"
        settings = {
            "op": op, "bytes": n_bytes, "ranks": ranks, "backend": backend, "dtype": dtype,
            "tier": tier, "nodes": nodes,
        }  # fmt: skip
        cases.setdefault(label, MeasuredCase(label, op, 0.0, float(n_bytes), settings))
    return list(cases.values())


class RankBench(Bench):
    """Runs collectives as one of their ranks."""

    def __init__(self, cases: Sequence[MeasuredCase], rank: int, torch: Any, device: str) -> None:
        self.torch, self.dist = torch, torch.distributed
        # figures travel apart from what is measured, and on the processor
        self.side = self.dist.new_group(backend="gloo") if device == "cuda" else None
        self.halves = [0.5 if case.family == "p2p" else 1.0 for case in cases]
        calls = [build_collective(case, rank, torch, device) for case in cases]
        super().__init__(calls, make_timer(device, torch, self.dist.barrier))

    def offered(self, case: int) -> str:
        """Try a case once; what the backend says if it does not have it."""
        try:
            self.timer.block(self.calls[case], 1)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return str(error).splitlines()[0]
        return ""

    def block(self, case: int, n: int) -> Block:
        """Make n calls, each after a barrier, and bring all ranks' times together."""
        made = super().block(case, n)
        times = self.torch.from_numpy(made.seconds * self.halves[case])
        every = [self.torch.empty_like(times) for _ in range(self.dist.get_world_size())]
        self.dist.all_gather(every, times, group=self.side)
        table = np.stack([values.numpy() for values in every])
        if self.halves[case] != 1.0:
            table = table[:1]  # a message is timed by the one that sends it first
        return Block(table.min(axis=0), made.at, table.max(axis=0))

    def agree(self, value: float) -> float:
        """Give the first rank's value to all."""
        shared = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.broadcast(shared, 0, group=self.side)
        return float(shared[0])


def build_collective(case: MeasuredCase, rank: int, torch: Any, device: str) -> Call:
    """Make a case's buffers and return the call that is timed."""
    s, dist, ranks = case.settings, torch.distributed, int(case.settings["ranks"])
    made = {"dtype": getattr(torch, s["dtype"]), "device": device}
    n, last = int(s["bytes"]) // DTYPES[s["dtype"]], ranks - 1
    whole, part = torch.zeros(n, **made), torch.zeros(n // ranks, **made)
    other = torch.zeros_like(whole) if s["op"] == "all_to_all" else None

    def there_and_back() -> None:
        """Send from the first rank to the last and back; ranks between them rest."""
        if rank == 0:
            dist.send(whole, last)
            dist.recv(whole, last)
        elif rank == last:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "p2p": there_and_back,
    }
    return calls[s["op"]]


def measure_rank(
    samples: Samples, rank: int, torch: Any, progress: Progress | None, keep: Keep | None
) -> Samples:
    """Take part in a measurement as one rank; what the backend does not have is left out."""
    plan = Plan(**samples.attrs["plan"])
    bench = RankBench(samples.cases, rank, torch, plan.device)
    refused = {i: why for i in range(len(samples.cases)) if (why := bench.offered(i))}
    if refused:
        if len(refused) == len(samples.cases):
            backend = samples.cases[0].settings["backend"]
            raise PrismError(f"{backend} has none of these collectives: {refused[0]}")
        notes = [f"{samples.cases[i].label}: left out: {why}" for i, why in refused.items()]
        cases = tuple(c for i, c in enumerate(samples.cases) if i not in refused)
        samples = Samples.empty("collective", cases, samples.attrs | {"notes": notes})
        bench = RankBench(cases, rank, torch, plan.device)
    samples.attrs["timer_overhead_s"] = bench.timer.overhead_s
    return run_session(bench, samples, plan, progress, keep)
