"""Experts: published counts, work against closed forms, all-to-alls, groups and their refusals."""

from dataclasses import replace
from itertools import combinations
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_jobs import LATENT, MODEL, make_job, times

from prism import PrismError, load_job, load_library, slow_node
from prism.analyses.sweeps.layouts import global_batch, layouts
from prism.cluster.dispatch import Dispatch, distinct_parts
from prism.cluster.groups import Group, Layout, count_replicas, shard_size
from prism.cluster.machine import build_cluster
from prism.cluster.nodemap import Placement
from prism.cluster.wiring import Wiring
from prism.jobs.jobspec.blocks import ModelBlock
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.workload.build import build_workload, count_model_flop
from prism.workload.experts import DEFAULT_IMBALANCE, expert_imbalance
from prism.workload.memory import ADAM_BYTES, estimate_memory, layer_activation_bytes
from prism.workload.modelsize import attention_flop, count_parameters, shard_sizes
from prism.workload.transformer import TP_OVERLAP_COST

LIBRARY = load_library("h100-healthy")


def kernels(work, direction):
    return [k for row in work.chunks for chunk in row for k in getattr(chunk, direction)]


def ideal_step(job):
    return float(times(ideal_program(prepare(job, 1).program))[0, 0])


# ------------------------------------------------------------------------------------ parameters
def test_mixtral_has_the_parameters_of_its_checkpoint():
    model = ModelBlock(name="mixtral-8x7b")
    assert count_parameters(model) == 46_702_792_704  # the published checkpoint's
    assert count_parameters(model, active=True) == pytest.approx(12.9e9, rel=0.005)  # its paper's


def test_deepseek_v3_has_671_billion_parameters_without_its_prediction_module():
    model = ModelBlock(name="deepseek-v3")
    assert count_parameters(model) == pytest.approx(671e9, rel=0.001)
    active = count_parameters(model, active=True)
    # The paper says 37B. The checkpoint's README_WEIGHTS.md says 36.7B with both embeddings, but
    # that is what one of them gives: the input embedding is 0.93B.
    assert active == pytest.approx(37e9, rel=0.02)
    assert active - model.vocab_size * model.hidden_size == pytest.approx(36.7e9, rel=0.003)


def test_parameters_of_a_small_model_by_hand():
    h, f, e = 1024, 4096, 1408
    attention = 4 * h * h + 2 * h
    dense = attention + 3 * h * f
    sparse = attention + 16 * h + 3 * h * e * (16 + 1)
    whole = dense + 3 * sparse + 2 * 8000 * h + h
    model = make_job().model
    assert count_parameters(model) == whole
    assert count_parameters(model, active=True) == whole - 3 * 14 * 3 * h * e
    latent = make_job(model=LATENT).model
    down = h * (384 + 128 + 32) + 384 + 128
    up = 384 * 8 * 96 + 128 * 8 * (64 + 64)
    assert count_parameters(latent) - whole == 4 * (down + up + 8 * 64 * h - 4 * h * h)


def test_tp_ranks_sum_the_gradients_of_what_each_has_whole():
    """Norms, routers and the way down to latents work on a rank's own tokens."""
    h, down = 1024, 1024 * (384 + 128 + 32) + 384 + 128
    for latents, own in (({}, 0), (LATENT, down)):
        job = make_job(model=latents, tp=2, dp=8, sequence_parallel=True, bucket_layers=4)
        reduce = build_workload(job, None).layernorm_reduce
        assert reduce.bytes == 4.0 * (4 * (2 * h + own) + 3 * 16 * h)


@pytest.mark.parametrize(
    "layout", [{"ep": 1}, {"ep": 4}, {"ep": 16}, {"ep": 2, "dp": 4, "pp": 4, "microbatches": 4}]
)
def test_the_ranks_hold_the_model_once_between_them(layout):
    """zero1: over all ranks of a stage, the optimizer touches every parameter once."""
    job = make_job(data_parallel="zero1", **layout)
    work = build_workload(job, LIBRARY)
    touched = sum(o.bytes for o in work.optimizer) * job.parallelism.dp
    assert touched == pytest.approx(30.0 * count_parameters(job.model), rel=1e-12)


