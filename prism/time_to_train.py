"""The run: from steps to time-to-train.

A run of n steps on cluster k takes `n mu_k + mu_k * (sum of the step effect's drift) + sqrt(n)
sigma_k z`: mu_k and sigma_k from the cluster's simulated steps with the step effect divided out,
shrunk towards all clusters; the drift is an AR(1) series with the step effect's spread and
correlation time, and its sum has an exact Gaussian law. Left out, for later: evaluations,
checkpoints, interruptions, fail-slow episodes, congestion that persists.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prism.engine import LANES

Array = NDArray[np.float64]
STEP_BY_STEP = 2000  # steps up to which a run is walked; beyond, its sum is as good as normal
_STREAM = 10  # keeps run draws apart from the engine's streams under the same seed


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
    step_time: Array, effect: Array, cluster: NDArray[np.int64], drift_cv: float, tau_s: float
) -> StepStatistics:
    """Estimate each cluster's step law from its simulated steps.

    Parameters
    ----------
    step_time, effect : float64 [replicate]
        Step times [s] and the step effect in them [1].
    cluster : int64 [replicate]
    drift_cv, tau_s : float
        Spread [1] and correlation time [s] of the step effect.

    Notes
    -----
    Means are shrunk by sqrt(max(0, Vb - Vw/n) / Vb), so that their spread is the clusters' own and
    not that of n simulated steps. An incomplete last cluster is left out where there are others.
    """
    complete = cluster < max(1, step_time.size // LANES)
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


def drift_variance(n_steps: int, step_s: float, tau_s: float) -> float:
    """Variance of the sum of n values of an AR(1) series of unit variance [1].

    Notes
    -----
    With r = exp(-step/tau): n (1 + r)/(1 - r) - 2 r (1 - r^n)/(1 - r)^2, from summing r^|i-j|.
    """
    if tau_s <= 0.0:
        return float(n_steps)
    rate = step_s / tau_s
    if n_steps * rate < 1e-6:
        return float(n_steps) ** 2
    r, gap = math.exp(-rate), -math.expm1(-rate)
    return n_steps * (1.0 + r) / gap - 2.0 * r * -math.expm1(-rate * n_steps) / gap**2


def simulate_runs(
    statistics: StepStatistics, n_steps: int, n_runs: int, seed: int
) -> tuple[Array, NDArray[np.int64]]:
    """Draw whole runs, each on one of the simulated clusters.

    Returns
    -------
    time_to_train : float64 [run_replicate]
        Seconds.
    cluster : int64 [run_replicate]
        Run i is on cluster i modulo their number, so the first n runs do not change with n.
    """
    n_clusters = statistics.mean.size
    cluster = np.arange(n_runs) % n_clusters
    if n_steps <= STEP_BY_STEP:
        return _walk_runs(statistics, n_steps, cluster, seed), cluster
    white, drift = (_generator(seed, k).standard_normal(n_runs) for k in (0, 1))
    mu, sigma = statistics.mean[cluster], statistics.std[cluster]
    per_cluster = np.array(
        [drift_variance(n_steps, float(m), statistics.correlation_time_s) for m in statistics.mean]
    )
    spread = statistics.drift_cv * np.sqrt(per_cluster[cluster])
    # White noise is that of steps at their own effect: E[S^2] = 1 + cv^2.
    noise = math.sqrt(n_steps * (1.0 + statistics.drift_cv**2)) * sigma
    return mu * (n_steps + spread * drift) + noise * white, cluster


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, _STREAM + stream]))


def _walk_runs(
    statistics: StepStatistics, n_steps: int, cluster: NDArray[np.int64], seed: int
) -> Array:
    """Short runs step by step: resampled steps times a lognormal AR(1) effect.

    Few steps do not make a sum normal, and a stall in one of them shows.
    """
    from scipy.signal import lfilter

    white, drift = _generator(seed, 0), _generator(seed, 1)
    sigma = math.sqrt(math.log1p(statistics.drift_cv**2))
    total = np.empty(cluster.size)
    for i, k in enumerate(cluster):
        if statistics.residuals.size:
            own = statistics.residuals[white.integers(0, statistics.residuals.size, n_steps)]
        else:
            own = statistics.std[k] * white.standard_normal(n_steps)
        steps = np.maximum(statistics.mean[k] + own, 0.0)
        shocks = drift.standard_normal(n_steps)
        if sigma > 0.0:
            tau = statistics.correlation_time_s
            r = math.exp(-statistics.mean[k] / tau) if tau > 0.0 else 0.0
            shocks[1:] *= math.sqrt(1.0 - r * r)
            path = lfilter([1.0], [1.0, -r], shocks)
            steps *= np.exp(sigma * path - 0.5 * sigma**2)
        total[i] = steps.sum()
    return total
