"""The machine: link tiers of groups, message times, where ranks sit, and power of kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from costs_made import PEAK, SMALL, TDP, make_job, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hardware import CURVES, NODES, ONE_GPU, WAIT, figures, ideal, lasting, made, run_of, speed
from touched import touched

import prism
from prism import NodeSlowdown, PrismError, load_job, load_library
from prism.cluster.groups import Ends, Group, Layout
from prism.cluster.linkcongestion import congested_links
from prism.cluster.linktiers import Tier
from prism.cluster.machine import Cluster, Link, build_cluster
from prism.cluster.nccl import STEP_OF_HOP
from prism.cluster.nodemap import Placement
from prism.cluster.power import mix_of, power_state
from prism.cluster.transports import ALGORITHMS, FULL_BYTES, OVERLAP_DOMAINS, TRANSPORTS
from prism.distributions.library import Entry, Library
from prism.jobs.devices import DEVICES, HOP_S, find_device
from prism.simulation.prepare import prepare
from prism.workload.build import build_workload
from prism.workload.kernels import Kernel

MEGATRON = ["cluster.placement=megatron"]
NVLINK = Link(400e9, 5e-6)
NETWORK = Link(40e9, 20e-6)


def ring_time(
    n: int, k: int, n_bytes: float, phases: float = 1.0, slow: float = 1.0
) -> float:  # fmt: skip
    """Add up a hop, n - 1 steps that grow with their bytes, and what the slower link sends [s]."""
    f, g, x = ALGORITHMS, n / k, n_bytes / n
    grown = f.least + (1.0 - f.least) * (x / (x + FULL_BYTES)) ** f.power
    inside = 5e-6 * STEP_OF_HOP * (f.beyond if k > 1 else f.within)
    steps = (
        grown * ((k - 1) * 20e-6 + (n - k) * inside) / math.sqrt(1.0 + (k - 1) / OVERLAP_DOMAINS)
    )
    moved = n_bytes * (n - 1) / n if k > 1 else 0.0
    wires = math.hypot(moved * slow / (g * 40e9), moved / f.channels_bytes_per_s)
    sending = max(wires, n_bytes * (g - 1.0) / g / 400e9)
    return (20e-6 if k > 1 else 5e-6) + phases * (steps + sending)


def make_cluster(tp: int = 8, cp: int = 1, dp: int = 4, pp: int = 4, vpp: int = 1) -> Cluster:
    stage, replica = tp * cp * dp, tp * cp  # Megatron's order
    layout = Layout((tp, cp), dp, pp, stage, replica)
    return Cluster(DEVICES["h100"], NVLINK, NETWORK, 8, layout, loops=vpp > 1)


def pods(gpus: int, over: float) -> tuple[Tier, ...]:
    return (Tier("pod", gpus, over, NETWORK.latency_s),)


@pytest.fixture
def library() -> Library:
    figures = {"nominal/nvlink_efficiency": 0.8, "nominal/network_efficiency": 0.5}
    entries = {name: Entry(name, "test", number=value) for name, value in figures.items()}
    return Library("test", "h100", entries)


@pytest.mark.parametrize(
    ("layout", "kind", "n_gpus", "domains"),
    [
        (Layout((8, 1), 4, 1, 32, 8), "tp", 8, 1),  # fills a node
        (Layout((16, 1), 2, 1, 32, 16), "tp", 8, 2),
        (Layout((8, 1), 16, 1, 128, 8), "dp_cp", 8, 16),
        (Layout((2, 3), 4, 1, 24, 6), "cp", 8, 2),  # ranks 6 | 8 10 across a border
        (Layout((2, 3), 1, 1, 6, 6), "cp", 8, 1),  # ... that a job of 6 GPUs does not reach
        (Layout((1, 1), 4, 4, 1, 4), "embedding", 8, 1),  # four pipelines of 4: 0 3, 4 7, 8 11...
        (Layout((1, 1), 4, 3, 1, 3), "embedding", 8, 2),  # ... and of 3: 6 | 8
        (Layout((10, 1), 1, 1, 10, 10), "tp", 72, 1),
        (Layout((64, 1), 39, 1, 2496, 64), "dp_cp", 72, 35),  # the last at 2,495 / 72 = 34.7
        (Layout((64, 1), 39, 1, 2496, 64), "dp_cp", 64, 39),
    ],
)
def test_domains_that_a_group_touches(layout: Layout, kind: str, n_gpus: int, domains: int) -> None:
    assert Group(layout, kind).domains(n_gpus) == domains


SIZES = st.integers(1, 4)


@given(
    sizes=st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES), together=st.booleans(),
    n_gpus=st.integers(1, 40),
)  # fmt: skip
@settings(deadline=None)
def test_domains_against_all_groups_of_each_kind(
    sizes: tuple[int, int, int, int, int], together: bool, n_gpus: int
) -> None:
    """Brute force: every rank of every group of a small machine, in both orders of ranks."""
    tp, cp, shard, shards, pp = sizes
    dp = shard * shards
    stage, replica = (tp * cp, tp * cp * pp) if together else (tp * cp * dp, tp * cp)
    cluster = replace(make_cluster(), layout=Layout((tp, cp), dp, pp, stage, replica, shard))
    axes = np.ix_(*map(range, (pp, shards, shard, cp, tp)))
    ranks = sum(
        axis * step
        for axis, step in zip(axes, (stage, shard * replica, replica, tp, 1), strict=True)
    )
    ends = ranks[[0, -1]] if pp > 1 else ranks
    kinds = {
        "tp": (ranks, 4), "cp": (ranks, 3), "dp_cp": (ranks, 1, 2, 3), "shard": (ranks, 2, 3),
        "replicas": (ranks, 1), "embedding": (ends, 0), "world": (ranks, 0, 1, 2, 3, 4),
    }  # fmt: skip
    for name, (members, *among) in kinds.items():
        count = int(np.prod([members.shape[a] for a in among]))
        groups = np.moveaxis(members // n_gpus, among, range(-len(among), 0)).reshape(-1, count)
        group = cluster.group(name)
        assert group.n_ranks == count
        assert group.domains(n_gpus) == max(len(set(row)) for row in groups.tolist()), name


def test_tiers_of_the_megatron_order() -> None:
    cluster = make_cluster()
    tiers = {name: cluster.tier(cluster.group(name)) for name in ("tp", "cp", "dp_cp", "world")}
    assert tiers == {"tp": "nvlink", "cp": "nvlink", "dp_cp": "network", "world": "network"}
    wide = make_cluster(tp=8, cp=2, dp=2)
    assert wide.tier(wide.group("cp")) == "network"
    shared, ends = wide.layout.groups("dp_cp"), wide.layout.groups("embedding")
    assert shared.shape == (8 * 4, 2 * 2) and shared[0].tolist() == [0, 8, 16, 24]
    assert ends.shape == (8 * 2 * 2, 2) and (np.diff(ends) == 8 * 2 * 2 * 3).all()


def test_ring_inside_a_node() -> None:
    cluster = make_cluster()
    found = cluster.collective_time("all_gather", 1e9, cluster.group("tp"))
    assert found == pytest.approx(ring_time(8, 1, 1e9))


def test_ring_over_the_network() -> None:
    cluster = make_cluster(dp=16)
    group = cluster.group("dp_cp")
    expected = ring_time(16, 16, 1e9)
    assert cluster.collective_time("reduce_scatter", 1e9, group) == pytest.approx(expected)
    both = cluster.collective_time("all_reduce", 1e9, group)
    assert both == pytest.approx(ring_time(16, 16, 1e9, 2.0))


@pytest.mark.parametrize(("dp", "sent", "passed"), [(2, 1.0, 0.0), (3, 1.5, 1.0), (64, 2.0, 2.0)])
def test_a_tree_s_busiest_domain_by_hand(dp: int, sent: float, passed: float) -> None:
    """Of two domains each sends the buffer once, of many the busiest sends it twice."""
    f, cluster = ALGORITHMS, make_cluster(dp=dp)
    group = cluster.group("dp_cp")
    for n_bytes in (1e3, 1e8) if dp < 4 else (1e3,):
        filled = (n_bytes / (n_bytes + FULL_BYTES)) ** f.power
        wires = math.hypot(sent * n_bytes / 40e9, passed * n_bytes / f.channels_bytes_per_s)
        expected = 20e-6 * (1.0 + (1.0 + math.log2(dp)) * f.level * filled) + wires
        found = cluster.collective_time("all_reduce", n_bytes, group)
        assert found == pytest.approx(min(expected, ring_time(dp, dp, n_bytes, 2.0)))


def test_hierarchical_ring_uses_every_network_card() -> None:
    cluster = make_cluster(tp=1, dp=64, pp=1)
    time = cluster.collective_time("all_gather", 1e9, cluster.group("dp_cp"))
    assert time == pytest.approx(ring_time(64, 8, 1e9))


def test_a_ring_torn_over_domains_has_the_cards_of_its_mean_member() -> None:
    """dp 12 over domains of 8: two have 8 and 4 members, and so 6 cards each in the mean."""
    cluster = make_cluster(tp=1, dp=12, pp=1)
    time = cluster.collective_time("all_gather", 1e9, cluster.group("dp_cp"))
    assert time == pytest.approx(ring_time(12, 2, 1e9))
    # one member more than fits costs a border, not all cards but one
    nine = make_cluster(tp=1, dp=9, pp=1)
    time = nine.collective_time("all_gather", 1e9, nine.group("dp_cp"))
    assert time == pytest.approx(ring_time(9, 2, 1e9))
    whole = make_cluster(tp=1, dp=8, pp=1)
    assert time > whole.collective_time("all_gather", 1e9, whole.group("dp_cp"))


def test_oversubscription_slows_groups_that_leave_their_pod() -> None:
    cluster = replace(make_cluster(dp=16), tiers=pods(32, 8.0))
    group = cluster.group("dp_cp")  # four members to a pod: the ring leaves it once for four
    expected = ring_time(16, 16, 1e9, slow=2.0)
    assert cluster.collective_time("all_gather", 1e9, group) == pytest.approx(expected)
    roomy = replace(cluster, tiers=pods(8 * 16, 8.0))
    assert roomy.collective_time("all_gather", 1e9, group) == pytest.approx(ring_time(16, 16, 1e9))


@given(
    n_bytes=st.floats(1.0, 1e11),
    dp=st.integers(2, 512),
    tp=st.sampled_from([1, 2, 4, 8]),
    op_kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
)
def test_more_bytes_take_longer(n_bytes: float, dp: int, tp: int, op_kind: str) -> None:
    cluster = make_cluster(tp=tp, dp=dp)
    group = cluster.group("dp_cp")
    short = cluster.collective_time(op_kind, n_bytes, group)
    assert 0.0 < short < cluster.collective_time(op_kind, 2.0 * n_bytes, group) <= 2.0 * short


def test_group_of_one_takes_no_time() -> None:
    cluster = make_cluster(tp=1)
    assert cluster.collective_time("all_reduce", 1e9, cluster.group("tp")) == 0.0


def test_transfer_between_stages() -> None:
    assert make_cluster().transfer_time(4e6) == pytest.approx(20e-6 + 4e6 / 40e9)
    near = make_cluster(tp=2, dp=1, pp=4)
    assert near.transfer_time(4e6) == pytest.approx(5e-6 + 4e6 / 400e9)
    assert make_cluster(pp=1).transfer_time(4e6) == 0.0


def test_transfer_is_the_mean_over_hops() -> None:
    fast, slow = 5e-6 + 4e6 / 400e9, 20e-6 + 4e6 / 40e9
    mixed = make_cluster(tp=4, dp=1, pp=4)  # stages 0 1 | 2 3
    assert mixed.transfer_time(4e6) == pytest.approx((2 * fast + slow) / 3)
    # with chunks, the last stage also sends to the first
    looped = make_cluster(tp=4, dp=1, pp=4, vpp=2)
    assert looped.transfer_time(4e6) == pytest.approx((2 * fast + 2 * slow) / 4)


def test_transfer_out_of_a_pod() -> None:
    cluster = replace(make_cluster(), tiers=pods(64, 7.0))  # two stages to a pod
    inside, out = 20e-6 + 4e6 / 40e9, 20e-6 + 3.5 * 4e6 / 40e9
    assert cluster.transfer_time(4e6) == pytest.approx((2 * inside + out) / 3)


def test_links_come_from_the_device_the_library_and_the_job(library: Library) -> None:
    job = load_job("llama3-405b-8k")
    cluster = build_cluster(job, library)
    assert cluster.nvlink == Link(450e9 * 0.8, HOP_S)
    assert cluster.network == Link(50e9 * 0.5, TRANSPORTS["infiniband"].hop_s)
    given = load_job(
        "llama3-405b-8k",
        [
            "cluster.links.network.bandwidth_gbytes_per_s=100",
            "cluster.links.network.latency_us=3",
            "cluster.links.nvlink.efficiency=1",
        ],
    )
    cluster = build_cluster(given, library)
    assert cluster.nvlink == Link(450e9, HOP_S)
    assert cluster.network.bytes_per_s == pytest.approx(100e9 * 0.5)
    assert cluster.network.latency_s == pytest.approx(3e-6)


def test_a_transport_sets_the_hop_and_the_share_and_a_measured_library_both(
    library: Library,
) -> None:
    efa = TRANSPORTS["efa"]
    job = load_job("llama3-405b-8k", ["cluster.links.network.transport=efa"])
    share = 0.5 * efa.efficiency / TRANSPORTS["infiniband"].efficiency
    assert build_cluster(job, library).network == Link(50e9 * share, efa.hop_s)
    own = ["cluster.links.network.latency_us=3", "cluster.links.network.efficiency=0.4"]
    given = load_job("llama3-405b-8k", ["cluster.links.network.transport=efa", *own])
    assert build_cluster(given, library).network == Link(pytest.approx(20e9), 3e-6)
    hop = Entry("nominal/network_hop_s", "test", number=5e-6, units="s")
    measured = replace(library, entries={**library.entries, hop.name: hop})
    assert build_cluster(job, measured).network == Link(25e9, 5e-6)
    with pytest.raises(PrismError, match="transport"):
        load_job("llama3-405b-8k", ["cluster.links.network.transport=token-ring"])


def test_unknown_device() -> None:
    with pytest.raises(PrismError, match="h1000.* v100, a100"):
        find_device("h1000")


def test_placement_follows_megatron_order() -> None:
    placement = Placement(load_job("llama3-405b-8k", MEGATRON))
    members = placement.members()
    assert members.shape == (64, 16, 8)
    assert sorted(members.ravel().tolist()) == list(range(8192))
    assert members[0, 0].tolist() == list(range(8))
    assert members[1, 0, 0] == 8  # the next replica is the next node
    assert members[0, 1, 0] == 8 * 64  # the next stage comes after all replicas
    assert placement.n_gpus == 8192
    assert placement.n_leaves == 64


def test_placement_keeps_the_stages_of_a_replica_together() -> None:
    job = load_job("llama3-405b-64k")
    assert job.cluster.placement == "tp-cp-pp-dp"
    members = Placement(job).members()
    assert sorted(members.ravel().tolist()) == list(range(65536))
    assert members[0, 1, 0] == 8  # the next stage is the next node
    assert members[1, 0, 0] == 8 * 16  # the next replica comes after all stages


def test_order_decides_what_leaves_a_pod(library: Library) -> None:
    """64K GPUs, pods of 3,072 at 7:1: transfers leave their pod only in Megatron's order."""
    n_bytes = 100e6
    together = build_cluster(load_job("llama3-405b-64k"), library)
    apart = build_cluster(load_job("llama3-405b-64k", MEGATRON), library)
    wire = n_bytes / together.network.bytes_per_s
    assert together.transfer_time(n_bytes) == pytest.approx(wire + together.network.latency_s)
    assert apart.transfer_time(n_bytes) > 6.9 * wire
    assert together.group("dp_cp").domains(3072) == 22  # of 65,536 / 3,072 = 21.3 pods
    assert apart.group("dp_cp").domains(3072) == 2  # a stage is 4,096 GPUs


