"""Effects as programmed: independence, congestion, slow nodes, stalls, and the ideal step."""

import dataclasses

import naive
import numpy as np
import pytest
from test_stepgraph import workload

import prism
from prism import engine, load_job, make_schedule, simulate
from prism.distributions.tables import sample_table
from prism.simulation.assembly import build_program
from prism.simulation.draws import lower
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks
from prism.workload import stepgraph as sg
from prism.workload.build import ChunkWork, Collective, Kernel

ALL = {
    "rank": {"cv": 0.02, "lemon_fraction": 0.1, "lemon_slowdown": [1.06, 1.2]},
    "step": {"cv": 0.01},
    "microbatch": {"cv": 0.05, "backward_loading": 1.5},
    "call": {"cv": 0.01},
    "residual": {"law": "lognormal", "cv": 0.03},
}
POOL_GPUS = 1024
WORDS = np.linspace(0, 2**32 - 1, 20_000).astype(np.uint32)
MODEL = {
    "n_layers": 2, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16, "vocab_size": 32_000,
    "seq_len": 2048,
}  # fmt: skip


def explicit(
    effects,
    forward=1.0,
    backward=2.0,
    dependence="full",
    cluster=None,
    resolution="op",
    **parallelism,
):
    return load_job({
        "model": {"durations": {"forward_s": forward, "backward_s": backward}},
        "parallelism": parallelism or {"pp": 1},
        "cluster": cluster or {"gpus_per_node": 1},
        "variability": {"library": None, "dependence": dependence, "effects": effects,
                        "resolution": resolution},
    })  # fmt: skip


def times_of(job, n_blocks, seed=5, change=lambda program: program):
    program = change(prepare(job, seed).program)
    return run_blocks(program, range(n_blocks), seed, threads=2)[0].astype(np.float64)


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

    Pooled laws are a sample as well, of POOL_GPUS draws of the rank effect.
    """
    (m, dm, v, dv), (n, dn, w, dw) = moments(none), moments(full)
    pool = (len(full) / POOL_GPUS) ** 0.5
    same_mean = abs(m - n) < 5 * np.hypot(dm, np.hypot(1, pool) * dn)
    return same_mean and abs(v - w) < 5 * np.hypot(dv, np.hypot(1, pool) * dw)


# -- dependence: none ------------------------------------------------------------------------


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("resolution", ["op", "kernel"])
def test_independence_keeps_every_ops_mean_and_variance(forward, backward, resolution):
    """An op on its own, forward or backward, is as variable with `none` as with `full`."""
    effects = ALL | {"rank": {"cv": 0.02}}  # lemons would make 1024 pooled GPUs a small sample
    full, none = (
        times_of(explicit(effects, forward, backward, d, resolution=resolution), 4000)
        for d in ("full", "none")
    )
    assert agree(none, full)
    wrong = none.mean() + 1.04 * (none - none.mean())  # negative control: 4 % more spread
    assert not agree(wrong, full)


def test_independence_draws_forward_and_backward_apart():
    both, forward, backward = (
        times_of(explicit(ALL, f, b, "none"), 2000) for f, b in ((1, 2), (1, 0), (0, 2))
    )
    _, _, v, dv = moments(both)
    parts = [moments(t)[2:] for t in (forward, backward)]
    expected, error = sum(p[0] for p in parts), np.hypot(*(p[1] for p in parts))
    assert abs(v - expected) < 5 * np.hypot(dv, error)
    shared = times_of(explicit(ALL, 1, 2, "full"), 2000)
    assert moments(shared)[2] > 1.5 * expected  # negative control


def test_independence_removes_what_is_shared():
    jobs = (explicit(ALL, dependence=d, pp=4, microbatches=12, dp=2) for d in ("full", "none"))
    full, none = (times_of(job, 300) for job in jobs)
    assert none.std() < 0.6 * full.std()
    # clusters differ by no more than 64 independent steps do
    ratio = none.mean(axis=1).var(ddof=1) / (none.var(axis=1, ddof=1).mean() / 64)
    assert abs(ratio - 1) < 5 * (2 / 299) ** 0.5
    assert full.mean(axis=1).var(ddof=1) / (full.var(axis=1, ddof=1).mean() / 64) > 5


def test_independence_pools_a_slow_node_into_everybody():
    """Half of the GPUs at 1.5x: an op's mean is 1.25 wherever it runs."""
    cluster = {"gpus_per_node": 1, "node_slowdowns": {1: 1.5}}
    job = explicit({"residual": {"law": "normal", "cv": 0.001}}, 1.0, 0.0, "none", cluster,
                   dp=2, microbatches=1)  # fmt: skip
    one = times_of(job, 500)
    # of two independent ops that take 1 or 1.5, the step waits for the slower
    assert abs(one.mean() - 1.375) < 5 * one.std() / one.size**0.5 + 2e-3


