"""What a rank waits for while it does not compute.

A wait ends when the next compute op begins; the chain of ops that decided when it does is walked
back to where the wait began, so that every moment has a cause: the op that was running then. Left
out: what would have been waited for had that op been shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.analyses.timelines.played import PlayedOp, PlayedStep, Row, Stream
from prism.common.launchgaps import LaunchGaps

CAUSES = {
    "bubble": ("bubble", "bubble"),
    "replica": ("other replicas", "waiting for replica {replica}"),
    "rank": ("other ranks", "waiting for another rank"),
    "group": ("its group", "waiting for its group"),
    "transfer": ("transfers", "waiting for transfer"),
    "communication": ("collectives", "waiting for {op_kind}"),
    "host": ("launch gaps", "launch gap"),
    "latency": ("latency", "launch latency"),
    "stall": ("stalls", "stall, jitter or data loading of the job"),
}
"""What is waited for, by cause: as a column's title, and as the name of a single wait."""

EPSILON = 1e-9  # s: times nearer than this are one


class Wait(NamedTuple):
    """A stretch in which a row computes nothing, with one cause."""

    start: float  # s
    end: float  # s
    cause: str
    op: int  # that ran at its end, -1: none
    replica: int  # of that op


class Span(NamedTuple):
    """An op of a row."""

    start: float  # s
    end: float  # s
    op: int


def spans_of(step: PlayedStep, row: Row, ops: Sequence[int]) -> list[Span]:
    """List some ops of a row with their times, by start."""
    r = row.replica
    # a step is from the first activity of a device to the last; the host is at work around it
    spans = [
        Span(max(0.0, step.start(i, r)), min(float(step.end[r, i]), step.step_time), i) for i in ops
    ]
    return sorted(s for s in spans if s.end > s.start)


def waits_of(step: PlayedStep, row: Row, spans: Sequence[Span]) -> list[Wait]:
    """List a row's waits, in order: all of the step that none of its compute ops covers."""
    found: list[Wait] = []
    now, end = 0.0, float(step.end[row.replica, step.final])
    computes = [span for span in spans if step.ops[span.op].stream == Stream.COMPUTE]
    for span in (*computes, Span(end, end, step.final)):
        if span.start > now + EPSILON:
            found += _explain(step, row, span.op, now, span.start)
        now = max(now, span.end)
    if step.step_time > end + EPSILON:
        found.append(Wait(now, step.step_time, "stall", -1, row.replica))
    if step.gaps is not None:
        found = _merge(_with_launch_gaps(step, step.gaps(row), spans, found))
    return found


def _with_launch_gaps(
    step: PlayedStep, gaps: LaunchGaps, spans: Sequence[Span], waits: Sequence[Wait]
) -> list[Wait]:
    """Give the host what is a launch gap, and no more: not what runs meanwhile, nor latency."""
    moves = Stream.COMMUNICATION, Stream.TRANSFER
    runs = [s for s in spans if step.ops[s.op].stream in moves]
    begin, until = np.array([s.start for s in runs]), np.array([s.end for s in runs])
    until = np.maximum.accumulate(until)
    found = []
    for wait in waits:
        cuts = np.concatenate([[wait.start, wait.end], gaps.begin, gaps.end, begin, until])
        cuts = np.unique(cuts[(cuts >= wait.start) & (cuts <= wait.end)])
        for a, b in pairwise(cuts.tolist()):
            cause, middle = wait.cause, 0.5 * (a + b)
            if _covers(gaps.begin, gaps.end, middle):
                cause = Stream.HOST
            elif cause == Stream.HOST:
                cause = Stream.COMMUNICATION if _covers(begin, until, middle) else "latency"
            found.append(wait._replace(start=a, end=b, cause=cause))
    return found


def _covers(begin: NDArray[Any], end: NDArray[Any], when: float) -> bool:
    """Tell whether one of the stretches, in order, covers a time."""
    i = int(np.searchsorted(begin, when)) - 1
    return i >= 0 and when < end[i]


def _explain(step: PlayedStep, row: Row, op: int, begin: float, end: float) -> list[Wait]:
    """Divide a wait for an op's start, or the step's end, by what ran on the way to it."""
    parts: list[Wait] = []
    now, later = end, None

    def add(since: float, cause: str, op: int, replica: int) -> None:
        nonlocal now
        parts.append(Wait(max(begin, since), now, cause, op, replica))
        now = parts[-1].start

    for ran in step.chain(op, row.replica):
        if later and later.lag > 0.0 and later.start - later.lag < now:
            add(later.start - later.lag, Stream.HOST, later.op, later.replica)
        if now <= begin + EPSILON:
            break
        info = step.ops[ran.op]
        if ran.replica != row.replica and not info.is_global:
            add(begin, "replica", ran.op, ran.replica)
            break
        if info.stream != Stream.JOIN and (later or op == step.final):
            add(ran.start, _cause(step, row, info), ran.op, ran.replica)
        later = ran
    if now > begin + EPSILON and later:
        add(begin, Stream.HOST if step.ranks else "bubble", -1, later.replica)
    return _merge(parts[::-1])


def _cause(step: PlayedStep, row: Row, ran: PlayedOp) -> str:
    """Name what a row waits for while an op of its own replica, or of all, runs."""
    if row.stage not in ran.stages:
        return "rank" if step.ranks else "bubble"
    if ran.member not in (-1, row.member):
        return "group"
    if ran.stream in (Stream.TRANSFER, Stream.HOST):
        return ran.stream
    return Stream.COMMUNICATION


def _merge(parts: list[Wait]) -> list[Wait]:
    """Join neighbours of one cause; what ran last stands for them."""
    out: list[Wait] = []
    for part in parts:
        if part.end <= part.start:
            continue
        last = out[-1] if out else part
        if out and (last.end, last.cause, last.replica) == (part.start, part.cause, part.replica):
            out[-1] = part._replace(start=out[-1].start)
        else:
            out.append(part)
    return out
