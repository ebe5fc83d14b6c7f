"""Precision and effort of `prism rank`: half-widths, coverage, growth with classes.

Run from a checkout: python experiments/checks/ranking.py [--classes 14 20 28 56] [--seed 1]
Seconds are of the processor, all threads together, so that other work on the machine counts little.
"""

import argparse
import math
import sys
import time
from dataclasses import replace

import numpy as np

from prism.analyses.rank import rank
from prism.analyses.rankings.shares import Sampler, sample_shares
from prism.common.attribution import Variance
from prism.jobs.job import job_from_dict, load_job
from prism.simulation.classops import split_classes
from prism.simulation.execution.context import make_context
from prism.simulation.prepare import prepare
from prism.simulation.program import Program
from prism.simulation.steps import run_blocks, warm_up
from prism.simulation.variance_inputs import Residuals, measure_residuals, partition

JOBS = ("llama3-405b-16k", "gpt3-175b-512", "llama3-70b-fsdp-512")
LIMIT = 150.0  # processor seconds: 75 s on two cores
CLASSES_JOB = "llama3-405b-16k"
CLUSTERS = {"gpt3-175b-512": 200, "llama3-70b-fsdp-512": 2000}  # of the plain estimate


def cluster_variance(times):
    """Split the variance of times [cluster, lane]; unbiased but for the bound at 0."""
    within = float(times.var(axis=1, ddof=1).mean()) if times.shape[1] > 1 else 0.0
    if times.shape[0] < 2:
        return Variance(within, 0.0)
    noise = within / times.shape[1]
    return Variance(within, max(0.0, float(times.mean(axis=1).var(ddof=1)) - noise))


def top(values: dict, n: int = 5) -> list[str]:
    """Names of the first rows by total order."""
    rows = values["kernels"] + values["effects"]
    return [r["name"] for r in sorted(rows, key=lambda r: -(r["total_order"] or 0.0))[:n]]


def check_job(name: str, seed: int) -> bool:
    """Rank one job; print widths, seconds and the first rows."""
    begin = time.process_time()
    found = rank(name, seed=seed).figures()
    spent = time.process_time() - begin
    rows = found["kernels"] + found["effects"]
    widest = {True: 0.0, False: 0.0}
    for row in rows:
        for order in ("first_order", "total_order"):
            low, high = row[f"{order}_ci"]
            large = row["total_order"] >= 0.5
            widest[large] = max(widest[large], 0.5 * (high - low))
    print(
        f"{name:22s} {len(rows):3d} inputs  half-widths {widest[False]:.3f} below one half, "
        f"{widest[True]:.3f} above  {spent:.0f} s\n  {', '.join(top(found))}"
    )
    return widest[False] <= 0.03 and widest[True] <= 0.06 and spent <= LIMIT


def check_coverage(seeds: int) -> bool:
    """How often 95 % intervals hold shares and savings that closed forms give."""
    square, noise, rank_square = 0.0016, 0.0009 * 5 / 9 / 4, 0.0004
    effects = {"step": {"cv": 0.04}, "rank": {"cv": 0.02},
               "residual": {"law": "lognormal", "cv": 0.03}}  # fmt: skip
    job = job_from_dict({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 4},
        "variability": {"library": None, "effects": effects},
    })  # fmt: skip
    parts = {"step": square, "compute": noise, "rank": rank_square}
    whole = math.prod(1.0 + part for part in parts.values()) - 1.0
    held: dict[str, list[bool]] = {}
    for seed in range(seeds):
        for row in rank(job, seed=seed).rows:
            part = parts[row["name"]]
            known = {
                "first_order": part / whole,
                "total_order": part * (1.0 + whole) / (1.0 + part) / whole,
            }
            if row["name"] == "step":  # a factor on all
                known["mean_reduction"] = 1.0 - 1.0 / math.sqrt(1.0 + square)
            for name, value in known.items():
                low, high = row[f"{name}_ci"]
                held.setdefault(f"{row['name']} {name}", []).append(low <= value <= high)
    shares = {name: sum(hits) / len(hits) for name, hits in held.items()}
    print(f"95 % intervals over {seeds} seeds hold:", shares)
    return bool(np.mean(list(shares.values())) >= 0.85)


def check_clusters(name: str, seed: int) -> bool:
    """Variance between clusters, with quiet times as control, against many clusters."""
    program = prepare(load_job(name), seed).program
    context = make_context(seed)
    sampler = Sampler(program, program, context)
    sampler.extend([], 16)
    sampler.extend_control()
    times = run_blocks(program, range(CLUSTERS[name]), context.under(seed + 1000))[0].astype(float)
    plain = cluster_variance(times)
    means = times.mean(axis=1) - times.mean()
    spread = np.sqrt(np.mean(means**4) / np.mean(means**2) ** 2 - 1.0) / np.sqrt(means.size)
    share, many = (v.between / v.total for v in (sampler.variance, plain))
    error = many * (1.0 - many) * spread
    print(
        f"{name:22s} share between clusters {share:.3f} from 2 x 16 clusters and "
        f"{sampler.control.times[0].size} quiet times; {many:.3f} +- {2 * error:.3f} "
        f"from {means.size}"
    )
    return bool(abs(share - many) <= 0.03 + 3.0 * error)


def check_growth(counts: list[int], seed: int) -> bool:
    """Effort of the shares with kernel classes split by ops, ever finer."""
    job = load_job(CLASSES_JOB)
    step = prepare(job, seed)
    warm_up(step.program, make_context(seed))
    ops, call = split_classes(step), measure_residuals(step, seed).call
    n_classes = len(step.program.classes)
    print(f"{CLASSES_JOB}: pick-freeze of its {n_classes} classes, and of finer ones")
    fine = True
    for count in counts:
        owner, called = ops.owner.copy(), ops.owner == n_classes
        owner[called] = count
        for new in range(n_classes, count):  # halve the class of most kinds of ops
            k = int(np.bincount(owner[~called]).argmax())
            owner[np.flatnonzero(owner == k)[::2]] = new
        program = _named(step.program, tuple(f"class {i}" for i in range(count)))
        varies = Residuals(np.ones((call.size, count)), call)
        inputs = partition(program, varies, owner)
        begin = time.process_time()
        sampler = Sampler(ops.program, step.program, make_context(seed))
        found = sample_shares(sampler, inputs)
        seconds = time.process_time() - begin
        wide = [s.entry.name for s in found if s.is_wide]
        blocks = sum(2 * len(s.ab) for s in found)
        print(
            f"  {count:3d} classes, {len(inputs)} inputs: {blocks} blocks of swapped "
            f"runs, {seconds:.0f} s; too wide: {', '.join(wide) or 'none'}"
        )
        fine &= not wide
    return fine


def _named(program: Program, names: tuple[str, ...]) -> Program:
    shares = np.zeros((program.shares.shape[0], len(names)), np.float32)
    return replace(program, classes=names, shares=shares)


def main() -> int:
    """Print every table; status 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, nargs="*", default=[14, 20, 28, 56])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=200, help="of coverage")
    args = parser.parse_args()
    fine = all([check_job(name, args.seed) for name in args.jobs])
    fine &= args.seeds == 0 or check_coverage(args.seeds)
    fine &= all([check_clusters(name, args.seed) for name in CLUSTERS if name in args.jobs])
    if args.classes:
        fine &= check_growth(args.classes, args.seed)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
