"""Kernels of one device as cases: matrix products, attention, memory-bound kernels.

Each case is named by its sizes and number format; `build_call` makes the operands and returns what
is timed. Work and traffic are counted as `prism.workload.kernels` counts them, so that rates
compare with its roofline. Left out: collectives (`prism.measuring.collectives`), fused kernels of a
framework's own.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prism.common.errors import PrismError, named
from prism.measuring.samples import Case
from prism.measuring.timers import Call
from prism.measuring.torchlib import DTYPES
from prism.workload.kernelcost import KINDS

GEMM_SHAPES: dict[str, tuple[str, ...]] = {
    "cpu": ("256x256x256", "512x512x512", "1024x512x512"),
    "cuda": ("1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192"),
}
ATTENTION_SHAPES: dict[str, tuple[str, ...]] = {
    "cpu": ("2x4x128x64", "2x4x256x64"),
    "cuda": ("1x16x2048x128", "1x16x4096x128", "1x16x8192x128"),
}
MEMORY_SHAPES: dict[str, tuple[str, ...]] = {
    "cpu": ("512x512", "2048x1024"),
    "cuda": ("4096x4096", "8192x8192"),
}

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


def parse_sizes(text: str, n: int, form: str) -> tuple[int, ...]:
    """Read sizes such as ``1024x512x256``.

    Examples
    --------
    >>> parse_sizes("1024x512x256", 3, "MxNxK")
    (1024, 512, 256)
    """
    parts = re.split(r"[xX*]", text.strip())
    if len(parts) != n or not all(p.isascii() and p.isdecimal() and int(p) > 0 for p in parts):
        raise PrismError(f"--shape {text}: expected {form}, such as {'x'.join(['512'] * n)}")
    return tuple(int(part) for part in parts)


def gemm_cases(shapes: Iterable[str], dtype: str) -> list[Case]:
    """Products of an [M, K] and a [K, N] matrix."""
    cases = []
    for text in shapes:
        m, n, k = parse_sizes(text, 3, "MxNxK")
        traffic = float(DTYPES[dtype] * (m * k + k * n + m * n))
        settings = {"m": m, "n": n, "k": k, "dtype": dtype}
        label = f"gemm/{m}x{n}x{k}/{dtype}"
        cases.append(Case(label, "gemm", 2.0 * m * n * k, traffic, settings))
    return cases


def attention_cases(
    shapes: Iterable[str], dtype: str, backend: str | Callable[[tuple[int, ...]], str]
) -> list[Case]:
    """Causal attention, forward and backward, of batch x heads x sequence x head size.

    By a backend of `BACKENDS`, or the one that a function names by the sizes.
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        raise PrismError(f"--backend {backend}: expected one of {', '.join(BACKENDS)}")
    cases = []
    for text in shapes:
        b, h, s, d = parse_sizes(text, 4, "BATCHxHEADSxSEQxDIM")
        by = backend if isinstance(backend, str) else backend((b, h, s, d))
        flop = 2.0 * b * h * s * s * d  # two products of 2 s^2 d, of which causality needs half
        array = float(DTYPES[dtype] * b * h * s * d)
        settings = {"batch": b, "heads": h, "seq": s, "dim": d, "dtype": dtype, "backend": by}
        for way, work, arrays in (
            ("forward", flop, _FORWARD_ARRAYS),
            ("backward", KINDS["attention"].backward_flop * flop, _BACKWARD_ARRAYS),
        ):
            label = f"attention-{way}/{b}x{h}x{s}x{d}/{dtype}/{by}"
            cases.append(Case(label, "attention", work, arrays * array, settings | {"way": way}))
    return cases


def memory_cases(shapes: Iterable[str], dtype: str) -> list[Case]:
    """Layer norm, sum, softmax and copy of a [rows, width] array."""
    cases = []
    for text in shapes:
        rows, width = parse_sizes(text, 2, "ROWSxWIDTH")
        for op, arrays in MEMORY_OPS.items():
            traffic = arrays * DTYPES[dtype] * rows * width
            settings = {"op": op, "rows": rows, "width": width, "dtype": dtype}
            cases.append(Case(f"{op}/{rows}x{width}/{dtype}", "memory", 0.0, traffic, settings))
    return cases


