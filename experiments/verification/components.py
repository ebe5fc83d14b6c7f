"""Coverage of the 90 % intervals of variance components on tables of known truth.

Run from a checkout: python experiments/verification/components.py [--repetitions 200] [--seed 1]
"""

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np

from prism.models.variance.components import Column, fit_components

LOWEST, HIGHEST, NULL_HIGHEST = 0.83, 0.96, 0.98


class Truth(NamedTuple):
    """Layout and standard deviations of log duration of a made-up job (forward; backward 1.5 x)."""

    name: str
    replicas: int
    stages: int
    steps: int
    microbatches: int
    rank: float = 0.005
    step: float = 0.008
    rank_step: float = 0.003
    content: float = 0.014
    residual: float = 0.004
    skew: float = 0.0
    lemon: bool = False
    memory: float = 0.0  # steps; the step numbers span 40 x their count


TRUTHS = (
    Truth("4 x 4, 44 x 32, one lemon", 4, 4, 44, 32, lemon=True),
    Truth("4 x 4, 44 x 32, skewed content", 4, 4, 44, 32, skew=0.5),
    Truth("32 x 2, 21 x 8, sequence lengths", 32, 2, 21, 8, 0.004, 0.02, 0.02, 0.2, 0.015, 0.5),
    Truth("2 x 4, 32 x 4", 2, 4, 32, 4, 0.005, 0.02, 0.004, 0.012, 0.006),
    Truth("2 x 2, 8 x 4, smallest", 2, 2, 8, 4),
    Truth("2 x 2, 8 x 4, little of everything", 2, 2, 8, 4, 0.001, 0.001, 0.001, 0.002, 0.004),
    Truth("4 x 3, 16 x 8, no rank_step, lemon", 4, 3, 16, 8, rank_step=0.0, lemon=True),
    Truth("8 x 4, 12 x 8, little content", 8, 4, 12, 8, content=0.001),
    Truth("16 x 2, 20 x 16, lemon, skewed", 16, 2, 20, 16, skew=1.0, lemon=True),
    Truth("4 x 4, 30 x 8, little step", 4, 4, 30, 8, step=0.0005, rank_step=0.0005),
    Truth("4 x 4, 44 x 8, memory of 100 steps", 4, 4, 44, 8, memory=100.0),
)


def loadings(truth: Truth) -> np.ndarray:
    """Give the loading [column] of every shared effect; the last stage follows less."""
    stage = np.linspace(1.0, 1.15, truth.stages)
    stage[-1] = 0.8
    return np.concatenate([stage, 1.5 * stage])


def draw(truth: Truth, steps: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a table [column, replica, step, microbatch] of log durations."""
    n_stages, shape = truth.stages, (truth.replicas, truth.steps, truth.microbatches)
    loading = loadings(truth)[:, None, None, None]
    if truth.skew > 0.0:  # a gamma of shape 4 / skew^2 has this skewness
        shape_k = 4.0 / truth.skew**2
        content = (rng.gamma(shape_k, size=shape) - shape_k) / np.sqrt(shape_k)
    else:
        content = rng.standard_normal(shape)
    silicon = rng.standard_normal((n_stages, truth.replicas))
    own = rng.standard_normal((2, n_stages, truth.replicas))
    rank = (0.9 * silicon + np.sqrt(1.0 - 0.81) * own).reshape(2 * n_stages, -1)
    rank[n_stages:] *= 1.5
    table = truth.rank * rank[:, :, None, None] + np.zeros((2 * n_stages, *shape))
    distance = np.abs(steps[:, None] - steps[None, :])
    correlation = np.exp(-distance / max(truth.memory, 1e-3))
    score = np.linalg.cholesky(correlation) @ rng.standard_normal(truth.steps)
    table += truth.step * loading * score[:, None]
    table += truth.rank_step * loading * rng.standard_normal((1, *shape[:2], 1))
    table += truth.content * loading * content
    table += truth.residual * rng.standard_normal(table.shape)
    table[:, :, :, 0] -= 0.01
    if truth.lemon:
        table[[1, n_stages + 1], -1] += np.log(2.4)
    return table - 3.0


def expected(truth: Truth) -> dict[str, np.ndarray]:
    """Give the true standard deviation [column] of each component."""
    loading = loadings(truth)
    ones = np.ones(loading.size)
    return {
        "rank": truth.rank * np.repeat([1.0, 1.5], truth.stages),
        "step": truth.step * loading,
        "rank_step": truth.rank_step * loading,
        "content": truth.content * loading,
        "residual": truth.residual * ones,
    }


def coverage(truth: Truth, repetitions: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Coverage pooled per op_kind, coverage per column, and relative bias of the variance."""
    rng = np.random.default_rng(seed)
    columns = [Column(kind, s) for kind in ("forward", "backward") for s in range(truth.stages)]
    steps = np.sort(rng.choice(40 * truth.steps, truth.steps, replace=False))
    true = expected(truth)
    inside: dict[str, list[float]] = {name: [] for name in true}
    inside_column: dict[str, list[float]] = {name: [] for name in true}
    square: dict[str, list[float]] = {name: [] for name in true}
    for _ in range(repetitions):
        fit = fit_components(draw(truth, steps, rng), columns, steps)
        if len(fit.lemons) != truth.lemon:
            print(f"  {truth.name}: lemons {fit.lemons}", file=sys.stderr)
        effects = {
            "rank": fit.rank_effect, "step": fit.step, "rank_step": fit.rank_step,
            "content": fit.content,
        }  # fmt: skip
        for name, value in true.items():
            if name == "residual":
                low, high = fit.residual_lo, fit.residual_hi
            else:
                low, high = effects[name].ci_lo, effects[name].ci_hi
            inside_column[name].append(float(np.mean((low <= value) & (value <= high))))
            for k, kind in enumerate(("forward", "backward")):
                part = value[k * truth.stages : (k + 1) * truth.stages]
                rms = float(np.sqrt(np.mean(part**2)))
                spread = fit.by_op_kind[kind][name]
                inside[name].append(spread.lo <= rms <= spread.hi)
                square[name].append(spread.std**2 / rms**2 - 1.0 if rms > 0.0 else np.nan)
    return {
        name: (
            float(np.mean(inside[name])),
            float(np.mean(inside_column[name])),
            float(np.mean(square[name])),
        )
        for name in true
    }


def main() -> int:
    """Print the table; exit 1 where a coverage is out of bounds by more than its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = ("rank", "step", "rank_step", "content", "residual")
    print("coverage of 90 % intervals, pooled per op_kind / per column (bias of the variance;")
    print("of components too small to see it is the cut of negative estimates at zero)")
    print(f"{'stages and sizes':<36}" + "".join(f"{name:>20}" for name in names))
    ok = True
    begin = time.perf_counter()
    for truth in TRUTHS:
        found = coverage(truth, options.repetitions, options.seed)
        text = ""
        for name in names:
            pooled, column, bias = found[name]
            # of an effect that is not there only the lower limit can miss: 95 % is exact
            highest = HIGHEST if np.any(expected(truth)[name] > 0.0) else NULL_HIGHEST
            off = "" if max(pooled, column) <= highest and min(pooled, column) >= LOWEST else "*"
            ok = ok and not off
            mean = f" ({bias:+.0%})" if np.isfinite(bias) else ""
            text += f"{pooled:.1%} {column:.1%}{mean}{off}".rjust(20)
        print(f"{truth.name:<36}{text}", flush=True)
    print(f"{options.repetitions} repetitions each, {time.perf_counter() - begin:.0f} s")
    print("all within bounds" if ok else f"* outside {LOWEST:.0%} to {HIGHEST:.0%}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
