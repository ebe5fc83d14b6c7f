"""The answer of a placement: what slow nodes cost, what to do about them, what else could be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from prism import plots
from prism.analyses.placements.placing import (
    MOST_SLACK,
    NO_SLACK,
    Placing,
    numbered,
    same_work,
    with_place,
)
from prism.common.text import (
    NO_CHANGE,
    format_count,
    format_duration,
    format_like,
    format_share,
    percent_change,
    plural,
)
from prism.engine import LANES
from prism.jobs.hostfiles import as_ranges
from prism.present.answer import Answer, Errors, Picture
from prism.present.answers.times import NOT_INCLUDED
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Table,
    delay,
    duration,
    error,
    half_width,
    pairs_table,
    words,
)
from prism.present.tables import Rule, find

Row = Mapping[str, Any]

MOST_MOVES, MOST_NODES, MOST_ALIKE, MOST_BETTER = 6, 8, 3, 3
"""Moves, nodes, kinds of slowness and better alternatives that are named one by one."""
DO = {"drop_nodes": "run ", "spares": "put ", "fewer_layers": "put "}
"""What is done for an alternative, before its label."""
LEAST_SURE = 0.9  # probability of a good selection below which there is a warning [1]


def place_answer(result: Placing) -> Answer:
    """Make the answer of a placement."""
    job, p95 = str(result.attrs["job_name"]), result.objective_name
    of = "the time-to-train" if p95 == "time-to-train" else f"{p95} of the step time"
    return Answer(
        title="Where slow nodes should go",
        subject=job,
        head=f": {_slow_nodes(result.figures()['slow_nodes'])}; seed {result.attrs['seed']}",
        question=f"Where should the slow nodes of {job} go for the least {of}?",
        findings=find(result, RULES),
        tables=tuple(table for table in _tables(result) if table.rows),
        figures=result.figures(),
        warnings=tuple(_warnings(result)),
        assumptions=tuple(result.figures()["notes"]),
        facts=tuple(_facts(result)),
        pictures=tuple(_pictures(result, job)),
    )


# ------------------------------------------------------------------------------------- nodes
def _slow_nodes(nodes: Sequence[Row]) -> str:
    """Say which nodes are slow, and by how much."""
    alike: dict[str, list[Row]] = {}
    for node in nodes:
        alike.setdefault(_slowness(node), []).append(node)
    if len(alike) <= MOST_ALIKE:
        return ", ".join(f"{_names(group)} ({text})" for text, group in alike.items())
    slowest = sorted(nodes, key=lambda node: -max(_factors(node).values()))[:5]
    listed = ", ".join(f"{_name(node)} ({max(_factors(node).values()):.3g}x)" for node in slowest)
    return f"{format_count(len(nodes), 'node')} of known speed, the slowest: {listed}"


def _slowness(node: Row) -> str:
    """Write a node's slowness by kind."""
    factors = _factors(node)
    if len(set(factors.values())) == 1 and factors["compute"] != 1.0:
        return f"everything {factors['compute']:.4g}x"
    slow = [f"{key} {value:.4g}x" for key, value in factors.items() if value != 1.0]
    return ", ".join(slow) or "not slowed"


def _factors(node: Row) -> dict[str, float]:
    return {key: float(node.get(key) or 1.0) for key in ("compute", "memory", "network", "other")}


def _name(node: Row) -> str:
    return str(node.get("host") or node["node"])


def _names(nodes: Sequence[Row]) -> str:
    """Name some nodes, by host where that is known."""
    listed = ", ".join(map(_name, nodes[:MOST_NODES]))
    more = len(nodes) - MOST_NODES
    text = f"node{'s' * (len(nodes) > 1)} {listed}"
    return f"{text} and {more} more" if more > 0 else text


# ------------------------------------------------------------------------------ in sentences
def _cost(result: Placing) -> dict[str, Cell]:
    """Give what the slow nodes cost where they are, over nodes that are as fast as the others."""
    numbers, now = result.figures(), result.entry("current")
    healthy, nodes = numbers["healthy"], numbers["slow_nodes"]
    low, high = (1.0 / (1.0 - x) - 1.0 for x in healthy["saved_ci"])
    before, after = _two(result, healthy, now)
    return {
        "nodes": f"{_names(nodes)} cost{'s' * (len(nodes) == 1)}",
        "cost": percent_change(1.0 / (1.0 - healthy["saved"]) - 1.0, (low, high)),
        "place": with_place("", now), "before": before, "after": after,

        "run": words(delay(healthy["run_saved"], float(np.ptp(healthy["run_saved_ci"])) / 2.0)),
        "steps": format_count(numbers["steps"], "step"),
    }  # fmt: skip


