"""The sizes that a job's ranks run: products, attention, memory-bound arrays, messages.

They are read from the job's own workload, tensor, context and expert parallelism applied, so that
what is measured is what `prism estimate` needs. Left out: how often each occurs in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from prism.cluster.machine import build_cluster
from prism.common.errors import PrismError
from prism.jobs.job import Job, load_job
from prism.workload.build import Collective, build_workload, nominal_library
from prism.workload.experts import SparseTransformer
from prism.workload.kernels import Kernel, Rates, build_rates
from prism.workload.modelsize import shard_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prism.workload.build import Workload

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class _Recording(Rates):
    """Rates that remember the products they were asked for."""

    seen: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def gemm(
        self, name: str, kernel_class: str, m: float, n: float, k: float, accumulate: bool = False,
        groups: float = 1.0, precision: str = "",
    ) -> Kernel:  # fmt: skip
        """Remember a product; one of each expert, whose tokens are the groups' part."""
        if accumulate:  # a weight's gradient sums over the tokens
            shape = (m, n, k / groups)
        else:
            shape = (m / groups, n, k)
        self.seen.setdefault((_whole(shape[0]), _whole(shape[1]), _whole(shape[2])), name)
        return super().gemm(name, kernel_class, m, n, k, accumulate, groups, precision)


def _whole(size: float) -> int:
    return max(1, round(size))


def job_shapes(named: str, kind: str) -> tuple[str, ...]:
    """Shapes of a kind that one rank of a job runs, as `--shape` takes them."""
    job = _sized(named)
    s = shard_sizes(job.model, job.parallelism)
    if kind == "memory":
        return (f"{_whole(s.tokens)}x{_whole(s.hidden)}",)
    if kind == "attention":
        layout = job.parallelism
        sizes = (
            layout.microbatch_size,
            job.model.n_heads / layout.tp,
            job.model.seq_len / layout.cp,
            job.model.head_size or job.model.hidden_size / job.model.n_heads,
        )
        return ("x".join(str(_whole(size)) for size in sizes),)
    library = nominal_library(job, None)
    cluster = build_cluster(job, library)
    rates = build_rates(cluster, library, job.parallelism)
    recording = _Recording(**{f.name: getattr(rates, f.name) for f in fields(Rates)})
    transformer = SparseTransformer(job.model, job.parallelism, cluster, recording)
    names = ["layer_forward", "layer_backward", "loss_forward", "loss_backward"]
    for name in (*names, *(("sparse_forward", "sparse_backward") if job.model.n_experts else ())):
        getattr(transformer, name)
    return tuple(f"{m}x{n}x{k}" for m, n, k in recording.seen)


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
