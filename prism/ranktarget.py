"""What a ranking is of: the step time, or the time of a run made of such steps.

Left out: failures and checkpoints, see `prism.time_to_train`.
"""

from dataclasses import dataclass

import numpy as np

from prism import engine
from prism.attribution import Array, Variance
from prism.time_to_train import drift_variance, simulate_runs, step_statistics

TARGETS = ("step_time", "time_to_train")
RUNS = 2_000  # run replicates, at least one per cluster


@dataclass(frozen=True)
class Target:
    """What is ranked; ``n_steps``, ``drift_cv`` and ``memory_s`` matter to a run alone."""

    name: str
    n_steps: int
    drift_cv: float  # of the step effect
    memory_s: float  # its correlation time
    seed: int

    def shares(
        self, names: list[str], first: Array, total: Array, variance: Variance, mean: float
    ) -> tuple[Array, Array]:
        """Shares of the target's variance from partial variances of one step [s^2].

        Notes
        -----
        Over a run of n steps the rank effect stays: its first order counts n^2. The step effect's
        variance counts as `drift_variance(n)`, between n and n^2. All else is new in every step and
        counts n, and so do interactions, but for those of the step effect, which last as long.
        """
        if self.name == "step_time":
            whole = variance.total or np.inf
            return first / whole, total / whole
        n = float(self.n_steps)
        lasting = drift_variance(self.n_steps, mean, self.memory_s)
        single, joint = first * n, total * n
        step = 0.0
        if "step" in names:
            i = names.index("step")
            step = float(first[i])
            single[i], joint[i] = first[i] * lasting, total[i] * lasting
        if "rank" in names:
            i = names.index("rank")
            single[i] = first[i] * n * n
            joint[i] = single[i] + max(0.0, total[i] - first[i]) * n
        whole = variance.between * n * n + step * lasting + max(0.0, variance.within - step) * n
        return single / (whole or np.inf), joint / (whole or np.inf)

    def times(self, steps: Array, effect: Array, steady: bool = False) -> Array:
        """Return the steps [cluster, replicate], or runs made of them under the same draws.

        Parameters
        ----------
        steps, effect : float64 [cluster, lane]
            Step times [s] and the step effect in them; every 64 lanes are one cluster's.
        steady : bool
            The step effect does not drift.
        """
        if self.name == "step_time":
            return steps
        # A row's lanes in turns of 64 are clusters of their own; equal rows stay together.
        lanes = engine.LANES
        cluster = np.repeat(np.arange(steps.size // lanes), lanes)
        drift = 0.0 if steady else self.drift_cv
        statistics = step_statistics(steps.ravel(), effect.ravel(), cluster, drift, self.memory_s)
        size = statistics.mean.size
        runs, which = simulate_runs(
            statistics, self.n_steps, size * max(1, RUNS // size), self.seed
        )
        order = np.argsort(which, kind="stable")
        return np.ascontiguousarray(runs[order].reshape(steps.shape[0], -1))
