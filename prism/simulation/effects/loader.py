"""The loader: a step begins once its batch is there, of which some are loaded ahead."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import xarray as xr

from prism.common.text import format_duration
from prism.engine import LANES
from prism.simulation.added import Added, Array, Words
from prism.simulation.draws import WORD
from prism.simulation.effects.effect import Pick


@dataclass(frozen=True)
class Loader(Added):
    """How fast batches are loaded."""

    name = "loader"
    stream = 12
    load_s: float  # mean time of a batch but for stalls
    sigma: float  # of its logarithm
    prefetch: int  # batches loaded ahead
    stall_probability: float  # of a batch
    stall_s: float  # mean, exponential

    @classmethod
    def resolve(cls, pick: Pick) -> Self | None:
        """Return what the job says; without a rate no step waits."""
        block, p = pick.job.run.loader, pick.job.parallelism
        if block is None:
            return None
        load_s = p.dp * p.microbatches * p.microbatch_size / block.samples_per_s
        return cls(
            load_s, math.sqrt(math.log1p(block.cv**2)), block.prefetch,
            -math.expm1(-block.stalls_per_hour * load_s / 3600.0), block.stall_s,
        )  # fmt: skip

    def draw(self, words: Words, steps: Array) -> Array:
        """Draw how long batches take to load, and find what each step waits for its own."""
        from scipy.special import ndtri  # for few jobs

        spread, stalls, length = (words[:3] + 0.5) / WORD
        load = self.load_s * np.exp(self.sigma * ndtri(spread) - 0.5 * self.sigma**2)
        load -= self.stall_s * np.where(stalls < self.stall_probability, np.log(length), 0.0)
        return wait_for_batches(steps, load, self.prefetch)

    def held(self) -> Self:
        """Load all batches in the mean time, without stalls."""
        return replace(self, sigma=0.0, stall_probability=0.0)

    def doubts(self, dataset: xr.Dataset) -> Iterator[str]:
        """Say that the loader decides the step: a batch takes longer than the step without it."""
        loss = float(dataset.time_loss_mean_share.sel(part=self.part))
        alone = float(dataset.step_time.mean()) * (1.0 - loss)
        if self.load_s > alone:
            yield (
                f"data loading: a batch takes {format_duration(self.load_s)} to load, a step "
                f"without it {format_duration(alone)}; the loader decides the step: raise "
                f"run.loader.samples_per_s {self.load_s / alone:.3g} times"
            )


def wait_for_batches(step: Array, load: Array, prefetch: int) -> Array:
    """Seconds that each of a row of steps [row, lane] waits for its batch.

    A batch loads once the one before is there and its place is free: when the step `prefetch`
    before it takes its own or, without prefetching, when the last step ends. A row goes round
    twice, and the second time counts; at first all places are full, or empty where loading takes
    longer than the steps.
    """
    full = load.sum(axis=1) < step.sum(axis=1)
    ready = np.where(full, -np.inf, 0.0)
    taken = deque([ready] * prefetch, maxlen=prefetch)
    end, wait = np.zeros(len(step)), np.empty_like(step)
    for k in [*range(LANES)] * 2:
        ready = np.maximum(ready, taken[0] if prefetch else end) + load[:, k]
        begin = np.maximum(end, ready)
        taken.append(begin)
        wait[:, k] = begin - end
        end = begin + step[:, k]
    return wait
