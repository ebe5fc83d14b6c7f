"""Other tools' configurations as jobs: values, lines, what is assumed, and what is refused."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from prism import PrismError, load_job
from prism.jobs.importing.imported import Imported, import_job
from prism.jobs.importing.layout import layers_of_layout
from prism.jobs.importing.model import layer_flags, preset_in
from prism.jobs.importing.settings import read_source, scalar
from prism.jobs.importing.shell import commands_of
from prism.present.imports import import_answer, imported_yaml

PUBLIC = Path(__file__).resolve().parents[1] / "experiments" / "public-configs"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
TP=2; KIND="fp8"; HERE=$1
if [[ "$KIND" == "fp8" ]]; then
  PRECISION=(
    "--fp8-format hybrid"   # a comment
    # --fp8-recipe mxfp8
  )
elif [ $TP -eq 3 ]; then
  PRECISION=(--never)
else
  PRECISION=(--neither)
fi
case $TP in
  1) PP=1 ;;
  2|3) PP=4 ;;
  *) PP=9 ;;
esac
SIZES=(--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu)
SIZES+=(--seq-length ${SEQ:-8192} --untie-embeddings-and-output-weights --vocab-size 128256)
REST=" \\
   --micro-batch-size 1 --global-batch-size $((TP * 64)) \\
   --save $HERE --save-interval 100 --lr 1e-4 --tp-comm-overlap --shiny-new-flag 3"
python preprocess.py --seq-length 10
srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 pretrain_gpt.py ${SIZES[*]} \\
   ${PRECISION[*]} $REST --tensor-model-parallel-size $TP --use-distributed-optimizer \\
   --pipeline-model-parallel-size $PP --sequence-parallel" 2>&1 | tee log
"""
DUMP = """\
using world size: 64, data-parallel size: 8
[default0]:------------------------ arguments ------------------------
[default0]:  add_bias_linear ................................. False
[default0]:  data_parallel_size .............................. 8
[default0]:  ffn_hidden_size ................................. 14336
[default0]:  global_batch_size ............................... 256
[default0]:  group_query_attention ........................... True
[default0]:  hidden_size ..................................... 4096
[default0]:  kv_lora_rank .................................... 32
[default0]:  micro_batch_size ................................ 1
[default0]:  multi_latent_attention .......................... False
[default0]:  num_attention_heads ............................. 32
[default0]:  num_experts ..................................... None
[default0]:  num_layers ...................................... 32
[default0]:  num_query_groups ................................ 8
[default0]:  overlap_grad_reduce ............................. True
[default0]:  padded_vocab_size ............................... 128512
[default0]:  pipeline_model_parallel_size .................... 4
[default0]:  rank ............................................ 0
[default0]:  seq_length ...................................... 8192
[default0]:  sequence_parallel ............................... True
[default0]:  swiglu .......................................... True
[default0]:  tensor_model_parallel_size ...................... 2
[default0]:  untie_embeddings_and_output_weights ............. True
[default0]:  use_distributed_optimizer ....................... True
[default0]:  virtual_pipeline_model_parallel_size ............ 2
[default0]:  world_size ...................................... 64
[default0]:-------------------- end of arguments ---------------------
"""
NEMO = """\
trainer: {num_nodes: 16, devices: 8, precision: bf16, max_steps: 100}
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 4
  context_parallel_size: 2
  encoder_seq_length: 8192
  num_layers: 30
  hidden_size: 4096
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 32
  activation: fast-swiglu
  share_embeddings_and_output_weights: false
  sequence_parallel: true
  fp8: true
  tokenizer: {type: GPT2BPETokenizer}
  optim: {name: distributed_fused_adam, overlap_grad_sync: true}
"""
TITAN = """\
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 10_000
[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["model", "loss"]
"""
DEEPSPEED = """\
{
\t"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2,
\t"gradient_accumulation_steps": 4,
\t"zero_optimization": {"stage": 2, "overlap_comm": true},
\t"bf16": {"enabled": true}
}
"""
CONFIG = """\
{
  "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
  "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": null,
  "tie_word_embeddings": false, "vocab_size": 32000
}
"""
BRIDGE = """\
model:
  hf_model_id: deepseek-ai/DeepSeek-V3
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 8
  pipeline_model_parallel_layout: Et|(tt|)*30mL
  expert_model_parallel_size: 64
  expert_tensor_parallel_size: 1
  sequence_parallel: true
  moe_token_dispatcher_type: flex
  moe_flex_dispatcher_backend: hybridep
  moe_router_force_load_balancing: true
  recompute_granularity: selective
  recompute_modules: [mla_up_proj, mlp]
  fp8: null
  fp8_recipe: delayed
  mtp_num_layers: 1
mixed_precision: {fp8: hybrid, fp8_recipe: blockwise, grad_reduce_in_fp32: false}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
train: {micro_batch_size: 1, global_batch_size: 8192, train_iters: 50}
dataset: {sequence_length: 4096}
"""
FILES = {
    "job.sh": (SCRIPT, None), "log.txt": (DUMP, None), "nemo.yaml": (NEMO, None),
    "titan.toml": (TITAN, 64), "ds.json": (DEEPSPEED, None), "config.json": (CONFIG, 8),
    "bridge.yaml": (BRIDGE, 1024),
}  # fmt: skip
FORMATS = {
    "job.sh": "megatron", "log.txt": "megatron", "nemo.yaml": "nemo", "titan.toml": "torchtitan",
    "ds.json": "deepspeed", "config.json": "huggingface", "bridge.yaml": "bridge",
}  # fmt: skip
MORE = {"ds.json": ["model.name=llama3-8b"]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FILES.items():
        Path(name).write_text(text)
    return tmp_path


def read(name: str, **more: object) -> Imported:
    options = {"gpus": FILES[name][1], "overrides": MORE.get(name, []), **more}
    return import_job(name, **options)


def refused(name: str, text: str, **more: object) -> str:
    Path(name).write_text(text)
    with pytest.raises(PrismError) as caught:
        import_job(name, **more)
    return str(caught.value)


# -------------------------------------------------------------------------------- what is there
def test_a_script_is_followed_and_its_arguments_know_their_lines() -> None:
    batch, *commands = commands_of(SCRIPT)
    assert batch == [("nodes", ["4"], 2), ("gres", ["gpu:8"], 3)]
    found = {name: (values, line) for name, values, line in max(commands, key=len)}
    assert found["fp8-format"] == (["hybrid"], 7)
    assert found["num-query-groups"] == (["8"], 21)
    assert found["seq-length"] == (["8192"], 22)
    assert found["global-batch-size"] == (["128"], 24)
    assert found["pipeline-model-parallel-size"] == (["4"], 29)
    assert found["save"] == (["$1"], 25) or found["save"][1] == 25
    assert not {"never", "neither", "fp8-recipe"} & set(found)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('A="x y"; run --a $A --b "$A"', [("a", ["x", "y"]), ("b", ["x y"])]),
        ("A=(--a 1 --b); A+=(2); run ${A[@]} --c=3", [("a", ["1"]), ("b", ["2"]), ("c", ["3"])]),
        ("run --a ${B:-4} --b ${B-5} --c $B", [("a", ["4"]), ("b", ["5"]), ("c", ["$B"])]),
        ("N=3\nrun --a $(($N*2+1)) --b $(nproc) --c -1 2>&1 | tee x --d", None),
        ("cat <<EOF > x\n--not 1\nEOF\nrun --a 1 # --b 2", [("a", ["1"])]),
        ("run --a 'it is' --b it\\'s", [("a", ["it is"]), ("b", ["it's"])]),
        ("if [ -z $1 ]; then A=1; else A=2; fi; run --a $A", [("a", ["2"])]),
        ("A=1; A=$A$A; run --a ${A}", [("a", ["11"])]),
    ],
)
def test_shell(script: str, words: list[tuple[str, list[str]]] | None) -> None:
    wanted = words or [("a", ["7"]), ("b", ["$()"]), ("c", ["-1"])]
    found = next(c for c in commands_of(script)[1:] if c)
    assert [(name, values) for name, values, _ in found] == wanted


