"""Several estimates side by side: one table and one picture of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prism import plots
from prism.common.text import format_count, format_duration, format_share
from prism.present.answer import Errors, Picture, words
from prism.present.answers.estimate import READING, interval_text, mean_figure, time_figure
from prism.present.reports.blocks import Block, Cell
from prism.present.reports.sections import Section

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

LONGEST_NAME = 60  # of a curve, in a legend
MOST_CURVES = 8
"""Curves in one picture of several estimates."""


def summary_table(sections: Sequence[tuple[str, str, Section]]) -> Block:
    """Put several estimates side by side."""
    runs = any("time_to_train" in _numbers(section) for _, _, section in sections)
    deadlines = any(_numbers(section).get("finish_by") for _, _, section in sections)
    step = ["mean, ± one standard error", "p50", "p95", "95 % interval of p95", "data error"]
    run = ["p50", "p95"] * runs
    top = [Cell("result", rows=2), Cell("GPUs", rows=2, right=True)]
    top += [Cell("step time", columns=len(step))]
    top += [Cell("time-to-train", columns=2)] * runs + [Cell("P(in time)", rows=2)] * deadlines
    rows = tuple(_summary_row(label, _numbers(s), runs, deadlines) for _, label, s in sections)
    return Block(
        "table",
        text="All estimates side by side",
        head=(tuple(top), tuple(Cell(text, right=True) for text in (*step, *run))),
        rows=rows,
        right=(False, *[True] * (len(rows[0]) - 1)),
        links=tuple(name for name, _, _ in sections),
    )


def _numbers(section: Section) -> Json:
    assert section.numbers is not None
    return section.numbers


def _summary_row(label: str, numbers: Json, runs: bool, deadlines: bool) -> tuple[str, ...]:
    """Write one estimate for the table of all."""
    step, run = numbers["step_time"], numbers.get("time_to_train")
    size = numbers.get("world_size")
    cells = [label, "" if size is None else format_count(size)]
    cells.append(words(mean_figure(step)))
    cells += [words(time_figure(step, step[key])) for key in ("p50", "p95")]
    cells.append(interval_text(step, "p95_ci") or "unknown")
    data = numbers.get("data_error")
    cells.append(f"± {format_share(data['mean'], 2)}" if data else "not included")
    if runs:
        cells += (
            ["", ""]
            if run is None
            else [words(time_figure(run, run[key], coarse=True)) for key in ("p50", "p95")]
        )
    if deadlines:
        found = numbers.get("finish_by")
        text = f"{format_share(found['probability'])} by {format_duration(found['deadline'])}" \
            if found else ""  # fmt: skip
        cells.append(text)
    return tuple(cells)


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
        errors = Errors("the bands; figures in the table above", "of each estimate, below")

        def draw(shown: dict[str, xr.Dataset] = shown, variable: str = variable) -> Any:
            # what tells results of one job apart stands at the end
            named = {
                label if len(label) <= LONGEST_NAME else f"...{label[-LONGEST_NAME:]}": found
                for label, found in shown.items()
            }
            return plots.plot_dependence(named, variable=variable)

        pictures.append(Picture("", f"{title} of {len(shown)} estimates", draw, note, errors))
    return pictures
