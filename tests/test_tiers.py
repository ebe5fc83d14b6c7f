"""Tiers of links between racks and sites: latency, shared uplinks, and what order costs."""

import functools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prism

MODEL = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 2048,
}  # fmt: skip
LINKS = {
    "nvlink": {"bandwidth_gbytes_per_s": 400, "latency_us": 5, "efficiency": 1.0},
    "network": {"bandwidth_gbytes_per_s": 40, "latency_us": 20, "efficiency": 0.8},
}
MS, NEAR = 5e-3, 20e-6
HOP = MS - NEAR  # of a message between sites, beyond the network's
FAR = {"gpus": 8, "latency_us": 5000}
STAGES_FIRST = {"placement": "tp-cp-pp-dp"}  # a replica is whole in a site; else a stage is
JOB, SITE = "llama3-405b-two-sites", "cluster.tiers.site"


@functools.cache
def _job(text):
    return prism.load_job(json.loads(text))


def made(tiers=None, effects=None, parallelism=None, **cluster):
    """16 GPUs on 8 nodes: tp 2, pp 2, dp 4, one group to a node; two sites of four nodes."""
    layout = {
        "tp": 2, "pp": 2, "vpp": 2, "dp": 4, "data_parallel": "zero1", "microbatches": 4,
    } | (parallelism or {})  # fmt: skip
    block = {"nodes": 8, "gpus_per_node": 2, "leaf_nodes": 2, "tiers": tiers or {},
             "links": LINKS}  # fmt: skip
    return _job(json.dumps({
        "model": MODEL, "parallelism": layout, "cluster": block | cluster,
        "variability": {"library": "none", "host_scale": 1e-9, "effects": effects or {}},
    }))  # fmt: skip


@functools.cache
def simulated(job, n=64):
    return prism.simulate(job, replicates=n, seed=1)


def step(job):
    return float(simulated(job).step_time[0])


def times(job, n):
    return simulated(job, n).step_time.to_numpy().astype(float)


# ----------------------------------------------------------------------------------------- latency
def test_replicas_between_sites_pay_every_barrier_s_latency():
    """zero1: the norm's all-reduce (twice), parameters, and at least the last reduce-scatter.

    Nothing else changes: the uplink is as wide as the GPUs' network cards. Of both chunks' gathers
    and reductions one each is not beside compute, and the others as far as compute is shorter.
    """
    found = step(made({"site": FAR}, **STAGES_FIRST)) - step(made(**STAGES_FIRST))
    assert 4 * HOP * 0.999 <= found <= 6 * HOP * 1.001
    # the ring of a gather of parameters after the optimizer leaves its site once
    late = {"parallelism": {"framework": "megatron-2022"}}
    gather = [
        prism.summary(simulated(made(t, **late, **STAGES_FIRST)))["critical_path"]["dp_all_gather"]
        for t in ({}, {"site": FAR})
    ]
    assert gather[1] - gather[0] == pytest.approx(HOP, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "hops"),
    [
        # the first microbatch goes there, the last gradient comes back, and the norm both
        ({"vpp": 1, "microbatches": 1}, 4),
        # of two stages that meet m + 1 times
        ({"vpp": 1, "microbatches": 4, "p2p": "blocking"}, 7),
        ({"vpp": 1, "microbatches": 8, "p2p": "blocking"}, 11),
    ],
)
def test_a_pipeline_over_two_sites_fills_over_the_distance(layout, hops):
    found = step(made({"site": FAR}, parallelism=layout)) - step(made(parallelism=layout))
    assert found == pytest.approx(hops * HOP, rel=1e-3)


@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
@pytest.mark.parametrize("km", [200, 1000])
def test_a_distance_is_a_latency_of_5_us_a_kilometre(order, km):
    fibre = made({"site": {"gpus": 8, "distance_km": km}}, placement=order)
    stated = made({"site": {"gpus": 8, "latency_us": 20 + 5 * km}}, placement=order)
    assert step(fibre) == pytest.approx(step(stated), rel=1e-6)
    assert step(fibre) > step(made(placement=order)) + 2 * 5e-6 * km


