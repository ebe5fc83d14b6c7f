"""Named models: parameters against published counts; which layers have experts or windows."""

import costs_made as made
import numpy as np
import pytest
from costs_made import classes, make_job, simulate

import prism

# Parameters, and where published those that a token passes [10^9]. Exact counts are those of
# checkpoints in Hugging Face's format; rounded ones are from the paper or card named in presets.py.
PUBLISHED = {
    "llama3-405b": (405.853,),
    "llama3-70b": (70.5537,),
    "llama3-8b": (8.03026,),
    "llama3.2-3b": (3.21275,),
    "llama3.2-1b": (1.23581,),
    "llama2-70b": (68.9766,),
    "llama2-13b": (13.0159,),
    "llama2-7b": (6.73842,),
    "gpt3-175b": (174.6,),  # Table 2.1
    "mpt-70b": (64.862437376,),  # with positions learned, in llm-foundry's table
    "mpt-30b": (29.975214080,),
    "mpt-13b": (12.853954560,),
    "mpt-7b": (6.658859008,),
    "nemotron4-340b": (341.0,),  # 331.6 and 9.4 of embeddings
    "nemotron4-15b": (15.6,),  # 12.5 and 3.2
    "qwen3-235b-a22b": (235.0, 22.0),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-32b": (32.8,),
    "qwen3-14b": (14.8,),
    "qwen3-8b": (8.19,),
    "gemma3-27b": (27.0,),  # 25.600 and 1.416
    "gemma2-27b": (27.2271,),
    "gemma2-9b": (9.2417,),
    "deepseek-v3": (671.0, 37.0),
    "kimi-k2": (1_026.5, 32.6),
    "gpt-oss-120b": (116.83, 5.13),
    "gpt-oss-20b": (20.91, 3.61),
    "mixtral-8x22b": (140.6, 39.0),
    "mixtral-8x7b": (46.7028, 12.9),
    "llama4-maverick": (400.0, 17.0),
    "llama4-scout": (107.77,),  # of 108.64, 0.87 for images
    "grok-1": (314.0,),
    "nemotron-h-8b": (8.1,),
    "nemotron3-nano-30b-a3b": (31.6, 3.2),
}
# OpenAI and Nemotron 3 count the output's matrix among the active parameters, not the input's.
WITHOUT_INPUT = ("gpt-oss-120b", "gpt-oss-20b", "nemotron3-nano-30b-a3b")
# Rounded to two digits, so that 0.5 % is less than the rounding.
ROUNDED = {"grok-1": 0.006, "nemotron4-15b": 0.005}
NO_ROTATION = {"gpt3-175b", "mpt-7b", "mpt-13b", "mpt-30b", "mpt-70b", "nemotron-h-8b",
               "nemotron3-nano-30b-a3b"}  # fmt: skip
SHORT = {"seq_len": 1}


def whole(name, layout=None, **model):
    """A named model on one GPU, whatever its memory."""
    return make_job(layout, model, sizes={"name": name})


def count(job):
    """Parameters that the optimizer goes over, of 30 bytes each, and those that a token passes."""
    found = prism.summary(simulate(job))
    flop = found["model_flops_per_gpu"] * found["step_time"]["mean"]
    first, second = (made.mean("memory", bytes=x) for x in (1e12, 2e12))
    moved = 1e12 + (found["critical_path"]["optimizer"] - first) / (second - first) * 1e12
    return moved / 30.0, flop / 6.0 / found["tokens_per_step"]


