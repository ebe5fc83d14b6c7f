"""Size and coverage of `prism compare`, and power with as many steps or runs as it asks for.

Run from a checkout:
    python experiments/verification/compare.py [--repetitions 400] [--seed 1] [--only TEXT]
"""

import argparse
import sys
import time

import numpy as np
from scipy import stats
from scipy.signal import lfilter

from prism.analyses.comparisons.distance import distance
from prism.analyses.comparisons.errors import Sample
from prism.analyses.comparisons.figures import FIGURES
from prism.analyses.comparisons.quantity import compare_figures, cosines_of

SHOWN = ("mean", "p50", "p95", "std")
SIZE = (0.01, 0.08)  # of 5 % tests; three standard errors of 400 repetitions are 0.033
POWER = 0.08  # what power may be off
CAUTIOUS = {
    "one run each, slow start",
    "3 runs each, run effect 0.5 %",
    "3 runs each, run effect 5 %",
    "5 runs of 300 steps, 5 of 3,000",
}  # may find less than 1 %: set after seeing 0 to 1 %
PERMUTATIONS = 499
EFFECT = 0.01


def series(n, rng, rho=0.0, cv=0.02, stalls=0.0, start=0.0):
    """Draw one run's steps [s]: AR(1) around 2 s, rare stalls, a start that dies away."""
    shocks = rng.standard_normal(n)
    shocks[1:] *= np.sqrt(1.0 - rho**2)
    x = lfilter([1.0], [1.0, -rho], shocks)
    seconds = 2.0 * np.exp(cv * x)
    seconds[rng.random(n) < stalls] += 2.0
    return seconds * (1.0 + start * np.exp(-np.arange(n) / 20.0))


def runs(n_runs, n, rng, effect=0.0, **law):
    """Draw several runs that differ as a whole."""
    values = np.concatenate(
        [series(n, rng, **law) * np.exp(effect * rng.standard_normal()) for _ in range(n_runs)]
    )
    kind = "runs" if n_runs > 1 else "steps"
    return Sample(values, np.repeat(np.arange(n_runs), n), np.tile(np.arange(n), n_runs), kind)


def clusters(n, rng, shared=None):
    """Draw simulated steps: 64 replicates on each of n clusters, `shared` with another sample."""
    own = np.random.default_rng(shared) if shared is not None else rng
    level = np.exp(0.02 * own.standard_normal(n))
    steps = np.exp(0.01 * own.standard_normal((n, 64)) + 0.002 * rng.standard_normal((n, 64)))
    values = (6.0 * level[:, None] * steps).ravel()
    return Sample(values, np.repeat(np.arange(n), 64), np.arange(64 * n), "clusters")


CASES = {
    "one run each, 1,000 steps, white": (lambda g: runs(1, 1_000, g), None),
    "one run each, AR(1) 0.5": (lambda g: runs(1, 1_000, g, rho=0.5), None),
    "one run each, AR(1) 0.9": (lambda g: runs(1, 1_000, g, rho=0.9), None),
    "the same, by step": (lambda g: runs(1, 1_000, g, rho=0.9), "step"),
    "one run each, 300 steps, AR(1) 0.9": (lambda g: runs(1, 300, g, rho=0.9), None),
    "one run each, stalls 1 %": (lambda g: runs(1, 1_000, g, stalls=0.01), None),
    "one run each, stalls 0.3 %": (lambda g: runs(1, 1_000, g, stalls=0.003), None),
    "one run each, slow start": (lambda g: runs(1, 1_000, g, start=0.1), None),
    "3 runs each, run effect 0.5 %": (lambda g: runs(3, 300, g, 0.005), None),
    "6 runs each, run effect 1 %, AR(1) 0.5": (lambda g: runs(6, 300, g, 0.01, rho=0.5), None),
    "6 runs each, run effect 5 %": (lambda g: runs(6, 300, g, 0.05), None),
    "12 runs each, run effect 0.2 %, stalls 1 %": (
        lambda g: runs(12, 300, g, 0.002, stalls=0.01), None),
    "one run against 8, run effect 0.5 %": (None, None),
    "100 clusters each": (lambda g: clusters(100, g), None),
    "100 clusters, same random numbers": (None, "cluster"),
    "3 runs each, run effect 5 %": (lambda g: runs(3, 300, g, 0.05), None),
    "one run of 300 steps, one of 5,000": (None, None),
    "5 runs of 300 steps, 5 of 3,000": (None, None),
}  # fmt: skip


