"""How long the kernels of a trace take, and how that varies: a table, and a typical step.

A collective matched over ranks counts with its transfer, one that is not with what was recorded,
labelled so. Durations are compared with those of the same launch grid, else sizes would pass for
variability. Left out: fitting families and separating effects, which is what a fit does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.models.kerneltrace.graph import NODE_KINDS, KernelGraph
from prism.models.kerneltrace.infer import infer_graph
from prism.models.kerneltrace.replay import node_durations, typical_step
from prism.models.kerneltrace.steps import kernel_keys, split_steps
from prism.traces.kernelnames import COLLECTIVES
from prism.traces.table import Trace

Floats = NDArray[np.float64]

MEASURES = ("kernel", "transfer", "includes waiting", "host")
"""What a row's durations are: a kernel's own; a collective's from its last arrival; a collective's
as recorded, because the other ranks were not traced or not matched; idle time before a launch."""


@dataclass(frozen=True)
class StepLaws:
    """The typical step as a model: a graph and how long its nodes take.

    Attributes
    ----------
    graph : KernelGraph
        Of the step of median span.
    nominal : array
        [node] mean duration over the steps [s].
    durations : array
        [node, step] in each step; not a number where it lacks the node [s].
    step_effect : array
        [step] what all kernels of a step share: their durations over the nominal ones, weighted by
        time; mean 1.
    steps : tuple of int
        The steps it was learnt from.
    """

    graph: KernelGraph
    nominal: Floats
    durations: Floats
    step_effect: Floats
    steps: tuple[int, ...]


def measured_durations(ops: pd.DataFrame) -> tuple[NDArray[np.int64], Floats]:
    """Measure (index into `MEASURES`) and duration [s] of each row."""
    kind = ops["op_kind"].astype(str).to_numpy()
    transfer = ops["transfer"].to_numpy()
    measure = np.zeros(kind.size, dtype=np.int64)
    communicates = np.isin(kind, list(COLLECTIVES))
    measure[communicates] = 2
    measure[communicates & np.isfinite(transfer)] = 1
    measure[kind == "launch_gap"] = 3
    return measure, np.where(measure == 1, transfer, ops["duration"].to_numpy())


def kernel_table(trace: Trace) -> pd.DataFrame:
    """Kernels of a trace with their share of the time and their variability."""
    keys, key = kernel_keys(trace)
    ops = trace.ops
    measure, duration = measured_durations(ops)
    end = ops["start"] + ops["duration"]
    by_rank = ops["rank"]
    total = float((end.groupby(by_rank).max() - ops["start"].groupby(by_rank).min()).sum())
    table = pd.DataFrame(
        {
            "name": [keys[k].name for k in key],
            "kernel_class": [keys[k].kernel_class for k in key],
            "op_kind": [keys[k].op_kind for k in key],
            "measure": [MEASURES[m] for m in measure],
            "duration": duration,
            "recorded": ops["duration"].to_numpy(),
        }
    )
    # a matched collective is one transfer, whatever number of ranks recorded it
    again = ops["collective"].duplicated().to_numpy() & (measure == MEASURES.index("transfer"))
    of_shape = pd.Series(np.where(again, np.nan, duration)).groupby([key, measure])
    alike = of_shape.transform("count").to_numpy()
    mean = of_shape.transform("mean").to_numpy()
    known = (alike > 1) & (mean > 0.0) & ~again
    table["relative"] = np.where(known, duration / np.where(known, mean, 1.0), np.nan)
    # n/(n - 1): the shape's own mean was taken out
    table["again"] = again
    table["square"] = (table["relative"] - 1.0) ** 2 * alike / np.maximum(alike - 1, 1)
    rows = []
    grouping = ["name", "kernel_class", "op_kind", "measure"]
    for group, rows_of in table.groupby(grouping, sort=False):
        sum_of = float(rows_of["duration"].sum())
        waited = float(rows_of["recorded"].sum()) - sum_of
        cv, p99_p50 = _spread(rows_of)
        rows.append(
            {
                **dict(zip(grouping, group, strict=True)),
                "n": len(rows_of),
                "mean": sum_of / len(rows_of),
                "cv": cv,
                "p99_p50": p99_p50,
                "share": sum_of / total if total > 0.0 else np.nan,
                "waiting_share": waited / total if total > 0.0 else np.nan,
            }
        )
    found = pd.DataFrame(rows).sort_values("share", ascending=False, kind="stable")
    return found.reset_index(drop=True)


def _spread(rows: pd.DataFrame) -> tuple[float, float]:
    """Coefficient of variation and p99 over p50 of durations over those of their shape."""
    rows = rows[~rows["again"]]
    relative = rows["relative"].dropna().to_numpy()
    square = rows["square"].dropna().to_numpy()
    if not relative.size and len(rows) > 1 and rows["duration"].mean() > 0.0:
        relative = (rows["duration"] / rows["duration"].mean()).to_numpy()
        square = (relative - 1.0) ** 2 * len(rows) / (len(rows) - 1)
    cv = float(np.sqrt(square.mean())) if square.size else np.nan
    if relative.size < 20:
        return cv, np.nan
    middle, high = np.quantile(relative, [0.5, 0.99])
    return cv, float(high / middle) if middle > 0.0 else np.nan


def step_laws(trace: Trace) -> StepLaws:
    """Describe the typical step: its graph, and what its nodes took in all the steps."""
    steps = split_steps(trace)
    graphs = [infer_graph(steps, step) for step in steps.steps]
    graph = graphs[steps.steps.index(typical_step(steps))]
    durations = node_durations(steps, graph, graphs)
    nominal = np.nanmean(durations, axis=1)
    communicates = np.array([key.op_kind in COLLECTIVES for key in graph.keys])[graph.key]
    shared = (graph.kind == NODE_KINDS.index("device")) & (nominal > 0.0) & ~communicates
    shared &= np.isfinite(durations).all(axis=1)
    effect = np.ones(len(graphs))
    if shared.any():
        effect = durations[shared].sum(axis=0) / nominal[shared].sum()
    return StepLaws(graph, nominal, durations, effect, tuple(steps.steps))
