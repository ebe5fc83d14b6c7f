"""What would make a job fit its cards, and what each change costs in time.

Recomputation, sharding, smaller microbatches, more tensor or pipeline parallelism on the same GPUs
with the same global batch. Left out: offloading, which a job cannot say.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.job import Job
from prism.workload.described import nominal_seconds
from prism.workload.memory import LEAST_P_FITS, memory_figures

Changes = dict[str, Any]
MOST = 6  # ways that are listed


def ways_to_fit(job: Job) -> list[dict[str, Any]]:
    """List changes of a job's keys that take of its memory, the fastest first.

    Each has ``change`` (keys of `parallelism`), ``gib``, ``p_fits``, and ``step_change``: the
    nominal step over the job's own, less 1. Two changes together only where none is enough; none
    that is slower than another and needs more.
    """
    own = memory_figures(job, every=False)
    if own is None or own["p_fits"] >= LEAST_P_FITS:
        return []
    single = list(_changes(job))
    found = [way for change in single if (way := _try(job, change, own["gib"])) is not None]
    if not any(way["p_fits"] >= LEAST_P_FITS for way in found):
        least = min((way["gib"] for way in found), default=own["gib"])
        both = [one | other for one, other in combinations(single, 2) if not set(one) & set(other)]
        found += [way for change in both if (way := _try(job, change, least)) is not None]
    found.sort(key=lambda way: float(way["gib"]))
    enough = [way for way in found if way["p_fits"] >= LEAST_P_FITS]
    before, shown = nominal_seconds(job), enough or found[:MOST]
    for way in shown:
        way["step_change"] = nominal_seconds(way.pop("job")) / before - 1.0
    fastest = [  # each that needs more is faster
        way for i, way in enumerate(shown)
        if all(way["step_change"] < other["step_change"] for other in shown[:i])
    ]  # fmt: skip
    return sorted(fastest, key=lambda way: float(way["step_change"]))[:MOST]


def _try(job: Job, change: Changes, before: float) -> dict[str, Any] | None:
    """Look at a changed job; None where it breaks a rule, or needs no less."""
    try:
        changed = job.replace({"parallelism": change})
    except PrismError:
        return None
    memory = memory_figures(changed, every=False)
    if memory is None or memory["gib"] >= before:
        return None
    return {"change": change, "gib": memory["gib"], "p_fits": memory["p_fits"], "job": changed}


def _changes(job: Job) -> Iterator[Changes]:
    """Give changes that may take less memory, each of one kind."""
    p = job.parallelism
    if p.recompute != "full":
        if p.recompute == "none" and not job.model.n_experts:
            yield {"recompute": "selective"}
        yield {"recompute": "full"}
    if p.data_parallel == "ddp":
        yield {"data_parallel": "zero1"}
    if p.data_parallel in ("ddp", "zero1") and p.pp == 1:
        yield {"data_parallel": "fsdp", "framework": p.framework}
    if p.data_parallel == "hsdp":
        yield {"data_parallel": "fsdp"}
    if p.data_parallel in ("fsdp", "hsdp") and not p.reshard_after_forward:
        yield {"reshard_after_forward": True}
    if p.microbatch_size % 2 == 0:
        yield {"microbatch_size": p.microbatch_size // 2, "microbatches": 2 * p.microbatches}
    if p.dp % 2 == 0:
        halved: Changes = {"dp": p.dp // 2, "microbatches": 2 * p.microbatches}
        if p.dp == 2 and p.token_shards == 1:
            halved["data_parallel"] = "none"
        if 2 * p.tp <= job.cluster.nvlink_domain_gpus:
            yield {"tp": 2 * p.tp, **halved}
        if p.layer_split == "auto":
            yield {"pp": 2 * p.pp, **halved}
