"""`prism replay`: a trace's own durations through its graph, and what the step would be without.

How well the graph reproduces the measured steps; the straggler-free step by two definitions; what
each op_kind, stage and worker costs. Left out: prediction, see `prism.analyses.validate`.

References
----------
.. [1] "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25,
   arXiv:2505.05713: the published slowdown.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prism.common.arrays import Flags, Index
from prism.common.errors import PrismError
from prism.common.means import finite_mean
from prism.common.results import (
    Columns,
    Field,
    Result,
    pack_figures,
    pack_texts,
    read_figures,
    read_texts,
)
from prism.common.text import percent_change
from prism.models.changes.find import choose_steps
from prism.models.kernellibraries import why_no_model
from prism.models.kerneltrace.graph import KernelGraph, step_graph
from prism.models.kerneltrace.steps import KernelSteps, split_steps
from prism.models.pipelinetrace.build import CLOSE, build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph
from prism.models.pipelinetrace.reduce import simplify
from prism.simulation.tracemodel.graph import COMPUTE, Array, TraceGraph, ends_of, filled
from prism.simulation.tracemodel.graph import replay as replay_graph
from prism.simulation.tracemodel.model import steady
from prism.traces import Trace, read_trace

if TYPE_CHECKING:
    import pandas as pd

LOCAL_MEAN = (*COMPUTE, "optimizer")  # ops that the published ideal puts at their mean
MOST_CELLS = 4_000_000  # durations replayed at once
Cause = tuple[str | int, ...]  # op_kind, stage or worker, and which
MEASURED: Cause = ("measured",)
STRAGGLERS: Cause = ("stragglers",)
DIMS = {"op_kind": ("op_kind",), "stage": ("stage",), "worker": ("dp_rank", "stage")}


def replay(
    trace: str | Path | Sequence[str | Path], step_range: str | None = None,
    skip: int | None = None, steps: str | None = None,
) -> "Replay":  # fmt: skip
    """Replay a trace's own durations, and the steps without stragglers.

    Parameters
    ----------
    trace : path or sequence of paths
        A trace: a file, several files of one job's ranks, or their folder.
    step_range : str, optional
        What a profiler's ranges that are steps are called (`read_trace`).
    skip : int, optional
        First steps to leave out.
    steps : str, optional
        ``A:B``, the numbers of the first and the last step to take.

    Returns
    -------
    Replay
        ``measured_step_time``, ``replayed_step_time`` [step] in seconds, ``ideal_step_time``,
        ``slowdown_by_op_kind``, ``slowdown_by_stage``, ``slowdown_by_worker`` [dp_rank, stage]:
        mean step time over the one in which only this has no stragglers; table
        ``slowdowns``. `prism.summary` gives the figures the command prints.

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
    return replay_trace(choose_steps(read_trace(trace, step_range), skip, steps))


FIGURES = (
    Field("steps", "count", "steps replayed"),
    Field("mean_error", "1", "replayed mean step over the measured one, less 1"),
    Field("max_abs_error", "1", "largest error of a step"),
    Field("measured_mean", "s", "mean step as measured"),
    Field("replayed_mean", "s", "mean step as replayed"),
    Field("ideal_mean", "s", "mean step with every effect at 1, stages as unequal as they are"),
    Field("slowdown_same_work", "1", "mean replayed step over the ideal one"),
    Field("slowdown", "1", "the same over the published ideal: equal stages, no launch gaps"),
    Field("p2p", "text", "whether transfers hold up the rank that sends"),
    Field("edges_recorded", "count", "edges that the recording shows"),
    Field("edges_inferred", "count", "edges that other steps show"),
    Field("late_starts", "count", "starts later than everything they wait for"),
    Field("unexplained_starts", "count", "starts before what they wait for ends"),
)
SPANS = Columns("gpu_span", (
    Field("step", "count", "step", "step"),
    Field("rank", "count", "rank", "rank"),
    Field("measured", "s", "first start to last end of the rank's kernels, measured", "measured"),
    Field("replayed", "s", "the same, replayed", "replayed"),
    Field("error", "1", "replayed over measured, less 1", "error", form="change"),
), numbered=True, prefix="span_")  # fmt: skip
SLOWDOWNS = Columns("cause", (
    Field("name", "text"),
    Field("kind", "text", "op kind, stage or worker"),
    Field("slowdown", "1", "mean step over the one in which only this is at its mean"),
))  # fmt: skip


