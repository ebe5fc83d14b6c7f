"""Which layers of a model mix tokens how, and which have experts, as configurations say it."""

import ast
import re
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.draft import Draft
from prism.jobs.importing.settings import Setting

_KINDS = {
    "full_attention": "*", "attention": "*", "global_attention": "*",
    "sliding_attention": "W", "sliding_window": "W", "local_attention": "W",
    "chunked_attention": "*", "indexed_attention": "*", "linear_attention": "L",
    "mamba": "M", "mamba2": "M", "moe": "E", "mlp": "-",
}  # fmt: skip
"""Letters of `model.layer_pattern` by words of ``layer_types`` and ``layers_block_type``."""


def read_layers(d: Draft) -> None:
    """Find the kinds of all layers, as the keys of a job that say them shortest."""
    n = d.values["model.n_layers"]
    if (pattern := d.find("hybrid_override_pattern", "layer_pattern")) is None:
        pattern = d.find(
            "hybrid_layer_pattern"
        )  # in Megatron a text, in MiMo a list: see `_mixers`
    if pattern is not None and isinstance(pattern.value, str):
        # behind / are layers that predict further tokens, | parts stages
        letters = pattern.value.partition("/")[0].replace("|", "")
        d.give("model.layer_pattern", letters, pattern)
        _check(letters, d, pattern)
        return
    words = d.find("layers_block_type", "layer_types")
    listed = words is not None and isinstance(words.value, list)
    if words is not None and listed and {"moe", "mlp"} & set(map(str, words.value)):
        letters = "".join(_letter(d, words, word) for word in words.value)
        d.give("model.layer_pattern", letters, words)
        _check(letters, d, words)
        return
    mixers, told = _mixers(d, n)
    sparse, told_sparse = _sparse(d, n)
    _write(d, mixers, sparse, told, told_sparse)


def _check(letters: str, d: Draft, setting: Setting) -> None:
    """See that the letters are as many as the layers, and that no layer has experts unknown."""
    if not d.values.get("model.n_experts") and "E" in letters:
        raise PrismError(
            f"{d.source.place(setting.line)}: {setting.path[-1]} has layers with experts, E, but "
            "no number of experts is given; give it: --set model.n_experts=N"
        )
    d.values["model.n_layers"] = len(letters)


def _letter(d: Draft, setting: Setting, word: Any) -> str:
    word = str(word)
    if word == "linear_attention" and "linearnumvalueheads" not in d.by_name:
        # transformers from 5 on saves Mamba's layers by this name
        mamba = {"mambanumheads", "mambanheads", "mambadstate", "ssmstatesize"} & set(d.by_name)
        return "M" if mamba else "L"
    if word not in _KINDS:
        raise PrismError(
            f"{d.source.place(setting.line)}: {setting.path[-1]} has layers {word!r}, which are "
            f"not modelled; known are {', '.join(_KINDS)}"
        )
    return _KINDS[word]


def _every(n: int, interval: int, offset: int, inside: str, others: str) -> str:
    return "".join(inside if i % interval == offset else others for i in range(n))


