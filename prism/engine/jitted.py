"""The Monte Carlo engine: every jitted function and the arrays it reads.

Models a step as ops in execution order, each with at most two predecessors, and runs 64 step
replicates at a time on the innermost axis: one block of lanes is one cluster (one draw of all
persistent effects). Ops are either local (run once for every dp replica, all of which share one
template) or global (collectives over replicas); phases alternate between the two. Draws are
counter-based (Philox4x32-10), keyed by seed, stream, entity and replicate, so neither threads nor
chunks nor the number of replicates change a number. Left out: what the arrays mean; `simulate`
knows both ends. One module for all of it: Numba's cache knows a function's own file only, so that
what is called in another one would stay as it was compiled. Replicas left out have entry points of
their own (`run_sampled`), and a job that leaves none out never compiles them.

References
----------
.. [1] Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11,
   doi:10.1145/2063384.2063405 (Philox).
.. [2] arXiv:2510.15596 (PRISM): sums along serial edges, maxima at joins.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

LANES = 64  # replicates per block, and step replicates per cluster
TABLE_ROWS = 3072  # cells of a quantile table, see prism.distributions.quantile_table
CDF_ROWS = 1024  # knots of a standardised cdf table
CDF_RANGE = 8.0  # its range in standard deviations, on both sides
QUADRATURE_NODES = 20  # trapezoid nodes of the maximum over a group

# Kinds of op.
JOIN, DRAW, EXPORT = 0, 1, 2
# Streams of draws: an entity of one stream never shares a counter with another stream.
(
    RESIDUAL, GLOBAL, STEP, MICROBATCH, CALL, RANK, NODE, REGIME, STALL, _FREE, UNSEEN, JITTER,
) = range(12)  # fmt: skip
# Entities of a stall.
NO_STALL, GROUP_STALL, JOB_STALL = 0, 1, 2
NEVER = np.float32(-1e30)  # an end that nothing waits for
BINS = 64  # of like replicas among those that are not simulated


class Ops(NamedTuple):
    """Ops of all phases in execution order; slots >= n_slots are global."""

    kind: np.ndarray  # int8[op]
    pred0: np.ndarray  # int32[op] slot
    pred1: np.ndarray  # int32[op] slot
    out: np.ndarray  # int32[op] slot
    coef: np.ndarray  # int32[op] row of the coefficients
    vec: np.ndarray  # int32[op, term] shared-effect vector of each term
    n_terms: np.ndarray  # int32[op]
    table: np.ndarray  # int32[op] quantile table of the residual
    draw: np.ndarray  # int32[op] index of the draw within its stage
    stage: np.ndarray  # int32[op]
    busy: np.ndarray  # int32[op] stage that computes meanwhile, -1: none


class Graph(NamedTuple):
    """Shape of the program: phases over `Ops`, and where ends are kept."""

    phase_global: np.ndarray  # uint8[phase]
    phase_lo: np.ndarray  # int64[phase]
    phase_hi: np.ndarray  # int64[phase]
    n_replicas: int
    n_state: int  # replicas whose slots are kept (1, or all where phases alternate)
    n_slots: int
    n_global_slots: int
    n_stages: int
    final_slot: int  # global slot with the step's end


class Bank(NamedTuple):
    """Shared-effect vectors: products of step, microbatch, call and link effects."""

    step_table: np.ndarray  # int32[row, vector], -1: none; a row per replica, or one for all
    mb_table: np.ndarray  # int32[vector]
    mb: np.ndarray  # int32[vector] microbatch
    call_table: np.ndarray  # int32[vector]
    call_draw: np.ndarray  # int32[vector]
    link: np.ndarray  # int32[vector], -1: none
    is_global: np.ndarray  # uint8[vector]
    n_microbatches: int
    skipped: np.ndarray = np.zeros((0, 0), np.uint8)  # [replica, vector] 1: no time in that
    # replica; without rows none is


class Links(NamedTuple):
    """Congestion of leaf switches; a link is hit if any leaf of its ranges is."""

    leaf_lo: np.ndarray  # int32[replica, link, range]
    leaf_hi: np.ndarray  # int32[replica, link, range]
    n_own: int  # links before this one are a replica's own, later ones join all replicas
    n_leaves: int
    probability: float
    quiet: float  # multiplier while not congested
    congested: float  # multiplier while congested


class Ranks(NamedTuple):
    """Persistent speed of GPUs: one copula draw, one table per loading."""

    n_gpus: int
    gpus_per_node: int
    node_weight: float  # sqrt of the node's share of the (normal score's) variance
    node_table: int  # quantile table of a standard normal
    tables: np.ndarray  # int32[loading] quantile tables of x ** loading, -1: constant
    factor: np.ndarray  # float32[loading, gpu] fixed slowdowns (hot nodes)


class Lowering(NamedTuple):
    """Segments between barriers of the ops of one chunk, to be maximised over a group."""

    member: np.ndarray  # int32[replica, stage, member] physical GPU
    seg_mean: np.ndarray  # float64[segment, loading] seconds of one segment
    seg_cv: np.ndarray  # float64[segment] std of the residuals over the mean
    seg_cdf: np.ndarray  # int32[segment] cdf table of the standardised residual
    cdf: np.ndarray  # float64[table, knot]
    coef_stage: np.ndarray  # int32[coef] stage, -1: no rank effect
    coef_seg_ptr: np.ndarray  # int32[coef + 1]
    coef_seg: np.ndarray  # int32[entry] segment
    coef_count: np.ndarray  # float64[entry] how often the op holds it
    coef_split: np.ndarray  # float64[entry, term] share of the segment in each term
    coef_member: np.ndarray  # int32[coef] -1: whole group, else this member alone
    fixed_mean: np.ndarray  # float64[row, coef, term] seconds without a rank effect; a row per
    # replica, or one for all
    fixed_var: np.ndarray  # float64[row, coef] s^2
    call_cv: np.ndarray  # float64[coef, term] call effect, lowered into the residual
    table_std: np.ndarray  # float64[coef] std of the residual table
    quiet: np.ndarray  # float64[coef] multiplier of compute between stalls


class Stalls(NamedTuple):
    """Rare delays: at most one per (replica, stage) and step, or one per job and step."""

    entity: int
    probability: np.ndarray  # float64[stage] of a group's stall; of the job's: the first
    quiet: float  # multiplier of the step between stalls of the job
    duration: float  # seconds
    table: int  # quantile table of the length
    op_ptr: np.ndarray  # int32[stage + 1]
    op: np.ndarray  # int32[entry] ops of that stage that can be hit
    op_share: np.ndarray  # float64[entry] cumulative share of the stage's nominal time


class Jitter(NamedTuple):
    """A time added to every step of the job."""

    mean_s: float
    table: int  # quantile table of its law of mean 1


NO_JITTER = Jitter(0.0, 0)


class Sample(NamedTuple):
    """Which replicas are simulated, and what the others would take."""

    n_top: int  # slowest replicas
    n_bulk: int  # and others, one of each stratum
    export: np.ndarray  # int32[export] global slots that the last phase reads
    tail: np.ndarray  # float32[global slot] nominal time to the step's end [s], NEVER: none
    coef: np.ndarray  # int32[entry] coefs of local ops, by stage
    typical: np.ndarray  # float32[coef, term] seconds of a replica whose GPUs are all average
    loading_share: np.ndarray  # float64[loading] of a segment's time, in the mean
    group_cv: float  # of a segment's time, in the mean
    softness: float  # scale of Gumbel's law whose maximum over a group is a normal's
    knot: np.ndarray  # float64[knot] level [s]
    mean: np.ndarray  # float64[knot] mean of a replica's step over the typical one's [1]
    std: np.ndarray  # float64[knot] scale of its noise [1]
    first: float  # noise at the first entry of log_cdf
    width: float  # and its distance to the next
    log_cdf: np.ndarray  # float64[entry]; one where what the others take is not known yet

    def alone(self) -> "Sample":
        """Return the sample that takes the replicas left out to be fast."""
        zero = np.zeros(1)
        noise = {"first": 0.0, "width": 1.0, "log_cdf": np.zeros(2)}
        return self._replace(knot=zero, mean=zero, std=zero + 1e-30, **noise)


class Step(NamedTuple):
    """Everything a step is made of; `share` without columns turns path tracking off."""

    ops: Ops
    graph: Graph
    bank: Bank
    links: Links
    ranks: Ranks
    low: Lowering
    stalls: Stalls
    jitter: Jitter
    tables: np.ndarray  # float32[table, row, 2]
    step_table: int  # quantile table of the step effect, -1: none
    share: np.ndarray  # float32[coef, class] share of an op's time in each kernel class


class SampledStep(NamedTuple):
    """A step of which some replicas are simulated."""

    step: Step
    sample: Sample


class Keys(NamedTuple):
    """Philox keys by stream, and residuals mixed of several draws.

    Where `mix` has rows, the residual of an op is mix[0] of its own draw, mix[1] of the draw under
    the first other key and mix[2] of that under the second.
    """

    stream: np.ndarray  # uint32[stream, 2]
    other: np.ndarray  # uint32[2, 2]
    mix: np.ndarray  # float32[coef, 3]; without rows every residual is its own draw


class Work(NamedTuple):
    """Buffers of one block."""

    state: np.ndarray  # float32[row, lane] ends
    path: np.ndarray  # float32[row, class, lane] time on the critical path
    busy: np.ndarray  # float32[stage, lane]
    words: np.ndarray  # uint32[stage, 4, lane] the stage's latest Philox block, by key
    drawn: np.ndarray  # int64[stage] and its number
    base: np.ndarray  # float32[lane]
    zeros: np.ndarray  # float32[lane]
    noise: np.ndarray  # float32[lane]
    vectors: np.ndarray  # float32[replica, vector, lane] shared effects
    coef_a: np.ndarray  # float32[replica, coef, term] seconds
    coef_r: np.ndarray  # float32[replica, coef] scale of the residual
    ev_op: np.ndarray  # int64[event] stalls: which op,
    ev_lane: np.ndarray  # int64[event] lane
    ev_delay: np.ndarray  # float32[event] and how long [s]
    other: np.ndarray  # of `Keys`
    mix: np.ndarray  # of `Keys`
    tail: np.ndarray  # float32[global slot, lane] from an export to the end [s]; empty: not asked
    own: np.ndarray  # float32[row, lane] the step's end as far as it is due to one replica
    after: np.ndarray  # float32[lane] what of the typical one's follows its last op
    weight: np.ndarray  # float32[row] replicas that a simulated one stands for


@njit(cache=True, nogil=True, inline="always")
def _mulhilo(a, b):
    p = np.uint64(a) * np.uint64(b)
    return np.uint32(p >> np.uint64(32)), np.uint32(p & np.uint64(0xFFFFFFFF))


@njit(cache=True, nogil=True)
def philox_lanes(c0, c1, lane0, stream, k0, k1, out):
    """Fill out[4, LANES] with Philox4x32-10 words of counter (c0, c1, replicate, stream)."""
    for lane in range(out.shape[1]):
        x0, x1 = np.uint32(c0), np.uint32(c1)
        x2, x3 = np.uint32(np.uint32(lane0) + np.uint32(lane)), np.uint32(stream)
        a, b = np.uint32(k0), np.uint32(k1)
        for _ in range(10):
            h0, l0 = _mulhilo(np.uint32(0xD2511F53), x0)
            h1, l1 = _mulhilo(np.uint32(0xCD9E8D57), x2)
            x0, x1, x2, x3 = h1 ^ x1 ^ a, l1, h0 ^ x3 ^ b, l0
            a = np.uint32(a + np.uint32(0x9E3779B9))
            b = np.uint32(b + np.uint32(0xBB67AE85))
        out[0, lane] = x0
        out[1, lane] = x1
        out[2, lane] = x2
        out[3, lane] = x3


@njit(cache=True, nogil=True, inline="always")
def lookup(tables, table, u):
    """Relative deviation at a 32-bit uniform; cells refine twice towards the upper tail."""
    i = u >> np.uint32(22)
    f = u & np.uint32(0x3FFFFF)
    if i == np.uint32(1023):
        i = np.uint32(1024) + ((u >> np.uint32(12)) & np.uint32(0x3FF))
        f = u & np.uint32(0xFFF)
        if i == np.uint32(2047):
            i = np.uint32(2048) + ((u >> np.uint32(2)) & np.uint32(0x3FF))
            f = u & np.uint32(3)
    return tables[table, i, 0] + tables[table, i, 1] * np.float32(np.int32(f))


@njit(cache=True, nogil=True)
def _multiply_lanes(tables, table, words, word, out, row):
    for lane in range(LANES):
        out[row, lane] *= np.float32(1.0) + lookup(tables, table, words[word, lane])


@njit(cache=True, nogil=True, inline="always")
def _look_up_lanes(tables, table, words, stage, word, noise):
    for lane in range(LANES):
        noise[lane] = lookup(tables, table, words[stage, word, lane])


@njit(cache=True, nogil=True)
def _mix_residual(work, tables, table, stage, d, who, lane0, stream, c):
    """Mix an op's residual of draws under several keys; a call, so that the op loop stays lean."""
    mix, words, drawn, noise = work.mix, work.words, work.drawn, work.noise
    for lane in range(LANES):
        noise[lane] *= mix[c, 0]
    for j in range(2):
        weight, row = mix[c, 1 + j], (1 + j) * (drawn.shape[0] // 3) + stage
        if weight == np.float32(0.0):
            continue
        if d >> 2 != drawn[row]:
            drawn[row] = d >> 2
            k0, k1 = work.other[j, 0], work.other[j, 1]
            philox_lanes((stage << 20) | (d >> 2), who, lane0, stream, k0, k1, words[row])
        for lane in range(LANES):
            noise[lane] += weight * lookup(tables, table, words[row, d & 3, lane])


@njit(cache=True, nogil=True, inline="always")
def _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, base, ratio, noise):
    """End = max of two predecessors + (a0 v0 + a1 v1 + base) * (1 + residual), for all lanes.

    Apart from the look-up, which is scalar, so that this is one vector operation after another.
    An op never writes a slot that it reads, so lanes do not depend on each other.
    """
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        start = a if a > b else b
        time = a0 * vectors[kept, v0, lane] + a1 * vectors[kept, v1, lane] + base[lane]
        state[po, lane] = start + time * (np.float32(1.0) + ratio * noise[lane])


