"""Steps of another run predicted from the first half of one run, on the same system.

    python experiments/validation/mlperf-scale/same_scale.py

Reads mlperf in the folder PRISM_DATA, or in ../shared/data beside the checkout. For every system
with a known floor (KS between its real repeats): each run in turn trains with its first half, each
other run is predicted; steps 0 to 4 dropped. Writes same_scale.csv.
"""

import csv
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from prism.common.agreement import ks_statistic
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.predict import draw_steps
from prism.traces import StepTimes

HERE = Path(__file__).resolve().parent
KEY = ["round", "benchmark", "submitter", "system"]
WARM_UP = 5
DRAWN_RUNS, REPETITIONS = 100, 1_000


def runs_of(table, drop_evaluations):
    """Give (step numbers, seconds) of each run."""
    found = []
    for _, run in table.groupby("run", observed=True):
        run = run.sort_values("log_idx").reset_index(drop=True).iloc[WARM_UP:]
        if drop_evaluations:
            run = run[~run.crosses_eval]
        run = run[np.isfinite(run.step_s)]
        found.append((run.index.to_numpy(), run.step_s.to_numpy(np.float64)))
    return found


def compare(runs):
    """Give the KS of prediction, independent distribution and copy, [pair of runs, 3]."""
    rows = []
    for i, (steps, seconds) in enumerate(runs):
        half = seconds.size // 2
        train = seconds[:half]
        times = StepTimes(train, steps[:half], np.full(half, ""), "first half", "step_s")
        model = fit_step_times(times, repeats=0)
        spread = model.spread
        white = float(np.sqrt(spread.white**2 + spread.drift**2))
        lognormal = train.mean() * np.exp(
            np.log(train).std() * np.random.default_rng(i).standard_normal(20_000)
        )
        for j, (_, other) in enumerate(runs):
            if j == i:
                continue
            drawn = draw_steps(model, np.arange(other.size), DRAWN_RUNS, i).ravel()
            alone = replace(model, spread=replace(spread, white=white, drift=0.0, tau_s=0.0))
            flat = draw_steps(alone, np.arange(other.size), DRAWN_RUNS, i).ravel()
            rows.append([ks_statistic(x, other) for x in (drawn, flat, train, lognormal)])
    return np.array(rows)


def main():
    default = HERE.parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PRISM_DATA", default)) / "mlperf"
    if not folder.is_dir():
        print(f"no measured data in {folder}; set PRISM_DATA")
        return 0
    steps = pd.read_parquet(folder / "step_times.parquet")
    floors = pd.read_csv(folder / "ks_floor.csv")
    names = ("prism", "independent", "copy", "lognormal")
    table, status = [], 0
    for drop in (True, False):
        excess = []
        for _, floor in floors.iterrows():
            mine = steps[(steps[KEY] == floor[KEY]).all(axis=1)]
            ks = np.median(compare(runs_of(mine, drop)), axis=0)
            excess.append(ks - floor.ks_run_run_med)
            table.append([*floor[KEY], drop, floor.ks_run_run_med, *ks])
        excess = np.array(excess)
        middle = np.median(excess, axis=0)
        rng = np.random.default_rng(1)
        again = [
            np.median(excess[rng.integers(0, len(excess), len(excess))], axis=0)
            for _ in range(REPETITIONS)
        ]
        error = np.std(again, axis=0)
        better = float(np.mean([row[0] < row[2] for row in again]))
        print(f"evaluations {'left out' if drop else 'kept'}: KS less floor, over {len(excess)}")
        for k, name in enumerate(names):
            print(
                f"  {name:12s} median {middle[k]:+.4f} +- {error[k]:.4f}  "
                f"mean {excess[:, k].mean():+.4f}"
            )
        wins = int((excess[:, 0] < excess[:, 2]).sum())
        print(f"  below the copy in {wins} of {len(excess)} systems, and in the median of "
              f"{better:.0%} of resampled sets of systems")  # fmt: skip
        status |= int(middle[0] >= middle[2])
    with (HERE / "same_scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*KEY, "evaluations_left_out", "floor", *names])
        writer.writerows([[f"{x:.4f}" if isinstance(x, float) else x for x in r] for r in table])
    return status


if __name__ == "__main__":
    sys.exit(main())
