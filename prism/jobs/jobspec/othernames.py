"""What other frameworks call a job's keys and values: Megatron, NeMo, torchtitan, DeepSpeed ...

`prism import`, hints for unknown words and the table in docs/job-file.md are made of `KEYS` and
`VALUES`, by spellings without case, dashes, underscores and the dots between sections.
"""

from collections.abc import Iterable

_KEYS = {
    "parallelism.tp": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size "
    "tensor_parallel tp_size tp_degree autotp_size model_parallel_size",
    "parallelism.cp": "context_parallel_size context_parallel_degree context_parallel cp_size "
    "cp_degree",
    "parallelism.pp": "pipeline_model_parallel_size pipeline_parallel_degree "
    "pipeline_parallel_size pipeline_parallel pipe_parallel_size pp_size pp_degree pipeline_stages "
    "num_stages",
    "parallelism.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
    "virtual_pipeline_parallel_size vpp_size num_layers_per_virtual_pipeline_stage "
    "pipeline_parallel_layers_per_stage",
    "parallelism.dp": "data_parallel_size data_parallel_degree dp_size dp_degree "
    "data_parallel_replicate_degree num_replicas world_size np",
    "parallelism.ep": "expert_model_parallel_size expert_parallel_degree expert_parallel_size "
    "expert_parallel ep_size",
    "parallelism.shard_size": "data_parallel_shard_degree fsdp_size",
    "parallelism.data_parallel": "zero_stage zero_optimization use_distributed_optimizer "
    "zero_optimization.stage sharding_strategy data_parallel_sharding_strategy use_torch_fsdp2 "
    "use_megatron_fsdp use_custom_fsdp fsdp optim.name",
    "parallelism.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallelism.schedule": "pipeline_parallel_schedule pipeline_schedule pp_engine",
    "parallelism.p2p": "overlap_p2p_comm overlap_p2p_communication",
    "parallelism.global_batch": "global_batch_size train_batch_size gbs",
    "parallelism.microbatches": "gradient_accumulation_steps num_microbatches gas "
    "batch_accumulation_per_replica",
    "parallelism.microbatch_size": "micro_batch_size train_micro_batch_size_per_gpu "
    "per_device_train_batch_size "
    "local_batch_size training.batch_size pipeline_parallel_microbatch_size mbs",
    "parallelism.recompute": "recompute_granularity activation_checkpoint "
    "activation_checkpointing activations_checkpoint_granularity recompute_activations "
    "checkpoint_activations activation_checkpoint.mode recompute_layer",
    "parallelism.overlap": "overlap_grad_reduce overlap_param_gather overlap_comm "
    "overlap_grad_sync",
    "parallelism.layer_split": "pipeline_model_parallel_layout module_fqns_per_model_part "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "parallelism.precision": "mixed_precision mixed_precision_param dtype trainer.precision fp8 "
    "fp8_format fp8_hybrid fp8_recipe fp4 fp4_format fp4_recipe model.converters",
    "parallelism.framework": "compile.enable training.compile torch_compile",
    "parallelism.attention": "attention_backend attn_implementation _attn_implementation "
    "use_flash_attn",
    "parallelism.optimizer": "optimizer.name optimizer.type optimizer_factory.name",
    "parallelism.optimizer_dtype": "exp_avg_dtype exp_avg_sq_dtype bf16_optimizer_states "
    "bf16_master_weights_and_grads",
    "parallelism.gradient_dtype": "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 "
    "grad_reduce_in_bf16 mixed_precision_reduce reduce_dtype communication_data_type "
    "grad_sync_dtype main_grads_dtype accumulate_grad_in_fp32",
    "parallelism.fused_loss": "cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "te_parallel_cross_entropy",
    "parallelism.expert_node_limit": "moe_router_group_topk",
    "parallelism.expert_tp": "expert_tensor_parallel_size etp",
    "parallelism.expert_dispatch": "moe_token_dispatcher_type moe_flex_dispatcher_backend",
    "parallelism.expert_capacity": "moe_expert_capacity_factor",
    "parallelism.expert_imbalance": "moe_router_force_load_balancing",
    "parallelism.expert_overlap": "overlap_moe_expert_parallel_comm",
    "parallelism.cuda_graphs": "cuda_graph_impl enable_cuda_graph external_cuda_graph",
    "model.name": "hf_model_id hf_path pretrained_model_name _name_or_path _factory_ recipe flavor "
    "tokenizer_model tokenizer_name_or_path",
    "model.n_layers": "num_layers num_hidden_layers encoder_num_layers n_layer",
    "model.hidden_size": "d_model dim hidden_dim n_embd",
    "model.ffn_size": "ffn_hidden_size intermediate_size ffn_dim n_inner",
    "model.n_heads": "num_attention_heads num_heads n_head",
    "model.n_kv_heads": "num_query_groups num_key_value_heads num_kv_heads",
    "model.vocab_size": "padded_vocab_size pad_vocab_size_to tokenizer_type",
    "model.seq_len": "seq_length sequence_length encoder_seq_length n_positions "
    "max_position_embeddings",
    "model.head_size": "kv_channels head_dim qk_head_dim qk_nope_head_dim",
    "model.v_head_size": "v_head_dim",
    "model.rope_head_size": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.gated_mlp": "swiglu gated_linear_unit hidden_act activation activation_function "
    "mlp_type",
    "model.rope": "position_embedding_type use_rotary_position_embeddings",
    "model.tied_embeddings": "tie_word_embeddings share_embeddings_and_output_weights "
    "untie_embeddings_and_output_weights no_weight_tying",
    "model.n_experts": "num_experts num_moe_experts n_routed_experts num_local_experts",
    "model.experts_per_token": "moe_router_topk num_experts_per_tok top_k",
    "model.expert_ffn_size": "moe_ffn_hidden_size moe_intermediate_size",
    "model.n_shared_experts": "num_shared_experts moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size",
    "model.n_dense_layers": "first_k_dense_replace",
    "model.moe_layer_interval": "moe_layer_freq interleave_moe_layer_step",
    "model.window": "sliding_window window_size",
    "model.full_attention_interval": "sliding_window_pattern window_attn_skip_freq",
    "model.layer_pattern": "hybrid_override_pattern hybrid_layer_pattern",
    "model.linear_heads": "linear_num_value_heads",
    "model.linear_key_heads": "linear_num_key_heads",
    "model.linear_head_size": "linear_key_head_dim linear_value_head_dim",
    "model.mamba_heads": "mamba_num_heads",
    "model.mamba_head_size": "mamba_head_dim",
    "model.mamba_groups": "mamba_num_groups n_groups",
    "model.mamba_state_size": "mamba_state_dim ssm_state_size",
    "cluster.nodes": "num_nodes nnodes",
    "cluster.gpus_per_node": "nproc_per_node num_gpus_per_node npernode devices num_gpus ngpu gres",
    "cluster.device": "constraint",
    "run.steps": "train_iters max_steps training_steps train_steps iterations",
    "run.tokens": "train_tokens train_samples",
    "run.checkpoint": "save_interval checkpoint_interval checkpoint.enable "
    "checkpoint.enable_checkpoint async_save async_mode",
    "run.evaluation": "eval_interval val_check_interval",
}
KEYS = {key: names.split() for key, names in _KEYS.items()}
"""Other frameworks' names by the key of a job that says the same, or comes nearest."""

