"""The model block: sizes, experts, attention; a preset's name where its sizes agree."""

import ast
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.draft import Draft
from prism.jobs.importing.settings import Setting
from prism.jobs.jobspec.blocks import ModelBlock
from prism.jobs.jobspec.othernames import KEYS, plain
from prism.jobs.jobspec.presets import PRESETS

MEGATRON = ("megatron", "nemo", "bridge")
_GATED = ("swiglu", "geglu", "silu", "fastswiglu", "fastgeglu", "reglu", "llama", "gelupytorchtanh")
_ROTARY = ("rope", "mrope", "yarn", "rotary")
_UNROTATED_FAMILIES = ("gpt2", "opt", "bloom", "mpt", "nemotronh")
_UNGATED_FAMILIES = ("gpt2", "gptneox", "gptj", "bloom", "opt", "falcon", "mpt", "phi")
# vocabularies by words in tokenizers' names, without padding: of GPT-2, Llama 2 and GPT-NeoX-20B
_VOCABULARIES = {"gpt2": 50_257, "llama2tokenizer": 32_000, "20btokenizer": 50_277}
_SIZES = ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_EXPERTS = ("n_experts", "experts_per_token", "expert_ffn_size")


def preset_of(d: Draft) -> dict[str, Any]:
    """Give the sizes of the named model, if there is one."""
    return PRESETS.get(d.values.get("model.name", ""), {})


def n_layers(d: Draft) -> int:
    """Give the layers of the model, 0 where they are not known."""
    layers = d.values.get("model.n_layers") or preset_of(d).get("n_layers", 0)
    return layers if isinstance(layers, int) else 0


def read_model(d: Draft) -> None:
    """Fill in the model of a draft."""
    named = _named(d)
    for key in ("n_layers", "hidden_size", "n_heads", "seq_len"):
        d.take(f"model.{key}")
        value = d.values.get(f"model.{key}", 1)
        if type(value) is not int or value < 1:
            given = d.given[f"model.{key}"]
            raise PrismError(
                f"{d.source.place(given.line)}: {given.shown}: model.{key}: expected a whole "
                "number, at least 1; correct it"
            )
    context = d.of_key("model.seq_len")
    if d.source.format == "huggingface" and context is not None:
        why = "the longest context; give that of training: --set model.seq_len=N"
        d.assume("model.seq_len", context.value, why, context)
    if "model.n_layers" not in d.values or "model.hidden_size" not in d.values:
        if named is None:
            return
        setting, preset = named
        d.give("model.name", preset, setting)
        return
    _read_heads(d)
    _read_feed_forward(d)
    _read_positions(d)
    _read_experts(d)
    _read_latents(d)
    _read_windows(d)
    for key in ("layer_pattern", "mamba_heads", "mamba_head_size", "mamba_groups",
                "mamba_state_size"):  # fmt: skip
        if key == "layer_pattern" or "model.layer_pattern" in d.values:
            d.take(f"model.{key}")
    _read_embeddings(d)
    _match(d, named[1] if named else None)


def _named(d: Draft) -> tuple[Setting, str] | None:
    """Give the preset whose name is in a setting that names a model, and the setting."""
    family = d.value("model.name")
    for name in ("flavor", "hf_model_id", "hf_path", "hf_assets_path", "pretrained_model_name",
                 "_name_or_path", "_factory_", "recipe", "_target_", "model.model_name", "model",
                 "tokenizer_model", "tokenizer_name_or_path", "tokenizer_path"):  # fmt: skip
        for setting in reversed(d.by_name.get(plain(name), [])):
            if not isinstance(setting.value, str):
                continue
            text = setting.value if name != "flavor" else f"{family}{setting.value}"
            if (preset := preset_in(text)) is not None:
                d.used |= {setting.path, *(s.path for s in d.by_name.get("modelname", []))}
                return setting, preset
    return None


def preset_in(text: str) -> str | None:
    """Give the preset whose name is in a text, however it is spelt; the longest one."""
    word = plain(text.replace("/", " ").replace("_", "")).replace("meta", "")
    word = word.replace("llama31", "llama3").replace("llama33", "llama3")
    if "deepseekv3" in word and ("flash" not in word and "lite" not in word and "16b" not in word):
        return "deepseek-v3"
    found = [p for p in PRESETS if plain(p) in word and p != "deepseek-v3"]
    return max(found, key=len) if found else None


def _read_heads(d: Draft) -> None:
    kv, heads = d.of_key("model.n_kv_heads"), d.values.get("model.n_heads")
    grouped = d.is_set("group_query_attention")
    if kv is not None and (grouped is not False) and d.source.format == "megatron":
        grouped = grouped or not d.by_name.get("worldsize")  # its log has all arguments
    if kv is not None and (grouped or d.source.format != "megatron"):
        d.give("model.n_kv_heads", kv.value, kv)
    elif heads is not None:
        d.assume("model.n_kv_heads", heads, "as many as attention heads, without query groups")
    width = d.count("kv_channels", "head_dim")
    hidden = d.values.get("model.hidden_size")
    if width is not None and heads and width.value * heads != hidden and _latent(d) is None:
        d.give("model.head_size", width.value, width)


