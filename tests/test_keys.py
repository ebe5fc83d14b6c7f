"""Every key of a job: which figures of an estimate it moves, by how much, and which it leaves.

`KEYS` has an entry for each key of the schema, so that none can be added, taken in another unit or
ignored without a test. Of small jobs in which nothing varies every figure is exact: sizes against
parameters and flop counted here, layouts against closed forms, links against latency plus bytes.
Where an expectation is a range, the reason stands beside it.
"""

import math
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest

import prism

Figures = dict[str, float]
Expected = Callable[[float, float], bool]
GIB = 2.0**30
QUIET = {
    "rank": {"cv": 0.0, "lemon_fraction": 0.0}, "step": {"cv": 0.0}, "jitter": {"mean_s": 0.0},
    "call": {"cv": 0.0}, "regime": {"probability": 0.0}, "stall": {"rate_per_hour": 0.0},
    "microbatch": {"cv": 0.0}, "residual": {"scale": 0.0}, "run": {"cv": 0.0},
}  # fmt: skip
DENSE = {
    "n_layers": 8, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 8, "vocab_size": 8000,
    "seq_len": 1024,
}  # fmt: skip
EXPERTS = DENSE | {"n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 512}
ONE_GPU = {"nodes": 1, "gpus_per_node": 1}
OWN_OP = {"op": "gemm", "m": "tokens", "n": 1024, "k": 1024, "split": "columns"}
OWN = {"seq_len": 1024, "dims": {"tokens": "batch * seq"}, "layers": [{"ops": [OWN_OP]}]}
DURATIONS = {"durations": {"forward_s": 1.0, "backward_s": 2.0}}


def quiet(model: dict[str, Any], layout: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    """A modelled job in which nothing varies."""
    effects = {**QUIET, "expert": {"cv": 0.0}} if "ep" in layout else QUIET
    return {
        "model": model, "parallelism": layout, "cluster": cluster,
        "variability": {"effects": effects, "model_error": 0.0, "host_scale": 1e-9},
        "run": {"failures": "none"},
    }  # fmt: skip


def given(layout: dict[str, Any], **blocks: Any) -> dict[str, Any]:
    """A job of explicit durations, without any effect."""
    return {"model": DURATIONS, "parallelism": layout, "variability": {"library": "none"},
            **blocks}  # fmt: skip


TABLE = {"rows": 4096, "lookups": 64}
TABLES = {"op": "embedding_bag", "dim": 64, "samples": "4096 * batch", "spread": "ep",
          "tables": [TABLE] * 3}  # fmt: skip
BASES = {
    "one": given({"microbatches": 8}),  # 24 s a step
    "pipe": given({"pp": 4, "microbatches": 8}),  # (8 + 3) * 3 s
    "eight": given({"dp": 8}, cluster={"nodes": 1}),  # 3 s, of eight GPUs in step
    "gpu": quiet(DENSE, {"microbatches": 2}, ONE_GPU),
    "named": quiet({"name": "llama3.2-1b"}, {}, ONE_GPU),
    "latent": quiet(
        DENSE | {"head_size": 128, "rope_head_size": 32, "q_lora_rank": 256, "kv_lora_rank": 128},
        {}, ONE_GPU,
    ),
    "sparse": quiet(EXPERTS, {}, ONE_GPU),
    "mamba": quiet(
        DENSE | {"layer_pattern": "M*-M*-M-", "mamba_heads": 16, "mamba_head_size": 64,
                 "mamba_groups": 2, "mamba_state_size": 64}, {}, ONE_GPU,
    ),
    "linear": quiet(
        DENSE | {"layer_pattern": "L*-L*-L-", "linear_heads": 16, "linear_key_heads": 8,
                 "linear_head_size": 128}, {}, ONE_GPU,
    ),
    "grid": quiet(DENSE, {"dp": 2, "tp": 2, "pp": 2, "microbatches": 8}, {"nodes": 1}),
    "net": quiet(DENSE, {"dp": 4, "overlap": False}, {"nodes": 4, "gpus_per_node": 1}),
    "hop": quiet(
        DENSE, {"pp": 2, "microbatches": 2, "p2p": "blocking"},
        {"nodes": 2, "gpus_per_node": 1,
         "links": {"network": {"bandwidth_gbytes_per_s": 10.0, "latency_us": 50.0,
                               "efficiency": 0.8}}},
    ),
    "nvlink": quiet(
        DENSE, {"dp": 8, "overlap": False},
        {"nodes": 1, "links": {"nvlink": {"bandwidth_gbytes_per_s": 100.0, "latency_us": 20.0,
                                          "efficiency": 0.5}}},
    ),
    "experts": quiet(EXPERTS, {"dp": 8, "ep": 4, "expert_imbalance": 1.0}, {"nodes": 1}),
    "far experts": quiet(
        EXPERTS, {"dp": 8, "ep": 8, "expert_imbalance": 1.0}, {"nodes": 8, "gpus_per_node": 1}
    ),
    "own": quiet(OWN, {}, ONE_GPU),
    "tables": quiet(
        {"layers": [{"ops": [TABLES]}]}, {"dp": 2, "ep": 2}, {"nodes": 1, "gpus_per_node": 2}
    ),
    "fsdp": quiet(DENSE, {"dp": 8, "data_parallel": "fsdp"}, {"nodes": 1}),
    "fail": given(
        {"microbatches": 8},
        cluster=ONE_GPU,
        run={"steps": 4000, "checkpoint": {"interval_steps": 10, "write_s": 0.0},
             "failures": {"per_1000_node_days": 20_000.0, "restart": 600.0}},
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------ figures
def figures_of(summary: Mapping[str, Any]) -> Figures:
    """The figures of an estimate, by short names."""
    step, memory = summary["step_time"], summary.get("memory", {"parts": {}})
    out = {
        "ideal": summary["ideal_step_time"], "world": summary["world_size"],
        "exposed": summary["exposed_communication"],
        **{name: step[name] for name in ("mean", "std", "cv", "p5", "p50", "p95", "p99")},
        "between": step["between_cluster_std"], "within": step["within_cluster_std"],
        **{f"path.{name}": s for name, s in summary["critical_path"].items()},
        **{f"loss.{row['name']}": row["mean_share"] for row in summary["time_loss"]},
        "memory": memory.get("gib"), "limit": memory.get("limit_gib"),
        **{f"part.{name}": gib for name, gib in memory["parts"].items()},
        "part.activations": sum(memory["parts"].get(kind, 0.0) for kind in ACTIVATIONS),
        **{f"above.{x}": p for x, p in summary["slowdown"].items()},
        "tokens": summary.get("tokens_per_step"), "batch": summary.get("global_batch"),
        "steps": summary.get("steps"), "ettr": summary.get("ettr"),
        "failures": summary.get("failures"),
        "cost": summary.get("cost", {}).get("mean"),
        "power": summary.get("energy", {}).get("gpu_power_w"),
        "carbon": summary.get("carbon", {}).get("operational_t", {}).get("p50"),
        "made": summary.get("carbon", {}).get("embodied_t"),
        "grid": summary.get("carbon", {}).get("intensity_g_per_kwh"),
        "pue": summary.get("carbon", {}).get("pue"),
        "finish": summary.get("finish_by", {}).get("probability"),
        "date": summary.get("finish_date", {}).get("date"),
        "asked": summary.get("finish_date", {}).get("probability"),
    }  # fmt: skip
    out |= {f"run.{name}": x for name, x in summary.get("time_to_train", {}).items()}
    if "mfu" in summary:
        rate = summary["model_flops_per_gpu"]
        out |= {"flop": rate * step["mean"] * summary["world_size"], "peak": rate / summary["mfu"]}
    path = summary["critical_path"]
    out["compute"] = sum(s for name, s in path.items() if not is_link(name))
    return {name: x for name, x in out.items() if x is not None}


def is_link(name: str) -> bool:
    """Whether a part of the critical path is spent on links."""
    return any(x in name for x in ("all_reduce", "all_gather", "reduce_scatter", "to_all", "p2p"))


@cache
def figures(base: str, changes: str, replicates: int, runs: int) -> Figures:
    """Estimate a base with changes, once; with a run of 100 steps where there are any."""
    run = {"run.steps": 100} if runs and base != "fail" else {}
    job = prism.load_job(BASES[base]).replace({**run, **literal_eval(changes)})
    dataset = prism.estimate(job, replicates=replicates, run_replicates=runs or None, seed=1)
    return figures_of(prism.summary(dataset))


# --------------------------------------------------------------------------------- expectations
def times(factor: float, rel: float = 1e-5) -> Expected:
    """Exactly so many times as much."""
    return lambda old, new: math.isclose(new, factor * old, rel_tol=rel)


def to(value: float, rel: float = 1e-5) -> Expected:
    """Exactly this."""
    return lambda old, new: math.isclose(new, value, rel_tol=rel, abs_tol=1e-9)


def plus(value: float, rel: float = 1e-5) -> Expected:
    """Exactly so much more."""
    return lambda old, new: math.isclose(new - old, value, rel_tol=rel, abs_tol=1e-9)


def ratio(low: float, high: float) -> Expected:
    """Between so many and so many times as much."""
    return lambda old, new: low * old < new < high * old


def within(low: float, high: float) -> Expected:
    """Between these."""
    return lambda old, new: low < new < high


# ------------------------------------------------------------------------ parameters and flop
def count(model: Mapping[str, Any]) -> tuple[float, float, float]:
    """Parameters, those that a token passes, and flop of attention and scans of a sequence."""
    m = {"n_kv_heads": model["n_heads"], "gated_mlp": True, "tied_embeddings": False,
         "n_experts": 0, "experts_per_token": 0, "n_shared_experts": 0, "n_dense_layers": 0,
         "moe_layer_interval": 1, "window": 0, "full_attention_interval": 0, "kv_lora_rank": 0,
         "q_lora_rank": 0, "rope_head_size": 0, "layer_pattern": "", "expert_latent_size": 0,
         "shared_ffn_size": 0, "attention_gate": False, **model}  # fmt: skip
    h, heads, s = m["hidden_size"], m["n_heads"], m["seq_len"]
    qk = m.get("head_size") or h // heads
    v = m.get("v_head_size") or qk
    wide = m.get("expert_ffn_size") or m["ffn_size"]
    q, kv, rope = m["q_lora_rank"], m["kv_lora_rank"], m["rope_head_size"]
    attention = heads * v * h * (2 if m["attention_gate"] else 1)
    attention += q * (h + 1 + heads * qk) if q else h * heads * qk
    attention += (
        h * (kv + rope) + kv * (1 + heads * (qk - rope + v))
        if kv else h * m["n_kv_heads"] * (qk + v)
    )  # fmt: skip
    inside = m.get("mamba_heads", 0) * m.get("mamba_head_size", 0)
    stream = inside + 2 * m.get("mamba_groups", 0) * m.get("mamba_state_size", 0)
    mamba = h * (stream + 2 * inside + m.get("mamba_heads", 0)) + 5 * stream + inside
    mamba += 3 * m.get("mamba_heads", 0)
    values = m.get("linear_heads", 0) * m.get("linear_head_size", 0)
    passed = values + 2 * m.get("linear_key_heads", 0) * m.get("linear_head_size", 0)
    linear = h * (passed + 2 * values + 2 * m.get("linear_heads", 0)) + 4 * passed
    linear += 2 * m.get("linear_heads", 0) + m.get("linear_head_size", 0)
    matrices = 3 if m["gated_mlp"] else 2

    inner = m["expert_latent_size"] or h

    def mlp(width: int, stream: int = h) -> int:
        return matrices * stream * width

    whole = active = float((1 if m["tied_embeddings"] else 2) * m["vocab_size"] * h + h)
    mixing = 0.0
    for i in range(m["n_layers"]):
        every, after = m["full_attention_interval"], i - m["n_dense_layers"]
        sparse = m["n_experts"] and after >= 0 and (after + 1) % m["moe_layer_interval"] == 0
        pattern = m["layer_pattern"].split() if " " in m["layer_pattern"] else m["layer_pattern"]
        kinds = pattern[i % len(pattern)] if pattern else "*E" if sparse else "*-"
        kinds = kinds.replace("H", "M*")
        full = "W" not in kinds and (not m["window"] or pattern or (every and (i + 1) % every == 0))
        kinds, seen = kinds.replace("W", "*"), s if full else min(s, m["window"])
        shared = h * (m["n_experts"] + 1) + mlp(
            m["shared_ffn_size"] or m["n_shared_experts"] * wide
        )
        shared += 2 * h * inner if inner != h else 0
        each = {"*": attention + h, "M": mamba + h, "-": mlp(m["ffn_size"]) + h, "E": shared,
                "L": linear + h}  # fmt: skip
        routed = mlp(wide, inner) if "E" in kinds else 0
        whole += sum(each[kind] for kind in kinds) + m["n_experts"] * routed
        active += sum(each[kind] for kind in kinds) + m["experts_per_token"] * routed
        mixing += ("*" in kinds) * heads * (qk + v) * (2 * s * seen - seen**2)
        mixing += ("M" in kinds) * 7 * s * inside * m.get("mamba_state_size", 0)
        mixing += ("L" in kinds) * 6 * s * values * m.get("linear_head_size", 0)
    return whole, active, mixing


def sizes(base: str, change: Mapping[str, Any]) -> dict[str, Expected]:
    """What sizes of a model on one GPU make of its weights, its flop and its tokens."""
    blocks = BASES[base]
    model = {**blocks["model"], **{k.partition(".")[2]: v for k, v in change.items()}}
    n = blocks["parallelism"].get("microbatches", 1)
    whole, active, mixing = count(model)
    moves = {
        "flop": to(n * (6.0 * active * model["seq_len"] + 3.0 * mixing)),
        "tokens": to(n * model["seq_len"]),
    }
    moves |= {"part.parameters": to(2.0 * whole / GIB), "part.optimizer": to(12.0 * whole / GIB)}
    return moves


ACTIVATIONS = ("checkpoints", "norms", "attention", "mlp", "logits")
STILL = ("ideal", "world", "memory", "limit", "flop", "peak", "tokens", "steps")
"""Figures that do not move unless a case says so: what effects and runs do not touch."""


class Case(NamedTuple):
    """A value of a key over a base, the figures that it moves, and those that may move with them.

    `also` is set with the value, `below` without it too.
    """

    base: str
    value: Any
    moves: dict[str, Expected]
    free: tuple[str, ...]
    also: dict[str, Any]
    below: dict[str, Any]
    replicates: int
    runs: int


OF_A_RUN = (
    "carbon",
    "grid",
    "made",
    "pue",
    "run",
    "steps",
    "cost",
    "finish",
    "asked",
    "ettr",
    "failures",
    "power",
)


def case(base: str, value: Any, free: str = "", also: Any = None, below: Any = None, n: int = 64,
         runs: int = 0, **moves: Expected) -> Case:  # fmt: skip
    """A case, with the figures that move by name and two underscores for a dot."""
    named = {name.replace("__", "."): expected for name, expected in moves.items()}
    if any(name.partition(".")[0] in OF_A_RUN for name in named):
        runs = runs or 16
    return Case(base, value, named, tuple(free.split()), also or {}, below or {}, n, runs)


def hop_s(bandwidth: float = 10.0, latency: float = 50.0, efficiency: float = 0.8) -> float:
    """What an activation of the base `hop` takes to the next stage [s]."""
    return latency * 1e-6 + 2.0 * 1024 * 1024 / (bandwidth * 1e9 * efficiency)


HOP = "ideal flop"  # with what a transfer takes
STEP = "ideal"
LINK, SCALE, TIER = "cluster.links.", "cluster.scale.", "cluster.tiers."
E, R = "variability.effects.", "run."
MANY = 64 * 400  # 400 cluster draws: a standard deviation to 3.5 %, so that 15 % is four of them
FOUR = {"cluster.nodes": 4}

ONE = {"cluster": ONE_GPU}
SAVE = {"run.checkpoint": {"interval_steps": 10, "write_s": 30.0}}
LOADS = {"run.loader": {"samples_per_s": 0.4}}  # a batch of 8 in 20 s
EPISODES = {"rate_per_1000_node_days": 1e6, "factor": 1.5, "duration": "1d"}
SLOW = {E + "fail_slow.factor": 1.5, E + "fail_slow.duration": "1d"}
OFTEN = {"rate_per_1000_node_days": 2e4}  # 20 a day of the one node
RARE = ONE | {E + "fail_slow": EPISODES | OFTEN | {"duration": "10min"}}
CALM = {"run.failures.per_1000_node_days": 1e-9}
FOUND = CALM | {E + "fail_slow": EPISODES | OFTEN | {"detection": "1min", "replace": True,
                                                     "duration": "9d"}}  # fmt: skip


def causes(key: str = "share", value: Any = 1.0) -> dict[str, Any]:
    """Two causes of failures, one of which takes an hour; the other has the key."""
    return {"gpu": {"share": 1.0, "restart": 3600}, "software": {"share": 1.0, key: value}}


def own(op: dict[str, Any], weights: float = 0.0, flop: float = 0.0, kept: float = 0.0,
        **keys: Any) -> Case:  # fmt: skip
    """One more op in a layer: its weights, flop of its forward, bytes that it keeps."""
    layers = [{"ops": [OWN_OP]}, {"ops": [op], "at": "last"}]
    moves = {
        "part__parameters": to(2.0 * (2.0**20 + weights) / GIB),
        "part__optimizer": to(12.0 * (2.0**20 + weights) / GIB),
        "part__activations": plus(kept / GIB), "flop": to(3.0 * (2.0**31 + flop)),
    }  # fmt: skip
    return case("own", layers, STEP, **{**moves, **keys})


GEMM = {"op": "gemm", "m": 512, "n": 256, "k": 128}
ATTENTION = {"op": "attention", "heads": 8, "head_dim": 64}
CROSS = ATTENTION | {"queries": 512, "keys": 64, "mask": "full"}
CONV = {"op": "conv", "pixels": 4096, "channels": 64, "filters": 128, "kernel": "3 * 3"}
SCAN = {"op": "scan", "kind": "mamba2", "heads": 8, "head_dim": 64, "state": 128}
BAG = {"op": "embedding_bag", "rows": 4096, "dim": 64}
BYTES = {"op": "elementwise", "bytes": 1e9}
SUM = {"op": "collective", "kind": "all_reduce", "bytes": 1e8, "group": "tp"}
TWO = {"parallelism.tp": 2, "cluster.gpus_per_node": 2}
of_attention = own(ATTENTION, 0, 2**30, 2 * 1024 * 4 * 512)
of_keys = own(CROSS, 0, 2**16 * 1024, 2 * (512 * 1024 + 64 * 1024))
of_gemm = own(GEMM, 2**15, 2 * 512 * 2**15, 2 * 512 * 128)
of_conv = own(CONV, 9 * 2**13, 2 * 4096 * 9 * 2**13, 2 * 4096 * 64)
of_scan = own(SCAN, 0, 7 * 2**26, 2 * 1024 * 4 * 512)
of_bag = own(BAG, 2**18, 2 * 1024 * 2**18)  # all of a table counts, as of an embedding
of_tables = own(
    {"op": "embedding_bag", "dim": 64, "samples": 16, "spread": "ep",
     "tables": [{"rows": 2**12}, {"rows": 2**14, "dim": 16, "lookups": 8}]}, 2**19,
    16 * (64 + 8 * 16) / 2, part__optimizer=times(1.0), part__parameters=plus(2**21 / GIB),
)  # fmt: skip
of_bytes = own(BYTES, path__memory=within(4e-4, 2e-3))  # there and back at 3.35 TB/s
over_two = {"also": TWO, "world": to(2), "part__parameters": times(0.5),
            "part__optimizer": times(0.5), "part__activations": ratio(0.4, 1.1)}  # fmt: skip


def of_ranks(keys: dict[str, Any], factor: float) -> Case:
    """What the rank with most to read takes and holds, over two of three tables."""
    near = times(factor, 0.02)
    return case("tables", [{"ops": [TABLES | keys]}], "p5 p95 above", mean=near,
                path__embedding=near, part__parameters=times(factor))  # fmt: skip


own_keys: dict[str, list[Case]] = {
    "op": [own({"op": "norm", "width": 1024}, 1024, 2**21, 2**21),
           # logits and their gradient
           own({"op": "loss", "width": 1024}, kept=2 * 2**20, path__loss=within(0, 1)),
           own({"op": "host_wait"})],
    "name": [case("own", [{"ops": [OWN_OP | {"name": "product"}]}])],
    "kind": [own({"op": "elementwise", "kind": "swiglu", "width": 512}, kept=4 * 2**19)],
    "split": [case("own", [{"ops": [OWN_OP | {"split": "rows"}]}], STEP, **over_two),
              case("own", [{"ops": [OWN_OP]}], STEP, **over_two)],
    **{key: [of_gemm] for key in "mk"},
    "n": [own(GEMM | {"n": {"a": 64, "b": 192}}, 2**15, 2 * 512 * 2**15, 2 * 512 * 128)],
    "groups": [own({"op": "grouped_gemm", "groups": 4, "m": 512, "n": 256, "k": 128}, 2**17,
                   2 * 512 * 2**15, 2 * 512 * 128)],
    **{key: [of_attention] for key in ("heads", "head_dim")},
    "kv_heads": [own(ATTENTION | {"kv_heads": 2}, 0, 2**30, 2 * 1024 * (2 * 512 + 256))],
    "v_head_dim": [own(ATTENTION | {"v_head_dim": 32}, 0, 3 * 2**28, 2 * 1024 * 3 * 512)],
    **{key: [of_keys] for key in ("queries", "keys")},
    "mask": [own(ATTENTION | {"mask": "full"}, 0, 2**31, 2 * 1024 * 4 * 512)],
    "window": [own(ATTENTION | {"window": 256}, 0, 7 * 2**26, 2 * 1024 * 4 * 512)],
    "state": [of_scan],
    "streams": [own(SCAN | {"streams": 256}, 0, 7 * 2**26, 2 * 1024 * 768)],
    **{key: [of_conv] for key in ("pixels", "channels", "filters", "kernel")},
    "rows": [own({"op": "norm", "rows": 64, "width": 1024}, 1024, 2**17, 2**17), of_bag],
    "width": [own({"op": "norm", "width": 512}, 512, 2**20, 2**20)],
    "dim": [of_bag],
    "lookups": [own(BAG | {"lookups": 4096}, 2**18, 2**29, path__embedding=within(4e-4, 4e-3))],
    "samples": [own(BAG | {"samples": 64}, 2**18, 2**25),
                own(ATTENTION | {"samples": 2}, 0, 2**31, 2 * 1024 * 8 * 512)],
    **{f"tables[].{key}": [of_tables] for key in ("rows", "dim", "lookups")},
    # three tables of which two are on the first of two ranks; then all on the second, or by rows
    "tables[].rank": [of_ranks({"tables": [TABLE | {"rank": 1}] * 3}, 1.5)],
    "tables[].shard": [of_ranks({"tables": [TABLE | {"shard": "row"}] * 3}, 0.75)],
    "shard": [of_ranks({"shard": "row"}, 0.75)],
    "spread": [own(BAG | {"spread": "ep"}, 2**18, 2**16, part__optimizer=times(1.0),
                   part__parameters=plus(2**20 / GIB))],
    "elements": [own({"op": "elementwise", "elements": 1e8, "passes": 5},
                     path__memory=within(4e-4, 2e-3))],
    "passes": [own({"op": "elementwise", "width": 1e5, "passes": 5},
                   path__memory=within(4e-4, 2e-3))],
    "bytes": [of_bytes],
    "backward": [own(BYTES | {"backward": 0}, path__memory=within(2e-4, 1e-3))],
    "parameters": [own(BYTES | {"parameters": 4096}, 4096),
                   own(SCAN | {"parameters": 64}, 64, 7 * 2**26 + 2**17, 2 * 1024 * 4 * 512)],
    "seconds": [own({"op": "kernel", "seconds": 1e-3}, path__compute=to(1e-3))],
    "launches": [own(BYTES | {"launches": 4000}, path__launch_gaps=within(1e-3, 0.1))],
    "backward_launches": [
        own(BYTES | {"backward_launches": 4000}, path__launch_gaps=within(1e-3, 0.1))
    ],
    "keeps": [own(BYTES | {"keeps": 1e8}, kept=1e8)],
    "routed": [own(BYTES | {"routed": True}, path__memory=within(4e-4, 2e-3))],
    "bf16": [case("own", [{"ops": [OWN_OP | {"bf16": True}]}], "ideal memory",
                  below={"parallelism.precision": "fp8"}, part__activations=times(2.0))],
    "group": [case("own", [{"ops": [OWN_OP, SUM]}], STEP, exposed=within(0.3, 1.0), **over_two)],
    "back": [case("own", [{"ops": [OWN_OP, SUM | {"back": "all_reduce"}]}], STEP, **over_two,
                  path__tp_all_reduce=within(3e-4, 2e-3))],
}  # fmt: skip


KEYS: dict[str, list[Case]] = {
    "model.dims": [case("own", {"tokens": 512}, STEP, flop=times(0.5), part__activations=times(0.5),
                        part__parameters=times(1.0))],
    "model.layers[].repeat": [case("own", [{"repeat": 3, "ops": [OWN_OP]}], STEP, flop=times(3.0),
                                   part__activations=times(3.0), part__parameters=times(3.0))],
    "model.layers[].name": [case("own", [{"name": "wide", "ops": [OWN_OP]}])],
    "model.layers[].at": [
        case("own", [*OWN["layers"], {"at": "last", "ops": [OWN_OP]}], STEP, flop=times(2.0),
             part__activations=times(2.0), part__parameters=times(2.0)),
    ],
    **{f"model.layers[].ops[].{key}": cases for key, cases in own_keys.items()},
    # ---------------------------------------------------------------- model, counted in `sizes`
    "model.name": [  # 3.21 billion parameters
        case("named", "llama3.2-3b", "ideal flop memory",
             part__parameters=to(2 * 3.213e9 / GIB, 1e-3)),
        case("gpu", "llama3-70b", also={"model": DENSE | {"n_kv_heads": 8}}),  # sizes go before
    ],
    "model.n_layers": [case("gpu", 12, STEP, compute=ratio(1.3, 1.5))],
    "model.hidden_size": [case("gpu", 2048, STEP)],
    "model.ffn_size": [case("gpu", 5632, STEP, path__gemm_mlp=ratio(1.6, 2.05),
                            path__attention=times(1.0))],
    "model.n_heads": [case("gpu", 16, STEP)],
    "model.n_kv_heads": [case("gpu", 2, STEP, path__gemm_mlp=times(1.0))],
    "model.vocab_size": [case("gpu", 16000, STEP, path__loss=ratio(1.6, 2.1),
                              path__gemm_mlp=times(1.0))],
    "model.seq_len": [case("gpu", 2048, STEP, part__activations=times(2.0))],
    "model.gated_mlp": [case("gpu", False, STEP, path__gemm_mlp=ratio(0.6, 0.75))],
    "model.tied_embeddings": [case("gpu", True, STEP, path__loss=times(1.0))],
    "model.head_size": [case("gpu", 64, STEP)],
    "model.v_head_size": [case("gpu", 64, STEP)],
    "model.attention_gate": [case("gpu", True, STEP, path__gemm_mlp=times(1.0))],
    "model.q_lora_rank": [case("latent", 512, STEP), case("latent", 0, STEP),
                          case("gpu", 256, STEP, path__gemm_mlp=times(1.0))],
    "model.kv_lora_rank": [case("latent", 256, STEP)],
    "model.rope_head_size": [case("latent", 64, STEP)],
    "model.n_experts": [case("sparse", 16, STEP)],
    "model.experts_per_token": [case("sparse", 4, STEP, path__gemm_expert=ratio(1.05, 2.1))],
    "model.expert_ffn_size": [case("sparse", 1024, STEP, path__gemm_expert=ratio(1.2, 2.1))],
    "model.expert_latent_size": [
        case("sparse", 256, STEP, path__gemm_expert=ratio(0.2, 0.9),
             path__gemm_mlp=ratio(1.05, 9.0)),
    ],
    "model.n_shared_experts": [case("sparse", 2, STEP, path__gemm_expert=times(1.0))],
    "model.shared_ffn_size": [case("sparse", 1024, STEP, path__gemm_expert=times(1.0)),
                              case("sparse", 1024, below={"model.n_shared_experts": 2})],
    "model.n_dense_layers": [case("sparse", 4, STEP, path__gemm_expert=times(0.5))],
    "model.moe_layer_interval": [case("sparse", 4, STEP, path__gemm_expert=times(0.25))],
    "model.window": [case("gpu", 256, STEP, path__attention=ratio(0.3, 0.99)),
                     case("gpu", 4096)],
    "model.full_attention_interval": [
        case("gpu", 4, STEP, path__attention=ratio(1.0, 2.0), below={"model.window": 256}),
    ],
    "model.layer_pattern": [
        case("mamba", "M*-M*-MM", STEP), case("mamba", "M*-M", STEP), case("mamba", "M- *-", STEP),
        case("mamba", "H- M-", STEP),
        case("mamba", "M- W-", STEP, also={"model.window": 128}),
    ],
    "model.mamba_heads": [case("mamba", 32, STEP)],
    "model.mamba_head_size": [case("mamba", 128, STEP)],
    "model.mamba_groups": [case("mamba", 4, STEP)],
    "model.mamba_state_size": [case("mamba", 128, STEP)],
    "model.linear_heads": [case("linear", 32, STEP)],
    "model.linear_key_heads": [case("linear", 16, STEP)],
    "model.linear_head_size": [case("linear", 64, STEP)],
    "model.rope": [case("gpu", False, STEP, path__memory=ratio(0.6, 0.98),
                        path__gemm_attention=times(1.0))],
    "model.durations.forward_s": [
        case("pipe", 2.0, ideal=to(44.0), mean=to(44.0), run__mean=to(4400.0)),
        # every microbatch waits for the last stage, the first one passes the others
        case("pipe", [1.0, 1.0, 1.0, 4.0], ideal=to(8 * 6.0 + 3 * 3.0)),
    ],
    "model.durations.backward_s": [case("pipe", 3.0, ideal=to(44.0))],
    # zero-bubble schedules idle for (stages - 1) (F + B - W), arXiv:2401.10241, table 2
    "model.durations.weight_s": [
        case("pipe", 0.5, ideal=to(30.0), below={"parallelism.schedule": "zb-h1"}),
    ],
    # ------------------------------------------------------------------------------ parallelism
    "parallelism.tp": [
        case("gpu", 2, STEP, also={"cluster.gpus_per_node": 2}, world=to(2), memory=ratio(0.5, 1),
             part__activations=times(0.5), path__gemm_mlp=ratio(0.5, 0.7),
             path__attention=ratio(0.5, 1.0), path__optimizer=ratio(0.49, 0.51)),
    ],
    "parallelism.cp": [
        case("gpu", 2, STEP, also={"cluster.nodes": 2}, world=to(2), memory=ratio(0.9, 1),
             part__activations=times(0.5), part__parameters=times(1.0), path__optimizer=times(1.0)),
    ],
    "parallelism.pp": [case("pipe", 8, ideal=to(45.0), world=to(8), loss__bubble=to(7 / 15))],
    "parallelism.vpp": [case("pipe", 2, ideal=to(28.5), loss__bubble=to(4.5 / 28.5))],
    "parallelism.dp": [
        case("one", 4, world=to(4)),
        case("gpu", 4, STEP, also=FOUR, world=to(4), flop=times(4.0), tokens=times(4.0),
             batch=times(4.0)),
    ],
    "parallelism.ep": [
        case("experts", 8, STEP, memory=ratio(0.9, 1.0), part__optimizer=ratio(0.5, 1.0)),
    ],
    "parallelism.expert_tp": [
        case("experts", 1, STEP, also={"parallelism.tp": 2, "parallelism.dp": 4},
             tokens=times(0.5), flop=times(0.5), memory=ratio(0.9, 1.0)),
        case("experts", 1, STEP, below={"parallelism.tp": 2, "parallelism.dp": 4},
             memory=ratio(0.95, 1.05), path__gemm_attention=times(1.0)),
    ],
    "parallelism.expert_imbalance": [
        case("experts", 2.0, STEP, memory=ratio(1.0, 1.05), path__gemm_expert=ratio(1.2, 2.01),
             path__ep_all_to_all=ratio(1.3, 2.01), path__gemm_attention=times(1.0)),
    ],
    "parallelism.expert_capacity": [
        case("experts", 1.0, STEP, memory=ratio(0.9, 1.0), path__gemm_expert=times(0.5),
             path__gemm_attention=times(1.0), below={"parallelism.expert_imbalance": 2.0}),
    ],
    # at most one of seven other nodes is sent to, in place of two copies
    "parallelism.expert_node_limit": [
        case("far experts", 1, STEP, path__ep_all_to_all=ratio(0.45, 0.7)),
    ],
    "parallelism.expert_dispatch": [
        # of messages as short as these it takes longer
        case("far experts", "deepep", STEP, path__ep_all_to_all=ratio(1.05, 2.0)),
    ],
    "parallelism.expert_overlap": [case("experts", True, STEP, exposed=ratio(0.2, 0.99))],
    # the host no longer holds up what layers with experts launch
    "parallelism.cuda_graphs": [
        case("experts", True, STEP, ideal=ratio(0.1, 0.7), below={"variability.host_scale": 1.0}),
    ],
    "parallelism.data_parallel": [
        case("net", "zero1", STEP, memory=ratio(0.8, 1.0), part__optimizer=times(0.25),
             part__parameters=times(1.0), path__optimizer=ratio(0.2, 0.4)),
        case("net", "fsdp", STEP, memory=ratio(0.8, 1.0), part__optimizer=times(1 / 6),
             part__parameters=ratio(0.2, 0.9)),
    ],
    "parallelism.shard_size": [
        case("fsdp", 4, STEP, memory=ratio(1.0, 1.1), part__optimizer=times(2.0),
             below={"parallelism.data_parallel": "hsdp", "parallelism.shard_size": 8}),
    ],
    "parallelism.reshard_after_forward": [
        case("fsdp", False, STEP, memory=ratio(1.0, 1.2), part__gathered=ratio(1.1, 8.0),
             part__optimizer=times(1.0), path__dp_all_gather=ratio(0.2, 0.9)),
    ],
    "parallelism.schedule": [
        # the first stage holds all 8 microbatches, not as many as there are stages
        case("grid", "gpipe", memory=ratio(1.0, 1.2), part__activations=ratio(3.0, 6.0)),
        case("pipe", "zb-h1", ideal=to(27.0)),
        # (stages - 1) (F + B - 2 W) of chunks: an idle 1.5 s, arXiv:2405.15362
        case("pipe", "zb-v", ideal=to(25.5)),
    ],
    # a transfer that is waited for runs beside no compute, which it would slow down
    "parallelism.p2p": [case("grid", "blocking", STEP, ideal=ratio(0.99, 1.1))],
    "parallelism.microbatches": [
        case("pipe", 16, ideal=to(57.0)),
        case("gpu", 4, STEP, tokens=times(2.0), flop=times(2.0), batch=to(4),
             path__optimizer=times(1.0), path__gemm_mlp=times(2.0)),
    ],
    "parallelism.global_batch": [
        case("pipe", 32, also={"parallelism.dp": 2}, ideal=to(57.0), world=to(8)),
        case("gpu", 12, STEP, also={"parallelism.microbatch_size": 3}, tokens=times(6.0),
             flop=times(6.0), batch=to(12), memory=ratio(1.0, 1.2)),
    ],
    "parallelism.microbatch_size": [
        case("gpu", 2, STEP, tokens=times(2.0), flop=times(2.0), batch=to(4),
             memory=ratio(1.0, 1.1), part__activations=times(2.0), path__optimizer=times(1.0)),
    ],
    # norms and residuals on all tokens of a rank, not on its half
    "parallelism.sequence_parallel": [
        case("grid", False, STEP, memory=ratio(1.0, 1.1), part__activations=ratio(1.2, 1.8),
             path__memory=ratio(1.05, 2.05)),
    ],
    # a third of forward and backward comes again
    "parallelism.recompute": [
        case("gpu", "full", STEP, memory=ratio(0.9, 1.0), part__activations=ratio(0.05, 0.5),
             path__gemm_mlp=ratio(1.25, 1.4), path__optimizer=times(1.0)),
        case("gpu", "selective", STEP, memory=ratio(0.9, 1.0),
             part__activations=ratio(0.3, 0.9), path__gemm_mlp=ratio(1.05, 1.3)),
    ],
    "parallelism.overlap": [case("net", True, STEP, exposed=ratio(0.5, 0.9999),
                                 path__optimizer=times(1.0))],
    # the gather of a layer is waited for before each, and one layer fewer is held
    "parallelism.prefetch": [
        case("fsdp", 0, STEP, ideal=ratio(1.05, 2.0)),
        case("fsdp", 3, STEP, memory=ratio(1.0, 1.1), part__gathered=ratio(1.1, 2.1)),
    ],
    # one bucket of all layers starts when the backward is over
    "parallelism.bucket_layers": [  # eight messages, not three of Megatron's 160 MB
        case("net", 1, STEP, exposed=ratio(1.05, 1.3),
             below={"cluster.links": {"network": {"bandwidth_gbytes_per_s": 1000.0}}}),
    ],
    "parallelism.layer_split": [
        case("grid", [5, 3], STEP, part__activations=times(1.25), memory=ratio(1.0, 1.1),
             path__attention=ratio(1.05, (8 * 5 + 3) / (9 * 4)), loss__stage_imbalance=ratio(2, 9)),
    ],
    "parallelism.precision": [
        case("gpu", "fp8", STEP, peak=to(1978.9e12, 1e-3), path__gemm_mlp=ratio(0.5, 0.9),
             path__attention=times(1.0), memory=ratio(0.98, 1.0),
             part__activations=ratio(0.8, 0.95)),
    ],
    "parallelism.framework": [
        # products no longer add up weight gradients
        case("gpu", "eager", STEP, memory=ratio(1.0, 1.1), path__memory=ratio(2.0, 3.5),
             path__gemm_mlp=ratio(0.8, 1.1), path__launch_gaps=ratio(3.0, 6.0)),
        case("gpu", "nanotron", STEP, memory=ratio(1.0, 1.1), path__memory=ratio(2.0, 3.0)),
        case("gpu", "transformers", STEP, memory=ratio(1.0, 1.1), path__memory=ratio(2.5, 6.0)),
    ],
    "parallelism.attention": [
        case("gpu", "efficient", STEP, path__attention=ratio(1.2, 4.0),
             path__gemm_mlp=times(1.0), path__memory=ratio(0.9, 0.95)),  # no kernels beside cuDNN's
    ],
    # Adam moves 30 bytes a parameter and holds 12
    "parallelism.optimizer": [
        case("gpu", "sgd", STEP, path__optimizer=times(14 / 30, 0.01), part__optimizer=times(1 / 3),
             path__memory=times(1.0)),
        case("gpu", "muon", STEP, path__optimizer=ratio(1.5, 20.0), part__optimizer=times(2 / 3),
             path__memory=times(1.0)),
    ],
    "parallelism.optimizer_dtype": [
        case("gpu", "bf16", STEP, path__optimizer=times(16 / 30, 0.01),
             part__optimizer=times(1 / 3), path__memory=times(1.0)),
    ],
    # Adam then holds the float32 gradient beside: 16 bytes for 12
    "parallelism.gradient_dtype": [
        case("net", "bf16", STEP, memory=ratio(1.0, 1.1), part__gradients=times(0.5),
             part__optimizer=times(4 / 3), path__dp_all_reduce=ratio(0.49, 0.52)),
    ],
    # a logit is kept in 4 bytes, not 2, and 10 more are needed beside it
    "parallelism.fused_loss": [
        case("gpu", False, STEP, memory=ratio(1.0, 1.05), part__workspace=times(5.0),
             path__loss=ratio(1.01, 1.5), path__memory=times(1.0),
             part__activations=plus(2 * 8000 * 1024 / GIB)),
    ],
    # ---------------------------------------------------------------------------------- cluster
    "cluster.nodes": [case("one", 8, also={"parallelism.dp": 8, "cluster.gpus_per_node": 1},
                           world=to(8))],
    "cluster.gpus_per_node": [
        # eight GPUs on two nodes: gradients cross the network
        case("nvlink", 4, STEP, also={"cluster.nodes": 2}, path__dp_all_reduce=ratio(0.2, 5.0)),
    ],
    "cluster.device": [
        case("gpu", "a100", "ideal power memory", peak=to(312e12), path__gemm_mlp=ratio(1.8, 4.0)),
        case("gpu", "h200", "power", limit=times(141 / 80), peak=times(1.0),
             ideal=ratio(0.8, 1.0)),
    ],
    "cluster.memory_gib": [case("gpu", 40.0, limit=to(40.0))],
    "cluster.nvlink_domain_gpus": [case("net", 4, STEP, path__dp_all_reduce=ratio(0.02, 0.3))],
    "cluster.pod_gpus": [
        case("net", 2, STEP, also={"cluster.oversubscription": 3.0},
             path__dp_all_reduce=ratio(1.4, 3.1)),
    ],
    "cluster.oversubscription": [
        case("net", 6.0, STEP, path__dp_all_reduce=ratio(1.6, 2.05),
             below={"cluster.pod_gpus": 2, "cluster.oversubscription": 3.0}),
    ],
    TIER + "*.gpus": [
        case("net", {"gpus": 2, "oversubscription": 4.0}, STEP,
             path__dp_all_reduce=ratio(1.8, 4.1)),
        case("net", {"gpus": 4, "oversubscription": 4.0}),  # nothing leaves it
    ],
    TIER + "*.oversubscription": [
        case("hop", {"gpus": 1, "oversubscription": 2.0}, HOP,
             path__p2p=times(hop_s(5.0) / hop_s())),
    ],
    TIER + "*.bandwidth_gbytes_per_s": [
        case("hop", {"gpus": 1, "bandwidth_gbytes_per_s": 2.0}, HOP,
             path__p2p=times(hop_s(2.0) / hop_s())),
    ],
    TIER + "*.total_gbits_per_s": [
        case("hop", {"gpus": 1, "total_gbits_per_s": 16.0}, HOP,
             path__p2p=times(hop_s(2.0) / hop_s())),
    ],
    TIER + "*.efficiency": [
        case("hop", {"gpus": 1, "total_gbits_per_s": 16.0, "efficiency": 0.4}, HOP,
             path__p2p=times(hop_s(2.0, efficiency=0.4) / hop_s())),
    ],
    TIER + "*.latency_us": [
        case("hop", {"gpus": 1, "latency_us": 300.0}, HOP,
             path__p2p=times(hop_s(latency=300.0) / hop_s())),
    ],
    TIER + "*.distance_km": [  # 5 us of fibre a kilometre
        case("hop", {"gpus": 1, "distance_km": 40.0}, HOP,
             path__p2p=times(hop_s(latency=250.0) / hop_s())),
    ],
    # of four units of one GPU a ring passes all, a hierarchy sends what others lack
    TIER + "*.collectives": [
        case("net", {"gpus": 2, "oversubscription": 4.0, "collectives": "hierarchical"}, STEP,
             below={TIER + "rack": {"gpus": 2, "oversubscription": 4.0}},
             path__dp_all_reduce=ratio(0.5, 0.75)),
    ],
    # racks of two: gradients stay inside, and half of the weights cross once in so many steps
    TIER + "*.sync_every": [
        case("net", {"gpus": 2, "oversubscription": 4.0, "sync_every": 10}, STEP,
             below={TIER + "rack": {"gpus": 2, "oversubscription": 4.0}},
             path__dp_all_reduce=ratio(0.1, 0.5)),
    ],
    TIER + "*.sync_overlap": [
        case("net", {"gpus": 2, "oversubscription": 4.0, "sync_every": 10, "sync_overlap": 10},
             STEP, below={TIER + "rack": {"gpus": 2, "oversubscription": 4.0, "sync_every": 10}},
             path__dp_sync_all_reduce=to(0.0)),
    ],
    # of gradients between racks, and of activations where a rack is farther than a node
    TIER + "*.cv": [
        case("net", {"gpus": 2, "cv": 0.5}, n=6400, within=ratio(100.0, 2000.0), below={
            E + "residual.scale": 1.0, TIER + "rack": {"gpus": 2, "cv": 0.0}}),
        case("hop", {"gpus": 1, "cv": 0.5, "latency_us": 50.1}, HOP, n=6400,
             within=ratio(5.0, 100.0), below={E + "residual.scale": 1.0, TIER + "rack": {
                 "gpus": 1, "cv": 0.0, "latency_us": 50.1}}),
    ],
    # congestion of a leaf hits the links of both nodes, or of each alone
    "cluster.leaf_nodes": [
        case("net", 1, below={E + "regime": {"probability": 0.2, "factor": 3.0}}, n=2560,
             within=ratio(0.3, 0.95)),
    ],
    LINK + "network.bandwidth_gbytes_per_s": [
        case("hop", 20.0, HOP, path__p2p=times(hop_s(20.0) / hop_s())),
    ],
    LINK + "network.latency_us": [
        case("hop", 100.0, HOP, path__p2p=times(hop_s(latency=100.0) / hop_s())),
    ],
    LINK + "network.efficiency": [
        case("hop", 0.4, HOP, path__p2p=times(hop_s(efficiency=0.4) / hop_s())),
    ],
    # messages of the gradients are long: the latency is a few percent of them
    LINK + "network.transport": [
        case("net", "efa", STEP, path__dp_all_reduce=ratio(1.05, 2.0)),
        case("hop", "slingshot", also={LINK + "network.latency_us": 50.0}),  # both are given
    ],
    LINK + "nvlink.bandwidth_gbytes_per_s": [
        case("nvlink", 50.0, STEP, path__dp_all_reduce=ratio(1.8, 2.0)),
    ],
    LINK + "nvlink.latency_us": [case("nvlink", 200.0, STEP, path__dp_all_reduce=ratio(1.02, 2.0))],
    LINK + "nvlink.efficiency": [
        case("nvlink", 0.25, STEP, path__dp_all_reduce=ratio(1.8, 2.0)),
    ],
    SCALE + "compute.time": [
        # but for the sums in memory of weight gradients
        case("gpu", 2.0, STEP, path__gemm_mlp=ratio(1.75, 2.0), path__attention=times(2.0),
             path__memory=times(1.0), path__optimizer=times(1.0)),
    ],
    SCALE + "memory.time": [
        case("gpu", 2.0, STEP, path__attention=times(1.0), path__memory=times(2.0),
             path__optimizer=times(2.0)),
    ],
    SCALE + "network.time": [
        case("hop", 2.0, HOP, path__p2p=times(2.0), path__gemm_mlp=times(1.0)),
    ],
    SCALE + "nvlink.time": [
        case("nvlink", 2.0, STEP, path__dp_all_reduce=times(2.0), path__gemm_mlp=times(1.0)),
    ],
    SCALE + "compute.cv": [case("gpu", 2.0, n=6400, within=ratio(1.1, 2.1),
                                below={E + "residual": {"scale": 1.0}})],
    SCALE + "memory.cv": [case("gpu", 3.0, n=6400, within=ratio(1.02, 3.1),
                               below={E + "residual": {"scale": 1.0}})],
    SCALE + "network.cv": [case("net", 2.0, n=6400, within=ratio(1.6, 2.4),
                                below={E + "residual": {"scale": 1.0}})],
    SCALE + "nvlink.cv": [case("nvlink", 2.0, n=6400, within=ratio(1.5, 2.4),
                               below={E + "residual": {"scale": 1.0}})],
    "cluster.power_limit_w": [
        case("gpu", 400.0, STEP, ideal=ratio(1.05, 2.0), power=within(200.0, 400.1),
             path__optimizer=times(1.0)),
    ],
    "cluster.clock_mhz": [
        # attention at its own clock of 1,770 MHz, faster where products take the most of theirs
        case("gpu", 990.0, STEP, path__gemm_mlp=ratio(1.5, 1.14 * (1365 / 990) ** 0.95 + 1e-6),
             path__attention=times(1770 / 990 * (1.14 / 1.10) ** (1 / 0.95)),
             path__optimizer=times(1.0), power=within(100.0, 500.0)),
    ],
    "cluster.throttled_share": [
        case("eight", 1.0, below={"cluster.device": "h100"},
             also={"cluster.throttled_power_w": 350.0}, mean=ratio(1.02, 2.0)),
    ],
    "cluster.throttled_power_w": [
        case("eight", 300.0, mean=ratio(1.02, 2.0),
             below={"cluster.throttled_share": 1.0, "cluster.throttled_power_w": 500.0}),
    ],
    "cluster.node_slowdowns": [
        case("one", {0: 1.5}, below=ONE, mean=times(1.5)),
        case("one", {0: {"compute": 1.5}}, below=ONE, mean=times(1.5)),
        case("one", {0: {"everything": 1.5}}, below=ONE, mean=times(1.5)),
        case("gpu", {0: {"memory": 2.0}}, path__optimizer=times(2.0), path__attention=ratio(1, 2)),
        case("hop", {0: {"network": 2.0}}, path__p2p=times(2.0), path__gemm_mlp=times(1.0)),
        # and launch gaps: an op's time is split over its classes as without
        case("nvlink", {0: {"other": 2.0}}, path__dp_all_reduce=times(2.0),
             path__gemm_mlp=ratio(1.0, 1.1)),
    ],
    # the slowest of eight decides; links, and what small products wait for, stay
    "cluster.gpu_slowdowns": [
        case("eight", [1, 1, 1, 1, 1, 1, 1, 1.5], mean=times(1.5)),
        case("nvlink", [1.5] * 8, below={"cluster": {"nodes": 1, "device": "h100"}},
             path__dp_all_reduce=times(1.0), path__gemm_mlp=ratio(1.3, 1.5)),
    ],
    # 20 K of leakage: 5.4 % of the power limit
    "cluster.gpu_temperatures": [
        case("eight", [55] * 7 + [75], mean=times((0.908 / 0.854) ** (1 / 2.64))),
    ],
    # the slow node is a spare, or has the last of two stages
    "cluster.hosts": [
        case("pipe", [0, 1, 2, 4], mean=to(33.0),
             below={"cluster": {"nodes": 5, "gpus_per_node": 1, "node_slowdowns": {3: 2.0},
                                "hosts": [0, 1, 2, 3]}}),
    ],
    # a stage's replicas on one node, or the stages of a replica
    "cluster.placement": [
        case("hop", "tp-cp-pp-dp", HOP, path__p2p=ratio(0.01, 0.5),
             below={"parallelism.dp": 2, "cluster.gpus_per_node": 2}),
    ],
    # the mean GPU is 1, with lemons: 1.5 / (0.7 + 0.3 * 1.5), or none beyond the limit
    "cluster.max_slowdown": [
        case("one", 1.6, n=MANY, p95=to(24.0 * 1.5 / 1.15, 1e-3),
             also={E + "rank": {"cv": 0.0, "lemon_fraction": 0.3, "lemon_slowdown": [1.5, 1.5]}}),
    ],
    # ------------------------------------------------------------------------------ variability
    "variability.library": [case("gpu", "h100-stressed", below={E + "residual.scale": 1.0}, n=6400,
                                 within=ratio(1.2, 20.0))],
    "variability.host_scale": [  # from free launches; the work and its end stay as they are
        case("gpu", 1.0, STEP, ideal=ratio(1.3, 5.0), path__launch_gaps=ratio(3.0, 100.0),
             path__optimizer=times(1.0), path__gemm_mlp=times(1.0)),
    ],
    "variability.dependence": [
        case("one", "none", below={E + "rank.cv": 0.1, E + "call.cv": 0.1}, n=MANY,
             cv=ratio(0.1, 0.7)),
    ],
    "variability.resolution": [
        case("gpu", "kernel", below={E + "residual": {"scale": 1.0}}, mean=times(1.0, 0.005)),
    ],
    # the measured step of a run or the whole: two draws of five percent
    E + "rank.cv": [case("one", 0.1, n=MANY, std=within(2.0, 2.8), within=to(0.0))],
    E + "rank.lemon_fraction": [
        case("one", 0.3, also={E + "rank.lemon_slowdown": [1.2, 1.2], E + "rank.cv": 0.0},
             n=MANY, below={"run.slowdown_thresholds": [1.1]}, above__1__1=within(0.2, 0.4)),
    ],
    E + "rank.lemon_slowdown": [
        case("one", [1.2, 1.2], n=MANY, p95=times(1.2 / 1.06 * 1.03 / 1.1, 1e-3),
             below={E + "rank": {"cv": 0.0, "lemon_fraction": 0.3, "lemon_slowdown": [1.1, 1.1]}}),
    ],
    # eight GPUs of one node alike: no slowest among them, and all of the variance is left
    E + "rank.node_share": [
        case("eight", 1.0, below={E + "rank": {"cv": 0.1, "node_share": 0.0}}, n=MANY,
             mean=ratio(0.85, 0.9), std=ratio(1.4, 2.0)),
    ],
    E + "rank.memory_loading": [
        case("gpu", 0.0, below={E + "rank": {"cv": 0.1, "memory_loading": 1.0}}, n=MANY,
             between=ratio(0.55, 0.9)),
    ],
    E + "step.cv": [case("one", 0.1, n=6400, std=within(2.25, 2.55), mean=ratio(0.99, 1.01))],
    # steps of 24 s: a drift of an hour moves the whole run, alone it averages out in 100 steps
    E + "step.correlation_time_s": [
        case("one", 3600.0, below={E + "step.cv": 0.1}, runs=400, run__cv=within(0.06, 0.1)),
        case("one", 0.0, below={E + "step": {"cv": 0.1, "correlation_time_s": 3600.0}}, runs=400,
             run__cv=within(0.008, 0.012)),
    ],
    # a run of 40 min around the slowest hour of a wave of amplitude 0.1 * sqrt(2)
    E + "step.diurnal_cv": [
        case("one", 0.1, below={"run.start": "2026-01-31T14:40"}, run__mean=ratio(1.1, 1.17)),
    ],
    E + "step.diurnal_peak_h": [
        case("one", 3.0, run__mean=ratio(0.7, 0.8), below={
            E + "step.diurnal_cv": 0.1, "run.start": "2026-01-31T14:40"}),
    ],
    # 8 microbatches of 3 s, each with a draw of its own
    E + "microbatch.cv": [
        case("one", 0.1, n=6400, cv=within(0.0330, 0.0377),
             below={E + "microbatch": {"cv": 0.0, "backward_loading": 1.0}}),
    ],
    E + "microbatch.backward_loading": [
        case("one", 0.0, below={E + "microbatch": {"cv": 0.1, "backward_loading": 1.0}}, n=6400,
             cv=times(1 / 3, 0.1)),
    ],
    E + "microbatch.loss_loading": [
        case("gpu", 0.0, below={E + "microbatch": {"cv": 0.1, "loss_loading": 1.0}}, n=6400,
             std=ratio(0.9, 0.995)),
    ],
    E + "expert.cv": [case("experts", 0.3, n=6400, within=within(1e-6, 1.0))],
    # forward and backward each have their own: sqrt(1 + 4) / 3 / sqrt(8)
    E + "call.cv": [case("one", 0.1, n=6400, cv=within(0.0246, 0.0281))],
    E + "residual.cv": [case("one", 0.1, n=6400, cv=within(0.0246, 0.0281))],
    # of one step of a forward and a backward: a normal law has less beyond than a lognormal one
    E + "residual.law": [
        case("one", "normal", below={E + "residual.cv": 0.2, "parallelism.microbatches": 1},
             n=MANY, cv=ratio(0.9, 1.1), p99=ratio(0.9, 0.98)),
    ],
    E + "residual.scale": [case("gpu", 2.0, below={E + "residual.scale": 1.0}, n=6400,
                                within=times(2.0, 0.1))],
    # a transfer that is hit takes 3 times one that is not, about the same mean
    E + "regime.probability": [
        case("hop", 0.2, below={E + "regime.factor": 3.0}, n=6400, within=within(1e-6, 1.0),
             mean=times(1.0, 0.02)),
    ],
    E + "regime.factor": [
        case("hop", 9.0, below={E + "regime": {"probability": 0.1, "factor": 3.0}}, n=6400,
             within=ratio(1.5, 4.0)),
    ],
    # congestion for hours holds for all of a run of a second
    E + "regime.duration_s": [
        case("hop", 7200.0, below={E + "regime": {"probability": 0.2, "factor": 3.0,
             "duration_s": 0.01}}, runs=400, run__cv=ratio(1.5, 20.0)),
    ],
    # a job of 24 s steps, stalls of 5 s: one in four steps at 37.5 an hour, less twice in one
    E + "stall.rate_per_hour": [
        case("one", 30.0, below={E + "stall": {"entity": "job", "duration_s": 5.0,
             "duration_cv": 0.0}}, n=6400, std=within(1.6, 2.3)),
    ],
    E + "stall.duration_s": [
        case("one", 10.0, n=6400, std=times(2.0, 0.05), below={E + "stall": {"entity": "job",
             "rate_per_hour": 30.0, "duration_s": 5.0, "duration_cv": 0.0}}),
    ],
    E + "stall.duration_cv": [
        case("one", 2.0, n=MANY, std=ratio(1.5, 2.8), below={E + "stall": {"entity": "job",
             "rate_per_hour": 30.0, "duration_s": 5.0, "duration_cv": 0.0}}),
    ],
    # the job stands where any of its eight GPUs does
    E + "stall.entity": [
        case("eight", "rank", n=6400, std=ratio(1.8, 3.2), below={E + "stall": {"entity": "job",
             "rate_per_hour": 20.0, "duration_s": 5.0, "duration_cv": 0.0}}),
    ],
    E + "jitter.mean_s": [case("one", 2.0, n=6400, mean=within(25.9, 26.1), std=within(1.8, 2.3))],
    E + "jitter.cv": [case("one", 0.5, below={E + "jitter.mean_s": 2.0}, n=6400,
                           std=times(0.5, 0.1), mean=times(1.0, 0.01))],
    E + "run.cv": [case("one", 0.1, runs=400, run__cv=within(0.085, 0.115))],
    "variability.model_error": [case("gpu", 0.1, runs=400, run__cv=within(0.085, 0.115))],
    # the one node is slow from the first episode on, for 24 h in the mean
    E + "fail_slow.rate_per_1000_node_days": [
        case("one", 1e6, also=SLOW, below=ONE, runs=400, run__mean=ratio(1.3, 2.0)),
    ],
    E + "fail_slow.factor": [
        case("one", 3.0, below=ONE | {E + "fail_slow": EPISODES}, runs=400,
             run__mean=ratio(1.2, 2.0)),
    ],
    E + "fail_slow.kind": [  # one GPU has no links
        case("one", "network", below=ONE | {E + "fail_slow": EPISODES}, run__mean=to(2400.0)),
    ],
    # half as many seconds slow of ten minutes as of twenty, where episodes are rare
    E + "fail_slow.duration": [
        case("one", "5min", below=ONE | RARE, runs=1000, run__mean=ratio(0.9, 0.99)),
    ],
    E + "fail_slow.duration_cv": [
        case("one", 3.0, runs=1000, run__std=ratio(1.2, 3.2), below=ONE | {
            E + "fail_slow": EPISODES | {"rate_per_1000_node_days": 2e5, "duration": "1min"}}),
    ],
    # a node that is found after a minute is replaced, at the cost of a restart
    E + "fail_slow.detection": [
        case("fail", "10h", below=FOUND, runs=100, run__mean=ratio(1.05, 3.0)),
    ],
    E + "fail_slow.replace": [
        case("fail", True, also={E + "fail_slow.detection": "1min"},
             below=CALM | {E + "fail_slow": EPISODES | OFTEN | {"duration": "9d"}}, runs=100,
             run__mean=ratio(0.5, 0.9)),
    ],
    # -------------------------------------------------------------------------------------- run
    "run.steps": [case("one", 50, steps=to(50), run__mean=to(1200.0))],
    # 2,048 tokens a step: the last one is not full
    "run.tokens": [case("gpu", 100_000, steps=to(49), run__mean=times(0.49))],
    "run.deadline": [
        case("one", "41min", finish=to(1.0)), case("one", "39min", finish=to(0.0)),
        case("one", 2401, finish=to(1.0)), case("one", 2399, finish=to(0.0)),
        case("one", "0.7h", finish=to(1.0)), case("one", "0.02d", finish=to(0.0)),
    ],
    "run.start": [case("one", "2026-01-31T23:30", asked=to(0.9))],
    "run.price_per_gpu_hour": [case("one", 3.0, cost=to(2.0)),
                               case("pipe", 3.0, cost=to(4 * 3.0 * 3300 / 3600))],
    "run.grid_intensity": [
        case("gpu", 400.0, below={"run.grid_intensity": 200.0}, carbon=times(2.0), grid=to(400.0)),
    ],
    "run.region": [
        case("gpu", "FRA", below={"run.region": "USA"}, carbon=times(56 / 386), grid=to(56.0)),
    ],
    "run.pue": [
        case("gpu", 2.2, below={"run.region": "USA"}, carbon=times(2.0), pue=to(2.2)),
    ],
    "run.probability": [
        case("one", 0.75, below={"run.start": "2026-01-31"}, asked=to(0.75)),
    ],
    "run.slowdown_thresholds": [
        case("one", [1.3, 1.5], below={"cluster": ONE_GPU | {"node_slowdowns": {0: 1.4}}},
             above__1__3=to(1.0), above__1__5=to(0.0)),
    ],
    # every 10th of 100 steps is followed by a checkpoint
    "run.checkpoint.interval_steps": [
        case("one", 25, below=SAVE, run__mean=to(2400.0 + 4 * 30.0)),
    ],
    "run.checkpoint.interval": [  # 240 s are 10 steps, 1 h is more than the run
        case("one", "1h", below=SAVE, run__mean=to(2400.0)),
        case("one", "8min", below=SAVE, run__mean=to(2400.0 + 5 * 30.0)),
    ],
    "run.checkpoint.write_s": [case("one", 60.0, below=SAVE, run__mean=to(2400.0 + 10 * 60.0))],
    "run.checkpoint.mode": [case("one", "async", below=SAVE, run__mean=to(2400.0))],
    "run.start_up": [case("one", "10min", run__mean=to(3000.0))],
    # steps of 24 s and 8 samples
    "run.loader.samples_per_s": [
        case("one", 0.25, mean=to(32.0)), case("one", 0.25, run__mean=to(3200.0)),
    ],
    "run.loader.prefetch": [case("one", 0, below=LOADS, mean=to(44.0))],
    "run.loader.cv": [
        case("one", 1.0, below=LOADS, n=6400, mean=ratio(1.05, 1.3), std=within(5.0, 20.0)),
    ],
    # one batch of 18 stands for 10 min, of which the buffer hides some
    "run.loader.stalls_per_hour": [
        case("one", 10.0, below=LOADS, also={"run.loader.stall_s": 600.0}, n=6400,
             mean=ratio(1.9, 2.5)),
    ],
    "run.loader.stall_s": [
        case("one", 600.0, below=LOADS, also={"run.loader.stalls_per_hour": 10.0}, n=6400,
             mean=ratio(1.9, 2.5)),
    ],
    # 20 failures a day of the one node, each 600 s and half of what 10 steps take
    "run.failures.per_1000_node_days": [
        case("fail", 40_000.0, runs=100, failures=times(2.2, 0.15), ettr=ratio(0.7, 0.95)),
    ],
    "run.failures.restart": [case("fail", 1200.0, runs=100, ettr=ratio(0.8, 0.95),
                                  run__mean=ratio(1.1, 1.2))],
    "run.failures.restart_success": [case("fail", 0.5, runs=100, ettr=ratio(0.8, 0.95),
                                          run__mean=ratio(1.1, 1.3))],
    "run.failures.detection": [case("fail", 600, runs=100, run__mean=ratio(1.1, 1.2))],
    # one node and no spare: each failure waits for a repair of an hour, or of a day
    "run.failures.spares": [case("fail", 0, also={"run.failures.repair": "1h"}, runs=100,
                                 run__mean=ratio(1.3, 2.5))],
    # each stops one of eight replicas for an hour, or all
    "run.failures.policy": [
        case("eight", "shrink", runs=100, run__mean=ratio(0.4, 0.8), below={
             "cluster": {"nodes": 8, "gpus_per_node": 1}, "run.steps": 20_000, **SAVE,
             "run.failures": {"per_1000_node_days": 2000.0, "spares": 0, "repair": "1h"}}),
    ],
    "run.failures.repair": [
        case("fail", "4h", below={"run.failures.spares": 0, "run.failures.repair": "1h"}, runs=100,
             run__mean=ratio(1.5, 4.0)),
    ],
    "run.failures.causes.*.share": [
        case("fail", causes("share", 9.0), below={"run.failures.causes": causes()}, runs=100,
             run__mean=ratio(0.7, 0.95)),
    ],
    "run.failures.causes.*.detection": [
        case("fail", causes("detection", 1200), below={"run.failures.causes": causes()}, runs=100,
             run__mean=ratio(1.08, 1.3)),
    ],
    "run.failures.causes.*.restart": [
        case("fail", causes("restart", 1200), below={"run.failures.causes": causes()}, runs=100,
             run__mean=ratio(1.08, 1.4)),
    ],
    # a node that is not replaced needs no spare, of which there are none
    "run.failures.causes.*.replace": [
        case("fail", causes("replace", False), runs=100, run__mean=ratio(0.2, 0.8),
             below={"run.failures": {"per_1000_node_days": 20_000.0, "spares": 0, "repair": "2h",
                                     "causes": causes()}}),
    ],
    # two nodes at once where one spare is: all wait for a repair
    "run.failures.causes.*.nodes": [
        case("pipe", {"rack": {"share": 1.0, "nodes": 2}}, runs=100, run__mean=ratio(1.2, 5.0),
             below={"cluster": {"nodes": 4, "gpus_per_node": 1}, "run.steps": 1000,
                    "run.failures": {"per_1000_node_days": 5000.0, "spares": 1, "repair": "1h",
                                     "restart": 60.0, "causes": {"rack": {"share": 1.0}}}}),
    ],
    "run.failures.causes.*.repair": [
        case("fail", causes("repair", "8h"), runs=100, run__mean=ratio(1.2, 3.0),
             below={"run.failures": {"per_1000_node_days": 20_000.0, "spares": 0, "repair": "2h",
                                     "causes": causes()}}),
    ],
    # 10 steps of half the batch, then 95 of the whole
    "run.batch_ramp[].global_batch": [
        case("gpu", [{"tokens": 10 * 1024, "global_batch": 1}], steps=to(105), run__mean=ratio(
            0.98, 1.05), below={"run.tokens": 100 * 2048}),
    ],
    "run.batch_ramp[].tokens": [
        case("gpu", [{"tokens": 40 * 1024, "global_batch": 1}], steps=to(120), run__mean=ratio(
            1.0, 1.2), below={"run.tokens": 100 * 2048}),
    ],
    "run.evaluation.interval_steps": [
        case("one", 50, below={"run.evaluation": {"interval_steps": 10, "duration": "1min"}},
             run__mean=within(2400.0 + 59, 2400.0 + 121)),
    ],
    "run.evaluation.duration": [
        case("one", "2min", below={"run.evaluation": {"interval_steps": 20, "duration": "1min"}},
             run__mean=within(2400.0 + 479, 2400.0 + 601)),
    ],
}  # fmt: skip


# ---------------------------------------------------------------------------------------- tests
SCHEMA = prism.Job.model_json_schema()


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references, and leave `null` out."""
    if "$ref" in schema:
        return resolved(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    forms = schema.get("anyOf") or schema.get("oneOf")
    return resolved(next(f for f in forms if f.get("type") != "null")) if forms else schema


def keys_below(schema: Mapping[str, Any], path: str) -> set[str]:
    """Find the keys of a schema that are no blocks; `*` is a name of the user's."""
    found = resolved(schema)
    if "properties" in found:
        parts = (keys_below(s, f"{path}.{k}".lstrip(".")) for k, s in found["properties"].items())
        return set().union(*parts)
    named = [*found.get("patternProperties", {}).values(), found.get("additionalProperties")]
    inner = [("[]", found.get("items")), *((".*", entry) for entry in named)]
    for sign, entry in inner:
        if isinstance(entry, dict) and "properties" in resolved(entry):
            return keys_below(entry, path + sign)
    return {path}


ELSEWHERE = {
    "name", "source",  # of the file
    "variability.model", "variability.ranks",  # of a fitted trace: test_modelfile.py
    "variability.kernel_scale",  # likewise: test_periods.py
}  # fmt: skip


def test_every_key_of_a_job_has_a_case():
    assert keys_below(SCHEMA, "") == set(KEYS) | ELSEWHERE


def written(key: str, value: Any) -> dict[str, Any]:
    """A value by the key that takes it: an entry of a tier, a ramp or causes is set whole."""
    if key.startswith("cluster.tiers."):
        return {"cluster.tiers.rack": value}
    return {key.partition("[")[0].partition(".*")[0]: value}


CASES = [(key, i, c) for key, cases in KEYS.items() for i, c in enumerate(cases)]


@pytest.mark.parametrize(("key", "i", "c"), CASES, ids=[f"{key}-{i}" for key, i, _ in CASES])
def test_a_key_moves_its_figures_and_no_others(key: str, i: int, c: Case) -> None:
    change = {**written(key, c.value), **c.also}
    old = figures(c.base, repr(c.below), c.replicates, c.runs)
    new = figures(c.base, repr({**c.below, **change}), c.replicates, c.runs)
    moves = dict(c.moves)
    counted = c.base not in ("own", "tables") and key != "model.name" and "durations" not in key
    if key.startswith("model.") and counted:
        sized = {k: v for k, v in {**c.below, **change}.items() if k.startswith("model.")}
        moves |= {name: want for name, want in sizes(c.base, sized).items() if name not in moves}
    wrong = {name: (old.get(name), new.get(name)) for name, expected in moves.items()
             if not expected(old.get(name, 0.0), new[name])}  # fmt: skip
    assert not wrong
    follows = {"memory"} if any(name.startswith("part.") for name in moves) else set()
    moved = {name: (old.get(name), new.get(name)) for name in STILL
             if name not in moves and name not in c.free and name not in follows
             and not math.isclose(old.get(name, 0), new.get(name, 0), rel_tol=2e-5)}  # fmt: skip
    assert not moved
