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
from scipy.linalg import cho_factor, cho_solve
from scipy.signal import lfilter

from prism.common.errors import PrismError, named
from prism.common.text import format_share
from prism.models.steptimes.model import StepModel
from prism.models.steptimes.predict import Drawn, Work, compound, draw_beginning, generator, work_of
from prism.models.steptimes.spread import Spread, drift_mean_variance, model_variances
from prism.traces import StepTimes

Array = NDArray[np.float64]
MAX_BLOCKS = 256  # of the completed steps; the drift hardly moves within one
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
    stall_s: Array
    exposure_s: float
    scale: float = 1.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """Joint normal distribution of a run's level and its drift at the last step.

    Attributes
    ----------
    mean : float64 [2]
        Relative level and drift.
    root : float64 [2, 2]
        Lower triangular root of their covariance.
    """

    mean: Array
    root: Array


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
    past = _past(seconds, weights, model)
    level = float(np.nanmean(past.deviation)) if np.isfinite(past.deviation).any() else 0.0
    expected = _expected_level(model, int(np.isfinite(past.deviation).sum()))
    if abs(level) > FAR * expected:
        note = (
            f"{times.source}: steps take {1.0 + level:.4g} times what the model says, and "
            f"{format_share(expected, 2)} more or less were expected: the level is taken from "
            "the steps; are they of the job that was fitted?"
        )
        past = _past(seconds, weights * (1.0 + level), model)
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
        float(model_variances(s, n_steps, model.step_s)) + _run_spread(model, s) ** 2
        for s in model.spreads()
    ]
    reading = model.grain_s / model.step_s
    return float(np.sqrt(np.mean(own) + model.step_error**2 + reading**2 / 12.0 + _LEAST**2))


def _run_spread(model: StepModel, spread: Spread) -> float:
    """Return what runs differ by [1]; wide where one run was fitted."""
    return spread.run if model.run_known else max(spread.run, UNKNOWN_LEVEL)


def _past(seconds: Array, weights: Array, model: StepModel) -> Past:
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
    return Past(seconds, deviation, np.array(stalls), exposure)


def level_given(
    deviation: Array, spread: Spread, rate: float, level_sd: float, mean_over: int = 1
) -> Level:
    """Distribution of level and last drift, given the deviations so far.

    Parameters
    ----------
    deviation : float64 [position]
        Relative deviations, not-a-number where there is none.

    Notes
    -----
    With r = exp(-rate), the means of two different blocks of b values have the drift covariance
    r^((j - i - 1) b + 1) ((1 - r^b)/((1 - r) b))^2, the last drift and a block's mean
    r^(distance) (1 - r^b)/((1 - r) b).
    """
    n = deviation.size
    b = max(1, -(-n // MAX_BLOCKS))
    edges = np.arange(n, 0, -b)[::-1]  # whole blocks count back from the last step
    starts = np.maximum(edges - b, 0)
    known = np.isfinite(deviation)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, deviation, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    count = counts[edges] - counts[starts]
    full = count * 2 >= np.minimum(b, edges - starts)
    full &= count > 0
    if not full.any():
        return Level(np.zeros(2), np.diag([level_sd, spread.drift]))
    edges, count = edges[full], count[full]
    means = (sums[edges] - sums[starts[full]]) / count
    # each block's clock errs on its own here, though the next takes it back: a little wide
    own = spread.white**2 / mean_over / count + (spread.clock / mean_over / count) ** 2
    covariance = np.full((count.size, count.size), level_sd**2) + np.diag(own)
    with_last = np.zeros(count.size)
    if spread.drift > 0.0:
        r = np.exp(-rate)
        mass = -np.expm1(-rate * b) / (-np.expm1(-rate)) / b
        apart = np.abs(edges[:, None] - edges[None, :])
        shared = np.exp(-rate * np.maximum(apart - b + 1, 0)) * mass**2
        np.fill_diagonal(shared, drift_mean_variance(b, rate))
        covariance += spread.drift**2 * shared
        with_last = spread.drift**2 * r ** (n - edges) * mass
    covariance[np.diag_indices_from(covariance)] += 1e-18
    cross = np.column_stack([np.full(count.size, level_sd**2), with_last])
    factor = cho_factor(covariance, lower=True)
    gain = cho_solve(factor, cross).T
    left = np.diag([level_sd**2, spread.drift**2]) - gain @ cross
    values, vectors = np.linalg.eigh(0.5 * (left + left.T))
    return Level(gain @ means, vectors * np.sqrt(np.maximum(values, 0.0)))


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
        law = level_given(past.deviation, spread, rate * k, np.hypot(base, model.step_error), k)
        state = law.mean + z[mine, :2] @ law.root.T
        carried, own = _drift_ahead(rest, rate, first - done)
        level[mine] = state[:, 0] * rest.total
        drift[mine] = state[:, 1] * carried + spread.drift * own * z[mine, 2]
        ends = spread.clock * rest.total / max(rest.n, 1)
        noise[mine] = np.sqrt(spread.white**2 * rest.squares + ends**2) * z[mine, 3]
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
        whole = (mean * rest.n) ** 2 * float(drift_mean_variance(rest.n, rate))
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
