"""A decoder to train on one device: RMSNorm, RoPE, grouped KV heads, SwiGLU, fp32 cross entropy."""

from __future__ import annotations

import importlib
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism.measuring.kernels import BACKENDS

WARM_UP = 5
PROFILED = 8


@dataclass(frozen=True)
class Model:
    """Sizes of a model, and of a step; names of fields as in a job's file."""

    n_layers: int
    hidden_size: int
    ffn_size: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    microbatch_size: int
    microbatches: int = 2

    @property
    def parameters(self) -> int:
        """Count weights."""
        h, kv = self.hidden_size, self.hidden_size * self.n_kv_heads // self.n_heads
        layer = h * (2 * h + 2 * kv + 3 * self.ffn_size + 2)
        return self.n_layers * layer + 2 * self.vocab_size * h + h


MODELS = {
    "1.1b": Model(16, 2048, 8192, 16, 8, 32_000, 4_096, 2),
    "2.5b-wide": Model(10, 4096, 14_336, 32, 8, 32_000, 4_096, 2),
    "0.3b": Model(16, 1024, 4096, 16, 8, 32_000, 2_048, 4),
}
"""The most important first."""

SMALL = {
    "1.1b": Model(2, 64, 128, 4, 2, 128, 32, 2),
    "2.5b-wide": Model(1, 128, 256, 4, 2, 128, 32, 2),
    "0.3b": Model(2, 32, 64, 2, 1, 128, 32, 2),
}
"""The same for a try on a processor."""


class Training:
    """A model, its data, its optimizer and its step."""

    def __init__(self, torch: Any, model: Model, device: str, compiled: bool, backend: str) -> None:
        self.torch, self.model, self.device = torch, model, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(1)
        with torch.device(device):
            layers = [build_layer(torch, model).to(dtype) for _ in range(model.n_layers)]
            self.ends = build_ends(torch, model).to(dtype)
        weights = [weight for part in (*layers, self.ends) for weight in part.parameters()]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        shape = (model.microbatches, model.microbatch_size, model.seq_len + 1)
        self.data = torch.randint(model.vocab_size, shape, device=device)
        self.turn = rotation(torch, model, device, dtype)
        self.calls = [*layers, self.ends]
        if compiled:  # layer by layer, as torchtitan
            self.calls = [torch.compile(part, dynamic=False) for part in self.calls]
        self.backend = backend

    def attention(self) -> Any:
        """Return the context in which attention has its backend."""
        if not self.backend:
            return nullcontext()
        module = importlib.import_module("torch.nn.attention")
        return module.sdpa_kernel(getattr(module.SDPBackend, BACKENDS[self.backend]))

    def step(self) -> None:
        """Train one step."""
        for tokens in self.data:
            x = self.torch.nn.functional.embedding(tokens[:, :-1], self.ends.embedding)
            for layer in self.calls[:-1]:
                x = layer(x, *self.turn)
            loss = self.calls[-1](x, tokens[:, 1:])
            (loss / self.model.microbatches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> None:
        """Train some steps that are not counted, the compiler's among them."""
        with self.attention():
            for _ in range(WARM_UP):
                self.step()
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def periods(self, seconds: float, most: int = 200) -> np.ndarray:
        """Train steps for some seconds, and return the device's time from step to step [s]."""
        cuda, marks, events = self.device == "cuda", [], []
        began = time.perf_counter()
        with self.attention():
            while len(marks) < most and (
                time.perf_counter() - began < seconds or len(marks) < WARM_UP
            ):
                self.step()
                marks.append(time.perf_counter())
                if cuda:
                    events.append(self.torch.cuda.Event(enable_timing=True))
                    events[-1].record()
                    if len(events) > 2:  # the host stays two steps ahead, so that time is kept
                        events[-3].synchronize()
        self.wait()
        if not cuda:
            return np.diff(marks)
        pairs = zip(events, events[1:], strict=False)
        return np.array([1e-3 * first.elapsed_time(last) for first, last in pairs])

    def peak_bytes(self) -> float:
        """Most memory that was allocated so far [B]; NaN on a processor."""
        if self.device != "cuda":
            return float("nan")
        return float(self.torch.cuda.max_memory_allocated())

    def profile(self, path: Path) -> None:
        """Profile some steps into a Kineto trace."""
        profiler = self.torch.profiler
        kinds = [profiler.ProfilerActivity.CPU]
        kinds += [profiler.ProfilerActivity.CUDA] * (self.device == "cuda")
        with self.attention(), profiler.profile(activities=kinds, record_shapes=True) as recorded:
            for _ in range(PROFILED):
                self.step()
                recorded.step()
            self.wait()
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))


def rotation(torch: Any, model: Model, device: str, dtype: Any) -> tuple[Any, Any]:
    """Cosine and sine of RoPE [token, half of a head]."""
    half = model.hidden_size // model.n_heads // 2
    frequency = 500_000.0 ** (-torch.arange(half, device=device) / half)
    angle = torch.outer(torch.arange(model.seq_len, device=device), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def build_layer(torch: Any, model: Model) -> Any:
    """Return one layer as a module."""
    nn, h = torch.nn, model.hidden_size
    d = h // model.n_heads
    groups = model.n_heads // model.n_kv_heads

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
            self.q, self.out = (nn.Linear(h, h, bias=False) for _ in range(2))
            self.k, self.v = (nn.Linear(h, model.n_kv_heads * d, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(h, model.ffn_size, bias=False) for _ in range(2))
            self.down = nn.Linear(model.ffn_size, h, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            y = self.norm1(x)
            q, k, v = (f(y).unflatten(-1, (-1, d)) for f in (self.q, self.k, self.v))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            y = self.norm2(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    return Layer()


def build_ends(torch: Any, model: Model) -> Any:
    """Return what follows the layers as a module, the loss with it; it holds the embedding too."""
    nn, h = torch.nn, model.hidden_size

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Parameter(0.02 * torch.randn(model.vocab_size, h))
            self.norm, self.head = nn.RMSNorm(h, eps=1e-5), nn.Linear(h, model.vocab_size, False)

        def forward(self, x: Any, target: Any) -> Any:
            logits = self.head(self.norm(x)).flatten(0, 1).float()
            return nn.functional.cross_entropy(logits, target.flatten())

    return Ends()
