"""A pipeline trace's rows as arrays: every op of a worker's step, by replica and step.

An op is identified by its stage, recorded name and microbatch (or, without one, its ordinal), so a
row that the trace lacks leaves a hole and does not shift the others. Steps with another number of
microbatches or without an end, and ops that are rare, are left out with a note.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.common.arrays import Index
from prism.common.errors import PrismError
from prism.common.means import median
from prism.common.text import format_count
from prism.simulation.tracemodel.graph import COMPUTE, Array

if TYPE_CHECKING:
    from prism.traces import Trace

CLOCK_S = 5e-5  # two clocks, or two launches of one event, differ by less
# Share of ops without a start above which a trace is refused: with 1 % lost, replays of three
# production jobs are within 0.4 % in the mean, with 3 % within 0.8 %.
UNKNOWN = 0.01
RARE = 0.5  # of the workers' steps: what most have is the job's step, the rest is not
WHAT = ["name", "op_kind", "kernel_class"]
_WORDS = re.compile(
    r"i?send|i?recv|receive|forward|fwd|fw(?![a-z])|backward|bwd|bw(?![a-z])|next|prev"
    r"|(?<![a-z])[fb](?![a-z])"
)
_SIDES = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv", "receive": "recv"}


@dataclass(frozen=True)
class Times:
    """Ops of a step, and when every worker ran them."""

    ops: pd.DataFrame  # [op] stage, name, ordinal of the name on its stage, and what it is
    start: Array  # [op, replica, step] s, NaN where it is missing
    end: Array
    group: Index  # [op, replica] which named group it met in, -1: none or not always the same
    steps: Index
    n_stages: int

    def select(self, ops: NDArray[Any], steps: NDArray[Any]) -> "Times":
        """Return some of the ops and steps, by place or by flag."""
        return replace(
            self, ops=self.ops.iloc[ops].reset_index(drop=True), group=self.group[ops],
            start=self.start[ops][:, :, steps], end=self.end[ops][:, :, steps],
            steps=self.steps[steps],
        )  # fmt: skip

    def alike(self) -> list[Index]:
        """Places of the ops of one name and ordinal, on one stage after the other."""
        groups = self.ops.groupby(["name", "ordinal"], sort=False)
        return [np.sort(places) for places in groups.indices.values()]


def read_times(trace: "Trace") -> tuple[Times, Array, list[str]]:
    """Lay a trace's rows into arrays, less what is unusual; measured step times [s]; notes."""
    notes: list[str] = []
    whole = _usual_steps(trace.source, _tabulate(trace, notes), notes)
    times = _complete_steps(trace.source, _without_rare(trace.source, whole, notes), notes)
    bare = set(range(times.n_stages)) - set(times.ops["stage"])
    if bare:
        raise PrismError(
            f"{trace.source}: stage no. {min(bare)} (from 0) has no op that is in most steps; take "
            "its rows out, or correct their stage"
        )
    _number_microbatches(times.ops, notes)
    end = np.fmax.reduce(whole.end, axis=(0, 1)) - np.fmin.reduce(whole.start, axis=(0, 1))
    return times, np.asarray(end[np.isin(whole.steps, times.steps)]), notes