@njit(cache=True, nogil=True)
def _interpolate_cdf(cdf, z):
    """Standardised cdf at z, linear between knots on [-CDF_RANGE, CDF_RANGE]."""
    if z <= -CDF_RANGE:
        return 0.0
    if z >= CDF_RANGE:
        return 1.0
    t = (z + CDF_RANGE) * ((CDF_ROWS - 1) / (2.0 * CDF_RANGE))
    i = int(t)
    return cdf[i] + (t - i) * (cdf[i + 1] - cdf[i])


@njit(cache=True, nogil=True)
def group_max(mean, cv, cdf):
    """Mean and variance of the maximum of independent times mean[i] * (1 + cv * z_i)."""
    n = mean.shape[0]
    top = mean[0]
    for i in range(1, n):
        top = max(top, mean[i])
    if n == 1 or cv <= 0.0:
        return top, (top * cv) ** 2
    low, high = top * (1.0 - 6.0 * cv), top * (1.0 + 7.0 * cv)
    step = (high - low) / (QUADRATURE_NODES - 1)
    first, second = 0.0, 0.0
    for k in range(QUADRATURE_NODES):
        t = low + k * step
        below = 1.0
        for i in range(n):
            sd = mean[i] * cv
            if mean[i] + CDF_RANGE * sd > t:
                below *= _interpolate_cdf(cdf, (t - mean[i]) / sd)
                if below < 1e-12:
                    break
        weight = 0.5 * step if k == 0 or k == QUADRATURE_NODES - 1 else step
        first += weight * (1.0 - below)
        second += weight * 2.0 * (t - low) * (1.0 - below)
    second += step * step / 6.0  # Euler-Maclaurin: the integrand's slope at `low` is 2, not 0
    return low + first, max(0.0, second - first * first)


