"""Other tools' configurations as jobs: values, lines, what is assumed, and what is refused."""

import importlib.util
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import prism

PUBLIC = Path(__file__).resolve().parents[1] / "experiments" / "validation" / "public-configs"
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
    "job.sh": (SCRIPT, ()), "log.txt": (DUMP, ()), "nemo.yaml": (NEMO, ()),
    "titan.toml": (TITAN, ("--gpus", 64)),
    "ds.json": (DEEPSPEED, ("--set", "model.name=llama3-8b")),
    "config.json": (CONFIG, ("--gpus", 8)), "bridge.yaml": (BRIDGE, ("--gpus", 1024)),
}  # fmt: skip
MEGATRON = (
    "torchrun pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 21504 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --swiglu "
    "--seq-length 8192 --vocab-size 128000 --untie-embeddings-and-output-weights "
    "--micro-batch-size 1 --global-batch-size 128 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer"
)


@pytest.fixture
def read(tmp_path, monkeypatch, run):
    """Import a text: the job that its file loads to, and what the command says of it."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, text: str, *options: Any) -> tuple[prism.Job, dict[str, Any]]:
        Path(name).write_text(text)
        status, out, err = run("import", name, *options, "-o", "out.yaml", "--json", "-q")
        assert status == 0, err
        return prism.load_job("out.yaml"), json.loads(out)

    return call


@pytest.fixture
def refused(tmp_path, monkeypatch, run):
    """Import a text that makes no job: the message."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, text: str, *options: Any) -> str:
        Path(name).write_text(text)
        status, out, err = run("import", name, *options)
        assert (status, out) == (2, "") and "Traceback" not in err
        return err

    return call


def value(job: prism.Job, key: str) -> Any:
    """A value of a job by its dotted key."""
    return reduce(getattr, key.split("."), job)


def check(job: prism.Job, wanted: dict[str, Any]) -> None:
    """Compare values by dotted key; without a block, of the parallelism."""
    found = {key: value(job, key if "." in key else f"parallelism.{key}") for key in wanted}
    assert found == wanted


# -------------------------------------------------------------------------------- what is there
def test_a_script_is_followed_and_its_arguments_know_their_lines(read) -> None:
    job, found = read("job.sh", SCRIPT)
    check(job, {"tp": 2, "pp": 4, "dp": 4, "precision": "fp8", "global_batch": 128,
                "model.seq_len": 8192, "model.n_kv_heads": 8})  # fmt: skip
    lines = {row["key"]: row["line"] for row in found["understood"]}
    assert (lines["model.name"], lines["parallelism.tp"], lines["parallelism.pp"]) == (20, 28, 29)
    assert [(s["setting"], s["line"]) for s in found["not_modelled"]] == [("--tp-comm-overlap", 25)]
    assert [(s["setting"], s["line"]) for s in found["not_understood"]] == [
        ("--shiny-new-flag 3", 25)
    ]
    assert {row["key"] for row in found["assumed"]} == {
        "cluster.device", "model.rope", "parallelism.p2p", "parallelism.overlap",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "argument"),
    [
        ('A="--seq-length 4096"', "$A"), ('A=4096', '--seq-length "$A"'),
        ("B=(--seq-length 9); B+=(--seq-length 4096)", "${B[@]}"),
        ("", "${B:---seq-length 4096}"),
        ("N=2048", "--seq-length $((N*2))"),
        ("N=1000", "--seq-length=$(( $N * 4 + 96 ))"),
        ("cat <<EOF > x\n--seq-length 1\nEOF", "--seq-length 4096  # --seq-length 2"),
        ("", "--seq-length '4096'"),
        ("if [ -z $1 ]; then S=1; else S=4096; fi", "--seq-length $S"),
        ("K=a\ncase $K in\n  b) S=1 ;;\n  a|c) S=4096 ;;\nesac", "--seq-length $S"),
        ("S=40; S=${S}96", "--seq-length $S"),
        ("", "--seq-length 4096 2>&1 | tee --seq-length 3"),
        ("if [ -z ${S} ]; then S=4096; fi", "--seq-length $S ${NOTHING_SETS_IT}"),
        ("for s in 1 2 4096; do S=$s; done", "--seq-length $S"),
    ],
)  # fmt: skip
def test_shell(read, before: str, argument: str) -> None:
    rest = MEGATRON.replace("--seq-length 8192 ", "")
    job, _ = read("a.sh", f"{before}\n{rest} {argument}\n", "--gpus", 64)
    assert job.model.seq_len == 4096


