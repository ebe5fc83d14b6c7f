"""Picture of a library's kernel tables: what matrix products reach by size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from prism.plots.base import COLOURS, legend_above, new_axes, styled

if TYPE_CHECKING:
    from prism.distributions.library import Library

_SIDES = np.geomspace(128.0, 32_768.0, 120)  # of square products


@styled
def plot_library(library: Library, ax: Axes | None = None) -> Axes:
    """Throughput of matrix products over their work: measured points, and what a job reads.

    Parameters
    ----------
    library : Library
        As `prism.load_library` returns it, with tables of products.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        A point for each measured product, a line for square ones of any size.

    Examples
    --------
    >>> import prism, prism.plots
    >>> ax = prism.plots.plot_library(prism.load_library("h100-healthy"))
    """
    ax = new_axes(ax)
    for i, (name, table) in enumerate(library.tables.items()):
        kind, _, precision = name.partition("/")
        if kind != "gemm":
            continue
        colour = COLOURS[i % len(COLOURS)]
        if "flop" in table.axes:
            flop = table.axes["flop"]
            ax.plot(flop, 1e-12 * table.rate, "o-", color=colour, label=precision)
            continue
        grids = np.meshgrid(*(table.axes[axis] for axis in ("m", "n", "k")), indexing="ij")
        work, rate = 2.0 * np.prod(grids, axis=0).ravel(), 1e-12 * table.rate.ravel()
        ax.plot(work, rate, ".", color=colour, alpha=0.15, markersize=2, rasterized=True)
        line = [1e-12 * table(m=side, n=side, k=side) for side in _SIDES]
        ax.plot(2.0 * _SIDES**3, line, color=colour, label=f"{precision}, square")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda flop, _: f"1e{round(np.log10(flop))}"))
    ax.set_ylim(bottom=0.0)
    ax.set_xlabel("work of one matrix product [flop]")
    ax.set_ylabel("throughput [TFLOP/s]")
    legend_above(ax)
    return ax