def test_sites_outside_zones_add_up_their_latencies():
    """From site to site a message takes the site's latency, not both; a zone's hop its own."""
    zone = {"gpus": 4, "latency_us": 1000}
    both, sites, zones = (
        step(made(t, **STAGES_FIRST))
        for t in ({"zone": zone, "site": FAR}, {"site": FAR}, {"zone": zone})
    )
    near = step(made(**STAGES_FIRST))
    # of 3 steps of a ring between 4 zones one is between the sites
    assert zones - near > 0.0 and sites < both < sites + zones - near


# --------------------------------------------------------------------------------------- bandwidth
def slope(collectives, tiers=None, low=64.0, high=128.0, **cluster):
    """Seconds that the step grows by for each time narrower that the uplink is."""
    ends = []
    for over in (low, high):
        site = {"gpus": 8, "oversubscription": over, "collectives": collectives}
        ends.append(step(made({"site": site, **(tiers or {})}, **STAGES_FIRST, **cluster)))
    return (ends[1] - ends[0]) / (high - low)


def test_what_leaves_a_site_shares_its_uplink():
    """Each of two rings of four sends 3/4 of all over every edge; hierarchical 1/2 of it."""
    ring, hierarchical = slope("ring"), slope("hierarchical")
    assert ring > 0.0
    assert hierarchical / ring == pytest.approx((1 / 2) / (3 / 4), rel=1e-3)
    # replicas 0 2 in one site, 1 3 in the other: a ring leaves its site twice as often
    mixed = {"hosts": [0, 1, 4, 5, 2, 3, 6, 7]}
    assert slope("ring", **mixed) == pytest.approx(2 * ring, rel=1e-3)
    assert slope("hierarchical", **mixed) == pytest.approx(hierarchical, rel=1e-3)
    # of several tiers the narrowest counts
    wide = {"zone": {"gpus": 4, "oversubscription": 2.0, "collectives": "ring"}}
    assert slope("ring", wide) == pytest.approx(ring, rel=1e-6)


def test_an_uplink_is_said_in_three_ways():
    """8 GPUs of 40 GB/s are 2,560 Gbit/s, of which 80 are 32 times less, or 1.25 GB/s for each."""
    ways = {"oversubscription": 32}, {"total_gbits_per_s": 80}, {"bandwidth_gbytes_per_s": 1.25}
    found = [step(made({"site": {"gpus": 8, **way}}, **STAGES_FIRST)) for way in ways]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    half = {"gpus": 8, "total_gbits_per_s": 80, "efficiency": 0.4}  # of which the network has 0.8
    narrower = step(made({"site": {"gpus": 8, "oversubscription": 64}}, **STAGES_FIRST))
    assert step(made({"site": half}, **STAGES_FIRST)) == pytest.approx(narrower, rel=1e-6)
    pod = {"pod_gpus": 8, "oversubscription": 32.0}
    assert step(made(**STAGES_FIRST, **pod)) == pytest.approx(found[0], rel=1e-6)


def test_transfers_queue_for_a_narrow_uplink():
    """With m microbatches the last one's forward arrives m times the time of one through it."""
    m = 8
    layout = {"vpp": 1, "microbatches": m, "schedule": "gpipe"}
    site = {"gpus": 8, "distance_km": 0.2, "total_gbits_per_s": 0.5}
    # bfloat16 activations of a tp rank, by 8 senders at a time
    wire = 2 * 2048 * 1024 / 2 / (0.5e9 / 8 * 0.8 / 8)
    assert 2 * m * wire < step(made({"site": site}, parallelism=layout)) < (2 * m + 1) * wire


def test_tiers_as_wide_and_as_near_as_the_network_change_no_bit():
    same = {"pod": {"gpus": 4}, "site": {"gpus": 8, "latency_us": 20, "oversubscription": 1}}
    for order in ("megatron", "tp-cp-pp-dp"):
        jobs = (made(t, {"rank": {"cv": 0.02}}, placement=order) for t in ({}, same))
        assert np.array_equal(*(times(job, 128) for job in jobs))


