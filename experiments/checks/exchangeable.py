"""Simulating some of a job's replicas against simulating all: the same clusters, the same keys.

    python experiments/checks/exchangeable.py [--replicates 100000] [JOB ...]

Bounds: Kolmogorov-Smirnov distance 0.015, p99 within 0.2 %, spread between clusters within 5 %
(where that is over a tenth of the spread within: else it is indistinguishable from 0). Two controls
must fail: the simulated replicas alone, where noise decides, and steps drawn from the exact
distribution itself but anew for every step, whose clusters are all alike.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from scipy.stats import ks_2samp

from prism.jobs.job import load_job
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.sampledreplicas import fit_unseen, ignore_unseen, sample_replicas
from prism.simulation.steps import run_blocks, warm_up
from prism.simulation.summary import spread

HERE = Path(__file__).parent
SEED, THREADS = 1, 2
LLAMA = ["parallelism.data_parallel=zero1"]
JOBS = {
    "gpt3-175b-1344": ("gpt3-175b-10752", ["parallelism.dp=168", "cluster.nodes=672"]),
    "gpt3-175b-10752": ("gpt3-175b-10752", []),
    "llama3-405b-16k zero1, dp 256": (
        "llama3-405b-16k", [*LLAMA, "parallelism.tp=4", "parallelism.dp=256"]),
    "gpt3-175b-10752 stressed": ("gpt3-175b-10752", ["variability.library=h100-stressed"]),
    "llama3-405b-16k zero1, dp 1024 stressed": (
        "llama3-405b-16k", [*LLAMA, "parallelism.dp=1024", "cluster.nodes=16384",
                            "variability.library=h100-stressed"]),
    "gpt3-175b-16384": ("gpt3-175b-10752", ["parallelism.dp=512", "cluster.nodes=2048"]),
    "gpt3-175b-16384 stressed": (
        "gpt3-175b-10752", ["parallelism.dp=512", "cluster.nodes=2048",
                            "variability.library=h100-stressed"]),
}  # fmt: skip
BOUNDS = {"ks": 0.015, "p99": 0.002, "between": 0.05}


def moments(times):
    """Spread of step times [cluster, lane]."""
    return spread(times.ravel(), np.repeat(np.arange(len(times)), times.shape[1]))


def differences(times, exact):
    """KS distance, and relative differences of the mean, p99 and the spread between clusters."""
    a, b = moments(times), moments(exact)
    told = b["between_cluster_std"] > 0.1 * b["within_cluster_std"]
    return {
        "ks": float(ks_2samp(times.ravel(), exact.ravel()).statistic),
        "mean": a["mean"] / b["mean"] - 1.0,
        "p99": a["p99"] / b["p99"] - 1.0,
        "between": a["between_cluster_std"] / b["between_cluster_std"] - 1.0 if told else None,
    }


def within(found):
    """Tell whether all bounds hold."""
    return all(found[k] is None or abs(found[k]) <= bound for k, bound in BOUNDS.items())


def compare(name, replicates):
    """Compare the engines on one job."""
    job, settings = JOBS[name]
    exact_program = prepare(load_job(job, settings), SEED).program
    blocks, context = range(-(-replicates // 64)), RunContext(SEED, THREADS)
    some = sample_replicas(exact_program)
    warm_up(some, context)
    begin = time.process_time()
    unseen = fit_unseen(some, context)
    found = run_blocks(unseen.program, blocks, context)[0].astype(float)
    middle = time.process_time()
    exact = run_blocks(exact_program, blocks, context)[0].astype(float)
    end = time.process_time()
    alone = run_blocks(ignore_unseen(some), blocks[:200], context)[0].astype(float)
    anew = np.random.default_rng(SEED).permutation(exact.ravel()).reshape(exact.shape)
    row = {
        "job": name, "replicas": exact_program.graph.n_replicas, "replicates": exact.size,
        "exchangeable": differences(found, exact), "alone": differences(alone, exact[:200]),
        "anew": differences(anew, exact), "slowest_unseen": unseen.slowest,
        "beyond_sample": unseen.beyond, "cpu_s": middle - begin, "exact_cpu_s": end - middle,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", choices=[[], *JOBS])
    parser.add_argument("--replicates", type=int, default=100_000)
    args = parser.parse_args()
    rows = [compare(name, args.replicates) for name in args.jobs or JOBS]
    failed = [r["job"] for r in rows if not within(r["exchangeable"])]
    told = [r for r in rows if r["anew"]["between"] is not None]
    failed += [f"{r['job']}: control" for r in told if within(r["anew"])]
    noisy = [r for r in rows if r["slowest_unseen"] > 0.5]
    failed += [f"{r['job']}: control" for r in noisy if within(r["alone"])]
    raise SystemExit(f"out of bounds: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
