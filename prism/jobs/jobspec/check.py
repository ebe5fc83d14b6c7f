"""What must hold between the keys of a job, and what is legal but not modelled yet.

A check gets all blocks, with defaults for bad values, so that all errors of a file are reported
at once; a problem whose keys include a bad value is left out (`prism.jobs.jobspec.messages`). What
depends on a device or on a step's length is checked where they are known.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import Any

from pydantic import BaseModel

from prism.common.text import format_count
from prism.jobs.devices import LIBRARIES
from prism.jobs.dimensions import TOKENS
from prism.jobs.jobspec.blocks import UNMODELLED, Blocks
from prism.jobs.jobspec.clustercheck import check_cluster, check_tiers
from prism.jobs.jobspec.modelcheck import (
    check_experts,
    check_latents,
    check_model,
    check_pattern,
    check_split,
)
from prism.jobs.jobspec.problem import Problem, undivided, unmodelled
from prism.jobs.pipelineshape import TRAITS

# Keys without effect where another one is set, or is not: that one, which of the two, words, keys.
_NO_EFFECT = (
    ("model.durations", True, "beside model.durations; leave one of the two out",
     ("parallelism.layer_split", "parallelism.recompute", "parallelism.prefetch",
      "parallelism.microbatch_size", "cluster.scale.memory", "cluster.scale.nvlink",
      "cluster.scale.network", "cluster.tiers", "run.batch_ramp")),
    ("model.n_experts", False, "without experts; set model.n_experts, or drop it",
     ("model.experts_per_token", "model.expert_ffn_size", "model.expert_latent_size",
      "model.n_shared_experts", "model.shared_ffn_size", "model.n_dense_layers",
      "model.moe_layer_interval", "parallelism.cuda_graphs")),
    ("model.window", False, "without a window; set model.window, or drop it",
     ("model.full_attention_interval",)),
    ("model.layer_pattern", True, "beside model.layer_pattern; leave one of the two out",
     ("model.n_dense_layers", "model.moe_layer_interval", "model.full_attention_interval")),
    ("model.layer_pattern", False, "without model.layer_pattern; give one, or drop it",
     ("model.mamba_heads", "model.mamba_head_size", "model.mamba_groups",
      "model.mamba_state_size", "model.linear_heads", "model.linear_key_heads",
      "model.linear_head_size")),
    ("parallelism.ep", False, "with ep = 1; set ep, or leave it out",
     ("parallelism.expert_tp", "parallelism.expert_node_limit", "parallelism.expert_dispatch",
      "parallelism.expert_capacity", "parallelism.expert_overlap", "variability.effects.expert")),
    ("variability.model", True, "with a fitted model, which has the batch of its trace; drop it",
     ("run.batch_ramp", "run.loader")),
    ("run.loader.stalls_per_hour", False, "without stalls; give their rate, or drop it",
     ("run.loader.stall_s",)),
    ("run.loader.stall_s", False, "without a length; give stall_s, or drop it",
     ("run.loader.stalls_per_hour",)),
    ("run.failures.spares", False, "where spares are always enough; give spares, or drop it",
     ("run.failures.repair", "run.failures.policy")),
    ("variability.effects.fail_slow.replace", False,
     "where a slow node stays; set replace: true, or drop it",
     ("variability.effects.fail_slow.detection",)),
)  # fmt: skip


def _is_set(b: Blocks, key: str) -> bool | None:
    """Whether a key has another value than its default; None where there is no such block."""
    *path, last = key.split(".")
    block: Any = b
    for name in path:
        block = getattr(block, name, None)
    if not isinstance(block, BaseModel):
        return None
    value = getattr(block, last)
    return value is not None and value != type(block).model_fields[last].default


def _check_effect(b: Blocks) -> Iterator[Problem]:
    for because, given, words, keys in _NO_EFFECT:
        for key in keys if _is_set(b, because) is given else ():
            if _is_set(b, key):
                yield f"has no effect {words}", key, because
    if b.parallelism.ep == 1 and (b.parallelism.expert_imbalance or 1) > 1:
        key = "parallelism.expert_imbalance"
        yield "has no effect with ep = 1; set ep, or leave it out", key, "parallelism.ep"


def _check_modelled(b: Blocks) -> Iterator[Problem]:
    m, p = b.model, b.parallelism
    for name, values in UNMODELLED.items():
        if (value := getattr(p, name)) in values:
            yield unmodelled(value, values[value], f"parallelism.{name}")
    ep, data_parallel, key = "parallelism.ep", "parallelism.data_parallel", "variability.resolution"
    if p.ep > 1 and p.data_parallel == "hsdp":
        yield unmodelled("hsdp with ep > 1", "fsdp or zero1", data_parallel, ep)
    if b.variability.resolution == "kernel":
        for applies, what, by in (
            *((getattr(p, d) > 1, f"{d} = {getattr(p, d)}", f"parallelism.{d}") for d in TOKENS),
            (p.ep > 1, f"ep = {p.ep}", ep),
            (p.data_parallel == "hsdp", "hsdp", data_parallel),
        ):
            if applies:
                yield unmodelled(f"kernel resolution with {what}", "op", key, by)
    key, experts = "parallelism.p2p", "model.n_experts"
    if p.p2p == "blocking" and (p.splits or (p.schedule == "interleaved" and p.pp > 1)):
        what = f"blocking with {p.schedule}"
        yield unmodelled(what, "async", key, "parallelism.schedule", "parallelism.vpp")
    if p.recompute == "selective" and (m.n_experts or m.kv_lora_rank or m.q_lora_rank):
        what, key = "selective with experts or latent attention", "parallelism.recompute"
        yield unmodelled(what, "none or full", key, experts, "model.kv_lora_rank", "model.name")
    if m.n_experts and p.tp > 1 and not p.sequence_parallel:
        what, key = "false with experts and tp > 1", "parallelism.sequence_parallel"
        yield unmodelled(what, "true", key, "parallelism.tp", experts)


def _check_data_parallel(b: Blocks) -> Iterator[Problem]:
    p, key, by = b.parallelism, "parallelism.shard_size", "parallelism.data_parallel"
    if p.data_parallel == "none" and p.dp > 1:
        text = f"none, but dp = {p.dp}: replicas must share gradients; set ddp, zero1 or fsdp"
        yield text, by, "parallelism.dp"
    if p.data_parallel == "hsdp" and b.model.durations is not None:
        text = "hsdp has no effect beside model.durations, which know no parameters; set ddp"
        yield text, by, "model.durations"
    if p.shard_size is not None and p.data_parallel != "hsdp":
        text = f"{p.shard_size} has no effect with {p.data_parallel}; set data_parallel: hsdp, "
        yield text + "or leave it out", key, by, "parallelism.dp"
    elif p.shard_size is not None and p.dp % p.shard_size:
        yield undivided(p.shard_size, "dp", p.dp, key, by, "parallelism.dp")


def _check_batch(b: Blocks) -> Iterator[Problem]:
    p, key = b.parallelism, "parallelism.global_batch"
    each = p.dp * p.microbatch_size
    keys = (key, "parallelism.dp", "parallelism.microbatch_size", "parallelism.microbatches")
    if p.global_batch is None:
        return
    if p.global_batch % each:
        down, up = p.global_batch // each * each, ceil(p.global_batch / each) * each
        text = f"{p.global_batch}, expected a multiple of dp * microbatch_size = {p.dp} * "
        text += f"{p.microbatch_size} = {each}; the nearest: "
        yield text + " or ".join(str(n) for n in (down, up) if n), *keys
    elif p.global_batch != each * p.microbatches:
        text = f"{p.global_batch}, but dp * microbatches * microbatch_size = {p.dp} * "
        text += f"{p.microbatches} * {p.microbatch_size} = {each * p.microbatches}; drop one of "
        yield text + "global_batch and microbatches", *keys


def _check_schedule(b: Blocks) -> Iterator[Problem]:
    p, vpp, many = b.parallelism, "parallelism.vpp", "parallelism.microbatches"
    batch = "parallelism.global_batch"
    keys = ("parallelism.schedule", vpp, "parallelism.pp")
    chunks, rounds = TRAITS[p.schedule].chunks or p.vpp, TRAITS[p.schedule].rounds
    if p.vpp > 1 and p.pp == 1:
        text = f"{p.vpp} chunks per stage need a pipeline, but pp = 1; set vpp: 1"
        yield text, vpp, "parallelism.pp"
    elif p.schedule == "interleaved" and p.vpp == 1:
        yield "interleaved needs vpp > 1; set 1f1b, or leave it out", *keys
    elif p.pp > 1 and chunks != p.vpp:
        each = "one chunk" if chunks == 1 else format_count(chunks, "chunk")
        way_out = f"vpp: {chunks}" if p.splits else "interleaved"
        yield f"{p.schedule} has {each} per stage, but vpp = {p.vpp}; set {way_out}", *keys
    if p.splits and p.microbatches < rounds * p.pp:
        text = (
            f"{p.microbatches}, but {p.schedule} needs {rounds} for each of the "
            f"{format_count(p.pp, 'stage')}; "
        )
        text += f"set {rounds * p.pp} or more, or schedule: zb-v"
        yield text, many, batch, "parallelism.pp", keys[0]
    if p.schedule == "interleaved" and p.pp > 1 and p.microbatches % p.pp:
        down, up = p.microbatches // p.pp * p.pp, ceil(p.microbatches / p.pp) * p.pp
        text = (
            f"interleaved with {format_count(p.microbatches, 'microbatch')} is not modelled "
            "yet, expected a "
        )
        text += f"multiple of pp = {p.pp}; the nearest supported: "
        text += " or ".join(str(n) for n in (down, up) if n)
        yield text, many, batch, "parallelism.pp", *keys


def _check_variability(b: Blocks) -> Iterator[Problem]:
    v, residual, rank = b.variability, b.variability.effects.residual, b.variability.effects.rank
    if v.ranks == "measured" and v.model is None:
        text = "measured needs a fitted model; set variability.model: MODEL.nc, or drawn"
        yield text, "variability.ranks", "variability.model"
    if v.kernel_scale != 1.0 and v.model is None:
        text = "is a what-if of a fitted trace; set variability.model: MODEL.nc, or leave it out"
        yield text, "variability.kernel_scale", "variability.model"
    if v.library == "":
        sets = ", ".join(LIBRARIES.values())
        text = f"no distribution set is shipped for {b.cluster.device}; name one ({sets}) or none"
        yield text, "variability.library", "cluster.device"
    if residual is not None:
        key = "variability.effects.residual"
        if residual.law is not None and residual.cv is None:
            yield f"{residual.law} has no spread; give its cv", f"{key}.law", f"{key}.cv"
        if residual.scale is not None and residual.cv is not None:
            text = "scales the library's distributions, but cv replaces them; keep one of the two"
            yield text, f"{key}.scale", f"{key}.cv"
        elif residual.scale is not None and v.library is None:
            text = "scales the library's distributions, but there is no library; give cv instead"
            yield text, f"{key}.scale", "variability.library"
    if rank is not None and rank.lemon_slowdown is not None:
        key, (low, high) = "variability.effects.rank.lemon_slowdown", rank.lemon_slowdown
        limit = b.cluster.max_slowdown or inf
        if low > high:
            yield f"[{low:g}, {high:g}] runs downwards; give the lower first", key
        elif high > limit:
            text = f"reaches {high:g}, but GPUs beyond cluster.max_slowdown = {limit:g} are "
            text += "taken out; raise max_slowdown or lower this"
            yield text, key, "cluster.max_slowdown"


def _rises(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


def _check_run(b: Blocks) -> Iterator[Problem]:
    r, durations = b.run, b.model.durations
    if r.steps is not None and r.tokens is not None:
        yield "given beside steps; keep one of the two", "run.tokens", "run.steps"
    if r.grid_intensity is not None and r.region is not None:
        text = "given beside region; keep one of the two"
        yield text, "run.grid_intensity", "run.region"
    if r.tokens is not None and durations is not None and b.model.seq_len < 1:
        text = "a step's tokens are not known with durations; set steps, or model.seq_len"
        yield text, "run.tokens", "model.seq_len", "model.durations"
    if not _rises([phase.tokens for phase in r.batch_ramp or ()]):
        text = "expected phases in the order of their tokens, which count from the start"
        yield text, "run.batch_ramp"
    if not r.slowdown_thresholds or not _rises(r.slowdown_thresholds):
        yield "expected rising numbers; write [1.05, 1.1, 1.2]", "run.slowdown_thresholds"
    if r.checkpoint is not None:
        yield from _check_checkpoint(b)


def _check_checkpoint(b: Blocks) -> Iterator[Problem]:
    c, key = b.run.checkpoint, "run.checkpoint"
    assert c is not None
    interval, steps, write_s = f"{key}.interval", f"{key}.interval_steps", f"{key}.write_s"
    if c.interval is None and c.interval_steps is None:
        text = "says not how often; give interval: 30min, or interval_steps: 500"
        yield text, key, interval, steps
    elif c.interval is not None and c.interval_steps is not None:
        yield "given beside interval; keep one of the two", steps, interval
    if c.write_s is None and b.model.durations is not None:
        text = "missing: without a model nothing says how large a checkpoint is; give its seconds"
        yield text, write_s, key, "model.durations"
    if c.interval is not None and c.write_s is not None and c.write_s >= c.interval:
        text = f"a checkpoint takes {c.write_s:g} s to write, but one begins every "
        yield text + f"{c.interval:g} s; make the interval longer", interval, write_s


def _check_slow_nodes(b: Blocks) -> Iterator[Problem]:
    slow, r, key = b.variability.effects.fail_slow, b.run, "variability.effects.fail_slow"
    if slow is None:
        return
    if slow.rate_per_1000_node_days is None:
        text = "missing, expected episodes per 1,000 node-days; give it"
        yield text, f"{key}.rate_per_1000_node_days", key
    if slow.replace and slow.detection is None:
        text = "missing: a slow node is replaced once it is found; give for example 10min"
        yield text, f"{key}.detection", f"{key}.replace"
    if slow.replace and (r.failures == "none" or (r.failures is None and b.model.durations)):
        text = "a replaced node means a restart; set run.failures, whose restart it takes"
        yield text, f"{key}.replace", "run.failures"


def _check_causes(b: Blocks) -> Iterator[Problem]:
    """Nodes that fail together are of the cluster, and need spares that may run out."""
    failures, nodes = b.run.failures, b.cluster.nodes
    if failures is None or failures == "none":
        return
    if failures.policy == "shrink":
        key, p = "run.failures.policy", b.parallelism
        if p.dp == 1:
            yield "no replica would be left; write replace", key, "parallelism.dp"
        if p.ep > 1:
            yield unmodelled("shrink with ep > 1", "replace", key, "parallelism.ep")
    for name, cause in failures.causes.items():
        key = f"run.failures.causes.{name}"
        if nodes is not None and cause.nodes > nodes:
            text = f"{cause.nodes} nodes fail together, of {nodes}; give at most these"
            yield text, f"{key}.nodes", "cluster.nodes"
        for given, value in (("nodes", cause.nodes > 1), ("repair", cause.repair)):
            if value and (failures.spares is None or not cause.replace):
                text = "has no effect where no node waits for a spare; give spares, or drop it"
                yield text, f"{key}.{given}", "run.failures"


_CHECKS = (
    *(check_model, check_split, check_experts, check_latents, check_pattern),
    *(check_cluster, check_tiers),
    *(_check_data_parallel, _check_batch, _check_schedule, _check_modelled, _check_effect),
    *(_check_variability, _check_run, _check_causes, _check_slow_nodes),
)


def find_problems(blocks: Blocks) -> list[Problem]:
    """Run every check."""
    return [problem for check in _CHECKS for problem in check(blocks)]
