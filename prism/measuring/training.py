"""A real training step over several processes, each op timed on its rank.

Data parallel: every rank trains the whole model on its microbatches, then all-reduces its gradients
bucket by bucket. Pipeline: every rank is a stage and follows prism's own 1F1B or GPipe order;
neighbours exchange in blocking batched pairs, as Megatron does. Both end with all-reduces over all
ranks, the gradient norm's in a pipeline and the loss's, so that steps begin together. Left out:
overlap of communication with compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prism.jobs.schedule import make_schedule
from prism.measuring.session import Progress
from prism.measuring.tinymodel import Sizes, build_stage, make_buckets

_CLIP = 1.0
_LEARNING_RATE = 1e-4


class Op(NamedTuple):
    """One op as recorded on a rank; times in ns of the machine's monotonic clock."""

    step: int
    name: str
    microbatch: int
    start: int
    end: int
    bytes: float


class Recorder:
    """Writes down when ops begin and end: on the processor at once, on a GPU by events."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device, self.step = torch, device, -1
        self.ops: list[Op] = []
        self._pending: list[tuple[str, int, Any, Any, float]] = []
        self._origin: Any = None
        self._origin_ns = 0

    def begin(self, step: int) -> None:
        """Begin a step; -1 for one that is not kept."""
        self.step = step
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            self._origin = self._event()
            self._origin_ns = time.perf_counter_ns()

    def _event(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def op(
        self, *names: str, microbatch: int = -1, n_bytes: float = float("nan")
    ) -> Iterator[None]:
        """Time what is done inside, as one op or as several that were issued as one."""
        if self.device == "cuda":
            first = self._event()
            yield
            last = self._event()
            self._pending += [(name, microbatch, first, last, n_bytes) for name in names]
            return
        start = time.perf_counter_ns()
        yield
        end = time.perf_counter_ns()
        if self.step >= 0:
            self.ops += [Op(self.step, name, microbatch, start, end, n_bytes) for name in names]

    def finish(self) -> None:
        """End the step: read the events of a GPU."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            for name, microbatch, first, last, n_bytes in self._pending:
                start, end = (
                    self._origin_ns + round(1e6 * self._origin.elapsed_time(event))
                    for event in (first, last)
                )
                if self.step >= 0:
                    self.ops.append(Op(self.step, name, microbatch, start, end, n_bytes))
            self._pending.clear()


