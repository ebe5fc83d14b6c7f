"""Wiring: what messages take where pods are oversubscribed or NVLink joins several nodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import make_job, times

from prism.cluster.groups import shard_size
from prism.cluster.linktiers import Reach
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.distributions.library import load_library
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare
from prism.workload.build import build_workload

LIBRARY = load_library("h100-healthy")
GROUPS = ("tp", "cp", "dp_cp", "embedding", "world")


def count_ranks(order, tp, cp, dp, pp):
    """Rank of every (stage, dp rank, cp rank, tp rank), counted one by one, the first axis fastest.

    Apart from all that prism knows of strides.
    """
    outer, inner = ("pp", "dp") if order == "megatron" else ("dp", "pp")
    size, rank, found = {"dp": dp, "pp": pp}, 0, {}
    for i in range(size[outer]):
        for j in range(size[inner]):
            at = {outer: i, inner: j}
            for c in range(cp):
                for t in range(tp):
                    found[at["pp"], at["dp"], c, t] = rank
                    rank += 1
    return found


def wire(job, hosts=None):
    placement = Placement(job, np.arange(8) if hosts is None else hosts)
    return Wiring(build_cluster(job, LIBRARY), placement)


def tier_factors(wiring, group):
    """How many times slower each ring of a kind is for the units it leaves."""
    reach = wiring._rings(group)
    return np.array([each.factor for each in reach.distinct])[reach.kind].ravel()


def test_hop_out_of_a_pod_by_hand():
    """One hop each way between pods of 8 GPUs: 2 tp ranks send, so 8 x 2 / 8 = 2 times slower."""
    job = make_job(
        pod_gpus=8, oversubscription=8.0, parallelism={"vpp": 1}, placement="tp-cp-pp-dp"
    )
    moved = wire(job, [0, 4, 2, 3, 5, 1, 6, 7])  # replica 0: node 0 to 4, replica 2: 5 to 1
    c = moved.cluster
    hop = c.network.latency_s + 2.0 * 1e9 / c.network.bytes_per_s
    near = c.network.latency_s + 1e9 / c.network.bytes_per_s
    assert moved.seconds("hop", 1e9, 0) == pytest.approx([hop, near, hop, near])


def test_wide_nvlink_domains():
    """Domains of two nodes: a ring has as many cards as members per domain in the mean."""
    job = make_job(nvlink_domain_gpus=4)
    cluster = build_cluster(job, LIBRARY)
    assert wire(job).seconds("dp_cp", 1e9) == pytest.approx(
        cluster.collective_time("all_gather", 1e9, cluster.group("dp_cp"))
    )
    apart = wire(job, [0, 2, 4, 6, 1, 3, 5, 7])  # the replicas of a stage in four domains
    alone = cluster.message_time("all_gather", 1e9, 4, Reach(4))
    assert apart.seconds("dp_cp", 1e9, 0) == pytest.approx(alone)
    torn = wire(job, [0, 1, 2, 4, 3, 5, 6, 7])  # of each stage's, 2 + 1 + 1 in three domains
    between = cluster.message_time("all_gather", 1e9, 4, Reach(3))
    assert torn.seconds("dp_cp", 1e9, 0) == pytest.approx(between)
    assert float(wire(job).seconds("dp_cp", 1e9)[0]) < between < alone
    assert alone > 1.9 * float(wire(job).seconds("dp_cp", 1e9)[0])
    step = prepare(job, 1)
    swapped = relocate(step, [1, 0, *range(2, 8)], {})
    assert np.array_equal(times(swapped), times(step.program))
    assert times(relocate(step, [0, 2, 4, 6, 1, 3, 5, 7], {}))[0, 0] > times(step.program)[0, 0]


@given(
    layout=st.sampled_from([(2, 1, 4, 2), (1, 2, 4, 2), (2, 2, 2, 2), (1, 1, 8, 2), (1, 4, 1, 4)]),
    order=st.sampled_from(["megatron", "tp-cp-pp-dp"]),
    domain=st.sampled_from([2, 4, 6, 10, 14, 16]),
)
@settings(deadline=None)
def test_torn_groups_of_the_default_order_are_as_the_cluster_says(layout, order, domain):
    """Also where groups do not tile the NVLink domains: the most domains that a ring touches."""
    sizes = dict(zip(("tp", "cp", "dp", "pp"), layout, strict=True))
    job = make_job(nvlink_domain_gpus=domain, placement=order, parallelism=sizes)
    wiring, cluster = wire(job), build_cluster(job, LIBRARY)
    for name in GROUPS:
        group = cluster.group(name)
        assert max(r.domains for r in wiring._rings(name).distinct) == group.domains(domain)
        slowest = max(wiring.seconds(name, 1e9, stage).max() for stage in range(layout[3]))
        assert slowest == pytest.approx(cluster.collective_time("all_gather", 1e9, group))


@pytest.mark.parametrize(
    ("layout", "pod_gpus", "edges"),
    [((2, 2, 2, 2), 4, 2), ((2, 2, 2, 2), 8, 4), ((1, 2, 4, 2), 4, 4), ((1, 2, 4, 2), 8, 4)],
)
def test_pods_that_hold_whole_runs_are_left_once(layout, pod_gpus, edges):
    """All cp ranks of a stage are in one pod; a ring in a node has two network cards."""
    sizes = dict(zip(("tp", "cp", "dp", "pp"), layout, strict=True))
    order = {"placement": "tp-cp-pp-dp", "pod_gpus": pod_gpus, "oversubscription": 8.0}
    job = make_job(parallelism=sizes, **order)
    wiring, cluster = wire(job), build_cluster(job, LIBRARY)
    group = cluster.group("dp_cp")
    assert cluster.reach(group).factor == pytest.approx(8.0 * edges / pod_gpus)
    assert tier_factors(wiring, "dp_cp") == pytest.approx(8.0 * edges / pod_gpus)
    expected = cluster.collective_time("all_gather", 1e9, group)
    assert wiring.seconds("dp_cp", 1e9) == pytest.approx(expected)


@given(
    hosts=st.permutations(range(8)), pod=st.sampled_from([4, 6, 8]), nvlink=st.sampled_from([2, 4])
)
@settings(max_examples=40, deadline=None)
def test_reach_against_counting(hosts, pod, nvlink):
    """Brute force over rings and edges, ring by ring."""
    job = make_job(
        pod_gpus=pod, oversubscription=5.0, nvlink_domain_gpus=nvlink,
        parallelism={"cp": 2, "dp": 2},
    )  # fmt: skip
    wiring = wire(job, list(hosts))
    members = Placement(job, list(hosts)).members().reshape(2, 2, 2, 2)  # replica stage cp tp
    sizes = [min(pod, 16 - first) for first in range(0, 16, pod)]
    for group, rings in {
        "dp_cp": [members[:, s, :, t].ravel() for s in range(2) for t in range(2)],
        "cp": [members[r, s, :, t] for r in range(2) for s in range(2) for t in range(2)],
    }.items():
        edges, inside = [], []
        for ring in rings:
            _, counts = np.unique(ring // nvlink, return_counts=True)
            inside.append(counts.mean())
            pairs = zip(ring // pod, np.roll(ring, -1) // pod, strict=True)
            edges.append([a for a, b in pairs if a != b])
        out = [
            sum(n * e.count(p) for n, e in zip(inside, edges, strict=True))
            for p in range(len(sizes))
        ]
        expected = [max([1.0, *(5.0 * out[p] / sizes[p] for p in e)]) for e in edges]
        n_alike = 2  # tp ranks of a node have the same ring
        assert tier_factors(wiring, group) == pytest.approx(expected[::n_alike])
        reach = wiring._rings(group)
        domains = np.array([each.domains for each in reach.distinct])[reach.kind].ravel()
        assert ((4 if group == "dp_cp" else 2) / domains).tolist() == inside[::n_alike]


TORN = [  # up to 48 GPUs in NVLink domains of 12, nodes of 4
    {"tp": 2, "cp": 1, "pp": 2, "dp": 10, "vpp": 1, "data_parallel": "zero1"},
    {"tp": 2, "cp": 4, "pp": 2, "dp": 3, "vpp": 1, "data_parallel": "zero1"},
    {"tp": 8, "cp": 1, "pp": 2, "dp": 3, "vpp": 2, "data_parallel": "ddp"},
    {"tp": 1, "cp": 2, "pp": 1, "dp": 24, "vpp": 1, "data_parallel": "hsdp", "shard_size": 4},
]


def torn_job(order, layout, **more):
    layout = layout | {"microbatches": 4} | more
    world = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    cluster = {"nodes": world // 4, "gpus_per_node": 4, "nvlink_domain_gpus": 12}
    return make_job(None, layout, placement=order, **cluster)


def groups_of(rank, p, n, name, r, s):
    """Ranks of the groups that an op of replica r and stage s stands for, or of all replicas."""
    own, tps, cps = range(r * n, r * n + n), range(p.tp), range(p.cp)
    return {
        "tp": [[rank[s, d, c, t] for t in tps] for d in range(p.dp) for c in cps],
        "cp": [[rank[s, d, c, t] for c in cps] for d in own for t in tps],
        "shard": [[rank[s, d, c, t] for d in own for c in cps] for t in tps],
        "dp_cp": [[rank[s, d, c, t] for d in range(p.dp) for c in cps] for t in tps],
        "replicas": [
            [rank[s, d, c, t] for d in range(k, p.dp, n)]
            for k in range(n) for c in cps for t in tps
        ],
        "embedding": [
            [rank[e, d, c, t] for e in (0, p.pp - 1)]
            for d in range(p.dp) for c in cps for t in tps
        ],
        "world": [sorted(rank.values())],
    }[name]  # fmt: skip


@pytest.mark.parametrize("layout", TORN)
@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
def test_groups_take_what_their_own_place_costs(layout, order):
    """Against counting the domains of every group: what all wait for takes the worst one's time.

    A group inside a replica takes its own; where one lies whole in a domain, it takes NVLink time.
    """
    job = torn_job(order, layout)
    p, cluster = job.parallelism, build_cluster(job, LIBRARY)
    rank, n = count_ranks(order, p.tp, p.cp, p.dp, p.pp), shard_size(job)
    resolution = {"resolution": "op" if n > 1 else "kernel"}
    kernels = {"variability": job.variability.model_copy(update=resolution)}
    step = prepare(job.model_copy(update=kernels), 1)
    mean, seen = step.program.low.fixed_mean, set()
    for c, op_type in enumerate(step.graph.op_types):
        message = op_type.collective or op_type.kernels[0]
        if message.group in ("", "hop") or not message.bytes:
            continue
        for r in range(p.dp // n):
            groups = groups_of(rank, p, n, message.group, r, op_type.stage)
            if op_type.collective is None and message.group == "tp":  # a replica's own
                groups = groups[r * n * p.cp : (r + 1) * n * p.cp]
            op_kind = message.kernel_class.partition("_")[2]
            each = [
                cluster.message_time(
                    op_kind, message.bytes, len(g), Reach(len({x // 12 for x in g}))
                )
                for g in groups
            ]
            shown = message.duration / (message.duration + getattr(message, "hidden_s", 0.0))
            expected = max(each) * shown * getattr(message, "messages", 1.0)
            found = mean[r % len(mean), c].sum()
            assert found == pytest.approx(expected, rel=1e-6), (message.name, r)
            seen.add(message.group)
    assert seen >= ({"shard", "replicas"} if p.data_parallel == "hsdp" else {"dp_cp"})


@pytest.mark.parametrize("layout", [x for x in TORN if x["pp"] > 1])
@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
def test_each_transfer_takes_what_its_own_hop_does(layout, order):
    job = torn_job(order, layout, pp=4, dp=max(2, layout["dp"] // 2))
    p, c = job.parallelism, build_cluster(job, LIBRARY)
    rank, step = count_ranks(order, p.tp, p.cp, p.dp, p.pp), prepare(job, 1)
    n_bytes, mean = step.workload.transfer.bytes, step.program.low.fixed_mean
    near = c.nvlink.latency_s + n_bytes / c.nvlink.bytes_per_s
    far = c.network.latency_s + n_bytes / c.network.bytes_per_s
    ends = [(s, (s + 1) % p.pp) for s in range(p.pp if p.vpp > 1 else p.pp - 1)]
    inside = range(p.cp * p.tp)
    for r in range(p.dp):
        expected = [
            max(
                near if rank[a, r, *divmod(i, p.tp)] // 12 == rank[b, r, *divmod(i, p.tp)] // 12
                else far for i in inside
            ) for a, b in ends
        ]  # fmt: skip
        found = {
            op_type.link: mean[r % len(mean), k].sum()
            for k, op_type in enumerate(step.graph.op_types) if op_type.op_kind == "transfer"
        }  # fmt: skip
        assert found == pytest.approx(dict(enumerate(expected)), rel=1e-6)


# ------------------------------------------------------------------------------- between sites
def wire_of(link, **parallelism):
    """Seconds on the uplink of what one transfer between sites sends, and the far links."""
    site = {"gpus": parallelism.pop("site_gpus"), "distance_km": 100, "total_gbits_per_s": 1.0}
    layout = {"tp": 2, "pp": 2, "dp": 4, "data_parallel": "zero1"} | parallelism
    far = build_workload(make_job(None, layout, tiers={"site": site}), LIBRARY).far_transfers
    return sorted(far), far[link][0].duration


def test_a_looped_pipeline_s_gradients_share_the_uplink():
    """Two chunks: stage 1 sends back to 0, so that its gradients come along in the steady part.

    Of 2 x 4 forwards 2 x 2 - 1 are warm-up; with as many microbatches as stages, 3 of 4.
    """
    alone, seconds = wire_of(0, site_gpus=8, vpp=1, microbatches=4)
    assert alone == [0]
    for m, share in ((4, 5 / 8), (2, 1 / 4)):
        links, shared = wire_of(0, site_gpus=8, vpp=2, microbatches=m)
        assert links == [0, 1] and shared == pytest.approx((1 + share) * seconds)


def test_sites_in_the_middle_send_activations_and_gradients_out():
    """One chunk: of m forwards (p - 1) / 2 are warm-up in the mean over stages, in GPipe all."""
    steady, gpipe = (
        wire_of(1, site_gpus=4, pp=4, dp=2, vpp=1, microbatches=8, schedule=name)
        for name in ("1f1b", "gpipe")
    )
    assert steady[0] == gpipe[0] == [0, 1, 2]
    assert steady[1] == pytest.approx((1 + (8 - 1.5) / 8) * gpipe[1])
