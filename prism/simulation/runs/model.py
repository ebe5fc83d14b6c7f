"""Draw whole runs from a model of their parts: total, terms that add up to it, and progress.

Runs go from event to event (`prism.simulation.runs.loop`). Congestion that changes too often to be
followed counts by its mean and its long-run spread.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from prism.common.errors import PrismError, option
from prism.simulation.execution.context import RunContext
from prism.simulation.execution.tasks import Arrays, Shared, Task, run_tasks
from prism.simulation.runs.loop import CHUNK, RunLoop
from prism.simulation.runs.parts import RunChunk, RunModel, Runs, term_names
from prism.simulation.runs.rates import expected_events, stationary, step_shares

# Steps of a run up to which the noise of each is drawn, so that a few rare ones show; beyond, the
# sum of it is normal:
# p99 is then 1.1 % low of 2,000 steps of 5 s with a jitter of mean 3 s and CV 4, 0.5 % of 10,000.
STEP_BY_STEP = 2000
NORMAL_STEPS = 64  # the same of steps that are nearly normal themselves
MAX_EVENTS = 200_000.0  # of a run: minutes of work
MOST_TRIES = 50.0  # of one checkpoint interval, on average, in a run that still gets on
MARKED = 4 * CHUNK  # runs whose progress is kept: enough for percentiles
STEP_S, EVENT_S = 5e-5, 2e-3  # of a chunk of runs: noise of a step, an event; about
SWITCHES = 5_000.0  # changes of regime in a run beyond which it counts by its long-run spread


def simulate_runs(
    model: RunModel,
    n_steps: int,
    n_runs: int,
    context: RunContext,
    *,
    start_s: float = 0.0,
    marks: Sequence[int] = (),
) -> Runs:
    """Draw whole runs; the first ones do not change with their number.

    Parameters
    ----------
    start_s : float
        Time of day at which runs start [s].
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
        context.report(min(n_runs, int((n_chunks + share) * CHUNK)), n_runs)

    seconds = EVENT_S * (1.0 + expected_events(model, n_steps))
    if is_short(model, n_steps):
        seconds += STEP_S * n_steps
    tasks = []
    for i, first in enumerate(range(0, n_runs, CHUNK)):
        args = (n_steps, first, context.seed, start_s, tuple(marks) if first < MARKED else ())
        tasks.append(Task(draw_chunk, shared, args, seconds, partial(tell, i)))
    run_tasks(tasks, take, replace(context, threads=1))  # the loop is Python's
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
) -> RunChunk:  # fmt: skip
    """Draw `CHUNK` runs."""
    short = is_short(model, n_steps)
    return RunLoop(model, n_steps, first, seed, start_s, marks, short).run(tell)


def is_short(model: RunModel, n_steps: int) -> bool:
    """Tell whether the steps of a run are few enough for their noise to be drawn one by one."""
    return bool(model.residuals.size) and n_steps <= STEP_BY_STEP


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
        down = (k.detection_s + k.restart_s / fail.restart_success for k in fail.kinds)
        if max(down) > most_s:
            raise PrismError(
                f"{often}, less than a restart takes; lower per_1000_node_days, detection or "
                "restart"
            )
    events = expected_events(replace(model, regime=None), n_steps)
    if events > MAX_EVENTS:
        raise PrismError(
            f"a run of {n_steps} steps has about {events:.2g} failures and fail-slow episodes, "
            f"above the {MAX_EVENTS:.0e} that can be followed; lower their rates, or "
            f"{option('steps')}"
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
    own = (model.std**2) @ step_shares(model)
    std = np.sqrt(own + model.mean[:, 0] * np.maximum(0.0, spread) / average**3)
    wider = math.sqrt(float((std**2).mean()) / max(float((model.std[:, 0] ** 2).mean()), 1e-300))
    return replace(
        model, mean=model.mean[:, :1] / average[:, None], std=std[:, None], regime=None,
        residuals=model.residuals * wider,
    )  # fmt: skip
