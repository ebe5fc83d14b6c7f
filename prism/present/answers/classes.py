"""The answer of a profile against a job: a step's time by class, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prism.analyses.comparisons.classes import COPIES, IDLE, ClassTimes
from prism.analyses.comparisons.profile import ClassComparison, has_links
from prism.common.text import format_count, format_duration, percent_change
from prism.present.answer import Answer, Cell, Column, Figure, Finding, Table, lines_table, share

Json = Mapping[str, Any]

TITLE = "Where the step's time goes"
COUNTED_ONCE = (
    "Time that runs at once is counted once: compute before communication, that before copies; "
    "idle: nothing runs. The classes add up to the period, from the end of one step's device work "
    "to the end of the next one's."
)
_NAMES = {COPIES: "copies and fills", "p2p": "send and receive"}
_LEAST = 0.005  # of the period: a class that is off by less is not worth a word


def classes_answer(result: ClassComparison) -> Answer:
    """Make the answer of a profile against a job."""
    figures = result.figures()
    period, rows = figures["period"], figures["classes"]
    unit = _milliseconds(period["measured"])
    columns = (
        Column("class", right=False), Column("measured [ms]"), Column("predicted [ms]"),
        Column("predicted/measured"), Column("kernels per step"),
    )  # fmt: skip
    cells = [
        (
            _NAMES.get(row["name"], row["name"]), unit(row["measured"]), unit(row["predicted"]),
            _ratio(row["ratio"]), _count(row["kernels"]),
        )
        for row in rows
    ]  # fmt: skip
    n_kernels = sum(row["kernels"] or 0.0 for row in rows)
    last = ("period", unit(period["measured"]), unit(period["predicted"]),
            _ratio(period["ratio"]), _count(n_kernels))  # fmt: skip
    of = f"{format_count(figures['steps'], 'step')} of {format_count(figures['ranks'], 'rank')}"
    return Answer(
        title="A profile against a job",
        subject=f"{figures['trace']} and {figures['job']}",
        head=f": {of}",
        question=f"Where does the step of {figures['job']} take another time than predicted?",
        findings=_findings(figures),
        tables=(
            Table(TITLE, columns, (*cells, last), (COUNTED_ONCE,)),
            lines_table("Notes", figures["notes"], details=True),
        ),
        figures=figures,
        warnings=_warnings(result),
        assumptions=_assumptions(figures),
    )


def class_times_table(times: ClassTimes) -> Table:
    """Lay out a profile's time by class."""
    unit = _milliseconds(times.period)
    columns = (
        Column("class", right=False), Column("per step [ms]"), Column("of the period"),
        Column("kernels per step"),
    )  # fmt: skip
    rows = tuple(
        (_NAMES.get(name, name), unit(seconds), share(seconds / times.period),
         None if name == IDLE else _count(times.kernels[name]))
        for name, seconds in times.seconds.items()
        if name == IDLE or times.kernels[name] or seconds
    )  # fmt: skip
    last = ("period", unit(times.period), share(1.0), _count(sum(times.kernels.values())))
    return Table(TITLE, columns, (*rows, last), (COUNTED_ONCE,))


def _milliseconds(period: float) -> Callable[[float], Figure]:
    """Write times so that all have the digits of a ten-thousandth of the period."""
    digits = next((n for n, least in ((1, 1.0), (2, 0.01)) if period >= least), 4)
    return lambda seconds: Figure(seconds, f"{1e3 * seconds:,.{digits}f}")


def _ratio(value: float | None) -> Cell:
    return (
        None if value is None else Figure(value, f"{value:.3f}" if value < 10 else f"{value:,.0f}")
    )


def _count(value: float | None) -> Cell:
    return (
        None
        if value is None
        else Figure(value, f"{value:,.4g}" if value < 1e3 else f"{value:,.0f}")
    )


def _findings(figures: Json) -> tuple[Finding, ...]:
    """Say how the periods differ, and which classes make most of it."""
    period = figures["period"]
    off = period["predicted"] - period["measured"]
    text = (
        f"The predicted period is {format_duration(period['predicted'])}, the measured one "
        f"{format_duration(period['measured'])} ({percent_change(period['ratio'] - 1.0)})."
    )
    found = [Finding("period", text, "answer")]
    gaps = {
        _NAMES.get(row["name"], row["name"]): row["predicted"] - row["measured"]
        for row in figures["classes"]
    }
    parts = [
        f"{name} {_signed(gaps[name])}" for name in sorted(gaps, key=lambda x: -abs(gaps[x]))[:3]
        if abs(gaps[name]) >= _LEAST * period["measured"]
    ]  # fmt: skip
    if parts:
        text = f"Predicted less measured is {_signed(off)}; most of it: {', '.join(parts)}."
        found.append(Finding("classes", text, "answer"))
    return tuple(found)


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0.0 else '-'}{format_duration(abs(seconds), 5e-3 * abs(seconds))}"


def _assumptions(figures: Json) -> tuple[str, ...]:
    """Say what either side holds."""
    said = ["predicted is the ideal step, without variability; a prism estimate adds that"]
    if has_links(figures):
        said.append(
            "a recorded collective lasts from a rank's arrival, so that measured communication "
            "holds waiting for other ranks; predicted waiting is idle"
        )
    return tuple(said)


def _warnings(result: ClassComparison) -> tuple[str, ...]:
    """Warn of a profile that can hardly be of the job."""
    found, wanted = (int(result.attrs[x]) for x in ("world_size", "job_world_size"))
    if found == wanted:
        return ()
    return (
        f"the profile is of {format_count(found, 'rank')}, the job of "
        f"{format_count(wanted, 'GPU')}: is it the same job?",
    )
