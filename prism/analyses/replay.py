"""`prism replay`: a trace's own durations through its graph, and what the step would be without.

How well the graph reproduces the measured steps; the straggler-free step by two definitions; what
each op_kind, stage and worker costs. Left out: prediction, see `prism.analyses.validate`.

References
----------
.. [1] "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25,
   arXiv:2505.05713: the published slowdown.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import percent_change
from prism.models.kernellaws import ONE_STEP, why_no_model
from prism.models.kerneltrace.report import replay_kernels
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.models.pipelinetrace.reduce import finite_mean, simplify
from prism.simulation.tracemodel.graph import COMPUTE, Array, TraceGraph, filled
from prism.simulation.tracemodel.graph import replay as propagate
from prism.traces import read_trace

if TYPE_CHECKING:
    import xarray as xr

LOCAL_MEAN = (*COMPUTE, "optimizer")  # ops that the published ideal puts at their mean
CLOSE = 0.015  # of the measured mean: a replay further off says so


def replay(trace: str | Path | Sequence[str | Path], step_range: str | None = None) -> "xr.Dataset":
    """Replay a trace's own durations, and the steps without stragglers.

    Parameters
    ----------
    trace : path or sequence of paths
        A trace: a file, several files of one job's ranks, or their folder.
    step_range : str, optional
        What a profiler's ranges that are steps are called (`read_trace`).

    Returns
    -------
    xarray.Dataset
        ``measured_step_time``, ``replayed_step_time`` [step] in seconds, ``ideal_step_time``,
        ``slowdown_by_op_kind``, ``slowdown_by_stage``, ``slowdown_by_worker`` [dp_rank, stage]:
        mean step time over the one in which only this has no stragglers. `prism.summary`
        gives the figures the command prints.

    Raises
    ------
    PrismError
        The trace cannot be read or put in order.

    Examples
    --------
    >>> import prism
    >>> figures = prism.summary(prism.replay("experiments/samples/trace.csv"))
    >>> figures["steps"], round(figures["slowdown_same_work"], 3)
    (8, 1.049)
    """
    import xarray as xr

    read = read_trace(trace, step_range)
    reason = why_no_model(read)
    if reason is not None and reason != ONE_STEP:
        raise PrismError(
            f"{read.source}: {reason}, so there is nothing to replay; prism fit makes a library of "
            "its kernels"
        )
    if read.has_kernels:
        return replay_kernels(read)
    graph = build_trace_graph(read)
    replayed = propagate(graph)
    ideal, simple = same_work(graph, read.source)
    baseline, ideal_s = (float(propagate(simple, x).mean()) for x in (None, ideal))
    mean_error = float(replayed.mean() / graph.measured.mean() - 1.0)
    summary = {
        "steps": int(graph.steps.size),
        "mean_error": mean_error,
        "max_abs_error": float(np.abs(replayed / graph.measured - 1.0).max()),
        "measured_mean": float(graph.measured.mean()),
        "replayed_mean": float(replayed.mean()),
        "ideal_mean": ideal_s,
        "slowdown": published_slowdown(graph),
        "slowdown_same_work": baseline / ideal_s,
        "edges_recorded": graph.edges_recorded,
        "edges_inferred": graph.edges_inferred,
        "p2p": graph.p2p,
        "warnings": _warnings(mean_error),
    }
    kinds = list(dict.fromkeys(n.op_kind for n in simple.nodes if n.kind != "join"))
    data: dict[str, Any] = {
        name: (dims, values, {"units": "s", "long_name": text})
        for name, dims, values, text in (
            ("measured_step_time", "step", graph.measured, "measured"),
            ("replayed_step_time", "step", replayed, "replayed"),
            ("ideal_step_time", (), ideal_s, "step with every effect at 1"),
        )
    }
    for name, (dims, values) in _slowdowns(simple, ideal, baseline, kinds).items():
        text = f"mean step time over the one in which this {name} has no stragglers"
        data[f"slowdown_by_{name}"] = (dims, values, {"units": "1", "long_name": text})
    coords = {
        "step": graph.steps, "op_kind": kinds, "stage": list(range(graph.n_stages)),
        "dp_rank": np.arange(graph.n_replicas),
    }  # fmt: skip
    attrs = {
        "kind": "replay", "source": read.source, "summary": json.dumps(summary),
        "notes": json.dumps([*read.notes, *graph.notes]),
    }  # fmt: skip
    return xr.Dataset(data, coords, attrs)


def _warnings(mean_error: float) -> list[str]:
    """Say where the graph is not what ran."""
    if abs(mean_error) <= CLOSE:
        return []
    return [
        f"replayed steps are {percent_change(mean_error)} off the measured ones: ops of one worker "
        "overlap, wait for what the trace does not show, or their clocks differ; slowdowns are "
        "those of the replay"
    ]


def summarize_replay(dataset: "xr.Dataset") -> dict[str, Any]:
    """Figures of a replay, as `prism replay --json` prints them."""
    summary: dict[str, Any] = json.loads(dataset.attrs["summary"])
    for name in ("op_kind", "stage"):
        if name in dataset.coords:
            values = dataset[f"slowdown_by_{name}"].values
            summary[f"by_{name}"] = {
                str(k): float(v) for k, v in zip(dataset[name].values, values, strict=True)
            }
    if "slowdown_by_worker" in dataset:
        worker = dataset["slowdown_by_worker"]
        summary["by_worker"] = [
            {"dp_rank": int(r), "stage": int(s), "slowdown": float(worker.sel(dp_rank=r, stage=s))}
            for r in worker.dp_rank.values
            for s in worker.stage.values
        ]
    return summary | {"notes": json.loads(dataset.attrs["notes"])}


def published_slowdown(graph: TraceGraph) -> float:
    """Slowdown over the ideal of [1]: every op at its mean over replicas, stages and steps.

    Communication takes the median of its transfer; launch gaps are left out of both.
    """
    durations = np.array(filled(graph))
    classes: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "gap":
            durations[i] = 0.0
        elif node.kind == "op":
            name = node.op_kind if node.op_kind in ("transfer", *COMPUTE) else node.name
            classes.setdefault(name, []).append(i)
    ideal = np.array(durations)
    for nodes in classes.values():
        local = graph.nodes[nodes[0]].op_kind in LOCAL_MEAN
        ideal[nodes] = durations[nodes].mean() if local else np.median(durations[nodes])
    return float(propagate(graph, durations).mean() / propagate(graph, ideal).mean())


def same_work(graph: TraceGraph, source: str) -> tuple[Array, TraceGraph]:
    """Durations with every effect at 1 but the work of each stage kept, and their graph.

    Those of a fitted model (`ideal_step_time` of `prism estimate`): slow workers run as the others.
    """
    simple = simplify(graph)
    if graph.steps.size < 2:
        mean = np.nan_to_num(finite_mean(simple.durations, (1, 2), keepdims=True))
        return np.broadcast_to(mean, simple.durations.shape), simple
    model = fit_graph(graph, source)
    mean = model.mean.mean(axis=1)[:, None, None]
    return np.broadcast_to(mean, simple.durations.shape), simple


def _slowdowns(
    graph: TraceGraph, ideal: Array, baseline: float, kinds: list[str]
) -> dict[str, tuple[tuple[str, ...], Array]]:
    """Mean step over the one in which only this op_kind, stage or worker is ideal."""
    durations = filled(graph)

    def without(mask: NDArray[np.bool_], replica: int = -1) -> float:
        changed = np.array(durations)
        where = slice(None) if replica < 0 else slice(replica, replica + 1)
        changed[mask, where] = ideal[mask, where]
        return baseline / float(propagate(graph, changed).mean())

    real = np.array([n.kind != "join" for n in graph.nodes])
    kind_of = np.array([n.op_kind for n in graph.nodes])
    alone = np.array([len(n.stages) == 1 and not n.is_global for n in graph.nodes]) & real
    stage_of = np.array([n.stages[0] for n in graph.nodes])
    of_stage = [alone & (stage_of == s) for s in range(graph.n_stages)]
    worker = [[without(mask, r) for mask in of_stage] for r in range(graph.n_replicas)]
    return {
        "op_kind": (("op_kind",), np.array([without(real & (kind_of == k)) for k in kinds])),
        "stage": (("stage",), np.array([without(mask) for mask in of_stage])),
        "worker": (("dp_rank", "stage"), np.array(worker)),
    }
