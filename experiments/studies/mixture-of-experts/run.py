"""DeepSeek-V3 on 2,048 H800s against its published GPU hours, and what decides the answer.

The shipped job as it is, and with single assumptions dropped; all under the same seed, so that
differences are paired. Writes table.csv.
"""

import csv
from pathlib import Path

import numpy as np

from prism.jobs.job import load_job
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks

HERE = Path(__file__).parent
JOB, SEED, CLUSTERS = "deepseek-v3-2048", 1, 64
PUBLISHED = 180e3  # H800 hours per 1e12 tokens: arXiv:2412.19437, section 1

# name, overrides
CASES = (
    ("as shipped", ()),
    ("CUDA graphs", ("parallelism.cuda_graphs=true",)),
    ("all-to-alls exposed", ("parallelism.expert_overlap=false",)),
    ("all-to-alls exposed, any node",
     ("parallelism.expert_overlap=false", "parallelism.expert_node_limit=null")),
    ("experts balanced", ("parallelism.expert_imbalance=1.0",)),
    ("and without variation", ("parallelism.expert_imbalance=1.0",
                               "variability.effects.expert.cv=0")),
    ("twice the imbalance", ("parallelism.expert_imbalance=1.2",
                             "variability.effects.expert.cv=0.1")),
    ("16 times the microbatches", ("parallelism.microbatches=1920",)),
)  # fmt: skip


def simulate_case(overrides):
    """Ideal and mean step [s], the mean's standard error by cluster, GPU hours per 1e12 tokens."""
    job = load_job(JOB, overrides)
    step = prepare(job, SEED)
    program, clusters = step.program, CLUSTERS if job.parallelism.microbatches < 1000 else 16
    times = run_blocks(program, range(clusters), RunContext(SEED, 2))[0].mean(
        axis=1, dtype=np.float64
    )
    ideal = float(run_blocks(ideal_program(program), range(1), RunContext(SEED))[0][0, 0])
    hours = job.world_size / job.tokens_per_step * 1e12 / 3600
    se = float(times.std(ddof=1)) / clusters**0.5
    return ideal, float(times.mean()), se, hours * float(times.mean())


def main():
    rows = []
    for name, overrides in CASES:
        ideal, mean, se, hours = simulate_case(overrides)
        rows.append([name, f"{ideal:.3f}", f"{mean:.3f}", f"{se:.3f}", f"{hours / 1e3:.1f}",
                     f"{hours / PUBLISHED:.3f}"])  # fmt: skip
        print("  ".join(rows[-1]), flush=True)
    with (HERE / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "ideal_s", "mean_s", "mean_se_s", "k_gpu_hours_per_1e12_tokens",
                         "over_published"])  # fmt: skip
        writer.writerows(rows)


if __name__ == "__main__":
    main()
