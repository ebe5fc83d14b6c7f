"""What is left of a run, given its completed steps: for a job, a step model, or nothing."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.analyses.estimates.run import CLUSTERS_IN_PROGRESS, calibration_of
from prism.engine import LANES
from prism.jobs.job import Job
from prism.models.calibration.model import communication_share
from prism.models.changes.find import changes_of_step_times, select_steps
from prism.models.changes.fit import fit_steps
from prism.models.changes.spans import FEWEST
from prism.models.steptimes.model import StepModel
from prism.models.steptimes.predict import draw_runs, generator, run_model
from prism.models.steptimes.runs import (
    NOMINAL_ERROR,
    UNKNOWN_LEVEL,
    Fitted,
    UnderWay,
    condition,
    known_steps,
    places_of,
    progress,
    without_pauses,
    work_of_values,
)
from prism.models.steptimes.spread import Spread
from prism.simulation.prepare import prepare
from prism.simulation.runs.build import build_run_model
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import RunModel
from prism.simulation.runs.ramp import step_work
from prism.simulation.steps import Progress, simulate_step
from prism.traces import StepTimes

Array = NDArray[np.float64]
REPLICATES = 64 * LANES
LATER = 0.0022
"""Standard deviation of the mean of steps to come over that of those done, less 1, beyond what the
latter's noise and drift tell. 0.24 % and 0.21 % in halves of 27 MLPerf systems, each tested on the
other (`experiments/verification/watch.py --later`)."""
_REPEATS = 20  # simulated fits behind the spread of a model that each look makes anew


@dataclass(frozen=True)
class Position:
    """Where a run is: steps before the log's first, steps done, and their total."""

    before: int
    done: int
    total: int
    at: datetime

    @property
    def left(self) -> int:
        """Steps to come."""
        return self.total - self.done


class Expected(NamedTuple):
    """What a change of level shows in.

    Attributes
    ----------
    ratio : float64 [value]
        Step over its work; not-a-number where the level does not show.
    elapsed_s : float64 [value]
        Time of each [s].
    spreads : list of Spread
        Of a value around its level.
    """

    ratio: Array
    elapsed_s: Array
    spreads: list[Spread]


class Forecast(NamedTuple):
    """Draws of the time that is left [run; s], the level of the run, and what was assumed."""

    left_s: Array
    past: UnderWay
    notes: tuple[str, ...] = ()


def _per_value(spread: Spread, k: int) -> Spread:
    """Bring the spread of a step to means of k."""
    return replace(spread, white=float(spread.white / np.sqrt(k)))


def _time_of_day(at: datetime) -> float:
    return at.hour * 3600.0 + at.minute * 60.0 + at.second


class OfJob:
    """A job, whose step is simulated once."""

    kind = "job"

    def __init__(self, job: Job, seed: int, threads: int, report: Progress | None) -> None:
        step = prepare(job, seed)
        found = calibration_of(job)
        dataset = simulate_step(step, REPLICATES, seed, threads, report, found is not None)
        self.name, self.steps = job.name, job.n_steps if job.has_run else None
        self._job, self._seed, self._threads = job, seed, threads
        self._model = build_run_model(step, dataset, seed, threads)
        self._nominal = self._model.model_error or NOMINAL_ERROR
        if found is not None:
            self._nominal = found.mean_error(communication_share(dataset))
        self._work: tuple[int, Array | None, tuple[str, ...]] = (-1, None, ())

    def _profile(self, total: int) -> tuple[Array | None, tuple[str, ...]]:
        """Work of each step [step], None where all are alike; worked out once."""
        if self._work[0] != total:
            self._work = total, *step_work(self._job, total, self._seed, self._threads)
        return self._work[1:]

    def expect(self, times: StepTimes, at: Position) -> Expected:
        """Divide steps by their work; how they vary."""
        profile, k = self._profile(at.total)[0], times.mean_over
        place = np.minimum(at.before + times.step - times.step[0], at.total - 1)
        work = 1.0 if profile is None else profile[place]
        drift = self._model.drift
        spread = Spread(0.0, float(np.mean(drift.cv)), float(np.mean(drift.tau_s)))
        elapsed_s = (times.step - times.step[0]) * float(times.seconds.mean())
        return Expected(times.seconds / work, elapsed_s, [_per_value(spread, k)])

    def forecast(self, times: StepTimes, at: Position, n_runs: int) -> Forecast:
        """Condition the job on these steps and draw what is left."""
        profile, notes = self._profile(at.total)
        first = int(at.done - times.step[-1] + times.step[0] - times.mean_over)
        rest = None if profile is None else profile[first:]
        draws = max(CLUSTERS_IN_PROGRESS, self._model.mean.shape[0])
        past = condition(
            replace(self._model, profile=rest), times, draws, self._seed, self._nominal
        )
        model = past.model
        if profile is not None:
            model = replace(model, profile=profile[at.done :])
        return Forecast(_draw(model, at, n_runs, self._seed), past, notes)


