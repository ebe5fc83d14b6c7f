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

from prism.analyses.timelines.played import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    JOIN,
    TRANSFER,
    Binding,
    PlayedOp,
    PlayedStep,
    Row,
)
from prism.common.launchgaps import LaunchGaps

CAUSES = {
    "bubble": "bubble", "replica": "other replicas", "rank": "other ranks", "group": "its group",
    "transfer": "transfers", "communication": "collectives", "host": "launch gaps",
    "latency": "latency", "stall": "stalls",
}  # fmt: skip
"""What is waited for, by cause: other stages of the pipeline, ..., what stops the whole job."""

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
    now = 0.0
    for span in spans:
        if step.ops[span.op].stream != COMPUTE:
            continue
        if span.start > now + EPSILON:
            found += _explain(step, row, span.op, row.replica, now, span.start)
        now = max(now, span.end)
    end = float(step.end[row.replica, step.final])
    if end > now + EPSILON:
        found += _explain(step, row, step.final, row.replica, now, end)
    if step.step_time > end + EPSILON:
        found.append(Wait(max(end, now), step.step_time, "stall", -1, row.replica))
    return (
        found
        if step.gaps is None
        else _merge(_with_launch_gaps(step, step.gaps(row), spans, found))
    )


def _with_launch_gaps(
    step: PlayedStep, gaps: LaunchGaps, spans: Sequence[Span], waits: Sequence[Wait]
) -> list[Wait]:
    """Give the host what is a launch gap, and no more: not what runs meanwhile, nor latency."""
    runs = [s for s in spans if step.ops[s.op].stream not in (HOST, JOIN, COMPUTE)]
    begin, until = np.array([s.start for s in runs]), np.array([s.end for s in runs])
    until = np.maximum.accumulate(until)
    found = []
    for wait in waits:
        cuts = np.concatenate([[wait.start, wait.end], gaps.begin, gaps.end, begin, until])
        cuts = np.unique(cuts[(cuts >= wait.start) & (cuts <= wait.end)])
        for a, b in pairwise(cuts.tolist()):
            cause, middle = wait.cause, 0.5 * (a + b)
            if _covers(gaps.begin, gaps.end, middle):
                cause = HOST
            elif cause == HOST:
                cause = COMMUNICATION if _covers(begin, until, middle) else "latency"
            found.append(wait._replace(start=a, end=b, cause=cause))
    return found


def _covers(begin: NDArray[Any], end: NDArray[Any], when: float) -> bool:
    """Tell whether one of the stretches, in order, covers a time."""
    i = int(np.searchsorted(begin, when)) - 1
    return i >= 0 and when < end[i]


def _explain(
    step: PlayedStep, row: Row, op: int, replica: int, begin: float, end: float
) -> list[Wait]:
    """Divide a wait that ends at an op's start by what ran on the way to it."""
    parts: list[Wait] = []
    now, asks_for_end = end, op == step.final
    if asks_for_end and step.ops[op].stream != JOIN:
        parts.append(_part(step, row, Binding(end, op, replica, 0.0), begin, now))
        now = parts[-1].start
    while now > begin + EPSILON:
        before = step.binding(op, replica)
        if before.op < 0:
            parts.append(
                Wait(begin, now, HOST if step.between == "rank" else "bubble", -1, replica)
            )
            break
        if before.lag > 0.0 and before.start - before.lag < now:
            since = max(begin, before.start - before.lag)
            parts.append(Wait(since, now, HOST, op, replica))
            now = since
            if now <= begin + EPSILON:
                break
        ran = step.ops[before.op]
        if before.replica != row.replica and not ran.is_global:
            parts.append(Wait(begin, now, "replica", before.op, before.replica))
            break
        if ran.stream != JOIN:
            parts.append(_part(step, row, before, begin, now))
            now = parts[-1].start
        op, replica = before.op, before.replica
    return _merge(parts[::-1])


def _part(step: PlayedStep, row: Row, ran: Binding, begin: float, now: float) -> Wait:
    """Give the part of a wait in which one op ran."""
    since = max(begin, step.start(ran.op, ran.replica))
    return Wait(since, now, _cause(step, row, step.ops[ran.op]), ran.op, ran.replica)


def _cause(step: PlayedStep, row: Row, ran: PlayedOp) -> str:
    """Name what a row waits for while an op of its own replica, or of all, runs."""
    if row.stage not in ran.stages:
        return step.between
    if ran.member not in (-1, row.member):
        return "group"
    if ran.stream in (TRANSFER, HOST):
        return ran.stream
    return COMMUNICATION


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
