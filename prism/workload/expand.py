"""Kernels of a table of ops: forward, backward, and what backward computes again.

Tensor parallelism as in Megatron, and 8- and 4-bit products as in Transformer Engine: operands are
quantized where they are made, before a sequence is gathered.

References
----------
.. [1] DeepSeek-V3, arXiv:2412.19437, section 3.2: DualPipe, all-to-alls.
.. [2] Wang et al., arXiv:2408.15664, table 2: the busiest expert has 4 % over its share where
   balanced without a loss, and 52 to 72 % with an auxiliary loss, over a validation set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from prism.cluster.machine import Cluster
from prism.jobs.dimensions import TOKENS
from prism.jobs.frameworks import FRAMEWORKS, FUSED_LOSS_BYTES, Framework
from prism.jobs.ops import (
    Attention,
    Exchange,
    Host,
    Loss,
    Norm,
    Op,
    Part,
    Pointwise,
    Product,
    Scan,
    Table,
    Timed,
    share_of,
)
from prism.workload.host import BLOCKS, blocks
from prism.workload.kernels import Kernel, collective_distribution, exposed
from prism.workload.layers import Layer, embedding_ops, layer_halves, loss_ops

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ModelBlock, ParallelismBlock
    from prism.workload.costs import Costs

DUALPIPE_COST = 20.0 / 132.0
"""Share of all-to-alls beside another microbatch by which its compute becomes longer: they keep 20
of an H800's 132 multiprocessors ([1]_, section 3.2.2)."""

DEFAULT_IMBALANCE = 1.1
"""Tokens of the busiest ep rank over the mean where the job does not say. An assumption between
the figures of [2]_: a microbatch's counts vary more than a validation set's, and a rank that holds
several experts averages over them."""

LOSS_REDUCE_BYTES = 12.0  # of a token: maximum, target logit and sum of exponentials, in float32

ACCUMULATE_BYTES = {"bf16": 6.0, "fp32": 10.0}
"""Traffic of adding a weight's gradient in bf16 to a sum in `parallelism.gradient_dtype`."""

Kernels = tuple[Kernel, ...]


def expert_imbalance(model: ModelBlock, layout: ParallelismBlock) -> float:
    """Tokens of the busiest expert-parallel rank over the mean.

    A token's experts are distinct, so that no rank has more than `experts_per_token` lets it have;
    with a capacity it drops what is beyond that.
    """
    if layout.ep == 1:
        return 1.0
    copies = model.experts_per_token
    most = min(layout.ep, model.n_experts / copies) if copies else float(layout.ep)
    given = layout.expert_imbalance
    busiest = min(DEFAULT_IMBALANCE, most) if given is None else float(given)
    return min(busiest, layout.expert_capacity or busiest)


def recomputed(kernel: Kernel) -> Kernel:
    """Return a forward kernel as it runs again in backward."""
    return replace(kernel, name=f"recompute_{kernel.name}")