def test_the_device_may_be_set(read, refused) -> None:
    job, found = read("a.sh", MEGATRON, "--gpus", 64, "--set", "cluster.device=h200")
    assert job.cluster.device == "h200"
    assert job == read("a.sh", MEGATRON, "--gpus", 64, "--device", "h200")[0]
    for wrong in ("", "null", "3", "x100"):
        assert refused("a.sh", MEGATRON, "--gpus", 64, "--set", f"cluster.device={wrong}")


def test_a_script_that_grows_without_end_is_cut(refused) -> None:
    assert refused("a.sh", "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "run --num-layers $A")


@pytest.mark.parametrize("name", FILES)
def test_the_file_loads_to_what_was_found(read, run, name: str) -> None:
    text, options = FILES[name]
    job, found = read(name, text, *options)
    assert found["world_size"] == job.world_size
    keys = {row["key"] for row in found["understood"] + found["assumed"]}
    assert keys <= set(found["values"]) and len(keys) > 3
    written = [x for x in Path("out.yaml").read_text().splitlines() if re.match("  [a-z]", x)]
    assert written and all("#" in line for line in written)  # where each comes from
    kinds = {"job.sh": "megatron", "log.txt": "megatron", "titan.toml": "torchtitan",
             "ds.json": "deepspeed", "config.json": "huggingface"}  # fmt: skip
    assert found["format"] == kinds.get(name, name.partition(".")[0])
    status, again, _ = run("import", name, "--from", found["format"], *options, "--json", "-q")
    assert status == 0 and json.loads(again)["values"] == found["values"]


# ------------------------------------------------------------------------------- what it becomes
@pytest.mark.parametrize(
    ("drop", "add", "wanted"),
    [
        ("", "", {"tp": 2, "pp": 4, "dp": 8, "microbatches": 16, "data_parallel": "zero1",
                  "p2p": "blocking", "overlap": False, "model.n_kv_heads": 8, "precision": "bf16",
                  "model.gated_mlp": True, "model.tied_embeddings": False, "model.rope": False,
                  "model.vocab_size": 128000, "sequence_parallel": True, "recompute": "none",
                  "framework": "megatron", "cluster.nodes": 8, "model.ffn_size": 21504}),
        ("--group-query-attention --num-query-groups 8", "", {"model.n_kv_heads": 64}),
        ("--num-query-groups 8", "--num-query-groups 16", {"model.n_kv_heads": 16}),
        # two thirds of 4 h, in multiples of 64
        ("--ffn-hidden-size 21504", "", {"model.ffn_size": 21824}),
        ("--ffn-hidden-size 21504|--swiglu", "", {"model.ffn_size": 32768,
                                                  "model.gated_mlp": False}),
        ("--untie-embeddings-and-output-weights", "", {"model.tied_embeddings": True}),
        ("--micro-batch-size 1", "--micro-batch-size 2", {"microbatches": 8, "microbatch_size": 2}),
        ("", "--context-parallel-size 2", {"cp": 2, "dp": 4, "microbatches": 32}),
        ("--vocab-size 128000", "--vocab-size 50257", {"model.vocab_size": 50432}),
        ("--vocab-size 128000", "--vocab-size 50257 --make-vocab-size-divisible-by 1",
         {"model.vocab_size": 50258}),
        ("--sequence-parallel", "", {"sequence_parallel": False}),
        ("--use-distributed-optimizer", "", {"data_parallel": "ddp"}),
        ("", "--use-torch-fsdp2", {"data_parallel": "fsdp", "framework": "megatron"}),
        ("", "--overlap-grad-reduce", {"overlap": True}),
        ("", "--num-layers-per-virtual-pipeline-stage 5", {"vpp": 4, "schedule": "interleaved"}),
        ("", "--num-virtual-stages-per-pipeline-rank 2", {"vpp": 2, "p2p": "async"}),
        ("", "--decoder-first-pipeline-num-layers 14", {"layer_split": (14, 22, 22, 22)}),
        ("", "--decoder-last-pipeline-num-layers 17", {"layer_split": (21, 21, 21, 17)}),
        ("", "--pipeline-model-parallel-layout 'Et*18|(t*21|)*2t*20L'",
         {"layer_split": (18, 21, 21, 20)}),
        ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         {"recompute": "full"}),
        ("", "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         {"recompute": "none"}),
        ("", "--recompute-granularity selective", {"recompute": "none"}),
        ("", "--fp8-format hybrid", {"precision": "fp8"}),
        ("", "--fp8-format e4m3 --fp8-recipe blockwise", {"precision": "fp8_block"}),
        ("", "--fp8-format e4m3 --fp8-recipe mxfp8 --device b200", {"precision": "mxfp8"}),
        ("", "--fp4-format e2m1", {"precision": "nvfp4"}),
        ("", "--accumulate-allreduce-grads-in-fp32", {"gradient_dtype": "fp32"}),
        ("", "--grad-reduce-in-bf16", {"gradient_dtype": "bf16"}),
        ("", "--main-grads-dtype bf16", {"gradient_dtype": "bf16"}),
        ("", "--attention-backend fused", {"attention": "cudnn"}),
        ("", "--attention-backend flash", {"attention": "fa2"}),
        ("", "--attention-backend unfused", {"attention": "math"}),
        ("", "--attention-backend auto", {"attention": None}),
        ("", "--optimizer adam", {"optimizer": "adamw", "optimizer_dtype": "fp32"}),
        ("", "--optimizer muon", {"optimizer": "muon"}),
        ("", "--optimizer sgd --exp-avg-dtype bf16", {"optimizer": "sgd",
                                                      "optimizer_dtype": "bf16"}),
        ("", "--per-device-train-batch-size 1", {"framework": "transformers"}),
        ("", "--per-device-train-batch-size 1 --torch-compile", {"framework": "compiled"}),
        ("", "--kv-channels 256", {"model.head_size": 256}),
        ("", "--position-embedding-type rope", {"model.rope": True}),
        ("--swiglu", "--use-rotary-position-embeddings", {"model.rope": True,
                                                          "model.gated_mlp": False}),
        ("", "--position-embedding-type learned_absolute", {"model.rope": False}),
        ("", "--train-iters 50", {"run.steps": 50, "run.tokens": None}),
        ("", "--train-samples 1000", {"run.tokens": 8_192_000, "run.steps": None}),
        ("", "--save x --save-interval 100", {"run.checkpoint.interval_steps": 100,
                                              "run.checkpoint.mode": "blocking"}),
        ("", "--save x --save-interval 100 --async-save", {"run.checkpoint.mode": "async"}),
        ("", "--num-experts 8 --expert-model-parallel-size 4",
         {"model.n_experts": 8, "ep": 4, "model.experts_per_token": 2, "expert_tp": None}),
        ("", "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 3 "
         "--moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048 "
         "--moe-layer-freq '([0]*3+[1]*77)' --expert-tensor-parallel-size 1 "
         "--moe-expert-capacity-factor 1.5 --overlap-moe-expert-parallel-comm "
         "--moe-router-force-load-balancing --moe-token-dispatcher-type alltoall",
         {"model.experts_per_token": 3, "model.expert_ffn_size": 1024, "model.n_shared_experts": 2,
          "model.n_dense_layers": 3, "expert_tp": 1, "expert_capacity": 1.5,
          "expert_overlap": True, "expert_imbalance": 1.0, "expert_dispatch": "alltoall"}),
        ("", "--num-experts 8 --expert-model-parallel-size 4 --moe-layer-freq 2 "
         "--moe-token-dispatcher-type flex --moe-enable-deepep",
         {"model.moe_layer_interval": 2, "expert_dispatch": "deepep"}),
    ],
)  # fmt: skip
def test_arguments_of_megatron(read, drop: str, add: str, wanted: dict[str, Any]) -> None:
    add, _, device = add.partition(" --device ")
    device = device or ("b200" if "fp4" in add else "h100")
    text = f"{MEGATRON} "
    for word in drop.split("|"):
        text = text.replace(f"{word} ", "") if word else text
    text += add
    job, _ = read("a.sh", text, "--gpus", 64, "--device", device)
    check(job, wanted)


@pytest.mark.parametrize(
    ("name", "old", "new", "wanted"),
    [
        ("log.txt", "", "", {"model.name": "llama3-8b", "vpp": 2, "schedule": "interleaved",
                             "microbatches": 32, "overlap": True, "dp": 8, "tp": 2, "pp": 4,
                             "model.kv_lora_rank": 0}),
        ("log.txt", "query_groups ................................ 8",
         "query_groups ................................ 4", {"model.n_kv_heads": 4}),
        ("log.txt", "attention ........................... True",
         "attention ........................... False", {"model.n_kv_heads": 32}),
        # 50,257 of GPT-2 in whole 128 * tp = 512; 128 of two cp ranks
        ("nemo.yaml", "", "", {"model.ffn_size": 16_384, "model.gated_mlp": True, "cp": 2, "tp": 4,
                               "dp": 16, "microbatches": 8, "model.vocab_size": 50_688,
                               "precision": "fp8", "run.steps": 100, "cluster.nodes": 16}),
        ("nemo.yaml", "fp8: true", "fp8: false", {"precision": "bf16"}),
        ("nemo.yaml", "overlap_grad_sync: true", "overlap_grad_sync: false", {"overlap": False}),
        ("nemo.yaml", "fast-swiglu", "gelu", {"model.gated_mlp": False}),
        ("nemo.yaml", "weights: false", "weights: true", {"model.tied_embeddings": True}),
        # a rank has one batch of 2 of each step; 4 copies of 2 shards
        ("titan.toml", "", "", {"data_parallel": "hsdp", "shard_size": 2, "dp": 8, "tp": 8,
                                "framework": "compiled", "recompute": "selective",
                                "microbatches": 1, "microbatch_size": 2, "global_batch": 16,
                                "run.steps": 10_000, "model.name": "llama3-70b"}),
        ("titan.toml", "replicate_degree = 4", "replicate_degree = 1",
         {"data_parallel": "fsdp", "dp": 8}),
        ("titan.toml", "local_batch_size = 2", "local_batch_size = 6\nglobal_batch_size = 96",
         {"microbatches": 2, "microbatch_size": 6, "global_batch": 96}),
        # two stages, microbatches of one of the two sequences of a rank
        ("titan.toml", "data_parallel_replicate_degree = 4",
         "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 1\n"
         "context_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'",
         {"pp": 2, "cp": 2, "dp": 2, "vpp": 2, "microbatch_size": 1, "microbatches": 2,
          "schedule": "interleaved", "global_batch": 4, "data_parallel": "fsdp"}),
        ("titan.toml", "enable = true", "enable = false", {"framework": "eager"}),
        ("titan.toml", '"model", "loss"', '"loss"', {"framework": "eager"}),
        ("titan.toml", 'mode = "selective"', 'mode = "full"', {"recompute": "full"}),
        ("titan.toml", 'mode = "selective"', 'mode = "none"', {"recompute": "none"}),
        # 256 / (2 * 4) replicas
        ("ds.json", "", "", {"dp": 32, "microbatches": 4, "microbatch_size": 2,
                             "data_parallel": "zero1", "framework": "eager",
                             "gradient_dtype": "bf16", "overlap": True}),
        ("ds.json", '"stage": 2', '"stage": 3', {"data_parallel": "fsdp"}),
        ("ds.json", '"stage": 2', '"stage": 0', {"data_parallel": "ddp"}),
        ("ds.json", '_steps": 4', '_steps": 8', {"dp": 16, "microbatches": 8}),
        ("config.json", "", "", {"model.name": "mixtral-8x7b", "data_parallel": "fsdp",
                                 "model.experts_per_token": 2, "model.n_kv_heads": 8}),
        ("config.json", "", "", {"framework": "transformers"}),
        ("ds.json", '_steps": 4', '_steps": 4, "fp16": {"loss_scale": "auto"}',
         {"framework": "transformers"}),
        ("ds.json", '_steps": 4', '_steps": 4, "optimizer": {"type": "Muon"}',
         {"optimizer": "muon"}),
        ("config.json", "14336", "7168", {"model.name": None, "model.ffn_size": 7168,
                                          "model.n_experts": 8, "model.vocab_size": 32_000}),
        ("bridge.yaml", "", "", {"model.name": "deepseek-v3", "precision": "fp8_block",
                                 "gradient_dtype": "bf16", "expert_dispatch": "hybridep",
                                 "vpp": 4, "ep": 64, "expert_tp": 1, "expert_imbalance": 1.0,
                                 "layer_split": (1, *[2] * 30, 0), "recompute": "none",
                                 "dp": 64, "global_batch": 8192, "data_parallel": "zero1"}),
        ("bridge.yaml", "hybridep", "deepep", {"expert_dispatch": "deepep"}),
        ("bridge.yaml", "in_fp32: false", "in_fp32: true", {"gradient_dtype": "fp32"}),
        ("bridge.yaml", "recipe: blockwise", "recipe: tensorwise", {"precision": "fp8"}),
    ],
)  # fmt: skip
def test_settings_of_the_others(read, name: str, old: str, new: str, wanted: dict) -> None:
    text, options = FILES[name]
    assert old in text
    job, _ = read(name, text.replace(old, new, 1) if old else text, *options)
    check(job, wanted)


NANOTRON = """
general: {project: x, seed: 42}
model:
  model_config: {hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32,
    num_hidden_layers: 32, num_key_value_heads: 8, tie_word_embeddings: false, vocab_size: 128256}
optimizer: {accumulate_grad_in_fp32: false, zero_stage: 1, optimizer_factory: {name: adamW}}
parallelism: {dp: 8, pp: 2, pp_engine: 1f1b, tp: 4, tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 16, micro_batch_size: 2, sequence_length: 4096,
  train_steps: 50}
"""


def test_a_configuration_of_nanotron(read) -> None:
    job, found = read("n.yaml", NANOTRON, "--device", "h100")
    assert found["format"] == "nanotron" and found["not_understood"] == []
    check(job, {"framework": "nanotron", "model.name": "llama3-8b", "dp": 8, "tp": 4, "pp": 2,
                "microbatches": 16, "microbatch_size": 2, "data_parallel": "zero1",
                "sequence_parallel": True, "gradient_dtype": "bf16", "run.steps": 50,
                "cluster.nodes": 8})  # fmt: skip
    sizes = found["parameters"]
    assert sizes["total"] == sizes["active"] == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize(
    ("variables", "attention"),
    [
        ("NVTE_FLASH_ATTN=0", "cudnn"), ("NVTE_FUSED_ATTN=0", "fa2"), ("NVTE_FUSED_ATTN=1", None),
        ("NVTE_FLASH_ATTN=0\nexport NVTE_FUSED_ATTN=0", "math"),
    ],
)  # fmt: skip
def test_what_transformer_engine_is_given(read, variables: str, attention: str | None) -> None:
    job, _ = read("a.sh", f"export {variables}\n{MEGATRON}", "--gpus", 64)
    check(job, {"attention": attention})


def test_settings_that_are_not_modelled_are_listed(read) -> None:
    text, options = FILES["bridge.yaml"]
    found = read("bridge.yaml", text, *options)[1]
    names = {s["setting"].partition(":")[0].rpartition(".")[2] for s in found["not_modelled"]}
    assert names == {"recompute_modules", "mtp_num_layers"} and found["not_understood"] == []
    text, options = FILES["ds.json"]
    assumed = {row["key"] for row in read("ds.json", text, *options)[1]["assumed"]}
    assert "parallelism.data_parallel" in assumed  # stage 2, as the nearest


def test_latents_and_experts_of_hugging_face(read) -> None:
    config = {
        "model_type": "deepseek_v2", "num_hidden_layers": 28, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 112,
        "vocab_size": 102400, "max_position_embeddings": 4096, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    job, _ = read("config.json", json.dumps(config), "--gpus", 8)
    sizes = {
        "n_layers": 28, "hidden_size": 2048, "n_heads": 16, "ffn_size": 10944, "n_experts": 64,
        "expert_ffn_size": 1408, "experts_per_token": 6, "n_shared_experts": 2,
        "n_dense_layers": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "rope_head_size": 64,
        "head_size": 192, "v_head_size": 112, "vocab_size": 102400, "seq_len": 4096,
        "gated_mlp": True, "tied_embeddings": True,
    }  # fmt: skip
    check(job, {f"model.{key}": n for key, n in sizes.items()})


def test_windows_of_hugging_face(read) -> None:
    config = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 1024,
              "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
              "intermediate_size": 4096, "sliding_window": 512, "sliding_window_pattern": 6,
              "vocab_size": 8000, "max_position_embeddings": 8192,
              "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
    job, _ = read("config.json", json.dumps(config), "--gpus", 8)
    check(job, {"model.window": 512, "model.full_attention_interval": 6, "model.head_size": 256,
                "model.n_kv_heads": 2, "model.gated_mlp": True})  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "rope"),
    [
        ("nemotron", {"hidden_act": "relu2"}, True), ("llama", {}, True),
        ("gpt2", {"activation_function": "gelu_new"}, False), ("mpt", {}, False),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, False),
    ],
)  # fmt: skip
def test_positions_of_hugging_face(read, kind: str, more: dict[str, str], rope: bool) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
             "intermediate_size": 2048, "vocab_size": 8000,
             "max_position_embeddings": 2048}  # fmt: skip
    text = json.dumps({"model_type": kind, **sizes, **more})
    assert read("config.json", text, "--gpus", 8)[0].model.rope is rope


