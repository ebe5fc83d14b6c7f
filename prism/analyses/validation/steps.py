"""A model of step times against measured steps or totals that it was not fitted on.

Either a fitted model against another file, or one file split by its first steps. Steps are
predicted at their places in a run, totals for runs of as many steps.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from prism.analyses.validation.against_measured import Call, Repetitions, ValidationCase
from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError, option
from prism.common.text import format_count, format_duration
from prism.models.changes.find import find_changes, select_steps
from prism.models.changes.fit import fit_steps
from prism.models.steptimes.fit import MIN_VALUES, fit_step_times
from prism.models.steptimes.model import StepModel, load_step_model
from prism.models.steptimes.predict import draw_runs, draw_steps, generator, no_dependence
from prism.models.steptimes.series import elapsed_steps
from prism.traces import StepTimes, total_per_run

MIN_TRAIN = 3  # steps that a trace's fit can start from
LONG_MEMORY = 20.0
"""Memories of a drift in what was fitted below which p-values are too small: where it has 3 or 7,
19 to 21 % are at most 0.1, where it has 20 or more, 3 % (`step_models.py --p-values`)."""
_CELLS = 2_000_000  # predicted steps at most
_Redraw = Callable[[StepModel, int], tuple[StepTimes, Mapping[str, float] | None, Array]]


def model_case(
    path: str | Path, times: StepTimes, totals: Mapping[str, float] | None, call: Call
) -> ValidationCase:
    """Hold a model of step times against measured steps, or totals [s] of runs by name."""
    model, notes = load_step_model(path), list(times.notes)
    facts = {"job": Path(path).stem, "taken": times.taken, "notes": notes}
    if call.quantity == "step_time":
        return _case(model, times, facts | {"n_train": model.n_runs * model.n_steps}, call)
    per_run, n_steps, said = _totals(model, times, totals)
    notes += said
    if totals is None:  # sums of the measured steps leave nothing out
        model = replace(model, offset_s=0.0, offset_std_s=0.0, offset_skips=0)
    runs = _Totals(n_steps, np.array(list(per_run.values())))
    return _case(model, times, facts | {"n_train": model.n_runs}, call, runs)


def split_case(times: StepTimes, source: str, train: str, call: Call) -> ValidationCase:
    """Fit the first steps of every run of a file and predict the others."""
    steps = np.unique(times.step)
    if train == "even":
        raise PrismError(
            f"{option('train')} even: steps of one run remember each other; of step times "
            f"{source}, take first-half or a number of steps"
        )
    part = split_steps(steps.size, train, source, MIN_VALUES)
    early = times.step < steps[part.size]
    first, rest = (select_steps(times, rows) for rows in (early, ~early))
    model = fit_steps(first) if call.bootstrap else fit_steps(first, repeats=0)
    facts = {
        "trace": source, "train": train, "n_train": model.n_runs * model.n_steps,
        "taken": times.taken, "notes": list(times.notes), "changes": model.report["changes"],
    }  # fmt: skip
    made = _case(model, rest, facts, call, redraw=_redraw_split(model, times, early))
    return replace(made, training=find_changes(first).settled().without_warm_up.seconds)


def split_steps(n: int, train: str, source: str, least: int = MIN_TRAIN) -> Index:
    """Positions of the steps that train."""
    if train == "first-half":
        part = np.arange(n // 2)
    elif train == "even":
        part = np.arange(0, n, 2)
    elif re.fullmatch(r"[0-9]+", train):
        part = np.arange(min(int(train), n))
    else:
        raise PrismError(
            f"{option('train')} {train}: expected first-half, even, or a number of steps"
        )
    if part.size < least or n - part.size < 1:
        raise PrismError(
            f"{source}: {option('train')} {train} takes {part.size} of {format_count(n, 'step')}; "
            f"at least {least} "
            "are needed to fit, and 1 to predict"
        )
    return part


def _case(
    model: StepModel, times: StepTimes, facts: dict[str, Any], call: Call,
    runs: "_Totals | None" = None, redraw: _Redraw | None = None,
) -> ValidationCase:  # fmt: skip
    """Predict steps at the places of the measured ones, or totals of runs where these are given."""
    if times.mean_over != model.mean_over:
        raise PrismError(
            f"{times.source}: each value is the mean of {format_count(times.mean_over, 'step')}, "
            "in the model of "
            f"{model.mean_over}; fit and measured steps need the same"
        )
    alone = no_dependence(model)
    used = alone if call.dependence == "none" else model
    sampler = _Steps.of(model, times) if runs is None else runs
    n, seed = call.replicates, call.context.seed
    predicted, other = (sampler.predicted(m, n, seed) for m in (used, alone))
    null = _anew(model, sampler, redraw or _redraw_apart(sampler), call)
    facts |= {"warnings": list(model.report.get("warnings", ()))}
    length_s = float(elapsed_steps(model.steps, model.steps, model.mean_over)[-1]) * model.step_s
    found = model.report.get("drift_memory", {}).get("no_drift_p_value", 1.0) <= 0.05
    if found and call.bootstrap and model.spread.tau_s > length_s / LONG_MEMORY:
        memory, of = map(format_duration, (model.spread.tau_s, length_s))
        facts["warnings"].append(
            f"drift: its memory of {memory} is long beside the {of} that were fitted, and a small "
            "p-value may be chance: where the prediction is right, about 20 % are at most 0.1"
        )
    if runs is not None:
        return ValidationCase(
            runs.measured, np.arange(runs.measured.size), predicted, other, null, facts
        )
    return ValidationCase(times.seconds, times.step, predicted, other, null, facts, times.run)


def _totals(
    model: StepModel, times: StepTimes, totals: Mapping[str, float] | None
) -> tuple[dict[str, float], int, list[str]]:
    """Measured total of each run [s], steps of a run, and notes."""
    names, counts = np.unique(times.run, return_counts=True)
    usual = int(np.median(counts)) * times.mean_over
    notes = []
    if counts.min() != counts.max():
        notes.append(
            f"runs have {counts.min() * times.mean_over} to {counts.max() * times.mean_over} "
            f"steps; runs of {usual} are predicted"
        )
    sums = total_per_run(times)
    if totals is None:
        if model.offset_skips or model.offset_s:
            notes.append("totals are sums of the steps; the model's offset is left out")
        return sums, usual, notes
    known = {run: totals[run] for run in map(str, names) if run in totals}
    if not known:
        raise PrismError(
            f"{times.source}: none of its runs ({', '.join(map(str, names[:4]))}, ...) has a "
            "total; the names must agree"
        )
    if not model.offset_skips and not model.offset_s:
        notes.append(
            "the model was fitted without totals, so an offset between them and the steps is not "
            "known; fit with --totals"
        )
    return known, usual, notes


@dataclass(frozen=True)
class _Steps:
    """Steps at the places of the measured ones."""

    at: Index  # [place] position in a run of the model, ascending
    elapsed: Array  # [place] steps since the first, gaps in the log included
    run: Index  # [value]
    place: Index  # [value]

    @classmethod
    def of(cls, model: StepModel, times: StepTimes) -> "_Steps":
        """Find the places of measured values."""
        steps, place = np.unique(times.step, return_inverse=True)
        last = int(model.steps[-1])
        inside = np.searchsorted(model.steps, steps)
        beyond = model.steps.size - 1 + (steps - last) // max(1, times.mean_over)
        at = np.asarray(np.where(steps <= last, inside, beyond), np.int64)
        run = np.unique(times.run, return_inverse=True)[1]
        return cls(at, elapsed_steps(steps, model.steps, model.mean_over), run, place)

    def predicted(self, model: StepModel, n: int, seed: int) -> Array:
        """Draw steps of many runs [n; s]."""
        n_runs = int(np.clip(-(-n // self.at.size) * 8, 16, max(16, _CELLS // self.at.size)))
        steps = draw_steps(model, self.at, n_runs, seed, self.elapsed)
        # each place as often as any other, from as many runs as can be
        places = np.random.default_rng([seed, 5]).permutation(self.at.size)
        k = np.arange(n)
        turn = k // np.lcm(n_runs, self.at.size)
        return np.asarray(steps[(k + turn) % n_runs, places[k % self.at.size]])

    def anew(self, model: StepModel, seed: int) -> Array:
        """Draw one value where each was measured [value; s]."""
        n_runs = int(self.run.max()) + 1
        return draw_steps(model, self.at, n_runs, seed, self.elapsed)[self.run, self.place]


@dataclass(frozen=True)
class _Totals:
    n_steps: int
    measured: Array  # [run] s

    def predicted(self, model: StepModel, n: int, seed: int) -> Array:
        """Draw totals [n; s]."""
        return draw_runs(model, self.n_steps, n, seed).total

    def anew(self, model: StepModel, seed: int) -> Array:
        """Draw the total of each measured run [run; s]."""
        return self.predicted(model, self.measured.size, seed)


def _redraw_split(fitted: StepModel, times: StepTimes, early: Flags) -> _Redraw:
    """Draw both parts of a file anew: runs go on from the fitted steps to the measured ones."""
    places = _Steps.of(fitted, times)

    def redraw(model: StepModel, seed: int) -> tuple[StepTimes, None, Array]:
        seconds = places.anew(model, seed)
        return select_steps(replace(times, seconds=seconds), early), None, seconds[~early]

    return redraw


def _redraw_apart(sampler: _Steps | _Totals) -> _Redraw:
    """Draw other runs than the fitted ones; of those, as many and as long as were fitted."""

    def redraw(model: StepModel, seed: int) -> tuple[StepTimes, Mapping[str, float] | None, Array]:
        n, n_runs = model.steps.size, model.n_runs
        elapsed = elapsed_steps(model.steps, model.steps, model.mean_over)
        seconds = draw_steps(model, np.arange(n), n_runs, seed, elapsed)
        run = np.repeat(np.arange(n_runs), n).astype(np.str_)
        steps = np.tile(model.steps, n_runs)
        times = StepTimes(seconds.ravel(), steps, run, "simulated", "", model.mean_over)
        measured = sampler.anew(model, seed + 1)
        if not model.offset_skips and not model.offset_s:
            return times, None, measured
        noise = model.offset_std_s * generator(seed, 7).standard_normal(n_runs)
        totals = seconds[:, model.offset_skips :].sum(axis=1) * model.mean_over
        totals += model.offset_s + noise
        return times, dict(zip(map(str, range(n_runs)), totals, strict=True)), measured

    return redraw


def _anew(model: StepModel, sampler: _Steps | _Totals, redraw: _Redraw, call: Call) -> Repetitions:
    """Draw what is fitted and what is measured from the model, and fit it anew.

    Each time with another spread that the fit leaves open: the most likely drift is too small where
    its memory is not far below the length of what was fitted, and so were p-values.
    """
    spreads = model.spreads()
    for b in count():
        seed = call.context.seed + 3 * b
        truth = replace(model, spread=spreads[b % len(spreads)])
        truth = no_dependence(truth) if call.dependence == "none" else truth
        training, totals, measured = redraw(truth, seed + 1)
        again = fit_step_times(training, totals, model.n_steps, repeats=0)
        if call.dependence == "none":
            again = no_dependence(again)
        yield measured, sampler.predicted(again, call.replicates, seed + 3)
