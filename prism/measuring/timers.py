"""How long one call takes: by the processor's clock, or by events on the GPU.

The processor's clock costs something itself, which is measured and subtracted. On a GPU a pair of
events brackets the call; calls are queued without waiting, and, where asked, a buffer larger than
the L2 cache is written before each, so that none finds its operands there. Left out: what a call
costs the host, which runs ahead of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Call = Callable[[], Any]

_EMPTY_CALLS = 2_000


class Block(NamedTuple):
    """Calls made one after another [call]; times in seconds."""

    seconds: Array  # own duration
    at: Array  # when it began, by the monotonic clock
    slowest: Array | None = None  # of a collective: the longest of its ranks'


class Timer(Protocol):
    """Times calls of one function."""

    overhead_s: float

    def block(self, call: Call, n: int) -> Block:
        """Call n times and return how long each call took."""
        ...


class CpuTimer:
    """Times calls by the processor's monotonic clock.

    Attributes
    ----------
    overhead_s : float
        What reading the clock twice around an empty call costs, the median of many [s]; it is
        subtracted from every duration.
    """

    def __init__(self) -> None:
        self.overhead_s = 0.0
        self.overhead_s = float(np.median(self.block(lambda: None, _EMPTY_CALLS).seconds))

    def block(self, call: Call, n: int) -> Block:
        """Call n times and return how long each call took."""
        now = time.perf_counter_ns
        begin, end = np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            start = now()
            call()
            end[i] = now()
            begin[i] = start
        seconds: Array = (end - begin).astype(np.float64) * 1e-9 - self.overhead_s
        return Block(np.maximum(seconds, 1e-9), begin.astype(np.float64) * 1e-9)


class CudaTimer:
    """Times calls by events on the current stream.

    Parameters
    ----------
    flush_l2 : bool
        Write a buffer of twice the L2 cache before each call, outside the events.
    """

    overhead_s = 0.0

    def __init__(self, torch: Any, flush_l2: bool) -> None:
        self.torch = torch
        self.buffer = None
        if flush_l2:
            l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self.buffer = torch.empty(2 * int(l2), dtype=torch.int8, device="cuda")

    def block(self, call: Call, n: int) -> Block:
        """Call n times and return how long each call took on the GPU."""
        cuda = self.torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(n)]
        origin = cuda.Event(enable_timing=True)
        cuda.synchronize()
        began = time.perf_counter()
        origin.record()
        for first, last in pairs:
            if self.buffer is not None:
                self.buffer.zero_()
            first.record()
            call()
            last.record()
        cuda.synchronize()
        milliseconds = np.array([first.elapsed_time(last) for first, last in pairs])
        since = np.array([origin.elapsed_time(first) for first, _ in pairs])
        return Block(np.maximum(milliseconds * 1e-3, 1e-9), began + since * 1e-3)


def make_timer(device: str, torch: Any, flush_l2: bool) -> Timer:
    """Return the timer of a device."""
    return CudaTimer(torch, flush_l2) if device == "cuda" else CpuTimer()
