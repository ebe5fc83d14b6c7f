"""What a validation found, as figures and as one dataset.

The comparison of a prediction and of its baselines with the measurement, the floor between two
parts of the measurement, samples and the band of refits. Left out: the prediction itself and the
p-value's repetitions (`prism.analyses.validation.trace`,
`prism.analyses.validation.steps`, `prism.analyses.validation.null`).
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common import agreement as measures

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]
BAND = (0.05, 0.95)  # of the predicted CDF over refits
CDF_POINTS = 200


def compare_all(
    measured: Array, predicted: Array, training: Array | None, independent: Array,
    steps: NDArray[np.int64], runs: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare the prediction and the baselines with the measurement; give the floor."""
    figures = measures.compare(measured, predicted, steps=steps, runs=runs)
    alone = measures.compare(measured, independent, steps=steps, runs=runs)
    if training is None:
        copy, floor = None, dict.fromkeys(("ks_floor", "p95_floor", "mean_floor", "cv_ratio_floor"))
    else:
        copy = measures.compare(measured, training, steps=steps)
        floor = measures.floor(training, measured)
    return {**figures, **floor, "baselines": {"copy": copy, "independent": alone}}


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
    figures: dict[str, Any], measured: Array, predicted: Array, independent: Array,
    training: Array | None, curves: list[Array],
) -> "xr.Dataset":  # fmt: skip
    """Lay samples [s], the band of the refits' curves and the figures into one dataset."""
    import xarray as xr

    def seconds(dim: str, values: Array, text: str) -> tuple[str, Array, dict[str, str]]:
        return dim, values, {"units": "s", "long_name": text}

    data: dict[str, Any] = {
        "measured": seconds("measured_idx", measured, "measured, held out"),
        "predicted": seconds("replicate", predicted, "predicted"),
        "predicted_independent": seconds("replicate", independent, "independent sampling"),
    }
    if training is not None:
        data["training"] = seconds("training_idx", training, "measured, used for the fit")
    if curves:
        everything = np.concatenate([predicted, measured])
        at = np.linspace(everything.min(), everything.max(), CDF_POINTS)
        cdf = np.stack([np.searchsorted(np.sort(c), at, side="right") / c.size for c in curves])
        lo, hi = np.quantile(cdf, BAND, axis=0)
        text = "quantile of the predicted CDF over refits of simulated traces"
        data["cdf_time"] = seconds("point", at, "where the band is given")
        data["cdf_lo"] = ("point", lo, {"units": "1", "long_name": f"{BAND[0]:g} {text}"})
        data["cdf_hi"] = ("point", hi, {"units": "1", "long_name": f"{BAND[1]:g} {text}"})
    attrs = {"kind": "validation", "summary": json.dumps(figures)}
    return xr.Dataset(data, attrs=attrs | {"quantity": figures["quantity"]})


def summarize_validation(dataset: "xr.Dataset") -> dict[str, Any]:
    """Figures of a validation, as `prism validate --json` prints them."""
    return dict(json.loads(dataset.attrs["summary"]))


def copy_at_half(training: Array, measured: Array, repetitions: int, seed: int) -> float:
    """Return the KS that a copy of half of the training steps is expected to have."""
    rng = np.random.Generator(np.random.Philox(seed))
    half = max(1, training.size // 2)
    return float(np.mean([
        measures.ks_statistic(measured, rng.choice(training, half, replace=False))
        for _ in range(repetitions)
    ]))  # fmt: skip
