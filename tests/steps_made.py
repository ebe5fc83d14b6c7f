"""Step times of known spread, stalls and work by step, as files of step times."""

import numpy as np
import pandas as pd

STEP_S = 2.0
TRUTH = {"white": 0.006, "drift": 0.004, "tau_s": 60.0, "run": 0.003}


def spread_of(truth, n, runs, rng):
    """Relative deviations [step, run]: white noise, an AR(1) drift, a level of each run."""
    white, drift, run = (truth.get(name, 0.0) for name in ("white", "drift", "run"))
    out = white * rng.standard_normal((n, runs)) + run * rng.standard_normal(runs)
    if drift:
        r = np.exp(-STEP_S / truth["tau_s"])
        state = rng.standard_normal(runs)
        for i in range(n):
            out[i] += drift * state
            state = r * state + np.sqrt(1.0 - r**2) * rng.standard_normal(runs)
    return out


def made(truth=TRUTH, shape=(600, 12), seed=1, *, stalls=0.0, length=3.0, work=None, grain=0.0):
    """Step times [step, run] of known spread, stalls at a rate per step, and work by step."""
    rng = np.random.default_rng(seed)
    seconds = STEP_S * (1.0 + spread_of(truth, *shape, rng))
    if work is not None:
        seconds = seconds * work[:, None]
    hit = rng.random(shape) < stalls
    seconds[hit] += length * rng.exponential(size=int(hit.sum())) + 1.0
    return np.round(np.rint(seconds / grain) * grain, 9) if grain else seconds


def write(path, seconds, first=0, every=1):
    """Write step times [step, run], or [step] of one run, as a table."""
    seconds = np.asarray(seconds)
    n, runs = seconds.shape if seconds.ndim > 1 else (seconds.size, 0)
    table = {"step": np.tile(first + every * np.arange(n), max(1, runs)),
             "step_s": seconds.T.ravel()}  # fmt: skip
    if runs:
        table["run"] = np.repeat([f"r{i}" for i in range(runs)], n)
    pd.DataFrame(table).to_csv(path, index=False)
    return path
