"""Slots of a job's rank order, which of them are alike, and all placements up to that.

A slot is a node's worth of consecutive ranks. Slots that share a replica form a block: a replica
of whole nodes, or several replicas that share nodes. Blocks that hold the same are exchangeable
where nodes of a class are, since a step is the latest of its replicas; so a placement is, for every
block with a slow node, which class sits at which position.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from prism.common.arrays import Array, Flags, Index

Content = tuple[tuple[int, int], ...]  # (position, class) of the slow nodes of a block, sorted
Pattern = tuple[tuple[int, Content], ...]  # (kind of block, content), sorted; blocks without: none


@dataclass(frozen=True)
class Layout:
    """What every slot holds, and which slots and blocks are alike."""

    pairs: tuple[tuple[tuple[int, int], ...], ...]  # (replica, stage) of the ranks there [slot]
    block: Index  # [slot]
    position: Index  # what it holds there: alike where slots of a block hold the same [slot]
    kind: Index  # blocks of one kind are exchangeable [block]

    @cached_property
    def room(self) -> tuple[Counter[int], ...]:
        """Slots of every position, by kind of block."""
        first = (blocks[0] for blocks in self.blocks_of)
        return tuple(Counter(self.position[self.block == b].tolist()) for b in first)

    @cached_property
    def slots_at(self) -> dict[tuple[int, int], list[int]]:
        """Slots by (block, position)."""
        out: dict[tuple[int, int], list[int]] = {}
        for slot, key in enumerate(zip(self.block.tolist(), self.position.tolist(), strict=True)):
            out.setdefault(key, []).append(slot)
        return out

    @cached_property
    def blocks_of(self) -> tuple[Index, ...]:
        """Blocks of each kind."""
        return tuple(np.flatnonzero(self.kind == k) for k in range(self.kind.max() + 1))

    def pattern(self, hosts: Index, classes: Mapping[int, int]) -> Pattern:
        """Return what a placement is up to symmetry."""
        blocks: dict[int, list[tuple[int, int]]] = {}
        for slot in np.flatnonzero(np.isin(hosts, list(classes))).tolist():
            entry = int(self.position[slot]), classes[int(hosts[slot])]
            blocks.setdefault(int(self.block[slot]), []).append(entry)
        return tuple(sorted((int(self.kind[b]), tuple(sorted(c))) for b, c in blocks.items()))

    def extensions(self, pattern: Pattern, label: int) -> set[Pattern]:
        """Patterns with one more slow node of a class."""
        used = Counter(kind for kind, _ in pattern)
        starts: list[tuple[Pattern, int, Content]] = [
            (pattern[:i] + pattern[i + 1 :], *entry) for i, entry in enumerate(pattern)
        ]
        starts += [(pattern, k, ()) for k, b in enumerate(self.blocks_of) if used[k] < b.size]
        return {
            tuple(sorted((*rest, (kind, grown))))
            for rest, kind, content in starts for grown in self._grow(kind, content, label)
        }  # fmt: skip

    def _grow(self, kind: int, content: Content, label: int) -> Iterable[Content]:
        taken = Counter(position for position, _ in content)
        for position, room in self.room[kind].items():
            if taken[position] < room:
                yield tuple(sorted((*content, (position, label))))

    def enumerate(self, labels: Iterable[int], limit: int) -> list[Pattern] | None:
        """All patterns of slow nodes with these classes, sorted; None where they exceed a limit."""
        level: set[Pattern] = {()}
        for label in sorted(labels):
            level = {more for pattern in level for more in self.extensions(pattern, label)}
            if len(level) > limit:
                return None
        return sorted(level)

    def realise(self, pattern: Pattern, hosts: Index, classes: Mapping[int, int]) -> Index:
        """Return hosts with that pattern, from present ones by exchanges of two nodes each.

        Of blocks that are alike those are taken that slow nodes are in already, or next to: nodes
        whose numbers are near share switches.
        """
        hosts = np.array(hosts, np.int64)
        at = {node: int(s) for node in classes for s in np.flatnonzero(hosts == node)}
        left = [node for node in classes if node in at]
        free = np.ones(self.kind.size, bool)
        for kind, content in sorted(pattern, key=lambda entry: -len(entry[1])):
            options = self._near_blocks(kind, free, [at[n] for n in left])
            plans = [(b, *self._plan(b, content, left, at, classes)) for b in options]
            block, _, moves = min(plans, key=lambda plan: plan[1])
            free[block] = False
            for node, slot in moves:
                left.remove(node)
                old, other = at[node], int(hosts[slot])
                hosts[[old, slot]] = other, node
                at[node] = slot
                if other in at and other != node:
                    at[other] = old
        return hosts

    def _near_blocks(self, kind: int, free: Flags, slots: list[int]) -> list[int]:
        """Free blocks of a kind: those that slow nodes are in, and as many next to them."""
        own = np.unique(self.block[slots])
        usable = self.blocks_of[kind][free[self.blocks_of[kind]]]
        far = np.abs(usable[:, None] - own).min(axis=1)
        return list(usable[np.argsort(far, kind="stable")[: 2 * own.size]].tolist())

    def _plan(
        self, block: int, content: Content, left: list[int], at: dict[int, int],
        classes: Mapping[int, int],
    ) -> tuple[tuple[int, int, int], list[tuple[int, int]]]:  # fmt: skip
        """Which nodes go to which slots of a block; how many move, leave their block, how far."""
        wanted = Counter(content)
        pairs = [
            (abs(at[node] - slot), node, slot)
            for position, label in wanted for slot in self.slots_at[block, position]
            for node in left if classes[node] == label
        ]  # fmt: skip
        moves: dict[int, int] = {}
        far = 0
        for distance, node, slot in sorted(pairs):
            entry = int(self.position[slot]), classes[node]
            if wanted[entry] and node not in moves and slot not in moves.values():
                wanted[entry] -= 1
                moves[node] = slot
                far += distance
        moving = sum(at[node] != slot for node, slot in moves.items())
        leaving = sum(int(self.block[at[node]]) != block for node in moves)
        return (moving, leaving, far), list(moves.items())


def make_layout(
    member: NDArray[np.int32], gpus_per_node: int, hosts: Index,
    work: Array | None = None,
) -> Layout:  # fmt: skip
    """Find blocks and positions of the slots, from the physical GPU member[replica, stage, rank].

    `hosts` [slot] are the nodes of the placement that the job starts from; `work` [loading, rank]
    that of a group's ranks, where it differs.
    """
    slot_of = {int(node): slot for slot, node in enumerate(hosts)}
    held: list[set[tuple[int, int]]] = [set() for _ in hosts]
    nodes = member // gpus_per_node
    for replica, stage in np.ndindex(nodes.shape[:2]):
        for node in np.unique(nodes[replica, stage]):
            held[slot_of[int(node)]].add((replica, stage))
    pairs = tuple(tuple(sorted(h)) for h in held)
    block = _components([{r for r, _ in h} for h in pairs], member.shape[0])
    signature: dict[object, int] = {}
    loads = [b""] * len(hosts)
    if work is not None:
        by_gpu = np.ones((len(work), int(member.max()) + 1))
        by_gpu[:, member] = work[:, None, None, :]
        loads = [by_gpu[:, n * gpus_per_node : (n + 1) * gpus_per_node].tobytes() for n in hosts]
    kinds: dict[tuple[int, ...], int] = {}
    kind = []
    position = np.zeros(len(pairs), np.int64)
    for b in range(block.max() + 1):
        slots = np.flatnonzero(block == b)
        first = min(r for s in slots for r, _ in pairs[s])
        for s in slots:  # what it holds, replicas counted from the block's first
            own = tuple((r - first, stage) for r, stage in pairs[s])
            position[s] = signature.setdefault((own, loads[s]), len(signature))
        key = tuple(sorted(position[slots].tolist()))
        kind.append(kinds.setdefault(key, len(kinds)))
    return Layout(pairs, block, position, np.array(kind))


def _components(replicas: list[set[int]], n: int) -> Index:
    """Return the number of every slot's block: slots that a chain of shared replicas connects."""
    pairs = np.array([(min(own), r) for own in replicas for r in own])
    joined = csr_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    root = connected_components(joined, directed=False)[1]
    labels: dict[int, int] = {}
    return np.array([labels.setdefault(root[min(own)], len(labels)) for own in replicas], np.int64)
