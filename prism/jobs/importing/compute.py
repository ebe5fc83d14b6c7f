"""What a step computes and how: recomputation, formats, kernels, optimizer, experts; the run."""

from prism.jobs.importing.draft import Draft
from prism.jobs.importing.model import MEGATRON, n_layers, preset_of
from prism.jobs.importing.settings import Setting
from prism.jobs.jobspec.othernames import KEYS, plain

UNMODELLED = {
    "tp_comm_overlap ub_tp_comm_overlap": "tensor-parallel collectives are exposed in prism",
    "enable_async_tensor_parallel": "tensor-parallel collectives are exposed in prism",
    "tp_linear_async_communication": "tensor-parallel collectives are exposed in prism",
    "cpu_offloading cpu_offload optimizer_cpu_offload enable_cpu_offload": "offloading to the CPU",
    "activation_offload fine_grained_activation_offloading": "offloading to the CPU",
    "mtp_num_layers num_nextn_predict_layers": "multi-token prediction, about a layer each",
    "moe_shared_expert_overlap": "shared experts beside the all-to-all",
    "delay_wgrad_compute defer_embedding_wgrad_compute": "weight gradients put off",
    "num_distributed_optimizer_instances": "an optimizer sharded over part of the replicas",
    "fp8_param_gather fp8_param": "parameters gathered in FP8",
    "enable_fsdp_float8_all_gather": "parameters gathered in FP8",
    "fp8_multi_head_attention fp8_dot_product_attention": "attention in FP8",
    "manual_gc manual_gc_interval gc_freq": "garbage collection of all ranks at the same step",
    "lora peft lora_rank": "adapters: only part of the weights has gradients",
}
"""Settings that change the step time and are not modelled, each with what it does."""
_ENGINE = {"NVTE_FUSED_ATTN": "cudnn", "NVTE_FLASH_ATTN": "fa2", "NVTE_UNFUSED_ATTN": "math"}
"""Variables by which Transformer Engine's attention is switched off, and what each stands for."""
_BF16 = ("bf16", "bfloat16", "torchbfloat16")
_OTHER_OPTIMIZERS = ("adafactor", "lion", "lamb", "lars", "sophia", "soap", "shampoo")
_OFF = (False, 0, None, "none", "None", "off", "disabled", "")


def read_recompute(d: Draft) -> None:
    """Find which activations are recomputed."""
    key = "parallelism.recompute"
    found = d.of_key(key)
    d.use("recompute_method", "activations_checkpoint_method", "checkpoint_num_layers")
    if found is None:
        return
    word, option = plain(str(found.value)), d.find("selective_ac_option")
    if d.source.format == "torchtitan" and word == "selective":
        special = d.values.get("model.n_experts") or preset_of(d).get("n_experts")
        if special or preset_of(d).get("kv_lora_rank"):
            d.assume(key, "full", "nearest to selective, which is not modelled for experts", found)
        elif option is not None and option.value not in ("op", "1"):
            d.assume(key, "selective", f"nearest to every {option.value} layers", option)
        else:
            d.give(key, "selective", found)
        return
    if word in ("selective", "selectivelayers") or found.path[-1].endswith("recompute-activations"):
        d.give(key, "none", found)
        extra = d.find("recompute_modules")
        if extra is not None and extra.value not in ([], "core_attn", ["core_attn"]):
            d.leave(extra, "modules recomputed one by one")
        return
    value = "full" if found.value is True else d.choice("recompute", found.value, ("full", "none"))
    if value is None or found.value is False:
        return
    number = d.count("recompute_num_layers", "activations_checkpoint_num_layers")
    method = d.value("recompute_method", "activations_checkpoint_method")
    layers = n_layers(d)
    chunks = d.values.get("parallelism.pp", 1) * d.values.get("parallelism.vpp", 1)
    if value == "full" and method == "block" and number and layers:
        share = number.value * chunks / layers
        if share < 1:
            value = "full" if share >= 0.5 else "none"
            d.assume(key, value, f"nearest to {number.value} of {layers / chunks:g} layers", number)
            return
    d.give(key, value, found)


def read_precision(d: Draft) -> None:
    """Find the number formats of products and gradients."""
    key, choices = "parallelism.precision", ("bf16", "fp8", "fp8_block", "mxfp8", "nvfp4")
    d.use("bf16", "fp16", "bf16.enabled", "fp16.enabled", "fp16.fp16", "params_dtype",
          "trainer.precision", "transformer_engine")  # fmt: skip
    four = d.find("fp4", "fp4_format")
    eight = d.find("fp8", "fp8_format", "fp8_hybrid")
    if d.is_set("fp8") is False:  # NeMo: the other settings of FP8 have no effect then
        eight = None
    recipe = d.find("fp8_recipe")
    converters = d.find("model.converters", "converters")
    chosen = converters if converters and "mx" in str(converters.value) else None
    if four is not None and four.value not in _OFF:
        d.give(key, "nvfp4", four)
    elif eight is not None and eight.value not in _OFF:
        value = d.choice("precision", recipe.value, choices) if recipe else "fp8"
        d.give(key, value or "fp8", *((recipe,) if recipe else ()), eight)
    elif chosen is not None:
        d.give(key, "mxfp8", chosen)
    elif converters is not None and "float8" in str(converters.value):
        d.give(key, "fp8", converters)
    _read_gradients(d)