def test_a_replica_of_the_gb200_job_has_a_rack_to_itself(library: Library) -> None:
    cluster = build_cluster(load_job("llama31-405b-gb200-512"), library)
    assert cluster.tier(cluster.group("cp")) == cluster.tier(cluster.group("embedding")) == "nvlink"
    assert cluster.group("dp_cp").domains(cluster.nvlink_gpus) == 8  # one for each replica
    wire = 100e6 / cluster.nvlink.bytes_per_s
    assert cluster.transfer_time(100e6) == pytest.approx(wire + cluster.nvlink.latency_s)
    full = build_cluster(
        load_job("llama31-405b-gb200-512", ["cluster.nvlink_domain_gpus=72"]), library
    )
    assert full.tier(full.group("cp")) == "nvlink"  # 8 divides 72: only stages are torn apart
    assert full.transfer_time(100e6) > 1.5 * cluster.transfer_time(100e6)


def test_context_parallel_groups_of_both_orders(library: Library) -> None:
    together = build_cluster(load_job("llama3-405b-131k-sequence"), library).group("dp_cp")
    apart = build_cluster(load_job("llama3-405b-131k-sequence", MEGATRON), library).group("dp_cp")
    assert together.n_ranks == apart.n_ranks == 128
    assert together.domains(128) == 8  # one replica's cp group, stride 8, has a pod to itself
    assert apart.domains(1024) == 1


