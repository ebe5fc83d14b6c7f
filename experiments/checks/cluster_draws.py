"""Stated 90 % intervals of the mean step, with few cluster draws and with many.

The truth is the mean over 100,000 cluster draws. Control: steps as if each had a draw of its own.
"""

import sys

import numpy as np

from prism.jobs.job import job_from_dict
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
from prism.simulation.summary import spread

SEEDS, DRAWS, MANY = 1_000, (4, 16, 64), 100_000
LOW, HIGH = 0.85, 0.95
JOB = {
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "microbatches": 4, "dp": 4, "data_parallel": "ddp"},
    "variability": {
        "library": None,
        "effects": {"rank": {"cv": 0.01}, "step": {"cv": 0.01}, "residual": {"cv": 0.02}},
    },
}


def main() -> int:
    program = prepare(job_from_dict(JOB), 1).program
    truth = float(np.mean(run_blocks(program, range(MANY), RunContext(10**6, 2))[0], dtype=float))
    print("| cluster draws | mean in its interval | as if independent | spread compatible with 0 |")
    print("|---|---|---|---|")
    fine = True
    for draws in DRAWS:
        inside = np.zeros(3)
        cluster = np.repeat(np.arange(draws), 64)
        for seed in range(SEEDS):
            times = run_blocks(program, range(draws), RunContext(seed))[0]
            found = spread(times.ravel().astype(float), cluster)
            low, high = found["mean_ci90"]
            own = 1.645 * found["std"] / cluster.size**0.5
            inside += (
                low <= truth <= high,
                abs(found["mean"] - truth) <= own,
                found["between_cluster_at_most"] is not None,
            )
        stated, control, unclear = inside / SEEDS
        print(f"| {draws} | {stated:.1%} | {control:.1%} | {unclear:.1%} |")
        fine &= LOW <= stated <= HIGH and control < LOW
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
