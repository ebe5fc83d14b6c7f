"""Lowering: from kernels on every GPU of a group to one op with the right distribution.

An op is segments of kernels between two collectives of a stage. Conditional on the persistent
effects x of the group's GPUs, each segment takes the maximum over the group; the engine integrates
its mean and variance per cluster draw, and this module prepares what it integrates. Beyond them an
op is distributed as the sum of its segments' maxima and collectives at x = 1 is (`residual_of`).
Approximated: where several dimensions divide a stage every segment is maximised over all of it, and
with hsdp over the whole shard group, so that its ranks wait for each other at every op where a
prefetched gather would let them drift by a unit. With experts a segment is maximised over the ep
group and the stages of replicas that it touches, also at the end of an op, and every rank's experts
take as long as the busiest's.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.distribution import Distribution
from prism.distributions.sums import Draws, largest_of, sum_of
from prism.simulation.program import FixedPart
from prism.simulation.variability import Variability
from prism.workload.build import Collective, Kernel
from prism.workload.kernels import MEMORY_CLASSES, is_compute
from prism.workload.opgraph import OpType

Array = NDArray[np.float64]
CALL = "call"  # its noise stands beside that of kernel classes


@dataclass(frozen=True)
class Term:
    """Part of an op's time that follows the same shared effects."""

    loadings: tuple[float, ...]  # with which it follows each of the factors
    compute: bool
    far: bool = False  # an all-to-all over the network


class Noise(NamedTuple):
    """Residuals of kernels of one class, or the `CALL` effect lowered into them."""

    kernel_class: str
    draws: Draws


def variance_of(noise: Iterable[Noise]) -> float:
    """Variance that residuals add up to [s^2]."""
    return sum(n.draws.variance for n in noise)


def distribution_of(noise: Iterable[Noise]) -> Distribution:
    """Distribution of the sum of kernels over its mean."""
    return sum_of(tuple(n.draws for n in noise))


@dataclass(frozen=True, eq=False)
class Segment:
    """Kernels between two barriers, as seen by one GPU."""

    mean: tuple[float, ...]  # seconds per rank loading
    noise: tuple[Noise, ...]
    split: tuple[tuple[Term, float], ...]  # share of the mean in each term

    @property
    def cv(self) -> float:
        """Coefficient of variation by the residuals, where no GPU is slow."""
        return math.sqrt(variance_of(self.noise)) / sum(self.mean)


@dataclass(frozen=True)
class LoweredOp:
    """One op type: segments with counts, fixed (collective) parts, and its terms."""

    segments: tuple[tuple[Segment, float], ...]
    terms: tuple[Term, ...]
    fixed: tuple[float, ...]  # seconds per term
    noise: tuple[Noise, ...]  # of its collectives
    shares: tuple[tuple[str, float], ...]  # nominal share of each kernel class
    parts: tuple[FixedPart, ...] = ()  # of the fixed time
    behind_s: float = 0.0  # how far the host is behind: what it hides of longer messages


def residual_of(op: LoweredOp, n_members: int, call: Distribution | None) -> Distribution:
    """Distribution of an op of a number of ranks over its mean, where no GPU is slow.

    `call` is that of the effect which is lowered into it, on its compute.
    """
    largest = [largest_of(distribution_of(s.noise), n_members) for s, _ in op.segments]
    segments = list(zip(largest, op.segments, strict=True))
    draws = [Draws(distribution, sum(s.mean), times) for distribution, (s, times) in segments]
    if call is not None:
        fixed = dict(zip(op.terms, op.fixed, strict=True))
        seconds = sum(t for term, t in fixed.items() if term.compute)
        for distribution, (s, times) in segments:
            share = sum(part for term, part in s.split if term.compute)
            seconds += times * sum(s.mean) * distribution.mean * share
        draws += [Draws(call, seconds)] if seconds > 0.0 else []
    return sum_of((*draws, *(n.draws for n in op.noise)))


