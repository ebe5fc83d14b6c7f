"""What a recording holds, as an answer: a trace's ops, or step times.

Files are known by their content. Durations are shown as recorded: those of transfers and
collectives include waiting. Left out: everything fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from prism.analyses.comparisons.classes import IDLE, measured_times
from prism.common.agreement import effective_n
from prism.common.text import format_count
from prism.models.changes.find import find_changes
from prism.models.changes.report import warn
from prism.present.answer import Answer
from prism.present.answers.classes import class_times_table
from prism.present.answers.stepmodel import step_time_rows
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Table,
    count,
    duration,
    lines_table,
    pairs_table,
    share,
    spread,
)
from prism.simulation.tracemodel.model import figures
from prism.traces import StepTimes
from prism.traces.table import Trace

WAITING = ("transfer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""Kinds of op whose recorded durations include waiting."""
MOST_ROWS = 20


def describe_trace(trace: Trace) -> Answer:
    """Describe a trace: its layout, where its step's time goes, each kind of op with its spread."""
    ops, times = trace.chosen, measured_times(trace)
    steps = np.unique(ops["step"][ops["step"] >= 0])
    places = ("rank", "dp_rank", "stage", "chunk", "stream")
    found: dict[str, Any] = {
        "kind": "trace", "format": trace.format, "source": trace.source, "n_ops": len(ops),
        "n_steps": int(steps.size),
        "steps": [int(steps[0]), int(steps[-1])] if steps.size else [],
        "n_microbatches": int(np.unique(ops["microbatch"][ops["microbatch"] >= 0]).size),
        **{f"n_{name}s": int(ops[name].nunique()) for name in places},
        "step_span_mean": _step_span(ops), **_step_times(trace),
        "ops": _kinds(trace), "notes": list(trace.notes),
    }  # fmt: skip
    if times is not None:
        found["step_classes"] = {
            "period": times.period, "steps": times.n_steps,
            "classes": [
                {"name": name, "seconds": seconds, "share": seconds / times.period,
                 "kernels": times.kernels.get(name)}
                for name, seconds in times.seconds.items()
                if name == IDLE or times.kernels[name] or seconds
            ],
        }  # fmt: skip
    by_class = () if times is None else (class_times_table(times),)
    ops_tables = _ops(found["ops"], details=times is not None)
    tables = (_sizes(found), *by_class, *ops_tables, lines_table("Notes", found["notes"]))
    return Answer(
        title="Trace",
        subject=Path(trace.source).name,
        head=f": trace, {trace.format}",
        tables=tuple(table for table in tables if table.rows),
        figures=found,
    )


def _kinds(trace: Trace) -> list[dict[str, Any]]:
    """Statistics per kind of op and, where the format knows kernels, per class; longest first."""
    keys = ["op_kind", "kernel_class"] if trace.has_kernels else ["op_kind", "name"]
    total = float(trace.chosen["duration"].sum()) or 1.0
    rows = []
    for (kind, what), group in trace.chosen.groupby(keys, observed=True)["duration"]:
        seconds = group.to_numpy()
        mean, median = float(seconds.mean()), float(np.median(seconds))
        rows.append({
            "op_kind": str(kind), "what": str(what), "n": int(seconds.size), "mean": mean,
            "cv": float(seconds.std() / mean) if mean > 0 else None,
            "p99_p50": float(np.quantile(seconds, 0.99) / median) if median > 0 else None,
            "share": float(seconds.sum() / total), "includes_waiting": str(kind) in WAITING,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -float(row["share"]))


def _step_span(ops: pd.DataFrame) -> float | None:
    """Mean over steps of last end minus first start [s]; None where there are no starts."""
    known = ops[(ops["step"] >= 0) & ops["start"].notna()]
    if known.empty:
        return None
    end = (known["start"] + known["duration"]).groupby(known["step"]).max()
    return float((end - known["start"].groupby(known["step"]).min()).mean())


def _step_times(trace: Trace) -> dict[str, Any]:
    """Periods of a profile's steps, and where the host leads what it sees of them [s]."""
    rows = trace.meta.get("periods", ())
    if not rows:
        return {}
    periods = np.array([end - begin for _, begin, end in rows])
    begins: dict[int, float] = {}
    for about in trace.meta["ranks"]:
        for number, begin, _ in about["steps"]:
            begins[number] = min(begin, begins.get(number, np.inf))
    latency = [end - begins[number] for number, _, end in rows if number in begins]
    return {
        "periods": periods.tolist(), "step_time": figures(periods),
        "host_to_device_end": float(np.mean(latency)) if latency else None,
    }  # fmt: skip


def _sizes(found: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, Cell]] = [("ops", count(found["n_ops"]))]
    if found["n_steps"]:
        first, last = found["steps"]
        gaps = "" if last - first + 1 == found["n_steps"] else ", with gaps"
        text = f"{format_count(found['n_steps'])} ({first} to {last}{gaps})"
        rows.append(("steps", Figure(found["n_steps"], text)))
    for key, title in (
        ("n_ranks", "ranks recorded"), ("n_dp_ranks", "replicas"), ("n_stages", "stages"),
        ("n_chunks", "model chunks"), ("n_microbatches", "microbatches"),
    ):  # fmt: skip
        if found[key] > 1 or key == "n_ranks":
            rows.append((title, count(found[key])))
    step, latency = found.get("step_time"), found.get("host_to_device_end")
    if step is not None:
        rows.append(("step time, mean", duration(step["mean"], 1e-3 * step["mean"])))
        if step["n"] > 1:
            rows.append(("step time, median", duration(step["p50"], 1e-3 * step["mean"])))
            rows.append(("step time, CV, ± 95 %", spread(step)))
        if latency is not None and latency > 1.01 * step["mean"]:
            rows.append((
                "host's begin to the device's end", duration(latency, 1e-3 * latency)
            ))  # fmt: skip
    elif found["step_span_mean"] is not None:
        span = found["step_span_mean"]
        rows.append(("step, mean, first start to last end", duration(span, 1e-3 * span)))
    return pairs_table("Recorded", rows)


