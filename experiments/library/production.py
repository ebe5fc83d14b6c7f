"""What steps of large clusters vary by: a part of the step, and a time added to it.

    python experiments/library/production.py [--simulate]

Reads the measured data in the folder PRISM_DATA, or in ../shared/data beside the checkout; build.py
puts what `production_steps` finds into the production sets. Targets are how far p5 lies below the
median and p95 above it, all runs together, as of a published or a simulated step: every Llama 3.1
405B system of MLPerf Training, two jobs outside it, and the published step of 64K GPUs. Without
options: the fit, its interval by drawing targets again, and each target predicted by a fit to all
others. --simulate (3 minutes) also runs the shipped job of 64K GPUs
with the sets of H100, and ranks MLPerf's systems by p95 over p50.
"""

import argparse
import csv
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from fits import Fit
from scipy import optimize, stats

from prism.distributions.distribution import lognormal
from prism.simulation.effects.jitter import JITTER_CV

ROOT = Path(__file__).resolve().parents[2]
P = (0.05, 0.5, 0.95)
WARM_UP = 5  # steps of each run
DRAWS = 200
PUBLISHED = (18.6, 18.8, 19.3)  # s, 64K GPUs: arXiv:2510.15596v2
SIMULATED = "llama3-405b-64k"


class Target(NamedTuple):
    """Steps of one job."""

    name: str
    gpus: int
    p50: float  # s
    below: float  # p50 - p5 [s]
    above: float  # p95 - p50 [s]


class Spread(NamedTuple):
    """What steps vary by."""

    step_cv: float
    jitter_s: float


def targets(data: Path) -> list[Target]:
    """Give all targets."""
    times = pd.read_parquet(data / "mlperf" / "step_times.parquet")
    times = times[(times.benchmark != "gpt3") & (times.crosses_eval == 0)]
    systems = pd.read_csv(data / "mlperf" / "systems.csv")
    gpus = systems.groupby("system").accelerators.first()
    found = [
        _target(f"MLPerf {round_}, {system}", int(gpus[system]), rows.run, rows.step_s)
        for (round_, system), rows in times.groupby(["round", "system"])
    ]
    trace = pd.read_csv(data / "production_traces" / "step_times.csv").query("trace == 'AR'")
    cloud = pd.read_csv(data / "public_jobs" / "gpt3_175b_steps.csv").dropna(subset="delta_s")
    for name, n, seconds in (
        ("ByteDance, trace AR", 64, trace.step_s), ("GPT-3 175B, Google Cloud", 256, cloud.delta_s)
    ):  # fmt: skip
        found.append(_target(name, n, pd.Series(0, seconds.index), seconds))
    p5, p50, p95 = PUBLISHED
    return [*found, Target("arXiv:2510.15596", 65_536, p50, p50 - p5, p95 - p50)]


def _target(name: str, gpus: int, run: pd.Series, seconds: pd.Series) -> Target:
    """Take each run's first steps off."""
    rows = pd.DataFrame({"run": run, "s": seconds}).dropna()
    p5, p50, p95 = np.quantile(rows.s[rows.groupby("run").cumcount() >= WARM_UP], P)
    return Target(name, gpus, float(p50), float(p50 - p5), float(p95 - p50))


@cache
def _offsets() -> tuple[np.ndarray, ...]:
    """Tabulate quantiles of r Z + J, J of mean 1, by r: r, median less p5, p95 less median."""
    rng = np.random.default_rng(0)
    z, u = rng.standard_normal(200_000), rng.random(200_000)
    added = lognormal(JITTER_CV).ppf(u)
    r = np.geomspace(1e-3, 1e3, 90)
    q = np.array([np.quantile(x * z + added, P) for x in r])
    return r, q[:, 1] - q[:, 0], q[:, 2] - q[:, 1]


def offsets(spread: Spread, p50: float) -> tuple[float, float]:
    """Give how far p5 lies below the median and p95 above it [s]."""
    r, below, above = _offsets()
    at = np.log(spread.step_cv * p50 / spread.jitter_s)
    low, high = (np.exp(np.interp(at, np.log(r), np.log(x))) for x in (below, above))
    return float(spread.jitter_s * low), float(spread.jitter_s * high)


