"""What a ranking is of: a job's inputs and runs, and the step time or the time of a run of steps.

Failures and checkpoints are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.analyses.rankings.shares import Sampler
from prism.common.attribution import Array, Variance
from prism.simulation.causes import Input, Residuals
from prism.simulation.prepare import Prepared
from prism.simulation.runs.build import model_of_steps
from prism.simulation.runs.drift import drift_variance
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import Drift

TARGETS = ("step_time", "time_to_train")
RUNS = 2_000  # run replicates, at least one per cluster


class Weights(NamedTuple):
    """How partial variances of a step count in the variance of the target."""

    single: Array  # [input] first orders
    joint: Array  # [input] interactions
    variance: Variance  # of the target

    @property
    def whole(self) -> float:
        """Variance that shares are of [s^2]; infinite where nothing varies."""
        return self.variance.total or np.inf

    def shares(self, first: Array, total: Array) -> tuple[Array, Array]:
        """Shares of first and total order [input] from variances of a step [s^2]."""
        lasting = np.where(self.single != self.joint, first, 0.0)
        total = np.maximum(total, lasting) * self.joint + lasting * (self.single - self.joint)
        return first * self.single / self.whole, total / self.whole


@dataclass(frozen=True)
class Target:
    """What is ranked; ``n_steps``, ``drift_cv`` and ``memory_s`` matter to a run alone."""

    name: str
    n_steps: int
    drift_cv: float  # of the step effect
    memory_s: float  # its correlation time
    seed: int
    period_ratio: float = 1.0  # from step to step, over a step's own time

    def weigh(self, names: Sequence[str], first: Array, variance: Variance, mean: float) -> Weights:
        """Return how partial variances of one step [s^2] count in the target's variance.

        Parameters
        ----------
        first : float64 [input]
            First-order variances of a step [s^2].

        Notes
        -----
        Over a run of n steps the rank effect stays: its first order counts n^2. The step effect's
        variance counts as `drift_variance(n)`, between n and n^2. All else is new in every step and
        counts n, and so do interactions, but for those of the step effect, which last as long.
        """
        if self.name == "step_time":
            one = np.ones(len(names))
            return Weights(one, one, variance)
        n = float(self.n_steps)
        lasting = drift_variance(self.n_steps, mean, self.memory_s)
        single, joint = np.full((2, len(names)), n)
        step = 0.0
        if "step" in names:
            i = names.index("step")
            step = float(first[i])
            single[i] = joint[i] = lasting
        if "rank" in names:
            single[names.index("rank")] = n * n
        within = step * lasting + max(0.0, variance.within - step) * n
        return Weights(single, joint, Variance(within, variance.between * n * n))

    def times(self, steps: Array, effect: Array, steady: bool = False) -> Array:
        """Return the steps [cluster, replicate], or runs made of them under the same draws.

        Parameters
        ----------
        steps, effect : float64 [cluster, lane]
            Step times [s] and the step effect in them; every 64 lanes are one cluster's.
        """
        if self.name == "step_time":
            return steps
        # A row's lanes in turns of 64 are clusters of their own; equal rows stay together.
        lanes = engine.LANES
        cluster = np.repeat(np.arange(steps.size // lanes), lanes)
        drift = 0.0 if steady else self.drift_cv
        model = model_of_steps(steps.ravel(), effect.ravel(), cluster, Drift(drift, self.memory_s))
        size = model.mean.size
        runs = simulate_runs(model, self.n_steps, size * max(1, RUNS // size), self.seed)
        total = runs.total[np.argsort(runs.cluster, kind="stable")]
        return np.ascontiguousarray(self.period_ratio * total.reshape(steps.shape[0], -1))


@dataclass
class Case:
    """Everything that the parts of a ranking share."""

    step: Prepared
    residuals: Residuals
    inputs: list[Input]
    sampler: Sampler
    target: Target