@settings(max_examples=8)
@given(
    over=st.floats(1.0, 1e3), more=st.floats(1.0, 50.0), latency=st.floats(20.0, 1e4),
    farther=st.floats(0.0, 1e4), order=st.sampled_from(["megatron", "tp-cp-pp-dp"]),
    collectives=st.sampled_from(["ring", "hierarchical"]),
)  # fmt: skip
def test_narrower_and_farther_is_never_faster(over, more, latency, farther, order, collectives):
    def at(over, latency, collectives=collectives):
        site = {"gpus": 8, "oversubscription": over, "latency_us": latency,
                "collectives": collectives}  # fmt: skip
        return step(made({"site": site}, placement=order))

    base, exact = at(over, latency), 1.0 + 1e-6
    assert base <= at(over * more, latency) * exact
    assert base <= at(over, latency + farther) * exact
    assert at(over, latency, "hierarchical") <= at(over, latency, "ring") * exact


# --------------------------------------------------------------------------------------- placement
def test_nodes_exchanged_between_sites_make_hops_longer():
    def at(hosts):
        return step(made({"site": FAR}, **STAGES_FIRST, hosts=hosts))

    plain = at(list(range(8)))
    assert at([1, 0, *range(2, 8)]) == plain
    assert at([4, 1, 2, 3, 0, 5, 6, 7]) > plain + 4 * MS


def test_an_answer_counts_what_goes_between_sites():
    job = made({"site": {"gpus": 8, "distance_km": 1000}}, {"rank": {"cv": 0.01}}, **STAGES_FIRST)
    slow = {0: prism.slow_node(1.3), 5: prism.slow_node(1.3)}
    found = prism.summary(prism.place(job, nodes=slow, seed=5, threads=2))
    rows = {row["name"]: row for row in found["placements"]}
    assert rows["current"]["moved_between"] == {}
    assert found["best"] != "worst" and rows[found["best"]]["moved_between"] == {}
    assert rows["worst"]["moved_between"].get("site", 0) % 2 == 0
    assert rows["worst"]["saved"] < 0.0  # its hops go 1,000 km


# ------------------------------------------------------------------------------- what varies there
def test_spread_of_a_tier():
    wild, still = (times(made({"site": FAR | cv}, **STAGES_FIRST), 640) for cv in ({"cv": 0.5}, {}))
    assert still.std() < 1e-6 * still.mean()
    # the norm's all-reduce, gradients and parameters, each a draw of its own
    least = 0.5 * 2 * MS / still.mean()
    assert least < wild.std() / still.mean() < 3 * least
    assert math.isclose(wild.mean(), still.mean(), rel_tol=0.2)


@pytest.mark.parametrize(
    ("order", "leaf_nodes", "hit"),
    [
        ("tp-cp-pp-dp", 8, 0.75),  # one leaf and the sites' link
        ("tp-cp-pp-dp", 4, 0.875),  # two leaves and the sites' link
    ],
)
def test_a_congested_site_slows_every_crossing_message(order, leaf_nodes, hit):
    regime = {"regime": {"probability": 0.5, "factor": 3.0}}
    site = {"site": {"gpus": 8, "latency_us": 50000}}
    x = times(made(site, regime, placement=order, leaf_nodes=leaf_nodes), 2560)
    low, high = np.quantile(x, [0.01, 0.99])
    slow = (x > 0.5 * (low + high)).mean()
    assert slow == pytest.approx(hit, abs=5 * math.sqrt(hit * (1 - hit) / 2560))
    assert np.all((x < 1.02 * low) | (x > 0.98 * high))  # all messages at once


# --------------------------------------------------------------------------- seldom, or beside
SYNC = {"gpus": 8, "latency_us": 5000, "total_gbits_per_s": 2.0}
LAYOUTS = [{"data_parallel": "zero1"}, {"data_parallel": "fsdp"},
           {"pp": 1, "vpp": 1, "dp": 8, "data_parallel": "hsdp", "shard_size": 2}]  # fmt: skip


