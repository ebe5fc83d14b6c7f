"""What work needs, estimated from the job's numbers before it begins, and refused where too much.

The figures are slopes of peak memory and processor time between two sizes of one job, on a thread
each (Python 3.11, numpy 2); `experiments/checks/sizes.py` holds them against large jobs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prism.common.errors import PrismError

GIGA = 1e9
MOST_SECONDS = 60.0  # work on one core that cannot show how far it is lasts no longer [s]; a choice
SHARE = 0.5  # of the free memory that a command may take; the rest is for others [1]; a choice


@dataclass(frozen=True)
class Cost:
    """What one thing of a kind takes: bytes at the peak, and seconds on one core."""

    n_bytes: float
    seconds: float


COMPUTE_OP = Cost(1600.0, 70e-6)
"""Of a graph's forward, backward or weight gradient, with the transfers and joins beside it."""
KERNEL = Cost(750.0, 25e-6)  # of a graph at kernel resolution: one kernel of one rank
LAYER = Cost(500.0, 1e-3)
"""Of each kind of op that stands for several layers: the kernels of one layer."""
OP_SAMPLE = Cost(0.0, 10e-9)
"""Of the block with the critical path that comes before any progress is shown."""
STAGE_PAIR = Cost(0.0, 2e-6)  # of stages that wait for each other while a graph is laid out
OP_OF_STAGE = Cost(0.0, 20e-9)  # of ops, each looked at for every stage
GPU = Cost(200.0, 11e-6)
"""Of a job: its links, rings and effects, and of a sample of its replicas what the others take."""
REPLICATE = Cost(80.0, 0.0)
"""Of an estimate's steps: arrays of the engine and of the result; they are shown as they run."""
BYTE = Cost(1.0, 0.0)  # of arrays whose shapes are known
RUN = Cost(400.0, 0.0)
"""Of an estimate's runs: some 20 numbers and as many on the way; counted, not measured."""
SETTING = Cost(40e3, 0.0)
"""Of a sweep: its job, its row and the answer's; how far a sweep is, is shown."""
EVENT_BYTE = Cost(5.5, 0.0)
"""Of a profiler's file, unpacked: its text, and what is read of it (2.6 where names are long)."""
ORDERED = Cost(110.0, 4e-6)  # of a schedule's actions: put in order, and walked for the memory
ACTION = Cost(450.0, 30e-6)  # of a printed schedule: made, played, and written as text or JSON


def check_size(source: str, counts: Mapping[str, tuple[float, Cost]], lower: str) -> None:
    """Refuse work that takes more memory or time than there is, and say how to reduce it.

    `counts` are how many of each thing, by what they are called; `lower` the numbers that make it
    less.
    """
    n_bytes = sum(n * cost.n_bytes for n, cost in counts.values())
    seconds = sum(n * cost.seconds for n, cost in counts.values())
    most = SHARE * free_bytes()
    if n_bytes <= most and seconds <= MOST_SECONDS:
        return
    things = ", ".join(f"{n:.3g} {name}" for name, (n, _) in counts.items())
    raise PrismError(
        f"{source}: {things} need about {n_bytes / GIGA:.3g} GB of memory and {seconds:.3g} s "
        f"before the first result, at most {most / GIGA:.2g} GB (half of what is free) and "
        f"{MOST_SECONDS:g} s are spent on that; lower {lower}"
    )


def free_bytes() -> float:
    """Memory that this process can still get: of the machine, its control group and its limit."""
    left = [_machine_bytes(), _group_bytes()]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = Path("/proc/self/statm")
    if limit != resource.RLIM_INFINITY and used.exists():
        left.append(limit - int(used.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return max(0.0, min(left))


def _machine_bytes() -> float:
    """Memory of the machine that is free, or can be; all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _group_bytes() -> float:
    """Memory that the control group leaves; without end where there is none."""
    group = Path("/sys/fs/cgroup")
    try:
        held = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(held.get("inactive_file", 0))
        return float((group / "memory.max").read_text()) - used
    except (OSError, ValueError):  # no group, or "max"
        return float("inf")
