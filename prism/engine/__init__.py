"""All compiled code: arrays in, arrays out.

A step is a list of ops in execution order, each with at most two predecessors. 64 replicates run at
a time on the innermost axis: a block of lanes is one cluster draw. Ops are local (run for every dp
replica, all of which share one template) or global (collectives over replicas), and phases
alternate between the two. Draws are counter-based, keyed by seed, stream, entity and replicate, so
that neither threads nor chunks nor the number of replicates change a number. What the arrays mean
is `prism.simulation`'s to know.

arrays    constants and the arrays of a step
random    Philox4x32-10, quantile tables, the pool of residuals
lowering  kernels of a group's GPUs to ops
effects   draws of everything that is shared, or rare
step      the ops of blocks
blocks    blocks from the arrays of a step
record    one replicate, op by op
ahead     what a second process compiles
unseen    blocks of which some replicas are simulated

References
----------
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, doi:10.1145/2063384.2063405.
arXiv:2510.15596 (PRISM): sums along serial edges, maxima at joins.
"""

from prism.engine.cache import kept_together

with kept_together():
    from prism.engine.ahead import compile_blocks, compile_rest
    from prism.engine.arrays import (
        CDF_RANGE,
        CDF_ROWS,
        DRAW,
        EXPORT,
        GLOBAL,
        GROUP_STALL,
        JOB_STALL,
        JOIN,
        LANES,
        N_STREAMS,
        NEVER,
        NO_LINKS,
        NO_STALL,
        POOL,
        RANK,
        REGIME,
        RESIDUAL,
        STALL,
        STEP,
        Bank,
        Graph,
        Keys,
        Links,
        Lowering,
        Ops,
        Ranks,
        Sample,
        Sampled,
        Shared,
        Stalls,
        Step,
        Walk,
        Work,
    )  # fmt: skip
    from prism.engine.blocks import draw_clusters, lower, new_work, room_for_coefs, run_range
    from prism.engine.effects import microbatches
    from prism.engine.lowering import cdf_cells, group_max
    from prism.engine.random import lookup, philox_lanes
    from prism.engine.record import record_block
    from prism.engine.step import run_given
    from prism.engine.unseen import run_sampled, unseen_bins, unseen_slowest

__all__ = [
    "CDF_RANGE", "CDF_ROWS", "DRAW", "EXPORT", "GLOBAL", "GROUP_STALL", "JOB_STALL",
    "JOIN", "LANES", "NEVER", "NO_LINKS", "NO_STALL", "N_STREAMS", "POOL", "RANK",
    "REGIME", "RESIDUAL", "STALL", "STEP", "Bank", "Graph", "Keys", "Links", "Lowering", "Ops",
    "Ranks", "Sample", "Sampled", "Shared", "Stalls", "Step", "Walk", "Work", "cdf_cells",
    "compile_blocks", "compile_rest", "draw_clusters", "group_max", "lookup", "lower",
    "microbatches", "new_work", "philox_lanes", "record_block", "room_for_coefs", "run_given",
    "run_range", "run_sampled", "unseen_bins", "unseen_slowest",
]  # fmt: skip
