"""Placements of slow nodes: the chosen one against brute force, and the stated probability.

Run from a checkout: python experiments/checks/placement.py [--cases 20] [--repetitions 200]
"""

import argparse
import sys
import time

import numpy as np

from prism.analyses.differences import LEAST_COST, Sampler, pseudo_values
from prism.analyses.placements import answer
from prism.analyses.placements.answer import choose, make_case
from prism.analyses.placements.problem import Problem, make_problem
from prism.analyses.placements.search import SearchResult, find_placements
from prism.cluster.nodemap import NodeSlowdown, slow_node
from prism.jobs.job import Job, job_from_dict, load_job
from prism.simulation.execution.context import make_context
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks

TOLERANCE = 0.001
ENOUGH = 0.95  # share of cases whose chosen placement is within the tolerance of the best
CLUSTERS = 800  # of the reference
SHORT = 400  # clusters of a selection that has to guess
CLOSE = 0.005  # of the deterministic step
FEWEST, MOST = 6, 60  # placements of a case, up to symmetry
RATIO = 2.0  # by which common random numbers must lower the variance of a difference
SHIPPED = "gpt3-175b-512"  # whose differences of placements are compared


def random_job(rng: np.random.Generator, resolution: str) -> tuple[Job, dict[int, NodeSlowdown]]:
    """Draw a small job and its slow nodes: layout, schedule, transfers, effects, slownesses."""
    tp, pp, vpp = (int(rng.choice(x)) for x in ((1, 2), (2, 4), (1, 1, 2)))
    dp, share = int(rng.integers(2, 5)), int(rng.choice((1, 2)))
    gpus = tp * share
    nodes = tp * pp * dp // gpus
    if nodes * gpus != tp * pp * dp:
        gpus, nodes = tp, pp * dp
    job = job_from_dict({
        "model": {
            "n_layers": 8, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": int(rng.choice((32_000, 128_000))), "seq_len": 4096,
        },
        "parallelism": {
            "tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "microbatches": 4 * int(rng.integers(1, 3)),
            "p2p": "async" if vpp > 1 else str(rng.choice(("async", "blocking"))),
        },
        "cluster": {
            "nodes": nodes, "gpus_per_node": gpus,
            "placement": str(rng.choice(("megatron", "tp-cp-pp-dp"))),
        },
        "variability": {"library": None, "resolution": resolution, "effects": {
            "rank": {"cv": float(rng.choice((0.0, 0.01, 0.02)))},
            "step": {"cv": float(rng.choice((0.0, 0.01)))},
            "microbatch": {"cv": float(rng.choice((0.0, 0.02, 0.05)))},
            "residual": {"law": "lognormal", "cv": float(rng.choice((0.01, 0.05)))},
        }},
    })  # fmt: skip
    k = int(rng.integers(1, min(3, nodes - 1) + 1))
    factors = rng.choice((1.03, 1.1, 1.2, 1.5), k)
    slow = rng.choice(nodes, k, replace=False)
    return job, {int(n): slow_node(float(x)) for n, x in zip(slow, factors, strict=True)}


def draw_case(
    rng: np.random.Generator, resolution: str, seed: int, near: int
) -> tuple[Problem, SearchResult]:
    """Draw small jobs until one has some placements to choose from, several of them close."""
    while True:
        job, slow = random_job(rng, resolution)
        problem = make_problem(prepare(job, seed), slow, make_context(seed))
        found = find_placements(problem, seed)
        close = (found.times <= found.times[0] * (1.0 + CLOSE)).sum()
        if FEWEST <= len(found.patterns) <= MOST and close >= near:
            return problem, found


def reference(
    problem: Problem, found: SearchResult, q: float | None, seed: int, n: int
) -> np.ndarray:
    """Figure of every placement by brute force [placement], in seconds, on the same clusters."""
    out = []
    for pattern in found.patterns:
        program = problem.program(problem.realise(pattern))
        times = run_blocks(program, range(n), make_context(seed))[0].astype(np.float64)
        out.append(pseudo_values(times, q).mean())
    return np.array(out)


