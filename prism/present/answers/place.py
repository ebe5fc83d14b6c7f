"""The answer of a placement: which slow nodes to move or leave, what that brings, what else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from prism import plots
from prism.analyses.place import Placing
from prism.analyses.placements.rows import (
    MOST_SLACK,
    NO_SLACK,
    SAME_NODES,
    better_alternatives,
    entry,
    numbered,
    objective_name,
    rows,
    same_work,
    with_place,
)
from prism.common.text import (
    NO_CHANGE,
    format_count,
    format_like,
    format_share,
    percent_change,
    plural,
)
from prism.engine import LANES
from prism.jobs.hostfiles import as_ranges
from prism.present.answer import (
    Answer,
    Cell,
    Column,
    Errors,
    Figure,
    Finding,
    Picture,
    Table,
    duration,
    error,
    half_width,
    pairs_table,
    words,
)
from prism.present.answers.times import NOT_INCLUDED

Json = Mapping[str, Any]

MOST_MOVES, MOST_NODES, MOST_ALIKE, MOST_BETTER = 6, 8, 3, 3
"""Moves, nodes, kinds of slowness and better alternatives that are named one by one."""
DO = {"drop_nodes": "run ", "spares": "put ", "fewer_layers": "put "}
"""What is done for an alternative, before its label."""
LEAST_SURE = 0.9
"""Probability of a good selection below which there is a warning [1]."""


def place_answer(result: Placing) -> Answer:
    """Make the answer of a placement."""
    numbers = result.figures()
    job, found = str(numbers["job"]), rows(numbers)
    quantity = "time-to-train" if numbers["objective"] == "time_to_train" else "step time"
    p95 = "p95" if quantity == "time-to-train" else objective_name(numbers)
    return Answer(
        title="Where slow nodes should go",
        subject=job,
        head=f": {_slow_nodes(numbers)}; seed {numbers['seed']}",
        question=f"Where should the slow nodes of {job} go for the least {p95} of the {quantity}?",
        findings=tuple(_findings(numbers, found)),
        tables=tuple(table for table in _tables(numbers, found) if table.rows),
        figures=numbers,
        warnings=(*_warnings(numbers), *(numbers.get("warnings") or ())),
        assumptions=tuple(numbers["notes"]),
        facts=tuple(_facts(numbers)),
        pictures=tuple(_pictures(numbers, result)),
    )


# ------------------------------------------------------------------------------------- nodes
def _slow_nodes(numbers: Json) -> str:
    """Say which nodes are slow, and by how much."""
    nodes = numbers["slow_nodes"]
    alike: dict[str, list[Json]] = {}
    for node in nodes:
        alike.setdefault(_slowness(node), []).append(node)
    if len(alike) <= MOST_ALIKE:
        return ", ".join(f"{_names(group)} ({text})" for text, group in alike.items())
    slowest = sorted(nodes, key=lambda node: -max(_factors(node).values()))[:5]
    listed = ", ".join(f"{_name(node)} ({max(_factors(node).values()):.3g}x)" for node in slowest)
    return f"{format_count(len(nodes), 'node')} of known speed, the slowest: {listed}"


def _slowness(node: Json) -> str:
    """Write a node's slowness by kind."""
    factors = _factors(node)
    if len(set(factors.values())) == 1 and factors["compute"] != 1.0:
        return f"everything {factors['compute']:.4g}x"
    slow = [f"{key} {value:.4g}x" for key, value in factors.items() if value != 1.0]
    return ", ".join(slow) or "not slowed"


def _factors(node: Json) -> dict[str, float]:
    return {key: float(node.get(key) or 1.0) for key in ("compute", "memory", "network", "other")}


def _name(node: Json) -> str:
    return str(node.get("host") or node["node"])


def _names(nodes: Sequence[Json]) -> str:
    """Name some nodes, by host where that is known."""
    listed = ", ".join(map(_name, nodes[:MOST_NODES]))
    more = len(nodes) - MOST_NODES
    text = f"node{'s' * (len(nodes) > 1)} {listed}"
    return f"{text} and {more} more" if more > 0 else text


