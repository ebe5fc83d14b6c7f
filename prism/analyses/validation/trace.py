"""A trace of ops split in two: one part of its steps is fitted, the other predicted.

Steps are predicted from their numbers alone, since steps remember those near them.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from prism.analyses.validation.against_measured import Call, Repetitions, ValidationCase
from prism.analyses.validation.steps import split_steps
from prism.common.arrays import Index
from prism.engine import LANES
from prism.models.changes.find import changes_of_trace, without_steps
from prism.models.changes.report import warn
from prism.models.fit import warnings_of
from prism.models.kerneltrace.graph import step_graph
from prism.models.kerneltrace.model import fit_kernel_graph, fit_kernels, redrawn
from prism.models.kerneltrace.steps import split_steps as split_kernel_steps
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph, fit_with_components
from prism.simulation.execution.context import RunContext
from prism.simulation.no_dependence import pool_program
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks
from prism.simulation.tracemodel.arrays import build_trace_graph_arrays, build_trace_program
from prism.simulation.tracemodel.graph import Array, TraceGraph
from prism.simulation.tracemodel.model import (
    TraceModel,
    conditioned,
    independent_graph,
    synthetic_graph,
)
from prism.traces import Trace

REPEAT_SAMPLES = 2048  # predicted steps behind the p-value's statistic: KS to 0.02


def trace_case(trace: Trace, train: str, call: Call) -> ValidationCase:
    """Fit one part of a trace's steps and predict the other."""
    split = (_split_kernels if trace.has_kernels else _split_pipeline)(trace, train)
    part, held = split.part, split.held
    predicted, alone = (
        predict_steps(split.model, split.steps[held], how, call.replicates, call.context.quiet)
        for how in (call.dependence or "full", "none")
    )
    facts = {
        "trace": trace.source, "train": train, "n_train": int(part.size), "notes": split.notes,
        "changes": split.changes, "warnings": [*map(warn, split.changes), *split.warnings],
    }  # fmt: skip
    null = _anew(split, call)
    return ValidationCase(
        split.measured[held], split.steps[held], predicted, alone, null, facts,
        training=split.measured[part],
    )  # fmt: skip


class _Split(NamedTuple):
    """A trace whose steps [step] are split, and the model of one part."""

    steps: Index
    measured: Array
    part: Index  # positions of the steps that are fitted, less what changes among them
    held: Index
    model: TraceModel
    refit: Callable[[TraceGraph], TraceModel]  # to the same part of a drawn trace
    changes: list[dict[str, Any]]
    notes: list[str]
    warnings: list[str]


def _parts(
    trace: Trace, steps: Index, train: str
) -> tuple[Index, Index, list[dict[str, Any]], Trace]:
    """Positions of steps to fit and to hold out, what changes in the first, and their trace."""
    part = split_steps(steps.size, train, trace.source)
    held = np.setdiff1d(np.arange(steps.size), part)
    training = without_steps(trace, steps[held])
    changes, out = changes_of_trace(training)
    return part[~np.isin(steps[part], out)], held, changes, without_steps(training, out)


def _split_pipeline(trace: Trace, train: str) -> _Split:
    graph = build_trace_graph(trace)
    part, held, changes, _ = _parts(trace, graph.steps, train)
    training = graph.select(part)
    model, parts = fit_with_components(training, trace.source)
    return _Split(
        graph.steps, graph.measured, part, held, model, lambda drawn: fit_graph(drawn.select(part)),
        changes, [*trace.notes, *graph.notes], warnings_of(training, model, parts),
    )  # fmt: skip


def _split_kernels(trace: Trace, train: str) -> _Split:
    """Split a trace of kernels; waits, too, are inferred from the training steps alone."""
    whole = split_kernel_steps(trace)
    steps = np.array(whole.steps)
    part, held, changes, training = _parts(trace, steps, train)
    model, graph = fit_kernels(training), step_graph(split_kernel_steps(training))
    return _Split(
        steps, whole.periods(), part, held, model,
        lambda drawn: fit_kernel_graph(redrawn(graph, drawn.select(part))), changes,
        list(trace.notes), model.report["warnings"],
    )  # fmt: skip


def _anew(split: _Split, call: Call) -> Repetitions:
    """Draw traces of the model, fit it to their training part and predict the rest.

    Traces have the dependence that is tested, so that the p-value is small where ops of the
    measured job depend on each other and the prediction leaves that out.
    """
    dependence, n = call.dependence or "full", min(call.replicates, REPEAT_SAMPLES)
    draw = synthetic_graph if dependence == "full" else independent_graph
    for b in count(1):
        rng = np.random.Generator(np.random.Philox(key=[call.context.seed, b]))
        graph = draw(split.model, split.steps, rng)
        predicted = predict_steps(
            split.refit(graph), split.steps[split.held], dependence, n,
            call.context.under(call.context.seed + b),
        )  # fmt: skip
        yield graph.measured[split.held], predicted


def predict_steps(
    model: TraceModel, steps: Index, dependence: str, replicates: int, context: RunContext
) -> Array:
    """Predicted times of steps of these numbers on the traced cluster, [replicate] s."""
    program = step_program(conditioned(model, steps), dependence, context.seed)
    blocks = range(-(-replicates // LANES))
    times = run_blocks(program, blocks, context)[0]
    return times.reshape(-1)[:replicates].astype(np.float64)


def step_program(model: TraceModel, dependence: str, seed: int) -> Program:
    """Engine arrays of a model on the traced cluster."""
    graph = build_trace_graph_arrays(model, model.n_replicas)
    program = build_trace_program(model, graph, measured_ranks=True)
    return program if dependence == "full" else pool_program(program, graph, seed)
