"""Picture of what was measured: how far single calls lie from the median, by kernel."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from prism.common.text import format_duration, format_share
from prism.plots.base import COLOURS, LINE_STYLES, legend_above, new_axes, styled

_LEAST = 1e-4  # smallest share of calls that the axis shows


@styled
def plot_measurement(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Share of calls that take longer than a multiple of the median, one line per kernel.

    Of what ``measure`` returns; the share on a logarithmic axis, so that the tail shows.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_measurement(prism.measure("gemm"))  # doctest: +SKIP
    """
    ax = new_axes(ax)
    case_idx, duration = result["case_idx"].values, result["duration"].values
    labels = [str(label) for label in result["case"].values]
    farthest = 1.0
    for i, label in enumerate(labels):
        seconds = np.sort(duration[case_idx == i])
        if not seconds.size:
            continue
        median = float(np.median(seconds))
        longer = 1.0 - np.arange(seconds.size) / seconds.size
        name = f"{label}: median {format_duration(float(f'{median:.3g}'))}"
        colour, line_style = COLOURS[i % len(COLOURS)], LINE_STYLES[i // len(COLOURS) % 4]
        ax.step(seconds / median, longer, line_style, where="post", color=colour, label=name)
        farthest = max(farthest, float(seconds[-1] / median))
    if farthest > 3.0:
        ax.set_xscale("log")
        ticks = [t for t in (0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000) if t <= farthest]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yscale("log")
    ax.set_ylim(max(_LEAST, 0.7 / max(int(np.bincount(case_idx).max()), 10)), 1.3)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: format_share(share)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("duration / median")
    ax.set_ylabel("share of calls longer")
    legend_above(ax)
    return ax
