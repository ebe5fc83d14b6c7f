"""A run over the calendar: how much is done when."""

from __future__ import annotations

import datetime
import json

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.ticker import PercentFormatter

from prism.common.arrays import Array
from prism.common.text import format_count, time_unit
from prism.plots.base import GREEN, GREY, RED, legend_above, new_axes, styled, title_of
from prism.plots.estimate import deadline_text

FAR = 1.5  # times the length of the run from which a deadline is off the axis
FAN = (0.05, 0.25, 0.5, 0.75, 0.95)


@styled
def plot_progress(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the share of steps done over time, with the middle 50 and 90 % of runs.

    Of what ``estimate`` returns: ``progress_time`` [quantile, progress] and ``time_to_train``
    [run_replicate] in s; where it has them ``deadline`` and ``ideal_time_to_train`` in s, and the
    start in its call. Dates where the start is known, else time since the start; inside it, how far
    runs are ahead of the median run or behind.

    Examples
    --------
    >>> import prism.plots
    >>> result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
    >>> ax = prism.plots.plot_progress(result)
    """
    ax = new_axes(ax)
    start = json.loads(result.attrs["call"]).get("start")
    times = result["progress_time"].sel(quantile=list(FAN)).to_numpy()
    done = result["progress"].to_numpy()
    unit, scale = time_unit(float(times.max()))
    origin = 0.0
    if start is not None:
        origin = float(date2num(datetime.datetime.fromisoformat(start)))  # type: ignore[no-untyped-call]
        scale = 86_400.0
    x = origin + times / scale
    ax.fill_betweenx(done, x[0], x[4], color=GREEN, alpha=0.25, lw=0, label="90 % of runs")
    ax.fill_betweenx(done, x[1], x[3], color=GREEN, alpha=0.45, lw=0, label="50 % of runs")
    ax.plot(x[2], done, color=GREEN, label="median")
    if "ideal_time_to_train" in result:
        ideal = origin + float(result["ideal_time_to_train"]) / scale
        ax.plot([origin, ideal], [0, 1], color=GREY, ls=":", lw=1.2, label="ideal steps alone")
    if text := deadline_text(result):
        deadline = float(result["deadline"])
        if deadline <= FAR * times.max():
            ax.axvline(origin + deadline / scale, 0.52, color=RED, ls="--", lw=1.2, label=text)
        else:  # the run itself would be a sliver
            ax.text(0.98, 0.52, f"{text} \N{RIGHTWARDS ARROW}", transform=ax.transAxes,
                    ha="right", fontsize=8, color=GREY)  # fmt: skip
    _label(ax, unit, start)
    _draw_fan(ax, times, done)
    legend_above(ax, title_of(result, format_count(result.sizes["run_replicate"], "run")), ncols=3)
    return ax


def _draw_fan(ax: Axes, times: Array, done: Array) -> None:
    """Draw how far runs are ahead or behind, which the whole calendar is too long to show."""
    behind = times - times[2]
    unit, scale = time_unit(float(np.abs(behind).max()))
    behind = behind / scale
    inset = ax.inset_axes((0.62, 0.12, 0.35, 0.3), zorder=6)
    inset.fill_between(done, behind[0], behind[4], color=GREEN, alpha=0.25, lw=0)
    inset.fill_between(done, behind[1], behind[3], color=GREEN, alpha=0.45, lw=0)
    inset.axhline(0.0, color=GREEN, lw=1.2)
    inset.set_title(f"lag behind the median run [{unit}]", fontsize=8)
    inset.set_xlabel("steps done", fontsize=8)
    inset.xaxis.set_major_formatter(PercentFormatter(1.0))
    inset.set_xlim(0.0, 1.0)
    inset.tick_params(labelsize=8)


def _label(ax: Axes, unit: str, start: str | None) -> None:
    """Name the axes, and write dates where there are any."""
    if start is None:
        ax.set_xlabel(f"time since the start [{unit}]")
        ax.set_xlim(left=0.0)
    else:
        locator = AutoDateLocator(minticks=4, maxticks=8)  # type: ignore[no-untyped-call]
        ax.xaxis.set_major_locator(locator)
        ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        ax.set_xlabel("date")
    ax.set_ylabel("steps done")
    ax.set_ylim(0.0, 1.0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
