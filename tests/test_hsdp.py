"""Hybrid sharding: parameters gathered in shard groups, gradients reduced over both levels."""

import numpy as np
import pytest
from test_placement import EFFECTS, MODEL, STILL, seconds, times
from touched import touched

from prism import PrismError, load_job, load_library, simulate, slow_node
from prism.cluster.groups import count_replicas, shard_size
from prism.cluster.linkcongestion import congested_links
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.distributions.distribution import lognormal
from prism.distributions.tables import sample_table
from prism.engine import DRAW
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare
from prism.simulation.program import Tables

GPUS = {"cv": 0.01, "lemon_fraction": 0.0075}


def make_job(data_parallel="hsdp", effects=None, cluster=None, **parallelism):
    """32 GPUs on 8 nodes of 4, no pipeline unless asked for."""
    layout = {"dp": 32, "data_parallel": data_parallel} | parallelism
    return load_job(
        {
            "model": MODEL,
            "parallelism": layout,
            "cluster": {"nodes": 8, "gpus_per_node": 4} | (cluster or {}),
            "variability": {"library": None, "effects": STILL if effects is None else effects},
        }
    )


def test_shard_groups_are_neighbours():
    job = make_job()
    assert shard_size(job) == 4 and count_replicas(job) == 8
    assert Placement(job).members()[1, 0].tolist() == [4, 5, 6, 7]
    assert Placement(job).slot_groups() == [[(r, 0)] for r in range(8)]
    wide = make_job(shard_size=8)
    assert Placement(wide).members()[1, 0].tolist() == list(range(8, 16))
    both = make_job(tp=2, pp=2, dp=8, shard_size=4, microbatches=2)
    # a stage of replica 0: 4 data-parallel ranks of 2 tp ranks each
    assert Placement(both).members()[0, 1].tolist() == list(range(16, 24))
    order = make_job(
        tp=2, pp=2, dp=8, shard_size=2, microbatches=2, cluster={"placement": "tp-cp-pp-dp"}
    )
    assert Placement(order).members()[0, 0].tolist() == [0, 1, 4, 5]
    assert sorted(Placement(order).members().ravel().tolist()) == list(range(32))


@pytest.mark.parametrize("layout", [{}, {"dp": 16, "tp": 2}, {"dp": 8, "pp": 4, "microbatches": 4}])
def test_one_shard_group_of_all_is_fsdp_where_nothing_varies(layout):
    world = layout.get("dp", 32)
    hybrid = prepare(make_job(shard_size=world, **layout), 1).program
    plain = prepare(make_job("fsdp", **layout), 1).program
    assert times(hybrid)[0, 0] == pytest.approx(float(times(plain)[0, 0]), rel=1e-6)


def test_collectives_of_both_levels():
    job = make_job()
    cluster = build_cluster(job, load_library("h100-healthy"))
    assert cluster.group("shard").n_ranks == 4 and cluster.tier(cluster.group("shard")) == "nvlink"
    assert cluster.group("replicas").n_ranks == 8
    assert cluster.tier(cluster.group("replicas")) == "network"
    step = prepare(job, 1)
    work = step.workload
    (gather,), (reduce, replicate) = work.gathers[0][1], work.reduces[0][1]
    assert (gather.group, reduce.group, replicate.group) == ("shard", "shard", "replicas")
    assert reduce.bytes == 2.0 * gather.bytes  # float32 gradients of bfloat16 parameters
    assert replicate.bytes == reduce.bytes / 4  # a GPU's part
    expected = cluster.collective_time("all_reduce", replicate.bytes, cluster.group("replicas"))
    assert replicate.duration == pytest.approx(expected)
    # gathers are a shard group's own, the all-reduce is one for all
    types = step.graph.op_types
    shared = np.zeros(len(types), bool)
    for g, lo, hi in zip(
        step.graph.phase_global, step.graph.phase_lo, step.graph.phase_hi, strict=True
    ):
        rows = np.arange(lo, hi)[step.graph.kind[lo:hi] == DRAW]
        shared[step.graph.op_type[rows]] |= bool(g)
    for c, op_type in enumerate(types):
        group = op_type.collective.group if op_type.collective else "shard"
        assert shared[c] == (group != "shard"), op_type.op_kind


