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

from prism.models.kerneltrace.graph import HOST_KEY, KernelGraph
from prism.models.kerneltrace.laws import StepLaws
from prism.models.kerneltrace.steps import KernelKey
from prism.traces.kernelnames import COLLECTIVES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LARGE = 1e-3
"""A node whose durations differ by this share of the step's matters on its own."""

_MOST_ALONE = 256
"""Nodes at most that keep their own durations: each costs a table."""

_SIZES_S = (3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Bounds [s] between which times of the host share a distribution: long ones vary unlike short."""


class NodeGroup(NamedTuple):
    """Nodes that share a distribution.

    Attributes
    ----------
    key : KernelKey
    nodes : array of int
        [member]
    profile : array
        [step] factor of all members in each step, mean 1.
    values : array
        [sample] of what is left, pooled over members and steps, mean 1; empty where nothing is.
    std : float
        Of that: unbiased, where the sample's own would be too small for few steps.
    """

    key: KernelKey
    nodes: Ints
    profile: Floats
    values: Floats
    std: float


def node_groups(laws: StepLaws) -> list[NodeGroup]:
    """Put all nodes that vary into groups; the others keep their nominal durations.

    Of a collective matched over ranks only the first member is in one: it takes as long for all.
    """
    graph, durations = laws.graph, laws.durations
    nominal = laws.nominal
    kinds = np.array([_part(key) for key in graph.keys])[graph.key]
    varies = np.zeros(nominal.size, np.bool_)
    for kind in ("device", "host", "return"):
        varies[graph.nodes(kind)] = True
    varies &= np.isfinite(nominal) & (nominal > 0.0)
    varies[list(joined(graph))] = False
    filled = np.where(np.isfinite(durations), durations, nominal[:, None])
    width = np.where(varies & (kinds != "computes"), np.ptp(filled, axis=1), 0.0)
    alone = np.flatnonzero(width > _LARGE * graph.measured_span())
    alone = alone[np.argsort(-width[alone], kind="stable")][:_MOST_ALONE]
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
        for nodes in _pools(members, laws):
            groups.append(_pool(laws, nodes, profile, variance))
    return groups


def joined(graph: KernelGraph) -> dict[int, int]:
    """Members of matched collectives but the first, which stands for all: node by node."""
    joins = set(graph.nodes("join").tolist())
    first: dict[int, int] = {}
    found: dict[int, int] = {}
    for i in graph.nodes("device").tolist() if joins else ():
        for j in graph.pred[graph.pred_ptr[i] : graph.pred_ptr[i + 1]].tolist():
            if j in joins and first.setdefault(j, i) != i:
                found[i] = first[j]
    return found


def _part(key: KernelKey) -> str:
    """Name what shares a step factor: computing kernels, the host, collectives of a kind."""
    if key.op_kind == "launch_gap":
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


def _pools(members: Ints, laws: StepLaws) -> list[Ints]:
    """Split nodes by kernel; the host's, which are of few kinds, also by length."""
    graph = laws.graph
    size = np.zeros(members.size, np.int64)
    host = np.array([key.op_kind == HOST_KEY.op_kind for key in graph.keys])[graph.key[members]]
    size[host] = 1 + np.searchsorted(_SIZES_S, laws.nominal[members[host]])
    pairs = np.stack([graph.key[members], size])
    _, pool = np.unique(pairs, axis=1, return_inverse=True)
    pool = pool.ravel()
    return [members[pool == p] for p in range(int(pool.max()) + 1)]


def _pool(laws: StepLaws, nodes: Ints, profile: Floats, variance: float) -> NodeGroup:
    """Pool what is left of the nodes' durations beside the step's factor."""
    ratio = laws.durations[nodes] / laws.nominal[nodes, None]
    seen = np.isfinite(ratio).sum(axis=1)
    rest = (ratio / profile)[seen > 1]
    values = rest[np.isfinite(rest)]
    key = laws.graph.keys[laws.graph.key[nodes[0]]]
    if not values.size or values.mean() <= 0.0:
        return NodeGroup(key, nodes, profile, np.zeros(0), 0.0)
    n = seen[seen > 1]
    own = np.nanvar(ratio[seen > 1], axis=1) * n / (n - 1)
    std = float(np.sqrt(max(0.0, float(np.average(own, weights=n - 1)) - variance)))
    return NodeGroup(key, nodes, profile, values / values.mean(), std)
