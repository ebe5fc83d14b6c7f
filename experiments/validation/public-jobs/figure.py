"""Draw results.csv and spread.csv: predicted over published, growth, pairs, excess of p95."""

from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from run import excess, growth, measured_excess, of_class, pairs, predicted, read

from prism.plots.base import COLOURS, save_figure

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).resolve().parent
MOST = 0.15  # growth that is drawn


def groups(rows, key):
    """Give (name, its rows, colour, marker) of every group."""
    names = dict.fromkeys(row[key] for row in rows)
    marks = "osD^v"
    return [
        (name, [r for r in rows if r[key] == name], COLOURS[i % len(COLOURS)], marks[i % 5])
        for i, name in enumerate(names)
    ]


def draw_classes(ax, rows):
    """Draw predicted over published step times by class, with geometric means."""
    ax.axvspan(0.9, 1.1, color="0.9", linewidth=0.0)
    ax.axvline(1.0, color="0.5", linewidth=0.8)
    names, devices = [], list(dict.fromkeys(row["class"].split()[0] for row in rows))
    for name, own in sorted(of_class(rows)):
        ratio = np.array([predicted(row) / row["measured_s"] for row in own])
        held = np.array([bool(row["held_out"]) for row in own])
        y = len(names) + np.linspace(-0.25, 0.25, ratio.size) * (ratio.size > 1)
        colour = COLOURS[devices.index(name.split()[0]) % len(COLOURS)]
        ax.plot(ratio[~held], y[~held], "o", color=colour, markersize=4, markerfacecolor="none")
        ax.plot(ratio[held], y[held], "o", color=colour, markersize=4)
        mean = np.exp(np.log(ratio).mean())
        ax.plot([mean] * 2, [len(names) - 0.4, len(names) + 0.4], color="black", linewidth=1.5)
        names.append(f"{name} ({ratio.size})")
    ax.set(xscale="log", ylim=(len(names) - 0.4, -0.6), title="Step times from job files alone",
           xlabel="predicted over published (filled: held out; bar: geometric mean; grey: 10 %)",
           xticks=[0.5, 0.7, 0.9, 1.1, 1.4, 2.0])  # fmt: skip
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())


def draw_growth(ax, rows):
    """Draw growth from the first to the last size of each weak-scaling series."""
    ends = np.array([-5.0, 100 * MOST])
    ax.fill_between(ends, ends - 2.0, ends + 2.0, color="0.9", linewidth=0.0,
                    label="within 2 points")  # fmt: skip
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    for name, part, colour, marker in groups(rows, "class"):
        own = growth(part)
        if own:
            x, y, error = [[100.0 * g[i] for g in own] for i in (5, 6, 7)]
            ax.errorbar(x, y, [2.0 * e for e in error], fmt=marker, color=colour, markersize=5,
                        markerfacecolor="none", linewidth=0.8, label=name)  # fmt: skip
    outside = sum(max(g[5:7]) > MOST for g in growth(rows))
    ax.set(xlim=ends, ylim=ends, xlabel=f"published [%]; {outside} series beyond",
           ylabel="predicted, two standard errors [%]",
           title="Growth from the smallest to the largest size")  # fmt: skip


def draw_pairs(ax, rows):
    """Draw the step over that in bf16 with the same layout."""
    ends = np.array([0.5, 1.0])
    ax.fill_between(ends, ends - 0.05, ends + 0.05, color="0.9", linewidth=0.0, label="within 0.05")
    ax.plot(ends, ends, color="0.5", linewidth=0.8)
    ratio = {id(row): (published, found) for row, published, found in pairs(rows)}
    for name, part, colour, marker in groups([r for r in rows if id(r) in ratio], "class"):
        x, y = zip(*(ratio[id(row)] for row in part), strict=True)
        ax.plot(x, y, marker, color=colour, markersize=5, markerfacecolor="none", label=name)
    ax.set(xlabel="published", ylabel="predicted", title="Step over that in bf16, same layout")


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
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(ScalarFormatter())


def main():
    rows, spread = read(HERE / "results.csv"), read(HERE / "spread.csv")
    figure = Figure(figsize=(13.0, 15.0), layout="constrained", facecolor="white", dpi=120)
    panels = figure.subplot_mosaic([["times", "growth"], ["times", "pairs"], ["times", "spread"]])
    axes = list(panels.values())
    draw_classes(panels["times"], rows)
    draw_growth(panels["growth"], rows)
    draw_pairs(panels["pairs"], rows)
    draw_spread(panels["spread"], spread)
    for ax in axes:
        ax.grid(color="0.92", linewidth=0.8, which="major")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        if ax is not panels["times"]:
            ax.legend(loc="upper left", frameon=False, fontsize=7)
    for suffix in ("png", "svg"):
        save_figure(axes[0], HERE / f"public-jobs.{suffix}")


if __name__ == "__main__":
    main()
