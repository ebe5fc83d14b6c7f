"""What a sweep found, in words: the fastest setting, the robust one, the job's own beside them.

Everything is said from the mapping that `prism.analyses.sweep.summarize_sweep` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from prism.common.text import format_count, format_like, format_share, percent_change

Json = Mapping[str, Any]

SHORT = {"microbatches": "m", "microbatch_size": "mbs", "data_parallel": "", "schedule": ""}
"""Keys whose last word is not what a setting is called by."""
SIGNIFICANT = 1.96
LEAST_SURE = 0.9
"""Probability of a right choice below which there is a warning [1]."""


def label(row: Json, varied: Sequence[str], but: Json | None = None) -> str:
    """Name a setting: ``tp 8 pp 16 dp 128``; a 1 is left out where many keys vary.

    Parameters
    ----------
    row : mapping
        A row of a sweep.
    varied : sequence of str
        Its keys.
    but : mapping, optional
        Another row: values that are the same there are left out.
    """
    words = []
    for key in varied:
        value, last = row[key], key.rpartition(".")[2]
        if but is not None and but.get(key) == value:
            continue
        if value == 1 and len(varied) > 3 and key.startswith("parallelism."):
            continue
        if key.startswith("parallelism."):
            word = SHORT.get(last, last)
        else:
            word = key.partition(".")[2] if len(varied) == 1 else last
        words.append(f"{word} {value}".strip())
    return " ".join(words) or "as is"


def change_text(row: Json, measure: str) -> str:
    """Write the change against the job's own setting, with half of its 95 % interval."""
    change, error = row.get(f"{measure}_change"), row.get(f"{measure}_change_se")
    if change is None:
        return ""
    half = None if error is None else [change - SIGNIFICANT * error, change + SIGNIFICANT * error]
    return percent_change(change, half)


def same_work_differs(numbers: Json) -> bool:
    """Whether steps do unequal work, so that times are compared per token."""
    return any(abs(row["work"] - 1.0) > 1e-9 for row in numbers["rows"])


def in_words(numbers: Json) -> dict[str, Any]:
    """Add to a summary what it means, as ``findings`` and ``warnings``."""
    return {**numbers, "findings": findings(numbers), "warnings": sweep_warnings(numbers)}


def sweep_warnings(numbers: Json) -> list[str]:
    """Say which choice the simulated steps do not carry."""
    out = []
    for name, measure in (("fastest", "p50"), ("robust", "p95")):
        p = float(numbers["p_correct"][name])
        if p < LEAST_SURE:
            out.append(
                f"that no setting has a {measure} better by 0.1 % than the {name} one is certain "
                f"to {format_share(p, 2)} only; raise --replicates"
            )
    return out


def findings(numbers: Json) -> list[str]:
    """Say which settings are the best, and what the job's own costs beside them."""
    rows, varied = numbers["rows"], numbers["varied"]
    fast, robust = rows[numbers["fastest"]], rows[numbers["robust"]]
    own = next((row for row in rows if row["own"]), None)
    out = []
    if fast is robust:
        out.append(f"Fastest and robust is {label(fast, varied)}: {_figures(fast, own)}.")
    else:
        out.append(f"Fastest (least p50) is {label(fast, varied)}: {_figures(fast, own)}.")
        out.append(f"Robust (least p95) is {label(robust, varied)}: {_figures(robust, own)}.")
    between = len(numbers["frontier"]) - len({numbers["fastest"], numbers["robust"]})
    if between > 0:
        out.append(f"{between} more on the frontier: no setting is better in both p50 and p95.")
    if own is not None and own is not fast and own["p50"] is not None:
        out.append(f"The job's own, {label(own, varied)}: {_figures(own, None)}.")
    for row in numbers.get("by_setting") or ():
        keys = [key for key in varied if key in row]
        best = rows[row["robust"]]
        rest = [key for key in varied if key not in row]
        given = next((own for own in rows if own["own"] and not _differ(own, row, keys)), None)
        out.append(f"With {label(row, keys)}: {label(best, rest)}, {_figures(best, given)}.")
    return out


def _differ(row: Json, other: Json, keys: Sequence[str]) -> bool:
    return any(row[key] != other[key] for key in keys)


def _figures(row: Json, own: Json | None) -> str:
    """Write p50 and p95 for the same work, and their changes against the job's own."""
    text = f"p50 {_time(row, 'p50')}, p95 {_time(row, 'p95')}"
    if own is not None and own is not row and row.get("p50_change") is not None:
        changes = " and ".join(change_text(row, measure) for measure in ("p50", "p95"))
        text += f" ({changes} against the job's own)"
    return text


def _time(row: Json, measure: str) -> str:
    value = float(row[f"{measure}_same_work"])
    return format_like(value, value, max(1e-3 * value, 0.2 * float(row[f"{measure}_se"] or 0.0)))


def refusals(numbers: Json) -> list[str]:
    """Say how many settings were refused, and why, the commonest reasons first."""
    refused = numbers["refused"]
    kinds = Counter(_kind(row["reason"]) for row in refused)
    return [f"{format_count(count)}: {kind}" for kind, count in kinds.most_common(5)]


def _kind(reason: str) -> str:
    """Put reasons that differ in their numbers together."""
    if reason.startswith("needs ") and " GiB" in reason:
        return "need " + reason[reason.index("more than") :]
    return reason
