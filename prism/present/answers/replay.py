"""The answer of a replay: how well the graph reproduces the steps, and what stragglers cost."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from prism import plots
from prism.analyses.replay import FIGURES, SPANS, Replay
from prism.common.results import read_figures
from prism.common.text import format_count, percent_change
from prism.present.answer import Answer, Errors, Picture
from prism.present.cells import Cell, Column, Figure, Table, change, duration, share
from prism.present.tables import Rule, find, lay_out

MOST_CAUSES = 6
WORTH_SHOWING = 1.0005  # slowdown below which a cause is left out

RULES = (
    Rule("stragglers", "answer", lambda r: True,
         "stragglers and noise make the step {slower} longer than the ideal step of {ideal}.",
         lambda r: {"slower": share(r.slowdown_same_work.item() - 1.0),
                    "ideal": duration(r.ideal_mean.item(), 1e-4 * r.ideal_mean.item())}),
    Rule("reproduction", "answer", lambda r: True,
         "replayed steps are {mean} off the measured ones in the mean, each within {most}.",
         lambda r: {"mean": change(r.mean_error.item()),
                    "most": percent_change(r.max_abs_error.item()).lstrip("+")}),
)  # fmt: skip


def replay_answer(result: Replay) -> Answer:
    """Make the answer of a replay."""
    numbers = result.figures()
    subject = Path(str(result.attrs.get("source") or "a recording")).name
    spans = lay_out("GPU spans", SPANS, numbers.get("gpu_spans", ()), details=True)
    made = _step_table(result), _causes_table(result), spans
    return Answer(
        title="Replay of a recording",
        subject=subject,
        head=f", {format_count(numbers['steps'], 'step')}",
        question=f"Does the graph of {subject} reproduce its measured steps, and what do "
        "stragglers cost?",
        findings=find(result, RULES),
        tables=tuple(table for table in made if table.rows),
        figures=numbers,
        warnings=tuple(numbers["warnings"]),
        assumptions=tuple(numbers["notes"]),
        facts=(("slowdown", _slowdown(numbers["slowdown_same_work"])),),
        pictures=tuple(_pictures(result, subject)),
    )


def _slowdown(value: float) -> Figure:
    return Figure(value, f"{value:.4f}")


def _step_table(result: Replay) -> Table:
    found = read_figures(FIGURES, result.to_xarray())
    mean = found["measured_mean"]
    rows: list[tuple[Cell, ...]] = [
        (label, seconds and duration(seconds, 1e-4 * mean, mean), slowdown and _slowdown(slowdown))
        for label, seconds, slowdown in (
            ("measured", mean, None),
            ("replayed", found["replayed_mean"], None),
            ("ideal (every effect at 1, stages as unequal as they are)", found["ideal_mean"],
             found["slowdown_same_work"]),
            ("ideal as published (equal stages, no launch gaps)", None, found["slowdown"]),
        ) if seconds or slowdown
    ]  # fmt: skip
    columns = (Column(right=False), Column("mean step"), Column("slowdown over it"))
    return Table("", columns, tuple(rows))


def _causes_table(result: Replay) -> Table:
    """Lay out op kinds, stages and workers by what the step would gain without each."""
    rows: list[tuple[Cell, ...]] = []
    for kind, causes in groupby(result.causes(), key=lambda row: str(row["kind"])):
        large = sorted(
            (row for row in causes if row["slowdown"] >= WORTH_SHOWING),
            key=lambda row: -row["slowdown"],
        )
        rows += [(kind, row["name"], _slowdown(row["slowdown"])) for row in large[:MOST_CAUSES]]
        if rest := large[MOST_CAUSES:]:
            rows.append(
                (kind, format_count(len(rest), "other"), f"up to {rest[0]['slowdown']:.4f}")
            )
    columns = (Column(right=False), Column(right=False), Column("slowdown"))
    note = "slowdown: mean step over that with only this at its mean (below 1.0005 left out)"
    return Table("What slows the step", columns, tuple(rows), (note,))


def _pictures(result: Replay, subject: str) -> list[Picture]:
    errors = Errors("none: nothing is drawn", "as exact as the recording's clock")
    pictures = [Picture(
        "replay", f"Replayed against measured step times of {subject}",
        lambda: plots.plot_replay(result),
        "On the dashed line the graph reproduces the measured step.", errors,
    )]  # fmt: skip
    if "slowdown_by_worker" in result:
        pictures.append(Picture(
            "slowdown_by_worker", f"Slowdown of the step by worker of {subject}",
            lambda: plots.plot_workers(result),
            "Step time as measured over the step time with only this worker at its mean.", errors,
        ))  # fmt: skip
    return pictures
