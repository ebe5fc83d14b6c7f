"""What must hold between the keys of a cluster, its link tiers, and the GPUs of a job.

What depends on the device (the network's own latency) is checked by `prism.cluster.linktiers`.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil, gcd, inf, lcm

import numpy as np

from prism.common.text import format_count
from prism.jobs.dimensions import GPUS, STAGE
from prism.jobs.jobspec.blocks import Blocks
from prism.jobs.jobspec.problem import Problem
from prism.jobs.jobspec.values import hosts_problem

UPLINK = ("oversubscription", "bandwidth_gbytes_per_s", "total_gbits_per_s")
DISTANCE = ("latency_us", "distance_km")
_RESERVED = ("nvlink", "network")
_PER_NODE = "cluster.gpus_per_node"


def check_cluster(b: Blocks) -> Iterator[Problem]:
    """Check how many GPUs there are, and which nodes are named."""
    p, c = b.parallelism, b.cluster
    replica, product = p.replica_gpus, "*".join(GPUS)
    world = replica * p.dp
    n_slots = ceil(world / c.gpus_per_node)
    nodes = n_slots if c.nodes is None else c.nodes
    gpus = nodes * c.gpus_per_node
    if c.nodes is None and b.model.durations is None:
        text = f"missing, expected the number of nodes; for {product} = {world} set {n_slots}"
        yield text, "cluster.nodes", "model.durations"
    # with a map of hosts, nodes that it leaves out are spares
    elif c.nodes is not None and world != gpus and (c.hosts is None or world > gpus):
        way_out = _fill_cluster(replica, p.dp, nodes, c.gpus_per_node)
        values = "*".join(str(getattr(p, name)) for name in GPUS)
        text = f"{product} = {values} = {world}, but the cluster has "
        text += (
            f"{format_count(nodes, 'node')} of {c.gpus_per_node} = "
            f"{format_count(gpus, 'GPU')}; {way_out}"
        )
        keys = (f"parallelism.{size}" for size in ("dp", "pp", *STAGE))
        yield text, "parallelism", *keys, "cluster.nodes", _PER_NODE
    for node in c.node_slowdowns:
        if node >= nodes:
            text = f"no node {node} among {nodes}; indices run from 0 to {nodes - 1}"
            yield text, f"cluster.node_slowdowns.{node}", "cluster.nodes"
    for name in ("gpu_slowdowns", "gpu_temperatures"):
        given = getattr(c, name)
        if given is not None and len(given) != c.gpus_per_node:
            text = f"{len(given)} values for the {c.gpus_per_node} GPUs of a node; give one for "
            yield f"{text}each", f"cluster.{name}", _PER_NODE
    yield from _check_throttled(b, nodes)
    if c.hosts is not None:
        found = hosts_problem(np.array(c.hosts, np.int64), n_slots, nodes)
        if found is not None:
            yield found, "cluster.hosts", "cluster.nodes"
    small, large = sorted((c.nvlink_domain_gpus, c.gpus_per_node))
    if large % small:
        text = f"{c.nvlink_domain_gpus} and gpus_per_node = {c.gpus_per_node}: "
        text += "neither is a multiple of the other; change one"
        yield text, "cluster.nvlink_domain_gpus", _PER_NODE


def _fill_cluster(replica: int, dp: int, nodes: int, per_node: int) -> str:
    """Say what makes replicas fill the nodes: another dp, other nodes, or both."""
    unit = replica // gcd(replica, per_node)  # nodes that whole replicas fill
    takes, spare = divmod(replica * dp, per_node)
    this_dp = "" if spare else f"cluster.nodes: {takes} for dp: {dp}"
    if nodes % unit == 0:
        ways = [f"parallelism.dp: {nodes * per_node // replica} for these nodes", this_dp]
    else:
        near = (n for n in (nodes - nodes % unit, nodes - nodes % unit + unit) if n)
        ways = [f"cluster.nodes: {n} with parallelism.dp: {n * per_node // replica}" for n in near]
        ways.append(this_dp)
    return f"set {', or '.join(filter(None, ways))}"


def _check_throttled(b: Blocks, nodes: int) -> Iterator[Problem]:
    """Check that some nodes throttle where heat leaves them less power than the others have."""
    c, share, power = b.cluster, "cluster.throttled_share", "cluster.throttled_power_w"
    if c.throttled_share > 0.0 and c.throttled_power_w is None:
        yield f"needs the power that heat leaves a GPU; set {power}", share, power
    elif c.throttled_share > 0.0 and round(c.throttled_share * nodes) == 0:
        text = (
            f"{c.throttled_share:g} of {format_count(nodes, 'node')} is none; one is "
            f"{1 / nodes:.3g}"
        )
        yield text, share, "cluster.nodes"
    if (c.throttled_power_w or 0.0) > (c.power_limit_w or inf):
        limit = "cluster.power_limit_w"
        text = f"{c.throttled_power_w:g}, more than the {c.power_limit_w:g} of {limit}; give less"
        yield text, power, limit


def check_tiers(b: Blocks) -> Iterator[Problem]:
    """Check the tiers of a cluster: one word for a thing, sizes that nest, latencies that grow."""
    c, pods = b.cluster, "cluster.pod_gpus"
    if c.oversubscription > 1 and c.pod_gpus is None:
        text = f"{c.oversubscription:g} needs to know where pods end; set {pods}"
        yield text, "cluster.oversubscription", pods
    for name, tier in c.tiers.items():
        key = f"cluster.tiers.{name}"
        if name in _RESERVED:
            text = f"{name} is what cluster.links describes; call the tier rack, pod, zone or site"
            yield text, key
        if name == "pod" and c.pod_gpus is not None:
            yield f"pods are described by {pods} already; keep one of the two", key, pods
        for names in (UPLINK, DISTANCE):
            given = [n for n in names if getattr(tier, n) is not None]
            if len(given) > 1:
                text = f"{' and '.join(given)} say the same thing; keep one of them"
                yield text, *(f"{key}.{n}" for n in reversed(given))
        if tier.efficiency is not None and all(getattr(tier, n) is None for n in UPLINK[1:]):
            text = f"has no effect without {' or '.join(UPLINK[1:])}; give one"
            yield text, f"{key}.efficiency", key
    if c.tiers:
        yield from _check_nesting(b)
        yield from _check_sync(b)


def _check_sync(b: Blocks) -> Iterator[Problem]:
    """Units that seldom exchange parameters have whole replicas; one tier has such units."""
    p, c = b.parallelism, b.cluster
    names = [name for name, tier in c.tiers.items() if tier.syncs_apart]
    if len(names) > 1:
        text = f"{' and '.join(names)} both exchange parameters apart; keep sync_every in one tier"
        yield text, *(f"cluster.tiers.{name}.sync_every" for name in names)
        return
    for name in names:
        tier, key = c.tiers[name], f"cluster.tiers.{name}"
        if tier.sync_overlap > tier.sync_every:
            text = f"{tier.sync_overlap}, but an exchange begins every {tier.sync_every} steps; "
            yield text + "give at most these", f"{key}.sync_overlap", f"{key}.sync_every"
        together = lcm(p.ep * p.expert_shards, p.stage_gpus) // p.stage_gpus
        if p.data_parallel == "hsdp":
            together = p.shard_size or 1  # by default inside an NVLink domain
        each, world = p.replica_gpus * together, p.replica_gpus * p.dp
        if world <= tier.gpus:
            continue
        if p.pp > 1 and c.placement == "megatron":
            text = "units exchange parameters, but each has some stages of all replicas; set "
            text += "placement: tp-cp-pp-dp"
            yield text, f"{key}.sync_every", "cluster.placement", "parallelism.pp"
        elif tier.gpus % each or world % tier.gpus:
            text = f"{tier.gpus} GPUs, expected a multiple of the {each} of "
            text += "a replica" if together == 1 else f"{together} replicas that meet in a step"
            yield f"{text}, that divides the job's {world}", f"{key}.gpus", f"{key}.sync_every"


def _check_nesting(b: Blocks) -> Iterator[Problem]:
    """Each unit holds whole units of the next inner tier, and lies no farther away."""
    c, tiers = b.cluster, b.cluster.link_tiers()
    sizes = [("gpus_per_node", _PER_NODE, c.gpus_per_node)]
    if c.nvlink_domain_gpus > c.gpus_per_node:
        sizes.append(("nvlink_domain_gpus", "cluster.nvlink_domain_gpus", c.nvlink_domain_gpus))
    for name, tier in tiers:
        key = f"cluster.tiers.{name}.gpus" if name in c.tiers else "cluster.pod_gpus"
        sizes.append((f"the {name}'s", key, tier.gpus))
    for (inner, inner_key, size), (_, key, gpus) in pairwise(sizes):
        is_tier = inner.startswith("the ")
        if gpus % size or (gpus == size and is_tier):
            least = 2 * size if is_tier else size
            multiples = sorted({max(n * size, least) for n in (gpus // size, gpus // size + 1)})
            ways = " or ".join(map(str, multiples))
            text = f"{gpus} GPUs do not hold whole units of {inner} {size}; set {ways}"
            yield text, key, inner_key
    known = [(name, t.latency_us) for name, t in tiers if t.latency_us is not None]
    for (inner, near), (name, far) in pairwise(known):
        if far < near:
            text = f"{far:g} is less than the {near:g} of the {inner} inside it; a message that "
            text += "leaves both takes the longer way; change one"
            yield text, *(f"cluster.tiers.{tier}.latency_us" for tier in (name, inner))