def _tabulate(trace: "Trace", notes: list[str]) -> Times:
    rows = trace.ops
    if len(rows) == 0:
        raise PrismError(f"{trace.source}: no ops; expected the ops of at least one step")
    known = np.isfinite(rows["start"].to_numpy(np.float64))
    n = int((~known).sum())
    if n > UNKNOWN * known.size:
        raise PrismError(
            f"{trace.source}: {n} of {format_count(known.size, 'op')} without a start time cannot "
            "be put in order; a column start_s (or start_ms, start_us) is needed to replay or "
            "simulate it"
        )
    if n:
        notes.append(f"{n} of {format_count(known.size, 'op')} without a start time left out")
        rows = rows[known]
    rows = _described(rows)
    rows["op"] = rows.groupby(["stage", "name", "label"]).ngroup()
    step, steps = pd.factorize(rows["step"], sort=True)
    replica, replicas = pd.factorize(rows["dp_rank"], sort=True)
    stage, stages = pd.factorize(rows["stage"], sort=True)
    ops = rows.assign(stage=stage).drop_duplicates("op").sort_values("op", ignore_index=True)
    start = np.full((len(ops), replicas.size, steps.size), np.nan)
    end = np.full_like(start, np.nan)
    start[rows["op"], replica, step] = rows["start"]
    end[rows["op"], replica, step] = rows["start"] + rows["duration"]
    zero = np.fmin.reduce(start, axis=(0, 1))
    start, end = start - zero, end - zero
    ops["typical"] = median(start, (1, 2))
    order = ops.sort_values(["stage", "name", "typical"]).index  # ordinals as they start
    ops = ops.loc[order, ["stage", *WHAT, "chunk", "microbatch"]].reset_index(drop=True)
    ops["ordinal"] = ops.groupby(["stage", "name"]).cumcount()
    group = np.full(start.shape[:2], -1)
    named = rows.assign(replica=replica).groupby(["op", "replica"])["group"].agg(["min", "max"])
    same = named["min"].where(named["min"] == named["max"], -1)
    group[same.index.get_level_values(0), same.index.get_level_values(1)] = same
    return Times(ops, start[order], end[order], group[order], np.asarray(steps), stages.size)