class Lowerer:
    """Lowers op types under one `Variability`.

    ``loadings`` are the distinct rank exponents. ``roles`` say what of a slow node each follows;
    memory-bound kernels have a loading of their own where it differs from the others, or
    where nodes are slow in memory (`own_memory`), and so have kernels whose work differs by rank:
    ``works`` are the ranks' shares over the mean. `call` is the effect of calls where a shard
    group's ranks have it of their own, within the segments.
    """

    def __init__(
        self,
        variability: Variability,
        own_memory: bool = False,
        call: Distribution | None = None,
    ) -> None:
        self.v, self.call = variability, call
        self.treatments = variability.residual.treatments
        rank = variability.rank
        memory = rank.memory_loading
        own = own_memory or memory not in (0.0, 1.0) or rank.memory_spread != 1.0
        self.loadings = [0.0, 1.0] + ([memory] if own else [])
        self.roles = ["other", "compute"] + (["memory"] if own else [])
        self.works: list[tuple[float, ...]] = [()] * len(self.roles)
        self.segments: dict[tuple[str, tuple[Kernel, ...]], Segment | None] = {}
        self.terms: dict[tuple[str, str, bool, bool, bool], Term] = {}

    @property
    def rank_exponents(self) -> list[float]:
        """Exponents of the random rank effect; `loadings` has those of a known slow node."""
        spread = {"memory": self.v.rank.memory_spread}
        each = zip(self.roles, self.loadings, strict=True)
        return [loading * spread.get(role, 1.0) for role, loading in each]

    def _column(self, kernel: Kernel) -> int:
        if kernel.kernel_class in MEMORY_CLASSES and "memory" in self.roles:
            column = self.roles.index("memory")
        else:
            column = self.loadings.index(self.v.rank.loading(kernel.kernel_class))
        if not kernel.by_rank:
            return column
        role = self.roles[column]
        for i, known in enumerate(zip(self.roles, self.works, strict=True)):
            if known == (role, kernel.by_rank):
                return i
        self.roles.append(role)
        self.loadings.append(self.loadings[column])
        self.works.append(kernel.by_rank)
        return len(self.works) - 1

    def _treated(self, kernel: Kernel | Collective) -> tuple[Distribution, float]:
        """Residual and duration of a kernel or collective [s] under its class's treatment."""
        share = kernel.share if isinstance(kernel, Collective) else 1.0
        name, entry = kernel.kernel_class, kernel.distribution
        distribution, factor = self.v.residual.treated(name, entry, share)
        return distribution, kernel.duration * factor

    def lower(self, op_type: OpType) -> LoweredOp:
        """Lower one op type, once for all programs that treat its classes alike."""
        parts = op_type.kernels if op_type.collective is None else (op_type.collective,)
        classes = {part.kernel_class for part in parts} & self.treatments.keys()
        treated = frozenset((c, self.treatments[c]) for c in classes)
        for kernel in op_type.kernels:
            if kernel.by_rank:
                self._column(kernel)  # before what is kept is found, which has its number
        columns = tuple(self.roles), tuple(self.works)
        key = id(op_type), columns, self.call, treated  # to hash all kernels takes as long
        if key not in self.v.lowered:
            self.v.lowered[key] = op_type, self._lower(op_type)  # held: its id stays its own
        found: LoweredOp = self.v.lowered[key][1]
        return found

    def _lower(self, op_type: OpType) -> LoweredOp:
        """Lower one op type; a collective is one fixed part."""
        c = op_type.collective
        if c is None:
            return self._lower_kernels(op_type)
        distribution, duration = self._treated(c)
        term = self._term(op_type.op_kind, c)
        var = (duration * distribution.std) ** 2
        role = "memory" if c.kernel_class in MEMORY_CLASSES else _link_role(c.distribution)
        part = FixedPart(role, c.group or "stage", c.bytes, 0, duration, var, c.op_kind)
        return LoweredOp(
            (), (term,), (duration,), (Noise(c.kernel_class, Draws(distribution, duration)),),
            ((c.kernel_class, 1.0),), (part,),
        )  # fmt: skip

    def _term(self, op_kind: str, part: Kernel | Collective) -> Term:
        routed = isinstance(part, Kernel) and part.routed
        far = routed and part.group == "ep" and _link_role(part.distribution) == "network"
        key = op_kind, part.kernel_class, bool(part.group), routed, far
        if key not in self.terms:
            loadings = tuple(factor.loading(op_kind, part) for factor in self.v.factors)
            compute = is_compute(part.kernel_class) and (routed or not part.group)
            self.terms[key] = Term(loadings, compute, far)
        return self.terms[key]

    def _lower_kernels(self, op_type: OpType) -> LoweredOp:
        counts: dict[Segment, float] = defaultdict(float)
        fixed: dict[Term, float] = defaultdict(float)
        shares: dict[str, float] = defaultdict(float)
        stretched: dict[tuple[str, str, float, Term, str], tuple[float, float]] = {}
        behind_s, total = 0.0, sum(k.duration for k in op_type.kernels) or 1.0
        alike: dict[tuple[str, str, float], list[Noise]] = defaultdict(list)
        for kernel in op_type.kernels:
            shares[kernel.kernel_class] += kernel.duration / total
            if kernel.behind_s:
                behind_s += kernel.behind_s * self._treated(kernel)[1] / kernel.duration
        for barriers, run in groupby(op_type.kernels, lambda kernel: bool(kernel.group)):
            if not barriers:
                key = op_type.op_kind, tuple(run)  # layers have the same ones
                if key not in self.segments:
                    self.segments[key] = self._segment(*key)
                segment = self.segments[key]
                if segment is not None:
                    counts[segment] += 1.0
                continue
            for kernel in run:
                term = self._term(op_type.op_kind, kernel)
                distribution, duration = self._treated(kernel)
                fixed[term] += duration
                own = Draws(distribution, duration)
                same = alike[kernel.kernel_class, kernel.distribution, duration]
                same.append(Noise(kernel.kernel_class, own))
                part = (
                    _link_role(kernel.distribution), kernel.group, kernel.bytes, term,
                    kernel.kernel_class.partition("_")[2],
                )  # fmt: skip
                mean, spread = stretched.get(part, (0.0, 0.0))
                stretched[part] = mean + duration, spread + own.variance
        terms = tuple(dict.fromkeys([t for s in counts for t, _ in s.split] + list(fixed)))
        parts = tuple(
            FixedPart(role, group, n_bytes, terms.index(term), *seconds, op_kind)
            for (role, group, n_bytes, term, op_kind), seconds in stretched.items()
        )
        return LoweredOp(
            tuple(counts.items()), terms, tuple(fixed.get(t, 0.0) for t in terms),
            tuple(n._replace(draws=n.draws._replace(times=float(len(same))))
                  for same in alike.values() for n in same[:1]),
            tuple(shares.items()), parts, behind_s,
        )  # fmt: skip

    def _segment(self, op_kind: str, run: tuple[Kernel, ...]) -> Segment | None:
        """Turn the kernels between two barriers into a segment; None where they take no time."""
        mean: dict[int, float] = defaultdict(float)
        noise: list[Noise] = []
        split: dict[Term, float] = defaultdict(float)
        for k in run:
            distribution, duration = self._treated(k)
            mean[self._column(k)] += duration
            noise.append(Noise(k.kernel_class, Draws(distribution, duration)))
            split[self._term(op_kind, k)] += duration
        called = sum(d for term, d in split.items() if term.compute)
        if self.call is not None and called > 0.0:
            noise.append(Noise(CALL, Draws(self.call, called)))
        total = sum(mean.values())
        if total <= 0.0:
            return None
        shares = tuple((t, d / total) for t, d in split.items())
        columns = range(len(self.loadings))
        return Segment(tuple(mean[i] for i in columns), tuple(noise), shares)


