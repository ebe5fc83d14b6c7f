"""What else could be done with slow nodes: leave them out, replace them, or give them less work."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prism.analyses.placements.problem import Problem, slowness, worst_factor
from prism.analyses.placements.search import find_placements
from prism.cluster.groups import count_replicas, shard_size
from prism.cluster.nodemap import Placement, slowdown_keys
from prism.common.arrays import Array, Index
from prism.common.errors import PrismError, option
from prism.common.text import format_count, format_share
from prism.jobs.dimensions import REPLICA
from prism.jobs.hostfiles import as_ranges
from prism.jobs.job import Job, job_from_dict, layer_split
from prism.simulation.othernodes import relocate
from prism.simulation.prepare import Prepared, prepare
from prism.simulation.program import Program
from prism.workload.memory import LEAST_P_FITS, memory_figures
from prism.workload.opgraph import nominal_duration


@dataclass(frozen=True)
class Alternative:
    """A program to run beside the placements, or why there is none."""

    name: str
    label: str
    program: Program | None = None
    work: float = 1.0  # tokens of a step over those of the job's
    impossible: str = ""


def list_alternatives(problem: Problem, same_stage: Index, seed: int) -> list[Alternative]:
    """List what could be done instead of moving nodes, or beside it.

    Given is the best placement with the slow nodes at as few stages as may be.
    """
    makers: dict[str, Callable[[], Alternative]] = {
        "drop_nodes": lambda: drop_nodes(problem, seed),
        "spares": lambda: use_spares(problem),
        "fewer_layers": lambda: fewer_layers(problem, same_stage, seed),
    }
    if problem.offered:  # as many slow GPUs as there are positions, in every node
        makers = {"fewer_layers": makers["fewer_layers"]}
    if problem.slow.isdisjoint(problem.hosts.tolist()):
        text = "no slow node takes part in the job: all are spares"
        return [Alternative(n, n.replace("_", " "), impossible=text) for n in makers]
    out = []
    for name, make in makers.items():
        try:
            out.append(make())
        except PrismError as error:  # the job's own rules, in its own words
            line = error.args[0]
            why = line.partition(": ")[2] or line
            out.append(Alternative(name, name.replace("_", " "), impossible=why))
    return out


def changed_job(job: Job, **blocks: Mapping[str, Any]) -> Job:
    """Return a job with some keys of some blocks changed, checked anew."""
    values = job.model_dump(mode="json", exclude={"name", "source"})
    for block, keys in blocks.items():
        values[block] = {**values[block], **keys}
    return job_from_dict(values, job.name)


# ------------------------------------------------------------------------------- leaving nodes out
def drop_nodes(problem: Problem, seed: int) -> Alternative:
    """Leave the slow nodes out: as many replicas as the others hold, a smaller batch."""
    job, label = problem.step.job, "without the slow nodes"
    if problem.step.workload is None:
        return _drop_trace_replicas(problem)
    kept, reason = _replicas_without(problem)
    if reason:
        return Alternative("drop_nodes", label, impossible=reason)
    n = count_replicas(job)
    fewer, kept = _without(problem, kept)
    step = prepare(fewer, seed)
    lost = (n - kept) * shard_size(job)
    label += f", {format_count(lost, 'replica')} fewer, smaller batch"
    _check_memory(problem, step.job)
    return Alternative("drop_nodes", label, step.program, kept / n)


def _check_memory(problem: Problem, changed: Job) -> None:
    """Refuse a job that is not likely to fit its GPUs' memory any more."""
    before, after = (memory_figures(job, every=False) for job in (problem.step.job, changed))
    if before and after and after["p_fits"] < LEAST_P_FITS <= before["p_fits"]:
        raise PrismError(
            f"memory: it needs {after['gib']:.0f} of {after['limit_gib']:.1f} GiB, P(fits) "
            f"{format_share(after['p_fits'])}"
        )


