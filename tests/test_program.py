"""Effects of a step as simulated: independence, slow nodes, congestion, stalls, jitter."""

from functools import cache

import numpy as np
import pytest
from drawn_steps import draw_steps
from played_ops import of_kind, play
from test_stepgraph import given, sized

import prism

ALL = {
    "rank": {"cv": 0.02, "lemon_fraction": 0.1, "lemon_slowdown": [1.06, 1.2]},
    "step": {"cv": 0.01},
    "microbatch": {"cv": 0.05, "backward_loading": 1.5},
    "call": {"cv": 0.01},
    "residual": {"law": "lognormal", "cv": 0.03},
}
POOL_GPUS = 1024


def on_nodes(job, dependence="full", resolution="op", **cluster):
    """The job on nodes of one GPU unless told otherwise."""
    values = {f"cluster.{key}": value for key, value in {"gpus_per_node": 1, **cluster}.items()}
    values |= {"variability.dependence": dependence, "variability.resolution": resolution}
    return job.replace(values)


@cache
def steps(job, clusters, seed=5):
    """Step times [cluster, draw]."""
    return draw_steps(job, 64 * clusters, seed).step_time.values.reshape(clusters, 64)


def by_cluster(values):
    """Mean over clusters (they are independent) and its standard error."""
    means = values.mean(axis=1)
    return means.mean(), means.std(ddof=1) / means.size**0.5


def moments(times):
    """Mean and variance of a step, each with its standard error."""
    mean, mean_se = by_cluster(times)
    variance, variance_se = by_cluster((times - mean) ** 2)
    return mean, mean_se, variance, variance_se


def agree(none, full):
    """Tell whether mean and variance agree within five standard errors.

    Pooled distributions are a sample as well, of POOL_GPUS draws of the rank effect.
    """
    (m, dm, v, dv), (n, dn, w, dw) = moments(none), moments(full)
    pool = (len(full) / POOL_GPUS) ** 0.5
    same_mean = abs(m - n) < 5 * np.hypot(dm, np.hypot(1, pool) * dn)
    return same_mean and abs(v - w) < 5 * np.hypot(dv, np.hypot(1, pool) * dw)


# ------------------------------------------------------------------------------ dependence: none
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_independence_keeps_every_ops_mean_and_variance(forward, backward, resolution):
    """An op on its own, forward or backward, is as variable with `none` as with `full`."""
    effects = ALL | {"rank": {"cv": 0.02}}  # lemons would make 1024 pooled GPUs a small sample
    full, none = (
        steps(on_nodes(given(forward, backward, effects), d, resolution), 4000)
        for d in ("full", "none")
    )
    assert agree(none, full)
    wrong = none.mean() + 1.04 * (none - none.mean())  # negative control: 4 % more spread
    assert not agree(wrong, full)


def test_independence_draws_forward_and_backward_apart():
    both, forward, backward = (
        steps(on_nodes(given(f, b, ALL), "none"), 2000) for f, b in ((1.0, 2.0), (1.0, 0.0),
                                                                   (0.0, 2.0))
    )  # fmt: skip
    _, _, v, dv = moments(both)
    parts = [moments(t)[2:] for t in (forward, backward)]
    expected, error = sum(p[0] for p in parts), np.hypot(*(p[1] for p in parts))
    assert abs(v - expected) < 5 * np.hypot(dv, error)
    full = steps(on_nodes(given(1.0, 2.0, ALL)), 2000)  # negative control: all is shared
    assert moments(full)[2] - expected > 5 * np.hypot(moments(full)[3], error)
    # clusters are independent draws with `full` alone
    for times, least, most in ((both, 0.8, 1.2), (full, 5.0, np.inf)):
        shared = times.mean(axis=1).var(ddof=1) / (times.var(axis=1, ddof=1).mean() / 64)
        assert least < shared < most


def test_independence_pools_a_slow_node_into_everybody():
    """Half of the GPUs at 1.5x: an op's mean is 1.25 wherever it runs."""
    job = given(1.0, 0.0, {"residual": {"law": "normal", "cv": 0.001}}, dp=2, microbatches=1)
    times = steps(on_nodes(job, "none", node_slowdowns={1: 1.5}), 500)
    # of two independent ops that take 1 or 1.5, the step waits for the slower
    assert abs(times.mean() - 1.375) < 5 * times.std() / times.size**0.5 + 2e-3


