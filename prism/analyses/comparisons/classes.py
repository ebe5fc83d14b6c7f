"""Where a step's time goes by kernel class: of a profile, and of a job's ideal step.

An instant counts once: where several activities run at once, compute comes before communication,
and that before copies; idle is when nothing runs. So classes and idle add up to the period. Left
out: how long hidden communication took, and what is waiting inside a recorded collective.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from prism.analyses.timelines.jobs import JobPlayer
from prism.analyses.timelines.played import durations
from prism.cluster.nodemap import Placement
from prism.common.arrays import Array, Index
from prism.common.errors import PrismError
from prism.jobs.job import Job
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.program import ideal_program
from prism.simulation.variability import is_communication
from prism.traces import Trace
from prism.traces.kernelnames import COLLECTIVES, collective_kind
from prism.workload.kernels import Kernel
from prism.workload.work import Collective

COMPUTE = ("gemm", "attention", "convolution", "elementwise", "norm", "loss", "embedding")
OTHER, OPTIMIZER, COPIES, IDLE = "other", "optimizer", "copies", "idle"
LINKS = (*(kind for kind in sorted(COLLECTIVES) if kind != "transfer"), "p2p")
ORDER = (*COMPUTE, OTHER, OPTIMIZER, *LINKS, COPIES)
"""Classes, in the order in which one of several that run at once counts."""

_NO_DEVICE = ("launch_gap", "data_load")
"""Kinds of rows of a profile that are no activity of the device."""
_SEED = 0  # an ideal step draws nothing


class ClassTimes(NamedTuple):
    """A step's time by class, a mean over steps and over ranks."""

    period: float  # [s]
    seconds: dict[str, float]  # [s] by class in `ORDER`, then idle; adds up to the period
    kernels: dict[str, float]  # device activities per step, by class
    n_steps: int
    ranks: tuple[int, ...]  # that took part


@dataclass(frozen=True)
class _Activities:
    """What ran on one rank [activity]."""

    start: Array  # [s]
    end: Array
    code: Index  # index of the class, the one that counts first is 0


# --------------------------------------------------------------------------------- of a profile
def measured_times(trace: Trace) -> ClassTimes | None:
    """Find a profile's time by class, in the periods of its steps; None without any."""
    periods = trace.meta.get("periods", ())
    if not periods:
        return None
    windows = np.array([row[1:] for row in periods])
    ops = trace.ops[trace.ops["start"].notna() & ~trace.ops["op_kind"].isin(_NO_DEVICE)]
    labels = {name: _measured_class(name) for name in ops["kernel_class"].unique()}
    code = ops["kernel_class"].map(labels).map(ORDER.index).to_numpy(np.int64)
    start, rank = ops["start"].to_numpy(), ops["rank"].to_numpy()
    end = start + ops["duration"].to_numpy()
    ranks = np.unique(rank).tolist()
    means = []
    for of in ranks:
        mine = rank == of
        activities = _Activities(start[mine], end[mine], code[mine])
        means.append(_time_by_class(activities, windows, len(ORDER)).mean(axis=0))
    mean = np.mean(means, axis=0)
    counted = np.bincount(code[ops["step"].isin([row[0] for row in periods])], minlength=len(ORDER))
    count = counted / (len(periods) * len(ranks))
    return ClassTimes(
        float(mean.sum()), _named(mean), dict(zip(ORDER, count.tolist(), strict=True)),
        len(periods), tuple(ranks),
    )  # fmt: skip


def _measured_class(kernel_class: str) -> str:
    """Class of a profile's row as a step's time is split."""
    if kernel_class.startswith("mem"):
        return COPIES
    return kernel_class if kernel_class in ORDER else OTHER


def _time_by_class(activities: _Activities, windows: Array, n: int) -> Array:
    """Split windows [window, 2] in order among classes, then idle: seconds [window, class + 1]."""
    start, end, code = activities.start, activities.end, activities.code
    cuts = np.unique(np.concatenate([start, end, windows.ravel()]))
    begins, ends = np.searchsorted(cuts, start), np.searchsorted(cuts, end)
    window = np.searchsorted(windows[:, 0], cuts[:-1], side="right") - 1
    inside = (window >= 0) & (cuts[:-1] < windows[np.maximum(window, 0), 1])
    length, free = np.diff(cuts), inside.copy()
    seconds = np.zeros((len(windows), n + 1))
    for k in range(n + 1):
        taken = free
        if k < n:
            mine = code == k
            if not mine.any():
                continue
            steps = np.bincount(begins[mine], minlength=cuts.size)
            steps = steps - np.bincount(ends[mine], minlength=cuts.size)
            taken = free & (np.cumsum(steps)[:-1] > 0)
        seconds[:, k] = np.bincount(window[taken], length[taken], len(windows))
        free = free & ~taken
    return seconds


def _named(seconds: Array) -> dict[str, float]:
    return dict(zip((*ORDER, IDLE), seconds.tolist(), strict=True))


