"""A step under its power limit and clock, and the energy of a job's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from prism.cluster.power import (
    Mix,
    gpu_power,
    kind_of,
    mix_of,
    power_state,
    silicon,
    step_joules,
    throttled_nodes,
)
from prism.jobs.devices import find_device
from prism.workload.kernels import ChunkWork, Kernel, is_compute

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.workload.work import Workload

T = TypeVar("T")
Chunks = tuple[tuple[ChunkWork, ...], ...]
"""[stage][chunk]"""


def under_power(
    job: Job, workload: Workload, memory_time: Callable[[float], float],
    pace: Callable[[ChunkWork], ChunkWork],
) -> Workload:  # fmt: skip
    """Return a workload of nominal durations as the job's power limit and clock leave it.

    The limit is the TDP where the job gives none. Bubbles and what gathers and reductions expose
    are not known here, so that the step waits less, and computes slower, than it may. No product is
    faster than the time that its bytes take (`memory_time`); `pace` adds the gaps between a chunk's
    kernels, in which a GPU draws less.
    """
    memory_time = cache(memory_time)
    spaced = _each(workload.chunks, pace)
    state = power_state(job, *_step(job, replace(workload, chunks=spaced)), memory_time)
    slowdowns = {"gemm": state.gemm_slowdown, "attention": state.attention_slowdown}

    @_once
    def slowed(kernel: Kernel) -> Kernel:
        factor = (
            slowdowns.get(kind_of(kernel, memory_time)) if is_compute(kernel.kernel_class) else None
        )
        if factor is None:
            return kernel
        return replace(kernel, duration=max(factor * kernel.duration, memory_time(kernel.bytes)))

    def chunk(work: ChunkWork) -> ChunkWork:
        names = ("forward", "backward", "inputs", "weights")
        return pace(replace(work, **{n: tuple(map(slowed, getattr(work, n))) for n in names}))

    return replace(workload, chunks=_each(workload.chunks, chunk), power=state)


def _each(chunks: Chunks, change: Callable[[ChunkWork], ChunkWork]) -> Chunks:
    """Change chunks; those that are one stay one."""
    once = _once(change)
    return tuple(tuple(map(once, row)) for row in chunks)


def _once(change: Callable[[T], T]) -> Callable[[T], T]:
    """Change what is one object once: to hash a chunk, or a kernel, takes longer."""
    made: dict[int, tuple[T, T]] = {}

    def changed(item: T) -> T:
        if id(item) not in made:
            made[id(item)] = item, change(item)
        return made[id(item)][1]

    return changed


def mean_power(job: Job, workload: Workload | None, step_s: float) -> float | None:
    """Mean power of a job's GPUs over steps of this length, per GPU [W].

    Joules per flop and byte of each kernel (`prism.cluster.power.Silicon`) over the idle draw, to
    which a GPU falls that waits or communicates; never more than its limit. Durations that a job
    gives itself draw all of it; None where neither a model's sizes nor a power limit say what
    computes. Hosts, networks and cooling are left out.
    """
    if workload is None or (not workload.model_flop and job.cluster.power_limit_w is None):
        return None
    device, phi = find_device(job.cluster.device), 1.0
    cool, hot = gpu_power(job), gpu_power(job, throttled=True)
    kernels, wait_s = _step(job, workload)
    if not workload.model_flop:
        phi, seconds = 1.0 / cool.slowdown, sum(n * kernel.duration for kernel, n in kernels)
        over = device.power_w - silicon(device).idle_w
        mix = Mix(gemm_s=phi * seconds, gemm_j=phi * seconds * over)
    elif workload.power is not None:
        mix, phi = workload.power.mix, workload.power.phi
    else:
        mix = mix_of(job, kernels, wait_s, at_cap=False)
    share, mean = len(throttled_nodes(job)) / job.n_nodes, 0.0
    for part, own, speed in (
        (1.0 - share, cool, phi), (share, hot, phi * cool.slowdown / hot.slowdown),
    ):  # fmt: skip
        joules, seconds = step_joules(device, mix, speed, own.limit_w, step_s)
        mean += part * min(joules / max(step_s, seconds), own.limit_w)
    return mean


def _step(job: Job, workload: Workload) -> tuple[list[tuple[Kernel, float]], float]:
    """Kernels of a step with how often a GPU runs each, mean over stages, and its time on links."""
    stages, m = len(workload.chunks), job.parallelism.microbatches
    chunks = [chunk for row in workload.chunks for chunk in row]
    alike = {id(chunk): chunk for chunk in chunks}  # those that are one count as such
    times = Counter(map(id, chunks))
    kernels = [
        (kernel, times[i] * m / stages)
        for i, chunk in alike.items()
        for kernel in (*chunk.forward, *chunk.backward)
    ]
    kernels += [
        (Kernel(o.name, o.kernel_class, o.duration, 0.0, o.bytes, o.distribution), 1.0 / stages)
        for o in workload.optimizer
    ]
    own = [(kernel, n) for kernel, n in kernels if is_compute(kernel.kernel_class)]
    links = sum(n * k.duration for k, n in kernels if not is_compute(k.kernel_class))
    return own, links
