"""How a framework turns ops into kernels: one record each.

Passes are reads and writes of an op's values in bfloat16, at the rate of a copy: where a kernel's
access is slower than a copy's, more of them. Those of `eager` are measured by
``experiments/library/frameworks.py`` in a profile of PyTorch 2.11 on H100, those of `compiled` in
its kernel list; of the others they are counted in the code of their modules. What a launch takes
the host is from the same two profiles, an upper bound; other frameworks have eager PyTorch's.

References
----------
.. [1] Megatron Core 0.14, ``fusions/``, and Transformer Engine 2.8: fused rotary positions, bias
   and SwiGLU, weight gradients added up in the product, cross entropy.
.. [2] nanotron, ``nn/layer_norm.py``, ``nn/activations.py``, ``models/llama.py``, 2025:
   norms of flash-attn; rotary positions, SwiGLU and residuals in eager PyTorch.
.. [3] transformers 4.5x, ``models/llama/modeling_llama.py``: norms, rotary positions, repeated keys
   and values, and logits in float32, an eager kernel for each operation.
.. [4] Buckets and what is hidden: Megatron Core 0.14, ``DistributedDataParallelConfig``; PyTorch,
   ``DistributedDataParallel``; nanotron, ``optim/zero.py``, and its measured steps (layout_sweep).
.. [5] What is kept: ``experiments/library/activations.py`` counts it for eager and compiled
   PyTorch, 18 h + 8 f and 16 h + 6 f; torchtitan, ``del pred``, where Megatron's model holds the
   logits in bfloat16; nanotron, ``sharded_cross_entropy`` (fp32 logits and their softmax) and
   ``MemoryBuffer``; PyTorch's ``reducer.cpp`` without ``gradient_as_bucket_view``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

Gathers = Literal["each", "buckets", "group"]
"""How ranks gather parameters of which each has a part: tensor by tensor, in buckets, or all
tensors in one group of NCCL's, by way of copies of all, the waits of one beside the bytes of
others."""


class Passes(NamedTuple):
    """What an op's forward and backward take: passes over its values, and kernels launched."""

    forward: float
    backward: float
    forward_launches: float = 1.0
    backward_launches: float = 1.0


# kinds that every framework runs alike: nobody measured other ways
_COMMON = {
    "routing": Passes(8.0, 0.0, 3, 0),  # logits to scores in float32, the top ones, counts
    "scatter": Passes(1.0, 1.0),
    "sort": Passes(2.0, 2.0),
    "convolution": Passes(2.0, 3.0),
    "gated_norm": Passes(3.0, 5.0),
    "gelu": Passes(2.0, 3.0),
    "repeat": Passes(0.0, 0.0, 0, 0),  # kernels that take fewer key heads, in any layout
    "layout": Passes(0.0, 0.0, 0, 0),
}
_FUSED = _COMMON | {
    "swiglu": Passes(3.0, 5.0), "rope": Passes(2.0, 2.0), "residual": Passes(3.0, 3.0),
}  # fmt: skip


@dataclass(frozen=True)
class Framework:
    """What a framework's kernels are."""

    name: str
    about: str
    passes: Mapping[str, Passes]
    norm: str  # backend of rms_norm
    loss_bytes: tuple[float, float]  # a logit, forward and backward, at the rate of a copy, where
    # `parallelism.fused_loss` is off, or the framework's own fuses it (see `fuses_loss`)
    attention: str  # a backend, or which of a device's it takes: te, flash
    cast_bytes: tuple[float, float] = (0.0, 0.0)  # of a logit, to float32 and its gradient back
    embedding_bytes: tuple[float, float] = (4.0, 10.0)  # a value: read, written; added in float32
    fused_products: bool = True  # q, k and v are one product, gate and up another
    fused_sums: bool = True  # the product adds to the weight gradients of earlier microbatches
    stops_early: bool = False  # recomputation ends before the last product
    casts_weights: bool = False  # to 8 bits in every pass, scales found by reading once more
    saves: tuple[tuple[str, float], ...] = ()  # kind, bytes a value kept beside the least
    gathered_inputs: float = 4.0  # of tp, whole at once beside a backward: inputs and gradients
    logit_bytes: tuple[float, float, float] = (4.0, 8.0, 14.0)  # kept; beside, alone and over tp
    fuses_loss: bool = False  # its cross entropy is one kernel, of `loss_bytes`
    bucket_copies: bool = False  # a second copy of all gradients lies in buckets, as parameters are
    fragmentation: tuple[float, float] = (1.0, 1.0)  # alone and over tp, see `FRAGMENTATION`
    optimizer_rate: float = 1.0  # of the optimizer's traffic, over a copy's
    product_launches: tuple[float, float] = (1.0, 2.0)  # of one product's forward and backward
    launch_s: tuple[float, float] = 36e-6, 54e-6  # of the host, a launch in forward and backward
    hides_gradients: bool = True  # reduces them beside the last backward, not after it
    hides_parameters: bool = False  # gathers them (zero1) beside the next forward
    bucket_bytes: float = 25.0 * 2.0**20  # of a message of gradients
    bucket_rank_bytes: float = 0.0  # at least, for every rank
    gathers: Gathers = "each"  # parameters (zero1): how after the optimizer
    reduces_whole: bool = False  # all-reduces gradients with zero1 too
    fused_loss: bool = False  # `parallelism.fused_loss` where a job does not say
    keeps_casts: bool = False  # quantized operands, from forward to backward
    splits_by_cost: bool = False  # layers over stages, of one chunk each


