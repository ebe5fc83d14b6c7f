"""Hybrid sharding: parameters gathered in shard groups, gradients reduced over both levels."""

from functools import cache

import numpy as np
import pytest
from drawn_steps import draw_steps
from played_ops import of_kind, play
from test_lowering import distribution_of
from test_stepgraph import sized

import prism

VARIED = {
    "rank": {"cv": 0.015, "lemon_fraction": 0.05, "lemon_slowdown": [1.06, 1.2], "node_share": 0.4},
    "step": {"cv": 0.01}, "microbatch": {"cv": 0.05}, "call": {"cv": 0.005},
    "residual": {"cv": 0.03},
}  # fmt: skip
COLLECTIVES = ("parameter_gather", "gradient_reduce", "gradient_replicate", "grad_norm_reduce")


def make_job(data_parallel="hsdp", effects=None, cluster=None, **parallelism):
    """32 GPUs on 8 nodes of 4, no pipeline unless asked for."""
    machine = {"gpus_per_node": 4} | (cluster or {})
    layout = {"dp": 32, "data_parallel": data_parallel, "microbatches": 1} | parallelism
    return sized({"seq_len": 2048}, machine, effects, **layout)


@cache
def steps(job, clusters=1):
    """Step times [cluster, draw]."""
    return draw_steps(job, 64 * clusters, 1).step_time.values.reshape(clusters, 64)


def seconds(job):
    """Seconds of each kind of collective [kind][group]."""
    ops = play(job, ideal=False)
    groups = range(1 + max(op.replica for op in ops))
    return {
        name: np.array([sum(op.duration for op in of_kind(ops, name) if op.replica == g)
                        for g in groups])
        for name in COLLECTIVES
    }  # fmt: skip


@pytest.mark.parametrize("layout", [{}, {"dp": 16, "tp": 2}, {"dp": 8, "pp": 4, "microbatches": 4}])
def test_one_shard_group_of_all_is_fsdp_where_nothing_varies(layout):
    hybrid = steps(make_job(shard_size=layout.get("dp", 32), **layout))
    assert hybrid[0, 0] == pytest.approx(steps(make_job("fsdp", **layout))[0, 0], rel=1e-6)


def test_shard_groups_are_neighbours_and_both_levels_have_their_links():
    """By default those of a node: what is sharded stays on NVLink, what is replicated does not."""
    slow = {"links": {"network": {"bandwidth_gbytes_per_s": 5.0, "efficiency": 1.0}}}
    slower = {"links": {"network": {"bandwidth_gbytes_per_s": 2.5, "efficiency": 1.0}}}
    for size, twice in ((None, 1.0), (4, 1.0), (8, 2.0)):
        given = {} if size is None else {"shard_size": size}
        one, other = (seconds(make_job(cluster=c, overlap=False, **given)) for c in (slow, slower))
        assert len(one["parameter_gather"]) == 32 // (size or 4)
        for name in ("parameter_gather", "gradient_reduce"):
            assert other[name] / one[name] == pytest.approx(twice, rel=0.05)
        assert other["gradient_replicate"] / one["gradient_replicate"] == pytest.approx(2, rel=0.05)


def test_a_slow_node_delays_gathers_of_its_own_shard_group_alone():
    """With fsdp everybody waits for it at every layer; with hsdp the others at the first sum."""
    slow = {"node_slowdowns": {3: 1.5}}
    first = {}
    for mode in ("hsdp", "fsdp"):
        for cluster in ({}, slow):
            ops = play(make_job(mode, cluster=cluster, microbatch_size=8), ideal=False)
            starts = [op for op in of_kind(ops, "backward") if op.chunk == 7]
            first[mode, bool(cluster)] = np.array([op.start for op in starts])
    ratio = first["hsdp", True] / first["hsdp", False]
    assert ratio[[0, 1, 2, 4, 5, 6, 7]] == pytest.approx(1.0, rel=1e-6) and ratio[3] > 1.1
    assert np.all(first["fsdp", True] / first["fsdp", False] > 1.1)


def test_a_slow_node_costs_the_same_anywhere_in_world_wide_fsdp():
    """One flat group on a homogeneous network has no better place."""
    found = [
        steps(make_job("fsdp", cluster={"node_slowdowns": {node: 1.3}}, microbatch_size=8))[0, 0]
        for node in range(8)
    ]
    assert np.ptp(found) == 0.0
    assert found[0] > 1.1 * steps(make_job("fsdp", microbatch_size=8))[0, 0]


def test_pods_make_places_of_fsdp_unequal():
    """Rings that leave pods of two nodes more often than they must take longer."""
    found = []
    for slot in range(8):
        hosts = list(range(8))
        hosts[3], hosts[slot] = hosts[slot], hosts[3]
        pods = {"pod_gpus": 8, "oversubscription": 8.0, "hosts": hosts, "node_slowdowns": {3: 1.3}}
        found.append(steps(make_job("fsdp", cluster=pods))[0, 0])
    assert found[3] == found[2] == min(found)  # at home, or beside it
    assert max(found) > 1.01 * min(found)


def test_slow_nodes_in_one_shard_group_or_in_two():
    """Shard groups of two nodes.

    Where nothing varies the groups meet only at the end, and the slowest decides: two slow nodes
    cost the same in one group or two, and as much as one alone. With noise a second slow group
    is a second chance to be the last, so that two groups cost more than one.
    """

    def at(slots, slow=(0, 1), effects=None, clusters=1):
        hosts = [*slots, *(node for node in range(8) if node not in slots)]
        machine = {"node_slowdowns": dict.fromkeys(slow, 1.3), "hosts": hosts}
        return steps(make_job(effects=effects, cluster=machine, shard_size=8), clusters)

    base = at([0, 1], [0])[0, 0]
    assert at([0, 1])[0, 0] == pytest.approx(base, rel=1e-6)
    assert at([0, 2, 1])[0, 0] == pytest.approx(base, rel=1e-6)
    together, apart = (at(slots, (0, 1), VARIED, 40) for slots in ([0, 1], [0, 2, 1]))
    more = (apart - together).mean(axis=1)
    assert more.mean() > 5 * more.std() / 40**0.5


