"""The answer of a profile against a job: a step's time by class, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable

from prism.analyses.comparisons.classes import COPIES, IDLE, ClassTimes
from prism.analyses.comparisons.profile import ClassComparison, has_links
from prism.common.text import format_count, format_duration, percent_change
from prism.present.answer import Answer
from prism.present.cells import Cell, Column, Figure, Json, Table, lines_table, share
from prism.present.tables import Rule, find

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
    n_kernels = sum(row["kernels"] or 0.0 for row in rows)
    columns = (
        Column("class", right=False), Column("measured [ms]"), Column("predicted [ms]"),
        Column("predicted/measured"), Column("kernels per step"),
    )  # fmt: skip
    cells = tuple(
        (_NAMES.get(row["name"], row["name"]), unit(row["measured"]), unit(row["predicted"]),
         _ratio(row["ratio"]), _count(row["kernels"]))
        for row in (*rows, {"name": "period", **period, "kernels": n_kernels})
    )  # fmt: skip
    of = f"{format_count(figures['steps'], 'step')} of {format_count(figures['ranks'], 'rank')}"
    return Answer(
        title="A profile against a job",
        subject=f"{figures['trace']} and {figures['job']}",
        head=f": {of}",
        question=f"Where does the step of {figures['job']} take another time than predicted?",
        findings=find(figures, RULES),
        tables=(
            Table(TITLE, columns, cells, (COUNTED_ONCE,)),
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
    digits = ".3f" if (value or 0.0) < 10 else ",.0f"
    return None if value is None else Figure(value, f"{value:{digits}}")


def _count(value: float | None) -> Cell:
    digits = ",.4g" if (value or 0.0) < 1e3 else ",.0f"
    return None if value is None else Figure(value, f"{value:{digits}}")


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0.0 else '-'}{format_duration(abs(seconds), 5e-3 * abs(seconds))}"


def _periods(figures: Json) -> dict[str, Cell]:
    """Write how the periods differ."""
    period = figures["period"]
    predicted, measured = period["predicted"], period["measured"]
    return {
        "predicted": format_duration(predicted), "measured": format_duration(measured),
        "change": percent_change(period["ratio"] - 1.0), "off": _signed(predicted - measured),
    }  # fmt: skip


def _parts(figures: Json) -> str:
    """List the classes that make most of the difference."""
    gaps = {
        _NAMES.get(row["name"], row["name"]): row["predicted"] - row["measured"]
        for row in figures["classes"]
    }
    return ", ".join(
        f"{name} {_signed(gaps[name])}" for name in sorted(gaps, key=lambda x: -abs(gaps[x]))[:3]
        if abs(gaps[name]) >= _LEAST * figures["period"]["measured"]
    )  # fmt: skip


RULES = (
    Rule("period", "answer", lambda f: True,
         "The predicted period is {predicted}, the measured one {measured} ({change}).", _periods),
    Rule("classes", "answer", lambda f: bool(_parts(f)),
         "Predicted less measured is {off}; most of it: {parts}.",
         lambda f: _periods(f) | {"parts": _parts(f)}),
)  # fmt: skip


def _assumptions(figures: Json) -> tuple[str, ...]:
    """Say what either side holds."""
    ideal = "predicted is the ideal step, without variability; a prism estimate adds that"
    links = "a recorded collective lasts from a rank's arrival, so that measured communication "
    links += "holds waiting for other ranks; predicted waiting is idle"
    return (ideal, links) if has_links(figures) else (ideal,)


def _warnings(result: ClassComparison) -> tuple[str, ...]:
    """Warn of a profile that can hardly be of the job."""
    found, wanted = (int(result.attrs[x]) for x in ("world_size", "job_world_size"))
    if found == wanted:
        return ()
    return (
        f"the profile is of {format_count(found, 'rank')}, the job of "
        f"{format_count(wanted, 'GPU')}: is it the same job?",
    )
