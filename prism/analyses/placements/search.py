"""Candidate placements: all of them up to symmetry where they are few, else a search.

Both look at the deterministic step only. The search moves one slow node at a time to wherever the
step is shortest, from several starts; where the other nodes differ too, nodes are then exchanged in
pairs.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.analyses.placements.problem import Problem
from prism.analyses.placements.slots import Pattern
from prism.common.arrays import Array, Index

LIMIT, LEAST = 20_000, 1_000  # placements up to which all are looked at
LIMIT_GPUS = 130_000_000  # the limit times the GPUs of the job: a large one takes longer
DIFFERENT = 4  # times longer where no two replicas hold the same nodes
RANDOM_STARTS = 2
PAIRS = 256  # exchanges of two nodes that are looked at at a time
GAIN = 1e-6  # relative; less is rounding


class SearchResult(NamedTuple):
    """Placements that were looked at, by increasing step time."""

    patterns: list[Pattern]
    times: Array  # [placement] s
    complete: bool  # whether these are all of them up to symmetry


def find_placements(problem: Problem, seed: int, limit: int | None = None) -> SearchResult:
    """Look at all placements of the slow nodes, or search among them."""
    if limit is None:
        limit = LIMIT_GPUS // max(1, problem.step.program.low.member.size)
        limit = int(np.clip(limit // (DIFFERENT if problem.differ else 1), LEAST, LIMIT))
    if problem.offered:
        patterns = list(dict.fromkeys(map(problem.pattern, (problem.hosts, *problem.offered))))
        return _sorted(patterns, problem.pattern_times(patterns), False)
    if problem.segment:
        return _whole_segments(problem, limit)
    every = problem.layout.enumerate(problem.labels.values(), limit)
    if every is not None:
        return _sorted(every, problem.pattern_times(every), True)
    search = _Search(problem, np.random.default_rng([seed, 7]), limit // 2)
    for start in search.starts():
        search.descend(start)
    patterns = list(search.seen)
    return _sorted(patterns, np.array([search.seen[p] for p in patterns]), False)


def _sorted(patterns: list[Pattern], times: Array, complete: bool) -> SearchResult:
    order = np.argsort(times, kind="stable")
    order = order[np.isfinite(times[order])]
    return SearchResult([patterns[i] for i in order], times[order], complete)


def _whole_segments(problem: Problem, limit: int) -> SearchResult:
    """Go from placement to placement, the shortest step first, by exchanges that tear no segment.

    A slow node takes another slot of its segment, or a segment with slow nodes all of another
    one's. All are reached so up to a limit, but for some in which blocks alike share segments.
    """
    start = problem.pattern(problem.hosts)
    times = {start: float(problem.times([problem.hosts])[0])}
    queue = [(times[start], start)]
    while queue and len(times) < limit:
        _, pattern = heappop(queue)
        options = (_exchanged(problem.realise(pattern), *pair)
                   for pair in _segment_pairs(problem, problem.realise(pattern)))  # fmt: skip
        new = {p: hosts for hosts in options if (p := problem.pattern(hosts)) not in times}
        found = problem.times([problem.realise(p) for p in new]).tolist()
        times |= zip(new, found, strict=True)
        for time, p in zip(found, new, strict=True):
            heappush(queue, (time, p))
    return _sorted(list(times), np.array(list(times.values())), False)


def _segment_pairs(problem: Problem, hosts: Index) -> Iterator[tuple[Index | int, Index | int]]:
    """Slots of each exchange: two of a segment, or two segments."""
    size, slots = problem.segment, np.arange(hosts.size)
    segments = [slots[i : i + size] for i in range(0, hosts.size, size)]
    slow = np.flatnonzero(np.isin(hosts, list(problem.classes))).tolist()
    for slot in slow:
        yield from ((slot, other) for other in segments[slot // size].tolist() if other != slot)
    for one in sorted({slot // size for slot in slow}):
        yield from (
            (segments[one], other) for i, other in enumerate(segments)
            if i != one and other.size == segments[one].size
        )  # fmt: skip


def _exchanged(hosts: Index, a: Index | int, b: Index | int) -> Index:
    """Exchange the nodes of some slots with those of others."""
    out = hosts.copy()
    out[a], out[b] = hosts[b], hosts[a]
    return out


class _Search:
    """Descent over patterns from several starts; every pattern is run once.

    A step is the latest of its parts, so that moving one of several slow nodes often changes
    nothing; then a move counts that puts the node where it would cost less alone.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, evaluations: int) -> None:
        self.problem, self.rng = problem, rng
        self.each = evaluations // (3 + RANDOM_STARTS)  # a start's share
        self.seen: dict[Pattern, float] = {}
        self.alone = {x: _times_alone(problem, x) for x in set(problem.labels.values())}

    def starts(self) -> Iterator[Pattern]:
        """As is; each where it costs least alone, apart; together in few blocks; at random."""
        problem = self.problem
        yield problem.pattern(problem.hosts)
        if (apart := self._apart()) is not None:
            yield apart
        yield self._together()
        for _ in range(RANDOM_STARTS):
            yield problem.pattern(random_hosts(problem, self.rng))

    def times(self, patterns: Sequence[Pattern]) -> Array:
        """Step times of patterns [s]."""
        new = [p for p in patterns if p not in self.seen]
        self.seen |= dict(zip(new, self.problem.pattern_times(new).tolist(), strict=True))
        return np.array([self.seen[p] for p in patterns])

    def descend(self, pattern: Pattern) -> None:
        """Move slow nodes one at a time as long as that shortens the step."""
        best, budget = float(self.times([pattern])[0]), len(self.seen) + self.each
        improved = bool(np.isfinite(best))
        while improved:
            improved = False
            entries = [(b, e) for b, (_, content) in enumerate(pattern) for e in content]
            for i in self.rng.permutation(len(entries)):
                options = self._moves(pattern, *entries[i])
                times = self.times(options)
                ranked = zip(np.round(times / best / GAIN), map(self._sum, options), strict=True)
                first = min(enumerate(ranked), key=lambda item: item[1])[0]
                found, time = options[first], float(times[first])
                level = time <= best * (1.0 + GAIN) and self._sum(found) < self._sum(pattern)
                if time < best * (1.0 - GAIN) or level:
                    pattern, best, improved = found, min(best, time), True
                    break
                if len(self.seen) > budget:
                    return

    def _moves(self, pattern: Pattern, block: int, entry: tuple[int, int]) -> list[Pattern]:
        """Patterns with one slow node elsewhere, at most a batch of them."""
        kind, content = pattern[block]
        rest = list(content)
        rest.remove(entry)
        left = (*pattern[:block], *([(kind, tuple(rest))] if rest else []), *pattern[block + 1 :])
        options = sorted(self.problem.layout.extensions(tuple(sorted(left)), entry[1]))
        if len(options) > engine.LANES:
            chosen = self.rng.choice(len(options), engine.LANES, replace=False)
            options = [options[i] for i in sorted(chosen)]
        return options

    def _sum(self, pattern: Pattern) -> float:
        """Sum over slow nodes of the step with that one alone [s], to whole nanoseconds."""
        entries = ((kind, entry) for kind, content in pattern for entry in content)
        return round(sum(self.alone[label][kind, at] for kind, (at, label) in entries), 9)

    def _apart(self) -> Pattern | None:
        """Each in a block of its own where it costs least; None where blocks are too few."""
        free = [blocks.size for blocks in self.problem.layout.blocks_of]
        out = []
        for label in self.problem.labels.values():
            order = sorted(self.alone[label], key=self.alone[label].__getitem__)
            choice = next((place for place in order if free[place[0]] > 0), None)
            if choice is None:
                return None
            free[choice[0]] -= 1
            out.append((choice[0], ((choice[1], label),)))
        return tuple(sorted(out))

    def _together(self) -> Pattern:
        """Slow nodes in as few blocks as may be, at the positions that cost least."""
        layout, labels = self.problem.layout, list(self.problem.labels.values())
        alone = self.alone[labels[0]]
        kind = max(range(len(layout.room)), key=lambda k: layout.room[k].total())
        order = sorted((place for place in alone if place[0] == kind), key=alone.__getitem__)
        slots = [at for _, at in order for _ in range(layout.room[kind][at])]
        parts = (labels[i : i + len(slots)] for i in range(0, len(labels), len(slots)))
        return tuple(sorted((kind, tuple(sorted(zip(slots, p, strict=False)))) for p in parts))


