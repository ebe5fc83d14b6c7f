"""What of a job runs, but perhaps not as meant: too much memory, settings that do nothing.

Each doubt is a sentence for the warnings of an answer; what cannot be meant is an error of the job
file (`prism.jobs.jobspec.check`). Left out: doubts about statistics, which each analysis has
itself.
"""

from collections.abc import Iterator

from prism.cluster.groups import shard_size
from prism.jobs.job import Job
from prism.workload.memory import GIB, estimate_memory, memory_limit


def job_doubts(job: Job) -> list[str]:
    """Say what a user should know before trusting any figure of the job."""
    return [*_memory(job), *_sharding(job), *_tiers(job)]


def _memory(job: Job) -> Iterator[str]:
    memory = estimate_memory(job)
    if memory is not None and memory.total > memory_limit(job):
        yield (
            f"memory: stage {memory.stage} is estimated at {memory.gib:.0f} GiB per GPU, more than "
            f"the {memory_limit(job) / GIB:.1f} GiB of {job.cluster.device}; shard more (tp, pp, "
            "fsdp), recompute, or take prism sweep --layouts for what fits"
        )


def _sharding(job: Job) -> Iterator[str]:
    p = job.parallelism
    if p.data_parallel == "hsdp" and p.dp > 1 and shard_size(job) == 1:
        yield (
            f"hsdp: one replica (tp {p.tp}, cp {p.cp}) fills the NVLink domain of "
            f"{job.cluster.nvlink_domain_gpus} GPUs, so that nothing is sharded, as with ddp; set "
            "parallelism.shard_size"
        )


def _tiers(job: Job) -> Iterator[str]:
    for name, tier in job.cluster.tiers.items():
        if tier.gpus >= job.world_size:
            yield (
                f"cluster.tiers.{name}: its units hold {tier.gpus:,} GPUs, the job has "
                f"{job.world_size:,}; nothing leaves one, so that it has no effect"
            )
