"""Coverage of what is fitted to step times of known truth, and of runs in progress.

Run from a checkout: python experiments/checks/step_models.py [--repetitions 100] [--seed 1]
[--p-values]
"""

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np

from prism.analyses.validation.against_measured import Call, compare_to_measured
from prism.analyses.validation.steps import split_case
from prism.common.agreement import bootstrap_p_value, effective_n, ks_statistic
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.predict import draw_runs
from prism.models.steptimes.progress import progress
from prism.models.steptimes.spread import Spread, simulate_body
from prism.traces import StepTimes

LOWEST, HIGHEST = 0.80, 0.97  # of 90 % intervals of a part that is there
PARTS = ("white", "drift", "tau_s", "run")


class Truth(NamedTuple):
    """Made-up runs: how many, how long, their spread, and stalls per hour with their mean [s].

    A clock's error enters one step and leaves the next: white noise to the model.
    """

    name: str
    runs: int
    steps: int
    step_s: float
    spread: Spread
    stalls_per_h: float = 0.0
    stall_s: float = 0.0
    work: bool = False
    clock: float = 0.0


TRUTHS = (
    Truth("20 runs, host clock, work by step", 20, 1_500, 0.17,
          Spread(0.0046, 0.0006, 12.0, 0.0005), 30.0, 0.4, work=True, clock=0.0035),
    Truth("12 runs, drift of a minute", 12, 600, 2.0, Spread(0.006, 0.004, 60.0, 0.003)),
    Truth("5 runs, stalls", 5, 800, 5.0, Spread(0.004, 0.003, 100.0, 0.003), 9.0, 4.0),
    Truth("one long run", 1, 20_000, 2.0, Spread(0.01, 0.004, 400.0), 5.0, 6.0),
    Truth("8 runs, white", 8, 500, 2.0, Spread(white=0.01)),
    Truth("10 runs, run effect alone", 10, 700, 2.0, Spread(white=0.01, run=0.004), 2.0, 3.0),
)  # fmt: skip


def draw(truth, n_runs, rng):
    """Draw steps [step, run] in seconds, and the number of stalls."""
    shape = (truth.steps, n_runs)
    elapsed_s = truth.step_s * np.arange(truth.steps)
    body = simulate_body(truth.spread, elapsed_s, n_runs, rng)
    body += (
        truth.clock / np.sqrt(2.0) * np.diff(rng.standard_normal((truth.steps + 1, n_runs)), axis=0)
    )
    seconds = truth.step_s * (1.0 + body)
    if truth.work:
        seconds *= (1.0 + 0.15 * np.arange(truth.steps) / truth.steps)[:, None]
    hit = rng.random(shape) < truth.stalls_per_h / 3600.0 * truth.step_s
    seconds[hit] += truth.stall_s * (0.5 + rng.exponential(0.5, int(hit.sum())))
    return seconds


def as_times(seconds):
    """Give steps as what a reader returns."""
    n, n_runs = seconds.shape
    run = np.repeat(np.arange(n_runs), n).astype(np.str_)
    return StepTimes(seconds.T.ravel().copy(), np.tile(np.arange(n), n_runs), run, "made", "step_s")


def check(truth, repetitions, seed):
    """Count how often intervals hold the truth, and how far estimates lie from it."""
    held = {name: 0 for name in (*PARTS, "stalls")}
    found = {name: [] for name in PARTS}
    inside = {0.1: 0, 0.5: 0}
    for i in range(repetitions):
        rng = np.random.default_rng([seed, i])
        everything = draw(truth, truth.runs + 1, rng)
        model = fit_step_times(as_times(everything[:, :-1]), seed=i, repeats=60)
        parts, bounds = model.report["effects"], model.report["drift_memory"]["ci"]
        for name in PARTS:
            value = getattr(truth.spread, name)
            found[name].append(getattr(model.spread, name))
            low, high = (bounds or (0.0, np.inf)) if name == "tau_s" else parts[name]["ci"]
            held[name] += low is None or low <= value <= high  # one run bounds no run effect
        low, high = model.report["stalls"]["rate_per_h_ci"]
        held["stalls"] += low <= truth.stalls_per_h <= high
        total = everything[:, -1].sum()
        for share in inside:
            seen = as_times(everything[: int(share * truth.steps), -1:])
            past = progress(model, seen, truth.steps, 1_000, i)
            drawn = draw_runs(model, truth.steps, 1_000, i, past).total
            inside[share] += bool(np.quantile(drawn, 0.05) <= total <= np.quantile(drawn, 0.95))
    return held, found, inside