def _times_alone(problem: Problem, label: int) -> dict[tuple[int, int], float]:
    """Step with one slow node of a class, by (kind of block, position) [s]."""
    options = sorted(problem.layout.extensions((), label))
    times = problem.alone_times(options)
    places = [(kind, content[0][0]) for ((kind, content),) in options]
    return dict(zip(places, times.tolist(), strict=True))


def random_hosts(problem: Problem, rng: np.random.Generator) -> Index:
    """Hosts with the slow nodes at random slots."""
    hosts = problem.hosts.copy()
    size = problem.segment
    if size:
        for node in problem.placed:
            for slot in np.flatnonzero(hosts == node).tolist():
                if slot < hosts.size // size * size:  # all segments but a short last one
                    own = slot // size * size + np.arange(size)
                    new = rng.integers(hosts.size // size) * size + np.arange(size)
                    hosts, slot = _exchanged(hosts, own, new), int(new[slot % size])
                first = slot // size * size
                last = min(first + size, hosts.size)
                hosts = _exchanged(hosts, slot, int(rng.integers(first, last)))
        return hosts
    slots = rng.choice(hosts.size, len(problem.placed), replace=False)
    for node, slot in zip(problem.placed, slots, strict=True):
        here = np.flatnonzero(hosts == node)
        if here.size:  # a spare node has no slot to change with
            hosts[[here[0], slot]] = hosts[[slot, here[0]]]
    return hosts


def exchange(problem: Problem, hosts: Index, seed: int, rounds: int = 40) -> Index:
    """Exchange nodes in pairs as long as that shortens the step; for nodes that all differ."""
    rng = np.random.default_rng([seed, 8])
    best, n = float(problem.times([hosts])[0]), hosts.size
    for _ in range(rounds):
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
        if len(pairs) > PAIRS:
            pairs = pairs[rng.choice(len(pairs), PAIRS, replace=False)]
        options = []
        for a, b in pairs:
            option = hosts.copy()
            option[[a, b]] = hosts[[b, a]]
            options.append(option)
        times = problem.times(options)
        if times.min() >= best * (1.0 - GAIN):
            break
        hosts, best = options[int(times.argmin())], float(times.min())
    return hosts