def _link_role(distribution: str) -> str:
    """Part of a node that a message follows, by the tier in its residual law's name."""
    return "other" if distribution.startswith("residual/nvlink") else "network"


@lru_cache(maxsize=256)  # programs of one job differ in few of them
def standardised_cdf(distribution: Distribution) -> Array:
    """Tabulate the cdf of (X - mean) / std on the engine's knots; a step for a constant."""
    z = np.linspace(-engine.CDF_RANGE, engine.CDF_RANGE, engine.CDF_ROWS)
    if distribution.std == 0.0:
        return np.where(z >= 0.0, 1.0, 0.0)
    return np.asarray(distribution.cdf(distribution.mean + distribution.std * z))


def _stretch(distribution: Distribution, cv: float, cdf: Array, n: int) -> tuple[float, float]:
    """Find what a maximum adds to a mean, and its variance, over what the engine makes of them.

    The engine's few nodes step over kinks and end where a heavy tail does not. Taken where all GPUs
    are alike; where they are not, the maximum adds less, and less is missed of it.
    """
    if n == 1 or distribution.std == 0.0:
        return 1.0, 1.0
    largest, unit = largest_of(distribution, n), cv / distribution.std
    mean, variance = engine.group_max(np.ones(n), cv, cdf)
    return unit * (largest.mean - distribution.mean) / (mean - 1.0), (
        unit * largest.std
    ) ** 2 / variance