# ------------------------------------------------------------------------------ in sentences
def _findings(numbers: Json, found: Sequence[Json]) -> list[Finding]:
    """Say the best that can be done, what the slow nodes cost now, then what explains it."""
    best, now = entry(numbers, "best"), entry(numbers, "current")
    moves = _advice(numbers, best, now)
    first, others = _alternatives(numbers, found, now), _cost_now(numbers, now)
    if first and first[0].severity == "answer":
        moves[0] = moves[0]._replace(text=f"With all nodes kept: {_lower(moves[0].text)}")
        return [*first, *others, *moves, *_stages(numbers), _selection(numbers)]
    return [*moves, *others, *first, *_stages(numbers), _selection(numbers)]


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _cost_now(numbers: Json, now: Json) -> list[Finding]:
    """Say what the slow nodes cost where they are, over nodes that are as fast as the others."""
    healthy = numbers.get("healthy")
    if not healthy:
        return []
    low, high = (1.0 / (1.0 - x) - 1.0 for x in healthy["saved_ci"])
    cost = percent_change(1.0 / (1.0 - healthy["saved"]) - 1.0, (low, high))
    before, after = _two(numbers, healthy, now)
    text = f"{_names(numbers['slow_nodes'])} cost{'s' * (len(numbers['slow_nodes']) == 1)} {cost} "
    text += f"of {objective_name(numbers)} as placed now{with_place('', now)}: {after} instead of "
    return [Finding("cost_now", f"{text[0].upper()}{text[1:]}{before}.")]


def _two(numbers: Json, *pair: Json) -> list[str]:
    """Write the objective of two rows for the same work, with digits that tell them apart."""
    values = [float(same_work(row, "objective") or 0.0) for row in pair]
    fine = max(abs(values[0] - values[1]) / 20.0, 1e-4 * values[0])
    return [format_like(value, values[0], fine) for value in values]


def _advice(numbers: Json, best: Json, now: Json) -> list[Finding]:
    """Say which nodes to move, and what that brings."""
    leave = "Leave the nodes where they are: "
    if best["name"] == now["name"]:
        why = f"no placement reduces {objective_name(numbers)} by {_tolerance(numbers)} or more."
        if numbers["n_screened"] == 1:
            why = "all placements are equivalent for this job."
        return [Finding("leave", leave + why, "answer")]
    gain = _gain(numbers, best, now)
    if best["saved"] < numbers["tolerance"]:
        text = f"{leave}the best placement ({with_place('', best)[2:]}) saves less than the "
        return [Finding("leave", f"{text}tolerance of {_tolerance(numbers)}: {gain}.", "answer")]
    moves = _moves(numbers)
    if not moves:
        text = f"The best placement is {with_place('', best)[2:]}: {gain}."
        return [Finding("move", text, "answer")]
    if len(moves) > MOST_MOVES:
        left = len(moves) - MOST_MOVES
        moves = [*moves[:MOST_MOVES], f"{left} more moves (-o writes all to hosts.csv)"]
    text = "; ".join(moves)
    out = [Finding("move", f"{text[0].upper()}{text[1:]}: {gain}.", "answer")]
    tiers = list((best.get("moved_between") or {}).items())[::-1]  # the outermost first
    if tiers:
        text = ", ".join(f"{n} from another {tier}" for tier, n in tiers)
        moved = best["hosts_changed"]
        get = plural(moved, "gets", "get")
        text = f"{format_count(moved, 'slot')} {get} another node: {text}."
        out.append(Finding("moved_between", text))
    return out


def _gain(numbers: Json, best: Json, now: Json) -> str:
    """Write both values of the objective and the change, with its interval."""
    text = " -> ".join(_two(numbers, now, best))
    return f"{objective_name(numbers)} {text} ({words(_saved(best))})"


def _saved(row: Json) -> Figure:
    """Write what a row saves as a change of the objective, with half of its 95 % interval."""
    return Figure(row["saved"], percent_change(-float(row["saved"]), row.get("saved_ci")))


def _moves(numbers: Json) -> list[str]:
    """List the moves of slow nodes, those to the same stages as one."""
    groups: dict[tuple[str, bool], list[Json]] = {}
    for node in numbers["slow_nodes"]:
        before, after = node.get("before"), node.get("after")
        if before != after:
            same = bool(before and after and before["replicas"] == after["replicas"])
            stages = as_ranges(after["stages"]) if after else ""
            groups.setdefault((stages, same), []).append(node)
    return [_move(group, same) for (_, same), group in groups.items()]