# -- the ideal step --------------------------------------------------------------------------


def transformer(dependence, effects=None, cluster=None, resolution="op", **parallelism):
    layout = {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4}
    return load_job({
        "model": MODEL,
        "parallelism": layout | parallelism,
        "cluster": {"nodes": 4, "gpus_per_node": 2} | (cluster or {}),
        "variability": {"library": None if effects is not None else "h100-stressed",
                        "dependence": dependence, "effects": effects or {},
                        "resolution": resolution},
    })  # fmt: skip


@pytest.mark.parametrize("resolution", ["op", "kernel"])
@pytest.mark.parametrize("dependence", ["full", "none"])
def test_ideal_is_the_step_without_variability(dependence, resolution, small_pools):
    """Effects, slow nodes, congestion, stalls: all at 1, whatever the dependence."""
    calm = times_of(transformer("full", {}, resolution=resolution), 1)
    assert np.ptp(calm) == 0.0
    noisy = transformer(dependence, cluster={"node_slowdowns": {2: 1.2}}, resolution=resolution)
    ideal = times_of(noisy, 1, change=ideal_program)
    np.testing.assert_allclose(ideal, calm, rtol=1e-6)
    assert times_of(noisy, 1).mean() > 1.01 * calm.mean()


# -- slow nodes ------------------------------------------------------------------------------


def test_slow_node_is_a_slow_stage():
    cluster = {"gpus_per_node": 2, "node_slowdowns": {1: 1.5}}
    slow = times_of(explicit({}, cluster=cluster, pp=4, dp=2, microbatches=6), 1)
    stage = times_of(explicit({}, [1, 1.5, 1, 1], [2, 3, 2, 2], pp=4, dp=2, microbatches=6), 1)
    np.testing.assert_allclose(slow, stage, rtol=1e-6)


def test_slow_node_in_one_replica_slows_the_step_once():
    cluster = {"gpus_per_node": 1, "node_slowdowns": {3: 1.5}}  # stage 1 of replica 1
    slow = times_of(explicit({}, cluster=cluster, pp=2, dp=2, microbatches=3), 1)
    alone = times_of(explicit({}, [1, 1.5], [2, 3], pp=2, microbatches=3), 1)
    np.testing.assert_allclose(slow, alone, rtol=1e-6)


@pytest.mark.parametrize(("loading", "expected"), [(0.0, 1.0), (0.5, 1.2), (1.0, 1.44)])
def test_memory_bound_kernels_follow_their_loading(loading, expected):
    effects = {"rank": {"cv": 0.0, "memory_loading": loading}}
    job = explicit(effects, cluster={"gpus_per_node": 1, "node_slowdowns": {0: 1.44}})
    one = Kernel("norm", "memory", 1.0, 0.0, 0.0, "residual/memory")
    none = dataclasses.replace(one, duration=0.0)
    work = dataclasses.replace(workload([[1.0]], [[1.0]]), chunks=((ChunkWork((one,), (none,)),),))
    assert run_work(job, work, 1) == pytest.approx(np.full((1, 64), expected), rel=1e-6)


# -- congestion ------------------------------------------------------------------------------


def run_work(job, work, n_blocks, seed=3):
    """Times [block, lane] of a workload made by hand, on the job's cluster."""
    p = job.parallelism
    graph = sg.build_step_graph(
        work, make_schedule("1f1b", p.pp, p.microbatches), sg.GraphOptions(n_replicas=p.dp)
    )
    program = build_program(job, graph, prepare_variability(job), seed)
    return run_blocks(program, range(n_blocks), seed)[0].astype(np.float64)


