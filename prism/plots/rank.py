"""Plots of a ranking: shares of the variance as a tornado, and what fixing a cause brings.

``(data, ax=None) -> Axes`` as in `prism.plots`. Nothing is sampled here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from prism.common.labels import TARGETS, label
from prism.plots.base import BLUE, GREY, ORANGE, RED, new_axes

Array = NDArray[np.float64]

MOST_BARS = 14
SMALL = 2e-3  # what neither contributes nor changes as much is left out [1]
_INTERVENED = {
    "freeze": "frozen at its median",
    "speed": "made faster by {faster:.3g} %",
}


def plot_ranking(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Shares of the variance by cause, the largest on top, with intervals.

    Parameters
    ----------
    result : xarray.Dataset
        What ``rank`` returns: ``total_order``, ``first_order`` [input] and their intervals.
    ax : matplotlib.axes.Axes, optional
        Where to draw; where None, a new figure that also has `plot_interventions` beside it, or
        `plot_path` where nothing was frozen.

    Returns
    -------
    matplotlib.axes.Axes
        Bars reach to the total order, points are first orders, lines 95 % intervals.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_ranking(ranking)
    """
    order = _order(result)
    if ax is None:
        figure = Figure(
            figsize=(9.6, 1.7 + 0.3 * order.size), layout="constrained", facecolor="white", dpi=150
        )
        ax, beside = figure.subplots(1, 2, sharey=True, width_ratios=(1.2, 1.0))
        if result.sizes.get("intervention"):
            plot_interventions(result, beside)
        else:
            plot_path(result, beside)
    rows = np.arange(order.size)
    total = result["total_order"].to_numpy()[order]
    quick = "total_order_ci" not in result
    total = np.minimum(total, 1.0) if quick else total  # a bound may lie above the whole
    kernels = result["input_kind"].to_numpy()[order] == "kernels"
    for mask, colour, name in ((kernels, BLUE, "kernels"), (~kernels, ORANGE, "shared effects")):
        style: dict[str, Any] = {"color": colour, "alpha": 0.85}
        if quick and name == "kernels":
            style, name = {"facecolor": "none", "edgecolor": colour, "hatch": "////"}, "at most"
        if mask.any():
            ax.barh(rows[mask], np.nan_to_num(total[mask]), height=0.66, label=name, **style)
    if not quick:
        low, high = np.clip(result["total_order_ci"].to_numpy()[order].T, 0.0, 1.0)
        ax.hlines(rows, low, high, color="black", linewidth=1.2, zorder=3)
        first = result["first_order"].to_numpy()[order]
        ax.plot(first, rows, "D", mfc="white", mec="black", ms=4.5, zorder=4, label="first-order",
                clip_on=False)  # fmt: skip
    for row in rows[np.isnan(total)]:
        ax.annotate("unknown", (0, row), xytext=(3, 0), textcoords="offset points",
                    va="center", fontsize=8, color=GREY)  # fmt: skip
    _finish(ax, result, order)
    ax.set_xlim(0.0, None)
    ax.set_xlabel("share of the variance: total-order" if not quick else
                  "share of the variance")  # fmt: skip
    ax.legend(loc="lower right", frameon=False, fontsize=8)
    what = TARGETS[_target(result)]
    name = str(result.attrs.get("job_name", ""))
    ax.set_title(f"{name}: what makes the {what} vary", fontsize=10, loc="left")
    return ax


def plot_interventions(
    result: xr.Dataset, ax: Axes | None = None, intervention: str | None = None
) -> Axes:
    """Change of standard deviation and p95 where one cause is fixed.

    Parameters
    ----------
    result : xarray.Dataset
        What ``rank`` returns: ``std_reduction``, ``p95_reduction`` [intervention, input].
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.
    intervention : str, optional
        The first that was tried where None.

    Returns
    -------
    matplotlib.axes.Axes
        Rows as in `plot_ranking`; lines are 95 % intervals.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_interventions(ranking)
    """
    order = _order(result)
    ax = new_axes(ax, (6.0, 1.4 + 0.3 * order.size))
    chosen = intervention or str(result["intervention"].to_numpy()[0])
    here = result.sel(intervention=chosen)
    rows = np.arange(order.size)
    for shift, key, colour, name in (
        (-0.18, "std_reduction", RED, "standard deviation"),
        (0.18, "p95_reduction", GREY, "p95"),
    ):
        change = -here[key].to_numpy()[order]
        ax.barh(rows + shift, np.nan_to_num(change), height=0.34, color=colour, label=name)
        low, high = -here[f"{key}_ci"].to_numpy()[order].T
        ax.hlines(rows + shift, low, high, color="black", linewidth=1.0, zorder=3)
    ax.axvline(0.0, color="black", linewidth=0.8)
    _finish(ax, result, order)
    faster = 100.0 * float(_call(result).get("speed_up") or 0.0)
    ax.set_xlabel(f"change if {_INTERVENED[chosen].format(faster=faster)}")
    # above, where no bar can run into it
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)
    return ax


def plot_path(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Where the time of a step is, and where its spread and its tail pass through.

    Parameters
    ----------
    result : xarray.Dataset
        What ``rank`` returns: shares of the critical path, its covariance and its tail [input].
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        Each of the three sums to one over the kernel classes; effects have none.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_path(ranking)
    """
    order = _order(result)
    ax = new_axes(ax, (6.0, 1.4 + 0.3 * order.size))
    rows = np.arange(order.size)
    for shift, key, colour, name in (
        (-0.25, "critical_path_share", GREY, "time on the critical path"),
        (0.0, "covariance_share", BLUE, "spread by time"),
        (0.25, "tail_share", RED, "tail by time"),
    ):
        values = np.nan_to_num(result[key].to_numpy()[order])
        ax.barh(rows + shift, values, height=0.24, color=colour, label=name)
    ax.axvline(0.0, color="black", linewidth=0.8)
    _finish(ax, result, order)
    ax.set_xlabel("share by kernel class")
    ax.legend(loc="lower right", frameon=False, fontsize=8)
    return ax


def _order(result: xr.Dataset) -> NDArray[np.int64]:
    """Find the inputs to draw, the largest total order first."""
    total = np.nan_to_num(result["total_order"].to_numpy())
    keys = ("covariance_share", "std_reduction", "p95_reduction")
    found = [np.abs(np.nan_to_num(result[key].to_numpy())) for key in keys if key in result]
    weights = [values.reshape(-1, total.size).max(axis=0, initial=0.0) for values in found]
    matter = np.max([total, *weights], axis=0)
    order = np.argsort(-total, kind="stable")
    kept = order[matter[order] >= SMALL]
    return (kept if kept.size else order)[:MOST_BARS]


def _call(result: xr.Dataset) -> dict[str, Any]:
    """Arguments that the ranking was called with."""
    return dict(json.loads(result.attrs.get("call", "{}")))


def _target(result: xr.Dataset) -> str:
    return str(_call(result).get("target", "step_time"))


def _finish(ax: Axes, result: xr.Dataset, order: NDArray[np.int64]) -> None:
    """Names of the causes, percent, and a frame that leaves the bars alone."""
    names, kinds = result["input"].to_numpy()[order], result["input_kind"].to_numpy()[order]
    texts = [label(str(n), str(k)) for n, k in zip(names, kinds, strict=True)]
    ax.set_yticks(range(order.size), texts, fontsize=9)
    ax.set_ylim(order.size - 0.5, -0.5)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100.0 * x:g} %"))
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(color="0.9", linewidth=0.8, axis="x")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="y", length=0, pad=7)
