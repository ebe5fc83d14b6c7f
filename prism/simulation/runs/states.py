"""How fast steps are in the states of a run: congested, with a slow node, between stalls.

Each state is simulated beside the undisturbed step under the same random numbers, so that a few
hundred replicates tell the ratio. Ratios of states at the same time multiply.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.cluster.nodemap import NodeSlowdown, Placement
from prism.simulation.draws import congested_leaves, stall_groups, stall_lengths, stalls_in
from prism.simulation.execution.context import RunContext
from prism.simulation.execution.tasks import Arrays, Shared, Task, run_tasks
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program, make_keys, run_chunk
from prism.simulation.runs.parts import Array, StallProcess
from prism.simulation.sampledreplicas import fit_unseen, unfitted
from prism.simulation.steps import SECONDS_PER_SAMPLE, run_blocks

BLOCKS = 32  # clusters, of 64 steps each, that tell a state apart; and slow nodes that are tried
ENOUGH = 8  # pairs that make a mean
TAIL = 1e-7  # chance of more congested leaves than are followed
OFTEN = 0.25  # stalls per step where they are looked for
RARE = 0.3  # stalls per step beyond which they are part of every step


class Congestion(NamedTuple):
    """States by the number of congested leaves."""

    ratio: Array  # [state] step time over that without
    rates: Array  # [state, state] of changes [1/s]


@dataclass(frozen=True)
class Simulator:
    """What the extra simulations share."""

    step: Prepared
    context: RunContext

    @property
    def program(self) -> Program:
        """The step with its shared effects, also where `dependence: none` pooled them."""
        return self.step.program.shared or self.step.program

    def times(self, program: Program) -> Array:
        """Simulate the steps of `BLOCKS` clusters [block, lane] [s]."""
        return run_blocks(program, range(BLOCKS), self.context)[0].astype(np.float64)

    @cached_property
    def calm(self) -> Program:
        """The step while nothing disturbs it, as fast as it then is."""
        links = self.program.links._replace(probability=0.0)
        stalls = self.program.stalls._replace(duration=0.0)
        calm = replace(self.program, links=links, stalls=stalls)
        if calm.sample is None:
            return calm
        # a node that slows down changes which replicas are slow, not what the others take
        return fit_unseen(unfitted(calm), self.context).program

    @cached_property
    def calm_times(self) -> Array:
        """Steps while nothing disturbs them [block, lane] [s]."""
        return self.times(self.calm)


def find_felt(sim: Simulator) -> float:
    """Share of a slowdown of all steps that delays a run; the rest hides behind its loader [1]."""
    added, rng = sim.program.added, np.random.Generator(np.random.Philox(sim.context.seed))
    late = [x for x in added if x.moments() is None]
    if not late:
        return 1.0
    alone = sim.times(replace(sim.program, added=tuple(x for x in added if x not in late)))
    words = rng.integers(0, 1 << 32, (len(late), 4, *alone.shape), dtype=np.uint32)

    def mean(steps: Array) -> float:
        for each, drawn in zip(late, words, strict=True):
            steps = steps + each.draw(drawn, steps)
        return float(steps.mean())

    return (mean(alone * 1.01) - mean(alone * 0.99)) / (0.02 * mean(alone))


# --------------------------------------------------------------------------------- congestion
def find_congestion(sim: Simulator) -> Congestion | None:
    """Measure congestion that outlasts steps; None where there is none, or it is always there.

    Notes
    -----
    Each of L leaves is congested in a share p of the steps, as where every step draws anew, and for
    d seconds on average. With m congested, steps take r times as long; one leaf is freed at the
    rate c m / (d r), one more is hit at c (L - m) p / (d r (1 - p)). Dividing by r makes m binomial
    over steps (over time long steps weigh more); c, the mean r of the steps in which a given leaf
    is congested, makes the mean length d.
    """
    effect, program = sim.step.effects.regime, sim.program
    p, n = effect.probability, program.links.n_leaves
    if n == 0 or not 0.0 < p < 1.0:
        return None
    from scipy.stats import binom  # most of a second to load, for few jobs

    often = max(p, min(0.5, 1.0 / n))
    more = unfitted(replace(sim.calm, links=program.links._replace(probability=often)))
    ratio = sim.times(more) / sim.calm_times
    count = congested_leaves(more, range(BLOCKS), sim.context.seed)
    found = np.bincount(count.ravel())
    mean = np.bincount(count.ravel(), ratio.ravel()) / np.maximum(found, 1)
    mean[0] = 1.0
    known = np.flatnonzero((found >= ENOUGH) | (np.arange(found.size) == 0))
    states = np.arange(int(binom.isf(TAIL, n, p)) + 1)
    ratio = np.interp(states, known, mean[known])
    per_s = binom.pmf(states, n, p) @ (states * ratio) / (n * p) / (effect.duration_s * ratio)
    rates = np.zeros((states.size, states.size))
    rates[states[:-1], states[1:]] = (per_s * (n - states) * p / (1.0 - p))[:-1]
    rates[states[1:], states[:-1]] = (per_s * states)[1:]
    return Congestion(ratio, rates)


# ------------------------------------------------------------------------------- a slow node
def find_slowdowns(sim: Simulator, kind: str, factor: float) -> Array:
    """Simulate one slow node at a time: mean step over that without it [1], at random places."""
    rng = np.random.Generator(np.random.Philox(key=[sim.context.seed, 11]))
    placement = Placement(sim.step.job)
    nodes = placement.slots[rng.integers(0, placement.n_slots, BLOCKS)].tolist()
    known, calm = placement.slowdowns(), replace(sim.step, program=sim.calm)

    def slowed(node: int) -> Shared:
        slow = known.get(node, NodeSlowdown())
        slower = slow._replace(**{kind: factor * getattr(slow, kind)})
        program = relocate(calm, placement.slots, known | {node: slower})
        return Shared(program.work(track=False))

    times, keys = np.zeros(BLOCKS), make_keys(sim.context.seed)

    def take(i: int, found: Arrays) -> None:
        times[i] = float(found[0].mean(dtype=float))

    seconds = sim.program.n_draws * engine.LANES * SECONDS_PER_SAMPLE
    tasks = [Task(run_chunk, slowed(nodes[i]), (i, 1, keys), seconds) for i in range(BLOCKS)]
    run_tasks(tasks, take, sim.context)
    return np.asarray(times / sim.calm_times.mean(axis=1))


# ------------------------------------------------------------------------------------- stalls
def find_stalls(sim: Simulator, step_s: float) -> StallProcess | None:
    """Measure how often the job stalls and what a stall adds; None where not, or in most steps."""
    program, stalls = sim.program, sim.program.stalls
    if stalls.entity == engine.NO_STALL:
        return None
    p = np.array([stalls.probability[stage] for stage, _ in stall_groups(program)])
    rate = float(-np.log1p(-p).sum()) if (p < 1.0).all() else np.inf
    if not 0.0 < rate < RARE:
        return None
    if stalls.entity == engine.JOB_STALL:  # all of it delays the run
        return StallProcess(rate / step_s, stall_lengths(program))
    more = np.minimum(stalls.probability * OFTEN / rate, 0.5)
    often = replace(sim.calm, stalls=stalls._replace(probability=more))
    count, length = stalls_in(often, range(BLOCKS), sim.context.seed)
    single = count == 1
    if not single.any():
        return None
    delay, length = np.maximum((sim.times(often) - sim.calm_times)[single], 0.0), length[single]
    mean = float(delay.mean())
    if delay.size >= ENOUGH and length.std() > 0.0 and mean > 0.0:
        # the mean length is known: a control variate that takes the luck of those drawn out
        slope = float(np.cov(delay, length)[0, 1] / length.var(ddof=1))
        wanted = mean + slope * (stalls.duration - float(length.mean()))
        delay = delay * max(0.0, wanted / mean)
    return StallProcess(rate / step_s, delay)