def _move(nodes: Sequence[Json], same_replicas: bool) -> str:
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
    return f"move {_names(nodes)} from {start} to {to}"


def _at(word: str, places: Iterable[Json]) -> str:
    return numbered(word, (i for place in places for i in place[f"{word}s"]))


def _tolerance(numbers: Json) -> str:
    return format_share(numbers["tolerance"], 2)


def _alternatives(numbers: Json, found: Sequence[Json], now: Json) -> list[Finding]:
    """Say whether something else than moving nodes is better still, for the same work."""
    sure = better_alternatives(numbers)
    if sure:
        first = sure[0]
        text = f"{DO.get(first['name'], '')}{first['label']}: {_gain(numbers, first, now)} for the "
        text = f"{text[0].upper()}{text[1:]}same work, better than any placement."
        more = "; ".join(f"{row['label']} ({words(_saved(row))})" for row in sure[1:MOST_BETTER])
        text += f" Also better than any placement: {more}." if more else ""
        return [Finding("better_alternative", text, "answer")]
    names = set(numbers.get("alternatives") or {}) - set(SAME_NODES)
    others = [row for row in found if row["name"] in names and "saved" in row]
    better = any(row["saved"] > entry(numbers, "best")["saved"] + NO_CHANGE for row in others)
    distinct = "statistically distinguishably " if better else ""
    text = f"No alternative that was simulated is {distinct}better for the same work."
    return [Finding("no_better_alternative", text)] if others else []


def _stages(numbers: Json) -> list[Finding]:
    """Say where a slow node costs least and where most."""
    costs = [row for row in numbers["stage_slack"] if row["cost"]]
    if len(costs) < 2:
        return []
    least, most = (pick(costs, key=lambda row: row["cost"]) for pick in (min, max))
    low, high = (format_share(row["cost"] / numbers["alike_step"]) for row in (least, most))
    text = f"{low} to the step on stage {least['stage']}, {high} on stage {most['stage']}"
    if low == high:
        text = f"{low} to the step on any stage"
    slowest = max(numbers["slow_nodes"], key=lambda node: max(_factors(node).values()))
    text = f"A node as slow as {_names([slowest])} ({_slowness(slowest)}), alone, adds {text}"
    return [Finding("stage_cost", f"{text} (deterministic step).")]


def _selection(numbers: Json) -> Finding:
    """Say how the choice was made, and how sure it is."""
    screened = numbers["n_screened"]
    text = f"{format_count(screened, 'placement')} screened on the "
    text += f"deterministic step ({numbers['method']}), {format_count(numbers['n_candidates'])} "
    text += f"simulated; P(no placement beats the best one by more than {_tolerance(numbers)} of "
    text += f"{objective_name(numbers)}) is {_probability(numbers['p_correct'])}."
    return Finding("selection", text)


def _probability(p: float) -> str:
    return "above 99.9 %" if p > 0.999 else f"{100.0 * p:.{1 if p > 0.99 else 0}f} %"


def _warnings(numbers: Json) -> list[str]:
    """Say where the choice is not one."""
    if numbers["p_correct"] >= LEAST_SURE:
        return []
    return [
        f"P(the best placement is within {_tolerance(numbers)} of the best simulated) is only "
        f"{_probability(numbers['p_correct'])}: those simulated are statistically "
        "indistinguishable within this budget; raise --tolerance"
    ]


def _facts(numbers: Json) -> list[tuple[str, Figure]]:
    """Pick the figures that stand out."""
    now, name = entry(numbers, "current"), objective_name(numbers)
    better = better_alternatives(numbers)
    first = better[0] if better else entry(numbers, "best")
    texts = zip((now, first), _two(numbers, now, first), strict=True)
    before, after = (Figure(same_work(row, "objective"), text) for row, text in texts)
    label = first.get("label") if first["name"] in numbers["alternatives"] else "best placement"
    return [(f"{name}, as is", before), (f"{name}, {label}", after), ("change", _saved(first))]


