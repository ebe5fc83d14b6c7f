"""A forecast as OpenMetrics text, for Prometheus and what reads its format.

All figures are gauges: a forecast goes up and down. Names end with their unit, and quantiles are a
label, as in a summary.

References
----------
OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from prism.common.text import visible
from prism.present.cells import Json


class Family(NamedTuple):
    """Figures of one name: their unit ("" for a count), what they are, and values by quantile."""

    name: str
    unit: str
    text: str
    values: dict[str, float]  # "" where the figure is no quantile


QUANTILES = ("p5", "p10", "p50", "p90", "p95", "p99")
TIMES = {
    "step_time": "Time of a step",
    "time_to_train": "Time of the whole run, what is done included",
    "time_left": "Time until the last step is done",
}
SINGLE = (
    ("steps", "steps", "", "Steps of the run"),
    ("completed_steps", "completed_steps", "", "Steps of the run that are done"),
    ("ideal_step_time", "ideal_step_time_seconds", "seconds", "Step time without variability"),
    ("mfu", "mfu_ratio", "ratio", "Model flops utilisation"),
    ("ettr", "effective_training_time_ratio", "ratio", "Share of the run that is training"),
    ("failures", "failures", "", "Mean number of failures of a run"),
    ("world_size", "gpus", "", "GPUs of the job"),
)
"""Key of the JSON, name, unit and meaning of figures that are one number."""


def openmetrics_text(figures: Json) -> str:
    """Write the figures of a forecast, as `prism estimate --json` and `prism watch --json` do."""
    job = _escaped(str(figures["job"]))
    out = []
    for family in _families(figures):
        name = f"prism_{family.name}"
        out += [f"# TYPE {name} gauge", f"# HELP {name} {_escaped(family.text)}."]
        out += [f"# UNIT {name} {family.unit}"] if family.unit else []
        for at, value in family.values.items():
            quantile = f',quantile="{at}"' if at else ""
            out.append(f'{name}{{job="{job}"{quantile}}} {value!r}')
    return "\n".join([*out, "# EOF", ""])


def _escaped(text: str) -> str:
    """Escape a label's value or a help text."""
    return visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _families(figures: Json) -> Iterator[Family]:
    """List what is known of a forecast."""
    for key, text in TIMES.items():
        found = figures.get(key)
        if found is None:
            continue
        values = {_level(q): float(found[q]) for q in QUANTILES if found.get(q) is not None}
        yield Family(f"{key}_seconds", "seconds", f"{text}, by quantile", values)
        yield Family(f"{key}_mean_seconds", "seconds", f"{text}, mean", {"": float(found["mean"])})
    for key, name, unit, text in SINGLE:
        if figures.get(key) is not None:
            yield Family(name, unit, text, {"": float(figures[key])})
    dates = figures.get("finish") or {}  # by quantile
    if figures.get("finish_date"):
        asked = figures["finish_date"]
        dates = {f"p{100.0 * asked['probability']:.10g}": asked["date"]}
    if dates:
        values = {_level(q): datetime.fromisoformat(date).timestamp() for q, date in dates.items()}
        text = "When the last step is done, in seconds since 1970-01-01 UTC, by quantile"
        yield Family("finish_timestamp_seconds", "seconds", text, values)
    end = figures.get("finish_by")
    if end:
        yield Family("deadline_seconds", "seconds", "Time the run may take", {"": end["deadline"]})
        text = "Probability that the run is done by the deadline"
        yield Family("done_by_deadline_ratio", "ratio", text, {"": float(end["probability"])})
    departure = figures.get("departure")
    if departure:
        text = "Whether the step time changed, 1 or 0"
        yield Family("departed", "", text, {"": float(departure["departed"])})
        text = "Time of the last steps over that of the steps before, less 1"
        yield Family("departure_ratio", "ratio", text, {"": float(departure["change"] or 0.0)})


def _level(quantile: str) -> str:
    """Write p95 as 0.95."""
    return f"{float(quantile.removeprefix('p')) / 100.0:.10g}"