def test_a_script_that_grows_without_end_is_cut() -> None:
    script = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "run --a $A"
    found = next(c for c in commands_of(script)[1:] if c)
    assert 100_000 < len(found[0][1][0]) <= 200_000


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("9_765", 9765), ("1e6", 1_000_000), ("True", True), ("None", None),
     ("[1, 2]", [1, 2]), ("gpu:8", "gpu:8"), ("1.5", 1.5), ("-1", -1), ("3.11.2", "3.11.2")],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    assert scalar(text) == value and type(scalar(text)) is type(value)


def test_formats_are_found_by_content(here: Path) -> None:
    for name, found in FORMATS.items():
        assert read_source(name).format == found
        assert read_source(name, found).format == found
    with pytest.raises(PrismError, match="NeMo"):
        read_source("titan.toml", "nemo")


# ------------------------------------------------------------------------------- what it becomes
def test_each_format_becomes_its_job(here: Path) -> None:
    jobs = {name: read(name).job for name in FILES}
    p = {name: job.parallelism for name, job in jobs.items()}
    assert {n: j.world_size for n, j in jobs.items()} == {
        "job.sh": 32, "log.txt": 64, "nemo.yaml": 128, "titan.toml": 64, "ds.json": 32,
        "config.json": 8, "bridge.yaml": 1024,
    }  # fmt: skip
    names = {n: j.model.name for n, j in jobs.items()}
    assert names == {
        "job.sh": "llama3-70b", "log.txt": "llama3-8b", "nemo.yaml": None,
        "titan.toml": "llama3-70b", "ds.json": "llama3-8b", "config.json": "mixtral-8x7b",
        "bridge.yaml": "deepseek-v3",
    }  # fmt: skip
    one = p["job.sh"]
    assert (one.tp, one.pp, one.dp, one.microbatches, one.data_parallel) == (2, 4, 4, 32, "zero1")
    assert (one.precision, one.overlap, one.p2p) == ("fp8", False, "blocking")
    assert jobs["job.sh"].run.checkpoint is not None
    one = p["log.txt"]
    assert (one.vpp, one.schedule, one.microbatches, one.overlap) == (2, "interleaved", 32, True)
    model = jobs["nemo.yaml"].model
    # 50,257 of GPT-2 in whole 128 * tp = 512
    assert (model.ffn_size, model.gated_mlp, model.vocab_size) == (16_384, True, 50_688)
    assert p["nemo.yaml"].precision == "fp8" and p["nemo.yaml"].cp == 2
    one = p["titan.toml"]
    assert (one.data_parallel, one.shard_size, one.dp, one.framework) == ("hsdp", 2, 8, "compiled")
    assert (one.recompute, one.microbatches, one.microbatch_size) == ("selective", 1, 2)
    one = p["ds.json"]  # 256 / (2 * 4) replicas
    assert (one.dp, one.microbatches, one.data_parallel, one.framework) == (32, 4, "zero1", "eager")
    one = p["bridge.yaml"]
    assert (one.precision, one.gradient_dtype, one.expert_dispatch) == (
        "fp8_block", "bf16", "hybridep",
    )  # fmt: skip
    assert (one.vpp, one.ep, one.expert_tp, one.expert_imbalance) == (4, 64, 1, 1)
    assert one.layer_split == (1, *[2] * 30, 0) and one.recompute == "none"