@njit(cache=True, nogil=True)
def draw_ranks(ranks, tables, cluster, k0, k1, words, x):
    """Draw x[loading, gpu], the persistent slowdowns of one cluster."""
    n_loadings = x.shape[0]
    own_weight = math.sqrt(max(0.0, 1.0 - ranks.node_weight**2))
    node_words = np.empty_like(words)
    node_base = -LANES
    for base in range(0, ranks.n_gpus, LANES):
        philox_lanes(cluster, 0, base, RANK, k0, k1, words)
        for lane in range(min(LANES, ranks.n_gpus - base)):
            gpu = base + lane
            u = words[0, lane]
            if ranks.node_weight > 0.0:
                node = gpu // ranks.gpus_per_node
                if node >= node_base + LANES or node_base < 0:
                    node_base = node - node % LANES
                    philox_lanes(cluster, 0, node_base, NODE, k0, k1, node_words)
                z_node = lookup(tables, ranks.node_table, node_words[0, node - node_base])
                z_own = lookup(tables, ranks.node_table, u)
                z = ranks.node_weight * z_node + own_weight * z_own
                p = 0.5 * math.erfc(-z * math.sqrt(0.5))
                u = np.uint32(min(4294967295.0, p * 4294967296.0))
            for j in range(n_loadings):
                value = ranks.factor[j, gpu]
                if ranks.tables[j] >= 0:
                    value *= np.float32(1.0) + lookup(tables, ranks.tables[j], u)
                x[j, gpu] = value


@njit(cache=True, nogil=True)
def _segment_moments(means, cv, cdf, table, segment, gpus, x, scratch):
    """Mean and variance of one segment's time, maximised over GPUs of its group."""
    n = gpus.shape[0]
    top = 0.0
    for i in range(n):
        total = 0.0
        for j in range(means.shape[1]):
            total += means[segment, j] * x[j, gpus[i]]
        scratch[i] = total
        top = max(top, total)
    if n > 1 and cv > 0.0:
        return group_max(scratch[:n], cv, cdf[table])
    return top, (top * cv) ** 2


@njit(cache=True, nogil=True)
def lower_groups(low, x, coef_a, coef_r):
    """Lower kernels to ops for all replicas that there is room for, see `lower_replicas`."""
    lower_replicas(low, x, np.arange(coef_a.shape[0]), coef_a, coef_r)


@njit(cache=True, nogil=True)
def lower_replicas(low, x, chosen, coef_a, coef_r):
    """Lower kernels to ops: coef_a[row, coef, term] seconds, coef_r[row, coef].

    A row is a replica that is simulated; chosen[row] says which, the first being replica 0.

    coef_r scales the op's residual table, so that its standard deviation is that of the sum of
    maxima over the group (x known) together with the call effect.
    """
    n_coefs, n_terms = coef_a.shape[1:]
    n_segments = low.seg_mean.shape[0]
    n_members = low.member.shape[2]
    member, means, cvs, cdf, cdfs = low.member, low.seg_mean, low.seg_cv, low.cdf, low.seg_cdf
    scratch = np.empty(max(1, n_members))
    seg_mean = np.empty(n_segments)
    seg_var = np.empty(n_segments)
    stamp = np.full(n_segments, -1, np.int64)
    term = np.empty(n_terms)
    for i in range(chosen.shape[0]):
        replica = chosen[i]
        row = replica % low.fixed_mean.shape[0]
        for c in range(n_coefs):
            stage = low.coef_stage[c]
            for t in range(n_terms):
                term[t] = low.fixed_mean[row, c, t]
            var = low.fixed_var[row, c]
            for e in range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1]):
                s = low.coef_seg[e]
                who = low.coef_member[c]
                if who >= 0:
                    gpus = member[replica, stage, who : who + 1]
                    m, v = _segment_moments(means, cvs[s], cdf, cdfs[s], s, gpus, x, scratch)
                else:
                    key = replica * low.member.shape[1] + stage
                    if stamp[s] != key:
                        stamp[s] = key
                        gpus = member[replica, stage]
                        seg_mean[s], seg_var[s] = _segment_moments(
                            means, cvs[s], cdf, cdfs[s], s, gpus, x, scratch
                        )
                    m, v = seg_mean[s], seg_var[s]
                for t in range(n_terms):
                    term[t] += low.coef_count[e] * m * low.quiet[c] * low.coef_split[e, t]
                var += low.coef_count[e] * v * low.quiet[c] ** 2
            total = called = 0.0
            for t in range(n_terms):
                total += term[t]
                called += low.call_cv[c, t] * term[t]  # one draw for all terms of the op
                coef_a[i, c, t] = term[t]
            var += called**2
            coef_r[i, c] = 0.0
            if total > 0.0 and low.table_std[c] > 0.0:
                coef_r[i, c] = math.sqrt(var) / (total * low.table_std[c])


