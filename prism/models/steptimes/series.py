"""Step times taken apart: work by step, level, stalls, a beginning that differs.

Runs stand side by side by step number. Where repeats of one schedule show that steps differ in
work, each step is divided by what the runs have in common; what then sticks out of a run's own
neighbourhood is an event, and the events' net excess is a stall.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.ndimage import median_filter
from scipy.signal import savgol_filter
from scipy.special import xlogy
from scipy.stats import binom

from prism.common.arrays import Array, Flags, Index
from prism.traces import StepTimes

WINDOW = 101  # steps of the neighbourhood a step is held against, and work is smoothed over
FEW_RUNS = 3  # below, steps of equal number tell nothing about the work
OUTLIER = 6.0  # robust standard deviations; a normal body of 10^6 steps has none beyond 5
_JOIN = 2  # steps between outliers of one event: a host's clock catches up in the next steps
_SHIFTS = 99  # circular shifts behind the test of the work by step: p-value to 0.01
_EARLY = 5.0  # stalls this many times as frequent early make a beginning
_LEVEL = 0.001  # chance of a beginning where stalls come evenly
_FLOOR = 1e-9  # relative; what differs by less is rounding


@dataclass(frozen=True)
class Series:
    """Step times by position and run, taken apart."""

    steps: Index  # [position] step numbers, ascending
    runs: tuple[str, ...]  # [run]
    mean_over: int  # steps that one value is the mean of
    # [position] typical seconds of the step; equal where nothing shows that steps differ
    work: Array
    has_profile: bool  # whether steps differ in work
    # [position, run] step over work, less 1; not-a-number in events and where nothing was measured
    body: Array
    # [position, run] what an event adds to its steps [s], clock errors included; 0 elsewhere
    excess: Array
    # [stall] net excess of each event that delays the run [s], and where it begins
    stall_run: Index
    stall_position: Index
    stall_s: Array
    # [event] where each event begins, those that add nothing included
    event_position: Index
    # positions at the start that have stalls of their own, kept as they were measured
    beginning: int
    threshold: float  # relative deviation beyond which a step is in an event
    grain_s: float  # step of a clock that shows few values [s]; 0 for a fine one

    @property
    def elapsed(self) -> Array:
        """Steps since the first, gaps in their numbers included [position]."""
        return elapsed_steps(self.steps, self.steps, self.mean_over)


def elapsed_steps(steps: Index, usual: Index, mean_over: int) -> Array:
    """Count steps since the first of these numbers; means of steps may be numbered one by one."""
    stride = float(np.median(np.diff(usual))) if usual.size > 1 else 1.0
    return np.asarray((steps - steps[0]) * max(1.0, mean_over / stride))


def decompose(times: StepTimes, seed: int = 0, least: float = 0.0) -> Series:
    """Separate work by step, body and stalls.

    `times`: of one or several runs; steps that fewer than half of the runs have are passed over
    where runs are repeats of each other. `seed`: of the shifts that test whether steps differ in
    work. `least`: relative deviation that is in no event [1].
    """
    steps, runs, seconds = side_by_side(times)
    work, has_profile = _work_by_step(seconds, seed)
    ratio = seconds / work[:, None]
    level = _local_level(ratio)
    deviation = ratio / level - 1.0
    threshold = max(least, _threshold(deviation, seconds))
    outlier = np.abs(np.nan_to_num(deviation)) > threshold
    if has_profile:
        work = _mean_work(seconds, ratio, outlier, work)
        ratio = seconds / work[:, None]
        level = _local_level(ratio)
        deviation = ratio / level - 1.0
    in_event, run, position, net = _events(deviation, level * work[:, None], outlier, threshold)
    delays = net > threshold * float(np.median(work))
    excess = np.where(in_event, np.nan_to_num(deviation) * level * work[:, None], 0.0)
    beginning = _beginning(position, outlier)
    body = np.where(in_event | np.isnan(seconds), np.nan, ratio - 1.0)
    centre = 1.0 + float(np.nanmean(body))  # the level of a body without stalls is 1
    work, body = work * centre, (1.0 + body) / centre - 1.0
    return Series(
        steps, runs, times.mean_over, work, has_profile, body, excess,
        run[delays], position[delays], net[delays], position, beginning, threshold,
        clock_grain(seconds),
    )  # fmt: skip


def side_by_side(times: StepTimes) -> tuple[Index, tuple[str, ...], Array]:
    """Lay runs side by side.

    Returns numbers of the steps [position], names of the runs [run], and seconds [position, run],
    not-a-number where a run lacks the step.
    """
    names, first, run = np.unique(times.run, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    steps, position = np.unique(times.step, return_inverse=True)
    seconds = np.full((steps.size, names.size), np.nan)
    seconds[position, place[run]] = times.seconds
    labels = tuple(str(names[i]) for i in order)
    if names.size == 1:
        return steps, labels, seconds
    common = np.isfinite(seconds).sum(axis=1) * 2 >= names.size
    if common.mean() >= 0.5:
        return steps[common], labels, seconds[common]
    # other steps in each run: no repeats, and only the place in the run is left to go by
    n = int(np.isfinite(seconds).sum(axis=0).max())
    packed = np.full((n, names.size), np.nan)
    for r, column in enumerate(seconds.T):
        values = column[np.isfinite(column)]
        packed[: values.size, r] = values
    return np.arange(n), labels, packed


def _work_by_step(seconds: Array, seed: int) -> tuple[Array, bool]:
    """Find the typical time of each step [position], and whether steps differ."""
    flat = np.full(seconds.shape[0], float(np.nanmedian(seconds)))
    n_with = np.isfinite(seconds).sum(axis=1)
    if seconds.shape[1] < FEW_RUNS or (2 * n_with < seconds.shape[1]).any():
        return flat, False
    rng = np.random.default_rng(seed)
    middle = np.nanmedian(seconds, axis=1)
    filled = np.where(np.isnan(seconds), middle[:, None], seconds)
    filled = np.clip(filled, *np.quantile(filled, [0.02, 0.98])).T.copy()  # tails count little
    if not float(filled.var()) > 0.0:
        return flat, False
    share = float(filled.mean(axis=0).var())
    for _ in range(_SHIFTS):  # shifts keep each run's own correlation and break the common part
        moved = [np.roll(row, rng.integers(0, row.size)) for row in filled]
        if float(np.mean(moved, axis=0).var()) >= share:
            return flat, False
    return np.asarray(np.where(middle > 0.0, middle, flat)), True


def _mean_work(seconds: Array, ratio: Array, outlier: Flags, median: Array) -> Array:
    """Average the runs at each step [position; s], outliers left out.

    A clock of coarse resolution has medians that all err to the same side; means do not. With few
    runs the mean of a step has noise of its own, and is drawn towards its neighbours by its share.
    """
    calm = np.where(outlier | np.isnan(seconds), np.nan, ratio)
    n = np.isfinite(calm).sum(axis=1)
    mean = np.divide(np.nansum(calm, axis=1), n, out=np.ones(n.size), where=n > 0) * median
    within = np.nanmean((calm - np.nanmean(calm, axis=0)) ** 2) * float(median.mean()) ** 2
    noise = within / seconds.shape[1]
    smooth = _smoothed(mean, OUTLIER * math.sqrt(noise))
    apart = mean - smooth
    keep = max(0.0, 1.0 - noise / max(float(np.mean(np.clip(apart**2, 0, 9 * noise))), 1e-300))
    return np.asarray(smooth + np.where(apart**2 > 9.0 * noise, 1.0, keep) * apart)


def _smoothed(mean: Array, size: float) -> Array:
    """Smooth what runs have in common [position], jumps of more than `size` left out."""
    window = min(WINDOW, mean.size - 1 + mean.size % 2)  # odd
    middle = median_filter(mean, window, mode="mirror")
    near = np.clip(mean, middle - size, middle + size)
    return np.asarray(savgol_filter(near, window, min(1, window - 1)))  # a line at the ends


def _local_level(ratio: Array) -> Array:
    """Return the running median of each run [position, run]."""
    filled = np.where(np.isnan(ratio), np.nanmedian(ratio, axis=0), ratio)
    if ratio.shape[0] < 2 * WINDOW:
        level = np.broadcast_to(np.median(filled, axis=0), filled.shape)
        return np.asarray(level)
    return np.asarray(median_filter(filled, size=(WINDOW, 1), mode="mirror"))


def _threshold(deviation: Array, seconds: Array) -> float:
    """Relative deviation beyond which a step is no part of the body."""
    values = deviation[np.isfinite(deviation)]
    low, middle, high = np.quantile(values, [0.1587, 0.5, 0.8413])
    robust = max(1.4826 * float(np.median(np.abs(values - middle))), 0.5 * float(high - low))
    grain = clock_grain(seconds) / float(np.nanmedian(seconds))
    return max(OUTLIER * robust, OUTLIER * grain / math.sqrt(6.0), _FLOOR)


def clock_grain(seconds: Array) -> float:
    """Find the step of a clock that shows few values [s]; 0 for a fine one."""
    values = seconds[np.isfinite(seconds)]
    known = np.unique(values)
    if known.size < 2 or known.size > 0.2 * values.size:
        return 0.0
    grain = float(f"{np.quantile(np.diff(known), 0.1):.6g}")
    whole = known / grain
    return grain if float(np.abs(whole - np.rint(whole)).max()) < 1e-3 * whole.max() else 0.0


def _events(
    deviation: Array, scale: Array, outlier: Flags, threshold: float
) -> tuple[Flags, Index, Index, Array]:
    """Join outliers that belong together; give their steps, and run, begin and net excess [s]."""
    n, n_runs = outlier.shape
    in_event = np.zeros_like(outlier)
    found: list[tuple[int, int, float]] = []
    low = np.nan_to_num(deviation) < -0.5 * threshold  # a clock that catches up
    for r in np.flatnonzero(outlier.any(axis=0)):
        at = np.flatnonzero(outlier[:, r])
        for group in np.split(at, np.flatnonzero(np.diff(at) > _JOIN) + 1):
            begin, end = int(group[0]), int(group[-1]) + 1
            while end < n and low[end, r]:
                end += 1
            in_event[begin:end, r] = True
            net = float(np.nansum(deviation[begin:end, r] * scale[begin:end, r]))
            found.append((int(r), begin, net))
    run, begin_at, net_s = ([row[k] for row in found] for k in range(3))
    return (
        in_event, np.array(run, np.int64), np.array(begin_at, np.int64),
        np.array(net_s, np.float64),
    )  # fmt: skip


def first_steps(series: Series, n: int) -> Series:
    """Keep the first `n` positions; the work by step stays as all of them show it."""
    early, events = series.stall_position < n, series.event_position < n
    position = series.event_position[events]
    return replace(
        series, steps=series.steps[:n], work=series.work[:n], body=series.body[:n],
        excess=series.excess[:n], stall_run=series.stall_run[early],
        stall_position=series.stall_position[early], stall_s=series.stall_s[early],
        event_position=position,
        beginning=_beginning(position, np.isnan(series.body[:n])),
    )  # fmt: skip


def _beginning(position: Index, outlier: Flags) -> int:
    """Count positions at the start that have events of their own.

    Either those that stick out from the first on; or up to where events become much rarer: the
    change of a Poisson rate with the largest likelihood, among places where chance puts as many
    events before any of them with a probability below 0.001.
    """
    n = outlier.shape[0]
    calm = np.flatnonzero(outlier.mean(axis=1) <= 0.5)
    warm = int(calm[0]) if calm.size else 0
    at = np.sort(position)
    ends = np.unique(at) + 1
    ends = ends[ends <= 0.75 * n]
    early = np.searchsorted(at, ends)
    late = at.size - early
    rate, rest = early / ends, late / (n - ends)
    chance = ends.size * binom.sf(early - 1, at.size, ends / n)
    possible = (early >= FEW_RUNS) & (rate > _EARLY * rest) & (chance < _LEVEL)
    if not possible.any():
        return warm
    likelihood = xlogy(early, rate) + xlogy(late, rest)
    return max(warm, int(ends[possible][likelihood[possible].argmax()]))
