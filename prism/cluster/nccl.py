"""Which of NCCL's algorithms a collective takes, and how long: measured inside an NVLink domain.

Beyond a domain, and where nothing was measured, NCCL's own tuning model decides with its constants
(src/graph/tuning.cc of 2.27, BSD-3-Clause): rings of n - 1 steps, trees of log2(k) levels, and for
one rank to a domain PAT, which sends to ranks 1, 2, 4, ... away. Left out: sums in switches beyond
a domain (CollNet, NVLS trees).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from prism.distributions.kerneltables import KernelTable


class Protocol(NamedTuple):
    """What an algorithm with a protocol costs, beside the link's latency and bandwidth."""

    base_s: float
    nvlink: float  # latency of a step over the hop's of a link [1]
    network: float
    rate: float  # of the links' rate [1]
    most_bytes_per_s: float = math.inf  # of a rank group in a domain, over the network


RINGS = (
    Protocol(8.4e-6, 1.0, 1.0, 1.0),  # Simple
    Protocol(14e-6, 1.9 / 3.4, 4.0 / 14.0, 0.92),  # LL128
    Protocol(6.6e-6, 0.6 / 3.4, 2.7 / 14.0, 0.5, 20e9),  # LL
)
TREES = (
    Protocol(8.4e-6, 4.0 / 3.4, 1.0, 0.92),
    Protocol(14e-6, 1.25 / 3.4, 8.5 / 14.0, 0.92 * 120.0 / 128.0),
    Protocol(6.8e-6, 0.6 / 3.4, 5.0 / 14.0, 0.92 / 3.8, 20e9),  # LL
)
PAT = Protocol(8.0e-6, 0.0, 1.0 / 3.5, 0.75)
PAT_RANK = 2.8 / 14.0
"""Latency that PAT adds for every rank over the network's hop [1]."""


class Path(NamedTuple):
    """Links under a group: n ranks in k domains, and how fast what they send goes."""

    n_ranks: int
    domains: int
    nvlink_hop_s: float
    network_hop_s: float
    nvlink_s: float  # of the group's bytes inside the domains
    network_s: float  # ... and between them
    network_bytes: float  # that a group sends from one domain to the next
    ring_s: float = 0.0  # latency that farther units add to a ring
    tree_s: float = 0.0  # ... and to a tree
    base_factor: float = 1.0  # on what a collective takes before it sends

    def _sending(self, protocol: Protocol) -> float:
        slowest = max(self.nvlink_s, self.network_s) / protocol.rate
        return max(slowest, self.network_bytes / protocol.most_bytes_per_s)

    def ring(self, protocol: Protocol, phases: float) -> float:
        """Duration of a ring [s]: n - 1 steps in a phase, k - 1 of them over the network."""
        between = (self.domains - 1) * self.network_hop_s * protocol.network + self.ring_s
        inside = (self.n_ranks - self.domains) * self.nvlink_hop_s * protocol.nvlink
        once = between + inside + self._sending(protocol)
        return protocol.base_s * self.base_factor + phases * once

    def tree(self, protocol: Protocol) -> float:
        """Duration of a tree over domains with a chain in each, up and down [s]."""
        between = math.log2(self.domains) * self.network_hop_s * protocol.network + self.tree_s
        chain = (self.n_ranks / self.domains - 1.0) * self.nvlink_hop_s * protocol.nvlink
        return protocol.base_s * self.base_factor + 2.0 * (
            between + chain + self._sending(protocol)
        )

    def pat(self) -> float:
        """Duration of PAT [s]."""
        steps = math.log2(self.domains) * PAT.network + self.n_ranks * PAT_RANK
        sent = self._sending(PAT)
        return PAT.base_s * self.base_factor + steps * self.network_hop_s + self.tree_s + sent

    def fastest(self, op_kind: str) -> float:
        """Duration of an all-gather, reduce-scatter or all-reduce by the best algorithm [s]."""
        phases = 2.0 if op_kind == "all_reduce" else 1.0
        each = [self.ring(protocol, phases) for protocol in RINGS]
        if op_kind == "all_reduce":
            each += [self.tree(protocol) for protocol in TREES]
        elif self.n_ranks == self.domains > 1:
            each.append(self.pat())
        return min(each)


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
