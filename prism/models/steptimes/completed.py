"""A run in progress: its completed steps condition its level, its drift and its stall rate.

Block means of the completed steps and the level of the rest are jointly normal; their conditional
distribution is exact. The parameters themselves are drawn anew for each run from what the fit
leaves open. Works for models of step times and, by `condition`, for any run model. Left out:
evaluations, checkpoints and failures of the past, which are in no step time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from prism.common.errors import PrismError, named
from prism.common.text import format_share
from prism.models.steptimes.likelihood import state_given
from prism.models.steptimes.model import StepModel
from prism.models.steptimes.predict import Drawn, Work, compound, draw_beginning, generator, work_of
from prism.models.steptimes.series import elapsed_steps
from prism.models.steptimes.spread import Spread, mean_variance
from prism.simulation.runs.drift import drift_variance
from prism.traces import StepTimes

Array = NDArray[np.float64]
UNKNOWN_LEVEL = 0.05  # what runs may differ by where one run was fitted: wide, so the steps decide
FAR = 4.0  # standard deviations of what was expected beyond which a level is said to be unlikely
_LEAST = 1e-6  # of a level: what differs by less is rounding
_JOIN = 2  # as in `prism.models.steptimes.series`


@dataclass(frozen=True)
class Past:
    """Completed steps of a run.

    Attributes
    ----------
    seconds : float64 [position]
        Measured, not-a-number where one is missing.
    deviation : float64 [position]
        Over the typical time at the run's scale, less 1; not-a-number in stalls too.
    elapsed_s : float64 [position]
        Usual time since the first [s].
    stall_s : float64 [stall]
        Net excess of each stall [s].
    exposure_s : float
        Time in which these came [s], the beginning left out.
    scale : float
        The run's level over the model's, where it lies far beyond what the model allows; else 1.
    notes : tuple of str
        Where the steps contradict the model.
    """

    seconds: Array
    deviation: Array
    elapsed_s: Array
    stall_s: Array
    exposure_s: float
    scale: float = 1.0
    notes: tuple[str, ...] = ()


def past_of(model: StepModel, times: StepTimes) -> Past:
    """Lay the completed steps beside the model's work; say where they contradict it."""
    check_one_run(times)
    if times.mean_over != model.mean_over:
        raise PrismError(
            f"{times.source}: each value is the mean of {times.mean_over} steps, in the model of "
            f"{model.mean_over}; fit and progress need the same"
        )
    last = int(times.step.max())
    known = model.steps[: int(np.searchsorted(model.steps, last, side="right"))]
    steps = known if known.size and known[-1] == last else np.unique(times.step)
    if model.has_profile and steps is not known and last <= model.steps[-1]:
        raise PrismError(f"{times.source}: step {last} is none of the model's")
    if last > model.steps[-1]:
        steps = np.concatenate([model.steps, np.arange(model.steps[-1] + 1, last + 1)])
    seconds = np.full(steps.size, np.nan)
    at = np.searchsorted(steps, times.step)
    at = np.minimum(at, steps.size - 1)
    same = steps[at] == times.step
    seconds[at[same]] = times.seconds[same]
    weights = work_of(model, steps.size * model.mean_over).steps[:: model.mean_over]
    elapsed_s = elapsed_steps(steps, model.steps, model.mean_over) * model.step_s
    past = _past(seconds, weights, elapsed_s, model)
    level = float(np.nanmean(past.deviation)) if np.isfinite(past.deviation).any() else 0.0
    expected = _expected_level(model, int(np.isfinite(past.deviation).sum()))
    if abs(level) > FAR * expected:
        note = (
            f"{times.source}: steps take {1.0 + level:.4g} times what the model says, and "
            f"{format_share(expected, 2)} more or less were expected: the level is taken from "
            "the steps; are they of the job that was fitted?"
        )
        past = _past(seconds, weights * (1.0 + level), elapsed_s, model)
        return replace(past, scale=1.0 + level, notes=(note,))
    return past


def check_one_run(times: StepTimes) -> None:
    """Refuse steps of several runs; raises PrismError."""
    names = np.unique(times.run)
    if names.size > 1:
        raise PrismError(
            f"{times.source}: steps of {names.size} runs ({', '.join(map(str, names[:4]))}, ...); "
            f"expected those of one run in progress: --where run={names[0]}"
        )


def _expected_level(model: StepModel, n_values: int) -> float:
    """Expect the mean of n values of a new run to be off the model's by this std [1]."""
    n_steps = max(1, n_values * model.mean_over)
    own = [
        mean_variance(s, n_steps, model.step_s) + _run_spread(model, s) ** 2
        for s in model.spreads()
    ]
    reading = model.grain_s / model.step_s
    return float(np.sqrt(np.mean(own) + model.step_error**2 + reading**2 / 12.0 + _LEAST**2))


def _run_spread(model: StepModel, spread: Spread) -> float:
    """Return what runs differ by [1]; wide where one run was fitted."""
    return spread.run if model.run_known else max(spread.run, UNKNOWN_LEVEL)


