"""A Gantt picture of a timeline: ops by kind, waits hatched, the critical path outlined."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from numpy.typing import NDArray

from prism.analyses.timelines.table import WAITING, texts
from prism.common.text import format_count, time_unit
from prism.plots.base import (
    BLUE,
    GREEN,
    GREY,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    ink,
    new_axes,
    styled,
)
from prism.traces.kernelnames import COLLECTIVES

MOST_ROWS = 64
"""Rows of a picture, of all steps together."""
KINDS = {
    "forward": (BLUE, "forward"), "backward": (ORANGE, "backward"),
    "backward_weight": (GREEN, "backward, weights"), "recompute": (SKY, "recompute"),
    "optimizer": (PURPLE, "optimizer"), "gemm": (BLUE, "matrix products"),
    "convolution": (OLIVE, "convolutions"), "attention": (GREEN, "attention"),
    "memory": (SKY, "memory-bound"), "embedding": (ORANGE, "embedding"), "loss": (OLIVE, "loss"),
}  # fmt: skip
OTHER = (GREY, "other compute")
LINKS = {"transfer": (OLIVE, "transfer"), "communication": (RED, "collective")}
WAITS = {
    "bubble": ("", "waits: other stages (bubble)"), "replica": ("////", "waits: another replica"),
    "rank": ("////", "waits: another rank"), "group": ("////", "waits: its group"),
    "transfer": ("....", "waits: transfer"), "communication": ("xxxx", "waits: collective"),
    "host": ("\\\\\\\\", "launch gaps"), "latency": ("\\\\", "waits: launch latency"),
    "stall": ("++++", "waits: stall or jitter of the job"),
}  # fmt: skip
HEIGHT, THIN = 0.86, 0.2  # of a row: all of it, and its strip of messages
MOST_SHAPES = 3000
LEAST = 2e-4  # of the axis: shorter waits are not drawn


class _Events(NamedTuple):
    """Ops and waits of the rows that are drawn, in the window [event]."""

    at: NDArray[np.float64]  # line
    start: NDArray[np.float64]  # in the unit of the axis
    end: NDArray[np.float64]
    stream: NDArray[np.str_]
    kind: NDArray[np.str_]
    critical: NDArray[np.bool_]


@styled
def plot_gantt(timeline: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the steps of a timeline above each other.

    Parameters
    ----------
    timeline : xarray.Dataset
        What ``prism.timeline`` returns; of the whole steps or of the window that it was given.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        At most 64 rows, those of the replicas that decide first; the axis says how many are left
        out.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_gantt(prism.timeline("experiments/samples/trace.csv"))
    """
    steps = json.loads(timeline.attrs["steps"])
    longest = max(step["step_time"] for step in steps)
    window = json.loads(timeline.attrs.get("window", "[0, 100]"))
    begin, until = (0.01 * percent * longest for percent in window)
    unit, scale = time_unit(longest)
    places = _place_rows(timeline, len(steps))
    n_lines = max(places.values()) + 1.0
    ax = new_axes(ax, 10.0, 1.9 + n_lines * (0.26 if n_lines <= 34 else 0.19))
    legend = _draw_events(ax, _events(timeline, places, scale, begin, until), until - begin, scale)
    ax.set_yticks(list(places.values()), _row_names(timeline, list(places)),
                  fontsize=7.5 if n_lines <= 34 else 6.0)  # fmt: skip
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(n_lines, -1.0)
    ax.set_xlim(begin / scale, until / scale)
    _draw_titles(ax, timeline, steps, places, scale)
    left = timeline.sizes["row"] - len(places)
    about = f"; {format_count(left, 'row')} of the timeline not drawn" if left else ""
    ax.set_xlabel(f"time since the step began [{unit}]{about}")
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    ax.legend(
        handles=legend, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, fontsize=7.5,
        title=timeline.attrs["source"].rpartition("/")[2], alignment="left",
    )  # fmt: skip
    return ax


def _place_rows(timeline: xr.Dataset, n_steps: int) -> dict[int, float]:
    """Line of every row that is drawn, with room above each step."""
    of_step, role = timeline["row_step"].values, timeline["role"].values.astype(str)
    replica = timeline["replica"].values
    places: dict[int, float] = {}
    line = 0.0
    for step in range(n_steps):
        mine = np.flatnonzero(of_step == step)
        rank = {"decides": 0, "typical": 1, "slowest": 2, "fastest": 3}
        weight = [min([rank[w] for w in role[r].split(", ") if w in rank], default=4) for r in mine]
        groups = [mine[replica[mine] == r] for r in dict.fromkeys(
            replica[mine[i]] for i in np.argsort(weight, kind="stable"))]  # fmt: skip
        room = MOST_ROWS // n_steps
        keep: list[int] = []
        for group in groups:
            if keep and len(keep) + len(group) > room:
                break
            keep += [int(r) for r in group[:room]]
        for row in sorted(keep):
            places[row] = line
            line += 1.0
        line += 1.2
    return places


def _row_names(timeline: xr.Dataset, rows: list[int]) -> list[str]:
    """Name rows; a replica and its role stand beside its first row."""
    labels, roles = (timeline[k].values.astype(str) for k in ("row_label", "role"))
    names, last = [], (-1, -1)
    for r in rows:
        group = int(timeline["row_step"][r]), int(timeline["replica"][r])
        name = labels[r] + (f" ({roles[r]})" if roles[r] else "")
        if group == last and labels[r].startswith("replica "):
            name = labels[r].split(" ", 2)[2]
        names.append(name)
        last = group
    return names