def _read_gradients(d: Draft) -> None:
    key = "parallelism.gradient_dtype"
    short, long = d.find("grad_reduce_in_bf16"), d.find("grad_reduce_in_fp32")
    named = d.find("mixed_precision_reduce", "reduce_dtype", "communication_data_type",
                   "grad_sync_dtype", "grad_reduce_dtype", "main_grads_dtype")  # fmt: skip
    if short is not None and d.is_set("grad_reduce_in_bf16"):
        d.give(key, "bf16", short)
    elif d.is_set("accumulate_allreduce_grads_in_fp32"):
        d.give(key, "fp32", d.find("accumulate_allreduce_grads_in_fp32"))
    elif d.is_set("accumulate_grad_in_fp32") is not None:
        on = d.is_set("accumulate_grad_in_fp32")
        d.give(key, "fp32" if on else "bf16", d.find("accumulate_grad_in_fp32"))
    elif long is not None:
        d.give(key, "fp32" if d.is_set("grad_reduce_in_fp32") else "bf16", long)
    elif named is not None:
        d.give(key, "fp32" if "32" in str(named.value) else "bf16", named)
    elif d.source.format == "deepspeed" or d.value("zero_optimization.stage") is not None:
        d.assume(key, "bf16", "DeepSpeed reduces gradients in the format of training")
    elif d.source.format == "megatron" and d.is_set("fp16"):
        d.assume(key, "bf16", "Megatron reduces gradients in fp16 without a flag for fp32")


def read_kernels(d: Draft) -> None:
    """Find what launches the kernels, and sequence parallelism."""
    key = "parallelism.framework"
    compiled = d.find("compile.enable", "training.compile")
    if d.source.format == "torchtitan":
        on = compiled is not None and compiled.value not in _OFF
        parts = d.value("compile.components")
        on = on and (parts is None or "model" in parts)
        if compiled is not None:
            d.give(key, "compiled" if on else "eager", compiled)
        else:
            d.assume(key, "eager", "torchtitan's default: compile is not set")
    elif d.source.format == "nanotron":
        d.assume(key, "nanotron", "a nanotron configuration")
    elif (trainer := _trainer(d)) is not None:
        whole = d.find("torch_compile")
        if whole is not None and d.is_set("torch_compile"):
            d.give(key, "compiled", whole)
        else:
            d.give(key, "transformers", trainer)
    elif d.source.format == "huggingface":
        d.assume(key, "transformers", "the model's own modules; --set parallelism.framework=eager")
    elif d.source.format == "deepspeed":
        d.assume(key, "eager", "PyTorch without a compiler")
    elif d.values.get("parallelism.data_parallel") in ("fsdp", "hsdp"):
        d.assume(key, "megatron", "Megatron's modules, with fsdp too")
    found = d.find("sequence_parallel", "disable_sequence_parallel")
    mode = d.find("tp_mode")
    if d.source.format == "nanotron" and mode is not None and d.values.get("parallelism.tp"):
        d.give("parallelism.sequence_parallel", plain(str(mode.value)) == "reducescatter", mode)
    if d.source.format in MEGATRON and d.values.get("parallelism.tp", 1) != 1:
        if found is not None:
            on = found.value not in _OFF
            d.give("parallelism.sequence_parallel", on != ("disable" in found.path[-1]), found)
        elif d.source.format == "megatron":
            why = "Megatron's default: no --sequence-parallel"
            d.assume("parallelism.sequence_parallel", False, why)
    for names, why in UNMODELLED.items():
        for name in names.split():
            found = d.find(name)
            if found is not None and found.value not in _OFF:
                d.leave(found, why)


def _trainer(d: Draft) -> Setting | None:
    """Give a setting that only the Trainer of Hugging Face's transformers has."""
    found = d.find("per_device_train_batch_size")
    if found is not None or d.source.format != "deepspeed":
        return found
    return next((s for s in d.source.settings if s.value == "auto"), None)


def read_attention(d: Draft) -> None:
    """Find the implementation of attention."""
    key, choices = "parallelism.attention", ("cudnn", "fa2", "fa3", "fa4", "math")
    off = {name for name in _ENGINE if d.value(name) == 0}
    found = d.of_key(key)
    if found is not None:
        word = "flash" if found.value is True else found.value
        value = d.choice("attention", word, choices)
        if value == "fa2" and d.values["cluster.device"] in ("h100", "h200") and word == "flash":
            d.assume(key, "fa2", "flash; with FlashAttention 3 installed: --set " + key + "=fa3",
                     found)  # fmt: skip
        elif value is not None:
            d.give(key, value, found)
    elif off and d.source.format in MEGATRON:
        left = next((_ENGINE[name] for name in _ENGINE if name not in off), None)
        if left is not None:
            d.give(key, left, *(d.find(name) for name in _ENGINE if name in off))


