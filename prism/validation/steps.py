"""Models of step times against measured steps and totals that they were not fitted on.

Either a fitted model against another file, or one file split by its first steps. Steps are
predicted at their places in a run, totals for runs of as many steps. The p-value comes from
repeating fit and comparison in simulation. Left out: jobs (`prism.validate`) and
traces (`prism.validation.trace`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism import measures
from prism.errors import PrismError, named
from prism.steptimes.fit import MIN_VALUES, fit_step_times
from prism.steptimes.model import StepModel, load_step_model
from prism.steptimes.predict import draw_runs, draw_steps, independent
from prism.traces import StepTimes, read_step_times, read_totals, total_per_run
from prism.validation.result import compare_all, make_validation, separation

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
_CELLS = 2_000_000  # predicted steps at most
REPEAT_SAMPLES = 2048  # predicted values of each simulated repetition: KS to 0.02


def validate_step_model(
    path: str | Path, measured: str | Path, *, column: str | None, where: Mapping[str, str] | None,
    totals: str | None, quantity: str, dependence: str | None, replicates: int, bootstrap: int,
    seed: int, progress: Progress | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Hold a model of step times against measured steps or totals.

    Parameters are those of `prism.validate.validate_steps`.

    Raises
    ------
    PrismError
        Bad input.
    """
    model = load_step_model(path)
    times = read_step_times(measured, column=column, where=where)
    known = None
    if quantity == "time_to_train" and totals is not None:
        known = read_totals(totals, where=where)
    facts = {"job": Path(path).stem, "measured": str(measured)}
    return _compare(
        model, times, known, quantity, dependence, replicates, bootstrap, seed, facts, progress
    )


