"""What a model of step times predicts: steps, and totals of whole runs.

A step is its typical time times (1 + run effect + drift + own noise), plus stalls; totals follow
from the exact normal distribution of the drift's weighted sum and a compound Poisson of stalls.
With no event between the steps nothing is to be walked through as in `prism.simulation.runs.model`,
which has no place for a beginning, a clock or an offset of totals, and no distribution to condition
a run in progress by.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from prism.models.steptimes.model import StepModel
from prism.models.steptimes.spread import Spread
from prism.simulation.runs.drift import ar1, drift_variance
from prism.traces.table import SHORTEST_S

Array = NDArray[np.float64]
MAX_WALK = 1_000_000  # steps whose weights are held one by one
_AHEAD = 0.2  # last share of the steps seen whose mean stands for all that come after
_FEW = 64  # steps whose own noise is drawn one by one: few do not make a sum normal
_STREAM = 40  # keeps these draws apart from others under the same seed


@dataclass(frozen=True)
class Drawn:
    """Runs that were drawn.

    Attributes
    ----------
    total : float64 [run]
        Seconds, the offset between steps and measured totals included.
    terms : dict of str to float64 [run]
        Seconds by term; they add up to the total.
    """

    total: Array
    terms: dict[str, Array]


@dataclass(frozen=True)
class Work:
    """Typical seconds of the steps of a run, in brief.

    Attributes
    ----------
    steps : float64 [step]
        One by one, as far as they are held.
    rest_s, n_rest
        Mean of the steps after those [s], and their number.
    """

    steps: Array
    rest_s: float
    n_rest: int

    @property
    def total(self) -> float:
        """Sum [s]."""
        return float(self.steps.sum()) + self.rest_s * self.n_rest

    @property
    def squares(self) -> float:
        """Sum of squares [s^2]."""
        return float(self.steps @ self.steps) + self.rest_s**2 * self.n_rest

    @property
    def n(self) -> int:
        """Number of steps."""
        return self.steps.size + self.n_rest


def work_of(model: StepModel, n_steps: int, first: int = 0) -> Work:
    """Typical seconds of steps `first` to `n_steps`; beyond those seen, the mean of the last."""
    k = model.mean_over
    seen = np.repeat(model.work, k) if k > 1 else model.work
    ahead = after(model)
    if not model.has_profile:
        held = min(max(n_steps - first, 0), MAX_WALK)
        return Work(np.full(held, ahead), ahead, max(0, n_steps - first - held))
    return Work(seen[first:n_steps], ahead, max(0, n_steps - max(seen.size, first)))


def after(model: StepModel) -> float:
    """Mean time of steps after those that were seen [s]."""
    last = max(1, int(_AHEAD * model.work.size))
    return float(model.work[-last:].mean()) if model.has_profile else model.step_s


def generator(seed: int, stream: int) -> np.random.Generator:
    """Random numbers of one purpose under a seed."""
    return np.random.Generator(np.random.Philox(key=[seed, _STREAM + stream]))


def independent(model: StepModel) -> StepModel:
    """Model of the same steps without memory: drift and run effect drawn anew in every step."""
    s = model.spread
    white = float(np.sqrt(s.white**2 + s.drift**2 + s.run**2))
    return replace(model, spread=Spread(white=white))


def drift_sum_variance(work: Work, spread: Spread, step_s: float) -> float:
    """Variance of the drift's sum over the steps, weighted by their time [s^2].

    Notes
    -----
    Sum over i, j of w_i w_j r^|i - j|, by a recursive filter; steps that are not held one by one
    count at their mean, which is exact where they are alike.
    """
    if spread.drift <= 0.0:
        return 0.0
    rate = step_s / spread.tau_s
    if work.n_rest == 0:
        w = work.steps
        carried = lfilter([1.0], [1.0, -np.exp(-rate)], w)
        return spread.drift**2 * float(2.0 * (w @ carried) - w @ w)
    mean = work.total / work.n
    return (spread.drift * mean) ** 2 * drift_variance(work.n, rate, 1.0)


def total_std(spread: Spread, work: Work, step_s: float) -> float:
    """Spread of the total of such steps, stalls left out [s]."""
    own = spread.white**2 * work.squares
    drift = drift_sum_variance(work, spread, step_s)
    return float(np.sqrt(own + drift + (spread.run * work.total) ** 2))


def draw_runs(model: StepModel, n_steps: int, n_runs: int, seed: int) -> Drawn:
    """Draw totals of whole runs.

    Parameters
    ----------
    n_steps : int
        Steps of a run; what totals leave out at the start is left out.
    """
    skips = min(model.offset_skips * model.mean_over, n_steps)
    work = work_of(model, n_steps, skips)
    rng = [generator(seed, k) for k in range(6)]
    normal = [r.standard_normal(n_runs) for r in rng[:3]]
    s, total = model.spread, work.total
    terms = {
        "steps": np.full(n_runs, total),
        "run": s.run * total * normal[0],
        "drift": np.sqrt(drift_sum_variance(work, s, model.step_s)) * normal[1],
        "white": _white(model, work, rng[5], normal[2]),
        "stalls": draw_stalls(model, np.full(n_runs, _late(model, work, skips)), rng[3]),
        "beginning": draw_beginning(model, n_runs, skips, n_steps, rng[4]),
        "offset": model.offset_s + model.offset_std_s * generator(seed, 6).standard_normal(n_runs),
    }
    return Drawn(np.asarray(sum(terms.values())), terms)


def _white(model: StepModel, work: Work, rng: np.random.Generator, normal: Array) -> Array:
    """Sum of the steps' own noise [run; s]; of few steps by their distribution, else normal."""
    s = model.spread
    if work.n > _FEW:
        return np.asarray(normal * s.white * np.sqrt(work.squares))
    drawn = rng.choice(model.residuals, (normal.size, work.n))
    return np.asarray(s.white * drawn @ work.steps)


