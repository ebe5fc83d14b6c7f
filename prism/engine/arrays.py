"""Constants, and the arrays that a step is made of; dtypes and dimensions stand beside each.

Those in annotations are read by `ahead.make_blank`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LANES = 64  # replicates per block, and step replicates per cluster
CDF_ROWS = 1024  # knots of a standardised cdf table
CDF_RANGE = 8.0  # its range in standard deviations, on both sides

# Kinds of op.
JOIN, DRAW, EXPORT = 0, 1, 2
# Streams of draws: an entity of one stream never shares a counter with another stream. What ops
# share and what is added to steps have numbers of their own, which nothing else has.
RESIDUAL, GLOBAL, STEP = range(3)
RANK, NODE, REGIME, STALL, POOL, UNSEEN = range(5, 11)
N_STREAMS = 16  # at most: four bits of a residual's counter
# Entities of a stall.
NO_STALL, GROUP_STALL, JOB_STALL = 0, 1, 2
NEVER = np.float32(-1e30)  # an end that nothing waits for


# Columns of ops as the engine takes them; from VEC on one for each term.
KIND, PRED0, PRED1, OUT, COEF, N_TERMS, TABLE, NUMBER, STAGE, BUSY, VEC = range(11)


class Ops(NamedTuple):
    """Ops of all phases in execution order; slots >= n_slots are global."""

    kind: Annotated[Array, "int8[op]"]
    pred0: Annotated[Array, "int32[op]"]  # slot
    pred1: Annotated[Array, "int32[op]"]  # slot
    out: Annotated[Array, "int32[op]"]  # slot
    coef: Annotated[Array, "int32[op]"]  # row of the coefficients
    n_terms: Annotated[Array, "int32[op]"]
    table: Annotated[Array, "int32[op]"]  # quantile table of the residual
    draw: Annotated[Array, "int32[op]"]  # index of the draw within its stage
    stage: Annotated[Array, "int32[op]"]
    busy: Annotated[Array, "int32[op]"]  # stage that computes meanwhile, -1: none
    vec: Annotated[Array, "int32[op, term]"]  # shared-effect vector of each term

    def pack(self) -> Array:
        """Lay an op's numbers side by side, int32[op, column]: it is read in one go.

        Every op has two terms: a second one that it has not takes no time.
        """
        second = [np.zeros_like(self.kind)] * (self.vec.shape[1] < 2)
        return np.column_stack([*self, *second]).astype(np.int32)


class Graph(NamedTuple):
    """Shape of the program: phases over `Ops`, and where ends are kept."""

    phase_global: Annotated[Array, "uint8[phase]"]
    phase_lo: Annotated[Array, "int64[phase]"]
    phase_hi: Annotated[Array, "int64[phase]"]
    n_replicas: int
    n_state: int  # replicas whose slots are kept (1, or all where phases alternate)
    n_slots: int
    n_global_slots: int
    n_stages: int
    final_slot: int  # global slot with the step's end


class Bank(NamedTuple):
    """Shared-effect vectors: products of factors, and of the congestion of a link."""

    table: Annotated[
        Array, "int32[factor, row, vector]"
    ]  # quantile table, -1: none; a row per replica, or one for all
    draw: Annotated[Array, "int32[factor, vector]"]  # its number: equal ones are one draw
    order: Annotated[Array, "int32[factor, vector]"]  # vectors by draw
    stream: Annotated[Array, "int32[factor]"]
    by_replica: Annotated[Array, "uint8[factor]"]  # whether each replica has draws of its own
    link: Annotated[Array, "int32[vector]"]  # -1: none
    is_global: Annotated[Array, "uint8[vector]"]


class Links(NamedTuple):
    """Congestion of leaf switches; a link is hit if any leaf that it touches is.

    It touches lo[k] <= leaf < hi[k] for begin <= k < end; one that touches none keeps its time.
    """

    begin: Annotated[Array, "int32[replica, link]"]
    end: Annotated[Array, "int32[replica, link]"]
    lo: Annotated[Array, "int32[range]"]
    hi: Annotated[Array, "int32[range]"]
    n_touched: Annotated[Array, "int32[replica, link]"]  # leaves
    n_leaves: int
    quiet: Annotated[Array, "float32[replica, link]"]  # multiplier while not hit
    congested: Annotated[Array, "float32[replica, link]"]  # multiplier while hit
    probability: float  # share of steps in which a leaf is congested


_NO_LINK, _NO_RANGE = np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
_NO_LEVEL = _NO_LINK.astype(np.float32)
NO_LINKS = Links(_NO_LINK, _NO_LINK, _NO_RANGE, _NO_RANGE, _NO_LINK, 0, _NO_LEVEL, _NO_LEVEL, 0.0)


class Ranks(NamedTuple):
    """Persistent speed of GPUs: one copula draw, one table per loading."""

    n_gpus: int
    gpus_per_node: int
    node_weight: float  # sqrt of the node's share of the (normal score's) variance
    node_table: int  # quantile table of a standard normal
    tables: Annotated[Array, "int32[loading]"]  # quantile tables of x ** loading, -1: constant
    factor: Annotated[Array, "float32[loading, gpu]"]  # fixed slowdowns (hot nodes)


class Lowering(NamedTuple):
    """Segments between barriers of the ops of one chunk, to be maximised over a group."""

    member: Annotated[Array, "int32[replica, stage, member]"]  # physical GPU
    seg_mean: Annotated[Array, "float64[segment, loading]"]  # seconds of one segment
    seg_cv: Annotated[Array, "float64[segment]"]  # std of the residuals over the mean
    seg_stretch: Annotated[
        Array, "float64[segment, 2]"
    ]  # what a maximum adds to its largest mean, and its variance, over those by quadrature
    seg_cdf: Annotated[Array, "int32[segment]"]  # cdf table of the standardised residual
    cdf: Annotated[Array, "float64[table, knot, 2]"]  # see `lowering.cdf_cells`
    coef_stage: Annotated[Array, "int32[coef]"]  # stage, -1: no rank effect
    coef_seg_ptr: Annotated[Array, "int32[coef + 1]"]
    coef_seg: Annotated[Array, "int32[entry]"]  # segment
    coef_count: Annotated[Array, "float64[entry]"]  # how often the op holds it
    coef_split: Annotated[Array, "float64[entry, term]"]  # share of the segment in each term
    coef_member: Annotated[Array, "int32[coef]"]  # -1: whole group, else this member alone
    fixed_mean: Annotated[
        Array, "float64[row, coef, term]"
    ]  # seconds without a rank effect; a row per
    # replica, or one for all
    fixed_var: Annotated[Array, "float64[row, coef]"]  # s^2
    call_cv: Annotated[Array, "float64[coef, term]"]  # call effect, lowered into the residual
    table_std: Annotated[Array, "float64[coef]"]  # std of the residual table
    quiet: Annotated[Array, "float64[coef]"]  # multiplier of compute between stalls


class Stalls(NamedTuple):
    """Rare delays: at most one per (replica, stage) and step, or one per job and step."""

    entity: int
    probability: Annotated[Array, "float64[stage]"]  # of a group's stall; of the job's: the first
    quiet: float  # multiplier of the step between stalls of the job
    duration: float  # seconds
    table: int  # quantile table of the length
    op_ptr: Annotated[Array, "int32[stage + 1]"]
    op: Annotated[Array, "int32[entry]"]  # ops of that stage that can be hit
    op_share: Annotated[Array, "float64[entry]"]  # cumulative share of the stage's nominal time


class Sample(NamedTuple):
    """Which replicas are simulated, and what the others would take."""

    n_top: int  # slowest replicas
    n_bulk: int  # and others, one of each stratum
    export: Array  # int32[export] global slots that the last phase reads
    tail: Annotated[
        Array, "float32[global slot]"
    ]  # nominal time to the step's end [s], NEVER: none
    coef: Array  # int32[entry] coefs of local ops, by stage
    typical: Annotated[
        Array, "float32[coef, term]"
    ]  # seconds of a replica whose GPUs are all average
    loading_share: Array  # float64[loading] of a segment's time, in the mean
    group_cv: float  # of a segment's time, in the mean
    softness: float  # scale of Gumbel's distribution whose maximum over a group is a normal's
    knot: Array  # float64[knot] level [s]
    mean: Array  # float64[knot] mean of a replica's step over the typical one's [1]
    std: Array  # float64[knot] scale of its noise [1]
    first: float  # noise at the first entry of log_cdf
    width: float  # and its distance to the next
    log_cdf: Array  # float64[entry] ; one where what the others take is not known yet

    @property
    def n_rows(self) -> int:
        """Replicas of a block that are simulated, with the typical one."""
        return 2 + self.n_top + self.n_bulk

    def alone(self) -> Sample:
        """Return the sample that takes the replicas left out to be fast."""
        zero = np.zeros(1)
        self = self._replace(knot=zero, mean=zero, std=zero + 1e-30)
        return self._replace(first=0.0, width=1.0, log_cdf=np.zeros(2))


class Step(NamedTuple):
    """Everything a step is made of; `share` without columns turns path tracking off."""

    ops: Ops
    graph: Graph
    bank: Bank
    links: Links
    ranks: Ranks
    low: Lowering
    stalls: Stalls
    tables: Annotated[Array, "float32[table, row, 2]"]
    step_table: int  # quantile table of the step effect, -1: none
    share: Annotated[Array, "float32[coef, class]"]  # share of an op's time in each kernel class

    def walk(self) -> Walk:
        """Return what a phase needs of it."""
        return Walk(self.ops.pack(), self.graph, self.share, self.tables)

    def shared(self) -> Shared:
        """Return what ops share."""
        return Shared(self.bank, self.links, self.stalls)


class Walk(NamedTuple):
    """What a phase needs of a step: a function takes a tuple array by array."""

    ops: Annotated[Array, "int32[op, column]"]
    graph: Graph
    share: Array  # of `Step`
    tables: Array  # of `Step`


class Shared(NamedTuple):
    """What the effects that ops share are drawn from, and the stalls."""

    bank: Bank
    links: Links
    stalls: Stalls


class Keys(NamedTuple):
    """Philox keys by stream, and those of the ops' residuals."""

    stream: Annotated[Array, "uint32[stream, 2]"]
    residual: Annotated[Array, "uint32[key, 2]"]
    of: Annotated[Array, "int64[coef]"]  # which of them an op's is of; not read where there is one