def test_two_reductions_among_the_ranks_that_share():
    job = make_job(dp=16, ep=4, data_parallel="zero1")
    work, cluster = build_workload(job, LIBRARY), build_cluster(job, LIBRARY)
    held = 3 * 3 * 1024 * 1408 * 16 / 4
    dense = count_parameters(job.model) - 4 * held
    reduce = [each[0] for row in work.reduces for each in row]
    experts = [c for row in work.reduces for each in row for c in each[1:]]
    assert sum(c.bytes for c in reduce) == pytest.approx(4.0 * dense)
    assert sum(c.bytes for c in experts) == pytest.approx(4.0 * held)
    assert {c.group for c in reduce} == {"dp_cp"} and {c.group for c in experts} == {"expert_dp"}
    assert cluster.group("dp_cp").n_ranks == 16 and cluster.group("expert_dp").n_ranks == 4
    (gather,) = work.param_gathers[1]
    assert gather.bytes == pytest.approx(2.0 * held)
    names = [t.collective.name for t in prepare(job, 1).graph.op_types if t.collective]
    for name in ("gradient_reduce", "expert_gradient_reduce", "expert_parameter_gather"):
        assert name in names
    alone = build_workload(make_job(ep=16), LIBRARY)
    assert all(len(each) == 1 for row in alone.reduces for each in row)  # nobody shares them


def test_fsdp_gathers_experts_among_fewer_ranks():
    work = build_workload(make_job(ep=4, data_parallel="fsdp"), LIBRARY)
    gathered = [c for row in work.gathers for each in row for c in each[1:]]
    assert len(gathered) == 3 and {c.group for c in gathered} == {"expert_dp"}  # one a sparse layer
    assert [c.name for c in work.gathers[0][1]] == ["parameter_gather", "expert_parameter_gather"]
    assert ideal_step(make_job(ep=4, data_parallel="fsdp")) > 0.0


# ---------------------------------------------------------------------------------------- flop
@pytest.mark.parametrize("latent", [{}, LATENT])
@pytest.mark.parametrize("layout", [{"ep": 1}, {"ep": 8}, {"ep": 2, "tp": 2, "dp": 4}])
def test_kernels_do_the_model_flop(latent, layout):
    """Forward: two flop for every active matrix element and token, and attention's."""
    job = make_job(model=latent, microbatches=1, **layout)
    work, m, p = build_workload(job, LIBRARY), job.model, job.parallelism
    norms = 2 * m.n_layers * m.hidden_size + m.hidden_size
    norms += m.n_layers * (m.q_lora_rank + m.kv_lora_rank)
    matrices = count_parameters(m, active=True) - norms - m.vocab_size * m.hidden_size
    want = 2.0 * m.seq_len * matrices + m.n_layers * attention_flop(m, 1)
    forward = sum(k.flop for k in kernels(work, "forward"))
    assert forward * p.tp == pytest.approx(want, rel=1e-12)
    products = sum(k.flop for k in kernels(work, "backward") if k.kernel_class != "attention")
    attention = sum(k.flop for k in kernels(work, "forward") if k.kernel_class == "attention")
    assert products == pytest.approx(2.0 * (forward - attention), rel=1e-12)


def test_model_flop_counts_active_parameters():
    job = load_job("deepseek-v3-2048")
    m, tokens = job.model, 15_360 * 4_096
    attention = 3 * 61 * 128 * (192 + 128) * 4_096 * tokens
    want = 6 * count_parameters(m, active=True) * tokens + attention
    assert count_model_flop(job) == pytest.approx(want, rel=1e-12)


def test_sparse_heads_without_latents_are_the_plain_ones():
    """A layer whose experts are one, and that one all of the tokens', does a dense layer's work."""
    one = {"n_experts": 1, "experts_per_token": 1, "expert_ffn_size": 0, "n_shared_experts": 0,
           "n_dense_layers": 0}  # fmt: skip
    sparse = build_workload(make_job(model=one, ep=1), LIBRARY)
    dense = build_workload(make_job(model={**one, "n_experts": 0, "experts_per_token": 0}, ep=1),
                           LIBRARY)  # fmt: skip
    names = {k.name for k in kernels(dense, "forward")}
    for direction in ("forward", "backward"):
        mine = [k for k in kernels(sparse, direction) if "mlp" not in k.name]
        other = [k for k in kernels(dense, direction) if "mlp" not in k.name]
        extra = [k for k in mine if k not in other]
        assert all(k.name.startswith(("router", "routing", "expert", "permute", "unpermute"))
                   for k in extra)  # fmt: skip
    up = next(k for k in kernels(sparse, "forward") if k.name == "expert_up")
    assert "mlp_up" in names
    like = next(k for k in kernels(dense, "forward") if k.name == "mlp_up")
    assert (up.flop, up.bytes, up.duration) == (like.flop, like.bytes, like.duration)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_the_host_holds_up_layers_with_experts_unless_they_are_cuda_graphs(recompute, passes):
    cost, layers = LIBRARY.value("nominal/expert_layer_s"), MODEL["n_layers"] - 1
    blocks = {"variability": {"library": "h100-healthy"}, "recompute": recompute}
    launched, graphs = (ideal_step(make_job(**blocks, cuda_graphs=on)) for on in (False, True))
    assert launched - graphs == pytest.approx(2 * layers * passes * cost, rel=1e-3)
    dense = {"n_experts": 0, "experts_per_token": 0, "expert_ffn_size": 0,
             "n_shared_experts": 0, "n_dense_layers": 0}  # fmt: skip
    job = make_job(model=dense, ep=1, variability={"library": "h100-healthy"})
    assert not [k for k in kernels(build_workload(job, LIBRARY), "forward") if "host" in k.name]