def test_options_are_put_over_the_file(read) -> None:
    job, found = read("job.sh", SCRIPT, "--gpus", 64, "--device", "b200", "--set",
                      "parallelism.tp=4", "--set", "run.steps=5")  # fmt: skip
    check(job, {"dp": 4, "tp": 4, "cluster.device": "b200", "run.steps": 5, "run.tokens": None})
    assert job.world_size == 64
    assert "parallelism.tp" not in {row["key"] for row in found["understood"]}


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("", "", "llama3-70b"), ("--num-layers 80", "--num-layers 76", None),
        ("--seq-length ${SEQ:-8192}", "--seq-length 4096", "llama3-70b"),
        ("--num-query-groups 8", "--num-query-groups 16", None),
    ],
)  # fmt: skip
def test_a_preset_is_named_where_its_sizes_agree_and_only_there(read, old, new, name) -> None:
    assert read("a.sh", SCRIPT.replace(old, new, 1) if old else SCRIPT)[0].model.name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-70B", "llama3-70b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"), ("deepseek-ai/DeepSeek-V2-Lite", None),
    ],
)  # fmt: skip
def test_a_model_is_known_by_its_name(read, refused, text: str, name: str | None) -> None:
    config = f"model:\n  hf_model_id: {text}\ntrain: {{global_batch_size: 64}}\n"
    config += "ddp: {use_distributed_optimizer: true}\nmixed_precision: bf16_mixed\n"
    if name is None:
        assert "model.name" in refused("a.yaml", config, "--gpus", 64, "--from", "bridge")
    else:
        assert read("a.yaml", config, "--gpus", 64, "--from", "bridge")[0].model.name == name


