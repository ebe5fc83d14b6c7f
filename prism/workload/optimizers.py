"""What an optimizer keeps and does for each parameter: one record each.

References
----------
.. [1] Kingma & Ba, arXiv:1412.6980: Adam.
.. [2] Jordan et al., Muon, https://kellerjordan.github.io/posts/muon: five Newton-Schulz steps in
   bfloat16 for each matrix; vectors and embeddings go by AdamW.
.. [3] Rajbhandari et al., arXiv:1910.02054, section 3.1: a master copy in float32.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from prism.jobs.ops import BF16_BYTES, Op, Product
from prism.workload.modelsize import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prism.jobs.jobspec.blocks import ParallelismBlock
    from prism.workload.costs import Costs

NEWTON_SCHULZ_STEPS = 5
Matrices = Counter[tuple[float, float]]
"""How many matrices there are of each shape, the shorter side first."""


class Optimizer(NamedTuple):
    """Numbers that an optimizer keeps for each parameter, beside the parameter itself."""

    moments: int
    orthogonal: bool = False  # matrices' updates are made orthogonal, by products


OPTIMIZERS = {"adamw": Optimizer(2), "sgd": Optimizer(0), "muon": Optimizer(1, orthogonal=True)}


def moment_bytes(layout: ParallelismBlock) -> float:
    """Bytes of optimizer state per parameter, beside a master copy."""
    return DTYPE_BYTES[layout.optimizer_dtype] * OPTIMIZERS[layout.optimizer].moments


def master_bytes(layout: ParallelismBlock) -> float:
    """Bytes of a parameter's master copy, which states in float32 have with them."""
    return DTYPE_BYTES["fp32"] if layout.optimizer_dtype == "fp32" else 0.0


def traffic_bytes(layout: ParallelismBlock) -> float:
    """Memory traffic of one update per parameter: states read and written, gradient, weight.

    Of AdamW in float32 30 bytes, in bfloat16 14.
    """
    master = master_bytes(layout)
    weight = 2.0 * BF16_BYTES if not master else 2.0 * master + BF16_BYTES
    return 2.0 * moment_bytes(layout) + DTYPE_BYTES[layout.gradient_dtype] + weight


def update_seconds(
    layout: ParallelismBlock, costs: Costs, n: float, n_shards: float, matrices: Matrices
) -> tuple[float, float]:
    """Duration [s] and traffic [byte] of updating a rank's part of n parameters."""
    n_bytes = traffic_bytes(layout) * n / n_shards
    seconds = costs.memory("optimizer", n_bytes / costs.framework.optimizer_rate).duration
    products = sum(k * _newton_schulz(costs, *shape) for shape, k in matrices.items())
    return seconds + products / n_shards, n_bytes


def orthogonal_matrices(
    layout: ParallelismBlock, ops: Callable[[], Iterable[Op]]
) -> tuple[Matrices, Matrices]:
    """Count weights whose updates are made orthogonal, by shape: others, and of ep's experts."""
    others: Matrices = Counter()
    routed: Matrices = Counter()
    for op in ops() if OPTIMIZERS[layout.optimizer].orthogonal else ():
        if isinstance(op, Product) and op.name != "logits":
            found = routed if op.routed and layout.ep > 1 else others
            for part in op.parts:
                sides = min(op.depth, part.width), max(op.depth, part.width)
                found[sides] += round(op.groups)
    return others, routed


def _newton_schulz(costs: Costs, rows: float, columns: float) -> float:
    """Orthogonalise an update of [rows, columns], rows the shorter side: products [s]."""
    gram = costs.gemm("gram", "optimizer", rows, rows, columns, in_bf16=True)
    square = costs.gemm("square", "optimizer", rows, rows, rows, in_bf16=True)
    apply = costs.gemm("apply", "optimizer", rows, columns, rows, in_bf16=True)
    return NEWTON_SCHULZ_STEPS * (gram.duration + square.duration + apply.duration)
