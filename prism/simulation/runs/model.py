"""Draw whole runs from a model of their parts: total, terms that add up to it, and progress.

Short undisturbed runs are walked step by step, so that a few rare steps show; all others go from
event to event (`prism.simulation.runs.events`). Congestion that changes too often to be followed
counts by its mean and its long-run spread. Left out: where the parts come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from prism.common.errors import PrismError, named
from prism.simulation.execution.task import Arrays, Shared, Task
from prism.simulation.execution.tasks import run_tasks
from prism.simulation.runs.events import CHUNK, Chunk, EventLoop, term_names, wrong_by
from prism.simulation.runs.parts import (
    DAY_S,
    Array,
    Cause,
    Checkpoints,
    CongestionStates,
    Drift,
    Episodes,
    Evaluations,
    Interruptions,
    RunModel,
    Runs,
    StallProcess,
)
from prism.simulation.runs.rates import expected_events, stationary

__all__ = [
    "Cause", "Checkpoints", "Drift", "Episodes", "Evaluations", "Interruptions", "CongestionStates",
    "RunModel", "Runs", "StallProcess", "is_undisturbed", "simulate_runs",
]  # fmt: skip

Progress = Callable[[int, int], None]
STEP_BY_STEP = 2000  # steps up to which a run is walked; beyond, its sum is as good as normal
MAX_EVENTS = 200_000.0  # of a run: minutes of work
MOST_TRIES = 50.0  # of one checkpoint interval, on average, in a run that still gets on
MARKED = 4 * CHUNK  # runs whose progress is kept: enough for percentiles
MAX_STALLS = 10**8  # in a thousand short runs: gigabytes
WALK_S, EVENT_S = 1e-4, 3e-3  # of a chunk of runs: a step, an event; about
SWITCHES = 5_000.0  # changes of regime in a run beyond which it counts by its long-run spread


def simulate_runs(
    model: RunModel,
    n_steps: int,
    n_runs: int,
    seed: int,
    *,
    start_s: float = 0.0,
    progress: Progress | None = None,
    marks: Sequence[int] = (),
) -> Runs:
    """Draw whole runs.

    Parameters
    ----------
    n_steps, n_runs, seed : int
        The first runs do not change with their number.
    start_s : float
        Time of day at which runs start [s].
    progress : callable, optional
        Called with (runs done, runs in all).
    marks : sequence of int
        Step counts, ascending, whose times are wanted; of the first `MARKED` runs alone.

    Returns
    -------
    Runs
        Run i starts on cluster i modulo their number.

    Raises
    ------
    PrismError
        The run would never end, or has more events than can be followed.
    """
    if model.profile is not None and model.profile.size < n_steps:
        raise PrismError(
            f"steps = {n_steps}, but the model knows the work of {model.profile.size} steps; "
            "lower the steps, or fit a longer run"
        )
    _check_end(model, n_steps)
    model = _averaged(model, n_steps)
    chunks = _draw_chunks(model, n_steps, n_runs, seed, start_s, marks, progress)
    terms = np.concatenate([c.terms for c in chunks], axis=1)[:, :n_runs]
    return Runs(
        total=np.concatenate([c.total for c in chunks])[:n_runs],
        cluster=np.concatenate([c.cluster for c in chunks])[:n_runs],
        terms=dict(zip(term_names(model), terms, strict=True)),
        marks=np.concatenate([c.marks for c in chunks[: MARKED // CHUNK]])[:n_runs],
        failures=np.concatenate([c.failures for c in chunks])[:n_runs],
    )


def _draw_chunks(
    model: RunModel, n_steps: int, n_runs: int, seed: int, start_s: float, marks: Sequence[int],
    progress: Progress | None,
) -> list[Chunk]:  # fmt: skip
    """Draw all runs, a chunk a task."""
    shared, firsts = Shared(model), range(0, n_runs, CHUNK)
    parts: dict[int, Arrays] = {}

    def take(i: int, found: Arrays) -> None:
        parts[i] = found
        tell(len(parts))

    def tell(n_chunks: float, share: float = 0.0) -> None:
        if progress is not None:
            progress(min(n_runs, int((n_chunks + share) * CHUNK)), n_runs)

    seconds, tasks = _seconds(model, n_steps), []
    for i, first in enumerate(firsts):
        args = (n_steps, first, seed, start_s, tuple(marks) if first < MARKED else ())
        tasks.append(Task(draw_chunk, shared, args, seconds, partial(tell, i)))
    run_tasks(tasks, take)
    return [Chunk(*parts[i]) for i in range(len(firsts))]


def draw_chunk(
    model: RunModel, n_steps: int, first: int, seed: int, start_s: float, marks: Sequence[int],
    tell: Callable[[float], None] | None = None,
) -> Arrays:  # fmt: skip
    """Draw `CHUNK` runs; gives the fields of `prism.simulation.runs.events.Chunk`."""
    if n_steps <= STEP_BY_STEP and is_undisturbed(model):
        chunk = _Walk(model, n_steps, first, seed, start_s, marks).run()
    else:
        chunk = EventLoop(model, n_steps, first, seed, start_s, marks).run(tell)
    return chunk.total, chunk.cluster, chunk.terms, chunk.marks, chunk.failures


def _seconds(model: RunModel, n_steps: int) -> float:
    """About how long a chunk of runs takes [s]."""
    if n_steps <= STEP_BY_STEP and is_undisturbed(model):
        return WALK_S * n_steps
    return EVENT_S * (1.0 + expected_events(model, n_steps))


def is_undisturbed(model: RunModel) -> bool:
    """Tell whether a run is its steps and stalls alone."""
    parts = (model.regime, model.interruptions, model.checkpoints, model.evaluations)
    return not model.episodes and all(part is None for part in parts)


def _check_end(model: RunModel, n_steps: int) -> None:
    """Refuse runs that never end, or whose events are too many to follow.

    Notes
    -----
    An interval of c seconds under failures at rate r is tried e^(r c) times.
    """
    mean = float(model.mean[:, 0].mean())
    fail, c = model.interruptions, model.checkpoints
    if fail is not None and fail.rate_per_s > 0.0:
        steps, write = (n_steps, 0.0) if c is None else (c.interval_steps, c.write_s)
        interval = min(steps, n_steps) * mean + write
        if fail.rate_per_s * interval > np.log(MOST_TRIES):
            what = "there is no checkpoint" if c is None else f"a checkpoint takes {interval:.3g} s"
            raise PrismError(
                f"run.failures: one every {1.0 / fail.rate_per_s:.3g} s, but {what}, so that the "
                "run would hardly get on; set a shorter run.checkpoint.interval"
            )
        if fail.rate_per_s * max(k.detection_s + k.restart_s for k in fail.kinds) > np.log(
            MOST_TRIES
        ):
            raise PrismError(
                f"run.failures: one every {1.0 / fail.rate_per_s:.3g} s, less than a restart takes"
                "; lower per_1000_node_days, detection or restart"
            )
    events = expected_events(replace(model, regime=None), n_steps)
    if events > MAX_EVENTS:
        raise PrismError(
            f"a run of {n_steps} steps has about {events:.2g} failures and fail-slow episodes, at "
            f"most {MAX_EVENTS:.0e} can be followed; lower their rates, or {named('steps')}"
        )


def _averaged(model: RunModel, n_steps: int) -> RunModel:
    """Return the model with a regime that changes too often to be followed as one lasting state.

    Notes
    -----
    In state s a step takes mu (1 + a_s); over t seconds the speed u = 1 / (1 + a) adds up to t E u
    plus a normal part of variance t v, v = 2 sum_s pi_s u_s (D u)_s, with D the deviation matrix
    (1 pi - Q)^-1 - 1 pi. So n steps take n mu / E u, with the variance T v / (E u)^2 on top: as
    much as white noise of variance mu v / (E u)^3 in a step.
    """
    if model.regime is None:
        return model
    only = replace(model, interruptions=None, episodes=())
    if expected_events(only, n_steps) <= SWITCHES:
        return model
    rates = model.regime.rates * (1.0 - np.eye(len(model.regime.rates)))
    share = stationary(rates)
    flow = rates - np.diag(rates.sum(axis=1))
    everywhere = np.tile(share, (share.size, 1))
    deviation = np.linalg.inv(everywhere - flow) - everywhere
    speed = model.mean[:, :1] / model.mean
    average = speed @ share
    spread = 2.0 * np.einsum("ks,s,ks->k", speed, share, speed @ deviation.T)
    mean = np.column_stack([model.mean[:, 0], model.mean[:, 0] / average])
    own = (model.std**2) @ share
    std = np.sqrt(own + model.mean[:, 0] * np.maximum(0.0, spread) / average**3)
    always = CongestionStates(
        np.array([[0.0, 1.0], [0.0, 0.0]])
    )  # state 1, from the start and for good
    return replace(model, mean=mean, std=np.column_stack([std, std]), regime=always)


class _Walk:
    """Short runs step by step: resampled steps times a lognormal AR(1) effect, and stalls.

    Few steps do not make a sum normal, and a rare step in one of them shows. Arrays are
    [step, run].
    """

    def __init__(
        self, model: RunModel, n_steps: int, first: int, seed: int, start_s: float,
        marks: Sequence[int],
    ) -> None:  # fmt: skip
        self.model, self.n_steps, self.start_s = model, n_steps, start_s
        self.marks = np.asarray(marks, np.int64)
        streams = (first // CHUNK << 8) + 16
        self.white, self.shocks, self.rest = (
            np.random.Generator(np.random.Philox(key=[seed, streams + k])) for k in range(3)
        )
        self.cluster = (first + np.arange(CHUNK)) % model.mean.shape[0]
        self.wrong = wrong_by(model, first, seed)

    def run(self) -> Chunk:
        """Walk all runs of the chunk."""
        model, n = self.model, self.n_steps
        mean = model.mean[self.cluster, 0]
        ideal = mean if model.ideal_s is None else np.full(CHUNK, model.ideal_s)
        work = np.ones(n) if model.profile is None else model.profile[:n]
        if model.residuals.size:
            own = model.residuals[self.white.integers(0, model.residuals.size, (n, CHUNK))]
        else:
            own = model.std[self.cluster, 0] * self.white.standard_normal((n, CHUNK))
        own = np.maximum(own, -mean) * work[:, None]
        drift = self._drift(mean)
        run = 1.0 + model.run_cv * self.rest.standard_normal(CHUNK)
        effect = run * self.wrong
        steady = mean * work[:, None] + own
        steps = effect * steady * drift
        stalls = self._stalls(steps)
        parts = {
            "ideal_steps": ideal * work.sum(),
            "slow_steps": (mean - ideal) * work.sum(),
            "step_noise": own.sum(axis=0),
            "run_effect": (run - 1.0) * steady.sum(axis=0),
            "model_error": (effect - run) * steady.sum(axis=0),
            "drift": (effect * steady * (drift - 1.0)).sum(axis=0),
            "stalls": stalls.sum(axis=0),
        }
        terms = np.array([parts.get(name, np.zeros(CHUNK)) for name in term_names(model)])
        path = np.concatenate([np.zeros((1, CHUNK)), np.cumsum(steps + stalls, axis=0)])
        none = np.zeros(CHUNK, np.int64)
        return Chunk(terms.sum(axis=0), self.cluster, terms, path[self.marks].T, none)

    def _drift(self, mean: Array) -> Array:
        """Draw what all ranks share: a lognormal AR(1) series and a daily wave, mean 1."""
        drift, n = self.model.drift, self.n_steps
        out = np.ones((n, CHUNK))
        sigma = float(np.sqrt(np.log1p(drift.cv**2)))
        if sigma > 0.0:
            x = self.shocks.standard_normal((n, CHUNK))
            if drift.initial is not None:
                x[0] = drift.initial[self.cluster]
            r = np.exp(-mean / drift.tau_s) if drift.tau_s > 0.0 else np.zeros(CHUNK)
            fresh = np.sqrt(1.0 - r**2)
            for i in range(1, n):
                x[i] = r * x[i - 1] + fresh * x[i]
            out = np.exp(sigma * x - 0.5 * sigma**2)
        if drift.diurnal_cv > 0.0:
            at = self.start_s + mean * np.arange(n)[:, None] - drift.diurnal_peak_s
            out += np.sqrt(2.0) * drift.diurnal_cv * np.cos(2.0 * np.pi * at / DAY_S)
        return np.maximum(out, 0.0)

    def _stalls(self, seconds: Array) -> Array:
        """Seconds of stalls in every step."""
        stalls = self.model.stalls
        if stalls is None or stalls.rate_per_s == 0.0 or not stalls.lengths.size:
            return np.zeros_like(seconds)
        count = self.rest.poisson(stalls.rate_per_s * seconds).ravel()
        if count.sum() > MAX_STALLS:
            raise PrismError(
                f"{stalls.rate_per_s:.3g} stalls per second are too many to follow; lower the rate"
            )
        lengths = stalls.lengths[self.rest.integers(0, stalls.lengths.size, int(count.sum()))]
        found = np.bincount(np.repeat(np.arange(count.size), count), lengths, count.size)
        return np.asarray(found.reshape(seconds.shape), np.float64)
