"""The answer of a replay: how well the graph reproduces the steps, and what stragglers cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism import plots
from prism.analyses.replay import summarize_replay
from prism.common.text import format_count, format_share, percent_change
from prism.present.answer import (
    Answer,
    Cell,
    Column,
    Errors,
    Figure,
    Finding,
    Picture,
    Table,
    change,
    count,
    duration,
    words,
)

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

MOST_CAUSES = 6
WORTH_SHOWING = 1.0005
"""Slowdown below which a cause is left out."""
CAUSES = (("by_op_kind", "op kind"), ("by_stage", "stage"), ("by_worker", "worker"))


def replay_answer(result: xr.Dataset) -> Answer:
    """Make the answer of a replay."""
    numbers = summarize_replay(result)
    subject = Path(str(result.attrs.get("source") or "a recording")).name
    steps = numbers["steps"]
    made = _step_table(numbers), _causes_table(numbers), _spans_table(numbers)
    return Answer(
        title="Replay of a recording",
        subject=subject,
        head=f", {format_count(steps, 'step')}",
        question=f"Does the graph of {subject} reproduce its measured steps, and what do "
        "stragglers cost?",
        findings=tuple(_findings(numbers)),
        tables=tuple(table for table in made if table.rows),
        figures=numbers,
        warnings=tuple(numbers.get("warnings") or ()),
        assumptions=tuple(numbers.get("notes") or ()),
        facts=tuple(
            (label, Figure(numbers[key], write(numbers[key])))
            for key, label, write in (
                ("mean_error", "replayed against measured", percent_change),
                ("slowdown_same_work", "slowdown", _slowdown),
            )
            if numbers.get(key) is not None
        ),
        pictures=tuple(_pictures(result, subject)),
    )


def _findings(numbers: Json) -> list[Finding]:
    """Say what stragglers cost, and how well steps are reproduced."""
    out = []
    slowdown, ideal = numbers.get("slowdown_same_work"), numbers.get("ideal_mean")
    if slowdown is not None and ideal is not None:
        text = (
            f"Stragglers and noise make the step {format_share(slowdown - 1.0, half=0.0)} longer "
        )
        text += "than the ideal step"
        out.append(Finding("stragglers", f"{text} of {words(duration(ideal, 1e-4 * ideal))}.",
                           "answer"))  # fmt: skip
    if numbers.get("mean_error") is not None:
        text = f"The replayed steps are {percent_change(numbers['mean_error'])} off the measured "
        text += "ones in the mean"
        if numbers.get("max_abs_error") is not None:
            text += f", each within {percent_change(numbers['max_abs_error']).lstrip('+')}"
        out.append(Finding("reproduction", f"{text}.", "answer"))
    return out


def _slowdown(value: float) -> str:
    return f"{value:.4f}"


def _step_table(numbers: Json) -> Table:
    mean = numbers.get("measured_mean") or numbers.get("replayed_mean") or 1.0
    rows: list[tuple[Cell, ...]] = []
    for key, label in (("measured_mean", "measured"), ("replayed_mean", "replayed")):
        rows.append((label, duration(numbers.get(key), 1e-4 * mean, mean), None))
    ideal = duration(numbers.get("ideal_mean"), 1e-4 * mean, mean)
    for label, step, key in (
        ("ideal (every effect at 1, stages as unequal as they are)", ideal, "slowdown_same_work"),
        ("ideal as published (equal stages, no launch gaps)", None, "slowdown"),
    ):
        value = numbers.get(key)
        over = None if value is None else Figure(value, _slowdown(value))
        if step is not None or over is not None:
            rows.append((label, step, over))
    columns = (Column(right=False), Column("mean step"), Column("slowdown over it"))
    return Table("", columns, tuple(row for row in rows if any(row[1:])))


def _causes_table(numbers: Json) -> Table:
    """Lay out op kinds, stages and workers by what the step would gain without each."""
    rows: list[tuple[Cell, ...]] = []
    for key, label in CAUSES:
        found = sorted(_named(numbers.get(key)), key=lambda pair: -pair[1])
        large = [pair for pair in found if pair[1] >= WORTH_SHOWING]
        for name, value in large[:MOST_CAUSES]:
            rows.append((label, name, Figure(value, _slowdown(value))))
        rest = len(large) - MOST_CAUSES
        if rest > 0:
            bound = f"up to {_slowdown(large[MOST_CAUSES][1])}"
            rows.append((label, f"{format_count(rest, 'other')}", bound))
    columns = (Column(right=False), Column(right=False), Column("slowdown"))
    note = "slowdown: mean step over that with only this at its mean (below 1.0005 left out)"
    return Table("What slows the step", columns, tuple(rows), (note,))


def _named(found: Any) -> list[tuple[str, float]]:
    """Give names and values of a mapping, or of records of replica and stage; known ones only."""
    if isinstance(found, Mapping):
        pairs = [(str(name), value) for name, value in found.items()]
    else:
        pairs = [
            (f"replica {row['dp_rank']}, stage {row['stage']}", row["slowdown"])
            for row in found or ()
        ]
    return [(name, float(value)) for name, value in pairs if value is not None]


def _spans_table(numbers: Json) -> Table:
    rows = tuple(
        (
            count(row["step"]), count(row["rank"]),
            *(duration(row[key], 1e-4 * row["measured"], row["measured"])
              for key in ("measured", "replayed")),
            change(row["error"]),
        )
        for row in numbers.get("gpu_spans") or ()
    )  # fmt: skip
    heads = ("step", "rank", "measured", "replayed", "error")
    return Table("GPU spans", tuple(Column(head) for head in heads), rows, details=True)


def _pictures(result: xr.Dataset, subject: str) -> list[Picture]:
    errors = Errors("none: nothing is drawn", "as exact as the recording's clock")
    pictures = []
    if "replayed_step_time" in result:
        pictures.append(Picture(
            "replay", f"Replayed against measured step times of {subject}",
            lambda: plots.plot_replay(result),
            "On the dashed line the graph reproduces the measured step.", errors,
        ))  # fmt: skip
    if "slowdown_by_worker" in result:
        pictures.append(Picture(
            "slowdown_by_worker", f"Slowdown of the step by worker of {subject}",
            lambda: plots.plot_workers(result),
            "Step time as measured over the step time with only this worker at its mean.", errors,
        ))  # fmt: skip
    return pictures