def test_a_slow_node_costs_the_same_anywhere_in_world_wide_fsdp():
    """One flat group on a homogeneous network has no better place."""
    step = prepare(make_job("fsdp", microbatch_size=8), 1)  # longer than its gathers
    slow = {3: slow_node(1.3)}
    found = [times(relocate(step, hosts, slow))[0, 0] for hosts in _swaps(3)]
    assert np.ptp(found) == 0.0
    assert found[0] > 1.1 * times(step.program)[0, 0]


def _swaps(node):
    """Every slot for a node, in exchange with the one that has it."""
    for slot in range(8):
        hosts = np.arange(8)
        hosts[[node, slot]] = hosts[[slot, node]]
        yield hosts


def test_pods_make_places_of_fsdp_unequal():
    """Rings that leave pods of two nodes more often than they must take longer."""
    cluster = {"pod_gpus": 8, "oversubscription": 8.0}
    step = prepare(make_job("fsdp", cluster=cluster), 1)
    found = [times(relocate(step, hosts, {3: slow_node(1.3)}))[0, 0] for hosts in _swaps(3)]
    assert found[3] == found[2] == min(found)  # at home, or beside it
    assert max(found) > 1.01 * min(found)


def test_slow_nodes_in_one_shard_group_or_in_two():
    """Shard groups of two nodes.

    Where nothing varies the groups meet only at the end, and the slowest decides: two slow nodes
    cost the same in one group or two, and as much as one alone. With noise a second slow group
    is a second chance to be the last, so that two groups cost more than one.
    """
    still = prepare(make_job(shard_size=8), 1)
    one = {0: slow_node(1.3)}
    two = {0: slow_node(1.3), 1: slow_node(1.3)}
    together, apart = list(range(8)), [0, 2, 1, 3, 4, 5, 6, 7]
    base = times(relocate(still, together, one))[0, 0]
    assert times(relocate(still, together, two))[0, 0] == pytest.approx(float(base), rel=1e-6)
    assert times(relocate(still, apart, two))[0, 0] == pytest.approx(float(base), rel=1e-6)
    noisy = prepare(make_job(shard_size=8, effects=EFFECTS | {"microbatch": {"cv": 0.05}}), 1)
    same, split = (times(relocate(noisy, h, two), 40).mean() for h in (together, apart))
    error = times(relocate(noisy, together, two), 40) - times(relocate(noisy, apart, two), 40)
    se = error.mean(axis=1).std() / np.sqrt(40)
    assert split - same > 5 * se


def test_slow_links_of_a_node_in_both_levels():
    """Shard groups of two nodes: a slow link stretches its own group's gathers, and all-reduces."""
    step = prepare(make_job(shard_size=8), 1)
    slow = relocate(step, range(8), {2: slow_node(2.0, "network")})  # group 1
    before, after = seconds(step.program)[0], seconds(slow)[0]
    for c, op_type in enumerate(step.graph.op_types):
        if op_type.collective is None or before[0, c] == 0.0:
            continue
        expected = np.ones(4)
        if op_type.collective.group == "shard":
            expected[1] = 2.0
        elif op_type.collective.group in ("replicas", "world"):
            expected[:] = 2.0
        assert after[:, c] / before[:, c] == pytest.approx(expected, rel=1e-6), op_type.op_kind


