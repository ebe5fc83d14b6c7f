"""Scaling: where replicas meet once a step, the mean follows order statistics of one replica.

With effects that are independent between replicas (rank without a node's share, residual) the step
of n replicas is the largest of n independent copies of one replica's step, cluster draws included:
``E[T_n] = integral of x n F^(n-1) dF`` with F the law of T_1 over clusters and steps. F is sampled
from a job of one replica, with another seed.
"""

import functools

import numpy as np
import pytest
from drawn_steps import draw_steps

from prism import load_job, simulate

SIZES = (8, 64, 512)
ONE = 64 * 8192  # steps of one replica: 8,192 clusters, 16 for each of 512 replicas
GROUPS = 16  # of clusters, for the error of an expectation of the maximum

EXPLICIT = {
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "microbatches": 4},
    "cluster": {},
}
# A transformer with the real path of ddp: gradients all-reduced after backward, gradient norm,
# optimizer. A network without latency and far beyond any real speed leaves the meeting itself.
DDP = {
    "model": {
        "n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8,
        "vocab_size": 4096, "seq_len": 4096,
    },
    "parallelism": {"bucket_layers": 2, "microbatches": 4, "overlap": False},
    "cluster": {
        "gpus_per_node": 1,
        "links": {
            tier: {"bandwidth_gbytes_per_s": 1e9, "latency_us": 0.0, "efficiency": 1.0}
            for tier in ("nvlink", "network")
        },
    },
}  # fmt: skip
PATHS = {"explicit durations": EXPLICIT, "ddp": DDP}
EFFECTS = {
    "rank": {"cv": 0.02, "lemon_fraction": 0.02, "lemon_slowdown": [1.06, 1.2], "node_share": 0.0},
    "residual": {"law": "gamma", "cv": 0.05},
}
STEP_SHOCK = EFFECTS | {"step": {"cv": 0.05}}  # shared by all replicas


def make_job(path, n_replicas, effects):
    """Build the job of a path with so many replicas."""
    layout = path["parallelism"] | {"dp": n_replicas}
    layout["data_parallel"] = "ddp" if n_replicas > 1 else "none"
    cluster = path["cluster"] and path["cluster"] | {"nodes": n_replicas}
    return load_job(
        {
            "model": path["model"],
            "parallelism": layout,
            "cluster": cluster,
            "variability": {"library": None, "effects": effects},
        }
    )


def expected_maximum(ordered, n):
    """Integral of x n F^(n-1) dF over the empirical law of ascending samples."""
    return float(ordered @ weights(ordered.size, n))


@functools.cache
def weights(size, n):
    return np.diff(np.linspace(0.0, 1.0, size + 1) ** n)


@functools.cache
def one_replica(name, shocked=False):
    """Steps of one replica [cluster, lane] in s."""
    job = make_job(PATHS[name], 1, STEP_SHOCK if shocked else EFFECTS)
    return draw_steps(job, ONE, 11, threads=1).step_time.to_numpy().reshape(-1, 64)


@functools.cache
def in_order(name, shocked):
    """Ascending steps of one replica [s], and the group of clusters of each."""
    samples = one_replica(name, shocked)
    order = np.argsort(samples, axis=None)
    return samples.ravel()[order], order // samples.shape[1] % GROUPS


@functools.cache
def sending(name, n):
    """What replicas send takes although links are fast: NCCL's channels pass it on [s]."""
    ideal = (draw_steps(make_job(PATHS[name], k, {}), 64, 1).ideal_step_time for k in (n, 1))
    return float(next(ideal)) - float(next(ideal))


def prediction(name, n, shocked=False):
    """Expected maximum of n replicas and its standard error [s], by jackknife over clusters.

    The jackknife also takes out the bias of an empirical law, which ends at its largest sample.
    """
    ordered, group = in_order(name, shocked)
    left = np.array([expected_maximum(ordered[group != i], n) for i in range(GROUPS)])
    error = np.sqrt((GROUPS - 1) / GROUPS * np.sum((left - left.mean()) ** 2))
    whole = expected_maximum(ordered, n) + sending(name, n)
    left += sending(name, n)
    return GROUPS * whole - (GROUPS - 1) * float(left.mean()), float(error)


def simulated(name, n, effects):
    """Mean step time of n replicas and its standard error by cluster [s]."""
    clusters = max(256, 8192 // n)
    result = draw_steps(make_job(PATHS[name], n, effects), 64 * clusters, 5, threads=1)
    means = result.step_time.to_numpy().reshape(-1, 64).mean(axis=1)
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(means.size))


def gap(name, n, effects, shocked=False):
    """Simulated minus predicted mean, in standard errors, and the two means [s]."""
    predicted, error = prediction(name, n, shocked)
    mean, mean_error = simulated(name, n, effects)
    return (mean - predicted) / np.hypot(error, mean_error), mean, predicted


@pytest.mark.nojit
def test_expected_maximum_of_uniforms():
    grid = (np.arange(200_000) + 0.5) / 200_000
    for n in (1, *SIZES):
        assert expected_maximum(grid, n) == pytest.approx(n / (n + 1), abs=1e-5)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PATHS)
def test_mean_step_is_that_of_the_slowest_of_n(name, n):
    errors, mean, predicted = gap(name, n, EFFECTS)
    assert abs(errors) < 5.0, f"{mean} s simulated, {predicted} s expected"
    # the bound is narrow: a tenth of what n replicas add to one would already be seen
    barrier = predicted - one_replica(name).mean()
    assert abs(mean - predicted) < 0.1 * barrier


@pytest.mark.parametrize("n", SIZES)
def test_a_shared_step_effect_is_not_an_order_statistic(n):
    errors, mean, predicted = gap("ddp", n, STEP_SHOCK, shocked=True)
    assert errors < -5.0, f"{mean} s simulated, {predicted} s if replicas were independent"


def test_the_slowest_replica_stays_the_slowest():
    """The mean alone would not tell persistent effects from fresh ones: the clusters do."""
    result = simulate(make_job(DDP, 64, EFFECTS), 64 * 256, seed=5, threads=1)
    steps = result.step_time.to_numpy().reshape(-1, 64)
    if_fresh = steps.std(ddof=1) / 8.0  # of the mean of 64 steps
    assert steps.mean(axis=1).std(ddof=1) > 4.0 * if_fresh
