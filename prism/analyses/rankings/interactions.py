"""What two causes make only together, and through which kernels an effect acts.

Pairs of a kernel class and an effect, and of two effects, by pick-freeze with both swapped. Two
classes are no pair here: where one op holds both, their residual is one draw, and redrawing its
parts one by one is exact for single classes only (`prism.simulation.causes.swap_keys`). Left out:
triples, though the joint share of a pair counts them.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.rankings.shares import HALF_WIDTH, Sampler, Shares
from prism.analyses.rankings.target import Case, Weights
from prism.common.attribution import Array, Estimate, PickFreeze, pair_variances, share_interval
from prism.simulation.causes import Input, swap_keys
from prism.simulation.steps import run_blocks

PILOT_BLOCKS, MAX_BLOCKS = 4, 64  # clusters of a pair's swapped runs
PATH_BLOCKS = 8  # clusters whose critical path is followed with an effect redrawn


def measure_interactions(
    case: Case, shares: Sequence[Shares], weights: Weights, n_largest: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pairs of the largest causes, and the classes that each of these effects acts through."""
    kernels, effects = (_largest(shares, kind, n_largest) for kind in ("kernels", "effects"))
    pairs = [(i, j) for i, j in combinations(kernels + effects, 2)
             if _is_pair(case.sampler, shares[i].entry, shares[j].entry)]  # fmt: skip
    case.sampler.planned = case.sampler.done + 2 * PILOT_BLOCKS * len(pairs)
    found = np.empty((2, len(pairs), 3))
    for k, (i, j) in enumerate(pairs):
        scale = weights.pair_share(i, j) * case.sampler.variance.total
        found[:, k] = np.array(_measure_pair(case.sampler, shares[i], shares[j])) * scale
    through = [_through_classes(case, shares[i].entry) for i in effects]
    values: dict[str, Any] = {}
    for name, estimates in zip(("pair_order", "pair_joint"), found, strict=True):
        values |= {name: estimates[:, 0], f"{name}_ci": estimates[:, 1:]}
    shape = len(effects), len(case.step.program.classes)
    values["through_class"] = np.array(through).reshape(shape)
    names = [[shares[i].entry.name for i in pair] for pair in pairs]
    coords = {
        "pair": [" x ".join(pair) for pair in names],
        "pair_first": ("pair", [pair[0] for pair in names]),
        "pair_second": ("pair", [pair[1] for pair in names]),
        "effect": [shares[i].entry.name for i in effects],
        "kernel_class": list(case.step.program.classes),
    }
    return values, coords


def _largest(shares: Sequence[Shares], kind: str, n: int) -> list[int]:
    """Return the inputs of a kind with the largest total orders."""
    found = [i for i, s in enumerate(shares) if s.entry.kind == kind and s.total.value > 0.0]
    return sorted(found, key=lambda i: -shares[i].total.value)[:n]


def _is_pair(sampler: Sampler, first: Input, second: Input) -> bool:
    """Tell whether two inputs can be redrawn apart: not two parts of one residual.

    Nor stalls that are so rare that the runs have none.
    """
    if sampler.rare is not None and engine.STALL in first.streams + second.streams:
        return False
    return first.weights is None or second.weights is None


def _measure_pair(sampler: Sampler, first: Shares, second: Shares) -> tuple[Estimate, Estimate]:
    """Interaction of two inputs, alone and with all others [share of a step's variance]."""
    none = np.empty((0, sampler.a.shape[1]))
    both = Shares(_joined(first.entry, second.entry), none, none)
    n = PILOT_BLOCKS
    while True:
        for shares in (first, second, both):
            if len(shares.ab) < n:
                sampler.extend(shares, n)
        a, b = sampler.a[:n], sampler.b[:n]
        runs = (PickFreeze(a, s.ab[:n], b, s.ba[:n]) for s in (first, second, both))
        own, joint = (
            share_interval(part, sampler.a, sampler.b, sampler.seed, sampler.control)
            for part in pair_variances(*runs)
        )
        n *= 2
        if max(own.half_width, joint.half_width) <= HALF_WIDTH or n > MAX_BLOCKS:
            return own, joint


def _joined(first: Input, second: Input) -> Input:
    """Return two inputs as one, to be redrawn together."""
    weights = first.weights if first.weights is not None else second.weights
    return Input("", "pair", first.streams + second.streams, weights)


def _through_classes(case: Case, entry: Input) -> Array:
    """Share of an effect's total-order variance that passes through each class [class].

    Notes
    -----
    With T = sum of T_k, the time of class k on the critical path, and T' the step with the effect
    redrawn: E[(T_k - T'_k)(T - T')] / E[(T - T')^2]. They sum to one; where a class's part shrinks
    when the step grows, its share is negative.
    """
    sampler, n = case.sampler, len(case.step.program.classes)
    program = sampler.program
    if sampler.rare is not None and engine.STALL in entry.streams:
        program = sampler.rare.often
    keys = swap_keys(entry, sampler.seed, sampler.other, sampler.third)
    paths = [
        run_blocks(program, range(PATH_BLOCKS), k, sampler.threads, track=True)[2]
        for k in (sampler.seed, keys)
    ]
    sampler.advance(2 * PATH_BLOCKS)
    moved = (paths[0].astype(np.float64) - paths[1])[:, :n]
    products = (moved * moved.sum(axis=1, keepdims=True)).sum(axis=(0, 2))
    return np.asarray(products / (products.sum() or np.inf))
