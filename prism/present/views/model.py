"""What any fitted model looks like in a terminal, and a calibrated one in particular.

Built from the mapping that the JSON is made of, as in `prism.present.views`. Nothing is computed
here beyond the choice of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from prism.common.text import format_count, format_duration, format_share
from prism.present.views.library import library_view
from prism.present.views.steps import step_fit_view
from prism.present.views.tables import inputs_line, lines_view, rows_view, table_view
from prism.present.views.trace import fit_view

Json = Mapping[str, Any]

_FACTORS = {
    "compute": "time of kernels on GPUs",
    "communication": "time of messages",
    "between_runs": "spread between runs (rank effect)",
    "within_run": "spread of kernels, calls, microbatches",
}


def model_view(summary: Json) -> RenderableType:
    """Lay out what `prism fit` found, by the kind of model."""
    views = {"steps": step_fit_view, "calibrated": calibration_view, "library": library_view}
    return views.get(summary.get("kind", "trace"), fit_view)(summary)


def calibration_view(summary: Json) -> RenderableType:
    """Lay out a calibration: its sizes, its factors, how much of each is the library's.

    Parameters
    ----------
    summary : mapping
        What ``summarize_fit`` returns for a model of kind ``calibrated``.
    """
    factors = [_factor(name, summary["factors"][name]) for name in _FACTORS]
    parts: list[RenderableType] = [
        inputs_line({**summary, "inputs": dict.fromkeys(summary["inputs"])}), "",
        table_view(
            "Sizes it was brought to: measured steps, and what the calibrated job gives",
            [_size(row) for row in summary["sizes"]],
            ("GPUs", "microbatches", "steps", "runs", "p50", "p95", "p50 is off", "p95 is off"),
        ), "",
        table_view(
            f"Factors on {summary['library']}: value, 90 % interval, how much is the library's",
            factors, ("factor", "90 % interval", "the library's"),
        ), "", rows_view(_shared(summary)),
    ]  # fmt: skip
    parts += lines_view("Not to be learned from these sizes", summary["not_identifiable"])
    parts += lines_view("Notes", summary["notes"])
    return Group(*parts)


def _size(row: Json) -> dict[str, Any]:
    """One measured size."""
    return {
        "job": row["job"], "GPUs": format_count(row["world_size"]),
        "microbatches": row["microbatches"], "steps": format_count(row["n"]), "runs": row["runs"],
        "p50": format_duration(row["p50"]), "p95": format_duration(row["p95"]),
        "p50 is off": f"{row['p50_error']:+.2%}", "p95 is off": f"{row['p95_error']:+.2%}",
    }  # fmt: skip


def _factor(name: str, value: Json) -> dict[str, str]:
    """One factor."""
    low, high = value["ci"]
    return {
        "what": _FACTORS[name], "factor": f"{value['value']:.3g}",
        "90 % interval": f"{low:.3g} to {high:.3g}",
        "the library's": format_share(value["library_share"]),
    }  # fmt: skip


def _shared(summary: Json) -> list[tuple[str, str]]:
    """Say what all ranks share in a step, and how stalls come."""
    step, stalls = summary["step"], summary["stalls"]
    parts = [
        f"{format_share(step['relative'])} of the step" if step["relative"] else "",
        f"{format_duration(step['fixed_s'])} whatever its length" if step["fixed_s"] else "",
    ]
    shared = " and ".join(part for part in parts if part) or "nothing beyond the library's"
    rows = [("all ranks vary in a step by", shared)]
    if step["correlation_time_s"] > min(row["p50"] for row in summary["sizes"]):
        rows.append(("... with a memory of", format_duration(step["correlation_time_s"])))
    if stalls["n"]:
        by_job, by_node = stalls["job_rate_per_hour"], stalls["node_rate_per_hour"]
        rates = [f"{by_job:.3g} per hour" if by_job else "",
                 f"{by_node:.3g} per hour and node" if by_node else ""]  # fmt: skip
        rows += [
            ("stalls", f"{stalls['n']}: {', and '.join(r for r in rates if r)}"),
            ("a stall adds", f"{format_duration(stalls['mean_s'])} on average, at most "
                             f"{format_duration(stalls['longest_s'])}"),
        ]  # fmt: skip
    return rows
