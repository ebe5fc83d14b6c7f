"""Groups of experts over data-, context- and tensor-parallel ranks, against their enumeration."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_jobs import make_job, times

import prism
from prism import PrismError, load_library
from prism.analyses.sweeps.layouts import global_batch, layouts
from prism.cluster.groups import Layout, count_replicas, layout_of, shard_size
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.workload.build import build_workload
from prism.workload.memory import estimate_memory
from prism.workload.modelsize import count_parameters

LIBRARY = load_library("h100-healthy")
OVER_TP = {"tp": 2, "dp": 4, "ep": 8, "expert_tp": 1, "data_parallel": "zero1"}


def enumerated(layout):
    """Ranks that hold the experts between them, and those that hold the same ones, as sets.

    A rank's place in its stage counts first the ranks of an expert, then those of its ep group.
    """
    ep, same = {}, {}
    for stage in range(layout.pp):
        sizes = range(layout.dp), range(layout.cp), range(layout.tp)
        for place, (replica, c, t) in enumerate(product(*sizes)):
            rank = stage * layout.stage_stride + replica * layout.replica_stride
            rank += c * layout.tp + t
            rest, part = divmod(place, layout.expert_tp)
            block, expert = divmod(rest, layout.ep)
            ep.setdefault((stage, block, part), set()).add(rank)
            same.setdefault((stage, expert, part), set()).add(rank)
    return [{frozenset(group) for group in kind.values()} for kind in (ep, same)]


@st.composite
def expert_layouts(draw):
    """Draw small layouts of experts."""
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    expert_tp = draw(st.sampled_from([1, tp]))
    over = dp * cp * tp // expert_tp
    ep = draw(st.sampled_from([n for n in range(1, over + 1) if over % n == 0]))
    strides = draw(st.sampled_from([(tp * cp * dp, tp * cp), (tp * cp, tp * cp * pp)]))
    shard = np.lcm(ep * expert_tp, tp * cp) // (tp * cp)
    return Layout(tp, cp, dp, pp, *strides, int(shard), ep, expert_tp)


@given(layout=expert_layouts())
def test_groups_are_those_enumerated(layout):
    for kind, want in zip(("ep", "expert_dp"), enumerated(layout), strict=True):
        groups = layout.groups(kind).tolist()
        assert {frozenset(group) for group in groups} == want
        assert len(groups) == len(want)
        assert sorted(sum(groups, [])) == sorted(set().union(*want))  # every rank once
        assert all(group == sorted(group) for group in groups)
    simulated = layout.ranks(layout.shard)
    of = {r: i for i, row in enumerate(simulated.reshape(len(simulated), -1)) for r in row.tolist()}
    assert all(len({of[rank] for rank in group}) == 1 for group in layout.groups("ep").tolist())


def test_groups_of_megatron_by_hand():
    """Two stages of 8 ranks, tp 2, whole experts: 8 of a stage, or halves of it."""
    whole = layout_of(make_job(pp=2, microbatches=2, **OVER_TP))
    assert whole.groups("ep").tolist() == [list(range(8)), list(range(8, 16))]
    assert whole.groups("expert_dp").shape == (16, 1)
    parts = layout_of(make_job(tp=2, cp=2, dp=2, ep=4))  # an expert on both tp ranks
    assert parts.groups("ep").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    inside = layout_of(make_job(tp=4, dp=3, ep=2, expert_tp=1))
    assert inside.groups("ep").tolist()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert inside.groups("expert_dp").tolist() == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize(
    ("layout", "size", "replicas"),
    [
        (OVER_TP, 4, 1),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 8}, 4, 1),
        ({"tp": 4, "dp": 3, "ep": 2, "expert_tp": 1}, 1, 3),
        ({"cp": 4, "dp": 3, "ep": 2}, 1, 3),
        ({"tp": 2, "cp": 3, "dp": 2, "ep": 4, "expert_tp": 1}, 2, 1),  # three share ranks
    ],
)
def test_data_parallel_ranks_that_an_ep_group_joins_are_simulated_as_one(layout, size, replicas):
    job = make_job(model={"seq_len": 1536}, **layout)
    p = job.parallelism
    assert (shard_size(job), count_replicas(job)) == (size, replicas)
    assert Placement(job).members().shape == (replicas, 1, size * p.tp * p.cp)
    program = prepare(job, 1).program
    ideal = times(ideal_program(program))[0, 0]
    assert times(program)[0, 0] == pytest.approx(ideal, rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        OVER_TP, {"tp": 2, "cp": 2, "dp": 2, "ep": 4}, {"tp": 4, "dp": 2, "ep": 2, "expert_tp": 1},
        {"cp": 4, "dp": 2, "ep": 8},
    ],
)  # fmt: skip
def test_ranks_hold_and_send_the_whole_once(layout):
    """Optimizer, parameters and tokens, summed over all ranks, do not depend on the layout."""
    job = make_job(**{"data_parallel": "zero1"} | layout)
    p, m = job.parallelism, job.model
    n_ranks = p.dp * p.cp * p.tp
    work, cluster = build_workload(job, LIBRARY), build_cluster(job, LIBRARY)
    assert sum(o.bytes for o in work.optimizer) * n_ranks == pytest.approx(
        30.0 * count_parameters(m), rel=1e-12
    )
    assert cluster.group("ep").n_ranks == p.ep
    assert cluster.group("expert_dp").n_ranks * p.ep * p.expert_shards == n_ranks
    sent = [k.bytes for row in work.chunks for c in row for k in c.forward if k.name == "dispatch"]
    tokens = p.dp * p.microbatch_size * m.seq_len
    copies = tokens * m.experts_per_token
    assert [b * n_ranks for b in sent] == [pytest.approx(2.0 * copies * m.hidden_size)] * 3
    up = [k.flop for row in work.chunks for c in row for k in c.forward if k.name == "expert_up"]
    gated = 2 * m.expert_ffn_size
    assert [f * n_ranks for f in up] == [pytest.approx(2.0 * copies * gated * m.hidden_size)] * 3


def test_more_ranks_to_hold_the_experts_need_less_memory_and_no_less_time_to_send():
    jobs = [make_job(**OVER_TP | {"ep": ep}, cluster={"gpus_per_node": 2, "nodes": 4})
            for ep in (2, 4, 8)]  # fmt: skip
    weights = [estimate_memory(job).weights for job in jobs]
    assert weights[0] > weights[1] > weights[2]
    sent = []
    for job in jobs:
        cluster = build_cluster(job, LIBRARY)
        sent.append(cluster.collective_time("all_to_all", 1e8, cluster.group("ep")))
    assert sent[0] <= sent[1] <= sent[2]


def test_a_slow_rank_anywhere_in_the_group_delays_all():
    """Whole experts: the ranks of every node wait for the slowest of the stage."""
    step = {}
    for node in (None, 0, 3):
        slow = {} if node is None else {"node_slowdowns": {node: 1.5}}
        job = make_job(**OVER_TP, cluster={"nodes": 4, "gpus_per_node": 2} | slow)
        step[node] = times(prepare(job, 1).program)[0, 0]
    assert step[0] == pytest.approx(step[3], rel=1e-6)
    assert step[0] > 1.1 * step[None]


def test_a_placed_job_sends_as_the_cluster_says():
    job = make_job(**OVER_TP, pp=2, microbatches=2, cluster={"pod_gpus": 8, "oversubscription": 3})
    cluster = build_cluster(job, LIBRARY)
    wiring = Wiring(cluster, Placement(job))
    want = cluster.collective_time("all_to_all", 1e8, cluster.group("ep"))
    assert wiring.is_nominal("ep") and wiring.seconds("ep", 1e8) == pytest.approx([want])
    assert cluster.group("ep").domains(4) == 2


def test_steps_vary_where_experts_are_on_tensor_parallel_ranks():
    effects = {"rank": {"cv": 0.02}, "expert": {"cv": 0.05}, "microbatch": {"cv": 0.02}}
    job = make_job(effects, **OVER_TP)
    found = prism.simulate(job, replicates=256, seed=1).step_time
    ideal = times(ideal_program(prepare(job, 1).program))[0, 0]
    assert float(found.mean()) > ideal and float(found.std()) > 0.0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 2, "dp": 4, "ep": 8}, "ep: 8 .*dp = 4; .*1, 2, 4, .*expert_tp: 1"),
        ({"tp": 2, "dp": 4, "ep": 16, "expert_tp": 1}, "ep: 16 .*dp . tp = 8; .*1, 2, 4, 8$"),
        ({"cp": 2, "dp": 6, "ep": 8}, "ep: 8 .*dp . cp = 12; .*1, 2, 3, 4, 6, 12$"),
        ({"dp": 8, "ep": 16}, "ep: 16 .*dp = 8; "),
    ],
)
def test_ep_that_does_not_divide_is_refused(layout, words):
    with pytest.raises(PrismError, match=words):
        make_job(**layout)


def test_layouts_of_a_sweep_spread_experts_over_the_ranks_of_a_stage():
    job = make_job(**OVER_TP)
    found = [s for s, _ in layouts(job, global_batch(job))]
    sizes = {tuple(int(s[f"parallelism.{key}"]) for key in ("tp", "cp", "pp", "dp")) for s in found}
    assert {(1, 1, 1, 8), (2, 1, 1, 4), (4, 1, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2)} <= sizes
    assert all(tp * cp * dp % 8 == 0 for tp, cp, _, dp in sizes)
    divided = make_job(tp=2, dp=8, ep=8)  # an expert on all tp ranks
    found = [s for s, _ in layouts(divided, global_batch(divided))]
    assert {s["parallelism.tp"] for s in found} == {"1", "2"}
