"""What follows from a model's tables of ops: parameters, flop, model chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from prism.jobs.ops import Norm, Op, Product, Share, Table, share_of
from prism.workload.layers import (
    Layer,
    embedding_ops,
    layer_ops,
    loss_ops,
    model_layers,
)

if TYPE_CHECKING:
    from prism.jobs.job import Job
    from prism.jobs.jobspec.blocks import ModelBlock

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0}  # bytes of a number of gradients and optimizer states


class Chunk(NamedTuple):
    """What one chunk holds: layers, and the model's ends."""

    layers: tuple[Layer, ...]
    embedding: bool
    loss: bool


class Weights(NamedTuple):
    """Parameters: of routed experts, and the others, of which every tp rank has `resident`.

    Those of tables that are spread are counted apart: no rank shares them.
    """

    others: float
    routed: float
    resident: float
    spread: float = 0.0

    @property
    def total(self) -> float:
        """Those that an optimizer updates."""
        return self.others + self.routed


def weigh(ops: Sequence[Op]) -> Weights:
    """Add up the parameters of a table of ops."""
    others = routed = resident = spread = 0.0
    for op in ops:
        if isinstance(op, Table) and op.spread:
            spread += op.parameters
        elif isinstance(op, Product) and op.routed:
            routed += op.parameters
        else:
            others += op.parameters
            if isinstance(op, Norm) or (isinstance(op, Product) and op.resident):
                resident += op.parameters
    return Weights(others, routed, resident, spread)


def count_parameters(model: ModelBlock, active: bool = False) -> float:
    """Parameters of a model, embeddings included (tied ones once).

    With ``active`` those that one token passes: of the routed experts, the ones it goes to, and of
    tables that are spread none. 0 of a job that gives durations instead.
    """
    passed = model.experts_per_token / model.n_experts if active and model.n_experts else 1.0
    total = 0.0
    for n, ops in _whole_tables(model, Share()):
        found = weigh(ops)
        total += n * (found.others + passed * found.routed + found.spread * (not active))
    return total


def forward_flop(model: ModelBlock, sequences: float) -> float:
    """Count the useful flop of a forward of some sequences."""
    tables = _whole_tables(model, Share(sequences))
    return sum(n * sum(op.model_flop for op in ops) for n, ops in tables)


def passed_on(model: ModelBlock, share: Share) -> float:
    """Values that a layer gives to the next one, the most of any."""
    kinds = set(model_layers(model))
    return max(layer_ops(model, share, layer)[-1].result for layer in kinds)


def _whole_tables(model: ModelBlock, share: Share) -> Iterator[tuple[int, Sequence[Op]]]:
    """Tables of a model and how often each is there; of tied embeddings the first."""
    if not model.depth:
        return
    ends = (*embedding_ops(model, share), *loss_ops(model, share))
    yield 1, [op for op in ends if op.name != "logits" or not model.tied_embeddings]
    for layer, n in Counter(model_layers(model)).items():
        yield n, layer_ops(model, share, layer)


def lay_slots(job: Job, counts: Sequence[int]) -> list[list[Chunk]]:
    """Lay out chunks by their numbers of layers, as a microbatch passes them, [stage][chunk]."""
    layout = job.parallelism
    last, layers, slots, done = len(counts) - 1, model_layers(job.model), [], 0
    for i, n in enumerate(counts):
        slots.append(Chunk(layers[done : done + n], embedding=i == 0, loss=i == last))
        done += n
    return layout.virtual_stages(len(slots) // layout.pp).rows(slots)


def slot_ops(job: Job, slot: Chunk) -> tuple[Op, ...]:
    """All ops of one chunk on one GPU."""
    model, share = job.model, share_of(job.parallelism)
    each = {layer: layer_ops(model, share, layer) for layer in set(slot.layers)}
    ops = tuple(op for layer in slot.layers for op in each[layer])
    if slot.embedding:
        ops = embedding_ops(model, share) + ops
    if slot.loss:
        ops = ops + loss_ops(model, share)
    return ops


def count_tensors(ops: Iterable[Op], fused_products: bool) -> list[float]:
    """Count weights of a GPU as a framework keeps them: others, and routed experts'."""
    counts = [0.0, 0.0]
    for op in ops:
        if op.parameters and not (isinstance(op, Table) and op.spread):
            parts = len(op.parts) if isinstance(op, Product) and not fused_products else 1
            counts[getattr(op, "routed", False)] += parts * getattr(op, "groups", 1.0)
    return counts


def slot_weights(job: Job, slots: Sequence[Sequence[Chunk]]) -> dict[Chunk, Weights]:
    """Parameters of each kind of chunk on one GPU; a tied matrix counts once per stage.

    Routed experts count as such where ep ranks hold them between them, else among the others.
    """
    p, model, share = job.parallelism, job.model, share_of(job.parallelism)
    kinds = {layer: weigh(layer_ops(model, share, layer)) for layer in set(model_layers(model))}
    met = model.tied_embeddings and p.ends_meet
    loss = weigh([op for op in loss_ops(model, share) if not met or op.name != "logits"])
    embedding = weigh(embedding_ops(model, share))

    def add_up(slot: Chunk) -> Weights:
        found = [kinds[layer] for layer in slot.layers]
        found += [embedding] * slot.embedding + [loss] * slot.loss
        others, routed, resident, spread = (sum(part[i] for part in found) for i in range(4))
        if p.ep == 1:
            others, routed = others + routed, 0.0
        return Weights(others, routed, resident, spread)

    return {slot: add_up(slot) for slot in dict.fromkeys(chain.from_iterable(slots))}
