"""Stalls: rare, long stops of a rank, a node or the job."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.cluster.nodemap import Placement
from prism.common.errors import PrismError
from prism.distributions.distribution import lognormal
from prism.simulation.effects.effect import Effect, HeldTables, Pick
from prism.simulation.program import Program, Tables
from prism.workload.opgraph import StepGraph, nominal_duration


class StallRates(NamedTuple):
    """How often what stops, and for how long; part of the mean step unless they add to it."""

    entity: str = "rank"
    rate_per_hour: float = 0.0  # per entity
    duration_s: float = 0.0
    duration_cv: float = 0.0
    adds: bool = False  # as those measured apart do


def resolve(pick: Pick) -> StallRates:
    """Return what the job or its library says; a calibrated one counts those of the whole job."""
    block = pick.effects.stall
    entity = "rank" if block is None or block.entity is None else block.entity
    rate, adds = pick.value("stall", "rate_per_hour"), False
    if block is None or (block.entity is None and block.rate_per_hour is None):
        of_job = pick.value("stall", "job_rate_per_hour")
        of_job += pick.job.n_nodes * pick.value("stall", "node_rate_per_hour")
        if of_job > 0.0:
            entity, rate, adds = "job", of_job, True
    duration, cv = pick.value("stall", "duration_s"), pick.value("stall", "duration_cv")
    return StallRates(entity, rate, duration, cv, adds)


def lay(
    stall: StallRates, placement: Placement, graph: StepGraph, tables: Tables
) -> tuple[engine.Stalls, NDArray[np.float64]]:
    """Lay stalls of a step, and the multiplier of compute between them, per op type.

    A group stalls at the rate of its entities over its own nominal compute time; a job over the
    whole step. Work between stalls is faster by what stalls take, so that the mean stays 1, unless
    they add to it.
    """
    quiet, job = np.ones(len(graph.op_types)), placement.job
    rate, length = stall.rate_per_hour / 3600.0, stall.duration_s
    nominal = np.array([nominal_duration(t) for t in graph.op_types])
    ops, shares, probability = [], [], np.zeros(graph.n_stages)
    entities = _entities(placement, stall.entity)
    busy = busy_stage(graph)
    for s in range(graph.n_stages):
        hit = np.flatnonzero((busy == s) & (nominal[graph.op_type] > 0.0))
        exposed = nominal[graph.op_type[hit]]
        # members of a group work at the same time: one of them stands for all
        alone = np.array([graph.op_types[t].member <= 0 for t in graph.op_type[hit]], bool)
        busy_s = float(exposed[alone].sum())
        ops.append(hit)
        shares.append(np.cumsum(exposed) / max(exposed.sum(), 1e-30))
        if stall.entity == "job":
            continue
        probability[s] = -np.expm1(-rate * entities * busy_s)
        if busy_s > 0.0:
            here = [t.stage == s and t.collective is None for t in graph.op_types]
            quiet[here] = 1.0 - probability[s] / entities * length / busy_s
    job_quiet = 1.0
    if stall.entity == "job":
        probability[:] = -np.expm1(-rate * graph.nominal_s)
        if not stall.adds:
            job_quiet = 1.0 - probability[0] * length / graph.nominal_s
    if min(job_quiet, float(quiet.min())) <= 0.0:
        raise PrismError(
            f"{job.source}: variability.effects.stall: {stall.rate_per_hour:g} per hour of "
            f"{length:g} s leave no time to work; lower rate_per_hour or duration_s"
        )
    entity = engine.JOB_STALL if stall.entity == "job" else engine.GROUP_STALL
    ptr = np.concatenate([[0], np.cumsum([len(o) for o in ops])])
    return engine.Stalls(
        entity if rate * length > 0.0 else engine.NO_STALL, probability, job_quiet, length,
        tables.add(lognormal(stall.duration_cv)), ptr.astype(np.int32),
        np.concatenate(ops).astype(np.int32), np.concatenate(shares),
    ), quiet  # fmt: skip


def busy_stage(graph: StepGraph) -> NDArray[np.int32]:
    """Stage that computes during each op, -1 for joins, transfers and collectives over replicas."""
    computes = np.array([*(t.collective is None for t in graph.op_types), False])[graph.op_type]
    return np.where(computes, graph.stage, -1).astype(np.int32)


class StallEffect(Effect):
    """Rare stops."""

    name = "stall"
    streams = (engine.STALL,)
    term = "stalls"

    def acts(self, program: Program) -> bool:
        """Tell whether anything ever stalls."""
        return program.stalls.entity != engine.NO_STALL and program.stalls.duration > 0.0

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Leave stalls out, whose median is none; the work between them stays as fast as it is."""
        return replace(program, stalls=program.stalls._replace(duration=0.0))


def _entities(placement: Placement, entity: str) -> float:
    """Ranks or nodes of one (replica, stage) group, in the mean."""
    ranks = placement.ranks()
    if entity == "rank":
        return float(ranks.shape[2])
    node = np.sort(ranks // placement.gpus_per_node, axis=2)
    return float(1.0 + np.count_nonzero(np.diff(node, axis=2), axis=2).mean())