def test_every_expert_has_weights_of_its_own():
    """A grouped product reads as many weights, and adds to as many gradients, as it has experts."""
    work = build_workload(make_job(ep=4), LIBRARY)
    copies, h, f = 2 * 1024, 1024, 1408
    up = next(k for k in kernels(work, "forward") if k.name == "expert_up")
    assert up.bytes == 2.0 * copies * (h + 2 * f) + 2.0 * 4 * h * 2 * f
    weight = next(k for k in kernels(work, "backward") if k.name == "expert_up_wgrad")
    assert weight.bytes == 2.0 * copies * (h + 2 * f) + 8.0 * 4 * h * 2 * f


# ------------------------------------------------------------------------------------ all-to-all
def links(job):
    cluster = replace(build_cluster(job, LIBRARY), measured={})
    return cluster, cluster.nvlink, cluster.network


def test_all_to_all_inside_a_node():
    cluster, nvlink, _ = links(make_job(ep=4))
    want = nvlink.latency_s + 1e9 * 3 / 4 / nvlink.bytes_per_s
    assert cluster.collective_time("all_to_all", 1e9, cluster.group("ep")) == pytest.approx(want)


def test_all_to_all_between_nodes_is_bound_by_the_slower_part():
    cluster, nvlink, network = links(make_job(ep=16))  # four nodes of four
    group = cluster.group("ep")
    latency = nvlink.latency_s + network.latency_s
    want = latency + max(1e9 * 3 / 16 / nvlink.bytes_per_s, 1e9 * 12 / 16 / network.bytes_per_s)
    assert cluster.collective_time("all_to_all", 1e9, group) == pytest.approx(want)
    slow = replace(cluster, nvlink=replace(nvlink, bytes_per_s=network.bytes_per_s / 8))
    want = latency + 1e9 * 3 / 16 / network.bytes_per_s * 8
    assert slow.collective_time("all_to_all", 1e9, group) == pytest.approx(want)
    assert cluster.collective_time("all_to_all", 0.0, group) == 0.0


def test_tokens_cross_the_network_once_for_each_of_their_nodes():
    """Four of eight copies' nodes at most; NVLink then carries all copies but a rank's own."""
    cluster, nvlink, network = links(make_job(ep=16))
    for most, crossing in ((1, 1 / 8), (4, 4 / 8), (9, 4 / 8)):
        limited = replace(cluster, token_copies=8, most_domains=most)
        want = max(1e9 * 3 / 4 / nvlink.bytes_per_s, 1e9 * crossing * 3 / 4 / network.bytes_per_s)
        want += nvlink.latency_s + network.latency_s
        found = limited.collective_time("all_to_all", 1e9, limited.group("ep"))
        assert found == pytest.approx(want)


def test_what_leaves_a_pod_shares_its_way_out():
    cluster, nvlink, network = links(
        make_job(ep=16, cluster={"pod_gpus": 8, "oversubscription": 7.0})
    )
    # 8 of 16 parts leave the pod at a seventh of the rate; 12 leave the node
    want = nvlink.latency_s + network.latency_s + 1e9 * 8 / 16 * 7.0 / network.bytes_per_s
    found = cluster.collective_time("all_to_all", 1e9, cluster.group("ep"))
    assert found == pytest.approx(want)


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 8}, {"ep": 2, "tp": 2, "dp": 8}])
def test_a_layer_has_two_all_to_alls_each_way(layout):
    job = make_job(microbatch_size=3, **layout)
    work, cluster = build_workload(job, LIBRARY), build_cluster(job, LIBRARY)
    n_bytes = 2.0 * 3 * 1024 / job.parallelism.tp * 2 * 1024  # bfloat16, tokens, copies, width
    for direction in ("forward", "backward"):
        found = [k for k in kernels(work, direction) if k.group == "ep"]
        assert len(found) == 2 * 3 and {k.bytes for k in found} == {n_bytes}
        want = cluster.collective_time("all_to_all", n_bytes, cluster.group("ep"))
        assert all(k.duration == pytest.approx(want) for k in found)
    assert not [k for k in kernels(build_workload(make_job(ep=1), LIBRARY), "forward") if k.group]


