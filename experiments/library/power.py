"""Fit speed against power (`prism.cluster.power`) to published points, and test it on others.

`power_points.csv` has one line per measured point: power is the measured draw (stages of Perseus,
epochs of Zeus) or the limit (the rest), and seconds are of one unit of work. Times are compared
with the time at the device's TDP, or at the largest power where that is less.

    python experiments/library/power.py
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.stats import t as student

from prism.cluster.power import AMPERE, CURVES, PowerCurve

HERE = Path(__file__).parent


def points() -> pd.DataFrame:
    """Points with their power over the reference's (`share`) and time over its (`ratio`)."""
    table = pd.read_csv(HERE / "power_points.csv")
    out = []
    for _, rows in table.groupby(["device", "workload"], sort=False):
        rows = rows.sort_values("power_w")
        most = min(rows.tdp_w.iloc[0], rows.power_w.max())
        at = np.interp(most, rows.power_w, rows.seconds)
        rows = rows.assign(share=rows.power_w / most, ratio=rows.seconds / at)
        out.append(rows[rows.share < 1.0])
    return pd.concat(out)


def errors(rows: pd.DataFrame, curve: PowerCurve) -> np.ndarray:
    """Logarithm of predicted over measured time."""
    predicted = [1.0 / curve.speed(share) for share in rows.share]
    return np.log(predicted) - np.log(rows.ratio.to_numpy())


def fit_ampere(rows: pd.DataFrame) -> np.ndarray:
    """Floor, exponent and knee."""
    bounds = ([0.0, 1.0, 0.5], [0.4, 6.0, 1.0])
    start = [0.1, 2.5, 0.85]
    return least_squares(lambda p: errors(rows, PowerCurve(*p)), start, bounds=bounds).x


def fit_hopper(rows: pd.DataFrame, floor: float) -> np.ndarray:
    """Exponent of each point alone: six workloads with one limit each."""
    dynamic = (rows.share - floor) / (1.0 - floor)
    return -np.log(dynamic.to_numpy()) / np.log(rows.ratio.to_numpy())


def fits() -> dict[str, tuple[float, float, float]]:
    """Fit what `prism.cluster.power` has, each figure with its interval.

    Ampere's are the ranges over four curves, of two models' forward and backward: points of one
    curve err together. Hopper's exponent has its 95 % interval over workloads.
    """
    table = points()
    a100 = table[table.device == "a100"]
    found = fit_ampere(a100[a100.use == "fit"])
    parts = np.array([fit_ampere(rows) for _, rows in a100.groupby("workload")])
    h100 = table[table.device == "h100"]
    each = fit_hopper(h100, found[0])
    reach = student.isf(0.025, each.size - 1) * each.std(ddof=1) / each.size**0.5
    ranges = zip(found, parts.min(axis=0), parts.max(axis=0), strict=True)
    out = dict(zip(("floor", "exponent", "knee"), ranges, strict=True))
    mean, slowest = each.mean(), 1.0 / h100.ratio.max()
    return out | {
        "hopper_exponent": (mean, mean - reach, mean + reach), "hopper_knee": (slowest, 0, slowest)
    }  # fmt: skip


def left_out() -> float:
    """Root mean square error of H100's points, each from the exponent of the others."""
    rows, floor = points().query("device == 'h100'"), fits()["floor"][0]
    each = fit_hopper(rows, floor)
    wrong = [
        errors(rows.iloc[[i]], PowerCurve(floor, float(np.delete(each, i).mean()), 0.5))[0]
        for i in range(each.size)
    ]
    return float(np.sqrt(np.mean(np.square(wrong))))


def spread_of_clocks() -> dict[str, float]:
    """Spread of V100s' clocks, of the logarithm: at their limit and far below it."""
    data = Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data"))
    runs = pd.read_parquet(data / "gpu_variability" / "runs.parquet")
    runs = runs[runs.cluster == "longhorn"]
    found = {}
    for work, rows in runs.groupby("workload"):
        each = rows.groupby("gpu_id")[["sm_clock_mhz", "power_w"]].median().dropna()
        found[f"{work} at {each.power_w.median():.0f} W"] = float(np.log(each.sm_clock_mhz).std())
    return found


def main() -> None:
    """Print fits, tests and spreads."""
    for name, (value, low, high) in fits().items():
        print(f"{name:16} {value:.3f}, {low:.3f} to {high:.3f}")
    for (use, device, work), rows in points().groupby(["use", "device", "workload"], sort=False):
        wrong = errors(rows, CURVES.get(device, AMPERE))
        rms, most = np.sqrt(np.mean(wrong**2)), rows.ratio.max()
        name = f"{use:6} {device:9} {work:28}"
        if use == "memory":
            print(f"{name} {len(rows):2} points, slowed at most {most - 1.0:.1%}")
            continue
        deep = wrong[rows.share.to_numpy() < 0.8]
        print(
            f"{name} {len(rows):2} points to {most:4.2f} times the time: rms {rms:.1%}, "
            f"below 0.8 of the power {deep.mean():+.1%}"
        )
    print(f"H100, each point from the others: rms {left_out():.1%}")
    print("clocks of V100:", {k: f"{v:.2%}" for k, v in spread_of_clocks().items()})


if __name__ == "__main__":
    main()
