"""All layouts of a job on its own GPUs: sizes of its dimensions, ep apart, and microbatches.

They use exactly its GPUs and keep its global batch, its microbatch size and its ep; what follows
from a layout (1F1B's chunks, resharding, the split of the layers) follows anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from prism.analyses.sweeps.grid import Setting, job_at, merged
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.dimensions import DIMENSIONS, REPLICA, STAGE
from prism.jobs.job import Job
from prism.jobs.jobspec.machines import ClusterBlock
from prism.jobs.jobspec.modelcheck import splits_over
from prism.jobs.layersplit import is_even
from prism.jobs.pipelineshape import TRAITS
from prism.workload.layers import expert_width

KEYS = (*(d for d in DIMENSIONS if d != "ep"), "microbatches")
FAMILY = ("1f1b", "interleaved")
"""One schedule with one chunk and with several; of the others a layout keeps the job's."""
SIZES = {*(f"parallelism.{d}" for d in REPLICA), "cluster.nodes", "cluster.gpus_per_node"}
"""Keys that dp follows."""
LAYOUT_KEYS = tuple(f"parallelism.{key}" for key in KEYS)


def layouts(job: Job, sequences: int) -> Iterator[tuple[Setting, tuple[str, ...]]]:
    """List a job's layouts."""
    model, p = job.model, job.parallelism
    if model.durations is not None or job.variability.model is not None:
        raise PrismError(
            f"{job.source or job.name}: --layouts needs a model's sizes (model.name); explicit "
            "durations and fitted traces hold for their own layout"
        )
    batch, rest = divmod(sequences, p.microbatch_size)
    if rest:
        raise PrismError(
            f"parallelism.microbatch_size: {p.microbatch_size} does not divide the global batch of "
            f"{format_count(sequences, 'sequence')} that layouts keep; take one that does"
        )
    for sizes in _sizes(job, job.world_size, REPLICA):
        tp, pp = sizes["tp"], sizes["pp"]
        shards = p.expert_tp or tp  # of an expert
        if (
            tp > job.cluster.nvlink_domain_gpus or shards not in (1, tp)
            or (model.n_experts and expert_width(model) % shards)
        ):  # fmt: skip
            continue
        dp = job.world_size // prod(sizes.values())
        if batch % dp or job.world_size // pp // shards % p.ep:
            continue
        for vpp in _chunk_counts(job, pp, batch // dp):
            sizes |= {"vpp": vpp, "dp": dp, "microbatches": batch // dp}
            yield {f"parallelism.{d}": str(sizes[d]) for d in KEYS}, _follows(job, pp, vpp)


def _sizes(job: Job, gpus: int, dimensions: Sequence[str]) -> Iterator[dict[str, int]]:
    """List sizes whose product divides a number of GPUs, and by which the model may be divided."""
    if not dimensions:
        yield {}
        return
    first, *others = dimensions
    for size in _divisors(gpus):
        if first not in STAGE or splits_over(job.model, first, size):
            for rest in _sizes(job, gpus // size, others):
                yield {first: size, **rest}


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _chunk_counts(job: Job, pp: int, microbatches: int) -> list[int]:
    """Model chunks per stage that the layers and the schedule allow; interleaved ones are equal."""
    most = (job.model.depth + 2) // pp
    if pp == 1:
        return [1]
    name = job.parallelism.schedule
    traits = TRAITS[name]
    if name not in FAMILY:
        chunks = traits.chunks or 1
        return [chunks] if chunks <= most and microbatches >= traits.rounds * pp else []
    # the interleaved schedule takes whole rounds of microbatches
    counts = range(1, 1 + (most if microbatches % pp == 0 else min(1, most)))
    return [vpp for vpp in counts if vpp == 1 or _even(job, pp * vpp) or _keeps(job, pp * vpp)]


def _even(job: Job, n_chunks: int) -> bool:
    return is_even(job.model.depth, n_chunks)


def _keeps(job: Job, n_chunks: int) -> bool:
    """Tell whether layers that no rule divides are divided as the job says."""
    split = job.parallelism.layer_split
    given = split != "auto" and len(split) == n_chunks
    return given and not _even(job, n_chunks)


def _follows(job: Job, pp: int, vpp: int) -> tuple[str, ...]:
    """Keys whose values were of the job's own layout."""
    p = job.parallelism
    keys = [] if _keeps(job, pp * vpp) else ["layer_split"]
    if p.schedule in FAMILY:
        keys.append("schedule")
    if (p.pp > 1) != (pp > 1):
        keys.append("reshard_after_forward")
    if p.data_parallel == "none":
        keys.append("data_parallel")
    return tuple(f"parallelism.{key}" for key in keys)


def global_batch(job: Job) -> int:
    """Sequences of a step over all replicas."""
    p = job.parallelism
    return int(p.dp * p.microbatches * p.microbatch_size)


def base_of(values: Mapping[str, Any], setting: Setting, name: str) -> Job:
    """Build a job at a setting with any layout that it can have: its own, or replicas alone."""
    try:
        return job_at(values, setting, (), name)
    except PrismError:
        cluster = merged(values, setting).get("cluster") or {}
        per_node = cluster.get("gpus_per_node") or ClusterBlock().gpus_per_node
        nodes = cluster.get("nodes")
        if not (isinstance(nodes, int) and isinstance(per_node, int)):
            raise
        plain = dict.fromkeys(KEYS, 1) | {"dp": nodes * per_node}
        keys = {f"parallelism.{key}": str(size) for key, size in plain.items()}
        follows = ["layer_split", "reshard_after_forward", "data_parallel"]
        if (merged(values, setting).get("parallelism") or {}).get("schedule") in FAMILY:
            follows.append("schedule")
        drop = tuple(f"parallelism.{key}" for key in follows)
        return job_at(values, {**setting, **keys}, drop, name)


def follow_sizes(
    job: Job, values: Mapping[str, Any], found: Sequence[Setting]
) -> list[tuple[Setting, tuple[str, ...]]]:
    """Let dp and the microbatches follow sizes that are varied: all GPUs, the same global batch.

    What is varied or does not divide stays as it is. Settings, with what follows in each of them
    where it does in one; and the keys that were of the job's own layout.
    """
    sized = [_sized(job, values, setting) for setting in found]
    given = {key for setting in found for key in setting}
    added = dict.fromkeys(key for setting, _ in sized for key in setting if key not in given)
    own = {key: str(getattr(job.parallelism, key.partition(".")[2])) for key in added}
    return [
        (setting | {k: own[k] for k in own if k not in setting}, drop) for setting, drop in sized
    ]


def _sized(
    job: Job, values: Mapping[str, Any], setting: Setting
) -> tuple[Setting, tuple[str, ...]]:
    if not SIZES & set(setting) or "parallelism.dp" in setting:
        return setting, ()
    given = merged(values, setting)
    p, cluster = (given.get(block) or {} for block in ("parallelism", "cluster"))
    sizes = {key: p.get(key, 1) for key in (*REPLICA, "vpp")}
    gpus = [cluster.get("nodes"), cluster.get("gpus_per_node", ClusterBlock().gpus_per_node)]
    size = p.get("microbatch_size", 1)
    if not all(isinstance(n, int) and n > 0 for n in (*sizes.values(), *gpus, size)):
        return setting, ()
    pp, vpp = sizes["pp"], sizes["vpp"]
    dp, rest = divmod(gpus[0] * gpus[1], prod(sizes[key] for key in REPLICA))
    if rest or dp == job.parallelism.dp:
        return setting, ()
    setting = {**setting, "parallelism.dp": str(dp)}
    microbatches, rest = divmod(global_batch(job), dp * size)
    if "parallelism.microbatches" not in setting and not rest:
        setting["parallelism.microbatches"] = str(microbatches)
    changed = pp != job.parallelism.pp or vpp != job.parallelism.vpp
    return setting, _follows(job, pp, vpp) if changed else ()


def is_own(job: Job, setting: Setting) -> bool:
    """Whether a layout is the job's own."""
    return all(str(getattr(job.parallelism, k)) == setting[f"parallelism.{k}"] for k in KEYS)