def test_overlap_hides_all_to_alls_behind_as_much_compute():
    def sent(job):
        work = build_workload(job, LIBRARY)
        sparse = [k for k in kernels(work, "backward") if k.group == "ep"]
        return sum(k.duration for k in sparse), work

    plain, _ = sent(make_job(ep=16))
    hidden, _ = sent(make_job(ep=16, expert_overlap=True))
    assert TP_OVERLAP_COST * plain * (1.0 - 1e-12) <= hidden < plain
    slow = {"links": {"network": {"bandwidth_gbytes_per_s": 0.1}}}
    exposed, work = sent(make_job(ep=16, cluster=slow))
    left, _ = sent(make_job(ep=16, cluster=slow, expert_overlap=True))
    loss = ("cross_entropy_backward", "logits_dgrad", "logits_wgrad", "final_norm_backward",
            "embedding_backward")  # fmt: skip
    beside = [k for k in kernels(work, "backward") if not k.group and k.name not in loss]
    dense = build_workload(make_job(ep=1, model={"n_layers": 1, "n_experts": 0, **NO_EXPERTS}),
                           LIBRARY)  # fmt: skip
    first = [k for k in kernels(dense, "backward") if not k.group and k.name not in loss]
    compute = sum(k.duration for k in beside) - sum(k.duration for k in first)
    assert exposed - left == pytest.approx(compute, rel=1e-9)


NO_EXPERTS = {"experts_per_token": 0, "expert_ffn_size": 0, "n_shared_experts": 0,
              "n_dense_layers": 0}  # fmt: skip


# ----------------------------------------------------------------------------------- ep groups
def test_ep_ranks_are_neighbours_and_simulated_as_one():
    job = make_job(tp=2, pp=2, dp=8, ep=4)
    assert shard_size(job) == 4 and count_replicas(job) == 2
    assert Placement(job).members()[1, 0].tolist() == list(range(8, 16))
    order = make_job(tp=2, pp=2, dp=8, ep=2, cluster={"placement": "tp-cp-pp-dp"})
    assert Placement(order).members()[0, 0].tolist() == [0, 1, 4, 5]


SIZES = st.integers(1, 4)


@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES), together=st.booleans(),
       n_gpus=st.integers(1, 40))  # fmt: skip
