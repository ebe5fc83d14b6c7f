"""The whole simulation in plain NumPy: every GPU, every kernel, every step of a run.

What prism computes fast, this computes slowly and plainly, from the same parsed job, the nominal
durations of its kernels (`work`, of `prism.workload.build`) and its library. Read it in this order:

1. `Machine`: which rank does what, on which GPU, node and leaf switch, and how slow nodes are.
2. `schedule`: per stage the actions F, B, W of (chunk, microbatch), by the published rules.
3. `Effects`: each multiplier has mean 1 and is drawn once per what it belongs to: a GPU and
   cluster, a step, a microbatch of a replica, a call (one forward or backward), a kernel.
4. `Walk`: time. `clock` [replica, cp, tp, draw] of a stage is when each rank is free. A kernel adds
   its duration to its rank's clock; a collective first lifts its members' clocks to the latest. A
   transfer ends its duration after its sender's group; the reader waits for it. Collectives over
   replicas run on streams of their own: one begins when the stream is free and all members have
   come. So for a 1F1B step with fsdp read `run`, `act` (one action), `gather`, `reduce`.
5. `simulate`: many steps; each 64 draws share a cluster, that is their GPUs.
6. `simulate_runs`: step after step, with drift, failures, checkpoints, spares and slow nodes.

The last axis of every array is [draw]: independent steps (or runs), computed at the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd, lcm, log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

COMPUTE = {"gemm_attention", "gemm_mlp", "gemm_expert", "attention", "loss", "compute"}
MEMORY = {"memory", "embedding", "optimizer", "launch_gaps"}
LOSS = {"loss", "embedding"}
PER_CLUSTER = 64  # steps that share their GPUs
POOLED = 8  # times as many steps give what an op takes, where each is drawn by itself
DAY = 86_400.0
TAIL = np.geomspace(1e-9, 1e-3, 400)
GRID = np.unique(np.concatenate([TAIL, np.linspace(1e-3, 1.0 - 1e-3, 4001), 1.0 - TAIL]))
NORMAL = np.array([NormalDist().inv_cdf(q) for q in GRID])  # quantiles of a standard normal
EVEN, EACH = TAIL.size - 1, 4000 / 0.998  # where the even steps of the grid begin; one over a step
Array = np.ndarray


# ------------------------------------------------------------------------------- 1. the machine
class Machine:
    """Ranks by [replica, stage, cp, tp]: where each is, and how slow that is."""

    def __init__(self, job: Any, memory_loading: float = 0.0) -> None:
        p, c = job.parallelism, job.cluster
        self.job, self.memory_loading = job, memory_loading
        self.shape = (p.dp, p.pp, p.cp, p.tp)
        group = p.tp * p.cp
        stage, replica = group * p.dp, group
        if c.placement == "tp-cp-pp-dp":  # stages before replicas, as Llama 3
            stage, replica = group, group * p.pp
        d, s, k, t = np.indices(self.shape)
        rank = d * replica + s * stage + k * p.tp + t
        slots = -(-job.world_size // c.gpus_per_node)
        hosts = np.arange(slots) if c.hosts is None else np.asarray(c.hosts)
        self.node = hosts[rank // c.gpus_per_node]
        self.gpu = self.node * c.gpus_per_node + rank % c.gpus_per_node
        self.domain, self.leaf = self.gpu // c.nvlink_domain_gpus, self.node // c.leaf_nodes
        self.n_nodes = max(c.nodes or 0, slots)
        self.n_leaves = -(-self.n_nodes // c.leaf_nodes)

    def slowness(self, kind: str) -> Array:
        """Known factor on durations of each rank's compute, memory, network or other work."""
        factor = np.ones(self.shape)
        for node, slow in self.job.cluster.node_slowdowns.items():
            found = {"compute": slow} if isinstance(slow, float | int) else dict(slow)
            found = {k: v for k, v in found.items() if v is not None}
            whole = found.pop("everything", None)
            value = found.get(kind, whole or 1.0)
            if kind == "memory" and kind not in found and whole is None:
                value = found.get("compute", 1.0) ** self.memory_loading
            factor[self.node == node] = value
        return factor

    def touched(self, ranks: Any, crossing: bool | None = None) -> Array:
        """Leaf switches that a message among some ranks uses; none inside an NVLink domain."""
        out = np.zeros(self.n_leaves, bool)
        if np.ptp(self.domain[ranks]) > 0 if crossing is None else crossing:
            out[self.leaf[ranks]] = True
        return out


