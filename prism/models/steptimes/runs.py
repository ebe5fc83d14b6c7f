"""Any run model conditioned on the completed steps of a run.

`condition` gives back the run model of the rest: a draw of level and drift from their posterior
stands where a cluster was. Left out: a regime's present state, and failures so far; models of step
times, whose distributions are in closed form (`prism.models.steptimes.predict`,
`prism.models.steptimes.completed`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prism.common.text import format_share
from prism.models.steptimes.completed import FAR, check_one_run
from prism.models.steptimes.likelihood import Observed, fit_spread, state_given
from prism.models.steptimes.predict import generator
from prism.models.steptimes.series import Series, take_apart
from prism.models.steptimes.spread import Spread
from prism.simulation.runs.parts import RunModel, StallProcess
from prism.simulation.runs.rates import stationary
from prism.traces import StepTimes

Array = NDArray[np.float64]
NOMINAL_ERROR = 0.1
"""What a job's mean step may be wrong by before anything is measured [1]: p95 errors of published
predictions reach 5 %, of rooflines more; the completed steps soon outweigh it."""
MOST_LENGTHS = 100_000  # of stalls, measured ones repeated by their weight
MISSING = 10  # steps that may lack without a word
MIN_OWN = 30  # steps from which their own spread is believed rather than the model's


@dataclass(frozen=True)
class UnderWay:
    """A run in progress: the model of its rest, and what is behind it.

    Attributes
    ----------
    model : RunModel
        Of the steps that are left.
    elapsed_s : float
        Sum of the completed steps [s].
    done : int
        Completed steps.
    level, level_std : float
        Level of this run over the model's mean before [1], and how well it is known.
    notes : tuple of str
        What was assumed.
    """

    model: RunModel
    elapsed_s: float
    done: int
    level: float
    level_std: float
    notes: tuple[str, ...] = ()


def condition(
    model: RunModel, times: StepTimes, n_draws: int, seed: int, nominal_error: float = NOMINAL_ERROR
) -> UnderWay:
    """Condition a run model on the completed steps of one run.

    Parameters
    ----------
    model : RunModel
        Before anything was measured.
    times : StepTimes
        Completed steps, from the first on.
    n_draws, seed : int
        Draws of level and drift; each becomes a cluster.
    nominal_error : float
        What the model's mean step may be wrong by before anything is measured [1].

    Raises
    ------
    PrismError
        Steps of several runs.

    Notes
    -----
    The level's prior is as wide as clusters and runs differ, and as a job's nominal mean may err.
    A stall rate has the model's as its prior, worth one stall, and the steps' own as evidence.
    """
    check_one_run(times)
    series = take_apart(times, seed)
    n, k = series.steps.size, series.mean_over
    done = n * k
    before = model.mean.mean(axis=0)  # of each state
    usual = _usual(model)
    work = np.full(n, usual)
    if model.profile is not None:
        work *= model.profile[np.minimum(np.arange(n) * k, model.profile.size - 1)]
    deviation = series.work * (1.0 + series.body[:, 0]) / work - 1.0
    deviation[: series.beginning] = np.nan
    # a level far from the model's scales all spreads with it
    scale = 1.0 + float(np.nanmedian(deviation)) if np.isfinite(deviation).any() else 1.0
    elapsed_s = series.elapsed * usual * scale
    white = _own_white(model, series.body[series.beginning :, 0], elapsed_s[series.beginning :])
    spread = Spread(white, model.drift.cv, model.drift.tau_s)
    between = float(model.mean[:, 0].std() / before[0])
    prior = float(np.sqrt(between**2 + model.run_cv**2 + nominal_error**2))
    relative = deviation / scale - (1.0 - 1.0 / scale)
    state = state_given(relative, elapsed_s, spread, prior).draw(
        generator(seed, 32).standard_normal((n_draws, 2))
    )
    level = scale * (1.0 + state[:, 0])
    drift = model.drift
    if drift.cv > 0.0:
        drift = replace(drift, initial=state[:, 1] / drift.cv)
    rest = replace(
        model, mean=level[:, None] * before, std=level[:, None] * _stds(model, white * np.sqrt(k)),
        run_cv=0.0, model_error=0.0, drift=drift, stalls=_stalls(model, series),
        profile=None if model.profile is None else model.profile[done:],
        residuals=model.residuals * (level.mean() * white * np.sqrt(k) / _own_spread(model)),
    )  # fmt: skip
    elapsed = float(times.seconds.sum()) * k
    notes = (*times.notes, *_granted(model, times, done, scale, prior))
    return UnderWay(rest, elapsed, done, float(level.mean()), float(level.std()), notes)


def _usual(model: RunModel) -> float:
    """Typical step so far [s]: it holds its share of congestion, so the mean is over all states."""
    states = model.mean.mean(axis=0)
    if model.regime is None:
        return float(states[0])
    return 1.0 / float(stationary(model.regime) @ (1.0 / states))


def _stds(model: RunModel, white: float) -> Array:
    """Own noise of a step in each state [state; s], in no congestion `white` of the step."""
    own = (model.std if model.std.shape[1] > 1 else model.mean).mean(axis=0)
    first = white * float(model.mean[:, 0].mean())
    return np.asarray(first / max(float(own[0]), 1e-300) * own)


def _granted(
    model: RunModel, times: StepTimes, done: int, scale: float, prior: float
) -> Iterator[str]:
    """Say what step times do not tell of the past, and where they contradict the model."""
    last = int(times.step.max())
    if last + 1 > done + max(MISSING, 0.1 * done):
        yield (
            f"{times.source}: {done} step times up to step {last}; {done} steps count as done, and "
            "their sum as the elapsed time"
        )
    if any(x is not None for x in (model.checkpoints, model.evaluations, model.interruptions)):
        yield (
            f"{times.source}: past checkpoints, evaluations and failures are not in step times; "
            "the elapsed time is without them"
        )
    if abs(scale - 1.0) > FAR * prior:
        yield (
            f"{times.source}: steps take {scale:.3g} times what the job says, and "
            f"{format_share(prior)} were expected: the level is taken from the steps; are they of "
            "this job?"
        )


def _own_spread(model: RunModel) -> float:
    """Spread of a step around its cluster's mean, in no state of congestion [1]."""
    own = float(np.sqrt((model.std[:, 0] ** 2).mean()) / model.mean[:, 0].mean())
    return max(own, 1e-300)


