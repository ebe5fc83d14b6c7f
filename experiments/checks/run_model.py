"""Runs from event to event against runs step by step, on the engine's own steps.

A job of 64 GPUs, 20,000 steps. The engine simulates all of them for each of 200 clusters (GPU
speeds stay, all else is new), and they are walked one by one: drift, stalls in the engine,
failures in the middle of a step, checkpoints. `prism estimate`'s run model sees 64 steps of each
cluster and goes from event to event. Three regimes: white, slow drift, stalls and failures.
Bounds: mean within 0.1 %, spread, also that within a cluster, within 10 %.
Controls that must fail: the drift without memory, no stalls. Also the effective time under
failures alone, and the best checkpoint interval, against their closed forms.

Run from a checkout: python experiments/checks/run_model.py [--seed 1] [--runs 4000]
"""

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

from prism import engine
from prism.jobs.job import Job, job_from_dict
from prism.simulation.execution.context import RunContext, cores
from prism.simulation.prepare import prepare
from prism.simulation.program import Program, make_keys, stream_keys
from prism.simulation.runs.build import build_run_model
from prism.simulation.runs.checkpointing import FailureDistribution, best_steps, expected_time
from prism.simulation.runs.model import simulate_runs
from prism.simulation.runs.parts import Checkpoints, Drift, Interruptions, RunModel
from prism.simulation.steps import run_each, simulate

N_STEPS, N_CLUSTERS = 20_000, 200
MEAN_BOUND, STD_BOUND = 0.001, 0.10
DAY_S = 86_400.0
JOB = {
    "model": {"name": "llama3-8b"},
    "parallelism": {"tp": 4, "pp": 2, "dp": 8, "microbatches": 8},
    "cluster": {"nodes": 8, "gpus_per_node": 8},
    "run": {"steps": N_STEPS, "failures": "none"},
}
STALL = {"entity": "node", "rate_per_hour": 0.5, "duration_s": 8.0, "duration_cv": 1.0}
# an interruption every 29 min, some 17 of them in a run; Llama 3 405B had one every 3 h
RUN = {
    "steps": N_STEPS,
    "checkpoint": {"interval": "3min", "write_s": 5},
    "failures": {
        "per_1000_node_days": 6250,
        "detection": "20s",
        "restart": "60s",
        # no node is replaced, or a run would not stay on the cluster whose steps are walked
        "causes": {"software": {"share": 1.0, "replace": False}},
    },
    "evaluation": {"interval_steps": 1000, "duration": "90s"},
}


def make_job(name: str) -> Job:
    """Return the job of a regime."""
    # the steps that are walked know neither what the model may be wrong by nor how runs differ
    effects = {"step": {"correlation_time_s": 0.0}, "run": {"cv": 0.0}}
    values = dict(JOB)
    if name == "slow drift":
        effects["step"] = {"correlation_time_s": 1800.0}
    if name == "stalls and failures":
        effects["stall"] = STALL
        values["run"] = RUN
    variability = {"model_error": 0.0, "effects": effects}
    return job_from_dict(values | {"variability": variability}, name.replace(" ", "-"))