# -------------------------------------------------------------------------------- 2. schedules
def schedule(name: str, p: int, m: int, v: int) -> list[list[tuple[str, int, int]]]:
    """Actions (kind, chunk, microbatch) of every stage; a B with a W later is its input half."""
    if p == 1:
        there, back = [("F", c) for c in range(v)], [("B", c) for c in range(v)[::-1]]
        return [[(*a, i) for i in range(m) for a in there + back]]
    rows = []
    for s in range(p):
        forward, backward = [[(kind, 0, i) for i in range(m)] for kind in "FB"]
        if name == "gpipe":
            rows.append(forward + backward)
        elif name == "1f1b":
            rows.append(one_by_one(forward, backward, min(m, p - 1 - s)))
        elif name == "zb-h1":
            rows.append(delay_weights(one_by_one(forward, backward, min(m, p - 1 - s)), s))
        elif name == "interleaved":  # Megatron: chunks advance in groups of p microbatches
            order = [(c, g * p + i) for g in range(m // p) for c in range(v) for i in range(p)]
            forward, backward = [("F", *a) for a in order], [("B", v - 1 - c, i) for c, i in order]
            rows.append(one_by_one(forward, backward, min(2 * (p - 1 - s) + (v - 1) * p, m * v)))
        else:
            rows.append(zero_bubble_v(s, p, m) if name == "zb-v" else dualpipe_v(s, p, m))
    return rows


def one_by_one(forward: list, backward: list, warmup: int) -> list:
    """Warm-up forwards, then one forward and one backward in turn, then the other backwards."""
    pairs = zip(forward[warmup:], backward, strict=False)
    return (
        forward[:warmup] + [a for pair in pairs for a in pair] + backward[len(forward) - warmup :]
    )


def delay_weights(row: list, by: int) -> list:
    """Each weight half follows its input half `by` backwards later (arXiv:2401.10241)."""
    out, late = [], deque()
    for action in row:
        out.append(action)
        if action[0] == "B":
            late.append(("W", *action[1:]))
            if len(late) > by:
                out.append(late.popleft())
    return out + list(late)


def play_cells(phases: list[tuple[str, int]]) -> list:
    """Actions of cells such as ``F0 I1 W``: each takes its kind's next microbatch."""
    out, count, late = [], Counter(), []
    for cells, times in phases:
        for letter, *chunk in cells.split() * times:
            if letter == "W":  # the oldest that waits
                action = next(a for a in late if not chunk or a[1] == int(chunk[0]))
                late.remove(action)
                out.append(("W", *action[1:]))
                continue
            kind = "F" if letter == "F" else "B"
            out.append((kind, int(chunk[0]), count[kind, chunk[0]]))
            count[kind, chunk[0]] += 1
            if letter == "I":
                late.append(out[-1])
    return out


def zero_bubble_v(s: int, p: int, m: int) -> list:
    """ZB-V (arXiv:2401.10241, section 6), made for 2 p - 1 microbatches or more and cut."""
    n = max(m, 2 * p - 1)
    row = play_cells([
        ("F0", 2 * (p - s) - 1), ("F1 F0", s), ("F1 I1 W1", p - s),
        ("F0 I0 W0 F1 I1 W1", n + s + 1 - 2 * p), ("I0 W0 F1 I1 W1", p - 1 - s), ("I0 I1", s),
        ("I0 W0", p - s), ("W1", s), ("W0", s),
    ])  # fmt: skip
    return [action for action in row if action[2] < m]


def dualpipe_v(s: int, p: int, m: int) -> list:
    """DualPipeV (DeepSeek's DualPipe): of the last pairs the later backwards are split."""
    last = [("B" if k <= s else "I") + c for k, c in enumerate("10" * (s + 1))]
    return play_cells([
        ("F0", 2 * (p - 1 - s)), ("F0 F1", s + 1), ("I1 W F1", p - 1 - s),
        ("F0 B1 F1 B0", m + s + 1 - 2 * p), ("B1 F1 B0", p - 1 - s), (" ".join(last), 1),
        ("W I0", p - 1 - s), ("W", s + 1),
    ])  # fmt: skip


def blocking_rows(rows: list) -> list:
    """Actions and meetings: a send followed by a receive from the same stage is one exchange."""
    p, way = len(rows), {"F": 1, "B": -1, "W": 0}

    def source(s: int, action: tuple) -> tuple | None:  # the message that an action reads
        kind, _, i = action
        v = s - way[kind]
        return (kind, v, i) if v != s and 0 <= v < p else None

    def reader(s: int, action: tuple) -> int | None:  # the stage that reads what it gives
        v = s + way[action[0]]
        return v if v != s and 0 <= v < p else None

    answers = {}
    for s, row in enumerate(rows):
        for a, b in pairwise(row):
            received = source(s, b)
            if received is not None and received[1] == reader(s, a):
                answers[a[0], s, a[2]] = received

    def meeting(message: tuple, to: int) -> tuple:
        answer = answers.get(message)
        both = (message, answer) if answer and answers.get(answer) == message else (message,)
        return (tuple(sorted((message[1], to))), frozenset(both))

    out = []
    for s, row in enumerate(rows):
        items: list = []
        for a in row:
            received, to = source(s, a), reader(s, a)
            if received is not None and items[-1:] != [meeting(received, s)]:
                items.append(meeting(received, s))
            items.append(a)
            if to is not None:
                items.append(meeting((a[0], s, a[2]), to))
        out.append(items)
    return out


# ---------------------------------------------------------------------------------- 3. effects
class Effects:
    """The job's effects, else its library's, else none; those named in `off` are off."""

    def __init__(self, job: Any, library: Any, off: tuple[str, ...] = ()) -> None:
        self.job, self.library, self.off = job, library, off
        self.known: dict[str, Array | None] = {}
        self.multipliers: dict[tuple[str, float], Array | None] = {}

    def value(self, effect: str, key: str, default: float = 0.0) -> float:
        given = getattr(getattr(self.job.variability.effects, effect), key, None)
        if given is not None:
            return float(given)
        name = f"{effect}/{key}"
        known = self.library is not None and name in self.library
        return self.library.value(name) if known else default

    def quantiles(self, effect: str) -> Array | None:
        """Values of an effect, or of a residual of the library, at `GRID`; None if it is off."""
        if effect not in self.known:
            find = self._residual if "/" in effect else self._effect
            self.known[effect] = None if effect in self.off else find(effect)
        return self.known[effect]

    def _effect(self, effect: str) -> Array | None:
        cv = getattr(getattr(self.job.variability.effects, effect), "cv", None)
        if self.library is not None and effect in self.library:
            distribution = self.library.distribution(effect)
            if cv is not None:
                distribution = (
                    distribution.with_params(body_cv=cv)
                    if effect == "rank"
                    else distribution.scaled_to(cv)
                )
            return distribution.ppf(GRID) if distribution.std else None
        if cv is None:
            cv = {"jitter": 1.0, "expert": 0.05 * (self.library is not None)}.get(effect)
        return lognormal(cv) if cv else None

    def _residual(self, entry: str) -> Array | None:
        given = self.job.variability.effects.residual
        if given is not None and given.cv is not None:
            return lognormal(given.cv) if given.cv else None
        if entry.startswith("lognormal/"):
            return lognormal(float(entry.split("/")[1]))
        if self.library is None:
            return None
        distribution = self.library.distribution(entry)
        distribution = distribution.scaled_to(
            distribution.cv * (1.0 if given is None or given.scale is None else given.scale)
        )
        return distribution.ppf(GRID) if distribution.std else None

    def at(self, effect: str, u: Array, loading: float = 1.0) -> Any:
        """Multiplier X**loading / E[X**loading] at probabilities u; 1 where the effect is off."""
        if (effect, loading) not in self.multipliers:
            self.multipliers[effect, loading] = self._multiplier(effect, loading)
        y = self.multipliers[effect, loading]
        return 1.0 if y is None else quantile(u, y)

    def _multiplier(self, effect: str, loading: float) -> Array | None:
        x = self.quantiles(effect)
        if x is None or loading == 0.0:
            return None
        y = x**loading
        return y / (np.sum(0.5 * (y[1:] + y[:-1]) * np.diff(GRID)) + GRID[0] * (y[0] + y[-1]))

    def draw_gpus(self, rng: Any, machine: Machine, n_clusters: int) -> Array:
        """Probability of each rank's speed [.., draw]: a part of its node, a part of its own."""
        share, per = self.value("rank", "node_share"), self.job.cluster.gpus_per_node
        node = rng.standard_normal((machine.n_nodes, n_clusters)).repeat(per, axis=0)
        own = rng.standard_normal(node.shape)
        u = np.interp(sqrt(share) * node + sqrt(1.0 - share) * own, NORMAL, GRID)
        return u.repeat(PER_CLUSTER, axis=1)[machine.gpu]

    def congestion(self, touched: Array, congested: Array) -> Array:
        """Multiplier [.., draw] of messages that use leaves [.., leaf], some congested.

        One is enough to slow a message down by the factor; the mean is 1 however many it uses.
        """
        p, factor = self.value("regime", "probability"), self.value("regime", "factor", 1.0)
        mean = 1.0 + (1.0 - (1.0 - p) ** touched.sum(axis=-1)) * (factor - 1.0)
        return np.where(touched.astype(int) @ congested > 0, factor, 1.0) / mean[..., None]

    def stall(self, entity: str) -> tuple[float, float]:
        """Rate of the stalls of an entity [1/s], and their mean length [s]."""
        block = self.job.variability.effects.stall
        mine = "rank" if block is None or block.entity is None else block.entity
        rate, length = self.value("stall", "rate_per_hour"), self.value("stall", "duration_s")
        return (rate / 3600.0, length) if mine == entity and length else (0.0, 0.0)

    def stall_seconds(self, rng: Any, count: Array) -> Array:
        """Seconds of so many stalls, each of its own lognormal length."""
        length, cv = self.value("stall", "duration_s"), self.value("stall", "duration_cv")
        each = lognormal(cv) if cv else np.ones(GRID.size)
        out = np.zeros(count.shape)
        while (count > 0).any():
            out += np.where(count > 0, length * quantile(rng.random(count.shape), each), 0.0)
            count = count - 1
        return out

    def microbatch_loading(self, kind: str, kernel_class: str) -> float:
        if kernel_class not in COMPUTE | MEMORY or kernel_class == "optimizer":
            return 0.0
        own = 1.0 if kind == "F" else self.value("microbatch", "backward_loading", 1.5)
        return own * (
            self.value("microbatch", "loss_loading", 1.0) if kernel_class in LOSS else 1.0
        )


def quantile(u: Array, y: Array) -> Array:
    """`np.interp(u, GRID, y)`, by place where the grid is even: a third of the time."""
    at = (u - GRID[EVEN]) * EACH
    i = at.astype(np.int32)
    low = y[EVEN:].take(i, mode="clip")
    out = low + (at - i) * (y[EVEN + 1 :].take(i, mode="clip") - low)
    tails = np.abs(u - 0.5) > 0.499
    out[tails] = np.interp(u[tails], GRID, y)
    return out


def lognormal(cv: float) -> Array:
    """Quantiles at `GRID` of a lognormal of mean 1."""
    s2 = log1p(cv * cv)
    return np.exp(sqrt(s2) * NORMAL - 0.5 * s2)


# -------------------------------------------------------------------------- 4. one step, many draws
@dataclass
class Stage:
    """What a stage has reached; streams and gathers are [replica, draw]."""

    clock: Array  # [replica, cp, tp, draw] when each rank is free
    uses: list[int]  # chunks whose parameters are gathered, in order
    pending: Counter  # backwards still to come, by chunk
    split: set  # (chunk, microbatch) whose weight half is an action of its own
    used: int = 0
    gathers: list[tuple] = field(default_factory=list)  # when each use's may begin, and may end
    stream: dict[str, Any] = field(default_factory=lambda: {"gather": 0.0, "reduce": 0.0})
    last: dict[tuple[str, str], Any] = field(default_factory=dict)  # (stream, group) -> last end
    waiting: list[tuple] = field(default_factory=list)  # gradients to reduce, and since when


class Walk:
    """A step of all ranks under draws of `rng`; without one every effect is 1.

    Known slow nodes are one, unless `known_nodes`.
    """

    def __init__(
        self, job: Any, work: Any, effects: Effects, n: int, rng: Any = None,
        pools: dict | None = None, known_nodes: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.work, self.effects, self.n, self.rng = job, work, effects, n, rng
        self.p = p = job.parallelism
        self.machine = m = Machine(job, effects.value("rank", "memory_loading"))
        dp, pp, cp, tp = m.shape
        self.v, self.in_v = len(work.chunks[0]), p.schedule in ("zb-v", "dualpipe-v")
        self.again = p.data_parallel in ("fsdp", "hsdp") and p.reshard_after_forward
        self.blocking = p.p2p == "blocking" and pp > 1
        self.stages, self.rows = [], schedule(p.schedule, pp, p.microbatches, self.v)
        for s, row in enumerate(self.rows):
            uses = [c for kind, c, _ in row if kind != "W" and work.gathers[s][c]]
            self.stages.append(Stage(
                np.zeros((dp, cp, tp, n)), uses if self.again else list(dict.fromkeys(uses)),
                Counter(c for kind, c, _ in row if kind == "B"),
                {a[1:] for a in row if a[0] == "W"},
            ))  # fmt: skip
        # replicas that one message joins: all, a shard group, or as many as ep groups span
        spans = lcm(p.ep * (p.expert_tp or tp), cp * tp) // (cp * tp)
        self.span = {"stage": dp, "hop": 1, "shard": shard_size(job), "ep": spans}
        self.arrived: dict[tuple, Array] = {}  # (kind, virtual stage, microbatch): [replica, draw]
        self.step = self.draw("step", (n,))
        self.loads: dict[tuple[int, int], Any] = {}  # of experts, by stage and microbatch
        self.pools, self.kept, self.congested = pools, {}, None
        kinds = "compute", "memory", "network", "other"
        known = rng is not None or known_nodes
        self.slow = {k: m.slowness(k) if known else np.ones(m.shape) for k in kinds}
        if rng is not None:
            self.speed = effects.draw_gpus(rng, m, n // PER_CLUSTER)
            self.content = rng.random((dp, p.microbatches, n))
            probability = effects.value("regime", "probability")
            if probability and "regime" not in effects.off:
                self.congested = rng.random((m.n_leaves, n)) < probability

    def draw(self, effect: str, shape: tuple) -> Any:
        return 1.0 if self.rng is None else self.effects.at(effect, self.rng.random(shape))

    def run(self) -> Array:
        """Step time [draw]: play every stage's actions, each as far as its inputs exist."""
        items = blocking_rows(self.rows) if self.blocking else self.rows
        heads, moved = [0] * len(items), True
        while moved:
            moved = False
            for s, row in enumerate(items):
                while heads[s] < len(row) and self.attempt(s, items, heads):
                    moved = True
        assert all(head == len(row) for head, row in zip(heads, items, strict=True)), "deadlock"
        return self.end_of_step()

    def attempt(self, s: int, items: list, heads: list[int]) -> bool:
        """Do a stage's next item, unless it has to wait for another stage."""
        item, arrived = items[s][heads[s]], None
        if len(item) == 2:  # a meeting
            both = item[0]
            other = both[0] + both[1] - s
            if items[other][heads[other] : heads[other] + 1] != [item]:
                return False
            self.meet(*both)
            heads[other] += 1
        else:
            kind, chunk, microbatch = item
            source = self.neighbour(kind, s, chunk, -1)
            if source is not None and not self.blocking:
                arrived = self.arrived.get((kind, source, microbatch))
                if arrived is None:
                    return False
            self.act(s, item, arrived)
        heads[s] += 1
        return True

    def act(self, s: int, action: tuple, arrived: Array | None) -> None:
        """One forward or backward of a chunk, on all ranks of all replicas of a stage."""
        kind, chunk, microbatch = action
        stage, work = self.stages[s], self.work.chunks[s][chunk]
        split = (chunk, microbatch) in stage.split
        backward = work.inputs if split else work.backward
        kernels = {"F": work.forward, "B": backward, "W": work.weights}[kind]
        first, beside = (None, None) if kind == "W" else self.gather(s, chunk)
        for inputs in (first, arrived):
            if inputs is not None:
                stage.clock = np.maximum(stage.clock, inputs[:, None, None])
        begin, op = self.all_of(s), (kind, s, chunk, split)
        given = self.given(op, begin.shape)
        if given is None:
            self.run_kernels(s, kind, kernels, microbatch)
            self.keep(op, self.all_of(s) - begin)
        else:
            stage.clock = np.broadcast_to((begin + given)[:, None, None], stage.clock.shape)
        if beside is not None:
            stage.clock = np.maximum(stage.clock, beside[:, None, None])
        if kind != "W":
            self.send(s, kind, chunk, microbatch)
        if kind == ("W" if split else "B"):
            self.reduce(s, chunk, begin)

    def run_kernels(self, s: int, kind: str, kernels: Any, microbatch: int) -> None:
        stage = self.stages[s]
        dp, cp, tp, n = stage.clock.shape
        call = self.draw("call", (dp, 1, 1, n))
        for k in kernels:
            load = self.expert_load(s, microbatch) if k.routed else 1.0
            if k.group:  # a collective of the tp, cp or ep group, or what runs beside one
                shape, axis = self.grouped(k.group), -2 if k.group == "tp" else -3
                clock = stage.clock.reshape(*shape, n)
                begin = clock.max(axis=axis, keepdims=True)
                own = self.draw(k.distribution, begin.shape) * self.step
                if k.group != "ep":
                    own = own * spread(self.slowed(k.distribution, s), begin.ndim)
                if np.ndim(load):
                    own = own * load.reshape(*shape, n).max(axis=axis, keepdims=True)
                if k.group == "ep" and "nvlink" not in k.distribution:
                    own = own * spread(self.on_link("ep", s), begin.ndim)
                clock = np.broadcast_to(begin + k.duration * own, clock.shape)
                stage.clock = clock.reshape(dp, cp, tp, n)
                continue
            seconds = k.duration * self.step * load * self.draw(k.distribution, stage.clock.shape)
            if k.kernel_class in COMPUTE | MEMORY:
                seconds = seconds * call * self.rank_factor(s, k.kernel_class)
                if self.rng is not None and not k.routed:
                    loading = self.effects.microbatch_loading(kind, k.kernel_class)
                    content = self.effects.at("microbatch", self.content[:, microbatch], loading)
                    seconds = seconds * spread(content, 4)
                rate, length = self.effects.stall("rank")
                if self.rng is not None and rate:  # part of the mean: the rest is faster
                    count = self.rng.poisson(rate * k.duration, stage.clock.shape)
                    seconds = seconds * (1.0 - rate * length)
                    seconds = seconds + self.effects.stall_seconds(self.rng, count)
            stage.clock = stage.clock + seconds

    def rank_factor(self, s: int, kernel_class: str) -> Any:
        """How slow each rank of a stage is at a class of kernels [replica, cp, tp, draw]."""
        kind = "compute" if kernel_class in COMPUTE else "memory"
        loading = 1.0 if kind == "compute" else self.machine.memory_loading
        drawn = 1.0
        if self.rng is not None:
            drawn = self.effects.at("rank", self.speed[:, s], loading)
        return self.slow[kind][:, s, :, :, None] * drawn

    def slowed(self, distribution: str, *stages: int) -> Array:
        """How slow nodes make a message: the slowest of a replica's that take part [replica, 1]."""
        factor = self.slow["other" if distribution.startswith("residual/nvlink") else "network"]
        return factor[:, list(stages)].max(axis=(1, 2, 3))[:, None]

    def grouped(self, group: str) -> tuple[int, ...]:
        """Shape of a stage's ranks in which members of a group lie along one axis.

        tp along the last one, cp before it; an ep group is neighbours over dp, cp and, where each
        tp rank holds whole experts, tp.
        """
        dp, _, cp, tp = self.machine.shape
        each = 1 if self.p.expert_tp == 1 else tp
        return (
            (dp * cp * tp // each // self.p.ep, self.p.ep, each) if group == "ep" else (dp, cp, tp)
        )

    def expert_load(self, s: int, microbatch: int) -> Any:
        """Tokens of an ep group's busiest rank over their mean, one draw for a microbatch."""
        if self.rng is None or self.p.ep == 1:
            return 1.0
        if (s, microbatch) not in self.loads:
            shape, clock = self.grouped("ep"), self.stages[s].clock
            x = self.draw("expert", (shape[0], 1, 1, self.n))
            x = np.broadcast_to(x, (*shape, self.n)).reshape(clock.shape) if np.ndim(x) else x
            self.loads[s, microbatch] = x
        return self.loads[s, microbatch]

    def all_of(self, s: int) -> Array:
        """When all ranks of a stage are free [replica, draw]."""
        return self.stages[s].clock.max(axis=(1, 2))

    # -- each op by itself: what it took elsewhere, drawn at random ------------------------------
    def given(self, op: tuple, shape: tuple) -> Array | None:
        if self.pools is None:
            return None
        return self.pools[op][self.rng.integers(0, self.pools[op].size, shape)]

    def keep(self, op: tuple, seconds: Array) -> None:
        if self.rng is not None:
            self.kept.setdefault(op, []).append(seconds.ravel())

    # -- between stages ------------------------------------------------------------------------
    def neighbour(self, kind: str, s: int, chunk: int, way: int) -> int | None:
        """Virtual stage that reads what an F or B gives (way 1), or whose it reads (-1)."""
        v = self.virtual(s, chunk) + (way if kind == "F" else -way)
        return v if kind != "W" and 0 <= v < len(self.rows) * self.v else None

    def virtual(self, s: int, chunk: int) -> int:
        """Place of a stage's chunk in the model: looped, or there and back in a V."""
        p = len(self.rows)
        return chunk * p + (p - 1 - s if self.in_v and chunk % 2 else s)

    def send(self, s: int, kind: str, chunk: int, microbatch: int) -> None:
        """Async: the group's output travels while the stage goes on."""
        p, v = len(self.rows), self.virtual(s, chunk)
        to = self.neighbour(kind, s, chunk, 1)
        if to is None or self.blocking:
            return
        done, place = (
            self.all_of(s),
            {self.virtual(x, c): x for x in range(p) for c in range(self.v)},
        )
        low, high = sorted((place[v], place[to]))
        if low != high:  # from the last stage round to the first is the last link
            round_ = not self.in_v and min(v, to) % p == p - 1
            done = done + self.transfer(high if round_ else low)
        self.arrived[kind, v, microbatch] = done

    def meet(self, low: int, high: int) -> None:
        """Blocking: both groups come, exchange what they have for each other, and go on."""
        end = np.maximum(self.all_of(low), self.all_of(high)) + self.transfer(low)
        for x in (low, high):
            shape = self.stages[x].clock.shape
            self.stages[x].clock = np.broadcast_to(end[:, None, None], shape)

    def transfer(self, low: int) -> Array:
        """Seconds of a transfer on a link, one draw for a replica's group [replica, draw]."""
        shape, peer = (self.p.dp, self.n), (low + 1) % len(self.rows)
        seconds = self.given(("transfer", low), shape)
        if seconds is None:
            seconds = np.zeros(shape)
            for t in self.work.transfers(low):
                own = self.draw(t.distribution, shape) * self.on_link("hop", low, peer)
                seconds = seconds + t.duration * self.step * own * self.slowed(
                    t.distribution, low, peer
                )
            self.keep(("transfer", low), seconds)
        return seconds

    def on_link(self, group: str, *stages: int) -> Any:
        """Congestion of what groups of some stages send [group, draw]."""
        if self.congested is None:
            return 1.0
        m, size, touched = self.machine, self.span.get(group, self.p.dp), []
        for d in range(0, self.p.dp, size):
            ranks, crossing = np.ix_(range(d, d + size), stages), None
            if group in ("hop", "embedding"):  # each rank sends to its peer
                ends = m.domain[d, list(stages)]
                crossing = bool((ends[0] != ends[-1]).any())
            touched.append(m.touched(ranks, crossing))
        return self.effects.congestion(np.array(touched), self.congested)

    # -- over replicas ---------------------------------------------------------------------------
    def collective(self, s: int, c: Any, *after: Any) -> Array:
        """End of one op for all members, from the last of what it waits for [replica, draw].

        Members are all replicas; with hsdp, those of a shard group have one of their own.
        """
        shape, size = (self.p.dp, self.n), self.span.get(c.group, self.p.dp)
        begin = np.maximum.reduce([np.broadcast_to(a, shape) for a in after])
        begin = begin.reshape(-1, size, self.n).max(axis=1)
        op, all_stages = (c.name, s, c.duration), range(len(self.rows))
        seconds = self.given(op, begin.shape)
        if seconds is None:
            of = {"world": all_stages, "embedding": (0, all_stages[-1])}.get(c.group, (s,))
            seconds = c.duration * self.step * self.draw(c.distribution, begin.shape)
            if c.group and not c.kernel_class.startswith("tp_"):
                slow = self.slowed(c.distribution, *of).reshape(-1, size).max(axis=1)
                seconds = seconds * self.on_link(c.group, *of) * slow[:, None]
            self.keep(op, np.broadcast_to(seconds, begin.shape))
        return (begin + seconds).repeat(size, axis=0)

    def on_stream(self, s: int, name: str, other: str, c: Any, since: Any = None) -> Array:
        """A collective after the last one on its stream, and the other stream's of its group."""
        stage = self.stages[s]
        before = stage.stream[name], stage.last.get((other, c.group), 0.0)
        since = self.all_of(s) if since is None else since
        stage.stream[name] = end = self.collective(s, c, *before, since)
        stage.last[name, c.group] = end
        return end

    def gather(self, s: int, chunk: int) -> tuple:
        """When a chunk may begin, and when it may end; issues this gather and some ahead of it."""
        stage = self.stages[s]
        if stage.used == len(stage.uses) or stage.uses[stage.used] != chunk:
            return None, None
        stage.used += 1
        ahead = self.p.prefetch if self.p.overlap else 0
        if self.p.data_parallel == "zero1":  # all from the step's beginning on
            ahead = len(stage.uses)
        for use in stage.uses[len(stage.gathers) : stage.used + ahead]:
            first = None
            for c in self.work.gathers[s][use]:
                end = self.on_stream(s, "gather", "reduce", c)
                first = first if c.beside else end
            stage.gathers.append((first, stage.stream["gather"]))
        return stage.gathers[stage.used - 1]

    def reduce(self, s: int, chunk: int, begin: Array) -> None:
        """Reduce a chunk's gradients after its last backward (with resharding after each)."""
        stage = self.stages[s]
        stage.pending[chunk] -= 1
        if stage.pending[chunk] == 0 or self.again:
            stage.waiting += [(c, begin if c.beside else None) for c in self.work.reduces[s][chunk]]
        if self.work.hides_gradients:
            self.run_reduces(s)

    def run_reduces(self, s: int) -> None:
        for c, since in self.stages[s].waiting:
            self.on_stream(s, "reduce", "gather", c, since)
        self.stages[s].waiting = []

    def end_of_step(self) -> Array:
        """The barriers that end a step, the gradient norm's over all ranks, then Adam."""
        w, done = self.work, []
        for s, stage in enumerate(self.stages):
            self.run_reduces(s)
            done.append(np.maximum(self.all_of(s), stage.stream["reduce"]).max(axis=0))
        if w.layernorm_reduce is not None:
            done = [self.collective(s, w.layernorm_reduce, d) for s, d in enumerate(done)]
        if w.embedding_reduce is not None and len(done) > 1:
            done[0] = done[-1] = self.collective(0, w.embedding_reduce, done[0], done[-1])
        if w.grad_norm_reduce is not None:
            done = [self.collective(0, w.grad_norm_reduce, *done)] * len(done)
        for row in (w.optimizer, *w.param_gathers):
            for s, c in enumerate(row):
                done[s] = done[s] if c is None else self.collective(s, c, done[s])
        end = np.maximum.reduce([np.broadcast_to(d, (self.p.dp, self.n)) for d in done]).max(axis=0)
        jitter = self.effects.value("jitter", "mean_s")
        return end + jitter * self.draw("jitter", (self.n,)) if jitter and self.rng else end


def spread(x: Any, ndim: int) -> Any:
    """Lay [group, draw] along the first and the last of some axes."""
    return x.reshape(x.shape[0], *[1] * (ndim - 2), x.shape[1]) if np.ndim(x) else x


def shard_size(job: Any) -> int:
    """hsdp: data-parallel ranks that hold one copy; by default those of an NVLink domain."""
    p, c = job.parallelism, job.cluster
    if p.data_parallel != "hsdp":
        return p.dp
    stride = p.tp * p.cp * (p.pp if c.placement == "tp-cp-pp-dp" else 1)
    return p.shard_size or gcd(p.dp, c.nvlink_domain_gpus // stride) or 1


# ---------------------------------------------------------------------------------- 5. many steps
def ideal(job: Any, work: Any, library: Any) -> float:
    """Step time with every effect at 1 [s]."""
    return float(Walk(job, work, Effects(job, library), 1).run()[0])


def simulate(job: Any, work: Any, library: Any, replicates: int, seed: int) -> Array:
    """Step times [replicate], whole clusters of 64 that share their GPUs.

    With `dependence: none` each op of a replica's group is drawn by itself of all that it took in
    such steps.
    """
    assert replicates % PER_CLUSTER == 0
    effects, rng = Effects(job, library), np.random.default_rng(seed)
    if job.variability.dependence == "full":
        return Walk(job, work, effects, replicates, rng).run()
    walk = Walk(job, work, effects, POOLED * replicates, rng)
    walk.run()
    pools = {op: np.concatenate(seconds) for op, seconds in walk.kept.items()}
    return Walk(job, work, effects, replicates, rng, pools).run()
