"""What the measured steps of one job size tell: mean, spread within and between runs, stalls.

A size is a job and the step times that it was measured at. Its steps are taken apart as those of a
model of step times (`prism.models.steptimes`), and its spread is put as one within runs and one
between them.
"""

from dataclasses import dataclass

import numpy as np

from prism.common.arrays import Array, Flags
from prism.common.text import format_count
from prism.jobs.job import Job
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.series import OUTLIER, Series, decompose, side_by_side
from prism.models.steptimes.spread import mean_variance
from prism.traces import StepTimes

SAMPLES = 4096  # measured steps kept of a size: quantiles to 1/4096


@dataclass(frozen=True)
class Size:
    """A job and its measured steps."""

    job: Job
    source: str  # file of the step times
    # steps and runs
    n: int
    n_runs: int
    # mean step without stalls; median of all measured steps [s]
    mean_s: float
    p50_s: float
    within: float  # standard deviation of the steps of a run around its mean, without stalls [1]
    within_n: float  # independent values that it is worth
    between: float  # variance of the means of runs [1]; not-a-number for one run
    between_noise: float  # part of it that steps of one run explain; known for one run too [1]
    # variance of a long sum of steps over its length [s]: twice the memory for a drift
    slow_s: float
    shape: Array  # [sample] steps' own deviations, unit standard deviation
    steps_s: Array  # [sample] quantiles of all measured steps [s]
    stall_from_s: float  # delay from which a slow step counts as a stall [s]
    # stalls, and the seconds they came in
    stalls: float
    exposure_s: float
    stall_s: Array  # [stall] what each adds [s]

    @property
    def label(self) -> str:
        """Job's name and its GPUs."""
        return f"{self.job.name} ({format_count(self.job.world_size, 'GPU')})"


def measure_size(job: Job, times: StepTimes, seed: int, shortest_s: float = 0.0) -> Size:
    """Take the measured steps of a job apart.

    Steps that are slow in every run (a collector, a save) stick out of the work by step as stalls
    stick out of a run, and count as stalls; odd fast ones (after a pause) are left out.
    """
    model = fit_step_times(times, repeats=0, seed=seed)
    series, k = decompose(times, seed), times.mean_over
    # a value is the mean of k steps, and a delay of one of them is a k-th in it
    typical = float(np.median(series.work))
    stall_from_s = max(shortest_s, k * model.stall_threshold * typical)
    seconds = side_by_side(times)[2]
    odd = _odd_steps(series.work, stall_from_s / k)
    stalled, stall_s, n_stalls = _stalls(series, stall_from_s / k)
    body = np.where(stalled | odd[:, None], np.nan, seconds)
    mean_s, n_runs = float(np.nanmean(body)), body.shape[1]
    own = (body / np.nanmean(body, axis=0) - 1.0)[np.isfinite(body)]
    within = float(own.std())
    delays = series.work[odd & (series.work > mean_s)] - mean_s
    s = model.spread
    noise = mean_variance(s, model.n_steps * k, model.step_s)
    # of single steps: a mean of k holds all of the drift, and a k-th of their own variance
    whole = s.drift**2 + k * max(0.0, within**2 - s.drift**2)
    # work by step comes again in every run
    slow = 2.0 * s.drift**2 * s.tau_s + s.white**2 * mean_s
    return Size(
        job=job, source=times.source, n=int(times.seconds.size), n_runs=n_runs,
        mean_s=mean_s, p50_s=float(np.median(times.seconds)),
        within=float(np.sqrt(whole)), within_n=float(model.report["n_effective"]),
        between=s.run**2 + noise if n_runs > 1 else float("nan"), between_noise=noise,
        slow_s=slow / whole if whole > 0.0 else 0.0,
        shape=np.sort(own) / within if within > 0.0 else np.zeros(1), steps_s=_thinned(times),
        stall_from_s=stall_from_s, stalls=float(n_stalls + delays.size * n_runs),
        exposure_s=float(np.isfinite(body).sum()) * mean_s * k,
        stall_s=k * np.concatenate([stall_s, np.repeat(delays, n_runs)]),
    )  # fmt: skip


def _odd_steps(work: Array, stall_from_s: float) -> Flags:
    """Tell which steps' typical time sticks out of the others' [position]."""
    apart = work - np.median(work)
    robust = 1.4826 * float(np.median(np.abs(apart)))
    return np.asarray(np.abs(apart) > max(stall_from_s, OUTLIER * robust))


def _stalls(series: Series, stall_from_s: float) -> tuple[Flags, Array, int]:
    """Find steps in stalls that long or in a beginning [position, run], and the lengths [s]."""
    stalled = np.zeros(series.body.shape, bool)
    stalled[: series.beginning] = np.isnan(series.body[: series.beginning])
    long = (series.stall_s >= stall_from_s) & (series.stall_position >= series.beginning)
    in_event = series.excess != 0.0
    for run, begin in zip(series.stall_run[long], series.stall_position[long], strict=True):
        rest = in_event[begin:, run]
        end = begin + (rest.size if rest.all() else int(rest.argmin()))
        stalled[begin:end, run] = True
    return stalled, series.stall_s[long], int(long.sum())


def _thinned(times: StepTimes) -> Array:
    """Quantiles of all measured steps [sample; s]; themselves where they are few."""
    values = np.sort(times.seconds)
    if values.size > SAMPLES:
        values = np.quantile(values, (np.arange(SAMPLES) + 0.5) / SAMPLES)
    return np.asarray(values)