def _events(
    timeline: xr.Dataset, places: dict[int, float], scale: float, begin: float, until: float
) -> _Events:
    """Take what is drawn; ops of a fitted model, whose kind is none, by their kernel class."""
    line = np.array([places.get(row, np.nan) for row in range(timeline.sizes["row"])])
    at = line[timeline["event_row"].values]
    start = timeline["start"].values
    end = start + timeline["duration"].values
    kind, classes = texts(timeline, "kind"), texts(timeline, "classes")
    first = np.char.partition(classes, " ")[:, 0]
    kind = np.where(np.isin(kind, ("compute", "memory")) & (first != ""), first, kind)
    in_memory = np.isin(kind, ("elementwise", "norm")) | np.char.startswith(kind, "mem")  # copies
    kind[in_memory] = "memory"
    shown = np.isfinite(at) & (end >= begin) & (start <= until)
    found = (at, start / scale, end / scale, texts(timeline, "stream"), kind,
             timeline["critical"].values == 1)  # fmt: skip
    return _Events(*(values[shown] for values in found))


def _draw_events(ax: Axes, events: _Events, length: float, scale: float) -> list[Patch]:
    """Draw ops and waits; returns the legend."""
    at, start, end, stream, kind, critical = events
    near = LEAST * length / scale
    waits, host = stream == WAITING, stream == "host"
    collectives = set(COLLECTIVES) | set(kind[np.isin(stream, list(LINKS))].tolist()) - set(WAITS)
    links = np.isin(kind, list(collectives))
    work = ~waits & ~host & ~links
    legend: list[Patch] = []

    def draw(mine: NDArray[np.bool_], low: float, high: float, zorder: int, label: str,
             **look: Any) -> None:  # fmt: skip
        if mine.any():
            _boxes(ax, start[mine], end[mine], at[mine], low, high, zorder=zorder, **look)
            legend.append(Patch(**look, label=label))

    pale = {"facecolor": rcParams["grid.color"], "edgecolor": rcParams["hatch.color"]}
    for cause, (hatch, label) in WAITS.items():
        mine = waits & (kind == cause) & (end - start >= near)
        draw(mine, -0.5, 0.5, 1, label, linewidth=0.0, hatch=hatch or None, **pale)
    inches = 8.0 * np.median((end - start)[work]) / (length / scale) if work.any() else 0.0
    edge = min(0.25, 4.0 * float(inches))  # [point] of short ops it would be all that is seen
    paper = {"edgecolor": rcParams["axes.facecolor"], "linewidth": edge}
    for name, (colour, label) in KINDS.items():
        draw(work & (kind == name), -0.5, 0.5 - THIN, 2, label, facecolor=colour, **paper)
    draw(work & ~np.isin(kind, list(KINDS)), -0.5, 0.5 - THIN, 2, OTHER[1], facecolor=OTHER[0],
         **paper)  # fmt: skip
    moves = (stream == "transfer") | (kind == "transfer")
    for mine, name in ((links & moves, "transfer"), (links & ~moves, "communication")):
        colour, label = LINKS[name]
        draw(mine, 0.5 - THIN, 0.5, 3, label, color=colour, linewidth=0.2)
    line: dict[str, Any] = {"facecolor": "none", "edgecolor": ink(), "linewidth": 0.7}
    for some, low, high in ((work, -0.5, 0.5 - THIN), (links, 0.5 - THIN, 0.5)):
        path = _runs(start, end, at, np.flatnonzero(critical & some), near)
        if path.size:
            _boxes(ax, path[:, 0], path[:, 1], path[:, 2], low, high, zorder=4, **line)
    if critical.any():
        legend.append(Patch(**line, label="critical path"))
    return legend


def _runs(
    start: NDArray[Any], end: NDArray[Any], at: NDArray[Any], some: NDArray[Any], near: float
) -> NDArray[Any]:
    """Join ops that follow each other on a line: start, end, line."""
    out: list[list[float]] = []
    for i in some[np.lexsort((start[some], at[some]))]:
        if out and out[-1][2] == at[i] and start[i] <= out[-1][1] + near:
            out[-1][1] = max(out[-1][1], float(end[i]))
        else:
            out.append([float(start[i]), float(end[i]), float(at[i])])
    return np.array(out).reshape(-1, 3)


def _boxes(
    ax: Axes, start: NDArray[Any], end: NDArray[Any], at: NDArray[Any], low: float, high: float,
    **look: Any,
) -> None:  # fmt: skip
    """Draw boxes from start to end on their lines, from `low` to `high` of a row's height."""
    y0, y1 = at + HEIGHT * low, at + HEIGHT * high
    corners = [(start, y0), (end, y0), (end, y1), (start, y1)]
    shapes = np.stack([np.stack(c, axis=-1) for c in corners], axis=1)
    many = len(shapes) > MOST_SHAPES  # an SVG of more would be slow to open
    ax.add_collection(PolyCollection(list(shapes), rasterized=many, **look))


def _draw_titles(
    ax: Axes, timeline: xr.Dataset, steps: list[dict[str, Any]], places: dict[int, float],
    scale: float,
) -> None:  # fmt: skip
    """Write what each step is above its rows, and mark where it ends."""
    of_step = timeline["row_step"].values
    for i, step in enumerate(steps):
        lines = [line for row, line in places.items() if of_step[row] == i]
        end = step["step_time"] / scale
        ax.vlines(end, min(lines) - 0.5, max(lines) + 0.5, color=GREY, lw=1.0, zorder=5)
        ax.text(ax.get_xlim()[0], min(lines) - 0.6, step["title"], fontsize=8.5, va="bottom",
                weight="bold")  # fmt: skip
