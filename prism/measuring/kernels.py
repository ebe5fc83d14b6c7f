"""Kernels of one device as cases: matrix products, attention, memory-bound kernels.

`KERNELS` has a row for each kind: how sizes are written, which are measured where none are asked
for, the cases of some sizes, and what makes the operands of a case and returns what is timed. Work
and traffic are counted as `prism.workload.kernels` counts them, so that rates compare with its
roofline. Left out: collectives (`prism.measuring.collectives`), fused kernels of a framework's own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prism.common.errors import PrismError, option
from prism.measuring.machine import DTYPES, load_torch
from prism.measuring.samples import MeasuredCase
from prism.measuring.session import Call, Timer
from prism.workload.kernelcost import KINDS

BACKENDS = {
    "cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}  # fmt: skip
"""Backends of attention, and what `torch.nn.attention.SDPBackend` calls them."""

MEMORY_OPS = {"layernorm": 2.0, "add": 3.0, "softmax": 2.0, "copy": 2.0}
"""Memory-bound kernels, and how many arrays each reads and writes: what has to move, no more."""

_PROBE = {"cpu": 256, "cuda": 4096}  # rows of the product that tells a device's rate
_PROBES = 5
_BACKWARD_ARRAYS = 8.0  # reads q, k, v, out and its gradient, writes three gradients
_FORWARD_ARRAYS = 4.0

Sizes = tuple[int, ...]


class Kernel(NamedTuple):
    """A kind of kernel."""

    form: str  # of its sizes
    shapes: dict[str, tuple[str, ...]]  # by device, where none are asked for
    cases: Callable[
        [Sizes, str, str], Iterator[MeasuredCase]
    ]  # of sizes, number format and backend
    build: Callable[[dict[str, Any], Any, dict[str, Any]], Call]  # of a case's settings


def kernel_cases(
    kind: str, shapes: Iterable[str], dtype: str, device: str = "cpu", backend: str | None = None
) -> list[MeasuredCase]:
    """Cases of a kind of kernel; attention by a backend of `BACKENDS`, else by torch's choice."""
    if backend not in (None, *BACKENDS):
        raise PrismError(f"{option('backend')} {backend}: expected one of {', '.join(BACKENDS)}")
    found: list[MeasuredCase] = []
    for text in shapes:
        sizes = parse_sizes(text, KERNELS[kind].form)
        by = backend or (choose_attention(sizes, dtype, device) if kind == "attention" else "")
        found += KERNELS[kind].cases(sizes, dtype, by)
    return found


def parse_sizes(text: str, form: str) -> Sizes:
    """Read sizes such as ``1024x512x256``.

    Examples
    --------
    >>> parse_sizes("1024x512x256", "MxNxK")
    (1024, 512, 256)
    """
    parts, n = re.split(r"[xX*]", text.strip()), form.count("x") + 1
    if len(parts) != n or not all(p.isascii() and p.isdecimal() and int(p) > 0 for p in parts):
        raise PrismError(f"--shape {text}: expected {form}, such as {'x'.join(['512'] * n)}")
    return tuple(map(int, parts))


def choose_attention(sizes: Sizes, dtype: str, device: str) -> str:
    """Name the backend that torch picks for batch, heads, sequence and head size.

    On a processor ``math``, which has no other of these.
    """
    if device == "cpu":
        return "math"
    torch = load_torch()
    made = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": True}
    chosen = torch._fused_sdp_choice(*(torch.empty(*sizes, **made),) * 3, is_causal=True)
    known = importlib.import_module("torch.nn.attention").SDPBackend
    name = known(chosen).name if isinstance(chosen, int) else chosen.name
    for own, theirs in BACKENDS.items():
        if theirs == name:
            return own
    raise PrismError(
        f"attention of {'x'.join(map(str, sizes))} in {dtype}: torch picks {name}, which "
        f"has no name here; give {option('backend')} {', '.join(BACKENDS)}"
    )


def build_call(case: MeasuredCase, torch: Any, device: str) -> Call:
    """Make a case's operands and return the call that is timed."""
    try:
        made = {"dtype": getattr(torch, case.settings["dtype"]), "device": device}
        call = KERNELS[case.family].build(dict(case.settings), torch, made)
        call()
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).splitlines()[0]
        other = (
            "--shape, --dtype or --backend" if case.family == "attention" else "--shape or --dtype"
        )
        raise PrismError(
            f"{case.label}: does not run on this device: {text}; choose another {other}"
        ) from None
    return call