def test_node_slowdowns_reach_the_node_s_gpus() -> None:
    job = load_job("llama3-405b-8k", ["cluster.node_slowdowns={2: 1.5}"])
    assert Placement(job).slowdowns() == {2: NodeSlowdown(1.5)}
    factor = prepare(job, 1).program.ranks.factor
    assert np.flatnonzero(factor[1] != 1.0).tolist() == list(range(16, 24))
    assert factor[1, 16] == 1.5 and np.all(factor[0] == 1.0)


def test_link_leaves() -> None:
    # a stage is 64 nodes: four leaves of 16
    placement = Placement(load_job("llama3-405b-8k", MEGATRON))
    hop, back, stage, world, embedding = (
        Ends((0, 1), False), Ends((15, 0), False), Ends((1,), True), Ends((), True),
        Ends((0, 15), True),
    )  # fmt: skip
    found = congested_links(placement, [hop, back, stage, world, embedding])
    assert found.begin.shape == (64, 5)
    assert touched(found, 0) == {0, 4} and touched(found, 0, 63) == {3, 7}
    assert touched(found, 1) == {60, 0}  # back to the first
    # the replicas of stage 1 together, the whole job, and the embedding's
    assert touched(found, 2) == touched(found, 2, 63) == {4, 5, 6, 7}
    assert touched(found, 3) == set(range(64)) and found.n_entities == placement.n_leaves
    assert touched(found, 4) == {0, 1, 2, 3, 60, 61, 62, 63}
    assert found.n_touched[0, [0, 2, 3]].tolist() == [2, 4, 64]


