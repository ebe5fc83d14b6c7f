"""What other frameworks call a job's keys and values: Megatron, NeMo, torchtitan, DeepSpeed ...

`prism import`, hints for unknown words and the tables in docs/job-file.md are made of these, by
spellings without case, dashes, underscores and the dots between sections.
"""

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import cache

from prism.jobs.dimensions import DIMENSIONS, GPUS

# Behind a bar: names that say it where none before does, as a longest context, or a width's default
_KEYS = {
    **{f"parallelism.{name}": dimension.names for name, dimension in DIMENSIONS.items()},
    "parallelism.shard_size": "data_parallel_shard_degree fsdp_size",
    "parallelism.data_parallel": "zero_stage zero_optimization use_distributed_optimizer "
    "zero_optimization.stage sharding_strategy data_parallel_sharding_strategy use_torch_fsdp2 "
    "use_megatron_fsdp use_custom_fsdp fsdp fsdp_version fsdp_sharding_strategy distributed_type "
    "optim.name",
    "parallelism.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallelism.schedule": "pipeline_parallel_schedule pipeline_schedule pp_engine",
    "parallelism.p2p": "overlap_p2p_comm overlap_p2p_communication",
    "parallelism.global_batch": "global_batch_size train_batch_size gbs global_train_batch_size | "
    "num_tokens_per_train_step",
    "parallelism.microbatches": "gradient_accumulation_steps num_microbatches gas "
    "batch_accumulation_per_replica",
    "parallelism.microbatch_size": "micro_batch_size train_micro_batch_size_per_gpu "
    "per_device_train_batch_size device_train_microbatch_size ppo_micro_batch_size_per_gpu mbs | "
    "local_batch_size training.batch_size num_tokens_per_microbatch_per_dp_rank "
    "pipeline_parallel_microbatch_size",
    "parallelism.recompute": "recompute_granularity activation_checkpoint "
    "activation_checkpointing activations_checkpoint_granularity recompute_activations "
    "checkpoint_activations activation_checkpoint.mode recompute_layer gradient_checkpointing "
    "enable_gradient_checkpointing",
    "parallelism.overlap": "overlap_grad_reduce overlap_param_gather overlap_comm "
    "overlap_grad_sync",
    "parallelism.layer_split": "pipeline_model_parallel_layout module_fqns_per_model_part "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
    "parallelism.precision": "mixed_precision mixed_precision_param dtype trainer.precision fp8 "
    "fp8_format fp8_hybrid te_fp8_format fp8_recipe fp4 fp4_format fp4_recipe model.converters",
    "parallelism.framework": "compile.enable training.compile torch_compile",
    "parallelism.attention": "attention_backend attn_implementation _attn_implementation "
    "use_flash_attn attention_config flash_attn",
    "parallelism.optimizer": "optimizer.name optimizer.type optimizer_factory.name",
    "parallelism.optimizer_dtype": "exp_avg_dtype exp_avg_sq_dtype bf16_optimizer_states "
    "bf16_master_weights_and_grads",
    "parallelism.gradient_dtype": "grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 "
    "grad_reduce_in_bf16 mixed_precision_reduce reduce_dtype communication_data_type "
    "grad_sync_dtype main_grads_dtype accumulate_grad_in_fp32 fp32_allreduce",
    "parallelism.fused_loss": "cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "te_parallel_cross_entropy",
    "parallelism.expert_node_limit": "moe_router_group_topk",
    "parallelism.expert_tp": "expert_tensor_parallel_size expert_tensor_parallel_degree etp",
    "parallelism.expert_dispatch": "moe_token_dispatcher_type moe_flex_dispatcher_backend",
    "parallelism.expert_capacity": "moe_expert_capacity_factor moe_train_capacity_factor",
    "parallelism.expert_imbalance": "moe_router_force_load_balancing",
    "parallelism.expert_overlap": "overlap_moe_expert_parallel_comm",
    "parallelism.cuda_graphs": "cuda_graph_impl enable_cuda_graph external_cuda_graph",
    "model.name": "model_name_or_path base_model hf_model_id hf_path pretrained_model_name "
    "_name_or_path _factory_ recipe flavor tokenizer_model tokenizer_name_or_path",
    "model.n_layers": "num_layers num_hidden_layers encoder_num_layers n_layer",
    "model.hidden_size": "d_model n_embd n_embed | dim | hidden_dim",
    "model.ffn_size": "intermediate_size_mlp ffn_hidden_size dense_intermediate_size | "
    "intermediate_size ffn_dim n_inner | hidden_dim",
    "model.n_heads": "num_attention_heads n_head | num_heads attention_heads",
    "model.n_kv_heads": "num_query_groups num_key_value_heads num_kv_heads kv_n_heads "
    "num_attention_groups",
    "model.vocab_size": "padded_vocab_size pad_vocab_size_to tokenizer_type",
    "model.seq_len": "seq_length sequence_length encoder_seq_length max_context_length cutoff_len "
    "sequence_len max_seq_length | n_positions max_position_embeddings max_position_embedding "
    "max_seq_len model_max_length",
    "model.head_size": "kv_channels head_dim attention_head_dim qk_head_dim qk_nope_head_dim",
    "model.attention_gate": "attn_output_gate attention_output_gate",
    "model.q_lora_rank": "share_q_dim",
    "model.v_head_size": "v_head_dim",
    "model.rope_head_size": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.gated_mlp": "swiglu gated_linear_unit hidden_act activation activation_function "
    "mlp_type",
    "model.rope": "position_embedding_type pos_emb use_rotary_position_embeddings",
    "model.tied_embeddings": "tie_word_embeddings share_embeddings_and_output_weights "
    "untie_embeddings_and_output_weights no_weight_tying",
    "model.n_experts": "num_experts num_moe_experts n_routed_experts num_local_experts "
    "moe_num_experts",
    "model.experts_per_token": "moe_router_topk num_experts_per_tok num_experts_per_token "
    "top_k_experts moe_topk moe_top_k moe_k | top_k",
    "model.expert_ffn_size": "moe_ffn_hidden_size moe_intermediate_size",
    "model.expert_latent_size": "moe_latent_size routed_expert_hidden_size",
    "model.n_shared_experts": "num_shared_experts num_shared_expert moe_num_shared_experts",
    "model.shared_ffn_size": "moe_shared_expert_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size share_expert_dim",
    "model.n_dense_layers": "first_k_dense_replace",
    "model.moe_layer_interval": "moe_layer_freq interleave_moe_layer_step decoder_sparse_step "
    "expert_layer_period moe_layer_interval",
    "model.window": "sliding_window window_size | sliding_window_size",
    "model.full_attention_interval": "sliding_window_pattern window_attn_skip_freq",
    "model.layer_pattern": "hybrid_override_pattern hybrid_layer_pattern",
    "model.linear_heads": "linear_num_value_heads linear_num_heads",
    "model.linear_key_heads": "linear_num_key_heads | linear_num_heads",
    "model.linear_head_size": "linear_value_head_dim linear_head_dim | linear_key_head_dim",
    "model.mamba_heads": "mamba_num_heads mamba_n_heads",
    "model.mamba_head_size": "mamba_head_dim mamba_d_head mamba_headdim",
    "model.mamba_groups": "mamba_num_groups mamba_n_groups n_groups",
    "model.mamba_state_size": "mamba_state_dim mamba_d_state ssm_state_size",
    "cluster.nodes": "num_nodes nnodes actor_num_nodes num_machines",
    "cluster.gpus_per_node": "nproc_per_node num_gpus_per_node n_gpus_per_node gpus_per_node "
    "actor_num_gpus_per_node npernode devices num_gpus ngpu gres",
    "cluster.device": "constraint",
    "run.steps": "train_iters max_steps training_steps train_steps iterations",
    "run.tokens": "train_tokens train_samples",
    "run.checkpoint": "save_interval save_steps checkpoint_factor checkpoint_interval "
    "every_n_train_steps checkpoint.enable checkpoint.enable_checkpoint async_save async_mode",
    "run.evaluation": "eval_interval eval_steps val_check_interval",
}  # fmt: skip
RANKS = {key: [rank.split() for rank in names.split("|")] for key, names in _KEYS.items()}
KEYS = {key: [name for rank in ranks for name in rank] for key, ranks in RANKS.items()}
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

