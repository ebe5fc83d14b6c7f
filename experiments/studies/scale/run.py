"""Time and memory of a step from 1,024 to 1,048,576 GPUs, all replicas simulated and some of them.

    python experiments/studies/scale/run.py [--replicates 2560] [--exact-up-to 1048576]

One layout (llama3-405b-1m: tp 8, pp 16, zero1), more replicas. Every point is a process of its
own, so that its peak memory is its own. Writes table.json beside itself; figure.py draws it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
JOB, SEED, THREADS = "llama3-405b-1m", 1, 2
REPLICAS = (8, 32, 128, 512, 2048, 8192)


def point(dp, engine, replicates):
    """Simulate one size in this process, and print what it took."""
    import prism
    from prism.simulation.summary import spread

    job = prism.load_job(JOB, [f"parallelism.dp={dp}", f"cluster.nodes={16 * dp}"])
    prism.simulate(job, 64, SEED, THREADS, engine=engine)  # compiled code is loaded
    wall, cpu = time.perf_counter(), time.process_time()
    result = prism.simulate(job, replicates, SEED, THREADS, engine=engine)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    steps = spread(result.step_time.to_numpy(), result.cluster_idx.to_numpy())
    figures = prism.summary(result)["replicas"]
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        "gpus": 128 * dp, "dp": dp, "engine": figures["engine"], "simulated": figures["simulated"],
        "replicates": replicates, "wall_s": wall, "cpu_s": cpu, "peak_gb": kib / 1e6,
        "ideal_s": float(result.ideal_step_time), "mean_s": steps["mean"],
        "mean_se_s": steps["mean_se"], "p99_s": steps["p99"],
        "between_s": steps["between_cluster_std"], "within_s": steps["within_cluster_std"],
        "slowest_unseen": figures.get("slowest_unseen"),
    }))  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicates", type=int, default=2560)
    parser.add_argument("--exact-up-to", type=int, default=1_048_576)
    parser.add_argument("--point", nargs=2)
    args = parser.parse_args()
    if args.point:
        point(int(args.point[0]), args.point[1], args.replicates)
        return
    rows = []
    for dp in REPLICAS:
        for engine in ("exchangeable", "exact"):
            if (engine == "exchangeable" and dp < 512) or (
                engine == "exact" and 128 * dp > args.exact_up_to
            ):
                continue
            command = [sys.executable, __file__, "--point", str(dp), engine]
            command += ["--replicates", str(args.replicates)]
            out = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(out.stdout))
            print(rows[-1], flush=True)
            (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