@njit(cache=True, nogil=True)
def _draw_regimes(links, lane0, k0, k1, words, regimes):
    threshold = np.uint64(links.probability * 4294967296.0)
    for leaf in range(links.n_leaves):
        philox_lanes(leaf, 0, lane0, REGIME, k0, k1, words)
        for lane in range(LANES):
            regimes[leaf, lane] = np.uint64(words[0, lane]) < threshold


@njit(cache=True, nogil=True)
def _link_lanes(links, regimes, replica, link, out):
    """Multiply lanes by the congestion of a link: hit if any leaf it touches is.

    Links of a group touch the leaves of all replicas; one that touches none is never congested.
    """
    first, last = replica, replica + 1
    if link >= links.n_own:
        first, last = 0, links.leaf_lo.shape[0]
    touched = 0
    for r in range(first, last):
        for side in range(links.leaf_lo.shape[2]):
            touched += links.leaf_hi[r, link, side] - links.leaf_lo[r, link, side]
    if touched == 0:
        return
    for lane in range(LANES):
        hit = False
        for r in range(first, last):
            for side in range(links.leaf_lo.shape[2]):
                for leaf in range(links.leaf_lo[r, link, side], links.leaf_hi[r, link, side]):
                    if regimes[leaf, lane]:
                        hit = True
                        break
                if hit:
                    break
            if hit:
                break
        out[lane] *= np.float32(links.congested if hit else links.quiet)


@njit(cache=True, nogil=True)
def fill_bank(step, regimes, step_words, is_global, replica, lane0, key, vectors, typical):
    """Shared effects of one replica (or of the global ops): vectors[vector, lane], mean 1.

    A typical replica has those alone that all replicas share.
    """
    bank, links, tables = step.bank, step.links, step.tables
    n_blocks = (bank.n_microbatches + 3) // 4
    mb_words = np.empty((4 * n_blocks, LANES), np.uint32)
    if not is_global:
        for i in range(n_blocks):
            k0, k1 = key[MICROBATCH, 0], key[MICROBATCH, 1]
            philox_lanes(i, replica, lane0, MICROBATCH, k0, k1, mb_words[4 * i : 4 * i + 4])
    call_words = np.empty((4, LANES), np.uint32)
    call_block = -1
    row = replica % bank.step_table.shape[0]
    for v in range(bank.mb.shape[0]):
        if bank.is_global[v] != is_global:
            continue
        if bank.skipped.shape[0] > 0 and not typical and bank.skipped[replica, v]:
            vectors[v] = np.float32(0.0)
            continue
        for lane in range(LANES):
            vectors[v, lane] = np.float32(1.0)
        if bank.step_table[row, v] >= 0:
            _multiply_lanes(tables, bank.step_table[row, v], step_words, 0, vectors, v)
        if typical:
            continue
        if bank.mb_table[v] >= 0:
            m = bank.mb[v]
            _multiply_lanes(tables, bank.mb_table[v], mb_words, m, vectors, v)
        if bank.call_table[v] >= 0:
            d = bank.call_draw[v]
            if d >> 2 != call_block:
                call_block = d >> 2
                k0, k1 = key[CALL, 0], key[CALL, 1]
                philox_lanes(call_block, replica, lane0, CALL, k0, k1, call_words)
            _multiply_lanes(tables, bank.call_table[v], call_words, d & 3, vectors, v)
        if bank.link[v] >= 0 and links.n_leaves > 0:
            _link_lanes(links, regimes, replica, bank.link[v], vectors[v])


@njit(cache=True, nogil=True)
def _draw_stalls(step, work, replica, lane0, k0, k1, words):
    """List this replica's stalls in the order of ops; returns how many."""
    stalls, tables = step.stalls, step.tables
    ev_op, ev_lane, ev_delay = work.ev_op, work.ev_lane, work.ev_delay
    n = 0
    for stage in range(step.graph.n_stages):
        lo, n_ops = stalls.op_ptr[stage], stalls.op_ptr[stage + 1] - stalls.op_ptr[stage]
        if n_ops == 0:
            continue
        philox_lanes(stage, replica, lane0, STALL, k0, k1, words)
        threshold = np.uint64(stalls.probability[stage] * 4294967296.0)
        for lane in range(LANES):
            if np.uint64(words[0, lane]) >= threshold or n >= ev_op.shape[0]:
                continue
            share = words[1, lane] / 4294967296.0
            pick = min(n_ops - 1, np.searchsorted(stalls.op_share[lo : lo + n_ops], share))
            op = stalls.op[lo + pick]
            delay = stalls.duration * (1.0 + lookup(tables, stalls.table, words[2, lane]))
            i = n
            while i > 0 and ev_op[i - 1] > op:
                ev_op[i], ev_lane[i], ev_delay[i] = ev_op[i - 1], ev_lane[i - 1], ev_delay[i - 1]
                i -= 1
            ev_op[i], ev_lane[i], ev_delay[i] = op, lane, delay
            n += 1
    return n


@njit(cache=True, nogil=True)
def _follow_path(state, path, pa, pb, po, dur, share, coef):
    """Carry the critical path's time by class from the later predecessor."""
    for k in range(share.shape[1]):
        part = share[coef, k]
        for lane in range(LANES):
            a, b = path[pa, k, lane], path[pb, k, lane]  # both, so that the choice is no branch
            path[po, k, lane] = (a if state[pa, lane] > state[pb, lane] else b) + part * dur[lane]


@njit(cache=True, nogil=True)
def _accumulate_max(state, path, pa, po, n_classes):
    for lane in range(LANES):
        if state[pa, lane] > state[po, lane]:
            state[po, lane] = state[pa, lane]
            for k in range(n_classes):
                path[po, k, lane] = path[pa, k, lane]


@njit(cache=True, nogil=True)
def _record_end(state, tail, pa, slot, own, row, after):
    """Record when the step would end if this replica were the only one, own[row, lane].

    after[lane] is the part of it that follows the last of its own ops.
    """
    for lane in range(LANES):
        end = state[pa, lane] + tail[slot, lane]
        if end > own[row, lane]:
            own[row, lane] = end
            after[lane] = tail[slot, lane]


@njit(cache=True, nogil=True)
def _add_terms(base, vectors, coef_a, vec, n_terms, row, kept, c, op):
    """Seconds of an op's third and further terms; few ops have them."""
    base[:] = np.float32(0.0)
    for t in range(2, n_terms):
        a, v = coef_a[row, c, t], vec[op, t]
        for lane in range(LANES):
            base[lane] += a * vectors[kept, v, lane]


