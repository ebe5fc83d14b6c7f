"""Errors of figures of two samples, and of their difference, by what is independent in them.

Clusters in simulated steps, runs in measured ones, and within one single run stretches of steps.
Samples drawn with the same random numbers are taken apart cluster by cluster, and two single runs
of the same steps step by step.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.analyses.comparisons.longrun import long_run, moment_dof

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Kind = Literal["clusters", "runs", "steps"]
Pairing = Literal["cluster", "step"] | None


@dataclass(frozen=True)
class Sample:
    """Values whose figures are compared."""

    values: Array  # [n] s; by unit, and in time order within each
    unit: Index  # [n] cluster or run of each: a number from 0
    step: Index  # [n] number of the step within its run, or of the replicate
    kind: Kind  # what is independent; steps where there is one run only

    @property
    def n_units(self) -> int:
        """Clusters or runs."""
        return int(np.unique(self.unit).size)

    def place_in_unit(self) -> Index:
        """Position of each value within its unit [n]."""
        return np.arange(self.unit.size) - np.searchsorted(self.unit, self.unit)

    def select(self, kept: NDArray[np.bool_]) -> "Sample":
        """Keep some of the values."""
        unit = np.unique(self.unit[kept], return_inverse=True)[1]
        return Sample(self.values[kept], unit, self.step[kept], self.kind)


class Error(NamedTuple):
    """Variance of means of series, or of their difference between two samples."""

    variance: Array  # [series]
    dof: Array  # [series] of that variance
    parts: Array  # [part, series] independent; their squares add up to the variance
    within: Array  # [series] what it would be if units did not differ; `variance` for steps


def error_of_means(sample: Sample, series: Array, floor: bool = True) -> Error:
    """Variance of the means of series [n, series] whose own means are zero.

    Units vary as the sums of their values do, R/(R - 1) sum u_r^2 where all are as long. A unit
    with a share h of the values draws the mean towards itself, so its u_r counts (1 - 1/R)/(1 - h)
    times: the jackknife over units (Bell and McCaffrey 2002, Survey Methodology 28, 169). What all
    runs have in common at a step, the work it does, is no noise of theirs and is taken out of the
    floor.
    """
    n = sample.values.size
    if sample.kind == "steps":
        return _of_steps(series)
    sums = _sums(sample.unit, series) / n * _leverage(sample)[:, None]
    found = _of_units(sums)
    own = series - _means(sample.unit, series)[sample.unit]
    if sample.kind == "clusters":
        return found._replace(within=(own**2).sum(axis=0) / n**2)
    if not floor or n < 4 * sums.shape[0]:
        return found
    own = own - _at_steps(own, sample.step, sample.step)
    own *= np.sqrt(sums.shape[0] / (sums.shape[0] - 1.0))
    within = _of_steps(own).variance  # runs end to end; seams are few
    return _raised(found, np.maximum(found.variance, within))._replace(within=within)


def _leverage(sample: Sample) -> Array:
    """Say how much more a long unit's sum counts [unit]; 1 where all are as long, or one is."""
    count = np.bincount(sample.unit).astype(np.float64)
    if count.size < 2:
        return np.ones(count.size)
    return np.asarray((1.0 - 1.0 / count.size) / (1.0 - count / count.sum()))


def errors_of_sides(
    a: Sample, b: Sample, of_a: Array, of_b: Array, floor: bool = True
) -> tuple[Error, Error]:
    """Errors of either sample's means on its own; a single run's beside several is theirs.

    Of one run against several, the single one is taken to vary as those do, and the difference as
    s^2 (1 + 1/R), as in a prediction; work that all do at a step is left out.
    """
    if not is_borrowed(a, b):
        return error_of_means(a, of_a, floor), error_of_means(b, of_b, floor)
    many, one, of_many, of_one = (a, b, of_a, of_b) if a.kind == "runs" else (b, a, of_b, of_a)
    found = error_of_means(many, of_many, floor)
    own = of_one - _at_steps(of_many, many.step, one.step)
    single = np.maximum(found.variance * many.n_units, _of_steps(own - own.mean(axis=0)).variance)
    alone = Error(single, found.dof, np.zeros((0, single.size)), single)
    return (found, alone) if a.kind == "runs" else (alone, found)


def is_borrowed(a: Sample, b: Sample) -> bool:
    """Say whether one run is held against several."""
    return {a.kind, b.kind} == {"runs", "steps"}


