"""Groups of GPUs as one op: the slowest of them by closed forms, and against every kernel drawn."""

from functools import cache

import numpy as np
import pytest
from drawn_steps import draw_steps
from played_ops import of_kind, play
from scipy import stats
from test_stepgraph import given, sized

import prism

Q = np.array([0.01, 0.1, 0.5, 0.9, 0.99])


def distribution_of(name, cv):
    """A distribution of mean 1."""
    sigma = np.log1p(cv**2) ** 0.5
    return {
        "lognormal": stats.lognorm(sigma, scale=np.exp(-(sigma**2) / 2)),
        "gamma": stats.gamma(1 / cv**2, scale=cv**2),
        "normal": stats.norm(1.0, cv),
    }[name]


def group(n, effects, backward=0.0, slow=None, gpus_per_node=1, **variability):
    """One forward of a second on a tp group of n GPUs, and one backward."""
    job = given(1.0, backward, effects, tp=n, microbatches=1)
    return job.replace({
        "cluster.gpus_per_node": gpus_per_node, "cluster.node_slowdowns": slow or {},
        **{f"variability.{key}": value for key, value in variability.items()},
    })  # fmt: skip


@cache
def steps(job, clusters, seed=17):
    """Step times [cluster, draw]."""
    return draw_steps(job, 64 * clusters, seed).step_time.values.reshape(clusters, 64)


def check_quantiles(x, expected):
    """Quantiles of x within five standard errors, by the slope of those that are expected."""
    error = np.sqrt(Q * (1 - Q) / x.size)
    low, high = (expected(np.clip(Q + s * 5 * error, 1e-9, 1 - 1e-9)) for s in (-1, 1))
    found = np.quantile(x, Q)
    assert np.all((low <= found) & (found <= high)), (low, found, high)