_UNMODELLED = {
    "tp_comm_overlap ub_tp_comm_overlap tp_comm_overlap_cfg enable_async_tensor_parallel "
    "tp_linear_async_communication": "tensor-parallel collectives are exposed in prism",
    "cpu_offloading cpu_offload optimizer_cpu_offload enable_cpu_offload activation_offload "
    "fine_grained_activation_offloading offload_optimizer.device offload_param.device "
    "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d offload_modules":
        "offloading to the CPU",
    "mtp_num_layers num_nextn_predict_layers num_mtp_modules mtp_num_hidden_layers num_mtp_layers "
    "mtp_hybrid_override_pattern mtp_layers_block_type use_mtp use_multi_token_prediction "
    "num_mtp_predictor": "multi-token prediction",
    "early_step_in_backward": "optimizer steps within the backward",
    "moe_router_group_topk": "experts on few nodes: write parallelism.expert_node_limit",
    "moe_shared_expert_overlap": "shared experts beside the all-to-all",
    "delay_wgrad_compute defer_embedding_wgrad_compute": "weight gradients put off",
    "num_distributed_optimizer_instances": "an optimizer sharded over part of the replicas",
    "fp8_param_gather fp8_param enable_fsdp_float8_all_gather": "parameters gathered in FP8",
    "fp8_multi_head_attention fp8_dot_product_attention": "attention in FP8",
    "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16": "bf16 layers",
    "reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size bucket_size "
    "ddp_bucket_cap_mb ddp_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_param_persistence_threshold": "sizes of messages; prism has the framework's own",
    "partition_activations distribute_saved_activations": "checkpoints divided over tp",
    "no_gradient_accumulation_fusion no_rope_fusion no_masked_softmax_fusion "
    "no_bias_swiglu_fusion no_bias_gelu_fusion no_bias_dropout_fusion no_persist_layer_norm":
        "kernels not fused",
    "manual_gc manual_gc_interval gc_freq": "garbage collection of all ranks at the same step",
    "lora peft lora_rank lora_r adapter peft_scheme finetuning_type use_lora":
        "adapters: part of the weights learns",
    "attn_logit_softcapping": "a cap on attention's scores",
    "use_qk_norm qk_layernorm qk_norm qk_l2_norm": "norms of queries and keys",
    "hidden_dropout attention_dropout resid_pdrop attn_pdrop embd_pdrop embedding_dropout "
    "output_dropout activation_dropout residual_dropout dropout hidden_dropout_prob "
    "attention_probs_dropout_prob": "dropout",
    "swa_num_key_value_heads swa_head_dim swa_v_head_dim": "other heads in layers with a window",
    "index_topk index_head_dim index_n_heads index_topk_freq index_topk_pattern indexer_types "
    "index_skip_topk_offset index_share_for_mtp_iteration dsa_indexer_topk dsa_indexer_n_heads "
    "dsa_indexer_head_dim sparse_attention_config": "sparse attention; here all see all",
    "attention_chunk_size": "attention in chunks; all tokens before are seen here",
    "variable_seq_lengths packed_sequence_size packing sample_packing neat_packing "
    "use_remove_padding use_dynamic_batch_size use_dynamic_bsz max_tokens_per_gpu "
    "use_varlen_dataset dynamic_context_parallel":
        "sequences packed together, of which each sees its own tokens",
    "hierarchical_context_parallel_sizes": "context parallelism in two levels",
    "deterministic_mode deterministic": "deterministic kernels, which are slower",
}  # fmt: skip
UNMODELLED = {name: why for names, why in _UNMODELLED.items() for name in names.split()}
"""Settings that change the step time and are not modelled, each with what it does."""

