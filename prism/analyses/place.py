"""`prism place`: where slow nodes should go, what they cost, and what else could be done.

Placements of the slow nodes are looked at up to symmetry on a deterministic step, the promising
ones simulated side by side until one is left, and alternatives beside them.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prism.analyses.differences import QUANTILES, Sampler
from prism.analyses.placements.alternatives import changed_job
from prism.analyses.placements.answer import answer, make_case
from prism.analyses.placements.placing import Placing, make_placing
from prism.analyses.placements.problem import MOST_PLACED, make_problem
from prism.cluster.nodemap import KINDS, NodeSlowdown, Placement, slow_node, slowdown_keys
from prism.cluster.nodes.inventory import Inventory
from prism.cluster.power import position_slowdowns
from prism.common.arrays import Index
from prism.common.errors import PrismError, is_typed, option
from prism.common.text import format_count
from prism.jobs.job import Job, load_job
from prism.simulation.execution.context import Progress, make_context
from prism.simulation.prepare import prepare
from prism.simulation.results import provenance
from prism.simulation.steps import warm_up


def place(
    job: Job | str,
    *,
    slow_nodes: int | None = None,
    slowdown: float | None = None,
    kind: str = "compute",
    nodes: Mapping[int, NodeSlowdown] | None = None,
    hosts: Mapping[int, str] | None = None,
    spares: int = 0,
    objective: str = "p95",
    tolerance: float = 0.001,
    keep_segments: int | None = None,
    heat: bool = False,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Placing:
    """Find where slow nodes should go, and what else could be done with them.

    Parameters
    ----------
    job : Job or str
        A job, its file, the name of a shipped one, or a job over a fitted trace, whose measured
        workers are the nodes.
    slow_nodes : int, optional
        How many nodes are slow; they sit on nodes drawn from the seed.
    slowdown : float, optional
        Their factor on durations [1].
    kind : str
        What is slow: ``compute``, ``memory``, ``network`` or ``everything``.
    nodes : mapping of int to NodeSlowdown, optional
        An inventory by node instead, as `prism.read_inventory` reads one. Without either, the job's
        ``cluster.node_slowdowns``.
    hosts : mapping of int to str, optional
        Host names by node; those of the inventory where it has them.
    spares : int
        Spare nodes beside the job's.
    objective : str
        ``p50``, ``p95``, ``p99`` or ``mean`` of the step, or ``time_to_train``: the p95 of the run.
    tolerance : float
        Share of the objective that does not matter.
    keep_segments : int, optional
        Size of a segment: as many slots in a row, in rank order, stay on nodes of one rack (an
        NVLink domain, or as many nodes in a row where a domain is smaller). Nodes then move within
        their rack, or all of a segment's with those of another one.
    heat : bool
        GPUs are slow by their position in the node, as ``cluster.gpu_temperatures``
        or ``gpu_slowdowns`` says: which stages should get the cool ones. Parts of nodes that are
        alike then count as nodes, called NODE:FIRST-LAST by their GPUs.
    seed, threads, progress
        As in `prism.simulate`.

    Returns
    -------
    Placing
        Tables ``placements``, ``alternatives``, ``stages``, ``slow_nodes``, and ``hosts`` of the
        best placement, whose files for launchers `Placing.host_files` writes; ``slot_cost``
        [stage, dp_rank] in seconds. `prism.summary` gives the figures the command prints.

    Raises
    ------
    PrismError
        The job cannot be built, or a number or node is out of range.

    Examples
    --------
    >>> import prism
    >>> placed = prism.place("pipeline-8x32", slow_nodes=1, slowdown=1.2, seed=1)
    >>> placed.action
    'current'
    """
    begin = time.perf_counter()
    job = job if isinstance(job, Job) else load_job(job)
    context = make_context(seed, threads, progress)
    _check(job, objective, tolerance, spares, keep_segments)
    known = nodes if isinstance(nodes, Inventory) else Inventory({})
    names, notes = known.hosts | dict(hosts or {}), list(known.notes)
    per_node = job.cluster.gpus_per_node
    if heat:
        if nodes or spares or keep_segments or (slow_nodes, slowdown) != (None, None):
            raise PrismError(
                f"{option('heat')}: places the GPUs of the job's own nodes; leave out slow nodes, "
                "spares and segments"
            )
        job, names = part_job(job, names)
    inventory = _inventory(job, slow_nodes, slowdown, kind, nodes, context.seed, notes)
    built = _with_nodes(job, inventory, spares)
    offered = tuple(by_heat(built, per_node)) if heat else ()
    step = prepare(built, context.seed)
    problem = make_problem(step, inventory, context, keep_segments or 0, offered)
    if not problem.placed:
        raise PrismError(f"{built.source or built.name}: {_no_slow_node(problem.slowdowns)}")
    n, n_placed = len(problem.slow), len(problem.placed)
    if problem.slow.isdisjoint(problem.placed):
        notes.append(
            f"most nodes are slow, {n:,} of them; so the {n_placed} that are faster are placed"
        )
    elif n_placed == MOST_PLACED < n:
        notes.append(
            f"only the {MOST_PLACED} slowest of {format_count(n, 'slow node')} are placed one by "
            "one; the others "
            "stay where they are"
        )
    warm_up(problem.step.program, context)
    case = make_case(problem, objective, tolerance, Sampler(context))
    found = answer(case) | {"notes": notes}
    call: dict[str, Any] = {
        "objective": objective, "tolerance": tolerance, "keep_segments": keep_segments,
        "seed": context.seed,
    }  # fmt: skip
    if heat:
        call["heat"] = True
    if built is job:  # its slow nodes are not written into it
        call["nodes"] = {str(n): list(slow) for n, slow in inventory.items()} or None
    found["wall_seconds"] = time.perf_counter() - begin
    return make_placing(found, provenance(built, call), names)


# ------------------------------------------------------------------------------------- the question
def _check(
    job: Job, objective: str, tolerance: float, spares: int, keep_segments: int | None
) -> None:
    if objective not in QUANTILES:
        raise PrismError(f"objective {objective}: expected one of {', '.join(QUANTILES)}")
    if not 0.0 < tolerance < 1.0:
        raise PrismError(f"tolerance = {tolerance:g}, expected a share, such as 0.001 (0.1 %)")
    if spares < 0:
        raise PrismError(f"spares = {spares}, expected 0 or more nodes")
    if keep_segments is not None and keep_segments < 1:
        raise PrismError(f"{option('keep_segments')} {keep_segments}: expected 1 or more slots")
    if spares and job.variability.model is not None:
        raise PrismError("spares: a fitted trace knows its own workers only; leave spares out")
    if job.variability.dependence == "none":
        raise PrismError(
            f"{job.source}: variability.dependence: none leaves no nodes to tell apart; set full"
        )


def _inventory(
    job: Job, slow_nodes: int | None, slowdown: float | None, kind: str,
    nodes: Mapping[int, NodeSlowdown] | None, seed: int, notes: list[str],
) -> dict[int, NodeSlowdown]:  # fmt: skip
    """Slow nodes: given one by one, a number of them at random, or the job's own."""
    if nodes is not None and (slow_nodes is not None or slowdown is not None):
        raise PrismError("slow nodes are given twice: by number and one by one; leave one out")
    placement = Placement(job)
    if nodes is not None:
        known = {int(n): NodeSlowdown(*x) for n, x in nodes.items()}  # lists, where kept as JSON
        _check_nodes(known, placement.n_nodes)
        return known
    if slow_nodes is None and slowdown is None:
        return placement.slowdowns()
    if slow_nodes is None or slowdown is None:
        pair = (option("slowdown"), option("slow_nodes") + " 3")
        if slowdown is None:
            pair = (option("slow_nodes"), option("slowdown") + " 1.2")
        given, missing = pair
        raise PrismError(f"{given} needs its partner: add {missing}")
    if kind not in KINDS:
        raise PrismError(f"kind of slowness {kind!r}, expected one of {', '.join(KINDS)}")
    if not 1 <= slow_nodes <= placement.n_slots:
        raise PrismError(
            f"slow_nodes = {slow_nodes}, expected between 1 and the job's "
            f"{format_count(placement.n_slots, 'node')}"
        )
    slow = slow_node(slowdown, kind)
    rng = np.random.default_rng([seed, 6])
    way = "--at" if is_typed() else "nodes"
    chosen = np.sort(rng.choice(placement.slots, slow_nodes, replace=False))
    notes.append(
        f"which nodes are slow was not given: drawn at random from the seed, "
        f"{', '.join(map(str, chosen[:8]))}{' ...' if chosen.size > 8 else ''}; {way} names them"
    )
    return {int(node): slow for node in chosen}


