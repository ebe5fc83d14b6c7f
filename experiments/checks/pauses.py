"""Periodic pauses of steps are found, and none where there is none; runs with them are predicted.

Run from a checkout: python experiments/checks/pauses.py [--seeds 40] [--without 400]
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prism.models.changes.find import find_changes
from prism.models.changes.fit import fit_steps
from prism.traces import StepTimes

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from changes_made import STEP_S, step_times

FOUND, ALARMS, BIAS = 0.9, 0.02, 0.2  # of seeds at least, at most; of the noise's spread
Make = Callable[[np.random.Generator], StepTimes]


def every(n: int, *pauses: tuple[int, int, float]) -> np.ndarray:
    """Return factors of steps, of which one in `interval` takes longer, from a first one on."""
    out = np.ones(n)
    for interval, first, more in pauses:
        out[first::interval] += more
    return out


def averaged(times: StepTimes, k: int) -> StepTimes:
    """Average k steps of a run to one value, as a log interval does."""
    seconds = times.seconds.reshape(-1, k).mean(axis=1)
    return StepTimes(seconds, times.step[k - 1 :: k] + 1, times.run[::k], "made", "s", k)


CASES: dict[str, tuple[Make, list[tuple[int, float]]]] = {
    "evaluation every 100 of 1000, +200 %": (
        lambda g: step_times(every(1000, (100, 99, 2.0)), g, stalls=0.005), [(100, 2.0)]),
    "garbage collection every 10 of 500, +8 %": (
        lambda g: step_times(every(500, (10, 4, 0.08)), g), [(10, 0.08)]),
    "the same hidden in noise, +4 % at CV 2 %": (
        lambda g: step_times(every(1000, (10, 4, 0.04)), g), [(10, 0.04)]),
    "every second step, +6 %": (
        lambda g: step_times(every(400, (2, 1, 0.06)), g, memory=0.5), [(2, 0.06)]),
    "every 50, +6 %, AR(1) 0.9, stalls": (
        lambda g: step_times(every(2000, (50, 49, 0.06)), g, memory=0.9, stalls=0.005),
        [(50, 0.06)]),
    "two of them: every 20 and every 250": (
        lambda g: step_times(every(2000, (20, 3, 0.2), (250, 249, 3.0)), g),
        [(20, 0.2), (250, 3.0)]),
    "hidden every 10, and every 100 between": (
        lambda g: step_times(every(1000, (10, 4, 0.04), (100, 99, 2.0)), g),
        [(10, 0.04), (100, 2.0)]),
    "hidden every 10, and every 200 on top": (
        lambda g: step_times(every(1000, (10, 9, 0.04), (200, 199, 6.0)), g),
        [(10, 0.04), (200, 6.04)]),
    "4 runs, every 25, +10 %": (
        lambda g: step_times(every(200, (25, 24, 0.1)), g, 4, run_sd=0.01), [(25, 0.1)]),
    "means of 10 steps, every 100 +200 %": (
        lambda g: averaged(step_times(every(2000, (100, 99, 2.0)), g), 10), [(100, 2.0)]),
}  # fmt: skip

WITHOUT: dict[str, Make] = {
    "white noise, 30 steps": lambda g: step_times(np.ones(30), g),
    "white noise, 300 steps": lambda g: step_times(np.ones(300), g),
    "white noise, 3000 steps": lambda g: step_times(np.ones(3000), g),
    "AR(1) 0.5, 300 steps": lambda g: step_times(np.ones(300), g, memory=0.5),
    "AR(1) 0.9, 1000 steps, stalls of 1 %": lambda g: step_times(
        np.ones(1000), g, memory=0.9, stalls=0.01),
    "stalls of 5 %, 500 steps": lambda g: step_times(np.ones(500), g, stalls=0.05),
    "8 runs, 200 steps, stalls": lambda g: step_times(np.ones(200), g, 8, 0.02, stalls=0.01),
    "work by step, 8 runs": lambda g: step_times(
        np.exp(0.05 * g.standard_normal(200)), g, 8, 0.02),
    "slow for a third": lambda g: step_times(
        np.where(np.arange(300) // 100 == 1, 1.5, 1.0), g, memory=0.5),
    "heavy tails, Student's t of 2": lambda g: step_times(
        np.exp(0.03 * g.standard_t(2, 500)).clip(0.2, 50.0), g),
    "5 long steps of 500 anywhere": lambda g: step_times(
        1.0 + 2.0 * (g.permutation(500) < 5), g),
    "slower from a step on": lambda g: step_times(
        np.where(np.arange(500) < g.integers(50, 450), 1.0, 1.2), g),
    "a clock of 10 ms": lambda g: _rounded(step_times(np.ones(500), g)),
}  # fmt: skip


def _rounded(times: StepTimes) -> StepTimes:
    times.seconds[:] = np.round(times.seconds, 2)
    return times


def pauses_of(times: StepTimes) -> list[tuple[int, float]]:
    """Interval and length over the step of each pause that is found."""
    rows = [row for row in find_changes(times).rows if row["kind"] == "pause"]
    return [(row["interval_steps"], row["duration_s"] / STEP_S) for row in rows]


def agrees(found: list[tuple[int, float]], truth: list[tuple[int, float]]) -> bool:
    """Whether the pauses are those that were put in, their lengths within a fifth."""
    return len(found) == len(truth) and all(
        a == b and abs(x - y) <= BIAS * y
        for (a, x), (b, y) in zip(sorted(found), truth, strict=True)
    )


def main() -> int:
    """Print detection, alarms and what a fit makes of them; return 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--without", type=int, default=400)
    args = parser.parse_args()
    begin, broken = time.perf_counter(), 0
    print("case: found with interval and length; CV of steps (true 2 %), total over the measured")
    for name, (make, truth) in CASES.items():
        hit, cv, total = [], [], []
        for seed in range(args.seeds):
            times = make(np.random.default_rng([seed, 5]))
            hit.append(agrees(pauses_of(times), truth))
            if seed < 5 and times.mean_over == 1:
                model = fit_steps(times, None, None, 0, 0)
                s = model.spread
                cv.append(np.sqrt(s.white**2 + s.drift**2))
                n = np.unique(times.step).size
                predicted = n * model.step_s + float(model.paused_s(np.array(n)))
                stalled = model.stall_rate * (model.stall_s.mean() if model.stall_s.size else 0.0)
                predicted += n * model.step_s * stalled
                total.append(predicted * np.unique(times.run).size / times.seconds.sum())
        more = f"{np.mean(cv):6.2%} {np.mean(total):8.4f}" if cv else ""
        broken += np.mean(hit) < FOUND
        print(f"  {name:42s} {np.mean(hit):6.1%} {more}", flush=True)
    print("without pauses: alarms")
    for name, make in WITHOUT.items():
        seeds = range(args.without)
        rate = np.mean([bool(pauses_of(make(np.random.default_rng([s, 6])))) for s in seeds])
        broken += rate > ALARMS
        print(f"  {name:42s} {rate:6.1%}", flush=True)
    print(f"{broken} bounds broken, {time.perf_counter() - begin:.0f} s")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
