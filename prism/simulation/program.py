"""The engine's arrays of one step, and what they are built of."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster.groups import Ends
from prism.cluster.wiring import Wiring
from prism.common.errors import PrismError
from prism.distributions.distribution import POSITIVE, Distribution, constant, quantile_table
from prism.distributions.tables import quadrature, table_of_quantiles, tail_panels
from prism.jobs.jobspec.values import MAX_CV
from prism.simulation.added import Added
from prism.simulation.draws import end_blocks, seed_key
from prism.simulation.execution.tasks import Arrays
from prism.workload.opgraph import StepGraph


class FixedPart(NamedTuple):
    """Fixed time of an op that is as slow as the slowest node of those that take part."""

    role: str  # what of a node it follows: network, other (NVLink) or memory
    group: str  # who takes part: of `prism.cluster.groups`, hop, or stage
    n_bytes: float
    term: int
    mean: float  # seconds
    var: float  # s^2
    op_kind: str = "all_gather"  # of a collective


class PlacedPart(NamedTuple):
    """A part of an op's fixed time (`FixedPart`), and whose nodes it waits for."""

    coef: int
    part: FixedPart
    ends: Ends


class Origin(NamedTuple):
    """A program before its nodes are placed: default order of ranks, no slow node."""

    low: engine.Lowering
    factor: NDArray[np.float64]  # [loading, gpu] what was measured, 1 where nothing was
    roles: tuple[str, ...]  # [loading] what of a slow node each follows
    loadings: tuple[float, ...]  # [loading] and with which exponent of its compute
    places: tuple[PlacedPart, ...]
    wiring: Wiring | None  # of the default order; None: there are no messages
    held: NDArray[np.float64] | None = None  # [2, loading, gpu] measured factor, and the share of
    # it that follows no effect; None unless a trace was measured
    work: NDArray[np.float64] | None = (
        None  # [loading, member] of ranks, over the mean; None: alike
    )
    behind: Sequence[float] = ()  # [coef] what a late host hides of longer messages [s]
    links: Sequence[Ends] = ()  # that may be congested, by their number in the bank
    nominal: Mapping[str, bool] = {}  # [group] whether its messages take what the cluster says


@dataclass(frozen=True)
class Program:
    """Engine arguments of one job, and the labels of what comes out."""

    ops: engine.Ops
    graph: engine.Graph
    bank: engine.Bank
    links: engine.Links
    ranks: engine.Ranks
    low: engine.Lowering
    stalls: engine.Stalls
    tables: NDArray[np.float32]
    factors: tuple[str, ...]  # whose rows the bank has
    step_table: int
    shares: NDArray[np.float32]  # [coef, class]
    classes: tuple[str, ...]
    n_draws: int
    n_members: int  # ranks whose ops are simulated apart in each group
    shared: "Program | None" = None  # before pooling, where `dependence: none` pooled this one
    typical: NDArray[np.float64] | None = None  # low.fixed_mean with every effect at 1
    alike: NDArray[np.int64] | None = None  # [coef] first coef with the same distributions
    origin: Origin | None = None  # what another placement starts from
    sample: engine.Sample | None = None  # None: all replicas are simulated
    added: tuple[Added, ...] = ()  # to every step, after its ops

    def arrays(self, track: bool) -> engine.Step:
        """Arrays of a step of all replicas, with or without tracking of the critical path."""
        shares = self.shares if track else np.zeros((self.shares.shape[0], 0), np.float32)
        return engine.Step(
            self.ops, self.graph, self.bank, self.links, self.ranks, self.low, self.stalls,
            self.tables, self.step_table, shares,
        )  # fmt: skip

    def work(self, track: bool) -> "Work":
        """Return what `run_chunk` takes."""
        return Work(self.arrays(track), self.sample, self.added)


class Work(NamedTuple):
    """A step, which replicas of it are simulated (None: all), and what is added to it."""

    step: engine.Step
    sample: engine.Sample | None
    added: tuple[Added, ...]


