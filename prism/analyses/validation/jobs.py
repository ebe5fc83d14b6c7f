"""A job, a model of a trace or a calibration against measured steps or totals.

Nothing is refitted, since what the job's values rest on is not at hand: p-values take them for
exact, but for the error of the mean that a calibration leaves open.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import f

from prism.analyses.estimate import estimate
from prism.analyses.validation.against_measured import Call, Repetitions, ValidationCase
from prism.common import agreement as measures
from prism.common.arrays import Array
from prism.common.text import format_count, percent_change
from prism.jobs.job import Job
from prism.models.calibration.model import Calibration, communication_share, load_calibration
from prism.simulation.prepare import prepare
from prism.simulation.runs.build import model_of_steps
from prism.simulation.runs.parts import Drift
from prism.simulation.steps import simulate_step
from prism.simulation.summary import apart
from prism.simulation.tracemodel.file import load_model
from prism.traces import StepTimes, total_per_run

if TYPE_CHECKING:
    import xarray as xr


_ALIKE = 0.9  # of the steps: below, the effective sample size is worth a word


def job_case(
    job: Job, times: StepTimes, totals: Mapping[str, float] | None, call: Call
) -> ValidationCase:
    """Hold a job against steps, or totals [s] of runs by name; their steps' sums where None."""
    job = job if call.dependence is None else _with_dependence(job, call.dependence)
    library = job.variability.library
    calibration = None if library is None else load_calibration(library)
    facts: dict[str, Any] = {
        "job": job.name, "n_train": _n_fitted(job, calibration), "taken": times.taken,
    }  # fmt: skip
    facts["dependence"] = job.variability.dependence
    jobs, notes = (job, _with_dependence(job, "none")), list(times.notes)
    if call.quantity == "time_to_train":
        totals = total_per_run(times) if totals is None else totals
        values = np.array(list(totals.values()))
        n_steps, said = _run_length(times)
        drawn, alone = (_runs(each, n_steps, call) for each in jobs)
        predicted = np.asarray(drawn.time_to_train)
        error = _mean_error(calibration, drawn)
        null = draws_anew(predicted, values.size, call.context.seed, error)
        return ValidationCase(
            values, np.arange(values.size), predicted, np.asarray(alone.time_to_train), null,
            facts | {"notes": notes + said}, refit=False,
        )  # fmt: skip
    drawn, alone = _steps(job, call, calibration is not None), _steps(jobs[1], call, False)
    error = _mean_error(calibration, drawn)
    n = measures.effective_n(times.seconds, times.step, times.run)
    null = clusters_anew(drawn, max(1, round(n)), call.context.seed, error)
    notes += _untested(drawn, times)
    if call.bootstrap and n < _ALIKE * times.seconds.size:
        notes.append(
            f"measured steps remember those before them: the p-value is that of {n:.0f} "
            "independent steps"
        )
    training, line = None, dict[str, Array]()
    if calibration is not None:
        nearest = calibration.nearest(job.world_size)
        median_s = calibration.line(job.parallelism.microbatches)
        training = nearest.steps_s
        line = {"line": training * (median_s / float(np.median(training)))}
        notes += _calibrated(calibration, nearest.label, times)
    return ValidationCase(
        np.asarray(times.seconds), np.asarray(times.step), np.asarray(drawn.step_time),
        np.asarray(alone.step_time), null, facts | {"notes": notes}, times.run, training, line,
        refit=False, open_mean=float(np.hypot(error, _between(drawn, times))),
    )  # fmt: skip


def _with_dependence(job: Job, dependence: str) -> Job:
    variability = job.variability.model_copy(update={"dependence": dependence})
    return job.model_copy(update={"variability": variability})


def _steps(job: Job, call: Call, parts: bool) -> "xr.Dataset":
    step = prepare(job, call.context.seed, engine="auto")
    return simulate_step(step, call.replicates, call.context, parts)


def _runs(job: Job, steps: int, call: Call) -> "xr.Dataset":
    run = job.run.model_copy(update={"failures": job.run.failures or "none"})
    job = job.model_copy(update={"run": run})
    return estimate(  # measured runs are whole ones
        job, replicates=call.replicates, run_replicates=call.replicates, steps=steps,
        seed=call.context.seed, threads=call.context.threads, progress=call.context.progress,
    ).to_xarray()  # fmt: skip


