"""A trace's graph made ready for a fit: negligible gaps folded away, compute ops as a table.

`simplify` keeps the end of every op that stays; `crossed_table` lays the compute ops of one
microbatch into (op_kind and stage, replica, step, microbatch); `resample` draws step times from
whole microbatches and whole steps, without any distribution.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from prism.common import sizes
from prism.common.arrays import Index
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
    node: Index  # [column, microbatch] index of the node, -1: none


def simplify(graph: TraceGraph) -> TraceGraph:
    """Fold negligible gaps into the ops after them, which end when they did.

    Missing durations stay missing.
    """
    durations = filled(graph)
    step_s = float(graph.measured.mean())
    instead: list[tuple[int, ...]] = []  # what followers of each node refer to
    nodes: list[TraceNode] = []
    rows: list[Array] = []
    ends, kept = ends_of(graph, durations), np.zeros_like(durations)  # by both graphs
    for i, (node, own) in enumerate(zip(graph.nodes, durations, strict=True)):
        preds = tuple(dict.fromkeys(q for p in node.preds for q in instead[p]))
        if node.kind == "gap" and own.mean() < FOLD * step_s and own.max() < 100.0 * FOLD * step_s:
            instead.append(preds)
            continue
        node = node._replace(preds=preds)
        start = start_of(node, kept)
        kept[len(nodes)] = start if node.kind == "join" else ends[i]
        row = np.maximum(kept[len(nodes)] - start, 0.0)
        rows.append(np.where(np.isfinite(graph.durations[i]), row, np.nan))
        instead.append((len(nodes),))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), durations=np.stack(rows))


def crossed_table(graph: TraceGraph) -> Crossed | None:
    """Lay compute ops into [column, replica, step, microbatch].

    Ops of one kind are distinguished by name where several make up a microbatch. None where there
    are too few to tell effects apart: one replica and one microbatch, one step.
    """
    table = pd.DataFrame(
        [(i, n.op_kind, n.stages[0], n.chunk, n.name, n.microbatch)
         for i, n in enumerate(graph.nodes) if n.kind == "op" and n.op_kind in COMPUTE],
        columns=["node", *Column._fields, "microbatch"],
    )  # fmt: skip
    names = table.groupby(["op_kind", "stage", "chunk"])["name"].transform("nunique")
    several = table["op_kind"].isin(table.loc[names > 1, "op_kind"])
    table["name"] = table["name"].where(several, "")
    table["op_kind"] = pd.Categorical(table["op_kind"], COMPUTE)
    by_column = table.groupby(list(Column._fields), observed=True)
    code = by_column.ngroup().to_numpy()  # pandas before 3.0 has its `groups` in another order
    first = table.iloc[np.unique(code, return_index=True)[1]][list(Column._fields)]
    columns = [
        Column(str(k), int(s), int(c), str(n)) for k, s, c, n in first.itertuples(index=False)
    ]
    n_mb = 1 + int(table["microbatch"].max()) if len(table) else 0
    cells = len(columns) * graph.n_replicas * graph.steps.size * n_mb
    counts = {"bytes of ops by replica, step and microbatch": (32.0 * cells, sizes.BYTE)}
    sizes.check_size("the trace", counts, "the numbers of its microbatches, or take fewer steps")
    where = np.full((len(columns), n_mb), -1, np.int64)
    where[code, table["microbatch"]] = table["node"]
    seconds = np.full((len(columns), graph.n_replicas, graph.steps.size, n_mb), np.nan)
    for c, m in np.argwhere(where >= 0):
        seconds[c, :, :, m] = graph.durations[where[c, m]]
    seconds[~(seconds > 0.0)] = np.nan  # an op of no length is a missing one
    seen = np.isfinite(seconds)
    real = seen.any(axis=(1, 2, 3))  # columns of zeros have nothing to tell
    replicas, steps = seen.any(axis=(0, 2, 3)).sum(), seen.any(axis=(0, 1, 3)).sum()
    if steps < 2 or max(replicas, seen.sum(axis=3).max(initial=0)) < 2:
        return None
    kept = [c for c, keep in zip(columns, real, strict=True) if keep]
    return Crossed(kept, seconds[real], where[real])


# -------------------------------------------------------------------------------- cross-check
def resample(graph: TraceGraph, n_steps: int, rng: np.random.Generator) -> Array:
    """Draw step times [s] from whole microbatches and whole steps, without any distribution.

    A nonparametric cross-check of the fitted model: deviations of one microbatch stay together over
    stages and passes, deviations of one step over all ops; what each resampled microbatch takes in
    another place is scaled by that place's mean.
    """
    graph = simplify(graph)
    which = rng.integers(0, graph.steps.size, n_steps)
    out, crossed = filled(graph)[:, :, which], crossed_table(graph)
    if crossed is not None:
        log = np.log(crossed.seconds)
        place = finite_mean(log, 2, keepdims=True)
        place = np.where(np.isfinite(place), place, finite_mean(log, (1, 2), keepdims=True))
        step = np.nan_to_num(finite_mean(log - place, (1, 3), keepdims=True))
        own = np.where(np.isfinite(log), log - place - step, 0.0)
        # centring on the replicas and microbatches of a step took some of their spread
        _, n_replicas, n_measured, n_mb = log.shape
        cells = max(2.0, n_replicas * n_mb)
        own = own * math.sqrt(cells / (cells - 1.0))
        shape = (n_replicas, n_steps, n_mb)
        r, t, m = (rng.integers(0, n, shape) for n in (n_replicas, n_measured, n_mb))
        drawn = own[:, r, t, m] + place + step[:, :, which]
        for c, mb in np.argwhere(crossed.node >= 0):
            if np.isfinite(drawn[c, ..., mb]).all():
                out[crossed.node[c, mb]] = np.exp(drawn[c, :, :, mb])
    return replay(replace(graph, durations=out), out)
