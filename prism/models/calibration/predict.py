"""What a job's step graph gives for its mean step and its spread, over a library at hand.

The step effect and stalls are left out: they are what a calibration sets beside the rest. One seed
for all settings of a job, so that their ratios hardly vary.
"""

from dataclasses import dataclass

import numpy as np

from prism.common.arrays import Array
from prism.distributions.library import Library
from prism.engine import LANES
from prism.jobs.job import Job
from prism.jobs.jobspec.effects import JitterEffectBlock, StallEffectBlock, StepEffectBlock
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import Prepared, prepare, prepare_again
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks

CLUSTERS = (8, 128)  # fewest and most for a figure: one in ten of a small job's has a lemon
OP_SAMPLES = 800_000_000  # of one simulation, about a second


@dataclass(frozen=True)
class Predicted:
    """Mean and spread of a job's steps."""

    mean_s: float  # over clusters [s]
    # standard deviations of steps of one cluster, and of clusters' means [1]
    within: float
    between: float
    clusters: int  # how many they are of
    # kurtosis of clusters' means beyond a normal law's, 0 or more [1]: lemons make a few slow
    excess: float


def predict_size(step: Prepared, library: Library, context: RunContext) -> Predicted:
    """Simulate a step of `prepare_quiet` over its library with other spreads and factors."""
    times = _draw(prepare_again(step, library, context.seed).program, context)
    means, variances = times.mean(axis=1), times.var(axis=1, ddof=1)
    mean = float(means.mean())
    own = float(variances.mean())
    between = max(0.0, float(means.var(ddof=1)) - own / LANES)
    apart = (means - mean) ** 2
    excess = float((apart**2).mean() / apart.mean() ** 2) - 3.0 if apart.any() else 0.0
    return Predicted(mean, own**0.5 / mean, between**0.5 / mean, means.size, max(0.0, excess))


def draw_steps(job: Job, library: Library, context: RunContext) -> Array:
    """Draw steps of some clusters, [cluster, 64] s."""
    return _draw(prepare(job, context.seed, library).program, context)


def _draw(program: Program, context: RunContext) -> Array:
    n = int(np.clip(OP_SAMPLES // max(program.n_draws * LANES, 1), *CLUSTERS))
    return run_blocks(program, range(n), context)[0].astype(np.float64)


def prepare_quiet(job: Job, library: Library, seed: int) -> Prepared:
    """Prepare the job without step effect, stalls and jitter."""
    effects = job.variability.effects
    off = {
        "step": StepEffectBlock(cv=0.0), "stall": StallEffectBlock(rate_per_hour=0.0),
        "jitter": JitterEffectBlock(mean_s=0.0),
    }  # fmt: skip
    quiet = effects.model_copy(update=off)
    variability = job.variability.model_copy(update={"effects": quiet})
    return prepare(job.model_copy(update={"variability": variability}), seed, library)