def lowering_arrays(
    lowered: list[LoweredOp],
    op_types: tuple[OpType, ...],
    member: NDArray[np.int32],
    call: Distribution | None,
) -> engine.Lowering:
    """Lay lowered ops into the engine's arrays, residual tables of standard deviation 1.

    `member` [replica, stage, member] is the physical GPU of each rank, `call` the effect of calls
    to lower into the residual (None where it is drawn apart).
    """
    n, n_terms = len(lowered), max(len(op.terms) for op in lowered)
    segments = list(dict.fromkeys(s for op in lowered for s, _ in op.segments))
    index = {s: i for i, s in enumerate(segments)}
    seg: list[int] = []
    count: list[float] = []
    split = np.zeros((sum(len(op.segments) for op in lowered), n_terms))
    fixed_mean, call_cv = np.zeros((n, n_terms)), np.zeros((n, n_terms))
    for c, op in enumerate(lowered):
        for s, times in op.segments:
            for term, share in s.split:
                split[len(seg), op.terms.index(term)] = share
            seg.append(index[s])
            count.append(times)
        fixed_mean[c, : len(op.terms)] = op.fixed
        if op_types[c].collective is None:
            std = call.std if call is not None else 0.0
            call_cv[c, : len(op.terms)] = [std if t.compute else 0.0 for t in op.terms]
    n_loadings = max((len(s.mean) for s in segments), default=1)
    means = [s.mean + (0.0,) * (n_loadings - len(s.mean)) for s in segments]
    shapes = [distribution_of(s.noise) for s in segments]
    shape_index = {distribution: i for i, distribution in enumerate(dict.fromkeys(shapes))}
    cdfs = [standardised_cdf(distribution) for distribution in shape_index] or [
        np.zeros(engine.CDF_ROWS)
    ]
    cells, cvs = engine.cdf_cells(np.array(cdfs)), [s.cv for s in segments]
    grouped = {s for op, t in zip(lowered, op_types, strict=True) if t.member < 0
               for s, _ in op.segments}  # fmt: skip
    stretch = [
        _stretch(
            distribution,
            cv,
            cells[shape_index[distribution]],
            member.shape[2] if s in grouped else 1,
        )
        for s, distribution, cv in zip(segments, shapes, cvs, strict=True)
    ]
    stages = [t.stage if op.segments else -1 for t, op in zip(op_types, lowered, strict=True)]
    return engine.Lowering(
        member=np.ascontiguousarray(member, np.int32),
        seg_mean=np.array(means, np.float64).reshape(-1, n_loadings),
        seg_cv=np.array(cvs),
        seg_stretch=np.array(stretch).reshape(-1, 2),
        seg_cdf=np.array([shape_index[distribution] for distribution in shapes], np.int32),
        cdf=cells,
        coef_stage=np.array(stages, np.int32),
        coef_seg_ptr=np.cumsum([0, *(len(op.segments) for op in lowered)], dtype=np.int32),
        coef_seg=np.array(seg, np.int32),
        coef_count=np.array(count, np.float64),
        coef_split=split,
        coef_member=np.array([t.member for t in op_types], np.int32),
        fixed_mean=fixed_mean[None],
        fixed_var=np.array([[variance_of(op.noise) for op in lowered]]),
        call_cv=call_cv,
        table_std=np.ones(n),
        quiet=np.ones(n),
    )
