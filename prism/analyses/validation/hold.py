"""One comparison of a prediction with measurements: figures, null, and one dataset.

A null repeats the comparison in simulation where the prediction is the truth; what was fitted to
the training part is fitted anew in every repetition.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common import agreement as measures

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
Repetitions = Iterator[tuple[Array, Array]]
"""Measured and predicted values [s] of one repetition after another, without end."""

BAND = (0.05, 0.95)  # of the predicted CDF over refits
CDF_POINTS = 200


class Call(NamedTuple):
    """What a user asks of a validation."""

    quantity: str
    dependence: str | None
    replicates: int
    bootstrap: int
    seed: int
    threads: int | None
    progress: Callable[[int, int], None] | None


@dataclass(frozen=True)
class Case:
    """A prediction, what it is held against, and how the comparison is repeated; times in s."""

    measured: Array
    steps: NDArray[np.int64]  # places in time of the measured values
    predicted: Array  # [replicate]
    independent: Array  # [replicate] with ops independent of each other
    repetitions: Repetitions
    facts: Mapping[str, Any]
    runs: Any = None  # run of each measured value
    training: Array | None = None
    baselines: Mapping[str, Array] = field(default_factory=dict)  # further ones
    refit: bool = True  # in the repetitions


def hold(case: Case, call: Call, **facts: Any) -> "xr.Dataset":
    """Compare a prediction and its baselines with the measurement, and find the p-value."""
    null, curves = [], []
    for measured, predicted in islice(case.repetitions, call.bootstrap):
        null.append(separation(measured, predicted))
        curves.append(predicted)
        if call.progress is not None and case.refit:
            call.progress(len(null), call.bootstrap)
    figures = compare_all(case) | {
        "quantity": call.quantity, "dependence": call.dependence or "full",
        "bootstrap": call.bootstrap, "seed": call.seed, "replicates": call.replicates,
        "ks_p_value": None, "ks_p_value_refit": case.refit, **case.facts, **facts,
    }  # fmt: skip
    if null:  # from as many predicted values as in each repetition
        found = separation(case.measured, case.predicted[: curves[0].size])
        figures["ks_p_value"] = measures.bootstrap_p_value(found, null)
    return make_validation(case, figures, curves if case.refit else [])


def compare_all(case: Case) -> dict[str, Any]:
    """Compare the prediction and the baselines with the measurement; give the floor."""
    given = {"copy": case.training, "independent": case.independent, **case.baselines}
    figures, *others = (
        None if sample is None
        else measures.compare(case.measured, sample, steps=case.steps, runs=case.runs)
        for sample in (case.predicted, *given.values())
    )  # fmt: skip
    assert figures is not None
    floor: dict[str, Any] = dict.fromkeys(("ks_floor", "p95_floor", "mean_floor", "cv_ratio_floor"))
    if case.training is not None:
        floor = measures.floor(case.training, case.measured)
    return {**figures, **floor, "baselines": dict(zip(given, others, strict=True))}


def separation(measured: Array, predicted: Array) -> float:
    """KS distance; where the samples do not overlap at all, more the further they lie apart.

    The statistic of p-values: a KS of 1 says no more of a prediction that is off by half than of
    one that is off by a hundred.
    """
    ks = measures.ks_statistic(measured, predicted)
    if ks < 1.0:
        return ks
    return 1.0 + abs(float(np.log(np.median(predicted) / np.median(measured))))


def make_validation(case: Case, figures: dict[str, Any], curves: list[Array]) -> "xr.Dataset":
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
    attrs = {"kind": "validation", "summary": json.dumps(figures), "quantity": figures["quantity"]}
    return xr.Dataset(data, attrs=attrs)
