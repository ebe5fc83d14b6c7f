"""What a whole run looks like in a terminal: when it is done, what delays it, what makes it vary.

Built from an estimate's summary, so that the table and the JSON cannot disagree. Nothing is
computed here beyond the choice of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from prism.common.text import format_count, format_duration, format_share

Json = Mapping[str, Any]
SMALL_DELAY, SMALL_SHARE = 1e-4, 1e-3
"""Shares of the run and of its variance that a term is left out below, where both are less [1]."""
WORDS = {
    "slow_steps": "steps slower than the ideal",
    "step_noise": "steps' own noise",
    "run_effect": "differences between runs",
    "model_error": "error of the model",
    "congestion": "congestion",
    "fail_slow": "fail-slow episodes",
    "drift": "drift",
    "stalls": "stalls",
    "evaluations": "evaluations",
    "checkpoints": "checkpoints",
    "lost_work": "work lost to failures",
    "restarts": "detection and restarts",
    "spares": "waiting for spare nodes",
}


def run_rows(summary: Json) -> list[tuple[str, str]]:
    """Say what the run as a whole comes to: label and text."""
    rows = []
    if summary.get("under_way"):
        past = summary["under_way"]
        rows.append((
            "under way", f"{format_count(past['steps'])} steps done in "
            f"{format_duration(past['seconds'])}, part of the time-to-train; steps take "
            f"{past['level'] - 1.0:+.2%} ± {past['level_std']:.2%} of what the job says",
        ))  # fmt: skip
    if summary.get("finish_by"):
        found = summary["finish_by"]
        text = format_share(found["probability"])
        if not found.get("failures_modelled", True):
            text += ", no failures modelled"
        rows.append((f"P(done within {format_duration(found['deadline'])})", text))
    if summary.get("finish_date"):
        probability = format_share(summary["finish_date"]["probability"])
        rows.append((f"done with {probability} by", str(summary["finish_date"]["date"])))
    if summary.get("cost") is not None:
        cost = summary["cost"]
        mean = cost["mean"] if isinstance(cost, Mapping) else cost
        rows.append(("mean cost, in the currency of the price", format_count(mean)))
    if summary.get("ettr") is not None:
        rows.append(("effective training time ratio (ETTR)", format_share(summary["ettr"])))
    if summary.get("failures") is not None:
        rows.append(("failures, mean", f"{summary['failures']:.4g}"))
    return rows + _checkpoint_rows(summary)


def _checkpoint_rows(summary: Json) -> list[tuple[str, str]]:
    """Say how often checkpoints are written, and how often would be best."""
    c = summary.get("checkpoint")
    if not c:
        return []
    rows = [("a checkpoint every", _interval(c["interval"], c["interval_steps"]))]
    if summary.get("best_checkpoint_interval") is not None:
        best = _interval(summary["best_checkpoint_interval"], c["best_interval_steps"])
        rows.append(("best interval", f"{best}; the present one costs "
                     f"{format_duration(c['costs_more'])} more"))  # fmt: skip
    return rows


def _interval(seconds: float, steps: int) -> str:
    return f"{format_duration(seconds)} ({format_count(steps)} step{'s' if steps != 1 else ''})"


def term_table(summary: Json) -> Table | None:
    """Lay out what each term delays the run, and its share of the variance; None without terms."""
    delays, shares = summary.get("delay_by_term") or {}, summary.get("variance_by_term") or {}
    mean = summary["time_to_train"]["mean"] if delays else 0.0
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for title in ("delay, mean", "of the run", "variance"):
        table.add_column(title, justify="right", no_wrap=True)
    for term, delay in delays.items():
        share, short = shares.get(term), abs(delay) < SMALL_DELAY * abs(mean)
        if short and abs(share or 0.0) < SMALL_SHARE:
            continue
        table.add_row(
            WORDS.get(term, term.replace("_", " ")),
            "0" if short else format_duration(delay),
            "<0.01 %" if short else format_share(delay / mean),
            "" if share is None else "<0.1 %" if abs(share) < SMALL_SHARE else format_share(share),
        )
    return table if table.row_count else None
