"""The order in which calls are made: warm-up apart, then blocks of cases in random order.

Every round goes through all cases in a new random order and makes a block of calls of each, so that
a drift of the machine falls on all of them alike, and calls of one block follow each other as they
do in training. Sustained, each case instead runs back to back until its rate settles, as it does at
a GPU's power limit, and its calls follow. Samples are handed out every few seconds, so that little
is lost when it is interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prism.common.errors import PrismError, named
from prism.measuring.machine import read_state
from prism.measuring.samples import Array, Samples
from prism.measuring.timers import Block

LEAD = 2
"""Calls of each block that are not counted, its first: another case ran last, whose data fill the
caches, and the first call after a synchronisation is 4 to 25 % slow on an H100."""
_KEEP_EVERY_S = 5.0
_STATE_EVERY_S = 10.0
_WARM_BLOCK = 10
_WARM_SHARE = 0.3  # of the time there is, for warm-up at most
_SETTLED = 0.02  # medians of two blocks that differ by less are the same
_WINDOW_S = 0.25  # of calls back to back, whose medians tell whether the rate has settled
_WINDOW_CALLS = 2_000  # in a window at most
_SUSTAINED_S = 3.0  # back to back at most before calls count: an H100's power limit acts within 1 s
_STEADY = 0.02  # means of two windows and of the two before that differ by less are steady
_MEDIAN_ERROR = 1.2533  # standard error of a normal median over that of the mean


@dataclass(frozen=True)
class Plan:
    """How a measurement is made.

    Attributes
    ----------
    repetitions : int
        Calls of each case that count.
    warm_up : int
        Most calls of each case before these.
    block : int
        Calls of one case one after another.
    limit_s : float or None
        Stop after this long [s], with what there is.
    seed : int
        Of the order.
    device : str
        ``cpu`` or ``cuda``: whose state is recorded.
    sustained : bool
        Case by case, back to back until the rate settles; `warm_up` and `block` say nothing then.
    """

    repetitions: int = 2_000
    warm_up: int = 200
    block: int = 50
    limit_s: float | None = None
    seed: int = 0
    device: str = "cpu"
    sustained: bool = False


class Bench(Protocol):
    """Runs cases by their number."""

    def block(self, case: int, n: int) -> Block:
        """Make n calls of a case."""
        ...

    def agree(self, value: float) -> float:
        """Give one value to all ranks, so that they decide alike; the first rank's."""
        ...


Progress = Callable[[int, int], None]


def check_threads(threads: int | None) -> int:
    """Return the threads of each process, one where None; raises PrismError below one."""
    if threads is not None and threads < 1:
        raise PrismError(f"{named('threads')} {threads}: expected 1 or more")
    return 1 if threads is None else threads


def run_session(
    bench: Bench,
    samples: Samples,
    plan: Plan,
    progress: Progress | None = None,
    keep: Callable[[Samples], None] | None = None,
    began: float | None = None,
) -> Samples:
    """Measure every case of samples until each has its calls."""
    began = time.perf_counter() if began is None else began
    earlier = max((float(at[-1]) for at in samples.at if at.size), default=0.0)
    states = samples.attrs.setdefault("states", [])
    states.append(read_state(plan.device))
    log = _Log(bench, samples, plan, began, began - earlier, progress, keep)
    try:
        (_sustained if plan.sustained else _rounds)(log)
    finally:
        states.append(read_state(plan.device))
        if keep is not None and any(samples.counts()):
            keep(samples)
    return samples


class _Log:
    """Makes blocks of calls and writes them down."""

    def __init__(
        self, bench: Bench, samples: Samples, plan: Plan, began: float, origin: float,
        progress: Progress | None, keep: Callable[[Samples], None] | None,
    ) -> None:  # fmt: skip
        self.bench, self.samples, self.plan, self.began = bench, samples, plan, began
        self.origin, self.progress, self.keep = origin, progress, keep
        self.total = plan.repetitions * len(samples.cases)
        last = max((int(block[-1]) for block in samples.block if block.size), default=-1)
        self.number, self.kept, self.looked = last + 1, began, began
        self.rng = np.random.Generator(np.random.Philox(plan.seed))

    def missing(self, case: int) -> int:
        """Count the calls of a case that are still to be made."""
        return self.plan.repetitions - self.samples.counts()[case]

    def block(self, case: int, n: int, lead: int) -> float:
        """Make some calls, the first of them not counted; median duration [s]."""
        made = self.bench.block(case, lead + n)
        slowest = made.seconds if made.slowest is None else made.slowest
        seconds, at, slowest = made.seconds[lead:], made.at[lead:] - self.origin, slowest[lead:]
        self.samples.add(case, seconds, at, slowest, self.number)
        self.number += 1
        now = time.perf_counter()
        if self.progress is not None:
            self.progress(sum(self.samples.counts()), self.total)
        if now - self.looked > _STATE_EVERY_S:
            self.samples.attrs["states"].append(read_state(self.plan.device))
            self.looked = time.perf_counter()
        if self.keep is not None and now - self.kept > _KEEP_EVERY_S:
            self.keep(self.samples)
            self.kept = time.perf_counter()
        return _typical(slowest)

    def is_over(self) -> bool:
        """Tell whether time is up, and note it."""
        over = _is_over(self.bench, self.plan, self.began)
        if over:
            self.samples.attrs["stopped"] = f"after {self.plan.limit_s:g} s, as --limit says"
        return over


