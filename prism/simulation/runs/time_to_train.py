"""From simulated steps to what a run needs of them.

A run of n steps on cluster k takes `n mu_k + mu_k * (sum of the step effect's drift) + sqrt(n)
sigma_k z`: mu_k and sigma_k from the cluster's simulated steps with the step effect divided out,
shrunk towards all clusters; the drift has the step effect's spread and correlation time. What else
a run is made of is `prism.simulation.runs.model`.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prism.engine import LANES
from prism.simulation.runs import model as runmodel
from prism.simulation.runs.drift import drift_variance
from prism.simulation.runs.parts import Drift, RunModel

__all__ = ["StepStatistics", "drift_variance", "run_model", "simulate_runs", "step_statistics"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepStatistics:
    """Per cluster: mean and spread of a step with the step effect divided out [s]."""

    mean: Array  # [cluster]
    std: Array  # [cluster]
    drift_cv: float  # of the step effect
    correlation_time_s: float
    # [sample] steps of all clusters less their cluster's mean [s]; none: normal with `std`
    residuals: Array = field(default_factory=lambda: np.empty(0))


def step_statistics(
    step_time: Array,
    effect: Array,
    cluster: NDArray[np.int64],
    drift_cv: float,
    tau_s: float,
    *,
    use: NDArray[np.bool_] | None = None,
) -> StepStatistics:
    """Estimate each cluster's step law from its simulated steps.

    Parameters
    ----------
    step_time, effect : float64 [replicate]
        Step times [s] and the step effect in them [1].
    cluster : int64 [replicate]
    drift_cv, tau_s : float
        Spread [1] and correlation time [s] of the step effect.
    use : bool [replicate], optional
        Steps to use, where stalls are taken out.

    Notes
    -----
    Means are shrunk by sqrt(max(0, Vb - Vw/n) / Vb), so that their spread is the clusters' own and
    not that of n simulated steps. An incomplete last cluster is left out where there are others.
    """
    complete = cluster < max(1, step_time.size // LANES)
    if use is not None and (complete & use).any():
        complete = complete & use
    steady, cluster = (step_time / effect)[complete], cluster[complete]
    labels, index, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    means = np.bincount(index, steady) / counts
    squares = np.bincount(index, (steady - means[index]) ** 2)
    dof = max(1, steady.size - labels.size)
    within = float(squares.sum() / dof)
    grand = float(steady.mean())
    if labels.size > 1:
        noise = within * float((1.0 / counts).mean())
        between = float(means.var(ddof=1))
        keep = math.sqrt(max(0.0, between - noise) / between) if between > 0.0 else 0.0
        means = grand + keep * (means - grand)
    own = squares / np.maximum(1, counts - 1)
    weight = counts / (counts + 32.0)  # half of the trust goes to the pool at 32 steps
    std = np.sqrt(np.where(counts > 1, weight * own + (1.0 - weight) * within, within))
    return StepStatistics(means, std, drift_cv, tau_s, steady - means[index])


def run_model(statistics: StepStatistics, ideal_s: float | None = None) -> RunModel:
    """Return the run of nothing but these steps.

    Parameters
    ----------
    ideal_s : float, optional
        Step time with every effect at 1 [s].
    """
    return RunModel(
        mean=statistics.mean[:, None],
        std=statistics.std[:, None],
        ideal_s=ideal_s,
        drift=Drift(statistics.drift_cv, statistics.correlation_time_s),
        residuals=statistics.residuals,
    )


def simulate_runs(
    statistics: StepStatistics, n_steps: int, n_runs: int, seed: int
) -> tuple[Array, NDArray[np.int64]]:
    """Draw whole runs of nothing but steps, each on one of the simulated clusters.

    Returns
    -------
    time_to_train : float64 [run_replicate]
        Seconds.
    cluster : int64 [run_replicate]
        Run i is on cluster i modulo their number, so the first n runs do not change with n.
    """
    runs = runmodel.simulate_runs(run_model(statistics), n_steps, n_runs, seed)
    return runs.total, runs.cluster
