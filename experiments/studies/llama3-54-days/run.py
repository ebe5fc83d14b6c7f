"""54 days of Llama 3 405B on 16,384 GPUs, and how much of them is effective training time.

The steps are simulated once; then restart time, checkpoint interval and rate of failures are
varied, since only the number of interruptions and "over 90 % effective" were published.

Run from a checkout: python experiments/studies/llama3-54-days/run.py [--replicates 12800]
[--run-replicates 1000] [--seed 1]. Writes table.json, progress.png and progress.svg beside itself.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

import prism
from prism.plots.base import save_figure
from prism.plots.run import plot_progress
from prism.simulation.execution.context import RunContext, make_context
from prism.simulation.prepare import prepare
from prism.simulation.runs.build import PAUSES, build_run_model, mean_step
from prism.simulation.runs.checkpointing import FailureDistribution, best_steps
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import RunModel

HERE = Path(__file__).parent
DAYS, DAY_S = 54.0, 86_400.0
# failures per 1,000 node-days: Llama 3 405B; two research clusters (arXiv:2410.21680)
RATES = {"Llama 3": 3.79, "RSC-1": 6.50, "RSC-2": 2.34}
RESTARTS_MIN = (5, 10, 20)
INTERVALS_MIN = (5, 10, 30, 60)


def one(model: RunModel, rate: float, restart_s: float, steps: int, runs: int, seed: int) -> dict:
    """Simulate 54 days: as many steps as they hold, about."""
    assert model.interruptions is not None and model.checkpoints is not None
    kinds = tuple(replace(k, restart_s=restart_s) for k in model.interruptions.causes)
    fail = replace(model.interruptions, per_1000_node_days=rate, causes=kinds)
    distribution = FailureDistribution(fail.rate_per_s, fail.mean_down_s)
    step_s = mean_step(model)
    steps = steps or best_steps(step_s, model.checkpoints.write_s, distribution)
    checkpoints = replace(model.checkpoints, interval_steps=steps)
    model = replace(model, interruptions=fail, checkpoints=checkpoints)
    lost = distribution.rate_per_s * (distribution.down_s + 0.5 * steps * step_s)
    n_steps = round(DAYS * DAY_S * (1.0 - lost) / step_s)
    found = simulate_runs(model, n_steps, runs, RunContext(seed))
    counts = np.sum([v for k, v in found.terms.items() if k not in PAUSES], axis=0)
    share = counts / found.total
    per_54 = found.failures * DAYS * DAY_S / found.total
    return {
        "per_1000_node_days": rate,
        "restart_min": restart_s / 60.0,
        "checkpoint_min": steps * step_s / 60.0,
        "interruptions": float(per_54.mean()),
        "interruptions_std": float(per_54.std()),
        "effective": float(share.mean()),
        "effective_p5_p95": np.quantile(share, [0.05, 0.95]).tolist(),
        "days": float(found.total.mean() / DAY_S),
        "days_std": float(found.total.std() / DAY_S),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicates", type=int, default=12_800)
    parser.add_argument("--run-replicates", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    job = prism.load_job(HERE / "llama3-54-days.yaml")
    result = prism.estimate(
        job, replicates=args.replicates, run_replicates=args.run_replicates, seed=args.seed
    )
    ax = plot_progress(result)
    for suffix in ("png", "svg"):
        save_figure(ax, HERE / f"progress.{suffix}")
    model = build_run_model(prepare(job, args.seed), result, make_context(args.seed))
    step_s = mean_step(model)
    rows = []
    for minutes in (0, *INTERVALS_MIN):  # 0: the best
        for restart in RESTARTS_MIN:
            steps = round(60.0 * minutes / step_s)
            rows.append(
                one(model, RATES["Llama 3"], 60.0 * restart, steps, args.run_replicates, args.seed)
            )
    for name in ("RSC-1", "RSC-2"):
        steps = round(1800.0 / step_s)
        rows.append(one(model, RATES[name], 600.0, steps, args.run_replicates, args.seed))
    for row in rows:
        low, high = row["effective_p5_p95"]
        print(
            f"{row['per_1000_node_days']:.2f} per 1,000 node-days, restart "
            f"{row['restart_min']:2.0f} min, checkpoint every {row['checkpoint_min']:4.1f} min: "
            f"{row['interruptions']:5.1f} ± {row['interruptions_std']:4.1f} interruptions in 54 "
            f"days, effective {row['effective']:.3f} ({low:.3f} to {high:.3f})"
        )
    summary = prism.summary(result)
    keys = ("time_to_train", "ettr", "failures", "delay_by_term", "variance_by_term",
            "checkpoint", "best_checkpoint_interval", "finish_by", "step_time")  # fmt: skip
    table = {"job": {key: summary[key] for key in keys}, "step_s": step_s, "rows": rows}
    (HERE / "table.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