def _rounds(log: _Log) -> None:
    """Go through the cases in random order until each has its calls, or time is up."""
    bench, plan, cases = log.bench, log.plan, range(len(log.samples.cases))
    warm = [_warm_up(bench, case, plan, log.began) for case in cases]
    log.samples.attrs["warm_up"] = warm
    typical = [float(one.get("last_s", 0.0)) for one in warm]
    while any(log.missing(case) > 0 for case in cases):
        for case in map(int, log.rng.permutation(len(cases))):
            n = min(plan.block, log.missing(case))
            if n <= 0:
                continue
            n = _in_time(bench, plan, log.began, typical[case], n + LEAD) - LEAD
            # of long calls one that counts costs less than two that do not
            typical[case] = log.block(case, n, LEAD) if n > 0 else log.block(case, 1, 0)
            if log.is_over():
                return


def _sustained(log: _Log) -> None:
    """Case by case: calls back to back until the rate settles, then those that count."""
    bench, plan, n_cases = log.bench, log.plan, len(log.samples.cases)
    warm: list[dict[str, Any]] = [{"calls": 0, "settled": None} for _ in range(n_cases)]
    log.samples.attrs["warm_up"] = warm
    for done, case in enumerate(map(int, log.rng.permutation(n_cases))):
        if log.missing(case) <= 0:
            continue
        end = np.inf
        if plan.limit_s is not None:  # what is left, shared by the cases that are left
            now = time.perf_counter()
            end = now + bench.agree((log.began + plan.limit_s - now) / (n_cases - done))
        warm[case], typical = _settle(bench, case, end)
        while log.missing(case) > 0:
            log.block(case, min(_window(typical), log.missing(case)), LEAD)
            if bench.agree(time.perf_counter()) >= end:
                break
        if log.is_over():
            return


def _window(seconds: float) -> int:
    """Count the calls of so long that fill a window."""
    return int(np.clip(_WINDOW_S / max(seconds, 1e-9), 1, _WINDOW_CALLS))


def _settle(bench: Bench, case: int, end: float) -> tuple[dict[str, Any], float]:
    """Call a case back to back until two windows take as long as the two before, or time is up.

    Returns what is kept of it, and the median of the last window [s].
    """
    began = time.perf_counter()
    limit = min(_SUSTAINED_S, _WARM_SHARE * (end - began))
    first = bench.block(case, 1).seconds
    medians, calls, settled = [float(first[0])], 1, False
    while not settled and bench.agree(time.perf_counter() - began) < limit:
        n = _window(medians[-1]) + LEAD
        medians.append(_typical(bench.block(case, n).seconds[LEAD:]))
        calls += n
        if len(medians) > 4:
            before, after = sum(medians[-4:-2]), sum(medians[-2:])
            settled = abs(after - before) <= _STEADY * before
    kept = {"calls": calls, "settled": settled, "first_s": medians[0], "last_s": medians[-1]}
    return kept, medians[-1]


def _is_over(bench: Bench, plan: Plan, began: float, share: float = 1.0) -> bool:
    """Tell whether this share of the time there is has passed, by the first rank's clock."""
    if plan.limit_s is None:
        return False
    return bench.agree(time.perf_counter() - began) > share * plan.limit_s


def _typical(seconds: Array) -> float:
    """Median of some calls [s]; 0 where none was made."""
    return float(np.median(seconds)) if seconds.size else 0.0


def _in_time(bench: Bench, plan: Plan, began: float, seconds: float, n: int) -> int:
    """How many of n calls of so long fit into the time there is, at least one; ranks agree."""
    if plan.limit_s is None:
        return n
    left = plan.limit_s - (time.perf_counter() - began)
    fit = min(float(n), max(1.0, left // seconds)) if seconds > 0.0 else float(n)
    return int(bench.agree(fit))


def _warm_up(bench: Bench, case: int, plan: Plan, began: float) -> dict[str, Any]:
    """Call a case until it takes no less time than before; say how long that took."""
    if plan.warm_up == 0 or _is_over(bench, plan, began, _WARM_SHARE):
        return {"calls": 0, "settled": None}
    first = bench.block(case, 1).seconds
    calls = 1
    before: Array | None = None
    settled = False
    while calls < plan.warm_up and not settled and not _is_over(bench, plan, began, _WARM_SHARE):
        n = min(_WARM_BLOCK, plan.warm_up - calls)
        took = _typical(first if before is None else before)
        n = _in_time(bench, plan, began, took / _WARM_SHARE, n)
        now = bench.block(case, n).seconds
        calls += n
        settled = before is not None and is_settled(before, now)
        before = now
    last = first if before is None else before
    return {
        "calls": calls,
        "settled": settled,
        "first_s": float(first[0]),
        "last_s": float(np.median(last)),
    }


def is_settled(before: Array, after: Array) -> bool:
    """Tell whether calls got no faster: medians alike within 2 %, or two of their standard errors.

    The error is that of a median of values whose spread is 1.4826 median absolute deviations.
    """

    def middle(values: Array) -> tuple[float, float]:
        median = float(np.median(values))
        spread = 1.4826 * float(np.median(np.abs(values - median)))
        return median, _MEDIAN_ERROR * spread / np.sqrt(values.size)

    (a, error_a), (b, error_b) = middle(before), middle(after)
    return a - b <= max(_SETTLED * b, 2.0 * float(np.hypot(error_a, error_b)))