TITAN_LINE = (
    "torchrun --nnodes=4 --nproc_per_node=8 -m torchtitan.train --module llama3 "
    "--config llama3_70b --parallelism.tensor_parallel_degree 8 --training.local_batch_size=4 "
    "--training.seq_len 8192 --training.steps 1000 --compile.enable "
    '--activation_checkpoint.mode full "$@"'
)
HYBRID = {
    "model_type": "granitemoehybrid", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 512, "shared_intermediate_size": 700,
    "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64,
    "vocab_size": 1000, "hidden_act": "silu", "tie_word_embeddings": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "options", "wanted"),
    [
        ("a.sh", TITAN_LINE, (),
         {"tp": 8, "dp": 4, "framework": "compiled", "recompute": "full", "data_parallel": "fsdp",
          "microbatch_size": 4, "global_batch": 16, "run.steps": 1000}),
        # a program's inference is not its training
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=64 trainer.nnodes=2 "
         "actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=8 "
         "actor_rollout_ref.rollout.tensor_model_parallel_size=4 "
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", (),
         {"tp": 1, "dp": 16, "microbatch_size": 2, "global_batch": 64, "model.name": "qwen3-8b"}),
        ("a.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\n"
         "num_machines: 2\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n",
         ("--set", "model.name=llama3-8b"),
         {"data_parallel": "fsdp", "framework": "transformers", "dp": 16}),
        ("a.yaml", "base_model: NousResearch/Meta-Llama-3-8B\nsequence_len: 2048\n"
         "micro_batch_size: 2\ngradient_accumulation_steps: 8\ngradient_checkpointing: true\n"
         "fsdp_version: 2\nlearning_rate: 2e-5\n", ("--gpus", 8),
         {"data_parallel": "fsdp", "recompute": "full", "model.seq_len": 2048, "microbatch_size": 2,
          "microbatches": 8, "framework": "transformers"}),
        ("a.yaml", "model_name_or_path: meta-llama/Meta-Llama-3-8B\ndeepspeed: ds_z3_config.json\n"
         "per_device_train_batch_size: 1\nfinetuning_type: full\n", ("--gpus", 8),
         {"data_parallel": "fsdp"}),
        ("a.yml", "num-layers: 32\nhidden-size: 4096\nnum-attention-heads: 32\npos_emb: rotary\n"
         "seq-length: 2048\nmax-position-embeddings: 2048\npipe-parallel-size: 0\n"
         "train_micro_batch_size_per_gpu: 4\nmake_vocab_size_divisible_by: 128\n"
         "vocab_size: 50304\n", ("--gpus", 8),
         {"model.rope": True, "pp": 1, "model.seq_len": 2048, "microbatch_size": 4}),
        ("config.json", json.dumps(HYBRID), ("--gpus", 8),
         {"model.layer_pattern": "ME ME ME *E", "model.n_layers": 8, "model.shared_ffn_size": 700,
          "model.mamba_heads": 32, "model.n_experts": 8}),
        ("config.json", json.dumps(HYBRID | {"layer_types": None, "model_type": "falcon_h1"}),
         ("--gpus", 8), {"model.layer_pattern": "HE HE"}),
        # a wrapper whose script is not there: what it is given is read by its names
        ("a.sh", "export MBS=2\nTP=2 PP=4 VPP=2 NNODES=4 GBS=64 bash ./train.sh --swiglu",
         ("--set", "model.name=llama3-8b"),
         {"tp": 2, "pp": 4, "vpp": 2, "dp": 4, "global_batch": 64, "microbatch_size": 2}),
        ("v100.sh", MEGATRON, ("--gpus", 64), {"cluster.device": "v100"}),
    ],
)  # fmt: skip
def test_what_people_bring(read, name: str, text: str, options: tuple, wanted: dict) -> None:
    device = () if "v100" in name else ("--device", "h100")
    job, _ = read(name, text, *options, *device)
    check(job, wanted)


