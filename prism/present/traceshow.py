"""What a recording holds, as data and as a view: a trace's ops, or step times.

Files are told apart by content. Durations are shown as recorded: those of transfers and
collectives include waiting. Left out: everything fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from prism.common.agreement import effective_n
from prism.common.text import format_count, format_duration, format_share
from prism.present.views.tables import bold, rows_view, table_view
from prism.traces import read_step_times, read_trace
from prism.traces.table import Trace

Description = tuple[dict[str, Any], RenderableType]

WAITING = ("transfer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Kinds of op whose recorded durations include waiting."""
_MOST_ROWS = 30


def describe_trace(what: str, step_range: str | None = None) -> Description:
    """Describe a trace: its layout, and each kind of op with its spread.

    ``step_range`` is what its ranges that are steps are called, where nothing else marks them.
    """
    trace = read_trace(what, step_range)
    ops = trace.ops
    steps = np.unique(ops["step"][ops["step"] >= 0])
    microbatches = np.unique(ops["microbatch"][ops["microbatch"] >= 0])
    n_per_place = {
        name: int(ops[name].nunique()) for name in ("rank", "dp_rank", "stage", "chunk", "stream")
    }
    kinds = _kinds(trace)
    found: dict[str, Any] = {
        "kind": "trace",
        "format": trace.format,
        "source": trace.source,
        "n_ops": len(ops),
        "n_steps": int(steps.size),
        "steps": [int(steps[0]), int(steps[-1])] if steps.size else [],
        "n_microbatches": int(microbatches.size),
        **{f"n_{name}s": n for name, n in n_per_place.items()},
        "step_span_mean": _step_span(ops),
        "ops": kinds,
        "notes": list(trace.notes),
    }
    return found, _trace_view(found)


def _kinds(trace: Trace) -> list[dict[str, Any]]:
    """Statistics per kind of op and, where the format knows kernels, per class; longest first."""
    ops = trace.ops
    keys = ["op_kind", "kernel_class"] if trace.has_kernels else ["op_kind", "name"]
    total = float(ops["duration"].sum()) or 1.0
    rows = []
    for labels, group in ops.groupby(keys, observed=True)["duration"]:
        seconds = group.to_numpy()
        mean, median = float(seconds.mean()), float(np.median(seconds))
        rows.append(
            {
                "op_kind": str(labels[0]),
                "what": str(labels[1]),
                "n": int(seconds.size),
                "mean": mean,
                "cv": float(seconds.std() / mean) if mean > 0 else None,
                "p99_p50": float(np.quantile(seconds, 0.99) / median) if median > 0 else None,
                "share": float(seconds.sum() / total),
                "includes_waiting": str(labels[0]) in WAITING,
            }
        )
    return sorted(rows, key=lambda row: -float(row["share"]))


def _step_span(ops: pd.DataFrame) -> float | None:
    """Mean over steps of last end minus first start [s]; None where there are no starts."""
    known = ops[(ops["step"] >= 0) & ops["start"].notna()]
    if known.empty:
        return None
    end = (known["start"] + known["duration"]).groupby(known["step"]).max()
    return float((end - known["start"].groupby(known["step"]).min()).mean())


def _trace_view(found: dict[str, Any]) -> RenderableType:
    """Lay out a trace."""
    rows = [("ops", format_count(found["n_ops"]))]
    if found["n_steps"]:
        first, last = found["steps"]
        gaps = "" if last - first + 1 == found["n_steps"] else ", with gaps"
        rows.append(("steps", f"{found['n_steps']} ({first} to {last}{gaps})"))
    for key, title in (
        ("n_ranks", "ranks recorded"),
        ("n_dp_ranks", "replicas"),
        ("n_stages", "stages"),
        ("n_chunks", "model chunks"),
        ("n_microbatches", "microbatches"),
    ):
        if found[key] > 1 or key == "n_ranks":
            rows.append((title, format_count(found[key])))
    if found["step_span_mean"] is not None:
        rows.append(("a step, first start to last end", format_duration(found["step_span_mean"])))
    table = [
        {
            "op kind": row["op_kind"],
            "what": row["what"] if row["what"] != row["op_kind"] else "",
            "n": format_count(row["n"]),
            "mean": format_duration(row["mean"]),
            "CV": "" if row["cv"] is None else format_share(row["cv"]),
            "p99/p50": "" if row["p99_p50"] is None else f"{row['p99_p50']:.3g}",
            "share of time": format_share(row["share"]),
            "": "includes waiting" if row["includes_waiting"] else "",
        }
        for row in found["ops"]
    ]
    parts: list[RenderableType] = [
        Text(f"{found['source']}: trace, {found['format']}", style="bold"),
        "",
        rows_view(rows),
        "",
        table_view(
            "Ops, as recorded", table[:_MOST_ROWS], ("n", "mean", "CV", "p99/p50", "share of time")
        ),
    ]
    if len(table) > _MOST_ROWS:
        parts.append(f"and {len(table) - _MOST_ROWS} more: --json lists all")
    return Group(*parts, *_notes(found["notes"]))


def describe_step_times(
    what: str, column: str | None = None, where: Mapping[str, str] | None = None
) -> Description:
    """Describe a file of step times: how many, of how many runs, and their spread.

    ``column`` and ``where`` choose the duration and the rows of a wide table.
    """
    times = read_step_times(what, column, where)
    seconds = times.seconds
    mean = float(seconds.mean())
    p5, p50, p95, p99 = (float(q) for q in np.quantile(seconds, [0.05, 0.5, 0.95, 0.99]))
    found: dict[str, Any] = {
        "kind": "step_times",
        "source": times.source,
        "column": times.column,
        "n": int(seconds.size),
        "n_runs": int(np.unique(times.run).size),
        "n_effective": effective_n(seconds, times.step, times.run),
        "mean_over": times.mean_over,
        **{"mean": mean, "std": float(seconds.std(ddof=1)) if seconds.size > 1 else 0.0},
        **{"p5": p5, "p50": p50, "p95": p95, "p99": p99},
        "notes": list(times.notes),
    }
    rows = [
        ("steps", f"{format_count(found['n'])}, of {format_count(found['n_runs'])} runs"),
        ("independent ones worth as much", f"{found['n_effective']:.1f}"),
        ("mean", format_duration(mean)),
        ("standard deviation", f"{format_share(found['std'] / mean if mean else 0.0)} of the mean"),
        *((name, format_duration(found[name])) for name in ("p5", "p50", "p95", "p99")),
    ]
    if times.mean_over > 1:
        rows.insert(1, ("each the mean of", f"{times.mean_over} steps"))
    title = Text(f"{times.source}: step times, {times.column}", style="bold")
    return found, Group(title, "", rows_view(rows), *_notes(found["notes"]))


def _notes(notes: list[str]) -> list[RenderableType]:
    """List what was dropped, repaired or counted."""
    if not notes:
        return []
    return ["", bold("Notes"), *(Text(f"- {note}") for note in notes)]
