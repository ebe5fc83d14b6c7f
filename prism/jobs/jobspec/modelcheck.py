"""What must hold between the keys of a model, and between a model and how it is divided."""

import re
from collections.abc import Iterator
from math import ceil, lcm

from prism.common.text import format_count
from prism.jobs.dimensions import DIMENSIONS, STAGE
from prism.jobs.jobspec.blocks import Blocks, Durations, ModelBlock
from prism.jobs.jobspec.owncheck import EXPERT_RANKS, check_layers
from prism.jobs.jobspec.presets import PRESETS, SIZES
from prism.jobs.jobspec.problem import Problem, undivided, unmodelled
from prism.jobs.jobspec.yaml import near
from prism.jobs.layersplit import even_split

_LATENT = ("kv_lora_rank", "rope_head_size", "head_size")
_EXPERT_RANKS = tuple(f"parallelism.{key}" for key in ("dp", *STAGE[::-1], "expert_tp"))


def check_model(b: Blocks) -> Iterator[Problem]:
    """Check that a model has all of its sizes, or durations instead of them."""
    m, known = b.model, ", ".join(PRESETS)
    if m.name is not None and m.name not in PRESETS:
        meant = near(m.name, PRESETS)
        hint = f"did you mean {meant[0]}?" if meant else "or leave it out and give the sizes"
        yield f"expected one of {known}, got {m.name!r}; {hint}", "model.name"
        return
    if m.durations is not None:
        yield from _check_durations(b, m.durations)
        return
    if m.layers is not None:
        yield from check_layers(b)
        return
    if m.dims:
        yield "has no effect without layers; give those, or drop it", "model.dims", "model.layers"
    missing = [size for size in SIZES if getattr(m, size) < 1]
    if len(missing) == len(SIZES):
        text = f"says no model; give a name ({known}), sizes, layers, or durations"
        yield text, "model", "model.name", "model.durations", "model.layers"
    elif missing:
        for name in missing:
            text = "missing or 0, expected at least 1; give it, or a name"
            yield text, f"model.{name}", "model.name", "model.durations", "model.layers"
    else:
        for size, by in (("hidden_size", "n_heads"), ("n_heads", "n_kv_heads")):
            n, per = getattr(m, size), getattr(m, by)
            if n % per and not (size == "hidden_size" and m.head_size):
                text = f"{n} is not a multiple of {by} = {per}; change one"
                yield text, f"model.{size}", f"model.{by}"
        yield from _check_shards(b)


def _check_durations(b: Blocks, d: Durations) -> Iterator[Problem]:
    m, pp, key = b.model, b.parallelism.pp, "model.durations"
    first = next(
        (name for name in ("name", *SIZES[:-1], "n_experts", "layers") if getattr(m, name)), None
    )
    if first is not None:
        yield "has no effect beside durations; keep one of the two", f"model.{first}", key
    for name, value in d:
        if isinstance(value, tuple) and len(value) != pp:
            text = (
                f"has {format_count(len(value), 'duration')}, expected one per stage, pp = {pp}; "
            )
            yield f"{text}give one number, or as many as stages", f"{key}.{name}", "parallelism.pp"
    forward, whole, late = (
        v if isinstance(v, tuple) else (v,) for v in (d.forward_s, d.backward_s, d.weight_s or 0.0)
    )
    stages = range(max(len(late), len(whole)))
    if any(late[i % len(late)] > whole[i % len(whole)] for i in stages):
        text = "is more than backward_s, of which it is a part; give less, or leave it out"
        yield text, f"{key}.weight_s", f"{key}.backward_s"
    if not any((*forward, *whole)):
        yield "are all 0, expected a step that takes time; give forward_s > 0", key