def _past(seconds: Array, weights: Array, elapsed_s: Array, model: StepModel) -> Past:
    """Split steps into body and stalls."""
    ratio = seconds / weights
    early = min(model.beginning_s.shape[1], ratio.size)
    # the first steps that stick out in most runs tell nothing of this one's level
    usual = np.ones(ratio.size, np.bool_)
    usual[:early] = (model.beginning_s[:, :early] != 0.0).mean(axis=0) <= 0.5
    known = ratio[early:] if early < ratio.size else ratio[usual]
    level = float(np.nanmedian(known)) if np.isfinite(known).any() else 1.0
    threshold = max(model.stall_threshold, 1e-9)
    apart = np.nan_to_num(ratio / level - 1.0)
    outlier = np.flatnonzero(np.abs(apart) > threshold)
    deviation = np.where(usual, ratio - 1.0, np.nan)
    stalls = []
    if outlier.size:
        for group in np.split(outlier, np.flatnonzero(np.diff(outlier) > _JOIN) + 1):
            begin, end = int(group[0]), int(group[-1]) + 1
            while end < ratio.size and apart[end] < -0.5 * threshold:
                end += 1
            net = float((apart[begin:end] * level * weights[begin:end]).sum())
            deviation[begin:end] = np.nan
            if begin >= early and net > threshold * float(weights.mean()):
                stalls.append(net * model.mean_over)
    exposure = float(np.nansum(seconds[early:])) * model.mean_over
    return Past(seconds, deviation, elapsed_s, np.array(stalls), exposure)


def finish(
    model: StepModel, past: Past, n_steps: int, n_runs: int, seed: int, *, data_error: bool = True
) -> Drawn:
    """Draw totals of a run whose first steps are known."""
    k = model.mean_over
    done = past.seconds.size * k
    if done >= n_steps:
        raise PrismError(
            f"{done} steps are done of {n_steps}; nothing is left; set {named('steps')} higher"
        )
    rng = [generator(seed, 20 + i) for i in range(6)]
    first = min(max(done, model.offset_skips * k), n_steps)
    rest = _scaled(work_of(model, n_steps, first), past.scale)
    spreads: Sequence[Spread] = model.spreads() if data_error else [model.spread]
    level, drift, noise = np.empty(n_runs), np.empty(n_runs), np.empty(n_runs)
    z = rng[0].standard_normal((n_runs, 5))
    for i, spread in enumerate(spreads):
        mine = slice(i, None, len(spreads))
        rate = model.step_s * past.scale / spread.tau_s if spread.drift > 0.0 else 0.0
        base = _run_spread(model, spread) if past.scale == 1.0 else UNKNOWN_LEVEL
        of_value = replace(spread, white=spread.white / np.sqrt(k))
        prior = float(np.hypot(base, model.step_error))
        state = state_given(past.deviation, past.elapsed_s * past.scale, of_value, prior).draw(
            z[mine, :2]
        )
        carried, own = _drift_ahead(rest, rate, first - done)
        level[mine] = state[:, 0] * rest.total
        drift[mine] = state[:, 1] * carried + spread.drift * own * z[mine, 2]
        noise[mine] = spread.white * np.sqrt(rest.squares) * z[mine, 3]
    early = max(0, model.beginning_s.shape[1] * k - first)
    stalls = _stalls_ahead(model, past, rest.total - float(rest.steps[:early].sum()), n_runs, rng)
    terms = {
        "completed_steps": np.full(n_runs, _elapsed(model, past)),
        "steps": np.full(n_runs, rest.total),
        "run": level, "drift": drift, "white": noise, "stalls": stalls,
        "beginning": draw_beginning(model, n_runs, first, n_steps, rng[4]),
        "offset": model.offset_s + model.offset_std_s * z[:, 4],
    }  # fmt: skip
    return Drawn(np.asarray(sum(terms.values())), terms)


def _elapsed(model: StepModel, past: Past) -> float:
    """Seconds that the completed steps add to the total; missing ones count as usual."""
    k, n = model.mean_over, past.seconds.size
    usual = past.scale * work_of(model, n * k).steps[::k]
    filled = np.where(np.isnan(past.seconds), usual, past.seconds)
    return float(filled[min(model.offset_skips, n) :].sum()) * k


def _scaled(work: Work, scale: float) -> Work:
    return Work(work.steps * scale, work.rest_s * scale, work.n_rest)


def _drift_ahead(rest: Work, rate: float, gap: int) -> tuple[float, float]:
    """Carry the drift on over the rest, which begins `gap` steps after the last known one."""
    if rate <= 0.0 or rest.n == 0:
        return 0.0, 0.0
    if rest.n_rest:  # too many to hold: the mean stands for all
        mean = rest.total / rest.n
        carried = mean * np.exp(-rate) * -np.expm1(-rate * rest.n) / -np.expm1(-rate)
        whole = mean**2 * drift_variance(rest.n, rate, 1.0)
    else:
        w = rest.steps
        r = np.exp(-rate)
        carried = float(w @ np.exp(-rate * np.arange(1, w.size + 1)))
        whole = float(2.0 * (w @ lfilter([1.0], [1.0, -r], w)) - w @ w)
    carried *= np.exp(-rate * gap)
    return float(carried), float(np.sqrt(max(whole - carried**2, 0.0)))


def _stalls_ahead(
    model: StepModel, past: Past, seconds: float, n_runs: int, rng: list[np.random.Generator]
) -> Array:
    """Sum of the stalls still to come [run; s]; their rate is known from both fit and past.

    Notes
    -----
    Gamma prior by moments from the counts of the fitted runs, which lets runs differ in rate where
    they did; Jeffreys' half count where there are none.
    """
    counts, exposure = model.stall_counts, model.exposure_s
    n, whole = float(counts.sum()) + 0.5, float(exposure.sum())
    if counts.size >= 3 and counts.sum() > 0:
        extra = float(counts.var(ddof=1)) - float(counts.mean())
        if extra > 0.0:  # runs differ in rate: the prior is as wide as they are
            n_one = float(counts.mean()) ** 2 / extra
            whole, n = min(whole, n_one / max(model.stall_rate, 1e-300)), min(n, n_one)
    lengths = np.concatenate([model.stall_s, past.stall_s])
    if not lengths.size:
        return np.zeros(n_runs)
    rate = rng[1].gamma(n + past.stall_s.size, 1.0 / (whole + past.exposure_s), n_runs)
    return compound(rate * seconds, lengths, rng[2])
