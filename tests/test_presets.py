"""Named models: parameters against published counts; kinds of layers, windows, hybrid layers."""

from collections import Counter

import pytest
from moe_jobs import make_job

from prism import PrismError, load_job, load_library
from prism.jobs.jobspec.blocks import ModelBlock
from prism.jobs.jobspec.presets import PRESETS
from prism.workload.build import build_workload, count_model_flop
from prism.workload.memory import estimate_memory
from prism.workload.modelsize import (
    Layer,
    attention_flop,
    count_parameters,
    model_forward_flop,
    model_layers,
)

LIBRARY = load_library("h100-healthy")
BILLION = 1e9

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


def test_every_preset_has_a_published_count():
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_parameters(name):
    model, (total, *active) = ModelBlock(name=name), PUBLISHED[name]
    assert count_parameters(model) == pytest.approx(total * BILLION, rel=ROUNDED.get(name, 0.005))
    for count in active:
        own = count_parameters(model, active=True)
        own -= model.vocab_size * model.hidden_size if name in WITHOUT_INPUT else 0
        assert own == pytest.approx(count * BILLION, rel=0.017)  # two digits


def test_layers_with_experts_and_windows_are_the_last_of_their_groups():
    full, window = Layer("attention", "dense"), Layer("window", "experts")
    model = ModelBlock(
        n_layers=7, n_experts=4, n_dense_layers=1, moe_layer_interval=3, window=8,
        full_attention_interval=2,
    )  # fmt: skip
    assert [layer.mixer for layer in model_layers(model)] == ["window", "attention"] * 3 + [
        "window"
    ]
    assert [i for i, x in enumerate(model_layers(model)) if x.mlp == "experts"] == [3, 6]
    assert model_layers(ModelBlock(n_layers=2)) == (full, full)
    every = ModelBlock(n_layers=2, window=8, n_experts=4)
    assert model_layers(every) == (window, window)
    maverick = Counter(x.mlp for x in model_layers(ModelBlock(name="llama4-maverick")))
    assert maverick == {"dense": 24, "experts": 24}


@pytest.mark.parametrize("window", [1, 100, 1_023, 1_024, 5_000])
def test_a_window_counts_the_pairs_it_leaves(window):
    model = ModelBlock(name="llama3-8b", seq_len=1_024, window=window)
    pairs = sum(min(i + 1, window) for i in range(1_024))
    whole = sum(i + 1 for i in range(1_024))
    found = attention_flop(model, 3, window=True) / attention_flop(model, 3)
    assert found == pytest.approx(pairs / whole, rel=2e-3)  # flop leave the diagonal's half out


def test_windowed_layers_take_less_attention_and_nothing_else():
    job = make_job(model={"n_layers": 6, "window": 64, "full_attention_interval": 3})
    plain = make_job(model={"n_layers": 6})
    forward, other = (
        [k for chunk in build_workload(j, LIBRARY).chunks[0] for k in chunk.forward]
        for j in (job, plain)
    )
    flop = [k.flop for k in forward if k.name == "attention"]
    of = attention_flop(job.model, 1), attention_flop(job.model, 1, window=True)
    assert flop == [of[1], of[1], of[0]] * 2
    assert [k for k in forward if k.name != "attention"] == [
        k for k in other if k.name != "attention"
    ]
    saved = count_model_flop(plain) - count_model_flop(job)
    sequences = 16 * 2
    assert saved == pytest.approx(3 * sequences * 4 * (of[0] - of[1]), rel=1e-9)


def hybrid(**model):
    return load_job(
        {
            "model": {"name": "nemotron3-nano-30b-a3b"} | model,
            "parallelism": {"dp": 8, "ep": 8, "microbatches": 2, "data_parallel": "zero1"},
            "cluster": {"nodes": 1},
        }
    )


def test_a_hybrid_models_kernels_do_its_flop():
    """Forward: two flop for every active matrix element, attention's and the scans'."""
    job = hybrid()
    m, work = job.model, build_workload(job, LIBRARY)
    kinds = Counter(model_layers(m))
    assert kinds == {Layer("mamba", ""): 23, Layer("", "experts"): 23, Layer("attention", ""): 6}
    small = 23 * (6_144 * 5 + 3 * 64 + 4_096) + 53 * m.hidden_size  # convolution, heads, norms
    matrices = count_parameters(m, active=True) - small - m.vocab_size * m.hidden_size
    want = 2.0 * m.seq_len * matrices + model_forward_flop(m, 1)
    kernels = [k for chunk in work.chunks[0] for k in chunk.forward]
    assert sum(k.flop for k in kernels) == pytest.approx(want, rel=1e-9)
    assert sum(k.name == "scan" for k in kernels) == 23
    touched = sum(o.bytes for o in work.optimizer) * 8
    assert touched == pytest.approx(30.0 * count_parameters(m), rel=1e-9)
    assert estimate_memory(job) is None  # not known


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"layer_pattern": "MEX*" * 13}, "layer_pattern"),
        ({"layer_pattern": "ME*"}, "layer_pattern"),
        ({"layer_pattern": "M*" * 26}, "layer_pattern"),
        ({"mamba_heads": 0}, "mamba_heads"),
        ({"window": 64}, "model.window"),
        ({"n_dense_layers": 1}, "n_dense_layers"),
    ],
)
def test_a_pattern_that_does_not_fit_is_refused(model, key):
    with pytest.raises(PrismError, match=key):
        hybrid(**model)


def test_intervals_without_what_they_group_are_refused():
    with pytest.raises(PrismError, match="full_attention_interval"):
        make_job(model={"full_attention_interval": 2})
    with pytest.raises(PrismError, match="moe_layer_interval"):
        make_job(model={"moe_layer_interval": 4})
