"""Other tools' names: none that touches the time vanishes; published models stay themselves."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

PUBLIC = Path(__file__).resolve().parents[1] / "experiments" / "validation" / "public-configs"

# --------------------------------------------------------------- names that touch the step's time
MEGATRON = """\
torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096
--ffn-hidden-size 14336 --num-attention-heads 32 --swiglu --seq-length 4096 --vocab-size 32000
--micro-batch-size 1 --global-batch-size 256 --tensor-model-parallel-size 2 --sequence-parallel
--pipeline-model-parallel-size 2 --use-distributed-optimizer --position-embedding-type rope
--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --group-query-attention
--num-query-groups 8 --untie-embeddings-and-output-weights --save x --save-interval 500""".replace(
    "\n", " "
)
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
data_parallel_shard_degree = 4
[float8]
[compile]
[checkpoint]
enable = true
[activation_checkpoint]
"""
NANOTRON = """\
general: {project: x}
model:
  model_config: {hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32,
    num_hidden_layers: 32, num_key_value_heads: 8, vocab_size: 128256}
optimizer: {zero_stage: 1}
parallelism: {dp: 8, pp: 2, tp: 4}
tokens: {micro_batch_size: 2, sequence_length: 4096, batch_accumulation_per_replica: 4}
"""
DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true},
 "NAME": VALUE}
"""
CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
BRIDGE = """\
mixed_precision: bf16_mixed
model: {num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32,
  seq_length: 4096, vocab_size: 32000, tensor_model_parallel_size: 2, num_moe_experts: 8,
  pipeline_model_parallel_size: 2, expert_model_parallel_size: 4, sequence_parallel: true}
