"""Ops whose residual is of one kernel class each, so that a class can be redrawn alone.

An op of several classes becomes a chain of ops, one for the residual of each that is asked for, one
for all others, and one for the call effect lowered into it: the time of all is split evenly among
them (a link may take less than none, and nothing waits for it but the next), so that their sum is
distributed as the op. Exact where a rank waits for no other inside an op. In a group, where the
maximum of a segment's kernels has its variance by class as a single rank has it, the classes' parts
in it add up instead of meeting.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster.groups import shard_size
from prism.distributions.distribution import Distribution
from prism.distributions.sums import Draws, sum_of
from prism.simulation.lowering import CALL, LoweredOp, Lowerer
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program, Tables, global_ops

Array = NDArray[np.float64]
OTHERS = -1  # owner of the residuals of classes that are not asked for
CARRIED = 1e-9  # share of a residual's variance left where a link has none of it, for its time


class ClassOps(NamedTuple):
    """A program of one class to an op, and whose residual each coefficient's is."""

    program: Program
    owner: NDArray[
        np.int64
    ]  # [coef] class, one more than there are for the call effect; -1: others


class _Link(NamedTuple):
    """Part of an op: the residuals of one class."""

    owner: int
    entries: Array  # [entry of the op] share of the variance of its segments
    fixed: float  # and of that of its collectives
    distribution: Distribution


def lower_again(step: Prepared) -> list[LoweredOp]:
    """Lower the op types of a job's program, as it was built."""
    v = step.effects
    lowerer = Lowerer(v, call=v.call if shard_size(step.job) > 1 else None)
    return [lowerer.lower(op_type) for op_type in step.graph.op_types]


def split_classes(step: Prepared, names: Collection[str] | None = None) -> ClassOps:
    """Split every op of a program by kernel class, or by some classes alone."""
    program = step.program
    apart = set(program.classes if names is None else names)
    if step.workload is None:  # ops of a trace hold one class each
        return ClassOps(program, program.shares.argmax(axis=1).astype(np.int64))
    called = (program.low.call_cv.max(axis=1) > 0.0).tolist()
    links = [
        _links(op, program.classes, apart, step.effects.call if called[c] else None)
        for c, op in enumerate(lower_again(step))
    ]
    owner = np.array([link.owner for each in links for link in each], np.int64)
    if owner.size > len(links):
        low, tables, table = _lower_links(program, links)
        program = _chain(program, np.array([len(each) for each in links]), table)
        none = np.zeros((owner.size, len(program.classes)), np.float32)
        program = replace(program, low=low, tables=tables, shares=none, alike=None, origin=None)
    return ClassOps(program, owner)


def _links(
    op: LoweredOp, classes: tuple[str, ...], apart: Collection[str], call: Distribution | None
) -> list[_Link]:
    """Split an op; one without residuals is its first class's."""
    owners = {name: i for i, name in enumerate(classes) if name in apart} | {CALL: len(classes)}
    whole = [max(sum(n.draws.variance for n in s.noise), 1e-300) for s, _ in op.segments]
    fixed = max(sum(n.draws.variance for n in op.noise), 1e-300)
    draws: dict[int, list[Draws]] = defaultdict(list)
    entries: dict[int, Array] = defaultdict(lambda: np.zeros(len(whole)))
    outside: dict[int, float] = defaultdict(float)
    for e, (segment, times) in enumerate(op.segments):
        for name, own in segment.noise:
            if own.variance > 0.0:
                owner = owners.get(name, OTHERS)
                draws[owner].append(own._replace(times=times * own.times))
                entries[owner][e] += own.variance / whole[e]
    for name, own in op.noise:
        if own.variance > 0.0:
            owner = owners.get(name, OTHERS)
            draws[owner].append(own)
            outside[owner] += own.variance / fixed
    if call is not None:
        draws[owners[CALL]].append(Draws(call, 1.0))
    found = [
        _Link(owner, entries[owner], outside[owner], sum_of(tuple(own)))
        for owner, own in draws.items()
    ]
    first = classes.index(op.shares[0][0])
    return found or [_Link(first, np.ones(len(whole)), 1.0, sum_of(()))]


