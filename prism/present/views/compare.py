"""What a comparison looks like in a terminal.

Built from the mapping that the JSON is made of. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from prism.analyses.texts.compare import (
    count_text,
    difference_text,
    p_text,
    percent_span,
    unit_kind,
)
from prism.common.text import format_count, format_like
from prism.present.views.tables import lines_view, table_view

Json = Mapping[str, Any]

_TITLES = {"step_time": "Step time", "time_to_train": "Time-to-train"}
_NAMES = {"mean": "mean", "p50": "p50", "p95": "p95", "p99": "p99", "std": "std", "cv": "CV"}


def compare_view(summary: Json) -> RenderableType:
    """Lay out a comparison.

    Parameters
    ----------
    summary : mapping
        What ``summarize_compare`` returns, the JSON of ``prism compare``.

    Returns
    -------
    rich.console.RenderableType
        Both sides, the verdict, and a table of figures for each quantity.
    """
    parts: list[RenderableType] = []
    for side in "ab":
        parts.append(Text(f"{side.upper()}  {_side(summary[side])}", style="bold"))
    parts += [f"seed {summary['seed']}", ""]
    parts += [Text(line[:1].upper() + line[1:] + ".") for line in summary["verdict"]]
    for name, quantity in summary["quantities"].items():
        parts += ["", _table(name, quantity), Text(_method(quantity))]
    tests = sum(
        row["p_value"] is not None for q in summary["quantities"].values()
        for row in (*q["figures"].values(), q["ks"])
    )  # fmt: skip
    parts.append(
        Text(
            f"Intervals: 95 %, each on its own. p-values: corrected for {tests} tests (Holm), so "
            "that any false one among them has a chance of at most 5 %."
        )
    )
    parts += lines_view("Notes", summary.get("notes"))
    return Group(*parts)


def _side(side: Json) -> str:
    """Name one side and its size."""
    if side["source"] == "measured":
        n = side["runs"]
        runs = f"{format_count(n)} run{'s' if n != 1 else ''}"
        return f"{side['name']}: {format_count(side['steps'])} values of {runs}"
    text = f"{side['name']}: {format_count(side['replicates'])} replicates"
    text += f" on {format_count(side['clusters'])} clusters"
    return text + (f", job {side['job']}, seed {side['seed']}" if side.get("job") else "")


def _table(name: str, quantity: Json) -> RenderableType:
    """Figures of one quantity, one a row."""
    kind = unit_kind(quantity)
    more = f"{'replicates' if kind == 'clusters' else kind} to see it"
    rows = [_row(key, row, kind, more) for key, row in quantity["figures"].items()]
    ks = quantity["ks"]
    rows.append({
        "": "KS", "A": "", "B": "", "B - A": f"{ks['distance']:.3f}", "B / A - 1": "",
        "p": _p(ks), more: "",
    })  # fmt: skip
    return table_view(_TITLES[name], rows, ("A", "B", "B - A", "B / A - 1", "p", more))


def _p(row: Json) -> str:
    return p_text(row["p_adjusted"]).removeprefix("p ").removeprefix("= ") or "-"


def _row(key: str, row: Json, kind: str, more: str) -> dict[str, str]:
    is_share = key == "cv"
    if is_share:
        a, b = (f"{100 * row[side]:.3g} %" for side in "ab")
    else:
        fine = abs(row["difference"]) / 10.0 or row["a"] * 1e-4
        fine = min(max(fine, row["a"] * 1e-6), row["a"] * 1e-3)
        a, b = (format_like(row[side], row["a"], fine) if row[side] else "0 s" for side in "ab")
    tested = row["p_value"] is not None
    plan = row["needed"]
    return {
        "": _NAMES[key], "A": a, "B": b,
        "B - A": difference_text(row, is_share) if tested else "",
        "B / A - 1": percent_span(row) if tested else "not determined",
        "p": _p(row),
        more: f"{count_text(plan['0.8'], kind)} ({count_text(plan['0.9'], kind)})"
        if plan else "",
    }  # fmt: skip


def _method(quantity: Json) -> str:
    """Say what was taken to be independent."""
    n, kinds = quantity["n_units"], quantity["units"]
    if quantity["paired_by"] == "cluster":
        return (
            "Paired by cluster: the same random numbers on both sides, "
            f"{max(n.values())} independent pairs."
        )
    worth = " and ".join(f"{quantity['n_effective'][s]:,.0f}" for s in "ab")
    if quantity["paired_by"] == "step":
        return (
            f"Paired by step number: {quantity['n']['a']:,} pairs of steps, worth {worth} "
            "independent ones for the mean."
        )
    if set(kinds.values()) == {"steps"}:
        return f"Independent within a run: steps worth {worth} independent ones for the mean."
    words = [f"{n[s]} {kinds[s]}" if kinds[s] != "steps" else "one run" for s in "ab"]
    return f"Independent units: {words[0]} and {words[1]}."