@njit(cache=True, nogil=True)
def _track(state, path, busy, pa, pb, po, base, share, c, stage, weight):
    """Add an op to the critical path, and a local one to its stage's busy time."""
    for lane in range(LANES):
        base[lane] = state[po, lane] - max(state[pa, lane], state[pb, lane])
        if stage >= 0:
            busy[stage, lane] += weight * base[lane]
    _follow_path(state, path, pa, pb, po, base, share, c)


@njit(cache=True, nogil=True)
def _run_join(state, path, pa, pb, po, base, share):
    for lane in range(LANES):
        a, b = state[pa, lane], state[pb, lane]
        state[po, lane] = a if a > b else b
        base[lane] = np.float32(0.0)
    _follow_path(state, path, pa, pb, po, base, share, 0)


@njit(cache=True, nogil=True)
def run_phase(step, work, phase, chosen, first, last, lane0, k0, k1, n_events):
    """Run the ops of one phase, replica after replica: ends (and paths) of all their lanes.

    chosen[row] are the replicas that are simulated; one that is no replica of the job, but what
    the others are measured by, delays nobody.

    A call per replica would cost as much as some ops: a tuple is passed array by array.
    """
    ops, graph, tables = step.ops, step.graph, step.tables
    # Names for all arrays: reaching into tuples inside the loop costs reference counts.
    kind, pred0, pred1, out, coef = ops.kind, ops.pred0, ops.pred1, ops.out, ops.coef
    vec, n_terms, table, draw, stages = ops.vec, ops.n_terms, ops.table, ops.draw, ops.stage
    state, path, words, drawn = work.state, work.path, work.words, work.drawn
    base, zeros, noise, vectors = work.base, work.zeros, work.noise, work.vectors
    coef_a, coef_r, share, busy = work.coef_a, work.coef_r, step.share, work.busy
    computes = ops.busy
    ev_op, ev_lane, ev_delay = work.ev_op, work.ev_lane, work.ev_delay
    stream = GLOBAL if graph.phase_global[phase] == 1 else RESIDUAL
    mixes = work.mix.shape[0] > 0
    shift = graph.n_state * graph.n_slots - graph.n_slots
    n_classes = share.shape[1]
    tail, own, skipped = work.tail, work.own, np.empty(LANES, np.float32)
    for row in range(first, last):
        who = chosen[row]
        real = who < graph.n_replicas
        kept = row % graph.n_state
        local = kept * graph.n_slots
        event = 0
        drawn[:] = -1
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            pa, pb, po = pred0[op], pred1[op], out[op]
            pa += local if pa < graph.n_slots else shift
            pb += local if pb < graph.n_slots else shift
            po += local if po < graph.n_slots else shift
            if kind[op] == EXPORT:
                if tail.shape[0] > 0:
                    after = skipped if real else work.after
                    _record_end(state, tail, pa, out[op] - graph.n_slots, own, row, after)
                if real:
                    _accumulate_max(state, path, pa, po, n_classes)
                continue
            if kind[op] == JOIN:
                _run_join(state, path, pa, pb, po, base, share)
                continue
            d, stage, c = draw[op], stages[op], coef[op]
            if d >> 2 != drawn[stage]:  # one Philox block serves four draws of a stage in turn
                drawn[stage] = d >> 2
                philox_lanes((stage << 20) | (d >> 2), who, lane0, stream, k0, k1, words[stage])
            _look_up_lanes(tables, table[op], words, stage, d & 3, noise)
            if mixes and work.mix[c, 0] != np.float32(1.0):
                _mix_residual(work, tables, table[op], stage, d, who, lane0, stream, c)
            v0, a0 = vec[op, 0], coef_a[row, c, 0]
            v1, a1 = v0, np.float32(0.0)
            if n_terms[op] > 1:
                v1, a1 = vec[op, 1], coef_a[row, c, 1]
            if n_terms[op] > 2:
                _add_terms(base, vectors, coef_a, vec, n_terms[op], row, kept, c, op)
            extra = base if n_terms[op] > 2 else zeros
            _end_op(state, pa, pb, po, vectors, kept, v0, v1, a0, a1, extra, coef_r[row, c], noise)
            while event < n_events and ev_op[event] < op:
                event += 1
            while event < n_events and ev_op[event] == op:
                state[po, ev_lane[event]] += ev_delay[event]
                event += 1
            if n_classes > 0:
                weight = work.weight[row]
                _track(state, path, busy, pa, pb, po, base, share, c, computes[op], weight)


@njit(cache=True, nogil=True, inline="always")
def _new_work(step, keys, n_simulated, n_tails):
    """Buffers of one block; slots and shared effects of every replica where phases alternate.

    n_tails are the global slots whose way to the step's end is asked for, all or none of them.
    """
    graph, shape = step.graph, step.low.call_cv.shape
    n_rows = graph.n_state * graph.n_slots + graph.n_global_slots
    n_keys = 3 if keys.mix.shape[0] > 0 else 1
    room = graph.n_stages * LANES if step.stalls.entity == GROUP_STALL else 0
    return Work(
        np.zeros((n_rows, LANES), np.float32),
        np.zeros((n_rows, step.share.shape[1], LANES), np.float32),
        np.zeros((graph.n_stages, LANES), np.float32),
        np.empty((n_keys * graph.n_stages, 4, LANES), np.uint32),
        np.empty(n_keys * graph.n_stages, np.int64),
        np.empty(LANES, np.float32),
        np.zeros(LANES, np.float32),
        np.empty(LANES, np.float32),
        np.ones((graph.n_state, step.bank.mb.shape[0], LANES), np.float32),
        np.empty((n_simulated, shape[0], shape[1]), np.float32),
        np.empty((n_simulated, shape[0]), np.float32),
        np.zeros(room, np.int64),
        np.zeros(room, np.int64),
        np.zeros(room, np.float32),
        keys.other,
        keys.mix,
        np.full((n_tails, LANES), NEVER),
        np.zeros((n_simulated if n_tails > 0 else 0, LANES), np.float32),
        np.zeros(LANES, np.float32),
        np.ones(n_simulated, np.float32),
    )


@njit(cache=True, nogil=True, inline="always")
def _run_phases(step, work, chosen, regimes, step_words, lane0, keys, words):
    graph, vectors, key, filled = step.graph, work.vectors, keys.stream, False
    k0, k1 = key[RESIDUAL, 0], key[RESIDUAL, 1]  # also of the global ops
    stalls = step.stalls.entity == GROUP_STALL
    n_rows = chosen.shape[0]
    zero, one = np.int64(0), np.int64(1)  # literals would compile every callee once more
    fill_bank(step, regimes, step_words, one, zero, lane0, key, vectors[0], np.bool_(False))
    for phase in range(graph.phase_global.shape[0]):
        if graph.phase_global[phase] == 1:
            run_phase(step, work, phase, chosen, zero, one, lane0, k0, k1, zero)
            continue
        for row in range(n_rows):
            r = chosen[row]
            if not filled:
                kept, typical = vectors[row % graph.n_state], r == graph.n_replicas
                fill_bank(step, regimes, step_words, zero, r, lane0, key, kept, typical)
            if stalls:
                n = _draw_stalls(step, work, r, lane0, key[STALL, 0], key[STALL, 1], words)
                run_phase(step, work, phase, chosen, row, row + 1, lane0, k0, k1, n)
            elif graph.n_state == 1:  # replicas share the shared effects' room
                run_phase(step, work, phase, chosen, row, row + 1, lane0, k0, k1, zero)
        if graph.n_state > 1 and not stalls:
            run_phase(step, work, phase, chosen, zero, n_rows, lane0, k0, k1, zero)
        filled = True


