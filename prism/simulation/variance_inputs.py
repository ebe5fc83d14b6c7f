"""The independent inputs of a step, and keys that redraw one of them alone.

The partition: the residuals of each kernel class, and each shared effect. What several classes
share (a call too) is an input of its own, never part of a class: else a class's total order would
fall below its first. A class is redrawn in a program whose ops hold one each
(`prism.simulation.classops`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.simulation.classops import lower_again
from prism.simulation.draws import draw_ranks, lower, seed_key, stall_lengths
from prism.simulation.effects import EFFECTS
from prism.simulation.effects.rank import has_fixed_ranks
from prism.simulation.lowering import CALL, variance_of
from prism.simulation.prepare import Prepared
from prism.simulation.program import Program, global_ops, ideal_program, make_keys
from prism.workload.opgraph import OpType

Array = NDArray[np.float64]
MAX_GROUPS = 8  # replicas over whose groups an op's variance is averaged


@dataclass(frozen=True)
class Input:
    """One input: streams that it owns, and ops whose residual it is."""

    name: str
    kind: str  # kernels or effects
    streams: tuple[int, ...] = ()
    owns: NDArray[np.bool_] | None = None  # [coef]; None: none

    @property
    def is_constant(self) -> bool:
        """Tell whether nothing of this input is drawn."""
        return not self.streams and self.owns is None


@dataclass(frozen=True)
class Residuals:
    """Variance of every op's residual by class, and of the call effect in it [s^2]."""

    classes: Array  # [coef, class]
    call: Array  # [coef]


def measure_residuals(step: Prepared, seed: int) -> Residuals:
    """Variance of every op's residual by class, at the first cluster's GPUs."""
    program, op_types = step.program, step.graph.op_types
    low, x = program.low, draw_ranks(program.ranks, program.tables, 0, seed_key(seed))
    if step.workload is None:  # ops of a trace hold one class each
        a, r = lower(low, x)
        std = a.sum(axis=2, dtype=np.float64) * r * low.table_std
        return Residuals((std**2).mean(axis=0)[:, None] * program.shares, np.zeros(std.shape[1]))
    column = {name: i for i, name in enumerate((*program.classes, CALL))}
    found = np.zeros((len(op_types), len(column)))
    for c, (op, op_type) in enumerate(zip(lower_again(step), op_types, strict=True)):
        mean = np.array([low.fixed_mean[0, c]])
        for name, own in op.noise:
            found[c, column[name]] += own.variance
        entries = range(low.coef_seg_ptr[c], low.coef_seg_ptr[c + 1])
        for e, (segment, _) in zip(entries, op.segments, strict=True):
            m, v = _segment(program, e, c, op_type, x)
            mean = mean + low.coef_count[e] * m * low.quiet[c] * low.coef_split[e]
            v *= low.coef_count[e] * low.quiet[c] ** 2 / (variance_of(segment.noise) or 1.0)
            for name, own in segment.noise:
                found[c, column[name]] += v * own.variance
        found[c, -1] += float((mean @ low.call_cv[c])[0]) ** 2
    return Residuals(found[:, :-1], found[:, -1])


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
                         low.cdf[low.seg_cdf[s]], low.seg_stretch[s])
        for row in gpus
    ]  # fmt: skip
    mean, var = np.mean(moments, axis=0)
    return float(mean), float(var)


def partition(program: Program, residuals: Residuals, owner: NDArray[np.int64]) -> list[Input]:
    """List the inputs of a step: its kernel classes, then the effects that vary.

    Ranks that keep their factors are an input too: one that moves the mean alone. owner[coef] is
    the class whose residual a coefficient's is, see `classops.ClassOps`.
    """
    kernels = [
        Input(name, "kernels", owns=owner == i if var.any() else None)
        for i, (name, var) in enumerate(zip(program.classes, residuals.classes.T, strict=True))
    ]
    effects = [
        Input(effect.name, "effects", effect.streams)
        for effect in EFFECTS.values()
        if effect.acts(program)
    ]
    if has_fixed_ranks(program):
        effects.append(Input("rank", "effects"))
    if residuals.call.any():
        effects.append(Input("call", "effects", owns=owner == len(program.classes)))
    return kernels + effects


def swap_keys(entry: Input, base: int, other: int) -> engine.Keys:
    """Keys of a run under seed `base`, but with one input as under seed `other`."""
    keys = make_keys(base, {stream: other for stream in entry.streams})
    if entry.owns is not None:
        seeds = np.array([seed_key(seed) for seed in (base, other)], np.uint32)
        keys = keys._replace(residual=seeds, of=entry.owns.astype(np.int64))
    return keys


def nominal_seconds(program: Program) -> Array:
    """Return the seconds of every op type with every effect at 1 [coef]."""
    ideal = ideal_program(program)
    x = np.repeat(ideal.ranks.factor.max(axis=1, keepdims=True), ideal.ranks.n_gpus or 1, axis=1)
    a, _ = lower(ideal.low, x.astype(np.float32))
    return np.asarray(a.sum(axis=2, dtype=np.float64).mean(axis=0))


def time_shares(program: Program) -> Array:
    """Return each class's share of all ranks' busy time, at nominal durations [class]."""
    ops, seconds = program.ops, nominal_seconds(program)
    copies = np.where(global_ops(program.graph), 1.0, program.graph.n_replicas)
    drawn = ops.kind == engine.DRAW
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


def stall_bound(program: Program) -> tuple[float, float]:
    """Stalls per step, and a bound of the variance that they bring [s^2]: none delays by more."""
    stalls = program.stalls
    if stalls.entity == engine.NO_STALL:
        return 0.0, 0.0
    rate = float(stalls.probability[0])
    if stalls.entity == engine.GROUP_STALL:
        rate = float(stalls.probability.sum()) * program.graph.n_replicas
    return rate, rate * (1.0 + rate) * float((stall_lengths(program) ** 2).mean())
