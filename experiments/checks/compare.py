"""Size and coverage of `prism compare`, and power with as many steps or runs as it asks for.

Run from a checkout:
    python experiments/checks/compare.py [--repetitions 400] [--seed 1] [--only TEXT]
"""

import argparse
import sys
import time

import numpy as np
from scipy import stats
from scipy.signal import lfilter

from prism.analyses.comparisons.quantity import POWERS, compare_figures
from prism.common.resampling import FIGURES, Sample, distance, in_blocks, resample

SHOWN = ("mean", "p50", "p95", "std")
SIZE = (0.01, 0.085)  # of 5 % tests; three standard errors of 400 repetitions are 0.033
POWER = 0.08  # what power may be off
CAUTIOUS = {"slow start", "3 runs", "paired", "1 run against 8"}  # may find less than 1 %
RESAMPLES, PERMUTATIONS = 300, 299
EFFECT = 0.01


def series(n, rng, rho=0.0, cv=0.02, stalls=0.0, start=0.0):
    """Draw one run's steps [s]: AR(1) around 2 s, rare stalls, a start that dies away."""
    shocks = rng.standard_normal(n)
    shocks[1:] *= np.sqrt(1.0 - rho**2)
    x = lfilter([1.0], [1.0, -rho], shocks)
    seconds = 2.0 * np.exp(cv * x)
    seconds[rng.random(n) < stalls] += 2.0
    return seconds * (1.0 + start * np.exp(-np.arange(n) / 20.0))


def runs(n_runs, n, rng, effect=0.0, **distribution):
    """Draw several runs that differ as a whole."""
    values = np.concatenate(
        [
            series(n, rng, **distribution) * np.exp(effect * rng.standard_normal())
            for _ in range(n_runs)
        ]
    )
    kind = "runs" if n_runs > 1 else "steps"
    return Sample(values, np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs), kind)


def clusters(n, rng, paired):
    """Draw two sides of n clusters of 64 replicates, on the same clusters or not."""
    sides, unit = [], np.repeat(np.arange(n), 64)
    level, steps = rng.standard_normal((n, 1)), rng.standard_normal((n, 64))
    for _ in "ab":
        if not paired:
            level, steps = rng.standard_normal((n, 1)), rng.standard_normal((n, 64))
        own = 0.002 * rng.standard_normal((n, 64))
        values = 6.0 * np.exp(0.02 * level + 0.01 * steps + own)
        sides.append(Sample(values.ravel(), unit, unit, "clusters"))
    return sides


def both(*arguments, **distribution):
    """Draw two sides alike."""
    return lambda g: [runs(*arguments[:2], g, *arguments[2:], **distribution) for _ in "ab"]


CASES = {
    "1 run of 500 steps, white": (both(1, 500), None),
    "1 run of 1,000 steps, AR(1) 0.5": (both(1, 1_000, rho=0.5), None),
    "1 run of 2,000 steps, AR(1) 0.9": (both(1, 2_000, rho=0.9), None),
    "the same, by step": (both(1, 2_000, rho=0.9), "step"),
    "1 run of 300 steps, AR(1) 0.9": (both(1, 300, rho=0.9), None),
    "1 run of 1,000 steps, stalls 1 %": (both(1, 1_000, stalls=0.01), None),
    "1 run of 1,000 steps, slow start kept": (both(1, 1_000, start=0.1), None),
    "1 run of 300 steps, one of 5,000": (
        lambda g: (runs(1, 300, g), runs(1, 5_000, g)), None),
    "3 runs of 300 steps, run effect 0.5 %": (both(3, 300, 0.005), None),
    "4 runs of 300 steps, run effect 0.5 %": (both(4, 300, 0.005), None),
    "6 runs of 300 steps, run effect 5 %": (both(6, 300, 0.05), None),
    "12 runs of 300 steps, run effect 0.2 %, stalls 1 %": (
        both(12, 300, 0.002, stalls=0.01), None),
    "5 runs of 300 steps, 5 of 3,000": (lambda g: (runs(5, 300, g), runs(5, 3_000, g)), None),
    "1 run against 8, run effect 0.5 %": (
        lambda g: (runs(8, 300, g, 0.005), runs(1, 300, g, 0.005)), None),
    "16 clusters": (lambda g: clusters(16, g, False), None),
    "16 clusters, paired": (lambda g: clusters(16, g, True), "cluster"),
    "100 clusters": (lambda g: clusters(100, g, False), None),
}  # fmt: skip


