"""Pictures of a comparison: two distribution functions, and their difference quantile by quantile.

``(data, ax=None) -> Axes`` as in `prism.plots`; nothing is computed here.
"""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from prism.common.text import time_unit
from prism.plots.base import BLUE, GREY, RED, finish_cdf, in_unit, in_words, new_axes, tell_beyond

_NAMES = {"step_time": "step time", "time_to_train": "time-to-train"}
_BODY = (0.01, 0.97)  # of both samples is in view whatever lies beyond
_MARKED = (0.5, 0.95)
_LONGEST = 40  # letters of a name
_FAR = 3.0  # times the height of the band: there zero would flatten it


def plot_comparison(result: xr.Dataset, ax: Axes | None = None, name: str = "step_time") -> Axes:
    """Distribution functions of both sides, with p50 and p95.

    Parameters
    ----------
    result : xarray.Dataset
        What ``compare`` returns: ``<name>_a``, ``<name>_b`` in s.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.
    name : str
        ``step_time`` or ``time_to_train``.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.plot_comparison(prism.compare(a, b, seed=1))
    """
    ax = new_axes(ax)
    sides = [result[f"{name}_{side}"].to_numpy() for side in "ab"]
    unit, scale = time_unit(float(np.median(sides[0])))
    write = in_unit if name == "step_time" else in_words
    names = _short(*(json.loads(result.attrs["summary"])[side]["name"] for side in "ab"))
    looks = zip("AB", names, sides, (BLUE, RED), ("-", "--"), strict=True)
    for side, source, sample, colour, style in looks:
        p = np.arange(1, sample.size + 1) / sample.size
        p50, p95 = (write(sample, float(np.quantile(sample, q))) for q in _MARKED)
        label = source if len(source) <= _LONGEST else f"{source[: _LONGEST - 3]}..."
        ax.step(sample / scale, p, where="post", color=colour, linestyle=style, linewidth=1.8,
                label=f"{side}: {label}, p50 {p50}, p95 {p95}")  # fmt: skip
        for q in _MARKED:
            ax.plot(np.quantile(sample, q) / scale, q, "o", color=colour, markersize=5, zorder=4)
    body = np.concatenate([np.quantile(sample, _BODY) for sample in sides]) / scale
    room = 0.35 * float(np.ptp(body))
    everything = np.concatenate(sides) / scale
    ax.set_xlim(max(body.min() - room, everything.min()), min(body.max() + room, everything.max()))
    if everything.max() > body.max() + room:
        for side, sample, colour in zip("BA", sides[::-1], (RED, BLUE), strict=True):
            tell_beyond(ax, f"{side} up to {in_unit(sample, float(sample.max()))}", colour, False)
    finish_cdf(ax, f"{_NAMES[name]} [{unit}]", "cumulative probability")
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9)
    return ax


def plot_shift(result: xr.Dataset, ax: Axes | None = None, name: str = "step_time") -> Axes:
    """Shift function: quantile of B less that of A, with its simultaneous 95 % band.

    Parameters
    ----------
    result : xarray.Dataset
        What ``compare`` returns: ``<name>_shift``, ``<name>_shift_lo`` and ``_hi`` [quantile; s].
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.
    name : str
        ``step_time`` or ``time_to_train``.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.plot_shift(prism.compare(a, b, seed=1))
    """
    ax = new_axes(ax, (5.0, 4.4))
    level = result["quantile"].to_numpy()
    shift, low, high = (
        result[f"{name}_{key}"].to_numpy() for key in ("shift", "shift_lo", "shift_hi")
    )
    unit, scale = time_unit(float(np.nanmax(np.abs(np.r_[shift, 1e-9]))))
    known = np.isfinite(low)
    ax.fill_between(level[known], low[known] / scale, high[known] / scale, color=BLUE, alpha=0.2,
                    linewidth=0.0, label="95 % simultaneous band")  # fmt: skip
    ax.plot(level, shift / scale, color=BLUE, linewidth=1.8, label="B - A")
    ax.axhline(0.0, color=GREY, linestyle="--", linewidth=1.0)
    ax.set_xlabel(f"quantile of the {_NAMES[name]}")
    ax.set_ylabel(f"B - A [{unit}]")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlim(0.0, 1.0)
    if known.any():  # a tail whose error is large would flatten the rest
        middle = known & (level > 0.04) & (level < 0.96)
        if middle.any():
            ends = np.r_[low[middle], high[middle]] / scale
            if np.abs(ends).min() < _FAR * float(np.ptp(ends)) or ends.min() * ends.max() < 0.0:
                ends = np.r_[ends, 0.0]  # no difference stays in sight, unless it is far
            margin = 0.15 * float(np.ptp(ends)) or 1.0
            ax.set_ylim(ends.min() - margin, ends.max() + margin)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=9, ncols=2)
    return ax


def draw_comparison(result: xr.Dataset, name: str = "step_time") -> Axes:
    """Draw both pictures side by side; the first one's axes.

    Examples
    --------
    >>> import prism.plots
    >>> a, b = (prism.simulate("pipeline-8x32", replicates=128, seed=seed) for seed in (1, 2))
    >>> ax = prism.plots.draw_comparison(prism.compare(a, b, seed=1))
    """
    figure = Figure(figsize=(11.6, 4.6), layout="constrained", facecolor="white", dpi=150)
    grid = figure.add_gridspec(1, 2, width_ratios=(1.45, 1.0))
    left, right = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    plot_comparison(result, left, name)
    plot_shift(result, right, name)
    return left


def _short(*names: str) -> list[str]:
    """Drop the folders of files' names, and the file where only the rows differ."""
    parts = [name.partition("[") for name in names]
    if len({path for path, _, _ in parts}) == 1 and all(rows for _, _, rows in parts):
        return [rows.removesuffix("]") for _, _, rows in parts]
    return [path.rstrip("/").rpartition("/")[2] + bracket + rows for path, bracket, rows in parts]
