"""The run model of a job: its simulated steps, and what its file says comes between them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from prism.common.errors import PrismError
from prism.engine import LANES
from prism.jobs.job import Job
from prism.jobs.jobspec.run import REPAIR_S, FailuresBlock
from prism.simulation.draws import congested_leaves, stalls_in
from prism.simulation.prepare import Prepared
from prism.simulation.runs.parts import (
    Array,
    Cause,
    Checkpoints,
    Drift,
    Episodes,
    Evaluations,
    Interruptions,
    RunModel,
)
from prism.simulation.runs.rates import stationary
from prism.simulation.runs.states import (
    Simulator,
    find_congestion,
    find_slowdowns,
    find_stalls,
)
from prism.simulation.runs.time_to_train import run_model, step_statistics
from prism.simulation.variability import Variability
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


def build_run_model(step: Prepared, dataset: "xr.Dataset", seed: int, threads: int) -> RunModel:
    """Return what a run of this job is made of.

    Parameters
    ----------
    step : Prepared
        As `prepare` gives it.
    dataset : xarray.Dataset
        The simulated steps, of `prism.simulate` under the same seed.

    Raises
    ------
    PrismError
        Parts of the run do not fit the length of a step.
    """
    job, effects, ratio = step.job, step.effects, step.period_ratio
    # a run is made of what lies between steps
    times, shared = ratio * np.asarray(dataset.step_time), np.asarray(dataset.step_effect)
    cluster, ideal = np.asarray(dataset.cluster_idx), ratio * float(dataset.ideal_step_time)
    slow = job.variability.effects.fail_slow
    full, keep = effects.dependence == "full", np.ones(times.size, bool)
    congestion, stalls, sim = None, None, None
    lasting = full and effects.regime.duration_s > 2.0 * ideal and effects.regime.factor > 1.0
    if (lasting and effects.regime.probability > 0.0) or slow is not None or _stalls(effects):
        sim = Simulator(step, seed, threads)
        blocks = range(-(-times.size // LANES))
        congestion = find_congestion(sim) if lasting else None
        if congestion is not None:
            count = congested_leaves(sim.program, blocks, seed).reshape(-1)[: times.size]
            known = np.arange(congestion.ratio.size)
            shared = shared * np.interp(count, known, congestion.ratio)
        stalls = find_stalls(sim, float(np.median(times)))
        if stalls is not None:
            keep = stalls_in(sim.program, blocks, seed)[0].reshape(-1)[: times.size] == 0
    drift_cv = float(effects.step.std) if full else 0.0
    statistics = step_statistics(
        times, shared, cluster, drift_cv, effects.correlation_time_s, use=keep
    )
    model = run_model(statistics, ideal)
    if congestion is not None:
        model = replace(
            model, mean=model.mean * congestion.ratio, std=model.std * congestion.ratio,
            regime=congestion.regime, residuals=np.empty(0),
        )  # fmt: skip
    model = replace(
        model, stalls=stalls, n_nodes=job.n_nodes, drift=_drift(job, model.drift, full),
        run_cv=effects.run_cv, model_error=effects.model_error,
    )  # fmt: skip
    if sim is not None and slow is not None:
        model = replace(model, episodes=(_episodes(job, sim),))
    return _interrupted(job, model)


def _stalls(effects: Variability) -> bool:
    return effects.stall.rate_per_hour * effects.stall.duration_s > 0.0


def _drift(job: Job, drift: Drift, full: bool) -> Drift:
    """Add the daily wave that the job sets."""
    step = job.variability.effects.step
    if step is None or not step.diurnal_cv or not full:
        return drift
    peak = PEAK_H if step.diurnal_peak_h is None else step.diurnal_peak_h
    return replace(drift, diurnal_cv=step.diurnal_cv, diurnal_peak_s=3600.0 * peak)


def _episodes(job: Job, sim: Simulator) -> Episodes:
    """Return the fail-slow episodes that the job sets."""
    slow = job.variability.effects.fail_slow
    assert slow is not None and slow.rate_per_1000_node_days is not None
    factor = SLOW_FACTOR[slow.kind] if slow.factor is None else slow.factor
    return Episodes(
        rate_per_node_hour=slow.rate_per_1000_node_days / 1000.0 / 24.0,
        n_nodes=job.n_nodes,
        mean_s=SLOW_S[slow.kind] if slow.duration is None else slow.duration,
        cv=slow.duration_cv,
        slowdowns=find_slowdowns(sim, slow.kind, factor),
        detection_s=np.inf if slow.detection is None else slow.detection,
        replaced=slow.replace,
    )


def _interrupted(job: Job, model: RunModel) -> RunModel:
    """Add checkpoints, failures and evaluations."""
    run, step_s = job.run, mean_step(model)
    evaluations = interruptions = None
    if run.evaluation is not None:
        evaluations = Evaluations(run.evaluation.interval_steps, run.evaluation.duration)
    if run.failures is not None:
        interruptions = _failures(run.failures, job.n_nodes)
    return replace(
        model, evaluations=evaluations, interruptions=interruptions,
        checkpoints=_checkpoints(job, step_s),
    )  # fmt: skip


def mean_step(model: RunModel) -> float:
    """Mean seconds from one step to the next, with what stalls it and congestion."""
    share = np.ones(1) if model.regime is None else stationary(model.regime.rates)
    seconds = float((model.mean @ share).mean())
    if model.stalls is not None:
        seconds *= 1.0 + model.stalls.rate_per_s * float(model.stalls.lengths.mean())
    return seconds


def _checkpoints(job: Job, step_s: float) -> Checkpoints | None:
    c = job.run.checkpoint
    if c is None:
        return None
    write_s = c.write_s
    if write_s is None:
        size = BYTES_PER_PARAMETER * count_parameters(job.model)
        write_s = size / (STORAGE_BYTES_PER_GPU_S * job.world_size)
    steps = c.interval_steps or max(1, round((c.interval or 0.0) / step_s))
    if write_s >= steps * step_s and (c.mode == "async" or c.interval is not None):
        raise PrismError(
            f"{job.source}: run.checkpoint: a checkpoint takes {write_s:.4g} s to write, but one "
            f"begins every {steps * step_s:.4g} s ({steps} steps); make the interval longer"
        )
    return Checkpoints(steps, write_s, c.mode == "blocking")


def _failures(f: FailuresBlock, n_nodes: int) -> Interruptions:
    causes = tuple(
        Cause(
            name, cause.share,
            f.detection if cause.detection is None else cause.detection,
            f.restart if cause.restart is None else cause.restart, cause.replace,
        )
        for name, cause in f.causes.items()
    )  # fmt: skip
    repair_s = REPAIR_S if f.repair is None else f.repair
    return Interruptions(
        f.per_1000_node_days, n_nodes, f.detection, f.restart, f.spares, repair_s, causes
    )


def marks_of(n_steps: int, n_marks: int = 100) -> Array:
    """Step counts at which progress is recorded, from 0 to all."""
    return np.unique(np.round(np.linspace(0.0, n_steps, n_marks + 1)))
