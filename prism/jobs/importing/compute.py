"""What a step computes and how: recomputation, formats, kernels, optimizer, experts; the run."""

from math import prod

from prism.jobs.dimensions import STAGE
from prism.jobs.importing.draft import OFF, Draft
from prism.jobs.importing.families import MEGATRON
from prism.jobs.importing.model import n_layers, preset_of, sequence_of
from prism.jobs.importing.settings import OTHER_MODELS, Setting
from prism.jobs.jobspec.othernames import FUSED, KEYS, UNMODELLED, plain

_ENGINE = {"NVTE_FUSED_ATTN": "cudnn", "NVTE_FLASH_ATTN": "fa2", "NVTE_UNFUSED_ATTN": "math"}
"""Variables by which Transformer Engine's attention is switched off, and what each stands for."""
_BF16 = ("bf16", "bfloat16", "torchbfloat16")
_OTHER_OPTIMIZERS = ("adafactor", "lion", "lamb", "lars", "sophia", "soap", "shampoo")


def read_recompute(d: Draft) -> None:
    """Find which activations are recomputed."""
    key = "parallelism.recompute"
    found = d.of_key(key)
    d.use("recompute_method", "activations_checkpoint_method", "checkpoint_num_layers",
          "recompute_num_layers", "activations_checkpoint_num_layers")  # fmt: skip
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
          "trainer.precision", "transformer_engine", "mixed_precision_param", "pipeline_dtype",
          "bfloat16_config", "autocast_dtype", "tf32")  # fmt: skip
    four = d.find("fp4", "fp4_format")
    eight = d.find("fp8", "fp8_format", "fp8_hybrid", "te_fp8_format")
    if four is not None or eight is not None or d.source.complete:
        d.use_key(key)
    if d.is_set("fp8") is False:  # NeMo: the other settings of FP8 have no effect then
        eight = None
    recipe = d.find("fp8_recipe") if eight is not None else None
    single = d.find("model.dtype") if d.source.format == "nanotron" else None
    if single is not None and "float8" in str(single.value):
        eight = eight or single
    if single is not None and "32" in str(single.value):
        d.leave(single, "training in float32")
    converters = d.find("model.converters", "converters")
    chosen = converters if converters and "mx" in str(converters.value) else None
    if four is not None and four.value not in OFF:
        d.give(key, "nvfp4", four)
    elif eight is not None and eight.value not in OFF:
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
    elif d.is_set("fp32_allreduce"):
        d.give(key, "fp32", d.find("fp32_allreduce"))
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
        on = compiled is not None and compiled.value not in OFF
        parts = d.value("compile.components")
        on = on and (parts is None or "model" in parts)
        if compiled is not None:
            d.give(key, "compiled" if on else "eager", compiled)
        else:
            d.assume(key, "eager", "torchtitan's default: compile is not set")
    elif d.source.format == "nanotron":
        d.assume(key, "nanotron", "a nanotron configuration")
    elif d.source.format == "trainer" or (trainer := _trainer(d)) is not None:
        trainer = _trainer(d)
        whole = d.find("torch_compile")
        if whole is not None and d.is_set("torch_compile"):
            d.give(key, "compiled", whole)
        elif trainer is not None:
            d.give(key, "transformers", trainer)
        else:
            d.assume(key, "transformers", "its modules, in transformers' Trainer")
    elif d.source.format == "huggingface":
        d.assume(key, "transformers", "the model's own modules; --set parallelism.framework=eager")
    elif d.source.format == "deepspeed":
        d.assume(key, "eager", "PyTorch without a compiler")
    elif d.values.get("parallelism.data_parallel") in ("fsdp", "hsdp"):
        d.assume(key, "megatron", "Megatron's modules, with fsdp too")
    found = d.find("sequence_parallel", "enable_sequence_parallel", "disable_sequence_parallel")
    mode = d.find("tp_mode")
    if d.source.format == "nanotron" and mode is not None and d.values.get("parallelism.tp"):
        d.give("parallelism.sequence_parallel", plain(str(mode.value)) == "reducescatter", mode)
    titan = d.source.format == "torchtitan"
    if (d.source.format in MEGATRON or titan) and d.values.get("parallelism.tp", 1) != 1:
        if found is not None:
            on = found.value not in OFF
            d.give("parallelism.sequence_parallel", on != ("disable" in found.path[-1]), found)
        elif d.source.format == "megatron":
            experts = bool(d.values.get("model.n_experts") or preset_of(d).get("n_experts"))
            why = "Megatron's default: no --sequence-parallel"
            why = "Megatron demands it with experts and tp" if experts else why
            d.assume("parallelism.sequence_parallel", experts, why)


def read_loss(d: Draft) -> None:
    """Find whether the cross entropy is one kernel."""
    found = d.find("cross_entropy_loss_fusion", "te_parallel_cross_entropy")
    d.use_key("parallelism.fused_loss")
    if found is not None and isinstance(found.value, bool):
        d.give("parallelism.fused_loss", found.value, found)


