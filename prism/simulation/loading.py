"""Data loading: what steps wait for their batches, of which some are loaded ahead."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from prism.engine import LANES, Loader

Array = NDArray[np.float64]
WORD = 4294967296.0  # 32-bit words


def load_times(loader: Loader, words: NDArray[np.uint32]) -> Array:
    """Draw how long batches take to load [s], from words[>= 3, batch]."""
    from scipy.special import ndtri  # for few jobs

    spread, stalls, length = (words[:3] + 0.5) / WORD
    time = loader.load_s * np.exp(loader.sigma * ndtri(spread) - 0.5 * loader.sigma**2)
    return np.asarray(
        time - loader.stall_s * np.where(stalls < loader.stall_probability, np.log(length), 0.0)
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