def read_optimizer(d: Draft) -> None:
    """Find the optimizer, and the number format of its states."""
    key, dtype = "parallelism.optimizer", "parallelism.optimizer_dtype"
    found = d.find(*KEYS[key], "optim.config.optimizer", "optimizer", "optim")
    word = plain(str(found.value)) if found is not None else "adam"
    if "muon" in word or word == "sgd":
        d.give(key, "muon" if "muon" in word else "sgd", found)
        if word == "sgd" and d.value("sgd_momentum", "momentum"):
            d.leave(d.find("sgd_momentum", "momentum"), "momentum is one more state")
    elif found is not None and isinstance(found.value, str) and word in _OTHER_OPTIMIZERS:
        d.assume(key, "adamw", f"nearest to {found.value}, which is not modelled", found)
    states = d.of_key(dtype)
    if states is not None and (states.value is True or plain(str(states.value)) in _BF16):
        if states.value is True:
            d.give(dtype, "bf16", states)
        else:
            d.assume(dtype, "bf16", "nearest: without a master copy of the weights", states)
    elif d.source.format == "torchtitan" and plain(str(d.value("training.dtype"))) in _BF16:
        d.give(dtype, "bf16", d.find("training.dtype"))


def read_dispatch(d: Draft) -> None:
    """Find how tokens get to their experts, and what launches their kernels."""
    graphs = d.of_key("parallelism.cuda_graphs")
    if graphs is not None and graphs.value not in _OFF and d.values.get("parallelism.ep", 1) > 1:
        d.give("parallelism.cuda_graphs", True, graphs)
    balanced = d.find("moe_router_force_load_balancing")
    if d.values.get("parallelism.ep", 1) == 1:
        for key in ("expert_dispatch", "expert_tp", "expert_capacity", "expert_overlap"):
            d.use(*KEYS[f"parallelism.{key}"])
        return
    kind = d.find("moe_token_dispatcher_type")
    backend = d.find("moe_flex_dispatcher_backend")
    key = "parallelism.expert_dispatch"
    if d.is_set("moe_enable_deepep") or d.is_set("use_turbo_deepep"):
        d.give(key, "deepep", d.find("moe_enable_deepep", "use_turbo_deepep"))
    elif kind is not None and kind.value == "flex" and backend is not None:
        d.give(key, "hybridep" if "hybrid" in str(backend.value) else "deepep", backend, kind)
    elif kind is not None and kind.value in ("alltoall", "alltoall_seq"):
        d.give(key, "alltoall", kind)
    elif kind is not None:
        d.assume(key, "alltoall", f"nearest to {kind.value}, which is not modelled", kind)
    whole = d.of_key("parallelism.expert_tp")
    if whole is not None and whole.value != d.values.get("parallelism.tp", 1):
        d.give("parallelism.expert_tp", whole.value, whole)
    if balanced is not None and d.is_set("moe_router_force_load_balancing"):
        d.give("parallelism.expert_imbalance", 1, balanced)
    capacity = d.find("moe_expert_capacity_factor")
    if capacity is not None and isinstance(capacity.value, int | float) and capacity.value > 0:
        d.give("parallelism.expert_capacity", capacity.value, capacity)
    if d.is_set("overlap_moe_expert_parallel_comm"):
        d.give("parallelism.expert_overlap", True, d.find("overlap_moe_expert_parallel_comm"))


def read_run(d: Draft) -> None:
    """Find how long the run is, and its checkpoints."""
    steps = d.find("train_iters", "max_steps", "training.steps", "training_steps", "train_steps",
                   "iterations")  # fmt: skip
    samples = d.find("train_samples")
    length = d.values.get("model.seq_len") or preset_of(d).get("seq_len", 0)
    if steps is not None and isinstance(steps.value, int | float) and steps.value > 0:
        d.give("run.steps", int(steps.value), steps)
    elif samples is not None and isinstance(samples.value, int | float) and samples.value > 0:
        d.give("run.tokens", int(samples.value) * length, samples)
    every = d.find("save_interval", "checkpoint.interval", "every_n_train_steps")
    on = d.find("checkpoint.enable", "checkpoint.enable_checkpoint")
    saved = on.value not in _OFF if on else d.has("save")
    if saved and every is not None and isinstance(every.value, int) and every.value > 0:
        block: dict[str, int | str] = {"interval_steps": every.value}
        if d.is_set("async_save") or d.value("async_mode") in ("async", "async_with_pinned_mem"):
            block["mode"] = "async"
        d.give("run.checkpoint", block, every, d.find("async_save", "async_mode"))
    interval = d.find("eval_interval", "validation.freq", "val_check_interval")
    if interval is not None and d.value("eval_iters", "limit_val_batches") != 0:
        off = d.is_set("validation.enabled") is False or d.is_set("validation.enable") is False
        if not off and interval.value not in _OFF:
            why = "what one takes is not in the file; write run.evaluation: {interval_steps: "
            d.leave(interval, f"{why}{interval.value}, duration: 2min}}")
