"""The answer of a ranking: what makes the time vary, what to do about it, what that brings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from prism import plots
from prism.analyses.rank import CAUSES, Ranking
from prism.analyses.rankings.shares import HALF_WIDTH, WIDE_HALF_WIDTH
from prism.common.text import format_share
from prism.jobs.jobspec.effects import WORDS
from prism.present.answer import Answer, Errors, Picture
from prism.present.answers.times import NOT_INCLUDED
from prism.present.cells import Cell, Figure, Json, duration, error, pairs_table, share, words
from prism.present.tables import Rule, find, lay_out, write
from prism.simulation.labels import TARGETS, label, short_label

# ------------------------------------------------------------------ what to do about a cause
_TERM_REMEDIES = {
    "model_error": "calibrate it on measured steps (prism fit --calibrate)",
    "run_effect": "look at what changes from run to run: nodes, software, neighbours",
    "fail_slow": "find and replace slow nodes sooner",
    "evaluations": "evaluate less often, or beside the training",
    "checkpoints": "write checkpoints in the background",
    "lost_work": "write checkpoints more often",
    "restarts": "detect failures and restart sooner",
    "spares": "keep more spare nodes",
    "fewer_replicas": "keep more spare nodes",
}
_STEADIER = "look for what disturbs these kernels: clocks, power limits, other processes"
_OVERLAP = "overlap it with compute, or look for what disturbs its links"
_COMMUNICATION = "p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "nccl"
"""Words in the names of kernel classes that communicate."""


def cause_text(cause: str, kind: str) -> str:
    """Name a cause by what it is, with the name that tables give it."""
    short = short_label(cause, kind)
    if kind == "terms":
        return short
    if cause in WORDS:
        return f"{WORDS[cause].cause} ({short})"
    return f"noise of {short}" if kind == "kernels" else f"the {short}"


def remedy_text(cause: str, kind: str) -> str:
    """Say what to do about a cause."""
    if kind == "terms":
        return _TERM_REMEDIES.get(cause, "look at what the run does beside its steps")
    if cause in WORDS:
        return WORDS[cause].remedy
    if cause == "launch_gap":
        return "launch fewer kernels, as with CUDA graphs"
    return _OVERLAP if any(word in cause.lower() for word in _COMMUNICATION) else _STEADIER


MOST_ROWS, MOST_CHANGES, MOST_NAMED = 12, 8, 3
SMALL, SMALL_CHANGE = 1e-3, 0.01
"""Shares of the variance, and changes, of causes that are details [1]."""
LEAST_FINDING = 0.005  # change of p95 worth a sentence [1]
NOTABLE = 0.02  # difference of shares worth a sentence [1]
FIELDS = {field.name: field for field in CAUSES.fields}
_SHARES = ("recurrence", "first_order", "total_order")
_GAINS = ("p50_reduction", "p95_reduction", "run_reduction")
_PATH = ("cv", "critical_path_share", "covariance_share", "tail_share")


def rank_answer(result: Ranking) -> Answer:
    """Make the answer of a ranking."""
    numbers, rows = result.figures(), _named(result.rows)
    target, spread = TARGETS[numbers["target"]], _spread(numbers)
    mean, p95, std = (words(cell) for _, cell in spread[:3])
    facts = spread[:3]
    if numbers["std"]:
        facts.append((f"largest cause, {rows[0]['name']}", _write(rows[0], "total_order")))
    shown = [row for row in rows if _matters(row)][:MOST_ROWS] or rows[:MOST_ROWS]
    rest = [row for row in rows if row not in shown]
    on_path = sorted(rows, key=lambda row: -_value(row, "critical_path_share"))
    tables = (
        lay_out("", CAUSES, shown, (*_SHARES, *_GAINS), tuple(_notes(rows))),
        _faster_table(rows, numbers),
        lay_out("Smaller causes", CAUSES, rest, (*_SHARES, *_GAINS), details=True),
        lay_out("Critical path", CAUSES, on_path, _PATH, (
            "Critical path: the class's share of the mean step, of its spread and of the excess of "
            "the slowest 5 % of steps; each sums to 100 %.",
        ), details=True),
        pairs_table("Spread", spread, details=True),
    )  # fmt: skip
    return Answer(
        title=f"What makes the {target} vary",
        subject=str(numbers["job"]),
        head=f": {target} with mean {mean}, p95 {p95}, standard deviation {std}; "
        f"seed {numbers['seed']}",
        question=f"What makes the {target} of {numbers['job']} vary, and what would fixing a cause "
        "bring?",
        findings=find({**numbers, "causes": rows}, RULES),
        tables=tuple(table for table in tables if table.rows),
        figures=numbers,
        warnings=tuple(_warnings(numbers, rows)),
        facts=tuple((name, cell) for name, cell in facts if isinstance(cell, Figure)),
        pictures=tuple(_pictures(numbers, rows, result)),
    )


# ------------------------------------------------------------------------------------- causes
def _named(rows: Sequence[Json]) -> list[dict[str, Any]]:
    """Give causes the names that tables have; `cause` is their own."""
    return [
        {**row, "cause": row["name"], "kind": f"{row['kind']}s",
         "name": label(row["name"], f"{row['kind']}s")}
        for row in rows
    ]  # fmt: skip


def _write(row: Json, name: str) -> Cell:
    return write(FIELDS[name], row)


def _value(row: Json, key: str) -> float:
    """Figure of a cause; 0 where there is none."""
    value = row.get(key)
    return 0.0 if value is None else float(value)


def _half(row: Json, key: str) -> float:
    """Half of the width of a figure's 95 % interval; 0 where there is none."""
    bounds = row.get(f"{key}_ci")
    return 0.5 * (float(bounds[1]) - float(bounds[0])) if bounds else 0.0


