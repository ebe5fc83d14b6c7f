"""One session of calls: how they are timed, in which order they are made, when they count.

Each case is called until it takes as long as before. Then rounds: every one goes through all cases
in a new random order and makes a block of calls of each, so that a drift of the machine falls on
all of them alike, and calls of one block follow each other as they do in training. Sustained, the
calls of a case follow at once, at a GPU's power limit. Samples are handed out every few seconds, so
that little is lost when it is interrupted. Left out: what a call costs the host of a GPU, which
runs ahead of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prism.common.arrays import Array
from prism.measuring.machine import read_state
from prism.measuring.samples import Samples

Call = Callable[[], Any]
Progress = Callable[[int, int], None]
Keep = Callable[[Samples], None]

LEAD = 2
"""Calls of each block that are not counted, its first: another case ran last, whose data fill the
caches, and the first call after a synchronisation is 4 to 25 % slow on an H100."""
_KEEP_EVERY_S = 5.0
_STATE_EVERY_S = 10.0
_EMPTY_CALLS = 2_000  # that tell what the clock costs
_WARM_SHARE = 0.3  # of the time there is, before calls count at most
_WARM_CALLS = 5  # in a window of warm-up
_WINDOW_S, _WINDOW_CALLS = 0.25, 2_000  # in a window of sustained calls, the smaller
_SUSTAINED_S = 3.0  # back to back at most before calls count: an H100's power limit acts within 1 s
_SETTLED = 0.02  # medians that differ by less are the same
_MEDIAN_ERROR = 1.2533  # standard error of a normal median over that of the mean


class Block(NamedTuple):
    """Calls made one after another [call]; times in seconds."""

    seconds: Array  # own duration
    at: Array  # when it began, by the monotonic clock
    slowest: Array | None = None  # of a collective: the longest of its ranks'


class CpuTimer:
    """Times calls by the processor's monotonic clock.

    From every duration `overhead_s` is subtracted: reading the clock twice around an empty call,
    the median of many.
    """

    def __init__(self, before: Call | None = None) -> None:
        self.before, self.overhead_s = _nothing, 0.0
        self.overhead_s = float(np.median(self.block(_nothing, _EMPTY_CALLS).seconds))
        self.before = before or _nothing

    def block(self, call: Call, n: int) -> Block:
        """Call n times and return how long each call took."""
        now, before = time.perf_counter_ns, self.before
        begin, end = np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            before()
            start = now()
            call()
            end[i] = now()
            begin[i] = start
        seconds: Array = (end - begin).astype(np.float64) * 1e-9 - self.overhead_s
        return Block(np.maximum(seconds, 1e-9), begin.astype(np.float64) * 1e-9)


class CudaTimer:
    """Times calls by pairs of events on the current stream; calls are queued without waiting."""

    overhead_s = 0.0

    def __init__(self, torch: Any, before: Call | None = None) -> None:
        self.cuda, self.before = torch.cuda, before or _nothing

    def block(self, call: Call, n: int) -> Block:
        """Call n times and return how long each call took on the GPU."""
        origin, *events = (self.cuda.Event(enable_timing=True) for _ in range(2 * n + 1))
        firsts, lasts = events[::2], events[1::2]
        self.cuda.synchronize()
        began = time.perf_counter()
        origin.record()
        for first, last in zip(firsts, lasts, strict=True):
            self.before()
            first.record()
            call()
            last.record()
        self.cuda.synchronize()
        milliseconds = np.array([a.elapsed_time(b) for a, b in zip(firsts, lasts, strict=True)])
        since = np.array([origin.elapsed_time(first) for first in firsts])
        return Block(np.maximum(milliseconds * 1e-3, 1e-9), began + since * 1e-3)


Timer = CpuTimer | CudaTimer


def make_timer(device: str, torch: Any, before: Call | None = None) -> Timer:
    """Return the timer of a device; `before` comes before each call and is not timed."""
    return CudaTimer(torch, before) if device == "cuda" else CpuTimer(before)


def _nothing() -> None:
    pass


class Bench:
    """Runs cases of this process's device by their number."""

    def __init__(self, calls: Sequence[Call], timer: Timer) -> None:
        self.calls, self.timer = calls, timer

    def block(self, case: int, n: int) -> Block:
        """Make n calls of a case."""
        return self.timer.block(self.calls[case], n)

    def agree(self, value: float) -> float:
        """Give one value to all ranks, so that they decide alike: here there is one."""
        return value


