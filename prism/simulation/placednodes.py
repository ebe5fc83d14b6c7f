"""Nodes put to their places: slow GPUs, stretched messages, other leaves and pods in a program.

A built program and one whose nodes were moved come from the same function, so that they are equal
to the bit. Slow compute is a factor of the GPU, which every draw and lowering reads; slow links,
memory and host gaps stretch fixed times by the slowest node that takes part.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster.linkcongestion import congested_links
from prism.cluster.nodemap import LEAST, MOST, NodeSlowdown, Placement
from prism.cluster.power import position_slowdowns
from prism.cluster.wiring import Wiring
from prism.common.errors import PrismError
from prism.simulation.program import Origin, Program

Array = NDArray[np.float64]
FIXED_ROLES = ("network", "other", "memory")  # of a node, that stretch fixed times


def site_nodes(
    program: Program, placement: Placement, slowdowns: Mapping[int, NodeSlowdown]
) -> Program:
    """Put a job's nodes to their places."""
    origin = _checked_origin(program, placement, slowdowns)
    factor = [
        _by_gpu(slowdowns, role, loading, placement)
        for role, loading in zip(origin.roles, origin.loadings, strict=True)
    ]
    fixed = {
        role: _by_gpu(slowdowns, role, 0.0, placement) for role in FIXED_ROLES
        if any(getattr(slow, role) not in (None, 1.0) for slow in slowdowns.values())
    }  # fmt: skip
    low, typical = _stretch(origin, placement, fixed)
    whole = np.stack(factor)
    if origin.work is not None:
        whole[:, low.member] *= origin.work[:, None, None, :]
    ranks = program.ranks._replace(
        n_gpus=placement.n_gpus, factor=np.ascontiguousarray(whole, np.float32)
    )
    links = program.links
    if links.n_leaves:
        touched = congested_links(placement, origin.links)
        # as fast as before while nothing is congested, and hit as often as what they now touch is
        links = engine.Links(*touched, links.quiet, links.congested, links.probability)
    return replace(program, low=low, ranks=ranks, typical=typical, links=links)


def site_workers(
    program: Program, placement: Placement, slowdowns: Mapping[int, NodeSlowdown]
) -> Program:
    """Put the workers of a fitted trace to other places, each with what was measured of it.

    What a worker takes longer than a typical one moves along, the share that follows no effect
    too; transfers and gaps stay what they were measured to be at their place. Spares are typical.
    """
    origin = _checked_origin(program, placement, slowdowns)
    other = [n for n, s in slowdowns.items() if s != NodeSlowdown(s.compute)]
    if other:
        raise PrismError(
            f"{placement.job.source or placement.job.name}: cluster.node_slowdowns: node "
            f"{other[0]}: a fitted trace knows compute and transfers as they were measured; give a "
            "factor on compute alone, or place a job file"
        )
    n_gpus = placement.n_nodes
    # engine GPU of every node: the one that has the node's place in the default order
    default = Placement(placement.job, np.arange(placement.n_slots), placement.nodes)
    gpu = np.arange(placement.n_nodes)
    gpu[default.members()] = origin.low.member
    low = origin.low._replace(member=np.ascontiguousarray(gpu[placement.members()], np.int32))
    factor = np.ones((len(origin.roles), n_gpus))
    factor[:, : origin.factor.shape[1]] = origin.factor
    for node, slow in slowdowns.items():
        factor[:, gpu[node]] *= slow.compute
    ops = program.ops
    if origin.held is not None:
        held = np.stack([np.ones_like(factor), np.zeros_like(factor)])
        held[:, :, : origin.held.shape[2]] = origin.held
        for node, slow in slowdowns.items():
            held[0, :, gpu[node]] *= slow.compute
        low = hold_seconds(low, held)
        ops = ops._replace(n_terms=count_terms(low)[ops.coef])
    ranks = program.ranks._replace(n_gpus=n_gpus, factor=np.ascontiguousarray(factor, np.float32))
    return replace(program, ops=ops, low=low, ranks=ranks)


def hold_seconds(low: engine.Lowering, held: Array) -> engine.Lowering:
    """Give ops a second term, the seconds of measured workers that follow no effect.

    `held` [2, loading, gpu]: a worker's factor, and the share of its time that follows no effect.
    """
    fixed = low.fixed_mean.copy()
    for c in np.flatnonzero(low.coef_stage >= 0):
        mean = low.seg_mean[low.coef_seg[low.coef_seg_ptr[c]]]
        k = int(np.argmax(mean))
        gpus = low.member[:, low.coef_stage[c], 0]
        fixed[:, c, 1] = mean[k] * held[0, k, gpus] * held[1, k, gpus]
    return low._replace(fixed_mean=fixed)


def count_terms(low: engine.Lowering) -> NDArray[np.int32]:
    """Terms of every op of a trace [coef]: two where some seconds follow no effect."""
    return np.where(low.fixed_mean[:, :, 1].any(axis=0), 2, 1).astype(np.int32)


