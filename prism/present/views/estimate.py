"""What a job, a library, a result or an estimate's summary looks like in a terminal.

Everything is built from plain mappings, so that the table and the JSON cannot disagree.
Nothing is computed here beyond the choice of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from prism.common.text import format_count, format_duration, format_like, format_share
from prism.present.views.run import run_rows, term_table
from prism.present.views.tables import bold, rows_view
from prism.simulation.results import TAIL_SAMPLES

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]
UNKNOWN = "unknown from 1 cluster draw"
ON_ONE, ALLOCATIONS = "p5 to p95 on one allocation", "p5 to p95 of allocations' means"


def estimate_view(summary: Json, result: xr.Dataset | None = None) -> RenderableType:
    """Lay out the summary of an estimate.

    Parameters
    ----------
    summary : mapping
        What ``prism.summary`` returns, the JSON of ``prism estimate``.
    result : xarray.Dataset, optional
        The result itself, for what the summary leaves out: the critical path.

    Returns
    -------
    rich.console.RenderableType
        Step time and time-to-train side by side, then the rest, every number with its unit.
    """
    head = [""]  # after the job's name
    if "world_size" in summary:
        head.append(f"{format_count(summary['world_size'])} GPUs")
    head.append(f"{format_count(summary['replicates'])} step replicates")
    if summary.get("run_replicates"):
        steps = f" of {format_count(summary['steps'])} steps" if "steps" in summary else ""
        head.append(f"{format_count(summary['run_replicates'])} run replicates{steps}")
    head.append(f"seed {summary['seed']}")
    parts: list[RenderableType] = [
        bold(str(summary["job"]), ", ".join(head)), "", _times(summary),
    ]  # fmt: skip
    for title, rows in (
        ("Slowdown", _slowdown_rows(summary)),
        ("Run", run_rows(summary)),
        ("Step", _step_rows(summary)),
        ("Critical path", _path_rows(result)),
        ("Errors", _error_rows(summary)),
        ("Engine", _engine_rows(summary)),
    ):
        if rows:
            parts += ["", bold(title), rows_view(rows)]
        terms = term_table(summary) if title == "Run" else None
        if terms is not None:
            parts += ["", bold("What delays the run, and what makes it vary"), terms]
    return Group(*parts)


def _times(summary: Json) -> Table:
    """Lay out the two distributions, one column each."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    columns = [name for name in ("step_time", "time_to_train") if summary.get(name)]
    table.add_column("")
    for name in columns:
        title = {"step_time": "Step time", "time_to_train": "Time-to-train"}[name]
        table.add_column(title, no_wrap=True)
    cells = {name: dict(_distribution_rows(summary[name])) for name in columns}
    run = summary.get("time_to_train")
    if run and 0.01 * run["cluster_draws"] < TAIL_SAMPLES:
        del cells["time_to_train"]["p99"]
    ideal = summary.get("ideal_step_time")
    if ideal is not None and "step_time" in cells:
        spread = _resolution(summary["step_time"])
        cells["step_time"]["ideal"] = format_like(ideal, ideal, spread)
    labels = ["ideal", "mean", "standard deviation", "  within a cluster draw"]
    labels += ["  between cluster draws", "  error of the model"]
    labels += [f"p{percentile}" for percentile in (5, 50, 90, 95, 99)]
    labels += [ON_ONE, ALLOCATIONS]
    for label in labels:
        if any(label in column for column in cells.values()):
            table.add_row(label, *(cells[name].get(label, "") for name in columns))
    return table


def _distribution_rows(numbers: Json) -> Iterator[tuple[str, str]]:
    """One column of the table of times: label and text."""
    mean, fine = numbers["mean"], _resolution(numbers)
    error = numbers.get("mean_se")
    text = format_like(mean, mean, fine)
    yield "mean", text if error is None else f"{text} ± {_small(error, mean)}"
    yield "standard deviation", f"{_small(numbers['std'], mean)} (CV {format_share(numbers['cv'])})"
    yield "  within a cluster draw", _small(numbers["within_cluster_std"], mean)
    yield "  between cluster draws", _between(numbers)
    if numbers.get("model_error_std"):
        yield "  error of the model", _small(numbers["model_error_std"], mean)
    for percentile in (5, 50, 90, 95, 99):
        yield f"p{percentile}", format_like(numbers[f"p{percentile}"], mean, fine)
    for label, key in ((ON_ONE, "one_allocation"), (ALLOCATIONS, "allocations")):
        if numbers.get(key):
            low, high = (format_like(numbers[key][p], mean, fine) for p in ("p5", "p95"))
            yield label, f"{low} to {high}"


def _between(numbers: Json) -> str:
    """Write how far cluster draws differ, as far as they tell."""
    if numbers["between_cluster_std"] is None:
        return UNKNOWN
    at_most = numbers["between_cluster_at_most"]
    if at_most is None:
        return _small(numbers["between_cluster_std"], numbers["mean"])
    return f"indistinguishable from 0 (at most {_small(at_most, numbers['mean'])})"


def _small(seconds: float, like: float) -> str:
    """Write an error or a spread with two digits, in the unit of what it belongs to."""
    return format_like(seconds, like, 0.0999 * seconds if seconds > 0 else 1e-3 * like)