def _short(row: Json) -> str:
    return short_label(row["cause"], row["kind"])


# ------------------------------------------------------------------------------ in sentences
def _alike(numbers: Json) -> list[Json]:
    """Give the largest cause, and those that are statistically indistinguishable from it."""
    (top, *others), key = numbers["causes"], "total_order"
    return [top, *(
        row for row in others
        if _value(top, key) - _value(row, key) < math.hypot(_half(top, key), _half(row, key))
    )][:MOST_NAMED]  # fmt: skip


def _largest(numbers: Json) -> dict[str, Cell]:
    """Name the largest causes and what to do about them."""
    named, target = _alike(numbers), TARGETS[numbers["target"]]
    causes = ((cause_text(x["cause"], x["kind"]), words(_write(x, "total_order"))) for x in named)
    helpful = dict.fromkeys(remedy_text(x["cause"], x["kind"]) for x in named if _helps(x))
    return {
        "causes": ", ".join(f"{name}: {share}" for name, share in causes), "target": target,
        "remedies": "".join(f"; {remedy}" for remedy in helpful),
        "brings": _brings(named[0], target),
    }  # fmt: skip


def _helps(row: Json) -> bool:
    """Tell whether fixing a cause makes the target steadier or sooner, as far as it was tried."""
    least = {"std_reduction": SMALL_CHANGE, "p95_reduction": LEAST_FINDING}
    tried = [key for key in least if row.get(key) is not None]
    return not tried or any(_value(row, key) > max(_half(row, key), least[key]) for key in tried)


def _brings(row: Json, target: str) -> str:
    """Say what holding a cause at its median would bring; nothing where it was not tried."""
    if row.get("std_reduction") is None:
        return ""
    fixed = WORDS[row["cause"]].held if row["cause"] in WORDS else "Held at its median"
    std, p95 = (_distinct(row, key) for key in ("std_reduction", "p95_reduction"))
    return f" {fixed}: standard deviation {std}, p95 of the {target} {p95}."


def _distinct(row: Json, key: str) -> str:
    """Write a change where it is distinguishable from none, else what it is within."""
    if abs(_value(row, key)) > _half(row, key):
        return words(_write(row, key))
    bound = max(abs(_value(row, key)) + _half(row, key), 5e-4)
    return f"statistically unchanged (within {format_share(bound, 2)})"


