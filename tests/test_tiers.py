"""Link tiers: closed forms, what tiers change and what they must not, and what never may happen."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from touched import touched

from prism import load_job, load_library
from prism.cluster.devices import DEVICES
from prism.cluster.groups import Layout
from prism.cluster.linkcongestion import congested_links
from prism.cluster.linktiers import Tier
from prism.cluster.machine import Cluster, Link, build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.engine import DRAW
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
from prism.workload.build import build_workload

NVLINK, NETWORK = Link(400e9, 5e-6), Link(40e9, 20e-6)
LIBRARY = load_library("h100-healthy")
S, MS = 1e9, 5e-3
MODEL = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 2048,
}  # fmt: skip
STILL = {"rank": {"cv": 0.0}, "residual": {"cv": 0.0}}
GROUPS = ("tp", "cp", "dp_cp", "embedding", "world")
ONE_WAY = {"gpus": 8, "latency_us": 5000, "total_gbits_per_s": 320.0}


def make_cluster(*tiers, tp=8, cp=1, dp=16, pp=1, **other):
    stage, replica = tp * cp * dp, tp * cp
    layout = Layout(tp, cp, dp, pp, stage, replica)
    return Cluster(DEVICES["h100"], NVLINK, NETWORK, 8, layout, tiers=tiers, **other)


def tier(gpus, over=1.0, latency_s=NETWORK.latency_s, hierarchical=False):
    far = latency_s > NETWORK.latency_s
    return Tier(f"t{gpus}", gpus, over, latency_s, hierarchical, far)


def gather(cluster, n_bytes=S, name="dp_cp"):
    return cluster.collective_time("all_gather", n_bytes, cluster.group(name))


def make_job(tiers=None, effects=None, parallelism=None, **cluster):
    """16 GPUs on 8 nodes: tp 2, pp 2, dp 4, one group to a node."""
    layout = {
        "tp": 2, "pp": 2, "vpp": 2, "dp": 4, "data_parallel": "zero1", "microbatches": 4,
    } | (parallelism or {})  # fmt: skip
    block = {"nodes": 8, "gpus_per_node": 2, "leaf_nodes": 2, "tiers": tiers or {}} | cluster
    effects = STILL if effects is None else effects
    return load_job(
        {
            "model": MODEL,
            "parallelism": layout,
            "cluster": block,
            "variability": {"library": None, "effects": effects},
        }
    )


def step_time(job):
    return float(run_blocks(prepare(job, 1).program, range(1), 1)[0][0, 0])


# ------------------------------------------------------------------------------- closed forms
def test_pods_are_a_tier():
    old = load_job("llama3-405b-16k")
    pod = "cluster.tiers.pod={gpus: 3072, oversubscription: 7}"
    no_pods = ["cluster.pod_gpus=", "cluster.oversubscription=1"]
    new = load_job("llama3-405b-16k", [*no_pods, pod])
    assert build_cluster(new, LIBRARY) == build_cluster(old, LIBRARY)
    assert build_workload(new, LIBRARY) == build_workload(old, LIBRARY)
    # as published before tiers: 128 replicas, 24 in a pod, so 7 / 24 < 1 slows nothing
    cluster = build_cluster(old, LIBRARY)
    expected = 8.4e-6 + 127 * 14e-6 + S * 127 / 128 / cluster.network.bytes_per_s
    assert gather(cluster) == pytest.approx(expected, rel=1e-12)


def test_latency_alone():
    """Two sites of 8 replicas: of a ring's 15 steps one goes between the sites."""
    cluster = make_cluster(tier(64, 1.0, MS, True))
    plain, between = make_cluster(), gather(cluster)
    assert between - gather(plain) == pytest.approx(MS - NETWORK.latency_s, rel=1e-9)
    farther, hop = MS - NETWORK.latency_s, NETWORK.latency_s
    ring = 6.6e-6 + 15 * hop * 2.7 / 14 + farther  # NCCL's protocol LL
    assert gather(cluster, 1e-3) == pytest.approx(ring, rel=1e-6)
    nested = make_cluster(tier(32, 1.0, 1e-3, True), tier(64, 1.0, MS, True))
    # 4 replicas in a zone, 4 zones, 2 sites: of the levels of a tree, or of PAT, two leave a zone
    # and one a site
    levels = 2 * (1e-3 - hop) + MS - 1e-3
    pat = 8e-6 + hop * (4 / 3.5 + 16 * 2.8 / 14) + levels
    assert gather(nested, 1e-3) == pytest.approx(pat, rel=1e-6)
    tree = 6.8e-6 + 2 * (4 * hop * 5 / 14 + levels)
    group = nested.group("dp_cp")
    assert nested.collective_time("all_reduce", 1e-3, group) == pytest.approx(tree)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_bandwidth_alone(hierarchical):
    """Eight groups of 16, 8 members a site of 64 GPUs, whose way out is 32 times narrower.

    Hierarchical, each site sends half of S for every group; a ring sends 15/16 of it.
    """
    cluster = replace(
        make_cluster(tier(64, 32.0, 0.0, hierarchical)),
        nvlink=Link(400e9, 0.0), network=Link(40e9, 0.0),
    )  # fmt: skip
    way_out = 64 * 40e9 / 32.0
    share = 1 / 2 if hierarchical else 15 / 16
    assert gather(cluster) == pytest.approx(8.4e-6 + 8 * S * share / way_out, rel=1e-12)
    # of several tiers the narrowest counts, each by what leaves its units
    both = replace(cluster, tiers=(tier(32, 100.0, 0.0, hierarchical), *cluster.tiers))
    zone = 8 * S * (3 / 4 if hierarchical else 15 / 16) / (32 * 40e9 / 100.0)
    assert gather(both) == pytest.approx(8.4e-6 + zone, rel=1e-12)


