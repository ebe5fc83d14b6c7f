"""Plot of a sweep: p50 of every simulated setting against p95, the frontier marked."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from prism.analyses.sweeps.swept import Sweep, label
from prism.common.text import format_count, time_unit
from prism.plots.base import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Json,
    legend_above,
    new_axes,
    shorten,
    styled,
)

FARTHEST = 1.25  # settings whose p95 is beyond this times the least are counted in a corner [1]


@styled
def plot_sweep(data: Sweep | xr.Dataset, ax: Axes | None = None) -> Axes:
    """p50 against p95 of the settings of a sweep, of what ``sweep`` returns.

    Bars are two standard errors, by cluster draw; open points were screened on a few of them. Times
    are for the tokens of one step of the job where settings differ in them.

    Examples
    --------
    >>> import prism.plots
    >>> vary = {"parallelism.microbatches": [16, 32]}
    >>> swept = prism.sweep("pipeline-8x32", vary, replicates=64, seed=1)
    >>> ax = prism.plots.plot_sweep(swept)
    """
    result = data if isinstance(data, Sweep) else Sweep(data)
    numbers = result.figures()
    rows = numbers["rows"]
    run = [i for i, row in enumerate(rows) if row["p50"] is not None]
    named = _named(numbers)
    least = rows[min(run, key=lambda i: float(rows[i]["p95_same_work"]))]
    limit = FARTHEST * float(least["p95_same_work"])
    shown = [i for i in run if i in named or rows[i]["p95_same_work"] <= limit]
    ax = new_axes(ax, 7.6, 5.0)
    unit, scale = time_unit(float(least["p95_same_work"]))
    looks = {i: (BLUE if i in numbers["frontier"] else GREY, None) for i in shown} | {
        i: (colour, shorten(f"{text}: {label(rows[i], numbers['varied'])}"))
        for i, (colour, text) in named.items()
    }
    for i, (colour, text) in looks.items():
        _point(ax, rows[i], scale, colour, text)
    if len(numbers["frontier"]) > 1:
        frontier = np.array([_place(rows[i], scale) for i in numbers["frontier"]])
        ax.plot(*frontier.T, color=BLUE, linewidth=1.4, zorder=2, label="frontier")
    if any(rows[i]["figures"] == "screen" for i in shown):
        ax.plot([], [], "o", mfc="none", color=GREY, label="screened on a few cluster draws")
    same = ", same tokens" if result.same_work_differs else ""
    ax.set_xlabel(f"p50 of the step{same} [{unit}]")
    ax.set_ylabel(f"p95 of the step{same} [{unit}]")
    if far := len(run) - len(shown):
        ax.text(
            0.99, 0.02, f"{format_count(far, 'slower setting')} not shown",
            transform=ax.transAxes, ha="right", fontsize=8, color=GREY,
        )  # fmt: skip
    title = f"{numbers['job']}, {format_count(len(rows), 'setting')}"
    legend_above(ax, title + (f", {len(run):,} simulated" if len(run) < len(rows) else ""))
    return ax


def _named(numbers: Json) -> dict[int, tuple[str, str]]:
    """Give colour and name of the settings that are distinguished."""
    fastest, robust = numbers["fastest"], numbers["robust"]
    named = {fastest: (RED, "fastest"), robust: (GREEN, "robust")}
    if fastest is None:  # no setting is likely to fit
        named = {}
    elif fastest == robust:
        named = {fastest: (RED, "fastest and robust")}
    for i, row in enumerate(numbers["rows"]):
        if row["own"] and row["p50"] is not None:
            text = f"{named[i][1]}, the job's own" if i in named else "the job's own"
            named[i] = (named[i][0] if i in named else ORANGE, text)
    return named


def _place(row: Json, scale: float) -> tuple[float, float]:
    return float(row["p50_same_work"]) / scale, float(row["p95_same_work"]) / scale


def _point(ax: Axes, row: Json, scale: float, colour: str, text: str | None) -> None:
    """One setting with the bars of its errors."""
    x, y = _place(row, scale)
    errors = [2.0 * float(row[f"{m}_se"] or 0.0) / row["work"] / scale for m in ("p50", "p95")]
    ax.errorbar(
        x, y, xerr=errors[0], yerr=errors[1], fmt="o", color=colour, label=text,
        mfc="none" if row["figures"] == "screen" else colour, elinewidth=0.8,
        markersize=8 if text else 5, zorder=4 if text else 3,
    )  # fmt: skip