def _run(row: Row) -> Cell:
    """Write the change of the run's steps, in the mean, to the digits of its interval."""
    saved = float(row["run_saved"])
    low, high = row.get("run_saved_ci") or (saved, saved)
    half = 0.5 * (high - low)
    fine = max(0.0999 * half, 0.01 * abs(saved))
    return Figure(saved, "0" if abs(saved) <= half else format_duration(-saved, fine))


def _two(result: Placing, *pair: Row) -> list[str]:
    """Write the objective of two rows for the same work, with digits that tell them apart."""
    values = [float(same_work(row, "objective") or 0.0) for row in pair]
    fine = max(abs(values[0] - values[1]) / 20.0, 1e-4 * values[0])
    return [format_like(value, values[0], fine) for value in values]


def _moved(result: Placing) -> bool:
    """Whether the best placement is another one than now, by the tolerance or more."""
    best = result.entry("best")
    return bool(
        best["name"] != result.attrs["current"] and best["saved"] >= result["tolerance"].item()
    )


def _advice(result: Placing) -> dict[str, Cell]:
    """Say which nodes to move, and what that brings; or why not."""
    best, tolerance = result.entry("best"), _tolerance(result)
    if best["name"] == result.attrs["current"]:
        why = f"no placement reduces {result.objective_name} by {tolerance} or more"
        if result["n_screened"].item() == 1:
            why = "all placements are equivalent for this job"
    else:
        why = f"the best placement ({with_place('', best)[2:]}) saves less than the tolerance of "
        why += f"{tolerance}: {_gain(result, best)}"
    moves = _moves(result) or [f"the best placement is {with_place('', best)[2:]}"]
    if len(moves) > MOST_MOVES:
        left = len(moves) - MOST_MOVES
        moves = [*moves[:MOST_MOVES], f"{left} more moves (-o writes all to hosts.csv)"]
    text = f"leave the nodes where they are: {why}"
    if _moved(result):
        text = f"{'; '.join(moves)}: {_gain(result, best)}"
    return {"advice": text}


def _tiers(result: Placing) -> dict[str, Cell]:
    """Say between which units of the network nodes move, the outermost first."""
    best = result.entry("best")
    tiers = list(best["moved_between"].items())[::-1]
    moved = best["hosts_changed"]
    return {
        "slots": f"{format_count(moved, 'slot')} {plural(moved, 'gets', 'get')}",
        "tiers": ", ".join(f"{n} from another {tier}" for tier, n in tiers),
    }


def _gain(result: Placing, best: Row) -> str:
    """Write both values of the objective and the change, with its interval."""
    text = " -> ".join(_two(result, result.entry("current"), best))
    return f"{result.objective_name} {text} ({words(_saved(best))})"


def _saved(row: Row, key: str = "saved") -> Figure:
    """Write what a row saves as a change, with half of its 95 % interval."""
    return Figure(row[key], percent_change(-float(row[key]), row.get(f"{key}_ci")))


def _moves(result: Placing) -> list[str]:
    """List the moves of slow nodes, those to the same stages as one."""
    if result.by_heat:
        at = numbered("stage", result.entry("best")["stages"])
        return [f"put the slow GPUs of every node at {at}, the others at the other stages"]
    groups: dict[tuple[str, bool], list[Row]] = {}
    for node in result.figures()["slow_nodes"]:
        before, after = node["before"], node["after"]
        if before != after:
            same = bool(before and after and before["replicas"] == after["replicas"])
            stages = as_ranges(after["stages"]) if after else ""
            groups.setdefault((stages, same), []).append(node)
    return [_move(group, same) for (_, same), group in groups.items()]


def _move(nodes: Sequence[Row], same_replicas: bool) -> str:
    """Say where some nodes go from where."""
    before, after = ([n[key] for n in nodes if n.get(key)] for key in ("before", "after"))
    if not after:
        return f"take {_names(nodes)} out"
    to = f"{_at('stage', after)} of {_at('replica', after)}"
    if not before:
        return f"put {_names(nodes)} at {to}"
    start = _at("stage", before)
    if not same_replicas:
        start += f" of {_at('replica', before)}"
    held = [[(p["stages"], p["replicas"]) for p in places] for places in (before, after)]
    if held[0] == held[1]:
        start, to = (numbered("slot", (p["slot"] for p in places)) for places in (before, after))
    return f"move {_names(nodes)} from {start} to {to}"


def _at(word: str, places: Iterable[Row]) -> str:
    return numbered(word, (i for place in places for i in place[f"{word}s"]))


def _tolerance(result: Placing) -> str:
    return format_share(result["tolerance"].item(), 2)


def _better(result: Placing) -> dict[str, Cell]:
    """Say which alternatives are better than any placement."""
    first, *others = result.better
    more = "; ".join(f"{row['label']} ({words(_saved(row))})" for row in others[: MOST_BETTER - 1])
    return {
        "do": f"{DO.get(first['name'], '')}{first['label']}: {_gain(result, first)}",
        "more": f" Also better than any placement: {more}." if more else "",
    }


