"""Stalls too rare to be met in the runs of a ranking: drawn more often, and weighed back.

A step is what it takes without stalls, T, and what its stalls add, D. Var(T + D) = Var T +
E[2 (T - E T) D + D^2] - (E D)^2, each part to be had where it is seen: the first from steps without
stalls, the rest from steps with many, each weighed by how much likelier its stalls were made
(importance sampling). Left out: what stalls change in the shares of other inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prism import engine
from prism.analyses.rankings.freezing import freeze_effect
from prism.common.attribution import Array
from prism.simulation.causes import Input, stall_bound, swap_keys
from prism.simulation.draws import draw_stalls
from prism.simulation.program import Program
from prism.simulation.steps import Run

Runner = Callable[[Sequence[Run]], list[tuple[Array, Array]]]  # step times and effects of each
RARE = 0.02  # stalls per step below which they are drawn more often
OFTEN = 0.25  # stalls per step then: enough to be seen, and rarely two in a step
MOST = 0.5  # probability of one group's stall, at most


@dataclass
class RareStalls:
    """Runs with stalls drawn more often, beside those without any, by cluster."""

    calm: Program  # without stalls, as fast between them
    often: Program
    log_odds: Array  # [stage] weight of a stall in place of none
    log_none: float  # weight of a step without any
    seeds: tuple[int, int]
    added: Array = field(default_factory=lambda: np.zeros(0))  # [cluster] variance by stalls [s^2]
    first: Array = field(default_factory=lambda: np.zeros(0))  # [cluster] of it, first order
    total: Array = field(default_factory=lambda: np.zeros(0))  # [cluster] and total order
    delay: Array = field(default_factory=lambda: np.zeros(0))  # [cluster] D [s]

    @property
    def mean(self) -> float:
        """What stalls add to the mean step [s]."""
        return float(self.delay.mean())

    def weights(self, n: int, seed: int) -> Array:
        """Likelihood of the stalls of n clusters over that under which they were drawn."""
        out = np.full((n, engine.LANES), self.log_none)
        for i in range(n):
            for stall in draw_stalls(self.often, i, seed):
                out[i, stall.hit] += self.log_odds[stall.stage]
        return np.asarray(np.exp(out))

    def measure(self, entry: Input, a: Array, b: Array, run: Runner) -> None:
        """Measure what stalls add in the clusters of two runs without them [cluster, lane]."""
        n, (seed, other) = len(a), self.seeds
        ab, ba = swap_keys(entry, seed, other), swap_keys(entry, other, seed)
        drawn = run([(self.often, range(n), keys) for keys in (seed, ab, other, ba)])
        in_a, in_ab, in_b, in_ba = (
            x[0] - quiet for x, quiet in zip(drawn, (a, a, b, b), strict=True)
        )
        wa, wb = self.weights(n, seed), self.weights(n, other)
        d, e = in_a - in_ab, in_ba - in_b
        self.first = 0.5 * (wa * wb * d * e).mean(axis=1)
        self.total = 0.25 * (wa * wb * (d * d + e * e)).mean(axis=1)
        self.delay = 0.5 * (wa * in_a + wb * in_b).mean(axis=1)
        parts = _added(wa, a, in_a) + _added(wb, b, in_b)
        self.added = 0.5 * parts - self.mean**2


def _added(w: Array, t: Array, d: Array) -> Array:
    """Variance that weighted delays add to steps, but for the square of their mean [cluster]."""
    return np.asarray((w * (2.0 * (t - t.mean()) * d + d * d)).mean(axis=1))


def find_rare_stalls(program: Program, seeds: tuple[int, int]) -> RareStalls | None:
    """Return the programs to measure stalls with, where they are rare."""
    stalls, (rate, _) = program.stalls, stall_bound(program)
    if not 0.0 < rate < RARE:
        return None
    p = stalls.probability
    more = np.minimum(p * OFTEN / rate, MOST)
    none = np.log1p(-p) - np.log1p(-more)
    odds = np.log(np.divide(p, more, out=np.ones_like(p), where=more > 0.0)) - none
    log_none = float(none[0])
    if stalls.entity == engine.GROUP_STALL:
        has_work = np.diff(stalls.op_ptr) > 0
        log_none = program.graph.n_replicas * float(none[: has_work.size][has_work].sum())
    return RareStalls(
        calm=freeze_effect(program, "stall"),
        often=replace(program, stalls=stalls._replace(probability=more)),
        log_odds=odds,
        log_none=log_none,
        seeds=seeds,
    )
