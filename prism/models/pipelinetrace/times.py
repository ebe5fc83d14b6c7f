"""A pipeline trace's rows as arrays: every op of a worker's step, by replica and step.

An op is identified by its stage, recorded name and microbatch (or, without one, its ordinal), so a
row that the trace lacks leaves a hole and does not shift the others. Steps with another number of
microbatches or without an end, and ops that are rare, are left out with a note.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.means import median
from prism.common.text import format_count
from prism.models.pipelinetrace.groups import CLOCK_S
from prism.models.pipelinetrace.pairs import transfer_roles
from prism.simulation.tracemodel.graph import COMPUTE, Array

if TYPE_CHECKING:
    from prism.traces import Trace

UNKNOWN = 0.01
"""Share of ops without a start above which a trace is refused: with 1 % lost, replays of three
production jobs are within 0.4 % in the mean, with 3 % within 2 %."""
RARE = 0.5  # of the workers' steps: what most have is the job's step, the rest is not

Key = tuple[int, str, int]  # stage, recorded name, its ordinal on the worker within a step
Index = NDArray[np.int64]


class Info(NamedTuple):
    """What an op is."""

    op_kind: str
    kernel_class: str
    chunk: int
    microbatch: int


class Times(NamedTuple):
    """Recorded times of every op [s], [key, replica, step]; NaN where it is missing."""

    row: dict[Key, int]
    start: Array
    end: Array
    info: dict[Key, Info]
    group: Index  # [key, replica] which named group it met in, -1: none or not always the same
    steps: Index
    n_stages: int
    placed: NDArray[np.bool_] | None = None  # [key, replica, step] not recorded, see `bridge`

    def of(self, values: Array, key: Key) -> Array:
        """One op's times, [replica, step]."""
        return np.asarray(values[self.row[key]])

    def on_stages(self, values: Array, name: str, ordinal: int) -> Array:
        """One op's times on all stages, [stage, replica, step]; NaN where a stage has none."""
        rows = [self.row.get((s, name, ordinal)) for s in range(self.n_stages)]
        none = np.full(values.shape[1:], np.nan)
        return np.stack([none if i is None else values[i] for i in rows])

    def keep(self, rows: NDArray[Any], steps: NDArray[Any]) -> "Times":
        """Return some of the ops and steps."""
        keys = [k for k, i in self.row.items() if rows[i]]
        chosen = [self.row[k] for k in keys]
        return self._replace(
            row={k: i for i, k in enumerate(keys)}, start=self.start[chosen][:, :, steps],
            end=self.end[chosen][:, :, steps], group=self.group[chosen], steps=self.steps[steps],
        )  # fmt: skip


def read_times(trace: "Trace") -> tuple[Times, Array, list[str]]:
    """Lay a trace's rows into arrays, and leave out what is not the job's usual step.

    Returns
    -------
    measured : float64 [step]
        Step times, last end - first start [s].
    """
    notes: list[str] = []
    times = tabulate(trace, notes)
    times = _usual_steps(trace.source, times, notes)
    whole, times = times, _without_rare(trace.source, times, notes)
    times = _complete_steps(trace.source, times, notes)
    bare = set(range(times.n_stages)) - {stage for stage, _, _ in times.row}
    if bare:
        raise PrismError(
            f"{trace.source}: stage no. {min(bare)} (from 0) has no op that is in most steps; take "
            "its rows out, or correct their stage"
        )
    end = np.fmax.reduce(whole.end, axis=(0, 1)) - np.fmin.reduce(whole.start, axis=(0, 1))
    return times, np.asarray(end[np.isin(whole.steps, times.steps)]), notes