@njit(cache=True, nogil=True)
def _stall_job(step, lane0, k0, k1, words, out_time):
    """Add the stalls that stop the whole job."""
    stalls = step.stalls
    threshold = np.uint64(stalls.probability[0] * 4294967296.0)
    philox_lanes(0, 0, lane0, STALL, k0, k1, words)
    for lane in range(LANES):
        out_time[lane] *= np.float32(stalls.quiet)
        if np.uint64(words[0, lane]) < threshold:
            length = 1.0 + lookup(step.tables, stalls.table, words[2, lane])
            out_time[lane] += np.float32(stalls.duration * length)


@njit(cache=True, nogil=True)
def _add_jitter(step, lane0, k0, k1, words, out_time):
    """Add to every step a time that does not depend on its length."""
    philox_lanes(0, 0, lane0, JITTER, k0, k1, words)
    for lane in range(LANES):
        share = 1.0 + lookup(step.tables, step.jitter.table, words[0, lane])
        out_time[lane] += np.float32(step.jitter.mean_s * share)


@njit(cache=True, nogil=True, inline="always")
def _draw_cluster(block, key, step, words, step_words):
    """Draw how fast the GPUs of a cluster are, x[loading, gpu], and regimes[leaf, lane]."""
    ranks, lane0 = step.ranks, block * LANES
    philox_lanes(0, 0, lane0, STEP, key[STEP, 0], key[STEP, 1], step_words)
    x = np.ones((ranks.tables.shape[0], max(1, ranks.n_gpus)), np.float32)
    draw_ranks(ranks, step.tables, block, key[RANK, 0], key[RANK, 1], words, x)
    regimes = np.zeros((max(1, step.links.n_leaves), LANES), np.bool_)
    _draw_regimes(step.links, lane0, key[REGIME, 0], key[REGIME, 1], words, regimes)
    return x, regimes


@njit(cache=True, nogil=True, inline="always")
def _end_block(step, lane0, key, words, step_words, out_time, out_step):
    """Add stalls and jitter of the job, and tell the step effect."""
    if step.stalls.entity == JOB_STALL:
        _stall_job(step, lane0, key[STALL, 0], key[STALL, 1], words, out_time)
    if step.jitter.mean_s > 0.0:
        _add_jitter(step, lane0, key[JITTER, 0], key[JITTER, 1], words, out_time)
    out_step[:] = np.float32(1.0)
    if step.step_table >= 0:
        for lane in range(LANES):
            u = step_words[0, lane]
            out_step[lane] *= np.float32(1.0) + lookup(step.tables, step.step_table, u)


@njit(cache=True, nogil=True)
def run_block(block, keys, step, out_time, out_step, out_path, out_busy):
    """Simulate one block of 64 replicates, which is one cluster.

    Fills out_time[lane] [s], out_step[lane] (the step effect), and where the step's share has
    classes out_path[class, lane] [s] and out_busy[stage, lane] [s].
    """
    lane0, graph, key = block * LANES, step.graph, keys.stream
    words, step_words = np.empty((4, LANES), np.uint32), np.empty((4, LANES), np.uint32)
    x, regimes = _draw_cluster(block, key, step, words, step_words)
    work, chosen = _new_work(step, keys, graph.n_replicas, 0), np.arange(graph.n_replicas)
    lower_replicas(step.low, x, chosen, work.coef_a, work.coef_r)
    _run_phases(step, work, chosen, regimes, step_words, lane0, keys, words)
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    out_time[:] = work.state[final]
    out_path[:] = work.path[final]
    out_busy[:] = work.busy
    _end_block(step, lane0, key, words, step_words, out_time, out_step)


@njit(cache=True, nogil=True)
def run_range(first, keys, step, out_time, out_step, out_path, out_busy):
    """Simulate blocks first, first + 1, ...; the first axis of the outputs is the block."""
    for i in range(out_time.shape[0]):
        run_block(first + i, keys, step, out_time[i], out_step[i], out_path[i], out_busy[i])


# ------------------------------------------------------------------- one step, op by op
@njit(cache=True, nogil=True)
def _record_phase(step, one, work, phase, chosen, first, last, lane0, k0, k1, n_events, lane, ends):
    """`run_phase` op by op: ends[replica, op] of one lane, read before their slots are used again.

    `one` is the step with a graph of a single phase, of which the op at hand is made.
    """
    graph, out, alone = step.graph, step.ops.out, one.graph
    shift = graph.n_state * graph.n_slots - graph.n_slots
    for row in range(first, last):
        local = (row % graph.n_state) * graph.n_slots
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            alone.phase_lo[0], alone.phase_hi[0] = op, op + 1
            alone.phase_global[0] = graph.phase_global[phase]
            run_phase(one, work, np.int64(0), chosen, row, row + 1, lane0, k0, k1, n_events)
            po = out[op]
            ends[row, op] = work.state[po + (local if po < graph.n_slots else shift), lane]


@njit(cache=True, nogil=True)
def record_block(block, lane, keys, step, one, ends, out_time):
    """Simulate one block as `run_block` does, and record ends[replica, op] [s] of one lane.

    Ends of global ops stand in the first row; those of exports are the latest so far. What stops
    the whole job is in out_time[lane] [s] alone.
    """
    lane0, graph, key = block * LANES, step.graph, keys.stream
    words, step_words = np.empty((4, LANES), np.uint32), np.empty((4, LANES), np.uint32)
    x, regimes = _draw_cluster(block, key, step, words, step_words)
    n = graph.n_replicas
    work, chosen = _new_work(step, keys, n, 0), np.arange(n)
    lower_replicas(step.low, x, chosen, work.coef_a, work.coef_r)
    k0, k1, vectors, filled = key[RESIDUAL, 0], key[RESIDUAL, 1], work.vectors, False
    stalls = step.stalls.entity == GROUP_STALL
    zero, first = np.int64(0), np.int64(1)
    fill_bank(step, regimes, step_words, first, zero, lane0, key, vectors[0], np.bool_(False))
    for phase in range(graph.phase_global.shape[0]):
        is_global = graph.phase_global[phase] == 1
        for row in range(first if is_global else n):
            events = zero
            if not is_global and not filled:
                kept = vectors[row % graph.n_state]
                fill_bank(step, regimes, step_words, zero, row, lane0, key, kept, np.bool_(False))
            if not is_global and stalls:
                events = _draw_stalls(step, work, row, lane0, key[STALL, 0], key[STALL, 1], words)
            _record_phase(
                step, one, work, phase, chosen, row, row + 1, lane0, k0, k1, events, lane, ends
            )
        filled = filled or not is_global
    out_time[:] = work.state[(graph.n_state - 1) * graph.n_slots + graph.final_slot]
    out_step = np.empty(LANES, np.float32)
    _end_block(step, lane0, key, words, step_words, out_time, out_step)