@dataclass(frozen=True)
class Expander:
    """Turns ops into one GPU's kernels for one microbatch."""

    model: ModelBlock
    layout: ParallelismBlock
    cluster: Cluster
    costs: Costs

    @property
    def framework(self) -> Framework:
        """How ops become kernels."""
        return FRAMEWORKS[self.layout.framework]

    # ------------------------------------------------------------------------------- a layer
    def forward(self, ops: Iterable[Op]) -> Kernels:
        """Kernels of ops in program order."""
        out: list[Kernel] = []
        for op in ops:
            out += self._shared_out(op, _KERNELS[type(op)](self, op, False))
        return tuple(out)

    def backward(self, ops: Sequence[Op]) -> Kernels:
        """Kernels of their gradients, the last op's first; residual streams meet at the end."""
        out: list[Kernel] = []
        streams = [op for op in ops if isinstance(op, Pointwise) and op.kind == "residual"]
        for op in [*(op for op in reversed(ops) if op not in streams), *streams]:
            out += self._shared_out(op, _KERNELS[type(op)](self, op, True))
        return tuple(out)

    def layer(self, layer: Layer) -> tuple[Kernels, Kernels]:
        """Forward and backward of a layer, with what it recomputes."""
        halves = layer_halves(self.model, share_of(self.layout), layer)
        ops = tuple(chain.from_iterable(halves))
        again: Kernels = ()
        if self.layout.recompute == "full":
            again = self._whole_again(ops)
        elif self.layout.recompute == "selective" and _selects(halves):
            again = self._selected(ops)
        backward = tuple(map(recomputed, again))
        backward += tuple(chain.from_iterable(map(self.backward, reversed(halves))))
        forward = self._captured(ops, self._overlapped(self.forward(ops)))
        return forward, self._captured(ops, self._overlapped(backward))

    def embedding(self) -> tuple[Kernels, Kernels]:
        """Forward and backward of the input embedding."""
        ops = embedding_ops(self.model, share_of(self.layout))
        return self.forward(ops), self.backward(ops)

    def loss(self) -> tuple[Kernels, Kernels]:
        """Forward and backward of the loss."""
        ops = loss_ops(self.model, share_of(self.layout))
        return self.forward(ops), self.backward(ops)

    def _captured(self, ops: Sequence[Op], kernels: Kernels) -> Kernels:
        """Leave a layer's kernels without launches where a CUDA graph holds them."""
        if not (self.layout.cuda_graphs and any(getattr(op, "routed", False) for op in ops)):
            return kernels
        return tuple(replace(k, launches=0.0) for k in kernels if not blocks(k))

    def _whole_again(self, ops: Sequence[Op]) -> Kernels:
        """Forward kernels of a layer that runs again in backward.

        PyTorch stops where it has what was saved for backward: before the last product, whose
        output nothing reads (`torch.utils.checkpoint`, early stop, since 2.1). Megatron does not.
        """
        kernels = self.forward(ops)
        if self.framework.stops_early:
            products = [i for i, kernel in enumerate(kernels) if kernel.flop]
            kernels = kernels[: products[-1]] if products else kernels
        return kernels

    def _selected(self, ops: Sequence[Op]) -> Kernels:
        """Forward kernels that run again with selective recomputation, as in torchtitan.

        Every second product is kept, the first one too, attention, and reduce-scatters.
        """
        out: list[Kernel] = []
        number, n_products = 0, sum(len(op.parts) for op in ops if isinstance(op, Product))
        for op in ops:
            if isinstance(op, Attention):
                continue
            kernels = self.forward((op,))
            if isinstance(op, Product):
                kept = [part.name for i, part in enumerate(op.parts) if (number + i) % 2 == 0]
                number += len(op.parts)
                left = [part for part in op.parts if part.name not in kept]
                if number == n_products:  # nothing reads it
                    break
                kernels = self.forward((replace(op, parts=tuple(left)),)) if left else ()
                kernels = tuple(k for k in kernels if "reduce_scatter" not in k.kernel_class)
                if not left:
                    kernels = self._operand(op)
            out += kernels
        return tuple(out)

    def _overlapped(self, kernels: Kernels) -> Kernels:
        """Leave of all-to-alls what is exposed beside another microbatch's compute.

        DualPipe pairs a forward with a backward of another microbatch, so that each direction's
        all-to-alls run beside as much compute as it has itself ([1]_, section 3.2.1).
        """
        sent = sum(k.duration for k in kernels if k.group == "ep")
        if not self.layout.expert_overlap or sent == 0.0:
            return kernels
        work = sum(k.duration for k in kernels if not k.group)
        left = exposed(sent, work, DUALPIPE_COST) / sent
        return tuple(
            replace(k, duration=k.duration * left) if k.group == "ep" else k for k in kernels
        )

    def _shared_out(self, op: Op, kernels: Kernels) -> Kernels:
        """Take the busiest rank's share of routed work; all wait for it at the next all-to-all."""
        if self.layout.ep == 1 or not getattr(op, "routed", False):
            return kernels
        factor = expert_imbalance(self.model, self.layout)
        return tuple(replace(k, duration=k.duration * factor, routed=True) for k in kernels)

    # ------------------------------------------------------------------------------- products
    def _operand(self, op: Product) -> Kernels:
        """Quantize what a product reads, and gather the sequence of it."""
        cast: Kernels = ()
        if op.casts and not op.in_bf16:
            cast = self.costs.cast(f"{op.name}_cast", op.operand)
            cast += self._weight_cast(op, f"{op.name}_weight_cast")
        return (*cast, *self._gather(op, op.enter, op.depth, op.name))

    def _product(self, op: Product, backward: bool) -> Kernels:
        if backward:
            return self._product_backward(op)
        parts = self._parts(op)
        products = (
            self._gemm(op, part, part.name, op.rows, part.width, op.depth) for part in parts
        )
        reduce = self._reduce(op.leave, op.rows, op.width) if op.leave else ()
        return (*self._operand(op), *products, *reduce)

    def _product_backward(self, op: Product) -> Kernels:
        """Input and weight gradients, the input gradient's sum hidden by the latter."""
        parts = self._parts(op)
        rows = op.own if op.leave else op.rows
        cast = () if op.in_bf16 else self.costs.cast(f"{op.name}_backward_cast", rows * op.width)
        cast += () if op.in_bf16 else self._weight_cast(op, f"{op.name}_backward_weight_cast")
        gathered = self._gather(op, op.leave, op.width, f"{op.leave}_backward")
        inputs = [
            self._gemm(op, part, f"{part.name}_dgrad", op.rows, op.depth, part.width)
            for part in parts
        ]
        values = op.rows * op.depth
        sums = tuple(
            self.costs.pointwise(f"{op.name}_gradient_sum", "residual", values, backward=True)
            for _ in parts[1:]
        )
        weights = [self._weight_gradient(op, part) for part in parts]
        hidden = sum(k.duration for k in weights)
        reduce = self._hidden(self._reduce(f"{op.enter}_backward", op.rows, op.depth), hidden)
        return (
            *cast, *gathered, *inputs, *sums, *(reduce if op.enter else ()), *weights,
            *self._accumulated(op),
        )  # fmt: skip

    def _accumulated(self, op: Product) -> Kernels:
        """Add weight gradients to those of earlier microbatches, where no product does it.

        With sharded gradients only a part of them is left by then.
        """
        p = self.layout
        if self.framework.fused_sums or p.data_parallel in ("fsdp", "hsdp"):
            return ()
        each = ACCUMULATE_BYTES[p.gradient_dtype]
        if p.gradient_dtype == "bf16":  # the first microbatch's stay where they are
            each *= 1.0 - 1.0 / p.microbatches
        if not each:
            return ()
        add = self.costs.memory(f"{op.name}_accumulate", each * op.parameters)
        return (replace(add, is_weight=True),)

    def _weight_cast(self, op: Product, name: str) -> Kernels:
        return self.costs.cast(name, op.parameters) if self.framework.casts_weights else ()

    def _parts(self, op: Product) -> tuple[Part, ...]:
        if self.framework.fused_products or len(op.parts) == 1:
            return (Part(op.name, op.width),)
        return op.parts

    def _gemm(self, op: Product, part: Part, name: str, m: float, n: float, k: float) -> Kernel:
        return self.costs.gemm(
            name, op.kernel_class, m / op.groups, n, k, op.groups, in_bf16=op.in_bf16
        )

    def _weight_gradient(self, op: Product, part: Part) -> Kernel:
        kernel = self.costs.gemm(
            f"{part.name}_wgrad",
            op.kernel_class,
            op.depth,
            part.width,
            op.rows / op.groups,
            op.groups,
            in_bf16=op.in_bf16,
            weight=True,
        )
        return replace(kernel, is_weight=True)

    # ---------------------------------------------------------------------- attention, the rest
    def _attention(self, op: Attention, backward: bool) -> Kernels:
        name = f"attention{_suffix(backward)}_keys_all_gather"
        gathered = self._keys(op, name, "all_gather")
        scattered = self._keys(op, "keys_reduce_scatter", "reduce_scatter") if backward else ()
        return (*gathered, *self.costs.attention(op, backward=backward), *scattered)

    def _keys(self, op: Attention, name: str, op_kind: str) -> Kernels:
        """Communicate keys and values [bfloat16] of a sequence, dimension by dimension."""
        rows, out = op.key_rows, list[Kernel]()
        for group in TOKENS:
            rows *= self.cluster.group(group).n_ranks
            n_bytes = 2.0 * rows * op.keys
            # one kernel class for gathering keys and scattering their gradients
            out += self._collective(name, f"{group}_all_gather", op_kind, n_bytes, group)
        return tuple(out)

    def _scan(self, op: Scan, backward: bool) -> Kernels:
        return (self.costs.scan(op, backward=backward),)

    def _norm(self, op: Norm, backward: bool) -> Kernels:
        name = op.name + _suffix(backward)
        return (self.costs.norm(name, op.rows, op.width, backward=backward),)

    def _pointwise(self, op: Pointwise, backward: bool) -> Kernels:
        name, values = op.name + _suffix(backward), op.rows * op.width
        if op.moved is not None:
            n = op.launches[backward]
            kernel = self.costs.memory(name, op.moved[backward], launches=n)
        else:
            kernel = self.costs.pointwise(name, op.kind, values, backward=backward)
        return (kernel,) * (kernel.bytes > 0.0)

    def _timed(self, op: Timed, backward: bool) -> Kernels:
        name, seconds = op.name + _suffix(backward), op.seconds[backward]
        kernel = Kernel(name, "compute", seconds, 0.0, 0.0, "residual/compute", launches=1.0)
        return (kernel,) * (seconds > 0.0)

    def _table(self, op: Table, backward: bool) -> Kernels:
        """Look up rows of a table, or add gradients to them."""
        name = f"embedding{_suffix(backward)}"
        row_bytes = self.framework.embedding_bytes[backward] * op.traffic[backward]
        n_bytes = row_bytes * op.rows * op.width
        kernel = self.costs.memory(name, n_bytes, "embedding")
        if op.spread:  # it is updated with what else backward gives
            return (replace(kernel, by_rank=op.by_rank[backward]),)
        if not backward:
            return (kernel, *self._reduce(name, op.rows, op.width))
        gathered = self._tp_gather(name, 2.0 * op.rows * op.width)
        return (*gathered, replace(kernel, is_weight=True))

    def _loss(self, op: Loss, backward: bool) -> Kernels:
        """Cross entropy, and casting the logits to float32 or their gradient back."""
        fused, logits, suffix = self.layout.fused_loss, op.rows * op.vocab, _suffix(backward)
        own = self.framework.fuses_loss or not fused
        loss_bytes = self.framework.loss_bytes if own else FUSED_LOSS_BYTES
        loss = self.costs.memory(f"cross_entropy{suffix}", loss_bytes[backward] * logits, "loss")
        cast_bytes = 0.0 if fused else self.framework.cast_bytes[backward] * logits
        cast = (self.costs.memory(f"logits_cast{suffix}", cast_bytes),) * (cast_bytes > 0.0)
        if backward:
            return (loss, *cast)
        return (*cast, loss, *self._tp("loss_reduce", "all_reduce", LOSS_REDUCE_BYTES * op.rows))

    def _host(self, op: Host, backward: bool) -> Kernels:
        return (BLOCKS,)

    # ------------------------------------------------------------------------------ collectives
    def _exchange(self, op: Exchange, backward: bool) -> Kernels:
        op_kind = op.back_kind if backward else op.op_kind
        if not op_kind:
            return ()
        name = op.name + _suffix(backward) + (f"_{op_kind}" if op.group != "ep" else "")
        n_bytes = 2.0 * op.rows * op.width
        return self._collective(name, f"{op.group}_{op_kind}", op_kind, n_bytes, op.group)

    def _gather(self, op: Product, among: str, width: float, name: str) -> Kernels:
        """Gather the sequence of an operand, or of a result's gradient."""
        if not among:
            return ()
        size = 2.0 if op.in_bf16 else self.costs.operand_bytes
        label = among if name == op.name else name
        return self._tp_gather(label, size * op.rows * width)

    def _tp_gather(self, name: str, n_bytes: float) -> Kernels:
        if not self.layout.sequence_parallel:
            return ()
        return self._tp(f"{name}_all_gather", "all_gather", n_bytes)

    def _reduce(self, name: str, rows: float, width: float) -> Kernels:
        """Sum over tp in bfloat16, and scatter the sequence."""
        op_kind = "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"
        return self._tp(f"{name}_{op_kind}", op_kind, 2.0 * rows * width)

    def _hidden(self, kernels: Kernels, beside_s: float) -> Kernels:
        """Leave of collectives what shows beside weight gradients, which Megatron starts after."""
        shown = [exposed(k.duration, beside_s, self.costs.overlap_cost) for k in kernels]
        return tuple(
            replace(k, duration=visible, hidden_s=k.duration - visible)
            for k, visible in zip(kernels, shown, strict=True)
        )

    def _tp(self, name: str, op_kind: str, n_bytes: float) -> Kernels:
        return self._collective(name, f"tp_{op_kind}", op_kind, n_bytes, "tp")

    def _collective(
        self, name: str, kernel_class: str, op_kind: str, n_bytes: float, group_name: str
    ) -> Kernels:
        """One collective as a kernel, or nothing where the group is a single GPU."""
        group = self.cluster.group(group_name)
        if group.n_ranks == 1:
            return ()
        duration = self.cluster.collective_time(op_kind, n_bytes, group)
        distribution = collective_distribution(self.cluster, n_bytes, group)
        return (
            Kernel(
                name, kernel_class, duration, 0.0, n_bytes, distribution, group_name, launches=1.0
            ),
        )


def _selects(halves: Sequence[Sequence[Op]]) -> bool:
    """Whether selective recomputation is modelled: of attention and a dense feed-forward part."""
    first, *rest = (set(map(type, half)) for half in halves)
    routed = any(getattr(op, "routed", False) for half in halves for op in half)
    return Attention in first and Scan not in first and any(rest) and not routed


def _suffix(backward: bool) -> str:
    return "_backward" if backward else ""


_KERNELS: dict[type[Op], Callable[[Expander, Any, bool], Kernels]] = {
    Product: Expander._product, Attention: Expander._attention, Scan: Expander._scan,
    Norm: Expander._norm, Pointwise: Expander._pointwise, Table: Expander._table,
    Loss: Expander._loss, Exchange: Expander._exchange, Host: Expander._host,
    Timed: Expander._timed,
}  # fmt: skip
