"""The machine: link tiers of groups, message times, and where ranks sit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.cluster import (
    DEVICES,
    Cluster,
    Link,
    build_cluster,
    find_device,
)
from prism.errors import PrismError
from prism.job import load_job
from prism.library import Entry, Library, load_library
from prism.placement import Group, NodeSlowdown, Placement
from prism.simulate import prepare

MEGATRON = ["cluster.placement=megatron"]
NVLINK = Link(400e9, 5e-6)
NETWORK = Link(40e9, 20e-6)


def make_cluster(tp: int = 8, cp: int = 1, dp: int = 4, pp: int = 4, vpp: int = 1) -> Cluster:
    world = tp * cp * dp * pp
    stage, replica = tp * cp * dp, tp * cp  # Megatron's order
    return Cluster(
        DEVICES["h100"], NVLINK, NETWORK, 8, world, 1.0, tp, cp, dp, pp, vpp, stage, replica
    )


@pytest.fixture
def library() -> Library:
    figures = {"nominal/nvlink_efficiency": 0.8, "nominal/network_efficiency": 0.5}
    entries = {name: Entry(name, "test", number=value) for name, value in figures.items()}
    return Library("test", "h100", entries)


@pytest.mark.parametrize(
    ("group", "within"),
    [
        (Group(8, 1), 8),  # tp fills a node
        (Group(4, 1), 4),
        (Group(16, 1), 8),
        (Group(16, 8), 1),  # dp beside tp 8
        (Group(12, 2), 4),
        (Group(3, 2), 1),  # ranks 0 2 4 in a node, 6 | 8 10 across its border
        (Group(6, 1), 2),  # ranks 6 7 | 8 9 10 11
        (Group(2, 64), 1),
    ],
)
def test_members_within_a_node(group: Group, within: int) -> None:
    assert group.members_within(8) == within


@given(n=st.integers(1, 64), stride=st.integers(1, 16))
def test_members_within_is_the_smallest_part_of_any_group(n: int, stride: int) -> None:
    """Brute force over all groups: the smallest part at a border is a multiple of the answer."""
    found = Group(n, stride).members_within(8)
    parts = set()
    for block in range(8):
        for offset in range(stride):
            ranks = block * n * stride + offset + stride * np.arange(n)
            parts |= set(np.unique(ranks // 8, return_counts=True)[1].tolist())
    assert 1 <= found <= max(parts)
    assert found == min(parts) or n * stride % 8 or 8 % stride


def test_tiers_of_the_megatron_order() -> None:
    cluster = make_cluster()
    tiers = {name: cluster.tier(cluster.group(name)) for name in ("tp", "cp", "dp_cp", "world")}
    assert tiers == {"tp": "nvlink", "cp": "nvlink", "dp_cp": "network", "world": "network"}
    wide = make_cluster(tp=8, cp=2, dp=2)
    assert wide.tier(wide.group("cp")) == "network"
    assert wide.group("dp_cp") == Group(2, 8, 2, 16)
    assert wide.group("embedding") == Group(2, 8 * 2 * 2 * 3)


def test_ring_inside_a_node() -> None:
    cluster = make_cluster()
    expected = 3 * 5e-6 + 1e9 * 7 / 8 / 400e9
    assert cluster.collective_time("all_gather", 1e9, cluster.group("tp")) == pytest.approx(
        expected
    )


def test_ring_over_the_network() -> None:
    cluster = make_cluster(dp=16)
    group = cluster.group("dp_cp")
    expected = 4 * 20e-6 + 1e9 * 15 / 16 / 40e9
    assert cluster.collective_time("reduce_scatter", 1e9, group) == pytest.approx(expected)
    both = cluster.collective_time("all_reduce", 1e9, group)
    assert both == pytest.approx(2 * expected)


def test_hierarchical_ring_uses_every_network_card() -> None:
    cluster = make_cluster(tp=1, dp=64, pp=1)
    latency = 3 * 20e-6 + 3 * 5e-6
    expected = latency + 1e9 / 8 * 7 / 8 / 40e9
    time = cluster.collective_time("all_gather", 1e9, cluster.group("dp_cp"))
    assert time == pytest.approx(expected)


def test_oversubscription_slows_groups_that_leave_their_pod() -> None:
    cluster = replace(make_cluster(dp=16), pod_gpus=32, oversubscription=8.0)
    group = cluster.group("dp_cp")  # four members to a pod: the ring leaves it once for four
    bytes_s = 1e9 * 15 / 16 / 40e9
    expected = 4 * 20e-6 + 2.0 * bytes_s
    assert cluster.collective_time("all_gather", 1e9, group) == pytest.approx(expected)
    roomy = replace(cluster, pod_gpus=8 * 16)
    assert roomy.collective_time("all_gather", 1e9, group) == pytest.approx(4 * 20e-6 + bytes_s)


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
    cluster = replace(make_cluster(), pod_gpus=64, oversubscription=7.0)  # two stages to a pod
    inside, out = 20e-6 + 4e6 / 40e9, 20e-6 + 3.5 * 4e6 / 40e9
    assert cluster.transfer_time(4e6) == pytest.approx((2 * inside + out) / 3)


def test_links_come_from_the_device_the_library_and_the_job(library: Library) -> None:
    job = load_job("llama3-405b-8k")
    cluster = build_cluster(job, library)
    assert cluster.nvlink == Link(450e9 * 0.8, 7e-6)
    assert cluster.network == Link(50e9 * 0.5, 16e-6)
    given = load_job(
        "llama3-405b-8k",
        [
            "cluster.links.network.bandwidth_gbytes_per_s=100",
            "cluster.links.network.latency_us=3",
            "cluster.links.nvlink.efficiency=1",
        ],
    )
    cluster = build_cluster(given, library)
    assert cluster.nvlink == Link(450e9, 7e-6)
    assert cluster.network.bytes_per_s == pytest.approx(100e9 * 0.5)
    assert cluster.network.latency_s == pytest.approx(3e-6)


def test_unknown_device() -> None:
    with pytest.raises(PrismError, match="expected one of v100, a100"):
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
    assert together.group("dp_cp").members_within(3072) == 8  # gcd(3072, 65536) / 128
    assert apart.group("dp_cp").members_within(3072) == 128  # gcd(3072, 4096) / 8


def test_context_parallel_groups_of_both_orders(library: Library) -> None:
    together = build_cluster(load_job("llama3-405b-131k-sequence"), library).group("dp_cp")
    apart = build_cluster(load_job("llama3-405b-131k-sequence", MEGATRON), library).group("dp_cp")
    assert together.n_ranks == apart.n_ranks == 128
    assert together.members_within(128) == 16  # one replica's cp group, stride 8
    assert apart.members_within(1024) == 128


def test_node_slowdowns_reach_the_node_s_gpus() -> None:
    job = load_job("llama3-405b-8k", ["cluster.node_slowdowns={2: 1.5}"])
    assert Placement(job).slowdowns() == {2: NodeSlowdown(1.5)}
    factor = prepare(job, 1).program.ranks.factor
    assert np.flatnonzero(factor[1] != 1.0).tolist() == list(range(16, 24))
    assert factor[1, 16] == 1.5 and np.all(factor[0] == 1.0)


def test_link_leaves() -> None:
    # a stage is 64 nodes: four leaves of 16
    placement = Placement(load_job("llama3-405b-8k", MEGATRON))
    lo, hi = placement.link_leaves(16)
    assert lo.shape == (64, 34, 2)
    assert (lo[0, 0].tolist(), hi[0, 0].tolist()) == ([0, 4], [1, 5])
    assert (lo[63, 0].tolist(), hi[63, 0].tolist()) == ([3, 7], [4, 8])
    assert (lo[0, 15].tolist(), hi[0, 15].tolist()) == ([60, 0], [61, 1])  # back to the first
    # the replicas of stage 1: each its own leaf, 4 to 7 in all
    assert (lo[0, 17, 0], hi[0, 17, 0]) == (4, 5)
    assert (lo[63, 17, 0], hi[63, 17, 0]) == (7, 8)
    assert (lo[0, 33].tolist(), hi[0, 33].tolist()) == ([0, 60], [1, 61])  # the embedding's
    assert (lo[0, 32, 0], hi[0, 32, 0]) == (0, 64)
    assert np.all(lo <= hi) and np.all(hi <= placement.n_leaves)


def test_groups_touch_only_their_own_leaves() -> None:
    """131K sequence: a stage's group of 128 GPUs fills a leaf, eight replicas lie far apart."""
    lo, hi = Placement(load_job("llama3-405b-131k-sequence")).link_leaves(16)
    touched = {leaf for r in range(8) for leaf in range(lo[r, 16, 0], hi[r, 16, 0])}
    assert touched == {16 * r for r in range(8)}


def test_links_inside_a_node_touch_no_leaf() -> None:
    lo, hi = Placement(load_job("pipeline-8x32")).link_leaves(8)
    assert not (hi - lo).any()


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