def test_one_group_of_neighbours_shares_the_way_out_with_itself():
    """fsdp over 128 GPUs in two sites: eight parallel rings leave a site, not one."""
    cluster = make_cluster(tier(64, 32.0, 0.0), tp=1, dp=128)
    free = replace(cluster, tiers=())
    assert gather(cluster) > 3.0 * gather(free)
    way_out = 64 * 40e9 / 32.0
    wire = S * 15 / 16 / way_out
    latency = 8.4e-6 + 112 * NVLINK.latency_s + 15 * NETWORK.latency_s - NETWORK.latency_s
    assert gather(cluster) == pytest.approx(latency + wire)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), dp=st.integers(1, 24),
    tp=st.sampled_from([1, 2, 8]), hierarchical=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_tiers_as_wide_and_as_near_as_the_network_change_nothing(sizes, dp, tp, hierarchical):
    gpus = np.cumprod([8, *sizes])[1:].tolist()
    tiers = [tier(n, 1.0, NETWORK.latency_s, hierarchical) for n in gpus]
    with_tiers, without = make_cluster(*tiers, tp=tp, dp=dp), make_cluster(tp=tp, dp=dp)
    for name in GROUPS:
        assert gather(with_tiers, name=name) == gather(without, name=name)
    assert with_tiers.transfer_time(S) == without.transfer_time(S)


def test_such_tiers_change_no_bit_of_a_job():
    latency = build_cluster(make_job(), LIBRARY).network.latency_s * 1e6
    same = {"pod": {"gpus": 4}, "site": {"gpus": 8, "latency_us": latency, "oversubscription": 1}}
    ends = [run_blocks(prepare(make_job(t), 1).program, range(1), 1)[0] for t in ({}, same)]
    assert np.array_equal(*ends)


@given(
    over=st.floats(0.5, 1e4), more=st.floats(1.0, 50.0), latency=st.floats(20e-6, 1e-2),
    farther=st.floats(0.0, 1e-2), dp=st.integers(2, 24), tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]), n_bytes=st.floats(1.0, 1e10),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_narrower_and_farther_is_never_faster(over, more, latency, farther, dp, tp, pp, n_bytes):
    def times(o, a, hierarchical=True, inner=1.0):
        tiers = tier(16, inner, 20e-6), tier(64, o, a, hierarchical)
        cluster = make_cluster(*tiers, tp=tp, dp=dp, pp=pp)
        found = [gather(cluster, n_bytes, name) for name in GROUPS]
        links = [None, *cluster.far_links()]
        return np.array([*found, *(cluster.transfer_time(n_bytes, x) for x in links[:1])])

    base, exact = times(over, latency), 1.0 + 1e-12
    assert np.all(base <= times(over * more, latency) * exact)
    assert np.all(base[:-1] <= times(over, latency + farther)[:-1] * exact)
    assert np.all(base <= times(over, latency, inner=more) * exact)
    ring = times(over, latency, hierarchical=False)
    assert np.all(base <= ring * exact)  # hierarchical is never slower than a ring


# -------------------------------------------------------------------------------- in any order
@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
@pytest.mark.parametrize("collectives", ["ring", "hierarchical"])
@pytest.mark.parametrize("inner", [{}, {"zone": {"gpus": 4, "oversubscription": 3.0}}])
def test_the_default_order_is_as_the_cluster_says(order, collectives, inner):
    tiers = {**inner, "site": ONE_WAY | {"collectives": collectives}}
    job = make_job(tiers, placement=order)
    cluster = build_cluster(job, LIBRARY)
    wiring = Wiring(cluster, Placement(job))
    for name in ("dp_cp", "embedding"):
        reach = wiring._rings_reach(name).distinct[0]
        assert reach == pytest.approx(cluster.reach(cluster.group(name)))
        assert wiring.seconds(name, S).max() == pytest.approx(gather(cluster, S, name))
    far = cluster.far_links()
    assert far == ([0, 1] if order == "megatron" else [])
    for link in range(2):
        expected = cluster.transfer_time(S, link)
        assert wiring.seconds("hop", S, link) == pytest.approx([expected] * 4)


