"""How often things happen in a run: shares of the states of a regime, events to be expected."""

import numpy as np

from prism.simulation.runs.parts import Array, RunModel


def stationary(rates: Array) -> Array:
    """Long-run shares of states that change at rates [state, state] with a diagonal of 0."""
    flow = rates - np.diag(rates.sum(axis=1))
    system = np.vstack([flow.T, np.ones(len(flow))])
    wanted = np.zeros(len(flow) + 1)
    wanted[-1] = 1.0
    found = np.clip(np.linalg.lstsq(system, wanted)[0], 0.0, None)
    return np.asarray(found / found.sum())


def step_shares(model: RunModel) -> Array:
    """Long-run shares of a run's steps in the states of its regime [state]."""
    if model.regime is None:
        return np.ones(1)
    pace = stationary(model.regime) / model.mean.mean(axis=0)
    return np.asarray(pace / pace.sum())


def expected_events(model: RunModel, n_steps: int) -> float:
    """Events of one run, about; they happen between its steps as well."""
    seconds = n_steps * float(model.mean[:, 0].mean())
    for interval, pause in model.pauses.values():
        seconds += n_steps // interval * pause
    rate = 0.0
    if model.episodes is not None:
        rate += 2.0 * model.episodes.rate_per_s
    if model.interruptions is not None:
        rate += model.interruptions.rate_per_s * (1 + (model.interruptions.shrink is not None))
    if model.regime is not None:
        rate += float(stationary(model.regime) @ model.regime.sum(axis=1))
    return rate * seconds


def waiting_times(rng: np.random.Generator, rate: Array) -> Array:
    """Draw exponential waiting times [s]; never where the rate [1/s] is 0."""
    z = rng.standard_exponential(rate.size)
    return np.asarray(np.divide(z, rate, out=np.full(rate.size, np.inf), where=rate > 0.0))