def _check_shards(b: Blocks) -> Iterator[Problem]:
    """Check that the dimensions of a stage divide what they shard."""
    m, p = b.model, b.parallelism
    wrong = [name for name in ("n_heads", "ffn_size") if getattr(m, name) % p.tp]
    if m.n_kv_heads % p.tp and p.tp % m.n_kv_heads:
        wrong.append("n_kv_heads")
    if wrong:
        sizes = ", ".join(f"{name} = {getattr(m, name)}" for name in wrong)
        text = f"{p.tp} does not divide {sizes}; take a tp that does"
        yield text, "parallelism.tp", *(f"model.{name}" for name in wrong), "model.name"
        return
    shards = lcm(_slices(p.token_shards), p.stage_gpus if p.sequence_parallel else p.token_shards)
    if m.seq_len % shards:
        sizes = " and ".join(f"{name} = {getattr(p, name)}" for name in STAGE)
        text = f"{m.seq_len} does not split over {sizes}; "
        text += f"take a multiple of {shards}, for example {ceil(m.seq_len / shards) * shards}"
        yield text, "model.seq_len", *(f"parallelism.{d}" for d in STAGE[::-1]), "model.name"


def splits_over(m: ModelBlock, name: str, size: int) -> bool:
    """Tell whether a model may be divided by a size of a stage's dimension, whatever the others."""
    if DIMENSIONS[name].splits == "weights":
        return m.n_heads % size == 0
    return m.seq_len % _slices(size) == 0


def _slices(shards: int) -> int:
    """Each shard of a sequence is two slices, one from either end, to balance causal work."""
    return 2 * shards if shards > 1 else 1