def test_groups_touch_only_their_own_leaves() -> None:
    """131K sequence: a stage's group of 128 GPUs fills a leaf, eight replicas lie far apart."""
    placement = Placement(load_job("llama3-405b-131k-sequence"))
    found = congested_links(placement, [Ends((0,), True)])
    assert touched(found, 0) == {16 * r for r in range(8)}


def test_links_inside_a_node_touch_no_leaf() -> None:
    hops = [Ends((stage, stage + 1), False) for stage in range(7)]
    assert not congested_links(Placement(load_job("pipeline-8x32")), hops).n_touched.any()


def test_a_replica_fewer_keeps_the_network_s_pace() -> None:
    """The same way out of a pod is shared by as many rings, whatever the number of replicas."""
    for pods in ("128", "3072"):
        changes = ["cluster.oversubscription=7", f"cluster.pod_gpus={pods}"]
        seconds = []
        for dp in (128, 127, 120):
            sizes = [f"parallelism.dp={dp}", f"cluster.nodes={16 * dp}"]
            job = load_job("llama3-405b-16k", [*changes, *sizes])
            cluster = build_cluster(job, load_library("h100-healthy"))
            group = cluster.group("dp_cp")
            seconds.append(cluster.collective_time("all_gather", 1e9, group))
        assert max(seconds) < 1.01 * min(seconds)


