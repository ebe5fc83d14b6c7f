"""`prism watch`: when a run that is going on will be done, and whether its last steps depart.

The model of a job is simulated once; each look at the log conditions it on the completed steps.
"""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import prism
from prism.analyses.watching.forecasts import OfJob, OfLog, OfSteps, Position
from prism.common.errors import PrismError, named
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.frommodel import is_step_model
from prism.models.changes.find import select_steps
from prism.models.changes.segments import outliers
from prism.models.steptimes.departure import ALARM, Departure, find_departure
from prism.models.steptimes.model import load_step_model
from prism.simulation.steps import Progress, fresh_seed, settle_call
from prism.traces import StepTimes
from prism.traces.growing import GrowingLog, Reading

if TYPE_CHECKING:
    from prism.models.steptimes.runs import UnderWay

Array = NDArray[np.float64]
KIND = "watch"
SCHEMA = 1
QUANTILES = 0.05, 0.1, 0.5, 0.9, 0.95
LAST = 20  # values whose mean is the present step time
RUNS = 2_000


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
    column, where
        As in `prism.estimate`.
    seed, threads, progress
        As in `prism.simulate`.

    Raises
    ------
    PrismError
        Bad input.

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
        where: Mapping[str, str] | None = None, seed: int | None = None,
        threads: int | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.seed = fresh_seed() if seed is None else seed
        if steps is not None and steps < 1:
            raise PrismError(f"{named('steps')} {steps}: expected at least 1")
        self._steps = steps
        options: dict[str, Any] = {"column": column, "unit": unit, "where": where}
        _, threads = settle_call(1, self.seed, threads)
        self._model: OfJob | OfLog | OfSteps
        path = "" if job is None or isinstance(job, Job) else os.fspath(job)
        if job is None:
            self._model = OfLog(self.seed)
        elif path and is_step_model(path):
            self._model = OfSteps(load_step_model(path), path, self.seed)
        else:
            loaded = job if isinstance(job, Job) else load_job(path)
            self._model = OfJob(loaded, self.seed, threads, progress)
            options["per_step"] = loaded.work_per_step
        self._log = GrowingLog(os.fspath(log), **options)

    def exists(self) -> bool:
        """Whether there is such a log."""
        return self._log.path.exists()

    def look(self) -> xr.Dataset:
        """Read the log and forecast the rest of the run.

        Returns
        -------
        xarray.Dataset
            Draws of the time that is left; `prism.summary` gives the figures.

        Raises
        ------
        PrismError
            The log holds no step times, or none that the model knows, or the run's length is not
            known.
        """
        reading = self._log.read()
        times, at = reading.times, self._position(reading)
        notes = list(times.notes)
        departure = None
        left, past = np.zeros(1), None
        if at.left > 0:
            expected = self._model.expect(times, at)
            ratio = _calm(expected.ratio)
            departure = find_departure(ratio, expected.elapsed_s, expected.spreads, self.seed)
            since = times
            if departure is not None and departure.p_value <= ALARM:
                since = select_steps(times, times.step >= times.step[departure.begin])
                notes.append("the steps to come take as long as those since the change")
            found = self._model.forecast(since, at, RUNS)
            left, past = found.left_s, found.past
            notes += found.notes
        numbers = {
            "job": self._model.name or str(self._log.path), "log": str(self._log.path),
            "model": self._model.kind, "seed": self.seed, "run_replicates": RUNS,
            "steps": at.total, "completed_steps": at.done,
            "taken": times.taken, "written": at.at.isoformat(timespec="seconds"),
            "last_step_time": float(times.seconds[-LAST:].mean()),
            "time_left": _spread(left), "finish": _dates(left, reading.written_s),
            "departure": _departed(departure, past, times),
            "level": None if past is None else past.level,
            "level_expected_std": None if past is None else past.expected,
            "notes": list(dict.fromkeys(notes)), "warnings": [],
        }  # fmt: skip
        attrs = {
            "kind": KIND, "schema": SCHEMA, "prism_version": prism.__version__,
            "job_name": numbers["job"], "seed": str(self.seed), "summary": json.dumps(numbers),
        }  # fmt: skip
        of_left = {"units": "s", "long_name": "time until the last step is done"}
        return xr.Dataset({"time_left": ("run_replicate", left, of_left)}, attrs=attrs)

    def _position(self, reading: Reading) -> Position:
        """Say how many steps are done, and of how many; raises PrismError."""
        times, k = reading.times, reading.times.mean_over
        total = self._steps or reading.total or self._model.steps
        if total is None:
            raise PrismError(
                f"{times.source}: names no number of steps; {named('steps')} N says how many the "
                "run has"
            )
        first, last = int(times.step[0]), int(times.step[-1])
        begun = 0 if first == 0 else k  # numbers count from 0, or are of the last step done
        done = last - begun + k
        if done > total:
            raise PrismError(
                f"{times.source}: {done} steps are done of {total}; {named('steps')} N says how "
                "many the run has"
            )
        at = datetime.fromtimestamp(reading.written_s).astimezone()
        return Position(max(first - begun, 0), done, total, at)


def _calm(ratio: Array) -> Array:
    """Leave out single values that stick out of their neighbourhood."""
    values = ratio.copy()
    known = np.flatnonzero(np.isfinite(values))
    if known.size:
        odd = outliers(np.log(values[known])[:, None])[0][:, 0]
        values[known[odd]] = np.nan
    return values


def _spread(left: Array) -> dict[str, float]:
    """Figures of the time that is left [s]."""
    out = {"mean": float(left.mean()), "std": float(left.std())}
    return out | {f"p{100 * q:g}": float(np.quantile(left, q)) for q in QUANTILES}


def _dates(left: Array, written_s: float) -> dict[str, str]:
    """When the run is done, by quantile; none where that is beyond the calendar."""
    out = {}
    for q in QUANTILES:
        try:
            end = datetime.fromtimestamp(written_s + float(np.quantile(left, q))).astimezone()
        except (OverflowError, ValueError, OSError):
            return {}
        out[f"p{100 * q:g}"] = end.isoformat(timespec="seconds")
    return out


def _departed(
    found: Departure | None, past: "UnderWay | None", times: StepTimes
) -> dict[str, Any] | None:
    """Say whether steps depart: from those before, or all of them from the model."""
    if past is None:
        return None
    changed = found is not None and found.p_value <= ALARM
    out: dict[str, Any] = {
        "departed": changed or past.far,
        "kind": "change" if changed else "level" * past.far or None,
    }
    if found is None:
        return out | dict.fromkeys(("change", "change_ci", "p_value", "step", "step_range"))
    half = 1.96 * found.std
    step, early, late = (int(times.step[i]) for i in (found.begin, found.earliest, found.latest))
    return out | {
        "change": found.change, "change_ci": [found.change - half, found.change + half],
        "p_value": found.p_value, "step": step, "step_range": [early, late],
    }  # fmt: skip


def summarize_watch(dataset: xr.Dataset) -> dict[str, Any]:
    """Figures of a look, as `prism watch --json` prints them."""
    return dict(json.loads(dataset.attrs["summary"]))