# ------------------------------------------------------------------- replicas left out
def count_rows(sample: Sample) -> int:
    """Count the replicas of a block that are simulated, with the typical one."""
    return 2 + sample.n_top + sample.n_bulk


@njit(cache=True, nogil=True)
def _find_tails(step, exports, work, chosen, lane0, k0, k1):
    """Fill work.tail: the time from every export that the last phase reads to the step's end."""
    graph, zero, one = step.graph, np.int64(0), np.int64(1)
    first = graph.n_state * graph.n_slots
    last = graph.phase_global.shape[0] - 1
    final = first - graph.n_slots + graph.final_slot
    for i in range(exports.shape[0]):
        work.state[0], work.state[first:] = NEVER, NEVER
        work.state[first + exports[i]] = 0.0
        run_phase(step, work, last, chosen, zero, one, lane0, k0, k1, zero)
        work.tail[exports[i]] = work.state[final]
    work.state[:], work.path[:], work.busy[:] = 0.0, 0.0, 0.0


@njit(cache=True, nogil=True)
def _group_times(low, sample, x, replica, stage, speed, slow, seconds):
    """Mean seconds of every segment of a group, about; speed[member], slow[loading] are scratch.

    The slowest member, and what the residuals of members that are nearly as slow add: as if they
    followed Gumbel's law, whose maximum is a sum of exponentials.
    """
    cv, share = sample.group_cv, sample.loading_share
    n, top = low.member.shape[2], 0
    for m in range(n):
        y = 0.0
        for j in range(slow.shape[0]):
            y += share[j] * x[j, low.member[replica, stage, m]]
        speed[m] = y
        if y > speed[top]:
            top = m
    for j in range(slow.shape[0]):
        slow[j] = x[j, low.member[replica, stage, top]]
    more = 0.0
    if n > 1 and cv > 0.0:
        scale = cv * sample.softness * speed[top]
        total = 0.0
        for m in range(n):
            total += math.exp((speed[m] - speed[top]) / scale)
        more = math.log(total) * sample.softness
    for s in range(seconds.shape[0]):
        seconds[s] = 0.0
        for j in range(slow.shape[0]):
            seconds[s] += low.seg_mean[s, j] * slow[j]
        seconds[s] *= 1.0 + more * low.seg_cv[s]


@njit(cache=True, nogil=True)
def _nominal_times(low, sample, x, first, last, a):
    """Seconds a[coef, lane] of the local ops of some replicas without noise, one to a lane."""
    n_terms = low.call_cv.shape[1]
    n_segments, n_loadings = low.seg_mean.shape
    slow, seconds = np.empty(n_loadings), np.empty(max(1, n_segments))
    speed = np.empty(low.member.shape[2])
    for r in range(first, last):
        row, stage = r % low.fixed_mean.shape[0], -1
        for i in range(sample.coef.shape[0]):
            c = sample.coef[i]
            if low.coef_stage[c] >= 0 and low.coef_stage[c] != stage:
                stage = low.coef_stage[c]
                _group_times(low, sample, x, r, stage, speed, slow, seconds)
            total = 0.0
            for t in range(n_terms):
                total += low.fixed_mean[row, c, t]
            for e in range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1]):
                total += low.coef_count[e] * low.quiet[c] * seconds[low.coef_seg[e]]
            a[c, r - first] = total


@njit(cache=True, nogil=True)
def _level_lanes(ops, graph, tail, a, state, level):
    """End of the step of one replica a lane, without noise and by itself: level[lane]."""
    kind, pred0, pred1, out, coef = ops.kind, ops.pred0, ops.pred1, ops.out, ops.coef
    level[:], state[:] = 0.0, 0.0
    for phase in range(graph.phase_global.shape[0]):
        if graph.phase_global[phase] == 1:
            continue
        for op in range(graph.phase_lo[phase], graph.phase_hi[phase]):
            pa, pb, po, c = pred0[op], pred1[op], out[op], coef[op]
            if pa >= graph.n_slots:  # of ops of all replicas: they are waited for by all alike
                pa = 0
            if pb >= graph.n_slots:
                pb = 0
            if kind[op] == EXPORT:
                after = tail[po - graph.n_slots]
                for lane in range(LANES):
                    level[lane] = max(level[lane], state[pa, lane] + after)
                continue
            for lane in range(LANES):
                p, q = state[pa, lane], state[pb, lane]
                start = p if p > q else q
                state[po, lane] = start + (a[c, lane] if kind[op] == DRAW else np.float32(0.0))


@njit(cache=True, nogil=True)
def find_levels(step, sample, x, level):
    """Find every replica's persistent speed: its own step without noise, level[replica] [s]."""
    n = level.shape[0]
    a = np.zeros((step.low.call_cv.shape[0], LANES), np.float32)
    state = np.zeros((step.graph.n_slots, LANES), np.float32)
    lanes = np.empty(LANES, np.float32)
    for first in range(0, n, LANES):
        last = min(n, first + LANES)
        _nominal_times(step.low, sample, x, first, last, a)
        _level_lanes(step.ops, step.graph, sample.tail, a, state, lanes)
        level[first:last] = lanes[: last - first]


@njit(cache=True, nogil=True)
def choose_replicas(sample, level, block, k0, k1, words, chosen, weight):
    """Choose replicas to be simulated: replica 0, the slowest, and one of every stratum of others.

    Fills chosen[row] in rising order, the typical replica (n_replicas) last, and weight[row], the
    number of replicas that each of them stands for.
    """
    n, n_top, n_bulk = level.shape[0], sample.n_top, sample.n_bulk
    order = np.argsort(-level, kind="mergesort")
    order = order[order != 0]
    rest = n - 1 - n_top
    count = np.zeros(n)
    count[0] = 1.0
    for i in range(n_top):
        count[order[i]] = 1.0
    for i in range(n_bulk):
        if i % LANES == 0:
            philox_lanes(block, 1, i, UNSEEN, k0, k1, words)
        lo, hi = i * rest // n_bulk, (i + 1) * rest // n_bulk
        pick = lo + np.int64((hi - lo) * (words[0, i % LANES] / 4294967296.0))
        count[order[n_top + pick]] = hi - lo
    at = 0
    for r in range(n):
        if count[r] > 0.0:
            chosen[at], weight[at] = r, count[r]
            at += 1
    chosen[at], weight[at] = n, 0.0


