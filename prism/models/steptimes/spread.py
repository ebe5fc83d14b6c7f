"""The spread of step times by time scale: white noise, slow drift, run effect.

The drift is an AR(1) series with its memory in seconds. The distribution and its simulation; its
estimation is `prism.models.steptimes.likelihood`.
"""

from dataclasses import asdict, dataclass

import numpy as np

from prism.common.arrays import Array
from prism.simulation.runs.drift import ar1, drift_variance


@dataclass(frozen=True)
class Spread:
    """Relative spread of steps by time scale; 0 is the step at the mean."""

    # standard deviations [1]: of a single step's own noise, of the slow drift, between runs
    white: float = 0.0
    drift: float = 0.0
    tau_s: float = 0.0  # memory of the drift [s]; 0 without drift
    run: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Figures by name."""
        return asdict(self)


def mean_variance(spread: Spread, n: int, step_s: float) -> float:
    """Variance of the mean of n steps of a run around its level."""
    drift = drift_variance(n, step_s, spread.tau_s) if spread.drift > 0.0 else 0.0
    return spread.white**2 / n + spread.drift**2 * drift / n**2


def simulate_body(spread: Spread, elapsed_s: Array, n_runs: int, rng: np.random.Generator) -> Array:
    """Draw relative deviations of steps at such times, [position, run]: all parts normal."""
    out = spread.white * rng.standard_normal((elapsed_s.size, n_runs))
    if spread.drift > 0.0:
        out += spread.drift * ar1(elapsed_s / spread.tau_s, n_runs, rng)
    return np.asarray(out + spread.run * rng.standard_normal(n_runs))
