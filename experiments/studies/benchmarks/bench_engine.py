"""Speed of the engine on the reference pipeline, beside its floor and vectorised NumPy.

Prints ns per op-sample (one duration drawn and propagated) of one core for the engine, for the
draws alone (Philox and the quantile table, no graph: the floor), and for NumPy float64 doing the
same work vectorised over replicates; then the speed-up of two threads. All in the same run and in
turn, so that a machine that changes pace changes all; medians and quartiles over the rounds.

    python experiments/studies/benchmarks/bench_engine.py [--rounds 7] [--json FILE]
"""

import argparse
import json
import os
import platform
import time

import numpy as np
from numba import njit

from prism import engine, load_job
from prism.jobs.schedule import make_schedule
from prism.simulation.execution.context import RunContext
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks, warm_up

JOB = "pipeline-8x32"
NUMPY_REPLICATES = 2048  # 16 kB a row: NumPy's best, measured over 256 to 65,536


@njit(nogil=True)
def draw_only(n_blocks, n_draws, key, tables, table, out):
    """Draw and look up as many numbers as the engine does, and sum them: no graph."""
    words = np.empty((4, engine.LANES), np.uint32)
    for block in range(n_blocks):
        for draw in range(n_draws):
            if draw & 3 == 0:
                engine.philox_lanes(draw >> 2, 0, block * engine.LANES, 0, key, words)
            for lane in range(engine.LANES):
                out[lane] += engine.lookup(tables, table, words[draw & 3, lane])


def numpy_steps(job, replicates, rng):
    """Step times of the same pipeline, float64, one vector of replicates per op."""
    p = job.parallelism
    schedule = make_schedule(p.schedule, p.pp, p.microbatches)
    cv = job.variability.effects.residual.cv
    sigma = np.sqrt(np.log1p(cv**2))
    clock = [np.zeros(replicates) for _ in schedule]
    end, position = {}, [0] * len(schedule)
    while any(position[s] < len(a) for s, a in enumerate(schedule)):
        for s, actions in enumerate(schedule):
            if position[s] == len(actions):
                continue
            a = actions[position[s]]
            source = s - 1 if a.kind == "F" else s + 1
            if 0 <= source < len(schedule):
                if (a.kind, source, a.microbatch) not in end:
                    continue
                clock[s] = np.maximum(clock[s], end.pop((a.kind, source, a.microbatch)))
            nominal = 1.0 if a.kind == "F" else 2.0
            noise = np.exp(sigma * rng.standard_normal(replicates) - 0.5 * sigma**2)
            clock[s] = clock[s] + nominal * noise
            end[a.kind, s, a.microbatch] = clock[s]
            position[s] += 1
    return np.maximum.reduce(clock)


def timed(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(rounds, blocks):
    job = load_job(JOB)
    program = prepare(job, 1).program
    warm_up(program, RunContext(1))
    key = np.array([1, 0], np.uint32)
    out = np.zeros(engine.LANES, np.float32)
    table = int(program.ops.table[program.ops.kind == engine.DRAW][0])
    draw_only(1, 4, key, program.tables, table, out)
    rng = np.random.default_rng(1)
    samples = program.n_draws * blocks * engine.LANES
    rows = {"engine": [], "floor": [], "numpy": [], "two_threads": []}
    for _ in range(rounds):
        rows["engine"].append(
            timed(lambda: run_blocks(program, range(blocks), RunContext(1))) / samples
        )
        rows["floor"].append(
            timed(lambda: draw_only(blocks, program.n_draws, key, program.tables, table, out))
            / samples
        )
        numpy_samples = program.n_draws * NUMPY_REPLICATES
        rows["numpy"].append(timed(lambda: numpy_steps(job, NUMPY_REPLICATES, rng)) / numpy_samples)
        rows["two_threads"].append(
            timed(lambda: run_blocks(program, range(blocks), RunContext(1, threads=2))) / samples
        )
    return {name: np.array(values) * 1e9 for name, values in rows.items()}, samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=4000, help="of 64 replicates, per round")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    rows, samples = measure(options.rounds, options.blocks)
    ratios = {
        "engine / floor": rows["engine"] / rows["floor"],
        "NumPy / engine": rows["numpy"] / rows["engine"],
        "one / two threads": rows["engine"] / rows["two_threads"],
    }
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, NumPy {np.__version__}; {JOB}, "
          f"{samples:.2e} op-samples a round, {options.rounds} rounds")  # fmt: skip
    for title, table in (("ns per op-sample", rows), ("ratio, round by round", ratios)):
        print(f"\n{title:28s}  median   quartiles")
        for name, values in table.items():
            low, mid, high = np.quantile(values, [0.25, 0.5, 0.75])
            print(f"{name:28s} {mid:7.2f}   {low:.2f} to {high:.2f}")
    if options.json:
        medians = {k: float(np.median(v)) for k, v in (rows | ratios).items()}
        with open(options.json, "w") as file:
            json.dump(medians, file, indent=1)


if __name__ == "__main__":
    main()