def _simulated(result: Placing) -> list[Row]:
    """Alternatives that were simulated and change more than places."""
    others = result.figures()["alternatives"]
    return [others[name] for name in DO if "saved" in others.get(name, {})]


def _no_better(result: Placing) -> dict[str, Cell]:
    saved = result.entry("best")["saved"] + NO_CHANGE
    better = any(row["saved"] > saved for row in _simulated(result))
    return {"distinct": "statistically distinguishably " if better else ""}


def _stages(result: Placing) -> dict[str, Cell]:
    """Say where a slow node costs least and where most."""
    numbers = result.figures()
    costs = [row for row in numbers["stage_slack"] if row["cost"]]
    least, most = (pick(costs, key=lambda row: row["cost"]) for pick in (min, max))
    low, high = (format_share(row["cost"] / numbers["alike_step"]) for row in (least, most))
    text = f"{low} to the step on stage {least['stage']}, {high} on stage {most['stage']}"
    slowest = max(numbers["slow_nodes"], key=lambda node: max(_factors(node).values()))
    return {
        "node": f"{_names([slowest])} ({_slowness(slowest)})",
        "costs": f"{low} to the step on any stage" if low == high else text,
    }


def _selection(result: Placing) -> dict[str, Cell]:
    """Say how the choice was made, and how sure it is."""
    numbers = result.figures()
    return {
        "screened": format_count(numbers["n_screened"], "placement"), "method": numbers["method"],
        "run": format_count(numbers["n_candidates"]), "tolerance": _tolerance(result),
        "p95": result.objective_name, "sure": _probability(numbers["p_correct"]),
    }  # fmt: skip


def _probability(p: float) -> str:
    return "above 99.9 %" if p > 0.999 else f"{100.0 * p:.{1 if p > 0.99 else 0}f} %"


RULES = (
    Rule("better_alternative", "answer", lambda r: r.better,
         "{do} for the same work, better than any placement.{more}", _better),
    Rule("move", "answer", lambda r: not r.better and _moved(r), "{advice}.", _advice),
    Rule("leave", "answer", lambda r: not r.better and not _moved(r), "{advice}.", _advice),
    Rule("cost_now", "info", lambda r: True,
         "{nodes} {cost} of {p95} as placed now{place}: {after} instead of {before}, and {run} "
         "over {steps} of the run.", lambda r: _cost(r) | {"p95": r.objective_name}),
    Rule("move", "answer", lambda r: r.better and _moved(r),
         "With all nodes kept: {advice}.", _advice),
    Rule("leave", "answer", lambda r: r.better and not _moved(r),
         "With all nodes kept: {advice}.", _advice),
    Rule("moved_between", "info", lambda r: _moved(r) and r.entry("best")["moved_between"],
         "{slots} another node: {tiers}.", _tiers),
    Rule("no_better_alternative", "info", lambda r: not r.better and _simulated(r),
         "No alternative that was simulated is {distinct}better for the same work.", _no_better),
    Rule("stage_cost", "info",
         lambda r: sum(row["cost"] > 0.0 for row in r.figures()["stage_slack"]) > 1,
         "A node as slow as {node}, alone, adds {costs} (deterministic step).", _stages),
    Rule("selection", "info", lambda r: True,
         "{screened} screened on the deterministic step ({method}), {run} simulated; P(no "
         "placement beats the best one by more than {tolerance} of {p95}) is {sure}.", _selection),
)  # fmt: skip


def _warnings(result: Placing) -> list[str]:
    """Say where the choice is not one."""
    sure = result["p_correct"].item()
    if sure >= LEAST_SURE:
        return []
    return [
        f"P(the best placement is within {_tolerance(result)} of the best simulated) is only "
        f"{_probability(sure)}: those simulated are statistically indistinguishable within this "
        "budget; raise --tolerance"
    ]


def _facts(result: Placing) -> list[tuple[str, Figure]]:
    """Pick the figures that stand out."""
    now, name = result.entry("current"), result.objective_name
    first = result.better[0] if result.better else result.entry("best")
    texts = zip((now, first), _two(result, now, first), strict=True)
    before, after = (Figure(same_work(row, "objective"), text) for row, text in texts)
    label = first["label"] if result.better else "best placement"
    return [(f"{name}, as is", before), (f"{name}, {label}", after), ("change", _saved(first))]


# --------------------------------------------------------------------------------- in tables
def _tables(result: Placing) -> list[Table]:
    impossible: list[tuple[str, Cell]] = [
        (row["label"], str(row["impossible"])) for row in result.options if row.get("impossible")
    ]
    return [
        _options_table(result, [row for row in result.options if not row.get("impossible")]),
        _slack_table(result.figures()),
        pairs_table("Impossible for this job", impossible, details=True),
    ]


