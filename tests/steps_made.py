"""Step times of known spread, stalls and work by step, for tests."""

import numpy as np

from prism.models.steptimes.spread import Spread, simulate_body
from prism.traces import StepTimes

STEP_S = 2.0
TRUTH = Spread(white=0.006, drift=0.004, tau_s=60.0, run=0.003)


def made(truth=TRUTH, shape=(600, 12), seed=1, *, stalls=0.0, length=3.0, work=None, grain=0.0):
    """Step times [step, run] of known spread, stalls at a rate per step, and work by step."""
    rng = np.random.default_rng(seed)
    seconds = STEP_S * (1.0 + simulate_body(truth, STEP_S * np.arange(shape[0]), shape[1], rng))
    if work is not None:
        seconds = seconds * work[:, None]
    hit = rng.random(shape) < stalls
    seconds[hit] += length * rng.exponential(size=int(hit.sum())) + 1.0
    return np.round(np.rint(seconds / grain) * grain, 9) if grain else seconds


def as_times(seconds, mean_over=1):
    """Step times as a reader gives them."""
    n, n_runs = seconds.shape
    run = np.repeat([f"r{i}" for i in range(n_runs)], n)
    step = np.tile(np.arange(n) * mean_over, n_runs)
    return StepTimes(seconds.T.ravel().copy(), step, run, "made.csv", "step_s", mean_over)
