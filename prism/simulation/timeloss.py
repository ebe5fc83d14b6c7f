"""Where the time of a step goes: compute, exposed communication by group, bubble, waiting, jitter.

A waterfall over steps with the same draws: communication is made free group by group, then every
effect is set to 1; what is left is work and idle time of the stages. The parts add up to the step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.distributions.tables import sample_table
from prism.simulation.execution.tasks import Arrays
from prism.simulation.prepare import Prepared, silence, silent_model
from prism.simulation.program import Program, ideal_program
from prism.simulation.tracemodel.devicetime import ideal_device_times
from prism.simulation.tracemodel.model import TraceModel
from prism.simulation.variability import is_communication

Array = NDArray[np.float64]
Run = Callable[..., Arrays]

GROUPS = ("dp", "pp", "ep", "cp", "tp")
"""Groups of ranks in the order in which their communication is made free, the widest first."""


class TimeLoss(NamedTuple):
    """Parts of the step, as shares of its mean and of its variance; each adds up to 1."""

    names: list[str]
    mean: Array  # [part]
    variance: Array  # [part]; NaN where nothing varies
    variance_error: Array  # [part] its standard error by cluster; NaN for one cluster


def group_of(kernel_class: str) -> str:
    """Name the group of ranks over which a class communicates.

    Examples
    --------
    >>> [group_of(name) for name in ("p2p", "tp_all_gather", "dp_cp_all_reduce", "gemm_mlp")]
    ['pp', 'tp', 'dp', '']
    """
    if not is_communication(kernel_class):
        return ""
    if kernel_class == "p2p":
        return "pp"
    first = kernel_class.partition("_")[0]
    return first if first in GROUPS else "dp"  # all ranks: gradient norms


def freed_classes(classes: Sequence[str]) -> dict[str, list[str]]:
    """List the classes whose communication is free once a group's is, by group, the widest first.

    Examples
    --------
    >>> freed_classes(["gemm_mlp", "p2p", "tp_all_gather"])
    {'pp': ['p2p'], 'tp': ['p2p', 'tp_all_gather']}
    """
    freed: list[str] = []
    found = {}
    for group in GROUPS:
        if own := [name for name in classes if group_of(name) == group]:
            freed = freed + own
            found[group] = freed
    return found


def find_time_loss(
    step: Prepared,
    times: NDArray[np.float32],
    silent: Mapping[str, NDArray[np.float32]],
    seed: int,
    run: Run,
) -> TimeLoss:
    """Split the step into parts.

    Parameters
    ----------
    times : float32 [cluster, lane]
        Steps of the first clusters [s].
    silent : mapping of float32 [cluster, lane]
        By group, the same draws once the communication of `freed_classes` takes no time [s].
    run : callable
        Runs blocks of a program under the same seed: `prism.simulation.steps.run_blocks`.
    """
    whole = times.astype(np.float64)
    parts: dict[str, Array] = {}  # seconds of each replicate
    left, present = whole, list(silent)
    for group, rest in silent.items():
        parts[f"exposed_{group}"] = left - rest.astype(np.float64)
        left = rest.astype(np.float64)
    jitter, jitter_variance = _jitter(step.program)
    ideal = _split_ideal(*_ideal_times(step, seed, run))
    means = {name: float(part.mean()) for name, part in parts.items()} | ideal
    means |= {"stragglers": left.mean() - jitter - sum(ideal.values()), "step_jitter": jitter}
    kept = [np.arange(len(whole)) != k for k in range(-1, len(whole))]  # all, then without each
    variance = np.array([_covariance(whole[k], whole[k]) for k in kept])
    shares = {"step_jitter": jitter_variance / variance} | {
        name: np.array([_covariance(part[k], whole[k]) for k in kept]) / variance
        for name, part in (parts | {"stragglers": left}).items()
    }
    shares["stragglers"] -= shares["step_jitter"]
    order = ["compute", *(f"exposed_{group}" for group in reversed(present)), "bubble",
             "stage_imbalance", "stragglers", "launch_gaps", "step_jitter"]  # fmt: skip
    mean = np.array([means[name] for name in order]) / whole.mean()
    found = np.stack([shares.get(name, 0.0 * variance / variance) for name in order])
    return TimeLoss(order, mean, found[:, 0], _jackknife_error(found[:, 1:]))


def _covariance(part: Array, whole: Array) -> float:
    """Covariance of two parts of the same replicates; NaN where there are none or they are one."""
    if not whole.size or not np.ptp(whole):
        return float("nan")
    return float(((part - part.mean()) * (whole - whole.mean())).mean())


def _jackknife_error(without: Array) -> Array:
    """Find standard errors of figures [figure] from their values without each cluster."""
    n = without.shape[1]
    if n < 2:
        return np.full(len(without), np.nan)
    return np.asarray(np.sqrt((n - 1.0) * without.var(axis=1)))


def _jitter(program: Program) -> tuple[float, float]:
    """Mean [s] and variance [s^2] of the jitter of a step."""
    mean = program.jitter.mean_s
    if not mean:
        return 0.0, 0.0
    words = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(1 << 15)
    std = float(sample_table(program.tables[program.jitter.table], words).std())
    return mean, (mean * std) ** 2


def _ideal_times(step: Prepared, seed: int, run: Run) -> tuple[float, Array, Array]:
    """Time of a step without communication and without noise; busy time, launch gaps [stage] s."""
    if isinstance(step.source, TraceModel):
        _, _, gaps = ideal_device_times(step.source)  # what communication covers is no gap
        whole, busy, _ = ideal_device_times(silent_model(step.source))
        return whole, busy, np.minimum(gaps, whole - busy)
    ideal = ideal_program(silence(step, seed))
    times, _, _, busy = run(ideal, range(1), track=True)
    whole = float(times[0, 0])
    each = busy[0, :, 0].astype(np.float64) / (ideal.graph.n_replicas * ideal.n_members)
    return whole, np.minimum(each, whole), np.zeros(each.size)  # the engine's 32 bits


def _split_ideal(whole: float, busy: Array, gaps: Array) -> dict[str, float]:
    """Split an ideal step into work and idle time [s].

    Compute is the mean over stages of a rank's work, the imbalance what the busiest stage has
    more, the launch gaps those of that stage, the bubble what remains.
    """
    work, most = float(busy.mean()), int(busy.argmax())
    idle = whole - float(busy[most])
    return {
        "compute": work, "bubble": idle - float(gaps[most]),
        "stage_imbalance": float(busy[most]) - work, "launch_gaps": float(gaps[most]),
    }  # fmt: skip
