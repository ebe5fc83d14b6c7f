"""What a model of step times and a calibrated job say, as parts of the answer of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.common.text import format_count, format_duration, format_share, plural
from prism.present.answer import (
    Cell,
    Column,
    Figure,
    Finding,
    Table,
    change,
    count,
    duration,
    error,
    pairs_table,
    share,
    words,
)

Json = Mapping[str, Any]
Parts = tuple[list[str], list[Finding], list[Table]]
"""What follows the subject, findings and tables."""

STEP_EFFECTS = {
    "white": "noise of single steps",
    "drift": "slow drift",
    "run": "differences between runs",
}
FACTORS = {
    "compute": "duration of kernels on GPUs",
    "communication": "duration of messages",
    "between_runs": "spread between runs (rank effect)",
    "within_run": "spread within a run (residual, call, microbatch)",
}
SIGNIFICANT = 0.05


# ------------------------------------------------------------------------------- of step times
def steps_parts(numbers: Json) -> Parts:
    """Lay out a model of step times."""
    head = [f"{format_count(numbers['n'], 'step time')} of {format_count(numbers['runs'], 'run')}"]
    if numbers["mean_over"] > 1:
        head.append(f"each the mean of {format_count(numbers['mean_over'], 'step')}")
    findings = _step_findings(numbers)
    times = step_time_rows(numbers["step_time"])
    if round(numbers["n_effective"]) < numbers["n"]:
        effective = Figure(numbers["n_effective"], f"{numbers['n_effective']:.1f}")
        times.append(("effective sample size", effective))
    return head, findings, [pairs_table("Step time", times), _step_effects(numbers)]


def step_time_rows(step: Json) -> list[tuple[str, Cell]]:
    """Write mean, standard deviation and percentiles of step times."""
    mean, std = step["mean"], step["std"]
    fine = max(0.02 * (step["p95"] - step["p5"]), 1e-5 * abs(mean))
    first: tuple[str, Cell] = ("mean", duration(mean, fine, mean))
    if step.get("mean_se") is not None:
        text = f"{words(first[1])} ± {words(error(1.96 * step['mean_se'], mean))}"
        first = "mean, ± 95 %", Figure(mean, text)
    spread = f"{words(error(std, mean))} (CV {format_share(std / mean if mean else 0.0)})"
    return [
        first, ("standard deviation", Figure(std, spread)),
        *((f"p{q}", duration(step[f"p{q}"], fine, mean)) for q in (5, 50, 95, 99)),
    ]  # fmt: skip


def _step_findings(numbers: Json) -> list[Finding]:
    """Say what the spread is made of, what stalls cost, and what else the steps hold."""
    effects, out = numbers["effects"], []
    memory = numbers["drift_memory"]
    drifts = memory["tau_s"] and memory.get("no_drift_p_value", 0.0) <= SIGNIFICANT
    for key, of in (("share_of_step", "a step time"), ("share_of_run", "a run's time")):
        largest = max(effects, key=lambda name: effects[name][key] or 0.0)
        if effects[largest][key]:
            part = f"{words(share(effects[largest][key]))} {STEP_EFFECTS[largest]}"
            if largest == "drift" and not drifts:
                part += ", which is statistically indistinguishable from 0"
            out.append(Finding(f"largest_{key}", f"Variance of {of}: {part}.", "answer"))
    stalls, work = numbers["stalls"], numbers["work_by_step"]
    if stalls["n"]:
        low, high = stalls["rate_per_h_ci"]
        text = f"{format_count(stalls['n'], 'stall')}: {stalls['rate_per_h']:.3g} per hour (90 % "
        text += f"interval {low:.3g} to {high:.3g}), mean {format_duration(stalls['mean_s'])}, p95 "
        text += f"{format_duration(stalls['p95_s'])} (steps of more than {stalls['beyond']:.3g} "
        out.append(Finding("stalls", f"{text}times the level around them)."))
    if work["found"]:
        text = f"Work differs by step, alike in all runs (CV {format_share(work['cv'])})."
        out.append(Finding("work_by_step", text))
    if drifts:
        text = f"Correlation time of the drift: {format_duration(memory['tau_s'])}"
        if memory["ci"]:
            text += f" (90 % interval {' to '.join(map(format_duration, memory['ci']))})"
        out.append(Finding("drift_memory", f"{text}."))
    first, offset = numbers["beginning"], numbers["offset"]
    if first["steps"]:
        more = f" ± {format_duration(first['std_s'])}" if numbers["runs"] > 1 else ""
        text = (
            f"The first {format_count(first['steps'], 'step')} of a run "
            f"{plural(first['steps'], 'adds', 'add')} "
            f"{format_duration(first['mean_s'])}"
        )
        text += f"{more}, with {format_count(stalls['in_beginning'], 'stall')}."
        out.append(Finding("beginning", text))
    if offset["mean_s"] or offset["skips"]:
        skips = (
            f", without the first {format_count(offset['skips'], 'step')}"
            if offset["skips"]
            else ""
        )
        text = f"Measured totals are the sum of the steps{skips} plus "
        text += f"{format_duration(offset['mean_s'])} ± {format_duration(offset['std_s'])}."
        out.append(Finding("offset", text))
    return out


def _step_effects(numbers: Json) -> Table:
    effects = {STEP_EFFECTS.get(name, name): e for name, e in numbers["effects"].items()}
    over = "share of variance"
    columns = (Column("CV"), Column("90 % interval"), Column("of a step", over),
               Column("of a run", over))  # fmt: skip
    return effects_table(effects, ("share_of_step", "share_of_run"), columns)


# ---------------------------------------------------------------------------- of a calibration
def calibrated_parts(numbers: Json) -> Parts:
    """Lay out a calibrated job: how well it meets its sizes, and its factors."""
    sizes = numbers["sizes"]
    worst = {key: max((s[f"{key}_error"] for s in sizes), key=abs) for key in ("p50", "p95")}
    largest = ", ".join(f"{key} {words(change(x))}" for key, x in worst.items())
    text = f"Calibrated job against measured step times, largest error: {largest}."
    times = ["p50", "p95"] * 2
    groups = ["measured"] * 2 + ["error of the job"] * 2
    columns = (Column(right=False), *map(Column, ("GPUs", "microbatches", "steps", "runs")),
               *map(Column, times, groups))  # fmt: skip
    rows = tuple(
        (s["job"], count(s["world_size"]), count(s["microbatches"]), count(s["n"]),
         count(s["runs"]), *(duration(s[key], 1e-4 * s["p50"], s["p50"]) for key in worst),
         *(change(s[f"{key}_error"]) for key in worst))
        for s in sizes
    )  # fmt: skip
    heads = (Column(right=False), Column("factor"), Column("90 % interval"), Column("from library"))
    factors = tuple(_factor(label, numbers["factors"][name]) for name, label in FACTORS.items())
    return [], [Finding("model_error", text, "answer"), *_shared(numbers)], [
        Table("Sizes", columns, rows),
        Table(f"Factors on {numbers['library']}", heads, factors),
    ]  # fmt: skip


def _factor(label: str, found: Json) -> tuple[Cell, ...]:
    low, high = found["ci"]
    factor = Figure(found["value"], f"{found['value']:.3g}")
    return label, factor, f"{low:.3g} to {high:.3g}", share(found["library_share"])


def _shared(numbers: Json) -> list[Finding]:
    """Say what all ranks share in a step, and how stalls come."""
    step, stalls, out = numbers["step"], numbers["stalls"], []
    parts = [
        f"{format_share(step['relative'])} of the step" if step["relative"] else "",
        f"{format_duration(step['fixed_s'])} of any step" if step["fixed_s"] else "",
    ]
    shared = " and ".join(part for part in parts if part)
    if shared:
        text = f"Standard deviation that all ranks share in a step: {shared}"
        if step["correlation_time_s"] > min(row["p50"] for row in numbers["sizes"]):
            text += f", correlation time {format_duration(step['correlation_time_s'])}"
        out.append(Finding("step_effect", f"{text}."))
    if stalls["n"]:
        by_job, by_node = stalls["job_rate_per_hour"], stalls["node_rate_per_hour"]
        rates = [f"{by_job:.3g} per hour" if by_job else "",
                 f"{by_node:.3g} per hour and node" if by_node else ""]  # fmt: skip
        text = (
            f"{format_count(stalls['n'], 'stall')}: {', and '.join(r for r in rates if r)}; mean "
        )
        text += f"{format_duration(stalls['mean_s'])}, longest "
        out.append(Finding("stalls", f"{text}{format_duration(stalls['longest_s'])}."))
    return out


# ------------------------------------------------------------------- of models of all kinds


def interval(ends: Sequence[float | None] | None) -> str | None:
    """Write both ends of an interval of shares; nothing where one is not known."""
    if not ends or None in ends:
        return None
    low, high = (words(share(end)) for end in ends)
    return f"{low} to {high}"


def effects_table(
    effects: Mapping[str, Json], keys: Sequence[str], columns: Sequence[Column]
) -> Table:
    """Lay out effects with their shares; those that are 0 are named below."""
    rows = tuple(
        (label, share(e["cv"]), interval(e["ci"]), *(share(e[key]) for key in keys))
        for label, e in effects.items() if e["cv"] > 0.0
    )  # fmt: skip
    none = [
        label + (f" (CV at most {words(share(e['ci'][1]))})" if e["ci"][1] else "")
        for label, e in effects.items() if not e["cv"] > 0.0
    ]  # fmt: skip
    notes = (f"indistinguishable from 0: {', '.join(none)}",) if none else ()
    heads = (Column(right=False), *columns)
    known = [i for i in range(len(heads)) if any(row[i] is not None for row in rows)]
    kept = tuple(tuple(row[i] for i in known) for row in rows)
    return Table("Effects", tuple(heads[i] for i in known), kept, notes)
