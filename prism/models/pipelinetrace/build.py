"""From a pipeline trace to its graph: chains of what each worker did, and who meets in what.

The order of a stage's ops is the order in which its workers did them; sends pair with receives,
collectives join the members of their named group, else of their class. Every op's duration counts
from the last arrival, gaps from the release before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from prism.common.errors import PrismError
from prism.common.means import median
from prism.common.text import format_share
from prism.models.pipelinetrace.groups import (
    CLOCK_S,
    EXPECTED,
    coincide,
    hidden_barriers,
    named_scope,
    nobody_leaves_before,
)
from prism.models.pipelinetrace.laying import Item, Laying, number_microbatches
from prism.models.pipelinetrace.times import Key, Times, bridge, ordered, read_times
from prism.models.pipelinetrace.transfers import (
    Pair,
    Transfers,
    consumers,
    issued_together,
    pair_transfers,
    posted_after,
)
from prism.simulation.tracemodel.graph import (
    COMPUTE,
    REPLICA,
    STAGE,
    WORKER,
    WORLD,
    Scope,
    TraceGraph,
    replay,
)

if TYPE_CHECKING:
    from prism.traces import Trace

LOCAL = (*COMPUTE, "optimizer", "launch_gap", "data_load", "compute", "memory", "other")
CLOSE = (
    0.015  # of the measured mean: a replay further off says so; production jobs' are 0.00002 off
)
REFUSED = 0.5  # a replay further off is of another job: two in one trace are 0.62 to 1.26 off
PLACES = {STAGE: "all replicas of stage {}", REPLICA: "all stages of replica {}"}


def build_trace_graph(trace: "Trace") -> TraceGraph:
    """Build the graph of a pipeline trace from the order in which its workers did things.

    Parameters
    ----------
    trace : Trace
        Ops of several steps with start times; each (dp_rank, stage) is one traced worker.

    Raises
    ------
    PrismError
        The trace has no start times, its workers do not repeat themselves from step to step, or
        sends and receives do not fit together.
    """
    times, measured, notes = read_times(trace)
    step_s = float(measured.mean())
    chains = ordered(times)
    transfers = pair_transfers(times, chains)
    if transfers.blocking or not transfers.pairs:  # else the next op may have waited for a message
        times = bridge(times, chains)
    plan = _Plan(times, chains, transfers, step_s, notes)
    laying = Laying(trace.source, times, plan.lay_out(), transfers.blocking)
    laying.walk()
    nodes, durations = number_microbatches(laying.nodes, notes), np.stack(laying.rows)
    placed = np.zeros(durations.shape, bool)
    for i, where in laying.placed.items():
        placed[i] = where
    graph = TraceGraph(
        nodes, durations, times.steps, measured, times.n_stages, times.start.shape[1], plan.p2p,
        tuple(notes), int(plan.recorded), int(plan.inferred), placed if placed.any() else None,
    )  # fmt: skip
    return _checked(graph, trace.source)


def _checked(graph: TraceGraph, source: str) -> TraceGraph:
    """Refuse a graph whose replay is far off what was measured."""
    off = replay(graph) / graph.measured - 1.0
    if float(np.median(np.abs(off))) > REFUSED:
        raise PrismError(
            f"{source}: replayed op by op, half of the steps are off by more than "
            f"{format_share(REFUSED)} ({format_share(float(off.mean()), 2)} in the mean); expected "
            "every worker's ops one after the other and in one order: give one job's trace, of one "
            "layout, with one traced worker per dp_rank and stage"
        )
    return graph


# --------------------------------------------------------------------------------------- plan
@dataclass
class _Plan:
    """Decides who meets in what; `lay_out` gives each stage's chain of items."""

    times: Times
    chains: list[list[Key]]
    transfers: Transfers
    step_s: float
    notes: list[str]
    recorded: int = 0
    inferred: int = 0

    @property
    def p2p(self) -> str:
        """How transfers wait: blocking, async, or none."""
        return (
            ("blocking" if self.transfers.blocking else "async") if self.transfers.pairs else "none"
        )

    def lay_out(self) -> list[list[Item]]:
        """Return each stage's items in order."""
        blocks = self.transfers.blocking or not self.transfers.pairs
        item_of = self._blocking() if blocks else {}
        self._count_transfers()
        passing = set() if self.transfers.blocking else _sides(self.transfers.pairs)
        rest = [k for k in self.times.row if k not in item_of and k not in passing]
        for name, ordinal in dict.fromkeys(k[1:] for k in rest):
            item_of |= self._collective(name, ordinal)
        chains = [[k for k in chain if k not in passing] for chain in self.chains]
        barriers = self._barriers(chains)
        batches = self._batches({k for k, i in item_of.items() if len(i.stages) > 2})
        laid = []
        for stage, chain in enumerate(chains):
            before = self._messages(stage, chain) if passing else [[] for _ in chain]
            row: list[Item] = []
            for key, messages in zip(chain, before, strict=False):
                passed = [b for b in barriers.get(key[1:], []) if key[0] in b.stages]
                item = item_of[key]
                if key in batches:
                    row += [*passed, *batches[key]]
                elif item.kind == "op" and item not in row[-len(item.keys) :]:
                    row += [*messages, *passed, item]
            laid.append(row + [m for messages in before[len(chain) :] for m in messages])
        return laid

    # -- meetings -----------------------------------------------------------------------------
    def _collective(self, name: str, ordinal: int) -> dict[Key, Item]:
        """Items of one op on all stages: one each, or one meeting."""
        keys = [(s, name, ordinal) for s in range(self.times.n_stages)]
        keys = [k for k in keys if k in self.times.row]
        scope = self._scope(keys)
        if scope in (REPLICA, WORLD):
            item = Item("op", frozenset(keys), scope, tuple(k[0] for k in keys))
            return dict.fromkeys(keys, item)
        return {k: Item("op", frozenset([k]), scope, (k[0],)) for k in keys}

    def _scope(self, keys: list[Key]) -> Scope:
        """Who meets in one op: by the names of groups, else by its class, else by coincidence."""
        t, (_, name, ordinal) = self.times, keys[0]
        info = t.info[keys[0]]
        group = np.full((t.n_stages, t.start.shape[1]), -1)
        for key in keys:
            group[key[0]] = t.group[t.row[key]]
        if info.op_kind == "transfer" or (info.op_kind in LOCAL and group.max() < 0):
            return WORKER
        starts, ends = (t.on_stages(v, name, ordinal) for v in (t.start, t.end))
        expected = EXPECTED.get(info.kernel_class)
        named = named_scope(group, expected)
        if group.max() >= 0 and named is None:
            self._note(f"{name}: its groups join other workers than a stage, a replica or all")
        for what, known in (("groups", named), ("class", expected)):
            if known is None:
                continue
            if nobody_leaves_before(starts, ends, known):
                self.recorded += known is not WORKER
                return known
            self._note(
                f"{name}: its {what} would join a {known.name}, of which some leave before all "
                "have come; not taken so"
            )
        for scope in (WORLD, STAGE, REPLICA):
            if coincide(starts, ends, scope):
                self.inferred += 1
                self._note(f"{name}: joins a {scope.name}, as coinciding ends tell")
                return scope
        return WORKER

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _barriers(self, chains: list[list[Key]]) -> dict[tuple[str, int], list[Item]]:
        """Barriers that no op names, by the op before which all of a group resume together."""
        t, found = self.times, {}
        for name, ordinal in dict.fromkeys(k[1:] for k in t.row):
            keys = [(s, name, ordinal) for s in range(t.n_stages)]
            if any(k not in chains[k[0]] for k in keys) or t.info[keys[0]].op_kind in COMPUTE:
                continue
            at = [chains[k[0]].index(k) for k in keys]
            if min(at) == 0:
                continue
            ready = np.stack([t.of(t.end, chains[s][i - 1]) for s, i in enumerate(at)])
            items = []
            for barrier in hidden_barriers(ready, t.on_stages(t.start, name, ordinal), self.step_s):
                scope, place = barrier
                stages = (place,) if scope == STAGE else tuple(range(t.n_stages))
                items.append(
                    Item("barrier", frozenset({(-1, name, ordinal)}), scope, stages, place)
                )
                where = PLACES[scope].format(place) if place >= 0 else "all workers"
                self._note(f"a barrier over {where} before {name}, which no op names")
                self.inferred += 1
            found[name, ordinal] = items
        return found

    # -- transfers ----------------------------------------------------------------------------
    def _count_transfers(self) -> None:
        """Count pairs of sends and receives, and say which have no other side."""
        pairs = self.transfers
        self.recorded += len(pairs.pairs)
        if pairs.alone:
            stage, name, ordinal = pairs.alone[0]
            self._note(
                f"{len(pairs.alone)} transfers have no other side in the trace, such as {name} no. "
                f"{ordinal} of stage {stage}; their recorded time, waiting included, counts as "
                "their own"
            )

    def _blocking(self) -> dict[Key, Item]:
        """Items of transfers that block: meetings of all that is issued together."""
        met: dict[Key, frozenset[Key]] = {k: frozenset([k]) for k in self.transfers.alone}
        joined = [pair[:2] for pair in self.transfers.pairs]
        met |= {k: frozenset([k]) for keys in joined for k in keys}
        for chain in self.chains:
            joined += [
                (a, b) for a, b in pairwise(chain)
                if a in met and b in met and issued_together(self.times, a, b)
            ]  # fmt: skip
        for a, b in joined:
            both = met[a] | met[b]
            met |= dict.fromkeys(both, both)
        return {
            key: Item("op", keys, REPLICA, tuple(sorted({k[0] for k in keys})))
            for key, keys in met.items()
        }

    def _batches(self, chained: set[Key]) -> dict[Key, list[Item]]:
        """Items of blocking transfers that join more than two workers, by a batch's first key.

        Each worker waits for its own neighbours, which wait for theirs: no common meeting.
        """
        pair_of = {k: p for p in self.transfers.pairs for k in p[:2] if k in chained}
        found: dict[Key, list[Item]] = {}
        for chain in self.chains:
            batch: list[Key] = []
            for key, after in zip(chain, [*chain[1:], None], strict=True):
                if key not in pair_of:
                    continue
                batch.append(key)
                if after in pair_of and issued_together(self.times, key, after):
                    continue
                found[batch[0]] = [
                    Item(kind, frozenset(pair_of[k][:2]), REPLICA, (k[0],), pair=pair_of[k])
                    for kind in ("post", "wait") for k in batch
                ]  # fmt: skip
                found |= {k: [] for k in batch[1:]}
                batch = []
        return found

    def _messages(self, stage: int, chain: list[Key]) -> list[list[Item]]:
        """Messages that a stage posts or awaits before each op of its chain, and after the last."""
        t = self.times
        posts: list[list[tuple[Key, Item]]] = [[] for _ in range(len(chain) + 1)]
        waits: list[list[tuple[Key, Item]]] = [[] for _ in range(len(chain) + 1)]
        ends = t.end[[t.row[k] for k in chain]]  # [place in the chain, replica, step]
        awaits = consumers(t, self.chains[stage], self.transfers.pairs)
        for pair in self.transfers.pairs:
            both = frozenset(pair[:2])
            for key in (k for k in pair[:2] if k[0] == stage):
                done = median(ends - t.of(t.start, key), (1, 2)) <= CLOCK_S
                slot = int(np.append(done, False).argmin())  # the first that is not
                posts[slot].append((key, Item("post", both, REPLICA, (stage,), pair=pair)))
            if pair.receive in awaits:
                slot = chain.index(awaits[pair.receive])
                item = Item("wait", both, REPLICA, (stage,), pair=pair)
                waits[slot].append((pair.receive, item))
        laid = []
        for i, slot_posts in enumerate(posts):
            ready = ends[i - 1] if i else np.zeros_like(ends[0])
            arrivals = [t.of(t.end, k) for k, _ in waits[i]]
            after = {k: posted_after(t.of(t.start, k), arrivals, ready) for k, _ in slot_posts}
            laid.append([
                *(item for k, item in slot_posts if not after[k]),
                *(item for _, item in waits[i]),
                *(item for k, item in slot_posts if after[k]),
            ])  # fmt: skip
        return laid


def _sides(pairs: Iterable[Pair]) -> set[Key]:
    return {k for p in pairs for k in (p.send, p.receive)}