def _own_white(model: RunModel, body: Array, elapsed_s: Array) -> float:
    """Own noise of a value [1]: the model's, or that of the steps where there are enough."""
    if np.isfinite(body).sum() < MIN_OWN:
        return _own_spread(model)
    return fit_spread(Observed.of(body[:, None], elapsed_s)).white


def _stalls(model: RunModel, series: Series) -> StallProcess | None:
    """Rate and lengths, after the beginning: the model's count as one stall, with its time."""
    late = series.stall_position >= series.beginning
    lengths = series.stall_s[late] * series.mean_over
    known = np.isfinite(series.body[series.beginning :, 0])
    exposure = float(series.work[series.beginning :][known].sum()) * series.mean_over
    if model.stalls is None:
        return StallProcess(lengths.size / exposure, lengths) if lengths.size else None
    rate = (lengths.size + 1.0) / (exposure + 1.0 / model.stalls.rate_per_s)
    own = model.stalls.lengths
    if lengths.size and own.size * lengths.size > MOST_LENGTHS:
        few = max(1, MOST_LENGTHS // lengths.size)
        own = np.quantile(own, (np.arange(few) + 0.5) / few)
        own = own * float(model.stalls.lengths.mean() / max(own.mean(), 1e-300))
    # a sample has no weights: each measured length as often as the model has lengths
    return StallProcess(rate, np.concatenate([own, np.repeat(lengths, own.size)]))