def test_scripts_that_a_script_reads_and_runs(read, refused, tmp_path) -> None:
    sizes = """L=6
kinds=()
for ((i=0; i<L; i++)); do
  if (( i < 2 )); then
    kinds+=(0)
  else
    kinds+=(1)
  fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${kinds[*]}")"
MODEL=(--num-layers $L --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8
  --vocab-size 32000 --seq-length 2048 --num-experts 8 --moe-layer-freq $FREQ --swiglu)
"""
    main = 'source "$(dirname "$0")/models/sizes.sh"\nDIM=2 bash run.sh --micro-batch-size 2\n'
    inner = (
        "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py ${MODEL[@]} --global-batch-size 32 "
        '--tensor-model-parallel-size $DIM --sequence-parallel "$@"\n'
    )
    (tmp_path / "run.sh").write_text(inner)
    assert "sizes.sh" in refused("main.sh", main)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sizes.sh").write_text(sizes)
    job, found = read("main.sh", main, "--device", "h100")
    check(job, {"model.n_dense_layers": 2, "tp": 2, "dp": 4, "microbatch_size": 2})
    places = {row["key"]: (row.get("file", ""), row["line"]) for row in found["understood"]}
    assert places["model.n_layers"][0].endswith("sizes.sh") and places["model.n_layers"][1] == 11
    assert places["parallelism.tp"][0].endswith("run.sh")
    assert places["parallelism.microbatch_size"] == ("", 2) and found["lacking"] == []


