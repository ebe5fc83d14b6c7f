"""Kinds of ops that a layer consists of, with the sizes of one GPU's share.

A layer is a table of them (`prism.workload.layers`). Kernels of forward and backward, parameters,
flop, and what backward keeps are all read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prism.jobs.jobspec.blocks import ParallelismBlock

BF16_BYTES = 2.0
TABLE_BYTES = 4.0  # bytes of a number of a table that is spread: float32

SCAN_FLOP = {"mamba2": 7.0, "gated_delta": 6.0}
"""Flop a token and value of a state: as Megatron-LM counts Mamba-2, and of the delta rule's three
products of a token's vectors with the state (arXiv:2412.06464, equation 10). Chunked algorithms do
more where chunks are longer than states; which, depends on the kernel."""


class Share(NamedTuple):
    """How one GPU's share of a model is cut; the default is the whole, for one sequence."""

    sequences: float = 1.0
    tp: int = 1
    shards: int = 1  # of its tokens
    ep: int = 1
    expert_tp: int = 1
    sequence_parallel: bool = False


def share_of(layout: ParallelismBlock) -> Share:
    """One GPU's share of a microbatch."""
    return Share(
        float(layout.microbatch_size), layout.tp, layout.token_shards, layout.ep,
        layout.expert_shards, layout.sequence_parallel,
    )  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One op of a layer, in forward order."""

    name: str
    rows: float  # tokens that this GPU computes

    @property
    def parameters(self) -> float:
        """Its weights on this GPU."""
        return 0.0

    @property
    def model_flop(self) -> float:
        """Useful flop of its forward on this GPU: 2 for each weight that a token passes."""
        return 2.0 * self.rows * self.parameters

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return 0.0

    def kept(self, entering: float) -> float:
        """Return bytes that backward keeps; a product's operand has `entering` a number."""
        return 0.0


class Part(NamedTuple):
    """One of the matrices that multiply the same operand."""

    name: str
    width: float


@dataclass(frozen=True)
class Product(Op):
    """Product of an operand [rows, depth] with one or more weights [depth, width].

    `enter` makes it column-parallel: the operand is gathered over tp first where the sequence is
    divided, and its gradient summed; `leave` row-parallel: the result is summed. Both name the
    collectives. Experts' `groups` share the rows, each with weights of its own.
    """

    parts: tuple[Part, ...]
    depth: float
    kernel_class: str
    groups: float = 1.0
    enter: str = ""
    leave: str = ""
    own: float = 0.0  # rows of the operand or result outside, where tp divides the sequence
    resident: bool = False  # every tp rank has all of the weights, for rows of its own
    routed: bool = False
    in_bf16: bool = False  # whatever the job's precision
    casts: bool = True  # its operand is quantized for it, rather than for the op before
    keeps: bool = True  # its operand is kept for it, rather than for the op before
    taps: float = 1.0  # places of a convolution's kernel, which share the values of an operand

    @property
    def width(self) -> float:
        """Width of all results."""
        return sum(part.width for part in self.parts)

    @property
    def operand_rows(self) -> float:
        """Rows of the operand that this GPU has before they are gathered."""
        return self.rows if self.leave else self.own or self.rows

    @property
    def parameters(self) -> float:
        """Its weights on this GPU."""
        return self.groups * self.depth * self.width

    @property
    def model_flop(self) -> float:
        """Useful flop of its forward on this GPU: 2 for each weight that a token passes."""
        return 2.0 * self.rows * self.depth * self.width

    @property
    def operand(self) -> float:
        """Values of its operand that this GPU has before they are gathered."""
        return self.operand_rows * self.depth / self.taps

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return (self.own or self.rows if self.leave else self.rows) * self.width

    def kept(self, entering: float) -> float:
        """Return bytes of its operand; one that is kept in bf16 already counts if quantized."""
        size = BF16_BYTES if self.in_bf16 else entering
        if not self.keeps and size == BF16_BYTES:
            return 0.0
        return size * self.operand


@dataclass(frozen=True)
class Attention(Op):
    """Fused attention of this GPU's queries with all keys, and their exchange."""

    sequences: float
    seq: float  # tokens of a whole sequence
    shards: float  # GPUs that divide its tokens
    heads: float
    kv_heads: float
    head_size: float
    v_head_size: float
    window: float = 0.0  # 0: it sees all tokens
    keys_seq: float = 0.0  # keys of a sequence where they are not its queries
    causal: bool = True

    @property
    def key_rows(self) -> float:
        """Keys that this GPU computes."""
        return self.rows * (self.keys_seq or self.seq) / self.seq

    @property
    def flop(self) -> float:
        """Flop of its forward.

        Scores and their product with the values: ``2 s^2`` times the heads' widths of queries and
        of values, half of it under the causal mask. In a sliding window of w < s tokens each of
        them sees at most w, so that ``s^2`` is ``2 s w - w^2``.
        """
        seen = min(self.window or self.seq, self.seq)
        width = self.heads * (self.head_size + self.v_head_size)
        if not self.causal:
            pairs = self.seq * (self.keys_seq or self.seq)
            return self.sequences * 2.0 * pairs * width / self.shards
        return self.sequences * (2.0 * self.seq * seen - seen**2) * width / self.shards

    @property
    def model_flop(self) -> float:
        """That of `flop`."""
        return self.flop

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return self.rows * self.out

    @property
    def query(self) -> float:
        """Width of the queries."""
        return self.heads * self.head_size

    @property
    def out(self) -> float:
        """Width of the result."""
        return self.heads * self.v_head_size

    @property
    def keys(self) -> float:
        """Width of keys and values together."""
        return self.kv_heads * (self.head_size + self.v_head_size)

    def kept(self, entering: float) -> float:
        """Return bytes of queries, keys, values and the result."""
        of_keys = 0.0 if not self.keys_seq else (self.key_rows - self.rows) * self.keys
        return BF16_BYTES * (self.rows * (self.query + self.out + self.keys) + of_keys)


