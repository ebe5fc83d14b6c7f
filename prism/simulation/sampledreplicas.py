"""Jobs of many replicas by simulating some of them: the slowest, and a sample of the others.

Replicas that meet at the end of a step are exchangeable: given the cluster and what all of them
share, their times are independent. Every cluster draws all its GPUs, so each replica's persistent
level is known; the slowest and a stratified sample run as in the exact engine, and the step also
waits for the slowest of the others (David and Nagaraja, Order Statistics, 2003, section 2.1), drawn
from the distribution that a fixed pilot of clusters gives of a replica's time at its level. Left
out: congestion hits the replicas left out one by one, also where they share a leaf switch.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from prism import engine
from prism.simulation.draws import lower
from prism.simulation.execution.context import RunContext
from prism.simulation.execution.tasks import map_threads
from prism.simulation.program import Program, global_ops, make_keys, make_room
from prism.simulation.tailfit import by_level, noise_table, widen

Array = NDArray[np.float64]
ENGINES = ("auto", "exact", "exchangeable")
N_TOP, N_BULK = 64, 64  # replicas simulated in each cluster: the slowest, and of the others
PILOT = 16  # clusters that tell what replicas take that are left out: 132,096 times
ENOUGH = 1024  # replicas that `auto` simulates exactly
DRAWN, MOST_DRAWN = 64, 1 << 17  # draws of microbatches in 64 lanes: for each replica, at most


class Choice(NamedTuple):
    """Which replicas a step simulates, and why not fewer."""

    engine: str  # "exact" or "exchangeable"
    replicas: int  # of the job
    simulated: int  # in each cluster
    reason: str  # why exact though the other was asked for; else empty


class Unseen(NamedTuple):
    """What the pilot tells about replicas that are not simulated."""

    program: Program  # with the distribution of their times
    slowest: float  # share of steps in which one of them is the slowest
    beyond: float  # share of steps whose noise is read beyond all that the pilot saw
    n_draws: int  # op-samples of the pilot


def choose_engine(program: Program, name: str, limit: int = ENOUGH) -> tuple[Program, Choice]:
    """Let a program simulate some of its replicas where that is asked for and holds.

    `name` is one of `ENGINES`; ``auto`` simulates up to `limit` replicas exactly.
    """
    n = program.graph.n_replicas
    exact = Choice("exact", n, n, "")
    if name == "exact" or (name == "auto" and n <= limit):
        return program, exact
    reason = _obstacle(program)
    if reason:
        return program, exact._replace(reason=reason)
    return sample_replicas(program), Choice("exchangeable", n, 1 + N_TOP + N_BULK, "")


def _obstacle(program: Program) -> str:
    """Say why the replicas of a job cannot be left out; empty where they can."""
    n = program.graph.n_replicas
    if n <= 1 + N_TOP + N_BULK:
        return f"{n} replica{'s are' if n > 1 else ' is'} few enough"
    if program.stalls.entity == engine.GROUP_STALL:
        return "stalls of ranks or nodes hit few replicas, which are not known in advance"
    if np.any(program.low.coef_member >= 0):
        return "at kernel resolution every replica is simulated"
    if program.bank.table.shape[1] > 1:
        return "the replicas of a fitted trace differ in their work"
    if int(np.sum(program.graph.phase_global == 0)) > 1:
        return "replicas synchronise in mid-step (gathers of parameters), not only at its end"
    return ""


def sample_replicas(program: Program, n_top: int = N_TOP, n_bulk: int = N_BULK) -> Program:
    """Let a program simulate some of its replicas; `fit_unseen` tells what the others take."""
    graph, ops, low = program.graph, program.ops, program.low
    if 1 + n_top + n_bulk >= graph.n_replicas:
        return program
    last = slice(graph.phase_lo[-1], graph.phase_hi[-1])
    read = np.concatenate([ops.pred0[last], ops.pred1[last]])
    exports = np.intersect1d(ops.out[ops.kind == engine.EXPORT], read)
    coef = np.unique(ops.coef[~global_ops(graph) & (ops.kind == engine.DRAW)])
    coef = coef[np.argsort(low.coef_stage[coef], kind="stable")]
    times = np.bincount(low.coef_seg, low.coef_count, low.seg_mean.shape[0])
    seconds = low.seg_mean * times[:, None]
    total = max(float(seconds.sum()), 1e-300)
    x = np.ones((max(1, program.ranks.tables.size), max(1, program.ranks.n_gpus)), np.float32)
    typical = lower(low, x, np.zeros(1, np.int64))[0][0]  # of a replica whose GPUs are average
    zero = np.zeros(1)  # before a fit, replicas that are left out take no time
    sample = engine.Sample(
        n_top, n_bulk, (exports - graph.n_slots).astype(np.int32),
        _tails(program, typical, exports), coef.astype(np.int32), typical,
        seconds.sum(axis=0) / total, float(seconds.sum(axis=1) @ low.seg_cv) / total,
        _softness(low.member.shape[2]), zero, zero, zero + 1e-30, 0.0, 1.0, zero,
    )  # fmt: skip
    return replace(program, sample=sample)


def needs_fit(program: Program) -> bool:
    """Tell whether a program leaves replicas out and does not know yet what they take."""
    return program.sample is not None and program.sample.log_cdf.size == 1


def ignore_unseen(program: Program) -> Program:
    """Return the step of the replicas that are simulated, as if there were no others."""
    return program if program.sample is None else replace(program, sample=program.sample.alone())


def unfitted(program: Program) -> Program:
    """Return a program that runs its own pilot, after its distributions were changed."""
    if program.sample is None:
        return program
    return replace(program, sample=program.sample._replace(log_cdf=np.zeros(1)))


def count_draws(program: Program) -> int:
    """Op-samples of one step replicate that are simulated."""
    graph, sample = program.graph, program.sample
    if sample is None:
        return program.n_draws
    copies = np.where(global_ops(graph), 1, sample.n_rows)
    kind = program.ops.kind[: copies.size]  # `warm_up` runs none of them
    return int(copies[kind == engine.DRAW].sum())


def _tails(
    program: Program, typical: NDArray[np.float32], exports: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Nominal time from every global slot that replicas export to, to the step's end [s]."""
    graph, ops, seconds = program.graph, program.ops, typical.sum(axis=1)
    tail = np.full(graph.n_slots + graph.n_global_slots, engine.NEVER, np.float32)
    tail[graph.final_slot] = 0.0
    for op in range(graph.phase_hi[-1] - 1, graph.phase_lo[-1] - 1, -1):
        after = tail[ops.out[op]] + (seconds[ops.coef[op]] if ops.kind[op] == engine.DRAW else 0.0)
        for p in (ops.pred0[op], ops.pred1[op]):
            tail[p] = max(tail[p], after)
    own = np.full_like(tail, engine.NEVER)
    own[exports] = tail[exports]
    return own[graph.n_slots :]


