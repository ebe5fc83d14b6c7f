"""The model block: sizes, experts, attention; a preset's name where its sizes agree."""

from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.draft import OFF, Draft
from prism.jobs.importing.families import (
    DEFAULTS,
    GATED,
    GATED_ATTENTION,
    MEGATRON,
    REFUSED,
    REFUSED_SETTINGS,
    ROTARY,
    SPARSE,
    TIED_FAMILIES,
    UNGATED,
    UNGATED_FAMILIES,
    UNROTATED_FAMILIES,
    VOCABULARIES,
)
from prism.jobs.importing.layerkinds import plain_type, read_layers
from prism.jobs.importing.recurrent import read_recurrent
from prism.jobs.importing.settings import Setting
from prism.jobs.jobspec.blocks import ModelBlock
from prism.jobs.jobspec.othernames import RANKS, plain
from prism.jobs.jobspec.presets import PRESETS

MOST_LAYERS = 10_000
SEQUENCE = 4096
"""Tokens of a sequence where only a model's longest context is known: an assumption, that of
pre-training of Qwen3, DeepSeek-V3 and Kimi K2."""


def preset_of(d: Draft) -> dict[str, Any]:
    """Give the sizes of the named model, if there is one."""
    return PRESETS.get(d.values.get("model.name", ""), {})


def n_layers(d: Draft) -> int:
    """Give the layers of the model, 0 where they are not known."""
    layers = d.values.get("model.n_layers") or preset_of(d).get("n_layers", 0)
    return layers if isinstance(layers, int) else 0


def sequence_of(d: Draft) -> int:
    """Give the tokens of a sequence, 0 where they are not known."""
    length = d.values.get("model.seq_len") or preset_of(d).get("seq_len", 0)
    return length if isinstance(length, int) else 0


def read_model(d: Draft) -> None:
    """Fill in the model of a draft; one with layers that no table of ops is for is refused."""
    _check_family(d)
    named = _named(d)
    _read_titan(d)
    for key in ("n_layers", "hidden_size", "n_heads", "seq_len"):
        if f"model.{key}" not in d.values:
            d.take(f"model.{key}")
        value = d.values.get(f"model.{key}", 1)
        if type(value) is not int or value < 1 or (key == "n_layers" and value > MOST_LAYERS):
            most = f" and at most {MOST_LAYERS}" * (key == "n_layers")
            given = d.given.get(f"model.{key}")
            place = f"{d.source.place(given.line)}: {given.shown}: " if given else "--set "
            text = f"expected a whole number, at least 1{most}; correct it"
            raise PrismError(f"{place}model.{key}: {text}")
    layers = d.find("layer_types", "layers_block_type", "hybrid_override_pattern",
                    "hybrid_layer_pattern")  # fmt: skip
    listed = layers is not None and isinstance(layers.value, list | str)
    if "model.n_layers" not in d.values and layers is not None and listed:
        d.give("model.n_layers", len(layers.value), layers)
    _read_longest(d)
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
    read_layers(d)
    read_recurrent(d)
    _read_embeddings(d)
    _match(d, named[1] if named else None)


def _check_family(d: Draft) -> None:
    """Refuse a model that would become another one."""
    kind = plain_type(d)
    told = next((why for names, why in REFUSED.items() if kind in names.split()), None)
    found = d.find("model_type")
    for names, why in REFUSED_SETTINGS.items():
        for name in names.split():
            setting = d.find(name)
            same = setting is not None and setting.value == d.value("num_attention_heads")
            if not (told or setting is None or same) and setting.value not in (*OFF, [], {}):
                found, told = setting, why
    if told is not None and found is not None:
        raise PrismError(
            f"{d.source.place(found.line)}: {found.path[-1]}: {kind or 'the model'} has {told}, "
            "for which prism has no costs; give model.durations in a job file, or fit its trace"
        )


def _read_titan(d: Draft) -> None:
    """Take sizes from the layers that torchtitan writes out one by one."""
    found = d.find("model_spec.model.layers")
    if found is None or not isinstance(found.value, list) or not found.value:
        return
    layer = found.value[0] if isinstance(found.value[0], dict) else {}
    attention, wide = layer.get("attention") or {}, layer.get("feed_forward") or {}
    d.give("model.n_layers", len(found.value), found)
    for key, value in (
        ("n_heads", attention.get("n_heads")), ("n_kv_heads", attention.get("n_kv_heads")),
        ("head_size", attention.get("head_dim")), ("ffn_size", wide.get("hidden_dim")),
    ):  # fmt: skip
        if type(value) is int:
            d.give(f"model.{key}", value, found)