# ------------------------------------------------------------------------- power of kernels
TABLES, ATTENTION = 1.14, 1.10  # phi of an H100's tables: of products, of attention


def phi_of(mix, watts, most=TABLES):
    """Speed at which an H100's mix draws a limit, by small steps down from the most."""
    floor, exponent, knee = 700 * CURVES["h100"][1], *CURVES["h100"][2:]

    def draw(phi):
        dynamic = phi**exponent if phi >= knee else phi * knee ** (exponent - 1.0)
        fast = (mix.gemm_s / phi, mix.gemm_s, mix.gemm_j)
        late = (mix.attention_s / phi ** (1 / 0.95), mix.attention_s, mix.attention_j)
        busy = [t * (floor + (WAIT - floor + j / n) * dynamic) for t, n, j in (fast, late) if n]
        moved = min(WAIT * mix.memory_s + mix.memory_j, watts * mix.memory_s)
        seconds = fast[0] + late[0] + mix.memory_s + mix.wait_s
        return (sum(busy) + moved + min(WAIT, watts) * mix.wait_s) / seconds

    return next(phi for phi in most * 0.9999 ** np.arange(20_000) if draw(phi) <= watts)


def state_of(job):
    return build_workload(job, None).power


@pytest.mark.parametrize("watts", [250, 400, 550, 700])
def test_a_limit_slows_compute_as_its_mix_draws_and_nothing_else(watts):
    job = made(cluster=NODES | {"power_limit_w": watts})
    plain, capped = (figures(j)["critical_path"] for j in (made(), job))
    state, free = state_of(job), state_of(made()).phi
    assert state.phi == pytest.approx(phi_of(state.mix, watts), rel=2e-4)
    assert state.phi >= speed("h100", watts)  # a mix of products alone has that
    assert state.phi == TABLES or state.watts == pytest.approx(watts, rel=1e-6)
    assert state.gemm_slowdown == pytest.approx(TABLES / state.phi)
    assert state.attention_slowdown == pytest.approx((ATTENTION / state.phi) ** (1 / 0.95))
    slower = free / state.phi
    assert capped["attention"] == pytest.approx(slower ** (1 / 0.95) * plain["attention"], rel=1e-3)
    assert capped["gemm_mlp"] == pytest.approx(slower * plain["gemm_mlp"], rel=0.05)
    for name in ("memory", "optimizer", "p2p", "tp_all_gather"):
        assert capped[name] == pytest.approx(plain[name], rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    flop=st.floats(0.0, 1e15), attention=st.floats(0.0, 1e15), moved=st.floats(0.0, 1e12),
    wait=st.floats(0.0, 1.0), watts=st.tuples(st.floats(176, 700), st.floats(176, 700)),
    clocks=st.tuples(st.floats(300, 2000), st.floats(300, 2000)), locked=st.booleans(),
    device=st.sampled_from(["h100", "h200", "a100"]),
)  # fmt: skip
def test_less_power_or_clock_is_never_faster(
    flop, attention, moved, wait, watts, clocks, locked, device
):
    tdp = find_device(device).power_w
    step = [
        (Kernel("product", "gemm_mlp", flop / 680e12, flop, 0.0, ""), 1.0),
        (Kernel("attention", "attention", attention / 600e12, attention, 0.0, ""), 2.0),
        (Kernel("norm", "memory", moved / 3e12, 0.0, moved, ""), 1.0),
    ]

    def state(limit, clock):
        more = {"clock_mhz": round(clock * (0.7 if device == "a100" else 1.0))} if locked else {}
        limit = {"power_limit_w": round(limit * tdp / 700)}
        return power_state(lasting(limit | more | {"device": device}), step, wait)

    low, high = (state(w, max(clocks)) for w in sorted(watts))
    slow, fast = (state(max(watts), c) for c in sorted(clocks))
    for less, more in ((low, high), (slow, fast)):
        assert less.gemm_slowdown >= more.gemm_slowdown * (1.0 - 1e-9)
        assert less.attention_slowdown >= more.attention_slowdown * (1.0 - 1e-9)
    assert low.watts <= round(min(watts) * tdp / 700)
    none = power_state(lasting({"device": device}), step, wait)
    assert none.phi <= {"h100": TABLES, "h200": 1.11, "a100": 1.0}[device]


