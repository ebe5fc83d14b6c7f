"""What must hold between the keys of a job, and what is legal but not modelled yet.

Each check is a generator of problems, given the blocks that were valid by themselves, so that
all mistakes of a file are reported at once.
"""

from collections.abc import Callable, Iterator
from math import ceil, lcm

import numpy as np

from prism.jobs.jobspec.blocks import (
    DEVICE_LIBRARY,
    SIZES,
    UNMODELLED,
    ModelBlock,
    ParallelismBlock,
)
from prism.jobs.jobspec.expertcheck import check_experts
from prism.jobs.jobspec.hardware import HardwarePart, HardwareScale
from prism.jobs.jobspec.presets import PRESETS
from prism.jobs.jobspec.problem import Blocks, Problem, unmodelled
from prism.jobs.jobspec.runcheck import check_run, check_slow_nodes
from prism.jobs.jobspec.tiercheck import check_tiers
from prism.jobs.jobspec.values import hosts_problem
from prism.jobs.jobspec.yaml import near
from prism.jobs.layersplit import auto_split, valid_split
from prism.jobs.pipelineshape import TRAITS


# -------------------------------------------------------------------------------- layer splits
def _shown(split: list[int] | tuple[int, ...]) -> str:
    return "[" + ", ".join(str(n) for n in split) + "]"


