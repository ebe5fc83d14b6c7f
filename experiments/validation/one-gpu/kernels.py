"""Kernels to measure on one device: what is called, its work, and what prism calls it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism.measuring.kernels import BACKENDS, build_call, kernel_cases
from prism.measuring.samples import MeasuredCase, Samples
from prism.measuring.session import Bench, Block, Call, Plan, Timer, run_session

SHORT = {"bfloat16": "bf16", "float32": "fp32"}
ADAM_BYTES = 14.0  # a parameter with bf16 states: weight and two states there and back, gradient
# Cross entropy in fp32 of bf16 logits, both ways [B per logit]: 18 passes where each op is a
# kernel, 4 where they are fused.
LOSS_BYTES = {"eager": 36.0, "compiled": 8.0}
_TRIED = 20  # calls that tell whether the host holds up the device
_QUEUED = 200  # calls that are queued while the device sleeps
_CYCLES = 3e9  # that the device sleeps for a second of the host: above any clock, to be ahead


@dataclass(frozen=True)
class Kernel:
    """One kernel of one size."""

    case: MeasuredCase
    asked: dict[str, Any]  # of prism.kernel: kind, sizes, backend, ...
    build: Callable[[Any, str], Call] | None = None  # by prism.measuring where None
    importance: int = 0  # 0 is measured first

    def call(self, torch: Any, device: str) -> Call:
        """Make the operands and return what is timed, called once."""
        if self.build is None:
            return build_call(self.case, torch, device)
        made = self.build(torch, device)
        made()
        return made


@dataclass
class Figures:
    """What was measured of a kernel."""

    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    settled: bool | None = None
    state: dict[str, Any] = field(default_factory=dict)


class OneCall(Bench):
    """A single call as `run_session` takes it.

    A GPU that is faster than the host launches sleeps until the calls are queued, inside the first
    of them, which does not count.
    """

    def __init__(self, call: Call, timer: Timer, torch: Any, device: str) -> None:
        super().__init__([call], timer)
        self.torch = torch
        self.host_s = host_seconds(call, torch) if device == "cuda" else 0.0

    def block(self, case: int, n: int) -> Block:
        """Make n calls, or as many as are queued."""
        if not self.host_s or n == 1:
            return super().block(case, n)
        n = min(n, _QUEUED)
        cycles = [int(self.host_s * n * _CYCLES)]

        def call() -> None:
            if cycles:
                self.torch.cuda._sleep(cycles.pop())
            self.calls[case]()

        return self.timer.block(call, n)


def host_seconds(call: Call, torch: Any) -> float:
    """Time of the host for a call [s] where it holds up the device, else 0."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_TRIED):
        call()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    return host / _TRIED if host > 0.7 * whole else 0.0


def measure(kernel: Kernel, torch: Any, timer: Timer, device: str, limit_s: float) -> Figures:
    """Call a kernel back to back until its rate settles, then measure; clocks right after."""
    plan = Plan(repetitions=500, limit_s=limit_s, device=device, sustained=True)
    samples = Samples.empty(kernel.case.family, (kernel.case,), {})
    run_session(OneCall(kernel.call(torch, device), timer, torch, device), samples, plan)
    settled, state = samples.attrs["warm_up"][0]["settled"], samples.attrs["states"][-1]
    return Figures(samples.seconds[0], settled, state)


def list_kernels(torch: Any, device: str, quick: bool) -> list[Kernel]:
    """All kernels for a device, the most important first."""
    cuda = device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    found = [*_products(dtype, cuda), *_attention(dtype, cuda), *_memory(dtype, cuda)]
    if cuda and torch.cuda.get_device_capability() >= (8, 9):
        found += _products("float8", cuda)
    found += [*_norms(dtype, cuda), *_adam(dtype, cuda), *_losses(dtype, cuda)]
    if quick:
        found = [kernel for kernel in found if kernel.importance == 0]
    return sorted(found, key=lambda kernel: kernel.importance)


def _products(dtype: str, cuda: bool) -> Iterator[Kernel]:
    """Products; of fp8 with one scale per tensor, as torch._scaled_mm has them."""
    shapes = {
        "8192x8192x8192": 0, "8192x2048x2048": 0, "8192x8192x2048": 0, "8192x2048x8192": 0,
        "2048x8192x8192": 0, "8192x32000x2048": 0, "4096x4096x4096": 1, "8192x28672x8192": 1,
        "8192x1024x2048": 1, "2048x2048x2048": 1, "1024x1024x1024": 1, "16384x53248x16384": 2,
    }  # fmt: skip
    if not cuda:
        shapes = {"64x64x64": 0, "96x64x64": 1}
    fp8 = dtype == "float8"
    cases = kernel_cases("gemm", shapes, "bfloat16" if fp8 else dtype)
    for case, importance in zip(cases, shapes.values(), strict=True):
        m, n, k = (case.settings[size] for size in "mnk")
        asked = {"kind": "gemm", "m": m, "n": n, "k": k, "dtype": SHORT.get(dtype, "fp8")}
        if fp8:
            traffic = float(m * k + k * n + 2 * m * n)
            case = MeasuredCase(f"gemm/{m}x{n}x{k}/fp8", "gemm", case.flop, traffic, asked)
        yield Kernel(case, asked, _fp8(m, n, k) if fp8 else None, importance + fp8)


