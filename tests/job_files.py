"""Random job files: any keys of the schema with plausible and edge values, most of them valid.

Keys, words and bounds are read from the schema, so that what is added to them is drawn as
well. Sizes are built so that they fit together; a key that breaks a rule for want of others is
mostly taken out again, as its message says. Left out: fitted models, which are files of their own.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from layers_made import DENSE, written_out

import prism

SCHEMA = prism.Job.model_json_schema()
CHUNKS = {"zb-v": 2, "dualpipe-v": 2, "interleaved": None}
"""Model chunks of a stage, by schedule: two, or more; one with the others."""
ROUNDS = {"dualpipe-v": 2}
"""Rounds of as many microbatches as there are stages that a schedule has at least."""
NOT_DRAWN = {
    "variability.model", "variability.ranks", "variability.kernel_scale", "variability.host_scale",
    "model.name",
}  # fmt: skip
"""Keys that need a file or mean a large model, or a slow host; the last is drawn beside sizes."""
PRESENT = 0.12  # of an optional key
BROKEN = 0.1  # of job files with a mistake that is left in
RARE_WORDS = {"zero2", "fp8", "kernel"}  # dear, or refused: one in ten of their keys

NUMBERS: dict[str, list[float]] = {
    "cv": [0.0, 0.001, 0.01, 0.05, 0.3, 1.5],
    "duration_cv": [0.0, 1.0, 3.0],
    "diurnal_cv": [0.0, 0.02, 0.7],
    "rate_per_hour": [0.0, 0.01, 1.0, 30.0],
    "duration_s": [0.0, 0.001, 0.1, 5.0, 600.0],
    "probability": [0.0, 0.01, 0.3, 0.9, 1.0],
    "factor": [1.0, 1.1, 3.0, 20.0],
    "time": [0.1, 0.5, 1.0, 3.0],
    "lemon_fraction": [0.0, 0.001, 0.05, 0.4],
    "max_slowdown": [1.01, 1.25, 2.0],
    "per_1000_node_days": [0.0, 3.8, 200.0],
    "rate_per_1000_node_days": [0.0, 1.0, 300.0],
    "tokens": [1.0, 1e6, 1e9],
    "write_s": [0.0, 1.0, 60.0],
    "bandwidth_gbytes_per_s": [0.1, 50.0, 900.0],
    "latency_us": [0.0, 7.0, 5000.0],
    "distance_km": [0.0, 0.3, 40.0, 9000.0],
    "total_gbits_per_s": [1.0, 400.0, 1e5],
    "oversubscription": [1.0, 3.0, 500.0],
    "expert_imbalance": [1.0, 1.1, 2.5],
    "expert_capacity": [0.5, 1.0, 2.0],
    "power_limit_w": [350.0],
    "clock_mhz": [400.0, 1200.0],
    "lemon_slowdown": [1.0, 1.1, 1.25],
}
COUNTS: dict[str, list[int]] = {
    "steps": [1, 2, 200, 20_000],
    "interval_steps": [1, 10, 1000],
    "pod_gpus": [1, 2, 8, 64],
    "nvlink_domain_gpus": [1, 2, 4, 8, 16],
    "leaf_nodes": [1, 2, 16],
    "expert_node_limit": [1, 2, 8],
}
LENGTHS = ["90s", "10min", "1h", "2d", 3600, 0.5]
WORDS = {
    "variability.library": ["none", "h100-healthy", "a100-healthy", "gb200-healthy"],
    "run.start": ["2026-01-31", "2026-01-31T08:00"],
}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """Follow references and leave `null` out."""
    if "$ref" in schema:
        return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return resolved(next(kind for kind in forms if kind.get("type") != "null"))
    return schema


def entries(schema: dict[str, Any]) -> dict[str, Any]:
    """What stands under the names of a mapping that a user chooses; empty where there are none."""
    by_pattern = schema.get("patternProperties", {}).values()
    free = schema.get("additionalProperties")
    return next(iter(by_pattern), free if isinstance(free, dict) else {})


def within(schema: dict[str, Any], values: list[Any]) -> list[Any]:
    """Values that a key's own bounds allow."""
    low = schema.get("minimum", schema.get("ge", -float("inf")))
    high = schema.get("maximum", schema.get("le", float("inf")))
    above = schema.get("exclusiveMinimum", -float("inf"))
    below = schema.get("exclusiveMaximum", float("inf"))
    return [v for v in values if low <= v <= high and above < v < below]


