"""What NCCL's collectives take between NVLink domains: figures of each network, and of all.

Fitted to public nccl-tests results by `experiments/library/collectives.py`, which writes them with
their intervals and sources to `experiments/library/transports.csv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Transport:
    """Figures of one kind of network, and what they rest on."""

    name: str  # as `cluster.links.network.transport` gives it
    label: str
    hop_s: float  # one hop of a small message [s]; a collective begins with one
    efficiency: float  # share of a network card's rate that large messages reach [1]
    measured: tuple[tuple[str, int], ...]  # collectives, and the most domains that were measured

    def covers(self, op_kind: str, domains: int, n_bytes: float) -> bool:
        """Whether a collective lies inside what was measured."""
        low, high = MEASURED_BYTES
        return domains <= dict(self.measured).get(op_kind, 0) and low <= n_bytes <= high


MEASURED_BYTES = 2.0**16, 2.0**34  # messages of the tests, from 64 KiB to 16 GiB

TRANSPORTS = {
    each.name: each
    for each in (
        Transport(
            "infiniband", "InfiniBand", 14e-6, 0.951,
            (("all_reduce", 12), ("all_gather", 10), ("reduce_scatter", 10), ("all_to_all", 10),
             ("p2p", 2)),
        ),
        Transport("roce", "RoCE", 17.1e-6, 0.951, (("all_reduce", 2), ("all_gather", 2))),
        Transport("efa", "EFA", 67.4e-6, 0.737, (("all_reduce", 2),)),
        Transport("tcpx", "TCPX", 133e-6, 0.927, (("all_reduce", 2), ("all_gather", 2))),
        Transport("slingshot", "Slingshot", 208e-6, 0.699, ()),
    )
}  # fmt: skip
"""Networks by their names; InfiniBand, the default, is the one that libraries' shares are of."""


class Algorithms(NamedTuple):
    """Figures of NCCL's rings and trees, the same on every network."""

    within: float = 6.6  # time of a ring's step over that of a domain's smallest ones, inside it
    beyond: float = 12.7  # the same where the ring goes on to other domains
    least: float = 0.137  # share of a step's time that a message of no bytes takes
    power: float = 0.405  # of the bytes of a step, with which the rest of it grows
    level: float = 6.82  # most of a tree's level over a hop
    chain: float = 0.798  # of a tree inside a domain: time of a step over the smallest ones
    chain_rate: float = 0.903  # share of NVLink's rate that a tree's chain of GPUs reaches
    messages: float = 0.657  # time of an all-to-all's message over a ring's step
    channels_bytes_per_s: float = 1.22e12  # that NCCL's channels pass on in a domain, together


ALGORITHMS = Algorithms()
FULL_BYTES = 32e6  # of a step: about where it grows no further; 16 to 256 MB fit as well
OVERLAP_DOMAINS = 100.0  # about where a ring's steps begin to overlap, from published FSDP series