def _fp8(m: int, n: int, k: int) -> Callable[[Any, str], Call]:
    def build(torch: Any, device: str) -> Call:
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        product = torch._scaled_mm
        return lambda: product(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return build


def _attention(dtype: str, cuda: bool) -> Iterator[Kernel]:
    shapes = {"2x16x4096x128": 0, "1x32x8192x128": 1, "4x32x2048x128": 1, "4x16x2048x64": 1,
              "1x16x16384x128": 2}  # fmt: skip
    if not cuda:
        shapes = {"1x2x32x16": 0, "1x2x64x16": 1}
    for backend in BACKENDS:
        for shape, importance in shapes.items():
            if backend == "math" and int(shape.split("x")[2]) > 4096:
                continue  # its scores do not fit
            for case in kernel_cases("attention", [shape], dtype, backend=backend):
                s = case.settings
                asked = {
                    "kind": "attention", "batch": s["batch"], "heads": s["heads"], "seq": s["seq"],
                    "head_dim": s["dim"], "backend": backend, "dtype": SHORT[dtype],
                    "backward": s["way"] == "backward",
                }  # fmt: skip
                yield Kernel(case, asked, None, importance + (backend in ("efficient", "math")))


def _memory(dtype: str, cuda: bool) -> Iterator[Kernel]:
    shapes = {"8192x16384": 0, "8192x2048": 1} if cuda else {"64x64": 0}
    for shape, importance in shapes.items():
        cases = kernel_cases("memory", [shape], dtype)
        case = next(x for x in cases if x.settings["op"] == "copy")
        yield Kernel(case, {"kind": "memory", "bytes": case.bytes}, None, importance)


def _norms(dtype: str, cuda: bool) -> Iterator[Kernel]:
    shapes = {(8192, 2048): 0, (8192, 4096): 1, (8192, 16384): 1} if cuda else {(32, 64): 0}
    size = 2.0 if dtype == "bfloat16" else 4.0
    for (rows, columns), importance in shapes.items():
        for mode in ("eager", "compiled"):
            for way, arrays in (("forward", 2.0), ("backward", 3.0)):
                label = f"rms_norm-{way}/{rows}x{columns}/{dtype}/{mode}"
                case = MeasuredCase(label, "rms_norm", 0.0, arrays * size * rows * columns)
                asked = {"kind": "rms_norm", "rows": rows, "columns": columns, "backend": mode,
                         "backward": way == "backward"}  # fmt: skip
                build = _norm(rows, columns, dtype, mode, way)
                yield Kernel(case, asked, build, importance)


def _norm(rows: int, columns: int, dtype: str, mode: str, way: str) -> Callable[[Any, str], Call]:
    def build(torch: Any, device: str) -> Call:
        made = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": True}
        x, weight = torch.randn(rows, columns, **made), torch.ones(columns, **made)

        def norm(x: Any, weight: Any) -> Any:
            return torch.nn.functional.rms_norm(x, (columns,), weight, 1e-5)

        run = torch.compile(norm, dynamic=False) if mode == "compiled" else norm
        if way == "forward":
            return lambda: run(x, weight)
        # buffers that backward may overwrite would allow one call of it only
        with importlib.import_module("torch._functorch.config").patch(donated_buffer=False):
            out = run(x, weight)
            gradient = torch.randn_like(out)
            torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)
        return lambda: torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)

    return build


def _adam(dtype: str, cuda: bool) -> Iterator[Kernel]:
    for n, importance in ({2**28: 0, 2**24: 1} if cuda else {2**12: 0}).items():
        n_bytes = ADAM_BYTES * n * (1.0 if dtype == "bfloat16" else 2.0)
        case = MeasuredCase(f"adamw-fused/{n}/{dtype}", "adamw", 0.0, n_bytes)

        def build(torch: Any, device: str, n: int = n) -> Call:
            weight = torch.randn(n, dtype=getattr(torch, dtype), device=device, requires_grad=True)
            weight.grad = torch.randn_like(weight)
            step: Call = torch.optim.AdamW([weight], lr=1e-4, fused=True).step
            return step

        yield Kernel(case, {"kind": "memory", "bytes": n_bytes}, build, importance)


def _losses(dtype: str, cuda: bool) -> Iterator[Kernel]:
    tokens, vocab = (8192, 32000) if cuda else (32, 64)
    for mode, n_bytes in LOSS_BYTES.items():
        label = f"cross_entropy-both/{tokens}x{vocab}/{dtype}/{mode}"
        case = MeasuredCase(label, "cross_entropy", 0.0, n_bytes * tokens * vocab)

        def build(torch: Any, device: str, mode: str = mode) -> Call:
            made = {"dtype": getattr(torch, dtype), "device": device}
            logits = torch.randn(tokens, vocab, **made, requires_grad=True)
            target = torch.randint(vocab, (tokens,), device=device)

            def loss(logits: Any) -> Any:
                return torch.nn.functional.cross_entropy(logits.float(), target)

            run = torch.compile(loss, dynamic=False) if mode == "compiled" else loss
            return lambda: torch.autograd.grad(run(logits), logits)

        yield Kernel(case, {"kind": "memory", "bytes": case.bytes}, build, 0)