def _mixers(d: Draft, n: int) -> tuple[str, list[Setting | None]]:
    """Give a letter a layer for what mixes tokens, and the settings that say so."""
    windows, told = _windows(d, n)
    kinds = d.find("layer_types", "layers_block_type")
    if kinds is not None and isinstance(kinds.value, list):
        letters = "".join(_letter(d, kinds, word) for word in kinds.value[:n])
        if "W" in letters and not d.values.get("model.window"):
            letters = letters.replace("W", "*")
        d.use("full_attention_interval", "sliding_window_pattern", "attn_layer_indices")
        return letters, [kinds]
    if plain_type(d) == "falcon_h1":
        return "H" * n, [d.find("model_type")]
    period, offset = d.size("attn_layer_period"), d.whole("attn_layer_offset") or 0
    if period is not None:  # Jamba
        return _every(n, period.value, offset, "*", "M"), [period]
    indices = d.find("attn_layer_indices")
    if indices is not None and isinstance(indices.value, list):  # Bamba
        return "".join("*" if i in indices.value else "M" for i in range(n)), [indices]
    if plain_type(d) == "bamba":
        return "M" * n, [d.find("model_type")]
    softmax = d.find("attn_type_list")
    if softmax is not None and isinstance(softmax.value, list):  # MiniMax-01: lightning attention
        return "".join("*" if one else "L" for one in softmax.value[:n]), [softmax]
    full = d.find("linear_attn_config.full_attn_layers")
    if full is not None and isinstance(full.value, list):  # Kimi Linear counts from 1
        return "".join("*" if i + 1 in full.value else "L" for i in range(n)), [full]
    linear = not {"linearnumvalueheads", "linearheads", "linearnumheads"}.isdisjoint(d.by_name)
    every = d.find("linear_attention_freq", "full_attention_interval") if linear else None
    if every is not None:
        d.use("experimental_attention_variant")
        flags = layer_flags(every.value)
        if isinstance(flags, list):
            return "".join("L" if one else "*" for one in flags[:n]), [every]
        if flags:
            return _every(n, flags, flags - 1, "*", "L"), [every]
    return windows, told