def test_a_bad_order_costs_a_ring_more_and_hierarchical_collectives_not():
    """Replicas 0 2 in one site, 1 3 in the other: a ring leaves its site twice as often."""
    mixed = [0, 1, 4, 5, 2, 3, 6, 7]  # a replica has two nodes, a site four
    for collectives, slower in (("ring", 2.0), ("hierarchical", 1.0)):
        site = ONE_WAY | {"latency_us": 16, "collectives": collectives}
        job = make_job({"site": site}, placement="tp-cp-pp-dp")
        cluster = build_cluster(job, LIBRARY)
        wirings = (Wiring(cluster, Placement(job, h)) for h in (range(8), mixed))
        good, bad = ({ring.factor for ring in w._rings_reach("dp_cp").distinct} for w in wirings)
        assert len(good) == len(bad) == 1 and max(bad) == pytest.approx(slower * max(good))


def test_nodes_exchanged_between_sites_make_hops_longer():
    job = make_job({"site": ONE_WAY}, placement="tp-cp-pp-dp")
    step = prepare(job, 1)
    times = run_blocks(step.program, range(1), 1)[0][0, 0]
    within = run_blocks(relocate(step, [1, 0, *range(2, 8)], {}), range(1), 1)[0][0, 0]
    between = run_blocks(relocate(step, [4, 1, 2, 3, 0, 5, 6, 7], {}), range(1), 1)[0][0, 0]
    assert within == times and between > times + 4 * MS


# ------------------------------------------------------------------------------ the whole step
def test_replicas_between_sites_pay_every_barrier_s_latency():
    """zero1: gradients, the norm's all-reduce (twice), parameters: four messages, one after each.

    Nothing else changes: the way out is as wide as the GPUs' network cards.
    """
    near = make_job(placement="tp-cp-pp-dp")
    far = make_job({"site": {"gpus": 8, "latency_us": 5000}}, placement="tp-cp-pp-dp")
    hop = MS - build_cluster(near, LIBRARY).network.latency_s
    found = step_time(far) - step_time(near)
    work = build_workload(far, LIBRARY)
    messages = 2 + 1 + 1  # all-reduce of the norm, gather, and at least the last reduce-scatter
    assert found >= messages * hop * 0.999
    assert found <= (messages + len(work.reduces[0])) * hop * 1.001


def test_a_pipeline_over_two_sites_fills_over_the_distance():
    """1F1B of two stages: the first microbatch goes there, the last gradient comes back."""
    one = {"vpp": 1, "microbatches": 1, "data_parallel": "zero1"}
    near = make_job(parallelism=one)
    far = make_job({"site": {"gpus": 8, "latency_us": 5000}}, parallelism=one)
    hop = MS - build_cluster(near, LIBRARY).network.latency_s
    norm = 2 * hop  # the norm's all-reduce is over all ranks
    assert step_time(far) - step_time(near) == pytest.approx(2 * hop + norm, rel=1e-3)


def test_transfers_queue_for_a_narrow_way_out():
    """With m microbatches the last one's forward arrives m times the time of one through it."""
    site = {"gpus": 8, "distance_km": 0.2, "total_gbits_per_s": 0.5}
    m, one = 8, {"vpp": 1, "microbatches": 8, "schedule": "gpipe"}
    job = make_job({"site": site}, parallelism=one)
    wire, way = build_workload(job, LIBRARY).far_transfers[0]
    assert way.duration == pytest.approx(build_cluster(job, LIBRARY).network.latency_s + 1e-6)
    senders, efficiency = 8, LIBRARY.value("nominal/network_efficiency")
    rate = 0.5e9 / 8 * efficiency / senders
    assert wire.duration == pytest.approx(wire.bytes / rate, rel=1e-9)
    forward = sum(k.duration for k in build_workload(job, LIBRARY).chunks[0][0].forward)
    assert wire.duration > 20 * forward  # so that the way out is always busy
    assert step_time(job) > 2 * m * wire.duration
    assert step_time(job) < (2 * m + 1) * wire.duration
    steps = prepare(job, 1).graph
    sent = [t.collective == wire for t in steps.op_types]
    drawn = steps.op_type[steps.kind == DRAW]
    assert sum(bool(sent[t]) for t in drawn) == 2 * m


