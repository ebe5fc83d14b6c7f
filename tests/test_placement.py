"""Placement: nodes take slots as wholes, and what is slow about a node goes where it goes."""

import numpy as np
import pytest
from touched import touched

from prism import NodeSlowdown, PrismError, load_job, slow_node
from prism.cluster.groups import Ends
from prism.cluster.linkcongestion import congested_links
from prism.cluster.nodemap import KINDS, Placement
from prism.simulation.draws import lower
from prism.simulation.effects.microbatch import _relative_speeds
from prism.simulation.effects.stall import _entities
from prism.simulation.execution.context import RunContext
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks

MODEL = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 2048,
}  # fmt: skip
EFFECTS = {
    "rank": {"cv": 0.015, "lemon_fraction": 0.05, "lemon_slowdown": [1.06, 1.2], "node_share": 0.4},
    "step": {"cv": 0.01},
    "microbatch": {"cv": 0.02},
    "call": {"cv": 0.005},
    "residual": {"cv": 0.03},
}
STILL = {"rank": {"cv": 0.0}, "residual": {"cv": 0.0}}


def make_job(effects=None, parallelism=None, **cluster):
    """16 GPUs on 8 nodes: tp 2, pp 2, dp 4, one group to a node."""
    layout = {
        "tp": 2, "pp": 2, "vpp": 2, "dp": 4, "data_parallel": "zero1", "microbatches": 4,
    } | (parallelism or {})  # fmt: skip
    return load_job(
        {
            "model": MODEL,
            "parallelism": layout,
            "cluster": {"nodes": 8, "gpus_per_node": 2, "leaf_nodes": 2} | cluster,
            "variability": {"library": None, "effects": STILL if effects is None else effects},
        }
    )


def times(program, blocks=1, seed=1):
    return run_blocks(program, range(blocks), RunContext(seed))[0]


def base_time(job):
    return float(times(prepare(job, 1).program)[0, 0])


# ------------------------------------------------------------------------------- who is where
def test_nodes_take_slots_as_wholes():
    job = make_job(hosts=[3, 0, 1, 2, 4, 5, 6, 9], nodes=10)
    placement = Placement(job)
    assert placement.n_slots == 8 and placement.n_nodes == 10
    members = placement.members()
    assert members[0, 0].tolist() == [6, 7] and members[3, 1].tolist() == [18, 19]
    plain = Placement(job, np.arange(8)).members()
    slot, local = np.divmod(plain, 2)
    assert np.array_equal(members, placement.slots[slot] * 2 + local)
    assert placement.slot_groups() == [
        [(0, 0)], [(1, 0)], [(2, 0)], [(3, 0)], [(0, 1)], [(1, 1)], [(2, 1)], [(3, 1)]
    ]  # fmt: skip


def test_a_slot_holds_several_groups_or_part_of_one():
    several = Placement(make_job(gpus_per_node=8, nodes=2)).slot_groups()
    assert several == [[(r, s) for r in range(4)] for s in range(2)]
    part = Placement(make_job(gpus_per_node=1, nodes=16, nvlink_domain_gpus=2)).slot_groups()
    assert part[:4] == [[(0, 0)], [(0, 0)], [(1, 0)], [(1, 0)]]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([0, 1, 2], "3 nodes, .*8 nodes"),
        ([0, 1, 2, 3, 4, 5, 6, 8], "slot 7 .*node 8, .* 8"),
        ([0, 1, 2, 3, 4, 5, 6, -1], "slot 7 .*node -1"),
        ([0, 1, 2, 3, 4, 5, 6, 2], "slots 2 and 7 .*node 2"),
        ([0, 1, 2.5, 3, 4, 5, 6, 7], "2.5"),
        ("nowhere.csv", "nowhere.csv"),
    ],
)
def test_hosts_that_are_no_placement(hosts, words):
    with pytest.raises(PrismError, match=rf"cluster\.hosts.*{words}"):
        make_job(hosts=hosts)
    if isinstance(hosts, list) and 2.5 not in hosts:
        with pytest.raises(PrismError, match=rf"cluster\.hosts.*{words}"):
            relocate(prepare(make_job(), 1), hosts, {})


def test_a_tp_group_stays_in_its_nvlink_domain():
    """tp 4 on nodes of 2 GPUs, domains of 4: pairs of nodes move together, or not at all."""
    sizes = {"tp": 4, "dp": 2}
    good = make_job(parallelism=sizes, nvlink_domain_gpus=4, hosts=[2, 3, 0, 1, 4, 5, 6, 7])
    assert Placement(good).members()[0, 0].tolist() == [4, 5, 6, 7]
    torn = make_job(parallelism=sizes, nvlink_domain_gpus=4, hosts=[0, 2, 1, 3, 4, 5, 6, 7])
    with pytest.raises(PrismError, match=r"ranks 0 to 3 .* nodes \[0, 2\].* domain of 4 GPUs"):
        prepare(torn, 1)


