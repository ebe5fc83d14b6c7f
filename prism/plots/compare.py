"""Pictures of a comparison: both distributions, and their difference quantile by quantile."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from prism.common.text import time_unit
from prism.plots.base import (
    BLUE,
    GREY,
    NAMES,
    RED,
    draw_cdf,
    finish_cdf,
    legend_above,
    mark_percentiles,
    new_axes,
    quantiles_text,
    shorten,
    side_by_side,
    styled,
)

_FAR = 3.0  # times the height of the band: there zero would flatten it


@styled
def plot_comparison(result: xr.Dataset, ax: Axes | None = None, name: str = "step_time") -> Axes:
    """Distributions of both sides of what ``compare`` returns, with p50 and p95.

    `name` is ``step_time`` or ``time_to_train``: ``<name>_a``, ``<name>_b`` in s.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.plot_comparison(prism.compare(a, b, seed=1))
    """
    ax = new_axes(ax)
    sides = [np.asarray(result[f"{name}_{side}"].to_numpy(), np.float64) for side in "ab"]
    _, scale = time_unit(float(np.median(sides[0])))
    names = _short(*(json.loads(result.attrs["summary"])[side]["name"] for side in "ab"))
    looks = zip("AB", names, sides, (BLUE, RED), ("-", "--"), strict=True)
    for side, source, sample, colour, line_style in looks:
        label = f"{side}: {shorten(source)}, {quantiles_text(sample, name)}"
        draw_cdf(ax, sample, scale, colour, label, line_style, error=False)
        mark_percentiles(ax, sample, scale, (50, 95))
    finish_cdf(ax, NAMES[name], sides)
    return ax


@styled
def plot_shift(result: xr.Dataset, ax: Axes | None = None, name: str = "step_time") -> Axes:
    """Shift function: quantile of B less that of A, with its simultaneous 95 % band.

    Of what ``compare`` returns: ``<name>_shift``, ``<name>_shift_lo`` and ``_hi`` [quantile; s],
    `name` as of `plot_comparison`.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.plot_shift(prism.compare(a, b, seed=1))
    """
    ax = new_axes(ax, 5.0)
    level = result["quantile"].to_numpy()
    shift, low, high = (
        result[f"{name}_{key}"].to_numpy() for key in ("shift", "shift_lo", "shift_hi")
    )
    unit, scale = time_unit(float(np.nanmax(np.abs(np.r_[shift, 1e-9]))))
    known = np.isfinite(low)
    if known.any():
        ax.fill_between(level[known], low[known] / scale, high[known] / scale, color=BLUE,
                        alpha=0.2, linewidth=0.0, label="95 % simultaneous band")  # fmt: skip
    ax.plot(level, shift / scale, color=BLUE, label="B - A")
    ax.axhline(0.0, color=GREY, linestyle="--", linewidth=1.0)
    ax.set_xlabel(f"quantile of the {NAMES[name]}")
    ax.set_ylabel(f"B - A [{unit}]")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlim(0.0, 1.0)
    middle = known & (level > 0.04) & (level < 0.96)
    if middle.any():  # a tail whose error is large would flatten the rest
        ends = np.r_[low[middle], high[middle]] / scale
        if np.abs(ends).min() < _FAR * float(np.ptp(ends)) or ends.min() * ends.max() < 0.0:
            ends = np.r_[ends, 0.0]  # no difference stays in sight, unless it is far
        margin = 0.15 * float(np.ptp(ends)) or 1.0
        ax.set_ylim(ends.min() - margin, ends.max() + margin)
    legend_above(ax, ncols=2)
    return ax


@styled
def draw_comparison(result: xr.Dataset, name: str = "step_time") -> Axes:
    """Draw both pictures side by side; the first one's axes.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.draw_comparison(prism.compare(a, b, seed=1))
    """
    left, right = side_by_side(4.6)
    plot_comparison(result, left, name)
    plot_shift(result, right, name)
    return left


def _short(*names: str) -> list[str]:
    """Drop the folders of files' names, and the file where only the rows differ."""
    parts = [name.partition("[") for name in names]
    if len({path for path, _, _ in parts}) == 1 and all(rows for _, _, rows in parts):
        return [rows.removesuffix("]") for _, _, rows in parts]
    return [path.rstrip("/").rpartition("/")[2] + bracket + rows for path, bracket, rows in parts]