def test_domains_against_all_expert_groups(sizes, together, n_gpus):
    """Brute force: every rank of every group of a small machine, in both orders of ranks."""
    tp, cp, ep, groups, pp = sizes
    dp = ep * groups
    stage, replica = (tp * cp, tp * cp * pp) if together else (tp * cp * dp, tp * cp)
    shard = ep // gcd(ep, cp)
    layout = Layout(tp, cp, dp, pp, stage, replica, shard, ep, tp)
    cluster = replace(build_cluster(make_job(), LIBRARY), layout=layout)
    axes = np.ix_(*map(range, (pp, dp, cp, tp)))
    steps = (stage, replica, tp, 1)
    ranks = sum(axis * step for axis, step in zip(axes, steps, strict=True))
    ranks = ranks.reshape(pp, groups * cp, ep, tp)
    for name, among in {"ep": (2,), "expert_dp": (1,)}.items():
        count = int(np.prod([ranks.shape[a] for a in among]))
        members = np.moveaxis(ranks // n_gpus, among, range(-len(among), 0)).reshape(-1, count)
        group = cluster.group(name)
        assert isinstance(group, Group) and group.n_ranks == count
        assert group.domains(n_gpus) == max(len(set(row)) for row in members.tolist()), name


@pytest.mark.parametrize("order", ["megatron", "tp-cp-pp-dp"])
def test_a_placed_job_sends_as_the_default_one_where_it_is_that(order):
    """Wiring counts the rings there are; `Cluster` has closed forms for the default order."""
    job = make_job(
        tp=2, pp=2, cp=2, dp=8, ep=4,
        cluster={"placement": order, "pod_gpus": 16, "oversubscription": 3.0},
    )  # fmt: skip
    cluster = build_cluster(job, LIBRARY)
    wiring = Wiring(cluster, Placement(job))
    want = cluster.collective_time("all_to_all", 1e8, cluster.group("ep"))
    assert wiring.seconds("ep", 1e8) == pytest.approx(np.full(4, want))
    members = Placement(job).members().reshape(4, 2, 4, 2)  # group, stage, ep, tp
    flat = members.transpose(1, 2, 3, 0).reshape(-1, 4)
    domains = max(len(set(row)) for row in (flat // 4).tolist())
    assert cluster.group("expert_dp").domains(4) == domains
    assert {each.domains for each in wiring._rings_reach("expert_dp").distinct} <= set(
        range(1, domains + 1)
    )


def test_one_rank_alone_takes_the_sum_of_its_kernels():
    """ep = 1 and one GPU: nothing to wait for."""
    job = make_job(dp=1, ep=1, microbatches=3)
    work = build_workload(job, None)
    each = sum(k.duration for d in ("forward", "backward") for k in kernels(work, d))
    want = 3 * each + work.optimizer[0].duration
    assert times(prepare(job, 1).program)[0, 0] == pytest.approx(want, rel=1e-6)


def test_a_group_of_equal_gpus_without_noise_is_the_ideal():
    """And that is the sum of one rank's kernels, with what all replicas do at the end."""
    job = make_job(dp=8, ep=8, data_parallel="zero1", overlap=False)
    program = prepare(job, 1).program
    work = build_workload(job, None)
    each = sum(k.duration for d in ("forward", "backward") for k in kernels(work, d))
    ends = [each[0] for row in work.reduces for each in row]
    ends += [work.grad_norm_reduce, work.optimizer[0], work.param_gathers[0][0]]
    want = 2 * each + sum(c.duration for c in ends)
    assert np.ptp(times(program, 4)) == 0.0
    assert times(program)[0, 0] == pytest.approx(want, rel=1e-6)
    assert times(ideal_program(program))[0, 0] == times(program)[0, 0]


def test_the_busiest_rank_lengthens_the_step_by_its_share():
    even = make_job(dp=8, ep=8, overlap=False)
    work = build_workload(even, None)
    routed = sum(k.duration for d in ("forward", "backward") for k in kernels(work, d) if k.routed)
    for factor in (1.1, 1.5):
        uneven = ideal_step(make_job(dp=8, ep=8, overlap=False, expert_imbalance=factor))
        want = 2 * routed * (factor - 1.0)
        assert uneven - ideal_step(even) == pytest.approx(want, rel=1e-3)
    assert expert_imbalance(even.model, even.parallelism) == 1.0
    usual = make_job(ep=8, expert_imbalance=None)
    assert expert_imbalance(usual.model, usual.parallelism) == DEFAULT_IMBALANCE
    alone = make_job(ep=1)
    assert expert_imbalance(alone.model, alone.parallelism) == 1.0


def test_ranks_are_even_where_every_token_goes_to_all_experts():
    job = make_job(ep=8, expert_imbalance=None)
    model = job.model.model_copy(update={"experts_per_token": job.model.n_experts})
    assert expert_imbalance(model, job.parallelism) == 1.0


def test_a_slow_node_holds_up_its_group_and_moves_with_it():
    """Flat network, pipeline of two: a slow node costs the same in either group."""
    step = prepare(make_job(dp=8, pp=2, ep=4, microbatches=4, microbatch_size=32), 1)
    slow = {3: slow_node(1.3)}  # of the second stage, which has the loss
    found = [times(relocate(step, hosts, slow))[0, 0] for hosts in ([0, 1, 2, 3], [0, 1, 3, 2])]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] > 1.1 * times(step.program)[0, 0]


def test_layouts_keep_ep_and_skip_what_it_does_not_divide():
    job = make_job(ep=4, pp=2, dp=8, microbatches=4)
    found = [setting for setting, _ in layouts(job, global_batch(job))]
    ranks = [int(s["parallelism.dp"]) * int(s["parallelism.cp"]) for s in found]
    assert found and all(n % 4 == 0 for n in ranks)
    alone = make_job(ep=1, pp=2, dp=8, microbatches=4)
    more = [setting for setting, _ in layouts(alone, global_batch(alone))]
    assert len(more) > len(found)


def test_layouts_keep_a_split_that_no_rule_gives():
    job = load_job("deepseek-v3-2048")
    found = [(s, drop) for s, drop in layouts(job, global_batch(job))]
    chunks = [int(s["parallelism.pp"]) * int(s["parallelism.vpp"]) for s, _ in found]
    assert set(chunks) == {1, 16}
    kept = ["parallelism.layer_split" not in drop for _, drop in found]
    assert kept == [n == 16 for n in chunks]


# ---------------------------------------------------------------------------------------- memory
def test_memory_of_parameters_and_optimizer():
    job = make_job(ep=4, data_parallel="zero1")
    found, held = estimate_memory(job), 3 * 3 * 1024 * 1408 * 16 / 4
    dense = count_parameters(job.model) - 4 * held
    assert found.weights == pytest.approx(2.0 * (dense + held))
    assert found.gradients == pytest.approx(4.0 * (dense + held))
    assert found.optimizer == pytest.approx(ADAM_BYTES * (dense / 16 + held / 4))
    whole = estimate_memory(make_job(ep=1, data_parallel="zero1"))
    assert whole.optimizer == pytest.approx(ADAM_BYTES * count_parameters(job.model) / 16)
    fsdp = estimate_memory(make_job(ep=4, data_parallel="fsdp"))
    assert fsdp.optimizer == pytest.approx(found.optimizer)


def test_activations_of_a_layer_with_experts():
    job = make_job(model=LATENT)
    h, e, copies = 1024, 1408, 2
    attention = 2 * (8 * 96 * 2 + 8 * 64 * 2) + 4 * (384 + 128)
    per_token = 8 * h + attention + 6 * e + copies * (2 * h + 6 * e) + 4 * 16
    whole, kept = layer_activation_bytes(job, sparse=True)
    assert whole == kept == pytest.approx(1024 * per_token)
    busy = make_job(model=LATENT, expert_imbalance=1.5)
    more = layer_activation_bytes(busy, sparse=True)[0] - whole
    assert more == pytest.approx(1024 * 0.5 * copies * (2 * h + 6 * e))
    sizes = shard_sizes(job.model, job.parallelism)
    assert (sizes.query, sizes.out, sizes.shared) == (8 * 96, 8 * 64, e)


# -------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ({"parallelism": {"ep": 3}}, "parallelism.ep: 3 .*dp = 16; .* 1, 2"),
        ({"parallelism": {"ep": 16}, "model": {"n_experts": 24}}, "ep: 16 .*n_experts = 24"),
        ({"model": {"n_experts": 0, **NO_EXPERTS}}, "parallelism.ep: .*model.n_experts"),
        ({"model": {"n_experts": 0}, "parallelism": {"ep": 1}}, "no effect .*experts"),
        ({"model": {"experts_per_token": 17}}, "17, .* 1 to n_experts = 16"),
        ({"model": {"experts_per_token": 0}}, "0, .* 1 to n_experts = 16"),
        ({"model": {"n_dense_layers": 4}}, "n_dense_layers: 4 .*n_layers = 4 "),
        ({"model": {"kv_lora_rank": 64}}, "q_lora_rank, rope_head_size, head_size"),
        ({"model": {**LATENT, "rope_head_size": 97}}, "rope_head_size: 97 .*head_size = 96"),
        ({"model": {**LATENT, "n_kv_heads": 2}}, "n_kv_heads: 2, "),
        ({"parallelism": {"data_parallel": "hsdp"}}, "hsdp with ep > 1 "),
        ({"variability": {"resolution": "kernel"}}, "kernel resolution with ep = 8 "),
        (
            {"parallelism": {"tp": 2, "dp": 8, "sequence_parallel": False}},
            "false with experts and tp > 1 .* setting: true",
        ),
        ({"model": {"expert_ffn_size": 33}, "parallelism": {"tp": 2, "dp": 8}},
         "tp: 2 .*expert_ffn_size"),
        ({"parallelism": {"ep": 1, "expert_imbalance": 1.2}}, "expert_imbalance: .*ep = 1"),
        ({"parallelism": {"ep": 1, "expert_overlap": True}}, "expert_overlap: .*ep = 1"),
        ({"model": {"n_experts": 0}, "parallelism": {"ep": 1, "cuda_graphs": True}}, "experts"),
        ({"parallelism": {"expert_imbalance": 0.9}}, "expert_imbalance: .* 1, .*0.9"),
        ({"parallelism": {"expert_imbalance": 8.5}}, "expert_imbalance: 8.5.* 8 times"),
        (
            {"parallelism": {"ep": 1}, "variability": {"effects": {"expert": {"cv": 0.1}}}},
            "variability.effects.expert: .*ep = 1",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_words(blocks, words):
    job = {
        "model": MODEL | blocks.get("model", {}),
        "parallelism": {"dp": 16, "ep": 8, "microbatches": 2} | blocks.get("parallelism", {}),
        "cluster": {"nodes": 4, "gpus_per_node": 4},
        "variability": {"library": None} | blocks.get("variability", {}),
    }
    with pytest.raises(PrismError, match=words):
        load_job(job)


def test_experts_at_kernel_resolution_with_one_rank_each():
    """ep = 1 has no group to meet in; both resolutions agree where nothing varies."""
    op, kernel = (
        times(prepare(make_job(ep=1, dp=2, variability={"resolution": r}), 1).program)[0, 0]
        for r in ("op", "kernel")
    )
    assert kernel == pytest.approx(op, rel=1e-6)


# ------------------------------------------------------------------------------- whole experts
WHOLE = {"tp": 2, "dp": 8, "ep": 4, "data_parallel": "zero1", "bucket_layers": 4}


def test_whole_experts_do_the_same_work_and_are_held_twice():
    """Each tp rank computes its own tokens' copies; its neighbour holds the same experts."""
    job, divided = make_job(**WHOLE, expert_tp=1), make_job(**WHOLE)
    work, other = build_workload(job, LIBRARY), build_workload(divided, LIBRARY)
    flop = [sum(k.flop for k in kernels(w, "forward")) for w in (work, other)]
    assert flop[0] == pytest.approx(flop[1], rel=1e-12)
    up, halves = (
        next(k for k in kernels(w, "forward") if k.name == "expert_up") for w in (work, other)
    )
    copies, width = 1024 * 2 / 2, 2 * 1408
    assert up.flop == 2.0 * copies * width * 1024 == halves.flop
    names = {k.name for k in kernels(work, "forward")}
    assert "experts_all_gather" not in names
    assert "experts_all_gather" in {k.name for k in kernels(other, "forward")}
    held = 3 * 3 * 1024 * 1408 * 16 / 4
    (gather,), (half,) = (w.param_gathers[1] for w in (work, other))
    assert (gather.bytes, half.bytes) == pytest.approx((2.0 * held, held))
    cluster = build_cluster(job, LIBRARY)
    assert cluster.group("expert_dp").n_ranks == 4  # two of dp and two of tp
    for w in (work, other):
        touched = sum(o.bytes for o in w.optimizer) * 16
        assert touched == pytest.approx(30.0 * count_parameters(job.model), rel=1e-12)
    assert estimate_memory(job).weights - estimate_memory(divided).weights == pytest.approx(held)
    optimizer = [estimate_memory(j).optimizer for j in (job, divided)]
    assert optimizer[0] == pytest.approx(optimizer[1])
    assert ideal_step(job) > 0.0


def test_ranks_that_hold_the_same_whole_experts():
    layout = Layout(tp=2, cp=1, dp=4, pp=2, stage_stride=8, replica_stride=2, ep=2)
    assert layout.groups("expert_dp").tolist()[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups("ep").tolist()[:3] == [[0, 1], [8, 9], [2, 3]]
    job = make_job(**WHOLE, expert_tp=1)
    wiring = Wiring(build_cluster(job, LIBRARY), Placement(job))
    assert wiring.is_nominal("expert_dp")


@pytest.mark.parametrize("wrong", [{"expert_tp": 4}, {"ep": 1, "expert_tp": 1}])
def test_experts_are_divided_as_tp_or_not_at_all(wrong):
    with pytest.raises(PrismError, match="expert_tp"):
        make_job(**{**WHOLE, "tp": 2, **wrong})


# ------------------------------------------------------------------------------------ DeepEP
def brute_parts(picks, n, parts):
    """Mean number of parts over all choices of experts."""
    each = n // parts
    found = [len({i // each for i in chosen}) for chosen in combinations(range(n), picks)]
    return sum(found) / len(found)


@pytest.mark.parametrize(("picks", "n", "parts"), [(1, 4, 2), (2, 8, 4), (3, 8, 2), (5, 6, 3)])
def test_parts_that_distinct_experts_lie_in(picks, n, parts):
    assert distinct_parts(picks, n, parts) == pytest.approx(brute_parts(picks, n, parts))


DEEPEP = Dispatch(
    copies=2, experts=16, token_bytes=2048.0, start_s=1e-5, local_s=1e-9, copy_s=2e-9,
    nvlink_bytes_per_s=4e11, network_bytes_per_s=4e10,
)  # fmt: skip


def test_a_token_goes_once_to_each_rank_and_each_domain():
    """Against the formula, with numbers of ranks and domains counted over all choices."""
    n_bytes = 1_000 * 2 * 2048.0
    inside = 1_000 * (1e-9 + brute_parts(2, 16, 4) * (2e-9 + 2048 * 3 / 4 / 4e11))
    assert DEEPEP.seconds(n_bytes, 4, 1) == pytest.approx(1e-5 + inside)
    across = 1_000 * 2048 * brute_parts(2, 16, 4) * 3 / 4 / 4e10  # four nodes of two
    assert DEEPEP.seconds(n_bytes, 8, 4) == pytest.approx(1e-5 + across)
    assert DEEPEP.seconds(n_bytes, 8, 4, 2.5) == pytest.approx(1e-5 + 2.5 * across)
    limited = replace(DEEPEP, most_domains=1).seconds(n_bytes, 8, 4)
    assert limited == pytest.approx(1e-5 + 1_000 * 2048 * 3 / 4 / 4e10)
    assert replace(DEEPEP, most_domains=9).seconds(n_bytes, 8, 4) == DEEPEP.seconds(n_bytes, 8, 4)


# Ranks on nodes of 8, nodes a token's experts lie in at most (0: any), published bytes per second
# of a rank's 4,096 tokens to the nodes they reach: deepseek-ai/DeepEP, docs/legacy.md (H800) and,
# not in the fit, Hybrid-EP_Implementation.md (two nodes of H100, dispatch in bfloat16).
@pytest.mark.parametrize(
    ("ranks", "experts", "most", "rate", "within"),
    [(32, 256, 4, 58e9, 0.05), (64, 256, 4, 51e9, 0.05), (16, 128, 0, 71.71e9, 0.3)],
)
def test_published_bandwidths_between_nodes(ranks, experts, most, rate, within):
    model = {"n_experts": experts, "experts_per_token": 8, "hidden_size": 7_168, "n_heads": 64}
    job = make_job(
        dp=64, ep=ranks, model=model, expert_dispatch="deepep",
        cluster={"nodes": 8, "gpus_per_node": 8, "nvlink_domain_gpus": 8},
    )  # fmt: skip
    dispatch, nodes = build_cluster(job, LIBRARY).dispatch, ranks // 8
    near = min(most or nodes, nodes)
    reached = distinct_parts(8, experts * near / nodes, near)
    seconds = replace(dispatch, most_domains=most).seconds(4_096 * 8 * 14_336.0, ranks, nodes)
    assert 4_096 * 14_336 * reached / seconds == pytest.approx(rate, rel=within)


def test_kernels_of_a_job_and_its_placement_take_deepep_times():
    job = make_job(ep=16, expert_dispatch="deepep")
    cluster = build_cluster(job, LIBRARY)
    n_bytes = 2.0 * 1024 * 2 * 1024
    want = cluster.network.latency_s + cluster.dispatch.seconds(n_bytes, 16, 4)
    sent = [k for k in kernels(build_workload(job, LIBRARY), "forward") if k.group == "ep"]
    assert {k.duration for k in sent} == {want}
    placed = Wiring(cluster, Placement(job)).seconds("ep", n_bytes)
    assert placed == pytest.approx(np.full(1, want))
    slow = make_job(ep=16, expert_dispatch="deepep",
                    cluster={"links": {"network": {"bandwidth_gbytes_per_s": 5.0}}})  # fmt: skip
    (slower,) = {
        k.duration for k in kernels(build_workload(slow, LIBRARY), "forward") if k.group == "ep"
    }
    assert slower > 2.0 * want
    faster = build_cluster(make_job(ep=4, expert_dispatch="hybridep"), LIBRARY).dispatch
    ratio = faster.seconds(n_bytes, 4, 1) / cluster.dispatch.seconds(n_bytes, 4, 1)
    assert ratio == pytest.approx(LIBRARY.value("nominal/hybridep_ratio"))
    assert build_cluster(make_job(ep=1), LIBRARY).dispatch is None


def test_a_library_without_deepep_has_its_links_rates():
    entries = {k: v for k, v in LIBRARY.entries.items() if "ep_" not in k}
    cluster = build_cluster(
        make_job(ep=4, expert_dispatch="deepep"), replace(LIBRARY, entries=entries)
    )
    want = brute_parts(2, 16, 4) * 3 / 4 * 2048 / cluster.nvlink.bytes_per_s
    assert cluster.dispatch.seconds(2 * 2048.0, 4, 1) == pytest.approx(want)


def test_capacity_bounds_the_busiest_rank():
    job = make_job(expert_imbalance=1.5, expert_capacity=1.25)
    assert expert_imbalance(job.model, job.parallelism) == 1.25
    loose = make_job(expert_imbalance=1.5, expert_capacity=2.0)
    assert expert_imbalance(loose.model, loose.parallelism) == 1.5
    drops = make_job(expert_imbalance=1.0, expert_capacity=0.5)
    half, whole = (
        sum(k.duration for k in kernels(build_workload(j, LIBRARY), "forward") if k.routed)
        for j in (drops, make_job())
    )
    assert half == pytest.approx(0.5 * whole)
