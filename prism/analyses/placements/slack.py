"""Why places differ: how much slower a node of a stage may be before the step is longer.

One node at a time is slow, all others are alike and every effect is at its mean. Left out: what
noise hides of a slack, and slow nodes that share one.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.analyses.placements.problem import Problem, worst_factor
from prism.cluster.nodemap import NodeSlowdown, Placement
from prism.common.arrays import Array

FREE = 0.1  # growth of the step over that of the node's time, below which slowness is hidden
OWN = 0.5  # and over that of the node's work alone, where it works for a small part of the step
FAR = 100.0, 200.0  # slowness at which a node alone sets the pace
ROUNDING = 1e-5  # of the step, in 32 bits
MOST = 1.0  # slack up to which is looked: twice as slow
GRID = MOST * np.linspace(0.0, 1.0, engine.LANES) ** 2  # slowness - 1, finer where it is small


class StageSlack(NamedTuple):
    """How much slower a node of a stage may be, and what the given slowness costs there [s]."""

    stage: int
    slack: float  # share of the node's time
    cost: float


def level(problem: Problem, nodes: Collection[int] | None = None) -> Problem:
    """Return the problem with some nodes typical, or all; the workers of a fitted trace too."""
    step, slowdowns = problem.step, {}
    if nodes is not None:
        slowdowns = {n: slow for n, slow in problem.slowdowns.items() if n not in nodes}
    origin = step.program.origin
    if step.workload is None and origin is not None:
        chosen = step.program.low.member
        if nodes is not None:
            chosen = chosen[np.isin(Placement(step.job).members(), list(nodes))]
        factor, held = origin.factor.copy(), origin.held
        factor[:, chosen] = 1.0
        if held is not None:
            held = held.copy()
            held[:, :, chosen] = np.array([1.0, 0.0]).reshape(2, *[1] * (chosen.ndim + 1))
        origin = origin._replace(factor=factor, held=held)
        step = replace(step, program=replace(step.program, origin=origin))
    return replace(problem, step=step, slowdowns=slowdowns, _known={})


def scale(slow: NodeSlowdown, exponent: float) -> NodeSlowdown:
    """Return a slowness of the same kind, more or less of it; what is faster is left out."""
    memory = None if slow.memory is None else max(1.0, slow.memory) ** exponent
    compute, network, other = (
        max(1.0, x) ** exponent for x in (slow.compute, slow.network, slow.other)
    )
    return NodeSlowdown(compute, memory, network, other)


def stage_slack(problem: Problem, slow: NodeSlowdown) -> list[StageSlack]:
    """Slack of every stage towards slowness of a kind, and the cost of this much of it."""
    exponents = np.log([*(1.0 + GRID), *FAR]) / np.log(worst_factor(slow))
    held = list(enumerate(problem.layout.pairs))
    first = {stage: slot for slot, pairs in reversed(held) for _, stage in pairs}
    slots = sorted(set(first.values()))
    nodes = [int(problem.hosts[slot]) for slot in slots]
    cases = [*(scale(slow, float(e)) for e in exponents), slow]
    times = problem.slowed_times(
        (problem.hosts, {node: case}) for node in nodes for case in cases
    ).reshape(len(slots), -1)
    out = []
    for s in range(problem.step.program.graph.n_stages):
        own = times[slots.index(first[s])]
        work = float((own[-2] - own[-3]) / (FAR[1] - FAR[0]))
        out.append(StageSlack(s, onset(own[: GRID.size], work), float(own[-1] - own[0])))
    return out


def onset(times: Array, work: float) -> float:
    """Slowness - 1 up to which the step hardly grows, from its times over `GRID`; at most `MOST`.

    It hardly does while it grows by less than `FREE` of what a node that works all the time would
    cost, and by less than `OWN` of what this node's work would. A stage's own part of the beginning
    and the end of a step costs a little in any case.
    """
    free = min(FREE, OWN * work / float(times[0]))
    growth = times / times[0] - 1.0 - free * GRID - ROUNDING
    if not (growth > 0.0).any():
        return MOST
    i = int((growth > 0.0).argmax())
    rise = (growth[i] - growth[i - 1]) / (GRID[i] - GRID[i - 1])
    return float(GRID[i] - growth[i] / rise)


def slot_cost(problem: Problem, slow: NodeSlowdown) -> Array:
    """Seconds that one slow node adds to the step, by where it is [stage, replica]."""
    layout, graph = problem.layout, problem.step.program.graph
    alike = problem.step.program.low.fixed_mean.shape[0] == 1
    slots = range(problem.hosts.size)
    key = [(layout.kind[layout.block[s]], layout.position[s]) if alike else (s, s) for s in slots]
    first = {k: s for s, k in reversed(list(enumerate(key)))}
    cases = [{}, *({int(problem.hosts[s]): slow} for s in first.values())]
    times = problem.slowed_times((problem.hosts, case) for case in cases)
    cost = dict(zip(first, times[1:] - times[0], strict=True))
    out = np.zeros((graph.n_stages, graph.n_replicas))
    for slot, k in enumerate(key):
        for replica, stage in layout.pairs[slot]:
            out[stage, replica] = max(out[stage, replica], cost[k])
    return out