def tabulate(trace: "Trace", notes: list[str]) -> Times:
    """Lay the table's rows into arrays by (stage, name, ordinal)."""
    ops = trace.ops
    if len(ops) == 0:
        raise PrismError(f"{trace.source}: no ops; expected the ops of at least one step")
    known = np.isfinite(ops["start"].to_numpy(np.float64))
    n = int((~known).sum())
    if n > UNKNOWN * known.size:
        raise PrismError(
            f"{trace.source}: {n} of {format_count(known.size, 'op')} without a start time "
            "cannot be put in "
            "order; a column start_s (or start_ms, start_us) is needed to replay or simulate it"
        )
    if n:
        notes.append(f"{n} of {format_count(known.size, 'op')} without a start time left out")
        ops = ops[known]
    start = ops["start"].to_numpy(np.float64)
    steps, step_idx = np.unique(ops["step"].to_numpy(), return_inverse=True)
    replicas, replica_idx = np.unique(ops["dp_rank"].to_numpy(), return_inverse=True)
    stages, stage_idx = np.unique(ops["stage"].to_numpy(), return_inverse=True)
    code, texts = _names(ops)
    place = stage_idx * len(texts) + code
    cell = place * replicas.size * steps.size + replica_idx * steps.size + step_idx
    label = _labels(ops["chunk"].to_numpy(), ops["microbatch"].to_numpy(), code, cell, start)
    _, row, inverse = np.unique(
        place * (int(label.max()) + 1) + label, return_index=True, return_inverse=True
    )
    begin = np.full((row.size, replicas.size, steps.size), np.nan)
    end = np.full_like(begin, np.nan)
    begin[inverse, replica_idx, step_idx] = start
    end[inverse, replica_idx, step_idx] = start + ops["duration"].to_numpy(np.float64)
    zero = np.fmin.reduce(begin, axis=(0, 1))
    begin, end = begin - zero, end - zero
    typical = median(begin, (1, 2))
    index: dict[Key, int] = {}
    counted: dict[tuple[int, str], int] = {}
    for i in np.lexsort((label[row], typical, place[row])):  # ordinals in the order of starting
        where = int(stage_idx[row[i]]), texts[code[row[i]]]
        index[(*where, counted.setdefault(where, 0))] = int(i)
        counted[where] += 1
    columns = [ops[c].to_numpy()[row] for c in ("op_kind", "kernel_class", "chunk", "microbatch")]
    info = {key: _info(key, *(column[i] for column in columns)) for key, i in index.items()}
    group = _groups(ops, inverse, replica_idx, (row.size, replicas.size))
    return Times(index, begin, end, info, group, steps.astype(np.int64), int(stages.size))


def _names(ops: Any) -> tuple[Index, list[str]]:
    """Name every op: as recorded, with its op_kind where a name has several; else by what it is."""
    columns = [ops[c].astype("category").cat for c in ("name", "op_kind", "kernel_class")]
    name, kind, of_class = (c.codes.to_numpy().astype(np.int64) for c in columns)
    names, kinds, classes = ([str(x) for x in c.categories] for c in columns)
    blank = np.array([n == "" for n in names])[name]
    shape = len(names), len(kinds), len(classes)
    which = np.ravel_multi_index((name, kind, np.where(blank, of_class, 0)), shape)
    values, code = np.unique(which, return_inverse=True)
    found = np.array(np.unravel_index(values, shape))
    texts = []
    for n, k, c in found.T:
        if names[n] == "":
            texts.append(f"{kinds[k]} {classes[c]}".strip())
        else:
            several = (found[0] == n).sum() > 1
            texts.append(f"{kinds[k]} {names[n]}" if several else names[n])
    return code.astype(np.int64), texts


def _labels(chunk: Index, microbatch: Index, code: Index, cell: Index, start: Array) -> Index:
    """Tell ops of one name on one worker and step apart: by microbatch, else by their order."""
    order = np.lexsort((start, cell))
    new = np.ones(order.size, bool)
    new[1:] = cell[order][1:] != cell[order][:-1]
    first = np.maximum.accumulate(np.where(new, np.arange(order.size), 0))
    ordinal = np.empty(order.size, np.int64)
    ordinal[order] = np.arange(order.size) - first
    width = int(microbatch.max()) + 2
    label = (np.maximum(chunk, 0) * width + microbatch + 1).astype(np.int64)
    by_label = np.lexsort((label, cell))
    again = np.zeros(order.size, bool)
    again[by_label[1:]] = (np.diff(cell[by_label]) == 0) & (np.diff(label[by_label]) == 0)
    unclear = np.isin(code, np.unique(code[again | (microbatch < 0)]))
    return np.asarray(np.where(unclear, ordinal, label))


