"""Step times of prism and of its twin, compared by clusters of 64 steps that share their GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import twin
import twin_run

import prism
from prism import Job, load_library
from prism.workload.build import build_workload

SHUFFLES = 400


class Compared(NamedTuple):
    """Differences of prism against the twin, relative, with their standard errors."""

    mean: float
    mean_se: float
    p95: float
    p95_se: float
    ks: float
    p_value: float  # of that KS distance, where clusters are exchanged at random


def inputs(job: Job) -> tuple[Any, Any]:
    """Nominal durations of a job's kernels, and its library."""
    name = job.variability.library
    library = None if name is None else load_library(name)
    return build_workload(job, library), library


def twin_steps(job: Job, clusters: int, seed: int) -> tuple[float, np.ndarray]:
    """Ideal step, and step times [cluster, draw]."""
    work, library = inputs(job)
    times = twin.simulate(job, work, library, twin.PER_CLUSTER * clusters, seed)
    return twin.ideal(job, work, library), times.reshape(clusters, -1)


def prism_steps(job: Job, clusters: int, seed: int) -> tuple[float, np.ndarray]:
    """The same of prism."""
    found = prism.simulate(job, replicates=twin.PER_CLUSTER * clusters, seed=seed)
    return float(found.ideal_step_time), np.asarray(found.step_time).reshape(clusters, -1)


def twin_runs(job: Job, clusters: int, runs: int, seed: int) -> dict[str, np.ndarray]:
    """Runs of the twin, without the error of the model; see `twin_run.simulate_runs`."""
    return twin_run.simulate_runs(job, *inputs(job), 0.0, clusters, runs, seed)


def prism_runs(job: Job, clusters: int, runs: int, seed: int) -> np.ndarray:
    """Times of runs of prism [s], likewise."""
    job = job.replace({"variability.model_error": 0.0})
    found = prism.estimate(
        job, replicates=twin.PER_CLUSTER * clusters, run_replicates=runs, seed=seed
    )
    return np.asarray(found.time_to_train)


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest distance of two empirical distribution functions."""
    at = np.concatenate([a.ravel(), b.ravel()])
    below = [np.searchsorted(np.sort(x.ravel()), at, side="right") / x.size for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


def compare(plain: np.ndarray, fast: np.ndarray) -> Compared:
    """Compare step times [cluster, draw] of the twin and of prism."""
    rng = np.random.default_rng(0)
    whole = np.concatenate([plain, fast])
    ks, n = ks_distance(plain, fast), len(plain)
    orders = (rng.permutation(len(whole)) for _ in range(SHUFFLES))
    beyond = sum(ks_distance(whole[o[:n]], whole[o[n:]]) >= ks for o in orders)

    def error(x: np.ndarray, of: Any) -> float:
        again = [of(x[rng.integers(0, len(x), len(x))]) for _ in range(100)]
        return float(np.std(again, ddof=1))

    def p95(x: np.ndarray) -> float:
        return float(np.quantile(x, 0.95))

    return Compared(
        fast.mean() / plain.mean() - 1.0,
        np.hypot(error(plain, np.mean), error(fast, np.mean)) / plain.mean(),
        p95(fast) / p95(plain) - 1.0,
        np.hypot(error(plain, p95), error(fast, p95)) / p95(plain),
        ks, (1 + beyond) / (1 + SHUFFLES),
    )  # fmt: skip
