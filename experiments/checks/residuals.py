"""Residuals of the engine's pool against residuals that every replicate looks up for itself.

Both are run in processes of their own, under different seeds, on jobs whose spread, number of ops
and number of replicas differ. They must agree in mean, spread and quantiles within 4 standard
errors, and blocks' means must vary as those of independent replicates (so that differences between
clusters are found where there are some and nowhere else). A pool that shares its slowest values,
too, must fail.

    python experiments/checks/residuals.py [--blocks 1000]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

QUANTILES = (0.5, 0.95, 0.99, 0.999)
PARTS = 20  # of the blocks, whose quantiles tell the error of a quantile
MOST = 4.0  # standard errors
# stages, replicas, microbatches, distribution, coefficient of variation
JOBS = (
    (8, 1, 32, "gamma", 0.05),
    (8, 1, 32, "lognormal", 1.0),
    (1, 128, 4, "gamma", 0.2),
    (1, 1024, 1, "gamma", 0.2),
    (1, 1024, 1, "lognormal", 1.0),
    (4, 16, 8, "lognormal", 2.0),
    (1, 1, 64, "lognormal", 2.0),
)
CHANGES = {
    "looked up": "engine.blocks.POOL_USES = 1 << 40",
    "pool": "",
    "shared tail": "engine.random.TAIL = np.uint32(0xFFFFFFFF)",
}
RUN = """
import json, sys
import numpy as np
import prism.engine.blocks, prism.engine.random
from prism import engine
{change}
from prism.jobs.job import job_from_dict
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks
seed, blocks, jobs, out = json.loads(sys.argv[1])
times = []
for pp, dp, microbatches, family, cv in jobs:
    program = prepare(job_from_dict({{
        "model": {{"durations": {{"forward_s": 1.0, "backward_s": 2.0}}}},
        "parallelism": {{"pp": pp, "dp": dp, "microbatches": microbatches}},
        "variability": {{
            "library": None, "effects": {{"residual": {{"law": family, "cv": cv}}}}}},
    }}), 1).program
    times.append(run_blocks(program, range(blocks), RunContext(seed, 2))[0])
np.save(out, np.array(times))
"""


def simulate(name: str, blocks: int, seed: int) -> np.ndarray:
    """Step times [job, block, lane] in seconds, of code that is compiled with a change."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "times.npy")
        args = json.dumps([seed, blocks, JOBS, out])
        subprocess.run(
            [sys.executable, "-c", RUN.format(change=CHANGES[name]), args],
            check=True, env=os.environ | {"NUMBA_CACHE_DIR": folder},
        )  # fmt: skip
        return np.load(out).astype(np.float64)


def figures(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, spread and quantiles of times [block, lane], and their standard errors."""

    def of(part: np.ndarray) -> list[float]:
        return [part.mean(), part.std(), *np.quantile(part, QUANTILES)]

    each = np.array([of(part) for part in np.array_split(x, PARTS)])
    return np.array(of(x)), each.std(axis=0, ddof=1) / PARTS**0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=1000, help="of 64 replicates")
    blocks = parser.parse_args().blocks
    found = {name: simulate(name, blocks, seed) for seed, name in enumerate(CHANGES, 1)}
    failed, control = 0, False
    print("stages, replicas, microbatches, residual     differences in standard errors:           "
          "variance of block means")  # fmt: skip
    quantiles = "".join(f"{100 * q:g} %".rjust(7) for q in QUANTILES)
    print(f"{'mean':>50s}{'std':>7s}{quantiles}   looked up   pool   shared tail")
    for i, (pp, dp, microbatches, family, cv) in enumerate(JOBS):
        (own, own_error), (pool, pool_error) = (figures(found[n][i]) for n in ("looked up", "pool"))
        apart = (pool - own) / np.hypot(own_error, pool_error)
        ratio = {
            n: x[i].mean(axis=1).var(ddof=1) / (x[i].var(axis=1, ddof=1).mean() / x.shape[2])
            for n, x in found.items()
        }
        wide = MOST * (2.0 / blocks) ** 0.5
        good = np.abs(apart).max() < MOST and abs(ratio["pool"] - 1.0) < wide
        failed += not good
        control |= abs(ratio["shared tail"] - 1.0) > wide
        print(f"{pp}, {dp}, {microbatches}, {family} {cv:g}".ljust(44)
              + "".join(f" {z:+6.1f}" for z in apart)
              + f" {ratio['looked up']:11.2f} {ratio['pool']:6.2f} {ratio['shared tail']:13.2f}"
              + ("" if good else "   FAILED"))  # fmt: skip
    print(f"{failed} of {len(JOBS)} jobs failed; the shared tail is "
          + ("found" if control else "NOT found"))  # fmt: skip
    return int(failed > 0 or not control)


if __name__ == "__main__":
    sys.exit(main())
