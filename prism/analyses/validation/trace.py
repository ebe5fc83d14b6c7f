"""A trace split in two: one part of its steps is fitted, the other predicted and compared.

Steps are predicted from their numbers alone, since steps remember those near them. The p-value
comes from repeating the whole comparison in simulation, refit included. Left out: jobs and models
against measured steps (`prism.analyses.validate`); step times (`prism.analyses.validation.steps`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prism.analyses.validation.result import compare_all, make_validation, separation
from prism.analyses.validation.steps import split_steps, validate_split
from prism.common import agreement as measures
from prism.common.errors import PrismError, named
from prism.engine import LANES
from prism.models.fit import warnings_of
from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.fit import fit_graph, fit_with_components
from prism.simulation.independent import pool_program
from prism.simulation.program import Program
from prism.simulation.steps import fresh_seed, run_blocks, settle_call
from prism.simulation.tracemodel.arrays import build_trace_graph_arrays, build_trace_program
from prism.simulation.tracemodel.graph import Array
from prism.simulation.tracemodel.model import (
    TraceModel,
    conditioned,
    independent_graph,
    synthetic_graph,
)
from prism.traces import Trace, read_trace
from prism.traces.kinds import holds_step_times

if TYPE_CHECKING:
    import xarray as xr

Progress = Callable[[int, int], None]
REPEAT_SAMPLES = 2048  # predicted steps behind the p-value's statistic: KS to 0.02


def validate_trace(
    trace: str | Path | Sequence[str | Path], train: str, *, column: str | None = None,
    where: Mapping[str, str] | None = None, dependence: str = "full", replicates: int = 20_000,
    bootstrap: int = 100, seed: int | None = None, threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Fit one part of a trace's steps and predict the other."""
    check_choices(dependence, bootstrap)
    if isinstance(trace, str | Path) and holds_step_times(str(trace)):
        seed = fresh_seed() if seed is None else seed
        return validate_split(
            trace, train, column=column, where=where, dependence=dependence,
            replicates=replicates, bootstrap=bootstrap, seed=seed, progress=progress,
        )  # fmt: skip
    if column is not None or where:
        names = f"{named('column')} and {named('where')}"
        raise PrismError(f"{names} choose among step times; a trace of ops has none")
    read = read_trace(trace)
    if read.has_kernels:
        raise PrismError(
            f"{read.source}: a trace of kernels has too few steps to hold some out; prism replay "
            "says how well each step's graph, learnt from the others, reproduces it"
        )
    seed, threads = settle_call(replicates, seed, threads)
    return _validate_ops(read, train, dependence, replicates, bootstrap, seed, threads, progress)


def _validate_ops(
    trace: Trace, train: str, dependence: str, replicates: int, bootstrap: int, seed: int,
    threads: int, progress: Progress | None,
) -> "xr.Dataset":  # fmt: skip
    """As `validate_trace`, of a trace of ops that was read."""
    graph = build_trace_graph(trace)
    part = split_steps(graph.steps.size, train, trace.source)
    training = graph.select(part)
    held = np.setdiff1d(np.arange(graph.steps.size), part)
    test = graph.select(held)
    model, parts = fit_with_components(training, trace.source)
    predict = {
        name: predict_steps(model, test.steps, name, replicates, seed, threads)
        for name in ("full", "none")
    }
    predicted, alone = predict[dependence], predict["none"]
    draws = min(replicates, REPEAT_SAMPLES)  # as many for the statistic as in each repetition
    null, curves = _repeat(
        model, graph.steps, part, held, dependence, draws, bootstrap, seed, threads, progress
    )
    figures = compare_all(test.measured, predicted, training.measured, alone, test.steps)
    figures |= {
        "trace": trace.source, "train": train, "dependence": dependence, "quantity": "step_time",
        "n_train": int(part.size), "bootstrap": bootstrap, "seed": seed,
        "ks_p_value": measures.bootstrap_p_value(
            separation(test.measured, predicted[:draws]), null
        ) if bootstrap else None, "ks_p_value_refit": True,
        "replicates": replicates, "notes": [*trace.notes, *graph.notes],
        "warnings": warnings_of(training, model, parts),
    }  # fmt: skip
    return make_validation(figures, test.measured, predicted, alone, training.measured, curves)


def check_choices(dependence: str | None, bootstrap: int) -> None:
    """Refuse what no validation knows; raises PrismError."""
    if dependence not in (None, "full", "none"):
        raise PrismError(f"dependence: {dependence!r}; expected full or none")
    if bootstrap < 0:
        raise PrismError(f"bootstrap: {bootstrap} repetitions; expected 0 (no p-value) or more")


def predict_steps(
    model: TraceModel, steps: NDArray[np.int64], dependence: str, replicates: int, seed: int,
    threads: int = 1,
) -> Array:  # fmt: skip
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


def _repeat(
    model: TraceModel, steps: NDArray[np.int64], part: NDArray[np.int64], held: NDArray[np.int64],
    dependence: str, draws: int, repetitions: int, seed: int, threads: int,
    progress: Progress | None,
) -> tuple[Array, list[Array]]:  # fmt: skip
    """KS [repetition] where the model is the truth, and the predictions [replicate] of its refits.

    The trace is drawn with the dependence that is tested, so that the p-value is small where ops of
    the measured job depend on each other and the prediction leaves that out.
    """
    null, curves = np.zeros(repetitions), []
    draw = synthetic_graph if dependence == "full" else independent_graph
    for b in range(repetitions):
        rng = np.random.Generator(np.random.Philox(key=[seed, b + 1]))
        graph = draw(model, steps, rng)
        again = fit_graph(graph.select(part))
        predicted = predict_steps(again, steps[held], dependence, draws, seed + b + 1, threads)
        null[b] = separation(graph.measured[held], predicted)
        curves.append(predicted)
        if progress is not None:
            progress(b + 1, repetitions)
    return null, curves