def _windows(d: Draft, n: int) -> tuple[str, list[Setting | None]]:
    """Find a sliding window, where it is narrower than the sequence, and the layers with it."""
    window = d.of_key("model.window")
    d.use("use_sliding_window")
    if window is None:
        return "*" * n, []
    d.use_key("model.full_attention_interval")
    if d.is_set("use_sliding_window") is False:
        return "*" * n, []
    value = window.value
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if type(value) is not int or value < 1 or value >= d.values.get("model.seq_len", 0):
        return "*" * n, []
    d.give("model.window", value, window)
    every, some = d.of_key("model.full_attention_interval"), d.find("hybrid_layer_pattern")
    if some is not None and isinstance(some.value, list):  # MiMo: 1 where the window is
        return "".join("W" if one else "*" for one in some.value[:n]), [some]
    if every is not None and isinstance(layer_flags(every.value), list):
        return "".join("W" if one else "*" for one in layer_flags(every.value)[:n]), [every]  # type: ignore[index]
    if every is not None and isinstance(every.value, int) and every.value > 0:
        return _every(n, every.value, every.value - 1, "*", "W"), [every]
    if every is not None and isinstance(every.value, str) and {*every.value} <= {"L", "G"}:
        whole = every.value * (n // len(every.value) + 1)  # EXAONE: LLLG
        return whole[:n].replace("L", "W").replace("G", "*"), [every]
    if d.is_set("use_sliding_window") and (first := d.whole("max_window_layers")) is not None:
        return ("*" * first + "W" * n)[:n], [window]  # Qwen
    if plain_type(d) in ("gemma2", "gpt_oss"):
        return ("W*" * n)[:n], [window]
    return "W" * n, [window]


def _sparse(d: Draft, n: int) -> tuple[list[bool], list[Setting | None]]:
    """Tell which layers have experts, and the settings that say so."""
    if not d.values.get("model.n_experts"):
        return [False] * n, []
    kinds = d.find("mlp_layer_types")
    if kinds is not None and isinstance(kinds.value, list):
        d.use("first_k_dense_replace", "moe_layer_freq")
        return [word != "dense" for word in kinds.value[:n]], [kinds]
    named = d.find("moe_layers_enum", "moe_layers")
    if named is not None and isinstance(named.value, list | str):  # "4,5,6" in Step-3
        words = named.value.split(",") if isinstance(named.value, str) else named.value
        which = {int(word) for word in words if str(word).strip().isdigit()}
        d.use("interleave_moe_layer_step")
        return [i in which for i in range(n)], [named]
    dense = d.count("n_dense_layers", "first_k_dense_replace", "num_dense_layers",
                    "moe_layer_start_index", "moe_layer_num_skipped")  # fmt: skip
    every = d.find("moe_layer_freq", "interleave_moe_layer_step", "decoder_sparse_step",
                   "expert_layer_period", "moe_layer_interval")  # fmt: skip
    last, offset = d.whole("moe_layer_end_index"), d.whole("expert_layer_offset")
    only = d.find("mlp_only_layers")
    flags = layer_flags(every.value) if every is not None else 1
    if isinstance(flags, list):
        return [bool(one) for one in flags[:n]], [every]
    first, step = dense.value if dense is not None else 0, max(1, flags or 1)
    counts_on = plain_type(d) in ("deepseek_v2", "deepseek_v3", "kimi_linear")

    def sparse(i: int) -> bool:
        if i < first or (last is not None and last >= 0 and i > last):
            return False
        if offset is not None:  # Jamba
            return i % step == offset
        if counts_on:
            return i % step == 0
        return i % step == step - 1

    out = [sparse(i) for i in range(n)]
    if only is not None and isinstance(only.value, list):
        out = [one and i not in only.value for i, one in enumerate(out)]
    told = [s for s in (dense, every if step > 1 else None) if s is not None]
    return out, [*told] or [only]


def _write(
    d: Draft, mixers: str, sparse: list[bool], told: list[Setting | None],
    told_sparse: list[Setting | None],
) -> None:  # fmt: skip
    """Say the kinds by intervals where they do, else by a pattern, as short as it repeats."""
    n = len(sparse)
    if len(mixers) != n:
        raise PrismError(
            f"{d.source.name}: {len(mixers)} kinds of layers, expected one for each of {n} layers; "
            "correct the file"
        )
    full = mixers.index("*") + 1 if "*" in mixers else 0
    windows = _every(n, full, full - 1, "*", "W") if full else "W" * n
    dense = sparse.index(True) if True in sparse else 0
    gap = sparse.index(True, dense + 1) - dense if sum(sparse) > 1 else 1
    first = dense - gap + 1  # groups of this many layers begin behind the dense ones
    grouped = [i >= first and (i - first) % gap == gap - 1 for i in range(n)]
    plain_mixers = "W" not in mixers or windows == mixers
    if set(mixers) <= {"*", "W"} and plain_mixers and (not any(sparse) or grouped == sparse):
        if "W" in mixers and full:
            d.give("model.full_attention_interval", full, *told)
        elif "W" not in mixers:
            d.values.pop("model.window", None)
        if any(sparse) and first > 0:
            d.give("model.n_dense_layers", first, *told_sparse)
        if any(sparse) and gap > 1:
            d.give("model.moe_layer_interval", gap, *told_sparse)
        return
    groups = [mixer + ("E" if one else "-") for mixer, one in zip(mixers, sparse, strict=True)]
    length = next(k for k in range(1, n + 1) if n % k == 0 and groups == groups[:k] * (n // k))
    if length == 1 and n > 1:
        length = 2
    known = [s for s in (*told, *told_sparse) if s is not None]
    d.give("model.layer_pattern", " ".join(groups[:length]), *known)
    if "W" not in mixers:
        d.values.pop("model.window", None)


def plain_type(d: Draft) -> str:
    """Give the family of a model as transformers names it, without the suffix of its text part."""
    return str(d.value("model_type") or "").lower().removesuffix("_text")


def layer_flags(value: Any) -> int | list[int] | None:
    """Read ``1``, ``[0, 1, 1]`` or ``([0]*3+[1]*58)``: which layers have something."""
    if isinstance(value, int | list):
        return value
    if re.fullmatch(r"\d+", str(value)):
        return int(value)
    try:
        found: int | list[int] = _flags(ast.parse(str(value).strip(), mode="eval").body)
        return found
    except (SyntaxError, ValueError, RecursionError):
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
