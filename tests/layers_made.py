"""Transformers written as tables of ops, beside the same as sizes of a built-in model."""

NONE, COLUMNS = {"split": "none"}, {"split": "columns"}
DENSE = {"n_layers": 4, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 16, "n_kv_heads": 4,
         "vocab_size": 8192, "seq_len": 2048}  # fmt: skip


def _elementwise(name, kind, width, **keys):
    return {"op": "elementwise", "name": name, "kind": kind, "width": width, **keys}


def _gemm(name, n, k, split, **keys):
    return {"op": "gemm", "name": name, "m": "tokens", "n": n, "k": k, "split": split, **keys}


def _norm(name):
    return {"op": "norm", "name": name, "width": "hidden"}


MIXER = [
    _norm("attention_norm"),
    _gemm("qkv", {"query": "q", "key": "kv", "value": "kv"}, "hidden", "columns"),
    _elementwise("rope", "rope", "q + kv", **COLUMNS),
    _elementwise("repeat_keys", "repeat", "2 * q", **COLUMNS),
    _elementwise("head_layout", "layout", "q + 2 * kv", **COLUMNS),
    {"op": "attention", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head"},
    _gemm("projection", "hidden", "q", "rows"),
    _elementwise("attention_residual", "residual", "hidden", **NONE),
]
MLP = [
    _norm("mlp_norm"),
    _gemm("mlp_up", {"gate": "ffn", "up": "ffn"}, "hidden", "columns"),
    _elementwise("activation", "swiglu", "ffn", **COLUMNS),
    _gemm("mlp_down", {"down": "hidden"}, "ffn", "rows"),
    _elementwise("mlp_residual", "residual", "hidden", **NONE),
]
_COPIES = {"rows": "copies", "routed": True}
_SENT = {"op": "collective", "bytes": "2 * copies * hidden"}
_GROUPED = {"op": "grouped_gemm", "groups": "n_experts", "m": "copies"}
EXPERTS = [
    _norm("mlp_norm"),
    _gemm("router", "n_experts", "hidden", "none", bf16=True),
    _elementwise("routing", "routing", "n_experts", **NONE),
    {"op": "host_wait"},
    _elementwise("permute", "scatter", "(1 + experts_per_token) * hidden", **NONE),
    {**_SENT, "name": "dispatch", "kind": "all_to_all", "group": "ep"},
    {**_SENT, "name": "experts", "kind": "all_gather", "group": "expert_tp"},
    _elementwise("sort", "sort", "hidden", **_COPIES, **NONE),
    {**_GROUPED, "name": "expert_up", "n": {"gate": "wide", "up": "wide"}, "k": "hidden",
     **COLUMNS},
    _elementwise("expert_activation", "swiglu", "wide", **_COPIES, **COLUMNS),
    {**_GROUPED, "name": "expert_down", "n": {"down": "hidden"}, "k": "wide", "split": "rows"},
    _elementwise("unsort", "sort", "hidden", **_COPIES, **NONE),
    {**_SENT, "name": "experts", "kind": "reduce_scatter", "group": "expert_tp"},
    {**_SENT, "name": "combine", "kind": "all_to_all", "group": "ep"},
    _elementwise("unpermute", "scatter", "(1 + experts_per_token) * hidden", **NONE),
    _elementwise("mlp_residual", "residual", "hidden", **NONE),
]  # fmt: skip


def written_out(model):
    """Return the table of a model's sizes, as a job file would have it."""
    own = {"seq_len": model["seq_len"], "hidden_size": model["hidden_size"]}
    dims = {
        "tokens": "batch * seq", "heads": model["n_heads"], "kv_heads": model["n_kv_heads"],
        "head": "hidden // heads", "q": "heads * head", "kv": "kv_heads * head",
        "ffn": model["ffn_size"], "vocab": model["vocab_size"], "depth": model["n_layers"],
    }  # fmt: skip
    if "n_experts" in model:
        own |= {key: model[key] for key in ("n_experts", "experts_per_token")}
        dims |= {"copies": "tokens * experts_per_token", "wide": model["expert_ffn_size"]}
    ends = (
        {"at": "first", "ops": [{"op": "embedding_bag", "rows": "vocab", "dim": "hidden"}]},
        {"at": "last", "ops": [_norm("final_norm"),
                               _gemm("logits", "vocab", "hidden", "columns", bf16=True),
                               {"op": "loss", "width": "vocab"}]},
    )  # fmt: skip
    mlp = EXPERTS if "n_experts" in model else MLP
    layers = [ends[0], {"repeat": "depth", "ops": MIXER + mlp}, ends[1]]
    return own | {"dims": dims, "layers": layers}
