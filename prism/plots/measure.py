"""Picture of what was measured: how far single calls lie from the median, by kernel.

Draws what it is given; percentiles are read off the samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prism.common.text import format_duration
from prism.plots.base import new_axes

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

_LEAST = 1e-4  # smallest share of calls that the axis shows


def plot_measurement(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Share of calls that take longer than so many times the median, one line for each kernel.

    Parameters
    ----------
    result : xarray.Dataset
        As `prism.measure` returns it.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        The share on a logarithmic axis, so that the tail shows.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_measurement(prism.measure("gemm"))  # doctest: +SKIP
    """
    ax = new_axes(ax, (7.2, 4.4))
    import matplotlib as mpl

    case_idx, duration = result["case_idx"].values, result["duration"].values
    labels = [str(label) for label in result["case"].values]
    colours = mpl.colormaps["viridis"](np.linspace(0.0, 0.88, max(len(labels), 2)))
    farthest = 1.0
    for i, label in enumerate(labels):
        seconds = np.sort(duration[case_idx == i])
        if not seconds.size:
            continue
        median = float(np.median(seconds))
        longer = 1.0 - np.arange(seconds.size) / seconds.size
        name = f"{label}: {format_duration(float(f'{median:.3g}'))}"
        ax.step(seconds / median, longer, where="post", color=colours[i], label=name, lw=1.6)
        farthest = max(farthest, float(seconds[-1] / median))
    if farthest > 3.0:
        ax.set_xscale("log")
        ticks = [t for t in (0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if t <= farthest]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.set_yscale("log")
    smallest = 1.0 / max(int(np.bincount(case_idx).max()), 10)
    ax.set_ylim(max(_LEAST, 0.7 * smallest), 1.3)
    ticks = [t for t in (1.0, 0.1, 0.01, 0.001, 0.0001) if t >= 0.7 * smallest]
    ax.set_yticks(ticks, [f"{100 * t:g} %" for t in ticks])
    ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.set_xlabel("duration / median")
    ax.set_ylabel("share of calls longer")
    ax.grid(True, which="major", color="0.9", lw=0.7)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=8, title="median", title_fontsize=8, alignment="left")
    return ax
