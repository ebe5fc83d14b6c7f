"""What a ranking looks like in a terminal.

Built from the mapping that the JSON is made of, as in `prism.present.views`: one table of kernel
classes and effects, then what it means in words. Nothing is computed here beyond the choice of a
unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism.analyses.texts.causes import short_label
from prism.analyses.texts.rank import TARGETS, causes, faster_text, findings, half_width, pair_label
from prism.common.text import format_duration, format_like
from prism.present.views.tables import bold

Json = Mapping[str, Any]

WIDTH = 110
MOST_ROWS, MOST_PAIRS = 24, 10
SMALL, SMALL_TIME, SMALL_CHANGE = 1e-3, 0.01, 0.01
"""Shares of the variance and of the time, and changes, below which a cause is only named [1]."""
LONGEST_LABEL = 28

_OTHERS = (
    ("_cut", "std_if_cut", "If its tail were cut at its own p95, %"),
    ("_faster", "std_if_faster", "If it took {faster} less time, %"),
)


def rank_view(numbers: Json) -> RenderableType:
    """Lay out a ranking.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_rank`` returns, the JSON of ``prism rank``.

    Returns
    -------
    rich.console.RenderableType
        The table, a line per column that is not plain, and what would help.
    """
    rows = causes(numbers)
    shown = [row for row in rows if _matters(row)][:MOST_ROWS]
    # where nothing varies the table would be empty: all of it then
    shown = shown or rows[:MOST_ROWS]
    left_out = [row["label"] for row in rows if row not in shown]
    parts: list[RenderableType] = [
        *_head(numbers),
        "",
        _table(shown, bool(numbers.get("quick"))),
    ]
    if left_out:
        text = f"and {len(left_out)} more of no weight: {', '.join(left_out)}"
        parts.append(_wrapped(text))
    for suffix, made, title in _OTHERS:
        tried = [row for row in rows if row.get(made) is not None]
        if tried:
            title = title.format(faster=faster_text(numbers))
            parts += ["", bold(title), _changes(tried, suffix)]
    parts += _together(numbers)
    parts += ["", *(_wrapped(line) for line in _legend(numbers))]
    lines = findings(numbers)
    if lines:
        parts += ["", bold("In words"), *(_wrapped(f"- {line}") for line in lines)]
    if numbers.get("wall_seconds") is not None:
        parts += ["", f"in all {format_duration(numbers['wall_seconds'], 0.1)}"]
    return Group(*parts)


def _head(numbers: Json) -> list[RenderableType]:
    """Say what is ranked, and how much there is to explain."""
    what = TARGETS[numbers["target"]]
    head = f": what makes the {what} vary"
    if numbers.get("seed") is not None:
        head += f", seed {numbers['seed']}"
    mean, std = numbers["mean"], numbers["std"]
    fine = max(0.05 * std, 1e-5 * abs(mean))

    def small(seconds: float) -> str:
        return format_like(seconds, mean, 0.0999 * seconds if seconds > 0 else 1e-3 * abs(mean))

    text = f"mean {format_like(mean, mean, fine)}, p95 {format_like(numbers['p95'], mean, fine)}, "
    text += f"standard deviation {small(std)}"
    if std and numbers.get("between_cluster_std") is not None:
        text += (
            f": {small(numbers['within_cluster_std'])} within a cluster draw, "
            f"{small(numbers['between_cluster_std'])} between cluster draws"
        )
    return [bold(str(numbers["job"]), head), _wrapped(text)]


def _matters(row: Json) -> bool:
    """Tell whether a cause is worth a line of its own."""
    if any((row.get(k) or 0.0) >= SMALL_TIME for k in ("critical_path_share", "covariance_share")):
        return True
    if row.get("total_order") is None:
        return True
    changes = ("mean_reduction", "std_reduction", "p95_reduction")
    if any(abs(row.get(key) or 0.0) >= SMALL_CHANGE for key in changes):
        return True
    return bool(row["total_order"] >= SMALL)


def _table(rows: Sequence[Json], quick: bool) -> Table:
    """Lay out the causes, all figures in percent."""
    frozen = any(row.get("std_if_frozen") is not None for row in rows)
    means = any(row.get("mean_reduction") is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("all figures\nin percent", no_wrap=True)
    titles = ["own\nCV", "path\ntime"]
    titles += ["variance\nat most"] if quick else ["variance\nalone", "\nin all", "95 %\ninterval"]
    titles += ["by time\nspread", "\ntail"]
    if frozen:
        titles += ["if frozen\nmean", "\nstd", "\np95"] if means else ["if frozen\nstd", "\np95"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [_figure(row.get("cv")), _figure(row.get("critical_path_share"))]
        if quick:
            cells.append(_figure(row.get("total_order"), "unknown"))
        else:
            cells += [_figure(row.get("first_order")), _figure(row.get("total_order"))]
            cells.append(_interval(row))
        cells += [_figure(row.get("covariance_share")), _figure(row.get("tail_share"))]
        if frozen:
            cells += [_change(row, "mean_reduction", error=False)] if means else []
            cells += [_change(row, "std_reduction"), _change(row, "p95_reduction")]
        table.add_row(_cut(row["label"]), *cells)
    return table


def _cut(text: str) -> str:
    """Shorten a kernel's own name to what fits; the JSON has it whole."""
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 3] + "..."