def chosen_index(
    problem: Problem, found: SearchResult, seed: int, objective: str
) -> tuple[int, float]:
    """Which of all placements is chosen under a seed, and how probably it is good."""
    case = make_case(problem, objective, TOLERANCE, Sampler(make_context(seed)))
    _, best, p_correct = choose(case, found)
    return found.patterns.index(problem.pattern(best.hosts)), p_correct


def brute_force(n_cases: int, seed: int) -> bool:
    """Random small jobs at kernel resolution, every placement."""
    good = 0
    for i in range(n_cases):
        rng = np.random.default_rng([seed, i])
        problem, found = draw_case(rng, "kernel", seed, 2)
        truth = reference(problem, found, 0.95, seed + 1000 + i, CLUSTERS)
        which, p = chosen_index(problem, found, seed + i, "p95")
        behind = truth[which] / truth.min() - 1.0
        good += behind <= TOLERANCE
        spread = truth.max() / truth.min() - 1.0
        print(
            f"{i:3d}  {len(found.patterns):4d} placements  worst {spread:7.2%}"
            f"  chosen {behind:7.3%} behind  stated {p:.3f}", flush=True,
        )  # fmt: skip
    print(f"within {TOLERANCE:.1%} of the best: {good} of {n_cases}")
    return good >= ENOUGH * n_cases


def calibration(repetitions: int, seed: int, jobs: list[int]) -> bool:
    """Stated probability of a good selection against the share of good ones."""
    fine = True
    whole, short = answer.SAMPLES, SHORT * LEAST_COST
    for objective, q, samples in (
        ("p95", 0.95, whole),
        ("mean", None, whole),
        ("p95", 0.95, short),
    ):
        for i in jobs:
            rng = np.random.default_rng([seed, 100 + i])
            problem, found = draw_case(rng, "op", seed, 5)
            truth = reference(problem, found, q, seed + 5000, 4 * CLUSTERS)
            limit, answer.SAMPLES = truth.min() * (1.0 + TOLERANCE), samples
            drawn = [chosen_index(problem, found, seed + r, objective) for r in range(repetitions)]
            good = np.array([truth[which] <= limit for which, _ in drawn])
            stated = np.array([p for _, p in drawn])
            error = float(np.sqrt(max(1e-4, stated.mean() * (1 - stated.mean())) / repetitions))
            holds = good.mean() >= stated.mean() - 2.0 * error
            fine &= bool(holds)
            share, said = good.mean(), stated.mean()
            print(
                f"{objective:5s} job {i}, at most {samples / 1e9:g}e9 op-samples: "
                f"{len(found.patterns):3d} placements, good in {share:.3f} of {repetitions}, "
                f"stated {said:.3f}"
                f"{'' if holds else '  TOO HIGH'}", flush=True,
            )  # fmt: skip
    answer.SAMPLES = whole
    return fine


def common_numbers(seed: int) -> bool:
    """Variance of the difference of two placements, with the same draws and with others."""
    job, slow = load_job(SHIPPED), {node: slow_node(1.2) for node in (9, 37, 44)}
    problem = make_problem(prepare(job, seed), slow, make_context(seed))
    found = find_placements(problem, seed)
    programs = [problem.program(problem.realise(found.patterns[i])) for i in (0, -1)]
    best, worst, other = (
        run_blocks(programs[i], range(24), make_context(key))[0].astype(np.float64)
        for i, key in ((0, seed), (1, seed), (1, seed + 1))
    )
    ratio = {
        "steps": (best - other).var() / (best - worst).var(),
        "clusters": (best - other).mean(axis=1).var() / (best - worst).mean(axis=1).var(),
    }
    for name, value in ratio.items():
        print(f"{SHIPPED}, best and worst: variance of the difference of {name} {value:.0f} times "
              "smaller under common random numbers")  # fmt: skip
    return min(ratio.values()) >= RATIO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--jobs", type=int, nargs="+", default=[0, 1, 2], help="of the repetitions")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begin, fine = time.perf_counter(), True
    if args.cases:
        fine &= brute_force(args.cases, args.seed)
        fine &= common_numbers(args.seed)
    if args.repetitions:
        fine &= calibration(args.repetitions, args.seed, args.jobs)
    print(f"{'holds' if fine else 'FAILS'}, {time.perf_counter() - begin:.0f} s")
    sys.exit(not fine)


if __name__ == "__main__":
    main()