@dataclass(frozen=True)
class Scan(Op):
    """Recurrence over a sequence, chunk by chunk: Mamba-2's scan, or the gated delta rule."""

    kind: str  # mamba2 or gated_delta, as tables of kernels name it
    seq: float  # tokens of a whole sequence
    heads: float
    head_size: float
    state: float
    streams: float  # width of what it reads: x, B and C, or queries, keys and values
    small: float  # weights beside the products: convolution, biases, decay, the gated norm

    @property
    def inside(self) -> float:
        """Width of all heads."""
        return self.heads * self.head_size

    @property
    def flop(self) -> float:
        """Flop of its forward, a token and value of a state: see `SCAN_FLOP`."""
        return SCAN_FLOP[self.kind] * self.rows * self.inside * self.state

    @property
    def model_flop(self) -> float:
        """Useful flop of its forward on this GPU: 2 for each weight that a token passes."""
        return self.flop + super().model_flop

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return self.rows * self.inside

    @property
    def parameters(self) -> float:
        """Its weights on this GPU."""
        return self.small

    def kept(self, entering: float) -> float:
        """Return bytes of what it reads, and of its result."""
        return BF16_BYTES * self.rows * (self.streams + self.inside)


@dataclass(frozen=True)
class Norm(Op):
    """RMSNorm; every tp rank has all of its weights."""

    width: float

    @property
    def parameters(self) -> float:
        """Its weights."""
        return self.width

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return self.rows * self.width

    def kept(self, entering: float) -> float:
        """Return bytes of what it reads."""
        return BF16_BYTES * self.rows * self.width


@dataclass(frozen=True)
class Pointwise(Op):
    """Op bound by memory, of a kind that a framework has passes for, over rows of some width."""

    kind: str
    width: float
    saves: float = 0.0  # bytes that backward keeps, a value
    routed: bool = False
    moved: tuple[float, float] | None = None  # by forward and backward, instead of a kind [byte]
    launches: tuple[float, float] = (1.0, 1.0)  # with `moved`: kernels of forward and backward
    weights: float = 0.0

    @property
    def parameters(self) -> float:
        """Its weights."""
        return self.weights

    @property
    def model_flop(self) -> float:
        """None: its weights multiply no operand."""
        return 0.0

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return self.rows * self.width

    def kept(self, entering: float) -> float:
        """Return bytes of what it reads, as far as backward needs it."""
        return self.saves * self.rows * self.width


def table_traffic(lookups: float, size: float) -> tuple[float, float]:
    """Return forward's and backward's traffic over those of one row in bf16 for each result.

    Forward reads rows of numbers of `size` bytes and writes their sum in bf16; backward reads a
    gradient and adds to a row in float32, 2 and 8 bytes.
    """
    return (size * lookups + 2.0) / 4.0, (2.0 + 8.0 * lookups) / 10.0


@dataclass(frozen=True)
class Table(Op):
    """Sums of rows of a table: the vocabulary-parallel embedding, or one spread over ep ranks.

    A spread one is in float32, as FBGEMM's, updated where it lies by the rows that were read: its
    gradients are never whole, and no optimizer passes over it.
    """

    width: float
    vocab: float
    lookups: float = 1.0  # rows that are summed
    spread: bool = False
    by_rank: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """Of tables that lie on single ranks: traffic of each over the mean, forward and backward."""

    @property
    def parameters(self) -> float:
        """Its weights on this GPU."""
        return self.width * self.vocab

    @property
    def model_flop(self) -> float:
        """As if a token passed all of the embedding, by the convention of its parameters' count."""
        return self.rows * self.lookups * self.width if self.spread else super().model_flop

    @property
    def result(self) -> float:
        """Values of its result on this GPU."""
        return self.rows * self.width

    @property
    def traffic(self) -> tuple[float, float]:
        """Forward's and backward's traffic over those of one row in bf16 for each result."""
        return table_traffic(self.lookups, TABLE_BYTES if self.spread else BF16_BYTES)


@dataclass(frozen=True)
class Loss(Op):
    """Vocabulary-parallel cross entropy."""

    vocab: float


@dataclass(frozen=True)
class Exchange(Op):
    """Collective within a tp or ep group; backward's carries gradients the other way."""

    group: str
    op_kind: str
    width: float
    back_kind: str
    routed: bool = False

    @property
    def result(self) -> float:
        """Values that are sent."""
        return self.rows * self.width


@dataclass(frozen=True)
class Timed(Op):
    """Op of which nothing is known but how long it takes, forward and backward [s]."""

    seconds: tuple[float, float]


@dataclass(frozen=True)
class Host(Op):
    """Where the host waits for what the device has computed, as counts of tokens."""
