"""The independent inputs of a step, and keys that redraw one of them alone.

The partition: the residuals of each kernel class, and each shared effect. What several classes
share (a call too) is an input of its own, never part of a class: else a class's total order would
fall below its first. An op that holds kernels of several classes has one residual; redrawing one
class's part of it mixes draws so that the residuals before and after have the joint law that
redrawing those kernels gives. Exact for ops of one class, and for normal residuals.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.distributions.tables import sample_table
from prism.simulation.draws import draw_ranks, lower
from prism.simulation.lowering import LoweredOp
from prism.simulation.program import Program, ideal_program, stream_keys
from prism.workload.opgraph import OpType

Array = NDArray[np.float64]
MAX_GROUPS = 8  # replicas over whose groups an op's variance is averaged


@dataclass(frozen=True)
class Input:
    """One input: streams that it owns, and its share of each op's residual variance."""

    name: str
    kind: str  # kernels or effects
    streams: tuple[int, ...] = ()
    weights: Array | None = None  # [coef]

    @property
    def is_constant(self) -> bool:
        """Tell whether nothing of this input is drawn."""
        return not self.streams and (self.weights is None or not self.weights.any())


@dataclass(frozen=True)
class Residuals:
    """Variance of every op's residual by class, and of the call effect in it [s^2]."""

    classes: Array  # [coef, class]
    call: Array  # [coef]

    def share(self, k: int) -> Array:
        """Share of class k in each op's residual variance [coef]."""
        return self._over_total(self.classes[:, k])

    @property
    def call_share(self) -> Array:
        """Share of the call effect [coef]."""
        return self._over_total(self.call)

    def _over_total(self, part: Array) -> Array:
        total = self.classes.sum(axis=1) + self.call
        return np.asarray(np.divide(part, total, out=np.zeros_like(part), where=total > 0.0))


def lowered_residuals(
    program: Program, lowered: list[LoweredOp], op_types: tuple[OpType, ...], seed: int
) -> Residuals:
    """Variance by class of ops lowered from kernels, at the first cluster's GPUs."""
    low, x = program.low, draw_ranks(program, 0, seed)
    classes = np.zeros((len(lowered), len(program.classes)))
    call = np.zeros(len(lowered))
    for c, (op, op_type) in enumerate(zip(lowered, op_types, strict=True)):
        mean = np.array([low.fixed_mean[0, c]])
        for name, var in op.fixed_classes:
            classes[c, program.classes.index(name)] += var
        entries = range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1])
        for e, (segment, _) in zip(entries, op.segments, strict=True):
            m, v = _segment(program, e, c, op_type, x)
            mean = mean + low.coef_count[e] * m * low.quiet[c] * low.coef_split[e]
            for name, share in segment.classes:
                at = program.classes.index(name)
                classes[c, at] += low.coef_count[e] * v * low.quiet[c] ** 2 * share
        call[c] = float((mean @ low.call_cv[c])[0]) ** 2
    return Residuals(classes, call)


def single_class_residuals(program: Program, seed: int) -> Residuals:
    """Variance of ops that hold one class each, as those of a trace do."""
    a, r = lower(program.low, draw_ranks(program, 0, seed))
    std = a.sum(axis=2, dtype=np.float64) * r * program.low.table_std
    return Residuals((std**2).mean(axis=0)[:, None] * program.shares, np.zeros(std.shape[1]))


def _segment(
    program: Program, entry: int, c: int, op_type: OpType, x: NDArray[np.float32]
) -> tuple[float, float]:
    """Mean and variance of a segment maximised over its group, averaged over some replicas."""
    low = program.low
    s = low.coef_seg[entry]
    gpus = low.member[:MAX_GROUPS, low.coef_stage[c]]
    if op_type.member >= 0:
        gpus = gpus[:, op_type.member : op_type.member + 1]
    moments = [
        engine.group_max(low.seg_mean[s] @ x[:, row].astype(np.float64), low.seg_cv[s],
                         low.cdf[low.seg_cdf[s]])
        for row in gpus
    ]  # fmt: skip
    mean, var = np.mean(moments, axis=0)
    return float(mean), float(var)


def has_fixed_ranks(program: Program) -> bool:
    """Tell whether every GPU keeps a factor of its own, such as the one that was measured."""
    ranks, low = program.ranks, program.low
    return not (ranks.tables >= 0).any() and bool(
        (ranks.factor != 1.0).any() and (low.coef_stage >= 0).any()
    )


def partition(program: Program, residuals: Residuals, call_name: str = "call") -> list[Input]:
    """List the inputs of a step: its kernel classes, then the effects that vary.

    Ranks that keep their factors are an input too: one that moves the mean alone.
    """
    kernels = [
        Input(name, "kernels", weights=residuals.share(k)) for k, name in enumerate(program.classes)
    ]
    bank, stalls = program.bank, program.stalls
    shared = {
        "rank": ((engine.RANK,), bool((program.ranks.tables >= 0).any())),
        "step": ((engine.STEP,), program.step_table >= 0 or bool((bank.step_table >= 0).any())),
        "microbatch": ((engine.MICROBATCH,), bool((bank.mb_table >= 0).any())),
        call_name: ((engine.CALL,), bool((bank.call_table >= 0).any())),
        "regime": ((engine.REGIME,), program.links.n_leaves > 0),
        "stall": ((engine.STALL,), stalls.entity != engine.NO_STALL and stalls.duration > 0.0),
        "jitter": ((engine.JITTER,), program.jitter.mean_s > 0.0),
    }
    effects = [Input(n, "effects", streams) for n, (streams, varies) in shared.items() if varies]
    if has_fixed_ranks(program):
        effects.append(Input("rank", "effects"))
    if residuals.call.any():
        effects.append(Input("call", "effects", weights=residuals.call_share))
    return kernels + effects


