"""What a replay and a validation look like in a terminal.

Built from the same mappings that the JSON is made of, as in `prism.present.views`. What a summary
lacks is left out. Nothing is computed here beyond the choice of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism.common.text import format_count, format_duration, format_like
from prism.present.views.tables import bold, lines_view, rows_view, table_view

Json = Mapping[str, Any]

MOST_CAUSES = 8
WORTH_SHOWING = 1.0005
"""Slowdown below which a cause is only counted."""
SIGNIFICANT = 0.05
_BASELINES = (
    ("copy", "copy of the training"), ("line", "line in microbatches"),
    ("independent", "independent sampling"),
)  # fmt: skip


def replay_view(summary: Json) -> RenderableType:
    """Lay out what a replay found.

    Parameters
    ----------
    summary : mapping
        What ``summarize_replay`` returns, the JSON of ``prism replay``.

    Returns
    -------
    rich.console.RenderableType
        Measured and replayed steps, the straggler-free step, and where the slowdown comes from.
    """
    mean = summary.get("measured_mean") or summary.get("replayed_mean") or 1.0
    fine = 1e-4 * mean
    rows = []
    for key, title in (
        ("measured_mean", "measured step, mean"),
        ("replayed_mean", "replayed step, mean"),
        ("ideal_mean", "ideal step: every effect at 1, stages as unequal as they are"),
    ):
        if summary.get(key) is not None:
            rows.append((title, format_like(summary[key], mean, fine)))
    for key, title in (
        ("mean_error", "replayed against measured, on average"),
        ("max_abs_error", "replayed against measured, largest error of a step"),
    ):
        if summary.get(key) is not None:
            sign = "+" if key == "mean_error" else ""
            rows.append((title, _percent(summary[key], sign)))
    for key, title in (
        ("slowdown_same_work", "slowdown over the ideal step"),
        ("slowdown", "slowdown over one with equal stages, no launch gaps (as published)"),
    ):
        if summary.get(key) is not None:
            rows.append((title, f"{summary[key]:.4f}"))
    if summary.get("edges_recorded") is not None:
        text = f"{format_count(summary['edges_recorded'])} recorded"
        if summary.get("edges_inferred") is not None:
            text += f", {format_count(summary['edges_inferred'])} inferred"
        rows.append(("edges of the graph", text))
    n_steps = summary.get("steps")
    title = f"Replay of {n_steps} step{'s' if n_steps != 1 else ''}"
    parts: list[RenderableType] = [bold(title), "", rows_view(rows)]
    for key, title, word in (
        ("by_op_kind", "Slowdown that goes with one kind of op at its mean", ""),
        ("by_stage", "... with one stage at its mean", "stage"),
        ("by_worker", "... with one worker at its mean", ""),
    ):
        parts += _parts_of_slowdown(title, summary.get(key), word)
    spans = summary.get("gpu_spans")
    if spans:
        parts += ["", table_view("GPU spans", [_flat(row) for row in spans])]
    parts += lines_view("Notes", summary.get("notes"))
    return Group(*parts)


def _parts_of_slowdown(title: str, found: Any, word: str = "") -> list[RenderableType]:
    """List causes by what the step would gain without them, the largest first."""
    pairs = [(name, value) for name, value in _named_values(found, word) if value is not None]
    if not pairs:
        return []
    pairs.sort(key=lambda pair: -pair[1])
    n_shown = max(1, min(MOST_CAUSES, sum(value >= WORTH_SHOWING for _, value in pairs)))
    rows = [(name, f"{value:.4f}") for name, value in pairs[:n_shown]]
    if len(pairs) > n_shown:
        n_others = len(pairs) - n_shown
        name = f"{n_others} other{'s' if n_others > 1 else ''}"
        rows.append((name, f"up to {pairs[n_shown][1]:.4f}"))
    return ["", bold(title), rows_view(rows)]


def _named_values(found: Any, word: str) -> Iterator[tuple[str, float | None]]:
    """Names and values of a mapping, or of records with one value each."""
    if isinstance(found, Mapping):
        yield from ((f"{word} {name}".strip(), value) for name, value in found.items())
        return
    for record in found or ():
        keys = [key for key in record if key != "slowdown"]
        words = {"dp_rank": "replica", "op_kind": ""}
        name = ", ".join(f"{words.get(key, key)} {record[key]}".strip() for key in keys)
        yield name, record.get("slowdown")


def _flat(row: Any) -> dict[str, Any]:
    """Write one record of a table."""
    out = {}
    for key, value in row.items():
        if isinstance(value, float):
            value = _percent(value, "+") if key.endswith("error") else format_duration(value)
        out[key.replace("_", " ")] = value
    return out


# -------------------------------------------------------------------------------- validation
def validation_view(summary: Json) -> RenderableType:
    """Lay out how well a prediction agrees with measurements.

    Parameters
    ----------
    summary : mapping
        What ``summarize_validation`` returns, the JSON of ``prism validate``.

    Returns
    -------
    rich.console.RenderableType
        The prediction beside the baselines and the floor, and a verdict in words.
    """
    n, head = f"{format_count(summary['n_measured'])} measured", ""
    if summary.get("n_effective") is not None:
        head += f", worth {summary['n_effective']:.1f} independent ones"
    if summary.get("n_train"):
        head += f"; {format_count(summary['n_train'])} to train on"
    if summary.get("dependence"):
        head += f"; dependence: {summary['dependence']}"
    if summary.get("seed") is not None:
        head += f"; seed {summary['seed']}"
    parts: list[RenderableType] = [bold(n, head), "", _comparison(summary), ""]
    parts += [Text(line) for line in verdict(summary)]
    parts += lines_view("Notes", summary.get("notes"))
    return Group(*parts)


def _comparison(summary: Json) -> Table:
    """Lay out the prediction and the baselines, one column each."""
    baselines = summary.get("baselines") or {}
    columns = {"prediction": summary}
    for key, title in _BASELINES:
        if baselines.get(key):
            columns[title] = baselines[key]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    refit = summary.get("ks_p_value_refit")
    for key, title in (
        ("ks", "KS distance"),
        ("ks_p_value", f"  p-value, {'refit' if refit else 'no refit'} in simulation"),
        ("ks_aligned", "  medians aligned"),
        ("wasserstein", "Wasserstein distance"),
        ("mean_error", "error of the mean"),
        ("p50_error", "error of p50"),
        ("p95_error", "error of p95"),
        ("p95_error_same_n", "  as so few would show it"),
        ("p99_error", "error of p99"),
        ("cv_ratio", "CV, predicted / measured"),
    ):
        if any(numbers.get(key) is not None for numbers in columns.values()):
            table.add_row(title, *(_figure(key, numbers.get(key)) for numbers in columns.values()))
    return table


def _figure(key: str, value: float | None) -> str:
    """Write one figure of a comparison."""
    if value is None:
        return ""
    if key == "wasserstein":
        return format_duration(value, 0.01 * value if value > 0 else None)
    return _percent(value, "+") if "_error" in key else f"{value:.3f}"


def verdict(summary: Json) -> list[str]:
    """Say in words whether the prediction can be told from the measurement.

    Parameters
    ----------
    summary : mapping
        What ``summarize_validation`` returns.

    Returns
    -------
    list of str
        One sentence each: KS, then p95 against the floor and what the measurement can tell.
    """
    lines = []
    ks, p_value, critical = (summary.get(k) for k in ("ks", "ks_p_value", "ks_critical_5pct"))
    if p_value is not None:
        told = p_value <= SIGNIFICANT
        lines.append(
            f"The prediction {'can' if told else 'cannot'} be told from the measurement "
            f"(p = {p_value:.3g}, by simulation; KS {ks:.3f})."
        )
    elif ks is not None and critical is not None:
        side = "above" if ks > critical else "not above"
        lines.append(
            f"KS {ks:.3f} is {side} {critical:.3f}, what a known law exceeds in 5 % of cases; "
            "no p-value without --bootstrap."
        )
    if ks is not None and summary.get("ks_floor") is not None:
        lines.append(
            f"Training and measured part lie {summary['ks_floor']:.3f} apart themselves (KS), the "
            f"prediction {ks:.3f}."
        )
    return lines + _p95_verdict(summary)


def _p95_verdict(summary: Json) -> list[str]:
    """Hold the error of p95 against the floor and against what the measurement can tell."""
    error, floor, se = (summary.get(k) for k in ("p95_error", "p95_floor", "p95_measured_se"))
    if error is None:
        return []
    line = f"Its p95 is off by {_percent(error, '+')}"
    if floor is not None:
        side = "within" if abs(error) <= abs(floor) else "beyond"
        line += f", {side} the floor of {_percent(abs(floor))} between the two parts"
    if se is not None:
        side = "within" if abs(error) <= 2.0 * se else "beyond"
        line += f"; {side} two standard errors of the measured one, {_percent(se)} each"
    return [line + "."]


def _percent(value: float, sign: str = "") -> str:
    """Write a relative error, two decimals of a percent, or one digit where it is less."""
    digits = ".2f" if abs(value) >= 1e-4 or abs(value) < 1e-9 else ".1g"
    return f"{100.0 * value:{sign}{digits}} %"
