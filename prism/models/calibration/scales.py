"""How fast the machine computes and communicates, beside the library's nominal figures.

Two factors on nominal durations, of all kernels on GPUs and of all messages, so that the mean steps
of the measured sizes come out. Sizes of like make-up tell one of them; the other then stays near
the library's, with a posterior that says how far it may be off. Left out: spreads
(`prism.models.calibration.spreads`), which the predicted means already hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import CubicSpline
from scipy.optimize import least_squares

from prism.common.arrays import Array
from prism.models.calibration.sizes import Size
from prism.models.calibration.spreads import Factor

COMPUTE_PRIOR = 0.5  # of the log of a factor: number formats alone make a factor of two
COMMUNICATION_PRIOR = 0.7  # a factor of two either way
MODEL_ERROR = 0.005
"""Of the predicted mean of one size, relative: 0.49 % (90 %: 0.36 to 0.59 %) over eleven training
sets of MLPerf (experiments/validation/mlperf-scale/other_scales.py). A size predicted from another
errs by both."""
_WIDEST = 5.0  # of the log ratio: far beyond the priors, so that no search overflows
RATIOS = np.log(np.array([0.25, 0.7, 1.6, 4.0]))  # communication over compute factor


@dataclass(frozen=True)
class Scales:
    """Factors on nominal durations."""

    compute: Factor
    communication: Factor
    covariance: Array  # [2, 2] of their logarithms


def fit_scales(
    sizes: Sequence[Size], means: Sequence[Array], between: Sequence[float],
    clusters: Sequence[int], ratios: Array = RATIOS,
) -> Scales:  # fmt: skip
    """Find both factors.

    `means` [ratio]: predicted mean step of each size with compute factor 1, over `ratios` [s].
    `ratios` [ratio]: logs of the communication over the compute factor, ascending.

    Maximum of the posterior, both logarithms normal around 0; durations scale, so that the mean at
    (a, b) is a times the mean at (1, b / a). That mean is nearly straight in the ratio, as work
    plus exposed messages, so it is interpolated in the ratio and not in its logarithm. A measured
    mean errs by the noise of its steps and by what its runs' clusters differ by, a predicted one by
    its clusters and by the model's own error.
    """
    tables = [CubicSpline(np.exp(ratios), m, bc_type="natural") for m in means]
    wanted = np.log([s.mean_s for s in sizes])
    errors = np.array([
        np.sqrt(MODEL_ERROR**2 + (s.between_noise + b**2) / s.n_runs + b**2 / n)
        for s, b, n in zip(sizes, between, clusters, strict=True)
    ])  # fmt: skip

    def residuals(x: Array, errors: Array) -> Array:
        found = np.array([_log_mean(table, x, ratios) for table in tables])
        prior = x / np.array([COMPUTE_PRIOR, COMMUNICATION_PRIOR])
        return np.concatenate([(found - wanted) / errors, prior])

    start = np.full(2, float((wanted - [_log_mean(t, np.zeros(2), ratios) for t in tables]).mean()))
    solved = least_squares(residuals, start, args=(errors,))
    misfit = float((solved.fun[: len(sizes)] ** 2).mean())
    if misfit > 1.0:  # sizes that contradict each other tell less than their own errors say
        solved = least_squares(residuals, solved.x, args=(errors * np.sqrt(misfit),))
    covariance = np.linalg.inv(solved.jac.T @ solved.jac)
    priors = (COMPUTE_PRIOR, COMMUNICATION_PRIOR)
    factors = [
        Factor(float(np.exp(x)), float(np.sqrt(v)), min(1.0, float(v) / prior**2))
        for x, v, prior in zip(solved.x, np.diag(covariance), priors, strict=True)
    ]
    return Scales(factors[0], factors[1], covariance)


def _log_mean(table: Callable[[float], Array], x: Array, ratios: Array) -> float:
    """Log of the mean at two log factors, straight in the ratio beyond the table's ends."""
    log_ratio = float(np.clip(x[1] - x[0], -_WIDEST, _WIDEST))
    ratio, inside = np.exp([log_ratio, np.clip(log_ratio, ratios[0], ratios[-1])])
    slope = float(table(inside, 1)) if inside != ratio else 0.0  # type: ignore[call-arg]
    return float(x[0] + np.log(table(inside) + slope * (ratio - inside)))
