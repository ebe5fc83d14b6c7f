"""The answer to why one job takes more GPU time than another for the same work."""

from __future__ import annotations

from prism.analyses.explain import Explanation
from prism.common.text import format_count, format_duration, format_share, percent_change
from prism.present.answer import Answer
from prism.present.answers.estimate import part_name
from prism.present.cells import Cell, Column, Figure, Json, Table, share
from prism.present.tables import Rule, find

LEAST = 1e-4  # share of either job's cost that a term must change to be shown
_COST = (
    "GPU-seconds for an exaflop of the model's own work: 1e18 over the flop/s of a GPU. Both "
    "columns add up to what the jobs take, or took where that was given."
)
_WAY = (
    "Each row changes the keys of its kind from A's values to B's and keeps what is above it; "
    "another order would share the gap out otherwise. Jobs on the way need not fit the memory."
)


def explain_answer(result: Explanation) -> Answer:
    """Make the answer of an explanation."""
    figures = result.figures()
    a, b = figures["a"], figures["b"]
    subject = f"{a['job']} and {b['job']}"
    return Answer(
        title="The gap between two jobs",
        subject=subject,
        head=f", {format_count(figures['replicates'], 'step replicate')}, seed {figures['seed']}",
        question=f"Why does {b['job']} take another time per flop than {a['job']}?",
        findings=find(figures, RULES),
        tables=(_sides(figures), _terms(figures), *_stages(figures)),
        figures=figures,
    )


def _rate(value: float | None) -> Cell:
    return None if value is None else Figure(value, f"{value / 1e12:.1f}")


def _seconds(value: float) -> Figure:
    return Figure(value, f"{value:,.1f}")


def _signed(value: float) -> Figure:
    return Figure(value, f"{value:+,.1f}")


def _taken(side: Json) -> float:
    """GPU time per exaflop as measured, or as predicted [s]."""
    return float(side.get("measured_cost") or side["cost"])


def _sides(figures: Json) -> Table:
    given = any("measured_cost" in figures[side] for side in "ab")
    columns = (
        Column("job", right=False), Column("GPUs"), Column("mean step"), Column("TFLOP/s per GPU"),
        Column("MFU"), *(Column("measured TFLOP/s") for _ in range(given)),
    )  # fmt: skip
    rows = tuple(
        (f"{name.upper()}: {side['job']}", Figure(side["gpus"], f"{side['gpus']:,}"),
         Figure(side["step_s"], format_duration(side["step_s"])), _rate(side["flops_per_gpu"]),
         share(side["mfu"]), *(_rate(side.get("measured_flops_per_gpu")) for _ in range(given)))
        for name, side in (("a", figures["a"]), ("b", figures["b"]))
    )  # fmt: skip
    return Table("Jobs", columns, rows)


def _shown(figures: Json) -> list[Json]:
    least = LEAST * min(figures["a"]["cost"], figures["b"]["cost"])
    return [row for row in figures["terms"] if max(abs(row["a"]), abs(row["b"])) > least]


def _terms(figures: Json) -> Table:
    columns = (
        Column("term", right=False), Column("A [s]"), Column("B [s]"), Column("B less A [s]"),
        Column("of the gap"),
    )  # fmt: skip
    rows = [
        (part_name(row["name"]), _seconds(row["a"]), _seconds(row["b"]),
         _signed(row["change"]), share(row["gap_share"]))
        for row in _shown(figures)
    ]  # fmt: skip
    a, b = (_taken(figures[side]) for side in "ab")
    rows.append(("all", _seconds(a), _seconds(b), _signed(b - a), share(1.0) if a != b else None))
    return Table("GPU time for an exaflop, by where it goes", columns, tuple(rows), (_COST,))


def _stages(figures: Json) -> tuple[Table, ...]:
    """List what each change brings; nothing where none is needed."""
    if len(figures["stages"]) < 2:
        return ()
    columns = (
        Column("change", right=False), Column("GPUs"), Column("mean step"),
        Column("TFLOP/s per GPU"), Column("of the predicted gap"), Column("keys", right=False),
    )  # fmt: skip
    rows = tuple(
        (row["change"], Figure(row["gpus"], f"{row['gpus']:,}"),
         Figure(row["step_s"], format_duration(row["step_s"])), _rate(row["flops_per_gpu"]),
         share(row["gap_share"]), row["keys"])
        for row in figures["stages"]
    )  # fmt: skip
    return (Table("The way from A to B", columns, rows, (_WAY,)),)


def _gap(figures: Json) -> float:
    return _taken(figures["b"]) / _taken(figures["a"]) - 1.0


def _most(figures: Json) -> str:
    """Name the terms that make most of the gap."""
    rows = [row for row in figures["terms"] if row["name"] != "not_predicted"][:3]
    least = 0.005 * _taken(figures["a"])
    named = [
        f"{part_name(row['name'])} {row['change']:+,.0f} s"
        for row in rows
        if abs(row["change"]) >= least
    ]
    return ", ".join(named)


def _said(figures: Json) -> dict[str, str]:
    a, b = figures["a"], figures["b"]
    predicted = b["cost"] / a["cost"] - 1.0
    return {
        "b": b["job"], "a": a["job"], "change": percent_change(_gap(figures)),
        "rates": f"{1e6 / _taken(b):.1f} TFLOP/s per GPU against {1e6 / _taken(a):.1f}",
        "parts": _most(figures), "predicted": percent_change(predicted),
        "explained": format_share(predicted / _gap(figures)) if _gap(figures) else "all",
    }  # fmt: skip


def _both(figures: Json) -> bool:
    return all("measured_cost" in figures[side] for side in "ab")


RULES = (
    Rule("gap", "answer", lambda f: True,
         "GPU time of {b} for the same work: {change} against {a} ({rates}).", _said),
    Rule("terms", "answer", lambda f: bool(_most(f)),
         "Most of the predicted difference, in GPU-seconds for an exaflop: {parts}.", _said),
    Rule("explained", "answer", lambda f: _both(f) and abs(_gap(f)) > LEAST,
         "The two jobs as described differ by {predicted}, which is {explained} of the measured "
         "gap; the rest is not predicted.", _said),
)  # fmt: skip
