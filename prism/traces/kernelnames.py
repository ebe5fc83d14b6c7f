"""What a device activity is, from the op that launched it and from its name.

The launching op is the better witness: one NCCL kernel serves all-to-all, gather and send, and a
matrix product has dozens of names. A kernel's own name is the fallback, and wins where one op
launches work of several classes (helpers of attention's backward) or the compiler fused ops
(Triton). Classes are coarse: gemm, attention, convolution, elementwise, norm, loss, embedding,
optimizer, copies by direction, memset, and collectives; shapes and data types are left out.
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

_LOSS = r"cross_?entropy|nll_?loss|log_?softmax|online_softmax"
_NORM = r"(?:layer|rms|batch|group|instance)_?norm"
_GEMM_OPS = (
    "mm|addmm|bmm|baddbmm|addbmm|matmul|linear|_scaled_mm(_v2)?|_int_mm|_grouped_mm|"
    "_scaled_grouped_mm(_v2)?|_addmm_activation"
)

_OP_CLASSES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"attention|flash_attn|fmha|(Flash|Fused)Attn", "attention"),
        (r"embedding|split_lookup", "embedding"),
        (rf"^aten::({_GEMM_OPS})$", "gemm"),
        (r"conv(olution)?(\d?d)?(_|$|Back|_backward)|cudnn_convolution|miopen_conv", "convolution"),
        (_LOSS, "loss"),
        (rf"(?i:{_NORM})(_backward|Backward\w*)?$|::\w*(layer|rms|batch|group)_norm", "norm"),
    )
)

_ATTENTION_HELPERS = re.compile(
    # dot products of output and gradient, sums and casts of the queries' gradient: cuDNN, flash 2
    # and 3, CK, Triton; passes over memory that attention's backward launches beside itself
    r"dot_do_o|convert_dk?[qv](?![a-z])|FlashAttnBwd(Pre|Post)process|_bwd_preprocess|BwdOGradDotO|"
    r"BwdConvertQGrad|fmha_bwd\w*_(odo|dq_convert|dot_do_o|convert_dq)|dq_convert"
)

_TRITON = re.compile(r"^triton_(?P<form>poi|red|per|tem|for|mm|bmm|flex|convolution|_)")

_KERNEL_CLASSES = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"memcpy|memset", "elementwise"),  # kernels of that name
        (r"flash|fmha|sdpa|attention|attn|bwd_kernel_d[kq]|softmax_warp_(?:for|back)ward(?!"
         r"<[^<>]*, true(, (true|false))?>)", "attention"),
        (r"embedding|pooled_embs|embeddingbag", "embedding"),
        (r"adam|sgd_|adagrad|lamb_|multi_tensor_apply|FusedOptimizer|shampoo", "optimizer"),
        (rf"{_LOSS}|softmax_warp", "loss"),
        (rf"{_NORM}|\b(?:ln|bn|rmsnorm)_(?:fwd|bwd|fw|bw)|GammaBeta|RowwiseMoments|"
         "cuCompute(?:GradInput|PartGrad)|cuApply(?:LayerNorm|RMSNorm)|norm2d", "norm"),
        (
            r"conv(?!ert)|wgrad|dgrad|fprop|winograd|implicit_?gemm|igemm_|scudnn|im2col",
            "convolution",
        ),
        (r"(?<!fb)gemm|gemv|cutlass|cublas|splitK|nvjet|wgmma|_mm_|matmul|^Cijk_", "gemm"),
    )
)  # fmt: skip
"""The first that fits; what none does is elementwise."""

_IN_MEMORY = frozenset({"elementwise", "norm"})
"""Classes whose op kind is ``memory``: they take as long as reading and writing does."""


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
    >>> classify("void vectorized_elementwise_kernel<8, silu>", "aten::silu", False, "kernel")
    ('memory', 'elementwise')
    >>> classify("Memcpy HtoD (Pinned -> Device)", "aten::copy_", False, "memcpy")
    ('memory', 'memcpy_h2d')
    """
    if category != "kernel":
        return "memory", _copy_class(kernel, category)
    by_name = _class_by_name(kernel)
    if in_optimizer or by_name == "optimizer":
        return "optimizer", "optimizer"
    by_op = ""
    if _TRITON.match(kernel) is None and _ATTENTION_HELPERS.search(kernel) is None:
        by_op = next((name for pattern, name in _OP_CLASSES if pattern.search(op)), "")
    kernel_class = by_op or by_name
    return ("memory" if kernel_class in _IN_MEMORY else "compute"), kernel_class


def _class_by_name(kernel: str) -> str:
    """Class of a kernel by its name."""
    if _ATTENTION_HELPERS.search(kernel) is not None:
        return "elementwise"
    found = _TRITON.match(kernel)
    if found is not None:
        return _triton_class(kernel, found["form"])
    return next(
        (name for pattern, name in _KERNEL_CLASSES if pattern.search(kernel)), "elementwise"
    )


def _triton_class(kernel: str, form: str) -> str:
    """Class of a kernel that Inductor made: its form, and the names of the ops fused into it."""
    if form in ("tem", "mm", "bmm", "flex", "convolution"):  # a template
        if "attention" in kernel or form == "flex":
            return "attention"
        return "convolution" if "convolution" in kernel else "gemm"
    if re.search(_LOSS, kernel):
        return "loss"
    if form in ("red", "per") and re.search(rf"{_NORM}|rsqrt", kernel):
        return "norm"
    return "embedding" if form == "poi" and "_embedding" in kernel else "elementwise"


def _copy_class(kernel: str, category: str) -> str:
    """Class of a copy: its direction; XPU's host memory is M, or H where it is pinned."""
    if category == "memset":
        return "memset"
    found = re.search(r"\b(HtoD|DtoH|DtoD|PtoP|HtoH|[HMD]2[HMD])\b", kernel)
    return f"memcpy_{found[1].lower().replace('to', '2').replace('m', 'h')}" if found else "memcpy"