def test_what_a_mix_sums_up_to():
    """Joules by hand: flop and bytes of each kernel, as often as it runs."""
    step = [
        (Kernel("product", "gemm_mlp", 2e-3, 1e12, 4e8, ""), 3.0),
        (Kernel("logits", "loss", 2e-3, 1e12, 0.0, ""), 1.0),
        (Kernel("attention", "attention", 1e-3, 5e11, 0.0, ""), 2.0),
        (Kernel("norm", "memory", 1e-3, 0.0, 3e9, ""), 4.0),
        (Kernel("few_rows", "gemm_mlp", 5e-4, 1e9, 1.5e9, ""), 1.0),
        (Kernel("host", "compute", 7e-3, 0.0, 0.0, ""), 1.0),
    ]
    job = made({"memory": {"time": 2.0}}, None, NODES, {"precision": "fp8"})
    mix = mix_of(job, step, 0.5, memory_time=lambda n: n / 3e12)
    assert mix.gemm_s == pytest.approx(TABLES * 8e-3) and mix.memory_s == pytest.approx(4.5e-3)
    assert mix.gemm_j == pytest.approx(3 * (0.39 + 4e-4 * 117) + 0.79)
    assert mix.attention_s == pytest.approx(2e-3 * ATTENTION ** (1 / 0.95))
    assert mix.attention_j == pytest.approx(1.03)
    assert mix.memory_j == pytest.approx(2 * (4 * 3e-3 * 117 + 1e-3 * 0.39 + 1.5e-3 * 117))
    assert mix.wait_s == pytest.approx(0.507)


