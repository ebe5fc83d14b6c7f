"""A built step with its nodes elsewhere, or with less work in some replicas.

No graph is laid and no distribution tabulated anew, so that thousands of placements can be
compared; what comes out equals the program of a job that says the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism import engine
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
    Takes 0.2 ms for 2,048 nodes, and 1 to 3 ms where messages take another time. Where slow nodes
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


def limit_microbatches(
    step: Prepared, counts: Sequence[int] | NDArray[np.int64], program: Program | None = None
) -> Program:
    """Give replicas fewer microbatches than the schedule has: the later ones take no time there.

    `counts` [replica] are from 1 to the schedule's, and their sum is the step's batch; `program` is
    the step's under another placement.

    Raises
    ------
    PrismError
        The counts do not fit the job.

    Notes
    -----
    Compute and transfers of a microbatch beyond a replica's count last 0 s but keep their place in
    the schedule. In GPipe and 1F1B the pipeline ends as with a shorter schedule; interleaved, an
    empty place may hold up a stage (by up to 1.5 % of the step in 100 random pipelines). Gradients
    are reduced after the last backward of a stage, empty or not.
    """
    program, graph = program or step.program, step.graph
    given = np.asarray(counts)
    n_replicas, most = program.graph.n_replicas, graph.n_microbatches
    whole = given.shape == (n_replicas,) and given.dtype.kind in "iu"
    if not (whole and 1 <= given.min() <= given.max() <= most):
        raise PrismError(
            f"{step.job.source or step.job.name}: microbatches per replica {given.tolist()!s:.60}, "
            f"expected {n_replicas} whole numbers from 1 to parallelism.microbatches = {most}"
        )
    cut = (graph.microbatch >= given.min()) & (program.ops.kind == engine.DRAW)
    if not cut.any():
        return program
    # every vector that a cut op reads gets a copy for the op's microbatch
    vec, bank = program.ops.vec.copy(), program.bank
    of_op = np.stack([vec[cut], np.broadcast_to(graph.microbatch[cut, None], vec[cut].shape)])
    pairs, which = np.unique(of_op.reshape(2, -1), axis=1, return_inverse=True)
    n_vectors = bank.mb.size
    vec[cut] = (n_vectors + which).reshape(vec[cut].shape)
    joined = {
        name: np.concatenate([getattr(bank, name), getattr(bank, name)[..., pairs[0]]], axis=-1)
        for name in ("step_table", "mb_table", "mb", "call_table", "call_draw", "link", "is_global")
    }
    skipped = np.zeros((n_replicas, n_vectors + pairs.shape[1]), np.uint8)
    skipped[:, n_vectors:] = pairs[1] >= given[:, None]
    bank = engine.Bank(n_microbatches=bank.n_microbatches, **joined, skipped=skipped)
    return replace(program, bank=bank, ops=program.ops._replace(vec=vec))
