"""Groups of experts over data-, context- and tensor-parallel ranks."""

import numpy as np
import pytest
from played_ops import of_kind, play
from test_stepgraph import sized

import prism

MODEL = {
    "n_layers": 2, "n_experts": 16, "experts_per_token": 2, "expert_ffn_size": 1408,
    "n_shared_experts": 1, "n_dense_layers": 1, "ffn_size": 4096,
}  # fmt: skip
OVER_TP = {"tp": 2, "dp": 4, "ep": 8, "expert_tp": 1, "data_parallel": "zero1"}


def make_job(effects=None, cluster=None, model=None, **parallelism):
    """A dense layer and one with experts, all ranks equally busy."""
    layout = {"expert_imbalance": 1.0, "microbatches": 1} | parallelism
    return sized(MODEL | (model or {}), {"gpus_per_node": 2} | (cluster or {}), effects, **layout)


def groups_of(layout):
    """Ranks that hold the experts between them, and those that hold the same ones, by enumeration.

    A rank's place in its stage counts first the ranks of an expert, then those of its ep group.
    """
    tp, n = layout.get("tp", 1), layout.get("tp", 1) * layout.get("cp", 1) * layout["dp"]
    each = layout.get("expert_tp", tp)
    ep, same = {}, {}
    for rank in range(n):
        rest, part = divmod(rank, each)
        block, expert = divmod(rest, layout["ep"])
        ep.setdefault((block, part), []).append(rank)
        same.setdefault((expert, part), []).append(rank)
    return list(ep.values()), list(same.values())


LAYOUTS = [
    {"tp": 2, "dp": 4, "ep": 2}, {"tp": 2, "cp": 2, "dp": 2, "ep": 4}, {"dp": 8, "ep": 4},
    {"dp": 8, "ep": 2}, {"tp": 2, "dp": 4, "ep": 4, "expert_tp": 1}, {"cp": 4, "dp": 2, "ep": 8},
    {"tp": 2, "dp": 4, "ep": 8, "expert_tp": 1}, {"tp": 4, "dp": 2, "ep": 2, "expert_tp": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "gpus_per_node"),
    # tp and cp do not cross the network themselves
    [(x, n) for x in LAYOUTS for n in (2, 4, 8) if x.get("tp", 1) * x.get("cp", 1) <= n],
)
def test_tokens_cross_the_network_where_a_group_does(layout, gpus_per_node):
    """Megatron's groups: neighbours, or every tp-th rank where an expert is on all tp ranks."""
    forward = []
    for bandwidth in (50.0, 5.0):
        links = {"network": {"bandwidth_gbytes_per_s": bandwidth}}
        job = make_job(cluster={"gpus_per_node": gpus_per_node, "links": links}, **layout)
        ops = play(job, replicas=(0,))
        forward.append(sum(op.duration for op in of_kind(ops, "forward")))
    crosses = any(len({r // gpus_per_node for r in group}) > 1 for group in groups_of(layout)[0])
    assert (forward[1] > 1.02 * forward[0]) == crosses
    assert crosses or forward[1] == pytest.approx(forward[0], rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_experts_are_summed_over_those_who_hold_the_same(layout):
    """No message at all where nobody does; the wider the experts, the longer otherwise."""
    found = []
    for width in (1408, 5632):
        model = {"expert_ffn_size": width, "n_shared_experts": 0}
        ops = play(make_job(model=model, data_parallel="ddp", overlap=False, **layout),
                   replicas=(0,))  # fmt: skip
        sums = [op.duration for op in of_kind(ops, "all_reduce") if op.name != "grad_norm_reduce"]
        found.append(sum(sums))
    few, many = found
    if len(groups_of(layout)[1][0]) == 1:
        assert many == pytest.approx(few, rel=1e-6)
    else:
        assert many > 1.5 * few


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        (OVER_TP, 1),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 8}, 1),
        ({"tp": 4, "dp": 3, "ep": 2, "expert_tp": 1}, 3),
        ({"cp": 4, "dp": 3, "ep": 2}, 3),
        ({"tp": 2, "cp": 3, "dp": 2, "ep": 4, "expert_tp": 1}, 1),  # three share ranks
    ],
)
def test_data_parallel_ranks_that_an_ep_group_joins_are_simulated_as_one(layout, replicas):
    job = make_job(model={"seq_len": 1536}, **layout)
    found = prism.simulate(job, 64, seed=1)
    assert found.replicas_replicas == replicas
    assert found.step_time.values == pytest.approx(float(found.ideal_step_time), rel=1e-6)


