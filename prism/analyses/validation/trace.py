"""A trace of ops split in two: one part of its steps is fitted, the other predicted.

Steps are predicted from their numbers alone, since steps remember those near them.
"""

from itertools import count

import numpy as np
from numpy.typing import NDArray

from prism.analyses.validation.hold import Call, Case, Repetitions
from prism.analyses.validation.steps import split_steps
from prism.engine import LANES
from prism.models.changes.find import changes_of_trace, without_steps
from prism.models.changes.report import warn
from prism.models.fit import warnings_of
from prism.models.kerneltrace.model import (
    fit_kernel_graph,
    fit_kernels,
    redrawn,
    whole_step_graph,
)
from prism.models.kerneltrace.steps import split_steps as split_kernel_steps
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph, fit_with_components
from prism.simulation.independent import pool_program
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks, settle_call
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
Int = NDArray[np.int64]


def trace_case(trace: Trace, train: str, call: Call) -> Case:
    """Fit one part of a trace's steps and predict the other."""
    how = (_Kernels if trace.has_kernels else _Pipeline)(trace, train)
    _, threads = settle_call(call.replicates, call.seed, call.threads)
    predicted, alone = (
        predict_steps(how.model, how.steps[how.held], dependence, call.replicates, call.seed,
                      threads)
        for dependence in (call.dependence or "full", "none")
    )  # fmt: skip
    facts = {
        "trace": trace.source, "train": train, "n_train": int(how.part.size),
        "notes": how.notes, "changes": how.changes,
        "warnings": [*map(warn, how.changes), *how.warnings],
    }  # fmt: skip
    null = _anew(how, call._replace(threads=threads))
    return Case(
        how.measured[how.held],
        how.steps[how.held],
        predicted,
        alone,
        null,
        facts,
        training=how.measured[how.part],
    )


class _Split:
    """A trace whose steps [step] are split: what is fitted, and fitted anew to drawn durations."""

    model: TraceModel
    steps: Int
    measured: Array
    notes: list[str]
    warnings: list[str]

    def split(self, trace: Trace, train: str) -> Trace:
        """Choose positions of steps to fit, less what changes among them, and to hold out.

        Returns
        -------
        Trace
            Steps that are fitted.
        """
        part = split_steps(self.steps.size, train, trace.source)
        self.held = np.setdiff1d(np.arange(self.steps.size), part)
        training = without_steps(trace, self.steps[self.held])
        self.changes, out = changes_of_trace(training)
        self.part = part[~np.isin(self.steps[part], out)]
        return without_steps(training, out)

    def refit(self, drawn: TraceGraph) -> TraceModel:
        """Fit to the training part of a drawn trace."""
        raise NotImplementedError


class _Pipeline(_Split):
    def __init__(self, trace: Trace, train: str) -> None:
        graph = build_trace_graph(trace)
        self.steps, self.measured = graph.steps, graph.measured
        self.split(trace, train)
        training = graph.select(self.part)
        self.model, parts = fit_with_components(training, trace.source)
        self.notes = [*trace.notes, *graph.notes]
        self.warnings = warnings_of(training, self.model, parts)

    def refit(self, drawn: TraceGraph) -> TraceModel:
        return fit_graph(drawn.select(self.part))


class _Kernels(_Split):
    """Waits between kernels, too, are inferred from the training steps alone."""

    def __init__(self, trace: Trace, train: str) -> None:
        whole = split_kernel_steps(trace)
        begin, _, end = whole.bounds()
        self.steps, self.measured = np.array(whole.steps), end - begin
        training = self.split(trace, train)
        self.model = fit_kernels(training)
        self.graph = whole_step_graph(split_kernel_steps(training))
        self.notes, self.warnings = list(trace.notes), self.model.report["warnings"]

    def refit(self, drawn: TraceGraph) -> TraceModel:
        return fit_kernel_graph(redrawn(self.graph, drawn.select(self.part)))


def _anew(how: _Split, call: Call) -> Repetitions:
    """Draw traces of the model, fit it to their training part and predict the rest.

    Traces have the dependence that is tested, so that the p-value is small where ops of the
    measured job depend on each other and the prediction leaves that out.
    """
    dependence, n = call.dependence or "full", min(call.replicates, REPEAT_SAMPLES)
    draw = synthetic_graph if dependence == "full" else independent_graph
    for b in count(1):
        rng = np.random.Generator(np.random.Philox(key=[call.seed, b]))
        graph = draw(how.model, how.steps, rng)
        predicted = predict_steps(
            how.refit(graph), how.steps[how.held], dependence, n, call.seed + b, call.threads or 1
        )
        yield graph.measured[how.held], predicted


def predict_steps(
    model: TraceModel, steps: Int, dependence: str, replicates: int, seed: int, threads: int
) -> Array:
    """Predicted times of steps of these numbers on the traced cluster, [replicate] s."""
    program = step_program(conditioned(model, steps), dependence, seed)
    blocks = range(-(-replicates // LANES))
    times = run_blocks(program, blocks, seed, threads)[0]
    return times.reshape(-1)[:replicates].astype(np.float64)


def step_program(model: TraceModel, dependence: str, seed: int) -> Program:
    """Engine arrays of a model on the traced cluster."""
    graph = build_trace_graph_arrays(model, model.n_replicas)
    program = build_trace_program(model, graph, measured_ranks=True)
    return program if dependence == "full" else pool_program(program, graph, seed)