# ------------------------------------------------------------------------- the slowest of a group
@pytest.mark.parametrize(
    ("distribution", "cv"),
    [("normal", 0.1), ("lognormal", 0.05), ("gamma", 0.5), ("lognormal", 1.0)],
)
@pytest.mark.parametrize("n", [1, 8, 64])
def test_a_group_takes_as_long_as_its_slowest_rank(distribution, cv, n):
    """The largest of n: where tails are heavy, beyond what a few nodes of a quadrature reach."""
    x = steps(group(n, {"residual": {"law": distribution, "cv": cv}}), 500).ravel()
    one = distribution_of(distribution, cv)
    check_quantiles(x, lambda q: one.ppf(q ** (1 / n)))
    z = one.ppf(np.random.default_rng(1).random((200_000 // n, n))).max(axis=1)
    error = (x.var() / x.size + z.var() / z.size) ** 0.5
    assert abs(x.mean() - z.mean()) < 5 * error
    if n > 1:  # negative control: one rank's own distribution
        with pytest.raises(AssertionError):
            check_quantiles(x, one.ppf)


@pytest.mark.parametrize("slow", [1.02, 1.2])
def test_ranks_that_are_not_alike(slow):
    """Four GPUs of eight on a slow node: the largest of what each takes, by brute force."""
    job = group(8, {"residual": {"law": "lognormal", "cv": 0.05}}, slow={1: slow}, gpus_per_node=4)
    x = steps(job, 500).ravel()
    speed = np.repeat([1.0, slow], 4)
    rng = np.random.default_rng(2)
    z = (distribution_of("lognormal", 0.05).ppf(rng.random((100_000, 8))) * speed).max(axis=1)
    assert abs(x.mean() - z.mean()) < 5 * (x.var() / x.size + z.var() / z.size) ** 0.5 + 1e-4
    assert x.std() == pytest.approx(z.std(), rel=0.05)
    assert np.quantile(x, 0.99) == pytest.approx(np.quantile(z, 0.99), rel=3e-3)


@pytest.mark.parametrize("node_share", [0.0, 0.5, 1.0])
def test_persistent_speeds_of_a_group(node_share):
    """The slowest of eight GPUs of two nodes that differ for good, anew with every cluster."""
    rank = {"cv": 0.05, "node_share": node_share}
    x = steps(group(8, {"rank": rank}, gpus_per_node=4), 4000)
    assert np.ptp(x, axis=1).max() < 1e-6
    rng = np.random.default_rng(3)
    node, own = rng.standard_normal((100_000, 2)), rng.standard_normal((100_000, 8))
    z = node_share**0.5 * node.repeat(4, axis=1) + (1 - node_share) ** 0.5 * own
    z = distribution_of("lognormal", 0.05).ppf(stats.norm.cdf(z)).max(axis=1)
    assert abs(x[:, 0].mean() - z.mean()) < 5 * z.std() / 4000**0.5
    assert x[:, 0].std() == pytest.approx(z.std(), rel=0.08)


def test_a_call_is_shared_by_all_kernels_of_an_op():
    """Forward and backward each draw one: their variances add, not their spreads."""
    x = steps(group(1, {"call": {"cv": 0.01}}, backward=2.0), 500)
    assert x.std() == pytest.approx(0.01 * 5**0.5, rel=5 / (2 * x.size) ** 0.5)
    model = sized(effects={"call": {"cv": 0.01}})
    calls = [op.duration for op in of_kind(play(model), "forward", "backward")]
    expected = 0.01 * np.linalg.norm(calls)
    assert steps(model, 500).std() == pytest.approx(expected, rel=5 / (2 * x.size) ** 0.5)


@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_like_kernels_of_an_op_vary_by_themselves(resolution):
    """On one GPU the variances of all kernels add up, whatever they are lowered to."""
    job = sized(effects={"residual": {"cv": 0.1}}).replace({"variability.resolution": "kernel"})
    kernels = [op.duration for op in play(job) if op.duration > 0.0]
    assert len(kernels) > 200
    expected = 0.1 * np.linalg.norm(kernels)
    x = steps(job.replace({"variability.resolution": resolution}), 500)
    assert x.std() == pytest.approx(expected, rel=5 / (2 * x.size) ** 0.5)


# --------------------------------------------------------------- op against kernel resolution
def both_resolutions(job):
    """The same job with one op for a group's forward or backward, and with every kernel drawn."""
    return [job.replace({"variability.resolution": name}) for name in ("kernel", "op")]


EFFECTS = {"step": {"cv": 0.01}, "microbatch": {"cv": 0.02}, "call": {"cv": 0.01}}
CASES = [
    (0.005, 0.02, False, {}), (0.015, 0.005, False, {}), (0.015, 0.02, True, {}),
    (0.005, 0.005, True, {}), (0.015, 0.02, True, EFFECTS),
    (0.0, 0.0, False, {"call": {"cv": 0.05}}), (0.0, 0.0, False, {"microbatch": {"cv": 0.1}}),
]  # fmt: skip


def layered(rank_cv, residual_cv, hot, shared):
    """Interleaved stages of 8 tp ranks on two nodes each, of which one may be slow."""
    effects = {"rank": {"cv": rank_cv}, "residual": {"law": "lognormal", "cv": residual_cv}}
    machine = {"nodes": 8, "gpus_per_node": 4, "nvlink_domain_gpus": 8}
    machine["node_slowdowns"] = {2: 1.2} if hot else {}
    return sized({"ffn_size": 4096}, machine, effects | shared, tp=8, pp=2, dp=2, vpp=2,
                 microbatches=4)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_resolutions_agree(case):
    """Same keys, so same clusters; `experiments/checks/lowering.py` runs it at 1e5."""
    kernel, op = (steps(job, 120) for job in both_resolutions(layered(*case)))
    assert stats.ks_2samp(kernel.ravel(), op.ravel(), method="asymp").statistic <= 0.035
    assert op.mean() == pytest.approx(kernel.mean(), rel=1e-3)
    if case[0]:
        assert op.mean(axis=1).std() == pytest.approx(kernel.mean(axis=1).std(), rel=0.06)
    else:
        assert op.std() == pytest.approx(kernel.std(), rel=0.04)
    if case == CASES[2]:  # negative control: GPUs a little less alike
        other = steps(both_resolutions(layered(0.013, 0.02, True, {}))[1], 120)
        assert stats.ks_2samp(kernel.ravel(), other.ravel(), method="asymp").statistic > 0.07


@pytest.mark.parametrize("library", ["h100-healthy", "h100-stressed"])
def test_resolutions_agree_in_own_noise(library):
    """Kernels' own runtimes alone, as measured: where many ranks wait, the tails decide."""
    off = {name: {"cv": 0.0} for name in ("step", "microbatch", "call")}
    off |= {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "regime": {"probability": 0.0}}
    off |= {"stall": {"rate_per_hour": 0.0}}
    job = sized(
        {"hidden_size": 2048, "ffn_size": 5632, "n_layers": 4}, {"gpus_per_node": 8}, off,
        tp=2, dp=16, data_parallel="fsdp",
    ).replace({"variability.library": library})  # fmt: skip
    kernel, op = (steps(one, 600) for one in both_resolutions(job))
    error = kernel.std(axis=1).std() / 600**0.5 / kernel.std()  # of the spread
    assert op.std() == pytest.approx(kernel.std(), rel=6 * error)
    assert op.mean() == pytest.approx(kernel.mean(), abs=6 * kernel.std() / kernel.size**0.5)
    assert stats.ks_2samp(kernel.ravel(), op.ravel(), method="asymp").statistic < 0.02


def test_idle_time_is_that_of_computing():
    """Stages wait in the bubble; with every kernel drawn also for the collectives of a group."""
    idle = prism.simulate(given(pp=4, microbatches=8), 64, seed=1).idle_fraction.values
    assert idle == pytest.approx([3 / 11] * 4, rel=1e-5)
    kernel, op = (
        prism.simulate(job, 64, seed=1).idle_fraction.values
        for job in both_resolutions(layered(0.0, 0.0, False, {}))
    )
    assert np.all((op > 0.1) & (op < kernel) & (kernel < 0.7))
