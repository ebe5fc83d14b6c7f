"""Known effects recovered from whole traces: generator, then graph, then components.

Traces of made-up jobs come from tests/pipeline_synth.py, which knows nothing of prism; they are
read, built into a graph and fitted as `prism fit` does. Counted is how often the 90 % interval of
a component holds its true value. Control: workers pooled, as if ranks were exchangeable draws.

Run from a checkout: python experiments/checks/synthetic_truth.py [--repetitions 200]
[--seed 1]
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prism.models.pipelinetrace.build import build_trace_graph
from prism.models.pipelinetrace.reduce import crossed_table, simplify
from prism.models.variance.components import Components, fit_components

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from pipeline_synth import Effects, Layout, as_trace, draw, record, run

LOWEST, HIGHEST = 0.83, 0.96
NAMES = ("rank", "step", "rank_step", "content", "residual")


class Case(NamedTuple):
    """A made-up job; rank_step is the spread of a worker's own drift from step to step."""

    name: str
    layout: Layout
    effects: Effects
    rank_step: float = 0.004


PLAIN = Effects(
    rank_sd=0.008, step_sd=0.01, content_sd=0.015, residual_sd=0.005, first_microbatch=0.99
)
CASES = (
    Case("1f1b, dp 4, pp 4, 12 steps of 8", Layout(4, 4, 8, 12), PLAIN),
    Case("the same, one lemon of 2.4", Layout(4, 4, 8, 12), replace(PLAIN, lemons={(1, 0): 2.4})),
    Case("1f1b, dp 8, pp 2, 20 steps of 4, 2 % missing, clock of 10 us, float32",
         Layout(8, 2, 4, 20),
         replace(PLAIN, missing=0.02, jitter_s=1e-5, float32=True)),
    Case("unbalanced: 3 odd steps, stages 1 to 1.6, 1 % missing, gaps", Layout(4, 3, 6, 15),
         replace(PLAIN, missing=0.01, stage=(1.0, 1.2, 1.6), gap_s=2e-3,
                 odd_steps={2: 4, 7: 5, 11: 3})),
    Case("interleaved, dp 4, pp 2, vpp 2, async", Layout(4, 2, 4, 12, "interleaved", "async", 2),
         PLAIN),
    Case("gpipe, dp 6, pp 2, lengths", Layout(6, 2, 8, 10, "gpipe"),
         replace(PLAIN, content_sd=0.2, residual_sd=0.015, content_last=0.7, step_sd=0.04,
                 rank_sd=0.03), 0.02),
    # two columns tell content from residual only if both hold the same shares of them
    Case("dp 8, no pipeline, forward and backward alike", Layout(8, 1, 8, 16),
         replace(PLAIN, content_backward=1.0)),
)  # fmt: skip


def durations_of(case: Case, rng: np.random.Generator) -> dict[tuple, np.ndarray]:
    """Draw every op's own duration, a worker's drift from step to step among them."""
    layout = replace(case.layout, steps=case.layout.steps - len(case.effects.odd_steps))
    durations, *_ = draw(layout, case.effects, rng)
    drift = rng.standard_normal((layout.replicas, layout.steps))
    for key, seconds in durations.items():
        if key[0] in ("forward", "backward"):
            durations[key] = seconds * np.exp(case.rank_step * drift[key[1]])
    return durations


def components_of(case: Case, seed: int, pooled: bool = False) -> Components:
    """Fit a made-up trace; pooled: who did what is shuffled within each microbatch."""
    rng = np.random.default_rng(seed)
    layout, odd = case.layout, case.effects.odd_steps
    normal = np.array([t for t in range(layout.steps) if t not in odd])
    frame, _ = run(replace(layout, steps=normal.size), case.effects, durations_of(case, rng))
    frame["step"] = normal[frame["step"]]
    for t, n in odd.items():
        small = replace(layout, microbatches=n, steps=1)
        other, _ = run(small, case.effects, draw(small, case.effects, rng)[0])
        frame = _append(frame, other.assign(step=t))
    graph = build_trace_graph(as_trace(record(frame, case.effects, rng)))
    crossed = crossed_table(simplify(graph))
    assert crossed is not None
    log = np.log(crossed.seconds)
    if pooled:
        order = rng.permuted(np.broadcast_to(
            np.arange(log.shape[1])[:, None, None], log.shape[1:]), axis=0)  # fmt: skip
        log = np.take_along_axis(log, order[None], axis=1)
    return fit_components(log, crossed.columns, graph.steps)


def _append(frame, other):
    import pandas as pd

    return pd.concat([frame, other], ignore_index=True)


def true_spreads(case: Case) -> dict[str, dict[str, float]]:
    """Give the true standard deviation of log duration, {op_kind: {component: rms over stages}}."""
    e, stages = case.effects, case.layout.stages
    last = np.ones(stages)
    last[-1] = e.content_last
    return {
        kind: {
            "rank": e.rank_sd, "step": e.step_sd, "rank_step": case.rank_step,
            "content": e.content_sd * power * float(np.sqrt(np.mean(last**2))),
            "residual": e.residual_sd,
        }
        for kind, power in (("forward", 1.0), ("backward", e.content_backward))
    }  # fmt: skip


def coverage(
    case: Case, repetitions: int, seed: int, pooled: bool = False
) -> dict[str, tuple[float, float]]:
    """Share of intervals that hold the truth, and mean estimate / truth - 1, by component."""
    inside: dict[str, list[bool]] = {name: [] for name in NAMES}
    ratio: dict[str, list[float]] = {name: [] for name in NAMES}
    true = true_spreads(case)
    for i in range(repetitions):
        parts = components_of(case, seed * 100_000 + i, pooled)
        found = {(x.replica, x.stage) for x in parts.lemons}
        if not pooled and found != set(case.effects.lemons):
            print(f"  {case.name}: lemons {sorted(found)}", file=sys.stderr)
        for kind, values in true.items():
            for name, value in values.items():
                spread = parts.by_op_kind[kind][name]
                inside[name].append(spread.lo <= value <= spread.hi)
                ratio[name].append(spread.std / value - 1.0)
    return {n: (float(np.mean(inside[n])), float(np.mean(ratio[n]))) for n in NAMES}


def main() -> int:
    """Print the table; exit 1 where a coverage is out of bounds, or the control is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.perf_counter()
    print("coverage of 90 % intervals (mean estimate / truth - 1), op_kinds together")
    print(f"{'':<72}" + "".join(f"{name:>15}" for name in NAMES))
    ok = True
    for case in CASES:
        found = coverage(case, options.repetitions, options.seed)
        text = ""
        for name in NAMES:
            share, ratio = found[name]
            off = "" if LOWEST <= share <= HIGHEST else "*"
            ok = ok and not off
            text += f"{share:.1%} ({ratio:+.0%}){off}".rjust(15)
        print(f"{case.name:<72}{text}", flush=True)
    pooled = coverage(CASES[0], max(20, options.repetitions // 5), options.seed, pooled=True)
    text = "".join(f"{share:.1%} ({ratio:+.0%})".rjust(15) for share, ratio in pooled.values())
    print(f"{'control: the first, workers pooled':<72}{text}")
    fails = pooled["rank"][0] < 0.5
    print(f"{options.repetitions} repetitions each, {time.perf_counter() - begin:.0f} s")
    print("all within bounds" if ok else f"* outside {LOWEST:.0%} to {HIGHEST:.0%}")
    print("the control fails, as it should" if fails else "the control does not fail")
    return 0 if ok and fails else 1


if __name__ == "__main__":
    sys.exit(main())
