"""Plain-Python oracle: one replicate of a step, written from the definition.

Counters are big integers, durations dictionaries, and the step is followed action by action; slow,
and independent of the graph builder, the lowering and the jitted kernels. It covers jobs with
explicit op durations and one GPU per stage, with free or blocking transfers.
"""

from functools import lru_cache

import numpy as np

from prism import engine, make_schedule
from prism.distributions import distribution as distributions
from prism.distributions.tables import sample_table
from prism.simulation.effects.microbatch import Microbatch

MASK = 0xFFFFFFFF
POOL = 2048
quantile_table = lru_cache(distributions.quantile_table)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 on Python integers (Salmon et al. 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


class Draws:
    """Multipliers by key, as the design says they are keyed."""

    def __init__(self, seed: int) -> None:
        self.key = (seed & MASK, seed >> 32)
        self.pools: dict[tuple, list[int]] = {}

    def multiplier(self, distribution, power, stream, index, entity, replicate) -> float:
        if distribution.std == 0.0 or power == 0.0:
            return 1.0
        word = philox4x32((index >> 2, entity, replicate, stream), self.key)[index & 3]
        table = quantile_table(distribution, power)
        return 1.0 + float(sample_table(table, np.array([word], np.uint32))[0])

    def residual(self, distribution, uses, stream, stage, index, entity, replicate) -> float:
        """Multiplier of a stage's index-th op, one of `uses` alike in a step."""
        if uses < 32:
            return self.multiplier(
                distribution, 1.0, stream, (stage << 22) | index, entity, replicate
            )
        if distribution.std == 0.0:
            return 1.0
        block, lane = divmod(replicate, engine.LANES)
        counter = (
            (stage << 20) | (index >> 8),
            entity,
            (index >> 2) & 63,
            stream | (block + 1) << 4,
        )
        word = philox4x32(counter, self.key)[index & 3]
        place = word * POOL >> 32
        at = self.pool(distribution, block)[(place + lane) % POOL]
        if at >> 24 == 0xFF:
            at = 0xFF << 24 | self.mixed(word + (lane + 1) * 0x9E3779B9) >> 8
        table = quantile_table(distribution, 1.0)
        return 1.0 + float(sample_table(table, np.array([at], np.uint32))[0])

    @staticmethod
    def mixed(x) -> int:
        """The finaliser of MurmurHash3 on a Python integer."""
        x &= MASK
        x = (x ^ x >> 16) * 0x85EBCA6B & MASK
        x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
        return x ^ x >> 16

    def pool(self, distribution, block) -> list[int]:
        """Words of the residuals of a block that follow a law, in the order of the pool."""
        if (distribution, block) in self.pools:
            return self.pools[distribution, block]
        order: list[int] = []
        for i in range(0, POOL, engine.LANES):
            for lane in range(engine.LANES):
                counter = (i - i % (2 * engine.LANES), 0, block * engine.LANES + lane, engine.POOL)
                two = philox4x32(counter, self.key)[2 * (i // engine.LANES % 2) :][:2]
                at = two[0] * (i + lane + 1) >> 32
                order.append(order[at] if at < i + lane else 0)
                order[at] = ((i + lane) << 21) | (two[1] >> 11)  # one of POOL equal parts
        return self.pools.setdefault((distribution, block), order)

    def rank(self, distribution, gpu, cluster) -> float:
        if distribution.std == 0.0:
            return 1.0
        word = philox4x32((cluster, 0, gpu, engine.RANK), self.key)[0]
        return 1.0 + float(
            sample_table(quantile_table(distribution), np.array([word], np.uint32))[0]
        )


def step_time(job, variability, seed: int, replicate: int, ends=None) -> float:
    """Step time [s] of one replicate; ends[replica, stage, i] of every action where asked for."""
    p, v, draws = job.parallelism, variability, Draws(seed)
    schedule = make_schedule(p.schedule, p.pp, p.microbatches, p.vpp)
    forward, backward = (
        d if isinstance(d, tuple) else (d,) * p.pp
        for d in (job.model.durations.forward_s, job.model.durations.backward_s)
    )
    slow, gpus = job.cluster.node_slowdowns, job.cluster.gpus_per_node
    work = v.factor(Microbatch)
    hosts = job.cluster.hosts or range(p.pp * p.dp)
    shock = draws.multiplier(v.step.distribution, 1.0, engine.STEP, 0, 0, replicate)
    latest = 0.0
    for replica in range(p.dp):
        duration = {}
        for s, actions in enumerate(schedule):
            slot, local = divmod(s * p.dp + replica, gpus)
            gpu = hosts[slot] * gpus + local
            x = draws.rank(v.rank.distribution, gpu, replicate // engine.LANES)
            x *= slow.get(hosts[slot], 1.0)
            for i, action in enumerate(actions):
                uses = p.dp * sum(other.kind == action.kind for other in actions)
                nominal = forward[s] if action.kind == "F" else backward[s]
                load = 1.0 if action.kind == "F" else work.backward_loading
                content = draws.multiplier(
                    work.distribution,
                    load,
                    work.stream,
                    action.microbatch,
                    replica,
                    replicate,
                )
                own = draws.residual(
                    v.residual.distribution("residual/compute"),
                    uses,
                    engine.RESIDUAL,
                    s,
                    i,
                    replica,
                    replicate,
                )
                duration[s, i] = nominal / p.vpp * x * shock * content * own
        mine: dict[tuple[int, int], float] = {}
        if p.p2p == "blocking" and p.pp > 1:
            gpipe = p.schedule == "gpipe"
            latest = max(latest, finish_blocking(schedule, duration, gpipe=gpipe, ends=mine))
        else:
            latest = max(latest, finish(schedule, duration, p.vpp, ends=mine))
        if ends is not None:
            ends.update({(replica, *key): end for key, end in mine.items()})
    return latest


def finish(schedule, duration, n_chunks, transfer=0.0, ends=None) -> float:
    """Latest end of a pipeline whose transfers take their time and hold nobody up."""
    n = len(schedule)
    end: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * n, [0] * n
    while any(position[s] < len(schedule[s]) for s in range(n)):
        before = list(position)
        for s in range(n):
            if position[s] == len(schedule[s]):
                continue
            a = schedule[s][position[s]]
            virtual = a.chunk * n + s
            source = virtual + (-1 if a.kind == "F" else 1)
            ready = 0.0
            if 0 <= source < n * n_chunks:
                if (a.kind, source, a.microbatch) not in end:
                    continue
                ready = end[a.kind, source, a.microbatch] + (transfer if n > 1 else 0.0)
            clock[s] = max(clock[s], ready) + duration[s, position[s]]
            end[a.kind, virtual, a.microbatch] = clock[s]
            if ends is not None:
                ends[s, position[s]] = clock[s]
            position[s] += 1
        assert position != before, "deadlock"
    return max(clock)


def finish_blocking(schedule, duration, transfer=0.0, gpipe=False, ends=None) -> float:
    """Latest end of 1F1B or GPipe with Megatron's blocking exchanges, one rendezvous at a time.

    Every stage runs a plain program: ("run", i) its i-th action, ("meet", neighbour, sent,
    received) an exchange that begins when both have come and lets both go `transfer` later.
    """
    n = len(schedule)
    programs = [_megatron_program(s, n, row, gpipe) for s, row in enumerate(schedule)]
    clock, position = [0.0] * n, [0] * n

    def head(s):
        return programs[s][position[s]] if position[s] < len(programs[s]) else ("done",)

    moved = True
    while moved:
        moved = False
        for s in range(n):
            while head(s)[0] == "run":
                clock[s] += duration[s, head(s)[1]]
                if ends is not None:
                    ends[s, head(s)[1]] = clock[s]
                position[s] += 1
                moved = True
            if s + 1 < n and head(s)[0] == head(s + 1)[0] == "meet":
                (_, above, sent, received), (_, below, back, forth) = head(s), head(s + 1)
                if (above, below) == (s + 1, s) and (sent, received) == (forth, back):
                    clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + transfer
                    position[s] += 1
                    position[s + 1] += 1
                    moved = True
    assert all(head(s)[0] == "done" for s in range(n)), "deadlock"
    return max(clock)


def _megatron_program(s, n, row, gpipe):
    """Actions and exchanges of a stage, as `forward_backward_pipelining_without_interleaving`.

    Warm-up: receive, forward, send. Steady: forward, send-forward-receive-backward, backward,
    send-backward-receive-forward. Cool-down: receive, backward, send. GPipe is all warm-up, then
    all cool-down.
    """
    index = {(a.kind, a.microbatch): i for i, a in enumerate(row)}
    m = len(row) // 2
    warmup = m if gpipe else min(m, n - 1 - s)
    program = []

    def meet(neighbour, sent, received):
        if 0 <= neighbour < n:
            program.append(("meet", neighbour, sent, received))

    for i in range(warmup):
        meet(s - 1, None, ("F", i))
        program.append(("run", index["F", i]))
        meet(s + 1, ("F", i), None)
    steady = m - warmup
    if steady > 0:
        meet(s - 1, None, ("F", warmup))
    for k in range(steady):
        program.append(("run", index["F", warmup + k]))
        meet(s + 1, ("F", warmup + k), ("B", k))
        program.append(("run", index["B", k]))
        meet(s - 1, ("B", k), ("F", warmup + k + 1) if k < steady - 1 else None)
    for k in range(steady, m):
        meet(s + 1, None, ("B", k))
        program.append(("run", index["B", k]))
        meet(s - 1, ("B", k), None)
    return program


def maximum_moments(mean, cv, cdf) -> tuple[float, float]:
    """Mean and variance of the maximum of independent m (1 + cv z), on a fine grid."""
    top = max(mean)
    t = np.linspace(top * (1 - 9 * cv), top * (1 + 9 * cv), 20_001)
    below = np.ones_like(t)
    for m in mean:
        below *= cdf((t - m) / (m * cv))
    first = t[0] + np.trapezoid(1 - below, t)
    second = np.trapezoid(2 * (t - t[0]) * (1 - below), t)
    return float(first), float(second - (first - t[0]) ** 2)
