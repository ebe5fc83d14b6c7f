"""What a comparison says, in words.

From the summary alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prism.common.text import format_count, format_like

Json = Mapping[str, Any]

WORDS = {"step_time": "step", "time_to_train": "run"}
_PLANNED = ("p50", "p95", "std")
_SHORT = {"std": "spread"}
LANES = 64  # replicates of a cluster


def in_words(numbers: dict[str, Any]) -> dict[str, Any]:
    """Add a ``verdict`` to a summary: what differs, what does not, and what it would take."""
    verdict = [
        line for name, quantity in numbers["quantities"].items()
        for line in _of_quantity(name, quantity, numbers)
    ]  # fmt: skip
    return {**numbers, "verdict": verdict}


def _of_quantity(name: str, quantity: Json, numbers: Json) -> list[str]:
    """Say what one quantity shows."""
    figures, effect = quantity["figures"], numbers["effect"]
    single = {quantity["units"]["a"], quantity["units"]["b"]} == {"steps"}
    who = f"the {WORDS[name]} of {'run B' if single else 'B'}"  # no more than these two are known
    lines = [
        _time(who, key, figures[key], effect) for key in ("p50", "p95") if figures[key]["verdict"]
    ]
    if figures["std"]["verdict"]:
        lines.append(_spread(WORDS[name], figures["std"], effect))
    lines.append(_distribution(WORDS[name], quantity["ks"]))
    return [*lines, *_plan(quantity, effect)]


def _time(who: str, key: str, row: Json, effect: float) -> str:
    """Say how a percentile differs."""
    low, high = row["relative_ci"]
    word = "slower" if row["relative"] > 0 else "faster"
    change = f"{_percent(abs(row['relative']), high - low)} {word}"
    p = p_text(row["p_adjusted"])
    if row["verdict"] == "different":
        small = max(abs(low), abs(high)) < effect
        less = f", though by less than {share_text(effect)}" if small else ""
        return f"{who} is {change} at {key} ({_span(low, high)}), {p}{less}"
    if row["verdict"] == "same":
        return f"{who} is the same at {key} to within {share_text(effect)} ({_signed(low, high)})"
    return f"{who} is not shown to differ at {key}: {change}, {_signed(low, high)}, {p}"


def _spread(word: str, row: Json, effect: float) -> str:
    """Say how the spread differs."""
    low, high = row["relative_ci"]
    more = "more" if row["relative"] > 0 else "less"
    size = f"{_percent(abs(row['relative']), high - low)} {more}"
    what = f"the spread of the {word} (standard deviation)"
    if row["verdict"] == "different":
        return f"{what} is different: {size} ({_span(low, high)}), {p_text(row['p_adjusted'])}"
    if row["verdict"] == "same":
        return f"{what} is the same to within {share_text(effect)} ({_signed(low, high)})"
    return f"{what} is not shown to differ: {size}, {_signed(low, high)}"


def _distribution(word: str, ks: Json) -> str:
    """Say whether the distributions differ as a whole."""
    if ks["p_value"] is None:
        return (
            f"the {word}'s distribution as a whole: KS distance {ks['distance']:.3f}, not tested: "
            f"{ks['why_not']}"
        )
    finds = "differ" if ks["verdict"] == "different" else "are not shown to differ"
    p = p_text(ks["p_adjusted"])
    return f"the {word}'s distributions as a whole {finds}: KS {ks['distance']:.3f}, {p}"


def _plan(quantity: Json, effect: float) -> list[str]:
    """Say what it takes to see the effect."""
    kind = unit_kind(quantity)
    plans = {key: quantity["figures"][key]["needed"] for key in _PLANNED}
    counts = [
        f"{_SHORT.get(key, key)} {count_text(plan['0.8'], kind)} ({count_text(plan['0.9'], kind)})"
        for key, plan in plans.items() if plan is not None
    ]  # fmt: skip
    if not counts:
        return []
    unit = {"runs": "runs", "clusters": "replicates"}.get(kind, "steps")
    sizes = [
        quantity["n"][side] / quantity["n_units"][side]
        for side in "ab" if quantity["units"][side] == "runs"
    ]  # fmt: skip
    if sizes and sizes[0] > 1:
        unit = f"runs of {format_count(sum(sizes) / len(sizes))} steps"
    lines = [
        f"to see {share_text(effect)} in 80 % (90 %) of cases it takes, on each side, this many "
        f"{unit}: {', '.join(counts)}"
    ]
    share = quantity["between_share"]
    if kind == "runs" and share is not None and sizes[0] > 1:
        part = f"{100 * share:.0f} % of the variance of the mean goes with whole runs"
        lines.append(
            f"runs limit, not steps: {part}; more runs help, longer ones hardly"
            if share > 0.5 else f"steps limit more than runs: {part}; longer runs help as well"
        )  # fmt: skip
    return lines


def unit_kind(quantity: Json) -> str:
    """Name what is counted where more is asked for: steps, runs, or clusters."""
    kinds = quantity["units"]
    return "runs" if "runs" in kinds.values() else str(kinds["a"])


def count_text(count: int | None, kind: str) -> str:
    """Write how many units are needed, rounded up to three digits; clusters as replicates."""
    if count is None:
        return "over 10^9"
    value = count * LANES if kind == "clusters" else count
    digits = max(0, math.floor(math.log10(value)) - 2)
    return format_count(math.ceil(value / 10**digits) * 10**digits)


def p_text(p: float | None) -> str:
    """Write a p-value.

    Examples
    --------
    >>> p_text(0.0004), p_text(0.0312), p_text(0.4)
    ('p < 0.001', 'p = 0.031', 'p = 0.40')
    """
    if p is None:
        return ""
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def share_text(share: float) -> str:
    """Write an effect in percent, as short as it is."""
    return f"{100.0 * share:.10g} %"


def _percent(value: float, width: float) -> str:
    """Write a size in percent with the digits that its interval shows."""
    return f"{100.0 * value:.{_digits(width)}f} %"


def _digits(width: float) -> int:
    """Decimals of a percentage whose interval is that wide [1]."""
    if not math.isfinite(width) or width <= 0.0:
        return 2
    return max(0, min(5, 1 - math.floor(math.log10(100.0 * width))))


def percent_span(row: Json) -> str:
    """Write a relative difference with its interval."""
    if row["relative"] is None:
        return ""
    low, high = row["relative_ci"]
    digits = _digits(high - low)
    return f"{100 * row['relative']:+.{digits}f} % ({_signed(low, high)})"


def _span(low: float, high: float) -> str:
    """Write the interval of a difference, without a sign where both ends have the same."""
    if low * high <= 0.0:
        return _signed(low, high)
    ends = sorted((abs(low), abs(high)))
    digits = _digits(high - low)
    return f"{100 * ends[0]:.{digits}f} to {100 * ends[1]:.{digits}f} %"


def _signed(low: float, high: float) -> str:
    """Write an interval with signs."""
    digits = _digits(high - low)
    return f"{100 * low:+.{digits}f} to {100 * high:+.{digits}f} %"


def difference_text(row: Json, is_share: bool) -> str:
    """Write an absolute difference with its interval."""
    if row["difference_ci"] is None:
        return ""
    low, high = row["difference_ci"]
    if is_share:
        return f"{100 * row['difference']:+.2g} % of the mean"
    half, size = 0.5 * (high - low), abs(row["difference"])
    sign = "+" if row["difference"] >= 0 else "-"
    like = max(size, half)
    if like == 0.0:
        return "0 s"
    if half < 1e-9 * like:  # nothing varies
        return f"{sign}{format_like(size, like, 1e-4 * size)}"
    fine = 0.1 * half if half > 0.0 else 1e-4 * like
    return f"{sign}{format_like(size, like, fine)} ± {format_like(half, like, fine)}"
