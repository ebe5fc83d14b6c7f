"""`prism validate`: predict what was held out, and say honestly how far off the prediction is.

A trace is split in two; one part is fitted, the other predicted from its step numbers alone, since
steps remember those near them. Or a job or model is held against measured step times or totals.
Beside each prediction stand a copy of the training part, independent sampling, the floor between
the two parts, and a p-value from repeating the whole comparison in simulation, refit included.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism import measures
from prism.calibration.model import is_calibrated, load_calibration
from prism.distributions import constant
from prism.engine import LANES
from prism.errors import PrismError
from prism.estimate import estimate
from prism.fit import warnings_of
from prism.job import Job, load_job
from prism.pipelinetrace.build import build_trace_graph
from prism.pipelinetrace.fit import fit_graph, fit_with_components
from prism.pooling import pool_program
from prism.program import Program
from prism.simulate import fresh_seed, run_blocks, settle_call, simulate
from prism.steptimes.model import is_step_model
from prism.stepvalidation import validate_split, validate_step_model
from prism.tracemodel.arrays import build_trace_graph_arrays, build_trace_program
from prism.tracemodel.file import load_model
from prism.tracemodel.graph import Array
from prism.tracemodel.model import TraceModel, conditioned, independent_graph, synthetic_graph
from prism.traces import StepTimes, read_step_times, read_totals, read_trace, total_per_run
from prism.traces.kinds import holds_step_times
from prism.validationnull import null_of_clusters, null_of_draws
from prism.validationresult import (
    compare_all,
    copy_at_half,
    make_validation,
    summarize_validation,
)
from prism.variability import Regime, Stall, Variability

if TYPE_CHECKING:
    import xarray as xr

Progress = Callable[[int, int], None]
REPEAT_SAMPLES = 2048  # predicted steps of each simulated repetition: KS to 0.02
QUANTITIES = ("step_time", "time_to_train")
MIN_TRAIN = 3  # steps a fit can start from


def validate(
    job: Job | str | Path | None = None,
    *,
    trace: str | Path | Sequence[str | Path] | None = None,
    train: str | int = "first-half",
    measured: str | Path | None = None,
    model: str | Path | None = None,
    **options: Any,
) -> "xr.Dataset":
    """Compare a prediction with measurements that it was not fitted on.

    Parameters
    ----------
    job : Job, str or path, optional
        A job or a fitted model, with `measured`.
    trace : path or sequence of paths, optional
        A trace whose one part is fitted and the other predicted; excludes `job`.
    train : str or int
        Which part of the trace is fitted: ``first-half``, ``even``, or a number of steps.
    measured : path, optional
        Measured step times.
    model : path, optional
        A fitted model, alone or as the variability of `job`.
    **options
        Of `validate_trace` or `validate_steps`.

    Returns
    -------
    xarray.Dataset
        `summarize_validation` gives the figures that the command prints.

    Raises
    ------
    PrismError
        Neither or both of `trace` and `measured` are given, or bad input.
    """
    if (trace is None) == (measured is None):
        raise PrismError("validate: give either a trace, or a job or model with measured steps")
    if measured is None:
        if job is not None or model is not None:
            raise PrismError("validate: a trace is fitted here; leave job and model out")
        assert trace is not None
        return validate_trace(trace, str(train), **options)
    if job is None and model is None:
        raise PrismError("validate: measured steps need a job or a model that predicts them")
    return validate_steps(_with_model(job, model), measured, **options)


def _with_model(job: Job | str | Path | None, model: str | Path | None) -> Job | str | Path:
    """Return the job whose effects are the model's, or the job that the model itself is."""
    if job is None:
        assert model is not None
        return model if is_step_model(model) else load_job(model)
    if model is None:
        return job if isinstance(job, Job) or is_step_model(job) else load_job(job)
    if not isinstance(job, Job):
        return load_job(job, [f"variability.model={model}"])
    key = "library" if is_calibrated(model) else "model"
    variability = job.variability.model_copy(update={key: str(model)})
    return job.model_copy(update={"variability": variability})


