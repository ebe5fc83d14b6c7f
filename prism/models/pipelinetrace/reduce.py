"""A trace's graph made ready for a fit: negligible gaps folded away, compute ops as a table.

`simplify` keeps the end of every op that stays; `crossed_table` lays the compute ops of one
microbatch into (op_kind and stage, replica, step, microbatch); `resample` draws step times from
whole microbatches and whole steps, without any distribution. Left out: distributions, see
`prism.models.pipelinetrace.fit`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common import sizes
from prism.common.means import finite_mean
from prism.models.variance.components import Column
from prism.simulation.tracemodel.graph import (
    COMPUTE,
    Array,
    TraceGraph,
    TraceNode,
    ends_of,
    filled,
    replay,
    start_of,
)

FOLD = 1e-5  # of the step: a gap whose mean is below this is part of the op after it


class Crossed(NamedTuple):
    """Compute ops as a table, and where it came from."""

    columns: list[Column]
    seconds: Array  # [column, replica, step, microbatch], NaN where missing
    node: NDArray[np.int64]  # [column, microbatch] index of the node, -1: none


def simplify(graph: TraceGraph) -> TraceGraph:
    """Fold negligible gaps into the ops after them, which end when they did.

    Missing durations stay missing.
    """
    durations = filled(graph)
    step_s = float(graph.measured.mean())
    gone = [
        n.kind == "gap" and d.mean() < FOLD * step_s and d.max() < 100.0 * FOLD * step_s
        for n, d in zip(graph.nodes, durations, strict=True)
    ]
    instead: list[tuple[int, ...]] = []  # what followers of each node refer to
    nodes: list[TraceNode] = []
    rows: list[Array] = []
    ends, kept = ends_of(graph, durations), np.zeros_like(durations)  # by both graphs
    for i, node in enumerate(graph.nodes):
        preds = tuple(dict.fromkeys(q for p in node.preds for q in instead[p]))
        if gone[i]:
            instead.append(preds)
            continue
        node = node._replace(preds=preds)
        start = start_of(node, kept)
        kept[len(nodes)] = start if node.kind == "join" else ends[i]
        row = kept[len(nodes)] - start
        rows.append(np.where(np.isfinite(graph.durations[i]), np.maximum(row, 0.0), np.nan))
        instead.append((len(nodes),))
        nodes.append(node)
    placed = None if graph.placed is None else graph.placed[~np.array(gone)]
    return replace(graph, nodes=tuple(nodes), durations=np.stack(rows), placed=placed)


def column_of(nodes: Sequence[TraceNode]) -> dict[int, Column]:
    """Column of every compute op of a microbatch, by the index of its node.

    Ops of one kind are distinguished by name where several make up a microbatch.
    """
    crossed = {
        i: n
        for i, n in enumerate(nodes)
        if n.kind == "op" and n.op_kind in COMPUTE and n.microbatch >= 0
    }
    names: dict[tuple[str, int, int], set[str]] = {}
    for n in crossed.values():
        names.setdefault((n.op_kind, n.stages[0], n.chunk), set()).add(n.name)
    several = {kind for (kind, _, _), found in names.items() if len(found) > 1}
    return {
        i: Column(n.op_kind, n.stages[0], n.chunk, n.name if n.op_kind in several else "")
        for i, n in crossed.items()
    }


def crossed_table(graph: TraceGraph) -> Crossed | None:
    """Lay compute ops into [column, replica, step, microbatch].

    None where there are too few to tell effects apart: one replica and one microbatch, one step.
    """
    found = column_of(graph.nodes)
    columns = sorted(set(found.values()), key=lambda c: (COMPUTE.index(c.op_kind), *c[1:]))
    n_mb = 1 + max((graph.nodes[i].microbatch for i in found), default=-1)
    cells = len(columns) * graph.n_replicas * graph.steps.size * n_mb
    counts = {"bytes of ops by replica, step and microbatch": (32.0 * cells, sizes.BYTE)}
    sizes.check_size("the trace", counts, "the numbers of its microbatches, or take fewer steps")
    where = np.full((len(columns), n_mb), -1, np.int64)
    seconds = np.full((len(columns), graph.n_replicas, graph.steps.size, n_mb), np.nan)
    for i, column in found.items():
        c, microbatch = columns.index(column), graph.nodes[i].microbatch
        where[c, microbatch] = i
        measured = graph.durations[i]
        if graph.placed is not None:
            measured = np.where(graph.placed[i], np.nan, measured)
        seconds[c, :, :, microbatch] = measured
    seconds[~(seconds > 0.0)] = np.nan  # an op of no length is a missing one
    seen = np.isfinite(seconds)
    real = seen.any(axis=(1, 2, 3))  # columns of zeros have nothing to tell
    columns = [c for c, keep in zip(columns, real, strict=True) if keep]
    replicas, steps, most = (
        int(seen.any(axis=(0, 2, 3)).sum()), int(seen.any(axis=(0, 1, 3)).sum()),
        int(seen.sum(axis=3).max(initial=0)),
    )  # fmt: skip
    if steps < 2 or max(replicas, most) < 2:
        return None
    return Crossed(columns, seconds[real], where[real])


# -------------------------------------------------------------------------------- cross-check
def resample(graph: TraceGraph, n_steps: int, rng: np.random.Generator) -> Array:
    """Step times from whole microbatches and whole steps resampled, without any distribution.

    A nonparametric cross-check of the fitted model: deviations of one microbatch stay together over
    stages and passes, deviations of one step over all ops; what each resampled microbatch takes in
    another place is scaled by that place's mean.

    Parameters
    ----------
    n_steps : int
        Steps to draw.

    Returns
    -------
    float64 [step]
        Step times [s].
    """
    graph = simplify(graph)
    durations, crossed = filled(graph), crossed_table(graph)
    n_replicas, n_measured = graph.n_replicas, graph.steps.size
    which = rng.integers(0, n_measured, n_steps)
    out = durations[:, :, which]
    if crossed is not None:
        log = np.log(crossed.seconds)
        place = finite_mean(log, 2, keepdims=True)
        place = np.where(np.isfinite(place), place, finite_mean(log, (1, 2), keepdims=True))
        step = np.nan_to_num(finite_mean(log - place, (1, 3), keepdims=True))
        own = np.where(np.isfinite(log), log - place - step, 0.0)
        # centring on the replicas and microbatches of a step took some of their spread
        cells = max(2.0, math.prod((n_replicas, own.shape[3])))
        own = own * math.sqrt(cells / (cells - 1.0))
        n_mb = own.shape[3]
        shape = (n_replicas, n_steps, n_mb)
        r, t, m = (rng.integers(0, n, shape) for n in (n_replicas, n_measured, n_mb))
        drawn = own[:, r, t, m] + place + step[:, :, which]
        for c in range(len(crossed.columns)):
            for mb in range(n_mb):
                if crossed.node[c, mb] >= 0 and np.isfinite(drawn[c, ..., mb]).all():
                    out[crossed.node[c, mb]] = np.exp(drawn[c, :, :, mb])
    return replay(replace(graph, durations=out), out)