def _read_longest(d: Draft) -> None:
    """Take a model's longest context as no more than that."""
    if "model.seq_len" in d.over:
        d.use_key("model.seq_len")
        return
    found, longest = d.of_key("model.seq_len"), RANKS["model.seq_len"][-1]
    if found is None and d.source.format == "huggingface":
        d.assume("model.seq_len", SEQUENCE, "not in the file; give it: --set model.seq_len=N")
    if found is None or plain(found.path[-1]) not in map(plain, longest):
        return
    length = min(SEQUENCE, found.value)
    why = f"its longest context is {found.value}; give that of training: --set model.seq_len=N"
    d.given.pop("model.seq_len", None)
    d.assume("model.seq_len", length, why, found)


def _named(d: Draft) -> tuple[Setting, str] | None:
    """Give the preset whose name is in a setting that names a model, and the setting."""
    family = d.value("model.name")
    for name in ("flavor", "hf_model_id", "hf_path", "hf_assets_path", "pretrained_model_name",
                 "_name_or_path", "model_name_or_path", "base_model", "hf_checkpoint", "model.path",
                 "_factory_", "recipe", "_target_", "model.model_name", "model", "config",
                 "config_file", "tokenizer_model", "tokenizer_name_or_path",
                 "tokenizer_path"):  # fmt: skip
        for setting in reversed(d.by_name.get(plain(name), [])):
            if not isinstance(setting.value, str):
                continue
            text = setting.value if name != "flavor" else f"{family}{setting.value}"
            if name.startswith(("tokenizer", "_name")):
                d.used |= {setting.path}
            if (preset := preset_in(text)) is not None:
                d.used |= {setting.path, *(s.path for s in d.by_name.get("modelname", []))}
                d.use("flavor")
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
        grouped = grouped or not d.source.complete  # its log has all arguments
    one = d.find("multi_query", "multi_query_attention")
    if "model.n_kv_heads" in d.values:
        pass
    elif one is not None and d.is_set(one.path[-1]) and not d.is_set("new_decoder_architecture"):
        d.give("model.n_kv_heads", 1, one)
    elif kv is not None and (grouped or d.source.format != "megatron"):
        d.give("model.n_kv_heads", kv.value, kv)
    elif heads is not None:
        d.assume("model.n_kv_heads", heads, "as many as attention heads, without query groups")
    width = d.count("kv_channels", "head_dim", "attention_head_dim")
    hidden = d.values.get("model.hidden_size")
    if width is not None and heads and _latent(d) is None:
        d.give("model.head_size", width.value, width)
    own = (sizes for names, sizes in DEFAULTS.items() if plain_type(d) in names.split())
    for key, value in next(own, {}).items():
        if f"model.{key}" not in d.values and d.of_key(f"model.{key}") is None:
            d.assume(f"model.{key}", value, "transformers' default of its family")
    values = d.count("v_head_dim")
    if (
        values is not None
        and _latent(d) is None
        and values.value != d.values.get("model.head_size", (hidden or 0) / (heads or 1))
    ):
        d.give("model.v_head_size", values.value, values)
    gate = d.of_key("model.attention_gate")
    if gate is not None and gate.value not in OFF:
        d.give("model.attention_gate", True, gate)
    elif plain_type(d) in GATED_ATTENTION:
        d.assume("model.attention_gate", True, "its family of models has it")


def _read_feed_forward(d: Draft) -> None:
    hidden, megatron = d.values["model.hidden_size"], d.source.format in MEGATRON
    act = d.find("swiglu", "gated_linear_unit", "mlp_type", "activation", "hidden_act",
                 "hidden_activation", "mlp_hidden_act", "activation_function")  # fmt: skip
    squared = d.find("squared_relu")
    kind = plain(str(d.value("model_type") or ""))
    gated = False
    if act is None:
        why = "Megatron's default: no --swiglu" if megatron else "its family of models has it"
        gated = not megatron and kind not in UNGATED_FAMILIES
        d.assume("model.gated_mlp", gated, why)
    else:
        word = plain(str(act.value))
        gated = act.value is True or (word in GATED and kind not in UNGATED_FAMILIES)
        if d.source.format == "huggingface" and (word not in UNGATED or kind == "bitnet"):
            gated = kind not in UNGATED_FAMILIES  # the activation alone: gelu of Gemma is gated
        d.give("model.gated_mlp", gated, act, squared if squared and squared.value else None)
    if "model.ffn_size" not in d.values and not d.take("model.ffn_size"):
        # Megatron-LM: 4 h, with --swiglu two thirds of that in multiples of 64
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated and megatron else 4 * hidden
        d.assume("model.ffn_size", ffn, "Megatron's default from hidden_size")


