"""What a slow node costs by where it is, and the alternatives side by side."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from prism.analyses.placements.placing import (
    MOST_SLACK,
    NO_SLACK,
    Placing,
    same_work,
)
from prism.common.arrays import Array
from prism.common.text import format_share, percent_change, time_unit
from prism.plots.base import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Json,
    ink,
    legend_above,
    name_rows,
    new_axes,
    shorten,
    styled,
)

ALIKE = 1e-3
"""Replicas whose costs differ by less than this share of the largest are drawn as one [1]."""
MOST_COLUMNS = 64  # more replicas are drawn several to a column
COST = "increase of the step, all else at its mean [%]"


@styled
def plot_slots(data: Placing | xr.Dataset, ax: Axes | None = None) -> Axes:
    """Cost of one slow node by where it is, and the slack of each stage, of what ``place`` returns.

    Where all replicas are alike, a bar per stage; else a map of stage x replica.

    Examples
    --------
    >>> import prism.plots
    >>> placed = prism.place("pipeline-8x32", slow_nodes=1, slowdown=1.2, seed=1)
    >>> ax = prism.plots.plot_slots(placed)
    """
    numbers = _placed(data).figures()
    step = float(numbers["alike_step"])
    cost = 100.0 * np.atleast_2d(np.asarray(numbers["slot_cost"], float)) / step
    title = f"{numbers['job']}: cost of one slow node, by place"
    largest = float(np.max(np.abs(cost), initial=0.0))
    if np.all(np.ptp(cost, axis=1) <= ALIKE * max(largest, 1e-9)):
        ax = _draw_stages(numbers, cost.max(axis=1), ax)
    else:
        ax = _draw_map(numbers, cost, ax)
    legend_above(ax, title, ncols=2)
    return ax


def _draw_stages(numbers: Json, cost: Array, ax: Axes | None) -> Axes:
    """Bars of the cost by stage, each with its slack beside it."""
    ax = new_axes(ax, 6.4, 1.5 + 0.27 * cost.size)
    stages = np.arange(cost.size)
    ax.barh(stages, cost, height=0.7, color=RED)
    limit = 1.3 * max(float(cost.max(initial=0.0)), 0.1)
    for row in numbers.get("stage_slack") or ():
        slack, stage = row.get("slack"), int(row["stage"])
        if slack is None or stage >= cost.size:
            continue
        text = "no slack" if slack < NO_SLACK else f"slack {format_share(slack, 2)}"
        text += " or more" if slack >= MOST_SLACK else ""
        ax.annotate(
            text, (max(0.0, cost[stage]), stage), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8, color=GREY,
        )  # fmt: skip
    name_rows(ax, [f"stage {stage}" for stage in stages])
    ax.set_xlim(min(0.0, float(cost.min(initial=0.0))), limit)
    ax.set_xlabel(f"{COST}; slack: slowdown at no cost")
    return ax


def _draw_map(numbers: Json, cost: Array, ax: Axes | None) -> Axes:
    """Heat map of the cost by stage and replica, the slow nodes' places in it."""
    n_stages, n_replicas = cost.shape
    per_column = -(-n_replicas // MOST_COLUMNS)
    starts = np.arange(0, n_replicas, per_column)
    shown = np.maximum.reduceat(cost, starts, axis=1)
    ax = new_axes(ax, 7.6, 2.2 + 0.24 * n_stages)
    right = starts.size * per_column - 0.5
    image = ax.imshow(
        shown, aspect="auto", cmap="cividis", interpolation="nearest", vmin=min(0.0, shown.min()),
        extent=(-0.5, right, n_stages - 0.5, -0.5),
    )  # fmt: skip
    # with an edge, to be seen on any cell and on the legend's ground
    for which, marker, fill, edge, name in (
        ("before", "o", "white", "black", "slow nodes now"),
        ("after", "X", RED, "white", "slow nodes, best placement"),
    ):
        places = [node[which] for node in numbers.get("slow_nodes") or () if node.get(which)]
        points = {
            (replica, stage)
            for place in places
            for stage in (place.get("stages") or ())[:1]
            for replica in (place.get("replicas") or ())[:1]
        }
        if points:
            x, y = np.array(sorted(points)).T
            ax.plot(x, y, marker, mfc=fill, mec=edge, mew=0.8, ms=8, label=name)
    ax.set_xlim(-0.5, n_replicas - 0.5)
    ax.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.grid(visible=False)
    ax.set_ylabel("stage")
    ax.set_xlabel("replica" if per_column == 1 else f"replica, {per_column} per column (worst)")
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=ax, label=COST, pad=0.02)
    return ax