SPLIT = (
    Truth("white", 1, 400, 5.0, Spread(0.01)),
    Truth("drift, memory a third of the training part", 1, 400, 5.0, Spread(0.005, 0.01, 333.0)),
    Truth("drift, memory a seventh of it", 1, 400, 5.0, Spread(0.005, 0.01, 143.0)),
)


def p_values(n, seed):
    """Print how many p-values of a validation's first half are at most 0.1 under the truth."""
    for truth in SPLIT:
        found = []
        for i in range(n):
            times = as_times(draw(truth, 1, np.random.default_rng([seed, i])))
            call = Call("step_time", None, 2_000, 19, i, None, None)
            held = compare_to_measured(split_case(times, "made", "first-half", call), call)
            found.append(float(held.ks_p_value))
        print(f"p-values at most 0.1, {truth.name}: {np.mean(np.array(found) <= 0.1):.0%} of {n}")


def known_p_values(n, seed):
    """Print the same where a known distribution is held against steps that drift."""
    every = np.random.default_rng(seed).standard_normal(5_000)
    for steps, share, memory in ((400, 0.0, 1), (400, 0.5, 5), (400, 0.8, 60), (100, 0.5, 10)):
        found = []
        for i in range(n):
            rng = np.random.default_rng([seed, i])
            spread = Spread(np.sqrt(1.0 - share), np.sqrt(share), memory)
            x = simulate_body(spread, np.arange(float(steps)), 1, rng)[:, 0]
            own, worth = ks_statistic(x, every), max(1, round(effective_n(x)))
            nulls = [
                [ks_statistic(rng.choice(every, k), every) for _ in range(39)]
                for k in (worth, steps)
            ]
            found.append([bootstrap_p_value(own, null) <= 0.1 for null in nulls])
        new, old = np.mean(found, axis=0)
        print(f"{steps} steps, {share:.0%} of the variance with a memory of {memory}: {new:.0%} as "
              f"n_effective steps, {old:.0%} as independent ones")  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the truths, from 0")
    parser.add_argument("--p-values", action="store_true", help="those of a validation alone")
    arguments = parser.parse_args()
    if arguments.p_values:
        known_p_values(arguments.repetitions, arguments.seed)
        return p_values(arguments.repetitions, arguments.seed)
    n, wrong = arguments.repetitions, []
    noise = 2.6 * np.sqrt(0.09 / n)  # 99 % of what as few repetitions err by
    for k, truth in enumerate(TRUTHS):
        if arguments.only is not None and k not in arguments.only:
            continue
        begin = time.perf_counter()
        held, found, inside = check(truth, n, arguments.seed)
        print(f"{truth.name} ({time.perf_counter() - begin:.0f} s)")
        for name in (*PARTS, "stalls"):
            known = name not in PARTS or getattr(truth.spread, name) > 0.0
            known &= not (truth.clock and name in ("white", "drift", "tau_s"))
            text = f"  {name:7s} held {held[name] / n:6.1%}"
            if name in PARTS:
                value, middle = getattr(truth.spread, name), np.median(found[name])
                text += f"  truth {value:.4g}, median {middle:.4g}"
            print(text)
            if known and not LOWEST - noise <= held[name] / n <= HIGHEST + noise:
                wrong.append(f"{truth.name}: {name} held in {held[name] / n:.1%}")
        for share, count in inside.items():
            print(f"  total after {share:.0%} of the steps: in the 90 % interval {count / n:.1%}")
            if not LOWEST - noise <= count / n <= HIGHEST + noise:
                wrong.append(f"{truth.name}: total after {share:.0%}: {count / n:.1%}")
    print("\n".join(wrong) if wrong else "all within bounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
