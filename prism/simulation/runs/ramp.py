"""A global batch that grows over a run: steps of each phase, and what they take.

With fewer microbatches where the schedule has them, as simulated; else with fewer replicas, whose
step takes as long while the others are idle.
"""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError, option
from prism.jobs.job import Job
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks

MOST_STEPS = 50_000_000  # of a run whose steps differ: each has a number of its own


def step_work(
    job: Job, n_steps: int, context: RunContext
) -> tuple[NDArray[np.float64] | None, tuple[str, ...]]:
    """Return the length of every step over that of the job's own, None where all are alike.

    The texts name phases in which replicas stand idle.

    Raises
    ------
    PrismError
        A batch is larger than the job's, or the run is too long.
    """
    phases = job.run.batch_ramp
    if not phases:
        return None, ()
    if n_steps > MOST_STEPS:
        raise PrismError(
            f"{option('steps')} {n_steps:,}: run.batch_ramp takes at most {MOST_STEPS:,} steps; "
            "leave it out, or lower the steps"
        )
    work, notes, own, first = np.ones(n_steps), [], 0.0, 0
    for phase, steps in zip(phases, job.ramp_steps, strict=True):
        smaller = _fewer_microbatches(job, phase.global_batch)
        if smaller is not None:
            own = own or _mean_step(job, context)
            work[first : first + steps] = _mean_step(smaller, context) / own
        else:
            notes.append(_idle(job, phase.global_batch))
        first += steps
    return (work if own else None), tuple(notes)  # a step takes as long while replicas stand idle


def _fewer_microbatches(job: Job, sequences: int) -> Job | None:
    p = job.parallelism
    count, rest = divmod(sequences, p.dp * p.microbatch_size)
    if rest or not count:
        return None
    try:
        return job.replace({"parallelism.microbatches": count})
    except PrismError:
        return None  # the schedule is not modelled with so few


def _mean_step(job: Job, context: RunContext) -> float:
    """Mean step of one cluster draw [s]: the same in every phase, so that a ratio hardly varies."""
    program = prepare(job, context.seed, engine="auto").program
    return float(run_blocks(program, range(1), context.quiet)[0].mean(dtype=np.float64))


def _idle(job: Job, sequences: int) -> str:
    """Say how many replicas a batch fills."""
    p = job.parallelism
    replicas = ceil(sequences / (p.microbatches * p.microbatch_size))
    if replicas > p.dp:
        most = p.dp * p.microbatches * p.microbatch_size
        raise PrismError(
            f"{job.source}: run.batch_ramp: a batch of {sequences} sequences is larger than the "
            f"job's own of {most}; lower it, or leave the phase out"
        )
    return (
        f"run.batch_ramp: {sequences:,} sequences fill {replicas} of {p.dp} replicas; the others "
        f"are idle, as {p.schedule} cannot run with fewer microbatches"
    )
