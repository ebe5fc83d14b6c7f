"""Op resolution against kernel resolution at 1e5 replicates, and a lowering that must fail.

Run from a checkout: python experiments/verification/lowering.py [--replicates 100000] [--seed 1]
"""

import argparse
import dataclasses
import itertools
import sys
import time

import numpy as np
from scipy.stats import ks_2samp

from prism.jobs.job import job_from_dict
from prism.simulation.prepare import prepare
from prism.simulation.program import Program
from prism.simulation.steps import default_threads, run_blocks

HOT_GPU = 11
OFF = {"step": {"cv": 0.0}, "microbatch": {"cv": 0.0}, "call": {"cv": 0.0}}


def build(resolution: str, library: str | None, effects: dict, hot: bool, seed: int) -> Program:
    """Engine arrays of the named job: tp 8, pp 2, dp 2, vpp 2, eight small layers."""
    job = job_from_dict({
        "model": {
            "n_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 2048,
        },
        "parallelism": {
            "tp": 8, "pp": 2, "dp": 2, "vpp": 2, "microbatches": 4, "layer_split": [2, 2, 2, 2]
        },
        "cluster": {"nodes": 4, "gpus_per_node": 8},
        "variability": {"library": library, "resolution": resolution, "effects": effects},
    })  # fmt: skip
    program = prepare(job, seed).program
    if not hot:
        return program
    factor = program.ranks.factor.copy()
    factor[1:, HOT_GPU] = 1.2  # row 0 is the loading of communication
    return dataclasses.replace(program, ranks=program.ranks._replace(factor=factor))


def pool_over_gpus(program: Program) -> Program:
    """Replace every group by one of its GPUs: calls pooled, barriers inside the group gone."""
    member = program.low.member
    pick = np.random.default_rng(0).integers(0, member.shape[2], (*member.shape[:2], 1))
    one = np.ascontiguousarray(np.take_along_axis(member, pick, axis=2))
    return dataclasses.replace(program, low=program.low._replace(member=one))


def times(program: Program, replicates: int, seed: int) -> np.ndarray:
    """Step times [cluster, replicate] in seconds."""
    blocks = range(-(-replicates // 64))
    return run_blocks(program, blocks, seed, default_threads())[0].astype(np.float64)


def cases() -> list[tuple[str, str | None, dict, bool]]:
    """Label, library, effects, whether one GPU runs at 1.2x."""
    out: list[tuple[str, str | None, dict, bool]] = []
    for rank, residual, hot in itertools.product((0.005, 0.015), (0.005, 0.02), (False, True)):
        effects = {"rank": {"cv": rank}, "residual": {"law": "lognormal", "cv": residual}} | OFF
        label = f"rank {rank:.1%} residual {residual:.1%}" + (" one GPU 1.2x" if hot else "")
        out.append((label, None, effects, hot))
    out.append(("library h100-healthy", "h100-healthy", {}, False))
    # unpacked sequences would hide what the control has wrong
    out.append(("library h100-stressed", "h100-stressed", {"microbatch": {"cv": 0.0}}, False))
    return out


def main() -> int:
    """Print the table; exit 1 where a bound of the design is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'case':<42}{'KS':>8}{'mean':>10}{'between':>9}{'within':>9}{'pooled KS':>11}{'s':>7}")
    ok = True
    for label, library, effects, hot in cases():
        begin = time.perf_counter()
        op_program = build("op", library, effects, hot, options.seed)
        kernel_program = build("kernel", library, effects, hot, options.seed)
        kernel, op, pooled = (
            times(p, options.replicates, options.seed)
            for p in (kernel_program, op_program, pool_over_gpus(op_program))
        )
        ks = ks_2samp(kernel.ravel(), op.ravel()).statistic
        control = ks_2samp(kernel.ravel(), pooled.ravel()).statistic
        mean = op.mean() / kernel.mean() - 1
        between = op.mean(axis=1).std() / kernel.mean(axis=1).std() - 1
        within = op.std(axis=1).mean() / kernel.std(axis=1).mean() - 1
        seconds = time.perf_counter() - begin
        print(f"{label:<42}{ks:8.4f}{mean:+10.4%}{between:+9.2%}{within:+9.2%}{control:11.3f}"
              f"{seconds:7.1f}", flush=True)  # fmt: skip
        ok &= ks <= 0.03 and abs(mean) <= 1e-3 and abs(between) <= 0.05 and control > 0.15
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
