"""`prism validate`: predict what was held out, and say honestly how far off the prediction is.

A trace is split in two; one part is fitted, the other predicted from its step numbers alone, since
steps remember those near them. Or a job or model is held against measured step times or totals.
Beside each prediction stand a copy of the training part, independent sampling, the floor between
the two parts, and a p-value from repeating the comparison in simulation. What is fitted here, and
models of step times, are refitted in each repetition; a job, a model of a trace or a calibration
stays as it is (``ks_p_value_refit``), but for the mean that a calibration leaves open.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.analyses.estimate import estimate
from prism.analyses.validation.null import null_of_clusters, null_of_draws
from prism.analyses.validation.result import (
    compare_all,
    copy_at_half,
    make_validation,
    separation,
    summarize_validation,
)
from prism.analyses.validation.steps import validate_step_model
from prism.analyses.validation.trace import check_choices, validate_trace
from prism.common import agreement as measures
from prism.common.errors import PrismError
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model, model_attrs
from prism.models.calibration.model import (
    Calibration,
    communication_share,
    is_calibrated,
    load_calibration,
)
from prism.simulation.steps import fresh_seed, simulate
from prism.simulation.summary import apart
from prism.simulation.tracemodel.file import load_model
from prism.traces import StepTimes, read_step_times, read_totals, total_per_run

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
QUANTITIES = ("step_time", "time_to_train")


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
    base, named = model_attrs(model).get("base_library"), job.variability.library
    if key == "library" and named not in (None, base, str(model)):
        raise PrismError(
            f"{job.source}: variability.library: {named}, but {model} was calibrated over {base}; "
            f"expected {base}, or a calibration over {named}"
        )
    variability = job.variability.model_copy(update={key: str(model)})
    return job.model_copy(update={"variability": variability})


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
    check_choices(dependence, bootstrap)
    if quantity not in QUANTITIES:
        raise PrismError(f"quantity: {quantity!r}; expected {' or '.join(QUANTITIES)}")
    seed = fresh_seed() if seed is None else seed
    if not isinstance(job, Job) and is_step_model(job):
        return validate_step_model(
            job, measured, column=column, where=where, totals=totals, quantity=quantity,
            dependence=dependence, replicates=replicates, bootstrap=bootstrap, seed=seed,
            progress=progress,
        )  # fmt: skip
    job = load_job(job) if not isinstance(job, Job) else job
    if dependence is not None:
        job = _with_dependence(job, dependence)
    times = read_step_times(measured, column=column, where=where)
    library = job.variability.library
    calibration = None if library is None else load_calibration(library)
    draws = _Draws(job, calibration, replicates, bootstrap, seed, threads, progress)
    if quantity == "step_time":
        held = _steps_held(draws, times)
    else:
        known = total_per_run(times) if totals is None else read_totals(totals, where=where)
        held = _totals_held(draws, times, known)
    figures = _compare(draws, held) | {
        "measured": str(measured), "quantity": quantity, "notes": [*times.notes, *held.notes],
    }  # fmt: skip
    return make_validation(figures, held.values, held.predicted, held.independent, held.copy, [])


@dataclass(frozen=True)
class _Draws:
    """A job, what it was calibrated on, and how it is drawn."""

    job: Job
    calibration: Calibration | None
    replicates: int
    bootstrap: int
    seed: int
    threads: int | None
    progress: Progress | None

    @property
    def alone(self) -> Job:
        """The job whose ops are independent of each other."""
        return _with_dependence(self.job, "none")

    def mean_error(self, drawn: "xr.Dataset") -> float:
        """Relative error of the predicted mean that a calibration leaves open; 0 without one."""
        if self.calibration is None:
            return 0.0
        return self.calibration.mean_error(communication_share(drawn))

    def runs(self, job: Job, steps: int, progress: Progress | None) -> "xr.Dataset":
        """Draw runs of so many steps."""
        return estimate(
            job, replicates=self.replicates, run_replicates=self.replicates, steps=steps,
            seed=self.seed, threads=self.threads, progress=progress,
        )  # fmt: skip


@dataclass(frozen=True)
class _Held:
    """Measured and predicted values [s]."""

    values: Array
    steps: NDArray[np.int64]  # their places in time
    runs: NDArray[Any] | None  # run of each, or None
    predicted: Array  # [replicate] by the job
    independent: Array  # [replicate] by the job whose ops are independent of each other
    null: Array  # [repetition] KS where the job is the measured one
    copy: Array | None = None  # steps of a calibration's nearest size
    line: Array | None = None  # the same, brought to the straight line in microbatches
    notes: tuple[str, ...] = ()


def _steps_held(d: _Draws, times: StepTimes) -> _Held:
    """Hold single steps against the job's."""
    drawn = simulate(d.job, d.replicates, d.seed, d.threads, d.progress)
    alone = simulate(d.alone, d.replicates, d.seed, d.threads)
    null = null_of_clusters(drawn, times.seconds.size, d.bootstrap, d.seed, d.mean_error(drawn))
    held = _Held(
        np.asarray(times.seconds), np.asarray(times.step), times.run, np.asarray(drawn.step_time),
        np.asarray(alone.step_time), null, notes=_untested(drawn, times),
    )  # fmt: skip
    if d.calibration is None:
        return held
    nearest = d.calibration.nearest(d.job.world_size)
    median_s = d.calibration.line(d.job.parallelism.microbatches)
    note = (
        f"calibrated on {', '.join(s.label for s in d.calibration.sizes)}; the copy is of "
        f"{nearest.label}, the line is straight in microbatches, with that size's tail"
    )
    line = nearest.steps_s * (median_s / float(np.median(nearest.steps_s)))
    notes = (*held.notes, note, *(
        f"{times.source}: these steps are what {s.label} was calibrated on; nothing is held out"
        for s in d.calibration.sizes if measures.ks_statistic(s.steps_s, times.seconds) == 0.0
    ))  # fmt: skip
    return replace(held, copy=nearest.steps_s, line=line, notes=notes)


