"""A trace of ops split in two: one part of its steps is fitted, the other predicted.

Steps are predicted from their numbers alone, since steps remember those near them.
"""

from itertools import count

import numpy as np
from numpy.typing import NDArray

from prism.analyses.validation.hold import Call, Case, Repetitions
from prism.analyses.validation.steps import split_steps
from prism.common.errors import PrismError
from prism.engine import LANES
from prism.models.fit import warnings_of
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph, fit_with_components
from prism.simulation.independent import pool_program
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks, settle_call
from prism.simulation.tracemodel.arrays import build_trace_graph_arrays, build_trace_program
from prism.simulation.tracemodel.graph import Array
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
    if trace.has_kernels:
        raise PrismError(
            f"{trace.source}: a trace of kernels has too few steps to hold some out; prism replay "
            "says how well each step's graph, learnt from the others, reproduces it"
        )
    _, threads = settle_call(call.replicates, call.seed, call.threads)
    graph = build_trace_graph(trace)
    part = split_steps(graph.steps.size, train, trace.source)
    held = np.setdiff1d(np.arange(graph.steps.size), part)
    training, test = graph.select(part), graph.select(held)
    model, parts = fit_with_components(training, trace.source)
    predicted, alone = (
        predict_steps(model, test.steps, how, call.replicates, call.seed, threads)
        for how in (call.dependence or "full", "none")
    )
    facts = {
        "trace": trace.source, "train": train, "n_train": int(part.size),
        "notes": [*trace.notes, *graph.notes], "warnings": warnings_of(training, model, parts),
    }  # fmt: skip
    null = _anew(model, graph.steps, part, held, call._replace(threads=threads))
    return Case(
        test.measured, test.steps, predicted, alone, null, facts, training=training.measured
    )


def _anew(model: TraceModel, steps: Int, part: Int, held: Int, call: Call) -> Repetitions:
    """Draw traces of the model, fit it to their training part and predict the rest.

    Traces have the dependence that is tested, so that the p-value is small where ops of the
    measured job depend on each other and the prediction leaves that out.
    """
    how, n = call.dependence or "full", min(call.replicates, REPEAT_SAMPLES)
    draw = synthetic_graph if how == "full" else independent_graph
    for b in count(1):
        rng = np.random.Generator(np.random.Philox(key=[call.seed, b]))
        graph = draw(model, steps, rng)
        again = fit_graph(graph.select(part))
        predicted = predict_steps(again, steps[held], how, n, call.seed + b, call.threads or 1)
        yield graph.measured[held], predicted


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
