"""Which transfers of a pipeline trace belong together, and whether they block.

Sends pair with receives in the order of posting: by their names and the neighbour these say, within
a named group where one is given; what has neither pairs where ends coincide, and counts as
inferred. Transfers block where no worker computes meanwhile.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from prism.common.means import median
from prism.models.pipelinetrace.groups import CLOCK_S, EXCEPTIONS, LESS
from prism.models.pipelinetrace.pairs import Role, transfer_roles
from prism.models.pipelinetrace.times import Key, Times
from prism.simulation.tracemodel.graph import Array

# Share of transfers during which a worker computes, from which they do not block: 0 in blocking
# made-up traces and in those of three production jobs, 0.25 to 0.94 where they do not.
BESIDE = 0.1


class Pair(NamedTuple):
    """Two sides of a transfer: two workers' ops, one of which sends (if one only)."""

    send: Key
    receive: Key
    way: str  # forward, backward, or "" where the trace does not say


class Transfers(NamedTuple):
    """What is known of a trace's transfers."""

    pairs: list[Pair]
    blocking: bool
    alone: list[Key]  # transfers without another side


def pair_transfers(times: Times, chains: list[list[Key]]) -> Transfers:
    """Find out which transfers belong together."""
    keys = [k for chain in chains for k in chain if times.info[k].op_kind == "transfer"]
    pairs = _by_name(times, keys)
    pairs += _by_group(times, [k for k in keys if not transfer_roles(k[1])])
    met = {k for pair in pairs for k in (pair.send, pair.receive)}
    return Transfers(pairs, _blocking(times, chains, pairs), [k for k in keys if k not in met])


# ------------------------------------------------------------------------------------ pairing
def _by_name(times: Times, keys: Iterable[Key]) -> list[Pair]:
    """Pair the k-th send of a pass with the k-th receive on the neighbour it goes to."""
    if times.n_stages < 2:  # the others are not in the trace
        return []
    sides: dict[tuple[int, Role], list[Key]] = {}
    for key in keys:
        for role in transfer_roles(key[1]):
            sides.setdefault((key[0], role), []).append(key)
    pairs: list[Pair] = []
    for (stage, role), sends in sides.items():
        if role.side == "send":
            there = (stage + role.step) % times.n_stages
            receives = sides.get((there, Role("recv", role.way)), [])
            pairs += [Pair(a, b, role.way) for a, b in _match(times, sends, receives)]
    return pairs


def _match(times: Times, sends: list[Key], receives: list[Key]) -> list[tuple[Key, Key]]:
    """Pair two sides in order: within a named group, by microbatch if some are missing."""
    groups = {k: _group(times, k) for k in (*sends, *receives)}
    both = {groups[k] for k in sends} & {groups[k] for k in receives}
    if all(g in both for g in groups.values()) and len(both) > 1:
        return [
            pair
            for g in sorted(both)
            for pair in _match(
                times._replace(group=np.full_like(times.group, -1)),
                [k for k in sends if groups[k] == g],
                [k for k in receives if groups[k] == g],
            )
        ]
    if len(sends) != len(receives):
        by_label = [{times.info[k][2:]: k for k in side} for side in (sends, receives)]
        if len(by_label[0]) == len(sends) and len(by_label[1]) == len(receives):
            common = [label for label in by_label[0] if label in by_label[1]]
            return [(by_label[0][label], by_label[1][label]) for label in common]
    return list(zip(sends, receives, strict=False))


def _group(times: Times, key: Key) -> tuple[int, ...]:
    """Named groups of an op, of every replica."""
    return tuple(times.group[times.row[key]].tolist())


def _by_group(times: Times, keys: Iterable[Key]) -> list[Pair]:
    """Pair transfers whose names say nothing, but whose group has two stages: in order."""
    members: dict[tuple[int, ...], dict[int, list[Key]]] = {}
    for key in keys:
        if min(group := _group(times, key)) >= 0:
            members.setdefault(group, {}).setdefault(key[0], []).append(key)
    pairs = []
    for stages in members.values():
        if len(stages) == 2:
            (_, one), (_, other) = sorted(stages.items())
            if len(one) == len(other):
                pairs += [Pair(a, b, "") for a, b in zip(one, other, strict=True)]
    return pairs