def _softness(n: int) -> float:
    """Scale of Gumbel's distribution [sd] whose mean maximum of n is that of n normals."""
    if n == 1:
        return 1.0
    q = (np.arange(4096) + 0.5) / 4096
    return float(ndtri(q ** (1.0 / n)).mean() / np.log(n))


def describe_replicas(choice: Choice | None, unseen: Unseen | None) -> dict[str, Any]:
    """Say which engine ran, how many replicas it simulated and what the others decided."""
    out: dict[str, Any] = {} if choice is None else choice._asdict()
    if unseen is not None:
        out |= {"slowest_unseen": unseen.slowest, "beyond_sample": unseen.beyond}
    return out


# --------------------------------------------------------------------------------- the pilot
def _run_pilot(program: Program, keys: engine.Keys, context: RunContext) -> engine.Sampled:
    """Run the first blocks, as if there were no other replicas; the first axis is the block."""
    step, sample = program.arrays(track=False), program.sample
    assert sample is not None
    alone = sample.alone()

    def one(block: int) -> engine.Sampled:
        time, _, *rest = make_room(step, 1)
        return engine.run_sampled(block, keys, step, alone, (time, *rest))

    told = map_threads(one, range(PILOT), context)
    return engine.Sampled(*map(np.concatenate, zip(*told, strict=True)))


