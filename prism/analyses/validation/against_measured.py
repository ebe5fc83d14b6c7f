"""One comparison of a prediction with measurements: figures, null, and one dataset.

A null repeats the comparison in simulation where the prediction is the truth; what was fitted to
the training part is fitted anew in every repetition.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prism.common import agreement as measures
from prism.common.arrays import Array, Index
from prism.common.results import Columns, Field, pack_figures, pack_texts
from prism.simulation.execution.context import RunContext

if TYPE_CHECKING:
    import xarray as xr

Repetitions = Iterator[tuple[Array, Array]]
"""Measured and predicted values [s] of one repetition after another, without end."""

BAND = (0.05, 0.95)  # of the predicted CDF over refits
CDF_POINTS = 200


TESTED = ("mean", "p50", "p95", "cv")
ERRORS = Columns("model", (
    Field("name", "text", "prediction, or a baseline"),
    Field("n_measured", "count", "measured values"),
    Field("n_effective", "1", "independent values that tell as much about the mean"),
    Field("n_runs", "count", "measured runs"),
    Field("ks", "1", "Kolmogorov-Smirnov distance to the measured part"),
    Field("ks_critical_5pct", "1", "KS that independent values of a known distribution exceed"),
    Field("ks_aligned", "1", "KS, both divided by their median"),
    Field("wasserstein", "s", "Wasserstein distance to it"),
    Field("mean_error", "1", "relative error of the mean", interval=True),
    Field("p50_error", "1", "relative error of the median", interval=True),
    Field("p95_error", "1", "relative error of p95", interval=True),
    Field("p99_error", "1", "relative error of p99"),
    Field("p95_error_same_n", "1", "the same of p95 of samples as large as the measured one"),
    Field("p95_measured_se", "1", "relative standard error of the measured p95"),
    Field("cv_ratio", "1", "predicted CV over the measured one", interval=True),
    *(Field(f"{name}_detectable_80", "1", f"relative error of the {name} seen with 80 % power")
      for name in TESTED),
))  # fmt: skip
FIGURES = (
    Field("quantity", "text", "step_time or time_to_train"),
    Field("dependence", "text", "full, or none: ops are independent of each other"),
    Field("bootstrap", "count", "repetitions in simulation behind the p-value"),
    Field("seed", "count", "of all draws"),
    Field("replicates", "count", "predicted values"),
    Field("ks_p_value", "1", "p-value of the KS distance"),
    Field("ks_p_value_refit", "flag", "whether repetitions refit the model"),
    Field("ks_floor", "1", "KS distance of training and measured part"),
    Field("p95_floor", "1", "relative difference of their p95"),
    Field("mean_floor", "1", "of their means"),
    Field("cv_ratio_floor", "1", "CV of the training part over that of the measured one"),
    Field("job", "text", "what predicts"),
    Field("trace", "text", "what is split"),
    Field("source", "text", "what is compared with"),
    Field("train", "text", "which part is fitted"),
    Field("n_train", "count", "values that the prediction is based on"),
)
TAKEN = tuple(Field(name, "text") for name in ("column", "unit", "why"))
TEXTS = ("notes", "warnings")
CHANGES = Columns("change", (
    Field("kind", "text", "warm_up, phase, interval, pause and so on"),
    Field("run", "text"), Field("rank", "count"), Field("dp_rank", "count"),
    Field("stage", "count"), Field("first_step", "count"), Field("last_step", "count"),
    Field("n_steps", "count", "steps that change"), Field("of_steps", "count", "among as many"),
    Field("interval_steps", "count", "steps between pauses"), Field("n", "count", "pauses"),
    Field("ratio", "1", "over the rest"), Field("duration_s", "s", "total"),
    Field("kept", "text", "what of it is kept as"),
    Field("skip", "count", "first steps that --skip would leave out"),
), numbered=True)  # fmt: skip


class Call(NamedTuple):
    """What a user asks of a validation."""

    quantity: str
    dependence: str | None
    replicates: int
    bootstrap: int
    context: RunContext


@dataclass(frozen=True)
class ValidationCase:
    """A prediction, what it is held against, and how the comparison is repeated; times in s."""

    measured: Array
    steps: Index  # places in time of the measured values
    predicted: Array  # [replicate]
    independent: Array  # [replicate] with ops independent of each other
    repetitions: Repetitions
    facts: Mapping[str, Any]
    runs: Any = None  # run of each measured value
    training: Array | None = None
    baselines: Mapping[str, Array] = field(default_factory=dict)  # further ones
    refit: bool = True  # in the repetitions
    open_mean: float = 0.0  # relative error that the mean of one measured run is predicted with


def compare_to_measured(case: ValidationCase, call: Call, **facts: Any) -> "xr.Dataset":
    """Compare a prediction and its baselines with the measurement, and find the p-value."""
    null, curves = [], []
    for measured, predicted in islice(case.repetitions, call.bootstrap):
        null.append(separation(measured, predicted))
        curves.append(predicted)
        if case.refit:
            call.context.report(len(null), call.bootstrap)
    refits = curves if case.refit else []
    figures = {
        "quantity": call.quantity, "dependence": call.dependence or "full",
        "bootstrap": call.bootstrap, "seed": call.context.seed, "replicates": call.replicates,
        "ks_p_value": None, "ks_p_value_refit": case.refit, **_floor(case), **case.facts, **facts,
    }  # fmt: skip
    if null:  # from as many predicted values as in each repetition
        found = separation(case.measured, case.predicted[: curves[0].size])
        figures["ks_p_value"] = measures.bootstrap_p_value(found, null)
    return make_validation(case, figures, _errors(case, refits), refits)


def _errors(case: ValidationCase, refits: list[Array]) -> list[dict[str, Any]]:
    """Compare the prediction, then the baselines, with the measurement.

    Intervals of the prediction's errors, and what would have been seen of them, rest on resamples
    of the measurement, on what refits of the prediction vary by, and on what a run's mean does.
    """
    errors = measures.measured_errors(case.measured, case.steps, case.runs)
    given = {"prediction": case.predicted, "copy": case.training, "independent": case.independent,
             **case.baselines}  # fmt: skip
    rows = [
        {"name": name, **measures.compare_to(case.measured, sample, errors)}
        for name, sample in given.items() if sample is not None
    ]  # fmt: skip
    first = rows[0] | {"n_runs": errors.runs}
    logs = np.log([_figures(refit) for refit in refits]) if len(refits) > 1 else np.zeros((1, 4))
    for name, spread in zip(TESTED, logs.std(axis=0), strict=True):
        more = float(np.hypot(spread, 0.0 if name == "cv" else case.open_mean))
        first[f"{name}_detectable_80"] = errors.detectable(name, more)
        if name == "cv":
            ratio = first["cv_ratio"]
            ends = errors.interval(name, None if ratio is None else ratio - 1.0, more)
            first["cv_ratio_ci"] = ends and [1.0 + end for end in ends]
        else:
            first[f"{name}_error_ci"] = errors.interval(name, first[f"{name}_error"], more)
    return [first, *rows[1:]]


def _figures(sample: Array) -> list[float]:
    """Find the figures of `TESTED`, of a sample that varies [s; CV 1]."""
    mean = sample.mean()
    return [mean, *np.quantile(sample, [0.5, 0.95]), max(sample.std() / mean, 1e-12)]


def _floor(case: ValidationCase) -> dict[str, Any]:
    if case.training is not None:
        return measures.floor(case.training, case.measured)
    return dict.fromkeys(("ks_floor", "p95_floor", "mean_floor", "cv_ratio_floor"))


def separation(measured: Array, predicted: Array) -> float:
    """KS distance; where the samples do not overlap at all, more the further they lie apart.

    The statistic of p-values: a KS of 1 says no more of a prediction that is off by half than of
    one that is off by a hundred.
    """
    ks = measures.ks_statistic(measured, predicted)
    if ks < 1.0:
        return ks
    return 1.0 + abs(float(np.log(np.median(predicted) / np.median(measured))))


def make_validation(
    case: ValidationCase, figures: dict[str, Any], errors: list[dict[str, Any]], curves: list[Array]
) -> "xr.Dataset":
    """Lay samples [s], the band of the refits' curves and the figures into one dataset."""
    import xarray as xr

    def seconds(dim: str, values: Array, text: str) -> tuple[str, Array, dict[str, str]]:
        return dim, values, {"units": "s", "long_name": text}

    data: dict[str, Any] = {
        "measured": seconds("measured_idx", case.measured, "measured, held out"),
        "predicted": seconds("replicate", case.predicted, "predicted"),
        "predicted_independent": seconds("replicate", case.independent, "independent sampling"),
    }
    if case.training is not None:
        data["training"] = seconds("training_idx", case.training, "measured, used for the fit")
    if curves:
        everything = np.concatenate([case.predicted, case.measured])
        at = np.linspace(everything.min(), everything.max(), CDF_POINTS)
        cdf = np.stack([np.searchsorted(np.sort(c), at, side="right") / c.size for c in curves])
        lo, hi = np.quantile(cdf, BAND, axis=0)
        text = "quantile of the predicted CDF over refits to simulated measurements"
        data["cdf_time"] = seconds("point", at, "where the band is given")
        data["cdf_lo"] = ("point", lo, {"units": "1", "long_name": f"{BAND[0]:g} {text}"})
        data["cdf_hi"] = ("point", hi, {"units": "1", "long_name": f"{BAND[1]:g} {text}"})
    parts = [
        xr.Dataset(data), ERRORS.pack(errors), pack_figures(FIGURES, figures),
        pack_figures(TAKEN, figures.get("taken") or {}, "taken_"),
        CHANGES.pack(figures.get("changes", ())),
        pack_texts(**{name: figures.get(name, ()) for name in TEXTS}),
    ]  # fmt: skip
    attrs = {"kind": "validation", "quantity": figures["quantity"]}
    return xr.merge(parts).assign_attrs(attrs)