HELPER_PASSES = {"cudnn": 7.6}
"""Of the result's values, in kernels beside attention's backward that its time in the tables holds:
the dot products with its gradient, and the queries' gradient from float32 (passes.csv)."""

FRAGMENTATION = 1.16, 1.27
"""Reserved over allocated bytes of what comes and goes in a step, alone and over tp, by PyTorch's
allocator as it is: of nanotron's peaks, 5 to 95 % 1.05 to 1.3 and 1.06 to 1.6
(``experiments/validation/layout-sweep/layout_sweep.py``). Recipes of Megatron Bridge and torchtitan
set ``expandable_segments``; LLM Foundry's layouts that ran, of one size each, leave no room for any
(``experiments/studies/layouts/memory.py``): other eager jobs are taken to lie between."""

FUSED_LOSS_BYTES = 6.0, 6.0
"""Logits read twice and written once in bfloat16, and as much for the gradient."""

_EAGER_PASSES = _COMMON | {
    "swiglu": Passes(4.75, 8.7, 2, 3), "rope": Passes(20.1, 24.2, 16, 24),
    "layout": Passes(2.3, 5.0, 1, 3), "residual": Passes(2.8, 2.7),
}  # fmt: skip
_EAGER = Framework(
    "eager", "eager PyTorch 2.11",
    _EAGER_PASSES | {
        "repeat": Passes(4.3, 3.8, 2, 2), "attention": Passes(0.0, 0.0, 2, 4),
        "norm": Passes(0.0, 0.0, 1, 2),
    },
    "eager", (15.0, 16.5), "flash", (9.9, 11.2), (4.0, 60.0),
    fused_products=False, fused_sums=False, stops_early=True, optimizer_rate=0.74,
    product_launches=(1.9, 3.7), saves=(("swiglu", 2.0), ("attention", 2.0)),
    bucket_copies=True, fragmentation=(1.08, FRAGMENTATION[1]),
)  # fmt: skip

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "megatron", "Megatron Core 0.14 with Transformer Engine 2.8", _FUSED, "te", (16.0, 6.0),
            "te", hides_parameters=True, bucket_bytes=160e6, bucket_rank_bytes=4e6, fused_loss=True,
            gathers="buckets", gathered_inputs=2.0, logit_bytes=(4.0, 10.0, 14.0), keeps_casts=True,
        ),
        Framework(
            "compiled", "torch.compile of PyTorch 2.11",
            _COMMON | {
                "swiglu": Passes(2.9, 4.8), "rope": Passes(2.7, 2.7, 3, 4),
                "repeat": Passes(2.0, 2.0, 0, 0), "layout": Passes(0.3, 0.0, 0, 0),
                "norm": Passes(2.4, 4.2, 1, 2), "residual": Passes(1.3, 1.3, 0, 0),
                "attention": Passes(0.0, 0.0, 2, 4),
            },
            "compiled", (5.6, 5.7), "flash", fuses_loss=True, fused_loss=True,
            fused_products=False, fused_sums=False, stops_early=True, casts_weights=True,
            optimizer_rate=_EAGER.optimizer_rate, product_launches=_EAGER.product_launches,
            launch_s=(39e-6, 53e-6),
        ),
        _EAGER,
        replace(
            _EAGER, name="nanotron", about="nanotron 0.4", passes=_EAGER_PASSES, norm="te",
            fused_products=True, hides_gradients=False, reduces_whole=True,
            gathered_inputs=5.25, logit_bytes=(4.0, 4.0, 4.0), gathers="group",
            fragmentation=FRAGMENTATION, splits_by_cost=True,
        ),
        replace(
            _EAGER, name="transformers", about="transformers 4.5x in eager PyTorch",
            passes={
                **_EAGER.passes, "rope": Passes(10.0, 15.0, 5, 9), "norm": Passes(18.0, 38.0, 6, 14)
            },
            cast_bytes=(17.9, 19.2),
        ),
    )
}  # fmt: skip
FRAMEWORKS |= {
    name: replace(FRAMEWORKS[name.partition("-")[0]], name=name, about=about, **changes)
    for name, about, changes in (
        (
            "megatron-2022", "Megatron-LM of 2021 to 2023, before Transformer Engine",
            {"attention": "flash", "hides_gradients": False, "hides_parameters": False,
             "bucket_bytes": inf, "fragmentation": FRAGMENTATION},
        ),
        (
            "eager-2023", "eager PyTorch 1.13 to 2.5, Triton's attention",
            {"attention": "efficient", "saves": (("swiglu", 2.0),),
             "fragmentation": (1.0, 1.0)},
        ),
        (
            "compiled-2024", "torch.compile of PyTorch 2.5 to 2.8",
            {"attention": "flash", "fuses_loss": False, "fused_loss": False},
        ),
    )
}  # fmt: skip
"""Older releases, whose products are slower by a factor that published jobs give
(``nominal/speed_...`` of a library). Triton's attention has no kernels measured: PyTorch's
memory-efficient one stands in."""


def family(name: str) -> str:
    """Name of a framework without its release."""
    return name.partition("-")[0]