def all_steps(program: Program, seed: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate every step of every cluster: time [cluster, step; s], and the step effect in it."""
    n = -(-N_STEPS // engine.LANES)
    times = np.empty((N_CLUSTERS, n * engine.LANES), np.float32)
    effects = np.empty_like(times)
    keys = make_keys(seed)
    for i in range(n):
        streams = stream_keys(seed + 1_000_003 * (i + 1))
        streams[engine.RANK] = keys.stream[engine.RANK]
        swapped = program, range(N_CLUSTERS), keys._replace(stream=streams)
        (found,) = run_each([swapped], RunContext(0, threads))
        span = slice(i * engine.LANES, (i + 1) * engine.LANES)
        times[:, span], effects[:, span] = found[0], found[1]
    return times, effects


def walk(
    job: Job, times: np.ndarray, n_runs: int, rng: np.random.Generator, drift: Drift
) -> np.ndarray:
    """Walk runs step by step, from the definition [run; s]; run i on cluster i modulo their number.

    `times` are whole steps where the drift has no memory, else steps at a step effect of 1.
    """
    cluster = np.arange(n_runs) % N_CLUSTERS
    t, done, saved = np.zeros(n_runs), np.zeros(n_runs, int), np.zeros(n_runs, int)
    rate, checkpoint = 0.0, job.run.checkpoint
    if job.run.failures != "none":
        rate = job.run.failures.per_1000_node_days * job.n_nodes / 1000.0 / DAY_S
    fail = np.full(n_runs, np.inf) if rate == 0.0 else rng.exponential(1.0 / rate, n_runs)
    every = N_STEPS + 1
    if checkpoint is not None:
        every = round(checkpoint.interval / float(times.mean(dtype=float)))
    keep = np.exp(-float(times.mean(dtype=float)) / drift.tau_s) if drift.tau_s else 0.0
    level = rng.standard_normal(n_runs)
    while (done < N_STEPS).any():
        seconds = times[cluster, rng.integers(0, times.shape[1], n_runs)].astype(float)
        if drift.tau_s:
            seconds *= 1.0 + drift.cv * level
            level = keep * level + np.sqrt(1.0 - keep**2) * rng.standard_normal(n_runs)
        after = done + 1
        if checkpoint is not None:
            seconds += np.where(after % every == 0, checkpoint.write_s, 0.0)
        if job.run.evaluation is not None:
            e = job.run.evaluation
            seconds += np.where(after % e.interval_steps == 0, e.duration, 0.0)
        active = done < N_STEPS
        stop = active & (fail < t + seconds)
        go = active & ~stop
        t, done = np.where(go, t + seconds, t), np.where(go, after, done)
        saved = np.where(go & (done % every == 0), done, saved)
        for i in np.flatnonzero(stop):
            f = job.run.failures
            now, t[i], done[i] = fail[i], 0.0, saved[i]
            while t[i] <= 0.0:  # a failure during a restart begins another one
                fail[i] = now + rng.exponential(1.0 / rate)
                end = now + f.detection + f.restart
                now, t[i] = (fail[i], 0.0) if fail[i] < end else (now, end)
    return t


def within(times: np.ndarray) -> float:
    """Spread of runs around the mean of their cluster [s]."""
    by_cluster = times.reshape(-1, N_CLUSTERS)
    return float(np.sqrt(by_cluster.var(axis=0, ddof=1).mean()))


def compare(name: str, found: np.ndarray, brute: np.ndarray, bounded: bool = True) -> bool:
    """Print a comparison; say whether it keeps the bounds.

    The clusters are the same, so that their differences are no error of the means.
    """
    mean = found.mean() / brute.mean() - 1.0
    inside = [within(x) for x in (found, brute)]
    error = np.hypot(inside[0] / found.size**0.5, inside[1] / brute.size**0.5) / brute.mean()
    ratios = found.std() / brute.std(), inside[0] / inside[1]
    good = abs(mean) <= MEAN_BOUND and all(abs(r - 1.0) <= STD_BOUND for r in ratios)
    verdict = ("ok" if good else "BROKEN") if bounded else ("fails" if not good else "BAD")
    print(
        f"{name:28s} {brute.mean() / 3600:7.3f} h {mean:+9.4%} ± {error:.4%} "
        f"{brute.std() / 60:8.2f} min {ratios[0]:6.3f} {inside[1]:9.1f} s {ratios[1]:6.3f} "
        f" {verdict}",
        flush=True,
    )
    return good == bounded


def regimes(seed: int, n_runs: int) -> bool:
    """Compare the three regimes and the controls."""
    good, threads = True, cores()
    for name in ("white", "slow drift", "stalls and failures"):
        job = make_job(name)
        program = prepare(job, seed).program
        begin = time.perf_counter()
        times, effects = all_steps(program, seed, threads)
        slow = name == "slow drift"
        dataset = simulate(job, N_CLUSTERS * engine.LANES, seed)
        model = build_run_model(prepare(job, seed), dataset, RunContext(seed, threads))
        if slow:
            times /= effects
        else:
            model = replace(model, drift=Drift(model.drift.cv, 0.0))
        rng = np.random.default_rng([seed, len(name)])
        brute = walk(job, times, n_runs, rng, model.drift)
        taken = time.perf_counter() - begin
        begin = time.perf_counter()
        runs = simulate_runs(model, N_STEPS, 5 * n_runs, RunContext(seed))
        print(f"{name}: step by step {taken:.0f} s, by events {time.perf_counter() - begin:.1f} s "
              f"for five times the runs, {runs.failures.mean():.1f} failures in each")  # fmt: skip
        good &= compare(name, runs.total, brute)
        if slow:
            short = replace(model, drift=Drift(model.drift.cv, 0.0))
            wrong = simulate_runs(short, N_STEPS, n_runs, RunContext(seed)).total
            good &= compare("  control: drift without memory", wrong, brute, bounded=False)
        if model.stalls is not None:
            wrong = simulate_runs(
                replace(model, stalls=None), N_STEPS, n_runs, RunContext(seed)
            ).total
            good &= compare("  control: no stalls", wrong, brute, bounded=False)
    return good


def closed_forms(seed: int) -> bool:
    """Compare failures alone, and the best interval, with their closed forms."""
    good = True
    print("\nfailures alone: 16,384 GPUs, 3.8 per 1,000 node-days, steps of 6 s, restart 10 min")
    fail = Interruptions(3.8, 2048, 0.0, 600.0)
    distribution = FailureDistribution(fail.rate_per_s, 600.0)
    flat = RunModel(np.full((1, 1), 6.0), np.zeros((1, 1)), n_nodes=2048, interruptions=fail)
    n_steps, write = 200_000, 60.0
    for interval in (100, 200, 400):
        model = replace(flat, checkpoints=Checkpoints(interval, write))
        total = simulate_runs(model, n_steps, 4096, RunContext(seed)).total
        wanted = expected_time(n_steps * 6.0, interval * 6.0, write, distribution)
        error = total.std() / total.size**0.5 / wanted
        off = total.mean() / wanted - 1.0
        ok = abs(off) < 4.0 * error
        ettr, young = n_steps * 6.0 / total.mean(), np.sqrt(2.0 * write / distribution.rate_per_s)
        first = (1.0 - distribution.rate_per_s * (600.0 + 3.0 * interval)) / (
            1.0 + write / 6.0 / interval
        )
        print(f"  every {interval} steps: effective {ettr:.4f}, closed form "
              f"{n_steps * 6.0 / wanted:.4f} ({off:+.4%} ± {error:.4%}), first order {first:.4f}"
              f"  {'ok' if ok else 'BROKEN'}")  # fmt: skip
        good &= ok
    best = best_steps(6.0, write, distribution)
    grid = np.unique(np.round(best * np.exp(np.linspace(-0.5, 0.5, 21))).astype(int))
    means = [
        simulate_runs(
            replace(flat, checkpoints=Checkpoints(int(n), write)), n_steps, 4096, RunContext(seed)
        ).total.mean()
        for n in grid
    ]
    curve = np.polynomial.Polynomial.fit(np.log(grid), means, 3)
    fine = np.linspace(np.log(grid[0]), np.log(grid[-1]), 1001)
    found = float(np.exp(fine[np.argmin(curve(fine))]))
    ok = abs(found / (young / 6.0) - 1.0) < 0.1
    print(f"  best interval: simulated {found:.0f} steps, prism says {best}, "
          f"sqrt(2 w / (N r)) = {young / 6.0:.0f}  {'ok' if ok else 'BROKEN'}")  # fmt: skip
    return good and ok


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=4000, help="a multiple of 200")
    args = parser.parse_args()
    print("mean, std, std within a cluster: step by step, and by events over that")
    good = regimes(args.seed, args.runs)
    good &= closed_forms(args.seed)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