# -------------------------------------------------------------------------------------- of a job
def predicted_times(job: Job, ranks: Sequence[int] = (), n_ranks: int = 0) -> ClassTimes:
    """Find the time by class of a job's ideal step, in which every effect is 1.

    A mean over the stages of `ranks` where the job has `n_ranks` ranks, else over all.

    Raises PrismError: the job is a fitted trace, which knows no kernels of a layer.
    """
    step = prepare(job, _SEED)
    if step.workload is None:
        raise PrismError(
            f"{job.source}: a model fitted to a trace; expected a job file, the name of a shipped "
            "job or a calibrated model, whose kernels are known by class"
        )
    program = ideal_program(step.program)
    graph = replace(step.graph, n_replicas=program.graph.n_replicas)
    step = replace(step, graph=graph, program=program)
    played = JobPlayer(step, _SEED).play(None)
    end = played.end[:1].astype(np.float64)
    begin = end[0] - durations(played.ops, end)[0]
    windows = np.array([[0.0, played.step_time]])
    found: list[Array] = []
    for stage in range(graph.n_stages):
        mine = [
            i for i, op in enumerate(played.ops)
            if graph.op_type[i] >= 0 and op.member <= 0 and stage in (op.shown or op.stages)
        ]  # fmt: skip
        found.append(_stage_times(step, mine, begin, end[0], windows))
    stages: Iterable[int] = range(graph.n_stages)
    if n_ranks == job.world_size and max(ranks, default=n_ranks) < n_ranks:
        stage_of = {int(rank): s for (_, s, _), rank in np.ndenumerate(Placement(job).ranks())}
        stages = [stage_of[rank] for rank in ranks]
    mean = np.mean([found[stage] for stage in stages], axis=0)
    return ClassTimes(played.step_time, _named(mean), {}, 1, tuple(ranks))


def _stage_times(
    step: Prepared, ops: Sequence[int], begin: Array, end: Array, windows: Array
) -> Array:
    """Split a stage's step among classes, then idle; ops that hold several share theirs out."""
    types = [step.graph.op_types[int(step.graph.op_type[i])] for i in ops]
    parts = [
        _kernel_shares(t.kernels) if t.collective is None else {class_of(t.collective): 1.0}
        for t in types
    ]
    # compute of a rank runs one after the other: all of it counts before what is beside it
    whole = np.array([not (set(part) <= set(LINKS)) for part in parts], np.bool_)
    code = [
        0 if mixed else 1 + LINKS.index(next(iter(part)))
        for mixed, part in zip(whole, parts, strict=True)
    ]
    activities = _Activities(begin[list(ops)], end[list(ops)], np.array(code, np.int64))
    seconds = _time_by_class(activities, windows, 1 + len(LINKS))[0]
    time: dict[str, float] = defaultdict(float)
    for i, mixed, part in zip(ops, whole, parts, strict=True):
        for name, share in part.items() if mixed else ():
            time[name] += share * (end[i] - begin[i])
    counted = sum(time.values())
    out = np.zeros(len(ORDER) + 1)
    for name, value in time.items():
        scale = seconds[0] / counted if counted else 0.0  # rounding of the engine
        out[(*ORDER, IDLE).index(name)] += scale * value
    for name, value in zip((*LINKS, IDLE), seconds[1:].tolist(), strict=True):
        out[(*ORDER, IDLE).index(name)] += value
    return out


def _kernel_shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Share of each class in the time of an op's kernels."""
    time: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        time[class_of(kernel)] += kernel.duration
    total = sum(time.values())
    return {name: value / total for name, value in time.items()} if total else {OTHER: 1.0}


def class_of(part: Kernel | Collective) -> str:
    """Class of a job's kernel or collective, as profiles' kernels have them."""
    name, own = part.name, part.kernel_class
    if is_communication(own):
        return next((kind for kind in map(_link, (name, own)) if kind), "p2p")
    if own == "launch_gaps":
        return IDLE
    if own == "compute":  # of explicit durations; or the host, which holds up layers with experts
        return IDLE if name.endswith("_host") else OTHER
    if isinstance(part, Kernel) and own != "attention" and part.flop > 0.0:
        return "gemm"
    if own == "memory":
        found = re.search(r"(norm|convolution)(?=_|$)", name)
        return found[1] if found else "elementwise"
    return own if own in ORDER else OTHER


def _link(name: str) -> str:
    """Op of a collective's name as in `LINKS`, "" where it is none."""
    kind = collective_kind(name)
    return kind if kind in LINKS else ""


# ------------------------------------------------------------------------------------------ both
def merged(measured: ClassTimes, predicted: ClassTimes) -> tuple[ClassTimes, ClassTimes]:
    """Add up classes of compute on both sides where the job gives durations of whole stages."""
    if not predicted.seconds[OTHER]:
        return measured, predicted
    parts = [x for x in (*COMPUTE, OTHER) if measured.seconds[x] or measured.kernels[x]]
    name = ", ".join(x for x in parts if x != OTHER) or OTHER

    def add(values: Mapping[str, float]) -> dict[str, float]:
        total = sum(values.get(x, 0.0) for x in (*COMPUTE, OTHER))
        return {name: total} | {x: v for x, v in values.items() if x not in (*COMPUTE, OTHER)}

    return (
        measured._replace(seconds=add(measured.seconds), kernels=add(measured.kernels)),
        predicted._replace(seconds=add(predicted.seconds)),
    )
