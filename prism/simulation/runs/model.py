"""Draw whole runs from a model of their parts: total, terms that add up to it, and progress.

Short undisturbed runs are walked step by step, so that a few rare steps show; all others go from
event to event (`prism.simulation.runs.events`). Congestion that changes too often to be followed
counts by its mean and its long-run spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from prism.common.errors import PrismError, named
from prism.simulation.execution.tasks import Arrays, Shared, Task, run_tasks
from prism.simulation.runs.events import (
    CHUNK,
    Chunk,
    EventLoop,
    draw_own,
    generator,
    stack_terms,
    term_names,
    wrong_by,
)
from prism.simulation.runs.parts import DAY_S, Array, Drift, Index, RunModel, Runs
from prism.simulation.runs.rates import expected_events, stationary

STEP_BY_STEP = 2000  # steps up to which a run is walked; beyond, its sum is as good as normal
NORMAL_STEPS = 64  # the same of steps that are normal themselves
MAX_EVENTS = 200_000.0  # of a run: minutes of work
MOST_TRIES = 50.0  # of one checkpoint interval, on average, in a run that still gets on
MARKED = 4 * CHUNK  # runs whose progress is kept: enough for percentiles
WALK_S, EVENT_S = 1e-4, 3e-3  # of a chunk of runs: a step, an event; about
SWITCHES = 5_000.0  # changes of regime in a run beyond which it counts by its long-run spread


def simulate_runs(
    model: RunModel,
    n_steps: int,
    n_runs: int,
    seed: int,
    *,
    start_s: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    marks: Sequence[int] = (),
) -> Runs:
    """Draw whole runs; the first ones do not change with their number.

    Parameters
    ----------
    start_s : float
        Time of day at which runs start [s].
    progress : callable, optional
        Called with (runs done, runs).
    marks : sequence of int
        Step counts, ascending, whose times are wanted; of the first `MARKED` runs alone.

    Raises
    ------
    PrismError
        The run would never end, or has more events than can be followed.
    """
    _check_end(model, n_steps)
    model = _averaged(model, n_steps)
    shared, chunks = Shared(model), dict[int, Arrays]()

    def take(i: int, found: Arrays) -> None:
        chunks[i] = found
        tell(len(chunks))

    def tell(n_chunks: float, share: float = 0.0) -> None:
        if progress is not None:
            progress(min(n_runs, int((n_chunks + share) * CHUNK)), n_runs)

    seconds = EVENT_S * (1.0 + expected_events(model, n_steps))
    if _is_walked(model, n_steps):
        seconds = WALK_S * n_steps
    tasks = []
    for i, first in enumerate(range(0, n_runs, CHUNK)):
        args = (n_steps, first, seed, start_s, tuple(marks) if first < MARKED else ())
        tasks.append(Task(draw_chunk, shared, args, seconds, partial(tell, i)))
    run_tasks(tasks, take)
    parts = (chunks[i] for i in range(len(tasks)))
    total, cluster, terms, found, failures = zip(*parts, strict=True)
    rows = np.concatenate(terms, axis=1)[:, :n_runs]
    return Runs(
        total=np.concatenate(total)[:n_runs],
        cluster=np.concatenate(cluster)[:n_runs],
        terms=dict(zip(term_names(model), rows, strict=True)),
        marks=np.concatenate(found[: MARKED // CHUNK])[:n_runs],
        failures=np.concatenate(failures)[:n_runs],
    )


def draw_chunk(
    model: RunModel, n_steps: int, first: int, seed: int, start_s: float, marks: Sequence[int],
    tell: Callable[[float], None] | None = None,
) -> Chunk:  # fmt: skip
    """Draw `CHUNK` runs."""
    if _is_walked(model, n_steps):
        return _walk(model, n_steps, first, seed, start_s, marks)
    return EventLoop(model, n_steps, first, seed, start_s, marks).run(tell)


def _is_walked(model: RunModel, n_steps: int) -> bool:
    """Tell whether a run is short, and its steps and stalls alone."""
    others = (
        model.regime, model.episodes, model.interruptions, model.checkpoints, model.evaluations,
    )  # fmt: skip
    most = STEP_BY_STEP if model.residuals.size else NORMAL_STEPS
    return n_steps <= most and all(part is None for part in others)


def _check_end(model: RunModel, n_steps: int) -> None:
    """Refuse runs that never end, or whose events are too many to follow."""
    fail, c = model.interruptions, model.checkpoints
    if fail is not None and fail.rate_per_s > 0.0:
        often = f"run.failures: one every {1.0 / fail.rate_per_s:.3g} s"
        most_s = np.log(MOST_TRIES) / fail.rate_per_s  # c seconds at rate r are tried e^(r c) times
        steps, write = (n_steps, 0.0) if c is None else (c.interval_steps, c.write_s)
        interval = min(steps, n_steps) * float(model.mean[:, 0].mean()) + write
        if interval > most_s:
            what = "there is no checkpoint" if c is None else f"a checkpoint takes {interval:.3g} s"
            raise PrismError(
                f"{often}, but {what}: the run would hardly progress; set a shorter "
                "run.checkpoint.interval"
            )
        if max(k.detection_s + k.restart_s for k in fail.kinds) > most_s:
            raise PrismError(
                f"{often}, less than a restart takes; lower per_1000_node_days, detection or "
                "restart"
            )
    events = expected_events(replace(model, regime=None), n_steps)
    if events > MAX_EVENTS:
        raise PrismError(
            f"a run of {n_steps} steps has about {events:.2g} failures and fail-slow episodes, "
            f"above the {MAX_EVENTS:.0e} that can be followed; lower their rates, or "
            f"{named('steps')}"
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
    only = replace(model, interruptions=None, episodes=None)
    if expected_events(only, n_steps) <= SWITCHES:
        return model
    share = stationary(model.regime)
    flow = model.regime - np.diag(model.regime.sum(axis=1))
    everywhere = np.tile(share, (share.size, 1))
    deviation = np.linalg.inv(everywhere - flow) - everywhere
    speed = model.mean[:, :1] / model.mean
    average = speed @ share
    spread = 2.0 * np.einsum("ks,s,ks->k", speed, share, speed @ deviation.T)
    mean = np.column_stack([model.mean[:, 0], model.mean[:, 0] / average])
    own = (model.std**2) @ share
    std = np.sqrt(own + model.mean[:, 0] * np.maximum(0.0, spread) / average**3)
    always = np.array([[0.0, 1.0], [0.0, 0.0]])  # state 1, from the start and for good
    return replace(model, mean=mean, std=np.column_stack([std, std]), regime=always)


def _walk(
    model: RunModel, n_steps: int, first: int, seed: int, start_s: float, marks: Sequence[int]
) -> Chunk:
    """Draw short runs: resampled steps times a lognormal AR(1) effect, and stalls [step, run].

    Few steps do not make a sum normal, and a rare step in one of them shows.
    """
    white, shocks, rest = (generator(seed, first, 16 + k) for k in range(3))
    cluster = (first + np.arange(CHUNK)) % model.mean.shape[0]
    mean, shape = model.mean[cluster, 0], (n_steps, CHUNK)
    ideal = mean if model.ideal_s is None else model.ideal_s
    work = np.ones(n_steps) if model.profile is None else model.profile[:n_steps]
    if model.residuals.size:
        own = model.residuals[white.integers(0, model.residuals.size, shape)]
    else:
        own = model.std[cluster, 0] * white.standard_normal(shape)
    own = np.maximum(own, -mean) * work[:, None]
    drift = _walk_drift(model.drift.of(cluster), n_steps, mean, cluster, start_s, shocks)
    run = draw_own(model, rest)
    effect = run * wrong_by(model, first, seed)
    steady = mean * work[:, None] + own
    steps = effect * steady * drift
    stalls = np.zeros(shape)
    if model.stalls is not None:
        lengths = model.stalls.lengths
        count = rest.poisson(model.stalls.of(cluster).rate_per_s * steps).ravel()
        drawn = lengths[rest.integers(0, lengths.size, int(count.sum()))]
        at = np.repeat(np.arange(count.size), count)
        stalls += np.bincount(at, drawn, count.size).reshape(shape)
    terms = stack_terms(model, {
        "ideal_steps": ideal * work.sum(),
        "slow_steps": (mean - ideal) * work.sum(),
        "step_noise": own.sum(axis=0),
        "run_effect": (run - 1.0) * steady.sum(axis=0),
        "model_error": (effect - run) * steady.sum(axis=0),
        "drift": (effect * steady * (drift - 1.0)).sum(axis=0),
        "stalls": stalls.sum(axis=0),
    })  # fmt: skip
    path = np.concatenate([np.zeros((1, CHUNK)), np.cumsum(steps + stalls, axis=0)])
    at_mark = path[np.asarray(marks, np.int64)].T
    return Chunk(terms.sum(axis=0), cluster, terms, at_mark, np.zeros(CHUNK, np.int64))


def _walk_drift(
    drift: Drift, n_steps: int, mean: Array, cluster: Index, start_s: float,
    rng: np.random.Generator,
) -> Array:  # fmt: skip
    """Draw what all ranks share: a lognormal AR(1) series and a daily wave, mean 1."""
    out = np.ones((n_steps, CHUNK))
    sigma = np.sqrt(np.log1p(np.square(drift.cv)))
    if np.any(sigma > 0.0):
        x = rng.standard_normal((n_steps, CHUNK))
        if drift.initial is not None:
            x[:1] = drift.initial[cluster]
        r = np.exp(-drift.rate(mean))
        fresh = np.sqrt(1.0 - r**2)
        for i in range(1, n_steps):
            x[i] = r * x[i - 1] + fresh * x[i]
        out = np.exp(sigma * x - 0.5 * sigma**2)
    if drift.diurnal_cv > 0.0:
        at = start_s + mean * np.arange(n_steps)[:, None] - drift.diurnal_peak_s
        out += np.sqrt(2.0) * drift.diurnal_cv * np.cos(2.0 * np.pi * at / DAY_S)
    return np.maximum(out, 0.0)