def test_spares_need_a_map_of_hosts():
    with pytest.raises(PrismError, match="10 nodes of 2 = 20 GPUs"):
        make_job(nodes=10)
    with pytest.raises(PrismError, match=r"8\*1 = 64|= 64"):
        make_job(nodes=8, hosts=list(range(8)), parallelism={"dp": 16})


def test_a_placement_file_is_read_beside_the_job(tmp_path):
    (tmp_path / "hosts.csv").write_text("slot,node\n1,0\n0,1\n")
    text = """
model: {durations: {forward_s: 1.0, backward_s: 2.0}}
parallelism: {pp: 2, microbatches: 4}
cluster: {gpus_per_node: 1, hosts: hosts.csv}
variability: {library: none}
"""
    (tmp_path / "job.yaml").write_text(text)
    job = load_job(tmp_path / "job.yaml")
    assert job.cluster.hosts == (1, 0)
    assert Placement(job).members()[0, :, 0].tolist() == [1, 0]
    (tmp_path / "hosts.csv").write_text("slot,node\n0,1\n")
    with pytest.raises(PrismError, match=r"job.yaml:4: cluster\.hosts: 1 node, expected 2"):
        load_job(tmp_path / "job.yaml")


# ---------------------------------------------------------------------------------- slow nodes
def test_kinds_of_slowness():
    assert slow_node(1.2) == NodeSlowdown(compute=1.2)
    assert slow_node(1.2, "memory") == NodeSlowdown(memory=1.2)
    assert slow_node(1.2, "network") == NodeSlowdown(network=1.2)
    assert slow_node(1.2, "everything") == NodeSlowdown(1.2, 1.2, 1.2, 1.2)
    assert set(KINDS) == {"compute", "memory", "network", "everything"}
    for bad in ((0.0,), (-1.0,), (float("nan"),), (1.2, "disk")):
        with pytest.raises(PrismError, match="expected"):
            slow_node(*bad)


def test_slowdowns_of_a_job_by_kind():
    job = make_job(node_slowdowns={0: 1.1, 1: {"everything": 1.2, "network": 1.5}})
    assert Placement(job).slowdowns() == {
        0: NodeSlowdown(1.1), 1: NodeSlowdown(1.2, 1.2, 1.5, 1.2)
    }  # fmt: skip
    assert load_job(job.model_dump(exclude={"name", "source"})) == job


@pytest.mark.parametrize(
    "value", [{"disk": 2.0}, {"network": 0}, {"cv": 0.1}, {}, {"network": None}, 0, True, "slow"]
)
def test_slowdowns_that_make_no_sense(value):
    with pytest.raises(PrismError, match=r"cluster\.node_slowdowns\.1: ") as caught:
        make_job(node_slowdowns={1: value})
    assert f"got {value!r}; " in str(caught.value)


def test_factors_out_of_range_and_unknown_nodes():
    step = prepare(make_job(), 1)
    with pytest.raises(PrismError, match="between 0.001 and 1000"):
        relocate(step, range(8), {1: slow_node(1e4, "network")})
    with pytest.raises(PrismError, match="no node 8 among 8"):
        relocate(step, range(8), {8: slow_node(1.2)})