def _check_nodes(nodes: Mapping[int, NodeSlowdown], n_nodes: int) -> None:
    unknown = [n for n in nodes if not 0 <= n < n_nodes]
    if unknown:
        raise PrismError(f"node {unknown[0]}: unknown; the job's nodes run from 0 to {n_nodes - 1}")
    for node, slow in nodes.items():
        for name in ("compute", "memory", "network", "other"):
            factor = getattr(slow, name)
            if factor is not None and not 0.0 < factor < np.inf:
                raise PrismError(
                    f"node {node}: {name} = {factor:g}, expected a factor on durations above 0; "
                    "1.2 is 20 % slower"
                )


def _no_slow_node(inventory: Mapping[int, NodeSlowdown]) -> str:
    """Say why there is no node to place."""
    if n := sum(slow != NodeSlowdown() for slow in inventory.values()):
        return (
            f"{format_count(n, 'node')} are slow, none of them more than the rest, so that no "
            "place is better; "
            "`prism estimate` with cluster.node_slowdowns says what they cost"
        )
    found = "all nodes given are as fast as the others" if inventory else "no node is slow"
    return (
        f"{found}; give {option('slow_nodes')} and {option('slowdown')}, "
        f"{'--measured-nodes' if is_typed() else 'nodes'}, or cluster.node_slowdowns in the job"
    )