def _read_feed_forward(d: Draft) -> None:
    hidden, megatron = d.values["model.hidden_size"], d.source.format in MEGATRON
    act = d.find("swiglu", "gated_linear_unit", "mlp_type", "activation", "hidden_act",
                 "activation_function")  # fmt: skip
    kind = plain(str(d.value("model_type") or ""))
    gated = False
    if act is None:
        why = "Megatron's default: no --swiglu" if megatron else "its family of models has it"
        gated = not megatron and kind not in _UNGATED_FAMILIES
        d.assume("model.gated_mlp", gated, why)
    else:
        word = plain(str(act.value))
        gated = act.value is True or (word in _GATED and kind not in _UNGATED_FAMILIES)
        d.give("model.gated_mlp", gated, act)
    if not d.take("model.ffn_size"):
        # Megatron-LM: 4 h, with --swiglu two thirds of that in multiples of 64
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated and megatron else 4 * hidden
        d.assume("model.ffn_size", ffn, "Megatron's default from hidden_size")


def _read_positions(d: Draft) -> None:
    """Find out whether positions rotate queries and keys."""
    kind = d.find("position_embedding_type")
    flag = d.find("use_rotary_position_embeddings")
    if kind is not None:
        d.give("model.rope", plain(str(kind.value)) in _ROTARY, kind)
    elif flag is not None:
        d.give("model.rope", bool(d.is_set(flag.path[-1])), flag)
    elif d.source.format in MEGATRON:
        d.assume("model.rope", False, "Megatron's default: learned positions")
    else:
        family = plain(str(d.value("model_type") or ""))
        rope = family not in _UNROTATED_FAMILIES and not d.is_set("alibi")
        d.assume("model.rope", rope, "its family of models has it" if rope else "its family's")