def _check_split(b: Blocks) -> Iterator[Problem]:
    if b.model is None or b.parallelism is None:
        return
    p, n_layers = b.parallelism, b.model.n_layers
    key, n_chunks = "parallelism.layer_split", p.pp * p.vpp
    keys = (key, "parallelism.vpp", "parallelism.pp", "model.n_layers", "model.name")
    if b.model.durations is not None:
        if p.layer_split != "auto":
            yield Problem(key, keys, "model.durations are given, so no layers are split; drop it")
        return
    if n_layers < 1:
        return
    chunks = f"pp*vpp = {p.pp}*{p.vpp} = {n_chunks} chunks"
    if n_chunks > n_layers + 2:
        pp, vpp = (p.pp, (n_layers + 2) // p.pp) if p.pp <= n_layers + 2 else (n_layers, 1)
        fitting = auto_split(n_layers, pp * vpp) or valid_split(n_layers, pp * vpp)
        text = f"{n_layers} layers do not fill {chunks}; with pp: {pp} and vpp: {vpp} a valid "
        yield Problem(key, keys, f"{text}layer_split: {_shown(fitting)}")
        return
    valid = _shown(auto_split(n_layers, n_chunks) or valid_split(n_layers, n_chunks))
    way_out = f"a valid layer_split: {valid}"
    if p.layer_split == "auto":
        if auto_split(n_layers, n_chunks) is None:
            text = f"{n_layers} layers do not divide evenly over {chunks}; {way_out}"
            yield Problem(key, keys, text)
    elif len(p.layer_split) != n_chunks:
        text = f"has {len(p.layer_split)} counts, expected one for each of {chunks}; {way_out}"
        yield Problem(key, keys, text)
    elif sum(p.layer_split) != n_layers:
        text = f"adds up to {sum(p.layer_split)}, expected n_layers = {n_layers}; {way_out}"
        yield Problem(key, keys, text)


# --------------------------------------------------------------------------------------- model
def _check_model(b: Blocks) -> Iterator[Problem]:
    if b.model is None:
        return
    m = b.model
    if m.name is not None and m.name not in PRESETS:
        meant = near(m.name, PRESETS)
        hint = f"did you mean {meant[0]}?" if meant else "or leave it out and give the sizes"
        text = f"expected one of {', '.join(PRESETS)}, got {m.name!r}; {hint}"
        yield Problem("model.name", ("model.name",), text)
        return
    if m.durations is not None:
        yield from _check_durations(b, m)
        return
    missing = [size for size in SIZES if getattr(m, size) < 1]
    if missing and len(missing) < len(SIZES):
        for name in missing:
            key = f"model.{name}"
            yield Problem(key, (key,), "missing or 0, expected at least 1; give it, or a name")
        return
    if missing:
        text = f"says no model; give a name ({', '.join(PRESETS)}), sizes, or durations"
        yield Problem("model", ("model", "model.name", "model.durations"), text)
        return
    for key, size, by, n in (
        ("hidden_size", m.hidden_size, "n_heads", m.n_heads),
        ("n_heads", m.n_heads, "n_kv_heads", m.n_kv_heads),
    ):
        if size % n and not (key == "hidden_size" and m.head_size):
            text = f"{size} is not a multiple of {by} = {n}; change one"
            yield Problem(f"model.{key}", (f"model.{key}", f"model.{by}"), text)


def _check_durations(b: Blocks, m: ModelBlock) -> Iterator[Problem]:
    sizes = [size for size in SIZES[:-1] if getattr(m, size) > 0]
    if m.name is not None or sizes:
        key = f"model.{sizes[0]}" if m.name is None else "model.name"
        text = "has no effect beside durations; keep one of the two"
        yield Problem(key, (key,), text)
    assert m.durations is not None
    d = m.durations
    both = (("forward_s", d.forward_s), ("backward_s", d.backward_s))
    stages = None if b.parallelism is None else b.parallelism.pp
    for name, value in (*both, ("weight_s", d.weight_s)):
        if isinstance(value, tuple) and stages is not None and len(value) != stages:
            key = f"model.durations.{name}"
            text = f"has {len(value)} durations, expected one per stage, pp = {stages}"
            way_out = "give one number, or as many as stages"
            yield Problem(key, (key, "parallelism.pp"), f"{text}; {way_out}")
    if d.weight_s is not None:
        late, whole = (v if isinstance(v, tuple) else (v,) for v in (d.weight_s, d.backward_s))
        n = max(len(late), len(whole))
        pairs = zip(late * (n // len(late)), whole * (n // len(whole)), strict=False)
        if any(weight > backward for weight, backward in pairs):
            key = "model.durations.weight_s"
            text = "is more than backward_s, of which it is a part; give less, or leave it out"
            yield Problem(key, (key, "model.durations.backward_s"), text)
    if b.parallelism is not None:
        for name, plain in (("recompute", "none"), ("prefetch", 1), ("microbatch_size", 1)):
            if getattr(b.parallelism, name) != plain:
                key = f"parallelism.{name}"
                text = "has no effect beside model.durations; leave it out"
                yield Problem(key, (key, "model.durations"), text)
    scale = HardwareScale() if b.cluster is None else b.cluster.scale
    for part in ("memory", "nvlink", "network"):
        if getattr(scale, part) != HardwarePart():
            key = f"cluster.scale.{part}"
            text = "has no effect beside model.durations, which are compute; scale compute instead"
            yield Problem(key, (key, "model.durations"), text)
    if not any(any(v) if isinstance(v, tuple) else v for _, v in both):
        text = "are all 0, expected a step that takes time; give forward_s > 0"
        yield Problem("model.durations", ("model.durations",), text)


def _check_groups(b: Blocks) -> Iterator[Problem]:
    """Check that tensor and context parallelism divide what they shard."""
    if b.model is None or b.parallelism is None:
        return
    m, p = b.model, b.parallelism
    if min(getattr(m, size) for size in SIZES) < 1:
        return
    wrong = [name for name in ("n_heads", "ffn_size") if getattr(m, name) % p.tp]
    if m.n_kv_heads % p.tp and p.tp % m.n_kv_heads:
        wrong.append("n_kv_heads")
    if wrong:
        sizes = ", ".join(f"{name} = {getattr(m, name)}" for name in wrong)
        keys = ("parallelism.tp", *(f"model.{name}" for name in wrong), "model.name")
        yield Problem(keys[0], keys, f"{p.tp} does not divide {sizes}; take a tp that does")
        return
    # Each context-parallel rank holds two slices, one from either end, to balance causal work.
    slices = 2 * p.cp if p.cp > 1 else 1
    shards = lcm(slices, p.cp * p.tp if p.sequence_parallel else p.cp)
    if m.seq_len % shards:
        text = f"{m.seq_len} does not split over tp = {p.tp} and cp = {p.cp}; "
        way_out = f"take a multiple of {shards}, for example {ceil(m.seq_len / shards) * shards}"
        keys = ("model.seq_len", "parallelism.cp", "parallelism.tp", "model.name")
        yield Problem(keys[0], keys, text + way_out)


# ------------------------------------------------------------------------------- sizes, places
_GPUS = ("cluster.nodes", "cluster.gpus_per_node")


def _check_sizes(b: Blocks) -> Iterator[Problem]:
    if b.model is None or b.parallelism is None or b.cluster is None:
        return
    p, c = b.parallelism, b.cluster
    world = p.tp * p.cp * p.pp * p.dp
    if c.nodes is None:
        if b.model.durations is None:
            need = ceil(world / c.gpus_per_node)
            text = f"missing, expected the number of nodes; for tp*cp*pp*dp = {world} set {need}"
            yield Problem("cluster.nodes", ("cluster.nodes", "model.durations"), text)
        return
    gpus = c.nodes * c.gpus_per_node
    if world == gpus or (c.hosts is not None and world < gpus):
        return  # with a map of hosts, nodes that it leaves out are spares
    ways = []
    replica = p.tp * p.cp * p.pp
    if gpus % replica == 0:
        ways.append(f"dp: {gpus // replica}")
    if world % c.gpus_per_node == 0:
        ways.append(f"cluster.nodes: {world // c.gpus_per_node}")
    product = f"{p.tp}*{p.cp}*{p.pp}*{p.dp} = {world}"
    way_out = f"one replica takes {replica} GPUs: change tp, cp or pp, or the nodes"
    text = (
        f"tp*cp*pp*dp = {product}, but the cluster has "
        f"{c.nodes} nodes of {c.gpus_per_node} = {gpus} GPUs; "
        + (f"set {' or '.join(ways)}" if ways else way_out)
    )
    keys = (*(f"parallelism.{s}" for s in ("dp", "pp", "tp", "cp")), *_GPUS)
    yield Problem("parallelism", ("parallelism", *keys), text)


def _check_cluster(b: Blocks) -> Iterator[Problem]:
    if b.cluster is None:
        return
    c, nodes = b.cluster, b.cluster.nodes
    if nodes is None and b.parallelism is not None:
        p = b.parallelism
        nodes = ceil(p.tp * p.cp * p.pp * p.dp / c.gpus_per_node)
    for node in c.node_slowdowns:
        if nodes is not None and node >= nodes:
            key = f"cluster.node_slowdowns.{node}"
            text = f"no node {node} among {nodes}; indices run from 0 to {nodes - 1}"
            yield Problem(key, (key, "cluster.nodes"), text)
    if c.hosts is not None and nodes is not None and b.parallelism is not None:
        p = b.parallelism
        n_slots = ceil(p.tp * p.cp * p.pp * p.dp / c.gpus_per_node)
        found = hosts_problem(np.array(c.hosts, np.int64), n_slots, nodes)
        if found is not None:
            key = "cluster.hosts"
            yield Problem(key, (key, "cluster.nodes"), found)
    key = "cluster.nvlink_domain_gpus"
    small, large = sorted((c.nvlink_domain_gpus, c.gpus_per_node))
    if large % small:
        text = f"{c.nvlink_domain_gpus} and gpus_per_node = {c.gpus_per_node}: "
        text += "neither is a multiple of the other; change one"
        yield Problem(key, (key, "cluster.gpus_per_node"), text)


# --------------------------------------------------------------------------------- parallelism
def _check_data_parallel(b: Blocks) -> Iterator[Problem]:
    p = b.parallelism
    if p is None:
        return
    key = "parallelism.data_parallel"
    if p.data_parallel == "none" and p.dp > 1:
        text = f"none, but dp = {p.dp}: replicas must share gradients; set ddp, zero1 or fsdp"
        yield Problem(key, (key, "parallelism.dp"), text)
    for name, values in UNMODELLED.items():
        value = getattr(p, name)
        if value in values:
            yield unmodelled(f"parallelism.{name}", value, values[value])
    yield from _check_shards(b, p)


def _check_shards(b: Blocks, p: ParallelismBlock) -> Iterator[Problem]:
    """Check that shard groups divide the data-parallel ranks."""
    key, by = "parallelism.shard_size", ("parallelism.data_parallel", "parallelism.dp")
    if p.shard_size is not None and p.data_parallel != "hsdp":
        text = f"{p.shard_size} has no effect with {p.data_parallel}; set data_parallel: hsdp, "
        yield Problem(key, (key, *by), text + "or leave it out")
    elif p.shard_size is not None and p.dp % p.shard_size:
        divisors = [str(n) for n in range(1, p.dp + 1) if p.dp % n == 0]
        text = f"{p.shard_size} does not divide dp = {p.dp}; take one of {', '.join(divisors)}"
        yield Problem(key, (key, *by), text)
    if p.data_parallel != "hsdp":
        return
    if b.model is not None and b.model.durations is not None:
        text = "hsdp has no effect beside model.durations, which know no parameters; set ddp"
        yield Problem(by[0], (by[0], "model.durations"), text)
    if b.variability is not None and b.variability.resolution == "kernel":
        key = "variability.resolution"
        yield unmodelled(key, "kernel resolution with hsdp", "op", key, by[0])


def _check_schedule(b: Blocks) -> Iterator[Problem]:
    p = b.parallelism
    if p is None:
        return
    key = "parallelism.schedule"
    keys = (key, "parallelism.vpp", "parallelism.pp")
    if p.vpp > 1 and p.pp == 1:
        text = f"{p.vpp} chunks per stage need a pipeline, but pp = 1; set vpp: 1"
        yield Problem("parallelism.vpp", ("parallelism.vpp", "parallelism.pp"), text)
    elif p.schedule == "interleaved" and p.vpp == 1:
        yield Problem(key, keys, "interleaved needs vpp > 1; set 1f1b, or leave it out")
    elif p.pp > 1 and (chunks := TRAITS[p.schedule].chunks or p.vpp) != p.vpp:
        each, n = ("one chunk", 1) if chunks == 1 else (f"{chunks} chunks", chunks)
        way_out = f"vpp: {n}" if p.splits else "interleaved"
        text = f"{p.schedule} has {each} per stage, but vpp = {p.vpp}; set {way_out}"
        yield Problem(key, keys, text)
    if p.splits:
        yield from _check_split_backward(p)
    if p.schedule == "interleaved" and p.pp > 1:
        if p.microbatches % p.pp:
            down, up = p.microbatches // p.pp * p.pp, ceil(p.microbatches / p.pp) * p.pp
            text = f"interleaved with {p.microbatches} microbatches is not modelled yet, "
            text += f"expected a multiple of pp = {p.pp}; the nearest supported: "
            text += " or ".join(str(n) for n in (down, up) if n)
            name = "parallelism.microbatches"
            yield Problem(name, (name, "parallelism.pp", *keys), text)
        if p.p2p == "blocking":
            name, what = "parallelism.p2p", "blocking with the interleaved schedule"
            yield unmodelled(name, what, "async", name, "parallelism.vpp")


def _check_split_backward(p: ParallelismBlock) -> Iterator[Problem]:
    """Check what schedules with put-off weight gradients need."""
    key, rounds = "parallelism.schedule", TRAITS[p.schedule].rounds
    if p.microbatches < rounds * p.pp:
        name = "parallelism.microbatches"
        text = f"{p.microbatches}, but {p.schedule} needs {rounds} for each of the {p.pp} stages; "
        way_out = f"set {rounds * p.pp} or more, or schedule: zb-v"
        yield Problem(name, (name, "parallelism.pp", key), text + way_out)
    if p.p2p == "blocking":
        name = "parallelism.p2p"
        yield unmodelled(name, f"blocking with {p.schedule}", "async", name, key)


# --------------------------------------------------------------------------------- variability
def _check_variability(b: Blocks) -> Iterator[Problem]:
    v = b.variability
    if v is None:
        return
    if v.ranks == "measured" and v.model is None:
        text = "measured needs a fitted model; set variability.model: MODEL.nc, or drawn"
        yield Problem("variability.ranks", ("variability.ranks", "variability.model"), text)
    key = "variability.resolution"
    if v.resolution == "kernel" and b.parallelism is not None and b.parallelism.cp > 1:
        what = f"kernel resolution with cp = {b.parallelism.cp}"
        yield unmodelled(key, what, "op", key, "parallelism.cp")
    e = v.effects
    if e.residual is not None:
        key = "variability.effects.residual"
        if e.residual.law is not None and e.residual.cv is None:
            keys = (f"{key}.law", f"{key}.cv")
            yield Problem(keys[0], keys, f"{e.residual.law} has no spread; give its cv")
        if e.residual.scale is not None and e.residual.cv is not None:
            text = "scales the library's laws, but cv replaces them; keep one of the two"
            yield Problem(f"{key}.scale", (f"{key}.scale", f"{key}.cv"), text)
        elif e.residual.scale is not None and v.library is None:
            text = "scales the library's laws, but there is no library; give cv instead"
            keys = (f"{key}.scale", "variability.library")
            yield Problem(f"{key}.scale", keys, text)
    if e.rank is not None and e.rank.lemon_slowdown is not None:
        key, (low, high) = "variability.effects.rank.lemon_slowdown", e.rank.lemon_slowdown
        limit = (b.cluster.max_slowdown if b.cluster is not None else None) or float("inf")
        if low > high:
            yield Problem(key, (key,), f"[{low:g}, {high:g}] runs downwards; give the lower first")
        elif high > limit:
            text = f"reaches {high:g}, but GPUs beyond cluster.max_slowdown = {limit:g} are "
            text += "taken out; raise max_slowdown or lower this"
            yield Problem(key, (key, "cluster.max_slowdown"), text)


def _check_library(b: Blocks) -> Iterator[Problem]:
    if b.variability is None or b.cluster is None or b.model is None:
        return
    if b.variability.library == "":
        sets = ", ".join(DEVICE_LIBRARY.values())
        text = f"no distribution set is shipped for {b.cluster.device}; name one ({sets}) or none"
        yield Problem("variability.library", ("variability.library", "cluster.device"), text)


CHECKS: tuple[Callable[[Blocks], Iterator[Problem]], ...] = (
    _check_model,
    _check_groups,
    _check_sizes,
    _check_split,
    _check_cluster,
    check_tiers,
    _check_data_parallel,
    _check_schedule,
    check_experts,
    _check_variability,
    _check_library,
    check_run,
    check_slow_nodes,
)


def find_problems(blocks: Blocks) -> list[Problem]:
    """Run every check on the blocks that are there."""
    return [problem for check in CHECKS for problem in check(blocks)]
