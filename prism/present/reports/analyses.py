"""Sections of a placement and a sweep.

Words, tables and plots are those of the commands; what is added is the question, and both errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prism.analyses.place import summarize_place
from prism.analyses.sweep import summarize_sweep
from prism.analyses.texts.place import assumed, entry, objective_name
from prism.analyses.texts.place import in_words as place_in_words
from prism.analyses.texts.sweep import in_words as sweep_in_words
from prism.common.text import format_like
from prism.plots.place import plot_alternatives, plot_slots
from prism.plots.sweep import plot_sweep
from prism.present.answer import Errors, Picture
from prism.present.answers.estimate import NOT_INCLUDED
from prism.present.reports.sections import Section
from prism.present.views.place import place_view
from prism.present.views.sweep import sweep_view

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]


def placement_section(result: xr.Dataset) -> Section:
    """Make the section of a placement, what ``prism.place`` returns."""
    numbers = place_in_words(summarize_place(result))
    errors = _placement_errors(numbers)
    pictures = [
        Picture(
            "",
            f"Placements of slow nodes of {numbers['job']} and alternatives",
            lambda: plot_alternatives(result),
            "Points are p50 and p95 of the step, for the work of one step as is.",
            errors,
        )
    ]
    if numbers["slot_cost"]:
        note = "What one slow node costs by where it is, on a step without noise; slack is how "
        note += "much slower it may be at no cost."
        title = f"Cost of one slow node of {numbers['job']} by its place"
        none = Errors("none: a step without noise", errors.data)
        pictures.append(Picture("", title, lambda: plot_slots(result), note, none))
    nodes = "; ".join(assumed(numbers))
    many = len(numbers["slow_nodes"]) != 1
    return Section(
        title="Where slow nodes should go",
        subject=str(numbers["job"]),
        question=f"Where should the slow node{'s' * many} of {numbers['job']} go, for the least "
        f"{objective_name(numbers)} of the step? ({nodes})",
        answers=tuple(dict.fromkeys(numbers["findings"])),
        pictures=tuple(pictures),
        view=place_view(numbers),
        captions=("Placements and alternatives side by side",),
        warnings=tuple(numbers["warnings"]),
        numbers=numbers,
    )


def _placement_errors(numbers: Json) -> Errors:
    """Write the error of the best placement's p95, and that of its gain."""
    best = entry(numbers, "best")
    if best.get("p95_se") is None:
        return Errors("not known", NOT_INCLUDED)
    like = float(best["p95"])
    error = format_like(float(best["p95_se"]), like, 0.0999 * float(best["p95_se"]) or 1e-4 * like)
    text = f"p95 of the best ± {error} (one standard error); changes are of the same draws, and "
    return Errors(text + "carry half of their 95 % interval", NOT_INCLUDED)


def sweep_section(result: xr.Dataset) -> Section:
    """Make the section of a sweep, what ``prism.sweep`` returns."""
    numbers = sweep_in_words(summarize_sweep(result))
    call = json.loads(result.attrs["call"])
    rows = numbers["rows"]
    robust = rows[numbers["robust"]]
    like, error = float(robust["p95_same_work"]), float(robust["p95_se"] or 0.0) / robust["work"]
    text = format_like(error, like, 0.0999 * error or 1e-4 * like)
    picture = Picture(
        "",
        f"Settings of {numbers['job']}: p50 of the step against p95",
        lambda: plot_sweep(result),
        "Down and to the left is better; nothing lies below and left of the frontier. Bars are two "
        "standard errors.",
        Errors(f"p95 of the robust one ± {text} (one standard error), by cluster", NOT_INCLUDED),
    )
    return Section(
        title="Settings side by side",
        subject=str(numbers["job"]),
        question=f"Which setting of {numbers['job']} has the shortest step, in the median and at "
        f"p95? Varied: {_varied(call, numbers)}.",
        answers=tuple(numbers["findings"]),
        pictures=(picture,),
        view=sweep_view(numbers),
        captions=("Settings, the best first",),
        warnings=tuple(numbers["warnings"]),
        numbers=numbers,
    )


def _varied(call: Json, numbers: Json) -> str:
    """Say which keys took which values."""
    vary: Mapping[str, Sequence[str]] = call.get("vary") or {}
    named = [f"{key} = {', '.join(map(str, values))}" for key, values in vary.items()]
    if call.get("layouts"):
        named.append("all layouts that use its GPUs, keep its batch and fit the memory")
    return "; ".join(named) or ", ".join(numbers["varied"])