def test_two_files_of_one_job(read, run, tmp_path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    job, found = read("ds.json", DEEPSPEED, "config.json")
    check(job, {"model.name": "mixtral-8x7b", "dp": 32, "microbatch_size": 2, "framework": "eager"})
    files = {row["key"]: row.get("file") for row in found["understood"]}
    assert files["model.name"] == "config.json" and files["parallelism.dp"] is None
    status, _, err = run("import", "ds.json", "ds.json")
    assert status == 2 and "config.json" in err
    script = "deepspeed --num_gpus 8 --num_nodes 4 train.py --deepspeed ds.json " + MEGATRON
    script = re.sub("--[a-z-]*(batch-size|parallel-size|optimizer)( [0-9]+)?", "", script)
    job, found = read("a.sh", script, "--device", "h100")
    check(job, {"data_parallel": "zero1", "microbatch_size": 2, "dp": 32})


@pytest.mark.parametrize("before", ["", "[default3]:", "0: "])
def test_configurations_inside_logs(read, before: str) -> None:
    lines = ["> setup done", "------- Task Configuration -------", *BRIDGE.splitlines(),
             "----------------------------------", "iteration 1/50 | time 3.1"]  # fmt: skip
    log = "".join(f"{before}{line}\n" for line in lines)
    job, found = read("run.log", log, "--gpus", 1024)
    check(job, {"model.name": "deepseek-v3", "global_batch": 8192, "ep": 64})
    lines = {row["key"]: row["line"] for row in found["understood"]}
    assert found["format"] == "bridge" and lines["model.name"] == 4
    config = {"training": {"local_batch_size": 2, "seq_len": 4096, "steps": 10},
              "model": {"name": "llama3", "flavor": "8B"},
              "parallelism": {"data_parallel_shard_degree": 16}}  # fmt: skip
    for text in (json.dumps(config, indent=2), repr(config)):
        log = f"{before}[titan] INFO - Running with configs: {text}\nstep: 1 loss: 2\n"
        job, found = read("titan.log", log, "--device", "h100")
        check(job, {"model.name": "llama3-8b", "dp": 16, "microbatch_size": 2, "run.steps": 10})
    neox = DUMP.replace("32\n", "32....updated\n").replace("4096\n", "4096....default\n")
    check(read("neox.log", neox)[0], {"model.n_layers": 32, "model.hidden_size": 4096})


def test_two_names_that_disagree_are_refused(read, refused) -> None:
    text, options = FILES["bridge.yaml"]
    wrong = text.replace("  tensor_model", "  seq_length: 131072\n  tensor_model")
    said = refused("bridge.yaml", wrong, *options)
    assert "bridge.yaml:3" in said and "bridge.yaml:21" in said and "--set model.seq_len=" in said
    job, _ = read("bridge.yaml", wrong, *options, "--set", "model.seq_len=4096")
    check(job, {"model.seq_len": 4096})


# ------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.toml", TITAN.replace("= 4", "= 1"), (), ("--gpus", "= 8")),
        ("a.sh", SCRIPT, ("--gpus", 12), ("12 GPUs",)),
        ("a.sh", SCRIPT.replace("$((TP * 64))", "130"), (), ("a.sh:24", "130", "128 or 132")),
        ("a.sh", SCRIPT.replace("size $TP", "size $T"), (), ("a.sh:28", "parallelism.tp")),
        ("a.sh", SCRIPT.replace("--vocab-size 128256", "").replace("28672", "32768"), (),
         ("model.vocab_size",)),
        ("a.sh", SCRIPT.replace("--num-attention-heads 64", "--num-attention-heads 0"), (),
         ("a.sh:21", "n_heads")),
        ("a.sh", "echo hello\nls --all\n", (), ("--num-layers",)),
        ("a.sh", "", (), ("a.sh",)),
        ("a.txt", "nothing at all", (), ("--from",)),
        ("a.json", DEEPSPEED, (), ("model.name",)),
        ("a.json", DEEPSPEED[:-9], (), ("JSON",)),
        ("a.toml", TITAN + "x", (), ("TOML",)),
        ("a.yaml", "model: [", (), ("a.yaml:",)),
        ("a.sh", SCRIPT, ("--device", "h1000"), ("h100",)),
        ("a.sh", SCRIPT, ("--set", "parallelism.tq=2"), ("parallelism.tq",)),
        ("a.sh", SCRIPT, ("--from", "word"), ("megatron",)),
        ("titan.toml", TITAN, ("--from", "nemo"), ("titan.toml",)),
        ("a.sh", SCRIPT, ("-o", "job.txt"), ("job.txt",)),
    ],
)  # fmt: skip
def test_what_makes_no_job_says_where(refused, name, text, options, words) -> None:
    said = refused(name, text, *options)
    assert all(word in said for word in words), said