class Tables:
    """Quantile tables, one per distribution and power; `source` is the file they are from."""

    def __init__(self, source: str = "") -> None:
        self.source = f"{source}: " if source else ""
        self.index: dict[Hashable, int] = {}
        self.arrays: list[NDArray[np.float32]] = []

    def add(self, distribution: Distribution, power: float = 1.0) -> int:
        """Index of the table of X**power."""
        key = (distribution, power)
        found = self.index.get(key)
        return self.add_table(key, quantile_table(distribution, power)) if found is None else found

    def add_table(self, key: Hashable, table: NDArray[np.float32]) -> int:
        """Index of a table made elsewhere; equal keys share it."""
        found = self.index.setdefault(key, len(self.arrays))
        if found == len(self.arrays):
            self.arrays.append(table)
        return found

    def checked(
        self, distribution: Distribution, power: float = 1.0, effect: str = "residual"
    ) -> int:
        """Index of a table of durations; raises PrismError where it reaches below 0."""
        if distribution.cv > MAX_CV and distribution.family not in ("empirical", "occasional"):
            raise PrismError(
                f"{self.source}{f'variability.effects.{effect}' if effect else 'an effect'}: a CV "
                f"of {distribution.cv:.3g}, expected at most {MAX_CV:g}: the mean of what is so "
                "wide cannot be sampled; take a smaller cv, scale or cluster.scale"
            )
        index = self.add(distribution, power)
        if float(self.arrays[index][0, 0]) >= -1.0:
            return index
        of = f"variability.effects.{effect}" if effect else "an effect of the fitted trace"
        way_out = f"take a smaller {of}.cv" if effect else "its spread is too wide to be drawn"
        if effect == "residual":
            way_out += " (or scale)"
            way_out += "" if distribution.family == "lognormal" else ", or law: lognormal with a cv"
        if effect in ("residual", "rank"):
            way_out += ", or of cluster.scale where that widens it"
        raise PrismError(
            f"{self.source}{of}: its distribution ({distribution.family.replace('_', ' ')}) with "
            f"cv {distribution.cv:.3g} gives negative durations; {way_out}"
        )

    def optional(self, distribution: Distribution, power: float = 1.0, effect: str = "") -> int:
        """Index of the table, -1 where the effect is off; `effect` is named in an error."""
        if power == 0.0 or distribution.std == 0.0:
            return -1
        return self.checked(distribution, power, effect)

    def largest(
        self, distribution: Distribution, power: float, relative: NDArray[np.float64]
    ) -> int:
        """Index of the table of the largest of several X**power; -1 where the effect is off.

        `relative` [draw, n] multiplies each of n values in equally likely cases; at most 1.
        """
        if relative.shape[1] == 1 or power == 0.0 or distribution.std == 0.0:
            return self.optional(distribution, power, "microbatch")
        key = (distribution, power, relative.tobytes())
        return self.add_table(key, _largest_table(distribution, power, relative.shape[1], key[2]))

    def stack(self) -> NDArray[np.float32]:
        """All tables, [table, row, 2]; at least one, since an array needs an element type."""
        self.add(constant())
        return np.ascontiguousarray(np.stack(self.arrays), np.float32)


def lay_bank(
    table: NDArray[np.int32], draw: NDArray[np.int32], stream: Sequence[int],
    by_replica: Sequence[bool], link: NDArray[np.int32], is_global: NDArray[np.generic],
) -> engine.Bank:  # fmt: skip
    """Lay shared-effect vectors, table[factor, row, vector] and draw[factor, vector]."""
    order = np.argsort(draw, axis=1, kind="stable").astype(np.int32)
    return engine.Bank(
        np.array(table, order="C"), np.array(draw, order="C"), order,  # that can be written
        np.array(stream, np.int32), np.array(by_replica, np.uint8), link,
        is_global.astype(np.uint8),
    )  # fmt: skip


def graph_arrays(graph: StepGraph) -> engine.Graph:
    """Replicas have rooms of their own where they meet in mid-step."""
    n_local_phases = int((graph.phase_global == 0).sum())
    return engine.Graph(
        graph.phase_global, graph.phase_lo, graph.phase_hi, graph.n_replicas,
        graph.n_replicas if n_local_phases > 1 else 1, graph.n_slots, graph.n_global_slots,
        graph.n_stages, graph.final_slot,
    )  # fmt: skip


def global_ops(graph: StepGraph | engine.Graph) -> NDArray[np.bool_]:
    """Tell which ops are one for all replicas [op]."""
    return np.repeat(graph.phase_global > 0, graph.phase_hi - graph.phase_lo)


def ideal_program(program: Program) -> Program:
    """Return the same step with every effect at 1, of one replica where all take the same."""
    program = program.shared or program  # pooled means hold slow GPUs and barriers' waits
    low, bank, ranks = program.low, program.bank, program.ranks
    mean = low.fixed_mean if program.typical is None else program.typical
    graph, sample = program.graph, program.sample
    if mean.shape[0] == 1:  # all replicas take the same: one stands for them
        graph, sample = graph._replace(n_replicas=1, n_state=1), None
    return replace(
        program,
        graph=graph,
        bank=bank._replace(
            table=np.full_like(bank.table, -1), link=np.full_like(bank.link, -1)
        ),
        ranks=ranks._replace(
            tables=np.full_like(ranks.tables, -1), factor=np.ones_like(ranks.factor)
        ),
        low=low._replace(
            seg_cv=np.zeros_like(low.seg_cv), fixed_mean=mean, fixed_var=np.zeros(mean.shape[:2]),
            call_cv=np.zeros_like(low.call_cv), quiet=np.ones_like(low.quiet),
        ),
        stalls=program.stalls._replace(entity=engine.NO_STALL), added=(),
        links=engine.NO_LINKS, step_table=-1,
        sample=None if sample is None else sample.alone(),
    )  # fmt: skip