def _resolution(numbers: Json) -> float:
    """Find the smallest difference worth showing in a distribution [s]."""
    mean, std = float(numbers["mean"]), float(numbers.get("std") or 0.0)
    return max(0.05 * std, 1e-5 * abs(mean))


def _slowdown_rows(summary: Json) -> list[tuple[str, str]]:
    """Chances that a step is slower than the ideal by some factor."""
    return [
        (f"P(step > {factor} x ideal)", format_share(probability))
        for factor, probability in (summary.get("slowdown") or {}).items()
    ]


def _step_rows(summary: Json) -> list[tuple[str, str]]:
    """Where the time of a step goes."""
    rows = []
    if summary.get("tokens_per_s") is not None:
        rate = f"{summary['tokens_per_s']:,.0f}, {summary['tokens_per_s_per_gpu']:,.0f} per GPU"
        rows.append(("tokens per second", rate))
    if summary.get("mfu") is not None:
        rows.append(("model flops utilisation (MFU)", format_share(summary["mfu"])))
    if summary.get("model_flops_per_gpu") is not None:
        tera = summary["model_flops_per_gpu"] / 1e12
        rows.append(("model flops per GPU", f"{tera:.1f} TFLOP/s"))
    if summary.get("exposed_communication") is not None:
        text, error = (
            format_share(summary["exposed_communication"]),
            summary.get("exposed_communication_se"),
        )
        text += f" ± {format_share(error, 2)}" if error else ""
        rows.append(("exposed communication", text))
    if summary.get("memory") is not None:
        gib, limit = (summary["memory"][key] for key in ("gib", "limit_gib"))
        rows.append(("memory of the busiest GPU", f"{gib:.0f} of {limit:.1f} GiB (estimate)"))
    return rows


def _path_rows(result: xr.Dataset | None) -> list[tuple[str, str]]:
    """Kernel classes by their mean time on the critical path, the smallest left out."""
    if result is None or "critical_path_time" not in result:
        return []
    times = result["critical_path_time"]
    total = float(times.sum())
    rows = []
    for index in times.argsort().to_numpy()[::-1]:
        seconds = float(times[index])
        if seconds > 0.001 * total:
            name = str(times["kernel_class"].to_numpy()[index])
            rows.append(
                (
                    name,
                    f"{format_like(seconds, total, 1e-4 * total):>12}  "
                    f"{format_share(seconds / total):>7}",
                )
            )
    return rows


def _error_rows(summary: Json) -> list[tuple[str, str]]:
    """How far the numbers above may be off."""
    rows: list[tuple[str, str]] = []
    for name, title in (("step_time", "step time"), ("time_to_train", "time-to-train")):
        if summary.get(name):
            rows += _monte_carlo_rows(summary[name], title)
    wrong, data = summary.get("model_error"), summary.get("data_error")
    if wrong:
        text = f"{format_share(wrong['spread'])} in percentiles and P(done) ({wrong['source']})"
        rows.append(("error of the model, on run times", text))
    if data:
        what = "what was measured leaves open" if "library_share" not in data else (
            f"calibrated; {format_share(data['library_share'])} of the library's variance is left"
        )  # fmt: skip
        rows.append(("mean step, standard error", f"{format_share(data['mean'], 2)} ({what})"))
    elif rows and not wrong:
        rows.append(
            ("laws and nominal durations", "not included: see prism show for their sources")
        )
    return rows


def _monte_carlo_rows(numbers: Json, title: str) -> Iterator[tuple[str, str]]:
    """Intervals of mean and p95, with the draws that they rest on."""
    n, fine = numbers["cluster_draws"], _resolution(numbers) / 10.0
    unknown = UNKNOWN if n == 1 else f"unknown from {format_count(n)} cluster draws"
    for label, key in (
        ("mean {}, 90 % interval", "mean_ci90"),
        ("p95 {}, 95 % interval", "p95_ci"),
    ):
        text = unknown
        if numbers[key] is not None:
            low, high = (format_like(bound, numbers["mean"], fine) for bound in numbers[key])
            text = f"{low} to {high} (Monte Carlo, {format_count(n)} cluster draws)"
        yield label.format(title), text


def _engine_rows(summary: Json) -> list[tuple[str, str]]:
    """Say what the simulation cost."""
    rows = []
    engine = summary.get("engine") or {}
    if engine.get("op_samples"):
        text = f"{engine['op_samples']:.3g} in {format_duration(engine['seconds'], 0.01)}"
        if engine.get("ns_per_op_sample") is not None:
            text += f", {engine['ns_per_op_sample']:.2f} ns each"
        if engine.get("threads"):
            text += f" on {engine['threads']} thread{'s' if engine['threads'] != 1 else ''}"
        rows.append(("op-samples", text))
    replicas = summary.get("replicas") or {"engine": "exact"}
    if replicas["engine"] != "exact":
        text = f"{replicas['simulated']} of {replicas['replicas']:,} in each cluster"
        rows.append(("replicas simulated", f"{text} (exchangeable)"))
        share = format_share(replicas["slowest_unseen"])
        rows.append(("steps that wait for another replica", f"{share} (drawn from a pilot's law)"))
    if summary.get("wall_seconds") is not None:
        rows.append(("in all", format_duration(summary["wall_seconds"], 0.1)))
    return rows
