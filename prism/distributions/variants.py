"""Laws with the same mean and another spread, as calibration and hardware variants ask for.

Each deviation from the mean is multiplied by a factor, as far as the law's family keeps its form
and nothing takes negative time. Left out: what factor (`prism.models.calibration.spreads`,
`cluster.scale`).
"""

from __future__ import annotations

import numpy as np

from prism.distributions.law import CONSTRUCTORS, Law, constant, empirical

_KNOTS = 513  # of a law kept as quantiles
_TIP = 1e-6  # probability of the outermost values of a law that is kept as quantiles
_TAIL = np.geomspace(_TIP, 1e-3, 31)
_TAILED = np.unique(np.concatenate([np.linspace(0.0, 1.0, _KNOTS), _TAIL, 1.0 - _TAIL]))


def stretched(law: Law, factor: float) -> Law:
    """Return the law of mean 1 with its spread multiplied, in a form that a file can hold.

    Parameters
    ----------
    factor : float
        On the standard deviation, >= 0.

    Notes
    -----
    A family with a constructor is rebuilt at the new CV; ranks' law moves its body, its lemons and
    its limit; other laws go through quantiles that are moved away from 1, or towards it.
    """
    if law.std == 0.0 or factor == 1.0:
        return law
    if factor == 0.0:
        return constant()
    if law.family == "bounded_body_lemons":
        names = ("body_cv", "gpd_shape", "lemon_fraction", "lo", "hi", "max_slowdown")
        p = dict(zip(names, law.params, strict=True))
        return law.with_params(
            body_cv=factor * p["body_cv"], lo=1.0 + factor * (p["lo"] - 1.0),
            hi=1.0 + factor * (p["hi"] - 1.0),
            max_slowdown=1.0 + factor * (p["max_slowdown"] - 1.0),
        )  # fmt: skip
    if law.family in CONSTRUCTORS:
        return law.scaled_to(factor * law.cv)
    q = np.array(law.knots_q) if law.knots_q else _TAILED
    # a mixture's ends may be infinite
    values = law.ppf(q if law.knots_q else np.clip(q, _TIP, 1.0 - _TIP))
    table = empirical(q.tolist(), np.maximum(values, 0.0).tolist())
    deviations = table.ppf(q) - 1.0
    values = np.maximum(1.0 + factor * law.cv / table.cv * deviations, 1e-6)
    return empirical(q.tolist(), np.maximum.accumulate(values).tolist())