class Trainer:
    """One rank of a job: its part of the model, its data, and its step."""

    def __init__(self, spec: dict[str, Any], rank: int, torch: Any) -> None:
        self.torch, self.dist, self.rank = torch, torch.distributed, rank
        self.ranks, self.device = int(spec["ranks"]), str(spec["device"])
        self.pipeline = spec["parallel"] == "pipeline"
        self.sizes = Sizes(**spec["sizes"])
        self.microbatches = int(spec["microbatches"])
        self.dtype = getattr(torch, spec["dtype"])
        self.stages = self.ranks if self.pipeline else 1
        self.stage = rank if self.pipeline else 0
        self.schedule = str(spec["schedule"])
        torch.manual_seed(int(spec["seed"]))
        self.model = build_stage(
            torch, self.sizes, self.stage, self.stages, self.dtype, self.device
        )
        self.buckets = make_buckets(torch, self.model, int(spec["bucket_bytes"]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE)
        self.data = torch.Generator(device=self.device).manual_seed(
            int(spec["seed"]) * 1_000 + (0 if self.pipeline else rank)
        )
        self.record = Recorder(torch, self.device)
        self.losses: list[float] = []
        self.shape = (self.sizes.microbatch_size, self.sizes.seq, self.sizes.hidden)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage == self.stages - 1

    def train_step(self, step: int) -> None:
        """Train one step; recorded from number 0 on."""
        self.record.begin(step)
        tokens = self.torch.randint(
            self.sizes.vocab, (self.microbatches, self.shape[0], self.shape[1] + 1),
            generator=self.data, device=self.device,
        )  # fmt: skip
        self.loss = self.torch.zeros((), device=self.device)
        if self.pipeline:
            self._pipeline(tokens)
            self._clip()
        else:
            for m in range(self.microbatches):
                self._backward(m, *self._forward(m, tokens, None))
            for flat in self.buckets:
                n_bytes = float(flat.numel() * flat.element_size())
                with self.record.op("grads-all-reduce", n_bytes=n_bytes):
                    self.dist.all_reduce(flat)
        with self.record.op("optimizer"):
            if not self.pipeline:
                for flat in self.buckets:
                    flat.div_(self.ranks)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        with self.record.op("loss-all-reduce", n_bytes=4.0):
            self.dist.all_reduce(self.loss)
        with self.record.op("log"):
            self.losses.append(float(self.loss))
        self.record.finish()

    # ------------------------------------------------------------------------- compute
    def _forward(self, m: int, tokens: Any, received: Any) -> tuple[Any, Any]:
        """Forward of a microbatch: what came in, and what goes on or the loss."""
        with self.record.op("forward-compute", microbatch=m):
            x = received if received is not None else tokens[m, :, :-1]
            out = self.model(x)
            if self.is_last:
                cross_entropy = self.torch.nn.functional.cross_entropy
                out = cross_entropy(
                    out.flatten(0, 1).float(), tokens[m, :, 1:].flatten()
                ) / self.microbatches  # fmt: skip
                self.loss += out.detach()
        return received, out

    def _backward(self, m: int, received: Any, out: Any, gradient: Any = None) -> Any:
        """Backward of a microbatch: the gradient of what came in."""
        with self.record.op("backward-compute", microbatch=m):
            self.torch.autograd.backward(out, gradient)
        return None if received is None else received.grad

    def _clip(self) -> None:
        """Gradient norm over all stages, and the gradients scaled by it."""
        with self.record.op("optimizer-clip-main-grad", n_bytes=4.0):
            norm = sum((flat.float().square().sum() for flat in self.buckets), start=self.loss * 0)
            self.dist.all_reduce(norm)
            scale = (_CLIP / (norm.sqrt() + 1e-6)).clamp(max=1.0)
            for flat in self.buckets:
                flat.mul_(scale.to(flat.dtype))

    # ------------------------------------------------------------------------ pipeline
    def _pipeline(self, tokens: Any) -> None:
        """Forward and backward passes in the schedule's order, with blocking exchanges."""
        row = make_schedule(self.schedule, self.stages, self.microbatches)[self.stage]
        order = [("forward" if a.kind == "F" else "backward", a.microbatch) for a in row]
        flying: dict[int, tuple[Any, Any]] = {}
        pending: list[tuple[str, Any]] = []
        steady = self._steady()
        for i, (way, m) in enumerate(order):
            received = self._exchange(way, m, pending)
            if way == "forward":
                flying[m] = self._forward(m, tokens, received)
                sent = None if self.is_last else flying[m][1].detach()
            else:
                sent = self._backward(m, *flying.pop(m), received)
            pending = [] if sent is None else [(way, sent)]
            if pending and not (i in steady and i + 1 in steady):
                self._exchange("", -1, pending)
        if pending:
            self._exchange("", -1, pending)

    def _steady(self) -> range:
        """Return the places in the order where passes take turns.

        There a message goes out together with the next receive, from the neighbour, which does the
        opposite at that time.
        """
        if self.schedule == "gpipe":
            return range(0)
        warmup = min(self.stages - self.stage - 1, self.microbatches)
        return range(warmup, warmup + 2 * (self.microbatches - warmup))

    def _exchange(self, way: str, m: int, pending: list[tuple[str, Any]]) -> Any:
        """Send what is pending and receive what a pass needs, as one; None if it needs nothing."""
        needs = (way == "forward" and not self.is_first) or (way == "backward" and not self.is_last)
        ops, names = [], []
        buffer = None
        for sent_way, message in pending:
            peer = self.rank + (1 if sent_way == "forward" else -1)
            ops.append(self.dist.P2POp(self.dist.isend, message.contiguous(), peer))
            names.append(f"{sent_way}-send")
        if needs:
            buffer = self.torch.empty(self.shape, dtype=self.dtype, device=self.device)
            peer = self.rank + (-1 if way == "forward" else 1)
            ops.append(self.dist.P2POp(self.dist.irecv, buffer, peer))
            names.append(f"{way}-recv")
        pending.clear()
        if not ops:
            return None
        n_bytes = float(np.prod(self.shape) * self.dtype.itemsize)
        with self.record.op(*names, n_bytes=n_bytes):
            for work in self.dist.batch_isend_irecv(ops):
                work.wait()
        if buffer is not None and way == "forward":
            buffer.requires_grad_()
        return buffer


def train_rank(spec: dict[str, Any], rank: int, torch: Any, progress: Progress | None) -> None:
    """Train as one rank, and write its ops to ``spec["folder"]``."""
    trainer = Trainer(spec, rank, torch)
    steps, warm_up = int(spec["steps"]), int(spec["warm_up"])
    first_profiled = steps - int(spec["profile"])
    for step in range(-warm_up, 0):
        trainer.train_step(-1)
        if progress is not None:
            progress(warm_up + step + 1, warm_up + steps)
    folder = Path(spec["folder"])
    for step in range(first_profiled):
        trainer.train_step(step)
        if progress is not None and step % 8 == 0:
            progress(warm_up + step + 1, warm_up + steps)
        if stop_early(trainer, spec, step):
            break
    write_ops(trainer.record.ops, folder / f"rank{rank}.npz")
    if spec["profile"]:
        with profiler(torch, spec, rank) as profile:
            for _ in range(first_profiled, steps):
                trainer.train_step(-1)
                profile.step()


def stop_early(trainer: Trainer, spec: dict[str, Any], step: int) -> bool:
    """Tell all ranks alike whether time is up: the first one's clock decides, every 16 steps."""
    if spec["limit_s"] is None or step % 16 != 15:
        return False
    began = trainer.record.ops[0].start
    over = trainer.torch.tensor(
        [float((time.perf_counter_ns() - began) * 1e-9 > spec["limit_s"])], device=trainer.device
    )
    trainer.dist.broadcast(over, 0)
    return bool(over[0] > 0.0)


@contextmanager
def profiler(torch: Any, spec: dict[str, Any], rank: int) -> Iterator[Any]:
    """Profile into ``kineto/rankN.json``: what prism and others read as a profiler's trace."""
    p = torch.profiler
    kinds = [p.ProfilerActivity.CPU]
    if spec["device"] == "cuda":
        kinds.append(p.ProfilerActivity.CUDA)
    target = Path(spec["folder"]) / "kineto"
    target.mkdir(exist_ok=True)
    with p.profile(activities=kinds, record_shapes=True) as profile:
        yield profile
    profile.export_chrome_trace(str(target / f"rank{rank}.json"))


def write_ops(ops: list[Op], path: Path) -> None:
    """Write a rank's ops as arrays."""
    table: dict[str, Any] = {f: np.array([getattr(op, f) for op in ops]) for f in Op._fields}
    np.savez(path, **table)