def fit(found: list[Target]) -> Spread:
    """Fit both figures, all targets alike, by squares of logarithms."""

    def errors(logs: np.ndarray) -> list[float]:
        spread = Spread(*np.exp(logs))
        pairs = [(offsets(spread, t.p50), (t.below, t.above)) for t in found]
        return [
            float(np.log(a / b)) for one, other in pairs for a, b in zip(one, other, strict=True)
        ]

    return Spread(*np.exp(optimize.least_squares(errors, np.log([3e-3, 0.1])).x))


def production_steps(data: Path) -> tuple[Fit, Fit]:
    """Give the step effect's CV and the mean jitter [s] of a production cluster."""
    found = targets(data)
    told = f"p5 and p95 of {len(found)} jobs, 17 of MLPerf's (experiments/library/production.py)"
    step, jitter = (
        Fit(float(f"{x:.2g}"), len(found), f"fitted to {told}, 90 %: {low:.2g} to {high:.2g}")
        for x, low, high in zip(fit(found), *interval(found), strict=True)
    )
    return step, jitter


def interval(found: list[Target]) -> tuple[Spread, Spread]:
    """Give the 90 % interval of both, targets drawn again."""
    rng = np.random.default_rng(0)
    drawn = [fit([found[i] for i in rng.integers(0, len(found), len(found))]) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, (0.05, 0.95), axis=0)
    return Spread(*low), Spread(*high)


def simulate() -> None:
    """Print the shipped job by library, and MLPerf's systems in order."""
    import prism

    sys.path.insert(0, str(ROOT / "experiments" / "validation" / "public-jobs"))
    from run import HERE, mlperf_job

    print(f"\n{SIMULATED}: p50, p5 and p95 of steps")
    for kind in ("healthy", "production", "uncurated", "stressed"):
        job = prism.load_job(SIMULATED, {"variability.library": f"h100-{kind}"})
        step = prism.summary(prism.simulate(job, seed=1))["step_time"]
        low, high = (100 * (step[p] / step["p50"] - 1) for p in ("p5", "p95"))
        print(f"  {kind:12s} {step['p50']:.3f} s {low:+.2f} {high:+.2f} %")
    with (HERE / "mlperf.csv").open(newline="") as file:
        systems = list(csv.DictReader(file))
    measured = [float(row["p95_less_p50_s"]) / float(row["p50_s"]) for row in systems]
    for kind in ("healthy", "production"):
        found = []
        for row in systems:
            job = mlperf_job(row).replace({"variability.library": f"{row['device']}-{kind}"})
            step = prism.summary(prism.simulate(job, replicates=1024, seed=1))["step_time"]
            found.append(step["p95"] / step["p50"] - 1)
        rho, p = stats.spearmanr(found, measured)
        print(f"{len(systems)} systems, {kind}: rank correlation of p95/p50 {rho:.2f} (p {p:.3f})")


def main() -> int:
    parser = argparse.ArgumentParser(description="What steps of large clusters vary by.")
    parser.add_argument("--simulate", action="store_true")
    arguments = parser.parse_args()
    data = Path(os.environ.get("PRISM_DATA", ROOT.parent / "shared" / "data"))
    if not (data / "mlperf").is_dir():
        print(f"no measured data in {data}; set PRISM_DATA to their folder", file=sys.stderr)
        return 2
    found = targets(data)
    spread, (low, high) = fit(found), interval(found)
    print(f"step CV {spread.step_cv:.2e} ({low.step_cv:.1e} to {high.step_cv:.1e}), jitter "
          f"{spread.jitter_s:.3f} s ({low.jitter_s:.3f} to {high.jitter_s:.3f}), 90 %")  # fmt: skip
    print("target: GPUs, p50, p5 and p95 measured, predicted by a fit to the others [%]")
    logs = []
    for i, t in enumerate(found):
        both = offsets(fit(found[:i] + found[i + 1 :]), t.p50)
        logs += [np.log(a / b) for a, b in zip(both, (t.below, t.above), strict=True)]
        told = (100 * x / t.p50 for x in (-t.below, t.above, -both[0], both[1]))
        print(f"  {t.name:45s} {t.gpus:6d} {t.p50:7.3f} s", *(f"{x:+6.2f}" for x in told))
    print(f"predicted over measured: {np.exp(np.mean(logs)):.2f}, sd of the log {np.std(logs):.2f}")
    if arguments.simulate:
        simulate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