class OfSteps:
    """A model of step times."""

    kind = "steps"

    def __init__(self, model: StepModel, name: str, seed: int) -> None:
        self.name, self.steps = name, model.n_steps * model.mean_over
        self._model, self._seed = model, seed

    def _values(self, times: StepTimes, at: Position) -> int:
        """Count the steps of the whole run that the model has."""
        steps, k = self._model.steps, times.mean_over
        last = at.total - (k if steps[0] == 0 else 0)  # number of the last one
        beyond = max(0, last - int(steps[-1]))
        return int(np.searchsorted(steps, last, side="right")) * k + beyond

    def expect(self, times: StepTimes, at: Position) -> Expected:
        """Divide steps by their work; how they vary."""
        whole, times = times, known_steps(self._model, times)
        place, k = places_of(self._model, times), times.mean_over
        work = work_of_values(self._model, int(place.max()) + 1)[place]
        ratio = np.full(whole.seconds.size, np.nan)
        late = np.where(place < self._model.beginning_s.shape[1], np.nan, 1.0)
        calm = without_pauses(self._model, times)
        ratio[np.isin(whole.step, times.step)] = late * calm.seconds / work
        elapsed_s = (whole.step - whole.step[0]) * self._model.step_s
        return Expected(ratio, elapsed_s, [_per_value(s, k) for s in self._model.spreads()])

    def forecast(self, times: StepTimes, at: Position, n_runs: int) -> Forecast:
        """Condition the model on these steps and draw what is left."""
        times, total = known_steps(self._model, times), self._values(times, at)
        past = progress(self._model, times, total, n_runs, self._seed)
        terms = draw_runs(self._model, total, n_runs, self._seed, past).terms
        left = [s for name, s in terms.items() if name not in ("completed_steps", "offset")]
        known_s = np.sum(left, axis=0)
        out = at.left - (total - past.done)  # steps to come that the fit left out
        return Forecast(known_s * (1.0 + out / (total - past.done)), past)


class OfLog:
    """The completed steps alone: fitted anew at each look."""

    kind = "log"
    name, steps = "", None

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def expect(self, times: StepTimes, at: Position) -> Expected:
        """Take steps as they are, without a warm-up; how they vary around levels of their own."""
        self._fitted = model = fit_steps(times, seed=self._seed, repeats=_REPEATS)
        _, calm, out, warm = changes_of_step_times(times)
        self._kept = select_steps(calm, ~(out | warm))
        ratio = np.where(warm, np.nan, calm.seconds)
        elapsed_s = (times.step - times.step[0]) * model.step_s
        return Expected(ratio, elapsed_s, [_per_value(s, times.mean_over) for s in model.spreads()])

    def forecast(self, times: StepTimes, at: Position, n_runs: int) -> Forecast:
        """Go on as in these steps, of those that `expect` was given, with the pauses of all."""
        kept = select_steps(self._kept, np.isin(self._kept.step, times.step))
        kept = kept if kept.step.size >= FEWEST else times  # a phase of its own, and a short one
        run = run_model(self._fitted, at.total)
        done = int(times.step[-1]) - int(self._fitted.steps[0]) + times.mean_over
        paused_s = self._fitted.paused_s(np.array([done, done + at.left]))
        n, spreads = kept.step.size, self._fitted.spreads()
        fitted = Fitted(spreads, np.arange(n), np.zeros(n, np.bool_), 0)
        past = condition(
            replace(run, run_cv=UNKNOWN_LEVEL, stalls=None), kept, CLUSTERS_IN_PROGRESS,
            self._seed, 0.0, fitted,
        )  # fmt: skip
        later = 1.0 + LATER * generator(self._seed, 34).standard_normal(n_runs)
        left_s = later * _draw(past.model, at, n_runs, self._seed) + np.diff(paused_s)
        return Forecast(left_s, replace(past, far=False))


def _draw(model: RunModel, at: Position, n_runs: int, seed: int) -> Array:
    """Draw the time of the steps to come [run; s]."""
    return simulate_runs(model, at.left, n_runs, seed, start_s=_time_of_day(at.at)).total
