"""Where the time of a step goes: compute, exposed communication by group, bubble, waiting, jitter.

A waterfall over steps with the same draws: communication is made free group by group, then every
effect is set to 1; what is left is work and idle time of the stages. The parts add up to the step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.jobs.dimensions import COMMUNICATING
from prism.simulation.execution.tasks import Arrays
from prism.simulation.prepare import Prepared, silent_model
from prism.simulation.program import Program, ideal_program
from prism.simulation.tracemodel.arrays import kernel_class
from prism.simulation.tracemodel.devicetime import ideal_device_times
from prism.simulation.tracemodel.model import TraceModel
from prism.simulation.variability import is_communication

Array = NDArray[np.float64]
Run = Callable[..., Arrays]

GROUPS = COMMUNICATING[::-1]
"""Groups of ranks in the order in which their communication is made free, the widest first."""
OTHER_NAMES = {"p2p": "pp", "transfer": "pp", "send": "pp", "embedding": "pp", "layernorm": "tp"}
"""Groups of classes named otherwise, by their first word."""


class TimeLoss(NamedTuple):
    """Parts of the step, as shares of its mean and of its variance; each adds up to 1."""

    names: list[str]
    mean: Array  # [part]
    mean_error: Array  # [part] its standard error by cluster; NaN for one cluster
    variance: Array  # [part]; NaN where nothing varies
    variance_error: Array  # [part] as of the mean


def group_of(name: str) -> str:
    """Name the group of ranks over which a class communicates: "all" ranks, "" where it does not.

    Examples
    --------
    >>> [group_of(name) for name in ("p2p", "tp_all_gather", "dp_cp_all_reduce", "gemm_mlp")]
    ['pp', 'tp', 'dp', '']
    """
    if not is_communication(name):
        return ""
    first = name.partition("_")[0]
    return first if first in GROUPS else OTHER_NAMES.get(first, "all")


def freed_classes(classes: Sequence[str]) -> dict[str, list[str]]:
    """List the classes whose communication is free once a group's is, by group, the widest first.

    What all ranks take part in counts to the widest group.

    Examples
    --------
    >>> freed_classes(["gemm_mlp", "p2p", "tp_all_gather"])
    {'pp': ['p2p'], 'tp': ['p2p', 'tp_all_gather']}
    """
    groups = {name: group_of(name) for name in classes}
    widest = next((group for group in GROUPS if group in groups.values()), GROUPS[0])
    freed: list[str] = []
    found = {}
    for group in GROUPS:
        also = "all" if group == widest else group
        if own := [name for name, its in groups.items() if its in (group, also)]:
            freed = freed + own
            found[group] = freed
    return found


def find_time_loss(
    step: Prepared,
    times: NDArray[np.float32],
    silent: Mapping[str, NDArray[np.float32]],
    free: Program,
    run: Run,
) -> TimeLoss:
    """Split the step into parts.

    Parameters
    ----------
    times : float32 [cluster, lane]
        Steps of the first clusters [s].
    silent : mapping of float32 [cluster, lane]
        By group, the same draws once the communication of `freed_classes` takes no time [s]; the
        first may be parts of added effects: without what steps wait for.
    free : Program
        The step once none does, as `silence` makes it.
    run : callable
        Runs blocks of a program under the same seed: `prism.simulation.steps.run_blocks`.
    """
    whole = times.astype(np.float64)
    parts: dict[str, Array] = {}  # seconds of each replicate
    left, present = whole, list(silent)
    for name, rest in silent.items():
        parts[f"exposed_{name}" if name in GROUPS else name] = left - rest.astype(np.float64)
        left = rest.astype(np.float64)
    added = {"step_jitter": (0.0, 0.0)}  # a row in any case
    added |= {x.part: moments for x in step.program.added if (moments := x.moments())}
    model = step.source
    fixed = _ideal_trace(model) if isinstance(model, TraceModel) else _ideal_job(step, free, run)
    ideal = _split_ideal(fixed) | {name: mean for name, (mean, _) in added.items()}
    n = len(whole)
    kept = [np.arange(n) != k for k in range(-1, n if n > 1 else 0)]  # all, then without each
    ends = np.array([whole[k].mean() for k in kept])
    means = {name: np.array([part[k].mean() for k in kept]) for name, part in parts.items()}
    means["stragglers"] = np.array([left[k].mean() for k in kept]) - sum(ideal.values())
    variance = np.array([_covariance(whole[k], whole[k]) for k in kept])
    shares = {name: (m * cv) ** 2 / variance for name, (m, cv) in added.items()} | {
        name: np.array([_covariance(part[k], whole[k]) for k in kept]) / variance
        for name, part in (parts | {"stragglers": left}).items()
    }
    for name in added:
        shares["stragglers"] -= shares[name]
    order = ["compute", *(f"exposed_{group}" for group in reversed(present)
             if group in GROUPS), "bubble", "stage_imbalance", "optimizer", "stragglers",
             "launch_gaps", *added, *(x for x in present if x not in GROUPS)]  # fmt: skip
    mean = np.stack([means.get(name, ideal.get(name, 0.0) + 0.0 * ends) / ends for name in order])
    found = np.stack([shares.get(name, 0.0 * variance / variance) for name in order])
    errors = _jackknife_error(mean[:, 1:]), _jackknife_error(found[:, 1:])
    return TimeLoss(order, mean[:, 0], errors[0], found[:, 0], errors[1])


def _covariance(part: Array, whole: Array) -> float:
    """Covariance of two parts of the same replicates; NaN where these are all alike."""
    if not np.ptp(whole):
        return float("nan")
    return float(((part - part.mean()) * (whole - whole.mean())).mean())


def _jackknife_error(without: Array) -> Array:
    """Find standard errors of figures [figure] from their values without each cluster."""
    n = without.shape[1]
    if n == 0:
        return np.full(len(without), np.nan)
    return np.asarray(np.sqrt((n - 1.0) * without.var(axis=1)))


class _Ideal(NamedTuple):
    """A step without communication and without noise [s]."""

    whole: float
    optimizer: float  # which stages begin together: where it takes longest
    busy: Array  # [stage] the other work of a rank
    idle: Array  # [stage] waiting for the host alone
    pipelined: bool


def _ideal_job(step: Prepared, free: Program, run: Run) -> _Ideal:
    assert step.workload is not None
    ideal = ideal_program(free)
    times, _, _, tracked = run(ideal, range(1), track=True)
    whole = float(times[0, 0])
    optimizer = max((op.duration for op in step.workload.optimizer), default=0.0)
    busy = tracked[0, :, 0].astype(np.float64) / (ideal.graph.n_replicas * ideal.n_members)
    if busy.size == 1:  # there is nothing to wait for; the engine counts in 32 bits
        busy = np.array([whole - optimizer])
    idle = np.array([
        step.job.parallelism.microbatches * sum(k.duration for chunk in row for k in chunk.gaps)
        for row in step.workload.chunks
    ])  # fmt: skip
    return _Ideal(whole, optimizer, busy - idle, idle, busy.size > 1)


def _ideal_trace(model: TraceModel) -> _Ideal:
    whole, devices = ideal_device_times(silent_model(model))
    busy, optimizer, idle = (np.array(x) for x in zip(*(d[:3] for d in devices), strict=True))
    if busy.size == 1:
        idle = whole - busy
    pipelined = model.p2p != "none" or "pp" in map(group_of, map(kernel_class, model.nodes))
    return _Ideal(whole, float(optimizer.max()), busy - optimizer, idle, pipelined)


def _split_ideal(ideal: _Ideal) -> dict[str, float]:
    """Split an ideal step into work and idle time [s].

    Compute is the mean over stages of a rank's work, the imbalance what the busiest stage has
    more, the launch gaps those of that stage, the bubble what remains. Without a pipeline that is
    ranks' waiting for each other: imbalance too.
    """
    work, most = float(ideal.busy.mean()), int(ideal.busy.argmax())
    rest = ideal.whole - ideal.optimizer - float(ideal.busy[most] + ideal.idle[most])
    bubble = rest if ideal.pipelined else 0.0
    return {
        "compute": work, "bubble": bubble,
        "stage_imbalance": float(ideal.busy[most]) - work + (rest - bubble),
        "optimizer": ideal.optimizer, "launch_gaps": float(ideal.idle[most]),
    }  # fmt: skip