def apart(every, beside=0, parallelism=None, effects=None, **site):
    """Two sites that exchange parameters every so many steps, or beside as many of them."""
    tier = SYNC | {"sync_every": every, "sync_overlap": beside} | site
    return made({"site": tier}, effects, parallelism, **STAGES_FIRST)


def exchange_s(parts=1):
    """Two ranks, one in each site, average a quarter of the weights of the larger stage in fp32."""
    layer = 4 * 1024**2 + 3 * 1024 * 2816
    weights = (4 * layer + 8000 * 1024) / 2 + (4 * 2 + 1) * 1024  # of a tp rank, norms whole
    n_bytes = 4 * weights / 2 / parts
    return n_bytes / (2e9 / 8 * 0.8 / 8) + 2 * MS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sites_that_never_exchange_are_sites_alone(layout):
    alone = layout | {"dp": layout.get("dp", 4) // 2}
    one = made(parallelism=alone, nodes=4, **STAGES_FIRST)
    two = apart(10**9, parallelism=layout)
    assert step(two) == pytest.approx(step(one), rel=1e-6)
    assert prism.memory(two)["gib"] == pytest.approx(prism.memory(one)["gib"])


def test_what_stays_in_a_site_does_not_meet_the_sites_congestion():
    regime, n = {"regime": {"probability": 0.5, "factor": 3.0}}, 2560
    site = {"site": SYNC | {"sync_every": 10**9}}
    x = times(made(site, regime, leaf_nodes=8, **STAGES_FIRST), n)  # one leaf
    slow = (x > 0.5 * (x.min() + x.max())).mean()
    assert slow == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / n))


@pytest.mark.parametrize("every", [2, 5, 500, 3000])
def test_an_exchange_is_one_step_of_so_many(every):
    n = 64 * 200
    x, alone = times(apart(every), n), step(apart(10**9))
    long = x > alone + 0.5 * exchange_s()
    assert long.sum() == pytest.approx(n / every, abs=4 * math.sqrt(n / every))
    assert x[~long] == pytest.approx(alone, rel=1e-5)
    assert x[long] - alone == pytest.approx(exchange_s(), rel=0.01)
    ideal = prism.summary(simulated(apart(every), n))["ideal_step_time"]
    assert ideal - alone == pytest.approx(exchange_s() / every, rel=0.01)


def test_every_step_s_exchange_is_the_job_as_it_was():
    varied = {"rank": {"cv": 0.02}, "residual": {"cv": 0.1}}
    jobs = apart(1, effects=varied), made({"site": SYNC}, varied, **STAGES_FIRST)
    assert np.array_equal(*(times(job, 128) for job in jobs))


@pytest.mark.parametrize("every", [1, 3, 50])
def test_beside_steps_an_exchange_shows_as_far_as_it_is_longer(every):
    n = 64 * 40
    alone = step(apart(10**9))
    for gbits in (0.01, 2.0, 100.0):
        x = [times(apart(every, d, total_gbits_per_s=gbits), n) for d in (1, every)]
        wire = (exchange_s() - 2 * MS) * 2.0 / gbits
        whole, part = max(alone, wire + 2 * MS), max(alone, wire / every + 2 * MS)
        assert x[0].max() == pytest.approx(whole, rel=0.01)
        assert x[0].min() == pytest.approx(alone if every > 1 else whole, rel=0.01)
        assert x[1] == pytest.approx(part, rel=0.01)
        if every > 1:  # in the same steps as when it comes after them
            after = times(apart(every, 0, total_gbits_per_s=gbits), n)
            assert np.all(x[0] <= after * (1 + 1e-6)) and x[1].mean() <= after.mean() * 1.02


def test_what_an_exchange_takes_varies_and_is_told(run):
    x = times(apart(20, cv=0.3), 64 * 400)
    extra = x[x > 1.02 * x.min()] - x.min()
    assert extra.mean() == pytest.approx(exchange_s(), rel=0.05)
    assert extra.std() / extra.mean() == pytest.approx(0.3, rel=0.1)
    causes = prism.rank(apart(20), seed=1).causes
    cause = causes.loc["dp_sync_all_reduce"]
    assert cause["total_order"] == pytest.approx(1.0, abs=0.05)
    assert cause["std_reduction"] == pytest.approx(1.0, abs=0.05)


