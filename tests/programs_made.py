"""Training steps of several kinds for `deviceprogram`; options change the program or its noise."""

from __future__ import annotations

from collections.abc import Sequence

from deviceprogram import Action, Program

BACK = "Memcpy DtoH (Device -> Pageable)"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
KERNELS = {
    "norm": ("void at::native::rms_norm<bf16>", "aten::rms_norm"),
    "gemm": ("nvjet_tst_128x256_64x4_NT", "aten::mm"),
    "silu": ("void at::native::silu<bf16>", "aten::silu"),
    "flash_fwd": ("flash_fwd_kernel<128>", "aten::_flash_attention_forward"),
    "flash_bwd": ("flash_bwd_kernel<128>", "aten::_flash_attention_backward"),
}
"""Names and host ops of a layer's kernels."""


# -------------------------------------------------------------------------------------- actions
def kernel(name: str, us: float, **options) -> Action:
    """Launch of a kernel, copy or fill of `us` microseconds."""
    return Action("launch", name, 1e-6 * us, **options)


def item(stream: int = 7, pinned: bool = False, **options) -> list[Action]:
    """Read a scalar: the copy to pageable memory, or else the call after it, returns at its end."""
    name = BACK.replace("Pageable", "Pinned") if pinned else BACK
    options = {"op": "aten::_local_scalar_dense", "n_bytes": 4, **options}
    short = {"python": 3e-6, "call": 2e-6}
    return [kernel(name, 1.5, stream=stream, **options), Action("sync", stream=stream, **short)]


def wait(event: str, on: int, stream: int) -> list[Action]:
    """Let `stream` wait for what `on` holds now."""
    short = {"event": event, "python": 1e-6, "call": 1e-6}
    return [Action("record", stream=on, **short), Action("wait", stream=stream, **short)]


def all_reduce(us: float, group: Sequence[int], n_bytes: int, stream: int = 20) -> Action:
    """All-reduce of `us` microseconds from the last arrival."""
    host = {"op": "c10d::allreduce_", "python": 30e-6, "thread": 2}
    return Action(
        "collective", NCCL, 1e-6 * us, stream, group=tuple(group), n_bytes=n_bytes, **host
    )


def optimizer(n: int, us: float, **options) -> list[Action]:
    """Fused AdamW of `n` kernels."""
    return [kernel(ADAM, us, op="aten::_fused_adamw_", optimizer=True, **options)] * n


def layers(n: int, us: float, **options) -> list[Action]:
    """Forward of `n` layers of five kernels, `us` microseconds on average."""
    of_one = (("norm", 0.4), ("gemm", 1.6), ("flash_fwd", 1.2), ("gemm", 1.4), ("silu", 0.4))
    return [_of_layer(kind, factor * us, **options) for kind, factor in of_one] * n


def backward(n: int, us: float, **options) -> list[Action]:
    """Backward of `n` layers of nine kernels and a fill, from another host thread."""
    options = {"thread": 2, **options}
    of_one = [("flash_bwd", 2.8), *[("gemm", 1.4)] * 4, ("silu", 0.4), *[("norm", 0.4)] * 3]
    fill = kernel("Memset (Device)", 1.0, op="aten::zero_", n_bytes=4096, **options)
    return [fill, *(_of_layer(kind, factor * us, **options) for kind, factor in of_one)] * n


def _of_layer(kind: str, us: float, **options) -> Action:
    name, op = KERNELS[kind]
    return kernel(name, us, op=op, **options)


def load(python: float = 2e-4) -> Action:
    """Copy of the batch, after its Python."""
    host = {"op": "aten::copy_", "python": python}
    return kernel("Memcpy HtoD (Pinned -> Device)", 20.0, n_bytes=1 << 20, **host)


def job(actions: Sequence[Action], n_ranks: int = 1, **options) -> Program:
    """Make a program of the same step on all ranks, with noise."""
    noise = {"kernel_cv": 0.03, "host_cv": 0.1, "step_cv": 0.01}
    return Program((actions,) * n_ranks, **(noise | options))


# ------------------------------------------------------------------------------------- programs
def device_bound(**options) -> Program:
    """Kernels of 0.1 ms, launched in 20 us each: the host runs ahead until its queue is full."""
    passes = [*layers(12, 100.0), *backward(12, 100.0)]
    return job([load(), *passes, *optimizer(6, 250.0)], **options)


def host_bound(**options) -> Program:
    """Kernels of 20 us, launched in 60 us each."""
    slow = {"python": 52e-6}
    passes = [*layers(12, 20.0, **slow), *backward(12, 20.0, **slow)]
    return job([load(), *passes, *optimizer(6, 40.0, **slow)], **options)


def mixed(python: float = 75e-6, **options) -> Program:
    """Forward host-bound, backward device-bound, and a host that runs ahead over both together.

    With `python` of 125e-6 the host is the slower one: gaps in every forward pass.
    """
    passes = [*layers(20, 8.0, python=python), *backward(20, 65.0)]
    return job([load(), *passes, *optimizer(6, 250.0)], **options)


def blocked(**options) -> Program:
    """The loss is read at the end of each step, then the host prepares the next batch."""
    passes = [*layers(12, 25.0, python=30e-6), *backward(12, 65.0)]
    return job([load(2e-3), *passes, *optimizer(6, 250.0), *item()], **options)


def data_parallel(n: int, us: float, transfer_us: float, n_ranks: int) -> list[Action]:
    """All-reduce of every second layer's gradients on another stream, joined by the optimizer."""
    found = [load(), *layers(n, us)]
    for i in range(1, n, 2):
        found += [*backward(2, us), *wait(f"gradients {i}", 7, 20)]
        found.append(all_reduce(transfer_us, range(n_ranks), 16_000_000 + 2 * i))
    return [*found, *wait("reduced", 20, 7), *optimizer(6, 150.0)]


def two_streams(**options) -> Program:
    """Two ranks whose all-reduces are hidden behind the backward pass, but for the last one."""
    return job(data_parallel(12, 70.0, 1200.0, 2), 2, **options)


def cuda_graphs(**options) -> Program:
    """Forward and backward pass are one CUDA graph each; loss and optimizer are launched alone."""
    passes = [
        Action("graph", graph=tuple(k for action in made for k in action.kernels), python=3e-4,
               call=6e-5) for made in (layers(12, 80.0), backward(12, 80.0))
    ]  # fmt: skip
    loss = [kernel("void at::native::nll_loss<float>", 40.0, op="aten::nll_loss")] * 3
    return job([load(), passes[0], *loss, passes[1], *optimizer(6, 250.0)], **options)


def eight_ranks(**options) -> Program:
    """Data parallel over eight ranks, of which rank 5 is 8 % slower."""
    slow = {"slowness": tuple(1.08 if r == 5 else 1.0 for r in range(8))}
    return job(data_parallel(6, 120.0, 1500.0, 8), 8, **(slow | options))


PROGRAMS = {
    made.__name__: made
    for made in (device_bound, host_bound, mixed, blocked, two_streams, cuda_graphs, eight_ranks)
}
