"""`prism place`: where slow nodes should go, what they cost, and what else could be done.

Placements of the slow nodes are looked at up to symmetry on a deterministic step, the promising
ones simulated side by side until one is left, and alternatives beside them.
"""

import json
import math
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.placements.alternatives import changed_job
from prism.analyses.placements.answer import answer, make_case
from prism.analyses.placements.problem import MOST_PLACED, make_problem
from prism.analyses.placements.rows import better_alternatives
from prism.analyses.selection import QUANTILES, Runner
from prism.cluster.nodemap import KINDS, NodeSlowdown, Placement, slow_node, slowdown_keys
from prism.cluster.nodes.inventory import Inventory
from prism.common.errors import PrismError, is_typed, named
from prism.common.results import Columns, Field, Result
from prism.common.text import format_count
from prism.jobs.hostfiles import host_order, launcher_files, placement_csv
from prism.jobs.job import Job, load_job
from prism.simulation.prepare import prepare
from prism.simulation.results import job_of, provenance
from prism.simulation.steps import Progress, settle_call, warm_up

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

ROWS = {
    "mean": "mean step", "p50": "p50 of the step", "p95": "p95 of the step",
    "p99": "p99 of the step", "p95_se": "standard error of p95",
    "objective": "what is to be small", "objective_se": "its standard error",
    "saved": "share of the current objective that is saved",
}  # fmt: skip


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
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> "Placing":
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
    seed, threads, progress
        As in `prism.simulate`.

    Returns
    -------
    Placing
        Tables ``placements``, ``alternatives`` and ``slow_nodes``; arrays ``hosts`` (the node of
        every slot) and ``slot_cost`` by stage and replica [s].

    Raises
    ------
    PrismError
        The job cannot be built, or a number or node is out of range.

    Examples
    --------
    >>> import prism
    >>> placed = prism.place("pipeline-8x32", slow_nodes=1, slowdown=1.2, seed=1)
    >>> placed.attrs["best"], placed.placements.p95.round().to_dict()  # s
    ('current', {'current': 146.0})
    """
    begin = time.perf_counter()
    job = job if isinstance(job, Job) else load_job(job)
    seed, threads = settle_call(1, seed, threads)
    _check(job, objective, tolerance, spares)
    known = nodes if isinstance(nodes, Inventory) else Inventory({})
    names, notes = known.hosts | dict(hosts or {}), list(known.notes)
    inventory = _inventory(job, slow_nodes, slowdown, kind, nodes, seed, notes)
    built = _with_nodes(job, inventory, spares)
    problem = make_problem(prepare(built, seed), inventory, threads)
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
    warm_up(problem.step.program, seed)
    found = answer(make_case(problem, objective, tolerance, Runner(seed, threads, progress)))
    call: dict[str, Any] = {"objective": objective, "tolerance": tolerance, "seed": seed}
    if built is job:  # its slow nodes are not written into it
        call["nodes"] = {str(n): list(slow) for n, slow in inventory.items()} or None
    for node in found["slow_nodes"]:
        if node["node"] in names:
            node["host"] = names[node["node"]]
    better = better_alternatives(found)
    found["action"] = better[0]["name"] if better else found["best"]
    found |= {"job": job.name, "seed": seed, "notes": notes}
    found["wall_seconds"] = time.perf_counter() - begin
    return Placing(_dataset(found, provenance(built, call), names))


_TIMES = (
    Field("mean", "s", "mean of the step"),
    Field("p50", "s", "median of the step"),
    Field("p95", "s", "p95 of the step"),
    Field("p95_se", "s", "its standard error"),
    Field("p99", "s", "p99 of the step"),
    Field("objective", "s", "what is minimised"),
    Field("objective_se", "s", "its standard error"),
    Field("saved", "1", "share of the objective saved against the present placement",
          interval=True),
)  # fmt: skip
PLACEMENTS = Columns("placement", (Field("name", "text"), *_TIMES))
ALTERNATIVES = Columns("alternative", (
    Field("name", "text"), Field("label", "text", "what is done"), *_TIMES,
    Field("impossible", "text", "why it cannot be done"),
))  # fmt: skip
SLOW_NODES = Columns("slow_node", (
    Field("node", "count"), Field("host", "text", "its host name"),
    Field("compute", "1", "factor on its compute"), Field("memory", "1", "on its memory traffic"),
    Field("network", "1", "on its network"), Field("other", "1", "on everything else"),
))  # fmt: skip


class Placing(Result):
    """Placements of slow nodes, what they cost, and alternatives."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        found: dict[str, Any] = json.loads(self.attrs["summary"])
        return found

    @cached_property
    def placements(self) -> "pd.DataFrame":
        """Placements that were simulated, the best first."""
        return PLACEMENTS.frame(self.figures()["placements"])

    @cached_property
    def alternatives(self) -> "pd.DataFrame":
        """What else may be done about the slow nodes, the largest gain first."""
        found = self.figures()["alternatives"]
        rows = [{"name": name, **row} for name, row in found.items()]
        return ALTERNATIVES.frame(sorted(rows, key=lambda row: -row.get("saved", -math.inf)))

    def host_files(self, placement: str | None = None) -> dict[str, str]:
        """Write a placement, the best where none is named, as files of launchers.

        Returns
        -------
        dict of str to str
            Texts by file name: ``hosts.csv`` (which stages and replicas each host has),
            ``hostfile.txt`` (hosts in rank order), and a file each of Slurm, MPI and PyTorch.
        """
        name = self.attrs["best"] if placement is None else placement
        if name not in self.dataset.placement.values:
            known = ", ".join(map(str, self.dataset.placement.values))
            raise PrismError(f"placement {name}: expected one of {known}")
        nodes = [int(node) for node in self.dataset.hosts.sel(placement=name).values]
        listed = self.dataset.coords["host"].values if "host" in self.dataset.coords else ()
        names = {node: str(host) for node, host in enumerate(listed) if host}
        placed = Placement(job_of(self.dataset))
        return {
            "hosts.csv": placement_csv(nodes, placed.slot_groups(), placed.gpus_per_node, names),
            "hostfile.txt": host_order(nodes, names),
            **launcher_files(nodes, names, placed.gpus_per_node),
        }

    @cached_property
    def slow_nodes(self) -> "pd.DataFrame":
        """The slow nodes and their factors [1]."""
        return SLOW_NODES.frame(self.figures()["slow_nodes"])


