"""Copy what MLPerf logs say of step-to-step spread into mlperf.csv: figures alone, a system a row.

    python experiments/validation/public-jobs/mlperf.py

Reads mlperf in the folder PRISM_DATA, or in ../shared/data beside the checkout (mlcommons training
results v3.0 to v5.1, closed division, Apache-2.0; an unofficial re-analysis). Steps 0 to 4 of each
run and gaps with an evaluation are left out.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "mlperf-scale"))
from other_scales import DEVICES, FOLDER, job_of, read_runs  # noqa: E402

KEYS = ("tp", "cp", "pp", "vpp", "dp", "microbatches", "microbatch_size")


def spread(times):
    """Give median step, p95 less it within runs, and the sd of the medians of runs [s]."""
    runs = np.unique(times.run)
    medians = np.array([np.median(times.seconds[times.run == run]) for run in runs])
    own = zip(runs, medians, strict=True)
    within = np.concatenate([times.seconds[times.run == r] / m for r, m in own])
    p50 = float(np.median(medians))
    return p50, p50 * float(np.quantile(within, 0.95) - 1.0), float(medians.std(ddof=1))


def precision(round_, submitter):
    """Give the precision of a GPT-3 or Llama 3.1 405B system, as NVIDIA reported of the rounds.

    Transformer Engine's FP8, and NVFP4 in NVIDIA's own of v5.1, which alone had 4 bits.
    """
    return "nvfp4" if (round_, submitter) == ("v5.1", "NVIDIA") else "fp8"


def main():
    rows = []
    for system in pd.read_csv(FOLDER / "systems.csv").itertuples():
        if not any(device in system.accelerator for device in DEVICES):
            print(f"{system.system}: prism has no {system.accelerator}", file=sys.stderr)
            continue
        job = job_of(system.system, system.benchmark)
        times = read_runs(system.system, system.benchmark)
        p50, tail, between = spread(times)
        rows.append({
            "round": system.round, "submitter": system.submitter, "system": system.system,
            "base": job.name, "device": job.cluster.device,
            "precision": precision(system.round, system.submitter),
            "nodes": job.n_nodes, "gpus_per_node": job.cluster.gpus_per_node,
            **{key: getattr(job.parallelism, key) for key in KEYS},
            "steps": times.seconds.size, "runs": np.unique(times.run).size, "p50_s": round(p50, 5),
            "p95_less_p50_s": round(tail, 5), "between_runs_s": round(between, 5),
        })  # fmt: skip
    pd.DataFrame(rows).to_csv(HERE / "mlperf.csv", index=False)


if __name__ == "__main__":
    main()
