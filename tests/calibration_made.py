"""Small jobs of unlike make-up, and step times of them with known figures, for calibrations."""

from dataclasses import dataclass

import numpy as np

from prism import load_job, load_library
from prism.models.calibration.model import with_factors, with_spreads
from prism.models.calibration.predict import draw_steps
from prism.traces import StepTimes

BASE = "h100-healthy"


def small_job(tp, pp, dp, microbatches, *more):
    """Four layers of Llama 3 8B on some nodes of 8 GPUs, modelled kernel by kernel."""
    return load_job("llama3-405b-8k", [
        "model.name=llama3-8b", "model.n_layers=4", f"parallelism.tp={tp}", f"parallelism.pp={pp}",
        f"parallelism.dp={dp}", f"parallelism.microbatches={microbatches}", "parallelism.vpp=1",
        "parallelism.cp=1", f"cluster.nodes={tp * pp * dp // 8}",
        f"parallelism.sequence_parallel={str(tp > 1).lower()}", f"variability.library={BASE}",
        *more,
    ])  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What a made-up machine does; a calibration is to find it."""

    compute: float = 1.0
    communication: float = 1.0
    between: float = 1.0
    within: float = 1.0
    relative: float = 0.0  # of all ranks in a step, a share of it
    fixed_s: float = 0.0  # of all ranks in a step, a time
    stalls_per_node_hour: float = 0.0
    model_error: float = 0.0  # of a size's durations, drawn anew for each size
    base: str = BASE

    @property
    def library(self):
        """Base library as this machine has it, with the library's step effect."""
        spread = with_spreads(load_library(self.base), self.between, self.within)
        return with_factors(spread, self.compute, self.communication)


def steps_of(truth, job, rng, runs=10):
    """Steps [run, 64] s that a job takes, each run on a cluster of its own; and the stalls' s.

    What all ranks share in a step, and stalls, are drawn here and not by prism.
    """
    quiet = job.variability.effects.model_copy(update={"step": _NO_STEP, "stall": _NO_STALL})
    alone = job.variability.model_copy(update={"effects": quiet})
    alone = job.model_copy(update={"variability": alone})
    drawn = draw_steps(alone, truth.library, int(rng.integers(1 << 40)), 1)
    steps = drawn[rng.permutation(drawn.shape[0])[:runs]]
    steps = steps * np.exp(truth.model_error * rng.standard_normal())
    mean = steps.mean()
    steps = steps * (1.0 + truth.relative * rng.standard_normal(steps.shape))
    steps = steps + truth.fixed_s * rng.standard_normal(steps.shape)
    rate = truth.stalls_per_node_hour * job.n_nodes / 3600.0
    hit = rng.random(steps.shape) < 1.0 - np.exp(-rate * mean)
    lengths = rng.uniform(1.0, 3.0, int(hit.sum()))
    steps[hit] += lengths
    return steps, lengths


def as_times(steps, source="made"):
    """Step times as a reader gives them, from [run, step] s."""
    n_runs, n = steps.shape
    labels = np.repeat([f"r{i}" for i in range(n_runs)], n)
    return StepTimes(steps.ravel(), np.tile(np.arange(n), n_runs), labels, source, "step_s", 1)


def _effects():
    from prism.jobs.jobspec.effects import StallEffect, StepEffect

    return StepEffect(cv=0.0), StallEffect(rate_per_hour=0.0)


_NO_STEP, _NO_STALL = _effects()