# ------------------------------------------------------------------------------------ waiting
def _blocking(times: Times, chains: list[list[Key]], pairs: list[Pair]) -> bool:
    """Tell whether both sides wait for each other and do nothing else meanwhile."""
    if not pairs:
        return False
    together = [_together(times, p) for p in pairs]
    if np.mean(together) < 0.5:
        return False
    paired = {k for p in pairs for k in (p.send, p.receive)}
    beside = []
    for chain in chains:
        alone = [k for k in chain if times.info[k].op_kind != "transfer"]
        starts = median(times.start[[times.row[k] for k in alone]], (1, 2))
        for key in chain:
            if key not in paired:
                continue
            until = times.of(times.end, key)
            i = int(np.searchsorted(starts, float(median(times.of(times.start, key)))))
            over = [_shared(times, key, k, until) for k in alone[max(i - 1, 0) : i + 1]]
            beside.append(max(over, default=0.0) > 0.5)
    return bool(np.mean(beside) < BESIDE)


def _shared(times: Times, key: Key, other: Key, until: Array) -> float:
    """Share of workers' steps in which a worker does another op during a transfer."""
    common = np.minimum(until, times.of(times.end, other)) - np.maximum(
        times.of(times.start, key), times.of(times.start, other)
    )
    shorter = np.minimum(until - times.of(times.start, key),
                         times.of(times.end, other) - times.of(times.start, other))  # fmt: skip
    return float(np.mean(common > np.maximum(CLOCK_S, 0.3 * shorter)))


def _together(times: Times, pair: Pair) -> bool:
    """Tell whether both sides of a transfer end far closer than they started."""
    (a, b), t = pair[:2], times
    apart = float(median(np.abs(t.of(t.end, a) - t.of(t.end, b))))
    wait = float(median(np.abs(t.of(t.start, a) - t.of(t.start, b))))
    return apart <= max(LESS * wait, CLOCK_S)


def issued_together(times: Times, a: Key, b: Key) -> bool:
    """Tell whether a worker issued two transfers as one: the second before the first ended."""
    t = times
    start, end = (np.stack([t.of(v, a), t.of(v, b)]) for v in (t.start, t.end))
    common = end.min(axis=0) - start.max(axis=0)
    known = np.isfinite(common)
    shorter = (end - start).min(axis=0)
    return bool(known.any() and np.mean((common > 0.5 * shorter)[known]) > 0.5)


def consumers(times: Times, chain: list[Key], pairs: list[Pair]) -> dict[Key, Key]:
    """Say which op of a chain waits for which message: receive -> op.

    The k-th receive of a pass is for its k-th op on this stage that has an upstream; where their
    numbers differ, or ops start before, for the first op that always starts after the arrival.
    """
    found: dict[Key, Key] = {}
    arrivals = {p.receive: p.way for p in pairs if p.receive in chain}
    for way in dict.fromkeys(arrivals.values()):
        receives = [k for k in chain if arrivals.get(k) == way]
        ops = _passes(times, [k for k in chain if times.info[k].op_kind == way])
        ends = {times.info[k].chunk for k in ops}
        if len(ops) != len(receives) and len(ends) > 1:  # one end of the pipeline needs none
            first = min(ends) if way == "forward" else max(ends)
            ops = [k for k in ops if times.info[k].chunk != first]
        if len(ops) == len(receives) and all(map(_after, [times] * len(ops), receives, ops)):
            found |= dict(zip(receives, ops, strict=True))
            continue
        others = [k for k in chain if times.info[k].op_kind != "transfer"]
        for key in receives:
            op = next((k for k in others if _after(times, key, k)), None)
            found |= {} if op is None else {key: op}
    return found


def _passes(times: Times, ops: list[Key]) -> list[Key]:
    """First op of each microbatch, where the trace names microbatches."""
    if any(times.info[k].microbatch < 0 for k in ops):
        return ops
    first: dict[tuple[int, int], Key] = {}
    for key in ops:
        first.setdefault((times.info[key].chunk, times.info[key].microbatch), key)
    return list(first.values())


def _after(times: Times, receive: Key, op: Key) -> bool:
    """Tell whether an op starts after a message has arrived."""
    slack = times.of(times.start, op) - times.of(times.end, receive)
    known = np.isfinite(slack)
    return bool(known.any() and np.mean(slack[known] > -CLOCK_S) >= 1.0 - EXCEPTIONS)


def posted_after(posted: Array, arrivals: Iterable[Array], ready: Array) -> bool:
    """Tell whether a message was posted only when another had arrived, for which a worker waited.

    Parameters
    ----------
    posted, ready : float64 [replica, step]
        When it was posted, and when the worker was done with its last op [s].
    arrivals : iterable of float64 [replica, step]
        Of messages that the worker's next op needs [s].
    """
    for arrival in arrivals:
        waited = arrival - ready > CLOCK_S
        if waited.any() and np.mean((posted - arrival)[waited] >= -CLOCK_S) >= 1.0 - EXCEPTIONS:
            return True
    return False
