"""What nodes of a typical step share when drawn: a distribution per kernel, one step factor.

The longest waits of the host and the collectives, whose times depend on each other, take what they
took in one of the steps, all in the same one. The other nodes draw from their kernel's
distribution, times a factor by step that all computing kernels share, and one for the host. Left
out: rank effects.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.models.kerneltrace.graph import KernelGraph
from prism.models.kerneltrace.steps import HOST, KernelKey
from prism.traces.kernelnames import COLLECTIVES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ALONE = 256
"""Nodes that keep their own durations, those that vary most: each costs a table of 24 kB. On the
traces at hand 64 to 1,024 give the same spread."""


class NodeGroup(NamedTuple):
    """Nodes that share a distribution."""

    key: KernelKey
    nodes: Ints  # [member]
    profile: Floats  # [step] factor of all members in each step, mean 1
    values: Floats  # [sample] of what is left, over members and steps, mean 1; empty: nothing
    std: float  # of that, unbiased, where the sample's own would be too small for few steps


def node_groups(graph: KernelGraph, nominal: Floats) -> list[NodeGroup]:
    """Put all nodes that vary into groups; the others keep their `nominal` durations [node] s."""
    durations = graph.durations[:, 0]
    kinds = np.array([_part(key) for key in graph.keys])[graph.key]
    varies = np.isin(graph.roles.role, ("device", "host", "return")) & (nominal > 0.0)
    filled = np.where(np.isfinite(durations), durations, nominal[:, None])
    width = np.where(varies & (kinds != "computes"), np.ptp(filled, axis=1), 0.0)
    alone = np.argsort(-width, kind="stable")[:_ALONE]
    alone = alone[width[alone] > 0.0]
    groups = [
        NodeGroup(
            graph.keys[graph.key[i]], np.array([i]), filled[i] / filled[i].mean(), np.zeros(0), 0.0
        )
        for i in alone
    ]
    varies[alone] = False
    for kind in np.unique(kinds[varies]):
        members = np.flatnonzero(varies & (kinds == kind))
        profile, variance = _step_factor(durations[members], nominal[members])
        for nodes in _pools(members, graph, nominal):
            key = graph.keys[graph.key[nodes[0]]]
            ratio = durations[nodes] / nominal[nodes, None]
            groups.append(_pool(key, nodes, ratio, profile, variance))
    return groups


def _part(key: KernelKey) -> str:
    """Name what shares a step factor: computing kernels, the host, collectives of a kind."""
    if key.op_kind == HOST.op_kind:
        return "host"
    return key.op_kind if key.op_kind in COLLECTIVES else "computes"


def _step_factor(durations: Floats, nominal: Floats) -> tuple[Floats, float]:
    """Split the step's factor off the nodes' own spread: the factor [step] and its variance.

    Notes
    -----
    Analysis of variance with weights: the sum over nodes varies by the shared factor and, less, by
    what the nodes have of their own; expected squares are set equal to those found.
    """
    whole = np.isfinite(durations).all(axis=1)
    n_steps = durations.shape[1]
    none = np.ones(n_steps), 0.0
    total = float(nominal[whole].sum())
    if whole.sum() < 2 or n_steps < 2 or total <= 0.0:
        return none
    score = durations[whole].sum(axis=0) / total
    found = float(score.var(ddof=1))
    own = float(durations[whole].var(axis=1, ddof=1).sum()) / total**2
    alike = float((nominal[whole] ** 2).sum()) / total**2
    variance = (found - own) / max(1.0 - alike, 1e-9)
    if variance <= 0.0 or score.std() <= 0.0:
        return none
    factor = 1.0 + (score - score.mean()) * min(1.0, np.sqrt(variance) / float(score.std()))
    return factor, float(factor.var())


def _pools(members: Ints, graph: KernelGraph, nominal: Floats) -> list[Ints]:
    """Split nodes by kernel; the host's, which are of few kinds, also by length."""
    host = np.array([key.op_kind == HOST.op_kind for key in graph.keys])[graph.key[members]]
    half_decades = np.round(2.0 * np.log10(nominal[members]))  # long times vary unlike short ones
    size = np.where(host, half_decades, 0.0)
    _, pool = np.unique(np.stack([graph.key[members], size]), axis=1, return_inverse=True)
    pool = pool.ravel()
    return [members[pool == p] for p in range(int(pool.max()) + 1)]


def _pool(
    key: KernelKey, nodes: Ints, ratio: Floats, profile: Floats, variance: float
) -> NodeGroup:
    """Pool what the step factor leaves of durations over the nominal ones [member, step]."""
    seen = np.isfinite(ratio).sum(axis=1)
    rest = (ratio / profile)[seen > 1]
    values = rest[np.isfinite(rest)]
    if not values.size or values.mean() <= 0.0:
        return NodeGroup(key, nodes, profile, np.zeros(0), 0.0)
    n = seen[seen > 1]
    own = np.nanvar(ratio[seen > 1], axis=1) * n / (n - 1)
    std = float(np.sqrt(max(0.0, float(np.average(own, weights=n - 1)) - variance)))
    return NodeGroup(key, nodes, profile, values / values.mean(), std)