def _checked_origin(
    program: Program, placement: Placement, slowdowns: Mapping[int, NodeSlowdown]
) -> Origin:
    """Refuse slowdowns of nodes that are not there, and factors out of range."""
    key = f"{placement.job.source or placement.job.name}: cluster.node_slowdowns"
    n_nodes = placement.n_nodes
    for node, slow in slowdowns.items():
        if not 0 <= node < n_nodes:
            raise PrismError(
                f"{key}: no node {node} among {n_nodes}; indices run from 0 to {n_nodes - 1}"
            )
        if not all(LEAST <= x <= MOST for x in slow if x is not None):
            raise PrismError(
                f"{key}: node {node}: expected factors between {LEAST:g} and {MOST:g}; "
                "a node that does not work does not belong in cluster.nodes"
            )
    assert program.origin is not None
    return program.origin


def needs_memory(slowdowns: Mapping[int, NodeSlowdown]) -> bool:
    """Tell whether memory-bound kernels need factors apart from compute and all else."""
    return any(slow.memory is not None or slow.other != 1.0 for slow in slowdowns.values())


def _by_gpu(
    slowdowns: Mapping[int, NodeSlowdown], role: str, loading: float, placement: Placement
) -> Array:
    """Factor of every GPU on what follows a role [gpu]; memory that of compute by default."""
    out = np.ones((placement.n_nodes, placement.gpus_per_node))
    for node, slow in slowdowns.items():
        as_compute = role == "memory" and slow.memory is None
        out[node] = slow.compute**loading if as_compute else getattr(slow, role)
    by_position = position_slowdowns(placement.job)
    return (out if by_position is None else out * np.power(by_position, loading)).ravel()


def _stretch(
    origin: Origin, placement: Placement, fixed: Mapping[str, Array]
) -> tuple[engine.Lowering, Array | None]:
    """Give fixed times of a placement with its slow nodes and, if they differ, without them.

    `fixed` [gpu] has factors by role, where any is not 1.
    """
    low = origin.low._replace(member=placement.members())
    wires = _find_wires(origin, placement)
    places = [p for p in origin.places if p.part.group in wires or p.part.role in fixed]
    if not places:
        return low, None
    slow = {role: x[low.member].max(axis=2, keepdims=True) for role, x in fixed.items()}
    n_replicas = low.member.shape[0]
    mean = np.repeat(low.fixed_mean, n_replicas, axis=0)
    var = np.repeat(low.fixed_var, n_replicas, axis=0)
    typical = mean.copy()
    for place in places:
        part, c = place.part, place.coef
        ratio = np.ones(n_replicas)
        if part.group in wires and part.n_bytes:  # the rest is what transfers take of compute
            stage = place.ends.stages[0] if place.ends.stages else 0
            wiring = wires[part.group]
            ratio = wiring.over_nominal(part.group, part.n_bytes, stage, part.op_kind)
        if place.ends.shared:  # one op for all replicas
            ratio = np.full_like(ratio, ratio.max())
        whole = ratio
        if part.role in slow:  # the slowest that takes part
            whole = ratio * place.ends.of(slow[part.role]).max(axis=(1, 2))
        typical[:, c, part.term] += part.mean * (ratio - 1.0)
        mean[:, c, part.term] += part.mean * (whole - 1.0)
        var[:, c] += part.var * (whole**2 - 1.0)
    late = np.flatnonzero(origin.behind)
    hidden = _hidden(typical[:, late] - low.fixed_mean[:, late], np.asarray(origin.behind)[late])
    typical[:, late] -= hidden
    mean[:, late] -= hidden
    if all(bool((x == x[:1]).all()) for x in (mean, var, typical)):
        mean, var, typical = mean[:1], var[:1], typical[:1]
    low = low._replace(fixed_mean=mean, fixed_var=var)
    return low, None if np.array_equal(typical, mean) else typical


def _hidden(more: Array, behind: Array) -> Array:
    """Tell what a host hides that is behind by some time [coef] of longer messages.

    `more` [replica, coef, term] is what they take more; shorter ones leave it as far behind.
    """
    total = more.sum(axis=2, keepdims=True)
    share = np.ones_like(total)
    np.divide(behind[:, None], total, out=share, where=total > behind[:, None])
    hidden: Array = more * share
    return hidden


def _find_wires(origin: Origin, placement: Placement) -> dict[str, Wiring]:
    """Wiring of the groups whose messages take another time than the cluster says."""
    default = origin.wiring
    if default is None:
        return {}
    found = {group: default for group, nominal in origin.nominal.items() if not nominal}
    slots, gpus = placement.slots, placement.gpus_per_node
    order = np.arange(slots.size)
    bounds = {tier.gpus for tier in default.cluster.tiers}
    bounds = (bounds | {max(gpus, default.cluster.nvlink_gpus)}) - {gpus}
    if default.is_flat or all(np.array_equal(slots * gpus // n, order * gpus // n) for n in bounds):
        return found  # every slot in its units and NVLink domain
    moved = Wiring(default.cluster, placement)
    return found | {group: moved for group in origin.nominal if not moved.is_as(default, group)}
