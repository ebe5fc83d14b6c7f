"""How often things happen in a run: shares of the states of a regime, events to be expected."""

import numpy as np

from prism.simulation.runs.parts import Array, RunModel


def stationary(rates: Array) -> Array:
    """Long-run shares of the states of a Markov process.

    Parameters
    ----------
    rates : float64 [state, state]
        Transition rates; the diagonal is ignored.
    """
    flow = rates * (1.0 - np.eye(len(rates)))
    flow = flow - np.diag(flow.sum(axis=1))
    system = np.vstack([flow.T, np.ones(len(flow))])
    wanted = np.zeros(len(flow) + 1)
    wanted[-1] = 1.0
    found = np.clip(np.linalg.lstsq(system, wanted)[0], 0.0, None)
    return np.asarray(found / found.sum())


def expected_events(model: RunModel, n_steps: int) -> float:
    """Events of one run, about; they happen between its steps as well."""
    seconds = n_steps * float(model.mean[:, 0].mean())
    c, e = model.checkpoints, model.evaluations
    if c is not None and c.blocking:
        seconds += n_steps // c.interval_steps * c.write_s
    if e is not None:
        seconds += n_steps // e.interval_steps * e.duration_s
    rate = sum(2.0 * e.rate_per_s for e in model.episodes)
    if model.interruptions is not None:
        rate += model.interruptions.rate_per_s
    if model.regime is not None:
        flow = model.regime.rates * (1.0 - np.eye(len(model.regime.rates)))
        rate += float(stationary(flow) @ flow.sum(axis=1))
    return rate * seconds
