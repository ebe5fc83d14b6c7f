"""A run in progress: its completed steps update its level, drift and stall rate.

`update_on_progress` gives back the run model of the rest: a draw of level and drift from their
exact posterior stands where a cluster was. For any run model; `prism.models.steptimes.progress` is
it for a model of step times.
Left out: a regime's present state; evaluations, checkpoints and failures so far.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prism.common.arrays import Array, Flags, Index
from prism.common.errors import PrismError
from prism.common.text import format_count, format_share
from prism.models.changes.find import find_changes
from prism.models.steptimes.blocks import Blocks, as_blocks, in_blocks, in_rows
from prism.models.steptimes.departure import FALSE_ALARMS, MOST, Departure, find_departure
from prism.models.steptimes.likelihood import state_given
from prism.models.steptimes.predict import generator
from prism.models.steptimes.series import OUTLIER, Series, clock_grain, decompose, elapsed_steps
from prism.models.steptimes.spread import Spread
from prism.simulation.runs.parts import RunModel, StallProcess
from prism.simulation.runs.rates import step_shares
from prism.traces import StepTimes
from prism.traces.growing import count_done

NOMINAL_ERROR = 0.1
"""What a job's mean step may be wrong by before anything is measured [1]: p95 errors of published
predictions reach 5 %, of rooflines more; the completed steps soon outweigh it."""
UNKNOWN_LEVEL = 0.05
"""What runs differ by where one was fitted, and phases of a run: wide, so the steps decide."""
FAR = 4.0  # standard deviations of what was expected beyond which a level is said to be unlikely
MOST_LENGTHS = 100_000  # of stalls, measured ones repeated by their weight
MISSING = 10  # steps that may lack without a word
LAST = 20  # values whose mean is the present step time
MIN_OWN = 30  # steps from which their own spread is believed rather than the model's
_LEAST = 1e-6  # of a level: what differs by less is rounding


@dataclass(frozen=True)
class ProgressPosterior:
    """A run in progress: the model of its rest, and what is behind it."""

    model: RunModel  # of the steps that are left
    elapsed_s: float  # sum of the completed steps [s]
    done: int  # completed steps
    # level of this run over the model's mean before [1], and how well it is known
    level: float
    level_std: float
    expected: float  # standard deviation of that level before the steps were seen [1]
    far: bool  # whether it is further off than the model allows, and is taken from the steps
    departure: Departure | None  # the last change of level; None of too few steps
    step: Index  # [value] numbers of the completed steps
    last_s: float  # mean of the last ones [s]
    notes: tuple[str, ...] = ()  # what was assumed

    def figures(self) -> dict[str, Any]:
        """Say what is done of the run, and whether its last steps deviate; times in seconds."""
        completed = {
            "steps": self.done, "seconds": self.elapsed_s, "level": self.level,
            "level_std": self.level_std, "level_expected_std": self.expected,
            "last_step_time": self.last_s,
        }  # fmt: skip
        return {"completed": completed, "departure": self._departure()}

    def _departure(self) -> dict[str, Any]:
        """Say whether steps deviate: from those before, or all of them from the model."""
        found = self.departure
        changed = found is not None and found.departed
        out: dict[str, Any] = {
            "departed": changed or self.far, "kind": "change" if changed else "level" * self.far
            or None, "false_alarm_rate": FALSE_ALARMS,
            "p_value": None if found is None else found.p_value,
        }  # fmt: skip
        if found is None or not changed:
            return out | dict.fromkeys(("change", "step"))
        return out | {
            "change": found.change, "change_low": found.low, "change_high": found.high,
            "step": self.step[found.begin], "step_first": self.step[found.earliest],
            "step_last": self.step[found.latest],
        }  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """What a model of step times knows beside its run model."""

    spreads: Sequence[Spread]  # that the fit leaves open
    place: Index  # [value] position of each measured value in the run
    odd: Flags  # [value] whether it tells nothing of the run's level
    early: int  # positions whose stalls are the beginning's, and in which no change is looked for


def update_on_progress(
    model: RunModel, times: StepTimes, n_draws: int, seed: int,
    nominal_error: float = NOMINAL_ERROR, fitted: Fitted | None = None,
) -> ProgressPosterior:  # fmt: skip
    """Condition a run model on the completed steps of one run; those that lack took as long.

    Each draw of level and drift becomes a cluster. `nominal_error` is what the model's mean step
    may be wrong by before anything is measured [1]. Without `fitted`, of a model of step times,
    steps follow each other, and their own noise is theirs.

    The level's prior is as wide as clusters and runs differ, and as a job's nominal mean may err.
    Where the steps lie far from it, or change, they are believed, and all spreads go with them: the
    level is that of the steps after a change was found (`departure`). A stall rate has the model's
    as its prior (gamma), worth the stalls it is based on. A long run is looked at in blocks
    (`blocks`).
    """
    check_one_run(times)
    done = _lay_out(model, times, seed, fitted)
    k, scale, ratio = done.mean_over, done.scale, done.ratio
    spreads = [_own_noise(model, done, k)] if fitted is None else fitted.spreads
    between = float(model.mean[:, 0].std() / model.mean[:, 0].mean())
    prior = float(np.sqrt(between**2 + model.run_cv**2 + nominal_error**2 + _LEAST**2))
    noise = spreads[0].white ** 2 / (max(1, np.isfinite(ratio).sum()) * k)
    expected = float(np.sqrt(prior**2 + max(s.drift for s in spreads) ** 2 + noise))
    changed = done.departure is not None and done.departure.departed
    far = not changed and abs(scale - 1.0) > FAR * expected
    own = far or changed
    centre, prior = (scale, max(prior, UNKNOWN_LEVEL)) if own else (1.0, prior / scale)
    z, state = generator(seed, 32).standard_normal((n_draws, 2)), np.empty((n_draws, 2))
    white, cv, tau_s = np.empty((3, n_draws))
    for i, s in enumerate(spreads):
        mine = slice(i, None, len(spreads))
        value = replace(s, white=s.white / np.sqrt(k))
        given = state_given((ratio - centre) / scale, done.elapsed_s, value, prior)
        state[mine] = given.draw(z[mine])
        white[mine], cv[mine], tau_s[mine] = s.white, s.drift, s.tau_s
    levels = centre + scale * state[:, 0]
    initial = np.divide(state[:, 1], cv, out=np.zeros(n_draws), where=cv > 0.0)
    n = done.done
    rest = replace(
        model, mean=levels[:, None] * model.mean.mean(axis=0),
        std=(levels * white)[:, None] * _shape_of_stds(model), run_cv=0.0, model_error=0.0,
        drift=replace(model.drift, cv=cv, tau_s=tau_s, initial=initial),
        stalls=_stalls(model.stalls, done, k, n_draws, generator(seed, 33)),
        profile=None if model.profile is None else model.profile[n:],
        residuals=model.residuals * float(levels.mean() * white.mean() / _own_spread(model)),
    )  # fmt: skip
    lack = n - done.n_values * times.mean_over if fitted is None else 0
    notes = [*times.notes, *_granted(model, times, lack)]
    if far:
        notes.append(
            f"{times.source}: steps take {scale:.3g} times what the model says, and "
            f"{format_share(expected, 2)} more or less were expected: the level is taken from the "
            "steps; are they of this job?"
        )
    if changed:
        notes.append(f"{times.source}: steps to come take as long as those since the change")
    elapsed_s = done.seconds * times.mean_over + lack * done.mean_s
    return ProgressPosterior(
        rest, elapsed_s, n, float(levels.mean()), float(levels.std()), expected, far,
        done.departure, done.step, done.last_s, tuple(notes),
    )  # fmt: skip


def without_changes(times: StepTimes, odd: Flags, each: int = 1) -> StepTimes:
    """Bring steps to their first level; `odd` ones tell nothing of it [value].

    `each` as in `find_departure`.
    """
    grain = clock_grain(times.seconds[:, None])
    found = find_departure(np.where(odd, np.nan, times.seconds), grain, each)
    return times if found is None else replace(times, seconds=times.seconds / found.level)


@dataclass(frozen=True)
class _Done:
    """Completed steps beside what the model says of them."""

    # those that are the values of all else; of one value each in a run that is no long one
    blocks: Blocks
    # steps that each is the mean of; values before blocks were made; steps to the last one
    mean_over: int
    n_values: int
    done: int
    # [value] numbers; steps of the run before each value
    step: Index
    first: Index
    series: Series  # of the steps over the work by step and the level between changes
    ratio: Array  # [value] over the usual step; not-a-number where the present level does not show
    # [value] relative work; time since the first [s]
    work: Array
    elapsed_s: Array
    begin: int  # first value after the beginning
    departure: Departure | None
    # mean ratio; sum of the values, mean of the last and of all [s]
    scale: float
    seconds: float
    last_s: float
    mean_s: float


def _lay_out(model: RunModel, times: StepTimes, seed: int, fitted: Fitted | None) -> _Done:
    """Lay completed steps beside the model's work, and find where their level changes."""
    once = np.unique(times.step, return_index=True)[1]
    seconds, step, usual = times.seconds[once], times.step[once], _usual(model)
    place = count_done(times)[0] + elapsed_steps(step, step, times.mean_over).astype(np.int64)
    first = place if fitted is None else fitted.place[once] * times.mean_over
    work, done = np.ones(once.size), int(first[-1]) + times.mean_over
    if model.profile is not None:
        work = model.profile[np.minimum(first, model.profile.size - 1)]
    blocks = in_blocks(seconds / work)
    plain, at, k = blocks.means, blocks.begins, times.mean_over * blocks.size
    grain = clock_grain(seconds[-MOST:, None]) / np.sqrt(blocks.size)
    late = times
    if blocks.size > 1:
        work = blocks.mean(work)
        late = as_blocks(times, blocks)
    if fitted is None:
        odd = find_changes(late).warm
        odd = odd[once] if blocks.size == 1 else odd
    else:
        odd = fitted.odd[once] | (fitted.place[once] < fitted.early)
        odd = np.asarray(in_rows(odd, blocks.size).any(axis=1))
    departure = find_departure(np.where(odd, np.nan, plain), grain, blocks.size)
    changes, current = np.ones(plain.size), np.ones(plain.size, np.bool_)
    if departure is not None:
        changes, current = departure.level, departure.current
    least = OUTLIER * _own_spread(model) if once.size < MIN_OWN else 0.0
    number = step if blocks.size == 1 else late.step
    level = replace(late, seconds=plain / changes, step=number, run=times.run[once][at])
    series = decompose(level, seed, least)
    ratio = changes * series.work * (1.0 + series.body[:, 0]) / usual
    if fitted is None:
        begin = series.beginning
        ratio[:begin], ratio[odd] = np.nan, np.nan
    else:
        begin = -(-int(np.searchsorted(fitted.place[once], fitted.early)) // blocks.size)
        ratio[in_rows(fitted.odd[once], blocks.size).any(axis=1)] = np.nan
    ratio[~current] = np.nan
    scale = float(np.nanmean(ratio)) if np.isfinite(ratio).any() else 1.0
    elapsed_s = np.asarray(first[at] * (usual * scale), np.float64)
    return _Done(
        blocks, k, once.size, done, step[at], first[at], series, ratio, work * changes, elapsed_s,
        begin, departure, scale, float(seconds.sum()), float(seconds[-LAST:].mean()),
        float(seconds.mean()),
    )  # fmt: skip


def check_one_run(times: StepTimes) -> None:
    """Refuse steps of several runs; raises PrismError."""
    if (times.run != times.run[0]).any():
        names = np.unique(times.run)
        raise PrismError(
            f"{times.source}: steps of {names.size} runs ({', '.join(map(str, names[:4]))}, ...); "
            f"expected those of one run in progress: --where run={names[0]}"
        )


def _usual(model: RunModel) -> float:
    """Typical step so far [s]: it holds its share of congestion, so the mean is over all states."""
    return float(step_shares(model) @ model.mean.mean(axis=0))


def _shape_of_stds(model: RunModel) -> Array:
    """Own noise of a step in each state for one of 1 in no congestion [state; s]."""
    own = (model.std if model.std.shape[1] > 1 else model.mean).mean(axis=0)
    return np.asarray(float(model.mean[:, 0].mean()) / max(float(own[0]), 1e-300) * own)


def _granted(model: RunModel, times: StepTimes, lack: int) -> Iterator[str]:
    """Say what step times do not tell of the past."""
    if lack > max(MISSING, 0.1 * times.step.size * times.mean_over):
        yield (
            f"{times.source}: {format_count(times.step.size, 'step time')} up to step "
            f"{int(times.step.max())}; "
            f"{format_count(lack, 'missing step')} counted as done, and as long as the others"
        )
    if any(x is not None for x in (model.checkpoints, model.evaluations, model.interruptions)):
        yield (
            f"{times.source}: past checkpoints, evaluations and failures are not in step times; "
            "the elapsed time is without them"
        )


def _own_spread(model: RunModel) -> float:
    """Spread of a step around its cluster's mean, in no state of congestion [1]."""
    own = float(np.sqrt((model.std[:, 0] ** 2).mean()) / model.mean[:, 0].mean())
    return max(own, 1e-300)


def _own_noise(model: RunModel, done: _Done, k: int) -> Spread:
    """Spread of a step: the model's, its own noise from the steps where there are enough.

    Half the mean square of successive differences (von Neumann), less what the drift adds to it.
    """
    drift = Spread(0.0, float(np.mean(model.drift.cv)), float(np.mean(model.drift.tau_s)))
    change = np.diff(done.series.body[done.begin :, 0])
    known = np.isfinite(change)
    if known.sum() < MIN_OWN:
        return replace(drift, white=_own_spread(model))
    square = 0.5 * float((change[known] ** 2).mean())
    gap_s = float(np.diff(done.elapsed_s).mean())
    gone = -np.expm1(-gap_s / drift.tau_s) if drift.tau_s > 0.0 else 1.0
    return replace(drift, white=float(np.sqrt(k * max(square - drift.drift**2 * gone, 0.0))))


def _stalls(
    before: StallProcess | None, done: _Done, k: int, n_draws: int, rng: np.random.Generator
) -> StallProcess | None:
    """Rate, drawn for each cluster, and lengths: the model's and those after the beginning."""
    series, begin, blocks = done.series, done.begin, done.blocks
    late = series.stall_position >= begin
    lengths = series.stall_s[late] * done.work[series.stall_position[late]] * k
    if blocks.size > 1:
        at = np.minimum(blocks.stall_at // blocks.size, done.work.size - 1)
        apart = (blocks.stall * done.work[at] * (k // blocks.size))[at >= begin]
        lengths = np.concatenate([lengths, apart])
    known = np.isfinite(series.body[begin:, 0])
    exposure = float((series.work * done.work)[begin:][known].sum()) * k
    if before is None:
        if not lengths.size:
            return None
        return StallProcess(rng.gamma(lengths.size, 1.0 / exposure, n_draws), lengths)
    whole = exposure + before.seen / float(np.mean(before.rate_per_s))
    rate = rng.gamma(lengths.size + before.seen, 1.0 / whole, n_draws)
    own = before.lengths
    if lengths.size and own.size * lengths.size > MOST_LENGTHS:
        few = max(1, MOST_LENGTHS // lengths.size)
        own = np.quantile(own, (np.arange(few) + 0.5) / few)
        own = own * float(before.lengths.mean() / max(own.mean(), 1e-300))
    # a sample has no weights: each measured length as often as the model has lengths for one stall
    often = max(1, round(own.size / before.seen))
    return StallProcess(rate, np.concatenate([own, np.repeat(lengths, often)]))