# --------------------------------------------------------------------------------- the ideal step
@pytest.mark.parametrize("resolution", ["op", "kernel"])
@pytest.mark.parametrize("dependence", ["full", "none"])
def test_ideal_is_the_step_without_variability(small_pools, dependence, resolution):
    """Effects, slow nodes, congestion, stalls: all at 1, whatever the dependence."""
    layout = {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4}
    calm = sized({"n_layers": 2}, {"gpus_per_node": 2}, **layout)
    calm = calm.replace({"variability.resolution": resolution})
    steady = steps(calm, 1)
    assert np.ptp(steady) == 0.0
    noisy = calm.replace({
        "variability.library": "h100-stressed", "variability.dependence": dependence,
        "cluster.node_slowdowns": {2: 1.2},
    })  # fmt: skip
    found = prism.simulate(noisy, 64, seed=1)
    assert float(found.ideal_step_time) == pytest.approx(steady[0, 0], rel=1e-6)
    assert float(found.step_time.mean()) > 1.01 * float(found.ideal_step_time)


# ------------------------------------------------------------------------------------- slow nodes
def test_slow_node_is_a_slow_stage():
    layout = {"pp": 4, "dp": 2, "microbatches": 6}
    slow = steps(on_nodes(given(**layout), gpus_per_node=2, node_slowdowns={1: 1.5}), 1)
    stage = steps(on_nodes(given([1.0, 1.5, 1.0, 1.0], [2.0, 3.0, 2.0, 2.0], **layout)), 1)
    np.testing.assert_allclose(slow, stage, rtol=1e-6)
    found = prism.simulate(on_nodes(given(**layout), gpus_per_node=2, node_slowdowns={1: 1.5}), 64)
    assert float(found.ideal_step_time) == pytest.approx(9 * 3.0)


def test_slow_node_in_one_replica_slows_the_step_once():
    job = given(pp=2, dp=2, microbatches=3)  # node 3: stage 1 of replica 1
    alone = steps(given([1.0, 1.5], [2.0, 3.0], pp=2, microbatches=3), 1)
    for slow in ({3: 1.5}, {2: 1.5, 3: 1.5}):
        np.testing.assert_allclose(steps(on_nodes(job, node_slowdowns=slow), 1), alone, rtol=1e-6)