def independent_error(
    sides: tuple[Error, Error], scale: tuple[Array | float, Array | float], borrowed: bool
) -> Error:
    """Error of a difference from the errors of both sides, each times its scale [series].

    Degrees of freedom are Welch's; those of the several runs where a single one borrows from them.
    """
    first, second = (
        Error(e.variance * c**2, e.dof, e.parts * c, e.within * c**2)
        for e, c in zip(sides, scale, strict=True)
    )
    variance, within = first.variance + second.variance, first.within + second.within
    if borrowed:
        many = first if first.parts.size else second
        return _raised(many, variance)._replace(within=within)
    squares = first.variance**2 / first.dof + second.variance**2 / second.dof
    dof = np.divide(variance**2, squares, out=np.ones_like(variance), where=squares > 0.0)
    return Error(variance, dof, np.vstack([first.parts, second.parts]), within)


def paired_error(a: Sample, b: Sample, of_a: Array, of_b: Array, pairing: Pairing) -> Error:
    """Error of a difference from what each cluster, or each step, adds to it."""
    if pairing == "step":
        return _of_steps(of_b - of_a)
    n = 1 + max(int(a.unit.max()), int(b.unit.max()))
    return _of_units(
        _sums(b.unit, of_b, n) / b.values.size - _sums(a.unit, of_a, n) / a.values.size
    )


def errors_of_both(
    a: Sample, b: Sample, of_a: Array, of_b: Array, pairing: Pairing, floor: bool = True
) -> tuple[Array, Array]:
    """Give standard errors of the means of either sample, common work at a step left out."""
    if pairing == "step":
        half = np.sqrt(0.5 * _of_steps(of_b - of_a).variance)
        return half, half
    first, second = errors_of_sides(a, b, of_a, of_b, floor)
    return np.sqrt(first.variance), np.sqrt(second.variance)


def _of_steps(series: Array) -> Error:
    """Variance of means of one series in time order."""
    found = long_run(series)
    variance = (found.parts**2).sum(axis=0)
    return Error(variance, found.dof, found.parts, variance)


def _raised(found: Error, variance: Array) -> Error:
    """Raise a variance, and the contributions to it."""
    scale = np.sqrt(
        np.divide(variance, found.variance, out=np.ones_like(variance), where=found.variance > 0.0)
    )
    return Error(variance, found.dof, found.parts * scale, found.within)


def _at_steps(series: Array, steps: Index, at: Index) -> Array:
    """Mean over runs of series at the same step [at, series]; 0 where no run has it."""
    known, index = np.unique(steps, return_inverse=True)
    means = _means(index, series)
    place = np.clip(np.searchsorted(known, at), 0, known.size - 1)
    return np.asarray(np.where((known[place] == at)[:, None], means[place], 0.0))


def within_of_difference(a: Sample, b: Sample, of_a: Array, of_b: Array, pairing: Pairing) -> Array:
    """Variance that replicates within clusters alone give the difference of means [series]."""
    inside_a = of_a - _means(a.unit, of_a)[a.unit]
    inside_b = of_b - _means(b.unit, of_b)[b.unit]
    n = min(a.values.size, b.values.size) if pairing == "cluster" else 0
    both = inside_b[:n] / b.values.size - inside_a[:n] / a.values.size
    rest = (inside_b[n:] ** 2).sum(axis=0) / b.values.size**2
    rest = rest + (inside_a[n:] ** 2).sum(axis=0) / a.values.size**2
    return np.asarray((both**2).sum(axis=0) + rest)


def _of_units(sums: Array) -> Error:
    """Variance of a sum over independent units [unit, series] of mean zero."""
    n = sums.shape[0]
    if n < 2:
        nothing = np.full(sums.shape[1], np.inf)
        return Error(nothing, np.ones(sums.shape[1]), sums, nothing)
    parts = (sums - sums.mean(axis=0)) * np.sqrt(n / (n - 1.0))
    variance = (parts**2).sum(axis=0)
    return Error(variance, np.minimum(n - 1.0, moment_dof(parts)), parts, variance)


def _sums(unit: Index, series: Array, n: int = 0) -> Array:
    """Sum series by unit [unit, series]."""
    return np.stack([np.bincount(unit, column, minlength=n) for column in series.T], axis=1)


def _means(unit: Index, series: Array) -> Array:
    """Average series by unit [unit, series]."""
    return np.asarray(_sums(unit, series) / np.bincount(unit)[:, None])
