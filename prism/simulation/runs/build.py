"""The run model of a job: its simulated steps, and what its file says comes between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.engine import LANES
from prism.jobs.job import Job
from prism.jobs.jobspec.effects import FailSlowEffectBlock
from prism.jobs.jobspec.run import (
    CHECKPOINT_S,
    FAILURES_PER_GPU_DAY,
    REPAIR_S,
    RESTART_S,
    FailuresBlock,
)
from prism.simulation.draws import congested_leaves, stalls_in
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import Prepared
from prism.simulation.runs.parts import (
    HOUR_S,
    Array,
    Cause,
    Checkpoints,
    Drift,
    Episodes,
    Evaluations,
    Index,
    Interruptions,
    RunModel,
    Shrink,
)
from prism.simulation.runs.rates import step_shares
from prism.simulation.runs.states import (
    Simulator,
    find_congestion,
    find_felt,
    find_slowdowns,
    find_stalls,
)
from prism.workload.build import count_parameters

if TYPE_CHECKING:
    import xarray as xr

# Weights in 2 bytes, their master copy and Adam's two moments in 4 each (arXiv:1910.02054), at
# 2 TB/s of storage for 16,384 GPUs (arXiv:2407.21783, section 3.3.1).
BYTES_PER_PARAMETER = 14.0
STORAGE_BYTES_PER_GPU_S = 2e12 / 16_384
SLOW_FACTOR = {"compute": 1.2, "network": 3.0}  # a hot node; the lower end of 3-10x congestion
SLOW_S = {"compute": 600.0, "network": 1440.0}  # means of Greyhound (ATC'25)
PEAK_H = 15.0  # assumption: slowest when the day is hottest
# Terms of a run in which nothing is learnt for good.
START_UP = "start_up"
PAUSES = (
    START_UP,
    "stalls",
    "evaluations",
    "pauses",
    "checkpoints",
    "lost_work",
    "restarts",
    "spares",
)


def build_run_model(step: Prepared, dataset: "xr.Dataset", context: RunContext) -> RunModel:
    """Return what a run of this job is made of.

    Parameters
    ----------
    dataset : xarray.Dataset
        The simulated steps, of `prism.simulate` under the same seed.

    Raises
    ------
    PrismError
        Parts of the run do not fit the length of a step.
    """
    job, effects = step.job, step.effects
    sim, seed = Simulator(step, context.quiet), context.seed
    felt = find_felt(sim)
    # a run is made of what lies between steps
    times, shared = np.asarray(dataset.step_time), np.asarray(dataset.step_effect) ** felt
    ideal = float(dataset.ideal_step_time)
    full, regime, stall = effects.dependence == "full", effects.regime, effects.stall
    slow, keep = job.variability.effects.fail_slow, np.ones(times.size, bool)
    congestion = stalls = episodes = None
    lasting = full and regime.duration_s > 2.0 * ideal and regime.acts
    stalling = stall.rate_per_hour * stall.duration_s > 0.0
    if lasting or slow is not None or stalling:
        blocks = range(-(-times.size // LANES))
        congestion = find_congestion(sim) if lasting else None
        if congestion is not None:
            count = congested_leaves(sim.program, blocks, seed).reshape(-1)[: times.size]
            known = np.arange(congestion.ratio.size)
            shared = shared * np.interp(count, known, congestion.ratio)
        stalls = find_stalls(sim, float(np.median(times)))
        if stalls is not None:
            keep = stalls_in(sim.program, blocks, seed)[0].reshape(-1)[: times.size] == 0
        if slow is not None:
            episodes = _episodes(slow, sim)
    drift = Drift(
        felt * float(effects.step.distribution.std) if full else 0.0,
        effects.step.correlation_time_s,
    )
    wave = job.variability.effects.step
    if wave is not None and wave.diurnal_cv and full:
        peak = PEAK_H if wave.diurnal_peak_h is None else wave.diurnal_peak_h
        drift = replace(drift, diurnal_cv=felt * wave.diurnal_cv, diurnal_peak_s=HOUR_S * peak)
    model = model_of_steps(
        times, shared, np.asarray(dataset.cluster_idx), drift, ideal_s=ideal, use=keep
    )
    if congestion is not None:
        model = replace(
            model, mean=model.mean * congestion.ratio, std=model.std * congestion.ratio,
            regime=congestion.rates,
        )  # fmt: skip
    fail, e = job.failures, job.run.evaluation
    model = replace(
        model, stalls=stalls, n_nodes=job.n_nodes, run_cv=felt * effects.run.cv, episodes=episodes,
        model_error=felt * effects.run.model_error,
        interruptions=None if fail is None else _failures(fail, job),
        evaluations=None if e is None else Evaluations(e.interval_steps, e.duration),
    )  # fmt: skip
    return replace(model, checkpoints=_checkpoints(job, mean_step(model)))


def model_of_steps(
    step_time: Array,
    effect: Array,
    cluster: Index,
    drift: Drift,
    *,
    ideal_s: float | None = None,
    use: NDArray[np.bool_] | None = None,
) -> RunModel:
    """Estimate each cluster's steps from simulated ones, for runs of nothing but them.

    Parameters
    ----------
    step_time, effect : float64 [replicate]
        Step times [s] and the step effect in them [1], which is divided out.
    cluster : int64 [replicate]
    drift : Drift
        That of the step effect.
    use : bool [replicate], optional
        Steps to use, where stalls are taken out.

    Notes
    -----
    Means are shrunk by sqrt(max(0, Vb - Vw/n) / Vb), so that their spread is the clusters' own and
    not that of n simulated steps. An incomplete last cluster is left out where there are others.
    """
    complete = cluster < max(1, step_time.size // LANES)
    if use is not None and (complete & use).any():
        complete = complete & use
    steady, cluster = (step_time / effect)[complete], cluster[complete]
    labels, index, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    means = np.bincount(index, steady) / counts
    squares = np.bincount(index, (steady - means[index]) ** 2)
    dof = max(1, steady.size - labels.size)
    within = float(squares.sum() / dof)
    grand = float(steady.mean())
    if labels.size > 1:
        noise = within * float((1.0 / counts).mean())
        between = float(means.var(ddof=1))
        keep = math.sqrt(max(0.0, between - noise) / between) if between > 0.0 else 0.0
        means = grand + keep * (means - grand)
    own = squares / np.maximum(1, counts - 1)
    weight = counts / (counts + 32.0)  # half of the trust goes to the pool at 32 steps
    std = np.sqrt(np.where(counts > 1, weight * own + (1.0 - weight) * within, within))
    return RunModel(
        means[:, None], std[:, None], ideal_s, drift=drift, residuals=steady - means[index]
    )


def mean_step(model: RunModel) -> float:
    """Mean seconds from one step to the next, with what stalls it and congestion."""
    seconds = float((model.mean @ step_shares(model)).mean())
    if model.stalls is not None:
        seconds *= 1.0 + float(np.mean(model.stalls.per_second))
    return seconds


def marks_of(n_steps: int) -> Array:
    """Step counts at which progress is recorded, from 0 to all."""
    return np.unique(np.round(np.linspace(0.0, n_steps, 101)))


def _episodes(slow: FailSlowEffectBlock, sim: Simulator) -> Episodes:
    assert slow.rate_per_1000_node_days is not None
    factor = SLOW_FACTOR[slow.kind] if slow.factor is None else slow.factor
    return Episodes(
        rate_per_node_hour=slow.rate_per_1000_node_days / 1000.0 / 24.0,
        n_nodes=sim.step.job.n_nodes,
        mean_s=SLOW_S[slow.kind] if slow.duration is None else slow.duration,
        cv=slow.duration_cv,
        slowdowns=find_slowdowns(sim, slow.kind, factor),
        detection_s=np.inf if slow.detection is None else slow.detection,
        replaced=slow.replace,
    )


def _checkpoints(job: Job, step_s: float) -> Checkpoints | None:
    c = job.checkpoint
    if c is None:
        return None
    write_s = c.write_s
    if write_s is None:
        size = 0.0
        if job.model.durations is None:
            size = BYTES_PER_PARAMETER * count_parameters(job.model)
        write_s = size / (STORAGE_BYTES_PER_GPU_S * job.world_size)
    steps = c.interval_steps or max(1, round((c.interval or 0.0) / step_s))
    if job.run.checkpoint is None:
        steps = max(steps, math.floor(write_s / step_s) + 1)  # as often as storage takes at most
    if write_s >= steps * step_s and (c.mode == "async" or c.interval is not None):
        raise PrismError(
            f"{job.source}: run.checkpoint: a checkpoint takes {write_s:.4g} s to write, but one "
            f"begins every {steps * step_s:.4g} s ({format_count(steps, 'step')}); make the "
            "interval longer"
        )
    return Checkpoints(steps, write_s, c.mode == "blocking")


def with_failures(model: RunModel, n_gpus: int) -> RunModel:
    """Give runs the failures of a number of GPUs, in nodes of 8, at a published rate.

    Checkpoints are written in the background; what one takes is not known.
    """
    n_nodes = max(1, round(n_gpus / 8))
    rate = 1000.0 * FAILURES_PER_GPU_DAY * n_gpus / n_nodes
    steps = max(1, round(CHECKPOINT_S / mean_step(model)))
    return replace(
        model, n_nodes=n_nodes, interruptions=Interruptions(rate, n_nodes, 0.0, RESTART_S),
        checkpoints=Checkpoints(steps, 0.0, blocking=False),
    )  # fmt: skip


def describe_failures(model: RunModel, source: str, assumed: Sequence[str] = ()) -> dict[str, Any]:
    """Say what stops a run, where its rate is from, what it goes back to, and what is assumed."""
    fail, c = model.interruptions, model.checkpoints
    if fail is None or fail.rate_per_s == 0.0:
        return {"per_1000_node_days": 0.0, "source": source}
    out = {
        "per_1000_node_days": fail.per_1000_node_days, "nodes": fail.n_nodes, "source": source,
        "down": fail.mean_down_s, "assumed": " ".join(assumed),
    }  # fmt: skip
    if c is not None:
        out |= {"checkpoint_interval": c.interval_steps * mean_step(model), "write": c.write_s}
    return out


def effective_share(terms: Mapping[str, Array], total: Array) -> Array:
    """Share of the time of runs in which something is learnt for good [run]."""
    return np.asarray(np.sum([terms[x] for x in terms if x not in PAUSES], axis=0) / total)


def _failures(f: FailuresBlock, job: Job) -> Interruptions:
    repair_s, p = REPAIR_S if f.repair is None else f.repair, job.parallelism
    shrink = Shrink(p.dp, p.replica_gpus / job.cluster.gpus_per_node)
    causes = tuple(
        Cause(
            name, cause.share,
            f.detection if cause.detection is None else cause.detection,
            f.restart if cause.restart is None else cause.restart,
            cause.nodes if cause.replace else 0,
            repair_s if cause.repair is None else cause.repair,
        )
        for name, cause in f.causes.items()
    )  # fmt: skip
    assert f.per_1000_node_days is not None  # filled by `Job.failures`
    return Interruptions(
        f.per_1000_node_days, job.n_nodes, f.detection, f.restart, f.spares, repair_s, causes,
        shrink if f.policy == "shrink" else None, f.restart_success,
    )  # fmt: skip
