"""Draw table.csv: mean over ideal against GPUs, with two standard errors and p5 to p95 of steps."""

import csv
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from prism.plots.base import COLOURS, LINE_STYLES, save_figure

matplotlib.style.use("prism.plots.light")

HERE = Path(__file__).parent
SHIPPED = "tp-cp-pp-dp"
CURVES = (("h100-healthy", SHIPPED), ("h100-stressed", SHIPPED), ("h100-uncurated", SHIPPED),
          ("h100-healthy", "megatron"))  # fmt: skip


def draw_curve(ax, rows, colour, line_style, label):
    """Draw one library in one rank order."""
    gpus, ideal = [int(r["gpus"]) for r in rows], [float(r["ideal_s"]) for r in rows]
    mean, error = ([float(r[k]) for r in rows] for k in ("slowdown", "slowdown_se"))
    low, high = (
        [float(r[k]) / i for r, i in zip(rows, ideal, strict=True)] for k in ("p5_s", "p95_s")
    )
    ax.fill_between(gpus, low, high, color=colour, alpha=0.18, linewidth=0.0)
    ax.errorbar(gpus, mean, [2.0 * e for e in error], color=colour, linestyle=line_style,
                marker="o", markersize=5, capsize=3, label=label)  # fmt: skip
    up = line_style == "-"
    for x, y in zip(gpus, mean, strict=True):
        ax.annotate(f"{y:.3f}", (x, y), xytext=(4, 8) if up else (-6, -5), ha="right", fontsize=9,
                    textcoords="offset points", color=colour)  # fmt: skip


def main():
    with (HERE / "table.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["step_cv"] in ("0", "0.0")]
    figure = Figure(figsize=(12.0, 4.8), layout="constrained", facecolor="white", dpi=150)
    axes = figure.subplots(1, 2)
    for k, (library, placement) in enumerate(CURVES):
        chosen = [r for r in rows if (r["library"], r["placement"]) == (library, placement)]
        ax = axes[1 if "stressed" in library else 0]
        line_style = LINE_STYLES[0 if placement == SHIPPED else 1]
        order = "as shipped" if placement == SHIPPED else "Megatron's order"
        label = f"{library}, {order}: mean, and p5 to p95 of steps"
        draw_curve(ax, chosen, COLOURS[k], line_style, label)
    gpus = sorted({int(r["gpus"]) for r in rows})
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(gpus, [f"{g:,}" if g > 128 else "128\n(one replica)" for g in gpus])
        ax.minorticks_off()
        ax.margins(x=0.08, y=0.12)
        ax.set_xlabel("GPUs, 128 a replica")
        ax.set_ylabel("step time over the ideal step")
        ax.grid(color="0.9", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    for suffix in ("png", "svg"):
        save_figure(axes[0], HERE / f"weak-scaling.{suffix}")


if __name__ == "__main__":
    main()
