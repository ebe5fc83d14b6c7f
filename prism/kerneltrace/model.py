"""A kernel trace as a model: the typical step's graph, with the laws of its kernels.

Every device activity and every stretch of the host's time is drawn from what its kernel did over
the steps, times a factor that all computing kernels of a step share; launch latencies are fixed.
Left out: rank effects (one job's few ranks do not show a law), and anything slower than a step.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from prism.distributions import constant
from prism.errors import PrismError
from prism.kerneltrace.graph import NODE_KINDS, KernelGraph
from prism.kerneltrace.laws import StepLaws, kernel_table, step_laws
from prism.kerneltrace.steps import split_steps
from prism.tracegraph import Array, TraceNode
from prism.tracegroups import REPLICA, WORKER
from prism.tracemodel import OpGroup, TraceModel, figures, sample_law, synthetic_graph
from prism.traces import Trace
from prism.traces.kernelnames import COLLECTIVES

CHECK_STEPS = 500  # simulated steps that the report compares with the measured ones
FAR_OFF = 0.03  # of the mean: a model further off says so
FEW_STEPS = 10  # below, a fit says that it rests on little
NOT_IDENTIFIABLE = (
    "rank effects, and their share common to a node: the traced ranks are too few for a law",
    "memory of the step effect, congestion, stalls: a profiler records a few steps in a row",
    "microbatch content: kernels do not say which microbatch they work on",
)
_FIXED = OpGroup(
    "launch_gap", "launch_gap", "launch latency", -1, 0, 0, 0.0, 0.0, 1.0, 0.0, constant(), 0.0, 0.0
)


def fit_kernels(trace: Trace) -> TraceModel:
    """Fit a model to a trace of kernels.

    Parameters
    ----------
    trace : Trace
        Of format ``kineto``, two steps or more.

    Raises
    ------
    PrismError
        Fewer than two steps.
    """
    steps = split_steps(trace)
    if len(steps.steps) < 2:
        raise PrismError(
            f"{trace.source}: {len(steps.steps)} step; at least 2 are needed to learn how kernels "
            "vary from step to step: profile more steps (schedule(active=...) of the profiler)"
        )
    laws = step_laws(trace)
    nodes, group_of, mean = _nodes(laws, steps.ranks)
    groups, index = _groups(laws)
    group = np.array([index[g] for g in group_of], np.int64)
    order = np.argsort(laws.step_effect, kind="stable")
    profile = np.ones((len(groups), 1, order.size))
    for k, g in index.items():
        if k >= 0 and _shares_step(laws.graph, k):
            profile[g, 0] = laws.step_effect[order] / laws.step_effect.mean()
    none, no_ranks = constant(), np.ones((0, len(steps.ranks), 1))
    measured = measured_steps(trace)
    model = TraceModel(
        nodes=tuple(nodes), n_stages=len(steps.ranks), n_replicas=1, p2p="none", group=group,
        groups=tuple(groups), mean=mean[:, None], profile=profile,
        steps=np.array(laws.steps, np.int64)[order], weight=np.full(order.size, 1.0 / order.size),
        rank=no_ranks, follows=no_ranks, rank_kinds=(), rank_law=none, rank_power=np.zeros(0),
        content=none, rank_step=none, correlation_steps=0.0, correlation_share=0.0,
        measured_mean=float(measured.mean()), job=_job(laws, len(steps.ranks)),
    )  # fmt: skip
    return replace(model, report=_report(trace, laws, measured, _simulated(model)))


def _simulated(model: TraceModel) -> Array:
    """Draw steps, beside which the measured ones are reported [s]."""
    rng = np.random.Generator(np.random.Philox(0))
    return synthetic_graph(model, np.arange(CHECK_STEPS, dtype=np.int64), rng).measured


def measured_steps(trace: Trace) -> Array:
    """Measured steps, [step] s: from the first rank's begin to the last device activity's end."""
    steps = split_steps(trace)
    out = []
    for step in steps.steps:
        views = [steps.views[step, rank] for rank in steps.ranks]
        begin = min(v.begin for v in views)
        out.append(max(float(np.nanmax(v.end)) for v in views) - begin)
    return np.array(out)


def _shares_step(graph: KernelGraph, key: int) -> bool:
    """Whether a kernel takes the step factor: those that compute do."""
    kind = graph.keys[key].op_kind
    return kind not in COLLECTIVES and kind != "launch_gap" and kind != "other"


def _nodes(
    laws: StepLaws, ranks: tuple[int, ...] | list[int]
) -> tuple[list[TraceNode], list[int], Array]:
    """Nodes with a latency before each edge that has one, their keys (-1: fixed) and means."""
    graph = laws.graph
    stage = {rank: i for i, rank in enumerate(ranks)}
    nodes: list[TraceNode] = []
    keys: list[int] = []
    mean: list[float] = []
    place: list[int] = []
    late: dict[tuple[int, float], int] = {}

    def append(node: TraceNode, key: int, seconds: float) -> int:
        nodes.append(node)
        keys.append(key)
        mean.append(max(seconds, 0.0))
        return len(nodes) - 1

    def latency(pred: int, lag: float, where: tuple[int, ...]) -> int:
        if lag <= 0.0:
            return pred
        if (pred, lag) not in late:
            node = TraceNode(
                "gap",
                "launch_gap",
                "launch_gap",
                "launch latency",
                WORKER,
                where,
                -1,
                0,
                -1,
                (pred,),
            )
            late[pred, lag] = append(node, -1, lag)
        return late[pred, lag]

    for i in range(graph.key.size):
        where = (stage.get(int(graph.rank[i]), 0),)
        edges = range(int(graph.pred_ptr[i]), int(graph.pred_ptr[i + 1]))
        preds = tuple(
            dict.fromkeys(
                latency(place[int(graph.pred[e])], float(graph.lag[e]), where) for e in edges
            )
        )
        key, kind = graph.keys[graph.key[i]], NODE_KINDS[graph.kind[i]]
        scope = REPLICA if kind == "join" else WORKER
        nominal = float(laws.nominal[i])
        seconds = nominal if np.isfinite(nominal) else float(graph.duration[i])
        drawn = kind in ("device", "host") and int(graph.key[i]) in laws.relative
        node = TraceNode(
            "op" if kind == "device" else "gap", key.op_kind if kind == "device" else "launch_gap",
            key.kernel_class if kind == "device" else "launch_gap", key.name, scope, where, -1, 0,
            -1, preds,
        )  # fmt: skip
        place.append(append(node, int(graph.key[i]) if drawn else -1, seconds))
    return nodes, keys, np.array(mean)


def _groups(laws: StepLaws) -> tuple[list[OpGroup], dict[int, int]]:
    """Laws by kernel; the first one is of what does not vary."""
    groups, index = [_FIXED], {-1: 0}
    for k, relative in laws.relative.items():
        key = laws.graph.keys[k]
        mine = laws.graph.key == k
        values = relative[np.isfinite(relative)]
        centre = float(values.mean()) or 1.0
        median = float(np.median(values)) or 1.0
        index[k] = len(groups)
        groups.append(
            OpGroup(
                key.op_kind, key.kernel_class, key.name, -1, 0, int(values.size),
                float(np.nanmean(laws.nominal[mine])), float(values.std() / centre),
                float(np.quantile(values, 0.99) / median), 0.0, sample_law(values / centre), 0.0,
                0.0,
            )
        )  # fmt: skip
    return groups, index


def _report(trace: Trace, laws: StepLaws, measured: Array, simulated: Array) -> dict[str, Any]:
    """Collect what a fit found, as plain values."""
    table = kernel_table(trace)
    rows = []
    for row in table.to_dict("records"):
        p99 = float(row["p99_p50"])
        rows.append({
            "name": str(row["name"]), "kernel_class": str(row["kernel_class"]),
            "op_kind": str(row["op_kind"]), "measure": str(row["measure"]), "n": int(row["n"]),
            "mean": float(row["mean"]), "cv": float(row["cv"]) if np.isfinite(row["cv"]) else None,
            "p99_p50": p99 if np.isfinite(p99) else None, "law": "empirical", "ks": None,
            "step_share": float(row["share"]),
        })  # fmt: skip
    n = len(laws.steps)
    effect = float(laws.step_effect.std(ddof=1) / laws.step_effect.mean()) if n > 1 else 0.0
    warnings = []
    if n < FEW_STEPS:
        warnings.append(f"{n} steps: how steps differ rests on little; profile {FEW_STEPS} or more")
    off = float(simulated.mean() / measured.mean()) - 1.0
    if abs(off) > FAR_OFF:
        warnings.append(
            f"the model's mean step is {100 * off:+.1f} % off the measured one: too few steps to "
            "tell which waits bind; take its spread and its what-ifs with care"
        )
    if any(r["measure"] == "includes waiting" for r in rows):
        warnings.append(
            "collectives without their other ranks include waiting; they are drawn as recorded, so "
            "the missing ranks' stragglers are in them: give the other ranks' files to separate it"
        )
    return {
        "inputs": [trace.source], "steps": n, "stages": len(np.unique(trace.ops["rank"])),
        "dp_size": 1, "p2p": "none",
        "step_time": figures(measured),
        "cross_check": {"measured": figures(measured), "model": figures(simulated)},
        "kernels": rows, "effects": {"step": {"cv": effect, "ci": [None, None], "share": None}},
        "loadings": {}, "lemons": [], "not_identifiable": list(NOT_IDENTIFIABLE),
        "warnings": warnings, "notes": list(trace.notes),
        "edges_recorded": laws.graph.count_edges("recorded"),
        "edges_inferred": laws.graph.count_edges("inferred"),
    }  # fmt: skip


def _job(laws: StepLaws, n_ranks: int) -> dict[str, Any]:
    """Blocks of a job file that describe the traced ranks: one forward stands for all kernels."""
    device = laws.graph.nodes("device")
    busy = float(np.nansum(laws.nominal[device])) / n_ranks
    return {
        "model": {"durations": {"forward_s": busy, "backward_s": busy}},
        "parallelism": {"pp": n_ranks, "dp": 1, "microbatches": 1},
        "cluster": {"gpus_per_node": 1},
        "variability": {"library": None},
    }
