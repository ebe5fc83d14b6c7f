"""Sends and receives of a pipeline trace: which belong together, and who waits for which.

A name such as forward-send, recv_backward or send_forward_recv_backward says which way data goes;
what it does not say, a named group of two stages does. The k-th send of a pass pairs with the k-th
receive on the neighbour it goes to. Transfers block where no worker computes meanwhile.
"""

from typing import NamedTuple

import numpy as np

from prism.common.means import median
from prism.models.pipelinetrace.times import CLOCK_S, Index, Times, transfer_roles

# Share of transfers during which a worker computes, from which they do not block: 0 in blocking
# made-up traces and in those of three production jobs, 0.25 to 0.94 where they do not.
BESIDE = 0.1


class Pair(NamedTuple):
    """Two sides of a transfer: ops of two stages, the first of which sends (if one only)."""

    send: int
    receive: int
    way: str  # forward, backward, or "" where the trace does not say


def pair_transfers(times: Times, chains: list[Index]) -> list[Pair]:
    """Pair sends with receives: in order, of one pass and sender, or of one named group."""
    found: dict[tuple[str | int, ...], dict[int, list[int]]] = {}
    kinds, names, n_stages = times.ops["op_kind"], times.ops["name"], times.n_stages
    for stage, chain in enumerate(chains):
        for op in chain[(kinds[chain] == "transfer").to_numpy()].tolist():
            roles, group = transfer_roles(names[op]), times.group[op]
            for role in roles:
                key = role.way, role.sender(stage, n_stages)
                found.setdefault(key, {}).setdefault(role.side == "recv", []).append(op)
            if not roles and group.min() >= 0:
                found.setdefault(("", *group.tolist()), {}).setdefault(stage, []).append(op)
    pairs = []
    for (way, *_), sides in found.items():
        if len(sides) == 2 and n_stages > 1:  # else the other sides are not in the trace
            first, second = (sides[side] for side in sorted(sides))
            pairs += [Pair(a, b, str(way)) for a, b in zip(first, second, strict=False)]
    return pairs


def do_block(times: Times, chains: list[Index], pairs: list[Pair]) -> bool:
    """Tell whether workers do nothing else during a transfer, so that both sides wait."""
    start, end = (median(v, (1, 2)) for v in (times.start, times.end))
    sides = [k for pair in pairs for k in pair[:2]]
    beside = []
    for chain in chains:
        own = chain[np.isin(chain, sides)][:, None]
        other = chain[times.ops["op_kind"].to_numpy()[chain] != "transfer"]
        common = np.minimum(end[own], end[other]) - np.maximum(start[own], start[other])
        shorter = np.minimum((end - start)[own], (end - start)[other])
        beside += (common > np.maximum(CLOCK_S, 0.3 * shorter)).any(axis=1).tolist()
    return bool(pairs) and float(np.mean(beside)) < BESIDE


def consumers(times: Times, chain: Index, pairs: list[Pair]) -> dict[int, list[int]]:
    """Say which messages each op of a chain waits for: op -> receives.

    The k-th receive of a pass is for its k-th op on this stage that has an upstream.
    """
    stage = times.ops["stage"]
    found: dict[int, list[int]] = {}
    for way in ("forward", "backward"):
        receives = [
            p.receive for p in pairs if p.way == way and stage[p.receive] == stage[chain[0]]
        ]
        ops = times.ops.loc[chain].query("op_kind == @way")
        ops = ops.drop_duplicates(["chunk", "microbatch"])
        if len(ops) != len(receives) and ops["chunk"].nunique() > 1:
            # one end of the pipeline needs none
            end = ops["chunk"].min() if way == "forward" else ops["chunk"].max()
            ops = ops[ops["chunk"] != end]
        for receive, op in zip(receives, ops.index.tolist(), strict=False):
            found.setdefault(op, []).append(receive)
    return found