def test_slow_links_of_a_node_in_both_levels():
    """Shard groups of two nodes: a slow link stretches its own group's gathers, and all-reduces."""
    slow = make_job(cluster={"node_slowdowns": {2: {"network": 2.0}}}, shard_size=8, overlap=False)
    before, after = seconds(make_job(shard_size=8, overlap=False)), seconds(slow)
    for name in COLLECTIVES:
        own = name in ("parameter_gather", "gradient_reduce")
        expected = [1.0, 2.0, 1.0, 1.0] if own else [2.0] * 4
        assert after[name] / before[name] == pytest.approx(expected, rel=1e-5)


def test_a_group_waits_for_its_longest_microbatch():
    """Each of 32 ranks has a content of its own, in all layers; the largest is the group's."""
    effects = {"microbatch": {"cv": 0.1, "backward_loading": 1.0, "loss_loading": 1.0}}
    job = make_job(effects=effects, shard_size=32, overlap=False)
    ops = play(job)
    compute = sum(op.duration for op in of_kind(ops, "forward", "backward"))
    longest = 1.0 + (steps(job, 200) - max(op.end for op in ops)) / compute
    q = np.array([0.01, 0.5, 0.99])
    expected = distribution_of("lognormal", 0.1).ppf(q ** (1 / 32))
    assert np.quantile(longest, q) == pytest.approx(expected, rel=6e-3)


def test_a_microbatch_waits_less_where_its_gpus_are_faster():
    """Ranks of 4 GPUs are as slow as the slowest; a faster one's long microbatch counts less.

    How much longer the microbatches of 8 ranks make the compute, in the mean, is known to 1 % by
    these steps and to about 2 % by the ranks that are drawn for it. What follows microbatches at
    all is told by GPUs that are alike; that unlike ones are bounded makes 2 % of it.
    """
    uneven = {"microbatch": {"cv": 0.06, "backward_loading": 1.0, "loss_loading": 1.0}}
    unlike = {"rank": {"cv": 0.06, "lemon_fraction": 0.0}}
    layout = {"dp": 8, "tp": 4, "shard_size": 8, "overlap": False}
    rng, spread = np.random.default_rng(1), distribution_of("lognormal", 0.06)
    own = spread.ppf(rng.random((100_000, 8)))
    gpus = distribution_of("normal", 0.06).ppf(rng.random((100_000, 8, 4)))
    speeds = gpus.max(axis=2) / gpus.max(axis=(1, 2))[:, None]
    alike, expected = own.max(axis=1).mean() - 1.0, (own * speeds).max(axis=1).mean() - 1.0

    bare, ranks = (steps(make_job(effects=x, **layout), 200) for x in ({}, unlike))
    more = steps(make_job(effects=uneven, **layout), 200) - bare
    compute = more.mean() / alike + ranks.mean() - bare.mean()
    longer = (steps(make_job(effects=unlike | uneven, **layout), 200) - ranks) / compute
    assert longer.mean() == pytest.approx(expected, rel=0.1)


def test_against_a_rank_by_rank_simulation():
    """FSDP of every rank for itself, joined in groups: what treating a group as one adds.

    A group's GPUs wait for the slowest at every unit here; in fact a prefetched gather lets them
    drift by a unit. What lasts costs nearly the same in both (-0.2 %); with calls of 1 %,
    drawn anew for every op, the step is 0.6 % longer, in one group of 32.
    """
    lasting = {"rank": {"cv": 0.01, "lemon_fraction": 0.0075}, "microbatch": {"cv": 0.02}}
    for more, most in (
        ({"call": {"cv": 0.01}, "residual": {"cv": 0.01}}, 0.012), ({}, 0.004)
    ):  # fmt: skip
        given = {"effects": lasting | more, "microbatch_size": 8}  # compute, not gathers
        lumped = steps(make_job(shard_size=32, **given), 60).mean()
        exact = steps(make_job("fsdp", **given), 60).mean()
        assert abs(lumped / exact - 1.0) < most
        assert exact > 1.04 * steps(make_job("fsdp", microbatch_size=8)).mean()


def test_congestion_of_a_shard_group_is_its_own():
    """Four groups of two nodes, each with a leaf: gathers of some are slow, sums are of all."""
    effects = {"regime": {"probability": 0.3, "factor": 3.0}}
    job = make_job(effects=effects, cluster={"leaf_nodes": 2}, shard_size=8, overlap=False)
    levels = np.unique(np.round(steps(job, 20) / steps(job, 20).min(), 5))
    # none is hit, or at least one: then all wait for a slow group's gathers, and for its sums
    assert len(levels) == 2
    hit = (steps(job, 20) > 1.001 * steps(job, 20).min()).mean()
    expected = 1 - 0.7**4
    assert abs(hit - expected) < 5 * (expected * (1 - expected) / 1280) ** 0.5


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"parallelism.shard_size": 5}, "shard_size"),
        ({"parallelism.shard_size": 4, "parallelism.data_parallel": "fsdp"}, "shard_size"),
        ({"parallelism.shard_size": 0}, "shard_size"),
        ({"variability.resolution": "kernel"}, "resolution"),
    ],
)
def test_shard_groups_that_are_refused(change, key):
    with pytest.raises(prism.PrismError, match=key):
        make_job().replace(change)
