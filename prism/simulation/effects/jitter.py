"""Jitter: a time added to every step of the job, whatever its length."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from prism.distributions.distribution import Distribution, constant, quantile_table
from prism.simulation.added import Added, Array, Words
from prism.simulation.draws import look_up, spread_values
from prism.simulation.effects.effect import Pick

JITTER_CV = 1.0  # of a jitter of which the mean alone is known


@dataclass(frozen=True)
class Jitter(Added):
    """Time added to a step, which the ideal step is without."""

    name = "jitter"
    stream = 11
    mean_s: float
    shape: Distribution  # of mean 1

    @classmethod
    def resolve(cls, pick: Pick) -> Self | None:
        """Return what the job or its library says."""
        mean_s = pick.value("jitter", "mean_s")
        return cls(mean_s, pick.distribution("jitter", JITTER_CV)) if mean_s else None

    def draw(self, words: Words, steps: Array) -> Array:
        """Draw each step's own."""
        return self.mean_s * (1.0 + look_up(quantile_table(self.shape), words[0]).astype(float))

    def held(self) -> Self:
        """Add the median to every step."""
        median = self.draw(np.full((1, 1), 1 << 31, np.uint32), np.zeros(1))
        return type(self)(float(median[0]), constant())

    def moments(self) -> tuple[float, float]:
        """Mean and CV."""
        return self.mean_s, float(spread_values(quantile_table(self.shape)).std())
