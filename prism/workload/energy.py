"""Energy of a job's GPUs: what they draw in compute, in memory-bound kernels, and else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.cluster.power import gpu_power, throttled_nodes
from prism.workload.kernels import COMPUTE_CLASSES, MEMORY_CLASSES

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.workload.work import Workload


def mean_power(job: Job, workload: Workload | None, step_s: float) -> float | None:
    """Mean power of a job's GPUs over its steps.

    Compute-bound kernels draw the power limit, memory-bound ones and waiting GPUs the shares of the
    TDP in `prism.cluster.power`. Hosts, networks and cooling are left out.

    Parameters
    ----------
    job : Job
        Its power limit and throttled nodes.
    workload : Workload or None
        Its kernels; None of a fitted trace.
    step_s : float
        Mean time from step to step [s].

    Returns
    -------
    float or None
        Per GPU [W]; None where neither a model's sizes nor a power limit say what computes.
    """
    if workload is None or (not workload.model_flop and job.cluster.power_limit_w is None):
        return None
    compute_s = min(_seconds(job, workload, COMPUTE_CLASSES), step_s)
    memory_s = min(_seconds(job, workload, MEMORY_CLASSES), step_s - compute_s)
    cool, hot = gpu_power(job), gpu_power(job, throttled=True)
    share = len(throttled_nodes(job)) / job.n_nodes
    slower_s = min(compute_s * hot.slowdown / cool.slowdown, step_s - memory_s)
    joules = cool.wait_w * step_s + memory_s * (cool.memory_w - cool.wait_w)
    joules += (1.0 - share) * compute_s * (cool.compute_w - cool.wait_w)
    joules += share * slower_s * (hot.compute_w - cool.wait_w)
    return joules / step_s


def _seconds(job: Job, workload: Workload, classes: frozenset[str]) -> float:
    """Seconds of a step that a GPU spends in kernels of some classes, mean over stages."""
    kernels = sum(
        kernel.duration
        for row in workload.chunks
        for chunk in row
        for kernel in (*chunk.forward, *chunk.backward)
        if kernel.kernel_class in classes
    )
    rest = sum(o.duration for o in workload.optimizer if o.kernel_class in classes)
    return (job.parallelism.microbatches * kernels + rest) / len(workload.chunks)
