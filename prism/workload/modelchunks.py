"""What every model chunk holds: layers with and without experts, embedding, loss, parameters.

Chunks lie as the pipeline's virtual stages do; without one they are units or buckets of layers, as
whoever asks divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.workload.modelsize import (
    expert_parameters,
    layer_parameters,
    n_sparse_layers,
    sparse_layer_parameters,
)

if TYPE_CHECKING:
    from prism.jobs.job import Job


@dataclass(frozen=True)
class Slot:
    """What one chunk holds: layers without and with experts, and the model's ends."""

    n_dense: int
    n_sparse: int
    embedding: bool
    loss: bool


def lay_slots(job: Job, counts: Sequence[int]) -> list[list[Slot]]:
    """Lay out chunks of so many layers, in the order a microbatch passes them, [stage][chunk]."""
    layout = job.parallelism
    last, first_sparse = len(counts) - 1, job.model.n_layers - n_sparse_layers(job.model)
    slots, done = [], 0
    for i, n in enumerate(counts):
        n_dense = min(n, max(0, first_sparse - done))
        slots.append(Slot(n_dense, n - n_dense, embedding=i == 0, loss=i == last))
        done += n
    return layout.virtual_stages(len(slots) // layout.pp).rows(slots)


def chunk_parameters(job: Job, slot: Slot) -> float:
    """Parameters of one chunk on one GPU; a tied matrix counts once per stage.

    Routed experts that ep ranks hold between them are `chunk_experts`.
    """
    model = job.model
    table = float(model.vocab_size * model.hidden_size)
    own_output = slot.loss and not (model.tied_embeddings and job.parallelism.ends_meet)
    total = slot.n_dense * layer_parameters(model) + table * (slot.embedding + own_output)
    if slot.n_sparse:
        n_experts = model.n_experts if job.parallelism.ep == 1 else 0
        each = sparse_layer_parameters(model) + n_experts * expert_parameters(model)
        total += slot.n_sparse * each
    return (total + (model.hidden_size if slot.loss else 0)) / job.parallelism.tp


def chunk_experts(job: Job, slot: Slot) -> float:
    """Parameters of one chunk's routed experts on one GPU, where ep ranks share them."""
    p = job.parallelism
    if p.ep == 1 or not slot.n_sparse:
        return 0.0
    return slot.n_sparse * expert_parameters(job.model) * job.model.n_experts / p.ep / p.tp