def _read_experts(d: Draft) -> None:
    experts = d.count("n_experts", *KEYS["model.n_experts"])
    if experts is None or experts.value < 2:
        return
    d.give("model.n_experts", experts.value, experts)
    if not d.take("model.experts_per_token"):
        d.assume("model.experts_per_token", 2, "Megatron's default of --moe-router-topk")
    d.take("model.expert_ffn_size")
    width = d.values.get("model.expert_ffn_size") or d.values["model.ffn_size"]
    shared = d.count("n_shared_experts", "num_shared_experts")
    total = d.count("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    if shared is not None and shared.value:
        d.give("model.n_shared_experts", shared.value, shared)
    elif total is not None and total.value and type(width) is int and width > 0:
        d.give("model.n_shared_experts", max(1, round(total.value / width)), total)
    d.take("model.n_dense_layers", "first_k_dense_replace")
    every = d.find("moe_layer_freq", "interleave_moe_layer_step", "decoder_sparse_step")
    if every is None:
        return
    layers = layer_flags(every.value)
    if isinstance(layers, int):
        if layers > 1:
            d.give("model.moe_layer_interval", layers, every)
    elif layers is not None and 1 in layers:
        dense = layers.index(1)
        if all(layers[dense:]):
            d.give("model.n_dense_layers", dense, every)
        else:
            gap = layers[dense + 1 :].index(1) + 1 if 1 in layers[dense + 1 :] else 1
            d.give("model.moe_layer_interval", gap, every)


def layer_flags(value: Any) -> int | list[int] | None:
    """Read ``1``, ``[0, 1, 1]`` or ``([0]*3+[1]*58)``: which layers have experts."""
    if isinstance(value, int | list):
        return value
    try:
        found: int | list[int] = _flags(ast.parse(str(value).strip(), mode="eval").body)
        return found
    except (SyntaxError, ValueError):
        return None


def _flags(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_flags(item) for item in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _flags(node.left), _flags(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and 0 <= right <= 10_000:
            return left * right
    raise ValueError("not a pattern of layers")


def _latent(d: Draft) -> int | None:
    """Give the width of the latent of keys and values, where attention has one."""
    if d.source.format in MEGATRON and not d.is_set("multi_latent_attention"):
        return None
    return d.whole("kv_lora_rank")


def _read_latents(d: Draft) -> None:
    if _latent(d) is None:
        return
    rope = d.count(*KEYS["model.rope_head_size"])
    plain_part = d.count("qk_head_dim", "qk_nope_head_dim")
    for key in ("q_lora_rank", "kv_lora_rank", "rope_head_size", "v_head_size"):
        d.take(f"model.{key}")
    if rope is not None and plain_part is not None:
        d.give("model.head_size", plain_part.value + rope.value, plain_part, rope)
    d.values["model.n_kv_heads"] = d.values["model.n_heads"]


def _read_windows(d: Draft) -> None:
    window = d.of_key("model.window")
    if window is None or d.is_set("use_sliding_window") is False:
        return
    value = window.value[0] if isinstance(window.value, list | tuple) else window.value
    if type(value) is not int or value < 1 or value >= d.values.get("model.seq_len", 0):
        return
    d.give("model.window", value, window)
    kinds, every = d.value("layer_types"), d.of_key("model.full_attention_interval")
    if isinstance(kinds, list) and "full_attention" in kinds:
        d.give("model.full_attention_interval", kinds.index("full_attention") + 1,
               d.find("layer_types"))  # fmt: skip
    elif every is not None and isinstance(every.value, int):
        d.give("model.full_attention_interval", every.value, every)


def _read_embeddings(d: Draft) -> None:
    untied = d.find("untie_embeddings_and_output_weights", "no_weight_tying")
    tied = d.find("share_embeddings_and_output_weights", "tie_word_embeddings")
    if untied is not None or tied is not None:
        opposite = untied is not None
        value = d.is_set((untied or tied).path[-1])  # type: ignore[union-attr]
        d.give("model.tied_embeddings", value is not opposite, untied or tied)
    else:
        megatron = d.source.format in MEGATRON
        why = "Megatron's default" if megatron else "most models of this kind"
        d.assume("model.tied_embeddings", megatron, why)
    padded = d.count("padded_vocab_size", "pad_vocab_size_to")
    if padded is not None:
        d.give("model.vocab_size", padded.value, padded)
        return
    tp = d.whole("tensor_model_parallel_size") or 1
    each = max(1, (d.whole("make_vocab_size_divisible_by") or 128) * tp)
    found, size, kind = d.count("vocab_size"), None, None
    for setting in (d.find(name) for name in ("vocab_file", "tokenizer_type", "tokenizer.type")):
        word = plain(str(setting.value)) if setting else ""
        known = next((n for text, n in _VOCABULARIES.items() if text in word), None)
        if known is not None and size is None:
            size, kind = known, setting
    if size is None and d.has("merge_file"):  # of the BPE tokenizer of GPT-2
        size = _VOCABULARIES["gpt2"]
    size = found.value if found else size
    if size is None:
        return
    if d.source.format in MEGATRON:
        size = -(-size // each) * each  # make-vocab-size-divisible-by times tp, as Megatron pads
    if found:
        d.give("model.vocab_size", size, found)
    else:
        d.assume("model.vocab_size", size, "of the tokenizer, padded", kind)


def _match(d: Draft, named: str | None) -> None:
    """Write a preset's name for sizes that agree with it."""
    own = {k.partition(".")[2]: v for k, v in d.values.items() if k.startswith("model.")}

    def agrees(preset: dict[str, Any]) -> bool:
        first = all(own.get(k) == preset.get(k) for k in ("n_layers", "hidden_size", "n_heads"))
        if not first or bool(own.get("n_experts")) != bool(preset.get("n_experts")):
            return False
        keys = (*_EXPERTS, "n_kv_heads") if own.get("n_experts") else ("ffn_size", "n_kv_heads")
        keys = (*keys, "gated_mlp", "window", "layer_pattern", "kv_lora_rank")
        same = all(
            own[k] == preset.get(k, own[k] if k in _EXPERTS else 0) for k in keys if k in own
        )
        if "expert_ffn_size" not in own and own.get("n_experts") and "model.ffn_size" in d.given:
            same = same and own["ffn_size"] == preset["expert_ffn_size"]
        near = "vocab_size" not in own or abs(own["vocab_size"] / preset["vocab_size"] - 1) < 0.02
        return same and near

    # sizes that many models have, with a feed-forward part of four widths, name none of them
    plain_width = own.get("ffn_size") == 4 * own["hidden_size"] and "vocab_size" not in own
    found = [name for name, preset in PRESETS.items() if agrees(preset)]
    found = [name for name in found if name == named or not plain_width]
    if not found:
        if "vocab_size" not in own and named is not None:
            d.assume("model.vocab_size", PRESETS[named]["vocab_size"], f"that of {named}")
        return
    name = named if named in found else found[0]
    preset = PRESETS[name]
    sizes = [d.given[f"model.{k}"] for k in ("n_layers", "hidden_size", "n_heads")]
    d.values["model.name"] = name
    d.given["model.name"] = sizes[0]._replace(
        key="model.name", value=name, shown=", ".join(g.shown for g in sizes)
    )
    if len(found) > 1 and "vocab_size" not in own and named is None:
        others = ", ".join(n for n in found if n != name)
        d.assume("model.name", name, f"sizes agree; so do those of {others}, of another vocabulary")
    for key, value in own.items():
        # a preset has the vocabulary as its checkpoint pads it
        default = ModelBlock.model_fields[key].default
        if key == "vocab_size" or value == preset.get(key, default):
            del d.values[f"model.{key}"]
            d.assumed.pop(f"model.{key}", None)
        elif f"model.{key}" in d.assumed and d.source.format not in MEGATRON:
            del d.values[f"model.{key}"]
            del d.assumed[f"model.{key}"]