FUSED = (
    "gradient_accumulation_fusion bias_activation_fusion bias_swiglu_fusion bias_gelu_fusion "
    "bias_dropout_fusion masked_softmax_fusion apply_rope_fusion persist_layer_norm "
    "moe_grouped_gemm moe_permute_fusion moe_router_fusion contiguous_gradients"
).split()
"""Fusions that are assumed: off, they change the step time."""

_NO_EFFECT = r"""
lr lr_* min_lr* max_lr* *_lr learning_rate* warmup warmup_ratio warmup_steps warmup_iters
warmup_fraction warmup_tokens lr_warmup_* num_warmup_steps weight_decay* *weight_decay wd_*
start_wd* end_wd* betas beta1 beta2 *_beta1 *_beta2 *momentum *_eps eps *_epsilon epsilon clip_grad*
*clip* max_norm max_grad_norm decay_* *_decay *_decay_* no_weight_decay* *_lr_* scheduler
scheduler_* lr_scheduler* adam_* loss_scale* *_loss_scale hysteresis loss_scale_window *_loss_coef
*_loss_coeff *_loss_weight *_loss_scaling_factor label_smoothing z_loss* moe_z_loss* init_* *_init
*_init_* *_init_method* initializer* *initialization* inv_* mup_* *_multiplier logit* scale_*
*_scale *_scaling_factor softmax_* attention_softmax_in_fp32 masked_softmax_fusion rope_* rotary_*
*_rotary_* *_rotary mrope_* yarn_* mscale* beta_fast beta_slow no_rope_* *_rope_*
original_max_position_embeddings initial_context_length use_mrope max_window_layers
position_embedding* norm_* *_norm_* normalization* *normalization *layernorm* rms_norm add_qkv_bias
*_bias add_bias_linear bias_* use_bias bias qk_clip* final_logit_softcapping query_pre_attn_scalar
routed_scaling_factor scoring_func topk_method topk_group n_group norm_topk_prob aux_loss_alpha
router_* seq_aux moe_router_load_balancing_type moe_router_pre_softmax moe_router_dtype
moe_router_num_groups moe_router_topk_scaling_factor moe_router_score_function output_router_logits
moe_router_enable_expert_bias moe_router_bias_update_rate moe_aux_loss_coeff moe_renormalize
moe_router_activation_func load_balance_coeff moe_input_jitter_eps moe_token_drop_policy
moe_per_layer_logging num_expert_group use_grouped_topk use_routing_bias use_moe_router_bias
use_cache cache_implementation cache_dir architectures model_type transformers_version torch_dtype
auto_map pretraining_tp return_dict is_decoder *_token_id *_token_ids *_token tokenizer*
*_tokenizer* vocab_file merge_file vocab_extra_ids special_tokens* chat_template num_logits_to_keep
is_*_config mtp_use_* mtp_transformer_layers mamba_hidden_act image_* vision_* video_* audio_*
patch_* spatial_* mm_* understand_* use_unified_vision_chunk residual_in_fp32
rescale_prenorm_residual time_step_* mamba_*_dtype mamba_chunk_size chunk_size mamba_conv_bias
mamba_proj_bias use_conv_bias conv_kernel mamba_d_conv d_conv *_conv_bias linear_conv_kernel_dim
use_mamba_kernels use_mambapy swiglu_limit* swiglu_alpha path paths *_path *_paths *_dir *_dirs
*_folder folder *_file *_files *_prefix *_filepath save load save_* load_* no_save* no_load* *_save
*_load ckpt_* *_ckpt_* *_ckpt dist_ckpt* keep_* resume* checkpoint checkpoint.* *checkpoint_path*
export_* exclude_from_loading most_recent_k finetune finetuning pretrained_* use_checkpoint_*
override_opt* auto_detect_ckpt_format *_upload* log log_* *_log_* *_log logger* logging* wandb*
*_wandb* tensorboard* tb_* *_tensorboard mlflow* comet* report_to print_* verbose* steps_per_print
timing_* timers* timer* profil* *_profil* nsys* record_* debug* use_nsys* use_pytorch_profiler nvtx*
disable_color* enable_one_logger *_logging dump* *_dump straggler* *_straggler* tracking_* monitor*
train_sync_interval progress_bar* name *_name names project* entity tags *_tags experiment
experiment_name experiment_id exp_name exp_dir job_* run_name description notes seed *_seed random_*
te_rng* *_rng_* *_rng trust_remote_code torchrun* strict* *_strict* data data_path data_paths
data_cache_path data_impl data_args_path data_sharding data_prefix data_parallel_random_init
data_files data_file data_source data_seed data_dir data_name dataset* train_data_path
valid_data_path test_data_path vision_data_path datasets dataloader* *_dataloader train_dataset*
eval_dataset* *_workers num_workers split splits shuffle* prefetch_factor persistent_workers pin_*
mmap* mock* eod* reset_* blend* text_column* streaming stage do_train do_eval do_predict template
max_samples preprocessing* overwrite_* eval_iters limit_val_batches limit_test_batches *_eval_*
eval_* *_eval val_* valid* skip_train test_mode test_* train_data* rdzv* master_* node_rank
local_rank rank ranks max_restarts tee redirects standalone role distributed_timeout* *timeout*
distributed_backend nccl_communicator_config_path init_timeout* port *_port host addr* ddp_timeout*
exit_* rerun_* check_for_nan* check_* iterations_to_skip calc_ft* simulate_* error_injection*
simulated_* ft_* enable_ft* nvrx* async_strategy use_gloo* one_logger* account partition constraint
time mem mem_per* exclusive ntasks* cpus_per* signal mail* output error open_mode requeue qos
nodelist exclude dependency comment reservation export wait* hint kill_on* container* network
unbuffered label segment distribution array chdir no_container* gpu_bind adlr_* bert_* biencoder_*
classes_fraction clone_scatter_* delay_grad_reduce dino_* img_* ict_* indexer_batch_size
indexer_log_interval inference_* iter_per_epoch lazy_* mask_* max_tokens_to_oom num_channels
num_classes onnx_safe openai_gelu output_bert_* query_in_block_prob retriever_* retro_* sample_rate
scatter_gather_* short_seq_prob swin_* titles_* use_mcore_models use_one_sent_docs
use_cpu_initialization consumed_* fp16_lm_cross_entropy head_lr_mult rl_*
async_tensor_model_parallel_allreduce tp_comm_bulk_* tp_comm_split_* tp_comm_overlap_*
tp_comm_atomic* tp_comm_bootstrap_backend calc_* cpu_offloading_activations cpu_offloading_weights
do_test do_validation filter_warnings fp4_recipe gpu_*_threshold granularity heartbeat_*
last_call_wait module mlp_chunks_for_prefill moe_deepep_num_sms moe_hybridep_num_sms muon_*
num_gpu_perf_* replication_* outer_dp_sharding_strategy preserve_fp32_weights report_time_*
runtime_time_unit spiky_* kitchen_* store_param_remainders termination_* throughput_window_size
manual_gc_eval transformer_pipeline_* aio_config amp_* autotuning_* comms_config compression_config
curriculum_* dataloader_drop_last elasticity_* eigenvalue_* flops_profiler_config global_rank
hybrid_engine nebula_* pld_* prescale_* gradient_predivide_factor zero_allow_* zero_enabled
zero_force_* weight_quantization_config use_data_before_expert_parallel_ use_node_local_storage
gradient_allreduce_op datastates_config disable_python_gc optimizer_params optimizer_legacy_fusion
grad_accum_dtype buffer_dtype *_timers activation_checkpointing_config pipeline
managed_gradient_accumulation bfloat16_config zero_config activation_func activation_func* _call_
_target_ _partial_ _args_ _recursive_ barrier_with_L1_time disable_bias_linear fp8_amax_* fp8_margin
fp8_interval fp8_wgrad framework batch_p2p_* cuda_device_max_connections pytorch_* omp_num_threads
ld_library_path pythonpath deallocate_* align_* average_in_collective
pad_buckets_for_high_nccl_busbw gradient_reduce_div_fusion config config_file *_config_file
hf_config* version recipe_name model_card* license language chunk_size_feed_forward
output_attentions output_hidden_states id2label label2id initial_scale_power allgather_partitions
reduce_scatter sub_group_size wall_clock_breakdown tensorboard csv_monitor _comment _description
plot_loss remove_unused_columns processor_type eot_tokens lora_alpha lora_dropout lora_target*
evals_per_epoch saves_per_epoch train_on_inputs loss_watchdog_* fsdp_state_dict_type
fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_cpu_ram_efficient_loading
fsdp_sync_module_states fsdp_use_orig_params state_dict_type auto_wrap_policy
transformer_layer_cls_to_wrap cpu_ram_efficient_loading sync_module_states
ddp_find_unused_parameters sample_backend max_new_tokens model_class include_kernels use_reentrant
gradient_checkpointing_kwargs compute_environment downcast_bf16 machine_rank main_training_function
same_network tpu_* use_cpu norm output_layer_parallelism hostfile launcher te_fp8_amax_*
te_fp8_margin accelerator enable_checkpointing *_sampler* max_epochs num_train_epochs num_epochs
benchmark enable_model_summary mcore_gpt pre_process post_process headscale transformer_block_type
attention_type normalize_attention_scores megatron_amp_o2 gradient_as_bucket_view start_step
async_mode implementation filter_fqns local_ranks_filter work_group workspace *_sink_level
disable_last_saving auto_continue_train prompt_template convert_to_hf runtime_env_json prompt_data
input_key label_key rm_* sglang_* advantage_estimator loss_type temperature torch_adam_is_fused
boi_token_index for_llm_compressor nccl_debug pythonwarnings no_check_for_nan* attn_out_bias
group_by_length special_tokens val_set_size hub_* micro_batch_eval* sample_packing_eff* mscale
mscale_all_dim deepspeed deepspeed_* token_type* type_vocab_size max_epoch* eval_strategy
save_strategy save_total_limit logging_* include_* bf16_full_eval ignore_* strict use_fast*
add_cross_attention layerdrop summary_* reorder_and_upcast_attn eoi_token_index
attn_temperature_tuning kda_* short_conv_kernel_size slow_but_exact n_ctx use_parallel_residual
_remove_final_layer_norm classifier_dropout linear_dt_* linear_a_log_* linear_allow_neg_eigval
use_bidirectional_attention boi_* position_bias_* memory_keys memory_snapshot* memory_breakdown
empty_cuda_cache progress_watchdog_interval data_per_class_fraction train_dataset eval_dataset
mock_dataset hf_dataset train_datasets eval_datasets total_epochs balance_batch balance_data
colocate update_weight_* num_rollout over_sampling_batch_size use_kl_loss use_tis use_slime_router
int4_params_rollout max_padding_length extra_vocab_size train_mode megatron_fsdp_version
calculate_per_token_loss nccl_nvls_enable gpt_j_residual use_bias_in_* mlp_multiple_of
n_samples_per_prompt num_steps_per_rollout rollout_function* rollout_max* rollout_temp* rollout_num*
rollout_shuffle rollout_stop* rollout_batch_size
"""
_SECTIONS = frozenset(
    """logger logging log exp_manager wandb tensorboard metrics profiling profiler tokenizer data
    dataset datasets dataloader lr_scheduler learning_rate_scheduler scheduler rng
    rerun_state_machine straggler nvrx_straggler ft fault_tolerance inprocess_restart tensor_inspect
    generation_config quantization_config rope_scaling rope_parameters comm debug lighteval general
    monitoring logging_config init_method custom_logger override data_stages validation validator
    checkpoint checkpoints checkpointing activation_func loss slurm env envs
    hooks callbacks sampler id2label label2id dataloader_config data_config
    metric experiment hydra defaults""".split()
)
"""Sections without any setting that changes the step time, but for names in `KEYS`."""