def swap_keys(entry: Input, base: int, other: int, third: int) -> engine.Keys:
    """Keys of a run under seed `base`, but with one input as under seed `other`.

    Notes
    -----
    With w the input's share of an op's residual variance, its residual is `(1 - w) A + w B +
    sqrt(2 w (1 - w)) C` of independent draws: covariance 1 - w with the run under `base` (what is
    kept), w with that under `other` (what is swapped). With base and other exchanged, and C under
    the same third key but of the other sign, the two swapped residuals add up to A + B, as they
    would kernel by kernel.
    """
    streams = {stream: other for stream in entry.streams}
    seeds = np.array([stream_keys(other)[0], stream_keys(third)[0]], np.uint32)
    mix = np.zeros((0, 3), np.float32)
    if entry.weights is not None and entry.weights.any():
        w = np.clip(entry.weights, 0.0, 1.0)
        rest = np.sqrt(2.0 * w * (1.0 - w)) * (1.0 if base < other else -1.0)
        mix = np.ascontiguousarray(np.stack([1.0 - w, w, rest], axis=1), np.float32)
    return engine.Keys(stream_keys(base, streams), seeds, mix)


def nominal_seconds(program: Program) -> Array:
    """Return the seconds of every op type with every effect at 1 [coef]."""
    ideal = ideal_program(program)
    x = np.repeat(ideal.ranks.factor.max(axis=1, keepdims=True), ideal.ranks.n_gpus or 1, axis=1)
    a, _ = lower(ideal.low, x.astype(np.float32))
    return np.asarray(a.sum(axis=2, dtype=np.float64).mean(axis=0))


def time_shares(program: Program) -> Array:
    """Return each class's share of all ranks' busy time, at nominal durations [class]."""
    ops, graph = program.ops, program.graph
    copies = np.zeros(ops.kind.size)
    for is_global, lo, hi in zip(graph.phase_global, graph.phase_lo, graph.phase_hi, strict=True):
        copies[lo:hi] = 1.0 if is_global else graph.n_replicas
    drawn = ops.kind == engine.DRAW
    seconds = nominal_seconds(program)
    weight = np.bincount(ops.coef[drawn], copies[drawn], seconds.size) * seconds
    total = weight @ program.shares.astype(np.float64)
    return np.asarray(total / max(float(total.sum()), 1e-300))


def class_cvs(program: Program, residuals: Residuals) -> Array:
    """Return the cv of each class's own part of an op, weighted by time [class]."""
    seconds, drawn = nominal_seconds(program), program.ops.kind == engine.DRAW
    part = program.shares * seconds[:, None]
    weight = np.bincount(program.ops.coef[drawn], minlength=seconds.size)[:, None] * part
    cv = np.divide(np.sqrt(residuals.classes), part, out=np.zeros_like(part), where=part > 0.0)
    total = weight.sum(axis=0)
    return np.asarray((weight * cv).sum(axis=0) / np.where(total > 0.0, total, np.inf))


def effect_cv(program: Program, name: str) -> float:
    """Coefficient of variation of one draw of a shared effect, where it acts most [1]."""
    bank, links = program.bank, program.links
    if name == "regime":
        p, mean = links.probability, 1.0
        return float(np.sqrt(p * (1.0 - p)) * (links.congested - links.quiet) / mean)
    if name == "call" and program.low.call_cv.any():
        return float(program.low.call_cv.max())
    tables = {
        "rank": program.ranks.tables,
        "step": np.array([program.step_table]),
        "microbatch": bank.mb_table,
        "call": bank.call_table,
        "rank_step": bank.call_table,
        "expert": bank.call_table,
        "jitter": np.array([program.jitter.table]),
    }.get(name, np.array([-1]))
    words = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(1 << 15)
    used = set(tables.ravel().tolist()) - {-1}
    stds = [float(sample_table(program.tables[i], words).std()) for i in used]
    return max(stds, default=float("nan"))


def stall_bound(program: Program) -> tuple[float, float]:
    """Stalls per step, and a bound of the variance that they bring [s^2]: none delays by more."""
    stalls = program.stalls
    if stalls.entity == engine.NO_STALL:
        return 0.0, 0.0
    rate = float(stalls.probability[0])
    if stalls.entity == engine.GROUP_STALL:
        rate = float(stalls.probability.sum()) * program.graph.n_replicas
    words = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) + np.uint32(1 << 15)
    length = 1.0 + sample_table(program.tables[stalls.table], words).astype(np.float64)
    return rate, rate * (1.0 + rate) * stalls.duration**2 * float((length**2).mean())