def _figure(value: float | None, none: str = "") -> str:
    """Write a share in percent."""
    if value is None:
        return none
    percent = 100.0 * value
    if abs(percent) < 0.05:
        return "<0.1" if percent > 0.0 else "0"
    return f"{percent:.1f}"


def _interval(row: Json) -> str:
    """Write the interval of the total order, which no share leaves [0, 1]."""
    bounds = row.get("total_order_ci")
    if not bounds or None in bounds or not half_width(row, "total_order"):
        return ""
    low, high = (100.0 * min(max(0.0, bound), 1.0) for bound in bounds)
    low_text, high_text = (f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" for x in (low, high))
    return f"{low_text} to {high_text}" if high >= 0.05 else ""


def _change(row: Json, key: str, error: bool = True) -> str:
    """Write a relative change in percent, with half of its interval."""
    value, half = row.get(key), 100.0 * half_width(row, key) * error
    if value is None:
        return ""
    percent = -100.0 * value
    digits = 0 if abs(percent) >= 9.95 or half >= 9.95 else 1
    if digits and abs(percent) < 0.05 and half < 0.05:
        return "0"
    text = f"{percent:+.{digits}f}"
    return f"{text} ±{half:.{digits}f}" if half >= 0.5 * 0.1**digits else text


def _changes(rows: Sequence[Json], suffix: str) -> Table:
    """Lay out what another intervention would change, the largest first."""
    keys = {f"std_reduction{suffix}": "std", f"p95_reduction{suffix}": "p95"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for title in keys.values():
        table.add_column(title, justify="right", no_wrap=True)
    first = next(iter(keys))
    for row in sorted(rows, key=lambda row: -abs(row.get(first) or 0.0))[:8]:
        table.add_row(_cut(row["label"]), *(_change(row, key) for key in keys))
    return table


def _together(numbers: Json) -> list[RenderableType]:
    """Lay out what pairs make only together, and through which classes effects act."""
    if not numbers.get("pairs"):
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for title in ("these two", "and others", "95 %\ninterval"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = [pair for pair in numbers["pairs"] if pair["joint"] >= SMALL][:MOST_PAIRS]
    for pair in shown:
        interval = _interval({"total_order_ci": pair["joint_ci"]})
        table.add_row(pair_label(pair), _figure(pair["second_order"]),
                      _figure(pair["joint"]), interval)  # fmt: skip
    lines: list[RenderableType] = []
    for effect, classes in numbers["through_class"].items():
        largest = sorted(classes.items(), key=lambda item: -abs(item[1]))
        told = [f"{short_label(name, 'kernels')} {_figure(share)}" for name, share in largest
                if abs(share) >= SMALL_TIME]  # fmt: skip
        lines.append(_wrapped(f"- {short_label(effect, 'effects')}: {', '.join(told)}"))
    rest = len(numbers["pairs"]) - len(shown)
    return [
        "", bold("Only where both meet, % of the variance"),
        *([table] if shown else []), *([f"and {rest} more of no weight"] if rest else []), "",
        bold("The classes whose time an effect acts through, % of what it makes"), *lines,
    ]  # fmt: skip


def _legend(numbers: Json) -> list[str]:
    """Explain the columns."""
    quick = bool(numbers.get("quick"))
    lines = []
    if not quick:
        lines.append(
            "variance: the share that a cause makes alone, and in all, with what it makes together "
            "with others. A kernel class stands there for its own noise; what it shares with "
            "others is in the rows of the effects."
        )
    lines.append(
        "by time: whatever the cause, how much of the spread of steps, and of the excess of the "
        "slowest 5 %, passed through this class's time on the critical path; each sums to 100."
    )
    if not quick:
        lines.append(
            "if frozen: the change where a cause is held at its median, ± half of its 95 % "
            "interval. A frozen kernel class has neither its own noise nor the effects that act on "
            "it; a frozen effect acts on no kernel."
        )
    if numbers["target"] == "time_to_train":
        lines.append("time on path, spread and tail are those of one step.")
    return lines


def _wrapped(text: str) -> RenderableType:
    """Text that breaks at the width of the table."""
    import textwrap

    # a number keeps its unit
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "))
