"""What a ranking is of: a job's inputs and runs, and the step time or the time of a run of steps.

Causes are those of steps. What else a run consists of, and what multiplies all of its steps, is
taken from the runs of its estimate.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism import engine
from prism.analyses.rankings.shares import Sampler
from prism.common.arrays import Array
from prism.common.attribution import Variance
from prism.simulation.effects import EFFECTS
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import Prepared
from prism.simulation.runs.build import model_of_steps
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import OF_STEPS, PER_TIME, Drift
from prism.simulation.variance_inputs import Input, Residuals

if TYPE_CHECKING:
    import xarray as xr

TARGETS = ("step_time", "time_to_train")
RUNS = 2_000  # run replicates, at least one per cluster


class Orders(NamedTuple):
    """Shares of the variance of steps, or of what steps make of a run's, [input]."""

    first: Array
    total: Array
    error: Array  # standard error of those that the run's terms tell [1], NaN: of the others


class Rest(NamedTuple):
    """What the runs of an estimate are: what of steps, and what beside, for runs of others."""

    work: float  # mean work of a step over the job's own: below 1 where batches grow
    factor: Array  # [run] on its steps: of the run, of the model's error [1]
    stops: Array  # [run] what comes as often as the run is long, over its steps' time [1]
    pauses: Array  # [run] what comes with the number of steps [s]
    parts: Mapping[str, float]  # of the variance of steps, by term [1]
    n_clusters: int
    per_step: float  # share of a mean run that its steps take, or comes in proportion to them [1]

    def around(self, steps: Array) -> Array:
        """Return runs whose steps take so long [s], with one rest after the other."""
        i = np.arange(steps.size) % self.factor.size
        own = self.work * steps.ravel()
        whole = own * (self.factor[i] + self.stops[i]) + self.pauses[i]
        return np.asarray(whole.reshape(steps.shape))


def rest_of_runs(dataset: "xr.Dataset") -> Rest:
    """Take the runs of an estimate apart."""
    rows = np.asarray(dataset.run_term_time, np.float64).T
    times = dict(zip(map(str, dataset.term.values), rows, strict=True))

    def total(names: Collection[str]) -> Array:
        found = [times.pop(name) for name in list(times) if name in names]
        return np.asarray(np.sum(found, axis=0))

    spread = {name: float(times[name].var()) for name in OF_STEPS if name in times}
    whole = sum(spread.values()) or 1.0
    parts = {name: part / whole for name, part in spread.items()}
    own, factors, stops = total(OF_STEPS), total(("run_effect", "model_error")), total(PER_TIME)
    alike = int(dataset.attrs["steps"]) * float(dataset.ideal_step_time)
    work = float(dataset.ideal_time_to_train) / alike
    clusters, pauses = np.unique(dataset.run_cluster_idx).size, total(list(times))
    per_step = 1.0 - float(np.mean(pauses) / (rows.sum(axis=0).mean() or 1.0))
    return Rest(work, 1.0 + factors / own, stops / own, pauses, parts, clusters, per_step)


@dataclass(frozen=True)
class Target:
    """What is ranked; ``n_steps``, ``drift_cv`` and ``memory_s`` matter to a run alone."""

    name: str
    n_steps: int
    drift_cv: float  # of the step effect
    memory_s: float  # its correlation time
    context: RunContext
    rest: Rest | None = None  # None: runs of steps alone

    def share(self, names: Sequence[str], first: Array, total: Array, variance: Variance) -> Orders:
        """Turn partial variances of one step [s^2] into shares of the target's.

        A run's terms tell what lasts: the rank effect makes clusters' means differ, the step effect
        its drift; stalls and congestion where they are followed through the run. All else is new in
        every step, interactions too: they share the term of noise as they share a step's variance,
        which lies between the sums of their first and of their total orders.
        """
        if self.rest is None:
            whole = variance.total or np.inf
            return Orders(first / whole, total / whole, np.full(first.size, np.nan))
        parts = self.rest.parts
        own = np.array(
            [parts.get(EFFECTS[name].term, 0.0) if name in EFFECTS else 0.0 for name in names]
        )
        lasting = own > 0.0
        alone, apart = np.where(lasting, 0.0, first), np.where(lasting, first, 0.0)
        joint = np.maximum(total - apart, alone)
        noise = variance.within - apart[np.array(names) != "rank"].sum()
        noise = np.clip(noise, alone.sum(), joint.sum())
        scale = (1.0 - own.sum()) / noise if noise > 0.0 else 0.0
        error = own * (1.0 - own) * (2.0 / max(1, self.rest.n_clusters - 1)) ** 0.5
        error = np.where(lasting, error, np.nan)
        return Orders(own + scale * alone, own + scale * joint, error)

    def times(self, steps: Array, effect: Array, steady: bool = False) -> Array:
        """Return the steps [cluster, replicate], or runs made of them under the same draws.

        `steps`, `effect` [cluster, lane]: step times [s] and the step effect in them; every 64
        lanes are one cluster's.
        """
        if self.name == "step_time":
            return steps
        # A row's lanes in turns of 64 are clusters of their own; equal rows stay together.
        lanes = engine.LANES
        cluster = np.repeat(np.arange(steps.size // lanes), lanes)
        drift = 0.0 if steady else self.drift_cv
        model = model_of_steps(steps.ravel(), effect.ravel(), cluster, Drift(drift, self.memory_s))
        size = model.mean.size
        runs = simulate_runs(model, self.n_steps, size * max(1, RUNS // size), self.context)
        total = runs.total[np.argsort(runs.cluster, kind="stable")]
        total = np.ascontiguousarray(total.reshape(steps.shape[0], -1))
        return total if self.rest is None else self.rest.around(total)


@dataclass
class RankingCase:
    """Everything that the parts of a ranking share."""

    step: Prepared
    residuals: Residuals
    inputs: list[Input]
    sampler: Sampler
    target: Target
    per_step: float | None  # share of a mean run that a shorter step shortens; None without a run
