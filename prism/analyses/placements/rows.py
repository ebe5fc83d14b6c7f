"""A placement's summary by rows: placements and alternatives, what they are called, their work."""

from collections.abc import Iterable, Mapping
from typing import Any

from prism.jobs.hostfiles import as_ranges

Json = Mapping[str, Any]

MOST_NUMBERS = 5
"""Commas between numbers; where there are more, how many numbers there are is said."""
NO_SLACK, MOST_SLACK = 5e-4, 1.0
"""Slack below which there is none, and up to which it is looked for [1]."""
SAME_NODES = {"all_in_one_replica": "all in one replica", "random": "placed at random, mean"}
"""Alternatives that place the same nodes elsewhere, and what they are called."""
HEALTHY = "if the slow nodes were as fast as the others"
OBJECTIVES = {"mean": "mean", "time_to_train": "time-to-train"}


def objective_name(numbers: Json) -> str:
    """Name what is minimised: p95, mean, time-to-train."""
    name = str(numbers.get("objective", "p95"))
    return OBJECTIVES.get(name, name)


def entry(numbers: Json, which: str) -> Json:
    """Find the ``best``, ``worst`` or ``current`` placement of a summary."""
    name = numbers.get(which)
    return next((row for row in numbers.get("placements") or () if row["name"] == name), {})


def rows(numbers: Json) -> list[dict[str, Any]]:
    """Put placements and alternatives into one list, as is first, each with its label."""
    found: list[dict[str, Any]] = []
    for which, text in (("current", "as is"), ("best", "best"), ("worst", "worst")):
        row = entry(numbers, which)
        # one of these may be another of them
        if row and not any(other["name"] == row["name"] for other in found):
            found.append({**row, "label": with_place(text, row)})
    if numbers.get("healthy"):
        found.append({**numbers["healthy"], "name": "healthy", "label": HEALTHY})
    one = len(numbers.get("slow_nodes") or ()) == 1
    for name, row in (numbers.get("alternatives") or {}).items():
        if one and name == "all_in_one_replica":
            continue
        label = SAME_NODES.get(name) or str(row.get("label") or name.replace("_", " "))
        found.append({**row, "name": name, "label": label})
    return found


def better_alternatives(numbers: Json) -> list[dict[str, Any]]:
    """List what is better than any placement by more than the tolerance, the best first.

    For the same work, and surely: all of its interval saves more than the best placement.
    """
    moved = max(0.0, float(entry(numbers, "best").get("saved", 0.0)))
    found = [
        row
        for row in rows(numbers)
        if row["name"] in (numbers.get("alternatives") or {}) and row["name"] not in SAME_NODES
    ]
    better = [
        row
        for row in found
        if row.get("saved", 0.0) > moved + numbers["tolerance"] and row["saved_ci"][0] > moved
    ]
    return sorted(better, key=lambda row: -float(row["saved"]))


def with_place(text: str, row: Json) -> str:
    """Add the stages and replicas of the slow nodes to what a placement is called."""
    if not row.get("stages"):
        return text
    stages, replicas = (numbered(word, row[f"{word}s"]) for word in ("stage", "replica"))
    return f"{text}: {stages}, {replicas}"


def numbered(word: str, numbers: Iterable[int]) -> str:
    """Write the numbers of stages or replicas, or how many there are.

    Examples
    --------
    >>> numbered("stage", [3, 0, 1]), numbered("replica", range(0, 20, 2))
    ('stages 0-1, 3', '10 replicas')
    """
    found = sorted(set(numbers))
    text = as_ranges(found, ", ")
    if text.count(",") > MOST_NUMBERS:
        return f"{len(found)} {word}s"
    return f"{word}{'s' * (len(found) > 1)} {text}"


def same_work(row: Json, key: str) -> float | None:
    """Give a quantile, mean or objective for the work of one step as is [s]; None without one."""
    value = row.get(f"{key}_same_work", row.get(key))
    return None if value is None else float(value)