@njit(cache=True, nogil=True)
def _log_below(sample, mean, std, at):
    """Log of the probability that a replica's own noise keeps it below `at`."""
    table = sample.log_cdf
    t = ((at - mean) / std - sample.first) / sample.width
    if t <= 0.0:
        return table[0] + t  # far below: falls steeply, so that a search goes on
    i = np.int64(t)
    if i >= table.shape[0] - 1:
        return 0.0
    return table[i] + (t - i) * (table[i + 1] - table[i])


@njit(cache=True, nogil=True)
def unseen_bins(sample, level, chosen, mean, std, count):
    """Gather the replicas that are not simulated into bins of like mean and spread.

    mean[bin] and std[bin] are over the typical replica's time [1]; returns how many there are.
    """
    seen = np.zeros(level.shape[0], np.bool_)
    seen[chosen[:-1]] = True
    lo, hi = np.inf, -np.inf
    for r in range(level.shape[0]):
        if not seen[r]:
            lo, hi = min(lo, level[r]), max(hi, level[r])
    n, total = count.shape[0], 0
    mean[:], std[:], count[:] = 0.0, 1.0, 0.0
    for r in range(level.shape[0]):
        if not seen[r]:
            i = min(n - 1, int(n * (level[r] - lo) / (hi - lo))) if hi > lo else 0
            count[i] += 1.0
            mean[i] += level[r]
            total += 1
    for i in range(n):
        if count[i] > 0.0:
            at = mean[i] / count[i]
            mean[i] = np.interp(at, sample.knot, sample.mean)
            std[i] = np.interp(at, sample.knot, sample.std)
    return total


@njit(cache=True, nogil=True)
def unseen_slowest(sample, mean, std, count, u):
    """Quantile u of the slowest replica that is not simulated, over the typical one's time [1]."""
    lo, hi, target = np.inf, -np.inf, math.log(u)
    end = sample.first + sample.width * (sample.log_cdf.shape[0] - 1)
    for i in range(count.shape[0]):
        if count[i] > 0.0:
            lo = min(lo, mean[i] + sample.first * std[i])
            hi = max(hi, mean[i] + end * std[i])
    for _ in range(32):
        middle, total = 0.5 * (lo + hi), 0.0
        for i in range(count.shape[0]):
            if count[i] > 0.0:
                total += count[i] * _log_below(sample, mean[i], std[i], middle)
        if total < target:
            lo = middle
        else:
            hi = middle
    return 0.5 * (lo + hi)


@njit(cache=True, nogil=True)
def _add_unseen(sample, typical, after, chosen, level, lane0, k0, k1, out_time, out_path):
    """Let the step wait for the slowest of the replicas that were not simulated, too."""
    mean, std, count = np.empty(BINS), np.empty(BINS), np.empty(BINS)
    if unseen_bins(sample, level, chosen, mean, std, count) == 0:
        return
    words = np.empty((4, LANES), np.uint32)
    philox_lanes(0, 0, lane0, UNSEEN, k0, k1, words)
    for lane in range(LANES):
        u = (words[0, lane] + 0.5) / 4294967296.0
        ratio = unseen_slowest(sample, mean, std, count, u)
        end = np.float32(after[lane] + (typical[lane] - after[lane]) * ratio)
        if end > out_time[lane]:
            for k in range(out_path.shape[0]):
                out_path[k, lane] *= end / out_time[lane]
            out_time[lane] = end


@njit(cache=True, nogil=True)
def run_sampled_block(block, keys, step, sample, out, level, chosen, own, after):
    """Simulate some replicas of one block, and let the step wait for the others, too.

    Fills out.time[lane] and the other outputs as `run_block` does, and besides level[replica]
    [s], chosen[row], own[row, lane] [s] (the step if there were no other replica; the
    last row is the typical one) and after[lane] [s] (what of the typical one's is due to the ops
    of all replicas).
    """
    out_time, out_step, out_path, out_busy = out
    lane0, graph, key = block * LANES, step.graph, keys.stream
    words, step_words = np.empty((4, LANES), np.uint32), np.empty((4, LANES), np.uint32)
    x, regimes = _draw_cluster(block, key, step, words, step_words)
    find_levels(step, sample, x, level)
    n_rows, k0, k1 = chosen.shape[0], key[RESIDUAL, 0], key[RESIDUAL, 1]
    work = _new_work(step, keys, n_rows, graph.n_global_slots)
    choose_replicas(sample, level, block, key[RANK, 0], key[RANK, 1], words, chosen, work.weight)
    lower_replicas(step.low, x, chosen[: n_rows - 1], work.coef_a, work.coef_r)
    work.coef_a[n_rows - 1], work.coef_r[n_rows - 1] = sample.typical, 0.0
    of_all, first = np.int64(1), np.int64(0)
    vectors, typical = work.vectors[0], np.bool_(False)
    fill_bank(step, regimes, step_words, of_all, first, lane0, key, vectors, typical)
    _find_tails(step, sample.export, work, chosen, lane0, k0, k1)
    _run_phases(step, work, chosen, regimes, step_words, lane0, keys, words)
    final = (graph.n_state - 1) * graph.n_slots + graph.final_slot
    out_time[:] = work.state[final]
    out_path[:] = work.path[final]
    out_busy[:] = work.busy
    own[:], after[:] = work.own, work.after
    typical = own[n_rows - 1]
    _add_unseen(sample, typical, after, chosen, level, lane0, k0, k1, out_time, out_path)
    _end_block(step, lane0, key, words, step_words, out_time, out_step)


@njit(cache=True, nogil=True)
def microbatches(replicas, lane0, tables, table, n, k0, k1, out):
    """Mean and longest microbatch of replicas, out[replica, lane, 2], of a mean of 1."""
    words = np.empty((4, LANES), np.uint32)
    out[:] = np.float32(0.0)
    for r in range(replicas.shape[0]):
        for m in range(n):
            if m & 3 == 0:
                philox_lanes(m >> 2, replicas[r], lane0, MICROBATCH, k0, k1, words)
            for lane in range(LANES):
                length = np.float32(1.0) + lookup(tables, table, words[m & 3, lane])
                out[r, lane, 0] += length
                out[r, lane, 1] = max(out[r, lane, 1], length)
    out[:, :, 0] /= np.float32(n)


@njit(cache=True, nogil=True)
def run_sampled(first, keys, step, sample, out_time, out_step, out_path, out_busy):
    """`run_range` where only some replicas are simulated."""
    n_rows = 2 + sample.n_top + sample.n_bulk
    level = np.empty(step.graph.n_replicas, np.float32)
    chosen = np.empty(n_rows, np.int64)
    own, after = np.empty((n_rows, LANES), np.float32), np.empty(LANES, np.float32)
    for i in range(out_time.shape[0]):
        out = (out_time[i], out_step[i], out_path[i], out_busy[i])
        run_sampled_block(first + i, keys, step, sample, out, level, chosen, own, after)