# ------------------------------------------------------------------------------------- the question
def _check(job: Job, objective: str, tolerance: float, spares: int) -> None:
    if objective not in QUANTILES:
        raise PrismError(f"objective {objective}: expected one of {', '.join(QUANTILES)}")
    if not 0.0 < tolerance < 1.0:
        raise PrismError(f"tolerance = {tolerance:g}, expected a share, such as 0.001 (0.1 %)")
    if spares < 0:
        raise PrismError(f"spares = {spares}, expected 0 or more nodes")
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
        pair = (named("slowdown"), named("slow_nodes") + " 3")
        if slowdown is None:
            pair = (named("slow_nodes"), named("slowdown") + " 1.2")
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
        f"{found}; give {named('slow_nodes')} and {named('slowdown')}, "
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


def _dataset(
    found: dict[str, Any], attrs: dict[str, Any], names: Mapping[int, str]
) -> "xr.Dataset":
    """Lay placements and the map of costs into a dataset; the summary goes along."""
    import xarray as xr

    rows, hosts = found["placements"], found.pop("hosts")
    data: dict[str, Any] = {}
    for name, text in ROWS.items():
        units = "1" if name == "saved" else "s"
        values = np.array([row[name] for row in rows])
        data[name] = ("placement", values, {"units": units, "long_name": text})
    text = "node of every slot, in rank order"
    data["hosts"] = (("placement", "slot"), hosts, {"units": "1", "long_name": text})
    if found["slot_cost"]:
        text = "cost of one slow node by where it is"
        data["slot_cost"] = (
            ("stage", "dp_rank"), np.array(found["slot_cost"]), {"units": "s", "long_name": text}
        )  # fmt: skip
        for name, units, text in (
            ("slack", "1", "how much slower a node may be before the step is longer"),
            ("cost", "s", "cost of the slowest node there"),
        ):
            values = np.array([row[name] for row in found["stage_slack"]])
            data[f"stage_{name}"] = ("stage", values, {"units": units, "long_name": text})
    coords: dict[str, Any] = {"placement": [row["name"] for row in rows]}
    if names:
        listed = [names.get(node, "") for node in range(max(*names, int(hosts.max())) + 1)]
        coords["host"] = ("node", listed, {"long_name": "host name of every node"})
    attrs |= {"kind": "placement", "summary": json.dumps(found)}
    attrs |= {which: found[which] for which in ("best", "worst", "current", "objective")}
    return xr.Dataset(data, coords=coords, attrs=attrs)