def join_idle(program: Program) -> Program:
    """Return the same step with transfers that take no time as joins, which are quicker to run."""
    ops, low = program.ops, program.low
    takes_none = (low.fixed_mean == 0.0).all(axis=(0, 2)) & (low.fixed_var == 0.0).all(axis=0)
    takes_none &= np.diff(low.coef_seg_ptr) == 0
    idle = (ops.kind == engine.DRAW) & (ops.busy < 0) & takes_none[ops.coef]
    return replace(program, ops=ops._replace(kind=np.where(idle, engine.JOIN, ops.kind)))


def check_finite(step: engine.Step, added: Sequence[Added] = ()) -> None:
    """Refuse arrays with a figure that is not finite; raises PrismError with its name."""
    for name, x in (step._asdict() | {x.name: x for x in added}).items():
        fields = x._asdict() if hasattr(x, "_asdict") else getattr(x, "__dict__", {"": x})
        for field, values in fields.items():
            values = np.asarray(values)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise PrismError(
                    f"the step's {name} {field} is not finite; durations, slowdowns and spreads "
                    "must stay within 1e-30 and 1e30: check the units of the job and its library"
                )


def stream_keys(seed: int, others: Mapping[int, int] | None = None) -> NDArray[np.uint32]:
    """Philox keys of every stream: the seed's, but for the streams that take another seed."""
    seeds = [(others or {}).get(stream, seed) for stream in range(engine.N_STREAMS)]
    return np.array([seed_key(x) for x in seeds], np.uint32)


def make_keys(seed: int, others: Mapping[int, int] | None = None) -> engine.Keys:
    """Keys of a run under one seed, but for the streams that take another one."""
    stream = stream_keys(seed, others)
    residual = stream[engine.RESIDUAL : engine.RESIDUAL + 1].copy()
    return engine.Keys(stream, residual, np.zeros(0, np.int64))


def run_chunk(work: Work, first: int, n: int, keys: engine.Keys) -> Arrays:
    """Run blocks first, first + 1, ...; gives what is not zero of `run_blocks`."""
    step = work.step
    time, effect, *rest = out = make_room(step, n)
    if work.sample is None:
        engine.run_range(first, keys, step, (time, *rest))
    else:
        engine.run_sampled(first, keys, step, work.sample, (time, *rest))
    effect[:] = end_blocks(step, work.added, first, keys.stream, time)
    return out if step.share.shape[1] else out[:2]


def thread_bytes(program: Program) -> float:
    """Bytes of the buffers that each thread of the engine holds, the critical path followed."""
    step = program.arrays(track=True)
    graph, (n_coefs, n_terms) = step.graph, step.low.call_cv.shape
    rows = graph.n_state * graph.n_slots + graph.n_global_slots
    lanes = rows + graph.n_state * step.bank.link.size
    simulated = graph.n_replicas if program.sample is None else program.sample.n_rows
    loads = step.ranks.tables.shape[0] * step.ranks.n_gpus
    paths = rows + simulated * step.ops.kind.size  # a bit a lane each
    held = engine.LANES * lanes + simulated * n_coefs * (n_terms + 1) + loads
    return 4.0 * float(held) + engine.LANES / 8 * paths


def make_room(step: engine.Step, n: int) -> Arrays:
    """Zeros for what n blocks give, as `prism.simulation.steps.run_blocks` says."""
    shapes = ((), (), (step.share.shape[1],), (step.graph.n_stages,))
    return tuple(np.zeros((n, *shape, engine.LANES), np.float32) for shape in shapes)


@lru_cache(maxsize=64)
def _largest_table(
    distribution: Distribution, power: float, n: int, cases: bytes
) -> NDArray[np.float32]:
    """Table of the largest of n X**power, times the float64 [draw, n] in `cases`.

    With F the distribution of one, the largest's is the mean over draws of prod_i F(t /
    relative_i), tabulated by logits; the mean of X**power is 1, that of the largest is not.
    """
    relative = np.frombuffer(cases).reshape(-1, n)
    q = np.unique(np.concatenate([tail_panels(), np.linspace(0.0, 1.0, 257)[1:-1]]))
    x = distribution.ppf(q if power > 0.0 else 1.0 - q)
    one = np.maximum(x, POSITIVE) ** power / distribution.power_moments(power).norm
    keep = np.concatenate([[True], np.diff(one) > 0.0])
    one, logit = one[keep], (np.log(q) - np.log1p(-q))[keep]
    most = np.empty_like(one)
    for k, value in enumerate(one):
        each = -np.logaddexp(0.0, -np.interp(value / relative, one, logit))  # log F
        whole = each.sum(axis=1)
        most[k] = np.logaddexp.reduce(whole) - np.log(np.sum(-np.expm1(whole)))
    most = np.maximum.accumulate(most)

    def top(q: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.interp(np.log(q) - np.log1p(-q), most, one))

    nodes, weights = quadrature(tail_panels(), 8)
    mean = float(weights @ top(nodes))
    std = math.sqrt(float(weights @ (top(nodes) - mean) ** 2))
    table = table_of_quantiles(lambda q: top(q) - mean, std)
    table[:, 0] += mean - 1.0
    table.setflags(write=False)  # others get the same
    return table