@styled
def plot_alternatives(data: Placing | xr.Dataset, ax: Axes | None = None) -> Axes:
    """Median and p95 of the step as is, at best, at worst and under the alternatives.

    Of what ``place`` returns: points at p50 and p95, for the work of one step as is. Where p50 or
    p95 is the objective, lines are 95 % intervals of its difference from as is, and where nodes are
    placed at random the spread between 90 % of placements.

    Examples
    --------
    >>> import prism.plots
    >>> placed = prism.place("pipeline-8x32", slow_nodes=1, slowdown=1.2, seed=1)
    >>> ax = prism.plots.plot_alternatives(placed)
    """
    result = _placed(data)
    found = [row for row in result.options if same_work(row, "p95") is not None]
    ax = new_axes(ax, 8.4, 1.7 + 0.36 * len(found))
    unit, scale = time_unit(float(same_work(found[0], "p95") or 1.0))
    now, objective = found[0], str(result.attrs["objective"])
    at = np.arange(len(found))
    p50, p95 = (
        np.array([same_work(row, key) or np.nan for row in found], float) / scale
        for key in ("p50", "p95")
    )
    ax.hlines(at, p50, p95, color=GREY, alpha=0.4, linewidth=3.0, zorder=1)
    ax.plot(p50, at, "o", color=BLUE, markersize=6, zorder=3, label="p50")
    ax.plot(p95, at, "o", color=ORANGE, markersize=6, zorder=3,
            label="p95, and its change from as is")  # fmt: skip
    for i, row in enumerate(found):
        low, high = _band(row, now, objective)
        if np.isfinite(high):
            ax.hlines(i, low / scale, high / scale, color=ink(), linewidth=1.2, zorder=4)
        ax.annotate(
            _change(row, now), (np.nanmax([p95[i], high / scale]), i), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8, color=GREY,
        )  # fmt: skip
    ax.axvline(float(now["p95"]) / scale, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
    name_rows(ax, [shorten(str(row["label"])) for row in found])
    low, high = ax.get_xlim()
    widen = max(0.0, 2e-4 * abs(high) - (high - low)) / 2.0
    ax.set_xlim(low - widen, high + widen + 0.12 * (high - low))
    ax.set_xlabel(f"step time, for the same work [{unit}]")
    job, name = result.attrs["job_name"], result.objective_name
    legend_above(ax, f"{job}: slow nodes placed for the least {name}", ncols=2)
    return ax


def _change(row: Json, now: Json) -> str:
    """Change of p95 against as is, where there is one."""
    if row["name"] == now["name"] or row.get("p95_saved") is None:
        return ""
    return percent_change(-float(row["p95_saved"]))  # the paired one, as the table has it


def _band(row: Json, now: Json, objective: str) -> tuple[float, float]:
    """Give the ends of the line around a point [s]; not-a-number where there is none."""
    interval = row.get("saved_ci")
    if objective not in ("p50", "p95"):
        return np.nan, np.nan
    if "p5_of_objective" in row:
        return float(row["p5_of_objective"]), float(row["p95_of_objective"])
    if not interval or row.get("name") == now.get("name"):
        return np.nan, np.nan
    half = 0.5 * abs(float(interval[1]) - float(interval[0])) * float(now[objective])
    middle = float(same_work(row, objective) or np.nan)
    return middle - half, middle + half


def _placed(data: Placing | xr.Dataset) -> Placing:
    return data if isinstance(data, Placing) else Placing(data)