@cache  # a strategy takes longer to make than to draw from
def below(n: int) -> st.SearchStrategy[int]:
    """Whole numbers from 0 to n - 1."""
    return st.sampled_from(range(n))


def one(draw: Any, options: Sequence[Any]) -> Any:
    """Draw one of some values."""
    return options[draw(below(len(options)))]


def chance(draw: Any, share: float) -> bool:
    """Draw True in a share of the draws."""
    return bool(draw(below(20)) >= 20 - round(20 * share))


def value_of(draw: Any, schema: dict[str, Any], path: str) -> Any:
    """Draw a value of a key; None where its kind is not known."""
    schema, name = resolved(schema), path.rpartition(".")[2]
    if path in WORDS:
        return one(draw, WORDS[path])
    if "enum" in schema:
        words = list(schema["enum"])
        common = [word for word in words if word not in RARE_WORDS]
        return one(draw, words if chance(draw, 0.1) else common or words)
    kind = schema.get("type")
    if "properties" in schema:
        return blocks(draw, schema, path)
    if "examples" in schema:
        return one(draw, [*schema["examples"], *LENGTHS])
    if kind == "boolean":
        return draw(st.booleans())
    if kind == "integer":
        return one(draw, within(schema, COUNTS.get(name, [0, 1, 2, 3, 8])))
    if kind == "number":
        usual = [0.0, 1e-6, 0.05, 0.2, 0.5, 1.0, 1.5, 2.0, 20.0]
        return one(draw, within(schema, NUMBERS.get(name, usual)))
    if "prefixItems" in schema:
        return sorted(value_of(draw, item, path) for item in schema["prefixItems"])
    if kind == "array":
        some = [value_of(draw, schema["items"], path) for _ in range(3)]
        if isinstance(some[0], dict):
            return sorted(some, key=lambda entry: tuple(entry.values()))
        return sorted(set(some))
    if entries(schema):
        of = entries(schema)
        return {key: value_of(draw, of, f"{path}.{key}") for key in ("gpu", "software")}
    return None


values = st.composite(value_of)


