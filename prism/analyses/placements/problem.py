"""One question of placement: a step, its nodes, which of them are slow, and where they are now.

Nodes of equal slowness are one class. Where every node differs (an inventory of all, a fitted
trace) only the slow ones are placed, and the others count as alike until nodes are exchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from prism.analyses.placements.screen import Screen
from prism.analyses.placements.slots import Layout, Pattern, make_layout
from prism.cluster.nodemap import NodeSlowdown, Placement
from prism.common.arrays import Array, Index
from prism.common.errors import PrismError, option
from prism.simulation.execution.context import RunContext
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program

MOST_PLACED = 64  # nodes that are placed one by one
NEARLY_ALL, FEW = 0.9, 8  # share of the nodes from which on an inventory is of everyone; at least
MANY_ALIKE = 0.25  # share of the nodes
OUTLIER, LEAST_SLOW = 5.0, 0.01  # robust standard deviations, and share, that a slow node is off by


@dataclass(frozen=True)
class Problem:
    """What placements are compared on."""

    step: Prepared  # the job with its nodes; of a fitted trace with its workers
    hosts: Index  # node of every slot now [slot]
    slowdowns: Mapping[int, NodeSlowdown]  # known ones; a fitted trace's are in its program
    placed: tuple[int, ...]  # to find slots for: those apart from the rest, at most `MOST_PLACED`
    classes: Mapping[int, int]  # of each of them; those of a class are as slow as each other
    slow: frozenset[int]  # all slow nodes; where most are, the others are fewer to place
    context: RunContext
    differ: bool = False  # whether the nodes that are not placed differ too
    segment: int = 0  # slots in a row that stay on nodes of one rack; 0: each node for itself
    offered: tuple[Index, ...] = ()  # placements to choose from; none: all, or a search
    _known: dict[bytes, float] = field(default_factory=dict, repr=False)
    _whole: dict[Pattern, Index] = field(default_factory=dict, repr=False)  # with segments kept

    @cached_property
    def layout(self) -> Layout:
        """Slots in the placement that the job starts from, and which are alike."""
        placement, origin = Placement(self.step.job), self.step.program.origin
        work = None if origin is None else origin.work
        return make_layout(placement.members(), placement.gpus_per_node, placement.slots, work)

    @cached_property
    def labels(self) -> dict[int, int]:
        """Classes of the nodes to place, without slow spares."""
        used = set(self.hosts.tolist())
        return {node: self.classes[node] for node in self.placed if node in used}

    @cached_property
    def _quiet(self) -> "Problem":
        """The same without what congests links, which no deterministic step meets."""
        program = self.step.program
        if not program.links.n_leaves:
            return self
        quiet = replace(program, links=program.links._replace(n_leaves=0))
        return replace(self, step=replace(self.step, program=quiet))

    @cached_property
    def _screen(self) -> Screen:
        return Screen(self.step.program, self.context)

    def program(self, hosts: Index, slowdowns: Mapping[int, NodeSlowdown] | None = None) -> Program:
        """Return the step's program with nodes elsewhere, and as slow as known or as given."""
        self.check_whole(hosts)
        return relocate(self.step, hosts, self.slowdowns if slowdowns is None else slowdowns)

    @property
    def rack_nodes(self) -> int:
        """Nodes of a rack: of an NVLink domain, or as many as a segment has where that is more."""
        cluster = self.step.job.cluster
        return max(self.segment, cluster.nvlink_domain_gpus // cluster.gpus_per_node)

    def check_whole(self, hosts: Index) -> None:
        """Refuse a placement that puts a segment on nodes of several racks."""
        if not self.segment:
            return
        racks, segments = hosts // self.rack_nodes, np.arange(hosts.size) // self.segment
        torn = segments[1:][(segments[1:] == segments[:-1]) & (racks[1:] != racks[:-1])]
        if torn.size:
            first = int(torn[0]) * self.segment
            last = min(first + self.segment, hosts.size) - 1
            raise PrismError(
                f"{option('keep_segments')}: slots {first} to {last} would be on nodes of several "
                "racks; give a size that divides those that the job has"
            )

    def times(self, placements: Sequence[Index]) -> Array:
        """Deterministic step times of placements [s]; infinite where the job allows none."""
        new = {h.tobytes(): h for h in placements if h.tobytes() not in self._known}
        self._known.update(dict.fromkeys(new, np.inf))
        allowed = []

        def programs() -> Iterator[Program]:
            for key, hosts in new.items():
                try:
                    program = self._quiet.program(hosts)
                except PrismError:  # a group of ranks would leave its NVLink domain
                    continue
                allowed.append(key)
                yield program

        found = self._screen.times(programs())
        self._known.update(zip(allowed, found.tolist(), strict=True))
        return np.array([self._known[h.tobytes()] for h in placements])

    def slowed_times(self, cases: Iterable[tuple[Index, Mapping[int, NodeSlowdown]]]) -> Array:
        """Deterministic step times under other slownesses [s]."""
        return self._screen.times(self._quiet.program(hosts, slow) for hosts, slow in cases)

    def alone_times(self, patterns: Sequence[Pattern]) -> Array:
        """Step times with one slow node alone, at each of some patterns of one node [s]."""
        label = patterns[0][0][1][0][1]
        node = next(n for n, x in self.labels.items() if x == label)
        slow = {n: x for n, x in self.slowdowns.items() if n == node}
        hosts = (self.layout.realise(p, self.hosts, {node: label}) for p in patterns)
        return self.slowed_times((h, slow) for h in hosts)

    def realise(self, pattern: Pattern) -> Index:
        """Hosts of a pattern, with as few nodes as may be going far."""
        if pattern in self._whole:
            return self._whole[pattern]
        return self.layout.realise(pattern, self.hosts, self.classes)

    def pattern(self, hosts: Index) -> Pattern:
        """Pattern of a placement; the first one that keeps its segments stands for it."""
        pattern = self.layout.pattern(hosts, self.classes)
        if self.segment or self.offered:
            self._whole.setdefault(pattern, hosts)
        return pattern

    def pattern_times(self, patterns: Sequence[Pattern]) -> Array:
        """Deterministic step times of patterns [s]."""
        return self.times([self.realise(p) for p in patterns])


def measured_speeds(step: Prepared) -> Array:
    """How slow each worker of a fitted trace was measured to be, over a typical one [node]."""
    origin = step.program.origin
    assert origin is not None
    factor = origin.factor if origin.held is None else origin.held[0]
    slow = (factor / np.median(factor, axis=1, keepdims=True)).max(axis=0)
    placement = Placement(step.job)
    out = np.ones(placement.n_nodes)
    out[placement.members()] = slow[step.program.low.member]
    return out


def make_problem(
    step: Prepared, slowdowns: Mapping[int, NodeSlowdown], context: RunContext, segment: int = 0,
    offered: tuple[Index, ...] = (),
) -> Problem:  # fmt: skip
    """Pose the question for a job's known slow nodes, or for a fitted trace's workers.

    Those nodes are placed that are known to be slow; of many, or of workers, those that are slow
    beyond the others' spread, the slowest first; where most are slow alike, the faster ones.
    """
    placement = Placement(step.job)
    measured = np.ones(placement.n_nodes) if step.workload else measured_speeds(step)
    speed = measured.copy()
    for node, slow in slowdowns.items():
        speed[node] *= worst_factor(slow)
    listed = [n for n, slow in slowdowns.items() if slow != NodeSlowdown()]
    most = min(MOST_PLACED, max(FEW, NEARLY_ALL * placement.n_slots))
    everyone = len(listed) > most and not offered
    slow_ones = frozenset(listed)
    if everyone:
        alike = listed if len(listed) <= MOST_PLACED else []
        found = _outliers(speed)
        fast = [] if found else _fast_outliers(speed, placement.slots)
        listed = (fast or found)[:MOST_PLACED] or _slowest(speed) or alike
        slow_ones = frozenset(found or listed)
        if fast:
            slow_ones = frozenset(np.flatnonzero(speed > speed[fast].max()).tolist())
    elif step.workload is None:
        found = _outliers(speed)
        listed = sorted({*(found[:MOST_PLACED] or _slowest(speed)), *listed})
        slow_ones = frozenset({*found, *listed})
    placed = tuple(sorted(listed, key=lambda n: (-speed[n], n)))
    labels: dict[object, int] = {}
    keys = {n: (slowdowns.get(n, NodeSlowdown()), float(measured[n])) for n in placed}
    for node in placed:
        labels.setdefault(keys[node], len(labels) + 1)
    classes = {node: labels[keys[node]] for node in placed}
    others = np.delete(speed, list(placed))
    differ = bool(others.size and np.ptp(others) > 0.0)
    problem = Problem(
        step, placement.slots, slowdowns, placed, classes, slow_ones, context, differ, segment,
        offered,
    )  # fmt: skip
    problem.check_whole(placement.slots)
    return problem


def _outliers(speed: Array) -> list[int]:
    """Nodes slower than the others' spread explains, by more than 1 %, the slowest first."""
    middle, off = _middle(speed)
    slow = np.flatnonzero(speed > middle + off)
    return [int(n) for n in slow[np.argsort(-speed[slow], kind="stable")]]


def _fast_outliers(speed: Array, used: Index) -> list[int]:
    """Nodes in use that are as much faster than the rest, the fastest first."""
    middle, off = _middle(speed[used])
    fast = np.sort(used[speed[used] < middle - off])
    return [int(n) for n in fast[np.argsort(speed[fast], kind="stable")]]


def _middle(speed: Array) -> tuple[float, float]:
    """Slowness of a typical node, and from which difference on a node is apart.

    Where many nodes are exactly alike, those are typical, though more than half may be slower.
    """
    values, counts = np.unique(speed, return_counts=True)
    if counts.max() >= max(FEW, MANY_ALIKE * speed.size):
        typical = float(values[counts.argmax()])
        return typical, LEAST_SLOW * typical
    middle = float(np.median(speed))
    spread = float(np.median(np.abs(speed - middle))) * 1.4826
    return middle, LEAST_SLOW * middle + OUTLIER * spread


def _slowest(speed: Array) -> list[int]:
    """Return the slowest node, if it is slower than a typical one."""
    slow = (speed == speed.max()) & (speed > np.median(speed))
    return [int(n) for n in np.flatnonzero(slow)[:1]]


def worst_factor(slow: NodeSlowdown) -> float:
    """Largest factor of a node among those that differ from 1 [1]."""
    factors = slow.compute, slow.memory or 1.0, slow.network, slow.other
    return max((x for x in factors if x != 1.0), default=1.0)


def slowness(problem: Problem, node: int) -> NodeSlowdown:
    """How slow a node is; a fitted trace's worker as measured, beside a typical one."""
    slow = problem.slowdowns.get(node, NodeSlowdown())
    if problem.step.workload is not None:
        return slow
    return slow._replace(compute=slow.compute * float(measured_speeds(problem.step)[node]))


def slowest_of(problem: Problem) -> NodeSlowdown:
    """Slowness of the slowest node, of all that are slow."""
    return max((slowness(problem, n) for n in sorted(problem.slow)), key=worst_factor)
