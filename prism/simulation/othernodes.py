"""A built step with its nodes elsewhere.

No graph is laid and no distribution tabulated anew, so that thousands of placements can be
compared; what comes out equals the program of a job that says the same.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import NodeSlowdown, Placement
from prism.common.errors import PrismError
from prism.jobs.job import job_from_dict
from prism.simulation.assembly import build_program
from prism.simulation.placednodes import needs_memory, site_nodes, site_workers
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program


def relocate(
    step: Prepared,
    hosts: Sequence[int] | NDArray[np.int64],
    slowdowns: Mapping[int, NodeSlowdown],
    n_nodes: int | None = None,
) -> Program:
    """Put a built step's nodes elsewhere, equal to the bit to a job that says so by its keys.

    Parameters
    ----------
    hosts : sequence of int
        [slot] the physical node that takes each slot.
    slowdowns : mapping of int to NodeSlowdown
        Slow nodes by physical node, all of them: those of the job do not stay. In a fitted trace
        a node is a traced worker, which keeps what was measured of it; these factors come on top.
    n_nodes : int, optional
        Physical nodes, more than the job's where there are further spares.

    Raises
    ------
    PrismError
        If `hosts` is no placement of the job, or a slowdown names no node.

    Notes
    -----
    Takes 0.3 ms for 2,048 nodes, and about 1 ms where messages take another time. Where slow nodes
    have factors on memory-bound kernels, or on what is neither compute nor network, and those of
    the job that `step` was built of have none, ops are lowered anew, at a hundred times the cost;
    the other way round results are equal but for rounding.
    """
    placement = Placement(step.job, hosts, n_nodes)
    program = step.program
    if program.origin is None or program.shared is not None:
        raise PrismError(
            f"{step.job.source or step.job.name}: variability.dependence: none forgets which node "
            "is slow; set full to place nodes"
        )
    if step.workload is None:
        return site_workers(program, placement, slowdowns)
    if needs_memory(slowdowns) and "memory" not in program.origin.roles:
        return _rebuilt(step, placement, slowdowns)
    return site_nodes(program, placement, slowdowns)


def _rebuilt(
    step: Prepared, placement: Placement, slowdowns: Mapping[int, NodeSlowdown]
) -> Program:
    """Build a job's program anew, memory-bound kernels with factors of their own."""
    job, blocks = step.job, step.job.model_dump(exclude={"name", "source"})
    blocks["cluster"] |= {
        "hosts": placement.slots.tolist(),
        "nodes": placement.n_nodes,
        "node_slowdowns": {
            str(node): {name: x for name, x in slow._asdict().items() if x is not None}
            for node, slow in slowdowns.items()
        },
    }
    return build_program(job_from_dict(blocks, job.name), step.graph, step.effects, 0)