def _info(key: Key, op_kind: str, kernel_class: str, chunk: int, microbatch: int) -> Info:
    """Describe an op; a transfer may be identified by its name alone."""
    if op_kind == "other" and transfer_roles(key[1]):
        op_kind, kernel_class = "transfer", "p2p"
    return Info(str(op_kind), str(kernel_class), int(chunk), int(microbatch))


def _groups(ops: Any, inverse: Index, replica: Index, shape: tuple[int, int]) -> Index:
    """Named group of every op and replica, -1 where there is none or it changes."""
    none = np.full(shape, -1, np.int64)
    column = ops.get("group")
    if column is None:
        return none
    named = column.astype("category")
    blank = np.array([str(c) == "" for c in named.cat.categories] + [True])
    codes = named.cat.codes.to_numpy().astype(np.int64)
    codes = np.where(blank[codes], -1, codes)
    low, high = np.full(shape, np.iinfo(np.int64).max), none
    np.minimum.at(low, (inverse, replica), codes)
    np.maximum.at(high, (inverse, replica), codes)
    return np.asarray(np.where(low == high, high, -1))


# ------------------------------------------------------------------------- what is left out
def _usual_steps(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out steps with another number of microbatches than most."""
    compute = [(i, times.info[k], k[2]) for k, i in times.row.items()
               if times.info[k].op_kind in COMPUTE]  # fmt: skip
    if not compute:
        return times
    names = {
        i: (w.chunk, w.microbatch) if w.microbatch >= 0 else (-1, ordinal)
        for i, w, ordinal in compute
    }
    seen = {name: np.zeros(times.steps.size, bool) for name in set(names.values())}
    for i, name in names.items():
        seen[name] |= np.isfinite(times.start[i]).any(axis=0)
    count = np.sum(list(seen.values()), axis=0)
    values, often = np.unique(count, return_counts=True)
    usual = int(values[::-1][np.argmax(often[::-1])])
    odd = np.asarray(count != usual)
    if not odd.any():
        return times
    if odd.mean() >= 0.5:
        found = ", ".join(
            f"{n} in {format_count(k, 'step')}" for n, k in zip(values, often, strict=True)
        )
        raise PrismError(
            f"{source}: the steps have different numbers of microbatches ({found}); a trace of one "
            "job whose steps do the same is expected: give each job's steps apart"
        )
    notes.append(
        f"{int(odd.sum())} of {format_count(odd.size, 'step')} with another number of "
        f"microbatches than {usual} "
        f"left out, such as step {times.steps[odd][0]} with {count[odd][0]}"
    )
    has = np.asarray(np.isfinite(times.start[:, :, ~odd]).any(axis=(1, 2)))
    return times.keep(has, ~odd)


def _without_rare(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out ops that fewer than half of the workers' steps have; count what is missing."""
    share = np.isfinite(times.start).mean(axis=(1, 2))
    rare = [k for k, i in times.row.items() if share[i] < RARE]
    if len(rare) > 0.5 * share.size:
        raise PrismError(
            f"{source}: more than half of the ops occur in fewer than half of the steps and "
            "replicas; give a trace of one job with one layout, all of whose steps do the same"
        )
    kept = share >= RARE
    missing = int((~np.isfinite(times.start[kept])).sum())
    if rare:
        stage, name, ordinal = rare[0]
        notes.append(
            f"{format_count(len(rare), 'op')} left out that fewer than half of the steps have, "
            "such as "
            f"{name} no. {ordinal} of stage {stage}"
        )
    if missing:
        notes.append(
            f"{format_count(missing, 'op')} missing: taken to fill the time "
            "between their "
            "neighbours, or at the median of their kind where that cannot be known"
        )
    return times.keep(kept, np.ones(times.steps.size, bool))


def _complete_steps(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out steps in which no worker has one of its first, or of its last two ops."""
    whole = np.zeros((2, times.steps.size), bool)
    for chain in ordered(times):
        for side, keys in enumerate((chain[:2], chain[-2:])):
            for key in keys:
                whole[side] |= np.isfinite(times.of(times.start, key)).any(axis=0)
    cut = np.asarray(~whole.all(axis=0))
    if not cut.any():
        return times
    if cut.all():
        raise PrismError(f"{source}: no step has both its first and its last ops")
    notes.append(
        f"{format_count(int(cut.sum()), 'step')} without beginning or end left out, "
        "such as step "
        f"{times.steps[cut][0]}"
    )
    return times.keep(np.ones(times.start.shape[0], bool), ~cut)


# ------------------------------------------------------------------------------------ chains
def ordered(times: Times) -> list[list[Key]]:
    """Every stage's ops by their typical start; those of one name posted at once, by their end."""
    typical = median(times.start, (1, 2))
    chains: list[list[Key]] = [[] for _ in range(times.n_stages)]
    for key in sorted(times.row, key=lambda k: (typical[times.row[k]], k)):
        chains[key[0]].append(key)
    for chain in chains:
        for _ in chain:  # medians over other steps than its neighbour's may misplace an op
            rows = [times.row[k] for k in chain]
            later, ends = (
                median(np.diff(v[rows], axis=0), (1, 2)) for v in (times.start, times.end)
            )
            alike = np.array([a[1] == b[1] for a, b in pairwise(chain)], bool)
            at_once = alike & (np.abs(later) <= CLOCK_S) & (ends < -CLOCK_S)
            wrong = np.flatnonzero((later < -CLOCK_S) | at_once)
            if not wrong.size:
                break
            for i in wrong:
                chain[i], chain[i + 1] = chain[i + 1], chain[i]
    return chains


def bridge(times: Times, chains: list[list[Key]]) -> Times:
    """Place missing ops between their neighbours, where those are there.

    A missing op begins its usual gap after the op before, and ends the usual gap before the op
    behind. Several in a row share the time as their medians do, unless one waits for other workers.
    Where a neighbour runs beside it, it stays missing.
    """
    start, end = times.start.copy(), times.end.copy()
    for chain in chains:
        rows = np.array([times.row[k] for k in chain])
        begin, until = times.start[rows], times.end[rows]
        if np.isfinite(begin).all() or len(rows) < 3:
            continue
        gap = median(begin[1:] - until[:-1], -1)
        length = median(until - begin, -1)
        local = np.array([times.info[k].op_kind in (*COMPUTE, "optimizer") for k in chain])
        for i, j, r, t in _runs(~np.isfinite(begin)):
            gaps, own = gap[i - 1 : j + 1, r], length[i : j + 1, r]
            time = begin[j + 1, r, t] - until[i - 1, r, t] - gaps.sum()
            alone = j == i or (local[i : j + 1].all() and own.sum() > 0.0)
            if not (alone and gaps.min() > -CLOCK_S and time >= 0.0):
                continue
            share = own / own.sum() if j > i else np.ones(1)
            start[rows[i : j + 1], r, t] = (
                until[i - 1, r, t] + np.cumsum(gaps[:-1]) + time * (np.cumsum(share) - share)
            )
            end[rows[i : j + 1], r, t] = start[rows[i : j + 1], r, t] + time * share
    placed = np.isfinite(start) & ~np.isfinite(times.start)
    return times._replace(start=start, end=end, placed=placed)


def _runs(lost: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """First and last of ops missing in a row, replica and step, between ops that are there."""
    for r, t in np.argwhere(lost.any(axis=0)):
        edges = np.flatnonzero(np.diff(lost[:, r, t].astype(np.int8), prepend=0, append=0))
        for i, j in edges.reshape(-1, 2):
            if 0 < i and j < lost.shape[0]:
                yield int(i), int(j) - 1, int(r), int(t)
