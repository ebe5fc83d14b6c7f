"""All layouts of three shipped jobs beside the one that each ships with.

    python experiments/studies/layouts/run.py [JOB ...]

Writes what is best, the job's own and how many layouts there are into ``table.json``, and the plot
of each job. With names, only those jobs are run again.
"""

import json
import sys
from pathlib import Path

from prism.analyses.sweep import sweep
from prism.plots.base import save_figure
from prism.plots.sweep import plot_sweep

HERE = Path(__file__).parent
JOBS = ("llama3-405b-16k", "gpt3-175b-512", "llama3-70b-fsdp-512")
SHOWN = ("p50", "p50_se", "p95", "p95_se", "p95_change", "p95_change_se", "memory", "clusters",
         "ideal_step_time", "exposed_communication", "mfu", "figures", "own")  # fmt: skip


def main(names):
    path = HERE / "table.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    for name in names or JOBS:
        result = sweep(name, layouts=True, seed=1)
        numbers = result.figures()
        rows, varied = numbers["rows"], numbers["varied"]
        kept = {numbers["fastest"], numbers["robust"], *numbers["frontier"], *range(5)}
        kept |= {i for i, row in enumerate(rows) if row["own"]}
        plain = [i for i, row in enumerate(rows) if row["parallelism.cp"] == 1 and row["p50"]]
        kept |= set(plain[:2])
        table[name] = {
            "layouts": len(rows),
            "simulated": sum(row["p50"] is not None for row in rows),
            "refused": len(numbers["refused"]),
            "p_correct": numbers["p_correct"],
            "cpu_seconds": round(numbers["cpu_seconds"]),
            "rows": [{key: rows[i].get(key) for key in (*varied, *SHOWN)} for i in sorted(kept)],
        }
        path.write_text(json.dumps(table, indent=1) + "\n")
        save_figure(plot_sweep(result), HERE / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
