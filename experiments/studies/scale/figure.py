"""Draw table.json: what a step costs to simulate, and how it grows, by the number of GPUs."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

HERE = Path(__file__).parent
STYLE = {"exact": ("o-", "C0", "all replicas"), "exchangeable": ("s--", "C1", "129 of them")}


def main():
    rows = json.loads((HERE / "table.json").read_text())
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for engine, (style, color, label) in STYLE.items():
        some = [r for r in rows if r["engine"] == engine]
        gpus = [r["gpus"] for r in some]
        each = [r["cpu_s"] for r in some]
        axes[0].plot(gpus, each, style, color=color, label=label)
        axes[1].plot(gpus, [r["peak_gb"] for r in some], style, color=color, label=label)
        for key, name, mark in (("mean_s", "mean", ""), ("p99_s", "p99", ":")):
            values = [r[key] / r["ideal_s"] for r in some]
            axes[2].plot(gpus, values, style[0] + (mark or style[1:]), color=color,
                         label=f"{name}, {label}")  # fmt: skip
    axes[0].set(
        yscale="log", ylabel=f"processor seconds, {rows[0]['replicates']:,} steps", title="Time"
    )
    axes[1].set(ylabel="peak memory [GB]", title="Memory", ylim=0)
    axes[2].set(ylabel="step time over the ideal", title="Step")
    for ax in axes:
        ax.set(xscale="log", xlabel="GPUs")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        ax.set_xticks([1024, 16384, 262144, 1048576])
        ax.minorticks_off()
        ax.tick_params(axis="x", rotation=20)
        ax.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "scale.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
