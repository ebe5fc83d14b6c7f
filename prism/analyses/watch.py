"""`prism watch`: when a run in progress will be done, and whether its steps changed.

Each look is `prism estimate --progress` of the log as it is then; the step of a job is simulated
once. Without a job the completed steps are the model.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import xarray as xr

import prism
from prism.analyses.estimate import (
    RUN_REPLICATES,
    Simulated,
    estimate,
    estimate_job,
    gather_options,
    parse_deadline,
    refuse_gpus,
    seconds_until,
    simulate_job,
)
from prism.analyses.estimates.run import CLUSTERS_IN_PROGRESS
from prism.common.errors import PrismError, option
from prism.common.results import Result, read_texts
from prism.common.text import format_count
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model
from prism.models.changes.find import find_changes
from prism.models.changes.fit import fit_steps
from prism.models.steptimes.blocks import as_blocks, in_blocks
from prism.models.steptimes.estimate import LANES, lay_out
from prism.models.steptimes.model import load_step_model
from prism.models.steptimes.predict import draw_runs, run_model
from prism.models.steptimes.runs import (
    LAST,
    UNKNOWN_LEVEL,
    Fitted,
    update_on_progress,
    without_changes,
)
from prism.simulation.execution.context import Progress, make_context
from prism.simulation.results import make_dataset
from prism.simulation.summary import failure_model, run_end, run_progress
from prism.traces.growing import GrowingLog, Reading, count_done

KIND = "watch"
SCHEMA = 2
PROBABILITY = 0.9
LATER = 0.0022
"""Standard deviation of the mean of steps to come over that of those done, less 1, beyond what the
latter's noise and drift tell. 0.24 % and 0.21 % in halves of 27 MLPerf systems, each tested on the
other (`experiments/checks/watch.py --later`)."""
_REPEATS = 20  # simulated fits behind the spread of a model that each look makes anew


class Watch:
    """A run that is going on: its log, and what it is held against.

    Parameters
    ----------
    log : path
        What the run writes: a log of step times, or a table that grows.
    job : Job, str or path, optional
        A job, its file, the name of a shipped one, or a model of `prism fit`; without it the
        completed steps are the model.
    steps : int, optional
        Steps of the run; those that the log names, else the job's, where None.
    column, unit, pattern, where
        As in `prism.estimate`.
    seed, threads, progress
        As in `prism.simulate`.
    **options
        Others of `prism.estimate`, such as `deadline`; without a job `deadline`, `probability`,
        `run_replicates` and `gpus`.

    Examples
    --------
    >>> import prism
    >>> with open("train.log", "w") as log:
    ...     for step in range(1, 31):
    ...         ms = 2000 + step % 3
    ...         print(f" iteration {step}/ 100 | elapsed time per iteration (ms): {ms} |", file=log)
    >>> found = prism.summary(prism.Watch("train.log", seed=1).look())
    >>> found["completed_steps"], found["steps"], round(found["time_left"]["p50"])
    (30, 100, 140)
    """

    def __init__(
        self, log: str | os.PathLike[str], job: Job | str | os.PathLike[str] | None = None, *,
        steps: int | None = None, column: str | None = None, unit: str | None = None,
        pattern: str | None = None,
        where: Mapping[str, str] | None = None, seed: int | None = None,
        threads: int | None = None, progress: Progress | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if steps is not None and steps < 1:
            raise PrismError(f"{option('steps')} {steps}: expected at least 1")
        self._context = make_context(seed, threads, progress)
        self._options = options | {"steps": steps, "seed": self._context.seed}
        self._simulated: Simulated | None = None
        self._usual: int | None = None
        choice: dict[str, Any] = {
            "column": column, "unit": unit, "pattern": pattern, "where": where,
        }  # fmt: skip
        self._job = job if job is None or isinstance(job, Job) else os.fspath(job)
        if isinstance(self._job, str) and is_step_model(self._job):
            model = load_step_model(self._job)
            self._usual = model.n_steps * model.mean_over
        elif self._job is not None:
            self._job = self._job if isinstance(self._job, Job) else load_job(self._job)
            self._usual = self._job.n_steps if self._job.has_run else None
            choice["per_step"] = self._job.work_per_step
            refuse_gpus(self._options.pop("gpus", None))
            replicates = gather_options(**self._options)["replicates"]
            self._simulated = simulate_job(self._job, replicates, self._context)
        self._log = GrowingLog(os.fspath(log), **choice)

    def exists(self) -> bool:
        """Whether there is such a log."""
        return self._log.path.exists()

    def look(self) -> "Forecast":
        """Read the log and draw the time that is left of the run, ``time_left`` [run] s.

        Raises PrismError: the log holds no step times, or none that the model knows, or the run's
        length is not known.
        """
        reading = self._log.read()
        options = self._options | {"steps": reading.length(self._options["steps"], self._usual)}
        done, total = count_done(reading.times)[1], options["steps"]
        if done > total:
            raise PrismError(
                f"{reading.times.source}: {format_count(done, 'step')} done of {total}; "
                f"{option('steps')} N "
                "says how many the run has"
            )
        if done == total:
            found = _finished(reading, done)
        elif self._job is None:
            found = _from_log(reading, **options)
        elif isinstance(self._job, Job):
            past: dict[str, Any] = {
                "completed": reading, "column": None, "unit": None, "pattern": None, "where": {},
            }  # fmt: skip
            found = estimate_job(
                self._job, gather_options(**options), past, self._context.quiet,
                simulated=self._simulated,
            )  # fmt: skip
        else:
            found = estimate(self._job, completed=reading, **options).to_xarray()
        attrs = {
            "kind": KIND, "schema": SCHEMA, "prism_version": prism.__version__,
            "job_name": found.attrs.get("job_name", str(self._log.path)),
            "log": str(self._log.path), "seed": str(options["seed"]), "steps": total,
            "model": "log" if self._job is None else "steps" if self._simulated is None else "job",
        }  # fmt: skip
        return Forecast(found.assign_attrs(attrs))


class Forecast(Result):
    """The rest of a run that is going on: `time_left`, and whether its steps changed."""

    _needs = ("completed_steps",)

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return _figures(self.dataset)


def _finished(reading: Reading, done: int) -> xr.Dataset:
    """Say that nothing is left."""
    seconds = float(reading.times.seconds.sum()) * reading.times.mean_over
    last = float(reading.times.seconds[-LAST:].mean())
    values = {
        "time_left": np.zeros(1), "time_to_train": np.full(1, seconds),
        "completed": {"steps": done, "seconds": seconds, "last_step_time": last},
    }  # fmt: skip
    call = json.dumps({"probability": PROBABILITY})
    return make_dataset(values | reading.figures(), {}, {"call": call})


def _from_log(
    reading: Reading, *, steps: int, seed: int, deadline: float | str | datetime | None = None,
    probability: float = PROBABILITY, run_replicates: int = RUN_REPLICATES,
    gpus: int | None = None,
) -> xr.Dataset:  # fmt: skip
    """Forecast the rest of a run from its completed steps: a model of them, held against them."""
    blocks = in_blocks(reading.times.seconds)
    times = reading.times if blocks.size == 1 else as_blocks(reading.times, blocks)
    changes = find_changes(times)
    # its noise is that of all steps, not of those since the last change
    calm = without_changes(times, changes.warm, blocks.size)
    fitted = fit_steps(calm, seed=seed, repeats=_REPEATS)
    before, done = count_done(reading.times)
    fitted = replace(fitted, pause_first=fitted.pause_first + before)
    n, warm, seen = changes.calm.step.size, changes.warm, changes.calm
    if blocks.size > 1:  # pauses are among the stalls, or in the blocks' means
        none = np.empty(0)
        fitted = replace(fitted, pause_interval=none, pause_first=none, pause_s=none)
        n, seen = reading.times.step.size, reading.times
        warm = np.append(np.repeat(warm, blocks.size), np.zeros(n % blocks.size, np.bool_))
    early = int(np.flatnonzero(warm)[-1]) + 1 if warm.any() else 0  # no stall to come is like these
    past = update_on_progress(
        replace(run_model(fitted, steps), run_cv=UNKNOWN_LEVEL, stalls=None), seen,
        CLUSTERS_IN_PROGRESS, seed, 0.0, Fitted(fitted.spreads(), np.arange(n), warm, early),
    )  # fmt: skip
    later = replace(past.model, model_error=LATER)
    elapsed_s = float(reading.times.seconds.sum()) * reading.times.mean_over  # with past pauses
    past = replace(past, model=later, done=done, far=False, elapsed_s=elapsed_s)
    drawn = draw_runs(fitted, steps, run_replicates, seed, past, gpus)
    until = None if deadline is None else parse_deadline(deadline)
    return lay_out(
        fitted, steps, drawn, past, reading, replicates=LANES, seed=seed, gpus=gpus,
        deadline=seconds_until(until, None, reading), probability=probability,
    )  # fmt: skip


def _figures(dataset: xr.Dataset) -> dict[str, Any]:
    """Give figures of a look: those of an estimate of a run in progress."""
    found = run_progress(dataset)
    past = found.pop("completed")
    call = json.loads(dataset.attrs["call"])
    runs = np.asarray(dataset.time_to_train, np.float64)
    notes = [*read_texts(dataset, "notes"), *read_texts(dataset, "warnings")]
    return {
        "job": dataset.attrs["job_name"], "log": dataset.attrs["log"],
        "model": dataset.attrs["model"], "seed": int(dataset.attrs["seed"]),
        "run_replicates": int(runs.size), "steps": int(dataset.attrs["steps"]),
        "completed_steps": past.pop("steps"), "elapsed": past.pop("seconds"), **past, **found,
        **run_end(dataset, call, runs),
        "failure_model": failure_model(dataset).get("failure_model"),
        "notes": list(dict.fromkeys(notes)), "warnings": [],
    }  # fmt: skip
