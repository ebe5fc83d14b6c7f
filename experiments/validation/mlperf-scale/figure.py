"""Draw other_scales.csv: p50 to p95 of each size, measured, predicted, copied and on a line.

    python experiments/validation/mlperf-scale/figure.py

Writes other_scales.png and other_scales.svg. Left out: evaluation gaps kept, other assumptions.
"""

import matplotlib.style
from matplotlib.figure import Figure
from other_scales import HERE, read_rows

from prism.plots.base import BLUE, GREEN, GREY, RED, save_figure

matplotlib.style.use("prism.plots.light")

EDGE = 7.2  # percent drawn; what lies beyond is written at the edge
SHOWN = {
    "required": "required sizes", "check": "other systems and sizes, as a check",
}  # fmt: skip
PREDICTIONS = (("prism", BLUE, "o", "prism"), ("copy", RED, "s", "copy of the nearest size"),
               ("line", GREEN, "^", "line in microbatches"))  # fmt: skip


def draw_prediction(ax, row, y, name, colour, marker):
    """Draw a prediction's p50 and p95 over the measured p50, or its number at the edge."""
    tail = row["p95_s"] / row["p50_s"]
    p50 = 100.0 * row[f"{name}_p50"]
    p95 = 100.0 * ((1.0 + row[f"{name}_p95"]) * tail - 1.0)
    if abs(p50) > EDGE:
        sign = 1.0 if p50 > 0.0 else -1.0
        ax.plot(sign * EDGE, y, marker=">" if sign > 0.0 else "<", color=colour, markersize=6)
        ax.annotate(f"{p50:+.0f} %", (sign * EDGE, y), xytext=(-sign * 7, 0), va="center",
                    ha="right" if sign > 0.0 else "left", textcoords="offset points",
                    fontsize=8, color=colour)  # fmt: skip
        return
    ax.plot([p50, min(p95, EDGE)], [y, y], color=colour, linewidth=1.6)
    ax.plot(p50, y, marker=marker, color=colour, markersize=6, markeredgecolor="white")
    ax.plot(min(p95, EDGE), y, marker="|", color=colour, markersize=8)


def draw_kind(ax, rows, title):
    """Draw the sizes of one kind, a line each."""
    for k, row in enumerate(rows):
        measured = 100.0 * (row["p95_s"] / row["p50_s"] - 1.0)
        ax.barh(k, max(measured, 0.02), height=0.8, left=0.0, color="0.85")
        ax.errorbar(0.0, k + 0.33, xerr=50.0 * row["run_spread_p50"], color=GREY, capsize=3,
                    linewidth=1.2)  # fmt: skip
        for offset, (name, colour, marker, _) in zip((-0.22, 0.0, 0.22), PREDICTIONS, strict=True):
            draw_prediction(ax, row, k + offset - 0.06, name, colour, marker)
    labels = [
        f"{r['case']}\n{r['trained_on']} → {r['gpus']:,} GPUs{' *' if r['bracketed'] else ''}"
        for r in rows
    ]
    ax.set_yticks(range(len(rows)), labels, fontsize=8.5)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(-EDGE - 0.2, EDGE + 0.2)
    ax.axvline(0.0, color=GREY, linewidth=0.8)
    ax.grid(axis="x", color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)


def main():
    rows = read_rows()
    if not rows:
        print("no other_scales.csv; other_scales.py makes it")
        return
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in SHOWN}
    figure = Figure(figsize=(9.5, 0.52 * sum(map(len, kinds.values())) + 2.0),
                    layout="constrained", facecolor="white", dpi=130)  # fmt: skip
    axes = figure.subplots(len(kinds), 1, sharex=True,
                           height_ratios=[len(r) + 0.4 for r in kinds.values()])  # fmt: skip
    for ax, (kind, chosen) in zip(axes, kinds.items(), strict=True):
        draw_kind(ax, chosen, SHOWN[kind])
    axes[-1].set_xlabel("step time over the measured p50 [%]; from p50 (marker) to p95 (tick)\n"
                        "* microbatch count within those trained on")  # fmt: skip
    ax = axes[0]
    entries = [
        *(ax.plot([], [], color=c, marker=m, label=label)[0] for _, c, m, label in PREDICTIONS),
        ax.barh(0.0, 0.0, color="0.85", label="measured, p50 to p95"),
        ax.errorbar([], [], xerr=[], color=GREY, capsize=3, label="spread of its runs' medians"),
    ]
    figure.legend(handles=entries, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    for suffix in ("png", "svg"):
        save_figure(axes[0], HERE / f"other_scales.{suffix}")


if __name__ == "__main__":
    main()