def _untested(drawn: "xr.Dataset", times: StepTimes) -> tuple[str, ...]:
    """Say that one run does not show how the nodes that jobs get differ."""
    means = apart(drawn)[1] / float(drawn.step_time.mean()) - 1.0
    if np.unique(times.run).size > 1 or means.size < 2 or not means.any():
        return ()
    low, high = np.quantile(means, [0.05, 0.95])
    return (
        "one run is one allocation: what is tested is the steps on it; that means of allocations "
        f"differ by {low:+.2%} to {high:+.2%} (p5 to p95) is not",
    )


def _totals_held(d: _Draws, times: StepTimes, totals: Mapping[str, float]) -> _Held:
    """Hold totals of runs against the job's."""
    values = np.array(list(totals.values()))
    n_steps, notes = _run_length(times)
    drawn, alone = d.runs(d.job, n_steps, d.progress), d.runs(d.alone, n_steps, None)
    predicted = np.asarray(drawn.time_to_train)
    null = null_of_draws(predicted, values.size, d.bootstrap, d.seed, d.mean_error(drawn))
    return _Held(
        values, np.arange(values.size), None, predicted, np.asarray(alone.time_to_train), null,
        notes=tuple(notes),
    )  # fmt: skip


def _compare(d: _Draws, held: _Held) -> dict[str, Any]:
    """Figures of the prediction and of the baselines."""
    figures = compare_all(
        held.values, held.predicted, held.copy, held.independent, held.steps, held.runs
    )
    if held.line is not None:
        figures["baselines"]["line"] = measures.compare(held.values, held.line, steps=held.steps)
    apart = separation(held.values, held.predicted)
    p_value = measures.bootstrap_p_value(apart, held.null) if d.bootstrap else None
    return figures | {
        "job": d.job.name, "dependence": d.job.variability.dependence,
        "n_train": _n_fitted(d.job, d.calibration), "bootstrap": d.bootstrap, "seed": d.seed,
        "replicates": d.replicates, "ks_p_value": p_value, "ks_p_value_refit": False,
    }  # fmt: skip


def _n_fitted(job: Job, calibration: Calibration | None) -> int:
    """Count the measured steps that the prediction rests on."""
    if calibration is not None:
        return sum(size.n for size in calibration.sizes)
    model = job.variability.model
    return 0 if model is None else int(load_model(model).steps.size)


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


__all__ = ["copy_at_half", "summarize_validation", "validate", "validate_steps"]
