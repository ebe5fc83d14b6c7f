"""The answer of a look at a run in progress: when it is done, whether its steps changed."""

from __future__ import annotations

from datetime import datetime

from prism.analyses.watch import Forecast
from prism.common.text import format_count, format_share
from prism.present.answer import Answer
from prism.present.answers.runs import DEPARTURE, FAILURES
from prism.present.cells import Cell, Column, Figure, Json, Table, duration
from prism.present.tables import Rule, find

SHOWN = {"p10": "earliest, 10 %", "p50": "median, 50 %", "p90": "latest, 90 %"}
MODELS = {"job": "the job", "steps": "the model", "log": "the completed steps"}
"""What a log is held against, by kind."""


def watch_answer(result: Forecast) -> Answer:
    """Make the answer of a look."""
    numbers = result.figures()
    done, total = numbers["completed_steps"], numbers["steps"]
    text = f": {format_count(done)} of {format_count(total, 'step')} ({format_share(done / total)})"
    written = _date(numbers["written"])
    return Answer(
        title="A run that is going on",
        subject=str(numbers["log"]),
        head=f"{text}, written {written}; held against {_model(numbers)}, seed {numbers['seed']}",
        question=f"When is the run of {numbers['log']} done, and did its step time change?",
        findings=find(numbers, RULES),
        tables=(_finish(numbers),) if numbers["departure"] else (),
        figures=numbers,
        warnings=tuple(numbers["warnings"]),
        assumptions=tuple(numbers["notes"]),
    )


def _model(numbers: Json) -> str:
    name = MODELS[numbers["model"]]
    return name if numbers["model"] == "log" else f"{name} {numbers['job']}"


def _date(iso: str) -> str:
    """Write a date to the minute, in the time zone it was written in."""
    return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M")


RULES = (
    Rule("finish", "answer", lambda n: not n["departure"], "All steps are done."),
    Rule("finish", "answer", lambda n: n["departure"] and not n["finish"],
         "The end is beyond the calendar."),
    Rule("finish", "answer", lambda n: n["departure"] and n["finish"],
         "Done on {p50} (P50), with 90 % by {p90}.",
         lambda n: {q: _date(date) for q, date in n["finish"].items()}),
    Rule("finish_by", "answer", lambda n: n.get("finish_by"), "P(done within {time}) is {p}.",
         lambda n: {"time": duration(n["finish_by"]["deadline"]),
                    "p": format_share(n["finish_by"]["probability"])}),
    *DEPARTURE,
    *FAILURES,
)  # fmt: skip


def _finish(numbers: Json) -> Table:
    """Lay out what is left and the date, by quantile."""
    left, dates = numbers["time_left"], numbers["finish"]
    fine = 0.1 * (left["p90"] - left["p10"]) or 1e-3 * left["p50"]
    rows: list[tuple[Cell, ...]] = [
        (label, duration(left[q], fine), _date(dates[q]) if dates else None)
        for q, label in SHOWN.items()
    ]
    steps = duration(numbers["last_step_time"])
    assert isinstance(steps, Figure)
    columns = (Column(right=False), Column("time left"), Column("done"))
    return Table("Finish", columns, tuple(rows), (f"Mean of the last step times: {steps.text}",))