def validate_trace(
    trace: str | Path | Sequence[str | Path],
    train: str,
    *,
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    dependence: str = "full",
    replicates: int = 20_000,
    bootstrap: int = 100,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":
    """Fit one part of a trace's steps and predict the other.

    Parameters
    ----------
    trace : path or sequence of paths
        Of ops; or step times, of which the first steps of each run are fitted.
    train : str
        ``first-half`` (in time), ``even`` (positions 0, 2, 4, ...), or a number of steps.
    column, where
        Choose from a wider table, where the trace is one of step times.
    dependence : str
        ``full``, or ``none`` (every op redraws everything from its pooled law).
    replicates, bootstrap : int
        Predicted steps, and simulated repetitions for the p-value (0: none).
    seed, threads, progress
        As in `prism.simulate`; progress counts repetitions.

    Returns
    -------
    xarray.Dataset
        ``measured``, ``training``, ``predicted``, ``predicted_independent`` and the band of the
        predicted CDF, all in seconds; `summarize_validation` gives the figures.

    Raises
    ------
    PrismError
        The trace cannot be read, or a part has too few steps.
    """
    if isinstance(trace, str | Path) and holds_step_times(str(trace)):
        seed = fresh_seed() if seed is None else seed
        return validate_split(
            trace, train, column=column, where=where, dependence=dependence,
            replicates=replicates, bootstrap=bootstrap, seed=seed, progress=progress,
        )  # fmt: skip
    if column is not None or where:
        raise PrismError("--column and --where choose among step times; a trace of ops has none")
    read = read_trace(trace)
    if read.format == "kineto":
        raise PrismError(
            f"{read.source}: a trace of kernels has too few steps to hold some out; prism replay "
            "says how well each step's graph, learnt from the others, reproduces it"
        )
    seed, threads = settle_call(replicates, seed, threads)
    _check_choices(dependence, bootstrap)
    graph = build_trace_graph(read)
    part = split_steps(graph.steps.size, train, read.source)
    training = graph.select(part)
    held = np.setdiff1d(np.arange(graph.steps.size), part)
    test = graph.select(held)
    model, parts = fit_with_components(training, read.source)
    predict = {
        name: predict_steps(model, test.steps, name, replicates, seed, threads)
        for name in ("full", "none")
    }
    predicted = predict[dependence]
    null, curves = _repeat(
        model, graph.steps, part, held, dependence, bootstrap, seed, threads, progress
    )
    figures = compare_all(test.measured, predicted, training.measured, predict["none"], test.steps)
    figures |= {
        "trace": read.source, "train": train, "dependence": dependence, "quantity": "step_time",
        "n_train": int(part.size), "bootstrap": bootstrap, "seed": seed,
        "ks_p_value": measures.bootstrap_p_value(figures["ks"], null) if bootstrap else None,
        "replicates": replicates,
    }  # fmt: skip
    figures["notes"] = [*read.notes, *graph.notes]
    figures["warnings"] = warnings_of(training, model, parts)
    return make_validation(
        figures, test.measured, predicted, predict["none"], training.measured, curves
    )


def _check_choices(dependence: str | None, bootstrap: int) -> None:
    if dependence not in (None, "full", "none"):
        raise PrismError(f"dependence: {dependence!r}; expected full or none")
    if bootstrap < 0:
        raise PrismError(f"bootstrap: {bootstrap} repetitions; expected 0 (no p-value) or more")


def split_steps(n: int, train: str, source: str) -> NDArray[np.int64]:
    """Positions of the steps that train.

    Raises
    ------
    PrismError
        The split is unknown, or leaves too few steps on one side.
    """
    if train == "first-half":
        part = np.arange(n // 2)
    elif train == "even":
        part = np.arange(0, n, 2)
    elif re.fullmatch(r"[0-9]+", train):
        part = np.arange(min(int(train), n))
    else:
        raise PrismError(f"--train {train}: expected first-half, even, or a number of steps")
    if part.size < MIN_TRAIN or n - part.size < 1:
        raise PrismError(
            f"{source}: --train {train} takes {part.size} of {n} steps; at least {MIN_TRAIN} are "
            "needed to fit, and 1 to predict"
        )
    return part


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
    program = build_trace_program(model, graph, model.n_replicas, measured_ranks=True)
    if dependence == "full":
        return program
    none = constant()
    nothing = Variability(none, none, none, none, Regime(), Stall(), dependence)
    return pool_program(program, graph, nothing, seed)


def _repeat(
    model: TraceModel, steps: NDArray[np.int64], part: NDArray[np.int64], held: NDArray[np.int64],
    dependence: str, repetitions: int, seed: int, threads: int, progress: Progress | None,
) -> tuple[Array, list[Array]]:  # fmt: skip
    """Simulate the whole comparison: a trace, its split, refit, prediction, KS.

    The trace is drawn with the dependence that is tested, so that the p-value is small where ops of
    the measured job depend on each other and the prediction leaves that out.

    Returns
    -------
    null : float64 [repetition]
        KS when the fitted model is the truth.
    curves : list of float64 [replicate]
        Predictions of the refits, for the band.
    """
    null, curves = np.zeros(repetitions), []
    for b in range(repetitions):
        rng = np.random.Generator(np.random.Philox(key=[seed, b + 1]))
        draw = synthetic_graph if dependence == "full" else independent_graph
        graph = draw(model, steps, rng)
        again = fit_graph(graph.select(part))
        predicted = predict_steps(
            again, steps[held], dependence, REPEAT_SAMPLES, seed + b + 1, threads
        )
        null[b] = measures.ks_statistic(graph.measured[held], predicted)
        curves.append(predicted)
        if progress is not None:
            progress(b + 1, repetitions)
    return null, curves


# ------------------------------------------------------------------------- jobs and step times
def validate_steps(
    job: Job | str | Path,
    measured: str | Path,
    *,
    column: str | None = None,
    where: Mapping[str, str] | None = None,
    totals: str | None = None,
    quantity: str = "step_time",
    dependence: str | None = None,
    replicates: int = 20_000,
    bootstrap: int = 100,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "xr.Dataset":
    """Hold a job's or a model's prediction against measured step times or totals.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, a shipped one's name, or a fitted model.
    measured : path
        Step times, see `prism.traces.read_step_times`.
    column, where
        Choose from a wider table.
    totals : str, optional
        "FILE:COLUMN" with measured totals per run.
    quantity : str
        ``step_time`` or ``time_to_train`` (one value per run).
    dependence : str, optional
        ``full`` or ``none``; the job's own where None.
    replicates, bootstrap, seed, threads, progress
        As in `validate_trace`.

    Raises
    ------
    PrismError
        Bad input.
    """
    _check_choices(dependence, bootstrap)
    if quantity not in QUANTITIES:
        raise PrismError(f"quantity: {quantity!r}; expected {' or '.join(QUANTITIES)}")
    if not isinstance(job, Job) and is_step_model(job):
        seed = fresh_seed() if seed is None else seed
        return validate_step_model(
            job, measured, column=column, where=where, totals=totals, quantity=quantity,
            dependence=dependence, replicates=replicates, bootstrap=bootstrap, seed=seed,
            progress=progress,
        )  # fmt: skip
    job = load_job(job) if not isinstance(job, Job) else job
    if dependence is not None:
        job = _with_dependence(job, dependence)
    alone = _with_dependence(job, "none")
    model = job.variability.model
    n_fitted = 0 if model is None else int(load_model(model).steps.size)
    library = job.variability.library
    calibration = None if library is None else load_calibration(library)
    seed = fresh_seed() if seed is None else seed
    times = read_step_times(measured, column=column, where=where)
    notes = list(times.notes)
    if quantity == "step_time":
        values, steps, runs = np.asarray(times.seconds), np.asarray(times.step), times.run
        drawn = simulate(job, replicates, seed, threads, progress)
        predicted = np.asarray(drawn.step_time)
        independent = np.asarray(simulate(alone, replicates, seed, threads).step_time)
        mean_error = 0.0
        if calibration is not None:
            mean_error = calibration.mean_error(float(drawn.exposed_communication))
        null = null_of_clusters(drawn, values.size, bootstrap, seed, mean_error)
    else:
        per_run = read_totals(totals, where=where) if totals else total_per_run(times)
        values, steps, runs = np.array(list(per_run.values())), np.arange(len(per_run)), None
        n_steps, said = _run_length(times)
        notes += said
        predicted = _run_times(job, n_steps, replicates, seed, threads, progress)
        independent = _run_times(alone, n_steps, replicates, seed, threads, None)
        null = null_of_draws(predicted, values.size, bootstrap, seed)
    training, line = None, None
    if calibration is not None and quantity == "step_time":
        nearest = calibration.nearest(job.world_size)
        training = nearest.steps_s
        line = training * (
            calibration.line(job.parallelism.microbatches) / float(np.median(training))
        )
        n_fitted = sum(s.n for s in calibration.sizes)
        notes.append(
            f"calibrated on {', '.join(s.label for s in calibration.sizes)}; the copy is of "
            f"{nearest.label}, the line is straight in microbatches, with that size's tail"
        )
    figures = compare_all(values, predicted, training, independent, steps, runs)
    if line is not None:
        figures["baselines"]["line"] = measures.compare(values, line, steps=steps)
    figures |= {
        "job": job.name, "measured": str(measured), "quantity": quantity,
        "dependence": job.variability.dependence,
        "n_train": n_fitted, "bootstrap": bootstrap, "seed": seed, "replicates": replicates,
        "ks_p_value": measures.bootstrap_p_value(figures["ks"], null) if bootstrap else None,
        "notes": notes,
    }  # fmt: skip
    return make_validation(figures, values, predicted, independent, training, [])


def _run_length(times: StepTimes) -> tuple[int, list[str]]:
    """Count the steps of a run; a note where runs differ, as their totals then do by length."""
    counts = np.unique(times.run, return_counts=True)[1] * times.mean_over
    usual = int(np.median(counts))
    if counts.min() == counts.max():
        return usual, []
    return usual, [
        f"runs have {counts.min()} to {counts.max()} steps; runs of {usual} are predicted, so "
        "part of the totals' spread is that of their lengths"
    ]


def _with_dependence(job: Job, dependence: str) -> Job:
    variability = job.variability.model_copy(update={"dependence": dependence})
    return job.model_copy(update={"variability": variability})


def _run_times(
    job: Job, steps: int, replicates: int, seed: int, threads: int | None, progress: Progress | None
) -> Array:
    """Predicted totals of runs of so many steps, [run_replicate] s."""
    drawn = estimate(
        job, replicates=replicates, run_replicates=replicates, steps=steps, seed=seed,
        threads=threads, progress=progress,
    )  # fmt: skip
    return np.asarray(drawn.time_to_train)


__all__ = ["copy_at_half", "summarize_validation", "validate_steps", "validate_trace"]