CONGESTED, FACTOR = 0.2, 3.0
REGIME = {"regime": {"probability": CONGESTED, "factor": FACTOR}}
REDUCE = Collective("r", "all_reduce", "dp_all_reduce", 1.0, 0.0, "residual/network_large")
SENT = Collective("t", "transfer", "p2p", 1.0, 0.0, "residual/p2p")
REDUCED = workload([[0.0]], [[0.0]], reduces=(((REDUCE,),),))  # one all-reduce of 1 s


def levels(probability, leaves, factor=FACTOR):
    """Chance that any of some leaves is congested; multiplier of mean 1, not hit and hit."""
    hit = 1.0 - (1.0 - probability) ** leaves
    quiet = 1.0 / (1.0 + hit * (factor - 1.0))
    return hit, quiet, factor * quiet


def assert_levels(times, hit, quiet, congested, table=False):
    """Times are the two levels, the higher one as often as links are hit, and 1 in the mean.

    A `table` of 257 quantiles joins them by a line.
    """
    middle = 0.5 * (quiet + congested)
    level = np.where(times > middle, congested, quiet)
    near = abs(times / level - 1.0) < (0.02 if table else 1e-5)
    assert near.mean() > 1.0 - (2 / 256 if table else 1e-9)
    error = 5 * (hit * (1 - hit) / times.size) ** 0.5 + (1 / 256 if table else 0.0)
    assert abs((times > middle).mean() - hit) < error
    assert abs(times.mean() - 1.0) < 5 * times.std() / times.size**0.5 + 1e-6


@pytest.mark.parametrize("dependence", ["full", "none"])
@pytest.mark.parametrize(
    ("dp", "leaf_nodes", "leaves", "probability"),
    [(8, 8, 1, 0.02), (8, 8, 1, 0.2), (2, 1, 2, 0.2), (8, 2, 4, 0.2), (8, 1, 8, 0.2),
     (128, 2, 64, 0.02), (128, 1, 128, 0.01)],
)  # fmt: skip
def test_larger_groups_meet_congestion_more_often(dp, leaf_nodes, leaves, probability, dependence):
    """A group is hit if any of its leaves is, each once; its mean is nominal."""
    regime = {"regime": {"probability": probability, "factor": FACTOR}}
    cluster = {"gpus_per_node": 1, "leaf_nodes": leaf_nodes}
    job = explicit(regime, cluster=cluster, dependence=dependence, dp=dp, microbatches=1)
    times = run_work(job, REDUCED, 200)
    assert_levels(times, *levels(probability, leaves), table=dependence == "none")


def test_transfers_meet_the_congestion_of_both_ends():
    job = explicit(REGIME, cluster={"gpus_per_node": 1, "leaf_nodes": 1}, pp=2, microbatches=1)
    times = run_work(job, workload([[0.0]] * 2, [[0.0]] * 2, transfer=SENT), 500)
    # there and back over the same link, in the same state
    assert_levels(times / 2.0, *levels(CONGESTED, 2))


