"""A Gantt picture of a timeline: ops by kind, waits hatched, the critical path outlined.

``(data, ax=None) -> Axes`` as in `prism.plots`. Steps stand above each other on one time axis, each
with its own rows; of many rows those of the replicas that decide come first. Nothing is simulated
here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from prism.analyses.timelines.table import WAITING, texts
from prism.common.text import time_unit
from prism.plots.base import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, new_axes

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

MOST_ROWS = 64
"""Rows of a picture, of all steps together."""
SKY = "#56B4E9"
KINDS = {
    "forward": (BLUE, "forward"), "backward": (ORANGE, "backward"),
    "backward_weight": (GREEN, "backward, weights"), "recompute": (SKY, "recompute"),
    "optimizer": (PURPLE, "optimizer"), "gemm": (BLUE, "matrix products"),
    "convolution": ("#004466", "convolutions"), "attention": (GREEN, "attention"),
    "memory": (SKY, "memory-bound"), "embedding": (ORANGE, "embedding"),
}  # fmt: skip
OTHER = ("#8C8C8C", "other compute")
LINKS = {"transfer": ("#6B4C9A", "transfer"), "communication": (RED, "collective")}
WAITS = {
    "bubble": ("", "waits: other stages (bubble)"), "replica": ("////", "waits: another replica"),
    "rank": ("////", "waits: another rank"), "group": ("////", "waits: its group"),
    "transfer": ("....", "waits: transfer"), "communication": ("xxxx", "waits: collective"),
    "host": ("\\\\\\\\", "waits: host"), "stall": ("++++", "waits: stall or jitter of the job"),
}  # fmt: skip
PALE = "#EFEFEF"
HEIGHT, THIN = 0.86, 0.2  # of a row: all of it, and its strip of messages
MOST_SHAPES = 3000
LEAST = 2e-4  # of the axis: shorter waits are not drawn


def plot_gantt(timeline: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the steps of a timeline above each other.

    Parameters
    ----------
    timeline : xarray.Dataset
        What ``prism.timeline`` returns.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        At most 64 rows; a line below says what is left out.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_gantt(prism.timeline("experiments/samples/trace.csv"))
    """
    steps = json.loads(timeline.attrs["steps"])
    places, left = _place_rows(timeline, len(steps))
    n_lines = max(places.values()) + 1.0
    longest = max(s["step_time"] for s in steps)
    unit, scale = time_unit(longest)
    ax = new_axes(ax, (10.0, 1.9 + n_lines * (0.26 if n_lines <= 34 else 0.19)))
    drawn = _draw_events(ax, timeline, places, scale, longest)
    _draw_titles(ax, timeline, steps, places, scale)
    ax.set_xlim(0.0, longest / scale)
    ax.set_ylim(n_lines, -1.0)
    names = _row_names(timeline, list(places))
    small = 7.5 if n_lines <= 34 else 6.0
    ax.set_yticks(list(places.values()), names, fontsize=small)
    about = f"; {left:,} rows of the timeline are not drawn" if left else ""
    ax.set_xlabel(f"time since the step began [{unit}]{about}", fontsize=9)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(
        handles=drawn, loc="lower left", bbox_to_anchor=(0.0, 1.005), ncols=5, frameon=False,
        fontsize=7.5, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip
    ax.set_title(timeline.attrs["source"].rpartition("/")[2], fontsize=10, loc="right")
    return ax


def _place_rows(timeline: xr.Dataset, n_steps: int) -> tuple[dict[int, float], int]:
    """Line of every row that is drawn, with room above each step; and how many are not."""
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
    return places, int(of_step.size - len(places))


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


def _draw_events(
    ax: Axes, timeline: xr.Dataset, places: dict[int, float], scale: float, longest: float
) -> list[Patch]:
    """Draw ops and waits; returns the legend."""
    row = timeline["event_row"].values
    at = np.array([places.get(r, np.nan) for r in range(timeline.sizes["row"])])[row]
    stream, kind = texts(timeline, "stream"), texts(timeline, "kind")
    start = timeline["start"].values / scale
    end = start + timeline["duration"].values / scale
    critical = (timeline["critical"].values == 1) & np.isfinite(at)
    waits, host = stream == WAITING, stream == "host"
    links = np.isin(kind, list(_communication(kind, stream)))
    legend: list[Patch] = []
    long = end - start >= LEAST * longest / scale
    for cause, (hatch, label) in WAITS.items():
        mine = waits & (kind == cause) & np.isfinite(at) & long
        if mine.any():
            style: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#B0B0B0", "linewidth": 0.0,
                                     "hatch": hatch or None}  # fmt: skip
            _boxes(ax, start[mine], end[mine], at[mine], -0.5, 0.5, zorder=1, **style)
            legend.append(Patch(**style, label=label))
    work = ~waits & ~host & ~links & np.isfinite(at)
    inches = 8.0 * np.median((end - start)[work]) / (longest / scale) if work.any() else 0.0
    edge = min(0.25, 4.0 * float(inches))  # [point] of short ops it would be all that is seen
    named = {k: v for k, v in KINDS.items() if (work & (kind == k)).any()}
    for name, (colour, label) in [*named.items(), ("", OTHER)]:
        mine = work & (kind == name if name else ~np.isin(kind, list(KINDS)))
        if mine.any():
            shade = {"facecolor": colour, "edgecolor": "white", "linewidth": edge}
            _boxes(ax, start[mine], end[mine], at[mine], -0.5, 0.5 - THIN, zorder=2, **shade)
            legend.append(Patch(facecolor=colour, label=label))
    for name, (colour, label) in LINKS.items():
        moves = (stream == "transfer") | (kind == "transfer")
        mine = links & (moves if name == "transfer" else ~moves) & np.isfinite(at)
        if mine.any():
            shade = {"facecolor": colour, "edgecolor": colour, "linewidth": 0.2}
            _boxes(ax, start[mine], end[mine], at[mine], 0.5 - THIN, 0.5, zorder=3, **shade)
            legend.append(Patch(facecolor=colour, label=label))
    line: dict[str, Any] = {"facecolor": "none", "edgecolor": "black", "linewidth": 0.7}
    for some, low, high in ((work, -0.5, 0.5 - THIN), (links, 0.5 - THIN, 0.5)):
        mine = _runs(start, end, at, np.flatnonzero(critical & some), LEAST * longest / scale)
        if mine.size:
            _boxes(ax, mine[:, 0], mine[:, 1], mine[:, 2], low, high, zorder=4, **line)
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


