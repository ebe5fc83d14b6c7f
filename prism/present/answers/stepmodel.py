"""What a model of step times and a calibrated job say, as parts of the answer of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prism.common.text import format_count, format_duration, format_share, plural
from prism.present.answers.times import std_figure
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    change,
    count,
    duration,
    error,
    pairs_table,
    share,
    words,
)
from prism.present.tables import Rule

Parts = tuple[list[str], tuple[Rule, ...], list[Table]]
"""What follows the subject, findings as rules, and tables."""

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
    times = step_time_rows(numbers["step_time"])
    if round(numbers["n_effective"]) < numbers["n"]:
        effective = Figure(numbers["n_effective"], f"{numbers['n_effective']:.1f}")
        times.append(("effective sample size", effective))
    return head, STEPS, [pairs_table("Step time", times), _step_effects(numbers)]


def step_time_rows(step: Json) -> list[tuple[str, Cell]]:
    """Write mean, standard deviation and percentiles of step times."""
    mean = step["mean"]
    fine = max(0.02 * (step["p95"] - step["p5"]), 1e-5 * abs(mean))
    first: tuple[str, Cell] = ("mean", duration(mean, fine, mean))
    if step.get("mean_se") is not None:
        text = f"{words(first[1])} ± {words(error(1.96 * step['mean_se'], mean))}"
        first = "mean, ± 95 %", Figure(mean, text)
    return [
        first, ("standard deviation", std_figure(step)),
        *((f"p{q}", duration(step[f"p{q}"], fine, mean)) for q in (5, 50, 95, 99)),
    ]  # fmt: skip


def _largest(numbers: Json, key: str) -> dict[str, Cell]:
    """Name the part with the largest share of a variance."""
    effects = numbers["effects"]
    name = max(effects, key=lambda name: effects[name][key] or 0.0)
    none = name == "drift" and not _drifts(numbers)
    return {
        "share": share(effects[name][key]), "effect": STEP_EFFECTS[name],
        "none": ", which is statistically indistinguishable from 0" if none else "",
    }  # fmt: skip


def _drifts(numbers: Json) -> bool:
    """Whether there is a drift that noise would not show as well."""
    memory = numbers["drift_memory"]
    return bool(memory["tau_s"] and memory.get("no_drift_p_value", 0.0) <= SIGNIFICANT)


def _stalls(numbers: Json) -> dict[str, Cell]:
    found = numbers["stalls"]
    low, high = found["rate_per_h_ci"]
    return {
        "n": count(found["n"], "stall"), "mean": duration(found["mean_s"]),
        "rate": f"{found['rate_per_h']:.3g} per hour (90 % interval {low:.3g} to {high:.3g})",
        "p95": duration(found["p95_s"]), "beyond": f"{found['beyond']:.3g}",
    }  # fmt: skip


def _memory(numbers: Json) -> dict[str, Cell]:
    found = numbers["drift_memory"]
    ends = " to ".join(map(format_duration, found["ci"] or ()))
    return {"tau": duration(found["tau_s"]), "ci": f" (90 % interval {ends})" if ends else ""}


def _beginning(numbers: Json) -> dict[str, Cell]:
    found, n = numbers["beginning"], numbers["beginning"]["steps"]
    return {
        "steps": count(n, "step"), "adds": plural(n, "adds", "add"),
        "mean": duration(found["mean_s"]),
        "std": f" ± {format_duration(found['std_s'])}" if numbers["runs"] > 1 else "",
        "stalls": count(numbers["stalls"]["in_beginning"], "stall"),
    }  # fmt: skip


def _offset(numbers: Json) -> dict[str, Cell]:
    found = numbers["offset"]
    skips = f", without the first {format_count(found['skips'], 'step')}" if found["skips"] else ""
    return {"skips": skips, "mean": duration(found["mean_s"]), "std": duration(found["std_s"])}


STEPS = (
    Rule("largest_share_of_step", "answer",
         lambda n: any(e["share_of_step"] for e in n["effects"].values()),
         "Variance of a step time: {share} {effect}{none}.",
         lambda n: _largest(n, "share_of_step")),
    Rule("largest_share_of_run", "answer",
         lambda n: any(e["share_of_run"] for e in n["effects"].values()),
         "Variance of a run's time: {share} {effect}{none}.",
         lambda n: _largest(n, "share_of_run")),
    Rule("stalls", "info", lambda n: n["stalls"]["n"],
         "{n}: {rate}, mean {mean}, p95 {p95} (steps of more than {beyond} times the level around "
         "them).", _stalls),
    Rule("work_by_step", "info", lambda n: n["work_by_step"]["found"],
         "Work differs by step, alike in every run (CV {cv}).",
         lambda n: {"cv": format_share(n["work_by_step"]["cv"])}),
    Rule("drift_memory", "info", _drifts, "Correlation time of the drift: {tau}{ci}.", _memory),
    Rule("beginning", "info", lambda n: n["beginning"]["steps"],
         "The first {steps} of a run {adds} {mean}{std}, with {stalls}.", _beginning),
    Rule("offset", "info", lambda n: n["offset"]["mean_s"] or n["offset"]["skips"],
         "Measured totals are the sum of the steps{skips} plus {mean} ± {std}.", _offset),
)  # fmt: skip


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
    times = ["p50", "p95"]
    groups = ["measured"] * 2 + ["error of the job"] * 2
    columns = (Column(right=False), *map(Column, ("GPUs", "microbatches", "steps", "runs")),
               *map(Column, times * 2, groups))  # fmt: skip
    rows = tuple(
        (s["job"], count(s["world_size"]), count(s["microbatches"]), count(s["n"]),
         count(s["runs"]), *(duration(s[key], 1e-4 * s["p50"], s["p50"]) for key in times),
         *(change(s[f"{key}_error"]) for key in times))
        for s in sizes
    )  # fmt: skip
    heads = (Column(right=False), Column("factor"), Column("90 % interval"), Column("from library"))
    factors = tuple(_factor(label, numbers["factors"][name]) for name, label in FACTORS.items())
    return [], CALIBRATED, [
        Table("Sizes", columns, rows),
        Table(f"Factors on {numbers['library']}", heads, factors),
    ]  # fmt: skip


def _factor(label: str, found: Json) -> tuple[Cell, ...]:
    low, high = found["ci"]
    factor = Figure(found["value"], f"{found['value']:.3g}")
    return label, factor, f"{low:.3g} to {high:.3g}", share(found["library_share"])


def _shared(numbers: Json) -> dict[str, Cell]:
    """Write what all ranks share in a step."""
    step = numbers["step"]
    parts = [
        f"{format_share(step['relative'])} of the step" if step["relative"] else "",
        f"{format_duration(step['fixed_s'])} of any step" if step["fixed_s"] else "",
    ]
    lasts = step["correlation_time_s"] > min(size["p50"] for size in numbers["sizes"])
    time = f", correlation time {format_duration(step['correlation_time_s'])}" if lasts else ""
    return {"shared": " and ".join(filter(None, parts)), "time": time}


def _stalls_by(numbers: Json) -> dict[str, Cell]:
    """Write how stalls of the job and of its nodes come."""
    found = numbers["stalls"]
    units = {"job_rate_per_hour": "per hour", "node_rate_per_hour": "per hour and node"}
    rates = (f"{found[key]:.3g} {unit}" for key, unit in units.items() if found[key])
    return {
        "n": count(found["n"], "stall"), "rates": ", and ".join(rates),
        "mean": duration(found["mean_s"]), "longest": duration(found["longest_s"]),
    }  # fmt: skip


CALIBRATED = (
    Rule("model_error", "answer", lambda n: True,
         "Calibrated job against measured step times, largest error: p50 {p50}, p95 {p95}.",
         lambda n: {p: change(max((size[f"{p}_error"] for size in n["sizes"]), key=abs))
                    for p in ("p50", "p95")}),
    Rule("step_effect", "info", lambda n: n["step"]["relative"] or n["step"]["fixed_s"],
         "Standard deviation that all ranks share in a step: {shared}{time}.", _shared),
    Rule("stalls", "info", lambda n: n["stalls"]["n"],
         "{n}: {rates}; mean {mean}, longest {longest}.", _stalls_by),
)  # fmt: skip


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
