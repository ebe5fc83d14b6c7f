"""What least squares gave to means of few cells and belongs to the cells: scores put back.

A worker's mean in a step holds the mean of its microbatches' own content. Deviations from such a
mean are smoothed by it: with eight microbatches the sharp ends of their distribution are gone.
Every estimated effect is therefore shrunk to its component's share of what was seen, and the rest
goes back to the cells, whose scores then have the shape of their distribution. Variances are not
estimated here.

References
----------
Robinson, Statistical Science 6 (1991) 15: best linear unbiased prediction.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism.models.variance.effects import Component, content_scores, standardise
from prism.models.variance.strata import Strata

Array = NDArray[np.float64]


def restore_cells(
    strata: Strata, content: Component, own: Array, effects: tuple[Component, Component],
    fixed: Array,
) -> tuple[Component, Array]:  # fmt: skip
    """Score content and residual by cells from which only shrunk effects were taken.

    Parameters
    ----------
    own : ndarray
        [column] variance of the residual.
    fixed : ndarray
        [column, replica, microbatch] what was taken for workers and positions and is no effect.

    Returns
    -------
    residual : ndarray
        [column, replica, step, microbatch] standardised; nan where missing.
    """
    rank_step, step = effects
    cell = noise_share(rank_step, strata.cell_products)[:, None, None] * strata.rank_step
    common = noise_share(step, strata.step_products)[:, None] * strata.step
    cells = strata.rest + (cell + common[:, None, :])[..., None] + fixed[:, :, None, :]
    cells = np.where(strata.present, cells, np.nan)
    signed = content.loadings * content.scale
    scores = content_scores(signed, own, np.diag(strata.rest_products), cells)
    left = cells - signed.reshape(-1, 1, 1, 1) * scores
    return replace(content, scores=scores), np.stack([standardise(column) for column in left])


def noise_share(effect: Component, products: Array) -> Array:
    """Share of what is seen of an effect [column] that comes from the strata below it."""
    seen = np.diag(products)
    ratio = np.divide(effect.std**2, seen, out=np.ones(seen.size), where=seen > 0.0)
    return np.asarray(np.clip(1.0 - ratio, 0.0, 1.0))
