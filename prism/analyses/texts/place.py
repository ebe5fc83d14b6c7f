"""Where slow nodes should go, in words: what to move, what else would help, what was assumed.

Everything is said from the mapping that `prism.analyses.place.summarize_place` returns. What a
summary lacks is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from prism.common.text import NO_CHANGE, format_count, format_like, format_share, percent_change
from prism.jobs.hostfiles import as_ranges

Json = Mapping[str, Any]

MOST_MOVES, MOST_NUMBERS = 6, 5
"""Moves told one by one, and commas between numbers; more are in the placement file."""

LEAST_SURE = 0.9
"""Probability of a good selection below which there is a warning [1]."""
NO_SLACK, MOST_SLACK = 5e-4, 1.0
"""Slack below which there is none, and up to which it is looked for [1]."""

ALTERNATIVES = {
    "all_in_one_replica": "all in one replica",
    "random": "placed at random, mean",
}
"""How the alternatives of a summary are called where it does not say."""

SAME_NODES = {"all_in_one_replica", "random"}
"""Alternatives that place the same nodes elsewhere."""

OBJECTIVES = {"mean": "mean", "time_to_train": "time-to-train"}


def objective_name(numbers: Json) -> str:
    """Name what is minimised: p95, mean, time-to-train."""
    name = str(numbers.get("objective", "p95"))
    return OBJECTIVES.get(name, name)


def entry(numbers: Json, which: str) -> Json:
    """Find the best, worst or current placement.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.
    which : str
        ``best``, ``worst`` or ``current``.
    """
    name = numbers.get(which)
    return next((row for row in numbers.get("placements") or () if row["name"] == name), {})


def rows(numbers: Json) -> list[dict[str, Any]]:
    """Put placements and alternatives into one list, as is first.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.

    Returns
    -------
    list of dict
        Each with ``label``, and its figures or why it is ``impossible``.
    """
    found: list[dict[str, Any]] = []
    for which, text in (("current", "as is"), ("best", "best"), ("worst", "worst")):
        row = entry(numbers, which)
        # one of these may be another of them
        if row and not any(other["name"] == row["name"] for other in found):
            found.append({**row, "label": _with_place(text, row)})
    one = len(numbers.get("slow_nodes") or ()) == 1
    for name, row in (numbers.get("alternatives") or {}).items():
        if one and name == "all_in_one_replica":
            continue
        label = str(row.get("label") or "") if name not in SAME_NODES else ""
        label = label or _with_place(ALTERNATIVES.get(name, name.replace("_", " ")), row)
        found.append({**row, "name": name, "label": label})
    return found


def _with_place(text: str, row: Json) -> str:
    """Add the stages and replicas of the slow nodes to what a placement is called."""
    if not row.get("stages"):
        return text
    stages, replicas = (_numbered(word, row[f"{word}s"]) for word in ("stage", "replica"))
    return f"{text}: {stages}, {replicas}"


def in_words(numbers: Json) -> dict[str, Any]:
    """Add to a summary what it means, as ``findings`` and ``warnings``.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.
    """
    told = {"findings": findings(numbers), "warnings": place_warnings(numbers)}
    return {**numbers, **{k: [*v, *(numbers.get(k) or ())] for k, v in told.items()}}


def place_warnings(numbers: Json) -> list[str]:
    """Say of a summary where its choice is not one."""
    p = numbers.get("p_correct")
    if p is None or p >= LEAST_SURE:
        return []
    return [
        f"the best placement is that to within {_tolerance(numbers)} with a probability of "
        f"{_probability(float(p))} only: those simulated differ by less than this budget tells; "
        "raise --tolerance"
    ]


def findings(numbers: Json) -> list[str]:
    """Say what to do, what it brings, and what explains it.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.

    Returns
    -------
    list of str
        One sentence or two each, the advice first.
    """
    return [*advice(numbers), *_others(numbers), *slack_in_words(numbers), *_trust(numbers)]


def advice(numbers: Json) -> list[str]:
    """Say which nodes to move, and what that brings.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.
    """
    best, now = entry(numbers, "best"), entry(numbers, "current")
    if not best or not now:
        return []
    if best["name"] == now["name"]:
        if numbers.get("n_screened") == 1:
            return ["Leave the nodes where they are: to this job all places are alike."]
        text = f"Leave the nodes where they are: no placement is better by {_tolerance(numbers)}"
        return [f"{text} of the {objective_name(numbers)} or more."]
    gain = _change(now, best, numbers)
    if float(best["saved"]) < float(numbers.get("tolerance", 0.0)):
        place = _with_place("the best placement", best).replace(": ", " (") + ")"
        return [f"Leave the nodes where they are; {place} is no better to speak of: {gain}."]
    moves = _moves(numbers)
    if not moves:
        return [f"The best placement is {best.get('label', best['name'])}: {gain}."]
    if len(moves) > MOST_MOVES:
        left = len(moves) - MOST_MOVES
        moves = [*moves[:MOST_MOVES], f"and {left} more (hosts.csv has all, with -o)"]
    text = "; ".join(moves)
    return [f"{text[0].upper()}{text[1:]}: {gain}.", *_between(best)]


def _between(best: Json) -> list[str]:
    """Say which tiers of the network nodes are exchanged over, the outermost first."""
    moved = list((best.get("moved_between") or {}).items())[::-1]
    if not moved:
        return []
    text = ", ".join(f"{n} of them from {tier} to {tier}" for tier, n in moved)
    return [f"Of the slots, {best['hosts_changed']} get another node, {text}."]


def _moves(numbers: Json) -> list[str]:
    """List the moves of slow nodes, those to the same stages as one."""
    groups: dict[tuple[str, bool], list[Json]] = {}
    for node in numbers.get("slow_nodes") or ():
        before, after = node.get("before"), node.get("after")
        if before != after:
            same = bool(before and after and before["replicas"] == after["replicas"])
            stages = as_ranges(after["stages"]) if after else ""
            groups.setdefault((stages, same), []).append(node)
    return [_move(group, same) for (_, same), group in groups.items()]


def _move(nodes: Sequence[Json], same_replicas: bool) -> str:
    """Say where some nodes go from where."""
    before = [node["before"] for node in nodes if node.get("before")]
    after = [node["after"] for node in nodes if node.get("after")]
    if not after:
        return f"take {names(nodes)} out"
    to = _numbered("stage", (i for place in after for i in place["stages"]))
    replicas = _numbered("replica", (i for place in after for i in place["replicas"]))
    if not before:
        return f"put {names(nodes)} at {to} of {replicas}"
    start = _numbered("stage", (i for place in before for i in place["stages"]))
    if same_replicas:
        return f"move {names(nodes)} from {start} to {to} of {replicas}"
    left = _numbered("replica", (i for place in before for i in place["replicas"]))
    return f"move {names(nodes)} from {start} of {left} to {to} of {replicas}"


def _numbered(word: str, numbers: Iterable[int]) -> str:
    """Write the numbers of stages or replicas, or how many there are."""
    found = sorted(set(numbers))
    text = as_ranges(found, ", ")
    if text.count(",") > MOST_NUMBERS:
        return f"{len(found)} {word}s"
    return f"{word}{'s' * (len(found) > 1)} {text}"


def _change(now: Json, then: Json, numbers: Json) -> str:
    """Write both values of the objective and the change, with its interval."""
    name, key = objective_name(numbers), str(numbers.get("objective"))
    before, after = (float(row.get(key, row["objective"])) for row in (now, then))
    fine = max(abs(before - after) / 20.0, 1e-4 * before)
    text = f"{name} {format_like(before, before, fine)} -> {format_like(after, before, fine)}"
    return f"{text} ({percent_change(-float(then['saved']), then.get('saved_ci'))})"


def _tolerance(numbers: Json) -> str:
    return format_share(float(numbers.get("tolerance", 0.001)), 2)


def _others(numbers: Json) -> list[str]:
    """Say whether something else than moving nodes is better still, for the same work."""
    best = entry(numbers, "best")
    placed = {row["name"] for row in numbers.get("placements") or ()} | SAME_NODES
    told = [row for row in rows(numbers) if row["name"] not in placed and "saved" in row]
    moved = float(best.get("saved", 0.0))
    better = [row for row in told if row["saved"] > moved + NO_CHANGE]
    sure = [row for row in better if (row.get("saved_ci") or [row["saved"]])[0] > max(0.0, moved)]
    if sure:
        sure.sort(key=lambda row: -float(row["saved"]))
        listed = ", ".join(
            f"{row['label']} {percent_change(-float(row['saved']), row.get('saved_ci'))}"
            for row in sure[:3]
        )
        return [f"Better still than moving them, for the same work, against as is: {listed}."]
    surely = "surely " if better else ""
    return [f"Nothing else that was tried is {surely}better for the same work."] if told else []


def same_work(row: Json, key: str) -> float | None:
    """Value of a quantile or mean for the work of one step as is [s]; None where there is none.

    Parameters
    ----------
    row : mapping
        A placement or an alternative.
    key : str
        ``p50``, ``p95``, ``objective``, ...
    """
    value = row.get(f"{key}_same_work", row.get(key))
    return None if value is None else float(value)


def slack_in_words(numbers: Json) -> list[str]:
    """Say which stages can hold a slow node for free, and which cannot.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.
    """
    stages = [row for row in numbers.get("stage_slack") or () if row.get("slack") is not None]
    if len(stages) < 2:
        return []
    parts = []
    for text, group in groupby(stages, key=lambda row: _slack(row["slack"])):
        found = [int(row["stage"]) for row in group]
        parts.append(f"{_numbered('stage', found)} {text}")
    costs = _costs(numbers, stages)
    if len(parts) == 1 and stages[0]["slack"] < NO_SLACK:
        return [f"No stage has any slack{costs}."]
    if len(parts) == 1:
        return [f"Every stage has a slack of {_slack(stages[0]['slack'])}{costs}."]
    words = ", ".join(parts[:8])
    more = f", and {len(parts) - 8} more" if len(parts) > 8 else ""
    return [f"Slack, by how much a node may be slower before the step is: {words}{more}{costs}."]


def _costs(numbers: Json, stages: Sequence[Json]) -> str:
    """Say what one slow node costs on the best and on the worst stage, all else at its mean."""
    step, known = numbers.get("alike_step"), [r for r in stages if r.get("cost")]
    if not step or not known:
        return ""
    least, most = (pick(known, key=lambda row: float(row["cost"])) for pick in (min, max))
    low, high = (f"{100.0 * float(row['cost']) / float(step):.1f} %" for row in (least, most))
    text = "; one such node alone, all else at its mean, makes the step longer by"
    if low == high:
        return f"{text} {low} wherever it is"
    return f"{text} {low} on stage {least['stage']} and {high} on stage {most['stage']}"


def _slack(value: float) -> str:
    if value < NO_SLACK:
        return "none"
    return format_share(float(value), 2) + (" or more" if value >= MOST_SLACK else "")


def _trust(numbers: Json) -> list[str]:
    """Say how the choice was made, and how sure it is."""
    lines = []
    screened, simulated = numbers.get("n_screened"), numbers.get("n_candidates")
    if screened and simulated:
        method = str(numbers.get("method") or "")
        how = f" ({method})" if method.startswith("all") else f" by {method}" * bool(method)
        lines.append(
            f"{_count(screened, 'placement')} looked at{how} on a step without noise, "
            f"{format_count(simulated)} of them simulated."
        )
    p = numbers.get("p_correct")
    if p is not None:
        lines.append(
            f"With a probability of {_probability(float(p))} none of those simulated is better "
            f"than the best by more than {_tolerance(numbers)} of the {objective_name(numbers)}."
        )
    return [" ".join(lines)] if lines else []


def _count(n: int, what: str) -> str:
    return f"{format_count(n)} {what}{'s' * (n != 1)}"


def _probability(p: float) -> str:
    return "99.9 %" if p > 0.999 else f"{100.0 * p:.{1 if p > 0.99 else 0}f} %"


def assumed(numbers: Json) -> list[str]:
    """Say which nodes are slow, and by how much.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns.
    """
    nodes = list(numbers.get("slow_nodes") or ())
    alike: dict[str, list[Json]] = {}
    for node in nodes:
        alike.setdefault(slowness(node), []).append(node)
    if len(alike) <= 3:
        return [f"{names(group)}: {text}" for text, group in alike.items()]
    slowest = sorted(nodes, key=lambda node: -max(_factors(node).values()))[:5]
    listed = ", ".join(f"{_name(node)} {max(_factors(node).values()):.3g}" for node in slowest)
    return [f"{len(nodes):,} nodes of known speed; the slowest: {listed}"]


def slowness(node: Json) -> str:
    """Write a node's slowness by kind.

    Examples
    --------
    >>> slowness({"node": 3, "compute": 1.2, "memory": None, "network": 1.0})
    'compute 1.2x'
    """
    factors = _factors(node)
    if len(set(factors.values())) == 1 and factors["compute"] != 1.0:
        words = [f"everything {factors['compute']:.4g}x"]
    else:
        words = [f"{key} {value:.4g}x" for key, value in factors.items() if value != 1.0]
    return ", ".join(words) or "not slowed"


def _factors(node: Json) -> dict[str, float]:
    return {key: float(node.get(key) or 1.0) for key in ("compute", "memory", "network", "other")}


def _name(node: Json) -> str:
    return str(node.get("host") or node["node"])


def names(nodes: Iterable[Json]) -> str:
    """Name some nodes, by host where that is known.

    Examples
    --------
    >>> names([{"node": 3}, {"node": 5, "host": "n5"}])
    'nodes 3, n5'
    """
    found = [_name(node) for node in nodes]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"node{'s' * (len(found) > 1)} {', '.join(found[:8])}{more}"