def _late(model: StepModel, work: Work, first: int) -> float:
    """Seconds of the steps after the beginning, where stalls come at their rate."""
    early = max(0, model.beginning_s.shape[1] * model.mean_over - first)
    return work.total - float(work.steps[:early].sum())


def draw_stalls(model: StepModel, seconds: Array, rng: np.random.Generator) -> Array:
    """Sum of the stalls in given seconds of steps [run; s]: compound Poisson."""
    return compound(model.stall_rate * seconds, model.stall_s, rng)


def compound(expected: Array, lengths: Array, rng: np.random.Generator) -> Array:
    """Sum Poisson numbers of lengths, drawn with replacement [run; s]."""
    if not lengths.size:
        return np.zeros(expected.size)
    counts = rng.poisson(expected)
    many = 1_000_000  # beyond, by the central limit theorem
    if counts.sum() > many:
        spread = np.sqrt(counts * float(lengths.var()))
        return np.asarray(counts * lengths.mean() + spread * rng.standard_normal(counts.size))
    drawn = rng.choice(lengths, int(counts.sum()))
    owner = np.repeat(np.arange(counts.size), counts)
    return np.bincount(owner, drawn, counts.size).astype(np.float64)


def draw_beginning(
    model: StepModel, n_runs: int, first: int, last: int, rng: np.random.Generator
) -> Array:
    """Draw what the beginning adds to steps `first` to `last` [run; s]: that of a measured run."""
    k = model.mean_over
    early = model.beginning_s[:, first // k : last // k].sum(axis=1) * k
    return np.asarray(rng.choice(early, n_runs))


def draw_steps(
    model: StepModel, positions: NDArray[np.int64], n_runs: int, seed: int,
    elapsed: Array | None = None,
) -> Array:  # fmt: skip
    """Draw steps of runs, [run, position] s.

    Parameters
    ----------
    positions : int64 [position]
        Places of the steps in a run, ascending, counted from 0.
    elapsed : float64 [position], optional
        Steps since the start, where the places leave some out; all steps follow each other where
        None.
    """
    rng = [generator(seed, 10 + k) for k in range(7)]
    shape = (n_runs, positions.size)
    s, k = model.spread, model.mean_over
    own = s.white / np.sqrt(k)
    grain = model.grain_s / model.step_s  # reading the clock is part of the measured noise
    own = np.sqrt(max(own**2 - grain**2 / 12.0, 0.0))
    deviation = own * _spread_out(rng[0].choice(model.residuals, shape), model, rng[6])
    deviation += s.run * rng[1].standard_normal((n_runs, 1))
    if s.drift > 0.0:
        time = np.asarray(positions, np.float64) * k if elapsed is None else elapsed
        at_memory = time * (model.step_s / s.tau_s)
        deviation += s.drift * ar1(at_memory, n_runs, rng[2]).T
    at = np.minimum(positions, model.work.size - 1)
    base = np.where(positions < model.work.size, model.work[at], after(model))
    steps = np.maximum(base * (1.0 + deviation), SHORTEST_S)
    n_early = model.beginning_s.shape[1]
    late = positions >= n_early
    if model.stall_rate > 0.0:
        # a value that is the mean of k steps shows a k-th of a stall
        hits = rng[3].random(shape) < -np.expm1(-model.stall_rate * base * k)
        hits &= late
        steps[hits] += rng[4].choice(model.stall_s, int(hits.sum())) / k
    if n_early and not late.all():
        rows = rng[5].integers(0, model.beginning_s.shape[0], n_runs)
        steps[:, ~late] += model.beginning_s[rows][:, positions[~late]]
    if model.grain_s > 0.0:
        # the same numbers that were read, so that equal times are equal
        steps = np.round(np.rint(steps / model.grain_s) * model.grain_s, 9)
    return np.asarray(np.maximum(steps, 0.0))


def _spread_out(values: Array, model: StepModel, rng: np.random.Generator) -> Array:
    """Fill the gaps that a coarse clock leaves in the noise's distribution; spread kept."""
    s = model.spread
    own = s.white * model.step_s
    if model.grain_s <= 0.0 or own <= 0.0:
        return values
    width = model.grain_s / own
    mixed = values + width * (rng.random(values.shape) - 0.5)
    return np.asarray(mixed / np.sqrt(1.0 + width**2 / 12.0))