def test_what_is_left_has_its_line(here: Path) -> None:
    found = read("job.sh")
    assert [(s.path[0], s.line) for s, _ in found.unmodelled] == [("tp-comm-overlap", 25)]
    assert [(s.path[0], s.value, s.line) for s in found.unknown] == [("shiny-new-flag", 3, 25)]
    lines = {g.key: g.line for g in found.given}
    assert (lines["model.name"], lines["parallelism.tp"], lines["parallelism.pp"]) == (20, 28, 29)
    assert {a.key for a in found.assumed} == {
        "cluster.device", "model.rope", "parallelism.p2p", "parallelism.overlap",
    }  # fmt: skip
    left = read("bridge.yaml")
    assert {s.path[-1] for s, _ in left.unmodelled} == {"recompute_modules", "mtp_num_layers"}
    assert [s.shown for s in left.unknown] == []
    assert {a.key for a in read("ds.json").assumed} >= {"parallelism.data_parallel"}


@pytest.mark.parametrize(
    ("option", "rope", "said"),
    [
        ("--position-embedding-type rope", True, True),
        ("--position-embedding-type learned_absolute", False, True),
        ("--use-rotary-position-embeddings", True, True),
        ("", False, False),  # Megatron's default
    ],
)
def test_positions_of_megatron(here: Path, option: str, rope: bool, said: bool) -> None:
    """Whatever the feed-forward part is: Nemotron rotates without a gate."""
    for gated in (" --swiglu", ""):
        text = SCRIPT.replace(" --swiglu", gated).replace("80 --h", "76 --h")
        Path("a.sh").write_text(text.replace("--hidden-size", f"{option} --hidden-size"))
        found = import_job("a.sh", gpus=32)
        assert (found.job.model.rope, found.job.model.gated_mlp) == (rope, bool(gated))
        assert ("model.rope" in {g.key for g in found.given}) is said
        assert ("model.rope" in {a.key for a in found.assumed}) is not said


