"""The answer of a comparison: whether two results, or two measurements, really differ."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain

from prism import plots
from prism.analyses.compare import Comparison
from prism.common.text import format_count, format_like, format_share, percent_change
from prism.engine import LANES
from prism.present.answer import Answer, Errors, Picture
from prism.present.answers.job import value_text
from prism.present.answers.times import NOT_INCLUDED, TITLES
from prism.present.cells import Cell, Column, Figure, Json, Table, share
from prism.present.tables import Rule, find

WORDS = {"step_time": "step", "time_to_train": "run"}
NAMES = {"std": "standard deviation", "cv": "CV"}
MOST_KEYS = 10  # keys of the jobs in the table; the JSON has all that differ
LONGEST_VALUE = 40


def compare_answer(result: Comparison) -> Answer:
    """Make the answer of a comparison."""
    numbers = result.figures()
    found = [
        {**quantity, "name": name, "effect": numbers["effect"]}
        for name, quantity in numbers["quantities"].items()
    ]
    gate = numbers.get("gate") or {"checks": ()}
    findings = [find({**gate, **check}, CHECK) for check in gate["checks"]]
    findings += [find(numbers, GATE), *(find(quantity, RULES) for quantity in found)]
    a, b = (str(numbers[side]["name"]) for side in "ab")
    return Answer(
        title="Is the difference real",
        subject=f"{a} and {b}",
        head=f": B against A, seed {numbers['seed']}",
        question=f"Is the difference between {a} (A) and {b} (B) real?",
        findings=tuple(chain(*findings)),
        tables=(*map(_figures, found), _sides(numbers), *map(_planning, found)),
        figures=numbers,
        warnings=tuple(numbers["warnings"]),
        assumptions=tuple(_assumptions(numbers)),
        facts=tuple(
            (f"{TITLES[quantity['name']]}, {key}, B against A",
             Figure(row["relative"], _relative(row)))
            for quantity in found for key, row in quantity["figures"].items()
            if key in ("p50", "p95") and row["relative"] is not None
        ),
        pictures=tuple(_pictures(numbers, result)),
    )  # fmt: skip


# ------------------------------------------------------------------------------ in sentences
def _check(check: Json) -> dict[str, Cell]:
    """Write the change of a mean that a gate is about, and what it would have missed."""
    return {
        "quantity": check["quantity"], "title": TITLES[check["quantity"]],
        "limit": format_share(check["fail_if_slower"]),
        "change": percent_change(check["relative"] or 0.0, check["relative_ci"]),
        "seen": format_share(check["detectable_80"], 2),
    }  # fmt: skip


def _gate(numbers: Json) -> dict[str, Cell]:
    """Say how often a gate errs, and from which spread that follows."""
    gate = numbers["gate"]
    runs = {check["spread_from"] for check in gate["checks"]} == {"runs of A"}
    return {
        "rate": format_share(gate["false_alarm"], 2), "limit": format_share(gate["fail_if_slower"]),
        "where": "between runs of A" if runs else "within each side",
    }  # fmt: skip


def _difference(quantity: Json) -> dict[str, Cell]:
    """Say how percentiles and spread differ; the distributions only where nothing else does."""
    figures, ks = quantity["figures"], quantity["ks"]
    middle = "p50" if figures["p50"]["verdict"] else "mean"
    keys = [key for key in (middle, "p95", "std") if figures[key]["verdict"]]
    parts = [_clause(key, figures[key], quantity["effect"]) for key in keys]
    if ks["verdict"] == "different" and not any(
        row["verdict"] == "different" for row in figures.values()
    ):
        parts.append(f"the distributions differ (KS {ks['distance']:.3f}, {_p(ks)})")
    single = {quantity["units"]["a"], quantity["units"]["b"]} == {"steps"}
    return {
        "name": quantity["name"], "what": WORDS[quantity["name"]],
        "side": "run B" if single else "B",  # no more than these two runs are known
        "parts": "; ".join(parts) or "not tested, too few values are independent",
    }  # fmt: skip


def _clause(key: str, row: Json, effect: float) -> str:
    """Say what was found of one figure."""
    low, high = row["relative_ci"]
    of, at = ("its standard deviation is ", "") if key == "std" else ("", f" at {key}")
    if row["verdict"] == "same":
        return f"{of}the same{at} to within {format_share(effect)} ({_relative(row)})"
    if row["verdict"] == "open":
        return f"{of}statistically indistinguishable from A's{at} ({_relative(row)}, {_p(row)})"
    more, less = ("larger", "smaller") if key == "std" else ("slower", "faster")
    size = percent_change(abs(row["relative"]), row["relative_ci"]).lstrip("+")
    small = f", below {format_share(effect)}" if max(abs(low), abs(high)) < effect else ""
    return f"{of}{size} {more if row['relative'] > 0 else less}{at} ({_p(row)}){small}"


def _sample_sizes(quantity: Json) -> list[str]:
    """Say what it takes to see the effect, where a percentile is left open."""
    return [
        f"{needed} for {key}"
        for key in ("p50", "p95") if quantity["figures"][key]["verdict"] == "open"
        if (needed := _needed(quantity, key, "0.8"))
    ]  # fmt: skip


def _has_runs(quantity: Json) -> bool:
    """Tell whether more runs or longer ones are asked for, and how they vary is known."""
    known = quantity["between_share"] is not None and _unit(quantity)[1] > 1.0
    return known and bool(_sample_sizes(quantity))


CHECK = (
    Rule("{quantity}_gate", "warning", lambda c: c["verdict"] == "slower",
         "Gate, mean {title}: slower by more than {limit} ({change}).", _check),
    Rule("{quantity}_gate", "answer", lambda c: c["verdict"] == "not_slower",
         "Gate, mean {title}: not slower by more than {limit} ({change}).", _check),
    Rule("{quantity}_gate", "warning", lambda c: c["verdict"] == "open",
         "Gate, mean {title}: no difference beyond {limit} detected ({change}); a slowdown of "
         "{seen} is missed with 20 % probability, smaller ones more often.", _check),
)  # fmt: skip
"""What is found by each check of a gate."""
GATE = (
    Rule("gate_rate", "advice", lambda n: n.get("gate") is not None,
         "Gate: {rate} false alarms where B is slower by just {limit}, from the spread {where}.",
         _gate),
)  # fmt: skip
RULES = (
    Rule("{name}", "answer", lambda q: True, "The {what} of {side} is {parts}.", _difference),
    Rule("{name}_sample_size", "advice", lambda q: bool(_sample_sizes(q)),
         "Sample size per side for 80 % power at {effect}, in {unit}: {sizes}.",
         lambda q: {"name": q["name"], "effect": format_share(q["effect"]), "unit": _unit(q)[0],
                    "sizes": ", ".join(_sample_sizes(q))}),
    Rule("{name}_between_runs", "advice", _has_runs,
         "{part} of the variance of the mean is between runs: {way}.",
         lambda q: {"name": q["name"], "part": format_share(q["between_share"], 2),
                    "way": "more runs help, longer ones hardly" if q["between_share"] > 0.5
                    else "longer runs help too"}),
)  # fmt: skip
"""What is found of each quantity."""


def _assumptions(numbers: Json) -> list[str]:
    """Say what was taken to be independent, and how p-values were corrected."""
    out = [*numbers["notes"], *map(_independence, numbers["quantities"].values())]
    tests = sum(
        row["p_value"] is not None for q in numbers["quantities"].values()
        for row in (*q["figures"].values(), q["ks"])
    )  # fmt: skip
    corrected = f"p-values corrected for {format_count(tests, 'test')} (Holm)"
    return list(dict.fromkeys([*out, f"95 % intervals, each on its own; {corrected}"]))


def _independence(quantity: Json) -> str:
    """Say what was resampled."""
    n = quantity["n_units"]
    if quantity["paired_by"] == "cluster":
        pairs = format_count(n["a"], "independent pair")
        return f"paired by cluster draw: same random numbers, {pairs}"
    if quantity["paired_by"] == "step":
        pairs = format_count(quantity["n"]["a"], "pair")
        return f"paired by step number: {pairs} in {format_count(n['a'], 'independent block')}"
    a, b = (_independent(quantity, side) for side in "ab")
    return f"independent: {a} of A, {b} of B"


def _independent(quantity: Json, side: str) -> str:
    n, kind = quantity["n_units"][side], quantity["units"][side]
    if kind != "steps":
        return f"{n} {'cluster draws' if kind == 'clusters' else kind}"
    return f"{format_count(n, 'block')} of {quantity['n'][side] / n:.0f} steps"


# --------------------------------------------------------------------------------- in tables
def _figures(quantity: Json) -> Table:
    """Lay out one quantity, a figure a row."""
    heads = ("A", "B", "B / A - 1, ± 95 %", "p")
    columns = (Column(right=False), *(Column(head) for head in heads))
    rows = []
    for key, row in quantity["figures"].items():
        cells: list[Cell] = [NAMES.get(key, key), *_both(key, row), "not tested", None]
        if row["p_value"] is not None:
            p = Figure(row["p_adjusted"], _p(row).removeprefix("p ").removeprefix("= "))
            cells[3:] = [Figure(row["relative"], _relative(row)), p]
        elif key == "p99":
            continue
        rows.append(tuple(cells))
    ks = quantity["ks"]
    tested = f"not tested: {ks['why_not']}" if ks["p_value"] is None else _p(ks)
    note = f"KS distance {ks['distance']:.3f} ({tested})"
    if quantity["figures"]["p95"]["p_value"] is None:
        note += "; p95 and p99 not tested: too few independent values lie beyond"
    return Table(TITLES[quantity["name"]].capitalize(), columns, tuple(rows), (note,))


def _both(key: str, row: Json) -> list[Cell]:
    """Write the figure of either side."""
    if key == "cv":
        return [share(row[side]) for side in "ab"]
    fine = abs(row["difference"]) / 10.0 or row["a"] * 1e-4
    fine = min(max(fine, row["a"] * 1e-6), row["a"] * 1e-3)
    return [
        Figure(row[side], format_like(row[side], row["a"], fine) if row[side] else "0 s")
        for side in "ab"
    ]


def _sides(numbers: Json) -> Table:
    """Lay out what is compared, and the keys in which the jobs differ."""
    sides = [_sizes(numbers[side]) for side in "ab"]
    rows: list[tuple[Cell, ...]] = [
        (label, *(side.get(label) for side in sides))
        for label in dict.fromkeys([*sides[0], *sides[1]])
    ]
    differing = numbers.get("job_differences") or ()
    rows += [
        (row["key"], *(value_text(row[side], LONGEST_VALUE) for side in "ab"))
        for row in differing[:MOST_KEYS]
    ]
    more = len(differing) - MOST_KEYS
    notes = (f"{more} more keys of the jobs differ: --json lists them",) if more > 0 else ()
    columns = (Column(right=False), Column("A", right=False), Column("B", right=False))
    title = f"What is compared{', and where the jobs differ' * bool(differing)}"
    return Table(title, columns, tuple(rows), notes)


def _sizes(side: Json) -> dict[str, str]:
    """Say what one side is and holds, by label."""
    if side["source"] == "measured":
        values = f"{format_count(side['steps'], 'value')} of {format_count(side['runs'], 'run')}"
        return {"name": side["name"], "measured": values}
    draws = format_count(side["clusters"], "cluster draw")
    out = {"name": side["name"], "job": f"{side['job']}, seed {side['seed']}"}
    out["steps"] = f"{format_count(side['replicates'], 'replicate')} on {draws}"
    if side.get("run_replicates"):
        steps = format_count(side["steps_per_run"], "step")
        out["runs"] = f"{format_count(side['run_replicates'])} of {steps}"
    return out


def _planning(quantity: Json) -> Table:
    """Lay out absolute differences, and what it takes to see the effect."""
    power = f"{_unit(quantity)[0]} per side to see {format_share(quantity['effect'])}"
    columns = (Column(right=False), Column("B - A"), Column("± 95 %"),
               Column("80 % power", power), Column("90 % power", power))  # fmt: skip
    rows = tuple(
        (NAMES.get(key, key), *_absolute(key, row),
         *(_needed(quantity, key, power) for power in ("0.8", "0.9")))
        for key, row in quantity["figures"].items() if row["p_value"] is not None
    )  # fmt: skip
    title = f"{TITLES[quantity['name']].capitalize()}: sample size"
    return Table(title, columns, rows, details=True)


def _absolute(key: str, row: Json) -> tuple[Cell, Cell]:
    """Write an absolute difference and half of its interval; none of a CV."""
    if key == "cv":
        return None, None
    size = row["difference"]
    half = 0.5 * (row["difference_ci"][1] - row["difference_ci"][0])
    like = max(abs(size), half)
    if like == 0.0:
        return Figure(0.0, "0 s"), "0 s"
    fine = 0.1 * half if half > 1e-9 * like else 1e-4 * like
    text = f"{'+' if size >= 0 else '-'}{format_like(abs(size), like, fine)}"
    return Figure(size, text), format_like(half, like, fine)


def _unit(quantity: Json) -> tuple[str, float]:
    """Name what is counted where more is asked for; the usual number of steps of a run, else 0."""
    kinds = quantity["units"]
    if "runs" not in kinds.values():
        return ("replicates" if kinds["a"] == "clusters" else str(kinds["a"])), 0.0
    lengths = [n / quantity["n_units"][s] for s, n in quantity["n"].items() if kinds[s] == "runs"]
    steps = f" of {format_count(sum(lengths) / len(lengths), 'step')}" if lengths[0] > 1 else ""
    return f"runs{steps}", lengths[0]


def _needed(quantity: Json, key: str, power: str) -> str | None:
    """Write how many units are needed, rounded up to three digits; clusters as replicates."""
    plan = quantity["figures"][key]["needed"]
    if plan is None:
        return None
    if plan[power] is None:
        return "over 10^9"
    value = plan[power] * (LANES if _unit(quantity)[0] == "replicates" else 1)
    digits = max(0, math.floor(math.log10(value)) - 2)
    return format_count(math.ceil(value / 10**digits) * 10**digits)


# ------------------------------------------------------------------------ numbers and pictures
def _p(row: Json) -> str:
    """Write a p-value, corrected."""
    p = float(row["p_adjusted"])
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def _relative(row: Json) -> str:
    """Write a relative difference with half of its interval."""
    return percent_change(row["relative"], row["relative_ci"])


def _pictures(numbers: Json, result: Comparison) -> list[Picture]:
    """Draw both distribution functions and their difference by quantile."""
    a, b = (str(numbers[side]["name"]) for side in "ab")
    drawn = [numbers[side]["source"] == "simulated" for side in "ab"]
    of_data = "in the intervals; of a simulated side not included" if any(drawn) else ""
    errors = Errors(
        "in the intervals" if any(drawn) else "none: nothing is drawn",
        NOT_INCLUDED if all(drawn) else of_data or "in the intervals",
    )
    pictures = []
    for name in numbers["quantities"]:
        pictures.append(Picture(
            f"compare_{name}" if len(numbers["quantities"]) > 1 else "compare",
            f"{TITLES[name].capitalize()} of {a} and {b}: distribution functions, and their "
            "difference by quantile",
            partial(plots.draw_comparison, result, name),
            "On the left the curve further to the right takes longer; on the right the quantile of "
            "B less that of A with its simultaneous 95 % band: they differ where it leaves zero.",
            errors,
        ))  # fmt: skip
    return pictures
