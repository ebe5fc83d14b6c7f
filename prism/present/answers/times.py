"""Distributions of times in an answer: their table, their spread, and what they may be off by."""

from __future__ import annotations

from prism.common.text import format_count, format_like, format_share
from prism.present.answer import Errors
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    duration,
    error,
    half_width,
    words,
)
from prism.simulation.results import TAIL_SAMPLES

UNKNOWN = "unknown from 1 cluster draw"
TITLES = {"step_time": "step time", "time_to_train": "time-to-train"}
READING = "A curve at 95 % over a time says that 95 of 100 take no longer."
NOT_INCLUDED = (
    "not included: distributions and nominal durations are taken as they are; their sources and "
    "sample sizes are under Inputs"
)


def _columns(numbers: Json) -> tuple[list[str], tuple[Column, ...]]:
    names = [name for name in TITLES if numbers.get(name)]
    heads = (Column(TITLES[name].capitalize(), right=False) for name in names)
    return names, (Column(right=False), *heads)


def times_table(numbers: Json) -> Table:
    """Lay out the distributions, one column each."""
    names, columns = _columns(numbers)
    found = [numbers[name] for name in names]
    rows: list[tuple[Cell, ...]] = [
        ("mean, ± 95 %", *map(mean_figure, found)),
        ("standard deviation", *map(std_figure, found)),
    ]
    if names[0] == "step_time" and numbers.get("ideal_step_time") is not None:
        more = (None,) * (len(names) - 1)
        rows.insert(
            0, ("ideal", time_figure(numbers["step_time"], numbers["ideal_step_time"]), *more)
        )
    for p in (5, 50, 90, 95, 99):
        rows.append((f"p{p}", *(_quantile(n, numbers[n], p) for n in names)))
    return Table("", columns, tuple(rows))


def mean_figure(numbers: Json) -> Cell:
    """Write a mean with half of its 95 % interval."""
    half = mean_half_width(numbers)
    text = f" ± {words(error(half, numbers['mean']))}" if half is not None else ""
    return Figure(numbers["mean"], words(time_figure(numbers, numbers["mean"])) + text)


def mean_half_width(numbers: Json) -> float | None:
    """Half of the 95 % interval of a mean [s]; None with one cluster draw."""
    return half_width(numbers["mean_se"], numbers["cluster_draws"])


def std_figure(numbers: Json) -> Cell:
    """Write a standard deviation, and what it is over the mean."""
    cv = format_share(numbers["std"] / numbers["mean"] if numbers["mean"] else 0.0)
    return Figure(numbers["std"], f"{words(error(numbers['std'], numbers['mean']))} (CV {cv})")


def _quantile(name: str, numbers: Json, percentile: int) -> Cell:
    """Write a quantile; nothing where too few draws stand behind a run's p99."""
    few = percentile == 99 and 0.01 * numbers["cluster_draws"] < TAIL_SAMPLES
    if few and name == "time_to_train":
        return None
    return time_figure(numbers, numbers[f"p{percentile}"])


def spread_table(numbers: Json) -> Table:
    """Lay out where the spread of each distribution is."""
    names, columns = _columns(numbers)
    found = [numbers[name] for name in names]
    rows: list[tuple[Cell, ...]] = []
    for label, key in (
        ("standard deviation within a cluster draw", "within_cluster_std"),
        ("model error", "model_error_std"),
    ):
        rows.append((label, *(error(n.get(key), n["mean"]) for n in found)))
    rows.insert(1, ("standard deviation between cluster draws", *map(_between, found)))
    for label, key in (
        ("p5 to p95 on one allocation", "one_allocation"),
        ("p5 to p95 of allocations' means", "allocations"),
    ):
        ends = (
            [words(time_figure(n, n[key][p])) for p in ("p5", "p95")] if n.get(key) else []
            for n in found
        )
        rows.append((label, *(" to ".join(end) or None for end in ends)))
    rows.append(
        ("mean, 90 % interval (Monte Carlo)", *(interval_text(n, "mean_ci90") for n in found))
    )
    kept = tuple(row for row in rows if any(cell is not None for cell in row[1:]))
    return Table("Spread", columns, kept, details=True)


def _between(numbers: Json) -> Cell:
    """Write how far cluster draws differ, as far as they tell."""
    if numbers["between_cluster_std"] is None:
        return UNKNOWN
    at_most = numbers["between_cluster_at_most"]
    if at_most is None:
        return error(numbers["between_cluster_std"], numbers["mean"])
    text = f"indistinguishable from 0 (at most {words(error(at_most, numbers['mean']))})"
    return Figure(numbers["between_cluster_std"], text)


def interval_text(numbers: Json, key: str) -> str | None:
    """Write both ends of an interval; None where it is not known."""
    if numbers[key] is None:
        return None
    fine = max(0.005 * float(numbers["std"]), 1e-6 * abs(numbers["mean"]))
    return " to ".join(format_like(bound, numbers["mean"], fine) for bound in numbers[key])


def time_figure(numbers: Json, seconds: float, coarse: bool = False) -> Cell:
    """Write a time of a distribution, with the digits that its spread makes worth showing."""
    mean, std = abs(float(numbers["mean"])), float(numbers["std"] or 0.0)
    if coarse:
        return duration(seconds, max(0.3 * std, 1e-4 * abs(seconds)))
    return duration(seconds, max(0.05 * std, 1e-5 * mean), numbers["mean"])


def errors_of(numbers: Json, name: str) -> Errors:
    """Write both errors of a step time or a time-to-train."""
    found = numbers[name]
    text = f"error {UNKNOWN}"
    half = mean_half_width(found)
    if half is not None:
        text = f"mean ± {words(error(half, found['mean']))} (95 %)"
    if found["p95_ci"] is not None:
        text += f"; p95 between {interval_text(found, 'p95_ci')} (95 %)".replace(" to ", " and ")
    n = numbers["replicates" if name == "step_time" else "run_replicates"]
    text += f"; from {format_count(n)} {'steps' if name == 'step_time' else 'runs'}"
    return Errors(text, data_text(numbers))


def data_text(numbers: Json) -> str:
    """Write what the data behind a job leave open, as far as a result knows."""
    found, wrong = numbers.get("data_error"), numbers.get("model_error")
    if not found and wrong:
        std = format_share(wrong["spread"])
        return f"{std} standard deviation of run times (model error, included)"
    if not found:
        return NOT_INCLUDED
    text = f"mean ± {format_share(1.96 * found['mean'], 2)} (95 %, by what was measured)"
    if found.get("std"):
        text += f"; standard deviation ± {format_share(1.96 * found['std'], 2)}"
    if found.get("std_at_most"):
        text += f", at most {found['std_at_most']:.3g} times as large (95 %)"
    if "library_share" in found:
        text += f"; {format_share(found['library_share'], 2)} of the library's variance is left"
    return text