@pytest.mark.parametrize(
    ("kind", "more", "rope"),
    [
        ("nemotron", {"hidden_act": "relu2"}, True), ("llama", {}, True),
        ("gpt2", {"activation_function": "gelu_new"}, False), ("mpt", {}, False),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, False),
    ],
)  # fmt: skip
def test_positions_of_hugging_face(here: Path, kind: str, more: dict[str, str], rope: bool) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
             "intermediate_size": 2048, "vocab_size": 8000,
             "max_position_embeddings": 2048}  # fmt: skip
    Path("config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    assert read("config.json", gpus=8).job.model.rope is rope


@pytest.mark.parametrize("name", FILES)
def test_the_file_loads_to_the_same_job(here: Path, name: str) -> None:
    found = read(name)
    Path("out.yaml").write_text(imported_yaml(found))
    again = load_job("out.yaml")
    assert again.model_copy(update={"name": found.job.name}) == found.job
    text = imported_yaml(found)
    assert text.count(": ") > 10 and all(
        "#" in line for line in text.splitlines() if re.match("  [a-z]", line)
    )
    figures = import_answer(found).json()
    assert figures["world_size"] == found.job.world_size
    keys = {entry["key"] for entry in figures["understood"] + figures["assumed"]}
    assert keys <= set(figures["values"]) and len(keys) > 3


def test_options_are_put_over_the_file(here: Path) -> None:
    found = read("job.sh", gpus=64, device="b200", overrides=["parallelism.tp=4", "run.steps=5"])
    job = found.job
    assert (job.world_size, job.parallelism.dp, job.cluster.device) == (64, 4, "b200")
    assert (job.run.steps, job.run.tokens, job.parallelism.tp) == (5, None, 4)
    assert "parallelism.tp" not in {g.key for g in found.given}


def test_a_preset_is_named_where_its_sizes_agree_and_only_there(here: Path) -> None:
    Path("a.sh").write_text(SCRIPT.replace("--num-layers 80", "--num-layers 76"))
    job = import_job("a.sh").job
    assert (job.model.name, job.model.n_layers, job.model.n_kv_heads) == (None, 76, 8)
    Path("a.sh").write_text(SCRIPT.replace("--seq-length ${SEQ:-8192}", "--seq-length 4096"))
    job = import_job("a.sh").job
    assert (job.model.name, job.model.seq_len) == ("llama3-70b", 4096)
    assert preset_in("meta-llama/Meta-Llama-3.1-70B") == "llama3-70b"
    assert preset_in("mistralai/Mixtral-8x7B-v0.1") == "mixtral-8x7b"
    assert preset_in("deepseek-ai/DeepSeek-V2-Lite") is None
    assert preset_in("Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"


def test_patterns_of_layers() -> None:
    assert layer_flags("([0]*3+[1]*2)") == [0, 0, 0, 1, 1]
    assert layer_flags("[0, 1]*2") == [0, 1, 0, 1]
    assert layer_flags("import os") is None and layer_flags("[0]*10**9") is None
    assert layers_of_layout("Et*3|(tt|)*2t|L") == [3, 2, 2, 1, 0]


# ------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.toml", TITAN.replace("= 4", "= 1"), {}, ("--gpus N", "= 8")),
        ("a.sh", SCRIPT, {"gpus": 12}, ("12 GPUs", "multiple of")),
        ("a.sh", SCRIPT.replace("--nodes=4", "--nodes=3"), {"gpus": 20}, ("20 GPUs",)),
        ("a.sh", SCRIPT.replace("$((TP * 64))", "130"), {}, ("a.sh:24", "130", "128 or 132")),
        ("a.sh", SCRIPT.replace("size $TP", "size $T"), {}, ("a.sh:28", "--set parallelism.tp")),
        ("a.sh", SCRIPT.replace("--vocab-size 128256", "").replace("28672", "32768"), {},
         ("--set model.vocab_size",)),
        ("a.sh", SCRIPT.replace("--num-attention-heads 64", "--num-attention-heads 0"), {},
         ("a.sh:21", "n_heads")),
        ("a.sh", "echo hello\nls --all\n", {}, ("--num-layers",)),
        ("a.sh", "", {}, ("is empty",)),
        ("a.txt", "nothing at all", {}, ("--from megatron",)),
        ("a.json", DEEPSPEED, {}, ("--set model.name",)),
        ("a.json", DEEPSPEED[:-9], {}, ("not valid JSON",)),
        ("a.toml", TITAN + "x", {}, ("not valid TOML",)),
        ("a.yaml", "model: [", {}, ("a.yaml:",)),
        ("a.sh", SCRIPT, {"device": "h1000"}, ("h100",)),
        ("a.sh", SCRIPT, {"overrides": ["parallelism.tq=2"]}, ("expected one of tp, cp",)),
        ("a.sh", SCRIPT, {"format": "word"}, ("megatron, nemo",)),
    ],
)  # fmt: skip
def test_what_makes_no_job_says_why(
    here: Path, name: str, text: str, options: dict[str, object], words: tuple[str, ...]
) -> None:
    said = refused(name, text, **options)
    assert all(word in said for word in words), said
    with pytest.raises(PrismError, match="no such file"):
        import_job("nowhere.sh")