def test_the_longest_microbatch_of_a_group():
    """Content of n ranks, equally fast or not: the largest product, against samples."""
    tables, rng, n_samples = Tables(), np.random.default_rng(1), 200_000
    law, n = lognormal(0.1), 8
    assert tables.largest(law, 1.0, np.ones((1, 1))) == tables.optional(law)
    assert tables.largest(law, 0.0, np.ones((1, n))) == -1
    uneven = rng.uniform(0.8, 1.0, (50, n))
    for relative in (np.ones((1, n)), uneven / uneven.max(axis=1, keepdims=True)):
        for power in (1.0, 1.5, -0.5):
            table = tables.arrays[tables.largest(law, power, relative)]
            found = 1.0 + sample_table(table, rng.integers(0, 1 << 32, n_samples, dtype=np.uint32))
            x = law.ppf(rng.random((n_samples, n))) ** power / law.power_moments(power).norm
            x *= relative[rng.integers(0, len(relative), n_samples)]
            expected = x.max(axis=1)
            error = np.hypot(found.std(), expected.std()) / np.sqrt(n_samples)
            assert abs(found.mean() - expected.mean()) < 5 * error
            assert found.std() == pytest.approx(expected.std(), rel=0.01)
            q = [0.01, 0.5, 0.99]
            assert np.quantile(found, q) == pytest.approx(np.quantile(expected, q), rel=6e-3)
    table = tables.arrays[tables.largest(law, 1.0, np.ones((1, n)))]
    words = (np.array(q) * 2.0**32).astype(np.uint32)
    exact = law.ppf(np.array(q) ** (1.0 / n))
    assert 1.0 + sample_table(table, words) == pytest.approx(exact, rel=2e-4)


def test_against_a_rank_by_rank_simulation():
    """FSDP of every rank for itself, joined in groups: what treating a group as one adds.

    A group's GPUs wait for the slowest at every unit here; in fact a prefetched gather lets them
    drift by a unit. What lasts costs nearly the same in both (-0.2 %); with calls of 1 %,
    drawn anew for every op, the step is 0.6 % longer, in one group of 32.
    """
    effects = {
        "rank": GPUS, "call": {"cv": 0.01}, "residual": {"cv": 0.01},
        "microbatch": {"cv": 0.02}, "step": {"cv": 0.0},
    }  # fmt: skip
    lasting = {"rank": GPUS, "microbatch": {"cv": 0.02}, "residual": {"cv": 0.0}}
    for given, most in ((effects, 0.012), (lasting, 0.004)):
        long = {"effects": given, "microbatch_size": 8}  # compute, not gathers
        lumped = times(prepare(make_job(shard_size=32, **long), 1).program, 60).mean()
        exact = times(prepare(make_job("fsdp", **long), 1).program, 60).mean()
        assert abs(lumped / exact - 1.0) < most
        still = times(prepare(make_job("fsdp", microbatch_size=8), 1).program).mean()
        assert exact > 1.04 * still  # what is compared is there


def test_congestion_of_a_shard_group_is_its_own():
    effects = STILL | {"regime": {"probability": 0.3, "factor": 3.0}}
    cluster = {"leaf_nodes": 2}
    found = congested_links(Placement(make_job(shard_size=8, cluster=cluster)), 1)
    assert found.n_touched.shape[1] == 2 + 1 + 2
    assert [touched(found, 1, r) for r in range(4)] == [{r} for r in range(4)]
    step = prepare(make_job(shard_size=8, effects=effects, cluster=cluster), 1)
    used = step.program.bank.link
    own = [(int(x), bool(g)) for x, g in zip(used, step.program.bank.is_global, strict=True)]
    assert (1, False) in own and (2, True) in own and (3, True) in own
    assert times(step.program, 4).std() > 0.0


def test_hsdp_simulates_with_every_effect():
    found = simulate(make_job(shard_size=8, effects=EFFECTS), 128, seed=1)
    assert float(found.step_time.std()) > 0.0
    assert float(found.step_time.mean()) > float(found.ideal_step_time)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard_size": 5}, ": 5 .*dp = 32; .* 1, 2, 4, 8, 16, 32"),
        ({"shard_size": 4, "data_parallel": "fsdp"}, ": .*no effect .*fsdp"),
        ({"shard_size": 0}, ": .* 1, .* 0"),
    ],
)
def test_shard_sizes_that_make_no_sense(change, words):
    given = {"data_parallel": "hsdp"} | change
    with pytest.raises(PrismError, match=rf"parallelism\.shard_size{words}"):
        make_job(**given)


def test_hsdp_at_kernel_resolution_is_not_modelled():
    blocks = make_job().model_dump(exclude={"name", "source"})
    blocks["variability"]["resolution"] = "kernel"
    with pytest.raises(PrismError, match="resolution: kernel .*hsdp"):
        load_job(blocks)
