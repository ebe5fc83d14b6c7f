"""Barriers that no op names: how often found, and how often seen where there is none.

Workers come with a lasting offset and a scatter, and go on after a gap of their own: exponential,
normal, constant per worker, or short with a rare long one. Waits count from 0.2 % of a step on.

Run from a checkout: python experiments/checks/coincidence.py [--repetitions 25] [--seed 1]
"""

import argparse
import sys

import numpy as np

from prism.models.pipelinetrace.meetings import HIDDEN_STEP, Barrier, hidden_barriers
from prism.simulation.tracemodel.graph import REPLICA, STAGE

STEP_S = 10.0
FALSE, FOUND = 0.05, 0.97
SHAPES = ((2, 2), (4, 2), (2, 4), (4, 4), (1, 4), (4, 1))
GAPS_S = (0.004, 0.02, 0.1, 0.5)


def gaps(kind: str, shape: tuple[int, ...], mean: float, rng: np.random.Generator) -> np.ndarray:
    """Draw gaps [stage, replica, step] in seconds."""
    if kind == "exponential":
        return rng.exponential(mean, shape)
    if kind == "normal":
        return np.abs(mean * (1.0 + 0.3 * rng.standard_normal(shape)))
    if kind == "constant":
        return mean * np.ones(shape) * rng.uniform(0.2, 2.0, (*shape[:2], 1))
    return mean * (0.1 + 5.0 * (rng.random(shape) < 0.1))


def rates(kind: str, n_steps: int, repetitions: int, seed: int) -> tuple[float, float, int]:
    """Share of jobs with a barrier that is not there, share of barriers found, and of how many."""
    rng = np.random.default_rng(seed)
    false, hits = [], []
    for mean in GAPS_S:
        for n_stages, n_replicas in SHAPES * repetitions:
            offset = rng.uniform() * rng.standard_normal((n_stages, n_replicas, 1))
            scatter = rng.uniform(0.0, 0.3) * rng.standard_normal((n_stages, n_replicas, n_steps))
            ready = STEP_S + offset + scatter
            starts = ready + gaps(kind, ready.shape, mean, rng)
            false.append(any(hidden_barriers(ready, starts, STEP_S)))
            if n_replicas > 1:
                barrier = Barrier(STAGE, int(rng.integers(n_stages)))
            else:
                barrier = Barrier(REPLICA, 0)
            released = barrier.release(ready)
            wait = float((released - ready)[barrier.members(ready)].mean())
            if mean > 0.2 * wait or wait < HIDDEN_STEP * STEP_S:
                continue
            found = hidden_barriers(ready, released + gaps(kind, ready.shape, mean, rng), STEP_S)
            hits.append(any(b == barrier for b, _ in found))
    return float(np.mean(false)), float(np.mean(hits)), len(hits)


def main() -> int:
    """Print the table; exit 1 where false alarms or misses are too many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ok = True
    for n_steps in (5, 8, 20):
        for kind in ("exponential", "normal", "constant", "rare"):
            false, found, n = rates(kind, n_steps, options.repetitions, options.seed)
            bad = false > FALSE or found < FOUND
            ok = ok and not bad
            print(
                f"{n_steps:>3} steps, gaps {kind:<12} false {false:6.2%}  "
                f"found {found:6.1%} of {n}{' *' * bad}",
                flush=True,
            )
    print("within bounds" if ok else "* out of bounds")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
