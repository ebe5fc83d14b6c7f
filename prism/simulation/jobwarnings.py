"""Warnings of an answer: what of a job runs, but perhaps not as intended.

What cannot be meant is an error of the job file (`prism.jobs.jobspec.check`).
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prism.cluster.groups import shard_size
from prism.cluster.power import CURVES
from prism.common.text import format_count, format_duration, format_share
from prism.jobs.job import Job
from prism.workload.memory import WARNED_P_FITS, memory_figures

if TYPE_CHECKING:
    import xarray as xr

ERRORS = 6.0  # standard errors: no random job of the tests is so far below its ideal step
FLOAT = 1e-5  # relative error of a step in float32
DOUBT = 0.2  # share of steps beyond the sample from which on a warning is given


def job_doubts(job: Job) -> Iterator[str]:
    """Say what a user should know before trusting any figure of the job."""
    memory, p = memory_figures(job, every=False), job.parallelism
    if memory is not None and memory["p_fits"] < WARNED_P_FITS:
        yield (
            f"memory: stage {memory['stage']} is estimated at {memory['gib']:.0f} GiB per GPU, of "
            f"{memory['limit_gib']:.1f} GiB of {job.cluster.device}; P(fits) is "
            f"{format_share(memory['p_fits'])}; prism show lists what would make it fit, prism "
            "sweep --layouts what fits"
        )
    if p.data_parallel == "hsdp" and p.dp > 1 and shard_size(job) == 1:
        yield (
            f"hsdp: one replica of {format_count(p.replica_gpus, 'GPU')} fills the NVLink domain "
            f"of {format_count(job.cluster.nvlink_domain_gpus, 'GPU')}, so that nothing is "
            "sharded, as with ddp; set parallelism.shard_size"
        )
    cluster, device = job.cluster, job.cluster.device
    limits = {
        "power_limit_w": cluster.power_limit_w,
        "clock_mhz": cluster.clock_mhz,
        "throttled_power_w": cluster.throttled_share,
    }
    given = [f"cluster.{key}" for key, value in limits.items() if value]
    if given and device not in CURVES:
        yield f"{', '.join(given)}: no power curve of {device} is published; A100's is used"
    for name, tier in job.cluster.tiers.items():
        if tier.gpus >= job.world_size:
            yield (
                f"cluster.tiers.{name}: its units hold {format_count(tier.gpus, 'GPU')}, the job "
                "has "
                f"{job.world_size:,}; nothing leaves one, so that it has no effect"
            )


def replica_doubts(replicas: dict[str, Any]) -> Iterator[str]:
    """Say why an engine that was asked for did not run, or where it guesses."""
    if replicas["reason"]:
        yield f"all {replicas['replicas']} replicas were simulated: {replicas['reason']}"
    beyond = replicas.get("beyond_sample", 0.0)
    if beyond > DOUBT:
        yield (
            f"{format_share(beyond, 2)} of the steps wait for a replica beyond any time that was "
            "simulated, where its distribution is extrapolated; --engine exact simulates all "
            "replicas"
        )


def mean_doubts(dataset: "xr.Dataset", rank_std: float) -> Iterator[str]:
    """Say that the mean step is below the ideal one, which no step of effects of mean 1 can be.

    `rank_std`: of the rank effect, which few cluster draws do not tell.
    """
    ideal, steps = float(dataset.ideal_step_time), dataset.step_time
    spread = max(float(steps.std()), ideal * rank_std)
    error = spread / math.sqrt(int(dataset.cluster_idx[-1]) + 1)
    mean = float(steps.mean())
    if mean < ideal * (1.0 - FLOAT) - ERRORS * error:
        yield (
            f"step time: its mean of {format_duration(mean)} is below the ideal step of "
            f"{format_duration(ideal)}, beyond the Monte Carlo error: an effect is so skewed that "
            "these replicates hold too few of its rare slow draws; take more, or a smaller cv"
        )
