"""Layers of one's own: the built-in models written out, ops by closed forms, what is refused."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers_made import DENSE, EXPERTS, MIXER, written_out

import prism

EXPERT_SIZES = {"n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 1408}
LLAMA3_8B = {"n_layers": 32, "hidden_size": 4096, "ffn_size": 14_336, "n_heads": 32,
             "n_kv_heads": 8, "vocab_size": 128_256, "seq_len": 8192}  # fmt: skip


def job(model, layout=None):
    layout = layout or {}
    world = math.prod(layout.get(key, 1) for key in ("tp", "cp", "pp", "dp"))
    nodes = {"nodes": max(1, world // 8), "gpus_per_node": min(8, world)}
    return prism.load_job({"model": model, "parallelism": layout, "cluster": nodes})


def figures(model, layout):
    made = job(model, layout)
    shown = prism.summary(prism.estimate(made, replicates=64, seed=3))
    memory = {k: v for k, v in shown["memory"].items() if k != "stages"}
    return {
        **{key: shown[key] for key in ("step_time", "ideal_step_time", "tokens_per_step", "mfu")},
        **{key: shown[key] for key in ("time_loss", "critical_path")},
        "memory": memory, "parts": prism.memory(made)["parts"],
    }  # fmt: skip


LAYOUTS = (
    {}, {"tp": 2, "dp": 4, "microbatches": 2, "data_parallel": "zero1"},
    {"tp": 4, "pp": 2, "vpp": 2, "microbatches": 4}, {"cp": 2, "dp": 2, "recompute": "full"},
    {"dp": 8, "data_parallel": "fsdp", "framework": "eager", "microbatch_size": 2},
    {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb-h1", "precision": "fp8"},
    {"dp": 2, "framework": "nanotron", "recompute": "selective"},
    {"tp": 2, "sequence_parallel": False}, {"dp": 8, "data_parallel": "hsdp", "shard_size": 2},
)  # fmt: skip
OVER_EXPERTS = (
    {"dp": 8, "ep": 4}, {"tp": 2, "dp": 4, "ep": 4},
    {"tp": 2, "dp": 4, "ep": 8, "expert_tp": 1, "data_parallel": "zero1"},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "microbatches": 4, "recompute": "full"},
    {"dp": 4, "ep": 2, "expert_overlap": True, "cuda_graphs": True, "framework": "compiled"},
)  # fmt: skip


@pytest.mark.parametrize("layout", [{}, {"tp": 4, "pp": 2, "microbatches": 4}], ids=str)
def test_llama_3_8b_written_out_is_the_named_model(layout):
    assert figures(written_out(LLAMA3_8B), layout) == figures({"name": "llama3-8b"}, layout)


@settings(max_examples=8, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS), heads=st.sampled_from([8, 16]), head=st.sampled_from([64, 96]),
    kv_heads=st.sampled_from([4, 2]), ffn=st.integers(8, 40), seq=st.sampled_from([512, 4096]),
    depth=st.integers(2, 3),
)  # fmt: skip
def test_a_table_gives_the_figures_of_its_sizes(layout, heads, head, kv_heads, ffn, seq, depth):
    kv_heads = max(kv_heads, layout.get("tp", 1))
    model = DENSE | {"n_heads": heads, "n_kv_heads": kv_heads, "hidden_size": heads * head,
                     "ffn_size": 64 * ffn, "seq_len": seq, "n_layers": 2 * depth}  # fmt: skip
    assert figures(written_out(model), layout) == figures(model, layout)


@settings(max_examples=8, deadline=None)
@given(
    layout=st.sampled_from((*LAYOUTS[:6], *OVER_EXPERTS)), n=st.sampled_from([8, 16]),
    each=st.integers(1, 4), width=st.integers(4, 24),
)  # fmt: skip
def test_a_table_with_experts_gives_the_figures_of_its_sizes(layout, n, each, width):
    model = DENSE | {"n_experts": n, "experts_per_token": each, "expert_ffn_size": 64 * width}
    assert figures(written_out(model), layout) == figures(model, layout)


def test_dims_change_with_set_and_vary():
    base = job(written_out(DENSE))
    wide = base.replace("model.dims.ffn=5632")
    assert prism.memory(wide) == prism.memory(job(DENSE | {"ffn_size": 5632}))
    means = prism.sweep(base, {"model.dims.depth": [2, 4]}, replicates=64, seed=1).mean.values
    assert means[0] < 0.8 * means[1]


def flop_of(op, **model):
    made = job({"layers": [{"ops": [op]}], **model})
    shown = prism.summary(prism.estimate(made, replicates=64, seed=1))
    return shown["model_flops_per_gpu"] * shown["step_time"]["mean"]


def test_a_convolution_is_its_implicit_product():
    conv = {"op": "conv", "pixels": "batch * 56 * 56", "channels": 64, "filters": 128,
            "kernel": "3 * 3"}  # fmt: skip
    gemm = {"op": "gemm", "m": "batch * 56 * 56", "n": 128, "k": 64 * 9}
    assert flop_of(conv) == pytest.approx(flop_of(gemm))
    kept = [prism.memory(job({"layers": [{"ops": [op]}]}))["parts"]["mlp"] for op in (conv, gemm)]
    assert kept[1] == pytest.approx(9 * kept[0])  # the operand, not its copies


def test_queries_of_other_keys_take_the_time_of_their_pairs():
    def seconds(**keys):
        op = {"op": "attention", "heads": 16, "head_dim": 128, "mask": "full", **keys}
        made = job({"seq_len": 4096, "layers": [{"ops": [op]}]})
        path = prism.summary(prism.estimate(made, replicates=64, seed=1))["critical_path"]
        return path["attention"]

    whole = seconds()
    causal = prism.kernel("attention", device="h100", batch=1, heads=16, seq=4096, head_dim=128)
    assert 1.5 < whole / (causal["mean"] * 3.5) < 2.6  # forward and backward, twice the pairs
    assert seconds(queries=8192, keys=4096) == pytest.approx(2.0 * whole, rel=0.15)
    assert seconds(queries=4096, keys=1024) == pytest.approx(whole / 4.0, rel=0.4)


def test_tables_that_are_spread_have_no_optimizer_and_no_gradients():
    bag = {"op": "embedding_bag", "rows": 2**20, "dim": 128, "samples": "batch", "spread": "ep"}
    top = {"op": "gemm", "m": "batch", "n": 128, "k": 128}
    parts = [
        prism.memory(job({"layers": [{"ops": ops}]}, {"dp": 8, "ep": 8, "microbatch_size": 512}))[
            "parts"
        ]
        for ops in ([bag, top], [bag | {"rows": 2**23}, top])
    ]
    assert parts[0]["optimizer"] == parts[1]["optimizer"]
    assert parts[0]["gradients"] == parts[1]["gradients"]
    more = parts[1]["parameters"] - parts[0]["parameters"]
    assert more == pytest.approx(4 * 128 * (2**23 - 2**20) / 8 / 2**30)


# ---------------------------------------------------------------------------------- what is wrong
GEMM = {"op": "gemm", "m": "batch * seq", "n": "w", "k": "hidden", "split": "columns"}
MODEL = {"seq_len": 1024, "hidden_size": 256, "dims": {"w": 512}}
OP = "model.layers.0.ops.0"
WRONG = [
    (GEMM | {"op": "gem"}, {}, {}, f"{OP}.op"),
    (GEMM | {"k": "q"}, {}, {}, f"{OP}.k"),
    (GEMM | {"n": "w / 3"}, {}, {}, f"{OP}.n"),
    (GEMM | {"n": {"a": "w", "b": 3.5}}, {}, {}, f"{OP}.n"),
    ({"op": "gemm", "m": 1, "n": 2}, {}, {}, OP),
    (GEMM | {"heads": 4}, {}, {}, OP),
    (GEMM | {"wdth": 4}, {}, {}, f"{OP}.wdth"),
    *((GEMM | {"m": text}, {}, {}, f"{OP}.m") for text in (
        "__import__('os').getcwd()", "2 ** 99", "1if 2", "[1][0]", "w if w else 1", "w.real", "",
        "min()", "max(w, *w)", "f'{w}'", "lambda: 1", "9" * 299, "9*" * 400 + "9", "(" * 290, True,
        "w - w", "1 / (w - w)", "-w", "\0", "min", "1e400", "w := 3", float("nan"),
    )),
    (GEMM, {"dims": {"w": "v", "v": "u + 1", "u": "w"}}, {}, "model.dims."),
    (GEMM, {"dims": {"w": 2, "seq": 3}}, {}, "model.dims.seq"),
    (GEMM, {"dims": {"w": 2, "a-b": 3}}, {}, "model.dims.a-b"),
    (GEMM, {"n_heads": 4}, {}, "model.n_heads"),
    (GEMM, {"name": "llama3-8b"}, {}, "model.name"),
    (GEMM, {}, {"ep": 2, "dp": 2}, "parallelism.ep"),
    (GEMM | {"split": None}, {}, {"tp": 2}, f"{OP}.split"),
    (GEMM | {"n": 511}, {}, {"tp": 2}, f"{OP}.n"),
    (GEMM | {"m": 1023}, {}, {"cp": 2}, f"{OP}.m"),
    ({"op": "conv", "pixels": 8, "channels": 3, "filters": 8, "kernel": 9}, {}, {"cp": 2},
     f"{OP}.op"),
    ({"op": "attention", "heads": 8, "head_dim": 64, "keys": 77}, {}, {}, f"{OP}.mask"),
    ({"op": "attention", "heads": 3, "kv_heads": 1, "head_dim": 64}, {}, {"tp": 2}, f"{OP}.heads"),
    ({"op": "elementwise", "kind": "rop", "width": 4}, {}, {}, OP),
    ({"op": "elementwise", "passes": 3}, {}, {}, OP),
    ({"op": "loss", "width": 3}, {}, {}, "model.layers.0.at"),
    ({"op": "embedding_bag", "rows": 9, "dim": 8, "spread": "ep"}, {}, {"ep": 2, "dp": 4},
     f"{OP}.spread"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "model", "layout", "key"), WRONG, ids=lambda x: str(x)[:40])
def test_a_wrong_table_is_named_with_its_place(op, model, layout, key):
    with pytest.raises(prism.PrismError) as error:
        job({**MODEL, "layers": [{"repeat": 2, "ops": [op]}], **model}, layout)
    assert all(line.startswith(f"job: {key}") for line in error.value.args), error.value.args


@pytest.mark.parametrize("repeat", [10**6, 1e14, "batch", "2.5", 0])
def test_there_are_as_many_layers_as_can_be_estimated(repeat):
    with pytest.raises(prism.PrismError, match=r"^job: model\.layers"):
        job({**MODEL, "layers": [{"repeat": repeat, "ops": [GEMM]}]}, {"microbatch_size": 2})


def test_the_line_of_a_size_is_named(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "model:\n  layers:\n  - ops:\n    - op: gemm\n      m: batch\n      n: 4\n      k: wide\n"
        "cluster: {nodes: 1, gpus_per_node: 1}\n"
    )
    with pytest.raises(prism.PrismError, match=r"own\.yaml:7: model\.layers\.0\.ops\.0\.k"):
        prism.load_job(file)


@pytest.fixture
def file(tmp_path):
    """A table with experts in a file."""
    path = tmp_path / "own.yaml"
    blocks = {
        "model": written_out(DENSE | EXPERT_SIZES),
        "parallelism": {"dp": 8, "ep": 2, "pp": 2, "microbatches": 4}, "cluster": {"nodes": 2},
    }  # fmt: skip
    path.write_text(json.dumps(blocks))
    return path


FEW = ("--replicates", "64")


@pytest.mark.parametrize(
    "command",
    [("rank",), ("place", "--slow-nodes", "1", "--slowdown", "1.2"), ("timeline", *FEW),
     ("sweep", "--layouts", *FEW),
     ("sweep", "--vary", "model.dims.wide=704,max(704, 1408)", *FEW)],
    ids=" ".join,
)  # fmt: skip
def test_every_command_takes_a_table(run, file, command):
    name, *options = command
    status, out, err = run(name, file, *options, "--seed", 1, "--json")
    assert status == 0, err
    assert json.loads(out)


def test_a_table_is_shown_by_layer(run, file):
    status, out, _ = run("show", file, "--json")
    found = json.loads(out)
    first, body, last = found["layers"]
    assert status == 0 and (first["at"], body["repeat"], last["at"]) == ("first", 4, "last")
    of_all = first["parameters"] + 4 * body["parameters"] + last["parameters"]
    assert of_all == found["parameters"]["total"]
    assert last["flop"] == 6 * 2048 * 1024 * 8192 and body["bytes"] > 0
    assert len(body) and body["ops"] == len(MIXER + EXPERTS)


def test_a_written_table_is_the_table(run, file, tmp_path):
    again = tmp_path / "again.yaml"
    again.write_text(run("show", file, "--yaml")[1])
    assert prism.load_job(again).model == prism.load_job(file).model