class Replay(Result):
    """Replayed steps of a trace, and what each part of it slows them.

    Examples
    --------
    >>> import prism
    >>> result = prism.replay("experiments/samples/trace.csv")
    >>> slowdowns = result.slowdowns[result.slowdowns.kind == "worker"].slowdown
    >>> slowdowns.idxmax(), result.steps.item()
    ('replica 1, stage 0', 8)
    """

    _needs = ("steps",)

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        data = self.dataset
        found = read_figures(FIGURES, data)
        if SPANS.dim in data.dims:
            found["gpu_spans"] = SPANS.rows(data)
        for name in ("op_kind", "stage"):
            if f"slowdown_by_{name}" in data:
                slowdown = data[f"slowdown_by_{name}"].values.tolist()
                found[f"by_{name}"] = dict(zip(map(str, data[name].values), slowdown, strict=True))
        if "slowdown_by_worker" in data:
            rows = data["slowdown_by_worker"].stack(worker=("dp_rank", "stage"))
            found["by_worker"] = [
                {"dp_rank": int(r), "stage": int(s), "slowdown": float(value)}
                for (r, s), value in zip(rows.worker.values, rows.values, strict=True)
            ]
        return found | {name: read_texts(data, name) for name in ("notes", "warnings")}

    @cached_property
    def slowdowns(self) -> "pd.DataFrame":
        """What each op kind, stage and worker slows the step [1]."""
        return SLOWDOWNS.frame(self.causes())

    def causes(self) -> list[dict[str, Any]]:
        """Give the rows of `slowdowns`."""
        found = self.figures()
        named = [
            *(("op kind", *pair) for pair in found.get("by_op_kind", {}).items()),
            *(("stage", *pair) for pair in found.get("by_stage", {}).items()),
            *(
                ("worker", f"replica {row['dp_rank']}, stage {row['stage']}", row["slowdown"])
                for row in found.get("by_worker", [])
            ),
        ]
        return [{"kind": kind, "name": name, "slowdown": value} for kind, name, value in named]


class Replayed(NamedTuple):
    """What replaying a trace of one kind gives."""

    steps: Index
    measured: Array  # [step] s
    times: dict[Cause, Array]  # [step] s: replayed, and without a cause
    figures: dict[str, Any]  # that the kind of trace adds
    notes: Sequence[str]
    spans: Sequence[dict[str, Any]] = ()  # of ranks, rows of `SPANS`


def replay_trace(trace: Trace) -> Replay:
    """Replay a trace that has been read, as `replay` does."""
    import xarray as xr

    reason = why_no_model(trace)
    if reason is not None:
        raise PrismError(
            f"{trace.source}: {reason}, so there is nothing to replay; prism fit makes a library "
            "of its kernels"
        )
    found = _replay_kernels(trace) if trace.has_kernels else _replay_pipeline(trace)
    mean = {cause: float(times.mean()) for cause, times in found.times.items()}
    replayed = found.times[MEASURED]
    mean_error = float(replayed.mean() / found.measured.mean() - 1.0)
    figures = {
        "steps": int(found.steps.size),
        "mean_error": mean_error,
        "max_abs_error": float(np.abs(replayed / found.measured - 1.0).max()),
        "measured_mean": float(found.measured.mean()),
        "replayed_mean": mean[MEASURED],
        "ideal_mean": mean[STRAGGLERS],
        "slowdown_same_work": _ratio(mean, STRAGGLERS),
    } | found.figures
    data: dict[str, Any] = {
        name: (dims, values, {"units": "s", "long_name": text})
        for name, dims, values, text in (
            ("measured_step_time", "step", found.measured, "measured"),
            ("replayed_step_time", "step", replayed, "replayed"),
            ("ideal_step_time", (), mean[STRAGGLERS], "step with every effect at 1"),
        )
    }
    coords: dict[str, Any] = {"step": found.steps}
    for name, dims in DIMS.items():
        causes = [cause[1:] for cause in mean if cause[0] == name]
        if not causes:
            continue
        own = {dim: list(dict.fromkeys(c[i] for c in causes)) for i, dim in enumerate(dims)}
        slowdown = np.array([_ratio(mean, (name, *place)) for place in product(*own.values())])
        text = f"mean step time over the one in which this {name} has no stragglers"
        shape = [len(values) for values in own.values()]
        about = {"units": "1", "long_name": text}
        data[f"slowdown_by_{name}"] = (dims, slowdown.reshape(shape), about)
        coords |= own
    parts = [
        xr.Dataset(data, coords),
        pack_figures(FIGURES, figures),
        pack_texts(warnings=_warnings(mean_error), notes=[*trace.notes, *found.notes]),
    ]
    if found.spans:
        parts.append(SPANS.pack(found.spans))
    attrs = {"kind": "replay", "source": trace.source}
    return Replay(xr.merge(parts).assign_attrs(attrs))


def _ratio(mean: dict[Cause, float], cause: Cause) -> float:
    return mean[MEASURED] / mean[cause] if mean[cause] > 0.0 else 1.0


def _replay_pipeline(trace: Trace) -> Replayed:
    graph = build_trace_graph(trace)
    ideal, simple = same_work(graph, trace.source)
    causes = _op_kinds(simple) | _places(simple)
    times = _without(simple, filled(simple), ideal, causes)
    figures = {
        "slowdown": published_slowdown(graph), "p2p": graph.p2p,
        "edges_recorded": graph.edges_recorded, "edges_inferred": graph.edges_inferred,
    }  # fmt: skip
    return Replayed(graph.steps, graph.measured, times, figures, graph.notes)