def _mean_error(calibration: Calibration | None, drawn: "xr.Dataset") -> float:
    """Relative error of the predicted mean that a calibration leaves open; 0 without one."""
    return 0.0 if calibration is None else calibration.mean_error(communication_share(drawn))


def _n_fitted(job: Job, calibration: Calibration | None) -> int:
    """Count the measured steps that the prediction is based on."""
    if calibration is not None:
        return sum(size.n for size in calibration.sizes)
    model = job.variability.model
    return 0 if model is None else int(load_model(model).steps.size)


# ------------------------------------------------------------------------------------------- notes
def _calibrated(calibration: Calibration, nearest: str, times: StepTimes) -> list[str]:
    """Say what the baselines of a calibration are, and where nothing is held out."""
    return [
        f"calibrated on {', '.join(s.label for s in calibration.sizes)}; the copy is of "
        f"{nearest}, the line is straight in microbatches, with that size's tail",
        *(
            f"{times.source}: these steps are what {s.label} was calibrated on; nothing is held out"
            for s in calibration.sizes if measures.ks_statistic(s.steps_s, times.seconds) == 0.0
        ),
    ]  # fmt: skip


def _between(drawn: "xr.Dataset", times: StepTimes) -> float:
    """Relative standard deviation of the mean between allocations, of which one was measured.

    That of cluster draws' means less what their few replicates leave; 0 where runs show it, and
    where an F test at 5 % does not tell the means apart.
    """
    steps, cluster = np.asarray(drawn.step_time, np.float64), np.asarray(drawn.cluster_idx)
    unit, size = np.unique(cluster, return_inverse=True, return_counts=True)[1:]
    if np.unique(times.run).size > 1 or size.size < 2 or steps.size <= size.size:
        return 0.0
    means = np.bincount(unit, steps) / size
    within = float(((steps - means[unit]) ** 2).sum()) / (steps.size - size.size)
    found, noise = float(means.var(ddof=1)), within * float((1.0 / size).mean())
    if found <= noise * f.isf(0.05, size.size - 1, steps.size - size.size):
        return 0.0
    return float(np.sqrt(found - noise) / steps.mean())


def _untested(drawn: "xr.Dataset", times: StepTimes) -> list[str]:
    """Say that one run does not show how the nodes that jobs get differ."""
    means = apart(drawn)[1] / float(drawn.step_time.mean()) - 1.0
    if np.unique(times.run).size > 1 or means.size < 2 or not means.any():
        return []
    low, high = np.quantile(means, [0.05, 0.95])
    return [
        "one run is one allocation: what is tested is the steps on it; that means of allocations "
        f"differ by {percent_change(low)} to {percent_change(high)} (p5 to p95) is not"
    ]


def _run_length(times: StepTimes) -> tuple[int, list[str]]:
    """Count the steps of a run; a note where runs differ, as their totals then do by length."""
    counts = np.unique(times.run, return_counts=True)[1] * times.mean_over
    usual = int(np.median(counts))
    if counts.min() == counts.max():
        return usual, []
    return usual, [
        f"runs have {counts.min()} to {format_count(counts.max(), 'step')}; runs of {usual} are "
        "predicted, so "
        "part of the totals' spread is that of their lengths"
    ]


# -------------------------------------------------------------------------------------------- null
def clusters_anew(drawn: "xr.Dataset", n: int, seed: int, mean_error: float = 0.0) -> Repetitions:
    """Draw n steps on one simulated cluster, against all steps: a measured job is one cluster.

    A cluster's few replicates are no distribution to draw n steps from, so what steps differ by
    within clusters is pooled over them, and the clusters' means are without its noise.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    every, cluster = np.asarray(drawn.step_time, np.float64), np.asarray(drawn.cluster_idx)
    parts = model_of_steps(every, np.ones(every.size), cluster, Drift(0.0, 0.0))
    for scale in _scales(mean_error, seed):
        yield scale * (rng.choice(parts.mean[:, 0]) + rng.choice(parts.residuals, n)), every


def draws_anew(predicted: Array, n: int, seed: int, mean_error: float = 0.0) -> Repetitions:
    """Draw n predicted totals, against all of them."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    for scale in _scales(mean_error, seed):
        yield scale * rng.choice(predicted, n), predicted


def _scales(mean_error: float, seed: int) -> Iterator[Any]:
    """Draw what the measured mean may be over the predicted one."""
    rng = np.random.default_rng([seed, 2])
    while True:
        yield 1.0 + mean_error * rng.standard_normal()
