"""The host that launches a GPU's kernels one by one: what the device waits for it.

The host runs ahead of the device, over forward and backward of a chunk's microbatches, except where
it waits for the device itself: there its lead is gone. Left out: how many launches queue, a lead
from a bubble or from another chunk of the stage, and that a late host hides what slow nodes add to
kernels and messages, or, simulated kernel by kernel, what another placement adds to messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from prism.workload.kernels import GAPS, ChunkWork, Kernel

BLOCKS = Kernel("host_waits", GAPS, 0.0, 0.0, 0.0, "residual/memory")
"""Stands where the host waits for what the device has computed."""


class Host(NamedTuple):
    """What launching takes [s]."""

    launch_s: tuple[float, float]  # of the host, a launch in forward and in backward
    gap_s: float  # of the device, between two kernels that are both launched
    wait_s: float = 0.0
    """Of the device, where the host has waited for it: until kernels follow again."""

    def pace(self, work: ChunkWork) -> ChunkWork:
        """Put the gaps between a chunk's kernels, and those where `BLOCKS` stands."""
        late = self._behind(work)
        return replace(
            work,
            forward=self._spaced(work.forward, late[0]),
            backward=self._spaced(work.backward, late[1]),
            inputs=self._spaced(work.inputs, late[1]),
            weights=self._spaced(work.weights, late[1]),
        )

    def _behind(self, work: ChunkWork) -> list[float]:
        """Time a launch that the host takes longer than the device, in forward and backward [s]."""
        spans = [[0.0, 0.0]]  # host over device, by pass, between two waits of the host [s]
        passes = work.forward, work.backward
        for i, kernels in enumerate(passes):
            for k in kernels:
                if blocks(k):
                    spans.append([0.0, 0.0])
                    continue
                spans[-1][i] += k.launches * self.launch_s[i] - k.duration - self._between(k)
        if len(spans) > 1:  # what follows the last wait goes on in the next microbatch
            first = spans.pop(0)
            spans[-1] = [sum(pair) for pair in zip(spans[-1], first, strict=True)]
        late = [0.0, 0.0]
        for span in spans:
            own, behind = [max(0.0, each) for each in span], max(0.0, sum(span))
            for i, each in enumerate(own):
                late[i] += behind * each / sum(own) if behind else 0.0
        launches = [sum(k.launches for k in kernels) for kernels in passes]
        return [s / n if s else 0.0 for s, n in zip(late, launches, strict=True)]

    def _between(self, kernel: Kernel) -> float:
        """Gaps of the device after a kernel's launches [s]."""
        return self.gap_s * kernel.launches * (not kernel.group)

    def _spaced(self, kernels: tuple[Kernel, ...], late_s: float) -> tuple[Kernel, ...]:
        """Put gaps before each collective and at the end; each launch is late by some time."""
        out: list[Kernel] = []
        gap_s = behind_s = 0.0
        for k in kernels:
            if blocks(k):
                gap_s += self.wait_s
                continue
            if k.group:
                out += _gap(gap_s, behind_s)
                gap_s = behind_s = 0.0
            out.append(k)
            behind_s += k.launches * late_s
            gap_s += self._between(k) + k.launches * late_s
        return (*out, *_gap(gap_s, behind_s))


def blocks(kernel: Kernel) -> bool:
    """Tell where the host waits, in what is recomputed too."""
    return kernel.kernel_class == GAPS and kernel.name.endswith(BLOCKS.name)


def _gap(seconds: float, behind_s: float) -> tuple[Kernel, ...]:
    gap = Kernel(GAPS, GAPS, seconds, 0.0, 0.0, "residual/memory", behind_s=behind_s)
    return (gap,) * (seconds > 0.0)
