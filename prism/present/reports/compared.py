"""The section of a comparison: whether two results, or two measured series, really differ.

Words, tables and plots are those of ``prism compare``; what is added is the question, and both
errors.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from prism.analyses.compare import summarize_compare
from prism.plots.compare import plot_comparison, plot_shift
from prism.present.answer import Errors, Picture
from prism.present.answers.estimate import NOT_INCLUDED
from prism.present.reports.sections import Section
from prism.present.views.compare import compare_view

if TYPE_CHECKING:
    import xarray as xr

TITLES = {"step_time": "step times", "time_to_train": "times-to-train"}


def comparison_section(result: xr.Dataset) -> Section:
    """Make the section of a comparison, what ``prism.compare`` returns."""
    numbers = summarize_compare(result)
    a, b = (str(numbers[side]["name"]) for side in "ab")
    pictures = []
    for name in json.loads(result.attrs["quantities"]):
        n = numbers["quantities"][name]["n_effective"]
        drawn = [numbers[side]["source"] == "simulated" for side in "ab"]
        worth = f"in the intervals; A is worth {n['a']:.3g} independent values, B {n['b']:.3g}"
        errors = Errors(
            worth if any(drawn) else "none: nothing is drawn",
            NOT_INCLUDED if all(drawn) else f"{worth}; that of a simulated side is not included"
            if any(drawn) else worth,
        )  # fmt: skip
        what = TITLES.get(name, name)
        pictures += [
            Picture(
                "",
                f"Distribution functions of the {what} of {a} and {b}",
                partial(plot_comparison, result, name=name),
                "The curve further to the right takes longer.",
                errors,
            ),
            Picture(
                "",
                f"Difference of the {what} of {a} and {b} by quantile",
                partial(plot_shift, result, name=name),
                "Quantile of B less that of A, with its simultaneous 95 % band; where the band "
                "leaves zero the two differ.",
                errors,
            ),
        ]
    return Section(
        title="Is the difference real",
        subject=f"{a} and {b}",
        question=f"Is the difference between {a} (A) and {b} (B) real?",
        answers=tuple(f"{line[:1].upper()}{line[1:]}." for line in numbers["verdict"]),
        pictures=tuple(pictures),
        view=compare_view(numbers),
        captions=tuple(f"Figures of the {TITLES.get(n, n)}" for n in numbers["quantities"]),
        warnings=tuple(numbers.get("warnings") or ()),
        numbers=numbers,
    )
