"""Sizes of recurrent layers: Mamba, linear and delta attention."""

from prism.jobs.importing.draft import Draft
from prism.jobs.importing.families import LINEAR, MAMBA
from prism.jobs.importing.layerkinds import plain_type


def read_recurrent(d: Draft) -> None:
    """Find the sizes of Mamba-2 layers, and of linear attention."""
    letters = set(d.values.get("model.layer_pattern", ""))
    if letters & {"M", "H"}:
        _read_mamba(d)
    elif d.source.complete:
        d.use_key(*(f"model.{key}" for key in MAMBA))
    if "L" not in letters:
        if d.source.complete:
            d.use_key(*(f"model.{key}" for key in LINEAR))
        return
    for key in LINEAR:
        if (found := d.of_key(f"model.{key}")) is not None:
            d.give(f"model.{key}", found.value, found)
    keys, values = d.count("linear_key_head_dim"), d.count("linear_value_head_dim")
    if keys is not None and values is not None and keys.value != values.value:
        d.leave(keys, f"keys of the width of values, {values.value}")
    heads, size = d.find("linear_attn_config.num_heads"), d.find("linear_attn_config.head_dim")
    lightning = d.find("attn_type_list")
    if lightning is None and plain_type(d) == "minimax":
        lightning = d.find("layer_types")
    if heads is not None and size is not None:
        d.give("model.linear_heads", heads.value, heads)
        d.give("model.linear_key_heads", heads.value, heads)
        d.give("model.linear_head_size", size.value, size)
        d.leave(heads, "delta attention with a decay for each channel; timed as one for each head")
        d.use("linear_attn_config.kda_layers", "linear_attn_config.short_conv_kernel_size")
    elif lightning is not None:
        n, hidden = d.values["model.n_heads"], d.values["model.hidden_size"]
        d.give("model.linear_heads", n, lightning)
        d.give("model.linear_key_heads", n, lightning)
        size = d.values.get("model.head_size") or hidden // n
        d.give("model.linear_head_size", size, lightning)
        d.leave(lightning, "lightning attention; timed as linear attention by the delta rule")


def _read_mamba(d: Draft) -> None:
    for key in MAMBA:
        found = d.of_key(f"model.{key}")
        if found is not None and type(found.value) is int:
            d.give(f"model.{key}", found.value, found)
    d.use("mamba_d_ssm", "mamba_intermediate_size")
    expand, first = d.size("mamba_expand", "expand"), d.count("mamba_dt_rank")
    state = d.of_key("model.mamba_state_size")
    if first is not None or ("model.mamba_head_size" not in d.values and state is not None):
        first = first or state  # Mamba-1 has no heads
        d.give("model.mamba_head_size", 64, first)
        d.give("model.mamba_groups", 1, first)
        d.leave(first, "Mamba-1; timed as Mamba-2 of as many channels, in heads of 64")
    known = {f"model.{key}" for key in ("mamba_heads", "mamba_head_size")} & set(d.values)
    if known == {"model.mamba_head_size"} and expand is not None:
        inside = expand.value * d.values["model.hidden_size"]
        d.give("model.mamba_heads", inside // d.values["model.mamba_head_size"], expand)
