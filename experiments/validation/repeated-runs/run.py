"""Totals of repeated runs predicted from other runs' steps, and from a run's own first steps.

    python experiments/validation/repeated-runs/run.py [--splits 100] [--versions NAME ...]

Reads repeated_runs in the folder PRISM_DATA, or in ../shared/data beside the checkout: every record
with at least 10 complete runs of known steps and total. Writes results.json beside itself.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import ks_2samp

from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.predict import draw_runs, no_dependence
from prism.models.steptimes.progress import progress
from prism.traces import StepTimes

HERE = Path(__file__).resolve().parent
DRAWS = 4_000  # predicted totals of each split
FIRST = 500  # steps of the training runs that the second model is fitted on
DONE = (0.0, 0.1, 0.3, 0.6)  # shares of the steps after which a run in progress is predicted
REPEATS = 60  # simulated repetitions behind the data error of those predictions
LEAST_RUNS = 10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def read_versions(folder):
    """Give (table of steps in seconds, totals by run) by record."""
    runs = pd.read_parquet(folder / "runs.parquet")
    steps = pd.read_parquet(folder / "step_deltas.parquet")
    steps = steps[steps.delta_ms > 0]  # the step in which the clock is set back
    found = {}
    for record, group in runs[runs.run_id.isin(steps.run_id)].groupby("record", observed=True):
        group = group[group.train_time_s.notna()]
        if len(group) >= LEAST_RUNS:
            mine = steps[steps.run_id.isin(group.run_id)].sort_values(["run_id", "step"])
            totals = dict(zip(group.run_id.astype(str), group.train_time_s, strict=True))
            found[str(record)] = (mine.assign(run=mine.run_id.astype(str)), totals)
    return found


def as_times(table, name):
    """Give a table of steps as what a reader returns."""
    return StepTimes(
        table.delta_ms.to_numpy(np.float64) / 1e3, table.step.to_numpy(np.int64),
        table.run.to_numpy().astype(np.str_), name, "delta_ms",
    )  # fmt: skip


def agreement(predicted, test):
    """Give p-value, CV ratio and error of the mean of predicted against measured totals."""
    cv = [x.std(ddof=1) / x.mean() for x in (predicted, test)]
    return (
        float(ks_2samp(predicted, test).pvalue), float(cv[0] / cv[1]),
        float(predicted.mean() / test.mean() - 1.0),
    )  # fmt: skip


def half_splits(name, table, totals, splits):
    """Fit half of the runs, predict the totals of the others; [split, (p, CV ratio, error)]."""
    names = np.array(list(totals))
    found = {key: [] for key in ("all_steps", "first_steps", "independent", "copy")}
    for i in range(splits):
        order = np.random.default_rng(i).permutation(names)
        train, rest = order[: names.size // 2], order[names.size // 2 :]
        test = np.array([totals[run] for run in rest])
        known = {run: totals[run] for run in train}
        times = as_times(table[table.run.isin(train)], name)
        for key, first in (("all_steps", None), ("first_steps", FIRST)):
            model = fit_step_times(times, known, first, repeats=0)
            n = model.work.size
            found[key].append(agreement(draw_runs(model, n, DRAWS, i).total, test))
            if key == "all_steps":
                drawn = draw_runs(no_dependence(model), n, DRAWS, i).total
                found["independent"].append(agreement(drawn, test))
        found["copy"].append(agreement(np.array(list(known.values())), test))
    return {key: np.array(rows) for key, rows in found.items()}


def completed(name, table, totals):
    """Predict every run from its first steps and a fit of all others; [run, (in, width, rank)]."""
    found = {share: [] for share in DONE}
    for i, (run, total) in enumerate(totals.items()):
        others = {key: value for key, value in totals.items() if key != run}
        model = fit_step_times(
            as_times(table[table.run != run], name), others, seed=i, repeats=REPEATS
        )
        n, mine = model.work.size, table[table.run == run]
        for share, rows in found.items():
            if share:
                seen = as_times(mine.iloc[: int(share * n)], name)
                past = progress(model, seen, n, DRAWS, i)
                drawn = draw_runs(model, n, DRAWS, i, past).total
            else:
                drawn = draw_runs(model, n, DRAWS, i).total
            low, high = np.quantile(drawn, [0.05, 0.95])
            rows.append((low <= total <= high, high - low, (drawn <= total).mean()))
    return {share: np.array(rows, dtype=np.float64) for share, rows in found.items()}


def describe(splits, progress):
    """Give the figures of a version as plain values."""
    out = {"splits": {}, "completed": {}}
    for key, rows in splits.items():
        p, ratio, error = rows.T
        out["splits"][key] = {
            "p_value": list(np.quantile(p, QUANTILES)), "p_median": float(np.median(p)),
            "cv_ratio": list(np.quantile(ratio, QUANTILES)),
            "cv_ratio_median": float(np.median(ratio)),
            "mean_error_median": float(np.median(error)),
            "p_below_5pct": float((p < 0.05).mean()),
        }  # fmt: skip
    for share, rows in progress.items():
        out["completed"][f"{share:g}"] = {
            "coverage": float(rows[:, 0].mean()), "inside": int(rows[:, 0].sum()),
            "runs": len(rows), "width_s": float(rows[:, 1].mean()),
        }  # fmt: skip
    return out


def broken(name, figures):
    """List the bounds that a version breaks."""
    out = []
    for key in ("all_steps", "first_steps"):
        found = figures["splits"][key]
        if found["p_median"] <= 0.2:
            out.append(f"{name}, {key}: median p-value {found['p_median']:.3f}, not above 0.2")
        if not 1 / 1.5 <= found["cv_ratio_median"] <= 1.5:
            out.append(f"{name}, {key}: median CV ratio {found['cv_ratio_median']:.2f}")
    widths = [value["width_s"] for value in figures["completed"].values()]
    if any(a <= b for a, b in zip(widths, widths[1:], strict=False)):
        out.append(f"{name}: the interval does not narrow: {widths}")
    for share, value in figures["completed"].items():
        if float(share) > 0 and not 0.8 <= value["coverage"] <= 0.97:
            out.append(f"{name}, {share} of the steps: coverage {value['coverage']:.3f}")
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--versions", nargs="*", help="records; all with enough runs without it")
    arguments = parser.parse_args()
    default = HERE.parents[3] / "shared" / "data"
    folder = Path(os.environ.get("PRISM_DATA", default)) / "repeated_runs"
    if not folder.is_dir():
        print(f"no measured data in {folder}; set PRISM_DATA")
        return 0
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    wrong = []
    for name, (table, totals) in read_versions(folder).items():
        if arguments.versions and name not in arguments.versions:
            continue
        begin = time.perf_counter()
        figures = describe(
            half_splits(name, table, totals, arguments.splits), completed(name, table, totals)
        )
        figures["runs"], figures["n_splits"] = len(totals), arguments.splits
        results[name] = figures
        wrong += broken(name, figures)
        print(f"{name}: {len(totals)} runs, {time.perf_counter() - begin:.0f} s")
        for key, value in figures["splits"].items():
            p, ratio = value["p_value"], value["cv_ratio"]
            print(
                f"  {key:12s} p {p[2]:.3f} ({p[0]:.3f} to {p[4]:.3f})  CV ratio {ratio[2]:.2f} "
                f"({ratio[0]:.2f} to {ratio[4]:.2f})"
            )
        for share, value in figures["completed"].items():
            print(
                f"  after {float(share):4.0%}: {value['inside']} of {value['runs']} inside, 90 % "
                f"interval {value['width_s']:.3f} s wide"
            )
    path.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(wrong) if wrong else "all bounds hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
