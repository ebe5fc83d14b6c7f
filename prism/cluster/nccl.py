"""How long NCCL's collectives take: as measured inside an NVLink domain, by a formula beyond it.

A ring of n ranks in k domains takes n - 1 steps, k - 1 of them over the network, and brings
S (n - 1) / n bytes over every edge; it leaves a domain over the network cards of all its members. A
tree has log2(k) levels over the network, up and down; its busiest domain sends S / 2 for each
neighbour, so that of two domains each sends the buffer once, as often as a ring's half. In the
domain a switch adds up where that was measured (NVLS), else a chain of GPUs. Steps take longer with
more bytes, as NCCL then fills a deeper pipeline. Left out: sums in switches of the network (SHARP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from prism.cluster.transports import ALGORITHMS, FULL_BYTES, OVERLAP_DOMAINS, Algorithms
from prism.distributions.kerneltables import KernelTable
from prism.jobs.devices import HOP_S

_ROUNDS = 30  # of rate and latency in turn
_LEAST_BYTE_S, _LEAST_HOP_S = 1e-15, 1e-9
STEP_OF_HOP = 0.43  # a collective's step at its shortest over NVLink's hop, as on H100


class Path(NamedTuple):
    """Links under a group: n ranks in k domains, and how fast what they send goes."""

    n_ranks: int
    domains: int
    hop_s: float  # of a message over the slowest link
    step_s: float  # of a collective's step inside a domain, at its shortest
    nvlink_bytes_per_s: float  # of a rank
    network_bytes_per_s: float  # of a domain, over the network cards of its members in the group
    channels: float = 1.0  # NCCL's rate over the measured one
    sum_s: float = 0.0  # of a byte that the domain's switch adds up; 0: none does
    ring_s: float = 0.0  # latency that farther units add to a ring
    tree_s: float = 0.0  # ... and to a tree
    figures: Algorithms = ALGORITHMS

    def steps(self, n_bytes: float) -> float:
        """Latency of a ring's steps, or of messages to every other rank [s]."""
        f, n, k = self.figures, self.n_ranks, self.domains
        grown = f.least + (1.0 - f.least) * _filled(n_bytes / n, f.power)
        inside = (n - k) * self.step_s * (f.beyond if k > 1 else f.within)
        together = math.sqrt(1.0 + (k - 1) / OVERLAP_DOMAINS)
        return grown * ((k - 1) * self.hop_s + inside) / together

    def _network_s(self, sent: float, passed: float) -> float:
        """Time of what the cards send from domain to domain, and the channels pass on [s]."""
        if self.domains == 1:
            return 0.0
        most = self.figures.channels_bytes_per_s * self.channels
        return math.hypot(sent / self.network_bytes_per_s, passed / most)

    def ring(self, n_bytes: float, phases: float) -> float:
        """Duration of a ring [s]; an all-reduce has two phases."""
        n, g = self.n_ranks, self.n_ranks / self.domains
        moved = n_bytes * (n - 1) / n
        inside = n_bytes * (g - 1.0) / g / self.nvlink_bytes_per_s
        sending = max(self._network_s(moved, moved), inside)
        return self.hop_s + phases * (self.steps(n_bytes) + self.ring_s + sending)

    def tree(self, n_bytes: float) -> float:
        """Duration of a tree over domains, up and down [s]."""
        f, others = self.figures, self.n_ranks / self.domains - 1.0
        levels = 0.0
        if self.domains > 1:  # up and down overlap but for one level, in the mean of both ways
            passed = (1.0 + math.log2(self.domains)) / 2.0
            levels = passed * self.hop_s * f.level * _filled(n_bytes, f.power)
        sent = n_bytes * min(self.domains, 4) / 2.0
        inside = n_bytes * self.sum_s
        if not inside:
            inside = 2.0 * n_bytes * min(others, 1.0) / (self.nvlink_bytes_per_s * f.chain_rate)
        latency = levels + self.tree_s + others * self.step_s * f.chain
        sending = max(self._network_s(sent, 2.0 * (sent - n_bytes)), inside)
        return self.hop_s + 2.0 * latency + sending

    def fastest(self, op_kind: str, n_bytes: float) -> float:
        """Duration of an all-gather, reduce-scatter or all-reduce by the best algorithm [s]."""
        if op_kind == "all_reduce":
            return min(self.ring(n_bytes, 2.0), self.tree(n_bytes))
        return self.ring(n_bytes, 1.0)

    def seconds(self, op_kind: str, n_bytes: float) -> float:
        """Duration of any collective, or of sending to the next rank [s]."""
        n, k = self.n_ranks, self.domains
        if op_kind == "all_to_all":
            return self.exchange(n_bytes, n_bytes * (n / k - 1.0) / n, n_bytes * (1.0 - 1.0 / k))
        if op_kind == "p2p":
            wire = self.network_bytes_per_s * k / n if k > 1 else self.nvlink_bytes_per_s
            return self.hop_s + n_bytes / wire
        return self.fastest(op_kind, n_bytes)

    def exchange(self, n_bytes: float, inside: float, outside: float) -> float:
        """Duration of an all-to-all of which a rank sends this many bytes to either side [s]."""
        latency = self.hop_s + self.figures.messages * self.steps(n_bytes) + self.ring_s
        own = self.network_bytes_per_s * self.domains / self.n_ranks
        return latency + max(inside / self.nvlink_bytes_per_s, outside / own)