def check_split(b: Blocks) -> Iterator[Problem]:
    """Check that every model chunk has its layers."""
    p, n_layers, split = b.parallelism, b.model.depth, b.parallelism.layer_split
    if b.model.durations is not None or n_layers < 1:
        return
    n_chunks = p.pp * p.vpp
    chunks = f"pp*vpp = {p.pp}*{p.vpp} = {format_count(n_chunks, 'chunk')}"
    if n_chunks > n_layers + 2:
        pp, vpp = (p.pp, (n_layers + 2) // p.pp) if p.pp <= n_layers + 2 else (n_layers, 1)
        text = (
            f"{format_count(n_layers, 'layer')} do not fill {chunks}; with pp: {pp} and vpp: {vpp}"
        )
        n_chunks = pp * vpp
    elif split == "auto":
        return
    elif len(split) != n_chunks:
        text = f"has {len(split)} counts, expected one for each of {chunks};"
    elif sum(split) != n_layers:
        text = f"adds up to {sum(split)}, expected n_layers = {n_layers};"
    else:
        return
    valid = even_split(n_layers, n_chunks)
    keys = ("parallelism.layer_split", "parallelism.vpp", "parallelism.pp", "model.n_layers")
    yield f"{text} a valid layer_split: {valid}", *keys, "model.name"


def check_experts(b: Blocks) -> Iterator[Problem]:
    """Check the experts of a model, and how they are divided."""
    m, p, key, of = b.model, b.parallelism, "parallelism.ep", "model.n_experts"
    if m.layers is not None:  # see `check_layers`
        return
    if not m.n_experts:
        if p.ep > 1:
            text = f"{p.ep}, but the model has no experts; set {of}, or ep: 1"
            yield text, key, of, "model.name", "model.layers"
        return
    if m.durations is not None:  # where experts have no effect
        return
    if not 1 <= m.experts_per_token <= m.n_experts:
        text = f"{m.experts_per_token}, expected 1 to n_experts = {m.n_experts}; give it"
        yield text, "model.experts_per_token", of
    if m.n_layers and m.n_dense_layers + m.moe_layer_interval > m.n_layers:
        text = f"{m.n_dense_layers} of n_layers = {m.n_layers} leave no group of "
        text += f"moe_layer_interval = {m.moe_layer_interval}; lower one, or set {of}: 0"
        keys = ("model.n_dense_layers", "model.moe_layer_interval", "model.n_layers")
        yield text, *keys
    if p.expert_shards not in (1, p.tp):
        text = f"{p.expert_shards}, expected 1 or tp = {p.tp}; leave it out for the latter"
        yield text, "parallelism.expert_tp", "parallelism.tp"
    elif p.expert_ranks % p.ep:
        text, *where = undivided(p.ep, EXPERT_RANKS, p.expert_ranks, key, *_EXPERT_RANKS)
        if p.expert_ranks * p.expert_shards % p.ep == 0:
            text += ", or set expert_tp: 1, for whole experts on tp ranks"
        yield text, *where
    if m.n_experts % p.ep:
        yield undivided(p.ep, "n_experts", m.n_experts, key, of, "model.name")
    # a token's experts are distinct: a rank computes it at most once for each expert it holds
    most = min(p.ep, m.n_experts / max(m.experts_per_token, 1))
    if p.ep > 1 and (p.expert_imbalance or 0) > most >= 1:
        text = (
            f"{p.expert_imbalance:g}, but {format_count(p.ep, 'rank')} of "
            f"{format_count(m.n_experts, 'expert')}, "
        )
        text += f"{m.experts_per_token} to a token, have {most:g} times the mean at most; lower it"
        yield text, "parallelism.expert_imbalance", key, "model.name"
    width = m.expert_ffn_size or m.ffn_size
    if width % p.expert_shards:
        text = f"{p.tp} does not divide expert_ffn_size = {width}; take a tp that does"
        yield text, "parallelism.tp", "model.expert_ffn_size", "model.name"


_RECURRENT = (
    ("MH", "Mamba-2", ("mamba_heads", "mamba_head_size", "mamba_groups", "mamba_state_size"),
     ("mamba_heads", "mamba_groups")),
    ("L", "linear attention", ("linear_heads", "linear_key_heads", "linear_head_size"),
     ("linear_heads", "linear_key_heads")),
)  # fmt: skip
"""Letters of recurrent layers, their name, the sizes they need, and those that tp divides."""


def check_pattern(b: Blocks) -> Iterator[Problem]:
    """Check a hybrid model's pattern, and that its layers have the sizes they need."""
    m, p, key = b.model, b.parallelism, "model.layer_pattern"
    if not m.layer_pattern:
        return
    wrong = sorted({g for g in m.layer_groups if not re.fullmatch("[ML*WH]?[-E]?", g)})
    n = len(m.layer_groups)
    if wrong:
        text = "expected letters of M, L, *, W, H, - and E, in groups one of the last two behind "
        yield f"has {', '.join(map(repr, wrong))}, {text}one of the others", key
    elif not n or m.n_layers % n:
        text = f"has {n} layers, expected as many as n_layers = {m.n_layers}, or a part of them "
        yield f"{text}that repeats; change one", key, "model.n_layers", "model.name"
    if bool(m.window) != ("W" in m.layer_pattern):
        text = "layers with a window, W, and window go together; give both, or neither"
        yield text, *(("model.window", key) if m.window else (key, "model.window"))
    if ("E" in m.layer_pattern) != bool(m.n_experts):
        text = "layers with experts, E, and n_experts go together; give both, or neither"
        yield text, key, "model.n_experts"
    for letters, kind, names, divided in _RECURRENT:
        missing = [name for name in names if not getattr(m, name)]
        if set(letters) & set(m.layer_pattern) and missing:
            text = f"has {kind} layers, {' or '.join(letters)}, which need {', '.join(missing)}; "
            text += "give them"
            yield text, key, *(f"model.{name}" for name in missing)
        elif any(getattr(m, name) % p.tp for name in divided):
            sizes = " and ".join(f"{name} = {getattr(m, name)}" for name in divided)
            text = f"{p.tp} does not divide {sizes}; take a tp that does"
            yield text, "parallelism.tp", key, "model.name"


def check_latents(b: Blocks) -> Iterator[Problem]:
    """Check that latent attention has all widths of its keys and values, and only they."""
    m = b.model
    keys = tuple(f"model.{name}" for name in _LATENT)
    if m.attention_gate and (m.q_lora_rank or m.kv_lora_rank):
        yield unmodelled("a gate with latents", "false", "model.attention_gate", *keys)
    given = [name for name in _LATENT[:-1] if getattr(m, name)]  # heads have a width anyway
    missing = [name for name in _LATENT if not getattr(m, name)]
    if not given:
        return
    if missing:
        text = f"needs {', '.join(missing)} beside {', '.join(given)}; give all of "
        yield f"{text}{', '.join(_LATENT)}, or none", f"model.{given[0]}", *keys
        return
    if m.rope_head_size > m.head_size:
        text = f"{m.rope_head_size} is part of head_size = {m.head_size}; lower it"
        yield text, "model.rope_head_size", *keys
    if m.n_kv_heads != m.n_heads:
        text = f"{m.n_kv_heads}, but latent attention has as many as n_heads = {m.n_heads}; "
        yield text + "leave it out", "model.n_kv_heads", *keys
