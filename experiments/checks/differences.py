"""Coverage of the 95 % intervals of paired differences: settings, placements and remedies.

Run from a checkout: python experiments/checks/differences.py [--seeds 80] [--clusters 16]
The truth of a pair is the difference of its figures over the draws of all seeds.
"""

import argparse
import sys

import numpy as np

from prism.analyses.differences import QUANTILES, Candidate, Sampler, difference, fit_slope
from prism.jobs.job import load_job
from prism.simulation.execution.context import RunContext, cores
from prism.simulation.prepare import prepare

SLOW = 'cluster.node_slowdowns={"0": {"compute": 1.05}}'
PAIRS = {
    "half the chunks": ("gpt3-175b-512", ["parallelism.vpp=6"]),
    "a slow node": ("gpt3-175b-512", [SLOW]),
    "no step effect": ("llama3-70b-fsdp-512", ["variability.effects.step.cv=0"]),
    "twice the microbatches": ("pipeline-8x32", ["parallelism.microbatches=64"]),
}
MEASURES = ("mean", "p50", "p95")
RANGE = (0.85, 0.999)
"""Share of intervals that may hold the truth: 95 %, or somewhat less for p95."""


def measure(job, changes, seeds, clusters, threads):
    """Give the share of intervals that hold the truth, by measure, and their mean half-width."""
    programs = [prepare(load_job(job, change), 0).program for change in ((), changes)]
    found = {name: [] for name in MEASURES}
    samples = [[], []]
    for seed in range(1, seeds + 1):
        sampler = Sampler(RunContext(seed, threads))
        pair = [Candidate(program=program) for program in programs]
        for candidate, held in zip(pair, samples, strict=True):
            sampler.extend(candidate, clusters)
            held.append(candidate.times)
        slope = fit_slope(pair)
        for candidate in pair:
            candidate.slope = slope
        for name in MEASURES:
            one = difference(pair[1], pair[0], name)
            found[name].append((one.share, one.half_widths[1]))
    out = {}
    for name, rows in found.items():
        share, half = np.array(rows).T
        q = QUANTILES[name]
        pooled = [np.concatenate(held) for held in samples]
        figures = [x.mean() if q is None else np.quantile(x, q) for x in pooled]
        truth = figures[1] / figures[0] - 1.0
        out[name] = float((np.abs(share - truth) <= half).mean()), float(half.mean()), truth
    return out


def main():
    """Print the coverage of each pair; exit status 1 where one is out of range."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=80)
    parser.add_argument("--clusters", type=int, default=16)
    options = parser.parse_args()
    bad = 0
    print(f"{options.seeds} seeds, {options.clusters} cluster draws each")
    for name, (job, changes) in PAIRS.items():
        found = measure(job, changes, options.seeds, options.clusters, cores())
        for key, (held, half, truth) in found.items():
            ok = RANGE[0] <= held <= RANGE[1]
            bad += not ok
            print(
                f"{job}, {name}, {key}: {100 * truth:+.3f} %, ± {100 * half:.3f} %, held by "
                f"{100 * held:.0f} %{'' if ok else '  OUT'}", flush=True,
            )  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
