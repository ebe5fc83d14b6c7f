"""What must hold between a model's experts, its latent attention and the layout.

Each check is a generator of problems, as in `prism.jobs.jobspec.check`, which runs them.
"""

from collections.abc import Iterator

from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock
from prism.jobs.jobspec.problem import Blocks, Problem, unmodelled

_EXPERT_KEYS = ("experts_per_token", "expert_ffn_size", "n_shared_experts", "n_dense_layers")
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "rope_head_size")


def check_experts(b: Blocks) -> Iterator[Problem]:
    """Check experts and latent attention, of the model and against the layout."""
    if b.model is not None:
        yield from _check_model(b.model)
        yield from _check_latents(b.model)
    if b.parallelism is None:
        return
    yield from _check_layout(b, b.parallelism)
    if b.model is not None and b.model.n_experts:
        yield from _check_shares(b.model, b.parallelism)
    special = b.model is not None and (b.model.n_experts or b.model.kv_lora_rank)
    if special and b.parallelism.recompute == "selective":
        key, what = "parallelism.recompute", "selective with experts or latent attention"
        keys = (key, "model.n_experts", "model.kv_lora_rank", "model.name")
        yield unmodelled(key, what, "none or full", *keys)


def _check_model(m: ModelBlock) -> Iterator[Problem]:
    """Check the numbers of experts and of layers that have them."""
    first = "model.n_experts"
    if not m.n_experts:
        for name in _EXPERT_KEYS:
            if getattr(m, name):
                key = f"model.{name}"
                text = f"{getattr(m, name)} has no effect without experts; set {first}, or drop it"
                yield Problem(key, (key, first), text)
        return
    if m.durations is not None:
        text = "has no effect beside durations; keep one of the two"
        yield Problem(first, (first, "model.durations"), text)
        return
    if not 1 <= m.experts_per_token <= m.n_experts:
        key = "model.experts_per_token"
        text = f"{m.experts_per_token}, expected 1 to n_experts = {m.n_experts}; give it"
        yield Problem(key, (key, first), text)
    if m.n_dense_layers >= m.n_layers > 0:
        key = "model.n_dense_layers"
        text = f"{m.n_dense_layers} of n_layers = {m.n_layers} leave none for experts; lower it, "
        yield Problem(key, (key, "model.n_layers"), text + f"or set {first}: 0")


def _check_latents(m: ModelBlock) -> Iterator[Problem]:
    """Check that multi-head latent attention has all of its widths, and only they."""
    keys = tuple(f"model.{name}" for name in (*_LATENT_KEYS, "head_size"))
    given = [name for name in _LATENT_KEYS if getattr(m, name)]
    if not given:
        return
    missing = [name for name in (*_LATENT_KEYS, "head_size") if not getattr(m, name)]
    if missing:
        text = f"needs {', '.join(missing)} beside {', '.join(given)}; give all of "
        text += f"{', '.join(_LATENT_KEYS)} and head_size, or none"
        yield Problem(f"model.{given[0]}", keys, text)
        return
    if m.rope_head_size > m.head_size:
        text = f"{m.rope_head_size} is part of head_size = {m.head_size}; lower it"
        yield Problem("model.rope_head_size", keys, text)
    if m.n_kv_heads != m.n_heads:
        text = f"{m.n_kv_heads}, but latent attention has as many as n_heads = {m.n_heads}; "
        yield Problem("model.n_kv_heads", ("model.n_kv_heads", *keys), text + "leave it out")


def _check_layout(b: Blocks, p: ParallelismBlock) -> Iterator[Problem]:
    """Check what expert parallelism needs, and what it is not modelled with."""
    key, sparse = "parallelism.ep", b.model is None or b.model.n_experts > 0
    if p.ep > 1 and not sparse:
        text = f"{p.ep}, but the model has no experts; set model.n_experts, or ep: 1"
        yield Problem(key, (key, "model.n_experts", "model.name"), text)
    elif p.ep > 1:
        if p.dp % p.ep:
            fits = ", ".join(str(n) for n in range(1, p.dp + 1) if p.dp % n == 0)
            text = f"{p.ep} does not divide dp = {p.dp}; take one of {fits}"
            yield Problem(key, (key, "parallelism.dp"), text)
        if p.data_parallel == "hsdp":
            name = "parallelism.data_parallel"
            yield unmodelled(name, "hsdp with ep > 1", "fsdp or zero1", name, key)
        if b.variability is not None and b.variability.resolution == "kernel":
            name = "variability.resolution"
            yield unmodelled(name, f"kernel resolution with ep = {p.ep}", "op", name, key)
    if p.ep > 1:
        return
    for name, plain in (
        ("expert_imbalance", None), ("expert_node_limit", None), ("expert_overlap", False),
    ):  # fmt: skip
        if getattr(p, name) not in (plain, 1.0 if name == "expert_imbalance" else plain):
            own = f"parallelism.{name}"
            yield Problem(own, (own, key), "has no effect with ep = 1; set ep, or leave it out")
    if b.variability is not None and b.variability.effects.expert is not None:
        own = "variability.effects.expert"
        text = "has no effect with parallelism.ep = 1; set ep, or leave it out"
        yield Problem(own, (own, f"{own}.cv", key), text)


def _check_shares(m: ModelBlock, p: ParallelismBlock) -> Iterator[Problem]:
    """Check that ranks hold whole experts, and tp ranks whole parts of one."""
    key = "parallelism.ep"
    if m.n_experts % p.ep:
        fits = ", ".join(str(n) for n in range(1, m.n_experts + 1) if m.n_experts % n == 0)
        text = f"{p.ep} does not divide n_experts = {m.n_experts}; take one of {fits}"
        yield Problem(key, (key, "model.n_experts", "model.name"), text)
    # a token's experts are distinct: a rank computes it at most once for each expert it holds
    most = min(p.ep, m.n_experts / max(m.experts_per_token, 1))
    if p.ep > 1 and p.expert_imbalance is not None and p.expert_imbalance > most >= 1:
        key = "parallelism.expert_imbalance"
        text = f"{p.expert_imbalance:g}, but {p.ep} ranks of {m.n_experts} experts, "
        text += f"{m.experts_per_token} to a token, have {most:g} times the mean at most; lower it"
        yield Problem(key, (key, "parallelism.ep", "model.name"), text)
    width = m.expert_ffn_size or m.ffn_size
    if width % p.tp:
        key = "parallelism.tp"
        text = f"{p.tp} does not divide expert_ffn_size = {width}; take a tp that does"
        yield Problem(key, (key, "model.expert_ffn_size", "model.name"), text)
    if p.tp > 1 and not p.sequence_parallel:
        key = "parallelism.sequence_parallel"
        what = "false with experts and tp > 1"
        yield unmodelled(key, what, "true", key, "parallelism.tp", "model.n_experts")