# ------------------------------------------------------------------------------ what a job may say
def test_keys_are_set_and_taken_away_one_by_one():
    assert prism.load_job(JOB, [f"{SITE}="]).cluster.tiers == {}
    assert prism.load_job(JOB, ["cluster.tiers="]).cluster.tiers == {}
    changed = prism.load_job(JOB, [f"{SITE}.distance_km=10"]).cluster.tiers["site"]
    assert (changed.distance_km, changed.total_gbits_per_s, changed.gpus) == (10, 25600, 8192)


def test_show_lists_the_links_from_the_inside(run):
    rack = "cluster.tiers.rack={gpus: 64, latency_us: 17}"
    status, out, _ = run("show", JOB, "--set", rack, "--json")
    links = json.loads(out)["links"]
    assert status == 0
    assert [link["tier"] for link in links] == ["nvlink", "network", "rack", "pod", "site"]
    site, pod = links[-1], links[-2]
    assert (site["gpus"], pod["gpus"]) == (8192, 4096)
    assert (site["latency_us"], pod["latency_us"]) == pytest.approx((5017, 17))
    assert [link["collectives"] for link in links[2:]] == ["hierarchical", "ring", "hierarchical"]
    # of 400 Gbit/s cards at the library's share
    share = prism.load_library("h100-healthy").value("nominal/network_efficiency")
    assert site["gbytes_per_s_per_gpu"] == pytest.approx(25600 / 8 / 8192 * share)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ([f"{SITE}.gpus=8000"], "site.gpus: 8000"),
        (["cluster.tiers.zone={gpus: 8192}"], "zone.gpus"),
        (["cluster.tiers.rack={gpus: 4}"], "rack.gpus"),
        (["cluster.tiers.rack={gpus: 4096}"], "rack"),
        ([f"{SITE}={{gpus: 8192, latency_us: 5000, distance_km: 9}}"], "distance_km"),
        (
            [f"{SITE}={{gpus: 8192, oversubscription: 2, total_gbits_per_s: 9}}"],
            "total_gbits_per_s",
        ),
        (["cluster.tiers.pod={gpus: 64}"], "cluster.pod_gpus"),
        (["cluster.tiers.network={gpus: 64}"], "network"),
        ([f"{SITE}.total_gbits_per_s=", f"{SITE}.efficiency=0.5"], "efficiency"),
        (["cluster.tiers.zone={distance_km: 5}"], "cluster.tiers.zone.gpus"),
        ([f"{SITE}.lattency_us=5"], "latency_us"),
        ([f"{SITE}.collectives=tree"], "collectives"),
        ([f"{SITE}.total_gbits_per_s=0"], "total_gbits_per_s"),
        (
            ["cluster.tiers.rack={gpus: 64, latency_us: 50}",
             "cluster.tiers.zone={gpus: 16384, latency_us: 40}"],
            "zone.latency_us",
        ),
        ([f"{SITE}.sync_every=0"], "sync_every"),
        ([f"{SITE}.sync_overlap=2"], "sync_overlap"),
        ([f"{SITE}.sync_every=8", "cluster.placement=megatron"], "sync_every"),
        (["cluster.tiers.zone={gpus: 16, sync_every: 8}"], "zone.gpus"),
        ([f"{SITE}.sync_every=8", "cluster.tiers.zone={gpus: 16384, sync_every: 2}"], "sync_every"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_their_key(changes, key):
    with pytest.raises(prism.PrismError, match=key) as caught:
        prism.load_job(JOB, changes)
    assert len(str(caught.value).splitlines()) == 1


def test_tiers_that_cannot_be_are_refused():
    with pytest.raises(prism.PrismError, match=r"latency_us: 2\b"):
        step(made({"site": {"gpus": 8, "latency_us": 2}}))
    with pytest.raises(prism.PrismError, match="cluster.tiers"):
        prism.load_job({
            "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
            "parallelism": {"pp": 2, "microbatches": 4},
            "cluster": {"tiers": {"site": {"gpus": 8}}},
        })  # fmt: skip
