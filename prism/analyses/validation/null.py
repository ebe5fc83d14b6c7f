"""What a KS distance would be where the predicted job is the measured one.

A measured job is one cluster: its steps are drawn from one simulated cluster, its totals from the
predicted runs. Nothing is refitted: what the job's values rest on is not at hand, so that the
p-value takes them for exact, but for the mean's error of a calibration. Left out: repetitions that
fit anew, of traces (`prism.analyses.validation.trace`) and of
step times (`prism.analyses.validation.steps`).
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prism.analyses.validation.result import separation
from prism.simulation.runs.build import model_of_steps
from prism.simulation.runs.parts import Drift

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]


def null_of_clusters(
    drawn: "xr.Dataset", n: int, repetitions: int, seed: int, mean_error: float = 0.0
) -> Array:
    """KS of n steps on one simulated cluster against all: a measured job is one cluster.

    Notes
    -----
    A cluster's few replicates are no law to draw n steps from, so what steps differ by within
    clusters is pooled over them, and the clusters' means are without its noise.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    every, cluster = np.asarray(drawn.step_time, np.float64), np.asarray(drawn.cluster_idx)
    parts = model_of_steps(every, np.ones(every.size), cluster, Drift(0.0, 0.0))
    return np.array([
        separation(s * (rng.choice(parts.mean[:, 0]) + rng.choice(parts.residuals, n)), every)
        for s in _scales(mean_error, repetitions, seed)
    ])  # fmt: skip


def null_of_draws(
    predicted: Array, n: int, repetitions: int, seed: int, mean_error: float = 0.0
) -> Array:
    """KS of n predicted totals against all; `mean_error` as in `null_of_clusters`."""
    rng = np.random.Generator(np.random.Philox(key=[seed, 1]))
    return np.array([
        separation(s * rng.choice(predicted, n), predicted)
        for s in _scales(mean_error, repetitions, seed)
    ])  # fmt: skip


def _scales(mean_error: float, repetitions: int, seed: int) -> Array:
    """Draw what the measured mean may be over the predicted one [repetition]."""
    return 1.0 + mean_error * np.random.default_rng([seed, 2]).standard_normal(repetitions)
