"""Op resolution against kernel resolution at 1e5 replicates, and lowerings that must fail.

Run from a checkout: python experiments/checks/lowering.py [--replicates 100000] [--seed 1]
[--own]: only the jobs in which nothing varies but kernels' own runtimes.
"""

import argparse
import dataclasses
import itertools
import sys
import time

import numpy as np
from scipy.stats import ks_2samp

from prism.analyses.rankings.shares import Sampler, sample_shares
from prism.distributions.distribution import normal, quantile_table
from prism.jobs.job import Job, job_from_dict
from prism.simulation.classops import split_classes
from prism.simulation.execution.context import make_context
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks
from prism.simulation.variance_inputs import measure_residuals, partition

HOT_GPU = 11
OFF = {"step": {"cv": 0.0}, "microbatch": {"cv": 0.0}, "call": {"cv": 0.0}}
OWN = OFF | {"rank": {"cv": 0.0, "lemon_fraction": 0.0}, "regime": {"probability": 0.0}}
JOBS = {
    "tp 8": {"tp": 8, "dp": 2, "microbatches": 4},
    "tp 4, pp 4": {"tp": 4, "pp": 4, "dp": 4, "microbatches": 8},
    "tp 2, pp 2, vpp 2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 4, "microbatches": 8},
    "tp 2, zero1": {"tp": 2, "dp": 16, "microbatches": 4, "data_parallel": "zero1"},
    "fsdp": {"dp": 64, "data_parallel": "fsdp", "reshard_after_forward": True},
    "tp 2, fsdp": {
        "tp": 2, "dp": 32, "microbatches": 2, "recompute": "full", "data_parallel": "fsdp",
        "reshard_after_forward": True,
    },
}  # fmt: skip
LIBRARIES = ("h100-stressed", "h100-healthy")
PARTS = 20  # of the replicates, for errors of quantiles
NOTABLE = 0.02  # share of the variance that is shown


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
    return run_blocks(program, blocks, make_context(seed))[0].astype(np.float64)


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


def own_noise(parallelism: dict, resolution: str, library: str, seed: int) -> Prepared:
    """Prepare a job in which kernels' own runtimes vary, and nothing else."""
    gpus = parallelism.get("tp", 1) * parallelism.get("pp", 1) * parallelism["dp"]
    job: Job = job_from_dict({
        "model": {
            "n_layers": 8, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 4096,
        },
        "parallelism": {"microbatches": 1} | parallelism,
        "cluster": {"nodes": gpus // 8, "gpus_per_node": 8},
        "variability": {"library": library, "resolution": resolution, "effects": OWN},
    })  # fmt: skip
    return prepare(job, seed)


def with_normal_residuals(program: Program) -> Program:
    """Give every op a residual of its spread without a tail."""
    table = quantile_table(normal(0.1))[None]
    ops, low = program.ops, program.low
    return dataclasses.replace(
        program, tables=np.concatenate([program.tables, table]),
        ops=ops._replace(table=np.full_like(ops.table, len(program.tables))),
        low=low._replace(table_std=np.full_like(low.table_std, 0.1)),
    )  # fmt: skip


def figures(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, spread, p95 and p99 of step times [cluster, replicate], and their errors."""

    def of(x: np.ndarray) -> np.ndarray:
        return np.array([x.mean(), x.std(), *np.quantile(x, (0.95, 0.99))])

    each = np.array([of(found[i::PARTS]) for i in range(PARTS)])
    return of(found), each.std(axis=0, ddof=1) / PARTS**0.5


def class_shares(step: Prepared, seed: int) -> dict:
    """First and total order of every kernel class."""
    ops, residuals = split_classes(step), measure_residuals(step, seed)
    sampler = Sampler(ops.program, step.program, make_context(seed))
    return {
        s.entry.name: s
        for s in sample_shares(sampler, partition(step.program, residuals, ops.owner))
    }


def check_own_noise(name: str, library: str, replicates: int, seed: int) -> bool:
    """Compare a job's step times and shares of its classes; the control is of normal residuals."""
    steps = {r: own_noise(JOBS[name], r, library, seed) for r in ("kernel", "op")}
    kernel, op = (figures(times(steps[r].program, replicates, seed)) for r in steps)
    control = figures(times(with_normal_residuals(steps["op"].program), replicates, seed))
    change, error = op[0] / kernel[0] - 1, np.hypot(op[1], kernel[1]) / kernel[0]
    print(
        f"{library:<14}{name:<20}{kernel[0][1] / kernel[0][0]:7.2%}"
        + "".join(f"{c:+9.3%} +- {e:.3%}" for c, e in zip(change, error, strict=True))
        + f"{control[0][1] / kernel[0][1] - 1:+8.0%}",
        flush=True,
    )
    shares = {r: class_shares(steps[r], seed) for r in steps}
    texts, fine = [], True
    for entry, there in shares["kernel"].items():
        here = shares["op"][entry]
        for a, b in ((here.first, there.first), (here.total, there.total)):
            fine &= abs(a.value - b.value) <= 0.01 + 1.5 * np.hypot(a.half_width, b.half_width)
        if max(here.total.value, there.total.value) >= NOTABLE:
            both = (f"{s.total.value:.1%} +- {s.total.half_width:.1%}" for s in (here, there))
            texts.append(f"{entry} {' | '.join(both)}")
    print(f"    total order, op | kernel: {'; '.join(texts)}", flush=True)
    return bool(fine & (abs(change[0]) < 4 * error[0] + 5e-5) & (abs(change[1]) < 4 * error[1]))


def main() -> int:
    """Print the tables; exit 1 where a bound of the design is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own", action="store_true", help="the second table alone")
    options = parser.parse_args()
    print(f"{'case':<42}{'KS':>8}{'mean':>10}{'between':>9}{'within':>9}{'pooled KS':>11}{'s':>7}")
    ok = True
    for label, library, effects, hot in [] if options.own else cases():
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
    print(f"\n{'own noise only':<34}{'CV':>7}{'mean':>12}{'sd':>20}{'p95':>19}{'p99':>19}  control")
    for library, name in itertools.product(LIBRARIES, JOBS):
        ok &= check_own_noise(name, library, options.replicates, options.seed)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