def build_call(case: Case, torch: Any, device: str) -> Call:
    """Make a case's operands and return the call that is timed."""
    try:
        call = _BUILDERS[case.family](case, torch, device)
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


def expect_seconds(cases: Sequence[Case], torch: Any, device: str) -> list[float]:
    """How long one call of each case may take [s], by two small kernels run before.

    Notes
    -----
    The longer of its work at the rate of a small matrix product of the same number format, and of
    its traffic at that of a copy; the best of a few calls each, so that it is rather too short.
    """
    made = {"dtype": getattr(torch, cases[0].settings["dtype"]), "device": device}
    n = _PROBE[device]
    a, out = torch.randn(n, n, **made), torch.empty(n, n, **made)
    product = _best_of(lambda: torch.mm(a, a, out=out), torch, device)
    copy = _best_of(lambda: out.copy_(a), torch, device)
    flop_s, byte_s = product / (2.0 * n**3), copy / (2.0 * n * n * a.element_size())
    return [max(case.flop * flop_s, case.bytes * byte_s) for case in cases]


def _best_of(call: Call, torch: Any, device: str) -> float:
    """Shortest of some calls [s], the first left out."""
    seconds = []
    for _ in range(_PROBES + 1):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _gemm(case: Case, torch: Any, device: str) -> Call:
    s = case.settings
    made = {"dtype": getattr(torch, s["dtype"]), "device": device}
    a, b = torch.randn(s["m"], s["k"], **made), torch.randn(s["k"], s["n"], **made)
    out = torch.empty(s["m"], s["n"], **made)
    return lambda: torch.mm(a, b, out=out)


def _attention(case: Case, torch: Any, device: str) -> Call:
    s = case.settings
    made = {"dtype": getattr(torch, s["dtype"]), "device": device}
    backward = s["way"] == "backward"
    shape = (s["batch"], s["heads"], s["seq"], s["dim"])
    q, k, v = (torch.randn(*shape, **made, requires_grad=backward) for _ in range(3))
    attend = attention_by(s["backend"], torch)
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                attend(q, k, v, is_causal=True)

        return forward
    out = attend(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def choose_attention(torch: Any, dtype: str, device: str) -> Callable[[tuple[int, ...]], str]:
    """Return what names, by batch, heads, sequence and head size, the backend that torch picks.

    On a processor ``math``, which has no other of these.
    """

    def choose(sizes: tuple[int, ...]) -> str:
        if device == "cpu":
            return "math"
        made = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": True}
        chosen = torch._fused_sdp_choice(*(torch.empty(*sizes, **made),) * 3, is_causal=True)
        known = importlib.import_module("torch.nn.attention").SDPBackend
        name = known(chosen).name if isinstance(chosen, int) else chosen.name
        found = [own for own, theirs in BACKENDS.items() if theirs == name]
        if not found:
            raise PrismError(
                f"attention of {'x'.join(map(str, sizes))} in {dtype}: torch picks {name}, which "
                f"has no name here; give {named('backend')} {', '.join(BACKENDS)}"
            )
        return found[0]

    return choose


def attention_by(backend: str, torch: Any) -> Callable[..., Any]:
    """Return scaled_dot_product_attention by a backend of `BACKENDS`."""
    attend: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
    module = importlib.import_module("torch.nn.attention")
    chosen = getattr(module.SDPBackend, BACKENDS[backend])

    def by_backend(*args: Any, **options: Any) -> Any:
        with module.sdpa_kernel(chosen):
            return attend(*args, **options)

    return by_backend


def _memory(case: Case, torch: Any, device: str) -> Call:
    s = case.settings
    made = {"dtype": getattr(torch, s["dtype"]), "device": device}
    x, y = (torch.randn(s["rows"], s["width"], **made) for _ in range(2))
    out = torch.empty_like(x)
    if s["op"] == "layernorm":
        weight, bias = torch.ones(s["width"], **made), torch.zeros(s["width"], **made)
        norm = torch.nn.functional.layer_norm
        return lambda: norm(x, (s["width"],), weight, bias)
    if s["op"] == "softmax":
        return lambda: torch.softmax(x, dim=-1, out=out)
    if s["op"] == "add":
        return lambda: torch.add(x, y, out=out)
    return lambda: out.copy_(x)


_BUILDERS = {"gemm": _gemm, "attention": _attention, "memory": _memory}