def _described(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a name and label that identify each op of a worker's step, and group numbers."""
    code = rows.groupby(WHAT, observed=True, sort=False).ngroup().to_numpy()
    what = rows[WHAT].drop_duplicates().astype(str)
    several = what.groupby("name")["op_kind"].transform("nunique") > 1
    full = (what["op_kind"] + " " + what["name"]).where(several, what["name"])
    unnamed = (what["op_kind"] + " " + what["kernel_class"]).str.strip()
    what["name"] = full.where(what["name"] != "", unnamed)
    by_name = (what["op_kind"] == "other") & what["name"].map(transfer_roles).astype(bool)
    what.loc[by_name, ["op_kind", "kernel_class"]] = "transfer", "p2p"
    rows = rows.reset_index(drop=True).assign(**{c: what[c].to_numpy()[code] for c in WHAT})
    named = rows["group"].astype("category")
    rows["group"] = named.cat.codes.astype(np.int64).where(named.astype(str) != "", -1)
    # ops of one name in a worker's step: distinguished by microbatch, else by their order
    cell = ["step", "dp_rank", "stage", "name"]
    microbatch = rows["microbatch"].astype(np.int64)
    rows["label"] = rows["chunk"].clip(lower=0) * (microbatch.max() + 2) + microbatch + 1
    unclear = (microbatch < 0) | rows.duplicated([*cell, "label"])
    ordinal = rows.sort_values("start", kind="stable").groupby(cell).cumcount()
    unclear = unclear.groupby(rows["name"]).transform("any")
    rows["label"] = rows["label"].where(~unclear, ordinal)
    return rows


# ------------------------------------------------------------------------- what is left out
def _usual_steps(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out steps with another number of microbatches than most."""
    ops = times.ops[times.ops["op_kind"].isin(COMPUTE)]
    if ops.empty:
        return times
    labels = [ops[c].where(ops["microbatch"] >= 0, -1) for c in ("chunk", "microbatch")]
    labels += [ops["ordinal"].where(ops["microbatch"] < 0, -1)]
    present = pd.DataFrame(np.isfinite(times.start[ops.index]).any(axis=1), ops.index)
    count = present.groupby(labels).any().sum().to_numpy()
    values, often = np.unique(count, return_counts=True)
    usual = int(values[::-1][np.argmax(often[::-1])])
    odd = np.not_equal(count, usual)
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
        f"{int(odd.sum())} of {format_count(odd.size, 'step')} with another number of microbatches "
        f"than {usual} left out, such as step {times.steps[odd][0]} with {count[odd][0]}"
    )
    has = np.asarray(np.isfinite(times.start[:, :, ~odd]).any(axis=(1, 2)))
    return times.select(has, ~odd)


def _without_rare(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out ops that fewer than half of the workers' steps have; count what is missing."""
    there = np.isfinite(times.start)
    rare = there.mean(axis=(1, 2)) < RARE
    if rare.mean() > 0.5:
        raise PrismError(
            f"{source}: more than half of the ops occur in fewer than half of the steps and "
            "replicas; give a trace of one job with one layout, all of whose steps do the same"
        )
    missing = int((~there[~rare]).sum())
    if rare.any():
        first = times.ops[rare].iloc[0]
        notes.append(
            f"{format_count(int(rare.sum()), 'op')} left out that fewer than half of the steps "
            f"have, such as {first['name']} no. {first.ordinal} of stage {first.stage}"
        )
    if missing:
        notes.append(f"{format_count(missing, 'op')} missing: taken at the median of their kind")
    return times.select(~rare, np.ones(times.steps.size, bool))


def _complete_steps(source: str, times: Times, notes: list[str]) -> Times:
    """Leave out steps in which no worker has one of its first, or of its last two ops."""
    there, chains = np.asarray(np.isfinite(times.start).any(axis=1)), ordered(times)
    whole = [there[np.concatenate([c[side] for c in chains])].any(axis=0)
             for side in (slice(2), slice(-2, None))]  # fmt: skip
    cut = ~np.logical_and(*whole)
    if not cut.any():
        return times
    if cut.all():
        raise PrismError(f"{source}: no step has both its first and its last ops")
    notes.append(
        f"{format_count(int(cut.sum()), 'step')} without beginning or end left out, such as step "
        f"{times.steps[cut][0]}"
    )
    return times.select(np.ones(len(times.ops), bool), ~cut)


def _number_microbatches(ops: pd.DataFrame, notes: list[str]) -> None:
    """Count the compute ops of each name and stage where the trace does not tell them apart."""
    compute = ops[ops["op_kind"].isin(COMPUTE)]
    named = compute.groupby(["stage", *WHAT, "chunk"])["microbatch"]
    size = named.transform("size")
    unclear = (named.transform("min") < 0) | (named.transform("nunique") < size)
    numbers = named.cumcount()[unclear]
    ops.loc[numbers.index, "microbatch"] = numbers
    if (unclear & (size > 1)).any():
        notes.append("compute ops whose microbatch is not known are numbered in their order")


def ordered(times: Times) -> list[Index]:
    """Every stage's ops by their typical start; those of one name posted at once, by their end."""
    typical, stage = median(times.start, (1, 2)), times.ops["stage"].to_numpy()
    order, name = np.argsort(typical, kind="stable"), times.ops["name"].to_numpy()
    chains = [order[stage[order] == s] for s in range(times.n_stages)]
    for chain in chains:
        for _ in chain:  # medians over other steps than its neighbour's may misplace an op
            later, ends = (
                median(np.diff(v[chain], axis=0), (1, 2)) for v in (times.start, times.end)
            )
            alike = name[chain[1:]] == name[chain[:-1]]
            at_once = alike & (np.abs(later) <= CLOCK_S) & (ends < -CLOCK_S)
            wrong = np.flatnonzero((later < -CLOCK_S) | at_once)
            if not wrong.size:
                break
            for i in wrong:
                chain[[i, i + 1]] = chain[[i + 1, i]]
    return chains


# ------------------------------------------------------------------------- names of transfers
def transfer_roles(name: str) -> list[tuple[str, str]]:
    """Sides and ways of the transfers that an op's name says it is; none where it says nothing.

    Examples
    --------
    >>> transfer_roles("forward-send")
    [('send', 'forward')]
    >>> transfer_roles("send_forward_recv_backward")
    [('send', 'forward'), ('recv', 'backward')]
    >>> transfer_roles("recv_prev")
    [('recv', 'forward')]
    """
    words = _WORDS.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    side_first = bool(words) and words[0] in _SIDES
    roles: dict[tuple[str, str], None] = {}
    side, way = "", ""
    for word in words:
        side, way = (_SIDES[word], way) if word in _SIDES else (side, word)
        if side and way and (word in _SIDES) != side_first:
            ahead = way[0] == "f" or way == ("next" if side == "send" else "prev")
            roles[side, "forward" if ahead else "backward"] = None
    return list(roles)
