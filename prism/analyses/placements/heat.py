"""Which GPUs of each node the stages get, where heat or `cluster.gpu_slowdowns` slows some.

GPUs of a node that are as fast as each other are taken for a node of their own, a part, so that
placements are compared as those of slow nodes are. A few rules make the candidates, at any size.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from prism.analyses.placements.alternatives import changed_job
from prism.cluster.nodemap import NodeSlowdown, Placement, slowdown_keys
from prism.cluster.power import position_slowdowns
from prism.common.errors import PrismError
from prism.jobs.job import Job

Int = NDArray[np.int64]


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


def by_heat(parts: Job, gpus_per_node: int) -> Iterator[Int]:
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
