"""What a fit of step times looks like in a terminal.

Built from the mapping that the JSON is made of, as in `prism.present.views`. Nothing is computed
here beyond the choice of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from prism.common.text import format_count, format_duration, format_share
from prism.present.views.tables import inputs_line, lines_view, rows_view, table_view

Json = Mapping[str, Any]

_WHAT = {
    "clock": "clock error, taken back by the next step",
    "white": "a step's own noise",
    "drift": "slow drift",
    "run": "between runs",
}


def step_fit_view(summary: Json) -> RenderableType:
    """Lay out what a fit of step times found."""
    step, work = summary["step_time"], summary["work_by_step"]
    rows = [
        ("step times", f"{format_count(summary['n'])} of {format_count(summary['runs'])} runs"),
        ("independent ones worth as much", f"{summary['n_effective']:.1f}"),
        ("mean", f"{format_duration(step['mean'])} +- {format_duration(step['mean_se'])}"),
        ("standard deviation", f"{format_share(step['cv'])} of the mean"),
        *((f"p{q}", format_duration(step[f"p{q}"])) for q in (5, 50, 95, 99)),
        (
            "work by step",
            f"differs, CV {format_share(work['cv'])}: the same in all runs" if work["found"]
            else "equal, as far as these runs show",
        ),
    ]  # fmt: skip
    if summary["mean_over"] > 1:
        rows.insert(1, ("each the mean of", f"{summary['mean_over']} steps"))
    parts: list[RenderableType] = [
        inputs_line(summary), "", rows_view(rows), "",
        table_view(
            "What makes steps and runs differ: CV, its 90 % interval, share of variance",
            [_effect(name, value) for name, value in summary["effects"].items()],
            ("CV", "90 % interval", "of a step", "of a run"),
        ),
        "", rows_view(_slow_and_rare(summary)),
    ]  # fmt: skip
    parts += lines_view("Not to be learned from this input", summary["not_identifiable"])
    parts += lines_view("Notes", summary["notes"])
    return Group(*parts)


def _effect(name: str, value: Json) -> dict[str, str]:
    """One part of the spread."""
    low, high = value["ci"]
    return {
        "effect": name,
        "what": _WHAT.get(name, name),
        "CV": format_share(value["cv"]),
        "90 % interval": "" if low is None else f"{format_share(low)} to {format_share(high)}",
        "of a step": format_share(value["share_of_step"]),
        "of a run": "" if value["share_of_run"] is None else format_share(value["share_of_run"]),
    }


def _slow_and_rare(summary: Json) -> list[tuple[str, str]]:
    """Memory of the drift, stalls, the beginning, and what totals hold beside the steps."""
    rows = []
    memory, stalls = summary["drift_memory"], summary["stalls"]
    if memory["tau_s"]:
        text = format_duration(memory["tau_s"])
        if memory["ci"]:
            text += f" ({format_duration(memory['ci'][0])} to {format_duration(memory['ci'][1])})"
        rows.append(("drift: memory", text))
    if stalls["n"]:
        low, high = stalls["rate_per_h_ci"]
        rows += [
            ("stalls", f"{stalls['n']}: {stalls['rate_per_h']:.3g} per hour ({low:.3g} to "
                       f"{high:.3g}), steps beyond {stalls['beyond']:.3g} times their level"),
            ("a stall adds", f"{format_duration(stalls['mean_s'])} on average, p95 "
                             f"{format_duration(stalls['p95_s'])}"),
        ]  # fmt: skip
    beginning, offset = summary["beginning"], summary["offset"]
    if beginning["steps"]:
        rows.append(
            ("beginning", f"{beginning['steps']} steps with {stalls['in_beginning']} stalls of "
             f"their own: {format_duration(beginning['mean_s'])} +- "
             f"{format_duration(beginning['std_s'])} a run")
        )  # fmt: skip
    if offset["mean_s"] or offset["skips"]:
        skipped = f", which leave out the first {offset['skips']}" if offset["skips"] else ""
        rows.append(
            ("totals less steps", f"{format_duration(offset['mean_s'])} +- "
             f"{format_duration(offset['std_s'])}{skipped}")
        )  # fmt: skip
    return rows
