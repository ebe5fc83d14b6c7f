"""A ranking in words: what to learn from it, and how far to trust it.

Everything is said from the mapping that `prism.analyses.rank.summarize_rank` returns. What a
summary lacks is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.analyses.texts.causes import label, short_label
from prism.common.text import format_share

Json = Mapping[str, Any]

MOST_FINDINGS = 4
"""Sentences per intervention, for kernel classes and for effects."""
LEAST_FINDING = 0.005
"""Reduction of the standard deviation worth a sentence [1]."""
LEAST_DELAY, MOST_OF_DELAY = 0.03, 0.1
"""An effect that freezing cuts the mean by the first, and the spread by less than the second, is
said to delay [1]."""
NOTABLE = 0.02
"""Difference of shares worth a sentence [1]."""
HALF_WIDTH, WIDE_HALF_WIDTH = 0.03, 0.06
"""Half-widths of the intervals aimed at, of shares below one half and above [1]."""

TARGETS = {"step_time": "step time", "time_to_train": "time-to-train"}

_INTERVENTIONS = {
    "": ("Freezing {} at its median", "std_if_frozen"),
    "_cut": ("Cutting the tail of {} at its p95", "std_if_cut"),
    "_faster": ("Making {} faster by {faster}", "std_if_faster"),
}
"""Suffix of the reductions of each intervention, and the start of its sentence."""


def causes(numbers: Json) -> list[dict[str, Any]]:
    """Put kernel classes and effects into one list, the largest total order first.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_rank`` returns.

    Returns
    -------
    list of dict
        Its rows, each with its ``kind`` and ``label``.
    """
    rows = [
        {**row, "kind": kind, "label": label(row["name"], kind)}
        for kind in ("kernels", "effects")
        for row in numbers.get(kind) or ()
    ]
    return sorted(rows, key=lambda row: -_value(row, "total_order"))


def _value(row: Json, key: str) -> float:
    """Figure of a row; 0 where there is none."""
    value = row.get(key)
    return 0.0 if value is None else float(value)


def half_width(row: Json, key: str) -> float:
    """Half of the width of a figure's interval; 0 where there is none.

    Parameters
    ----------
    row : mapping
        One cause.
    key : str
        The figure, whose interval is ``key_ci``.
    """
    bounds = row.get(f"{key}_ci")
    if not bounds or None in bounds:
        return 0.0
    return 0.5 * (float(bounds[1]) - float(bounds[0]))


def in_words(numbers: Json) -> dict[str, Any]:
    """Add to a summary what it means, as ``findings`` and ``warnings``.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_rank`` returns.
    """
    return {**numbers, "findings": findings(numbers), "warnings": rank_warnings(numbers)}


def findings(numbers: Json) -> list[str]:
    """Say what would help, where the tail differs, and whether causes add up.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_rank`` returns.

    Returns
    -------
    list of str
        One sentence or two each.
    """
    if not numbers.get("std"):
        return [f"The {TARGETS[numbers['target']]} does not vary: there is nothing to rank."]
    rows, what = causes(numbers), TARGETS[numbers["target"]]
    lines = _interventions(rows, what, faster_text(numbers)) + _delays(rows)
    if not numbers.get("quick"):
        lines += _additivity(rows)
    return lines + _together(numbers) + _tail(rows, numbers)


def faster_text(numbers: Json) -> str:
    """Write how much faster a class was made, as ``10 %``."""
    return f"{100.0 * (numbers.get('speed_up') or 0.1):.3g} %"


def _interventions(rows: Sequence[Json], what: str, faster: str) -> list[str]:
    """Say what changing single causes would bring."""
    lines = []
    for suffix, (pattern, made) in _INTERVENTIONS.items():
        start = pattern.replace("{faster}", faster)
        key = f"std_reduction{suffix}"
        tried = [row for row in rows if row.get(made) is not None and row.get(key) is not None]
        told = [row for row in tried if row[key] >= LEAST_FINDING and _bounds(row, key)[0] > 0.0]
        told.sort(key=lambda row: -row[key])
        for row in _some_of_each(told):
            lines.append(
                f"{_start(start, row)} would cut the standard deviation of the {what} by "
                f"{_range(row, key)} and {_p95(row, suffix)}."
            )
        if tried and not told:
            lines.append(
                f"{start.format('any one cause')} would change the standard deviation of the "
                f"{what} by less than these runs can tell."
            )
    return lines


def _start(start: str, row: Json) -> str:
    """Begin a sentence about a changed cause; stalls have no median but are left out."""
    if row["name"] == "stall" and start.startswith("Freezing"):
        return "Leaving out all stalls"
    return start.format(_named(row))


def _some_of_each(rows: Sequence[Json]) -> list[Json]:
    """Pick the first kernel classes and the first effects."""
    return [
        row
        for kind in ("kernels", "effects")
        for row in [row for row in rows if row["kind"] == kind][:MOST_FINDINGS]
    ]


def _delays(rows: Sequence[Json]) -> list[str]:
    """Name effects that make the mean long rather than uncertain."""
    lines = []
    for row in rows:
        mean, std = row.get("mean_reduction"), row.get("std_reduction")
        if row["kind"] != "effects" or mean is None or std is None:
            continue
        if mean >= LEAST_DELAY and std < MOST_OF_DELAY:
            lines.append(
                f"{_named(row).capitalize()} costs time rather than certainty: freezing it would "
                f"cut the mean by {_range(row, 'mean_reduction')}, and "
                f"{'raise ' if std < 0.0 else ''}the standard deviation by "
                f"{100.0 * abs(std):.1f} %."
            )
    return lines


def _named(row: Json) -> str:
    """Name a cause within a sentence."""
    name = short_label(row["name"], row["kind"])
    return f"the {name}" if name.endswith(" effect") else name


def _bounds(row: Json, key: str) -> tuple[float, float]:
    """Interval of a figure; the figure itself where it has none."""
    bounds = row.get(f"{key}_ci")
    if not bounds or None in bounds:
        return _value(row, key), _value(row, key)
    return float(bounds[0]), float(bounds[1])


def _range(row: Json, key: str, sign: float = 1.0) -> str:
    """Write a relative change in percent, with its interval where the digits show one."""
    value = 100.0 * sign * _value(row, key)
    low, high = sorted(100.0 * sign * bound for bound in _bounds(row, key))
    digits = 0 if value >= 10.0 and high - low >= 1.0 else 1 if value >= 0.1 else 2
    texts = [f"{number:.{digits}f}" for number in (value, low, high)]
    if texts[1] == texts[2]:
        return f"{texts[0]} %"
    return f"{texts[0]} % ({texts[1]} to {texts[2]} %)"


def _p95(row: Json, suffix: str) -> str:
    """Say what becomes of p95."""
    key = f"p95_reduction{suffix}"
    value, (low, high) = _value(row, key), _bounds(row, key)
    if low <= 0.0 <= high or abs(value) < 5e-5:
        return f"leave p95 as it is, within {100.0 * max(-low, high, 1e-4):.2g} %"
    return f"p95 by {_range(row, key)}" if value > 0 else f"raise p95 by {_range(row, key, -1.0)}"


def _additivity(rows: Sequence[Json]) -> list[str]:
    """Say how much of the variance single causes make, and how much only several together."""
    known = [row for row in rows if row.get("first_order") is not None]
    if not known:
        return []
    alone = {
        kind: sum(_value(row, "first_order") for row in known if row["kind"] == kind)
        for kind in ("kernels", "effects")
    }
    error = sum(half_width(row, "first_order") ** 2 for row in known) ** 0.5
    whole = alone["kernels"] + alone["effects"]
    kernels = [row for row in known if row["kind"] == "kernels" and _value(row, "total_order") > 0]
    text = f"Acting alone, the kernels' own noise makes {_share(alone['kernels'])} of the variance"
    largest = max(kernels, key=lambda row: _value(row, "total_order"), default=None)
    if largest is not None and largest["total_order"] >= 5e-4:
        text += (
            f" (the largest class in all: {short_label(largest['name'], 'kernels')}, "
            f"{_share(largest['total_order'])})"
        )
    lines = [f"{text}; shared effects make {_share(alone['effects'])}."]
    if abs(1.0 - whole) <= max(error, NOTABLE):
        lines.append(f"Causes add up: alone they make {_with_error(whole, error)} of the variance.")
    elif whole < 1.0:
        lines.append(
            f"Not additive: {_with_error(1.0 - whole, error)} of the variance arise only "
            "where causes meet, as at the wait for the slowest."
        )
    joint = [
        row for row in known
        if row["total_order"] - row["first_order"] > max(NOTABLE, half_width(row, "total_order"))
    ]  # fmt: skip
    if joint:
        named = ", ".join(
            f"{short_label(row['name'], row['kind'])} ({_share(row['first_order'])} alone, "
            f"{_share(row['total_order'])} in all)"
            for row in joint[:MOST_FINDINGS]
        )
        lines.append(f"More together with others than alone: {named}.")
    return lines


def pair_label(pair: Json) -> str:
    """Name a pair of causes."""
    return " x ".join(short_label(name) for name in pair["names"])


def _together(numbers: Json) -> list[str]:
    """Say what the largest pair makes that neither cause makes alone."""
    pairs = [p for p in numbers.get("pairs") or () if _bounds(p, "joint")[0] > 0.0]
    if "pairs" not in numbers:
        return []
    if not pairs or pairs[0]["joint"] < LEAST_FINDING:
        return ["No pair that was tried makes 0.5 % of the variance."]
    first, second = (_named({"name": n, "kind": ""}) for n in pairs[0]["names"])
    own, joint = pairs[0]["second_order"], pairs[0]["joint"]
    return [
        f"Where {first} meets {second}, {_share(own)} of the variance arises that neither makes "
        f"alone ({_share(joint)} with all other causes)."
    ]


def _with_error(value: float, error: float) -> str:
    """Write a share of the variance with its error."""
    digits = 0 if error >= 0.01 else 1
    return f"{100.0 * value:.{digits}f} ± {100.0 * error:.{digits}f} %"


def _share(value: float) -> str:
    """Write a share of the variance; what is too small to matter is only bounded."""
    if value < 5e-4:
        return "less than 0.1 %"
    return f"{100.0 * value:.{0 if abs(value) >= 0.1 else 1}f} %"


def _tail(rows: Sequence[Json], numbers: Json) -> list[str]:
    """Say where the tail ranks differently from the variance."""
    lines = []
    frozen = [row for row in rows if row.get("std_if_frozen") is not None]
    frozen = [row for row in frozen if row.get("std_reduction") is not None]
    if frozen:
        by_std = max(frozen, key=lambda row: _value(row, "std_reduction"))
        by_p95 = max(frozen, key=lambda row: _value(row, "p95_reduction"))
        gap = _value(by_p95, "p95_reduction") - _value(by_std, "p95_reduction")
        error = half_width(by_p95, "p95_reduction") + half_width(by_std, "p95_reduction")
        if by_p95["name"] != by_std["name"] and gap > max(error, LEAST_FINDING):
            lines.append(
                f"The tail ranks differently: {short_label(by_p95['name'], by_p95['kind'])} is "
                f"what to fix for p95, {short_label(by_std['name'], by_std['kind'])} for the "
                "standard deviation."
            )
    apart = set(numbers.get("tail_differs") or ())
    shown = [row for row in rows if row["kind"] == "kernels" and row["name"] in apart]
    shown.sort(key=lambda row: _value(row, "covariance_share") - _value(row, "tail_share"))
    for sign, word in ((1.0, "more"), (-1.0, "less")):
        named = ", ".join(
            f"{short_label(row['name'], 'kernels')} ({format_share(row['tail_share'], 2)} against "
            f"{format_share(row['covariance_share'], 2)})"
            for row in shown
            if sign * (row["tail_share"] - row["covariance_share"]) > 0.0
        )
        if named:
            lines.append(f"In the slowest 5 % of steps {word} than in the spread: {named}.")
    return lines


def rank_warnings(numbers: Json) -> list[str]:
    """Say how far the ranking can be trusted.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_rank`` returns.
    """
    if numbers.get("quick"):
        unknown = [row for row in causes(numbers) if row.get("total_order") is None]
        text = "--quick: one run; a kernel class's share of the variance is an upper bound, "
        text += "an effect's has no interval, and nothing is frozen"
        names = ", ".join(short_label(row["name"], row["kind"]) for row in unknown)
        return [f"{text}; unknown: {names}" if names else text]
    wide = []
    for row in causes(numbers):
        share, error = _value(row, "total_order"), half_width(row, "total_order")
        if error > 1.05 * (HALF_WIDTH if share < 0.5 else WIDE_HALF_WIDTH):
            wide.append(
                f"{short_label(row['name'], row['kind'])} {100.0 * share:.0f} ± "
                f"{100.0 * error:.{0 if error >= 0.1 else 1}f} %"
            )
    if not wide:
        return []
    return [
        f"wide intervals: {', '.join(wide)} of the variance; aimed at is ± {100 * HALF_WIDTH:.0f} "
        f"% (± {100 * WIDE_HALF_WIDTH:.0f} % above one half), so order these with care"
    ]
