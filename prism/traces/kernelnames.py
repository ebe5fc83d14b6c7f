"""What a device activity is, from the op that launched it and from its name.

The launching op is the better witness: one NCCL kernel serves all-to-all, gather and send, and a
matrix product has dozens of names. A kernel's own name is the fallback. Classes are coarse (gemm,
attention, memory, ...); shapes and data types are left out.
"""

from __future__ import annotations

import re
from functools import lru_cache

COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "transfer"}
)
"""Op kinds whose recorded duration includes waiting for other ranks."""

_COLLECTIVE_WORDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all2all", "all_to_all"),
    ("barrier", "all_reduce"),  # NCCL has no barrier: it is an all-reduce of one element
    ("broadcast", "broadcast"),
    ("reduce", "all_reduce"),
    ("gather", "all_gather"),
    ("scatter", "broadcast"),
    ("sendrecv", "transfer"),
    ("coalesced", "transfer"),
    ("send", "transfer"),
    ("recv", "transfer"),
)

_COMMUNICATION_OP = re.compile(r"^(c10d::|nccl|gloo:|rccl|xccl|record_param_comms)")
_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl|oneccl", re.IGNORECASE)

_OP_CLASSES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"attention|flash_attn|fmha", "attention"),
        (r"embedding|split_lookup", "embedding"),
        (r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_addmm_activation)$", "gemm"),
        (r"conv(olution)?(\d?d)?(_|$|Back|_backward)|cudnn_convolution|miopen_conv", "convolution"),
        (r"cross_entropy|nll_loss|log_softmax", "loss"),
    )
)

_KERNEL_CLASSES = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"memcpy|memset", "memory"),
        (r"flash|fmha|attention|attn|softmax_warp", "attention"),
        (r"embedding|pooled_embs|embeddingbag", "embedding"),
        (r"adam|sgd_|adagrad|lamb_|multi_tensor_apply|FusedOptimizer|shampoo", "optimizer"),
        (
            r"conv(?!ert)|wgrad|dgrad|fprop|winograd|implicit_?gemm|scudnn|im2col|xmma_fprop",
            "convolution",
        ),
        (r"gemm|gemv|cutlass|cublas|splitK|nvjet|wgmma|_mm_|matmul|^Cijk", "gemm"),
        (r"cross_entropy|nll_loss|log_?softmax", "loss"),
    )
)


@lru_cache(maxsize=65_536)
def op_role(name: str | float | None) -> str:
    """Say what a host event tells of launches inside it: communication, optimizer or nothing."""
    if not isinstance(name, str):
        return ""
    if _COMMUNICATION_OP.match(name) is not None:
        return "communication"
    return "optimizer" if name.startswith("Optimizer.step") else ""


@lru_cache(maxsize=65_536)
def is_communication_kernel(name: str) -> bool:
    """Tell whether a kernel's name is one of NCCL's or RCCL's."""
    return _COMMUNICATION_KERNEL.search(name) is not None


@lru_cache(maxsize=4_096)
def collective_kind(text: str) -> str:
    """Op kind of a collective's name in any spelling, ``""`` where it is none.

    Examples
    --------
    >>> collective_kind("_reduce_scatter_base"), collective_kind("c10d::alltoall_base_")
    ('reduce_scatter', 'all_to_all')
    >>> collective_kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)")
    'transfer'
    """
    short = text.split("(")[0].lower().replace("_", "")
    return next((kind for word, kind in _COLLECTIVE_WORDS if word in short), "")


@lru_cache(maxsize=65_536)
def classify(kernel: str, op: str, in_optimizer: bool, category: str) -> tuple[str, str]:
    """Give op kind and class of a device activity that is no collective.

    `op` is the innermost host op around its launch, "" where unknown; `category` is ``kernel``,
    ``memcpy`` or ``memset``.

    Examples
    --------
    >>> classify("ampere_sgemm_128x64_nn", "", False, "kernel")
    ('compute', 'gemm')
    >>> classify("Memcpy HtoD (Pinned -> Device)", "aten::copy_", False, "memcpy")
    ('memory', 'memcpy_h2d')
    """
    if category != "kernel":
        return "memory", _copy_class(kernel, category)
    by_name = next((name for pattern, name in _KERNEL_CLASSES if pattern.search(kernel)), "memory")
    if in_optimizer or by_name == "optimizer":
        return "optimizer", "optimizer"
    by_op = next((name for pattern, name in _OP_CLASSES if pattern.search(op)), "")
    kernel_class = by_op or by_name
    return ("memory" if kernel_class == "memory" else "compute"), kernel_class


def _copy_class(kernel: str, category: str) -> str:
    """Class of a copy: its direction; XPU's host memory is M, or H where it is pinned."""
    if category == "memset":
        return "memset"
    found = re.search(r"\b(HtoD|DtoH|DtoD|PtoP|HtoH|[HMD]2[HMD])\b", kernel)
    return f"memcpy_{found[1].lower().replace('to', '2').replace('m', 'h')}" if found else "memcpy"
