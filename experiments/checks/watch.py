"""`prism watch` on measured runs, replayed as growing logs: coverage, planted departures, alarms.

Run from a checkout: python experiments/checks/watch.py [--runs 6] [--systems 8] [--seed 1]
(PRISM_DATA names the folder of the data). Each log ends in the middle of a line. Half of the runs
of a record make the model of the others; an MLPerf log is held against its own steps. With --later
alone: how much the mean of later steps differs, fitted to half of the systems of MLPerf and tested
on the others. With --sequential 1000 alone: runs of 1,000 simulated steps, looked at after each:
false alarms, delays of changes after 500 steps, coverage of their intervals at the first alarm and
30 steps later. With --large alone: what looks at long logs cost, and what blocks of steps change in
what they say.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from prism import fit, save
from prism.analyses.watch import LATER, Watch
from prism.models.steptimes import blocks, departure
from prism.models.steptimes.departure import find_departure
from prism.models.steptimes.fit import fit_step_times
from prism.models.steptimes.model import model_to_dataset
from prism.simulation.runs.drift import ar1
from prism.traces import read_step_times

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
AFTER = (0.01, 0.02, 0.05, 0.1)  # of the steps, after half of them, from which on a step is slower
SLOWER, HELD = 1.03, 0.8


def write_log(path, steps, seconds, n):
    """Write the first n steps as Megatron does, and half of the next line."""
    text = "".join(
        f" iteration {s:8d}/ {steps[-1]:8d} | elapsed time per iteration (ms): {1e3 * x:.1f} | x\n"
        for s, x in zip(steps[: n + 1], seconds[: n + 1], strict=True)
    )
    if n < len(steps):
        text = text[: text.rfind("(ms): ") + 8]
    path.write_text(text)


def look(path, model, total, seed):
    """Give the figures of one look."""
    return Watch(path, model, steps=total, seed=seed).look().figures()


def replay(path, steps, seconds, model, seed):
    """Replay one run: whether P10 to P90 hold what is left, alarms by share, delays of a plant."""
    n = len(steps)
    inside, alarm, found = {}, {}, {}
    for share in SHARES:
        m = int(share * n)
        write_log(path, steps, seconds, m)
        numbers = look(path, model, int(steps[-1]), seed)
        left = numbers["time_left"]
        inside[share] = bool(left["p10"] <= seconds[m:].sum() <= left["p90"])
        alarm[share] = numbers["departure"]["kind"]
    slower = np.where(np.arange(n) >= n // 2, SLOWER, 1.0) * seconds
    for more in AFTER:
        m = n // 2 + int(more * n)
        write_log(path, steps, slower, m)
        found[more] = look(path, model, int(steps[-1]), seed)["departure"]["departed"]
    return inside, alarm, found


def repeated_runs(data, folder, most, seed, whole):
    """Replay runs of each record against a model of the other half."""
    deltas = pd.read_parquet(data / "repeated_runs" / "step_deltas.parquet")
    runs = pd.read_parquet(data / "repeated_runs" / "runs.parquet").set_index("run_id")
    deltas["record"] = deltas["run_id"].map(runs["record"])
    for record, rows in deltas.groupby("record"):
        ids = rows["run_id"].unique()
        if len(ids) < 20:
            continue
        ids = np.random.default_rng(seed).permutation(ids)
        known = rows[rows["run_id"].isin(ids[: len(ids) // 2])]
        table, model = folder / "known.csv", folder / "model.nc"
        renamed = known.rename(columns={"run_id": "run", "delta_ms": "step_ms"})
        renamed[["run", "step", "step_ms"]].to_csv(table, index=False)
        if whole:
            found = fit_step_times(read_step_times(table), seed=seed, repeats=60)
            save(model_to_dataset(found, {}), model)
        else:
            save(fit(table, seed=seed), model)
        for run in ids[len(ids) // 2 :][:most]:
            one = rows[rows["run_id"] == run].sort_values("step")
            seconds = 1e-3 * np.maximum(one["delta_ms"].to_numpy(float), 0.1)  # a clock that waits
            yield record, one["step"].to_numpy(), seconds, model


def mlperf(data, most, runs=1):
    """Replay runs of each of some systems against their own steps."""
    times = pd.read_parquet(data / "mlperf" / "step_times.parquet")
    long = times.groupby(["round", "system", "benchmark", "run"]).filter(lambda g: len(g) >= 200)
    groups = [*long.groupby(["round", "system", "benchmark"])]
    for at in np.unique(np.linspace(0, len(groups) - 1, most).astype(int)):
        system, rows = groups[at]
        for run in rows["run"].unique()[:runs]:
            one = rows[rows["run"] == run].sort_values("log_idx")
            seconds = one["step_s"].to_numpy(float)[5:]  # the first five are a warm-up
            yield system, np.arange(1, seconds.size + 1), seconds, None


def later_steps(data, folder, runs, seed):
    """Fit by how much later steps differ to systems in turn, and test on the others."""
    found = {}
    for system, steps, seconds, _ in mlperf(data, 1000, runs):
        for share in SHARES:
            m = int(share * len(steps))
            write_log(folder / "run.log", steps, seconds, m)
            left = look(folder / "run.log", None, int(steps[-1]), seed)["time_left"]
            done, whole = seconds[m:].sum(), left["mean"]
            own = max((left["std"] / whole) ** 2 - LATER**2, 0.0)  # without what is looked for
            found.setdefault(system, []).append((done / whole - 1.0, own))
    halves = [np.concatenate([*found.values()][i::2]) for i in (0, 1)]
    print(f"{len(found)} systems of MLPerf, up to {runs} runs of each, {len(SHARES)} looks")
    for name, (fitted, other) in zip("ab", (halves, halves[::-1]), strict=True):
        grid = np.arange(0.0, 0.01, 0.0001)
        best = next(s for s in grid if held(fitted, s) >= HELD)
        print(
            f"  half {name}: 80 % intervals hold {held(fitted, 0.0):.0%}, {HELD:.0%} with "
            f"{best:.2%} more; then the other half's {held(other, best):.0%}, and with "
            f"{LATER:.2%} {held(other, LATER):.0%}"
        )


def held(rows, more):
    """Share of errors within an 80 % interval that is wider by so much."""
    return float((np.abs(rows[:, 0]) <= 1.2816 * np.sqrt(rows[:, 1] + more**2)).mean())


NOISES = {  # white, drift, its memory in steps
    "white": (1.0, 0.0, 1.0), "AR(1) 0.5": (0.0, 1.0, 1.44), "AR(1) 0.9": (0.0, 1.0, 9.49),
    "AR(1) 0.98": (0.0, 1.0, 49.5), "white + 0.5 AR(1) 0.95": (1.0, 0.5, 19.5),
    "white + 0.5 AR(1) 0.99": (1.0, 0.5, 99.5), "white + AR(1) 0.99": (1.0, 1.0, 99.5),
}  # fmt: skip
LOOKS, CHANGE_AT, CV = 1000, 500, 0.01


def noisy(kind, seed, change=0.0):
    """Draw steps of a run with such noise, which change after CHANGE_AT."""
    white, drift, memory = NOISES[kind]
    times, rng = np.arange(LOOKS) / memory, np.random.default_rng(seed)
    noise = white * rng.standard_normal(LOOKS) + drift * ar1(times, 1, rng)[:, 0]
    return (1.0 + CV * noise) * np.where(np.arange(LOOKS) < CHANGE_AT, 1.0, 1.0 + change)


def first_alarm(seconds):
    """Give the look at which a run first departs, looked at after every step; None without."""

    def alarms(n):
        found = find_departure(seconds[:n])
        return found is not None and found.p_value <= departure.FALSE_ALARMS

    whole = find_departure(seconds)
    if whole.p_value > departure.FALSE_ALARMS:
        return None
    low, high = 0, seconds.size  # once the bound is crossed it stays so
    near = int(whole.current.argmax()) + departure.LEAST  # where there is one change
    tries = [near, near - 1]
    while high - low > 1:
        n = tries.pop(0) if tries else (low + high) // 2
        if low < n < high:
            low, high = (low, n) if alarms(n) else (n, high)
    return high


def sequential(series, seed, kinds):
    """Count false alarms of runs looked at after every step; delays and coverage of changes."""
    failed = False
    for kind in kinds:
        for change in (0.0, 0.01, 0.02, 0.03):
            looks = [first_alarm(noisy(kind, [seed, i], change)) for i in range(series)]
            early = sum(n is not None and n <= CHANGE_AT for n in looks)
            found, inside, later = [], [], []
            for i, n in enumerate(looks):
                if n is None or (change and n <= CHANGE_AT):
                    continue
                found.append(n - CHANGE_AT)
                for hits, m in ((inside, n), (later, n + 30)):
                    seen = find_departure(noisy(kind, [seed, i], change)[:m])
                    hits.append(seen.low <= change <= seen.high)
            text = f"{kind}, {change:+.0%}: {len(found)} of {series} depart"
            if change:
                delays = np.quantile(found, [0.1, 0.5, 0.9]) if found else []
                text += f", {early} before; after {', '.join(f'{d:.0f}' for d in delays)} steps"
            else:
                failed |= len(found) > departure.FALSE_ALARMS * series
            held = [f"{np.mean(hits):.0%}" for hits in (inside, later) if hits]
            print(f"{text}; intervals hold the change in {' and '.join(held)}", flush=True)
    return int(failed)


LONG = 10**4, 10**5, 10**6  # lines
MORE = 10, 1000  # that come in before the next looks
WHOLE = 20_000  # steps that are looked at in blocks and one by one


def long_run(n, seed, since=None, change=0.03):
    """Draw steps of 58.5 s with noise, a slow drift, pauses each 500 steps and rare stalls."""
    rng = np.random.default_rng(seed)
    drift = ar1(np.arange(n) / 19.5, 1, rng)[:, 0]
    seconds = 58.5 * (1.0 + 0.01 * rng.standard_normal(n) + 0.005 * drift)
    seconds[499::500] += 3.0
    stalled = rng.random(n) < 2e-4
    seconds[stalled] += 1.0 + rng.exponential(10.0, stalled.sum())
    return seconds * np.where(np.arange(n) < (n if since is None else since), 1.0, 1.0 + change)


def large(folder, seed, held):
    """Print what looks at long logs cost, and how far blocks move quantiles of the time left."""
    print("lines, MB: s of the first look, of those after 10 and 1,000 more lines, of none; peak")
    for n in LONG:
        path, seconds = folder / "run.log", long_run(n + sum(MORE), seed)
        steps, at = np.arange(1, 2 * n + 1)[: seconds.size], n
        write_log(path, steps, seconds, n)
        size, watched, costs = path.stat().st_size / 1e6, Watch(path, held, steps=2 * n, seed=1), []
        for more in (0, *MORE, 0):
            write_log(path, steps, seconds, at := at + more)
            begin = time.perf_counter()
            watched.look().figures()
            costs.append(time.perf_counter() - begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        costs = ", ".join(f"{x:.2f}" for x in costs)
        print(f"  {n:,}, {size:.0f}: {costs}; {peak:.0f} MiB", flush=True)
    for since in (None, WHOLE // 3, WHOLE - 400):
        apart, found = [], []
        for i in range(5):
            seconds, rows = long_run(WHOLE, [seed, i], since), []
            write_log(path, np.arange(1, WHOLE + 1), seconds, WHOLE)
            for most in (departure.MOST, WHOLE):
                blocks.MOST = most
                numbers = look(path, held, 2 * WHOLE, 1)
                rows.append([numbers["time_left"][q] for q in ("p5", "p50", "p95")])
                found.append(numbers["departure"]["departed"])
            few, whole = np.array(rows)
            apart.append((few - whole) / (whole[2] - whole[0]))
        mean, most = np.mean(apart, axis=0), np.abs(apart).max(axis=0)
        text = ", ".join(f"{m:+.3f} ({x:.3f})" for m, x in zip(mean, most, strict=True))
        print(
            f"{WHOLE:,} steps, 3 % slower since {since}: P5, P50, P95 in blocks less those of all "
            f"steps, over P5 to P95: {text} (at most); departs {sum(found[::2])} and "
            f"{sum(found[1::2])} of 5",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=6, help="of each record")
    parser.add_argument("--systems", type=int, default=8, help="of MLPerf")
    parser.add_argument("--whole", action="store_true", help="models of all steps, pauses too")
    parser.add_argument("--later", action="store_true", help="how later steps differ, alone")
    parser.add_argument("--sequential", type=int, metavar="SERIES", help="simulated runs, alone")
    parser.add_argument("--large", action="store_true", help="costs of looks at long logs, alone")
    parser.add_argument("--held", help="job or model that --large holds them against")
    parser.add_argument("--noise", choices=NOISES, help="of --sequential; each where not given")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    data = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if arguments.sequential:
        kinds = [arguments.noise] if arguments.noise else list(NOISES)
        return sequential(arguments.sequential, arguments.seed, kinds)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.large:
            large(folder, arguments.seed, arguments.held)
            return 0
        if arguments.later:
            later_steps(data, folder, arguments.runs, arguments.seed)
            return 0
        for kind, source in (
            (
                "repeated runs",
                repeated_runs(data, folder, arguments.runs, arguments.seed, arguments.whole),
            ),
            ("mlperf", mlperf(data, arguments.systems)),
        ):
            begin = time.perf_counter()
            found[kind] = [
                replay(folder / "run.log", steps, seconds, model, arguments.seed)
                for _, steps, seconds, model in source
            ]
            n = len(found[kind])
            if not n:
                continue
            print(f"{kind}: {n} runs, {time.perf_counter() - begin:.0f} s")
            for share in SHARES:
                held = sum(r[0][share] for r in found[kind])
                kinds = [r[1][share] for r in found[kind]]
                change, level = kinds.count("change"), kinds.count("level")
                print(
                    f"  {share:4.0%}: P10 to P90 hold {held}/{n}, last steps depart {change}/{n}, "
                    f"all steps {level}/{n}"
                )
            ever = sum(any(r[1].values()) for r in found[kind])
            print(f"  departs at any of {len(SHARES)} looks: {ever}/{n}")
            for more in AFTER:
                seen = sum(r[2][more] for r in found[kind])
                print(f"  3 % slower for {more:.0%} of the steps: found {seen}/{n}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