def expect_seconds(
    cases: Sequence[MeasuredCase], torch: Any, device: str, timer: Timer
) -> list[float]:
    """How long one call of each case may take [s], by two small kernels run before.

    Notes
    -----
    The longer of its work at the rate of a small matrix product of the same number format, and of
    its traffic at that of a copy; the best of a few calls each, so that it is rather too short.
    """
    made = {"dtype": getattr(torch, cases[0].settings["dtype"]), "device": device}
    n = _PROBE[device]
    a, out = torch.randn(n, n, **made), torch.empty(n, n, **made)
    product, copy = (
        float(timer.block(call, _PROBES + 1).seconds[1:].min())
        for call in (lambda: torch.mm(a, a, out=out), lambda: out.copy_(a))
    )
    flop_s, byte_s = product / (2.0 * n**3), copy / (2.0 * n * n * a.element_size())
    return [max(case.flop * flop_s, case.bytes * byte_s) for case in cases]


def _gemm_cases(sizes: Sizes, dtype: str, _: str) -> Iterator[MeasuredCase]:
    """Product of an [M, K] and a [K, N] matrix."""
    m, n, k = sizes
    traffic = float(DTYPES[dtype] * (m * k + k * n + m * n))
    settings = {"m": m, "n": n, "k": k, "dtype": dtype}
    yield MeasuredCase(f"gemm/{m}x{n}x{k}/{dtype}", "gemm", 2.0 * m * n * k, traffic, settings)


def _attention_cases(sizes: Sizes, dtype: str, backend: str) -> Iterator[MeasuredCase]:
    """Causal attention, forward and backward."""
    b, h, s, d = sizes
    flop = 2.0 * b * h * s * s * d  # two products of 2 s^2 d, of which causality needs half
    array = float(DTYPES[dtype] * b * h * s * d)
    settings = {"batch": b, "heads": h, "seq": s, "dim": d, "dtype": dtype, "backend": backend}
    for way, work, arrays in (
        ("forward", flop, _FORWARD_ARRAYS),
        ("backward", KINDS["attention"].backward_flop * flop, _BACKWARD_ARRAYS),
    ):
        label = f"attention-{way}/{b}x{h}x{s}x{d}/{dtype}/{backend}"
        yield MeasuredCase(label, "attention", work, arrays * array, settings | {"way": way})


def _memory_cases(sizes: Sizes, dtype: str, _: str) -> Iterator[MeasuredCase]:
    """Layer norm, sum, softmax and copy of a [rows, width] array."""
    rows, width = sizes
    for op, arrays in MEMORY_OPS.items():
        traffic = arrays * DTYPES[dtype] * rows * width
        settings = {"op": op, "rows": rows, "width": width, "dtype": dtype}
        yield MeasuredCase(f"{op}/{rows}x{width}/{dtype}", "memory", 0.0, traffic, settings)


def _gemm(s: dict[str, Any], torch: Any, made: dict[str, Any]) -> Call:
    a, b = torch.randn(s["m"], s["k"], **made), torch.randn(s["k"], s["n"], **made)
    out = torch.empty(s["m"], s["n"], **made)
    return lambda: torch.mm(a, b, out=out)


def _attention(s: dict[str, Any], torch: Any, made: dict[str, Any]) -> Call:
    backward = s["way"] == "backward"
    shape = (s["batch"], s["heads"], s["seq"], s["dim"])
    q, k, v = (torch.randn(*shape, **made, requires_grad=backward) for _ in range(3))
    module = importlib.import_module("torch.nn.attention")
    backend = getattr(module.SDPBackend, BACKENDS[s["backend"]])

    def forward() -> Any:
        with torch.set_grad_enabled(backward), module.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return forward
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _memory(s: dict[str, Any], torch: Any, made: dict[str, Any]) -> Call:
    x, y = (torch.randn(s["rows"], s["width"], **made) for _ in range(2))
    out = torch.empty_like(x)
    weight, bias = torch.ones(s["width"], **made), torch.zeros(s["width"], **made)
    norm = torch.nn.functional.layer_norm
    calls: dict[str, Call] = {
        "layernorm": lambda: norm(x, (s["width"],), weight, bias),
        "softmax": lambda: torch.softmax(x, dim=-1, out=out),
        "add": lambda: torch.add(x, y, out=out),
        "copy": lambda: out.copy_(x),
    }
    return calls[s["op"]]


KERNELS = {
    "gemm": Kernel(
        "MxNxK",
        {"cpu": ("256x256x256", "512x512x512", "1024x512x512"),
         "cuda": ("1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192")},
        _gemm_cases, _gemm,
    ),
    "attention": Kernel(
        "BATCHxHEADSxSEQxDIM",
        {"cpu": ("2x4x128x64", "2x4x256x64"),
         "cuda": ("1x16x2048x128", "1x16x4096x128", "1x16x8192x128")},
        _attention_cases, _attention,
    ),
    "memory": Kernel(
        "ROWSxWIDTH",
        {"cpu": ("512x512", "2048x1024"), "cuda": ("4096x4096", "8192x8192")},
        _memory_cases, _memory,
    ),
}  # fmt: skip
"""Every kind of kernel of one device."""
