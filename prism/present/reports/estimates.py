"""Several estimates side by side: one table and one picture of them all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from prism import plots
from prism.common.text import format_duration, format_share
from prism.present.answer import Errors, Picture
from prism.present.answers.times import READING, interval_text, mean_figure, time_figure
from prism.present.cells import Cell, Column, Json, Table, count

if TYPE_CHECKING:
    import xarray as xr


MOST_CURVES = 8  # curves in one picture of several estimates


def summary_table(estimates: Mapping[str, Json]) -> Table:
    """Put the figures of several estimates side by side, by the name of each."""
    runs = any("time_to_train" in numbers for numbers in estimates.values())
    deadlines = any(numbers.get("finish_by") for numbers in estimates.values())
    step = ("mean, ± 95 %", "p50", "p95", "95 % interval of p95", "data error")
    columns = [Column("result", right=False), Column("GPUs")]
    columns += [Column(title, "step time") for title in step]
    columns += [Column(title, "time-to-train") for title in ("p50", "p95")] * runs
    columns += [Column("P(in time)")] * deadlines
    rows = tuple((label, *_cells(numbers, runs, deadlines)) for label, numbers in estimates.items())
    return Table("All estimates side by side", tuple(columns), rows)


def _cells(numbers: Json, runs: bool, deadlines: bool) -> list[Cell]:
    """Write one estimate for the table of all."""
    step, run = numbers["step_time"], numbers.get("time_to_train")
    cells = [count(numbers.get("world_size")), mean_figure(step)]
    cells += [time_figure(step, step[p]) for p in ("p50", "p95")]
    cells.append(interval_text(step, "p95_ci") or "unknown")
    data = numbers.get("data_error")
    cells.append(f"± {format_share(1.96 * data['mean'], 2)}" if data else "not included")
    if runs:
        quantiles = ("p50", "p95")
        cells += [time_figure(run, run[p], coarse=True) if run else None for p in quantiles]
    if deadlines:
        found = numbers.get("finish_by")
        by = f" by {format_duration(found['deadline'])}" if found else ""
        cells.append(format_share(found["probability"]) + by if found else None)
    return cells


def overlays(results: Mapping[str, xr.Dataset]) -> list[Picture]:
    """Draw several estimates into one picture, their steps and, where two have one, their runs."""
    pictures = []
    for variable, title in (("step_time", "Step times"), ("time_to_train", "Times-to-train")):
        known = {label: found for label, found in results.items() if variable in found}
        shown = dict(list(known.items())[:MOST_CURVES])
        if len(shown) < 2:
            continue
        note = f"{READING} Bands are two Monte Carlo standard errors."
        if len(known) > len(shown):
            note += f" The first {len(shown)} of {len(known)}."
        errors = Errors("the bands; figures in the table above", "in the table above")
        draw = partial(plots.plot_dependence, shown, variable=variable)
        pictures.append(Picture("", f"{title} of {len(shown)} estimates", draw, note, errors))
    return pictures