def test_congestion_of_every_step_against_python():
    """Six pipelines of two stages, two nodes a leaf: each waits for the leaves of its own nodes."""
    cluster = {"gpus_per_node": 1, "leaf_nodes": 2}
    job = explicit(REGIME, cluster=cluster, pp=2, dp=6, microbatches=1)
    times = run_work(job, workload([[0.0]] * 2, [[0.0]] * 2, transfer=SENT), 2, seed=3).ravel()
    _, quiet, congested = levels(CONGESTED, 2)
    for replicate, found in enumerate(times):
        words = [naive.philox4x32((leaf, 0, replicate, engine.REGIME), (3, 0)) for leaf in range(6)]
        hit = [w[0] < CONGESTED * 2**32 for w in words]
        # ranks 0 to 5 are stage 0
        slow = [hit[rank // 2] or hit[(rank + 6) // 2] for rank in range(6)]
        assert found == pytest.approx(2.0 * (congested if any(slow) else quiet), rel=1e-6)


def test_nodes_moved_to_more_leaves_are_hit_more_often_but_as_fast_while_they_are_not():
    """What is nominal is so in the default order: two nodes of a leaf, then one of each of two."""
    cluster = {"gpus_per_node": 1, "leaf_nodes": 2, "nodes": 4}
    times = [
        run_work(
            explicit(REGIME, cluster=cluster | {"hosts": h}, dp=2, microbatches=1), REDUCED, 200
        )
        for h in ([0, 1], [0, 2])
    ]
    _, quiet, congested = levels(CONGESTED, 1)
    assert_levels(times[0], CONGESTED, quiet, congested)
    slow = times[1] > 1.0
    np.testing.assert_allclose(times[1], np.where(slow, congested, quiet), rtol=1e-5)
    hit = levels(CONGESTED, 2)[0]
    assert abs(slow.mean() - hit) < 5 * (hit * (1 - hit) / slow.size) ** 0.5


@pytest.mark.parametrize("layout", [
    {"pp": 2, "tp": 2, "dp": 4}, {"pp": 4, "dp": 4, "vpp": 2}, {"dp": 16, "ep": 4},
    {"dp": 16, "data_parallel": "hsdp", "shard_size": 4},
])  # fmt: skip
def test_every_op_has_the_same_mean_under_full_and_none(layout):
    """Nominal, over clusters, replicas and shared effects, whatever leaves its message touches."""
    experts = {"n_experts": 8, "experts_per_token": 2} if "ep" in layout else {}
    regime = {"regime": {"probability": 0.1, "factor": 4.0}}

    def program(dependence):
        return prepare(load_job({
            "model": MODEL | {"n_layers": 8} | experts,
            "parallelism": {"microbatches": 4} | layout,
            "cluster": {"nodes": 8, "gpus_per_node": 2, "leaf_nodes": 1, "nvlink_domain_gpus": 2},
            "variability": {"library": None, "dependence": dependence, "effects": regime},
        }), 3).program  # fmt: skip

    full, none = program("full"), program("none")
    a, _ = lower(full.low, np.ones((len(full.ranks.tables), full.ranks.n_gpus), np.float32))
    nominal = a.sum(axis=2, dtype=np.float64).mean(axis=0)
    np.testing.assert_allclose(none.low.fixed_mean[0, :, 0], nominal, rtol=1e-3)
    table = np.zeros(nominal.size, int)
    table[none.ops.coef] = none.ops.table
    drawn = [i for i, t in enumerate(table) if np.ptp(none.tables[t]) > 0.0]
    assert len(drawn) >= 3  # there is congestion


@pytest.mark.parametrize("probability", [0.05, 0.6])
def test_frozen_congestion_takes_the_spread_and_leaves_the_mean(probability):
    """Of ops one after another, whether links are hit in most steps or in few."""
    cluster = {"nodes": 8, "gpus_per_node": 2, "leaf_nodes": 2}
    effects = {"regime": {"probability": probability, "factor": FACTOR}}
    job = transformer("full", effects, cluster, pp=1, dp=8, overlap=False)
    numbers = prism.summary(prism.rank(job, seed=1))
    found = {row["name"]: row for row in (*numbers["effects"], *numbers["kernels"])}
    mean, std = numbers["mean"], numbers["std"]
    regime, reduce = found["regime"], found["dp_all_reduce"]
    assert std > 0.02 * mean and regime["total_order"] == pytest.approx(1.0, abs=0.1)
    ideal = float(simulate(job, 64, seed=1).ideal_step_time)
    assert regime["std_if_frozen"] < 1e-5 * mean
    assert regime["p95_if_frozen"] == pytest.approx(ideal, rel=1e-5)
    _, quiet, congested = levels(probability, 4)
    assert regime["cv"] == pytest.approx(np.sqrt((1.0 - quiet) * (congested - 1.0)), rel=1e-5)
    for row in (regime, reduce):
        low, high = row["mean_reduction_ci"]
        assert low < 0.0 < high and high - low < 0.05
    assert reduce["std_if_frozen"] < 0.01 * std


def test_congestion_leaves_compute_alone():
    times = times_of(explicit(REGIME, pp=2, dp=2, microbatches=3), 5)
    assert np.all(times == 4 * 3.0)


def test_pooled_links_that_touch_no_leaf_stay_at_nominal():
    """One pipeline of three crosses nodes of three GPUs; the others' transfers stay within one."""
    job = explicit(
        REGIME, cluster={"gpus_per_node": 3, "leaf_nodes": 1, "placement": "tp-cp-pp-dp"},
        dependence="none", pp=2, dp=3, microbatches=1,
    )  # fmt: skip
    graph = sg.build_step_graph(
        workload([[0.0]] * 2, [[0.0]] * 2, transfer=SENT), make_schedule("1f1b", 2, 1),
        sg.GraphOptions(n_replicas=3),
    )  # fmt: skip
    program = build_program(job, graph, prepare_variability(job), 5)
    assert program.low.fixed_mean[0, :, 0].max() == pytest.approx(1.0, rel=1e-4)
    hit, quiet, congested = levels(CONGESTED, 2)
    sent = program.low.fixed_mean[0, program.ops.coef, 0] > 0.0
    found = 1.0 + sample_table(program.tables[program.ops.table[sent][0]], WORDS)
    for level, share in ((1.0, 2 / 3), (quiet, (1.0 - hit) / 3), (congested, hit / 3)):
        assert np.mean(abs(found - level) < 0.02) == pytest.approx(share, abs=0.01)


# -- stalls ----------------------------------------------------------------------------------

RATE, LENGTH = 40.0, 25.0


def stall(entity, cv=0.0):
    effect = {"entity": entity, "rate_per_hour": RATE, "duration_s": LENGTH, "duration_cv": cv}
    return {"stall": effect}


@pytest.mark.parametrize(
    ("entity", "tp", "per_group"),
    [("rank", 4, 4.0), ("node", 4, 2.0), ("node", 1, 1.0), ("job", 4, 1.0)],
)
def test_stalls_come_at_the_rate_of_their_entities(entity, tp, per_group):
    """A tp group of four GPUs is four ranks, two nodes of two, one job."""
    job = explicit(stall(entity), cluster={"gpus_per_node": 2}, tp=tp, microbatches=10)
    times = times_of(job, 400)
    p = 1 - np.exp(-per_group * RATE / 3600 * 30)
    quiet = 30 - p * LENGTH / per_group  # each entity's own mean stays at nominal
    hit = times > quiet + 1
    assert abs(hit.mean() - p) < 5 * np.sqrt(p * (1 - p) / times.size)
    np.testing.assert_allclose(times[~hit], quiet, rtol=1e-6)
    np.testing.assert_allclose(times[hit], quiet + LENGTH, rtol=1e-6)


def test_stall_lengths_have_their_law():
    times = times_of(explicit(stall("rank", 0.5), microbatches=10), 2000)
    quiet = 30 + np.expm1(-RATE / 3600 * 30) * LENGTH
    lengths = times[times > quiet + 0.01] - quiet
    assert abs(lengths.mean() - LENGTH) < 5 * lengths.std() / lengths.size**0.5
    assert lengths.std() == pytest.approx(0.5 * LENGTH, rel=0.05)


def test_ranks_stall_apart_and_the_job_together():
    """Two replicas: either may stall, and the step waits for the later."""
    rank, job = (times_of(explicit(stall(e), dp=2, microbatches=10), 400) for e in ("rank", "job"))
    p = 1 - np.exp(-RATE / 3600 * 30)
    for times, expected in ((rank, 1 - (1 - p) ** 2), (job, p)):
        hit = times > 30 - p * LENGTH + 1
        assert abs(hit.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / hit.size)


@pytest.mark.parametrize("entity", ["rank", "node", "job"])
def test_stalls_do_not_make_a_step_shorter(entity):
    """Every entity's mean is kept, and a step is convex in its durations."""
    effect = {"entity": entity, "rate_per_hour": 36.0, "duration_s": 1.0, "duration_cv": 0.0}
    job = explicit({"stall": effect}, pp=8, microbatches=32)
    times = times_of(job, 300)
    assert times.mean() > 117 - 5 * times.std() / times.size**0.5


def test_idle_time_is_that_of_computing():
    """Stages wait for the bubble only; transfers and the members of a group do not count."""
    idle = [
        simulate(transformer("full", {}, resolution=r), 64, seed=1).idle_fraction
        for r in ("op", "kernel")
    ]
    for values in idle:
        assert np.all((values > 0) & (values < 1))


def test_a_link_that_cannot_be_congested_stays_at_nominal():
    regime = {"regime": {"probability": 0.5, "factor": 3.0}}
    calm, hit = (
        times_of(explicit(e, pp=4, microbatches=8, cluster={"gpus_per_node": 8}), 2)
        for e in ({}, regime)
    )
    np.testing.assert_array_equal(calm, hit)


def test_stall_rate_does_not_depend_on_the_resolution():
    op, kernel = (
        prepare(transformer("full", stall("rank"), resolution=r), 1).program.stalls.probability
        for r in ("op", "kernel")
    )
    assert kernel == pytest.approx(op, rel=1e-9)
