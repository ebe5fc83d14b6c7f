"""What a GPU of each stage holds, part by part, beside what its card has."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from prism.plots.base import RED, Json, ink, new_axes, styled
from prism.workload.memory import PARTS

SHADES = {
    "Blues": ("parameters", "gradients", "optimizer", "gathered"),
    "Oranges": ("checkpoints", "norms", "attention", "mlp", "logits"),
    "Greys": ("workspace", "fragmentation", "reserve"),
}
"""Maps of colours: what lasts, what forwards keep, what else comes and goes."""
LEAST_SHARE, MOST_TICKS = 2e-3, 17


@styled
def plot_memory(data: Json, ax: Axes | None = None) -> Axes:
    """Stack the parts of a GPU's memory by pipeline stage, of what ``memory`` returns.

    Bars at the worst moment of each stage [GiB]; the line is what the card offers, the bar of the
    fullest stage has its 90 % interval.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_memory(prism.memory("gpt3-175b-512"))
    """
    stages, limit = data["stages"], float(data["limit_gib"])
    at = np.array([stage["stage"] for stage in stages])
    ax = new_axes(ax, min(12.0, 5.6 + 0.22 * len(stages)), 4.6)
    colours = {
        name: colormaps[shade](0.3 + (0.3 if shade == "Greys" else 0.5) * i / (len(names) - 1))
        for shade, names in SHADES.items()
        for i, name in enumerate(names)
    }
    bottom = np.zeros(len(stages))
    for name, text in PARTS.items():
        sizes = np.array([stage["parts"][name] for stage in stages])
        if sizes.max() >= LEAST_SHARE * data["gib"]:
            ax.bar(at, sizes, 0.82, bottom, color=colours[name], label=text, linewidth=0.0)
            bottom += sizes
    low, high = data["ci_gib"]
    error = [[data["gib"] - low], [high - data["gib"]]]
    ax.errorbar([data["stage"]], [data["gib"]], error, fmt="none", ecolor=ink(), capsize=3,
                label="90 % interval")  # fmt: skip
    ax.axhline(limit, color=RED, linestyle="--", linewidth=1.2, label=f"card, {limit:.1f} GiB")
    ax.set(xlabel="pipeline stage", ylabel="memory of a GPU [GiB]", xlim=(-0.6, at.max() + 0.6))
    ax.set_ylim(0.0, 1.06 * max(limit, high))
    ax.set_xticks(at[:: -(-len(at) // MOST_TICKS)])
    ax.grid(visible=False, axis="x")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8
    )
    return ax
