"""What makes the time vary, what fixing a cause brings, and where the time of a step is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from prism.common.arrays import Index
from prism.common.text import format_share
from prism.plots.base import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    ink,
    legend_above,
    name_rows,
    new_axes,
    styled,
    title_of,
)
from prism.simulation.labels import TARGETS, label

MOST_BARS = 14
SMALL = 2e-3  # what neither contributes nor changes as much is left out [1]
_INTERVENED = {"freeze": ("", "held at its median"), "speed": ("_faster", "made faster by {}")}


@styled
def plot_ranking(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Shares of the variance by cause, the largest on top, of what ``rank`` returns.

    Bars are total-order shares, diamonds first-order shares, lines 95 % intervals of the total
    order.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_ranking(ranking)
    """
    order = _order(result, changed=False)
    ax = new_axes(ax, 7.2, 1.5 + 0.3 * order.size)
    rows = np.arange(order.size)
    total = result["total_order"].to_numpy()[order]
    kinds = result["kind"].to_numpy()[order]
    for kind, colour, name in (
        ("effect", ORANGE, "shared effects, total-order"),
        ("kernel", BLUE, "kernels, total-order"),
        ("term", GREY, "the run beside its steps"),
    ):
        mask = kinds == kind
        if mask.any():
            ax.barh(rows[mask], total[mask], height=0.66, label=name, color=colour)
    low, high = np.clip(result["total_order_ci"].to_numpy()[order].T, 0.0, 1.0)
    ax.hlines(rows, low, high, color=ink(), linewidth=1.2, zorder=3)
    first = result["first_order"].to_numpy()[order]
    ax.plot(first, rows, "D", mfc="white", mec="black", ms=4.5, zorder=4, label="first-order",
            clip_on=False)  # fmt: skip
    _finish(ax, result, order)
    ax.set_xlim(0.0, None)
    target = TARGETS[str(_call(result).get("target", "step_time"))]
    ax.set_xlabel(f"share of the variance of the {target}")
    legend_above(ax, title_of(result, f"what makes the {target} vary"), ncols=3)
    return ax


@styled
def plot_interventions(
    result: xr.Dataset, ax: Axes | None = None, intervention: str | None = None
) -> Axes:
    """Change of standard deviation and p95 where one cause is fixed, of what ``rank`` returns.

    `intervention` is ``freeze``, at its median, or ``speed``, made faster; the first where None.
    Ordered as in `plot_ranking`; lines are 95 % intervals.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_interventions(ranking)
    """
    order = _order(result)
    ax = new_axes(ax, 6.0, 1.4 + 0.3 * order.size)
    suffix, text = _INTERVENED[intervention or "freeze"]
    rows = np.arange(order.size)
    for shift, key, colour, name in (
        (-0.18, "std_reduction", RED, "standard deviation"),
        (0.18, "p95_reduction", GREY, "p95"),
    ):
        change = -result[f"{key}{suffix}"].to_numpy()[order]
        ax.barh(rows + shift, np.nan_to_num(change), height=0.34, color=colour, label=name)
        low, high = -result[f"{key}{suffix}_ci"].to_numpy()[order].T
        ax.hlines(rows + shift, low, high, color=ink(), linewidth=1.0, zorder=3)
    ax.axvline(0.0, color=ink(), linewidth=0.8)
    _finish(ax, result, order)
    faster = format_share(float(_call(result).get("speed_up") or 0.0))
    ax.set_xlabel(f"change if {text.format(faster)}")
    legend_above(ax, ncols=2)
    return ax


@styled
def plot_path(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Where the time of a step is, and where its spread and its tail pass through.

    Of what ``rank`` returns; each of the three sums to one over the kernel classes.

    Examples
    --------
    >>> import prism.plots
    >>> ranking = prism.rank("pipeline-8x32", seed=1)
    >>> ax = prism.plots.plot_path(ranking)
    """
    keys = ("critical_path_share", "covariance_share", "tail_share")
    shares = np.nan_to_num([result[key].to_numpy() for key in keys])
    largest = np.abs(shares).max(axis=0)
    order = np.argsort(-largest, kind="stable")
    order = order[largest[order] >= SMALL][:MOST_BARS]
    ax = new_axes(ax, 7.2, 1.4 + 0.34 * order.size)
    looks = ((GREY, "mean"), (BLUE, "spread"), (RED, "slowest 5 %"))
    for i, (colour, name) in enumerate(looks):
        ax.barh(np.arange(order.size) + 0.25 * (i - 1), shares[i, order], height=0.24,
                color=colour, label=name)  # fmt: skip
    ax.axvline(0.0, color=ink(), linewidth=0.8)
    _finish(ax, result, order)
    ax.set_xlabel("share of the step's time on the critical path")
    legend_above(ax, ncols=3)
    return ax


def _order(result: xr.Dataset, changed: bool = True) -> Index:
    """Find the inputs to draw, the largest total order first, with those whose fixing changes."""
    total = result["total_order"].to_numpy()
    matter = total
    for key in ("std_reduction", "p95_reduction", "std_reduction_faster", "p95_reduction_faster"):
        if changed and key in result:
            matter = np.maximum(matter, np.abs(np.nan_to_num(result[key].to_numpy())))
    if changed:  # terms of a run were not held at anything
        matter = np.where(result["kind"].to_numpy() == "term", 0.0, matter)
    order = np.argsort(-total, kind="stable")
    kept = order[matter[order] >= SMALL]
    return (kept if kept.size else order)[:MOST_BARS]


def _call(result: xr.Dataset) -> dict[str, Any]:
    """Arguments that the ranking was called with."""
    return dict(json.loads(result.attrs.get("call", "{}")))


def _finish(ax: Axes, result: xr.Dataset, order: Index) -> None:
    """Name causes and shares."""
    names, kinds = (result[key].to_numpy()[order] for key in ("cause", "kind"))
    name_rows(ax, [label(str(n), f"{k}s") for n, k in zip(names, kinds, strict=True)])
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