def _replicas_without(problem: Problem) -> tuple[int, str]:
    """Replicas (with hsdp shard groups) that the healthy nodes hold; and why not, if not."""
    job, p = problem.step.job, problem.step.job.parallelism
    healthy = job.n_nodes - len(problem.slow)
    each, n = p.replica_gpus * shard_size(job), count_replicas(job)
    kept = min(n, healthy * job.cluster.gpus_per_node // each)
    if kept < 1:
        why = (
            f"the {format_count(healthy, 'other node')} do not hold one replica of "
            f"{format_count(each, 'GPU')}; lower {', '.join(REPLICA[:-1])} or {REPLICA[-1]}"
        )
        return 0, why
    if kept == n:
        return 0, "there are spare nodes enough for all replicas; see spares"
    return kept, ""


def _without(problem: Problem, n: int) -> tuple[Job, int]:
    """Return the job with n replicas on the healthy nodes, or as many as keep its segments."""
    try:
        return _with_replicas(problem, n), n
    except PrismError:
        if not problem.segment or n == 1:
            raise
    return _without(problem, n - 1)


def _with_replicas(problem: Problem, n: int) -> Job:
    """Return the job with n replicas (with hsdp shard groups) on the healthy nodes.

    The replicas with most slow nodes go; their healthy nodes take the places of slow ones.
    """
    job, before = problem.step.job, count_replicas(problem.step.job)
    keys: dict[str, Any] = {"dp": n * shard_size(job)}
    if job.parallelism.data_parallel == "hsdp":
        keys["shard_size"] = shard_size(job)  # its default may follow dp
    n_slots = math.ceil(job.world_size // before * n / job.cluster.gpus_per_node)
    cluster: dict[str, Any] = {"node_slowdowns": {}, "hosts": None, "nodes": n_slots}
    small = changed_job(job, parallelism=keys, cluster=cluster)
    layout, taken = problem.layout, set(problem.slow)
    slow = np.zeros(before, np.int64)
    for slot in np.flatnonzero(np.isin(problem.hosts, list(taken))).tolist():
        slow[list({r for r, _ in layout.pairs[slot]})] += 1
    kept = np.sort(np.argsort(-slow, kind="stable")[before - n :])
    old: dict[tuple[int, int], list[int]] = {}
    for slot, pairs in enumerate(layout.pairs):
        for pair in pairs:
            old.setdefault(pair, []).append(int(problem.hosts[slot]))
    hosts = np.full(n_slots, -1)
    for slot, held in enumerate(Placement(small).slot_groups()):
        replica, stage = held[0]
        node = next((x for x in old[int(kept[replica]), stage] if x not in taken), None)
        if node is not None:
            hosts[slot] = node
            taken.add(node)
    others = dict.fromkeys([*problem.hosts.tolist(), *range(job.n_nodes)])
    pool = (node for node in others if node not in taken)
    for slot in np.flatnonzero(hosts < 0).tolist():
        hosts[slot] = next(pool)
    others_slow = {n: x for n, x in problem.slowdowns.items() if n not in problem.slow}
    problem.check_whole(hosts)
    cluster |= {"nodes": job.n_nodes, "hosts": hosts.tolist()}
    cluster["node_slowdowns"] = slowdown_keys(others_slow)
    return changed_job(job, parallelism=keys, cluster=cluster)


def _drop_trace_replicas(problem: Problem) -> Alternative:
    """Leave out the replicas of a fitted trace that slow workers are in; the others as measured."""
    label = "without the slow workers"
    program = problem.program(problem.hosts)
    n = program.graph.n_replicas
    slow = np.flatnonzero(np.isin(problem.hosts, list(problem.slow))).tolist()
    keep = np.setdiff1d(np.arange(n), [r for slot in slow for r, _ in problem.layout.pairs[slot]])
    if keep.size == 0:
        return Alternative("drop_nodes", label, impossible="every replica holds a slow worker")
    low, bank = program.low, program.bank
    rows = keep if low.fixed_mean.shape[0] > 1 else np.zeros(1, np.int64)
    bank_rows = keep if bank.table.shape[1] > 1 else np.zeros(1, np.int64)
    program = replace(
        program,
        graph=program.graph._replace(
            n_replicas=keep.size, n_state=keep.size if program.graph.n_state > 1 else 1
        ),
        low=low._replace(
            member=low.member[keep], fixed_mean=low.fixed_mean[rows], fixed_var=low.fixed_var[rows]
        ),
        bank=bank._replace(table=bank.table[:, bank_rows].copy()),
    )
    label += f", {format_count(n - keep.size, 'replica')} fewer, smaller batch"
    return Alternative("drop_nodes", label, program, keep.size / n)


# ------------------------------------------------------------------------------- less work for them
def fewer_layers(problem: Problem, hosts: Index, seed: int) -> Alternative:
    """Take a layer off the stage that slow nodes are at; the stage with least work takes it.

    Where GPUs are slow by their position, off every stage that such GPUs are at.
    """
    name, job, label = "fewer_layers", problem.step.job, "a layer fewer on the slow stage"
    if problem.step.workload is None:
        text = "a fitted trace has the graph that was measured; only its workers can be moved"
        return Alternative(name, label, impossible=text)
    if job.model.durations is not None:
        text = "the job gives durations of whole stages, and no layers to move"
        return Alternative(name, label, impossible=text)
    pp, split = job.parallelism.pp, np.array(layer_split(job))
    if pp == 1:
        return Alternative(name, label, impossible="there is one stage only")
    busy = _stage_seconds(problem.step)
    slow = [s for slot, node in enumerate(hosts.tolist()) if node in problem.slow
            for s in {stage for _, stage in problem.layout.pairs[slot]}]  # fmt: skip
    sources = sorted(set(slow), key=lambda s: (-slow.count(s), -s))
    targets = sorted((s for s in range(pp) if s not in slow), key=lambda s: busy[s])
    moves = list(zip(sources if problem.offered else sources[:1], targets, strict=False))
    if not moves:
        return Alternative(name, label, impossible="every stage has a slow node")
    chunks, of_stage = job.parallelism.virtual_stages(), range(job.parallelism.vpp)
    for pair in moves:
        giving, taking = (np.array([chunks.virtual(s, c) for c in of_stage]) for s in pair)
        giver, taker = giving[split[giving].argmax()], taking[split[taking].argmin()]
        if split[giver] < 1:
            return Alternative(name, label, impossible=f"stage {pair[0]} has no layers")
        split[giver], split[taker] = split[giver] - 1, split[taker] + 1
    step = prepare(changed_job(job, parallelism={"layer_split": split.tolist()}), seed)
    _check_memory(problem, step.job)
    source, target = (as_ranges(sorted(stages), ", ") for stages in zip(*moves, strict=True))
    label = f"slow nodes at stage {source}, a layer of it moved to stage {target}"
    if len(moves) > 1:
        label = f"slow nodes at stages {source}, a layer of each moved to stages {target}"
    return Alternative(name, label, relocate(step, hosts, problem.slowdowns))


def _stage_seconds(step: Prepared) -> Array:
    """Nominal seconds of every stage's own ops [stage]."""
    graph = step.graph
    seconds = np.array([nominal_duration(t) if t.collective is None else 0.0
                        for t in graph.op_types])  # fmt: skip
    ops = np.flatnonzero(graph.op_type >= 0)
    weights = seconds[graph.op_type[ops]]
    return np.asarray(np.bincount(graph.stage[ops], weights, graph.n_stages), np.float64)


# --------------------------------------------------------------------------------------- replacing
def use_spares(problem: Problem) -> Alternative:
    """Put spare nodes in the places of the slowest; the rest go where they cost least."""
    name, used = "spares", set(problem.hosts.tolist())
    factor = {n: worst_factor(slowness(problem, n))
              for n in range(Placement(problem.step.job).n_nodes)}  # fmt: skip
    free = sorted(set(factor) - used, key=lambda n: (factor[n], n))
    slow = sorted(problem.slow & used, key=lambda n: (-factor[n], n))
    pairs = []
    for n in slow:
        rack = problem.rack_nodes if problem.segment else Placement(problem.step.job).n_nodes
        near = (x for x in free if x // rack == n // rack)
        x = next(near, None)
        if x is not None and factor[x] < factor[n]:
            pairs.append((n, x))
            free.remove(x)
    if free and problem.segment and not pairs:
        return Alternative(
            name, "spare nodes in their places", impossible="no spare node in a slow node's rack"
        )
    if not pairs:
        text = f"no spare nodes; {option('spares')} N says what they would bring"
        return Alternative(name, "spare nodes in their places", impossible=text)
    slowest = [n for n, _ in pairs]
    hosts = problem.hosts.copy()
    for node, spare in pairs:
        hosts[hosts == node] = spare
    left = tuple(n for n in problem.placed if n in used and n not in slowest)
    if left:
        classes = {n: problem.classes[n] for n in left}
        rest = replace(problem, hosts=hosts, placed=left, classes=classes, _known={}, _whole={})
        hosts = rest.realise(find_placements(rest, 0).patterns[0])
    label = f"spare nodes in the places of {format_count(len(slowest), 'slow node')}"
    if len(slow) > len(slowest):
        label += ", the others best placed"
    return Alternative(name, label, problem.program(hosts))