def _options_table(result: Placing, found: Sequence[Row]) -> Table:
    """Lay out placements and alternatives side by side, the best first."""
    now, name, key = found[0], result.objective_name, result.attrs["objective"]
    times, saved = {"p50": "p50", "p95": "p95"}, {"p50_saved": "p50", "p95_saved": "p95"}
    if key not in times:
        times["objective"], saved = name, {"saved": name}
    fine = {k: _resolution(found, k) for k in times}
    cells = tuple(
        (
            str(row["label"]),
            *(_time(row, k, fine[k], now) for k in times),
            *(_saved(row, k) if row is not now and k in row else None for k in saved),
            _run(row) if row is not now and "run_saved" in row else None,
        )
        for row in found
    )
    heads = [Column(right=False), Column("p50", "step time"), Column("p95", "step time")]
    if len(times) > 2:
        heads += [Column("p95", name) if key == "time_to_train" else Column(name, "step time")]
    heads += [Column(head, "vs as is, same work") for head in (*saved.values(), "run")]
    return Table("", tuple(heads), cells, tuple(_notes(found, name, result["steps"].item())))


def _resolution(found: Sequence[Row], key: str) -> float:
    """Choose the smallest difference worth showing in a column [s]."""
    values = [float(row[key]) for row in found if row.get(key) is not None]
    # others than p95 are known no worse
    errors = [float(row["p95_se"]) for row in found if row.get("p95_se") is not None]
    return max(2e-3 * max(values, default=0.0), 0.2 * min(errors, default=0.0))


def _time(row: Row, key: str, fine: float, now: Row) -> Cell:
    """Write a time with the digits of its column, in the unit of its row as is."""
    value = row.get(key)
    return None if value is None else duration(float(value), fine, float(now.get(key) or value))


def _notes(found: Sequence[Row], name: str, steps: int) -> list[str]:
    """Explain what is not plain."""
    notes = [
        "Vs as is: change for the same work, per token where the batch differs; ± half of the 95 % "
        f"interval. Run: {format_count(steps, 'step')} in the mean, without failures and pauses."
    ]
    random = next((row for row in found if row.get("name") == "random"), {})
    if random:
        low, high = (float(random[f"{p}_of_objective"]) for p in ("p5", "p95"))
        fine = max(1e-3 * low, 0.1 * (high - low))
        ends = " to ".join(format_like(value, low, fine) for value in (low, high))
        notes.append(f"Placed at random: the mean of placements; {name} of 90 % of them: {ends}.")
    return notes


def _slack_table(numbers: Row) -> Table:
    """Lay out how slow a node may be at each stage, and what one slow node costs there."""
    cells = [
        (row["stage"], _slack(row["slack"]),
         Figure(row["cost"], format_share(row["cost"] / numbers["alike_step"])))
        for row in numbers["stage_slack"]
    ]  # fmt: skip
    merged = []
    for _, group in groupby(cells, key=lambda row: (words(row[1]), words(row[2]))):
        alike = list(group)
        merged.append((as_ranges((row[0] for row in alike), ", "), *alike[0][1:]))
    heads = (Column("stages", right=False), Column("slack"), Column("one slow node adds"))
    note = "Slack: how much slower a node of the stage may be before the step is longer; what one "
    note += "slow node adds is a share of the deterministic step."
    rows = tuple(merged) if len(cells) > 1 else ()
    return Table("Slack by stage", heads, rows, (note,), details=True)


def _slack(value: float) -> Figure:
    text = format_share(float(value), 2) + " or more" * (value >= MOST_SLACK)
    return Figure(value, "none" if value < NO_SLACK else text)


# ------------------------------------------------------------------------------- in pictures
def _pictures(result: Placing, job: str) -> list[Picture]:
    best = result.entry("best")
    half = half_width(best["p95_se"], result["replicates"].item() // LANES)
    text = f"p95 of the best ± {words(error(half, best['p95']))} (95 %); changes of the same draws"
    pictures = [Picture(
        "alternatives", f"Placements of slow nodes of {job} and alternatives",
        lambda: plots.plot_alternatives(result),
        "Points are p50 and p95 of the step, for the work of one step as is.",
        Errors(text, NOT_INCLUDED),
    )]  # fmt: skip
    if "slot_cost" in result:  # what a node costs that is slower than the others
        pictures.append(Picture(
            "slots", f"Cost of one slow node of {job} by its place",
            lambda: plots.plot_slots(result),
            "What one slow node adds to the deterministic step; slack is how much slower it may be "
            "at no cost.", Errors("none: a deterministic step", NOT_INCLUDED),
        ))  # fmt: skip
    return pictures
