"""The host that launches a GPU's kernels one by one: what the device waits for it.

The host runs ahead of the device, over forward and backward of a chunk's microbatches, except where
it waits for the device itself: there its lead is gone. Left out: how many launches queue, a lead
from a bubble or from another chunk of the stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from prism.workload.kernels import ChunkWork, Kernel

BLOCKS = Kernel("host_waits", "launch_gaps", 0.0, 0.0, 0.0, "residual/memory")
"""Stands where the host waits for what the device has computed."""


class Host(NamedTuple):
    """What launching takes [s]."""

    launch_s: tuple[float, float]
    """Of the host, a launch in forward and in backward."""
    gap_s: float
    """Of the device, between two kernels that are both launched."""
    wait_s: float = 0.0
    """Of the device, where the host has waited for it: until kernels follow again."""

    def pace(self, work: ChunkWork) -> ChunkWork:
        """Replace `BLOCKS` in a chunk's passes by the gaps between its kernels."""
        passes, gaps = (work.forward, work.backward), [0.0, 0.0]
        spans = [[0.0, 0.0]]  # host over device, by pass, between two waits of the host [s]
        for i, kernels in enumerate(passes):
            for kernel in kernels:
                if _blocks(kernel):
                    spans.append([0.0, 0.0])
                    gaps[i] += self.wait_s
                    continue
                between = self.gap_s * kernel.launches * (not kernel.group)
                gaps[i] += between
                spans[-1][i] += kernel.launches * self.launch_s[i] - kernel.duration - between
        if len(spans) > 1:  # what follows the last wait goes on in the next microbatch
            first = spans.pop(0)
            spans[-1] = [sum(pair) for pair in zip(spans[-1], first, strict=True)]
        for span in spans:
            late, behind = [max(0.0, each) for each in span], max(0.0, sum(span))
            for i, each in enumerate(late):
                gaps[i] += behind * each / sum(late) if behind else 0.0
        forward, backward, inputs = (
            tuple(k for k in kernels if not _blocks(k)) + _gap(gap)
            for kernels, gap in zip((*passes, work.inputs), (*gaps, gaps[1]), strict=True)
        )
        inputs = inputs if work.inputs else ()
        return replace(work, forward=forward, backward=backward, inputs=inputs)


def _blocks(kernel: Kernel) -> bool:
    return kernel.name.endswith(BLOCKS.name)  # a recomputed one too


def _gap(seconds: float) -> tuple[Kernel, ...]:
    gap = Kernel("launch_gaps", "launch_gaps", seconds, 0.0, 0.0, "residual/memory")
    return (gap,) * (seconds > 0.0)