def _for_p95(numbers: Json) -> dict[str, Cell]:
    """Say what p95 would gain from another cause than the largest, if that is more."""
    rows, key = numbers["causes"], "p95_reduction"
    best = max(rows, key=lambda row: _value(row, key))
    gap, error = _value(best, key) - _value(rows[0], key), _half(best, key) + _half(rows[0], key)
    if not numbers["std"] or gap <= max(error, LEAST_FINDING):
        return {}
    return {
        "more": "most" if rows[0].get(key) is None else "more", "cause": _short(best),
        "gain": _write(best, key), "remedy": remedy_text(best["cause"], best["kind"]),
    }  # fmt: skip


def _additivity(numbers: Json) -> dict[str, Cell]:
    """Write what single causes make of the variance, and whether they add up; nothing of one."""
    rows, kinds = numbers["causes"], ("kernels", "effects", "terms")
    if not numbers["std"] or sum(_value(row, "total_order") >= SMALL for row in rows) < 2:
        return {}
    first = {k: sum(_value(row, "first_order") for row in rows if row["kind"] == k) for k in kinds}
    whole, error = sum(first.values()), sum(_half(row, "first_order") ** 2 for row in rows) ** 0.5
    off = abs(1.0 - whole) > max(error, NOTABLE)
    run = f", the run beside its steps {words(share(first['terms']))}" if first["terms"] else ""
    return {kind: share(part) for kind, part in first.items()} | {
        "run": run, "whole": share(whole, error), "rest": share(1.0 - whole, error),
        "sum": "less" if off and whole < 1.0 else "more" if off else "whole",
    }  # fmt: skip


_PARTS = "First-order, shared effects make {effects} of the variance, kernels' own noise {kernels}"
RULES = (
    Rule("no_variance", "answer", lambda n: not n["std"],
         "The {target} does not vary: there is nothing to rank.",
         lambda n: {"target": TARGETS[n["target"]]}),
    Rule("largest_cause", "answer", lambda n: bool(n["std"]) and len(_alike(n)) == 1,
         "{causes} of the variance of the {target}{remedies}.{brings}", _largest),
    Rule("largest_cause", "answer", lambda n: bool(n["std"]) and len(_alike(n)) > 1,
         "{causes} of the variance of the {target} (statistically indistinguishable){remedies}.",
         _largest),
    Rule("largest_for_p95", "advice", lambda n: bool(_for_p95(n)),
         "p95 would gain {more} from {cause} held at its median, {gain}: {remedy}.", _for_p95,
         capital=False),
    Rule("additivity", "info", lambda n: _additivity(n).get("sum") == "whole",
         _PARTS + "{run}: causes add up ({whole}).", _additivity),
    Rule("additivity", "info", lambda n: _additivity(n).get("sum") == "less",
         _PARTS + "{run}; {rest} arises only where causes meet, as in waits for the slowest rank.",
         _additivity),
    Rule("additivity", "info", lambda n: _additivity(n).get("sum") == "more",
         _PARTS + "{run}.", _additivity),
)  # fmt: skip


def _warnings(numbers: Json, rows: Sequence[Json]) -> list[str]:
    """Say how far the ranking can be trusted."""
    out = []
    if rare := numbers.get("std_with_rare_stalls"):
        std = words(error(rare, numbers["mean"]))
        out.append(
            "stalls are too rare for an estimate's steps to meet as many as there are; shares, and "
            f"changes at the median, are of steps with all of them: standard deviation {std}"
        )
    wide = [
        f"{_short(row)} {words(_write(row, 'total_order'))}" for row in rows
        if _half(row, "total_order")
        > 1.05 * (HALF_WIDTH if _value(row, "total_order") < 0.5 else WIDE_HALF_WIDTH)
    ]  # fmt: skip
    if wide:
        out.append(
            f"wide 95 % intervals, so the order is uncertain: {', '.join(wide)} of the variance; "
            f"aimed at is ± {format_share(HALF_WIDTH)} (± {format_share(WIDE_HALF_WIDTH)} above "
            "one half)"
        )
    return out


