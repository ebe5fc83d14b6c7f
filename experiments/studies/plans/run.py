"""Three search tasks of NEST, with `prism sweep --layouts`: time to answer, gain, what p95 changes.

    python experiments/studies/plans/run.py    # writes table.json

NEST's table has throughput over that of a manual layout on H100 behind a spine and leaf network;
which layout, batch, sequence and network it does not say. What is taken here is in `TASKS`.
"""

import json
import time
from pathlib import Path

import prism

HERE = Path(__file__).parent
NETWORK = {"spine": {"gpus": 64, "oversubscription": 4}}
SEQ_LEN = {"gpt3-175b": 2048, "mixtral-8x7b": 4096}
TRAINING = {"microbatch_size": 1, "data_parallel": "zero1"}
TASKS = {
    "gpt3 128": (
        "gpt3-175b", 16, {"tp": 8, "pp": 8, "dp": 2, "global_batch": 512}, ("1f1b", "zb-h1"), (1,)
    ),
    "mixtral 128": (
        "mixtral-8x7b", 16, {"ep": 8, "pp": 4, "dp": 32, "global_batch": 512},
        ("1f1b", "dualpipe-v"), (4, 8),
    ),
    "mixtral 1024": (
        "mixtral-8x7b", 128, {"ep": 8, "pp": 4, "dp": 256, "global_batch": 4096},
        ("1f1b", "dualpipe-v"), (4, 8),
    ),
}  # fmt: skip
"""Model, nodes, the manual layout, schedules and expert-parallel sizes that are searched."""
NEST = {"gpt3 128": (1.334, 661), "mixtral 128": (1.503, 45), "mixtral 1024": (1.519, 240)}
"""NEST's throughput over the manual layout, and its time to answer [s]."""


def main():
    rows = []
    for name, (model, nodes, manual, schedules, eps) in TASKS.items():
        for library in ("h100-healthy", "h100-production"):
            job = prism.load_job({
                "model": {"name": model, "seq_len": SEQ_LEN[model]},
                "parallelism": {**TRAINING, **manual},
                "cluster": {"nodes": nodes, "device": "h100", "tiers": NETWORK},
                "variability": {"library": library},
            })  # fmt: skip
            vary = {"cluster.placement": ["megatron", "tp-cp-pp-dp"],
                    "parallelism.schedule": schedules, "parallelism.ep": eps}  # fmt: skip
            begin = time.perf_counter()
            found = prism.summary(prism.sweep(job, vary, layouts=True, seed=1, threads=2))
            seconds = time.perf_counter() - begin
            rows.append({
                "task": name, "library": library, "seconds": seconds,
                "cpu_seconds": found["cpu_seconds"],
                "layouts": len(found["rows"]) + len(found["refused"]),
                "manual": plan(next(row for row in found["rows"] if row["own"]), vary),
                "fastest": plan(found["rows"][found["fastest"]], vary),
                "robust": plan(found["rows"][found["robust"]], vary),
                "nest_gain": NEST[name][0], "nest_seconds": NEST[name][1],
            })  # fmt: skip
            print(rows[-1])
    (HERE / "table.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def plan(row, vary):
    """Name a layout, with its step [s] and P(fits)."""
    sizes = {k.rpartition(".")[2]: v for k, v in row.items() if k in vary or ".microb" in k}
    sizes |= {k.rpartition(".")[2]: v for k, v in row.items() if k.startswith("parallelism.")}
    figures = {key: row[key] for key in ("p50", "p95", "p50_change", "p50_change_se")}
    return {"layout": sizes, **figures, "p_fits": row["memory"]["p_fits"]}


if __name__ == "__main__":
    main()
