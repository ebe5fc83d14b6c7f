"""One step's costs: seconds by class of kernel against a transformer written down apart, flop,
MFU, energy, and what data parallelism and stages send."""

import costs_made as made
import numpy as np
import pytest
from costs_made import (
    NETWORK,
    PEAK,
    PEAK_FP8,
    SMALL,
    classes,
    make_job,
    parameters,
    ring,
    simulate,
)

import prism

CASES = {
    "one GPU": ({}, {}),
    "every head has keys, one product before the activation": (
        {}, {"n_kv_heads": 16, "gated_mlp": False}),
    "no rotation": ({}, {"rope": False}),
    "wide heads": ({}, {"head_size": 128}),
    "a window": ({}, {"window": 1024}),
    "one table": ({}, {"tied_embeddings": True}),
    "microbatches": ({"microbatches": 3, "microbatch_size": 2}, {}),
    "tp": ({"tp": 8}, {}),
    "fewer key heads than ranks": ({"tp": 4}, {"n_kv_heads": 2}),
    "tp without sequence parallelism": ({"tp": 4, "sequence_parallel": False}, {}),
    "cp": ({"cp": 4}, {}),
    "cp over nodes": ({"tp": 4, "cp": 4}, {}),
    "full recomputation": ({"tp": 2, "recompute": "full"}, {}),
    "selective recomputation": ({"tp": 2, "recompute": "selective"}, {}),
    "selective, plain": ({"recompute": "selective"}, {"gated_mlp": False}),
    "torch recomputes up to the last product": (
        {"tp": 2, "recompute": "full", "framework": "compiled"}, {}),
    "eager": ({"framework": "eager", "tp": 2, "microbatches": 2}, {}),
    "compiled, gradients in bf16": (
        {"framework": "compiled", "gradient_dtype": "bf16", "microbatches": 3}, {}),
    "eager, selective": ({"framework": "eager", "recompute": "selective"}, {}),
    "nanotron, full": ({"framework": "nanotron", "recompute": "full", "tp": 2}, {}),
    "transformers": ({"framework": "transformers", "tp": 2}, {"n_kv_heads": 16}),
    "eight bits": ({"tp": 2, "precision": "fp8"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_by_class_of_kernel(name):
    layout, model = CASES[name]
    found = classes(make_job(layout, model))
    expected = made.step(SMALL | model, layout)
    reduced = {key for key in found if key.startswith("dp_")}  # cp ranks share gradients
    assert reduced == ({"dp_all_reduce"} if layout.get("cp", 1) > 1 else set())
    assert {key: found[key] for key in found.keys() - reduced} == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------- data parallelism
H, V = SMALL["hidden_size"], SMALL["vocab_size"]
LAYER = parameters(SMALL, 1) - parameters(SMALL, 0)
UNITS = [LAYER + V * H, LAYER + V * H + H]  # of two layers, the embedding and the loss with them
SHARED = made.value("overlap_cost")  # of what compute hides, by which it becomes longer


def sent(size, op_kind="all_gather", tp=1):
    """Seconds of each unit's collective over 16 ranks in two nodes, of so many bytes a number."""
    return np.array([ring(size * n / tp, 16, 2, op_kind) for n in UNITS])


def in_node(size):
    return np.array([ring(size * n, 8) for n in UNITS])


AHEAD, BACK, BOTH = sent(2.0), sent(4.0), sent(4.0, "all_reduce")
HALVES = np.array([ring(4.0 * n / 8, 2, 2, "all_reduce") for n in UNITS])  # of shards of 8
FSDP, HSDP = {"data_parallel": "fsdp"}, {"data_parallel": "hsdp", "shard_size": 8}
APART = {"overlap": False}
PARTS = 4.0 * sum(UNITS) / 160e6  # messages of Megatron, of 4 MB a rank or these at least
# all_gather, reduce_scatter, all_reduce [s], shards of the optimizer
SHARING = {
    "ddp": (APART, 0.0, 0.0, BOTH.sum(), 1),
    "one bucket": (APART | {"bucket_layers": 2}, 0.0, 0.0,
                   PARTS * ring(4.0 * sum(UNITS) / PARTS, 16, 2, "all_reduce"), 1),
    "gradients in bf16": (APART | {"gradient_dtype": "bf16"}, 0.0, 0.0,
                          sent(2.0, "all_reduce").sum(), 1),
    "three microbatches reduce once": (APART | {"microbatches": 3}, 0.0, 0.0, BOTH.sum(), 1),
    "zero1": (APART | {"data_parallel": "zero1"}, ring(2.0 * sum(UNITS), 16, 2), BACK.sum(), 0.0,
              16),
    "fsdp": (APART | FSDP, 2 * AHEAD.sum(), BACK.sum(), 0.0, 16),
    "fsdp in fp8": (APART | FSDP | {"precision": "fp8"}, 2 * sent(1.0).sum(), BACK.sum(), 0.0, 16),
    "fsdp, every microbatch": (APART | FSDP | {"microbatches": 3}, 6 * AHEAD.sum(), 3 * BACK.sum(),
                               0.0, 16),
    "fsdp, kept": (APART | FSDP | {"microbatches": 3, "reshard_after_forward": False}, AHEAD.sum(),
                   BACK.sum(), 0.0, 16),
    "hsdp": (APART | HSDP, 2 * in_node(2.0).sum(), in_node(4.0).sum(), HALVES.sum(), 8),
    # one message each: the first layers' come last, and are gathered first
    "ddp, hidden": ({}, 0.0, 0.0, BOTH[0] + SHARED * BOTH[1], 1),
    "zero1, hidden": ({"data_parallel": "zero1"}, AHEAD[0] + SHARED * AHEAD[1],
                      BACK[0] + SHARED * BACK[1], 0.0, 16),
    "fsdp, hidden": (FSDP, AHEAD[0] + SHARED * (2 * AHEAD + BACK).sum(), BACK[0], 0.0, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARING)
def test_what_replicas_send(name):
    layout, gathered, scattered, reduced, shards = SHARING[name]
    found = classes(make_job({"dp": 16, "bucket_layers": 1} | layout))
    kinds = ("dp_all_gather", "dp_reduce_scatter", "dp_all_reduce")
    expected = [gathered, scattered, reduced]
    assert [found.get(kind, 0.0) for kind in kinds] == pytest.approx(expected, rel=1e-4)
    rate = 0.74 if layout.get("data_parallel") in ("fsdp", "hsdp") else 1.0  # torch's own
    each = 28.0 if "gradient_dtype" in layout else 30.0
    adam = made.mean("memory", bytes=each * parameters(SMALL) / shards / rate)
    assert found["optimizer"] == pytest.approx(adam, rel=1e-5)


def test_a_rank_of_a_tp_group_sends_its_part():
    found = classes(make_job({"dp": 16, "tp": 2, "bucket_layers": 1} | APART))
    # eight of a group's ranks are in two nodes each
    norms = [2 * H, 3 * H]  # which both ranks have
    sizes = [n / 2 + whole / 2 for n, whole in zip(UNITS, norms, strict=True)]
    expected = [ring(4.0 * n, 16, 4, "all_reduce") for n in sizes]
    assert found["dp_all_reduce"] == pytest.approx(sum(expected), rel=1e-4)


# ------------------------------------------------------------------------------------- stages
APART_GPUS = {"gpus_per_node": 1}
NEAR = 5e-6 + 2.0 * 4096 * H / 400e9, 2.0 * 4096 * H / 400e9  # of an activation: whole, sending


@pytest.mark.parametrize(
    ("layout", "cluster", "transfers", "beside"),
    [
        ({"pp": 2, "p2p": "blocking"}, {}, 2 * NEAR[0], 0.0),
        ({"pp": 2}, {}, 2 * NEAR[0], 4 * NEAR[1]),
        ({"pp": 2, "tp": 2}, {}, 2 * (5e-6 + NEAR[1] / 2), 4 * NEAR[1] / 2),
        ({"pp": 2, "cp": 2}, {}, 2 * (5e-6 + NEAR[1] / 2), 4 * NEAR[1] / 2),
        ({"pp": 2, "microbatch_size": 2}, {}, 2 * (5e-6 + 2 * NEAR[1]), 4 * 2 * NEAR[1]),
        ({"pp": 2, "p2p": "blocking"}, APART_GPUS, 2 * (NETWORK[1] + 10 * NEAR[1]), 0.0),
        ({"pp": 2, "p2p": "blocking"}, APART_GPUS | {"nvlink_domain_gpus": 2}, 2 * NEAR[0], 0.0),
    ],
)
def test_what_stages_send(layout, cluster, transfers, beside):
    """A microbatch's activation and its gradient; sent beside compute they slow that too."""
    found = classes(make_job({"microbatches": 1} | layout, cluster=cluster))
    assert found["p2p"] == pytest.approx(transfers + SHARED * beside, rel=1e-4)


def test_ends_with_one_table_reduce_its_gradient():
    tied = make_job({"pp": 2, "microbatches": 1}, {"tied_embeddings": True})
    expected = ring(4.0 * V * H, 2, 1, "all_reduce")
    assert classes(tied)["embedding_all_reduce"] == pytest.approx(expected, rel=1e-5)
    assert "embedding_all_reduce" not in classes(make_job({"pp": 2, "microbatches": 1}))


@pytest.mark.parametrize(
    ("layout", "step"),
    [
        ({}, (32 + 7) * 3.0),
        ({"microbatches": 8}, (8 + 7) * 3.0),
        ({"pp": 4}, (32 + 3) * 3.0),
        ({"vpp": 2, "schedule": "interleaved"}, 32 * 3.0 + 7 * 3.0 / 2),  # chunks take a half
    ],
)
def test_stages_of_given_durations(layout, step):
    job = prism.load_job("pipeline-8x32").replace({"parallelism": layout})
    result = simulate(job)
    assert float(result.ideal_step_time) == pytest.approx(step)
    assert "mfu" not in result and prism.memory(job) is None  # no sizes, no flop


# ------------------------------------------------------------------------- measured rates
# of a Hopper GPU's gradients in fp8 over its tables by shape
GRADIENTS_IN_FP8 = prism.load_library("h100-healthy").value("nominal/fp8_backward")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [4096, 11_585])
def test_products_of_a_device_are_its_tables_by_shape(precision, tokens):
    """Both products forward, gradients of their inputs and, tokens added up, of their weights."""
    sizes = {"hidden_size": 4096, "ffn_size": 8192, "gated_mlp": False, "n_layers": 1}
    job = make_job({"precision": precision}, sizes | {"seq_len": tokens, "n_heads": 32},
                   {"device": "h100", "links": {}, "clock_mhz": 1000.0})  # fmt: skip

    def mean(kind, **sizes):
        return prism.kernel(kind, "h100", **sizes)["mean"]

    forward = [(tokens, 8192, 4096), (tokens, 4096, 8192)]
    gradients = [(tokens, 4096, 8192), (tokens, 8192, 4096), (4096, 8192, tokens),
                 (8192, 4096, tokens)]  # fmt: skip
    once, twice = (
        sum(mean("gemm", m=m, n=n, k=k, dtype=precision) for m, n, k in each)
        for each in (forward, gradients)
    )
    seconds = once + (GRADIENTS_IN_FP8 if precision == "fp8" else 1.0) * twice
    added = 2 * mean("memory", bytes=6.0 * 4096 * 8192)  # the products' own gradients
    # locked to a clock at which power is ample; tables are 1.14 of back to back at 1,365 MHz
    slower = 1.14 * (1365 / 1000) ** 0.95
    assert classes(job)["gemm_mlp"] == pytest.approx(slower * (seconds + added), rel=1e-5)


@pytest.mark.parametrize("release", ["megatron-2022", "eager-2023", "compiled-2024"])
def test_an_older_release_computes_slower_and_moves_alike(release):
    now, then = (
        classes(make_job({"framework": name, "attention": "fa2"}))
        for name in (release.partition("-")[0], release)
    )
    speed = made.value(f"speed_{release}")
    assert 0.5 < speed < 1.0
    sums = 0.0  # that products add to float32 gradients
    if release.startswith("megatron"):
        widths = 2 * SMALL["ffn_size"], SMALL["ffn_size"]
        sums = SMALL["n_layers"] * sum(made.mean("memory", bytes=6.0 * n * H) for n in widths)
    ratio = (then["gemm_mlp"] - sums) / (now["gemm_mlp"] - sums)
    assert ratio == pytest.approx(1.0 / speed, rel=1e-5)
    assert then["attention"] == pytest.approx(now["attention"] / speed, rel=1e-5)
    for kind in ("memory", "optimizer", "launch_gaps"):
        assert then[kind] == pytest.approx(now[kind], rel=1e-5)


@pytest.mark.parametrize(
    ("device", "precision", "copies", "rate"),
    [  # bytes a number is written in: by rows and by columns where products need both
        ("h100", "fp8", 2 * 1.0, 0.55 * 3.35e12), ("b200", "fp8", 1.0, 0.49 * 8e12),
        ("b200", "mxfp8", 2 * (1.0 + 1 / 32), 0.49 * 8e12),
        ("mi300x", "fp8", 0.0, np.inf),  # its products were measured with quantizing
    ],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["megatron", "compiled"])
def test_operands_are_quantized_for_every_product(device, precision, copies, rate, framework):
    """Where they are made; torch.compile finds scales by reading once more, and casts weights."""
    bf16, eight = (
        classes(make_job({"precision": p, "framework": framework}, cluster={"device": device}))
        for p in ("bf16", precision)
    )
    q, keys, f = H, H / 2, SMALL["ffn_size"]
    operands = H + q + H + f  # into q, k and v, the projection, gate and up, down
    results = q + 2 * keys + H + 2 * f + H  # whose gradients are operands
    values, n, reads = SMALL["seq_len"] * (operands + results), 8, 2.0
    if framework == "compiled":
        values, n, reads = values + 2 * (LAYER - 2 * H), 16, 4.0
    seconds = SMALL["n_layers"] * values * (reads + copies) / rate if copies else 0.0
    assert eight["memory"] - bf16["memory"] == pytest.approx(seconds, rel=1e-4, abs=1e-9)
    gaps = SMALL["n_layers"] * n * made.value("kernel_launch_s") * (copies > 0)
    assert eight["launch_gaps"] - bf16["launch_gaps"] == pytest.approx(gaps, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("seq_len", [4096, 16_384])
def test_attention_of_cudnn_has_kernels_beside_its_backward(seq_len):
    """Passes over its result, which its time in the tables holds, at the rate of a copy."""
    sizes = {"n_layers": 1, "seq_len": seq_len, "head_size": 128}
    found = {
        backend: classes(make_job({"attention": backend}, sizes,
                                  {"device": "h100", "clock_mhz": 1000.0}))
        for backend in ("cudnn", "fa2")
    }  # fmt: skip
    shape = {"batch": 1, "heads": 16, "kv_heads": 8, "seq": seq_len, "head_dim": 128}
    table = {
        backend: sum(
            prism.kernel("attention", "h100", backend=backend, backward=backward, **shape)["mean"]
            for backward in (False, True)
        )
        for backend in found
    }
    helpers = prism.kernel("memory", "h100", bytes=7.6 * 2.0 * seq_len * 16 * 128)["mean"]
    more = found["cudnn"]["memory"] - found["fa2"]["memory"]
    assert more == pytest.approx(helpers, rel=1e-4)
    slower = found["fa2"]["attention"] / table["fa2"]
    expected = slower * (table["cudnn"] - helpers)
    assert found["cudnn"]["attention"] == pytest.approx(expected, rel=1e-4)


def test_tables_are_of_their_own_device():
    """With another device's library products go by the ratio of the data sheets' rates."""
    big = {"hidden_size": 8192, "ffn_size": 28672, "seq_len": 8192, "n_layers": 1, "n_heads": 64}
    h100, h200, a100 = (
        prism.kernel("gemm", device, m=8192, n=57344, k=8192)["mean"]
        for device in ("h100", "h200", "a100")
    )
    assert 0.9 < h200 / h100 < 1.1 and a100 / h100 == pytest.approx(989 / 312, rel=0.2)
    own, other = (
        classes(make_job({}, big, {"device": device}).replace("variability.library=h100-healthy"))
        for device in ("h100", "a100")
    )
    # each at the speed that its own power leaves
    assert other["gemm_mlp"] / own["gemm_mlp"] == pytest.approx(989 / 312, rel=0.15)


@pytest.mark.parametrize(
    ("device", "precision"),
    [("a100", "fp8"), ("h100", "nvfp4"), ("h200", "mxfp8"), ("mi300x", "nvfp4")],
)
def test_arithmetic_that_a_device_has_not_is_refused(device, precision):
    with pytest.raises(prism.PrismError, match=r"parallelism\.precision"):
        simulate(make_job({"precision": precision}, cluster={"device": device}))


# ------------------------------------------------------------------------ flop, tokens, energy
FLOP = 6 * parameters(SMALL) * 4096 + 3 * 2 * made.attention_flop(SMALL)  # of a sequence


@pytest.mark.parametrize(
    ("layout", "model", "flop", "peak"),
    [
        ({}, {}, FLOP, PEAK),
        ({"precision": "fp8"}, {}, FLOP, PEAK_FP8),
        ({"recompute": "full"}, {}, FLOP, PEAK),  # what is done again is no use
        ({"microbatches": 3, "microbatch_size": 2, "dp": 4, "tp": 2}, {}, FLOP, PEAK),
        ({"pp": 2, "microbatches": 2}, {}, FLOP, PEAK),
        ({}, {"window": 512}, FLOP - 6 * made.attention_flop(SMALL)
         + 6 * made.attention_flop(SMALL | {"window": 512}), PEAK),
    ],
)  # fmt: skip
def test_mfu_counts_useful_flop_over_the_precisions_peak(layout, model, flop, peak):
    job = make_job(layout, model)
    found = prism.summary(simulate(job))
    each = [layout.get(key, 1) for key in ("dp", "microbatches", "microbatch_size")]
    gpus = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    rate = flop * np.prod(each) / found["step_time"]["mean"] / gpus
    assert found["model_flops_per_gpu"] == pytest.approx(rate, rel=1e-6)
    assert found["mfu"] == pytest.approx(rate / peak, rel=1e-6)
    assert found["global_batch"] == np.prod(each)
    assert found["tokens_per_step"] == job.tokens_per_step == np.prod(each) * 4096
    tokens_per_s = np.prod(each) * 4096 / found["step_time"]["mean"]
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens_per_s / gpus, rel=1e-6)