def test_every_preset_has_a_published_count():
    with pytest.raises(prism.PrismError) as caught:
        whole("no such model")
    assert all(name in str(caught.value) for name in PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_parameters(name):
    total, *active = PUBLISHED[name]
    job = whole(name, **SHORT)
    found, passed = count(job)
    model = job.model
    assert found == pytest.approx(total * 1e9, rel=ROUNDED.get(name, 0.005))
    passed -= model.vocab_size * model.hidden_size if name in WITHOUT_INPUT else 0
    for own in active or ([] if model.n_experts else [total]):
        assert passed == pytest.approx(own * 1e9, rel=0.025)  # two digits, and a hybrid's scans
    assert model.rope == (name not in NO_ROTATION)


# --------------------------------------------------------------------------- kinds of layers
EXPERTS = {"n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 1024}


def each_layer(model):
    """Seconds of attention and experts in each of seven layers: what its node adds, if slow."""
    sizes = {"n_layers": 7, "seq_len": 32_768} | model  # so long that windows are much less
    job = make_job({"pp": 7, "microbatches": 1}, sizes, {"gpus_per_node": 1})
    plain, found = classes(job), []
    for node in range(7):
        slow = classes(job.replace({"cluster": {"node_slowdowns": {node: 2.0}}}))
        kinds = "attention", "gemm_expert"
        found.append([slow.get(kind, 0.0) - plain.get(kind, 0.0) for kind in kinds])
    return np.array(found).T


@pytest.mark.parametrize(
    ("model", "full", "sparse"),
    [
        ({"n_dense_layers": 1, "moe_layer_interval": 3, "window": 256, "full_attention_interval": 2}
         | EXPERTS, [1, 3, 5], [3, 6]),
        ({"window": 256} | EXPERTS, [], range(7)),
        ({"n_dense_layers": 3} | EXPERTS, range(7), range(3, 7)),
    ],
)  # fmt: skip
def test_layers_with_experts_and_whole_attention_are_the_last_of_their_groups(model, full, sparse):
    attention, experts = each_layer(model)
    whole = attention > 4.0 * attention.min() if len(full) not in (0, 7) else [len(full) == 7] * 7
    assert np.flatnonzero(whole).tolist() == list(full)
    assert np.flatnonzero(experts > 1e-6).tolist() == list(sparse)


@pytest.mark.parametrize("window", [1, 100, 1_023, 1_024, 5_000])
def test_a_window_counts_the_pairs_it_leaves(window):
    sizes = made.SMALL | {"seq_len": 1_024}
    flop = []
    for model in ({}, {"window": window}):
        found = prism.summary(simulate(make_job({}, model, sizes=sizes)))
        flop.append(found["model_flops_per_gpu"] * found["step_time"]["mean"])
    pairs = sum(i + 1 - min(i + 1, window) for i in range(1_024))  # that are left out
    each = 6 * 2 * 2.0 * made.SMALL["hidden_size"]  # two products, three passes, two layers
    # flop leave the diagonal's half out
    left_out = (flop[0] - flop[1]) / each
    assert left_out == pytest.approx(pairs, rel=3e-3, abs=1_024)


def test_a_hybrid_models_kernels_do_its_flop():
    """Two flop forward for every element of a matrix that a token passes, and both its gradients.

    Experts' take as long as grouped products of all experts' shares do.
    """
    job = whole("nemotron3-nano-30b-a3b", {"microbatch_size": 32}, seq_len=4096)
    m, found = job.model, classes(job)
    small = 23 * (6_144 * 5 + 3 * 64 + 4_096) + 53 * m.hidden_size  # convolution, heads, norms
    small += 23 * 3 * 7 * 4_096 * 128 / 6  # scans: 7 flop a value of a state, forward
    passed = count(whole("nemotron3-nano-30b-a3b", **SHORT))[1]
    matrices = passed - small - 2 * m.vocab_size * m.hidden_size
    tokens, width, h = 32 * 4096, m.expert_ffn_size, m.hidden_size
    routed = 23 * 6 * 2 * h * width  # of a token's six experts of 128
    # into Mamba-2: two of 64 heads of 64, B and C of 8 groups of 128, a step; into attention: 32
    # heads of 128 and two of keys and of values; then two shared experts, and the router
    each = 23 * [(h, 2 * 4_096 + 2 * 8 * 128 + 64), (4_096, h)]
    each += 6 * [(h, (32 + 2 * 2) * 128), (32 * 128, h)]
    each += 23 * [(h, 2 * width), (2 * width, h), (h, 128)]
    assert sum(n * k for k, n in each) == pytest.approx(matrices - routed, rel=1e-3)
    per_flop = made.mean("gemm", m=8192, n=8192, k=8192) / (2.0 * 8192**3)  # whatever the shape
    seconds = 2.0 * tokens * (matrices - routed) * per_flop
    seconds += sum(
        made.mean("gemm", m=tokens, n=n, k=k, backward=True)
        + made.mean("memory", bytes=6.0 * n * k)
        for k, n in each
    )  # gradients, and their sums
    assert found["gemm_attention"] + found["gemm_mlp"] == pytest.approx(seconds, rel=3e-4)
    shapes = [{"n": width, "k": h}, {"n": h, "k": width}]
    experts = sum(
        made.mean("grouped_gemm", experts=128, m=tokens * 6 / 128, backward=backward, **shape)
        for shape in shapes
        for backward in (False, True)
    )
    experts += 2 * made.mean("memory", bytes=6.0 * 128 * h * width)  # gradients' sums
    assert found["gemm_expert"] == pytest.approx(23 * experts, rel=1e-4)
    held = prism.memory(job)["parts"]["parameters"] * 2**30 / 2.0
    assert held == pytest.approx(count(job)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"layer_pattern": "MEX*" * 13}, "layer_pattern"),
        ({"layer_pattern": "ME*"}, "layer_pattern"),
        ({"layer_pattern": "M*" * 26}, "layer_pattern"),
        ({"layer_pattern": "W*" * 26, "n_experts": 0}, "window"),
        ({"layer_pattern": "ME E*"}, "layer_pattern"),
        ({"layer_pattern": "ME MM* *E"}, "layer_pattern"),
        ({"mamba_heads": 0}, "mamba_heads"),
        ({"window": 64}, "model.window"),
        ({"n_dense_layers": 1}, "n_dense_layers"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(model, key):
    with pytest.raises(prism.PrismError, match=key):
        whole("nemotron3-nano-30b-a3b", **model)


@pytest.mark.parametrize("key", ["full_attention_interval", "moe_layer_interval"])
def test_intervals_without_what_they_group_are_refused(key):
    with pytest.raises(prism.PrismError, match=key):
        make_job({}, {key: 2})