class Block(NamedTuple):
    """What is drawn once for a block of replicates, and room for more draws."""

    hits: Array  # int32[leaf + 1, lane] congested leaves before this one
    words: Array  # uint32[4, lane]


class Sampled(NamedTuple):
    """What a block of which some replicas are simulated tells of them."""

    level: Array  # float32[replica] its own step without noise [s]
    chosen: Annotated[
        Array, "int64[row]"
    ]  # replicas that are simulated; last the typical one, n_replicas
    own: Array  # float32[row, lane] the step if there were no other replica [s]
    after: Annotated[
        Array, "float32[lane]"
    ]  # what of the typical one's is due to the ops of all replicas [s]


class Work(NamedTuple):
    """Buffers of one block; slots and shared effects of every replica where phases alternate."""

    chosen: Annotated[
        Array, "int64[row]"
    ]  # replicas that are simulated; n_replicas: the typical one
    weight: Array  # float32[row] replicas that a simulated one stands for
    state: Array  # float32[row, lane] ends; of the last row always zero
    path: Array  # float32[class, lane] time on the critical path
    on: Annotated[
        Array, "uint64[replica, op]"
    ]  # lanes, a bit each: which predecessor was later, then whose path it is on; empty: not asked
    wanted: Array  # uint64[row] lanes whose path leads through an end
    busy: Array  # float32[stage, lane]
    words: Annotated[
        Array, "uint32[2 * key * stage, 4, lane]"
    ]  # the stage's latest draws, of the pool first
    drawn: Array  # int64[2 * key * stage] and which these are
    base: Array  # float32[2, lane] zeros; time of an op's third and further terms [s]
    begin: Annotated[
        Array, "int64[coef]"
    ]  # where the values of its table under the first key begin in the
    # pool; -1: each lane looks up its own
    row: Array  # int64[table] the same by table
    pool: Array  # float32: values, then a row of lanes
    order: Array  # uint32[place] words of the pool
    slow: Annotated[
        Array, "int16[key, place]"
    ]  # the next place from this one on whose value is drawn anew;
    # with LANES and one more than there are values
    vectors: Array  # float32[replica, vector, lane] shared effects
    ev_op: Array  # int64[event] stalls: which op,
    ev_lane: Array  # int64[event] lane
    ev_delay: Array  # float32[event] and how long [s]
    tail: Annotated[
        Array, "float32[global slot, lane]"
    ]  # from an export to the end [s]; empty: not asked
    own: Array  # float32[row, lane] the step's end as far as it is due to one replica
    after: Annotated[
        Array, "float32[2, lane]"
    ]  # what of it follows its last op; of the typical one the second