def tested(a, b, pairing, seed):
    """Both sides in their units, and figures by name."""
    a, b = in_blocks(a, b, pairing)
    of_a, of_b = (
        resample(x, np.random.default_rng([seed, 0 if pairing else k]), RESAMPLES)
        for k, x in enumerate((a, b))
    )
    return a, b, compare_figures(a, b, of_a, of_b, pairing, EFFECT, 0.0)


def rejected(name, repetitions, seed, factor=1.0):
    """Share of tests at 5 % that find a difference; the last of a row is a naive t test.

    Percentiles and KS that are not tested count as not found; NaN where most are not.
    """
    make, pairing = CASES[name]
    rng, rows = np.random.default_rng([seed, list(CASES).index(name)]), []
    for r in range(repetitions):
        a, b = make(rng)
        b = Sample(factor * b.values, b.unit, b.step, b.kind)
        a, b, found = tested(a, b, pairing, r)
        p = [found["p_value"][FIGURES.index(f)] for f in SHOWN]
        whole = distance(a, b, pairing, r, PERMUTATIONS).p_value if factor == 1.0 else None
        p += [np.nan if whole is None else whole, stats.ttest_ind(a.values, b.values).pvalue]
        rows.append(p)
    p = np.array(rows)
    shares = (np.nan_to_num(p, nan=1.0) < 0.05).mean(axis=0)
    return np.where(np.isfinite(p).mean(axis=0) > 0.5, shares, np.nan)


PLANS = {
    "steps, white, CV 5 %": lambda n, g: both(1, n, cv=0.05)(g),
    "steps, AR(1) 0.8, CV 2 %": lambda n, g: both(1, n, rho=0.8)(g),
    "runs of 200 steps, run effect 1 %, AR(1) 0.5": lambda n, g: both(n, 200, 0.01, rho=0.5)(g),
    "clusters of 64 replicates": lambda n, g: clusters(n, g, False),
}
PILOTS = (20_000, 20_000, 400, 2_000)


def planned(name, figure, power, repetitions, seed):
    """How many a large pilot asks for, and how often as many see the effect."""
    make, pilot = PLANS[name], PILOTS[list(PLANS).index(name)]
    rng = np.random.default_rng([seed, 7, list(PLANS).index(name)])
    k = FIGURES.index(figure)
    n = int(tested(*make(pilot, rng), None, 0)[2]["needed"][k, POWERS.index(power)])
    hits = []
    for r in range(repetitions):
        a, b = make(n, rng)
        b = Sample(b.values * (1 + EFFECT), b.unit, b.step, b.kind)
        hits.append(tested(a, b, None, r)[2]["p_value"][k] < 0.05)
    return n, float(np.mean(hits))


def main():
    """Print the tables; status 1 where a bound is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="Cases and plans whose name holds this.")
    options = parser.parse_args()
    begin, broken = time.process_time(), []
    for factor in (1.0, 1.0 + EFFECT):
        title = "no difference" if factor == 1.0 else "1 % difference"
        print(f"\n| {title} | " + " | ".join(SHOWN) + " | KS | naive t |")
        print("|---" * (len(SHOWN) + 3) + "|")
        for name in (name for name in CASES if options.only in name):
            row = rejected(name, options.repetitions, options.seed, factor)
            least = 0.0 if any(word in name for word in CAUTIOUS) else SIZE[0]
            if factor == 1.0:
                broken += [
                    (name, x) for x in row[:-1] if np.isfinite(x) and not least <= x <= SIZE[1]
                ]
            cells = ["-" if np.isnan(x) else f"{100 * x:.1f} %" for x in row]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print("\n| plan, to see 1 % | figure | asked for | power asked | power found |")
    print("|---" * 5 + "|")
    for name in (name for name in PLANS if options.only in name):
        for figure, power in (("p50", 0.8), ("p50", 0.9), ("p95", 0.8)):
            n, found = planned(name, figure, power, options.repetitions, options.seed)
            if abs(found - power) > POWER:
                broken.append((name, figure, found))
            print(f"| {name} | {figure} | {n:,} | {power:.0%} | {found:.1%} |", flush=True)
    seconds = time.process_time() - begin
    print(f"\n{seconds:.0f} s of processor time; out of bounds: {broken or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