def test_more_ranks_that_hold_the_experts_need_less_memory_each():
    parts = []
    for ep in (2, 4, 8):
        job = make_job(cluster={"nodes": 4}, **OVER_TP | {"ep": ep})
        numbers = prism.summary(prism.estimate(job, replicates=64, run_replicates=1, steps=1,
                                               seed=1))  # fmt: skip
        parts.append(numbers["memory"]["parts"])
    weights, optimizer = (np.array([p[key] for p in parts]) for key in ("parameters", "optimizer"))
    # of 8 ranks, 1/ep of the experts each; parameters of 2 bytes [GiB]
    experts = 16 * 3 * 1024 * 1408 * 2 / 2**30
    assert weights[0] - weights[1:] == pytest.approx(experts * np.array([1 / 4, 3 / 8]), rel=1e-6)
    # zero1 divides its optimizer among all who hold the same: it is the same share of the whole
    assert optimizer == pytest.approx(optimizer[0], rel=1e-6)


def test_a_slow_rank_anywhere_in_the_group_delays_all():
    """Whole experts: the ranks of every node wait for the slowest of the stage."""
    step = {}
    for node in (None, 0, 3):
        slow = {} if node is None else {"node_slowdowns": {node: 1.5}}
        job = make_job(cluster=slow, model={"seq_len": 4096}, **OVER_TP)
        step[node] = prism.simulate(job, 64, seed=1).step_time[0]
    assert float(step[0]) == pytest.approx(float(step[3]), rel=1e-6)
    assert float(step[0]) > 1.1 * float(step[None])


def test_sending_to_more_ranks_takes_no_less_time():
    """Tokens go to as many experts; of more ranks, more are on other nodes."""
    sent = []
    for ep in (2, 4, 8):
        links = {"network": {"bandwidth_gbytes_per_s": 2.0}}
        ops = play(make_job(cluster={"links": links}, dp=8, ep=ep), replicas=(0,))
        sent.append(sum(op.duration for op in of_kind(ops, "forward")))
    assert sent[0] < sent[1] < sent[2]


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        ({"tp": 2, "dp": 4, "ep": 8}, "1, 2, 4"),
        ({"tp": 2, "dp": 4, "ep": 16, "expert_tp": 1}, "1, 2, 4, 8"),
        ({"cp": 2, "dp": 6, "ep": 8}, "1, 2, 3, 4, 6, 12"),
        ({"dp": 8, "ep": 16}, "1, 2, 4, 8"),
    ],
)
def test_ep_that_does_not_divide_is_refused(layout, fits):
    with pytest.raises(prism.PrismError, match=rf"parallelism\.ep\b.*\b{fits}\b"):
        make_job(**layout)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (OVER_TP, {(1, 1, 1, 8), (2, 1, 1, 4), (4, 1, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2)}),
        # an expert on all tp ranks
        ({"tp": 2, "dp": 8, "ep": 8}, {(1, 1, 1, 16), (2, 1, 1, 8)}),
    ],
)
def test_layouts_of_a_sweep_spread_experts_over_the_ranks_of_a_stage(layout, expected):
    job = make_job(cluster={"gpus_per_node": 4}, **{"microbatches": 2} | layout)
    rows = prism.summary(prism.sweep(job, layouts=True, replicates=64, seed=1))["rows"]
    names = ("tp", "cp", "pp", "dp")
    sizes = {tuple(row[f"parallelism.{name}"] for name in names) for row in rows}
    assert expected <= sizes
    each = 1 if "expert_tp" in layout else None
    assert all(tp * cp * dp // (each or tp) % 8 == 0 for tp, cp, _, dp in sizes)