# --------------------------------------------------------------------------------- in tables
def _tables(numbers: Json, found: Sequence[Json]) -> list[Table]:
    impossible: list[tuple[str, Cell]] = [
        (row["label"], str(row["impossible"])) for row in found if row.get("impossible")
    ]
    possible = [row for row in found if not row.get("impossible")]
    return [
        _rows_table(numbers, possible),
        _slack_table(numbers),
        pairs_table("Impossible for this job", impossible, details=True),
    ]


def _rows_table(numbers: Json, found: Sequence[Json]) -> Table:
    """Lay out placements and alternatives side by side."""
    now, name = entry(numbers, "current"), objective_name(numbers)
    key = numbers["objective"]
    columns = [(k, Column(k, "step time")) for k in ("p50", "p95")]
    if key in ("mean", "p99"):
        columns.append((key, Column(key, "step time")))
    elif key not in ("p50", "p95"):
        columns.append(("objective", Column("p95", name)))
    fine = {k: _resolution(found, k) for k, _ in columns}
    cells = tuple(
        (
            str(row["label"]),
            *(_time(row, k, fine[k], now) for k, _ in columns),
            None if row["name"] == now["name"] else _saved(row),
        )
        for row in found
    )
    heads = (Column(right=False), *(column for _, column in columns))
    heads += (Column("same work", "vs as is"),)
    return Table("", heads, cells, tuple(_notes(found, name)))


def _resolution(found: Sequence[Json], key: str) -> float:
    """Choose the smallest difference worth showing in a column [s]."""
    values = [float(row[key]) for row in found if row.get(key) is not None]
    # others than p95 are known no worse
    errors = [float(row["p95_se"]) for row in found if row.get("p95_se") is not None]
    return max(2e-3 * max(values, default=0.0), 0.2 * min(errors, default=0.0))


def _time(row: Json, key: str, fine: float, now: Json) -> Cell:
    """Write a time with the digits of its column, in the unit of its row as is."""
    value = row.get(key)
    return None if value is None else duration(float(value), fine, float(now.get(key) or value))


def _notes(found: Sequence[Json], name: str) -> list[str]:
    """Explain what is not plain."""
    notes = [
        f"Vs as is: change of {name} for the same work, per token where the batch differs; ± half "
        "of the 95 % interval."
    ]
    random = next((row for row in found if row.get("name") == "random"), {})
    if random:
        low, high = (float(random[f"{p}_of_objective"]) for p in ("p5", "p95"))
        fine = max(1e-3 * low, 0.1 * (high - low))
        ends = " to ".join(format_like(value, low, fine) for value in (low, high))
        notes.append(f"Placed at random: the mean of placements; {name} of 90 % of them: {ends}.")
    return notes


def _slack_table(numbers: Json) -> Table:
    """Lay out how slow a node may be at each stage, and what one slow node costs there."""
    cells = [
        (row["stage"], _slack(row["slack"]), None if row["cost"] is None
         else Figure(row["cost"], format_share(row["cost"] / numbers["alike_step"])))
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
def _pictures(numbers: Json, result: Placing) -> list[Picture]:
    job, errors = numbers["job"], _errors(numbers)
    pictures = [Picture(
        "alternatives", f"Placements of slow nodes of {job} and alternatives",
        lambda: plots.plot_alternatives(result),
        "Points are p50 and p95 of the step, for the work of one step as is.", errors,
    )]  # fmt: skip
    if numbers["slot_cost"]:  # what a node costs that is slower than the others
        pictures.append(Picture(
            "slots", f"Cost of one slow node of {job} by its place",
            lambda: plots.plot_slots(result),
            "What one slow node adds to the deterministic step; slack is how much slower it may be "
            "at no cost.", Errors("none: a deterministic step", errors.data),
        ))  # fmt: skip
    return pictures


def _errors(numbers: Json) -> Errors:
    """Write the error of the best placement's p95, and that of its gain."""
    best = entry(numbers, "best")
    half = half_width(best["p95_se"], numbers["replicates"] // LANES)
    text = f"p95 of the best ± {words(error(half, best['p95']))} (95 %); changes of the same draws"
    return Errors(text, NOT_INCLUDED)
