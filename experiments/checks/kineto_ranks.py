"""Time and accuracy of bringing many ranks' clocks together on the collectives that they share.

Ranks of made-up jobs have clocks that are off by up to 50 ms and drift by up to 50 ppm; ends of a
collective differ by some microseconds. Some jobs' ranks start late, end early or miss events; the
ranks of the last ones have nothing to do with one another.
Run from a checkout: python experiments/checks/kineto_ranks.py [--seeds 5]
"""

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import pandas as pd

from prism.traces.kineto.collectives import match_collectives

MOST_S, MOST_WRONG_S = 10.0, 10e-6


@dataclass(frozen=True)
class Case:
    """A job: `n` collectives a rank, by turns in tp and dp groups."""

    ranks: int = 8
    tp: int = 2
    n: int = 1_000
    period_s: float = 1e-3
    steps: int = 10
    late_s: float = 0.0
    missing: float = 0.0
    apart_s: float = 3e-6
    jitter: float = 0.3
    related: bool = True


CASES = {
    "plain": Case(),
    "no steps": Case(steps=1),
    "16 collectives": Case(n=16, steps=2),
    "late, early": Case(late_s=0.3),
    "late, early, no steps": Case(late_s=0.3, steps=1),
    "30 % missing": Case(missing=0.3),
    "60 % missing, no steps": Case(missing=0.6, steps=1),
    "every 0.1 ms": Case(period_s=1e-4, n=2_000),
    "regular": Case(jitter=0.01),
    "regular, late, early, no steps": Case(jitter=0.01, late_s=0.3, steps=1),
    "regular, sparse, 50 s": Case(jitter=0.01, period_s=0.1, n=500),
    "regular, sparse, late, no steps": Case(jitter=0.01, period_s=0.1, n=500, late_s=15, steps=1),
    "60 s": Case(period_s=3e-2, n=2_000),
    "180 s, every 0.3 ms": Case(2, 2, 600_000, period_s=3e-4, jitter=0.1, steps=1_000),
    "64 ranks x 2,000": Case(ranks=64, tp=8, n=2_000),
    "64 ranks x 2,000, world": Case(ranks=64, tp=64, n=2_000),
    "64 ranks x 2,000, no steps": Case(ranks=64, tp=64, n=2_000, steps=1),
    "512 ranks x 500": Case(ranks=512, tp=8, n=500),
    "unrelated": Case(related=False),
    "unrelated, 10 each": Case(related=False, n=10, period_s=0.1, steps=5),
    "64 unrelated": Case(ranks=64, tp=8, n=400, related=False),
}


def make(case: Case, seed: int) -> tuple[pd.DataFrame, np.ndarray, np.ndarray, np.ndarray]:
    """Members by their ranks' clocks; true ends [s], true collective, of each rank its clock."""
    draw = np.random.default_rng(seed)
    clock = draw.uniform(-1.0, 1.0, (2, case.ranks)) * [[0.05], [50e-6]]
    clock[:, 0] = 0.0
    rank = np.repeat(np.arange(case.ranks), case.n)
    number = np.tile(np.arange(case.n), case.ranks)
    across = (number % 2 == 1) & (case.tp < case.ranks)
    group = np.where(across, rank % case.tp, rank // case.tp + case.ranks)
    base = np.cumsum(case.period_s * np.exp(case.jitter * draw.standard_normal(case.n)))
    delay = min(0.2, 3.0 * case.jitter) * case.period_s * draw.random((case.n, 2 * case.ranks))
    end = base[number] + delay[number, group] + case.apart_s * np.abs(draw.normal(size=rank.size))
    if not case.related:
        end = base[-1] * np.sort(draw.random((case.ranks, case.n)), axis=1).ravel()
    length = 0.2 * case.period_s * (1.0 + 0.5 * draw.random(rank.size))
    step = np.minimum(end / base[-1] * case.steps, case.steps - 1).astype(np.int64)
    first, last = case.late_s * draw.random((2, case.ranks))
    kept = (end >= first[rank]) & (end <= base[-1] + case.period_s - last[rank])
    kept &= draw.random(rank.size) >= case.missing
    kept = np.flatnonzero(kept)
    kept = kept[np.lexsort((end[kept], rank[kept]))]
    rank, end, group, number, length = (x[kept] for x in (rank, end, group, number, length))
    start, recorded = ((t - clock[0, rank]) / (1.0 + clock[1, rank]) for t in (end - length, end))
    members = pd.DataFrame({
        "rank_idx": rank, "op_kind": "all_reduce", "group": group.astype(str), "size": number % 8,
        "step": step[kept], "start": start, "end": recorded,
    })  # fmt: skip
    return members, end, number * 10_000 + group, clock


def main() -> int:
    """Make, match, print; the status is 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    failed = False
    for name, case in CASES.items():
        rows = []
        for seed in range(parser.parse_args().seeds):
            members, end, true, clock = make(case, seed)
            begin = time.perf_counter()
            found = match_collectives(members, np.zeros(case.ranks))
            seconds = time.perf_counter() - begin
            of, matched = members["rank_idx"].to_numpy(), found.collective >= 0
            moved = found.offset[of] + found.drift[of] * members["end"].to_numpy()
            pairs = np.unique(np.c_[found.collective, true][matched], axis=0)
            mixed = len(pairs) - found.collective.max(initial=-1) - 1
            _, which, size = np.unique(true, return_inverse=True, return_counts=True)
            rows.append((
                seconds, np.abs(members["end"].to_numpy() + moved - end).max(),
                np.abs(found.drift - clock[1]).max(), (found.aligned_on[1:] > 0).mean(),
                matched.sum() / (size[which] > 1).sum(), mixed,
            ))  # fmt: skip
        worst, mean = np.max(rows, axis=0), np.mean(rows, axis=0)
        print(
            f"{name:31} {mean[0]:6.2f} s; ranks aligned {mean[3]:6.1%}, members matched "
            f"{mean[4]:6.1%}, collectives of several {worst[5]:.0f}"
            + (f"; wrong by up to {1e6 * worst[1]:.1f} us, {1e6 * worst[2]:.2f} ppm" * case.related)
        )
        failed |= worst[0] > MOST_S
        failed |= case.related and (worst[1] > MOST_WRONG_S or mean[4] < 0.999 or worst[5] > 0)
        failed |= not case.related and mean[4] > 0.01
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
