"""What a model of step times predicts: single steps, and totals of whole runs.

A step is its typical time times (1 + run effect + drift + own noise), plus stalls. The steps of
runs are drawn by `prism.simulation.runs.model`; the beginning and the offset are added here.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prism.common.arrays import Array, Index
from prism.models.steptimes.model import StepModel
from prism.models.steptimes.spread import Spread, mean_variance
from prism.simulation.execution.context import RunContext
from prism.simulation.runs.build import with_failures
from prism.simulation.runs.drift import ar1
from prism.simulation.runs.model import NORMAL_STEPS, simulate_runs
from prism.simulation.runs.parts import Drift, RunModel, StallProcess
from prism.traces.table import SHORTEST_S

if TYPE_CHECKING:
    from prism.models.steptimes.runs import ProgressPosterior

MAX_WORK = 1_000_000  # steps whose work is held one by one
_AHEAD = 0.2  # last share of the steps seen whose mean stands for all that come after

_STREAM = 40  # keeps these draws apart from others under the same seed
_TERMS = ("ideal_steps", "slow_steps", "step_noise", "run_effect", "drift", "stalls")
_STOPS = ("lost_work", "restarts")


@dataclass(frozen=True)
class Drawn:
    """Runs that were drawn."""

    total: Array  # [run] seconds, the offset between steps and measured totals included
    terms: dict[str, Array]  # [run] seconds by term; they add up to the total
    model: RunModel  # what was drawn
    failures: Index  # [run]


def work_of(model: StepModel, first: int, n_steps: int) -> tuple[float, Array | None]:
    """Typical seconds of steps `first` to `n_steps`: their mean, and each over the model's step.

    Beyond those seen each is the mean of the last; one by one as far as they differ and are few.
    """
    if not model.has_profile:
        return model.step_s, None
    seen = np.repeat(model.work, model.mean_over)[first:n_steps]
    rest = max(0, n_steps - first - seen.size)
    if n_steps > MAX_WORK:
        return (float(seen.sum()) + rest * after(model)) / max(n_steps - first, 1), None
    return model.step_s, np.concatenate([seen, np.full(rest, after(model))]) / model.step_s


def after(model: StepModel) -> float:
    """Mean time of steps after those that were seen [s]."""
    last = max(1, int(_AHEAD * model.work.size))
    return float(model.work[-last:].mean()) if model.has_profile else model.step_s


def generator(seed: int, stream: int) -> np.random.Generator:
    """Random numbers of one purpose under a seed."""
    return np.random.Generator(np.random.Philox(key=[seed, _STREAM + stream]))


def no_dependence(model: StepModel) -> StepModel:
    """Model of the same steps without memory: drift and run effect drawn anew in every step."""
    s = model.spread
    white = float(np.sqrt(s.white**2 + s.drift**2 + s.run**2))
    return replace(model, spread=Spread(white=white))


def total_cv(model: StepModel, spread: Spread, n_steps: int) -> float:
    """Spread of the total of n steps, stalls left out [1]."""
    return float(np.sqrt(mean_variance(spread, n_steps, model.step_s) + spread.run**2))


def run_model(model: StepModel, n_steps: int, first: int = 0) -> RunModel:
    """Give the parts of a run from step `first` on; the beginning and the offset are none."""
    mean, profile = work_of(model, first, n_steps)
    s, n = model.spread, n_steps - first
    early = min(max(0, model.beginning_s.shape[1] * model.mean_over - first), n)
    stalls = _stalls(model, 1.0 - early / max(n, 1))
    return RunModel(
        np.array([[mean]]), np.array([[s.white * mean]]), mean, profile, s.run,
        drift=Drift(s.drift, s.tau_s), stalls=stalls,
        residuals=s.white * mean * model.residuals if n <= NORMAL_STEPS else np.empty(0),
    )  # fmt: skip


def _stalls(model: StepModel, share: float) -> StallProcess | None:
    """Stalls as a process over all steps, of which a share has them.

    The rate is worth the stalls that were counted; fewer, by moments, where runs differ in rate.
    Where none was counted: Jeffreys' half of one in the time that was seen, of no length.
    """
    counts, exposure = model.stall_counts, float(model.exposure_s.sum())
    if not counts.sum():
        return StallProcess(0.5 / exposure, np.zeros(1), 0.5) if exposure > 0.0 else None
    seen = float(counts.sum())
    if counts.size > 2:
        extra = float(counts.var(ddof=1) - counts.mean())
        seen = min(seen, float(counts.mean()) ** 2 / extra) if extra > 0.0 else seen
    return StallProcess(model.stall_rate * share, model.stall_s, seen)


def draw_runs(
    model: StepModel, n_steps: int, n_runs: int, seed: int, past: "ProgressPosterior | None" = None,
    gpus: int | None = None,
) -> Drawn:  # fmt: skip
    """Draw totals of whole runs of n_steps, less what totals leave out at the start.

    A run in progress has a `past`; `gpus`, where known, are those whose failures stop it.
    """
    done = 0 if past is None else past.done
    first = min(max(done, model.offset_skips * model.mean_over), n_steps)
    parts = run_model(model, n_steps, first) if past is None else past.model
    parts = parts if gpus is None else with_failures(parts, gpus)
    runs = simulate_runs(parts, n_steps - first, n_runs, RunContext(seed))
    wrong = ("model_error",) if parts.model_error > 0.0 else ()
    names = (*_TERMS, *wrong, *(() if gpus is None else _STOPS))
    terms = {name: runs.terms[name] for name in names}
    if past is not None:
        terms = {"completed_steps": np.full(n_runs, past.elapsed_s)} | terms
    k = model.mean_over
    early = model.beginning_s[:, first // k : n_steps // k].sum(axis=1) * k
    terms["beginning"] = generator(seed, 4).choice(early, n_runs)
    if model.pause_s.size:
        ahead = float(model.paused_s(np.array(n_steps)) - model.paused_s(np.array(first)))
        terms["pauses"] = np.full(n_runs, ahead)
    noise = generator(seed, 6).standard_normal(n_runs)
    terms["offset"] = model.offset_s + model.offset_std_s * noise
    return Drawn(np.asarray(sum(terms.values())), terms, parts, runs.failures)


def draw_steps(
    model: StepModel, positions: Index, n_runs: int, seed: int,
    elapsed: Array | None = None,
) -> Array:  # fmt: skip
    """Draw steps of runs, [run, position] s, at ascending places in a run, counted from 0.

    `elapsed` [position] are steps since the start, where the places leave some out.
    """
    rng = [generator(seed, 10 + k) for k in range(6)]
    shape = (n_runs, positions.size)
    s, k = model.spread, model.mean_over
    own = s.white / np.sqrt(k)
    grain = model.grain_s / model.step_s  # reading the clock is part of the measured noise
    own = np.sqrt(max(own**2 - grain**2 / 12.0, 0.0))
    deviation = own * rng[0].choice(model.residuals, shape)
    deviation += s.run * rng[1].standard_normal((n_runs, 1))
    if s.drift > 0.0:
        time = np.asarray(positions, np.float64) * k if elapsed is None else elapsed
        at_memory = time * (model.step_s / s.tau_s)
        deviation += s.drift * ar1(at_memory, n_runs, rng[2]).T
    at = np.minimum(positions, model.work.size - 1)
    base = np.where(positions < model.work.size, model.work[at], after(model))
    steps = np.maximum(base * (1.0 + deviation), SHORTEST_S)
    n_early = model.beginning_s.shape[1]
    late = positions >= n_early
    if model.stall_rate > 0.0:
        # a value that is the mean of k steps shows a k-th of a stall
        hits = rng[3].random(shape) < -np.expm1(-model.stall_rate * base * k)
        hits &= late
        steps[hits] += rng[4].choice(model.stall_s, int(hits.sum())) / k
    if n_early and not late.all():
        rows = rng[5].integers(0, model.beginning_s.shape[0], n_runs)
        steps[:, ~late] += model.beginning_s[rows][:, positions[~late]]
    ends = k * (positions.astype(np.float64) + 1.0)
    steps += (model.paused_s(ends) - model.paused_s(ends - k)) / k
    if model.grain_s > 0.0:
        # the same numbers that were read, so that equal times are equal
        steps = np.round(np.rint(steps / model.grain_s) * model.grain_s, 9)
    return np.asarray(np.maximum(steps, 0.0))
