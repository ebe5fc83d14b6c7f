"""What a second site costs Llama 3 405B, by what goes between the sites, how fast and how far.

    python experiments/studies/two-sites/run.py     # writes table.json
    python experiments/studies/two-sites/figure.py  # the plot

All settings run on the same clusters and steps (seed 1), so differences are paired.
"""

import json
from pathlib import Path

import numpy as np

from prism.analyses.placements.screen import Screen
from prism.jobs.job import load_job
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks

HERE = Path(__file__).parent
JOB, SEED, CLUSTERS, THREADS = "llama3-405b-two-sites", 1, 32, 2
TBITS = (1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
KILOMETRES = (100, 4000)  # beside 1,000
APART = "parallelism.schedule=1f1b", "parallelism.vpp=1"
TENTH = "cluster.tiers.site.sync_every=10"
WAYS = {
    "replicas": ((), ()),
    "replicas, flat ring": (("cluster.tiers.site.collectives=ring",), ()),
    "replicas, hsdp": (("parallelism.data_parallel=hsdp", "parallelism.shard_size=64"),) * 2,
    "parameters, every 10th step": ((TENTH,), ()),
    "parameters, beside 10 steps": ((TENTH, "cluster.tiers.site.sync_overlap=10"), ()),
    "stages": (("cluster.placement=megatron",), ()),
    "stages, one chunk each": (("cluster.placement=megatron", *APART), APART),
}
"""What goes between the sites, and the same job in one site: settings of each."""


def run(overrides):
    """Find the step with every effect at 1, and simulated steps [cluster, lane] [s]."""
    program = prepare(load_job(JOB, overrides), SEED).program
    ideal, context = ideal_program(program), RunContext(SEED, THREADS)
    times, *_ = run_blocks(program, range(CLUSTERS), context)
    return float(Screen(ideal, context).times([ideal])[0]), times.astype(float)


def row(ideal, times, base_ideal, base):
    change = times.mean(axis=1) / base.mean() - base.mean(axis=1) / base.mean()
    p50, p95 = (float(np.quantile(times, q)) for q in (0.5, 0.95))
    return {
        "ideal": ideal, "p50": p50, "p95": p95,
        "ideal_change": ideal / base_ideal - 1.0, "mean_change": float(change.mean()),
        "mean_change_se": float(change.std(ddof=1) / np.sqrt(len(change))),
    }  # fmt: skip


def main():
    one_site = {}
    rows = []
    for way, (settings, base) in WAYS.items():
        if base not in one_site:
            one_site[base] = run(("cluster.tiers=", *base))
            ideal, times = one_site[base]
            rows.append({"way": way, "tbits": None, "km": None, **row(ideal, times, ideal, times)})
        base_ideal, base_times = one_site[base]
        points = [(tbits, 1000) for tbits in TBITS] + [
            (25.6, km) for km in KILOMETRES if km != 1000
        ]
        for tbits, km in points:
            link = [
                f"cluster.tiers.site.total_gbits_per_s={1000 * tbits:g}",
                f"cluster.tiers.site.distance_km={km}",
            ]
            found = row(*run([*link, *settings]), base_ideal, base_times)
            rows.append({"way": way, "tbits": tbits, "km": km, **found})
            print(rows[-1], flush=True)
    (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