train: {micro_batch_size: 1, global_batch_size: 256}
ddp: {use_distributed_optimizer: true}
checkpoint: {save: x}
"""
# of megatron-core 0.16.1 (ModelParallelConfig, TransformerConfig, MLATransformerConfig,
# OptimizerConfig, DistributedDataParallelConfig) and Megatron Bridge 0.3.1 (CommOverlapConfig,
# MixedPrecisionConfig, TrainingConfig, CheckpointConfig), each with a value that is no default
MEGATRON_NAMES = """
tensor_model_parallel_size=4 pipeline_model_parallel_size=4 context_parallel_size=2
virtual_pipeline_model_parallel_size=2 num_layers_per_virtual_pipeline_stage=4
expert_model_parallel_size=8 expert_tensor_parallel_size=1
hierarchical_context_parallel_sizes=2 hybrid_context_parallel=True moe_extended_tp=True
tp_comm_overlap=True overlap_moe_expert_parallel_comm=True delay_wgrad_compute=True
ep_overlap_early_attn_memory_release=True overlap_p2p_comm_warmup_flush=True
variable_seq_lengths=True defer_embedding_wgrad_compute=True use_ring_exchange_p2p=True
microbatch_group_size_per_vp_stage=2 cpu_offloading=True cpu_offloading_num_layers=4
num_layers=48 mtp_num_layers=1 num_layers_in_first_pipeline_stage=12
num_layers_in_last_pipeline_stage=12 account_for_embedding_in_pipeline_split=True
account_for_loss_in_pipeline_split=True hidden_size=2048 num_attention_heads=64
num_query_groups=4 ffn_hidden_size=8192 kv_channels=256 hidden_dropout=0.1 attention_dropout=0.1
fp32_residual_connection=True num_moe_experts=16 window_size=1024
qk_layernorm=True qk_l2_norm=True attention_output_gate=True dsa_indexer_topk=2048
experimental_attention_variant=gated_delta_net linear_attention_freq=4 recompute_granularity=full
recompute_modules=mlp fp8=hybrid fp8_recipe=blockwise fp8_param=True fp8_dot_product_attention=True
fp8_multi_head_attention=True first_last_layers_bf16=True fp4=e2m1
moe_shared_expert_intermediate_size=2048 moe_shared_expert_overlap=True moe_layer_freq=2
moe_ffn_hidden_size=1024 moe_router_topk=4 moe_router_topk_limited_devices=2
moe_router_padding_for_quantization=True moe_router_group_topk=2
moe_router_force_load_balancing=True moe_expert_capacity_factor=1.5
moe_pad_expert_input_to_capacity=True moe_token_dispatcher_type=allgather moe_enable_deepep=True
moe_layer_recompute=True moe_latent_size=1024 moe_use_legacy_grouped_gemm=True cp_comm_type=a2a
cuda_graph_impl=local enable_cuda_graph=True external_cuda_graph=True cuda_graph_scope=attn
transformer_impl=local fine_grained_activation_offloading=True
heterogeneous_block_specs=True use_kitchen=True optimizer=muon use_precision_aware_optimizer=True
exp_avg_dtype=bf16 main_grads_dtype=bf16 use_distributed_optimizer=False
overlap_param_gather=True overlap_param_gather_with_optimizer_step=True
optimizer_cpu_offload=True overlap_grad_reduce=True num_distributed_optimizer_instances=2
bucket_size=40000000 reduce_scatter_with_fp32_accumulation=True fp8_param_gather=True
use_megatron_fsdp=True use_torch_fsdp2=True nccl_ub=True fsdp_double_buffer=True
grad_reduce_in_fp32=True micro_batch_size=2 global_batch_size=512 rampup_batch_size=16
train_iters=1000 manual_gc=True manual_gc_interval=10 eval_interval=100 save_interval=100
async_save=True seq_length=8192 position_embedding_type=rope deterministic_mode=True
cross_entropy_loss_fusion=True no_rope_fusion=True no_gradient_accumulation_fusion=True
attention_backend=fused empty_unused_memory_level=1 standalone_embedding_stage=True
memory_efficient_layer_norm=True decoder_first_pipeline_num_layers=12 vocab_size=64000
make_vocab_size_divisible_by=1024 padded_vocab_size=40960
"""
# of torchtitan 0.3.0 and, by sections, of 2025
TITAN_NAMES = """
training.local_batch_size=4 training.global_batch_size=128 training.seq_len=4096 training.steps=10
training.enable_cpu_offload=true training.dtype="bfloat16" training.gc_freq=10
training.mixed_precision_reduce="bfloat16" parallelism.data_parallel_replicate_degree=2
parallelism.data_parallel_shard_degree=2 parallelism.fsdp_reshard_after_forward="never"
parallelism.enable_fsdp_symm_mem=true parallelism.tensor_parallel_degree=4
parallelism.enable_sequence_parallel=false parallelism.pipeline_parallel_degree=4
parallelism.pipeline_parallel_first_stage_less_layers=2 parallelism.spmd_backend="full_dtensor"
parallelism.pipeline_parallel_layers_per_stage=4
parallelism.pipeline_parallel_schedule="ZBVZeroBubble" parallelism.context_parallel_degree=2
parallelism.pipeline_parallel_microbatch_size=2
parallelism.context_parallel_load_balancer="ptrr" parallelism.expert_parallel_degree=2
parallelism.enable_async_tensor_parallel=true compile.enable=true compile.backend="eager"
float8.enable_fsdp_float8_all_gather=true model.converters=["float8"]
activation_checkpoint.mode="full" activation_checkpoint.early_stop=true
debug.deterministic=true checkpoint.interval=100
training.disable_cuda_graphs=true
"""
# of nanotron 0.4
NANOTRON_NAMES = """
parallelism.dp=16 parallelism.tp=2 parallelism.pp=4 parallelism.pp_engine=afab
parallelism.tp_mode=ALL_REDUCE parallelism.expert_parallel_size=2
parallelism.tp_linear_async_communication=true parallelism.recompute_layer=true
parallelism.context_parallel_size=2 optimizer.zero_stage=0 optimizer.accumulate_grad_in_fp32=true
model.ddp_bucket_cap_mb=50 model.dtype=float32 tokens.micro_batch_size=4
tokens.batch_accumulation_per_replica=8 tokens.sequence_length=2048 tokens.train_steps=100
checkpoints.checkpoint_interval=100 tokens.val_check_interval=10
"""
# of DeepSpeed 0.19.8
DEEPSPEED_NAMES = """
train_batch_size=512 gradient_accumulation_steps=4 train_micro_batch_size_per_gpu=4
communication_data_type="fp32" sparse_gradients=true
zero_optimization={"stage":1} reduce_bucket_size=5e8 allgather_bucket_size=5e8
overlap_comm=true stage3_prefetch_bucket_size=1e8 stage3_param_persistence_threshold=1e5
contiguous_gradients=false round_robin_gradients=true offload_optimizer={"device":"cpu"}
zero_hpz_partition_size=8 zero_quantized_weights=true zero_quantized_gradients=true
mics_shard_size=8 gradient_accumulation_dtype="fp32" partition_activations=true
cpu_checkpointing=true number_checkpoints=4 optimizer={"type":"Muon"} autotp_size=2
sequence_parallel_size=2 torch_autocast={"enabled":true} compile={"deepcompile":true}
"""
# of causal language models of transformers 5.24
HUGGING_FACE_NAMES = """
hidden_size=8192 intermediate_size=28672 num_hidden_layers=40 num_attention_heads=64
num_key_value_heads=4 head_dim=256 vocab_size=64000 max_position_embeddings=2048
tie_word_embeddings=true hidden_act="relu2" sliding_window=1024 attention_chunk_size=2048
num_local_experts=8 num_experts=8 n_routed_experts=8 moe_intermediate_size=1024
num_experts_per_tok=4 n_shared_experts=2 shared_expert_intermediate_size=1024
first_k_dense_replace=2 mlp_only_layers=[0,1] decoder_sparse_step=2 moe_layer_freq=2
kv_lora_rank=512 q_lora_rank=1536 moe_latent_size=512 full_attention_interval=4
linear_num_value_heads=32 layer_types=["linear_attention"] mamba_n_heads=64 mamba_d_state=128
attn_layer_period=8 index_topk=2048 num_nextn_predict_layers=1 attn_logit_softcapping=50.0
use_qk_norm=true attn_output_gate=true attention_dropout=0.1 num_kv_shared_layers=4
block_configs=[1] conv_L_cache=3 parallel_attn=true new_decoder_architecture=true
hybrid_override_pattern="M*" vision_config={"depth":2} num_mem_blocks=2 lru_width=2560
"""
CONTEXT: dict[str, dict[str, Any]] = {
    "moe_": {"num_experts": 8, "num_experts_per_tok": 2},
    "num_experts_per_tok": {"num_experts": 8}, "n_shared": {"num_experts": 8},
    "shared_expert": {"num_experts": 8}, "first_k_dense": {"num_experts": 8},
    "mlp_only": {"num_experts": 8}, "decoder_sparse": {"num_experts": 8},
    "q_lora_rank": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                    "v_head_dim": 128},
    "kv_lora_rank": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    "sliding_window": {"max_position_embeddings": 4096},
    "attention_chunk": {"max_position_embeddings": 4096},
}  # fmt: skip
"""Settings without which a name of a model would have no effect."""

Found = dict[str, Any]


@pytest.fixture
def told(run, tmp_path):
    """What an import says of a text, or the error."""

    def call(name: str, text: str, gpus: int | None, *more: Any) -> tuple[Found | None, str]:
        (tmp_path / name).write_text(text)
        options = ["--gpus", gpus] if gpus else []
        files = [tmp_path / name, *more]
        status, out, err = run("import", *files, "--device", "h100", *options, "--json", "-q")
        assert status in (0, 2) and "Traceback" not in err and "internal" not in err
        return (json.loads(out), "") if status == 0 else (None, err)

    return call


def settings(found: Found, *lists: str) -> list[str]:
    return [row["setting"].replace("-", "_") for name in lists for row in found[name]]


def vanishes(told: Any, file: str, name: str, with_it: str, without: str, gpus: Any) -> bool:
    """Whether a setting is in a configuration and neither in its job nor listed."""
    found, _ = told(file, with_it, gpus)
    last = name.rpartition(".")[2]
    before, _ = told(file, without, gpus)
    if found is None or before is None:
        return found is None and before is None
    shown = settings(found, "not_understood", "not_modelled", "understood")
    return not any(last in text for text in shown) and before["values"] == found["values"]


def pairs(names: str) -> list[list[str]]:
    return [word.split("=", 1) for word in names.split()]


def files() -> Iterator[tuple[str, str, str, str, Any]]:
    """Give name, file, text with a setting, text without it, and GPUs."""
    for name, value in pairs(MEGATRON_NAMES):
        flag = f" --{name.replace('_', '-')}"
        words = "" if value == "True" else f" {value}"
        bare = re.sub(rf"{flag}( [^-]\S*)?(?= |$)", "", MEGATRON)
        text = bare if value == "False" else f"{bare}{flag}{words}"
        before = MEGATRON if value == "False" else bare
        yield name, "a.sh", text, before, 64
        if value not in ("True", "False"):
            yield name, "b.yaml", f"{BRIDGE}other: {{{name}: {value}}}\n", BRIDGE, 64
    for name, value in pairs(TITAN_NAMES):
        section, last = name.split(".")
        bare = re.sub(rf"\n{last} = [^\n]*", "", TITAN)
        head = f"[{section}]\n"
        start = bare if head in bare else f"{bare}{head}"
        yield name, "t.toml", start.replace(head, f"{head}{last} = {value}\n"), bare, 32
    for name, value in pairs(NANOTRON_NAMES):
        section, last = name.split(".")
        bare = re.sub(rf"(?<=[{{ ]){last}: [^,}}]*(, )?", "", NANOTRON)
        if f"{section}: {{" in bare:
            text = bare.replace(f"{section}: {{", f"{section}: {{{last}: {value}, ")
        elif section == "model":
            text = bare.replace("model:\n", f"model:\n  {last}: {value}\n")
        else:
            text = f"{bare}{section}: {{{last}: {value}}}\n"
        yield name, "n.yaml", text.replace(", }", "}"), bare, None


@pytest.mark.parametrize("case", list(files()), ids=lambda case: f"{case[1]}-{case[0]}")
def test_no_setting_that_touches_the_time_vanishes(told, case) -> None:
    name, file, text, without, gpus = case
    assert not vanishes(told, file, name, text, without, gpus)


@pytest.mark.parametrize(("name", "value"), pairs(DEEPSPEED_NAMES))
def test_no_setting_of_deepspeed_vanishes(told, tmp_path, name: str, value: str) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    config = json.loads(DEEPSPEED.replace('"NAME": VALUE', f'"{name}": {value}'))
    plain = json.loads(DEEPSPEED.replace('"NAME": VALUE', '"steps_per_print": 10'))
    found, _ = told("ds.json", json.dumps(config), 64, model)
    before, _ = told("plain.json", json.dumps(plain), 64, model)
    assert found is not None and before is not None
    inside = [*json.loads(value)] if value.startswith("{") else []
    shown = settings(found, "not_understood", "not_modelled", "understood")
    listed = any(word in text for text in shown for word in (name, *inside))
    assert listed or found["values"] != before["values"]


@pytest.mark.parametrize(("name", "value"), pairs(HUGGING_FACE_NAMES))
def test_no_setting_of_a_model_vanishes(told, name: str, value: str) -> None:
    context = next((more for start, more in CONTEXT.items() if name.startswith(start)), {})
    base = CONFIG | context
    text = json.dumps(base | {name: json.loads(value)})
    without = json.dumps({key: v for key, v in base.items() if key != name})
    assert not vanishes(told, "config.json", name, text, without, 8)


def test_a_name_in_any_section_is_listed(told) -> None:
    for section in ("model", "parallelism", "training", "optim", "decoder", "trainer"):
        for name in ("new_size", "config_rank", "max_token_kernel", "data_size", "fancy_config"):
            found, _ = told("n.yaml", f"{NANOTRON}{section}_x: {{{name}: 3}}\n", None)
            assert found is not None and settings(found, "not_understood") == [f"{name}: 3"]


# --------------------------------------------------------------------------- models of 2024 to 2026
MODELS = [json.loads(line) for line in (PUBLIC / "models.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_published_models_have_their_parameters_or_are_refused(told, model) -> None:
    found, error = told("config.json", json.dumps(model["config"]), 8)
    if found is None:
        assert "no costs" in error and re.search(r"config.json:\d+: \w+: ", error)
        return
    total, beside = found["parameters"]["total"], model.get("beside", {})
    encoder = any("vision_config" in text for text in settings(found, "not_modelled"))
    if encoder and "vision" not in beside:
        assert 0.95 < total / model["published"] < 1.0  # whose parts are not published
        return
    assert total == pytest.approx(model["published"] - sum(beside.values()), rel=0.01)
    assert found["not_understood"] == []


def test_most_published_models_are_read() -> None:
    rows = (PUBLIC / "models.csv").read_text().splitlines()
    assert len(MODELS) == len(rows) - 1 >= 40
    refused = {"lfm2", "lfm2_moe", "zamba2", "mamba", "falcon_mamba", "deepseek_v4", "gemma4"}
    families = {str(m["config"].get("model_type")) for m in MODELS}
    assert len(families) > 40 and len(refused & families) > 3


# ------------------------------------------------------------------------------ one wrong setting
WRONG = {
    "a.sh": """tensor-model-parallel-size 3 0 -2 x 1.5; pipeline-model-parallel-size 7 0 two;
        num-layers 0 -4 x 2.5; hidden-size 4095 0 abc; num-attention-heads 0 33;
        num-query-groups 5 0; global-batch-size 250 -5 1.5 many; micro-batch-size 0 3 x;
        seq-length 0 4095 -1 x; vocab-size 0 x -3; ffn-hidden-size 0 14337 x; num-experts -8 x;
        expert-model-parallel-size 5 0 x; moe-router-topk 9 0""",
    "n.yaml": """tp 3 true {a:b}; pp -1; dp 0; micro_batch_size x 0; sequence_length 4097 [1];
        zero_stage 7; batch_accumulation_per_replica -4; num_key_value_heads 5; vocab_size x""",
    "t.toml": """tensor_parallel_degree 3; pipeline_parallel_degree "x"; local_batch_size -2;
        seq_len 8191; steps -5""",
    "config.json": """num_hidden_layers 0; hidden_size -1 4095; num_attention_heads "x";
        vocab_size 0; num_key_value_heads 5; layer_types ["x"];
        num_local_experts -8; intermediate_size 0""",
}
TEXTS = {"a.sh": MEGATRON, "n.yaml": NANOTRON, "t.toml": TITAN, "config.json": json.dumps(CONFIG)}


def wrong() -> Iterator[tuple[str, str, str]]:
    for file, rows in WRONG.items():
        for name, *values in (row.split() for row in rows.split(";")):
            yield from ((file, name, value.replace(":", ": ")) for value in values)


@pytest.mark.parametrize(("file", "name", "value"), list(wrong()))
def test_one_wrong_setting_says_where(told, file: str, name: str, value: str) -> None:
    forms = {"a.sh": (rf"--{name} \S+", f"\\\n--{name} {value} \\\n"),
             "n.yaml": (rf"\b{name}: [^,}}]*", f"{name}: {value}"),
             "t.toml": (rf"\n{name} = \S+", f"\n{name} = {value}")}  # fmt: skip
    if file == "config.json":
        text = json.dumps(CONFIG | {name: json.loads(value)}, indent=1)
    else:
        text, n = re.subn(*forms[file], TEXTS[file], count=1)
        assert n == 1
    found, error = told(file, text, {"a.sh": 64, "t.toml": 32, "config.json": 8}.get(file))
    assert found is None
    line = next(i for i, words in enumerate(text.splitlines(), 1) if name in words)
    if value in ("3", "5", "14337"):  # which do not divide another one, whose line it may be
        assert re.search(rf"{file}:\d+: ", error) and value in error
    else:
        assert f"{file}:{line}: " in error, error
    assert re.search(r"expected|take|change|correct|give|lower|set|known are", error)


JUNK: tuple[Any, ...] = (
    None, [], {}, "x", -1, 0, 3, 1.5, 1e308, True, ["x"], [1, 2], {"a": 1}, "$A", "1e9", 10**12,
    "auto", "4,5,6", [[1]], "", "*E",
)  # fmt: skip
SETS = ("model.n_layers", "model.hidden_size", "model.name", "parallelism.tp", "model.window",
        "model.layer_pattern", "parallelism.ep", "model.n_experts", "model.seq_len")  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_changed_configurations_are_read_or_refused(run, tmp_path, seed: int) -> None:
    draw, read, path = Random(seed), 0, tmp_path / "config.json"
    for _ in range(60):
        config = dict(draw.choice(MODELS)["config"])
        for name in draw.sample(sorted(config), draw.choice([1, 1, 2, 3])):
            config[name] = draw.choice(JUNK)
        path.write_text(json.dumps(config))
        options = ["--set", f"{draw.choice(SETS)}={draw.choice(JUNK)}"] * draw.choice([0, 0, 1])
        status, _, err = run("import", path, "--gpus", 8, *options, "--json", "-q")
        assert status in (0, 2) and "internal" not in err, (config, options)
        read += status == 0
    assert 5 < read < 55
