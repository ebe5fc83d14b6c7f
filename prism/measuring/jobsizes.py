"""The sizes that a job's ranks run: products, attention, memory-bound arrays, messages.

They are read from the job's own workload, tensor, context and expert parallelism applied, so that
what is measured is what `prism estimate` needs. Left out: how often each occurs in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prism.common.errors import PrismError
from prism.jobs.frameworks import FRAMEWORKS
from prism.jobs.job import Job, load_job
from prism.jobs.ops import Attention, Op, Product, share_of
from prism.workload.build import Collective, Workload, build_workload, nominal_library
from prism.workload.layers import layer_ops, loss_ops, model_layers

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _whole(size: float) -> int:
    return max(1, round(size))


def job_shapes(named: str, kind: str) -> tuple[str, ...]:
    """Shapes of a kind that one rank of a job runs, as `--shape` takes them."""
    job = _sized(named)
    ops = [*_ops(job)][::-1]  # of the logits first, whose operand is whole
    if kind == "memory":
        return _first(named, kind, ((op.rows, op.depth) for op in ops if isinstance(op, Product)))
    if kind == "attention":
        found = [op for op in ops if isinstance(op, Attention)]
        sizes = ((op.sequences, op.heads, op.rows / op.sequences, op.head_size) for op in found)
        return _first(named, kind, sizes)
    shapes: dict[str, None] = {}
    for m, n, k in _products(job):
        shapes.setdefault(f"{_whole(m)}x{_whole(n)}x{_whole(k)}")
    return tuple(shapes)


def _first(named: str, kind: str, sizes: Iterable[tuple[float, ...]]) -> tuple[str, ...]:
    """Write the first of some sizes."""
    for found in sizes:
        return ("x".join(str(_whole(size)) for size in found),)
    raise PrismError(f"{named}: its layers have nothing for {kind}; name shapes with --shape")


def _ops(job: Job) -> Iterator[Op]:
    """Every op of a layer of each kind, and of the loss."""
    share, kinds = share_of(job.parallelism), dict.fromkeys(model_layers(job.model))
    for layer in kinds:
        yield from layer_ops(job.model, share, layer)
    yield from loss_ops(job.model, share)


def _products(job: Job) -> Iterator[tuple[float, float, float]]:
    """Every product of a layer and of the loss: forward, and the gradients of both operands."""
    fused = FRAMEWORKS[job.parallelism.framework].fused_products
    for op in _ops(job):
        if isinstance(op, Product):
            rows = op.rows / op.groups
            for n in (op.width,) if fused else (part.width for part in op.parts):
                yield rows, n, op.depth
                yield rows, op.depth, n
                yield op.depth, n, rows


def job_messages(named: str) -> tuple[tuple[str, int], ...]:
    """List a job's collectives and transfers: op_kind (``p2p``: transfer) and message [byte]."""
    job = _sized(named)
    found: dict[tuple[str, int], None] = {}
    for op, n_bytes in _messages(build_workload(job, nominal_library(job, None))):
        if n_bytes >= 1.0:
            found.setdefault((op, _whole(n_bytes)))
    if not found:
        raise PrismError(f"{named}: its ranks send nothing; expected a job of several GPUs")
    return tuple(found)


def _messages(work: Workload) -> Iterator[tuple[str, float]]:
    """Every message of a workload."""
    for row in work.chunks:
        for chunk in row:
            for kernel in (*chunk.forward, *chunk.backward):
                for op in OPS:
                    if kernel.group and kernel.kernel_class.endswith(op):
                        yield op, kernel.bytes
    each = [chunk for rows in (work.gathers, work.reduces) for row in rows for chunk in row]
    shared: list[Collective | None] = [collective for chunk in each for collective in chunk]
    shared += [work.layernorm_reduce, work.embedding_reduce, work.grad_norm_reduce]
    shared += [collective for row in work.param_gathers for collective in row]
    for collective in shared:
        if collective is not None:
            yield collective.op_kind, collective.bytes
    if work.transfer is not None:
        yield "p2p", work.transfer.bytes


def _sized(named: str) -> Job:
    """Load a job that has a model's sizes."""
    job = load_job(named)
    if job.model.durations is not None:
        raise PrismError(
            f"--job {named}: gives durations, not a model's sizes, so it says no shapes; name them "
            "with --shape, or give a job with a model"
        )
    return job
