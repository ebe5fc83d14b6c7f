"""Draw results.csv and spread.csv: predicted against published, growth with size, excess of p95."""

import csv
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from run import excess, growth, measured_excess

from prism.plots.base import COLOURS, save_figure

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).resolve().parent
TEXT = {"job", "class", "release", "system", "round", "device"}


def read(name):
    """Read a table that run.py wrote."""
    with (HERE / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {k: v if k in TEXT else int(v) if k == "gpus" else float(v) for k, v in row.items()}
        for row in rows
    ]


def groups(rows, key):
    """Give (name, its rows, colour, marker) of every group."""
    names = dict.fromkeys(row[key] for row in rows)
    marks = "osD^v"
    return [
        (name, [r for r in rows if r[key] == name], COLOURS[i % len(COLOURS)], marks[i % 5])
        for i, name in enumerate(names)
    ]


def draw_times(ax, rows):
    """Draw predicted against published step times."""
    ends = np.array([0.5, 60.0])
    ax.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", linewidth=0.0, label="within 10 %")
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    for name, own, colour, marker in groups(rows, "class"):
        x, y = [[r[k] for r in own] for k in ("measured_s", "mean_s")]
        ax.plot(x, y, marker, color=colour, markersize=5, markerfacecolor="none", label=name)
    ax.set(xscale="log", yscale="log", title="Step times from job files alone",
           xlabel="published step time [s]", ylabel="predicted mean step time [s]")  # fmt: skip


def draw_growth(ax, rows):
    """Draw growth from the first to the last size of each weak-scaling series."""
    ends = np.array([-3.0, 13.0])
    ax.fill_between(ends, ends - 2.0, ends + 2.0, color="0.9", linewidth=0.0,
                    label="within 2 points")  # fmt: skip
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    classes = {r["job"]: r["class"] for r in rows}
    for name, _, colour, marker in groups(rows, "class"):
        own = [g for g in growth(rows) if classes[g[0]] == name]
        if own:
            x, y, error = [[100.0 * g[i] for g in own] for i in (4, 5, 6)]
            ax.errorbar(x, y, [2.0 * e for e in error], fmt=marker, color=colour, markersize=5,
                        markerfacecolor="none", linewidth=0.8, label=name)  # fmt: skip
    ax.set(xlabel="published [%]", ylabel="predicted, two standard errors [%]",
           title="Growth from the smallest to the largest size")  # fmt: skip


def draw_spread(ax, rows):
    """Draw p95 over p50 less 1, on one allocation, of MLPerf systems."""
    ends = np.array([0.08, 8.0])
    ax.fill_between(ends, ends / 2.0, ends * 2.0, color="0.9", linewidth=0.0,
                    label="within a factor of 2")  # fmt: skip
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    for name, own, colour, marker in groups(rows, "job"):
        ax.plot([100.0 * measured_excess(r) for r in own], [100.0 * excess(r) for r in own],
                marker, color=colour, markersize=5, markerfacecolor="none", label=name)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="measured p95 / p50 - 1 [%]",
           ylabel="predicted [%]", title="Spread from step to step, MLPerf systems")  # fmt: skip


def main():
    rows, spread = read("results.csv"), read("spread.csv")
    figure = Figure(figsize=(15.0, 5.0), layout="constrained", facecolor="white", dpi=150)
    axes = figure.subplots(1, 3)
    draw_times(axes[0], rows)
    draw_growth(axes[1], rows)
    draw_spread(axes[2], spread)
    for ax in axes:
        ax.grid(color="0.92", linewidth=0.8, which="major")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(loc="upper left", frameon=False, fontsize=8)
    for suffix in ("png", "svg"):
        save_figure(axes[0], HERE / f"public-jobs.{suffix}")


if __name__ == "__main__":
    main()