def fit_unseen(program: Program, context: RunContext, keys: engine.Keys | None = None) -> Unseen:
    """Tell from a pilot what replicas take that are not simulated.

    The pilot is the first clusters, however many are asked for, so that the first of many
    replicates are those of few. A replica's own work over the typical one's, which has the same
    shared effects, follows the distribution of `prism.simulation.tailfit`. Where microbatches
    decide, most of it is known without simulating.
    """
    assert program.sample is not None
    keys = make_keys(context.seed) if keys is None else keys
    pilot = _run_pilot(program, keys, context)
    work = pilot.own.astype(np.float64) - pilot.after[:, None]
    level = np.take_along_axis(pilot.level, pilot.chosen[:, :-1], axis=1)
    level = level.astype(np.float64).ravel()  # [s] of every replica and block
    ratio = (work[:, :-1] / work[:, -1:]).reshape(-1, engine.LANES)  # to the typical one's step
    knot, mean, std = by_level(level, ratio)
    at = np.interp(level, knot, mean)[:, None]
    noise = ((ratio - at) / np.interp(level, knot, std)[:, None]).ravel()
    noise = widen(noise, *_microbatches(program, keys, pilot.chosen))
    first, width, log_cdf = noise_table(noise)
    sample = program.sample._replace(
        knot=knot, mean=mean, std=std, first=first, width=width, log_cdf=log_cdf
    )
    slowest, beyond = _shares(sample, pilot, float(noise[-1]))
    n_draws = count_draws(program) * PILOT * engine.LANES
    return Unseen(replace(program, sample=sample), slowest, beyond, n_draws)


def _microbatches(
    program: Program, keys: engine.Keys, chosen: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and longest microbatch [draw, 2] of the pilot, and of draws of which none is simulated.

    All tables of a microbatch rise with the same uniform; the widest stands for them.
    """
    bank, n = program.bank, program.graph.n_replicas
    row = [i for i, name in enumerate(program.factors) if name == "microbatch"]
    found = np.unique(bank.table[row][..., bank.is_global == 0])
    found = found[found >= 0]
    n_drawn = min(DRAWN * n, MOST_DRAWN) if found.size else 0
    told = np.zeros((*chosen[:, :-1].shape, engine.LANES, 2), np.float32)
    drawn = np.zeros((n_drawn, engine.LANES, 2), np.float32)
    if n_drawn:
        stream = bank.stream[row].item()
        table = int(found[np.argmax([program.tables[t, :1024, 0].std() for t in found])])
        args = (
            program.tables[table][None], 1 + int(bank.draw[row].max()), stream, keys.stream[stream],
            np.empty((4, engine.LANES), np.uint32),
        )  # fmt: skip
        for block, who in enumerate(chosen):
            engine.microbatches(who[:-1], block * engine.LANES, *args, told[block])
        engine.microbatches(n + 1 + np.arange(n_drawn), 0, *args, drawn)
    return told.reshape(-1, 2), drawn.reshape(-1, 2)


def _shares(sample: engine.Sample, pilot: engine.Sampled, largest: float) -> tuple[float, float]:
    """Share of the pilot's steps that wait for a replica left out, and of those beyond the data."""
    u = (np.arange(engine.LANES) + 0.5) / engine.LANES
    slowest = beyond = 0
    for level, chosen, own, after in zip(*pilot, strict=True):
        bins = engine.unseen_bins(sample, level, chosen)
        if bins[0].size == 0:
            continue
        known = float((bins[0] + bins[1] * largest).max())
        z = np.array([engine.unseen_slowest(sample, *bins, v) for v in u])
        seen = (own[:-1].max(axis=0) - after) / (own[-1] - after)
        waits = z[:, None] > seen[None, :]
        slowest += waits.sum()
        beyond += (waits & (z > known)[:, None]).sum()
    pairs = PILOT * engine.LANES**2
    return slowest / pairs, beyond / pairs
