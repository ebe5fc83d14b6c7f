"""Who waits for whom in a pipeline trace: sends and receives, collectives, unnamed barriers.

Sends pair with receives in order, by what their names or groups say; transfers block where no
worker computes meanwhile. A profiler records a collective from the moment a rank arrives, so its
duration holds the wait for the others. Workers meet where they leave when the last of them has
come: so groups and classes are checked, and barriers found that the trace does not name.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

import numpy as np

from prism.common.arrays import Flags, Index
from prism.common.means import finite_mean, median
from prism.models.pipelinetrace.times import CLOCK_S, Times, transfer_roles
from prism.simulation.tracemodel.graph import REPLICA, STAGE, WORKER, WORLD, Array, Scope

# of the step: shorter unexplained waits are less than what a model's mean is wrong by (0.04 to
# 1.4 % on three production jobs)
HIDDEN_STEP = 2e-3
# With these, 99 % of barriers are found in made-up jobs with gaps of four kinds, and one where
# there is none in at most 5 % (experiments/checks/coincidence.py).
FEW = 5  # steps below which no barrier is looked for: in traces of two, one of 45 had a false one
# Share of transfers' neighbours in the chain that run beside them, from which they do not block: 0
# in blocking made-up traces and those of three production jobs, 0.20 to 0.34 where they do not.
BESIDE = 0.1
EXCEPTIONS = 0.05  # share of cases that lost rows and clocks may make exceptions
LESS = 0.5  # of how far apart workers came, within which they leave together
# What a collective of this class joins where the trace does not contradict it.
EXPECTED = {
    "dp_reduce_scatter": STAGE,
    "dp_all_gather": STAGE,
    "dp_all_reduce": STAGE,
    "embedding_all_reduce": REPLICA,
    "world_all_reduce": WORLD,
    "layernorm_all_reduce": WORKER,
}


# -------------------------------------------------------------------------- sends and receives
class TransferPair(NamedTuple):
    """Two sides of a transfer: ops of two stages, the first of which sends (if one only)."""

    send: int
    receive: int
    way: str  # forward, backward, or "" where the trace does not say


def pair_transfers(times: Times, chains: list[Index]) -> list[TransferPair]:
    """Pair sends with receives: in order, of one pass and sender, or of one named group."""
    found: dict[tuple[str | int, ...], dict[int, list[int]]] = {}
    kinds, names, n_stages = times.ops["op_kind"], times.ops["name"], times.n_stages
    for stage, chain in enumerate(chains):
        for op in chain[(kinds[chain] == "transfer").to_numpy()].tolist():
            roles, group = transfer_roles(names[op]), times.group[op]
            for side, way in roles:
                to_sender = 0 if side == "send" else -1 if way == "forward" else 1
                passed = found.setdefault((way, (stage + to_sender) % n_stages), {})
                passed.setdefault(side == "recv", []).append(op)
            if not roles and group.min() >= 0:
                found.setdefault(("", *group.tolist()), {}).setdefault(stage, []).append(op)
    pairs = []
    for key, sides in found.items():
        if len(sides) == 2 and n_stages > 1:  # else the other sides are not in the trace
            first, second = (sides[side] for side in sorted(sides))
            pairs += [TransferPair(a, b, str(key[0])) for a, b in zip(first, second, strict=False)]
    return pairs


def do_block(times: Times, chains: list[Index], pairs: list[TransferPair]) -> bool:
    """Tell whether workers do nothing else during a transfer, so that both sides wait."""
    start, end, sides = times.start, times.end, [k for pair in pairs for k in pair[:2]]
    beside = []
    for chain in chains:
        at = np.flatnonzero(np.isin(chain, sides))
        others = np.flatnonzero(times.ops["op_kind"].to_numpy()[chain] != "transfer")
        for side in (-1, 0) if others.size else ():  # the op before, and that after
            near = others[np.clip(np.searchsorted(others, at) + side, 0, others.size - 1)]
            i, j = chain[at], chain[near]
            common = np.minimum(end[i], end[j]) - np.maximum(start[i], start[j])
            shorter = np.minimum(end[i] - start[i], end[j] - start[j])
            beside += (median(common - np.maximum(CLOCK_S, 0.3 * shorter), (1, 2)) > 0.0).tolist()
    return bool(beside) and float(np.mean(beside)) < BESIDE


def consumers(
    times: Times, chain: Index, pairs: list[TransferPair], sides: Container[int]
) -> dict[int, list[int]]:
    """Say which messages each op of a chain waits for: op -> receives.

    The k-th receive of a pass is for its k-th op on this stage that has an upstream.
    """
    found: dict[int, list[int]] = {}
    for way in ("forward", "backward"):
        receives = [p.receive for p in pairs if p.way == way and p.receive in sides]
        ops = times.ops.loc[chain].query("op_kind == @way")
        ops = ops.drop_duplicates(["chunk", "microbatch"])
        if len(ops) != len(receives) and ops["chunk"].nunique() > 1:
            # one end of the pipeline needs none
            end = ops["chunk"].min() if way == "forward" else ops["chunk"].max()
            ops = ops[ops["chunk"] != end]
        for receive, op in zip(receives, ops.index.tolist(), strict=False):
            found.setdefault(op, []).append(receive)
    return found


# ------------------------------------------------------------------ collectives and barriers
def nobody_leaves_before(arrived: Array, left: Array, scope: Scope) -> bool:
    """Tell whether nobody leaves before the last has come, [stage, replica, step]; NaN: absent."""
    own = left - arrived
    after = (left - scope.latest(arrived))[np.isfinite(own)]
    slack = CLOCK_S + 0.01 * float(np.abs(median(own)))
    return bool(after.size and np.mean(after < -slack) <= EXCEPTIONS)


def coincide(arrived: Array, left: Array, scope: Scope) -> bool:
    """Tell whether workers leave together, far closer than they came, when the last has come."""
    came, went = (float(median(scope.latest(t) - scope.earliest(t))) for t in (arrived, left))
    return went <= max(CLOCK_S, LESS * came) and nobody_leaves_before(arrived, left, scope)


def last_arrival(arrived: Array, scope: Scope) -> Array:
    """When the last of a meeting came, [stage, replica, step]; NaN where that of one is missing."""
    missing = scope.latest(np.where(np.isnan(arrived), 1.0, 0.0)) > 0.0
    return np.where(missing, np.nan, scope.latest(arrived))


def named_scope(group: Index, expected: Scope | None) -> Scope | None:
    """Which division of workers the numbers of groups [stage, replica] amount to; -1: none."""
    inside = group >= 0
    stage, replica = np.nonzero(inside)
    labels = {WORKER: stage * group.shape[1] + replica, STAGE: stage, REPLICA: replica,
              WORLD: np.zeros_like(stage)}  # fmt: skip
    for scope in sorted(labels, key=lambda s: (s != expected, -len(s.axes()))):
        pairs = set(zip(labels[scope].tolist(), group[inside].tolist(), strict=True))
        if len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) > 0:
            return scope
    return None


class Barrier(NamedTuple):
    """Workers that resume together although the trace names no meeting."""

    scope: Scope  # STAGE or REPLICA
    place: int  # which stage or replica

    def members(self, times: Array) -> Flags:
        """Who takes part, [stage, replica, step] of the shape of `times`."""
        return np.asarray(np.indices(times.shape)[int(self.scope == REPLICA)] == self.place)

    def release(self, level: Array) -> Array:
        """Return when workers leave, [stage, replica, step]; others keep their times."""
        inside = self.members(level)
        return np.where(inside, last_arrival(np.where(inside, level, -np.inf), self.scope), level)


def hidden_barriers(ready: Array, starts: Array, step_s: float) -> Iterator[tuple[Barrier, Array]]:
    """Find barriers between ends of workers' last ops and starts of what they do together.

    Yields each with when everyone has left it and those before, [stage, replica, step] like both.
    """
    n_stages, n_replicas = ready.shape[:2] if ready.shape[2] >= FEW else (0, 0)
    level = np.where(np.isfinite(starts), ready, np.nan)
    candidates = [Barrier(STAGE, s) for s in range(n_stages)]
    for barrier in candidates + [Barrier(REPLICA, r) for r in range(n_replicas)]:
        released = barrier.release(level)
        arrived, left = (np.where(barrier.members(t), t, np.nan) for t in (level, starts))
        wait = float(np.nan_to_num(finite_mean(released - arrived)))
        if wait > HIDDEN_STEP * step_s and coincide(arrived, left, barrier.scope):
            level = released
            yield barrier, released