def two(name, make, rng):
    """Draw both sides."""
    if name.startswith("one run against"):
        return runs(8, 300, rng, 0.005), runs(1, 300, rng, 0.005)
    if name == "one run of 300 steps, one of 5,000":
        return runs(1, 300, rng), runs(1, 5_000, rng)
    if name == "5 runs of 300 steps, 5 of 3,000":
        return runs(5, 300, rng), runs(5, 3_000, rng)
    if make is None:
        key = int(rng.integers(2**62))
        return clusters(100, rng, key), clusters(100, rng, key)
    return make(rng), make(rng)


def rejected(name, repetitions, seed):
    """Share of tests at 5 % that find a difference where there is none; the last two are naive."""
    make, pairing = CASES[name]
    rng = np.random.default_rng([seed, list(CASES).index(name)])
    hits = np.zeros((repetitions, len(FIGURES)))
    ks, naive = np.full(repetitions, np.nan), np.zeros((repetitions, 2))
    for r in range(repetitions):
        a, b = two(name, make, rng)
        found = compare_figures(a, b, pairing, EFFECT)
        p = [found.figures[f]["p_value"] for f in FIGURES]
        hits[r] = [np.nan if x is None else x < 0.05 for x in p]
        whole = distance(a, b, pairing, cosines_of(a, b, found.of_a, found.of_b, pairing), r,
                         PERMUTATIONS)  # fmt: skip
        ks[r] = np.nan if whole.p_value is None else whole.p_value < 0.05
        naive[r] = (
            stats.ttest_ind(a.values, b.values).pvalue < 0.05,
            stats.ks_2samp(a.values, b.values).pvalue < 0.05,
        )
    with np.errstate(invalid="ignore"):
        return [_mean(c) for c in hits.T], _mean(ks), naive.mean(axis=0)


def _mean(column):
    known = column[np.isfinite(column)]
    return float(known.mean()) if known.size > 0.5 * column.size else float("nan")


PLANS = {
    "steps, white": (lambda n, g: runs(1, n, g, cv=0.05), 20_000),
    "steps, AR(1) 0.8": (lambda n, g: runs(1, n, g, cv=0.02, rho=0.8), 20_000),
    "runs of 200 steps, run effect 1 %": (lambda n, g: runs(n, 200, g, 0.01, rho=0.5), 400),
    "clusters": (lambda n, g: clusters(n, g), 2_000),
}


def planned(name, figure, power, repetitions, seed):
    """How many a large pilot asks for, and how often as many see the effect."""
    make, pilot = PLANS[name]
    rng = np.random.default_rng([seed, 7, list(PLANS).index(name)])
    n = compare_figures(make(pilot, rng), make(pilot, rng), None, EFFECT).figures[figure]
    n = n["needed"][f"{power:g}"]
    hits = []
    for _ in range(repetitions):
        a, b = make(n, rng), make(n, rng)
        if figure == "std":  # the same mean, wider
            middle = b.values.mean()
            b = Sample(middle + (b.values - middle) * (1 + EFFECT), b.unit, b.step, b.kind)
        else:
            b = Sample(b.values * (1 + EFFECT), b.unit, b.step, b.kind)
        p = compare_figures(a, b, None, EFFECT).figures[figure]["p_value"]
        hits.append(p is not None and p < 0.05)
    return n, float(np.mean(hits))


def main():
    """Print both tables; status 1 where a bound is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="Cases and plans whose name holds this.")
    options = parser.parse_args()
    begin, broken = time.process_time(), []
    print("| no difference | " + " | ".join(SHOWN) + " | KS | naive t | naive KS |")
    print("|---" * (len(SHOWN) + 4) + "|")
    for name in (name for name in CASES if options.only in name):
        hits, ks, naive = rejected(name, options.repetitions, options.seed)
        row = [hits[FIGURES.index(f)] for f in SHOWN] + [ks]
        least = 0.0 if name in CAUTIOUS else SIZE[0]
        broken += [(name, x) for x in row if np.isfinite(x) and not least <= x <= SIZE[1]]
        cells = ["-" if np.isnan(x) else f"{100 * x:.1f} %" for x in [*row, *naive]]
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