def validate_split(
    source: str | Path, train: str, *, column: str | None, where: Mapping[str, str] | None,
    dependence: str | None, replicates: int, bootstrap: int, seed: int,
    progress: Progress | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Fit the first steps of every run of a file and predict the others.

    ``train`` is ``first-half`` or a number of steps.

    Raises
    ------
    PrismError
        The split leaves too little on one side.
    """
    times = read_step_times(source, column=column, where=where)
    steps = np.unique(times.step)
    if train == "even":
        raise PrismError(
            f"{named('train')} even: steps of one run remember each other; of step times "
            f"{source}, take "
            "first-half or a number of steps"
        )
    n = steps.size // 2 if train == "first-half" else int(train)
    if n < MIN_VALUES or n >= steps.size:
        raise PrismError(
            f"{source}: {named('train')} {train} takes {n} of {steps.size} steps; at least "
            f"{MIN_VALUES} are "
            "needed to fit, and 1 to predict"
        )
    early = times.step < steps[n]
    first, rest = (_part(times, rows) for rows in (early, ~early))
    facts = {"trace": str(source), "train": train}
    model = fit_step_times(first, repeats=0)
    return _compare(
        model, rest, None, "step_time", dependence, replicates, bootstrap, seed, facts, progress,
        first.seconds,
    )  # fmt: skip


def _part(times: StepTimes, rows: NDArray[np.bool_]) -> StepTimes:
    return replace(times, seconds=times.seconds[rows], step=times.step[rows], run=times.run[rows])


def _compare(
    model: StepModel, times: StepTimes, totals: Mapping[str, float] | None, quantity: str,
    dependence: str | None, replicates: int, bootstrap: int, seed: int, facts: dict[str, Any],
    progress: Progress | None, training: Array | None = None,
) -> "xr.Dataset":  # fmt: skip
    """Predict, compare, repeat in simulation, and lay out."""
    if times.mean_over != model.mean_over:
        raise PrismError(
            f"{times.source}: each value is the mean of {times.mean_over} steps, in the model of "
            f"{model.mean_over}; fit and measured steps need the same"
        )
    alone = independent(model)
    used = alone if dependence == "none" else model
    notes = list(times.notes)
    runs: Any = None
    if quantity == "step_time":
        values, steps, runs = times.seconds, times.step, times.run
        sampler: _Steps | _Totals = _Steps(_positions(model, times))
        n_runs = int(np.unique(times.run).size)
    else:
        per_run, n_steps, said = _totals(model, times, totals)
        notes += said
        values, steps = np.array(list(per_run.values())), np.arange(len(per_run))
        if totals is None:  # sums of the measured steps leave nothing out
            used, alone = _without_offset(used), _without_offset(alone)
        sampler = _Totals(n_steps)
        n_runs = len(per_run)
    predicted, other = (sampler.predicted(m, replicates, seed) for m in (used, alone))
    null = _null(used, sampler, n_runs, bootstrap, seed, progress)
    figures = compare_all(values, predicted, training, other, steps, runs)
    figures |= facts | {
        "quantity": quantity, "dependence": dependence or "full",
        "n_train": int(model.n_runs * model.n_steps if quantity == "step_time" else model.n_runs),
        "bootstrap": bootstrap, "seed": seed, "replicates": replicates,
        "ks_p_value": measures.bootstrap_p_value(separation(values, predicted), null)
        if bootstrap else None,
        "notes": notes, "warnings": list(model.report.get("warnings", ())),
    }  # fmt: skip
    return make_validation(figures, values, predicted, other, training, [])


def _without_offset(model: StepModel) -> StepModel:
    return replace(model, offset_s=0.0, offset_std_s=0.0, offset_skips=0)


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


def _positions(model: StepModel, times: StepTimes) -> NDArray[np.int64]:
    """Places in a run of the measured steps, ascending."""
    steps = np.unique(times.step)
    last = int(model.steps[-1])
    inside = np.searchsorted(model.steps, steps)
    beyond = model.steps.size - 1 + (steps - last) // max(1, times.mean_over)
    return np.asarray(np.where(steps <= last, inside, beyond), np.int64)


@dataclass(frozen=True)
class _Steps:
    """Steps at the places of the measured ones."""

    at: NDArray[np.int64]  # [position]

    def predicted(self, model: StepModel, n: int, seed: int) -> Array:
        """Draw steps of many runs [n; s]."""
        n_runs = int(np.clip(-(-n // self.at.size) * 8, 16, max(16, _CELLS // self.at.size)))
        steps = draw_steps(model, self.at, n_runs, seed)
        # each place as often as any other, from as many runs as can be
        places = np.random.default_rng([seed, 5]).permutation(self.at.size)
        k = np.arange(n)
        turn = k // np.lcm(n_runs, self.at.size)
        return np.asarray(steps[(k + turn) % n_runs, places[k % self.at.size]])

    def measured(self, model: StepModel, n_runs: int, seed: int) -> Array:
        """Draw all steps of so many runs [s]."""
        return draw_steps(model, self.at, n_runs, seed).ravel()


@dataclass(frozen=True)
class _Totals:
    """Totals of runs of so many steps."""

    n_steps: int

    def predicted(self, model: StepModel, n: int, seed: int) -> Array:
        """Draw totals [n; s]."""
        return draw_runs(model, self.n_steps, n, seed).total

    measured = predicted


def _null(
    model: StepModel, sampler: _Steps | _Totals, n_runs: int, repetitions: int, seed: int,
    progress: Progress | None,
) -> Array:  # fmt: skip
    """KS where the model is the truth: other runs are measured, and it is fitted anew.

    What a new fit would find is at hand from the repetitions behind its intervals; its mean errs by
    its own standard error.
    """
    null = np.zeros(repetitions)
    spreads = model.repeats
    rng = np.random.default_rng([seed, 6])
    for b in range(repetitions):
        again = model
        if spreads.size:
            parts = dict(zip(model.spread.as_dict(), spreads[b % len(spreads)], strict=True))
            again = replace(model, spread=replace(model.spread, **parts))
        scale = 1.0 + model.step_error * rng.standard_normal()
        again = replace(again, work=model.work * scale)
        measured = sampler.measured(model, n_runs, seed + 2 * b + 1)
        predicted = sampler.predicted(again, REPEAT_SAMPLES, seed + 2 * b + 2)
        null[b] = separation(measured, predicted)
        if progress is not None:
            progress(b + 1, repetitions)
    return null