@cache
def _without_effect() -> re.Pattern[str]:
    return re.compile("|".join(map(translate, _NO_EFFECT.lower().split())))


def no_effect(path: tuple[str, ...]) -> bool:
    """Tell a setting that does not change the step time as prism models it, by its whole name."""
    words = [part.lower().lstrip("-").replace("-", "_") for part in path]
    if plain(words[-1]) in _KEY_OF or words[-1] in UNMODELLED:
        return False
    quiet = not _SECTIONS.isdisjoint(words[:-1]) or words[-1] in (*_SECTIONS, *FUSED)
    return quiet or _without_effect().match(words[-1]) is not None


NOTES = {
    "local_batch_size": "it is microbatches * microbatch_size",
    "data_parallel_replicate_degree": "dp is replicate * shard degree",
    "world_size": f"it is {' * '.join(GPUS)}",
    "np": f"it is {' * '.join(GPUS)}",
    "num_layers_per_virtual_pipeline_stage": "vpp is layers of a stage / these",
    "pipeline_parallel_layers_per_stage": "vpp is layers of a stage / these",
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
_KNOWN = {*_KEY_OF, *DIMENSIONS, "etp", "seqlen"}
_NOTE_OF = {plain(name): note for name, note in NOTES.items()}


def key_of(name: str) -> str | None:
    """Return the dotted key that another framework's name stands for."""
    return _KEY_OF.get(plain(name))


def understood(name: str) -> bool:
    """Tell a name of a key, in another framework or in a job, with its sections or without."""
    parts = name.split(".")
    return any(plain("".join(parts[k:])) in _KNOWN for k in range(len(parts)))


def note_of(name: str) -> str | None:
    """Return what to mind about another framework's name, where it does not count the same."""
    return _NOTE_OF.get(plain(name))


def value_of(key: str, word: str, choices: Iterable[str]) -> str | None:
    """Return the choice of a key that another framework's word stands for."""
    for value, words in VALUES.get(key, {}).items():
        if value in choices and plain(word) in map(plain, words):
            return value
    return None
