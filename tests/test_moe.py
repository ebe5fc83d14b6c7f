"""Experts and latent attention: what they compute, send, hold and vary by, in closed forms."""

import functools
import json
from itertools import combinations

import numpy as np
import pytest
from drawn_steps import draw_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from test_effects import body, check
from test_hardware import figures, ideal

import prism

MODEL = {
    "n_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024, "n_experts": 16, "experts_per_token": 2, "expert_ffn_size": 1408,
    "n_shared_experts": 1, "n_dense_layers": 1,
}  # fmt: skip
LATENT = {
    "head_size": 96, "v_head_size": 64, "rope_head_size": 32, "q_lora_rank": 384,
    "kv_lora_rank": 128,
}  # fmt: skip
NO_EXPERTS = dict.fromkeys(
    ("n_experts", "experts_per_token", "expert_ffn_size", "n_shared_experts", "n_dense_layers"), 0
)
LINKS = {
    "nvlink": {"bandwidth_gbytes_per_s": 400, "latency_us": 5, "efficiency": 1.0},
    "network": {"bandwidth_gbytes_per_s": 40, "latency_us": 20, "efficiency": 1.0},
}
H, E, CV, GIB = 1024, 1408, 0.1, 2**30
HELD = 3 * 3 * H * E * 16  # parameters of all routed experts
SENT = 2.0 * 1024 * 2 * H  # bytes that a rank sends: bfloat16, tokens, copies, width


@functools.cache
def _job(text):
    return prism.load_job(json.loads(text))


