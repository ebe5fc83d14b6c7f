"""Replay of a kernel trace as a result: spans per step and rank, and what each op_kind costs."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.models.kerneltrace.graph import KernelGraph, replay
from prism.models.kerneltrace.replay import StepGraphs, replay_trace, step_graphs
from prism.traces import Trace

if TYPE_CHECKING:
    import xarray as xr


def replay_kernels(trace: Trace) -> "xr.Dataset":
    """Replay every step of a kernel trace, as `prism.analyses.replay.replay` does for pipelines.

    The step's time is the GPU span, first start to last end of the device activities launched in
    it; with several ranks the longest of them.
    """
    import xarray as xr

    graphs = step_graphs(trace)
    found = replay_trace(graphs)
    rows = found.pop("steps")
    numbers = np.unique([r["step"] for r in rows])
    measured, replayed = (
        np.array([max(r[name] for r in rows if r["step"] == s) for s in numbers])
        for name in ("measured", "replayed")
    )
    kinds, slowdown = _by_op_kind(graphs)
    ratio = found["slowdown"]
    summary: dict[str, Any] = {
        **{k: v for k, v in found.items() if k != "notes"},
        "steps": int(numbers.size),
        "slowdown": None,  # the published ideal is one of pipelines
        "slowdown_same_work": float(ratio) if np.isfinite(ratio) else None,
        "gpu_spans": rows,
    }
    text = "mean span over the one in which this op_kind is always at its mean"
    data = {
        "measured_step_time": (
            "step", measured, {"units": "s", "long_name": "measured GPU span of the step"}
        ),
        "replayed_step_time": (
            "step", replayed, {"units": "s", "long_name": "replayed GPU span of the step"}
        ),
        "ideal_step_time": (
            (), found["ideal_mean"], {"units": "s", "long_name": "span with every node at its mean"}
        ),
        "slowdown_by_op_kind": ("op_kind", slowdown, {"units": "1", "long_name": text}),
    }  # fmt: skip
    attrs = {
        "kind": "replay", "source": trace.source, "summary": json.dumps(summary),
        "notes": json.dumps([*trace.notes, *found["notes"]]),
    }  # fmt: skip
    return xr.Dataset(data, {"step": numbers, "op_kind": kinds}, attrs)


def _by_op_kind(steps: StepGraphs) -> tuple[list[str], "np.ndarray[Any, Any]"]:
    """Mean span over the one in which only this op_kind is at its mean over the steps."""
    _, graphs, means = steps
    kind_of = [np.array([k.op_kind for k in g.keys])[g.key] for g in graphs]
    kinds = sorted({str(k) for g, names in zip(graphs, kind_of, strict=True)
                    for k in names[g.nodes("device")]} | {"launch_gap"})  # fmt: skip
    base = float(np.mean([replay(g).span for g in graphs]))
    out = []
    for kind in kinds:
        spans = [
            _with_mean(g, mean, names == kind)
            for g, mean, names in zip(graphs, means, kind_of, strict=True)
        ]
        ideal = float(np.mean(spans))
        out.append(base / ideal if ideal > 0.0 else 1.0)
    return kinds, np.array(out)


def _with_mean(graph: KernelGraph, mean: "np.ndarray[Any, Any]", mask: Any) -> float:
    durations = np.where(mask & np.isfinite(mean), mean, graph.duration)
    return float(replay(graph, durations).span)
