"""A kernel trace as a model: the typical step's graph, with the distributions of its kernels.

Every device activity and every stretch of the host's time is drawn from what its kernel did over
the steps, times a factor that all computing kernels of a step share; launch latencies are fixed.
Left out: rank effects (one job's few ranks do not show a distribution), and anything slower than a
step.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_duration, percent_change
from prism.distributions.distribution import constant
from prism.models.kerneltrace.graph import NODE_KINDS
from prism.models.kerneltrace.groups import NodeGroup, joined, node_groups
from prism.models.kerneltrace.laws import StepLaws, kernel_table, step_laws
from prism.models.kerneltrace.steps import KernelSteps, split_steps
from prism.simulation.tracemodel.graph import REPLICA, WORKER, Array, TraceNode
from prism.simulation.tracemodel.model import (
    OpGroup,
    TraceModel,
    figures,
    sample_law,
    synthetic_graph,
)
from prism.traces import Trace
from prism.traces.kernelnames import COLLECTIVES

CHECK_STEPS = 500  # simulated steps that the report compares with the measured ones
FAR_OFF = 0.03  # of the mean: a model further off says so
FEW_STEPS = 10  # below, a fit says that it rests on little
NOT_IDENTIFIABLE = (
    "rank effects, and their share common to a node: the traced ranks are too few",
    "memory of the step effect, congestion, stalls: a profiler records a few steps in a row",
    "microbatch content: kernels do not say which microbatch they work on",
)
_FIXED = OpGroup(
    "launch_gap", "launch_gap", "launch latency", -1, 0, 0, 0.0, 0.0, 1.0, 0.0, constant(), 0.0, 0.0
)


def fit_kernels(trace: Trace) -> TraceModel:
    """Fit a model to a trace of kernels."""
    steps = split_steps(trace)
    if len(steps.steps) < 2:
        raise PrismError(
            f"{trace.source}: {len(steps.steps)} step; at least 2 are needed to learn how kernels "
            "vary from step to step: profile more steps (schedule(active=...) of the profiler)"
        )
    laws = step_laws(trace)
    shared = node_groups(laws)
    nodes, place, mean = _nodes(laws, steps.ranks)
    group = np.zeros(len(nodes), np.int64)
    measured = measured_steps(trace)
    order = np.argsort(measured, kind="stable")
    profile = np.ones((len(shared) + 1, 1, order.size))
    for g, members in enumerate(shared, start=1):
        group[place[members.nodes]] = g
        profile[g, 0] = members.profile[order]
    none, no_ranks = constant(), np.ones((0, len(steps.ranks), 1))
    model = TraceModel(
        nodes=tuple(nodes), n_stages=len(steps.ranks), n_replicas=1, p2p="none", group=group,
        groups=(_FIXED, *(_law(laws, g) for g in shared)), mean=mean[:, None], profile=profile,
        steps=np.array(laws.steps, np.int64)[order], weight=np.full(order.size, 1.0 / order.size),
        rank=no_ranks, follows=no_ranks, rank_kinds=(), rank_law=none, rank_power=np.zeros(0),
        content=none, rank_step=none, correlation_steps=0.0, correlation_share=0.0,
        measured_mean=float(measured.mean()), period_ratio=_period_ratio(steps),
        job=_job(laws, len(steps.ranks)),
    )  # fmt: skip
    return replace(
        model, report=_report(trace, laws, measured, _simulated(model), model.period_ratio)
    )


def _simulated(model: TraceModel) -> Array:
    """Draw steps, beside which the measured ones are reported [s]."""
    rng = np.random.Generator(np.random.Philox(0))
    return synthetic_graph(model, np.arange(CHECK_STEPS, dtype=np.int64), rng).measured


def measured_steps(trace: Trace) -> Array:
    """Measured steps, [step] s: from the first rank's begin to the last device activity's end."""
    begin, end = _step_bounds(split_steps(trace))
    return end - begin


def _step_bounds(steps: KernelSteps) -> tuple[Array, Array]:
    """First begin on a host and last end on a device of each step, [step] s."""
    views = [[steps.views[step, rank] for rank in steps.ranks] for step in steps.steps]
    begin = np.array([min(v.begin for v in of_step) for of_step in views])
    return begin, np.array([max(float(np.nanmax(v.end)) for v in of_step) for of_step in views])


def _period_ratio(steps: KernelSteps) -> float:
    """Mean time from step to step over a step's own [1]; 1 where no two follow each other.

    From end to end on the device: a host that runs ahead begins its first steps faster than the
    device can follow.
    """
    begin, end = _step_bounds(steps)
    between = np.diff(end)[np.diff(steps.steps) == 1]
    return float(between.mean() / (end - begin).mean()) if between.sum() > 0.0 else 1.0


def _nodes(
    laws: StepLaws, ranks: Sequence[int]
) -> tuple[list[TraceNode], NDArray[np.int64], Array]:
    """Nodes with a latency before each edge that has one, where each graph node is, and means."""
    graph = laws.graph
    stage = {rank: i for i, rank in enumerate(ranks)}
    nodes: list[TraceNode] = []
    mean: list[float] = []
    place: list[int] = []
    late: dict[tuple[int, float], int] = {}
    first = joined(graph)

    def append(node: TraceNode, seconds: float) -> int:
        nodes.append(node)
        mean.append(max(seconds, 0.0))
        return len(nodes) - 1

    def latency(pred: int, lag: float, where: tuple[int, ...]) -> int:
        if lag <= 0.0:
            return pred
        if (pred, lag) not in late:
            node = TraceNode(
                "gap", "launch_gap", "launch_gap", "launch latency", WORKER, where, -1, 0, -1,
                (pred,),
            )  # fmt: skip
            late[pred, lag] = append(node, lag)
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
        if i in first:  # a collective's transfer is drawn once, and ends for all at once
            preds, seconds = (place[first[i]],), 0.0
        node = TraceNode(
            "op" if kind == "device" else "gap", key.op_kind if kind == "device" else "launch_gap",
            key.kernel_class if kind == "device" else "launch_gap", key.name, scope, where, -1, 0,
            -1, preds,
        )  # fmt: skip
        place.append(append(node, seconds))
    return nodes, np.array(place, np.int64), np.array(mean)


def _law(laws: StepLaws, group: NodeGroup) -> OpGroup:
    """Describe a group as the model keeps it; its distribution has the group's own spread."""
    seconds = laws.durations[group.nodes]
    ratio = seconds / laws.nominal[group.nodes, None]
    ratio = ratio[np.isfinite(ratio)]
    law = sample_law(group.values)
    if group.std > 0.0 and law.std > 0.0:
        wide = law.scaled_to(group.std)
        law = wide if float(wide.ppf(np.array([0.0]))[0]) > 0.0 else law
    elif law.std > 0.0:
        law = constant()
    key, median = group.key, float(np.median(ratio)) or 1.0
    return OpGroup(
        key.op_kind, key.kernel_class, key.name, -1, 0, int(ratio.size),
        float(np.nanmean(seconds)), float(ratio.std()), float(np.quantile(ratio, 0.99) / median),
        0.0, law, 0.0, 0.0,
    )  # fmt: skip