def _lower_links(
    program: Program, links: list[list[_Link]]
) -> tuple[engine.Lowering, NDArray[np.float32], NDArray[np.int32]]:
    """Lower every link: its coefficients, all tables, and which is its residual's [coef]."""
    low, tables = program.low, Tables()
    for i, values in enumerate(program.tables):
        tables.add_table((i,), values)
    n_links = np.array([len(each) for each in links])
    of = np.repeat(np.arange(len(links)), n_links)
    n, flat = n_links[of].astype(np.float64), [link for each in links for link in each]
    table = np.zeros(len(links), np.int32)
    table[program.ops.coef] = program.ops.table
    table, std, call_cv = table[of], low.table_std[of], low.call_cv[of] * n[:, None]
    held = [slice(a, b) for a, b in pairwise(low.coef_seg_ptr)]
    shares = [np.maximum(link.entries, CARRIED) for link in flat]
    for i in np.flatnonzero(n > 1).tolist():
        table[i], std[i] = tables.add(flat[i].distribution), flat[i].distribution.cv
        call_cv[i] *= flat[i].owner == len(program.classes)
    each = list(zip(of, n, shares, strict=True))
    return low._replace(
        coef_stage=low.coef_stage[of], coef_member=low.coef_member[of], quiet=low.quiet[of],
        coef_seg_ptr=np.cumsum([0, *(w.size for w in shares)], dtype=np.int32),
        coef_seg=np.concatenate([low.coef_seg[held[c]] for c in of]),
        coef_count=np.concatenate(
            [low.coef_count[held[c]] * w for c, _, w in each]
        ),
        coef_split=np.concatenate([low.coef_split[held[c]] / (k * w)[:, None] for c, k, w in each]),
        fixed_mean=np.ascontiguousarray(low.fixed_mean[:, of] / n[:, None]),
        fixed_var=np.ascontiguousarray(low.fixed_var[:, of] * [link.fixed for link in flat]),
        call_cv=call_cv, table_std=std,
    ), tables.stack(), table  # fmt: skip


def _chain(program: Program, n_links: NDArray[np.int64], table: NDArray[np.int32]) -> Program:
    """Lay a chain of ops for every op, whose ends but the last take turns in two slots."""
    ops, graph, stalls = program.ops, program.graph, program.stalls
    n = np.where(ops.kind == engine.DRAW, n_links[ops.coef], 1)
    begin = np.cumsum([0, *n])  # of every chain, and the end of all
    of, link = np.repeat(np.arange(n.size), n), np.arange(begin[-1]) - np.repeat(begin[:-1], n)

    def slot(old: NDArray[np.int32]) -> NDArray[np.int32]:
        return old + (old >= graph.n_slots)  # one more of them is between links

    last = n[of] - 1 - link
    out = np.where(last % 2 == 0, slot(ops.out)[of], graph.n_slots).astype(np.int32)
    before = np.roll(out, 1)
    coef = np.cumsum([0, *n_links])[ops.coef][of] + np.where(ops.kind[of] == engine.DRAW, link, 0)
    chained = engine.Ops(*(column[of] for column in ops))._replace(
        pred0=np.where(link == 0, slot(ops.pred0)[of], before), out=out,
        pred1=np.where(link == 0, slot(ops.pred1)[of], 0), coef=coef.astype(np.int32),
        table=table[coef], draw=_number(ops, n, global_ops(graph), of, link),
    )  # fmt: skip
    drawn = n[ops.kind == engine.DRAW] - 1
    copies = np.where(global_ops(graph), 1, graph.n_replicas)[ops.kind == engine.DRAW]
    return replace(
        program, ops=chained, n_draws=program.n_draws + int(drawn @ copies),
        stalls=stalls._replace(op=(begin[1:] - 1)[stalls.op].astype(np.int32)),
        graph=graph._replace(
            phase_lo=begin[graph.phase_lo], phase_hi=begin[graph.phase_hi],
            n_slots=graph.n_slots + 1, final_slot=graph.final_slot + 1,
        ),
    )  # fmt: skip


def _number(
    ops: engine.Ops, n: NDArray[np.int64], is_global: NDArray[np.bool_],
    of: NDArray[np.int64], link: NDArray[np.int64],
) -> NDArray[np.int32]:  # fmt: skip
    """Return each draw's index within its stage, in the schedule's order; -1 where none is."""
    first = np.full(n.size, -1)
    for stage in np.unique(ops.stage):
        for whole in (False, True):
            own = np.flatnonzero((ops.stage == stage) & (is_global == whole) & (ops.draw >= 0))
            own = own[np.argsort(ops.draw[own])]
            first[own] = np.cumsum(n[own]) - n[own]
    return np.where(first[of] < 0, -1, first[of] + link).astype(np.int32)