def read_unmodelled(d: Draft) -> None:
    """Note what changes the step time and is not in the job."""
    for name, why in UNMODELLED.items():
        found = d.find(name)
        if name in ("finetuning_type", "use_lora") and found and found.value in ("full", False):
            continue
        if name.startswith("lora") and d.is_set("use_lora") is False:
            continue
        one = name == "num_distributed_optimizer_instances" and found and found.value == 1
        if found is not None and found.value not in (*OFF, "auto", [], {}) and not one:
            d.leave(found, why)
    local = d.find("transformer_impl")
    if local is not None and local.value == "local":
        d.leave(local, "Megatron's own modules; prism has Transformer Engine's")
    for setting in d.source.settings:
        if setting.path[-1] in FUSED and setting.value is False and not d.source.complete:
            d.leave(setting, "kernels not fused")
        if OTHER_MODELS.fullmatch(setting.path[-1]) and isinstance(setting.value, dict):
            d.leave(setting, "a part beside the language model, left out")

    def harmless(setting: Setting) -> bool:
        whole = type(setting.value) is int and setting.value >= sequence_of(d)
        return setting.path[-1] == "attention_chunk_size" and whole

    d.unmodelled = [(setting, why) for setting, why in d.unmodelled if not harmless(setting)]


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
        listed = isinstance(found.value, list) and "flash" in str(found.value)  # of NeoX
        word = "flash" if found.value is True or listed else found.value
        value = d.choice("attention", word, choices)
        hopper = d.values.get("cluster.device") in ("h100", "h200")
        if value == "fa2" and hopper and word == "flash":
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
    if graphs is not None and graphs.value not in OFF and d.values.get("parallelism.ep", 1) > 1:
        d.give("parallelism.cuda_graphs", True, graphs)
    if d.source.complete and (graphs is None or graphs.value in OFF):
        d.use("cuda_graph_scope", "cuda_graph_warmup_steps")
    balanced = d.find("moe_router_force_load_balancing", "moe_force_load_balance")
    if d.values.get("parallelism.ep", 1) == 1:
        for key in ("expert_dispatch", "expert_tp", "expert_capacity", "expert_overlap"):
            d.use_key(f"parallelism.{key}")
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
    ranks = prod(d.values.get(f"parallelism.{name}", 1) for name in ("dp", *STAGE))
    if whole is None and ranks // d.values.get("parallelism.tp", 1) % d.values["parallelism.ep"]:
        if ranks % d.values["parallelism.ep"] == 0:
            d.assume("parallelism.expert_tp", 1, "not in the file; ep fits with no other")
    if whole is not None and whole.value != d.values.get("parallelism.tp", 1):
        d.give("parallelism.expert_tp", whole.value, whole)
    if balanced is not None and d.is_set("moe_router_force_load_balancing"):
        d.give("parallelism.expert_imbalance", 1, balanced)
    capacity = d.find("moe_expert_capacity_factor", "moe_train_capacity_factor")
    if capacity is not None and isinstance(capacity.value, int | float) and capacity.value > 0:
        d.give("parallelism.expert_capacity", capacity.value, capacity)
    if d.is_set("overlap_moe_expert_parallel_comm"):
        d.give("parallelism.expert_overlap", True, d.find("overlap_moe_expert_parallel_comm"))


_SAVES = ("checkpointinterval", "everyntrainsteps", "savesteps", "checkpointfactor")
"""Names by which checkpoints are written without another setting."""


def read_run(d: Draft) -> None:
    """Find how long the run is, and its checkpoints."""
    steps = d.size("train_iters", "max_steps", "training.steps", "training_steps", "train_steps",
                   "iterations", least=0)  # fmt: skip
    samples, tokens = d.find("train_samples"), d.size("train_tokens")
    length = sequence_of(d)
    whole = d.values.get("parallelism.global_batch", 1)
    longest = steps.value * whole * length if steps is not None else 0
    if tokens is not None and (not longest or tokens.value < longest):
        d.give("run.tokens", tokens.value, tokens)
    elif steps is not None and steps.value > 0:
        d.give("run.steps", steps.value, steps)
    elif (
        samples is not None
        and isinstance(samples.value, int | float)
        and samples.value * length > 0
    ):
        d.give("run.tokens", int(samples.value) * length, samples)
    every = d.find("save_interval", "save_steps", "checkpoint.interval", "checkpoint_interval",
                   "checkpoint_factor", "every_n_train_steps")  # fmt: skip
    on = d.find("checkpoint.enable", "checkpoint.enable_checkpoint")
    always = every is not None and plain(every.path[-1]) in _SAVES
    saved = on.value not in OFF if on else d.has("save") or always
    if saved and every is not None and isinstance(every.value, int) and every.value > 0:
        block: dict[str, int | str] = {"interval_steps": every.value}
        if d.is_set("async_save") or d.value("async_mode") in ("async", "async_with_pinned_mem"):
            block["mode"] = "async"
        d.give("run.checkpoint", block, every, d.find("async_save", "async_mode"))
    interval = d.find("eval_interval", "eval_steps", "validation.freq", "val_check_interval")
    if interval is not None and d.value("eval_iters", "limit_val_batches") != 0:
        off = d.is_set("validation.enabled") is False or d.is_set("validation.enable") is False
        never = isinstance(interval.value, int | float) and interval.value < 0
        if not off and not never and interval.value not in OFF:
            why = "what one takes is not in the file; write run.evaluation: {interval_steps: "
            d.leave(interval, f"{why}{interval.value}, duration: 2min}}")