def _label(row: Mapping[Hashable, Any]) -> str:
    """Name a kernel; a collective also by what launched it, as its kernel need not tell."""
    waits = ", includes waiting" if row["measure"] == "includes waiting" else ""
    kind = f"{row['op_kind']}{waits}: " if row["op_kind"] in COLLECTIVES else ""
    return f"{kind}{row['name']}"


def _report(
    trace: Trace, laws: StepLaws, measured: Array, simulated: Array, period_ratio: float
) -> dict[str, Any]:
    """Collect what a fit found, as plain values."""
    table = kernel_table(trace)
    rows = []
    for row in table.to_dict("records"):
        p99 = float(row["p99_p50"])
        rows.append({
            "name": _label(row), "kernel_class": str(row["kernel_class"]),
            "op_kind": str(row["op_kind"]), "measure": str(row["measure"]), "n": int(row["n"]),
            "mean": float(row["mean"]), "cv": float(row["cv"]) if np.isfinite(row["cv"]) else None,
            "p99_p50": p99 if np.isfinite(p99) else None, "law": "empirical", "ks": None,
            "step_share": float(row["share"]),
        })  # fmt: skip
    n = len(laws.steps)
    effect = float(laws.step_effect.std(ddof=1) / laws.step_effect.mean()) if n > 1 else 0.0
    warnings = []
    if n < FEW_STEPS:
        warnings.append(f"{n} steps: too few for how steps differ; profile {FEW_STEPS} or more")
    off = float(simulated.mean() / measured.mean()) - 1.0
    if abs(off) > FAR_OFF:
        warnings.append(
            f"the model's mean step is {percent_change(off)} off the measured one: too few steps "
            "to identify which waits bind; its spread and its what-ifs are uncertain"
        )
    if round(period_ratio, 2) != 1.0:
        period = format_duration(period_ratio * float(measured.mean()))
        warnings.append(
            f"steps follow each other every {period}, but take {format_duration(measured.mean())} "
            "each, from the host's begin to the last GPU's end: steps overlap or leave pauses; "
            "the time of a run counts the first"
        )
    if any(r["measure"] == "includes waiting" for r in rows):
        warnings.append(
            "ranks not traced enter through the waiting in collectives, drawn as recorded: "
            "their stragglers are in it, and are not identifiable"
        )
    return {
        "inputs": [trace.source], "steps": n, "stages": len(np.unique(trace.ops["rank"])),
        "dp_size": 1, "p2p": "none",
        "step_time": figures(measured),
        "step_period": {"mean": period_ratio * figures(measured)["mean"], "ratio": period_ratio},
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
