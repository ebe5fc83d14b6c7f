"""Section of a sweep.

Words, tables and plots are those of the commands; what is added is the question, and both errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prism.analyses.sweep import summarize_sweep
from prism.analyses.texts.sweep import in_words as sweep_in_words
from prism.common.text import format_like
from prism.plots.sweep import plot_sweep
from prism.present.answer import Errors, Picture
from prism.present.answers.estimate import NOT_INCLUDED
from prism.present.reports.sections import Section
from prism.present.views.sweep import sweep_view

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]


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