def blocks(draw: Any, schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Draw some of a block's keys, and all that it requires."""
    out = {}
    for key, kind in schema["properties"].items():
        here = f"{path}.{key}".lstrip(".")
        required = key in schema.get("required", ())
        if here in NOT_DRAWN or here in STRUCTURE:
            continue
        deep = "." in path or path == "variability" or "properties" in resolved(kind)
        often = 0.4 if deep else PRESENT
        if required or chance(draw, often):
            value = value_of(draw, kind, here)
            if value is not None:
                out[key] = value
    return out


STRUCTURE = {
    *(f"model.{k}" for k in ("n_layers", "hidden_size", "ffn_size", "n_heads", "n_kv_heads",
                             "vocab_size", "seq_len", "durations", "head_size", "v_head_size",
                             "q_lora_rank", "kv_lora_rank", "rope_head_size", "n_experts",
                             "experts_per_token", "expert_ffn_size", "n_shared_experts",
                             "expert_latent_size", "shared_ffn_size", "attention_gate",
                             "n_dense_layers", "moe_layer_interval", "window",
                             "full_attention_interval", "layer_pattern", "mamba_heads",
                             "mamba_head_size", "mamba_groups", "mamba_state_size", "linear_heads",
                             "linear_key_heads", "linear_head_size", "layers", "dims")),
    *(f"parallelism.{k}" for k in ("tp", "cp", "pp", "vpp", "dp", "ep", "microbatches", "schedule",
                                   "data_parallel", "layer_split", "shard_size",
                                   "expert_imbalance", "expert_node_limit", "expert_overlap",
                                   "expert_dispatch", "expert_capacity", "expert_tp",
                                   "cuda_graphs")),
    *(f"cluster.{k}" for k in ("nodes", "gpus_per_node", "hosts", "node_slowdowns", "device",
                               "tiers")),
}  # fmt: skip
"""Keys whose values must fit together; `structures` draws them."""
SOFT = {
    *(f"parallelism.{key}" for key in ("schedule", "data_parallel", "shard_size")),
    *(f"model.{key}" for key in ("head_size", "v_head_size")),
    "cluster.tiers",
}
"""Those of them that may be left out again."""
TIERS = ("rack", "pod", "site")  # from the inside
ONE_OF = (
    ("oversubscription", "bandwidth_gbytes_per_s", "total_gbits_per_s"),
    ("latency_us", "distance_km"),
)
"""Keys of a tier that say the same thing."""
MANY = 129  # replicas of which the engine `exchangeable` simulates some


def literals(block: str, key: str) -> list[str]:
    """Words that a key of a block may be."""
    return list(resolved(SCHEMA["$defs"][block]["properties"][key])["enum"])


@st.composite
def structures(draw: Any) -> dict[str, Any]:
    """Draw sizes that fit together: model, layout, cluster."""
    pick = lambda *options: one(draw, options)  # noqa: E731
    explicit = pick(True, False, False)
    tp, cp = (1, 1) if explicit else (pick(1, 1, 2, 4), pick(1, 1, 1, 2))
    pp, dp = pick(1, 1, 2, 3, 4), pick(1, 2, 4, 8)
    if explicit and chance(draw, 0.2):  # cheap, and more than `exchangeable` simulates
        pp, dp = pick(1, 2), pick(130, 200)
    schedule = one(draw, literals("ParallelismBlock", "schedule"))
    rounds = ROUNDS.get(schedule, 0)
    vpp = 1 if pp == 1 else CHUNKS.get(schedule, 1) or pick(2, 3)
    layout = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
    layout |= {"vpp": vpp} if vpp > 1 else {}
    if pp > 1:
        more = 0 if schedule == "interleaved" else pick(0, 0, 1)
        layout |= {"schedule": schedule, "microbatches": pp * pick(1, 2, 2) + more}
        if layout["microbatches"] < rounds * pp:
            layout["microbatches"] = rounds * pp
    else:
        layout["microbatches"] = pick(1, 2, 5)
        if chance(draw, 0.1):
            layout["schedule"] = schedule
    if pick(True, False):
        kinds = [k for k in literals("ParallelismBlock", "data_parallel") if k not in RARE_WORDS]
        layout["data_parallel"] = one(draw, kinds)
        if layout["data_parallel"] == "hsdp" and pick(True, False):
            layout["shard_size"] = one(draw, [n for n in (1, 2, 4, 8) if dp % n == 0])
    if explicit:
        model: dict[str, Any] = {"durations": durations(draw, pp)}
    else:
        n_heads = tp * pick(1, 2, 4)
        hidden = n_heads * pick(16, 64, 128)
        chunks = pp * vpp
        model = {
            "n_layers": chunks * pick(1, 2) if pp > 1 else pick(1, 4, 7),
            "hidden_size": hidden, "ffn_size": tp * pick(32, 1024), "n_heads": n_heads,
            "n_kv_heads": pick(n_heads, tp), "vocab_size": tp * pick(128, 4000),
            "seq_len": 2 * cp * tp * pick(8, 256),
        }  # fmt: skip
        if chance(draw, 0.35):
            routed, many = experts(draw, tp, cp, dp, model["n_layers"])
            model, layout = model | routed, layout | many
        if chance(draw, 0.2):
            model |= latents(draw, hidden // n_heads) | {"n_kv_heads": n_heads}
        elif chance(draw, 0.1):
            model |= {pick("head_size", "v_head_size"): pick(1, 24, 200)}
        elif chance(draw, 0.1):
            model |= {"attention_gate": True} if pick(True, False) else {"q_lora_rank": pick(8, 40)}
        if chance(draw, 0.1):
            model["name"] = "llama3-8b"
        if pp > 1 and chance(draw, 0.15):
            extra = [pick(0, 1) for _ in range(chunks)]
            layout["layer_split"] = [1 + n for n in extra]
            model["n_layers"] = chunks + sum(extra)
        if set(model) == set(DENSE) and chance(draw, 0.3):
            model = written_out(model)
    whole = layout.get("data_parallel") != "hsdp" and pp == layout.get("ep", 1) == 1
    cluster = machines(draw, tp * cp * pp * dp, not explicit, tp * cp if whole else 0)
    return {"model": model, "parallelism": layout, "cluster": cluster}


def durations(draw: Any, pp: int) -> dict[str, Any]:
    """Draw durations of a stage's forward, backward, and of the part of it that may wait."""
    pick = lambda *options: one(draw, options)  # noqa: E731
    each = lambda: pick(1.0, 0.01, [pick(0.0, 0.5, 1.0, 2.0) for _ in range(pp)])  # noqa: E731
    out = {"forward_s": each(), "backward_s": each()}
    if chance(draw, 0.4):
        whole, share = out["backward_s"], pick(0.0, 0.3, 0.5, 1.0)
        several = isinstance(whole, list)
        out["weight_s"] = [share * b for b in whole] if several else share * whole
    return out


def experts(
    draw: Any, tp: int, cp: int, dp: int, n_layers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw experts of a model, and how a layout shares them."""
    pick = lambda *options: one(draw, options)  # noqa: E731
    n = pick(4, 8, 24)
    model = {
        "n_experts": n,
        "experts_per_token": pick(1, 2, n),
        "expert_ffn_size": tp * pick(8, 96),
    }
    model |= {"n_shared_experts": pick(0, 1, 2), "n_dense_layers": pick(0, n_layers - 1)}
    if chance(draw, 0.2):
        model |= {"expert_latent_size": pick(8, 40), "shared_ffn_size": tp * pick(0, 16)}
    if chance(draw, 0.2):
        del model["expert_ffn_size"]
    if chance(draw, 0.2):
        del model["n_dense_layers"]
        letters = ["E"] + [pick(*"ML*-EHW") for _ in range(n_layers - 1)]
        if chance(draw, 0.3):
            letters = ["*E"] + [pick("LE", "M-", "H-", "WE", "*") for _ in range(n_layers - 1)]
        between = " " if len(letters[0]) > 1 else ""
        model |= {"layer_pattern": between.join(letters)}
        if "W" in model["layer_pattern"]:
            model |= {"window": pick(1, 64)}
        if {"M", "H"} & set(model["layer_pattern"]):
            model |= {"mamba_heads": 2 * tp, "mamba_head_size": pick(16, 64)}
            model |= {"mamba_groups": tp, "mamba_state_size": pick(16, 128)}
        if "L" in model["layer_pattern"]:
            model |= {"linear_heads": 2 * tp, "linear_key_heads": tp}
            model |= {"linear_head_size": pick(64, 128)}
    elif chance(draw, 0.3):
        model["moe_layer_interval"] = pick(1, n_layers - model["n_dense_layers"])
        model |= {"window": pick(1, 64), "full_attention_interval": pick(0, 1, 3)}
    whole = chance(draw, 0.3)
    over = dp * cp * (tp if whole else 1)
    layout: dict[str, Any] = {"ep": pick(*[k for k in (2, 4, 8, 1) if over % k == n % k == 0])}
    if layout["ep"] > 1:
        layout |= {"expert_tp": 1} if whole else {"expert_tp": tp} if chance(draw, 0.1) else {}
        for key in (
            "expert_imbalance",
            "expert_node_limit",
            "expert_overlap",
            "expert_dispatch",
            "expert_capacity",
            "cuda_graphs",
        ):
            if chance(draw, 0.4):
                kind = SCHEMA["$defs"]["ParallelismBlock"]["properties"][key]
                layout[key] = value_of(draw, kind, f"parallelism.{key}")
    return model, layout


def latents(draw: Any, width: int) -> dict[str, Any]:
    """Draw the widths of latent attention, beside heads of a width."""
    pick = lambda *options: one(draw, options)  # noqa: E731
    rope = pick(1, width // 2, width)
    model = {"head_size": width, "rope_head_size": rope, "q_lora_rank": pick(0, 8, 200)}
    model |= {"kv_lora_rank": pick(8, 64)}
    return model | ({"v_head_size": pick(16, width)} if chance(draw, 0.5) else {})


def tiers(draw: Any, unit: int, world: int, replica: int) -> dict[str, Any]:
    """Draw tiers of whole units of so many GPUs, in a job of `world`; some larger than it.

    One of whole replicas may exchange parameters once in so many steps.
    """
    pick = lambda *options: one(draw, options)  # noqa: E731
    kind = SCHEMA["$defs"]["TierBlock"]
    names = sorted(draw(st.sets(st.sampled_from(TIERS), min_size=1)), key=TIERS.index)
    out, latency = {}, 0.0
    for name in names:
        unit *= pick(1, 2, 2, 3) if not out and unit < world else 2
        tier = blocks(draw, kind, "cluster.tiers.tier") | {"gpus": unit}
        for keys in ONE_OF:
            given = [key for key in keys if key in tier]
            for key in given[1:] if not chance(draw, 0.5) else given[:-1]:
                del tier[key]
        for key in ("efficiency", "sync_every", "sync_overlap"):  # the latter: whole replicas
            tier.pop(key, None)
        if {"bandwidth_gbytes_per_s", "total_gbits_per_s"} & set(tier) and chance(draw, 0.5):
            efficiency = kind["properties"]["efficiency"]
            tier["efficiency"] = value_of(draw, efficiency, "cluster.tiers.tier.efficiency")
        if "latency_us" in tier:  # of what is farther away, or the device's own
            latency = max(latency, pick(30.0, tier["latency_us"]))
            tier["latency_us"] = latency
        whole = bool(replica) and unit % replica == 0 and world % unit == 0
        if (whole or unit >= world) and not any("sync_every" in each for each in out.values()):
            if chance(draw, 0.5):
                tier |= {"sync_every": pick(2, 5, 40), "sync_overlap": pick(0, 1, 2)}
        out[name] = tier
    return out


def machines(draw: Any, world: int, messages: bool, replica: int) -> dict[str, Any]:
    """Draw nodes for some GPUs: known slow ones, spares, another order, tiers for messages.

    GPUs of a `replica` that a unit can hold, else 0.
    """
    pick = lambda *options: one(draw, options)  # noqa: E731
    per_node = one(draw, [n for n in (1, 2, 4, 8, 16) if world % n == 0])
    n_slots = n_nodes = world // per_node
    cluster: dict[str, Any] = {"gpus_per_node": per_node}
    if chance(draw, 0.25):
        n_nodes += pick(0, 1, 2)
        order = draw(st.permutations(range(n_nodes)))
        cluster["hosts"] = list(order[:n_slots])
    if chance(draw, 0.25):
        node = pick(*range(n_nodes))
        slow = [1.2, 3.0, {"network": 1.5}, {"compute": 1.1, "cv": 0.1}, {"memory": 2.0}]
        cluster["node_slowdowns"] = {node: one(draw, slow)}
    if chance(draw, 0.25):
        cluster["device"] = one(draw, literals("ClusterBlock", "device"))
    if messages and world > per_node and chance(draw, 0.5):
        cluster["tiers"] = tiers(draw, per_node, world, replica)
    return cluster | {"nodes": n_nodes}


def drop(tree: dict[str, Any], path: str) -> bool:
    """Take a key out; its parent where it is not there. False where nothing was."""
    parts = path.split(".")
    while len(parts) > 1:
        node: Any = tree
        for part in parts[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and parts[-1] in node:
            if ".".join(parts) in STRUCTURE - SOFT:
                return False
            del node[parts[-1]]
            return True
        parts.pop()
    return False


def mend(tree: dict[str, Any]) -> dict[str, Any]:
    """Take out the keys that a job's check names, until it passes or nothing can be taken out."""
    for _ in range(12):
        try:
            prism.load_job(tree)
            return tree
        except prism.PrismError as error:
            found = re.findall(r"^job: ([\w.-]+): ", str(error), re.MULTILINE)
            if not any([drop(tree, path) for path in found]):
                return tree
    return tree


MISTAKES = [
    ("parallelism.dp", 7), ("parallelism.tpp", 2), ("cluster.nodes", "many"), ("run", []),
    ("variability.effects.rank", {"cv": -1}), ("parallelism.microbatches", True),
    ("cluster.hosts", [0, 0]), ("model.n_layers", 0), ("run.deadline", "soon"),
]  # fmt: skip


@st.composite
def job_files(draw: Any) -> dict[str, Any]:
    """Draw a job file's contents; one in ten with a mistake."""
    tree = draw(structures())
    for block, kind in SCHEMA["properties"].items():
        if block in ("name", "source"):
            continue
        drawn = value_of(draw, kind, block)
        tree[block] = {**drawn, **tree.get(block, {})}
    device = tree["cluster"].get("device", "h100")
    if "library" not in tree["variability"] and device not in ("h100", "a100", "gb200"):
        tree["variability"]["library"] = "h100-healthy"
    tree = mend(tree)
    if chance(draw, BROKEN):
        path, value = one(draw, MISTAKES)
        *parts, last = path.split(".")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return tree