def test_kernels_draw_by_their_flop_and_bytes():
    """At the clock of products back to back at the TDP, to which joules belong."""
    job = made(None, None, {"nodes": 1, "gpus_per_node": 1, "clock_mhz": 1365}, ONE_GPU)
    work = build_workload(job, None)
    kernels = [k for row in work.chunks for c in row for k in (*c.forward, *c.backward)]
    flop = sum(k.flop for k in kernels if k.kernel_class != "attention")
    late = sum(k.flop for k in kernels if k.kernel_class == "attention")
    moved = sum(x.bytes for x in (*kernels, *work.optimizer))
    joules = 1e-12 * (0.79 * flop + 1.03 * late + 117 * moved)
    assert flop > 0 and late > 0
    expected = WAIT + joules / ideal(job)
    assert run_of(job)["energy"]["gpu_power_w"] == pytest.approx(expected, rel=0.01)
    assert "energy" not in figures(job) and "energy" not in run_of(lasting())


@pytest.mark.parametrize("limit", [{"power_limit_w": 300}, {"clock_mhz": 900}])
def test_a_job_under_a_limit_draws_what_its_mix_does(limit):
    one = {"nodes": 1, "gpus_per_node": 1}
    job = made(None, None, one | limit, ONE_GPU)
    state = state_of(job)
    assert run_of(job)["energy"]["gpu_power_w"] == pytest.approx(state.watts, rel=0.01)
    assert state.watts < run_of(made(None, None, one, ONE_GPU))["energy"]["gpu_power_w"]


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "microbatches": 3, "dp": 2}])
def test_energy_of_computing_moving_and_waiting(layout):
    """Each flop and byte has its joules over an idle draw of TDP / 5; the mean over stages.

    At the clock at which products back to back draw the TDP, to which joules belong.
    """
    job = make_job(layout, cluster={"clock_mhz": 1365 / 1980 * 2100}, steps=1000)
    found = prism.summary(prism.estimate(job, replicates=64, run_replicates=4, seed=1))
    pp, m = layout.get("pp", 1), layout.get("microbatches", 1)
    work = build_workload(job, None)
    each = 0.8 * TDP / (0.7 * PEAK)  # J per flop of a product
    joules = sum(
        k.flop * each * (1.03 / 0.79 if k.kernel_class == "attention" else 1.0) + 117e-12 * k.bytes
        for row in work.chunks for c in row for k in (*c.forward, *c.backward)
    )  # fmt: skip
    joules = m * joules + 117e-12 * 30.0 * parameters(SMALL)
    power = 0.2 * TDP + joules / pp / found["step_time"]["mean"]
    energy = found["energy"]
    assert energy["gpu_power_w"] == pytest.approx(power, rel=1e-4)
    joules = power * found["world_size"] * found["time_to_train"]["p50"]
    assert energy["gpu_mwh_p50"] * 3.6e9 == pytest.approx(joules, rel=1e-4)
