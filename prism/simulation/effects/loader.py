"""The loader: a step begins once its batch is there."""

import math
from dataclasses import replace

from prism import engine
from prism.jobs.job import Job
from prism.simulation.effects.effect import Effect, HeldTables
from prism.simulation.program import Program


def resolve(job: Job) -> engine.Loader:
    """Return what the job says; without a rate no step waits."""
    block, p = job.run.loader, job.parallelism
    if block is None:
        return engine.NO_LOADER
    load_s = p.dp * p.microbatches * p.microbatch_size / block.samples_per_s
    return engine.Loader(
        load_s, math.sqrt(math.log1p(block.cv**2)), block.prefetch,
        -math.expm1(-block.stalls_per_hour * load_s / 3600.0), block.stall_s,
    )  # fmt: skip


class LoaderEffect(Effect):
    """Differences in how long batches take to load."""

    name = "loader"
    streams = (engine.LOADER,)

    def acts(self, program: Program) -> bool:
        """Tell whether batches differ."""
        loader = program.loader
        return loader.load_s > 0.0 and (loader.sigma > 0.0 or loader.stall_probability > 0.0)

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Load all batches in the mean time, without stalls."""
        return replace(program, loader=program.loader._replace(sigma=0.0, stall_probability=0.0))
