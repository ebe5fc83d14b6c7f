"""Steps drawn one by one, for runs so short that a few rare ones show in the total."""

from dataclasses import dataclass

import numpy as np

from prism.simulation.runs.parts import DAY_S, Array, Drift, Index, RunModel, StallProcess

BLOCK = 128  # steps drawn at once: arrays of [128, 1024] stay in the cache


@dataclass(frozen=True)
class SteppedRuns:
    """Sums over the next steps of many runs [steps taken, run], from none on."""

    end_s: Array  # with stalls and pauses
    noise_s: Array
    drift_s: Array
    stalls_s: Array
    drift: Array  # what the steps share, before the next one [1]

    def within(self, gap_s: Array) -> tuple[Array, Array]:
        """Count the steps that end in time, and the seconds over."""
        n = (self.end_s[1:] <= gap_s).sum(axis=0)
        over = np.where(np.isfinite(gap_s), gap_s, 0.0) - self.end_s[n, np.arange(n.size)]
        return n.astype(float), over

    def after(self, n: Array) -> tuple[Array, Array, Array, Array]:
        """Seconds of noise, drift and stalls of n steps, and the drift after them [run]."""
        at = n.astype(np.int64), np.arange(n.size)
        return self.noise_s[at], self.drift_s[at], self.stalls_s[at], self.drift[at]


def draw_noise(
    model: RunModel, cluster: Index, state: Index, n: int, rng: np.random.Generator
) -> Array:
    """Draw what n steps take beyond their mean, no less than that below it [step, run]."""
    shape, std = (n, cluster.size), model.std[cluster, state]
    if model.residuals.size:
        calm = model.std[cluster, 0]
        wider = np.divide(std, calm, out=np.ones(cluster.size), where=calm > 0.0)
        noise = wider * model.residuals[rng.integers(0, model.residuals.size, shape)]
    else:
        noise = std * rng.standard_normal(shape)
    return np.asarray(np.maximum(noise, -model.mean[cluster, state]))


def draw_drift(
    drift: Drift, start: Array, base_s: Array, at_s: Array, n: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draw what all ranks share: factors of mean 1 [step, run], and the series [step + 1, run].

    A lognormal AR(1) series from a start on, and a daily wave from a time of day on.
    """
    series, factor = np.tile(start, (n + 1, 1)), np.ones((n, start.size))
    sigma = np.sqrt(np.log1p(np.square(drift.cv)))
    if np.any(sigma > 0.0):
        r = np.exp(-drift.rate(base_s))
        series[1:] = np.sqrt(1.0 - r**2) * rng.standard_normal((n, start.size))
        for i in range(n):
            series[i + 1] += r * series[i]
        factor = np.exp(sigma * series[:-1] - 0.5 * sigma**2)
    if drift.diurnal_cv > 0.0:
        at = at_s + base_s * np.arange(n)[:, None] - drift.diurnal_peak_s
        factor += np.sqrt(2.0) * drift.diurnal_cv * np.cos(2.0 * np.pi * at / DAY_S)
    return np.maximum(factor, 0.0), series


def draw_stalls(process: StallProcess | None, seconds: Array, rng: np.random.Generator) -> Array:
    """Draw the seconds of stalls in each step [step, run]."""
    if process is None:
        return np.zeros(seconds.shape)
    count = rng.poisson(process.rate_per_s * seconds).ravel()
    at = np.repeat(np.arange(count.size), count)
    drawn = process.lengths[rng.integers(0, process.lengths.size, at.size)]
    return np.asarray(np.bincount(at, drawn, count.size).reshape(seconds.shape), np.float64)


def add_up(values: Array) -> Array:
    """Add up the first steps, from none on [step + 1, run]."""
    return np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])


def draw_steps(
    model: RunModel, cluster: Index, state: Index, scale: Array, work: Array, pauses_s: Array,
    start: Array, at_s: Array, rng: np.random.Generator,
) -> SteppedRuns:  # fmt: skip
    """Draw the next steps of runs.

    Parameters
    ----------
    cluster, state : int64 [run]
        Whose steps they are.
    scale : float64 [run]
        Factor on all of them [1].
    work : float64 [step, run]
        Relative work of each.
    pauses_s : float64 [step + 1, run]
        Checkpoints and evaluations up to each [s].
    start, at_s : float64 [run]
        The drift before the first step [1], and its time of day [s].
    """
    mean = model.mean[cluster, state]
    own = draw_noise(model, cluster, state, work.shape[0], rng)
    factor, drift = draw_drift(
        model.drift.of(cluster), start, scale * mean, at_s, work.shape[0], rng
    )
    steady, noise = scale * work * (mean + own), scale * work * own
    process = None if model.stalls is None else model.stalls.of(cluster)
    stalls = draw_stalls(process, steady * factor, rng)
    return SteppedRuns(
        add_up(steady * factor + stalls) + pauses_s, add_up(noise),
        add_up(steady * (factor - 1.0)), add_up(stalls), drift,
    )  # fmt: skip