spec = importlib.util.spec_from_file_location("public_configs", PUBLIC / "run.py")
public = importlib.util.module_from_spec(spec)
spec.loader.exec_module(public)


@pytest.mark.parametrize("name", public.SOURCES)
def test_public_configurations(name: str) -> None:
    gpus, device, overrides = public.SOURCES[name]
    found = import_job(PUBLIC / "configs" / name, None, gpus, device, overrides)
    assert gpus in (None, found.job.world_size)
    assert len(found.given) >= 1 and len(found.unknown) <= 1
    assert {path.name for path in (PUBLIC / "configs").iterdir()} == set(public.SOURCES)


JUNK = ("-1", "0", "x", "[1, x]", "1.5", "999999999999", "null", "true", "$NOT_SET", "1e9")


@pytest.mark.parametrize("name", FILES)
def test_junk_is_refused_or_read_but_never_a_crash(here: Path, name: str) -> None:
    text, gpus = FILES[name]
    numbers = [found.span() for found in re.finditer(r"(?<=[ =])\d+\b", text)]
    tried = 0
    for start, end in numbers:
        for junk in JUNK[tried % 3 :: 3]:
            Path(f"junk-{name}").write_text(text[:start] + junk + text[end:])
            tried += 1
            try:
                import_job(f"junk-{name}", gpus=gpus, overrides=MORE.get(name, []))
            except PrismError as error:
                assert str(error)
    assert tried > 10