def _with_nodes(job: Job, inventory: Mapping[int, NodeSlowdown], spares: int) -> Job:
    """Return the job with its slow nodes and spares written into it."""
    if job.variability.model is not None:
        return job
    keys: dict[str, Any] = {"node_slowdowns": slowdown_keys(inventory)}
    if spares:
        placement = Placement(job)
        keys |= {"nodes": placement.n_nodes + spares, "hosts": placement.slots.tolist()}
    return changed_job(job, cluster=keys)


# ------------------------------------------------------------------- by position in the node
# GPUs of a node that are as fast as each other are taken for a node of their own, a part, so that
# placements are compared as those of slow nodes are. A few rules make the candidates, at any size.


def part_job(job: Job, hosts: Mapping[int, str]) -> tuple[Job, dict[int, str]]:
    """Return a job whose nodes are parts of the job's, and what each part is: node and GPUs.

    `hosts` are names by node, where known.
    """
    factors, placement = position_slowdowns(job), Placement(job)
    where = f"{job.source or job.name}: cluster.gpu_temperatures"
    if factors is None or len(set(factors)) == 1:
        raise PrismError(
            f"{where}: heat needs GPUs of a node that differ by their position; set it, such as "
            "[60, 60, 60, 60, 76, 76, 76, 76], or cluster.gpu_slowdowns"
        )
    n, tp = len(factors), job.parallelism.tp
    if tp >= n:
        raise PrismError(
            f"{where}: a tp group of {tp} fills the node of {n} GPUs, so that every stage waits "
            "for its slowest GPU wherever it is; lower parallelism.tp"
        )
    size = next(
        s for s in range(n, 0, -1)
        if n % s == 0 and max(s, tp) < n and all(len({*factors[i : i + s]}) == 1
                                                 for i in range(0, n, s))
    )  # fmt: skip
    each, known = n // size, placement.slowdowns()
    slow: dict[int, NodeSlowdown] = {}
    for part in range(placement.n_nodes * each):
        whole = known.get(part // each, NodeSlowdown())
        own = whole._replace(compute=whole.compute * factors[part % each * size])
        slow |= {} if own == NodeSlowdown() else {part: own}
    order = (placement.slots[:, None] * each + np.arange(each)).ravel().tolist()
    keys = {
        "gpus_per_node": size, "nodes": placement.n_nodes * each, "hosts": order,
        "nvlink_domain_gpus": job.cluster.nvlink_domain_gpus, "gpu_slowdowns": None,
        "gpu_temperatures": None,
        "leaf_nodes": job.cluster.leaf_nodes * each, "node_slowdowns": slowdown_keys(slow),
        "throttled_share": 0.0, "throttled_power_w": None,
    }  # fmt: skip
    names = {}
    for part in range(placement.n_nodes * each):
        node, first = part // each, part % each * size
        last = f"-{first + size - 1}" * (size > 1)
        names[part] = f"{hosts.get(node, node)}:{first}{last}"
    return changed_job(job, cluster=keys), names


def by_heat(parts: Job, gpus_per_node: int) -> Iterator[Index]:
    """Give placements of a `part_job`: cool GPUs on early stages and the reverse.

    Each once with the ranks of a node kept on it, once over all nodes; tp groups stay whole.
    """
    placement, slow = Placement(parts), Placement(parts).slowdowns()
    size = parts.cluster.gpus_per_node
    group, node = max(1, parts.parallelism.tp // size), gpus_per_node // size
    stages = [min(stage for _, stage in pairs) for pairs in placement.slot_groups()]
    stage = np.array(stages).reshape(-1, group).min(axis=1)
    heat = np.array([slow.get(p, NodeSlowdown()).compute for p in placement.slots.tolist()])
    # of each node its parts by heat, then as many together as hold a tp group
    order = np.lexsort((heat, np.arange(heat.size) // node)).reshape(-1, group)
    hottest = heat[order].max(axis=1)
    nodes = np.arange(stage.size) // (node // group)
    for within in (nodes, np.zeros_like(nodes)):
        slots = np.lexsort((stage, within))
        for sign in (1.0, -1.0):
            taken = np.lexsort((sign * hottest, within))
            hosts = np.empty((stage.size, group), np.int64)
            hosts[slots] = placement.slots[order[taken]]
            yield hosts.ravel()