def test_a_looped_pipeline_s_gradients_share_the_way_out():
    """Two chunks: stage 1 sends back to 0, so that its gradients come along in the steady part.

    Of 2 x 4 forwards 2 x 2 - 1 are warm-up; with as many microbatches as stages, 3 of 4.
    """
    site = {"gpus": 8, "distance_km": 100, "total_gbits_per_s": 1.0}

    def wire(vpp, m):
        job = make_job({"site": site}, parallelism={"vpp": vpp, "microbatches": m})
        far = build_workload(job, LIBRARY).far_transfers
        return sorted(far), far[0][0].duration

    alone, seconds = wire(1, 4)
    assert alone == [0]
    for m, share in ((4, 5 / 8), (2, 1 / 4)):
        links, shared = wire(2, m)
        assert links == [0, 1]
        assert shared == pytest.approx((1 + share) * seconds)


def test_sites_in_the_middle_send_activations_and_gradients_out():
    """One chunk: of m forwards (p - 1) / 2 are warm-up in the mean over stages, in GPipe all."""
    site = {"gpus": 4, "distance_km": 100, "total_gbits_per_s": 1.0}

    def wire(schedule):
        layout = {"pp": 4, "dp": 2, "vpp": 1, "microbatches": 8, "schedule": schedule}
        far = build_workload(make_job({"site": site}, parallelism=layout), LIBRARY).far_transfers
        assert sorted(far) == [0, 1, 2]
        return far[1][0].duration

    assert wire("1f1b") == pytest.approx((1 + (8 - 1.5) / 8) * wire("gpipe"))


def test_blocking_transfers_take_both_parts():
    """1F1B of two stages meets m + 1 times, and the norm's all-reduce goes there and back."""
    site, m = {"site": {"gpus": 8, "latency_us": 5000}}, 4
    one = {"vpp": 1, "microbatches": m, "p2p": "blocking"}
    found = [step_time(make_job(t, parallelism=one)) for t in ({}, site)]
    hop = MS - build_cluster(make_job(), LIBRARY).network.latency_s
    assert found[1] - found[0] == pytest.approx((m + 1 + 2) * hop, rel=1e-4)


def test_spread_of_a_tier():
    tiers = {"site": {"gpus": 8, "latency_us": 5000, "cv": 0.5}}
    job = make_job(tiers, effects={"rank": {"cv": 0.0}}, placement="tp-cp-pp-dp")
    calm = make_job({"site": {"gpus": 8, "latency_us": 5000}}, {"rank": {"cv": 0.0}},
                    placement="tp-cp-pp-dp")  # fmt: skip
    wild, still = (run_blocks(prepare(j, 1).program, range(8), 1)[0] for j in (job, calm))
    assert still.std() < 1e-6 * still.mean()
    # the norm's all-reduce, gradients and parameters, each a draw of its own
    least = 0.5 * 2 * MS / still.mean()
    assert least < wild.std() / still.mean() < 3 * least
    assert math.isclose(wild.mean(), still.mean(), rel_tol=0.2)


def test_what_crosses_between_sites_is_hit_together():
    def crossing(**order):
        """Links that touch what joins the sites; without it they touch the same leaves."""
        sites, plain = (Placement(make_job(t, **order)) for t in ({"site": ONE_WAY}, {}))
        a, b = congested_links(sites, 2), congested_links(plain, 2)
        assert a.n_entities == b.n_entities + 1 == sites.n_leaves + 1
        links = [touched(a, link) for link in range(6)]
        assert [x - {sites.n_leaves} for x in links] == [touched(b, link) for link in range(6)]
        return [sites.n_leaves in x for x in links]

    # hops, dp, world, ends
    assert crossing(placement="tp-cp-pp-dp") == [False, False, True, True, True, False]
    # Megatron's order: stages in a site each
    assert crossing() == [True, True, False, False, True, True]


def test_a_congested_site_slows_every_crossing_message():
    regime = {"rank": {"cv": 0.0}, "residual": {"cv": 0.0}}
    regime["regime"] = {"probability": 0.5, "factor": 3.0}
    site = {"site": {"gpus": 8, "latency_us": 50000}}
    job = make_job(site, regime, placement="tp-cp-pp-dp", leaf_nodes=8)
    times = run_blocks(prepare(job, 1).program, range(40), 1)[0]
    low, high = np.quantile(times, [0.01, 0.99])
    # one leaf and the sites' link are hit by halves: 3 of 4 steps are slow, all messages at once
    slow = (times > 0.5 * (low + high)).mean()
    assert slow == pytest.approx(0.75, abs=5 * math.sqrt(0.75 * 0.25 / 2560))
    assert np.all((times < 1.02 * low) | (times > 0.98 * high))
