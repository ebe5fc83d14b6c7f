"""The order in which calls are made: warm-up apart, then blocks of cases in random order.

Every round goes through all cases in a new random order and makes a block of calls of each, so that
a drift of the machine falls on all of them alike, and calls of one block follow each other as they
do in training. Samples are handed out every few seconds, so that little is lost when it is
interrupted.
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
"""Calls before each block that are not counted: another case ran last, and its data fill caches."""
_KEEP_EVERY_S = 5.0
_STATE_EVERY_S = 10.0
_WARM_BLOCK = 10
_WARM_SHARE = 0.3  # of the time there is, for warm-up at most
_SETTLED = 0.02  # medians of two blocks that differ by less are the same
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
    """

    repetitions: int = 2_000
    warm_up: int = 200
    block: int = 50
    limit_s: float | None = None
    seed: int = 0
    device: str = "cpu"


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
    samples.attrs["warm_up"] = [_warm_up(bench, i, plan, began) for i in range(len(samples.cases))]
    try:
        _rounds(bench, samples, plan, began, began - earlier, progress, keep)
    finally:
        states.append(read_state(plan.device))
        if keep is not None and any(samples.counts()):
            keep(samples)
    return samples


def _rounds(
    bench: Bench, samples: Samples, plan: Plan, began: float, origin: float,
    progress: Progress | None, keep: Callable[[Samples], None] | None,
) -> None:  # fmt: skip
    """Go through the cases in random order until each has its calls, or time is up."""
    rng = np.random.Generator(np.random.Philox(plan.seed))
    total = plan.repetitions * len(samples.cases)
    number = max((int(block[-1]) for block in samples.block if block.size), default=-1) + 1
    kept = looked = began
    typical = [float(warm.get("last_s", 0.0)) for warm in samples.attrs["warm_up"]]
    while min(samples.counts()) < plan.repetitions:
        for case in rng.permutation(len(samples.cases)):
            n = min(plan.block, plan.repetitions - samples.counts()[case])
            if n <= 0:
                continue
            n = _in_time(bench, plan, began, typical[case], n + LEAD) - LEAD
            if n <= 0:  # long calls: one that counts costs less than two that do not
                n = 1
            else:
                bench.block(int(case), LEAD)
            block = bench.block(int(case), n)
            slowest = block.seconds if block.slowest is None else block.slowest
            typical[case] = _typical(slowest)
            samples.add(int(case), block.seconds, block.at - origin, slowest, number)
            number += 1
            now = time.perf_counter()
            if progress is not None:
                progress(sum(samples.counts()), total)
            if now - looked > _STATE_EVERY_S:
                samples.attrs["states"].append(read_state(plan.device))
                looked = time.perf_counter()
            if keep is not None and now - kept > _KEEP_EVERY_S:
                keep(samples)
                kept = time.perf_counter()
            if _is_over(bench, plan, began):
                samples.attrs["stopped"] = f"after {plan.limit_s:g} s, as --limit says"
                return


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