@dataclass(frozen=True)
class Plan:
    """How a measurement is made."""

    repetitions: int = 2_000  # calls of each case that count
    warm_up: int = 200  # most calls of each case before these
    block: int = 50  # calls of one case one after another
    limit_s: float | None = None  # stop after this long, with what there is
    seed: int = 0  # of the order
    device: str = "cpu"  # ``cpu`` or ``cuda``: whose state is recorded
    # case by case, back to back until the rate settles: `warm_up` and `block` say nothing
    sustained: bool = False


def run_session(
    bench: Bench,
    samples: Samples,
    plan: Plan,
    progress: Progress | None = None,
    keep: Keep | None = None,
    began: float | None = None,
) -> Samples:
    """Measure every case of samples until each has its calls, or time is up."""
    session = _Session(bench, samples, plan, progress, keep, began)
    try:
        session.run()
    finally:
        session.look()
        if keep is not None and any(samples.counts()):
            keep(samples)
    return samples


class _Session:
    """Makes blocks of calls and writes them down."""

    def __init__(
        self, bench: Bench, samples: Samples, plan: Plan, progress: Progress | None,
        keep: Keep | None, began: float | None,
    ) -> None:  # fmt: skip
        self.bench, self.samples, self.plan = bench, samples, plan
        self.progress, self.keep = progress, keep
        began = time.perf_counter() if began is None else began
        self.end = np.inf if plan.limit_s is None else began + plan.limit_s
        earlier = max((float(at[-1]) for at in samples.at if at.size), default=0.0)
        last = max((int(block[-1]) for block in samples.block if block.size), default=-1)
        self.origin, self.number, self.kept = began - earlier, last + 1, began
        self.rng = np.random.Generator(np.random.Philox(plan.seed))
        self.look()

    def look(self) -> None:
        """Note the machine's state."""
        self.looked = time.perf_counter()
        self.samples.attrs.setdefault("states", []).append(read_state(self.plan.device))

    def run(self) -> None:
        """Let each case settle; sustained, its calls follow; else rounds of blocks of all."""
        n_cases, sustained = len(self.samples.cases), self.plan.sustained
        fresh = [{"calls": 0, "settled": None} for _ in range(n_cases)]
        warm = self.samples.attrs.setdefault("warm_up", fresh)
        typical = [0.0] * n_cases
        for done, case in enumerate(map(int, self.rng.permutation(n_cases))):
            if not self.missing(case):
                continue
            now = time.perf_counter()
            share = self.left(self.end) / (n_cases - done if sustained else n_cases)
            warm[case], typical[case] = self.settle(case, now, share)
            while sustained and self.missing(case):
                self.block(case, min(_window(typical[case]), self.missing(case)), LEAD)
                if self.left(now + share) <= 0.0:
                    break
        if not sustained:
            self.rounds(typical)
        if any(map(self.missing, range(n_cases))):
            self.samples.attrs["stopped"] = f"after {self.plan.limit_s:g} s, as --limit says"

    def rounds(self, typical: list[float]) -> None:
        """Make blocks of all cases in random order until each has its calls, or time is up."""
        cases = range(len(typical))
        while any(map(self.missing, cases)):
            for case in map(int, self.rng.permutation(len(typical))):
                n = min(self.plan.block, self.missing(case))
                if not n:
                    continue
                n = self.fit(n + LEAD, typical[case], self.end) - LEAD
                # of long calls one that counts costs less than two that do not
                typical[case] = self.block(case, n, LEAD) if n > 0 else self.block(case, 1, 0)
                if self.left(self.end) <= 0.0:
                    return

    def settle(self, case: int, now: float, share: float) -> tuple[dict[str, Any], float]:
        """Call a case until two windows take as long as the two before, or its calls are made.

        Returns what is kept of it, and the median of the last window [s].
        """
        sustained = self.plan.sustained
        most, lead = (np.inf, LEAD) if sustained else (self.plan.warm_up, 0)
        end = now + min(_WARM_SHARE * share, _SUSTAINED_S if sustained else np.inf)
        windows: list[Array] = []
        calls, settled = 0, False
        while calls < most and not settled and (self.left(end) > 0.0 or (sustained and not calls)):
            n = 1
            if windows:
                typical = float(np.median(windows[-1]))
                n = lead + (_window(typical) if sustained else _WARM_CALLS)
                n = self.fit(int(min(n, most - calls)), typical, end)
            made = self.bench.block(case, n)
            seconds = made.seconds if made.slowest is None else made.slowest
            windows.append(seconds[min(lead, n - 1) :])
            calls += n
            settled = len(windows) > 4 and is_settled(windows[-4:-2], windows[-2:])
        if not windows:
            return {"calls": 0, "settled": None}, 0.0
        first_s, last_s = float(windows[0][0]), float(np.median(windows[-1]))
        kept = {"calls": calls, "settled": settled, "first_s": first_s, "last_s": last_s}
        return kept, last_s

    def block(self, case: int, n: int, lead: int) -> float:
        """Make some calls, the first of them not counted; median duration [s]."""
        made = self.bench.block(case, lead + n)
        slowest = made.seconds if made.slowest is None else made.slowest
        seconds, at, slowest = made.seconds[lead:], made.at[lead:] - self.origin, slowest[lead:]
        self.samples.add(case, seconds, at, slowest, self.number)
        self.number += 1
        now = time.perf_counter()
        if self.progress is not None:
            total = self.plan.repetitions * len(self.samples.cases)
            self.progress(sum(self.samples.counts()), total)
        if now - self.looked > _STATE_EVERY_S:
            self.look()
        if self.keep is not None and now - self.kept > _KEEP_EVERY_S:
            self.keep(self.samples)
            self.kept = time.perf_counter()
        return float(np.median(slowest))

    def missing(self, case: int) -> int:
        """Count the calls of a case that are still to be made."""
        return max(0, self.plan.repetitions - int(self.samples.seconds[case].size))

    def left(self, end: float) -> float:
        """Time left [s], by the first rank's clock."""
        return np.inf if end == np.inf else self.bench.agree(end - time.perf_counter())

    def fit(self, n: int, seconds: float, end: float) -> int:
        """How many of n calls of so long fit into the time there is, at least one."""
        left = self.left(end)
        return n if seconds <= 0.0 or left == np.inf else int(min(n, max(1.0, left // seconds)))


def _window(seconds: float) -> int:
    """Count the calls of so long that fill a window."""
    return int(np.clip(_WINDOW_S / max(seconds, 1e-9), 1, _WINDOW_CALLS))


def is_settled(before: Sequence[Array], after: Sequence[Array]) -> bool:
    """Tell whether windows take as long as those before: within 2 %, or two standard errors.

    Compared are means of the windows' medians; the error of a median is that of values whose spread
    is 1.4826 median absolute deviations.
    """

    def level(windows: Sequence[Array]) -> tuple[float, float]:
        medians = np.array([np.median(x) for x in windows])
        spreads = [1.4826 * np.median(np.abs(x - np.median(x))) / np.sqrt(x.size) for x in windows]
        error = _MEDIAN_ERROR * float(np.hypot.reduce(spreads)) / len(windows)
        return float(medians.mean()), error

    (a, error_a), (b, error_b) = level(before), level(after)
    return abs(a - b) <= max(_SETTLED * a, 2.0 * float(np.hypot(error_a, error_b)))