_VALUES = {
    "data_parallel": {
        "ddp": "dp no_shard zero0 0",
        "zero1": "distributed_optimizer optim os distributed_fused_adam 1 optim_grads os_g 2",
        "fsdp": "zero3 zero_stage_3 fsdp2 full_shard optim_grads_params fsdp1 3",
        "hsdp": "hybrid_shard zero++ mics",
    },
    "recompute": {
        "full": "uniform block all true",
        "none": "false off attention core_attn",
    },
    "schedule": {
        "interleaved": "interleaved1f1b vpp",
        "zb-h1": "zerobubble interleavedzerobubble zb1p zbh1",
        "zb-v": "zbvzerobubble zbv",
        "dualpipe-v": "dualpipev dualpipe",
        "gpipe": "afab",
    },
    "precision": {
        "bf16": "bfloat16 fp16 float16 bf16-mixed 16-mixed 16",
        "fp8": "hybrid e4m3 tensorwise delayed float8",
        "fp8_block": "blockwise",
        "mxfp8": "mxfp8_1d2d",
        "nvfp4": "e2m1",
    },
    "attention": {
        "cudnn": "fused",
        "fa2": "flash flash_attention_2 flash_attn flash_attn_2",
        "fa3": "flash_attention_3 flash_attn_3",
        "math": "unfused local eager",
    },
    "optimizer": {
        "adamw": "adam fused_adam adamw_torch adamw_torch_fused",
        "muon": "dist_muon",
    },
    "p2p": {
        "blocking": "sync false",
        "async": "true",
    },
}
VALUES = {
    key: {value: words.split() for value, words in values.items()}
    for key, values in _VALUES.items()
}
"""Other frameworks' words by key and the value that says the same, or comes nearest."""

NOTES = {
    "local_batch_size": "it is microbatches * microbatch_size",
    "data_parallel_replicate_degree": "dp is replicate * shard degree",
    "world_size": "it is tp * cp * pp * dp",
    "np": "it is tp * cp * pp * dp",
    "num_layers_per_virtual_pipeline_stage": "vpp is layers of a stage / these",
    "pipeline_parallel_layers_per_stage": "vpp is layers of a stage / these",
    "moe_shared_expert_intermediate_size": "it is experts * their width",
    "no_weight_tying": "the opposite",
    "data_parallel_shard_degree": "with hsdp; dp is replicate * shard degree",
    "use_distributed_optimizer": "zero1",
    "moe_layer_freq": "a list of first layers without experts is model.n_dense_layers",
    "train_samples": "it is samples * seq_len",
    "exp_avg_dtype": "bf16 has no master copy here",
    "untie_embeddings_and_output_weights": "the opposite",
}
"""What to mind, where a name and its key do not count the same."""


def plain(word: str) -> str:
    """Give the letters and digits of a name, by which names are the same."""
    return "".join(c for c in word.lower() if c not in "-_ .")


_KEY_OF = {plain(name): key for key, names in KEYS.items() for name in names}
_NOTE_OF = {plain(name): note for name, note in NOTES.items()}


def key_of(name: str) -> str | None:
    """Return the dotted key that another framework's name stands for."""
    return _KEY_OF.get(plain(name))


def note_of(name: str) -> str | None:
    """Return what to mind about another framework's name, where it does not count the same."""
    return _NOTE_OF.get(plain(name))


def value_of(key: str, word: str, choices: Iterable[str]) -> str | None:
    """Return the choice of a key that another framework's word stands for."""
    for value, words in VALUES.get(key, {}).items():
        if value in choices and plain(word) in map(plain, words):
            return value
    return None
