"""What lifts the p95 of measured steps over their median: a slow start, stalls, or a slow run.

    python experiments/validation/mlperf-scale/tails.py

For every system of GPT-3 and Llama 3.1 405B in mlperf: p95 over p50 with and without the first
steps, how far the first steps lie from the settled ones in each run, how far the runs' medians lie
apart, and how many steps of each run stick out. Evaluation gaps left out. Writes tails.csv.
Nothing is predicted here.
"""

import csv
import sys

import numpy as np
import pandas as pd
from other_scales import FOLDER, GPT3, HERE, LLAMA, SETTLED, WARM_UP, read_runs

STARTS = (WARM_UP, 30, 60, SETTLED, 120)  # first step that is counted
WINDOWS = ((WARM_UP, 20), (20, 35), (35, 50), (50, 65), (65, 80), (80, 95))
STALL = 1.02  # of the run's median: a step that sticks out


def tail_from(seconds, steps, first):
    """Give p95 over p50 of the steps from one on."""
    kept = seconds[steps >= first]
    return float(np.quantile(kept, 0.95) / np.median(kept))


def drift_of(seconds, steps):
    """Give windows' medians over that of the settled steps, less 1 [window]."""
    settled = np.median(seconds[steps >= SETTLED])
    return np.array([
        np.median(seconds[(steps >= a) & (steps < b)]) / settled - 1.0 for a, b in WINDOWS
    ])  # fmt: skip


def row_of(system, benchmark):
    """Give a system's row: figures of all runs pooled, and lists of a figure a run."""
    times = read_runs(system, benchmark)
    runs = [(times.seconds[k], times.step[k]) for k in
            (times.run == name for name in np.unique(times.run))]  # fmt: skip
    medians = np.array([np.median(x) for x, _ in runs])
    out = {"benchmark": benchmark, "system": system, "steps": times.seconds.size}
    out |= {f"tail_from_{n}": tail_from(times.seconds, times.step, n) for n in STARTS}
    out["tail_of_runs"] = [tail_from(x, s, WARM_UP) for x, s in runs]
    out["median_of_runs"] = list(medians / np.median(times.seconds))
    out["sticking_out_of_runs"] = [float(np.mean(x > STALL * np.median(x))) for x, _ in runs]
    drift = np.array([drift_of(*run) for run in runs])
    for (a, b), values in zip(WINDOWS, drift.T, strict=True):
        out[f"drift_{a}_to_{b}"] = list(values)
    return out


def as_text(value):
    """Write a figure, or a figure a run."""
    if isinstance(value, list):
        return " ".join(f"{x:.4f}" for x in value)
    return f"{value:.4f}" if isinstance(value, float) else value


def main():
    if not FOLDER.is_dir():
        print(f"no measured data in {FOLDER}; set PRISM_DATA")
        return 0
    systems = pd.read_csv(FOLDER / "systems.csv")
    systems = systems[systems.benchmark.isin([GPT3, LLAMA])]
    rows = [row_of(s.system, s.benchmark) for s in systems.itertuples()]
    print(f"{'p95 / p50, all runs, steps from':40s}" + "".join(f"{n:>8d}" for n in STARTS)
          + f"   steps {WARM_UP}-19 over settled ones, by run [%]"
          + "   runs' medians [%]   sticking out [%]")  # fmt: skip
    for row in rows:
        start = " ".join(f"{100 * x:+5.2f}" for x in row[f"drift_{WARM_UP}_to_20"])
        medians = " ".join(f"{100 * x - 100:+5.2f}" for x in row["median_of_runs"])
        out = " ".join(f"{100 * x:4.1f}" for x in row["sticking_out_of_runs"])
        tails = "".join(f"{row[f'tail_from_{n}']:8.4f}" for n in STARTS)
        print(f"{row['system']:40s}{tails}   {start}   {medians}   {out}")
    with (HERE / "tails.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: as_text(v) for k, v in row.items()} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
