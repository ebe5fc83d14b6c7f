"""What `prism measure` prints: a table of what was measured, and the state of the machine.

Numbers come from `prism.measuring.command.summarize_measurement` and
`prism.measuring.step.summarize_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from prism.common.text import format_duration, format_share, percent_change
from prism.present.views.tables import table_view

_READINGS = {
    "load_average": ("load average", 1.0, ""),
    "cpu_clock_hz": ("CPU clock", 1e9, " GHz"),
    "cpu_temperature_c": ("CPU temperature", 1.0, " °C"),
    "sm_clock_hz": ("GPU clock", 1e9, " GHz"),
    "memory_clock_hz": ("GPU memory clock", 1e9, " GHz"),
    "temperature_c": ("GPU temperature", 1.0, " °C"),
    "power_w": ("GPU power", 1.0, " W"),
}


def measure_view(numbers: Mapping[str, Any]) -> RenderableType:
    """Lay out the figures of kernels or collectives."""
    rows = [_row(case) for case in numbers["cases"]]
    right = tuple(name for name in (rows[0] if rows else {}) if name != "kernel")
    machine = numbers["machine"]
    title = f"{numbers['kind']} on {machine['device']}, torch {machine['torch']}"
    title += f", seed {numbers['seed']}"
    parts: list[RenderableType] = [table_view(title, rows, right=right), "", *_machine(numbers)]
    calls = [warm["calls"] for warm in numbers["warm_up"]]
    if calls:
        parts.append(f"warm-up: {min(calls)} to {max(calls)} calls of each, not counted")
    if numbers.get("timer_overhead"):
        cost = 1e9 * numbers["timer_overhead"]
        parts.append(f"reading the clock costs {cost:.0f} ns, subtracted from every call")
    if numbers.get("stopped"):
        parts.append(f"stopped {numbers['stopped']}")
    return Group(*parts, *(f"- {note}" for note in numbers["notes"]))


def _row(case: Mapping[str, Any]) -> dict[str, Any]:
    """One line: percentiles, spread, rate, memory and drift."""
    scale, unit = (1e12, "TFLOP/s") if case["rate_units"] == "flop/s" else (1e9, "GB/s")
    row = {
        "kernel": case["label"],
        "n": f"{case['n']:,}",
        "p50": _short(case["p50"]),
        "p95": _short(case["p95"]),
        "p99": _short(case["p99"]),
        "CV": format_share(case["cv"]),
        "rate": f"{case['rate'] / scale:.3g} {unit}",
        "lag 1": "" if case["autocorrelation"] is None else f"{case['autocorrelation']:+.2f}",
        "drift": "" if case["drift"] is None else percent_change(case["drift"]),
        "modes": case["modes"],
    }
    if "slowest_p50" in case:
        row["slowest rank"] = _short(case["slowest_p50"])
    return row


def _short(seconds: float) -> str:
    return format_duration(float(f"{seconds:.4g}"))


def _machine(numbers: Mapping[str, Any]) -> list[str]:
    """Say what state the machine was in."""
    machine = numbers["machine"]
    lines = [f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"]
    readings = []
    for name, (word, scale, unit) in _READINGS.items():
        if name in numbers["states"]:
            low, high = (x / scale for x in numbers["states"][name])
            span = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
            readings.append(f"{word} {span}{unit}")
    if readings:
        lines.append("; ".join(readings))
    return lines


def step_view(numbers: Mapping[str, Any]) -> RenderableType:
    """Lay out the figures of a training step."""
    job, time = numbers["job"], numbers["step_time"]
    layout = f"{job['ranks']} ranks, {job['parallel']}"
    if job["parallel"] == "pipeline":
        layout += f" {job['schedule']}"
    rows = [
        {
            "op": op["name"],
            "n": f"{op['n']:,}",
            "p50": _short(op["p50"]),
            "p99": _short(op["p99"]),
            "CV": format_share(op["cv"]),
            "of the step": format_share(op["step_share"]),
        }
        for op in numbers["ops"]
    ]
    title = f"{layout}, {job['microbatches']} microbatches, {job['parameters']:,} parameters"
    title += f", seed {numbers['seed']}"
    table = table_view(title, rows, right=("n", "p50", "p99", "CV", "of the step"))
    lag = time["autocorrelation"]
    whole = (
        f"step: {time['n']:,} steps, mean {_short(time['mean'])}, p50 {_short(time['p50'])}, p95 "
        f"{_short(time['p95'])}, p99 {_short(time['p99'])}, CV {format_share(time['cv'])}"
    )
    memory = "" if lag is None else f"lag-1 correlation {lag:+.2f}"
    if time["drift"] is not None:
        memory += f", drift {percent_change(time['drift'])} over the session"
    return Group(table, "", whole, memory, *_machine(numbers))