spec = importlib.util.spec_from_file_location("public_configs", PUBLIC / "run.py")
public = importlib.util.module_from_spec(spec)
spec.loader.exec_module(public)


@pytest.mark.parametrize("name", public.SOURCES)
def test_public_configurations(run, name: str) -> None:
    gpus, device, overrides = public.SOURCES[name]
    options = [x for one in overrides for x in ("--set", one)]
    options += ["--gpus", gpus] if gpus else []
    options += ["--device", device] if device else []
    status, out, err = run("import", PUBLIC / "configs" / name, *options, "--json", "-q")
    assert status == 0, err
    found = json.loads(out)
    assert gpus in (None, found["world_size"])
    assert len(found["understood"]) >= 1 and len(found["not_understood"]) <= 1
    assert {path.name for path in (PUBLIC / "configs").iterdir()} == set(public.SOURCES)


JUNK = ("-1", "0", "x", "[1, x]", "1.5", "999999999999", "null", "true", "$NOT_SET", "1e9")


@pytest.mark.parametrize("name", FILES)
def test_junk_is_refused_or_read_but_never_a_crash(run, tmp_path, name: str) -> None:
    text, options = FILES[name]
    path, tried = tmp_path / f"junk-{name}", 0
    for i, found in enumerate(re.finditer(r"(?<=[ =])\d+\b", text)):
        junk = JUNK[i % len(JUNK)]
        path.write_text(text[: found.start()] + junk + text[found.end() :])
        status, _, err = run("import", path, *options, "--json", "-q")
        assert status in (0, 2) and "Traceback" not in err
        tried += 1
    assert tried > 3
