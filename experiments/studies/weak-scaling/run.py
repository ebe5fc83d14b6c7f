"""What a wider barrier costs: one layout from 128 to 65,536 GPUs, microbatches per replica fixed.

    python experiments/studies/weak-scaling/run.py [--threads 2]

Writes table.csv and barrier.json beside itself; figure.py draws the table. The step effect is off,
since it slows all replicas alike; the last rows have it on, for the published percentiles. The job
is as shipped, with its 7:1 network, but for two rows in Megatron's rank order, in which 3 of 8
(16,384 GPUs) or all (65,536) of the transfers between stages leave their pod.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

import prism
from prism.simulation.summary import spread

HERE = Path(__file__).parent
JOB, SEED, GPUS_PER_REPLICA = "llama3-405b-64k", 1, 128
RATIOS = ("p5_over_p50", "p95_over_p50")
# Step replicates by replicas of the job; a quarter for the stressed library.
REPLICATES = {1: 65_536, 8: 20_480, 32: 10_240, 128: 10_240, 512: 5_120}
LIBRARIES = {"h100-healthy": 1, "h100-uncurated": 1, "h100-stressed": 4}
SHIPPED, MEGATRON = "tp-cp-pp-dp", "megatron"
# Library, placement, replicas, CV of the step effect (None: the library's own).
ROWS = [(library, SHIPPED, dp, 0.0) for library in LIBRARIES for dp in REPLICATES]
ROWS += [("h100-healthy", MEGATRON, dp, 0.0) for dp in (128, 512)] + [
    ("h100-healthy", SHIPPED, 512, None),
    ("h100-stressed", SHIPPED, 512, None),
    ("h100-healthy", SHIPPED, 512, 0.016),
]


def percentile_ratios(sample):
    """p5/p50 and p95/p50."""
    p5, p50, p95 = np.quantile(sample, [0.05, 0.5, 0.95])
    return np.array([p5 / p50, p95 / p50])


def ratio_errors(sample, cluster, n_bootstrap=400):
    """Give the ratios standard errors by resampling clusters, which alone are independent."""
    rng = np.random.default_rng(SEED)
    members = [sample[cluster == k] for k in np.unique(cluster)]
    draws = []
    for _ in range(n_bootstrap):
        picked = rng.integers(0, len(members), len(members))
        draws.append(percentile_ratios(np.concatenate([members[k] for k in picked])))
    return np.std(draws, axis=0, ddof=1)


def simulate(library, placement, dp, step_cv, threads):
    """Simulate one row of the table."""
    settings = [f"parallelism.dp={dp}", f"cluster.nodes={dp * GPUS_PER_REPLICA // 8}",
                f"cluster.placement={placement}", f"variability.library={library}"]  # fmt: skip
    settings += ["parallelism.data_parallel=none"] if dp == 1 else []
    settings += [] if step_cv is None else [f"variability.effects.step.cv={step_cv}"]
    replicates = REPLICATES[dp] // LIBRARIES[library]
    result = prism.simulate(prism.load_job(JOB, settings), replicates, SEED, threads)
    sample, cluster = result.step_time.to_numpy(), result.cluster_idx.to_numpy()
    moments, ideal = spread(sample, cluster), float(result.ideal_step_time)
    row = {"library": library, "placement": placement, "gpus": dp * GPUS_PER_REPLICA, "dp": dp,
           "step_cv": "library" if step_cv is None else step_cv, "replicates": replicates,
           "ideal_s": ideal, "mean_s": moments["mean"], "mean_se_s": moments["mean_se"],
           "slowdown": moments["mean"] / ideal, "slowdown_se": moments["mean_se"] / ideal,
           "cv": moments["cv"], "p5_s": moments["p5"], "p50_s": moments["p50"],
           "p95_s": moments["p95"]}  # fmt: skip
    errors = ratio_errors(sample, cluster)
    for name, value, error in zip(RATIOS, percentile_ratios(sample), errors, strict=True):
        row |= {name: float(value), f"{name}_se": float(error)}
    seconds = float(result.attrs["engine_seconds"])
    print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()},
          f"engine {seconds:.0f} s", flush=True)  # fmt: skip
    return row


def barrier_cost(rows):
    """Mean over ideal of 512 replicas less that of one, with its error, by library [1]."""
    cost = {}
    for library in LIBRARIES:
        chosen = (library, SHIPPED, 0.0)
        curve = [r for r in rows if (r["library"], r["placement"], r["step_cv"]) == chosen]
        one, many = curve[0], curve[-1]
        error = float(np.hypot(one["slowdown_se"], many["slowdown_se"]))
        cost[library] = {"one_replica": one["slowdown"], "65536_gpus": many["slowdown"],
                         "barrier": many["slowdown"] - one["slowdown"], "se": error}  # fmt: skip
    return cost


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None)
    threads = parser.parse_args().threads
    rows = [simulate(*row, threads) for row in ROWS]
    (HERE / "barrier.json").write_text(json.dumps(barrier_cost(rows), indent=1) + "\n")
    with (HERE / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in r.items()}
                         for r in rows)  # fmt: skip


if __name__ == "__main__":
    main()
