"""The overview of production-traces: predicted and measured steps, and what they vary by."""

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

from prism.plots.base import BLUE, GREY, ORANGE, save_figure
from prism.plots.validation import plot_validation

matplotlib.style.use("prism.plots.light")

SHOWN = ("microbatch", "step", "rank step", "residual", "rank", "slow workers")


def draw_overview(results, validated, split, path_stem):
    """Draw one column per job: one split's distribution functions above, interventions below."""
    n = len(validated)
    figure = Figure(figsize=(5.2 * n, 8.2), layout="constrained", facecolor="white", dpi=130)
    axes = figure.subplots(2, n, squeeze=False, gridspec_kw={"height_ratios": (1.35, 1.0)})
    for (name, result), above, below in zip(validated.items(), axes[0], axes[1], strict=True):
        plot_validation(result, above)
        above.set_title(f"{name}\n{split} steps train", loc="right", fontsize=10)
        plot_interventions(results[name]["varies"]["effects"], below)
    axes[1][0].legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    for suffix in (".png", ".svg"):
        save_figure(axes[0][0], path_stem.with_suffix(suffix))


def plot_interventions(rows, ax):
    """Draw what is left of the step's mean and spread without one effect, and with it alone."""
    rows = [row for row in rows if row["effect"] in SHOWN][::-1]
    at = np.arange(len(rows))
    for key, colour, shift, label in (
        ("mean_without", GREY, 0.27, "mean without it"),
        ("std_without", BLUE, 0.0, "standard deviation without it"),
        ("std_alone", ORANGE, -0.27, "standard deviation with it alone"),
    ):
        left = [row[key] or 0.0 for row in rows]
        ax.barh(at + shift, left, 0.25, color=colour, label=label)
    ax.axvline(1.0, color="0.4", linestyle="--", linewidth=1.0)
    ax.set_yticks(at, [row["effect"] for row in rows])
    ax.set_xlabel("relative to the fitted model [1]")
    ax.spines[["top", "right"]].set_visible(False)