LAYOUTS = {
    "tp, pp, dp": ({}, {}),
    "cp over nodes": ({"cp": 2, "dp": 2}, {}),
    "fsdp": ({"tp": 1, "pp": 1, "vpp": 1, "dp": 16, "data_parallel": "fsdp", "microbatches": 1},
             {"gpus_per_node": 2}),
    "blocking": ({"vpp": 1, "p2p": "blocking"}, {}),
    "kernel resolution": ({}, {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_nodes_slow_in_everything_slow_the_step(layout):
    """Every op of every kind has a factor: if all are 1.5, so is the step's."""
    parallelism, cluster = LAYOUTS[layout]
    job = make_job(parallelism=parallelism, **cluster)
    if layout == "kernel resolution":
        job = load_job(
            job.model_dump(exclude={"name", "source"})
            | {"variability": {"resolution": "kernel", "library": None, "effects": STILL}}
        )
    step = prepare(job, 1)
    slow = relocate(step, range(8), dict.fromkeys(range(8), slow_node(1.5, "everything")))
    healthy = float(times(step.program)[0, 0])
    assert float(times(slow)[0, 0]) == pytest.approx(1.5 * healthy, rel=1e-5)
    # a negative control: without the links, communication keeps its time
    rest = slow_node(1.5, "everything")._replace(network=1.0)
    short = relocate(step, range(8), dict.fromkeys(range(8), rest))
    assert float(times(short)[0, 0]) < 1.4999 * healthy


def seconds(program):
    """Seconds of every op type [replica, coef] at the slow nodes' mean."""
    a, r = lower(program.low, program.ranks.factor)
    return a.sum(axis=2), r


@pytest.mark.usefixtures("free_beside")
def test_slow_links_stretch_the_messages_that_use_them():
    step = prepare(make_job(), 1)
    slow = relocate(step, range(8), {5: slow_node(2.0, "network")})  # replica 1, stage 1
    before, after = seconds(step.program)[0], seconds(slow)[0]
    ratio = np.divide(after, before, out=np.ones_like(after), where=before > 0)
    for c, op_type in enumerate(step.graph.op_types):
        kind = op_type.collective.name if op_type.collective else op_type.op_kind
        expected = np.ones(4)
        if kind == "transfer":
            expected[1] = 2.0  # of both stages: one is where it comes from or goes to
        elif kind in ("grad_norm_reduce",) or (op_type.stage == 1 and "gather" in kind):
            expected[:] = 2.0
        elif op_type.stage == 1 and kind == "gradient_reduce":
            expected[:] = 2.0
        assert ratio[:, c] == pytest.approx(expected, rel=1e-6), (kind, op_type.stage)


@pytest.mark.usefixtures("free_beside")
def test_the_slowest_member_counts_once():
    step = prepare(make_job(), 1)
    two = relocate(step, range(8), {4: slow_node(1.5, "network"), 5: slow_node(2.0, "network")})
    one = relocate(step, range(8), {5: slow_node(2.0, "network")})
    a, b = seconds(two)[0], seconds(one)[0]
    is_global = np.array([t.link < 0 for t in step.graph.op_types])
    assert np.array_equal(a[:, is_global], b[:, is_global])
    assert np.all(a[0, ~is_global] > b[0, ~is_global])


SLOW_MEMORY = ("memory", "embedding")


def test_slow_memory_slows_memory_bound_kernels_and_the_optimizer():
    job = make_job()
    step = prepare(job, 1)
    both = {3: slow_node(1.5, "memory")}
    slow = relocate(step, range(8), both)
    before, after = seconds(step.program)[0], seconds(slow)[0]
    for c, op_type in enumerate(step.graph.op_types):
        kernels = [k for k in op_type.kernels if not k.group]
        memory = sum(k.duration for k in kernels if k.kernel_class in SLOW_MEMORY)
        expected = before[:, c].copy()
        if op_type.stage == 0:
            expected[3] += 0.5 * memory  # node 3 is replica 3 of stage 0
        if op_type.op_kind == "optimizer" and op_type.stage == 0:
            expected *= 1.5
        assert after[:, c] == pytest.approx(expected, rel=1e-5), op_type.op_kind


@pytest.mark.usefixtures("free_beside")
def test_everything_else_is_links_inside_the_node_and_launch_gaps():
    step = prepare(make_job(), 1)
    slow = relocate(step, range(8), {0: NodeSlowdown(other=3.0)})
    before, after = seconds(step.program)[0], seconds(slow)[0]
    c = next(i for i, t in enumerate(step.graph.op_types) if t.op_kind == "forward")
    op = step.graph.op_types[c]
    nvlink = sum(k.duration for k in op.kernels if k.group == "tp")
    gaps = sum(k.duration for k in op.kernels if k.kernel_class == "launch_gaps")
    assert nvlink > 0.0 and gaps > 0.0
    assert after[0, c] - before[0, c] == pytest.approx(2.0 * (nvlink + gaps), rel=1e-4)
    assert np.array_equal(after[1:, c], before[1:, c])


def test_leaves_follow_the_hosts():
    job = make_job(hosts=[0, 5, 2, 3, 4, 1, 6, 7])
    found = congested_links(Placement(job), [Ends((0, 1), False), Ends((0,), True)])
    # replica 1: stage 0 on node 5 (leaf 2), stage 1 on node 1 (leaf 0)
    assert touched(found, 0, 1) == {2, 0}
    assert touched(found, 1) == {0, 1, 2}


def test_a_group_on_far_nodes_touches_all_their_leaves():
    """cp 2 puts a group on two nodes; torn apart they are two ranges of leaves."""
    parallelism = {"cp": 2, "dp": 2}
    torn = make_job(parallelism=parallelism, hosts=[0, 6, 2, 3, 4, 5, 1, 7])
    whole, apart = (
        congested_links(Placement(j), [Ends((0, 1), False)])
        for j in (make_job(parallelism=parallelism), torn)
    )
    assert touched(whole, 0) == {0, 2} and touched(apart, 0) == {0, 2, 3}  # nodes 0, 6; 4, 5


# ------------------------------------------------------------------- groups in any order of ranks
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


def ordered_job(order, layout, gpus, effects=None, **cluster):
    layout = layout | {"vpp": 1, "data_parallel": "hsdp"}
    world = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    cluster |= {"nodes": world // gpus, "gpus_per_node": gpus, "placement": order}
    return make_job(effects, layout, **cluster)


def shard_nodes(job, n, gpus):
    """Node of every member of every (replica, stage) group of n data-parallel ranks."""
    p = job.parallelism
    rank = count_ranks(job.cluster.placement, p.tp, p.cp, p.dp, p.pp)
    return [
        [
            rank[s, r * n + k, c, t] // gpus
            for k in range(n) for c in range(p.cp) for t in range(p.tp)
        ]
        for r in range(p.dp // n) for s in range(p.pp)
    ]  # fmt: skip


ORDERED = [
    ("megatron", {"tp": 2, "cp": 1, "pp": 4, "dp": 8, "shard_size": 4}, 8),
    ("tp-cp-pp-dp", {"tp": 2, "cp": 1, "pp": 4, "dp": 8, "shard_size": 4}, 8),
    ("tp-cp-pp-dp", {"tp": 1, "cp": 2, "pp": 2, "dp": 8, "shard_size": 4}, 8),
    (
        "tp-cp-pp-dp",
        {"tp": 2, "pp": 3, "dp": 8, "cp": 1, "shard_size": 2, "layer_split": [3, 3, 2]},
        4,
    ),  # do not tile nodes
    ("megatron", {"tp": 2, "cp": 1, "pp": 2, "dp": 6, "shard_size": 3}, 4),
]


@pytest.mark.parametrize(("order", "layout", "gpus"), ORDERED)
def test_shard_groups_share_nodes_in_any_order_of_ranks(order, layout, gpus):
    effects = STILL | {"rank": {"cv": 0.02, "node_share": 1.0}}
    job = ordered_job(order, layout, gpus, effects)
    n = layout["shard_size"]
    # a data-parallel rank has one node here, and GPUs of a node are alike
    nodes = [group[:: layout["tp"] * layout["cp"]] for group in shard_nodes(job, n, gpus)]
    alike = {tuple(map(group.index, group)) for group in nodes}
    found = _relative_speeds(Placement(job), prepare(job, 0).effects.rank).tolist()
    assert {tuple(map(row.index, row)) for row in found} == alike


@pytest.mark.parametrize(("order", "layout", "gpus"), ORDERED)
def test_stalls_of_nodes_count_the_nodes_of_a_group(order, layout, gpus):
    job = ordered_job(order, layout, gpus)
    nodes = shard_nodes(job, layout["shard_size"], gpus)
    assert _entities(Placement(job), "node") == pytest.approx(np.mean([len(set(g)) for g in nodes]))
    assert _entities(Placement(job), "rank") == len(nodes[0])


@pytest.mark.parametrize(("order", "layout", "gpus"), ORDERED)
def test_links_of_hops_leave_where_a_member_does(order, layout, gpus):
    """A transfer goes from a rank to the one of its place in the next stage, and to no other."""
    unit = 2 * gpus
    tiers = {"site": {"gpus": unit, "latency_us": 5000}}
    job = ordered_job(order, layout, gpus, tiers=tiers)
    p, n = job.parallelism, layout["shard_size"]
    rank = count_ranks(order, p.tp, p.cp, p.dp, p.pp)
    hops = [Ends((stage, stage + 1), False) for stage in range(p.pp - 1)]
    found, site = congested_links(Placement(job), hops), Placement(job).n_leaves
    for r in range(p.dp // n):
        for s in range(p.pp - 1):
            pairs = [
                (rank[s, d, c, t], rank[s + 1, d, c, t])
                for d in range(r * n, r * n + n) for c in range(p.cp) for t in range(p.tp)
            ]  # fmt: skip
            expected = {site} if any(a // unit != b // unit for a, b in pairs) else set()
            if any(a // gpus != b // gpus for a, b in pairs):
                expected |= {x // gpus // job.cluster.leaf_nodes for pair in pairs for x in pair}
            assert touched(found, s, r) == expected