def test_memory_bound_kernels_follow_their_loading():
    """A node slower by 1.44: what follows by half of the logarithm is slower by 1.2."""
    times = [
        steps(sized(cluster={"node_slowdowns": {0: 1.44}},
                    effects={"rank": {"cv": 0.0, "memory_loading": x}}), 1)[0, 0]
        for x in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    ideal = steps(sized(), 1)[0, 0]
    memory = (times[2] - times[0]) / 0.44
    assert 0.05 * ideal < memory < 0.6 * ideal
    assert times[1] - times[0] == pytest.approx(0.2 * memory, rel=1e-3)
    assert 1.3 < times[2] / ideal <= 1.44


# ------------------------------------------------------------------------------------- congestion
FACTOR = 3.0


def regime(probability):
    return {"regime": {"probability": probability, "factor": FACTOR}}


def levels(probability, leaves, factor=FACTOR):
    """Chance that any of some leaves is congested; multiplier of mean 1, not hit and hit."""
    hit = 1.0 - (1.0 - probability) ** leaves
    quiet = 1.0 / (1.0 + hit * (factor - 1.0))
    return hit, quiet, factor * quiet


def exposed(dp, probability, dependence="full", **cluster):
    """A step of ddp that overlaps nothing: compute, then reductions that all ranks take part in."""
    return sized(
        {"n_layers": 4, "hidden_size": 512, "ffn_size": 1024}, cluster, regime(probability),
        dp=dp, overlap=False, microbatches=1,
    ).replace({"variability.dependence": dependence})  # fmt: skip


def network_seconds(job):
    """Nominal seconds of each message of a step."""
    ops = play(job, replicas=(0,))
    return np.array([op.duration for op in of_kind(ops, "all_reduce") if op.duration > 0.0])


@pytest.mark.parametrize(
    ("dp", "leaf_nodes", "leaves", "probability"),
    [(8, 8, 1, 0.02), (8, 8, 1, 0.2), (2, 1, 2, 0.2), (8, 2, 4, 0.2), (8, 1, 8, 0.2),
     (64, 1, 64, 0.02)],
)  # fmt: skip
def test_larger_groups_meet_congestion_more_often(dp, leaf_nodes, leaves, probability):
    """A group is hit if any of its leaves is, each once; its mean is nominal."""
    job = exposed(dp, probability, leaf_nodes=leaf_nodes)
    times, ideal = steps(job, 200).ravel(), float(prism.simulate(job, 64).ideal_step_time)
    hit, quiet, congested = levels(probability, leaves)
    network = network_seconds(job).sum()
    level = np.where(times > ideal, congested, quiet)
    np.testing.assert_allclose(times, ideal + network * (level - 1.0), rtol=1e-5)
    error = 5 * (hit * (1 - hit) / times.size) ** 0.5
    assert abs((times > ideal).mean() - hit) < error
    assert abs(times.mean() - ideal) < 5 * times.std() / times.size**0.5 + 1e-5 * ideal


def test_exposed_communication_is_what_free_messages_would_save():
    job = exposed(8, 0.0)
    found = prism.simulate(job, 64, seed=1)
    share = network_seconds(job).sum() / float(found.ideal_step_time)
    assert float(found.exposed_communication) == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize(("dp", "leaf_nodes", "leaves"), [(8, 8, 1), (8, 2, 4), (8, 1, 8)])
def test_independent_messages_are_congested_as_often(dp, leaf_nodes, leaves):
    """Each op has the two levels of its group, by itself: their variances add up."""
    job = exposed(dp, 0.05, "none", leaf_nodes=leaf_nodes)
    times, ideal = steps(job, 400).ravel(), float(prism.simulate(job, 64).ideal_step_time)
    _, quiet, congested = levels(0.05, leaves)
    messages = network_seconds(exposed(dp, 0.05, leaf_nodes=leaf_nodes))
    expected = np.linalg.norm(messages) * ((1.0 - quiet) * (congested - 1.0)) ** 0.5
    assert times.std() == pytest.approx(expected, rel=0.05)
    assert times.mean() == pytest.approx(ideal, abs=5 * expected / times.size**0.5 + 2e-3 * ideal)


def test_nodes_moved_to_more_leaves_are_hit_more_often_but_as_fast_while_they_are_not():
    """What is nominal is so in the default order: two nodes of a leaf, then one of each of two."""
    near, far = (exposed(2, 0.2, leaf_nodes=2, nodes=4, hosts=hosts) for hosts in ([0, 1], [0, 2]))
    for job, leaves in ((near, 1), (far, 2)):
        times = steps(job, 200).ravel()
        ideal, network = float(prism.simulate(near, 64).ideal_step_time), network_seconds(near)
        _, quiet, congested = levels(0.2, 1)
        level = np.where(times > ideal, congested, quiet)
        np.testing.assert_allclose(times, ideal + network.sum() * (level - 1.0), rtol=1e-5)
        hit = levels(0.2, leaves)[0]
        assert abs((times > ideal).mean() - hit) < 5 * (hit * (1 - hit) / times.size) ** 0.5


@pytest.mark.parametrize("job", [
    on_nodes(given(pp=2, dp=2, microbatches=3, effects=regime(0.5))),
    sized(cluster={"gpus_per_node": 8, "nodes": 1}, effects=regime(0.5), pp=4, dp=2),
], ids=["compute alone", "on NVLink alone"])  # fmt: skip
def test_congestion_leaves_what_crosses_no_leaf_alone(job):
    assert np.ptp(steps(job, 5)) == 0.0
    assert steps(job, 5)[0, 0] == float(prism.simulate(job, 64).ideal_step_time)


# ----------------------------------------------------------------------------------------- stalls
RATE, LENGTH = 40.0, 25.0


def stalled(entity, cv=0.0, rate=RATE, length=LENGTH, **layout):
    effect = {"entity": entity, "rate_per_hour": rate, "duration_s": length, "duration_cv": cv}
    return given(effects={"stall": effect}, **({"microbatches": 10} | layout))


@pytest.mark.parametrize(
    ("entity", "tp", "per_group"),
    [("rank", 4, 4.0), ("node", 4, 2.0), ("node", 1, 1.0), ("job", 4, 1.0)],
)
def test_stalls_come_at_the_rate_of_their_entities(entity, tp, per_group):
    """A tp group of four GPUs is four ranks, two nodes of two, one job."""
    times = steps(on_nodes(stalled(entity, tp=tp), gpus_per_node=2), 400)
    p = 1 - np.exp(-per_group * RATE / 3600 * 30)
    quiet = 30 - p * LENGTH / per_group  # each entity's own mean stays at nominal
    hit = times > quiet + 1
    assert abs(hit.mean() - p) < 5 * np.sqrt(p * (1 - p) / times.size)
    np.testing.assert_allclose(times[~hit], quiet, rtol=1e-6)
    np.testing.assert_allclose(times[hit], quiet + LENGTH, rtol=1e-6)
    if per_group == 1.0:
        assert abs(times.mean() - 30) < 5 * times.std() / times.size**0.5


def test_stall_lengths_have_their_distribution():
    times = steps(on_nodes(stalled("rank", 0.5)), 2000)
    quiet = 30 + np.expm1(-RATE / 3600 * 30) * LENGTH
    lengths = times[times > quiet + 0.01] - quiet
    assert abs(lengths.mean() - LENGTH) < 5 * lengths.std() / lengths.size**0.5
    assert lengths.std() == pytest.approx(0.5 * LENGTH, rel=0.05)


def test_ranks_stall_apart_and_the_job_together():
    """Two replicas: either may stall, and the step waits for the later."""
    p = 1 - np.exp(-RATE / 3600 * 30)
    for entity, expected in (("rank", 1 - (1 - p) ** 2), ("job", p)):
        hit = steps(on_nodes(stalled(entity, dp=2)), 400) > 30 - p * LENGTH + 1
        assert abs(hit.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / hit.size)


@pytest.mark.parametrize("entity", ["rank", "node", "job"])
def test_stalls_do_not_make_a_step_shorter(entity):
    """Every entity's mean is kept, and a step is convex in its durations."""
    times = steps(on_nodes(stalled(entity, 0.0, 36.0, 1.0, pp=8, microbatches=32)), 300)
    assert times.mean() > 117 - 5 * times.std() / times.size**0.5


def test_stall_rate_does_not_depend_on_the_resolution():
    """Some of a group's ranks stop in as many steps, whether ops or kernels are drawn."""
    often = {"stall": {"entity": "rank", "rate_per_hour": 26e3, "duration_s": 0.02,
                       "duration_cv": 0.0}}  # fmt: skip
    job = sized({"n_layers": 2}, {"gpus_per_node": 2}, often, tp=2, pp=2, dp=2, microbatches=4)
    hit = [
        (steps(on_nodes(job, resolution=r, gpus_per_node=2), 200) > 0.01).mean()
        for r in ("op", "kernel")
    ]
    assert 0.05 < hit[0] < 0.9
    assert abs(hit[0] - hit[1]) < 5 * (0.5 / 12_800) ** 0.5


# ----------------------------------------------------------------------------------------- jitter
@pytest.mark.parametrize(("engine", "dp"), [("exact", 8), ("exchangeable", 140)])
def test_jitter_adds_the_same_seconds_to_a_short_step_and_to_a_long_one(engine, dp):
    def times(forward, n, **jitter):
        effects = {"rank": {"cv": 0.01}, "jitter": jitter}
        job = on_nodes(given(forward, 2.0, effects, dp=dp, microbatches=2))
        result = prism.simulate(job, n, seed=3, engine=engine)
        np.testing.assert_allclose(result.ideal_step_time, 2 * (forward + 2.0), rtol=1e-6)
        return result.step_time.values

    quiet = times(1.0, 12_800)
    short = times(1.0, 12_800, mean_s=0.5, cv=0.4) - quiet
    long = times(3.0, 640, mean_s=0.5, cv=0.4) - times(3.0, 640)
    np.testing.assert_allclose(short[:640], long, atol=2e-6)
    sigma = np.log1p(0.4**2) ** 0.5  # lognormal
    quantiles = 0.5 * np.exp(sigma * np.array([-1.644854, 0.0, 1.644854]) - sigma**2 / 2)
    np.testing.assert_allclose(np.quantile(short, [0.05, 0.5, 0.95]), quantiles, rtol=0.02)
    assert abs(short.mean() - 0.5) < 5 * 0.5 * 0.4 / short.size**0.5
    assert abs(np.corrcoef(short[:-1], short[1:])[0, 1]) < 0.04
    np.testing.assert_allclose(times(1.0, 640, mean_s=0.5, cv=0.0) - quiet[:640], 0.5, atol=2e-6)


def test_jitter_is_a_row_of_the_ranking_and_a_part_of_runs_that_averages_out():
    effects = {"microbatch": {"cv": 0.02}, "residual": {"law": "gamma", "cv": 0.05}}
    job = on_nodes(given(effects=effects, pp=3, dp=2, microbatches=6))
    noisy = job.replace("variability.effects.jitter={mean_s: 0.5, cv: 1.0}")
    rows = {row["name"]: row for row in prism.summary(prism.rank(noisy, seed=1))["effects"]}
    plain, more = (prism.estimate(j, replicates=6_400, steps=25, seed=1) for j in (job, noisy))
    var = [float(r.step_time.var()) for r in (plain, more)]
    assert var[1] - var[0] == pytest.approx(0.25, rel=0.1)
    assert rows["jitter"]["total_order"] == pytest.approx(0.25 / var[1], abs=0.05)
    assert rows["jitter"]["std_if_frozen"] == pytest.approx(var[0] ** 0.5, rel=0.1)
    added = float(more.time_to_train.mean() - plain.time_to_train.mean())
    assert added == pytest.approx(25 * 0.5, rel=0.05)
    assert float(more.time_to_train.std()) == pytest.approx(5 * var[1] ** 0.5, rel=0.15)