# --------------------------------------------------------------------------------- in tables
def _notes(rows: Sequence[Json]) -> list[str]:
    """Say what the columns of the first table mean."""
    notes = [
        "Total-order: with what a cause makes only together with others. A kernel class is its own "
        "noise, in every column. ±: half of the 95 % interval.",
        "Recurs: persistent, the same GPUs in every step; rotating, drawn anew in every step; "
        "occasional, most of it in 5 % of the steps.",
    ]
    at_median = "At its median: what p50 and p95 would be then, under the same draws"
    if any(row.get("run_reduction") is not None for row in rows):
        at_median += ", and the mean time-to-train (run)"
    if any(row["cause"] == "regime" for row in rows):
        at_median += ". Congestion, on or off, is held at its mean"
    return [*notes, f"{at_median}."]


def _matters(row: Json) -> bool:
    """Tell whether a cause belongs to the first table."""
    changes = ("mean_reduction", "std_reduction", "p95_reduction")
    changed = any(abs(_value(row, key)) >= SMALL_CHANGE for key in changes)
    return changed or _value(row, "total_order") >= SMALL


def _faster_table(rows: Sequence[Json], numbers: Json) -> Any:
    """Lay out what faster kernel classes would change, the largest change first."""
    keys = tuple(f"{name}_faster" for name in _GAINS)

    def largest(row: Json) -> float:
        return max(abs(_value(row, key)) for key in keys)

    changed = sorted((row for row in rows if largest(row) >= SMALL), key=largest, reverse=True)
    title = f"If a kernel class took {format_share(numbers['speed_up'] or 0.0)} less time"
    return lay_out(title, CAUSES, changed[:MOST_CHANGES], keys)


def _spread(numbers: Json) -> list[tuple[str, Cell]]:
    """Write mean, p95 and standard deviation, and where the last is."""
    mean, std = numbers["mean"], numbers["std"]
    fine = max(0.05 * std, 1e-5 * abs(mean))
    rows = [
        ("mean", duration(mean, fine, mean)),
        ("p95", duration(numbers["p95"], fine, mean)),
        ("standard deviation", error(std, mean)),
    ]
    for where in ("within a cluster draw", "between cluster draws"):
        if part := numbers[f"{where.split()[0]}_cluster_std"]:
            rows.append((f"standard deviation {where}", error(part, mean)))
    return rows


# ------------------------------------------------------------------------------- in pictures
def _pictures(numbers: Json, rows: Sequence[Json], result: Ranking) -> list[Picture]:
    job, target = numbers["job"], TARGETS[numbers["target"]]
    note = "Bars are total-order shares of the variance, diamonds first-order shares, lines 95 % "
    note += "intervals of the total order."
    ranking = Picture(
        "ranking", f"Causes of the spread of the {target} of {job}, the largest on top",
        lambda: plots.plot_ranking(result), note, _errors(numbers, rows),
    )  # fmt: skip
    path = Picture(
        "critical_path", f"Time on the critical path of {job} by kernel class",
        lambda: plots.plot_path(result),
        "Shares of the mean time of a step, of its spread and of its slowest 5 %; each adds up "
        "to 100 %.", _errors(numbers, rows, "covariance_share"),
    )  # fmt: skip
    return [ranking, path]


def _errors(numbers: Json, rows: Sequence[Json], key: str = "total_order") -> Errors:
    """Write the widest interval of a share."""
    widest = max(rows, key=lambda row: _half(row, key))
    if not _half(widest, key):
        return Errors("less than the digits shown", NOT_INCLUDED)
    text = f"95 % intervals between cluster draws; the widest is {widest['name']}, "
    return Errors(f"{text}{words(_write(widest, key))}", NOT_INCLUDED)
