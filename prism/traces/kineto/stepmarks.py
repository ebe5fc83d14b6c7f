"""Which of a recording's named ranges are the job's steps.

Ranges called step, iteration or batch, with or without a number, are taken for steps; of several
families the one that covers most time. A pattern of the user's replaces the guess. Where PyTorch's
profiler marks no steps, the annotations of the optimizer do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prism.common.arrays import Array, Index
from prism.common.errors import PrismError, option
from prism.common.text import format_count

_STEP = re.compile(
    r"^(?:(?:profiler|train(?:ing|er)?|global|mini|micro_?global)[\s_.:/-]*)?"
    r"(?:step|iter(?:ation)?|batch)(?:[\s_.:#=/(\[-]*(\d{1,15})[)\]]?)?$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(\d{1,15})\D*$")


@dataclass(frozen=True)
class NamedRanges:
    """Ranges of one process, times in us; one row a range."""

    labels: Sequence[str]  # the different names
    label: Index  # [range] index into `labels`
    start: Array
    end: Array


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """Compile what the user gave as --step-range; raises PrismError where it is no pattern."""
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PrismError(
            f"{option('step_range')} {pattern}: is no regular expression ({error}); give the "
            "name of the range that is one step, such as 'train_step', or 'step (\\d+)' with its "
            "number"
        ) from error


def find_steps(
    ranges: NamedRanges, pattern: re.Pattern[str] | None = None
) -> list[tuple[int, float, float]]:
    """Find the steps among named ranges: number, start and end [us], in order of time."""
    families: dict[str, dict[int, int | None]] = {}
    for i, text in enumerate(ranges.labels):
        match = (pattern.fullmatch if pattern else _STEP.match)(text.strip())
        if match is None:
            continue
        number = _number(match, text)
        family = "" if pattern else text if number is None else _NUMBER.sub("N", text.strip())
        families.setdefault(family, {})[i] = number
    found = []
    for numbers in families.values():
        rows = np.flatnonzero(np.isin(ranges.label, list(numbers)))
        rows = rows[np.isfinite(ranges.start[rows]) & (ranges.end[rows] > ranges.start[rows])]
        rows = rows[np.lexsort((-ranges.end[rows], ranges.start[rows]))]
        found.append(_steps(ranges, rows, numbers))

    def rhythm(steps: list[tuple[int, float, float]]) -> tuple[bool, float]:
        # one long range named step is less of a rhythm than several
        return len(steps) > 1, float(sum(end - start for _, start, end in steps))

    return max(found, key=rhythm, default=[])


def _number(match: re.Match[str], text: str) -> int | None:
    """Step number that a name holds, None where it holds none."""
    given = match[1] if match.re.groups else None
    if given is None and match.re is not _STEP:
        last = _NUMBER.search(text)
        given = last[1] if last and not match.re.groups else None
    return int(given) if given is not None and given.isdecimal() and len(given) <= 15 else None


def _steps(
    ranges: NamedRanges, rows: Index, numbers: dict[int, int | None]
) -> list[tuple[int, float, float]]:
    """Build the steps of one family, its ranges in order of start."""
    found: dict[int, tuple[float, float]] = {}
    until = -np.inf
    counted = 0
    for row in rows.tolist():
        start, end = float(ranges.start[row]), float(ranges.end[row])
        number = numbers[int(ranges.label[row])]
        if number is None:
            if start < until:  # inside the one before, or on another thread beside it
                continue
            number, until = counted, end
            counted += 1
        old = found.get(number, (start, end))
        found[number] = (min(start, old[0]), max(end, old[1]))
    return sorted(((n, *times) for n, times in found.items()), key=lambda step: step[1])


def optimizer_steps(ranges: NamedRanges, launches: Array) -> list[tuple[int, float, float]]:
    """Find steps by the optimizer: each lasts from the end of one update to that of the next.

    ``Optimizer.zero_grad#`` serves where no update is annotated. Where several optimizers take
    turns, the one that comes least often counts; where one comes several times a step, as for
    several groups of parameters, the pattern of launches between them says so.
    """
    for word in ("Optimizer.step#", "Optimizer.zero_grad#"):
        named_so = [i for i, text in enumerate(ranges.labels) if text.startswith(word)]
        of = {i: np.flatnonzero(ranges.label == i) for i in named_so}
        if not of:
            continue
        rows = min(of.values(), key=lambda rows: rows.size)
        is_update = word == "Optimizer.step#"
        at = np.sort((ranges.end if is_update else ranges.start)[rows])
        first = float(launches.min(initial=at[0]))
        bounds = np.r_[min(first, at[0]), at] if is_update else np.r_[at, np.inf]
        bounds = bounds[:: _turns(np.histogram(launches, bounds)[0])]
        return [(k, float(a), float(b)) for k, (a, b) in enumerate(itertools.pairwise(bounds))]
    return []


def _turns(launched: Index) -> int:
    """Tell how many pieces between marks are one step, from what each launches."""
    usual = launched[1:]  # the recording may begin within the first
    for turns in range(1, usual.size // 3 + 1):
        ahead, behind = usual[turns:], usual[:-turns]
        if (np.abs(ahead - behind) <= 0.1 * np.maximum(ahead, behind)).all():
            return turns
    return 1


def candidates(ranges: NamedRanges) -> str:
    """Name ranges that come several times, those of most time first: they may be the steps."""
    n = len(ranges.labels)
    counts = np.bincount(ranges.label, minlength=n)
    length = np.bincount(ranges.label, np.maximum(0.0, ranges.end - ranges.start), minlength=n)
    often = [i for i in np.argsort(-length, kind="stable") if counts[i] > 1 and length[i] > 0.0]
    return ", ".join(
        f"{ranges.labels[i][:40]} ({format_count(counts[i], 'time')})" for i in often[:4]
    )


def no_such_step(
    ranges: NamedRanges, pattern: re.Pattern[str], source: str, what: str
) -> PrismError:
    """Error for a pattern that no range is called by."""
    there = candidates(ranges) or "none"
    return PrismError(
        f"{source}: {option('step_range')} {pattern.pattern}: no {what} is called so; those that "
        f"repeat: {there}"
    )