def _filled(n_bytes: float, power: float) -> float:
    """How deep a step of this many bytes fills NCCL's pipeline [1]."""
    return math.pow(n_bytes / (n_bytes + FULL_BYTES), power)


def solve_link(
    op_kind: str, n_ranks: int, domains: int, small: tuple[float, float],
    large: tuple[float, float],
) -> tuple[float, float]:  # fmt: skip
    """Rate of a rank [byte/s] and latency of a hop [s] that give what was measured.

    `small` and `large` are bytes and seconds of a collective; over several domains what its NVLink
    limits counts as the network's.
    """

    def seconds(n_bytes: float, hop_s: float, byte_s: float) -> float:
        step_s, wires = HOP_S * STEP_OF_HOP, n_ranks / domains / byte_s
        path = Path(n_ranks, domains, hop_s, step_s, math.inf, wires)
        if domains == 1:
            path = Path(n_ranks, 1, hop_s, hop_s * STEP_OF_HOP, 1.0 / byte_s, math.inf)
        return path.seconds(op_kind, n_bytes)

    byte_s, hop_s = large[1] / large[0], small[1]
    for _ in range(_ROUNDS):
        byte_s = _solve(partial(seconds, large[0], hop_s), large[1], _LEAST_BYTE_S)
        hop_s = _solve(partial(seconds, small[0], byte_s=byte_s), small[1], _LEAST_HOP_S)
    return 1.0 / byte_s, hop_s


def _solve(rising: Callable[[float], float], goal: float, low: float) -> float:
    """Where a function reaches its goal, to a millionth; the nearest end where it does not."""
    high = 1.0
    while high > low * (1.0 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high


def bus_factor(op: str, ranks: int) -> float:
    """Bytes that a link carries over those of the message, as nccl-tests counts them.

    Examples
    --------
    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("p2p", 2)
    (1.5, 0.75, 1.0)
    """
    if op == "p2p":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def smallest_step(table: KernelTable) -> float:
    """Latency of a ring's step with the shortest messages of a measured all-gather [s]."""
    ranks, n_bytes = float(table.axes["ranks"][-1]), float(table.axes["bytes"][0])
    return n_bytes / table(ranks=ranks, bytes=n_bytes) / (ranks - 1.0)


def sum_per_byte(table: KernelTable, n_ranks: float) -> float:
    """Time of a byte more in a measured all-reduce of large messages [s/byte]."""
    sizes, most = table.axes["bytes"], min(n_ranks, float(table.axes["ranks"][-1]))
    ends = [float(x) for x in sizes[[-3, -1]]]
    low, high = (x / table(ranks=most, bytes=x) for x in ends)
    least = max(most, float(table.axes["ranks"][0]))
    return (high - low) / (ends[1] - ends[0]) * (1.0 - 1.0 / n_ranks) / (1.0 - 1.0 / least)


def measured_time(table: KernelTable, op_kind: str, n_bytes: float, n_ranks: int) -> float:
    """Duration of a collective inside a domain [s], from a table of rates by ranks and bytes.

    Shorter messages than the shortest take as long. More ranks than were measured send what a rank
    has for the others at the same rate, and wait for more steps: for every rank as many as the last
    ones added, with all-reduce for every doubling, as a tree.
    """
    ranks, sizes = table.axes["ranks"], table.axes["bytes"]
    least, most = float(sizes[0]), min(n_ranks, int(ranks[-1]))
    moved = max(n_bytes * (1.0 - 1.0 / n_ranks) / (1.0 - 1.0 / most), least)
    seconds = moved / table(ranks=most, bytes=moved)
    if n_ranks == most:
        return seconds
    before = float(ranks[-2])
    last = least / table(ranks=most, bytes=least) - least / table(ranks=before, bytes=least)
    steps = (n_ranks - most) / (most - before)
    if op_kind == "all_reduce":
        steps = math.log2(n_ranks / most) / math.log2(most / before)
    return seconds + max(last, 0.0) * steps
