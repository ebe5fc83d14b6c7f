"""What changes in a recording is found, and what does not change raises no alarm.

Run from a checkout: python experiments/checks/changes.py [--seeds 20] [--stationary 200]
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prism.models.changes.find import changes_of_trace, find_changes
from prism.models.changes.segments import find_edges
from prism.traces import StepTimes

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from changes_made import during, noise, step_times, trace

DETECTED, ALARMS = 0.9, 0.05  # of seeds at least, and at most
NEAR = 3  # steps by which an end may be off


class Expected(NamedTuple):
    """A change to be found: its kind, first and last step, and the worker or run."""

    kind: str
    first: int
    last: int
    where: dict[str, Any] = {}
    near: int = NEAR


def ramp(n: int, begin: int, end: int, factor: float) -> np.ndarray:
    """Rise from 1 to another level."""
    return np.exp(np.log(factor) * np.clip((np.arange(n) - begin) / (end - begin), 0, 1))


def paused(n: int, interval: int, more: float) -> np.ndarray:
    """Return factors of steps, one in `interval` of which takes longer."""
    return 1.0 + more * (np.arange(n) % interval == interval - 1)


def widened(rng: np.random.Generator) -> StepTimes:
    """Make steps that vary four times as much in the first 200 of 400."""
    times = step_times(np.ones(400), rng)
    early = np.where(times.step < 200, 4.0, 1.0)
    times.seconds[:] = 2.0 * np.exp(early * np.log(times.seconds / 2.0))
    return times


def warm_runs(rng: np.random.Generator) -> StepTimes:
    """Make six runs of 120 steps, whose first 4 to 14 steps are 1.6 times slower."""
    spans = [(0, 4 + 2 * k, 1.6, k) for k in range(6)]
    return step_times(during(120, *spans, workers=6), rng, run_sd=0.01)


def on(r: int, s: int) -> dict[str, int]:
    """Where a worker is."""
    return {"dp_rank": r, "stage": s}


CASES: dict[str, tuple[Callable[[np.random.Generator], Any], list[Expected]]] = {
    "five warm-up steps": (
        lambda g: step_times(np.r_[6, 3, 2.5, 2, 2, np.ones(115)], g),
        [Expected("warm_up", 0, 4)]),
    "five first steps that fall, of 20": (
        lambda g: step_times(np.r_[3, 2, 1.5, 1.2, 1.1, np.ones(15)], g, sd=0.01),
        [Expected("warm_up", 0, 4, near=1)]),
    "a first step that hides four others": (
        lambda g: step_times(np.r_[27, 1.5, 1.5, 1.5, 1.5, np.ones(25)], g),
        [Expected("warm_up", 0, 4, near=0)]),
    "two phases": (
        lambda g: step_times(during(120, (0, 60, 0.55)), g, memory=0.5),
        [Expected("phase", 0, 59)]),
    "slow for a third of the steps": (
        lambda g: step_times(during(120, (40, 80, 1.5)), g, memory=0.5),
        [Expected("interval", 40, 79)]),
    "slow for a third, AR(1) 0.9, stalls": (
        lambda g: step_times(during(300, (100, 200, 1.5)), g, memory=0.9, stalls=0.01),
        [Expected("interval", 100, 199)]),
    "slow for 10 of 200 steps": (
        lambda g: step_times(during(200, (90, 100, 1.3)), g, memory=0.5),
        [Expected("interval", 90, 99)]),
    "one run of 8 slow for a while": (
        lambda g: step_times(during(150, (50, 90, 1.2, 3), workers=8), g, run_sd=0.01),
        [Expected("interval", 50, 89, {"run": "r3"})]),
    "evaluation every 25 steps": (
        lambda g: step_times(paused(200, 25, 2.0), g, stalls=0.01),
        [Expected("pause", 0, 199)]),
    "slow ramp": (
        lambda g: step_times(ramp(300, 100, 200, 1.6), g), [Expected("ramp", 100, 199, near=15)]),
    "another spread": (widened, [Expected("spread", 0, 199, near=15)]),
    "warm-ups of different length": (warm_runs, [Expected("warm_up", 0, 13)]),
    "worker slow for a while": (
        lambda g: trace(g, factors=during(80, (30, 50, 1.5, 5), workers=8)),
        [Expected("interval", 130, 149, on(2, 1))]),
    "worker slow from a step on": (
        lambda g: trace(g, factors=during(80, (50, 80, 1.4, 5), workers=8)),
        [Expected("phase", 100, 149, on(2, 1))]),
    "two workers in turn": (
        lambda g: trace(g, 90, factors=during(90, (20, 40, 1.4, 1), (55, 75, 1.4, 6), workers=8)),
        [Expected("interval", 120, 139, on(0, 1)), Expected("interval", 155, 174, on(3, 0))]),
    "job slow for a while": (
        lambda g: trace(g, factors=during(80, (20, 45, 1.3), workers=8)),
        [Expected("interval", 120, 144)]),
    "first steps of a trace that fall, of 20": (
        lambda g: trace(g, 20, factors=np.repeat(
            np.r_[3, 2, 1.5, 1.2, 1.1, np.ones(15)][:, None], 8, 1)),
        [Expected("warm_up", 100, 104, near=1)]),
    "warm-up of a trace": (
        lambda g: trace(g, 40, factors=during(40, (0, 3, 1.5), workers=8)),
        [Expected("warm_up", 100, 102)]),
    "kernels: first two of 12 steps": (
        lambda g: trace(g, 12, 2, 1, during(12, (0, 2, 1.6), workers=2), kernels=True),
        [Expected("warm_up", 100, 101, near=0)]),
    "kernels: rank slow for 8 of 24 steps": (
        lambda g: trace(g, 24, 4, 1, during(24, (10, 18, 1.5, 2), workers=4), kernels=True),
        [Expected("interval", 110, 117, {"rank": 2}, 1)]),
}  # fmt: skip

STATIONARY: dict[str, Callable[[np.random.Generator], Any]] = {
    "white noise, 120 steps": lambda g: step_times(np.ones(120), g),
    "AR(1) 0.5, 120 steps": lambda g: step_times(np.ones(120), g, memory=0.5),
    "AR(1) 0.9, 12 steps": lambda g: step_times(np.ones(12), g, memory=0.9),
    "AR(1) 0.9, 16 steps": lambda g: step_times(np.ones(16), g, memory=0.9),
    "AR(1) 0.9, 30 steps": lambda g: step_times(np.ones(30), g, memory=0.9),
    "AR(1) 0.9, 120 steps": lambda g: step_times(np.ones(120), g, memory=0.9),
    "AR(1) 0.9, 1000 steps, stalls": lambda g: step_times(
        np.ones(1000), g, memory=0.9, stalls=0.01),
    "white, stalls of 1 %": lambda g: step_times(np.ones(300), g, stalls=0.01),
    "2 runs, AR(1) 0.9": lambda g: step_times(np.ones(120), g, 2, 0.02, memory=0.9),
    "12 runs, AR(1) 0.9, stalls": lambda g: step_times(
        np.ones(200), g, 12, 0.02, memory=0.9, stalls=0.01),
    "12 runs, work by step": lambda g: step_times(
        np.exp(0.05 * g.standard_normal(200)), g, 12, 0.02, memory=0.5),
    "trace, 8 workers, 24 steps": lambda g: trace(g, 24),
    "trace, 64 workers, 44 steps": lambda g: trace(g, 44, 16, 4, microbatches=2),
    "trace, 2 workers, 60 steps": lambda g: trace(g, 60, 2, 1),
    "trace, 4 workers, 200 steps": lambda g: trace(g, 200, 4, 1),
    "kernels, 1 rank, 6 steps": lambda g: trace(g, 6, 1, 1, kernels=True),
    "kernels, 8 ranks, 12 steps": lambda g: trace(g, 12, 8, 1, kernels=True),
}  # fmt: skip


def rows_of(recording: Any) -> list[dict[str, Any]]:
    """Find what changes in a recording."""
    if isinstance(recording, StepTimes):
        return find_changes(recording).rows
    return changes_of_trace(recording)[0]


def is_found(rows: list[dict[str, Any]], expected: Expected) -> bool:
    """Whether a row is what was put in."""
    return any(
        row["kind"] == expected.kind
        and abs(row["first_step"] - expected.first) <= expected.near
        and abs(row["last_step"] - expected.last) <= expected.near
        and all(row.get(key) == value for key, value in expected.where.items())
        for row in rows
    )


def edges_alarm(memory: float, n: int, series: int, seeds: int) -> float:
    """Share of stationary tables in which a change of level is found."""
    found = [
        any(find_edges(np.log(noise(np.random.default_rng([seed, n]), (n, series), memory)))[0])
        for seed in range(seeds)
    ]
    return float(np.mean(found))


def main() -> int:
    """Print detection and alarms, return 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--stationary", type=int, default=200)
    args = parser.parse_args()
    begin, broken = time.perf_counter(), 0
    print("case: detected, with nothing else found")
    for name, (make, expected) in CASES.items():
        rows = [rows_of(make(np.random.default_rng([seed, 1]))) for seed in range(args.seeds)]
        hit = np.array([all(is_found(row, e) for e in expected) for row in rows])
        alone = np.array([len(row) == len(expected) for row in rows])
        broken += bool(hit.mean() < DETECTED)
        print(f"  {name:40s} {hit.mean():6.1%} {(hit & alone).mean():6.1%}", flush=True)
    print("stationary: alarms")
    for name, make_one in STATIONARY.items():
        seeds = range(args.stationary)
        rate = float(
            np.mean([bool(rows_of(make_one(np.random.default_rng([s, 2])))) for s in seeds])
        )
        broken += rate > ALARMS
        print(f"  {name:40s} {rate:6.1%}", flush=True)
    print("bound of levels alone, by series and steps")
    for memory in (0.0, 0.5, 0.9):
        for n in (8, 12, 24, 48, 120, 300, 600):
            rates = [edges_alarm(memory, n, k, args.stationary) for k in (1, 8, 32)]
            broken += max(rates) > ALARMS
            print(
                f"  AR(1) {memory}, {n:4d} steps " + " ".join(f"{r:6.1%}" for r in rates),
                flush=True,
            )
    print(f"{broken} bounds broken, {time.perf_counter() - begin:.0f} s")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