def made(effects=None, model=None, cluster=None, variability=None, **parallelism):
    """A job of 16 GPUs on 4 nodes unless told: two ep groups of 8, nothing random."""
    layout = {"dp": 16, "ep": 8, "microbatches": 2, "expert_imbalance": 1.0} | parallelism
    if layout["ep"] == 1:
        del layout["expert_imbalance"]
    gpus = layout["dp"] * layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    nodes = {"nodes": max(1, gpus // 4), "gpus_per_node": min(4, gpus)}
    return _job(json.dumps({
        "model": MODEL | (model or {}), "parallelism": layout,
        "cluster": nodes | (cluster or {}),
        "variability": {"library": "none", "host_scale": 1e-9, "effects": effects or {}}
        | (variability or {}),
    }))  # fmt: skip


def seconds(job, kernel_class):
    """Seconds of a class on the critical path of a step."""
    return figures(job)["critical_path"].get(kernel_class, 0.0)


def times(job, n=6400):
    return draw_steps(job, n, 1).step_time.to_numpy().astype(float)


# ------------------------------------------------------------------------------- what they hold
def parameters(name, **layout):
    """Parameters of a named model, by what one GPU with all of it would hold in bfloat16."""
    job = prism.load_job({
        "model": {"name": name}, "parallelism": {"microbatches": 1} | layout,
        "cluster": {"nodes": 1, "gpus_per_node": 1}, "variability": {"library": "none"},
    })  # fmt: skip
    found = figures(job)
    return found["memory"]["parts"]["parameters"] * GIB / 2, found


def test_published_models_have_their_published_parameters():
    whole, found = parameters("mixtral-8x7b")
    assert whole == pytest.approx(46_702_792_704, rel=1e-12)  # the published checkpoint's
    m = {"layers": 32, "heads": 32, "size": 128, "seq": found["tokens_per_step"]}
    attention = 3 * m["layers"] * m["heads"] * 2 * m["size"] * m["seq"] ** 2
    flop = found["model_flops_per_gpu"] * found["step_time"]["mean"]
    active = (flop - attention) / (6 * m["seq"])
    assert active == pytest.approx(12.9e9, rel=0.005)  # its paper's
    # without the prediction module
    assert parameters("deepseek-v3")[0] == pytest.approx(671e9, rel=0.001)


def small_parameters(latent=False):
    """Of the model here, by hand: all, and those that a token meets."""
    attention = 4 * H * H
    if latent:
        attention = H * (384 + 128 + 32) + 384 + 128 + 384 * 8 * 96 + 128 * 8 * 128 + 8 * 64 * H
    layer = attention + 2 * H
    dense, sparse = layer + 3 * H * 4096, layer + 16 * H + 3 * H * E * 17
    whole = dense + 3 * sparse + 2 * 8000 * H + H
    return whole, whole - 3 * 14 * 3 * H * E


@pytest.mark.parametrize("latent", [False, True])
def test_parameters_and_flop_of_a_small_model_by_hand(latent):
    job = made(model=LATENT if latent else {}, dp=1, ep=1)
    whole, active = small_parameters(latent)
    found = figures(job)
    assert found["memory"]["parts"]["parameters"] * GIB == pytest.approx(2.0 * whole)
    tokens, heads = 2 * 1024, 96 + 64 if latent else 2 * 128
    flop = 6 * active * tokens + 3 * 4 * 8 * heads * 1024 * tokens
    assert found["model_flops_per_gpu"] * ideal(job) == pytest.approx(flop, rel=1e-6)


def test_memory_of_weights_and_optimizer():
    parts = figures(made(ep=4, data_parallel="zero1"))["memory"]["parts"]
    dense = small_parameters()[0] - HELD
    assert parts["parameters"] * GIB == pytest.approx(2.0 * (dense + HELD / 4))
    assert parts["gradients"] * GIB == pytest.approx(4.0 * (dense + HELD / 4))
    assert parts["optimizer"] * GIB == pytest.approx(12.0 * (dense / 16 + HELD / 4 / 4))
    alone = figures(made(ep=1, data_parallel="zero1"))["memory"]["parts"]
    assert alone["optimizer"] * GIB == pytest.approx(12.0 * (dense + HELD) / 16)
    fsdp = figures(made(ep=4, data_parallel="fsdp"))["memory"]["parts"]
    held = fsdp["optimizer"] + fsdp["parameters"]  # of a shard the master copies
    assert held == pytest.approx(parts["optimizer"])
    # tp neighbours that hold whole experts hold the same ones
    whole, halves = (
        figures(made(tp=2, dp=8, ep=4, data_parallel="zero1", **more))["memory"]["parts"]
        for more in ({"expert_tp": 1}, {})
    )
    assert (whole["parameters"] - halves["parameters"]) * GIB == pytest.approx(HELD / 4)
    assert whole["optimizer"] == pytest.approx(halves["optimizer"])


def test_activations_follow_the_busiest_rank():
    even, busy = (figures(made(dp=8, microbatches=1, expert_imbalance=x))["memory"]["parts"]
                  for x in (1.0, 1.5))  # fmt: skip
    more = (busy["mlp"] - even["mlp"]) * GIB
    assert more == pytest.approx(3 * 1024 * 0.5 * 2 * (2 * H + 6 * E), rel=1e-6)


def test_the_optimizer_touches_every_parameter_once():
    """zero1: over all ranks, whatever shares the experts."""
    one, *apart = (seconds(made(data_parallel="zero1", ep=ep), "optimizer") for ep in (1, 4, 16))
    shares = [30.0 * n / 16 for n in (small_parameters()[0] - HELD, HELD)]
    both, *each = (prism.kernel("memory", "h100", bytes=x)["mean"] for x in (sum(shares), *shares))
    assert one == pytest.approx(both, rel=1e-5)
    assert apart == pytest.approx([sum(each)] * 2, rel=1e-5)  # a kernel for each kind


# -------------------------------------------------------------------------------- what they compute
def test_the_busiest_rank_lengthens_what_is_routed_by_its_share():
    even = made(dp=8, overlap=False)
    for factor in (1.1, 1.5):
        uneven = made(dp=8, overlap=False, expert_imbalance=factor)
        for name in ("gemm_expert", "ep_all_to_all"):
            assert seconds(uneven, name) == pytest.approx(factor * seconds(even, name), rel=1e-4)
        for name in ("gemm_mlp", "attention", "loss", "optimizer"):
            assert seconds(uneven, name) == pytest.approx(seconds(even, name), rel=1e-6)
    usual = made(dp=8, overlap=False, expert_imbalance=None)
    assert ideal(usual) == ideal(made(dp=8, overlap=False, expert_imbalance=1.1))
    # where every token goes to all experts no rank has more
    all_of_them = {"experts_per_token": 16}
    assert ideal(made(model=all_of_them, expert_imbalance=None)) == ideal(made(model=all_of_them))


@pytest.mark.parametrize(("imbalance", "capacity", "busiest"), [
    (1.5, 1.25, 1.25), (1.5, 2.0, 1.5), (1.0, 0.5, 0.5), (None, 1.05, 1.05),
])  # fmt: skip
def test_a_capacity_bounds_the_busiest_rank(imbalance, capacity, busiest):
    found = made(dp=8, expert_imbalance=imbalance, expert_capacity=capacity)
    expected = busiest * seconds(made(dp=8), "gemm_expert")
    assert seconds(found, "gemm_expert") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_the_host_waits_in_layers_with_experts_unless_they_are_cuda_graphs(recompute, passes):
    """Kernels are long here, so that launching takes no time beside the waits."""
    cost = prism.load_library("h100-healthy").value("nominal/expert_layer_s")

    def step(graphs, scale):
        calm = {"library": "h100-healthy", "host_scale": scale}
        return ideal(made(variability=calm, recompute=recompute, cuda_graphs=graphs,
                          microbatch_size=64, overlap=False))  # fmt: skip

    waits = 2 * 3 * passes * cost  # microbatches, layers
    assert step(False, 0.2) - step(False, 0.1) == pytest.approx(0.1 * waits, rel=1e-3)
    assert step(True, 0.2) == pytest.approx(step(True, 0.1), rel=1e-9)
    assert step(False, 0.1) > step(True, 0.1) + 0.1 * waits  # the gaps between kernels too


def test_one_expert_that_all_tokens_go_to_is_a_dense_layer():
    one = {"n_experts": 1, "experts_per_token": 1, "expert_ffn_size": 4096, "n_shared_experts": 0,
           "n_dense_layers": 0}  # fmt: skip
    sparse, dense = made(model=one, ep=1), made(model=NO_EXPERTS, ep=1)
    names = ("gemm_mlp", "gemm_expert")
    ours, plain = (sum(seconds(job, name) for name in names) for job in (sparse, dense))
    router = ours - plain
    assert 0.0 < router < 0.1 * plain
    assert figures(sparse)["model_flops_per_gpu"] * ideal(sparse) == pytest.approx(
        figures(dense)["model_flops_per_gpu"] * ideal(dense), rel=1e-3
    )


def test_resolutions_agree_where_nothing_varies():
    op, kernel = (ideal(made(ep=1, dp=2, variability={"resolution": r})) for r in ("op", "kernel"))
    assert kernel == pytest.approx(op, rel=1e-6)


# ------------------------------------------------------------------------------------ all-to-alls
def all_to_all(**job):
    """Seconds of one all-to-all: two each way, of three layers and two microbatches."""
    cluster = {"links": LINKS} | job.pop("cluster", {})
    job = {"overlap": False} | job  # what reduces gradients hides none
    return seconds(made(cluster=cluster, **job), "ep_all_to_all") / (4 * 3 * 2)


def sending(tier, bandwidth=None, **job):
    """Seconds of it that a tier's rate makes: twice what a rate twice as high saves."""
    cluster, each = job.pop("cluster", {}), []
    for times in (1, 2):
        own = (bandwidth or LINKS[tier]["bandwidth_gbytes_per_s"]) * times
        links = LINKS | {tier: LINKS[tier] | {"bandwidth_gbytes_per_s": own}}
        each.append(all_to_all(cluster=cluster | {"links": links}, **job))
    return 2.0 * (each[0] - each[1])


def test_an_all_to_all_is_bound_by_the_slower_of_its_links():
    """Four nodes of four, each message over its own tier; what waits does not depend on rates."""
    assert sending("nvlink", ep=4) == pytest.approx(SENT * 3 / 4 / 400e9, rel=1e-3)
    across = SENT * 12 / 16 / 40e9
    assert sending("network", ep=16) == pytest.approx(across, rel=1e-3)
    assert sending("nvlink", ep=16) == pytest.approx(0.0, abs=1e-9)
    inside = sending("nvlink", bandwidth=0.5, ep=16)
    assert inside == pytest.approx(SENT * 3 / 16 / 0.5e9, rel=1e-3)
    # more tokens, fewer of them on a rank of a tp group
    assert sending("network", ep=16, microbatch_size=3) == pytest.approx(3 * across, rel=1e-3)
    pairs = sending("network", ep=8, tp=2, dp=8, cluster={"gpus_per_node": 2, "nodes": 8})
    assert pairs == pytest.approx(SENT / 2 * 7 / 8 / 40e9, rel=1e-3)  # no two ranks on a node
    near, far = (all_to_all(ep=ep) - SENT * 3 / 4 / rate for ep, rate in ((4, 400e9), (16, 40e9)))
    assert 5e-6 < near < 20e-6 < far < 100e-6  # a hop of the tier, and a message to each rank


def test_tokens_cross_the_network_once_for_each_of_their_nodes():
    more = {"ep": 16, "model": {"experts_per_token": 8}}
    copies = 8 / 2 * SENT
    for most, crossing in ((1, 1 / 8), (3, 3 / 8), (4, 4 / 8)):
        found = sending("network", bandwidth=20, expert_node_limit=most, **more)
        assert found == pytest.approx(copies * crossing * 3 / 4 / 20e9, rel=1e-3)
    inside = sending("nvlink", bandwidth=4, expert_node_limit=1, **more)
    assert inside == pytest.approx(copies * 3 / 4 / 4e9, rel=1e-3)


def test_what_leaves_a_pod_shares_its_uplink():
    """8 of 16 parts leave the pod at a seventh of the rate; 12 leave the node."""
    found = sending("network", ep=16, cluster={"pod_gpus": 8, "oversubscription": 7.0})
    assert found == pytest.approx(SENT * 8 / 16 * 7.0 / 40e9, rel=1e-3)


def test_overlap_hides_all_to_alls_behind_compute_but_for_what_they_take_of_it():
    quick = {"latency_us": 0.1, "bandwidth_gbytes_per_s": 4e4}  # less than the work beside
    links = {"links": {"network": LINKS["network"] | quick, "nvlink": LINKS["nvlink"] | quick}}
    whole, shown = (all_to_all(ep=16, cluster=links, expert_overlap=on) for on in (False, True))
    assert shown == pytest.approx(whole * 20 / 132, rel=1e-6)  # of an H800's multiprocessors
    slow = {"links": LINKS | {"network": LINKS["network"] | {"bandwidth_gbytes_per_s": 0.1}}}
    exposed, left = (made(ep=16, cluster=slow, expert_overlap=on) for on in (False, True))
    saved = ideal(exposed) - ideal(left)
    names = ("gemm_attention", "attention", "gemm_mlp", "gemm_expert", "memory", "compute")
    work = sum(seconds(exposed, name) for name in names)
    # all but the dense layer's and the ends' work is beside it
    assert 0.5 * work < saved < work


def brute_parts(picks, n, parts):
    """Mean number of parts over all choices of experts."""
    each = n // parts
    found = [len({i // each for i in chosen}) for chosen in combinations(range(n), picks)]
    return sum(found) / len(found)


@pytest.mark.parametrize("dispatch", ["deepep", "hybridep"])
def test_deepep_sends_a_token_once_to_each_rank_and_each_node(dispatch):
    """Its measured parts, on links of these rates; ranks and nodes counted over all choices."""
    library = prism.load_library("h100-healthy")
    names = ("start_s", "local_s_per_byte", "copy_s", "nvlink_efficiency", "network_efficiency")
    start, local, copy, nvlink, network = (library.value(f"nominal/deepep_{n}") for n in names)
    ratio = library.value("nominal/hybridep_ratio") if dispatch == "hybridep" else 1.0

    def expected(ranks, nodes):
        inside, reached = ranks // nodes, brute_parts(2, 16, ranks)
        near = 1024 * (local * 2048 + reached * copy)
        near += 1024 * 2048 * reached * (inside - 1) / inside / (400e9 * nvlink)
        far = 1024 * 2048 * brute_parts(2, 16, nodes) * (nodes - 1) / nodes / (40e9 * network)
        return start * ratio + max(near * ratio, far) + (20e-6 if nodes > 1 else 0.0)

    for ep, nodes in ((4, 1), (16, 4)):
        found = all_to_all(ep=ep, expert_dispatch=dispatch, variability={"library": "h100-healthy"},
                           effects=OFF)  # fmt: skip
        assert found == pytest.approx(expected(ep, nodes), rel=1e-3)


OFF = {name: {"cv": 0.0} for name in ("step", "microbatch", "call", "residual", "expert", "run")}
OFF |= {"rank": {"cv": 0.0, "lemon_fraction": 0.0}}


# ----------------------------------------------------------------------------------- one effect
def test_a_library_s_uneven_experts_are_even_within_one_rank():
    calm = {"rank": {"cv": 0, "lemon_fraction": 0}, "residual": {"scale": 0},
            "stall": {"rate_per_hour": 0}, "regime": {"probability": 0}}  # fmt: skip
    calm |= {name: {"cv": 0} for name in ("step", "call", "microbatch")}
    library = {"library": "h100-healthy"}
    one, several = (figures(made(calm, {"n_experts": 8}, variability=library, dp=8, ep=ep))
                    for ep in (1, 8))  # fmt: skip
    assert one["step_time"]["std"] == 0.0 < several["step_time"]["std"]


ALONE = {"expert": {"cv": CV}}


def routed(**layout):
    """Seconds of a microbatch that follow the experts: those that an imbalance lengthens."""
    half = made(**layout | {"expert_imbalance": 1.5})
    return (ideal(half) - ideal(made(**layout))) / 0.5 / layout["microbatches"]


def test_a_group_varies_by_its_experts_one_draw_a_microbatch():
    """All layers, forward and backward follow the draw; microbatches have their own."""
    layout = {"dp": 8, "microbatches": 6, "overlap": False}
    x = times(made(ALONE, **layout), 12_800)
    check(x, ideal(made(**layout)), CV * routed(**layout) * 6**0.5)
    none = times(made(ALONE, variability={"dependence": "none"}, **layout))
    assert 0.68 < none.std() / x.std() < 0.95  # forward and backward apart


def test_two_groups_draw_apart_and_the_later_one_decides():
    layout = {"microbatches": 6, "overlap": False}
    one, two = (times(made(ALONE, dp=dp, **layout), 12_800) for dp in (8, 16))
    later = two.mean() - ideal(made(dp=16, **layout))
    # E max of two sums is their deviation / sqrt(pi) above their mean
    assert later == pytest.approx(one.std() / np.pi**0.5, rel=0.06)


def test_stages_of_a_group_follow_one_draw():
    """Two stages, one microbatch: forward and backward of both add up."""
    layout = {"dp": 8, "pp": 2, "microbatches": 1, "overlap": False, "layer_split": [2, 2],
              "model": {"n_dense_layers": 0}}  # fmt: skip
    check(times(made(ALONE, **layout)), ideal(made(**layout)), CV * routed(**layout))


def test_experts_move_no_other_draw_and_what_is_routed_follows_no_microbatch():
    effects = {"step": {"cv": 0.02}, "call": {"cv": 0.02}}
    off, on = (times(made(effects | {"expert": {"cv": cv}}, dp=8), 640) for cv in (0.0, 1e-7))
    assert off.std() > 0.01 * off.mean()
    np.testing.assert_allclose(off, on, rtol=1e-5)
    layout = {"dp": 1, "ep": 1, "microbatches": 1, "overlap": False}
    whole = times(made({"microbatch": {"cv": 0.05}}, **layout)).std() / ideal(made(**layout))
    layout = {"dp": 8, "ep": 8, "microbatches": 1, "overlap": False}
    both = times(made({"microbatch": {"cv": 0.05}}, **layout)).std() / ideal(made(**layout))
    assert both < 0.9 * whole


def test_the_default_is_half_of_a_usual_imbalance_with_a_library_and_off_without():
    layout = {"dp": 8, "microbatches": 6, "overlap": False}
    assert times(made(**layout), 640).std() == 0.0
    quiet = {key: block for key, block in OFF.items() if key != "expert"}
    usual, stated = (
        times(made(quiet | more, variability={"library": "h100-healthy"}, **layout), 640)
        for more in ({}, {"expert": {"cv": 0.05}})
    )
    assert np.array_equal(usual, stated) and usual.std() > 0.0


def test_a_ranking_gives_experts_their_share():
    job = made(ALONE | {"step": {"cv": 0.01}}, dp=8, microbatches=4)
    both, alone = (times(x) for x in (job, made(ALONE, dp=8, microbatches=4)))
    rows = {r["name"]: r for r in prism.summary(prism.rank(job, seed=1))["effects"]}
    assert rows["expert"]["total_order"] == pytest.approx(alone.var() / both.var(), abs=0.08)
    assert rows["expert"]["total_order"] + rows["step"]["total_order"] == pytest.approx(1, abs=0.08)


# --------------------------------------------------------------------------------- group maxima
def test_all_wait_for_the_slowest_gpu_of_the_group():
    """As long as all 16 were as slow as the slowest of them, but for messages and the optimizer."""
    layout = {"dp": 16, "ep": 16, "overlap": False, "microbatch_size": 8}
    slow = {node: {"compute": 1.1} for node in range(4)}
    rank = {"rank": {"cv": 0.03, "memory_loading": 1.0}}
    still = {"rank": {"cv": 0.0, "memory_loading": 1.0}}
    plain = ideal(made(**layout))
    follows = (times(made(still, cluster={"node_slowdowns": slow}, **layout), 64)[0] - plain) / 0.1
    z = body(np.random.default_rng(1).standard_normal((40_000, 16)))
    most = (0.03 * (z - z.mean()) / z.std()).max(axis=1)
    x = times(made(rank, **layout), 500 * 64)[::64]
    assert x.mean() - plain == pytest.approx(follows * most.mean(), rel=0.03)


def test_a_slow_node_holds_up_its_group_wherever_it_is():
    """Flat network, pipeline of two: it costs the same in either group of its stage."""
    layout = {"dp": 8, "pp": 2, "ep": 4, "microbatches": 4, "microbatch_size": 32}
    found = [
        times(made(cluster={"hosts": hosts, "node_slowdowns": {3: 1.3}}, **layout), 64)[0]
        for hosts in ([0, 1, 2, 3], [0, 1, 3, 2])
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] > 1.1 * ideal(made(**layout))


def test_congestion_of_all_to_alls_is_the_group_s_own():
    effects = {"regime": {"probability": 0.3, "factor": 3.0}}
    across = times(made(effects, dp=8, ep=8, cluster={"leaf_nodes": 1}))
    hit = across > across.min() * (1 + 1e-6)
    assert hit.mean() == pytest.approx(1 - 0.7**2, abs=5 * 0.5 / 80)
    assert across.mean() == pytest.approx(ideal(made(dp=8)), abs=5 * across.std() / 80)
    assert times(made(effects, dp=4, ep=4), 640).std() == 0.0  # all on one node


# --------------------------------------------------------------------------------- whole jobs
@pytest.mark.slow
def test_the_shipped_job_takes_its_published_hours():
    found = figures(prism.load_job("deepseek-v3-2048"))
    hours = found["step_time"]["mean"] * 1e12 / (15_360 * 4_096) * 2_048 / 3_600
    assert 0.8 * 180e3 < hours < 1.25 * 180e3  # 180K H800 hours were published
    # 2.5e11 flop a token in 180K hours are 0.195 of the peak in fp8
    assert found["mfu"] == pytest.approx(0.195, rel=0.25)


@settings(max_examples=4)
@given(data=st.data())
def test_any_layout_runs_and_noise_only_adds(data):
    draw = lambda values: data.draw(st.sampled_from(values))  # noqa: E731
    ep, (tp, cp, pp) = draw([1, 2, 4]), (draw([1, 2]) for _ in range(3))
    layout = {
        "tp": tp, "cp": cp, "pp": pp, "ep": ep, "dp": ep * draw([1, 2, 3]),
        "data_parallel": draw(["ddp", "zero1", "fsdp"]), "recompute": draw(["none", "full"]),
        "microbatches": draw([2, 4]), "overlap": draw([True, False]),
        "expert_imbalance": draw([1.0, 1.3]),
    }  # fmt: skip
    effects = {name: {"cv": 0.02} for name in ("rank", "call", "residual", "microbatch")}
    effects["regime"] = {"probability": 0.1, "factor": 2.0}
    if ep > 1:
        layout |= {"expert_overlap": draw([True, False]), "expert_node_limit": draw([None, 1])}
        effects["expert"] = {"cv": draw([0.0, 0.1])}
    cluster = {"placement": draw(["megatron", "tp-cp-pp-dp"]), "gpus_per_node": 1,
               "nodes": tp * cp * pp * layout["dp"], "nvlink_domain_gpus": 4}  # fmt: skip
    job = made(effects, draw([{}, LATENT]), cluster, **layout)
    x, still = times(job, 128), ideal(job)
    assert still > 0.0 and x.mean() > 0.97 * still
    assert figures(job)["memory"]["gib"] > 0.0


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ({"parallelism": {"ep": 3}}, "parallelism.ep"),
        ({"parallelism": {"ep": 16}, "model": {"n_experts": 24}}, "ep"),
        ({"model": NO_EXPERTS}, "parallelism.ep"),
        ({"model": {"n_experts": 0}, "parallelism": {"ep": 1}}, "experts"),
        ({"model": {"experts_per_token": 17}}, "experts_per_token"),
        ({"model": {"experts_per_token": 0}}, "experts_per_token"),
        ({"model": {"n_dense_layers": 4}}, "n_dense_layers"),
        ({"model": {"kv_lora_rank": 64}}, "rope_head_size"),
        ({"model": {"q_lora_rank": 64, "attention_gate": True}}, "attention_gate"),
        ({"model": {**LATENT, "rope_head_size": 97}}, "rope_head_size"),
        ({"model": {**LATENT, "n_kv_heads": 2}}, "n_kv_heads"),
        ({"parallelism": {"data_parallel": "hsdp"}}, "hsdp"),
        ({"variability": {"resolution": "kernel"}}, "resolution"),
        ({"parallelism": {"tp": 2, "dp": 8, "sequence_parallel": False}}, "sequence_parallel"),
        (
            {"model": {"expert_ffn_size": 33}, "parallelism": {"tp": 2, "dp": 8}},
            "expert_ffn_size",
        ),
        ({"parallelism": {"ep": 1, "expert_imbalance": 1.2}}, "expert_imbalance"),
        ({"parallelism": {"ep": 1, "expert_overlap": True}}, "expert_overlap"),
        ({"model": {"n_experts": 0}, "parallelism": {"ep": 1, "cuda_graphs": True}}, "experts"),
        ({"parallelism": {"expert_imbalance": 0.9}}, "expert_imbalance"),
        ({"parallelism": {"expert_imbalance": 8.5}}, "expert_imbalance"),
        ({"parallelism": {"tp": 2, "dp": 8, "ep": 4, "expert_tp": 4}}, "expert_tp"),
        ({"parallelism": {"ep": 1, "expert_tp": 1}}, "expert_tp"),
        (
            {"parallelism": {"ep": 1}, "variability": {"effects": {"expert": {"cv": 0.1}}}},
            "effects.expert",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_key(blocks, key):
    with pytest.raises(prism.PrismError, match=key):
        prism.load_job({
            "model": MODEL | blocks.get("model", {}),
            "parallelism": {"dp": 16, "ep": 8, "microbatches": 2} | blocks.get("parallelism", {}),
            "cluster": {"nodes": 4, "gpus_per_node": 4},
            "variability": {"library": "none"} | blocks.get("variability", {}),
        })  # fmt: skip