def _read_positions(d: Draft) -> None:
    """Find out whether positions rotate queries and keys."""
    kind = d.find("position_embedding_type", "pos_emb")
    flag = d.find("use_rotary_position_embeddings")
    if kind is not None:
        d.give("model.rope", plain(str(kind.value)) in ROTARY, kind)
    elif flag is not None:
        d.give("model.rope", bool(d.is_set(flag.path[-1])), flag)
    elif d.source.format in MEGATRON:
        d.assume("model.rope", False, "Megatron's default: learned positions")
    else:
        family = plain(str(d.value("model_type") or ""))
        rope = family not in UNROTATED_FAMILIES and not d.is_set("alibi")
        d.assume("model.rope", rope, "its family of models has it" if rope else "its family's")


def _read_experts(d: Draft) -> None:
    experts = d.of_key("model.n_experts")
    n = experts.value if experts is not None else 0
    if experts is not None and (type(n) is not int or n < 0):
        d.refuse(experts, "expected a whole number of experts, or 0")
    if n < 2 or d.is_set("enable_moe_block") is False or d.is_set("is_moe") is False:
        if experts is not None or d.source.complete:
            d.use_key(*(f"model.{key}" for key in SPARSE))
        shared = d.count("shared_intermediate_size")
        if experts is not None and shared is not None and shared.value:  # Granite 4, dense
            d.give("model.ffn_size", shared.value, shared)
        return
    d.give("model.n_experts", n, experts)
    if not d.take("model.experts_per_token"):
        d.assume("model.experts_per_token", 2, "Megatron's default of --moe-router-topk")
    wide, own = d.given.get("model.ffn_size"), d.find("intermediate_size")
    if not d.take("model.expert_ffn_size") and wide and own and own.shown != wide.shown:
        d.give("model.expert_ffn_size", own.value, own)  # Llama 4
    width = d.values.get("model.expert_ffn_size") or d.values["model.ffn_size"]
    latent = d.of_key("model.expert_latent_size")
    if latent is not None and latent.value:
        d.give("model.expert_latent_size", latent.value, latent)
    shared, total = d.of_key("model.n_shared_experts"), d.of_key("model.shared_ffn_size")
    if total is not None and total.value and type(width) is int and width > 0:
        whole = type(total.value) is int and total.value % width == 0
        key = "model.n_shared_experts" if whole else "model.shared_ffn_size"
        d.give(key, total.value // width if whole else total.value, total)
    elif shared is not None and shared.value:
        d.give("model.n_shared_experts", shared.value, shared)
    elif plain_type(d) in ("llama4", "hunyuan_v1_moe"):
        d.assume("model.n_shared_experts", 1, "its family of models has one")


def _latent(d: Draft) -> int | None:
    """Give the width of the latent of keys and values, where attention has one."""
    if d.source.format in MEGATRON and not d.is_set("multi_latent_attention"):
        return None
    return d.whole("kv_lora_rank") or None


def _read_latents(d: Draft) -> None:
    if _latent(d) is None:
        alone = d.count("share_q_dim")
        if alone is not None and alone.value:
            d.give("model.q_lora_rank", alone.value, alone)
        if d.source.complete:
            d.use("q_lora_rank", "kv_lora_rank", "v_head_dim")
            d.use_key("model.rope_head_size", "model.head_size")
        return
    rope = d.size("qk_rope_head_dim", "qk_pos_emb_head_dim", "rope_head_size")
    rest, whole = d.count("qk_nope_head_dim"), d.count("qk_head_dim")
    d.use("head_dim", "kv_channels")
    for key in ("q_lora_rank", "kv_lora_rank", "rope_head_size", "v_head_size"):
        found = d.of_key(f"model.{key}")
        if found is not None and found.value:
            d.give(f"model.{key}", found.value, found)
    # qk_head_dim: of Megatron the part without positions, of transformers both
    if rest is None and d.source.format in MEGATRON:
        rest = whole
    if rest is not None and rope is not None:
        d.give("model.head_size", rest.value + rope.value, rest, rope)
    elif whole is not None:
        d.give("model.head_size", whole.value, whole)
    d.values["model.n_kv_heads"] = d.values.get("model.n_heads", 0)
    if d.is_set("mla_use_nope"):
        d.give("model.rope", False, d.find("mla_use_nope"))


def _read_embeddings(d: Draft) -> None:
    untied = d.find("untie_embeddings_and_output_weights", "no_weight_tying")
    tied = d.find("share_embeddings_and_output_weights", "tie_word_embeddings")
    if untied is not None or tied is not None:
        opposite = untied is not None
        value = d.is_set((untied or tied).path[-1])  # type: ignore[union-attr]
        d.give("model.tied_embeddings", value is not opposite, untied or tied)
    else:
        megatron, family = d.source.format in MEGATRON, plain_type(d) in TIED_FAMILIES
        why = "Megatron's default" if megatron else "transformers' default of its family"
        d.assume("model.tied_embeddings", megatron or family, why)
    padded = d.count("padded_vocab_size", "pad_vocab_size_to")
    if padded is not None:
        d.give("model.vocab_size", padded.value, padded)
        return
    tp = d.whole("tensor_model_parallel_size") or 1
    each = max(1, (d.whole("make_vocab_size_divisible_by") or 128) * tp)
    found, size, kind = d.size("vocab_size"), None, None
    for setting in (d.find(name) for name in ("vocab_file", "tokenizer_type", "tokenizer.type")):
        word = plain(str(setting.value)) if setting else ""
        known = next((n for text, n in VOCABULARIES.items() if text in word), None)
        if known is not None and size is None:
            size, kind = known, setting
    if size is None and d.has("merge_file"):  # of the BPE tokenizer of GPT-2
        size = VOCABULARIES["gpt2"]
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

    mine = _effective(own)

    def agrees(preset: dict[str, Any]) -> bool:
        theirs, near = _effective(preset), own.get("vocab_size", preset["vocab_size"])
        free = {"vocab_size", "seq_len", "rope", "tied_embeddings", "durations", "name"}
        free |= {"window", "full_attention_interval"} if "window" not in own else set()
        # a file may leave out the width of experts, and of shared ones
        free |= {k for k in ("expert_ffn_size", "n_shared_experts") if k not in own}
        if own.get("n_experts"):
            free |= {"ffn_size"}
            if "expert_ffn_size" not in own and "model.ffn_size" in d.given:
                free -= {"expert_ffn_size"}
        same = all(mine[key] == theirs[key] for key in mine if key not in free)
        return same and abs(near / preset["vocab_size"] - 1) < 0.02

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
    known = (d.given.get(f"model.{k}") for k in ("n_layers", "hidden_size", "n_heads"))
    sizes = [given for given in known if given is not None]
    if not sizes or "model.name" in d.over:
        return
    d.values["model.name"] = name
    d.given["model.name"] = sizes[0]._replace(
        key="model.name", value=name, shown=", ".join(g.shown for g in sizes)
    )
    if "vocab_size" not in own and named is None:
        others = ", ".join(n for n in found if n != name)
        why = f"; so do those of {others}, of another one" * bool(others)
        d.assume("model.name", name, f"sizes agree; the vocabulary is not in the file{why}")
    for key in own:
        if f"model.{key}" in d.over:
            continue
        # a preset has the vocabulary as its checkpoint pads it
        if key == "vocab_size" or mine[key] == _effective(preset)[key]:
            del d.values[f"model.{key}"]
            d.assumed.pop(f"model.{key}", None)
        elif f"model.{key}" in d.assumed and d.source.format not in MEGATRON:
            del d.values[f"model.{key}"]
            del d.assumed[f"model.{key}"]


def _effective(sizes: dict[str, Any]) -> dict[str, Any]:
    """Give all sizes, those that follow from others too."""
    full = {key: field.default for key, field in ModelBlock.model_fields.items()} | sizes
    head = full["head_size"] or full["hidden_size"] // max(full["n_heads"], 1)
    full |= {"head_size": head, "v_head_size": full["v_head_size"] or head}
    full["n_kv_heads"] = full["n_kv_heads"] or full["n_heads"]
    full["expert_ffn_size"] = full["n_experts"] and (full["expert_ffn_size"] or full["ffn_size"])
    return full