def _replay_kernels(trace: Trace) -> Replayed:
    """Replay every step through the edges that the other steps show.

    The step's time is its period, from the end of the device work of the step before, on all ranks,
    to the end of its own.
    """
    steps = split_steps(trace)
    times: list[dict[Cause, Array]] = []
    rows: list[dict[str, Any]] = []
    counts = {"edges_recorded": 0, "edges_inferred": 0, "n_late": 0, "n_unexplained": 0}
    for graph in (step_graph(steps, step) for step in steps.steps):
        own = graph.select(graph.own)
        mean = finite_mean(graph.durations, axis=(1, 2))
        mean = steady(graph.nodes, mean, graph.most_lead)[:, None, None]
        times.append(_without(own, own.durations, mean, _op_kinds(own)))
        rows += _gpu_spans(own, steps)
        counts = {name: n + getattr(graph, name) for name, n in counts.items()}
    causes = dict.fromkeys(cause for of_step in times for cause in of_step)
    joined = {
        cause: np.concatenate([of_step.get(cause, of_step[MEASURED]) for of_step in times])
        for cause in causes
    }
    figures = {
        "slowdown": None,  # the published ideal is one of pipelines
        "late_starts": counts.pop("n_late"), "unexplained_starts": counts.pop("n_unexplained"),
    }  # fmt: skip
    alone = ["one step only: no edge can be inferred from other steps"]
    alone *= len({step for step, _ in steps.views}) == 1
    return Replayed(np.array(steps.steps), steps.periods(), joined, figures | counts, alone, rows)


def _gpu_spans(graph: KernelGraph, steps: KernelSteps) -> list[dict[str, Any]]:
    """First start to last end of each rank's activities in a step, measured and replayed [s]."""
    ends, rows = ends_of(graph), []
    for stage, rank in enumerate(graph.ranks):
        measured = steps.views[graph.step, rank].span()
        own = np.array([stage in node.stages and node.kind == "op" for node in graph.nodes])
        replayed = float(ends[own].max() - (ends - graph.durations)[own].min())
        error = replayed / measured - 1.0
        rows.append({"step": graph.step, "rank": rank, "measured": measured, "replayed": replayed,
                     "error": error})  # fmt: skip
    return rows


def _op_kinds(graph: TraceGraph) -> dict[Cause, Flags]:
    """Nodes of each op kind, [node, 1, 1]."""
    kinds = np.array([node.op_kind if node.kind != "join" else "" for node in graph.nodes])
    found = dict.fromkeys(kind for kind in kinds.tolist() if kind)
    return {("op_kind", kind): (kinds == kind)[:, None, None] for kind in found}


def _places(graph: TraceGraph) -> dict[Cause, Flags]:
    """Nodes of each stage alone, and of each worker, [node, replica, 1]."""
    alone = np.array([n.kind != "join" and len(n.stages) == 1 and not n.is_global
                      for n in graph.nodes])  # fmt: skip
    stage_of = np.where(alone, [n.stages[0] for n in graph.nodes], -1)[:, None, None]
    replica_of = np.arange(graph.n_replicas)[:, None]
    places = list(product(range(graph.n_replicas), range(graph.n_stages)))
    return {("stage", s): stage_of == s for s in range(graph.n_stages)} | {
        ("worker", r, s): (stage_of == s) & (replica_of == r) for r, s in places
    }


def _without(
    graph: TraceGraph, durations: Array, ideal: Array, causes: dict[Cause, Flags]
) -> dict[Cause, Array]:
    """Replay steps as measured, without stragglers, and without those of each cause, [step] s."""
    all_nodes = np.ones((1, 1, 1), bool)
    masks = {MEASURED: ~all_nodes, STRAGGLERS: all_nodes} | causes
    found: dict[Cause, Array] = {}
    at_once = max(1, MOST_CELLS // durations.size)
    for first in range(0, len(masks), at_once):
        some = list(masks)[first : first + at_once]
        changed = [np.where(masks[cause], ideal, durations) for cause in some]
        times = replay_graph(graph, np.concatenate(changed, axis=2))
        found |= zip(some, np.split(times, len(some)), strict=True)
    return found


def _warnings(mean_error: float) -> list[str]:
    """Say where the graph is not what ran."""
    if abs(mean_error) <= CLOSE:
        return []
    return [
        f"replayed steps are {percent_change(mean_error)} off the measured ones: ops of one worker "
        "overlap, wait for what the trace does not show, or their clocks differ; slowdowns are "
        "those of the replay"
    ]


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
    return float(replay_graph(graph, durations).mean() / replay_graph(graph, ideal).mean())


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
