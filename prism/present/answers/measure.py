"""The answer of a measurement of kernels or collectives."""

from __future__ import annotations

from prism import plots
from prism.common.text import format_share
from prism.measuring.command import Measurement
from prism.present.answer import Answer, Errors, Picture
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    brief,
    change,
    count,
    duration,
    lines_table,
    number,
    pairs_table,
    share,
    words,
)
from prism.present.tables import Rule, find

READINGS = {
    "load_average": ("load average", 1.0, ""),
    "cpu_clock_hz": ("CPU clock", 1e9, " GHz"),
    "cpu_temperature_c": ("CPU temperature", 1.0, " °C"),
    "sm_clock_hz": ("GPU clock", 1e9, " GHz"),
    "memory_clock_hz": ("GPU memory clock", 1e9, " GHz"),
    "temperature_c": ("GPU temperature", 1.0, " °C"),
    "power_w": ("GPU power", 1.0, " W"),
}
LAG = "lag 1: rank correlation with the next call; drift: last quarter of the calls over the first"


def measurement_answer(result: Measurement) -> Answer:
    """Make the answer of a measurement of kernels or collectives."""
    numbers = result.figures()
    kind, machine = numbers["kind"], numbers["machine"]
    errors = Errors("as many calls as the table says", "of this machine at this moment")
    picture = Picture(
        "measurement", f"Durations of {kind} over their median",
        lambda: plots.plot_measurement(result),
        "The share of calls that take longer than a multiple of the median.", errors,
    )  # fmt: skip
    made = _cases(numbers), _machine(numbers), lines_table("Notes", numbers["notes"])
    return Answer(
        title=f"Measured durations: {kind}",
        subject=f"{kind} on {machine['device']}",
        head=f", torch {machine['torch']}, seed {numbers['seed']}",
        question=f"How long does {kind} take on {machine['device']}, and how does that vary?",
        findings=find(numbers, RULES),
        tables=tuple(table for table in made if table.rows),
        figures=numbers,
        warnings=tuple(numbers["warnings"]),
        pictures=(picture,),
    )


def _spread(numbers: Json) -> dict[str, Cell]:
    """Name the kernel that varies most."""
    worst = max(numbers["cases"], key=lambda case: case["cv"])
    least, most = min(case["cv"] for case in numbers["cases"]), worst["cv"]
    return {"least": format_share(least), "most": format_share(most), "worst": worst["label"]}


RULES = (
    Rule("spread", "answer", lambda n: len(n["cases"]) > 1,
         "The CV of single calls is {least} to {most}, the largest that of {worst}.", _spread),
    Rule("stopped", "warning", lambda n: bool(n.get("stopped")), "Stopped {stopped}.",
         lambda n: {"stopped": n["stopped"]}),
)  # fmt: skip


def _cases(numbers: Json) -> Table:
    titles = ["n", "p50", "p95", "p99", "CV", "rate", "lag 1", "drift", "modes"]
    if any("slowest_p50" in case for case in numbers["cases"]):
        titles.append("p50, slowest rank")
    rows = tuple(map(_case, numbers["cases"]))
    return Table("Durations", (Column(right=False), *map(Column, titles)), rows, (LAG,))


def _case(case: Json) -> tuple[Cell, ...]:
    scale, unit = (1e12, "TFLOP/s") if case["rate_units"] == "flop/s" else (1e9, "GB/s")
    cells = (
        case["label"], count(case["n"]), *(brief(case[key]) for key in ("p50", "p95", "p99")),
        share(case["cv"]), Figure(case["rate"], f"{case['rate'] / scale:.3g} {unit}"),
        number(case["autocorrelation"], "+.2f"), change(case["drift"]), count(case["modes"]),
    )  # fmt: skip
    return (*cells, brief(case["slowest_p50"])) if "slowest_p50" in case else cells


def _machine(numbers: Json) -> Table:
    machine = numbers["machine"]
    rows: list[tuple[str, Cell]] = [
        ("system", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}")
    ]
    for name, (label, scale, unit) in READINGS.items():
        if name in numbers["states"]:
            low, high = (f"{x / scale:.3g}" for x in numbers["states"][name])
            rows.append((label, (low if low == high else f"{low} to {high}") + unit))
    calls = [warm["calls"] for warm in numbers.get("warm_up") or ()]
    if calls:
        least, most = min(calls), max(calls)
        text = f"{least}{f' to {most}' * (most > least)} calls of each, not counted"
        rows.append(("warm-up", text))
    cost = numbers.get("timer_overhead")
    if cost:
        text = f"{words(duration(cost, 1e-9))}, subtracted from every call"
        rows.append(("overhead of the clock", Figure(cost, text)))
    return pairs_table("Machine", rows)