def _communication(kind: NDArray[np.str_], stream: NDArray[np.str_]) -> set[str]:
    """Kinds of op that are messages, whatever the name of their stream."""
    from prism.traces.kernelnames import COLLECTIVES

    return set(COLLECTIVES) | set(kind[np.isin(stream, list(LINKS))].tolist()) - set(WAITS)


def _boxes(
    ax: Axes, start: NDArray[Any], end: NDArray[Any], at: NDArray[Any], low: float, high: float,
    **style: Any,
) -> None:  # fmt: skip
    """Draw boxes from start to end on their lines, from `low` to `high` of a row's height."""
    y0, y1 = at + HEIGHT * low, at + HEIGHT * high
    corners = [(start, y0), (end, y0), (end, y1), (start, y1)]
    shapes = np.stack([np.stack(c, axis=-1) for c in corners], axis=1)
    many = len(shapes) > MOST_SHAPES  # an SVG of so many would be slow to open
    ax.add_collection(PolyCollection(list(shapes), rasterized=many, **style))


def _draw_titles(
    ax: Axes, timeline: xr.Dataset, steps: list[dict[str, Any]], places: dict[int, float],
    scale: float,
) -> None:  # fmt: skip
    """Write what each step is above its rows, and mark where it ends."""
    of_step = timeline["row_step"].values
    for i, step in enumerate(steps):
        lines = [line for row, line in places.items() if of_step[row] == i]
        end = step["step_time"] / scale
        ax.plot(
            [end, end], [min(lines) - 0.5, max(lines) + 0.5], color=GREY, linewidth=1.0, zorder=5
        )
        ax.text(0.0, min(lines) - 0.6, step["title"], fontsize=8.5, va="bottom", weight="bold")
