"""Dispatch and combine of experts' tokens by kernels that send a token once to each rank: DeepEP.

Between NVLink domains it crosses the network once for each domain, to the rank of the same place
there, which passes it on. Left out: what the kernels' multiprocessors cost the compute beside them.

References
----------
.. [1] deepseek-ai/DeepEP, README and Hybrid-EP_Implementation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prism.distributions.library import Library
    from prism.jobs.job import Job


def distinct_parts(picks: int, n: float, parts: float) -> float:
    """Parts that `picks` distinct experts of n, drawn at random, lie in: the expected number.

    The parts are equal; n and parts may be means, and then need not be whole.

    Examples
    --------
    >>> distinct_parts(1, 8, 4), distinct_parts(8, 8, 4), round(distinct_parts(8, 256, 8), 3)
    (1.0, 4.0, 5.295)
    """
    elsewhere = n - n / parts
    missed = math.prod(max(0.0, (elsewhere - i) / (n - i)) if n > i else 0.0 for i in range(picks))
    return parts * (1.0 - missed)


@dataclass(frozen=True)
class Dispatch:
    """Kernels that send tokens to their experts and back, and the tokens."""

    copies: int
    """Routed experts of a token."""
    experts: int
    token_bytes: float
    start_s: float
    local_s: float
    """Time that a token takes where it is [s]."""
    copy_s: float
    """Time that each rank which a token reaches takes [s]."""
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    most_domains: int = 0
    """NVLink domains that a token's experts lie in at most; 0: any number."""

    def seconds(self, n_bytes: float, n_ranks: int, domains: int, factor: float = 1.0) -> float:
        """Duration of a dispatch or a combine [s], without the network's latency.

        `n_bytes` are those of all copies of a rank's tokens; the network is slower by `factor`.
        For T tokens of B bytes, each of which reaches r ranks and d domains, with m ranks of the
        group in each of k domains:
        ``start + T max(local + r copy + B r (m-1)/m / b_nvl, B d (k-1)/k / b_net)``.
        """
        inside = n_ranks / domains
        near = min(self.most_domains or domains, domains)
        experts = self.experts * near / domains
        ranks = distinct_parts(self.copies, experts, near * inside)
        tokens = n_bytes / (self.copies * self.token_bytes)
        sent, reached = tokens * self.token_bytes, distinct_parts(self.copies, experts, near)
        nvlink_s = sent * ranks * (inside - 1.0) / inside / self.nvlink_bytes_per_s
        network_s = sent * reached * (domains - 1.0) / domains / self.network_bytes_per_s * factor
        local_s = tokens * (self.local_s + ranks * self.copy_s)
        return self.start_s + max(local_s + nvlink_s, network_s)


def build_dispatch(
    job: Job, library: Library, nvlink_bytes_per_s: float, network_bytes_per_s: float
) -> Dispatch | None:
    """Return a job's kernels, from its links' rates on data sheets; None where NCCL's are used.

    Where a library lacks their figures they reach what NCCL does, and nothing else takes time.
    """
    model, layout = job.model, job.parallelism
    if layout.expert_dispatch == "alltoall" or layout.ep == 1:
        return None

    def value(name: str, otherwise: float) -> float:
        return library.value(f"nominal/{name}") if f"nominal/{name}" in library else otherwise

    ratio = value("hybridep_ratio", 1.0) if layout.expert_dispatch == "hybridep" else 1.0
    nvlink, network = (
        value(f"deepep_{link}_efficiency", library.value(f"nominal/{link}_efficiency"))
        for link in ("nvlink", "network")
    )
    token_bytes = 2.0 * model.hidden_size
    return Dispatch(
        copies=model.experts_per_token,
        experts=model.n_experts,
        token_bytes=token_bytes,
        start_s=value("deepep_start_s", 0.0) * ratio,
        local_s=value("deepep_local_s_per_byte", 0.0) * token_bytes * ratio,
        copy_s=value("deepep_copy_s", 0.0) * ratio,
        nvlink_bytes_per_s=nvlink_bytes_per_s * nvlink / ratio,
        network_bytes_per_s=network_bytes_per_s * network,
        most_domains=layout.expert_node_limit or 0,
    )