def _ops(kinds: Sequence[Mapping[str, Any]], details: bool) -> list[Table]:
    """Lay out kinds of op, those with most of the time first."""
    rows = tuple(
        (
            row["op_kind"], row["what"] if row["what"] != row["op_kind"] else None,
            count(row["n"]), duration(row["mean"], 1e-3 * row["mean"]), share(row["cv"]),
            None if row["p99_p50"] is None else Figure(row["p99_p50"], f"{row['p99_p50']:.3g}"),
            share(row["share"]), "includes waiting" if row["includes_waiting"] else None,
        )
        for row in kinds
    )  # fmt: skip
    heads = ("kind of op", "class", "n", "mean", "CV", "p99/p50", "of the time", "")
    columns = tuple(Column(head, right=2 <= i <= 6) for i, head in enumerate(heads))
    more = len(rows) - MOST_ROWS
    notes = (f"{more} more: --details lists them",) if more > 0 else ()
    if details:
        return [Table("Ops, as recorded", columns, rows, details=True)]
    shown = Table("Ops, as recorded", columns, rows[:MOST_ROWS], notes)
    return [shown, Table("Further ops", columns, rows[MOST_ROWS:], details=True)]


def describe_step_times(times: StepTimes) -> Answer:
    """Describe step times: how many, of how many runs, and their spread."""
    found_changes = find_changes(times).settled()
    changes, calm = found_changes.rows, found_changes.late
    said = [warn({**row, "kept": row["kept"] or "shown"}) for row in changes]
    seconds = times.seconds
    mean, std = float(seconds.mean()), float(seconds.std(ddof=1)) if seconds.size > 1 else 0.0
    found: dict[str, Any] = {
        "kind": "step_times", "source": times.source, "column": times.column, "taken": times.taken,
        "n": int(seconds.size), "n_runs": int(np.unique(times.run).size),
        "n_effective": effective_n(calm.seconds, calm.step, calm.run), "mean_over": times.mean_over,
        "mean": mean, "std": std,
        **{f"p{q}": float(np.quantile(seconds, 0.01 * q)) for q in (5, 50, 95, 99)},
        "changes": changes, "notes": [*said, *times.notes],
    }  # fmt: skip
    rows: list[tuple[str, Cell]] = [
        ("steps", count(found["n"])),
        ("runs", count(found["n_runs"])),
        ("effective sample size", Figure(found["n_effective"], f"{found['n_effective']:.1f}")),
        *step_time_rows(found),
    ]
    if times.mean_over > 1:
        rows.insert(
            1, ("each the mean of", Figure(times.mean_over, format_count(times.mean_over, "step")))
        )
    tables = (pairs_table("", rows), lines_table("Notes", found["notes"]))
    return Answer(
        title="Step times",
        subject=Path(times.source).name,
        head=f": step times, {times.column}",
        tables=tuple(table for table in tables if table.rows),
        figures=found,
    )
