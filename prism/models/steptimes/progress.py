"""A run in progress of a model of step times: its update on progress, and what a fit left out."""

from dataclasses import replace

import numpy as np

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError, option
from prism.common.text import format_count
from prism.models.changes.find import select_steps
from prism.models.steptimes.model import StepModel
from prism.models.steptimes.predict import run_model, work_of
from prism.models.steptimes.runs import (
    UNKNOWN_LEVEL,
    Fitted,
    ProgressPosterior,
    check_one_run,
    update_on_progress,
)
from prism.traces import StepTimes
from prism.traces.table import SHORTEST_S


def progress(
    model: StepModel, times: StepTimes, n_steps: int, n_draws: int, seed: int
) -> ProgressPosterior:
    """Condition a model of step times on the completed steps of a run of `n_steps`.

    Raises PrismError: steps of several runs, that are none of the model's, or as many as the run
    has.
    """
    check_one_run(times)
    whole, times = times, known_steps(model, times)
    k, at = model.mean_over, places_of(model, times)
    done = (int(at.max()) + 1) * k
    if done >= n_steps:
        raise PrismError(
            f"{format_count(done, 'step')} done of {n_steps}; nothing is left; set "
            f"{option('steps')} higher"
        )
    first = min(max(done, model.offset_skips * k), n_steps)
    ahead = run_model(model, n_steps, first)
    before = replace(run_model(model, done), stalls=ahead.stalls)
    early = model.beginning_s.shape[1]
    # the first steps that stick out in most runs tell nothing of this one's level
    odd = np.zeros(max(early, int(at.max()) + 1), np.bool_)
    odd[:early] = (model.beginning_s != 0.0).mean(axis=0) > 0.5
    prior = before.run_cv if model.run_known else max(before.run_cv, UNKNOWN_LEVEL)
    calm = without_pauses(model, times)
    found = update_on_progress(
        replace(before, run_cv=prior), calm, n_draws, seed, model.step_error,
        Fitted(model.spreads(), at, odd[at], early),
    )  # fmt: skip
    ratio = float(ahead.mean[0, 0] / before.mean[0, 0])
    rest = replace(
        found.model, mean=ratio * found.model.mean, std=ratio * found.model.std,
        ideal_s=ahead.ideal_s, profile=ahead.profile, residuals=found.level * ahead.residuals,
    )  # fmt: skip
    notes, out_s = list(found.notes), float(whole.seconds.sum() - times.seconds.sum())
    if (n := whole.step.size - times.step.size) > 0:
        notes.append(
            f"{times.source}: {format_count(n, 'step')} that the model's fit left out "
            f"({k * out_s:.4g} s) counted as elapsed; those to come take as long as the others"
        )
    usual = found.level * work_of_values(model, int(at.max()) + 1)
    usual[at] = times.seconds
    elapsed_s = float(usual[model.offset_skips :].sum() + out_s) * k
    return replace(found, model=rest, elapsed_s=elapsed_s, done=done, notes=tuple(notes))


def known_steps(model: StepModel, times: StepTimes) -> StepTimes:
    """Leave out steps that the fit left out, such as evaluations.

    A model without a profile takes steps of any numbers where none of them is its own.
    """
    known = np.isin(times.step, model.steps) | (times.step > model.steps[-1])
    if not known.any() and not model.has_profile:
        return times
    if not known.any():
        first = times.step[0]
        raise PrismError(f"{times.source}: step {first} and all others are none of the model's")
    if not model.has_profile:
        known |= times.step < model.steps[0]
    return times if known.all() else select_steps(times, known)


def without_pauses(model: StepModel, times: StepTimes) -> StepTimes:
    """Take the model's periodic pauses out of steps."""
    k, at = model.mean_over, places_of(model, times)
    ends = k * (at.astype(np.float64) + 1.0)
    pause_s = (model.paused_s(ends) - model.paused_s(ends - k)) / k
    return replace(times, seconds=np.maximum(times.seconds - pause_s, SHORTEST_S))


def steps_known(model: StepModel, total: int) -> int:
    """Count the steps of a run of n steps that the model knows."""
    steps, k = model.steps, model.mean_over
    last = total - (k if steps[0] == 0 else 0)  # number of the last one
    beyond = max(0, last - int(steps[-1]))
    return int(np.searchsorted(steps, last, side="right")) * k + beyond


def work_of_values(model: StepModel, n: int) -> Array:
    """Typical time of the first n values [value; s]."""
    mean, profile = work_of(model, 0, n * model.mean_over)
    return np.full(n, mean) if profile is None else mean * profile[:: model.mean_over]


def places_of(model: StepModel, times: StepTimes) -> Index:
    """Positions of measured values in a run of the model [value]."""
    if times.mean_over != model.mean_over:
        raise PrismError(
            f"{times.source}: each value is the mean of {times.mean_over} steps, in the model of "
            f"{model.mean_over}; fit and progress need the same"
        )
    known = model.steps
    inside = np.isin(times.step, known)
    odd = times.step[~inside & (times.step <= known[-1])]
    if odd.size:
        return np.asarray(np.unique(times.step, return_inverse=True)[1], np.int64)
    beyond = known.size - 1 + (times.step - known[-1])
    return np.asarray(np.where(inside, np.searchsorted(known, times.step), beyond), np.int64)
