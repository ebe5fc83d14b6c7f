"""What published jobs and MLPerf logs say of figures that the shipped libraries assume.

    python experiments/public-jobs/fit.py

Three figures: how far GPUs of a burnt-in cluster differ (rank effect), what all ranks share in a
step (step effect), and what GEMMs reach in training over what they reach alone, by device (derate).
Nothing is written: the libraries do not use these yet. The burn-in needs the measured data (folder
PRISM_DATA, or ../shared/data beside the checkout) and is left out without them.
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import run
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm, spearmanr

from prism.library import load_library, save_library

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data"))
EFFECT = "variability.effects."
STEADY = (f"{EFFECT}rank.lemon_fraction=0", f"{EFFECT}microbatch.cv=0", f"{EFFECT}step.cv=0")
BODIES = (0.002, 0.006, 0.010, 0.014)  # CV of the rank effect [1]
BODY = 0.007  # of the other fits
CONTENT = 0.01  # trial CV between microbatches [1]
DERATE, TRIAL = "nominal/training_gemm_derate", 1.0
TAIL = norm.ppf(0.95)


# ------------------------------------------------------------------------------------- rank effect
def burn_in(rng):
    """Print the spread of GEMM times within and between nodes of a burnt-in cluster."""
    path = DATA / "kernel_tables" / "primus_mi3xx_nodes.csv"
    if not path.is_file():
        print(f"burn-in: {path} is not there", file=sys.stderr)
        return
    table = pd.read_csv(path)
    low, middle, high = (1.0 / table[f"gemm_{k}"].to_numpy() for k in ("max", "med", "min"))
    normal = np.sort(rng.standard_normal((100_000, 8)), axis=1)
    width = (normal[:, -1] - normal[:, 0]).mean()  # of eight normal values, in their sd
    noise = np.median(normal, axis=1).var()

    def parts(i):
        within = ((high - low)[i] / middle[i]).mean() / width
        node = (middle[i] / middle.mean()).var(ddof=1) - noise * within**2
        return np.sqrt(within**2 + max(0.0, node)), max(0.0, node) / (within**2 + max(0.0, node))

    n = len(table)
    draws = np.array([parts(rng.integers(0, n, n)) for _ in range(2_000)])
    (cv, share), (lo, hi) = parts(np.arange(n)), np.quantile(draws, [0.05, 0.95], axis=0)
    cvs, shares = zip(lo, hi, strict=True)
    print(f"burn-in, {8 * n} GPUs, 90 % by bootstrap: CV {100 * cv:.2f} % ({100 * cvs[0]:.2f} to "
          f"{100 * cvs[1]:.2f}), share of nodes {share:.2f} ({shares[0]:.2f} to "
          f"{shares[1]:.2f})")  # fmt: skip


def growth_by_body():
    """Fit the rank effect to growth with size; print how far each series is off."""
    found = {}
    for cv in BODIES:
        rows = run.predict((*STEADY, f"{EFFECT}rank.cv={cv}"), ("h100",))
        rows = [row for row in rows if row["class"] == "h100 megatron"]
        found[cv] = run.growth(rows)
    names = [f"{series[0]}, {series[1]}" for series in found[BODIES[0]]]
    published = np.array([series[4] for series in found[BODIES[0]]])
    grid = np.array([[series[5] for series in found[cv]] for cv in BODIES])  # [body, series]
    fine = np.linspace(BODIES[0], BODIES[-1], 601)
    curves = np.array([np.interp(fine, BODIES, column) for column in grid.T])
    squares = ((curves - published[:, None]) ** 2).sum(axis=0)
    best, variance = squares.argmin(), squares.min() / (len(names) - 1)
    inside = fine[squares <= squares.min() + 2.71 * variance]
    print(f"growth of {len(names)} series: CV {100 * fine[best]:.2f} % ({100 * inside[0]:.2f} to "
          f"{100 * inside[-1]:.2f}, 90 %), sd {100 * variance**0.5:.1f} points")  # fmt: skip
    at = np.array([np.interp(BODY, BODIES, column) for column in grid.T])
    for name, own, guess in zip(names, published, at, strict=True):
        print(f"  {name:40s} published {100 * own:+.1f} %, with a CV of {100 * BODY:.1f} % "
              f"{100 * guess:+.1f} %")  # fmt: skip


# ------------------------------------------------------------------------------------- step effect
def spreads():
    """Simulate MLPerf systems without step effect, with and without content of microbatches."""
    quiet = (*STEADY, f"{EFFECT}rank.cv={BODY}")
    plain = run.predict_spread(quiet)
    varied = run.predict_spread((*quiet, f"{EFFECT}microbatch.cv={CONTENT}"))
    table = pd.DataFrame(plain)
    more = pd.DataFrame(varied).p95_less_p50_s ** 2 - table.p95_less_p50_s**2
    table["content_s"] = np.sqrt(np.maximum(0.0, more)) / CONTENT
    return table


def predicted(table, step, content=0.0, seconds=0.0):
    """Give p95 less p50 [s] with a step effect [1], content [1], and an added time."""
    parts = (table.p95_less_p50_s, content * table.content_s, TAIL * step * table.p50_s, seconds)
    return np.sqrt(sum(np.asarray(part) ** 2 for part in parts))


def fit_step(table, content=False):
    """Fit one figure by least absolute deviations of logarithms."""

    def loss(x):
        step, other = (0.0, np.exp(x)) if content else (np.exp(x), 0.0)
        return np.abs(np.log(table.measured_p95_less_p50_s / predicted(table, step, other))).sum()

    grid = np.linspace(np.log(1e-5), np.log(0.1), 400)
    start = grid[np.argmin([loss(x) for x in grid])]
    return float(np.exp(minimize_scalar(loss, (start - 0.05, start, start + 0.05)).x))


def judge(name, table, step, content=0.0, seconds=0.0):
    """Print how well the spread of some systems is met."""
    own = predicted(table, step, content, seconds)
    excess = own / table.p50_s
    measured = table.measured_p95_less_p50_s / table.measured_p50_s
    logs = np.abs(np.log(own / table.measured_p95_less_p50_s))
    rank = spearmanr(excess, measured).statistic if len(table) > 3 else np.nan
    print(f"  {name:48s} n {len(table):2d}, Spearman {rank:+.2f}, median error "
          f"{100 * np.median(np.abs(excess - measured)):.2f} points, within a factor of 2 "
          f"{np.mean(logs < np.log(2.0)):.2f}")  # fmt: skip


def step_effect(rng):
    """Fit the step effect on some systems and try it on the others."""
    table = spreads()
    h100 = table[table.device == "h100"]
    draws = [fit_step(h100.sample(frac=1.0, replace=True, random_state=rng)) for _ in range(200)]
    low, high = np.quantile(draws, [0.05, 0.95])
    print(f"step effect, H100: CV {100 * fit_step(h100):.3f} % ({100 * low:.3f} to "
          f"{100 * high:.3f}, 90 % by bootstrap)")  # fmt: skip
    judge("nothing but measured residuals", h100, 0.0)
    judge("step effect fitted", h100, fit_step(h100))
    judge("content fitted instead", h100, 0.0, fit_step(h100, content=True))
    for ms in (5.0, 10.0, 20.0):
        judge(f"step effect, and {ms:.0f} ms added", h100, fit_step(h100), 0.0, 1e-3 * ms)
    gpt = h100.job.str.startswith("gpt3")
    nvidia = ~h100.system.str.startswith(("coreweave", "64xSMC"))
    for name, train in (("GPT-3", gpt), ("Llama 3.1 405B", ~gpt), ("NVIDIA", nvidia)):
        step = fit_step(h100[train])
        judge(f"fitted on {name} ({100 * step:.3f} %), the others", h100[~train], step)
    gb200 = table[(table.device == "gb200") | (table.device == "b200")]
    judge(f"GB200 and B200, fitted ({100 * fit_step(gb200):.3f} %)", gb200, fit_step(gb200))


# ------------------------------------------------------------------------------------------ derate
def derates(folder):
    """Find the derate of each device under which its Megatron jobs take what was published."""
    for device in ("h100", "a100", "gb200"):
        library = load_library(f"{device}-healthy")
        entry = library.entry(DERATE)
        path = folder / f"{device}.nc"
        entries = {**library.entries, DERATE: replace(entry, number=TRIAL)}
        save_library(replace(library, entries=entries), path)
        quiet = (*STEADY, f"{EFFECT}rank.cv={BODY}", f"{EFFECT}step.cv=0.0007")
        rows = [run.predict(o, (device,)) for o in (quiet, (*quiet, f"variability.library={path}"))]
        keep = [i for i, row in enumerate(rows[0]) if row["class"] == f"{device} megatron"]
        shipped, trial, measured = (
            np.array([source[i][key] for i in keep])
            for source, key in ((rows[0], "mean_s"), (rows[1], "mean_s"), (rows[0], "measured_s"))
        )
        models = np.array([rows[0][i]["job"] for i in keep])
        # a step is a part that the derate divides, and the rest
        part = (shipped - trial) / (1.0 / entry.number - 1.0 / TRIAL)
        fixed = trial - part / TRIAL
        show_derate(f"{device} (shipped {entry.number:.2f})", part, fixed, measured, models)


def show_derate(name, part, fixed, measured, models):
    """Fit one derate to the geometric mean of some jobs, and try it on models left out."""

    def logs(derate, chosen):
        return np.log((part / derate + fixed) / measured)[chosen]

    def solve(chosen):
        return brentq(lambda derate: logs(derate, chosen).mean(), 0.3, 3.0)

    everything = np.ones(len(models), bool)
    derate, text = solve(everything), ""
    left = logs(derate, everything)
    if len(names := np.unique(models)) > 1:
        out = [solve(models != own) for own in names]
        unseen = [logs(d, models == own) for d, own in zip(out, names, strict=True)]
        percent = 100.0 * np.expm1(np.concatenate(unseen))
        text = f"; models left out ({min(out):.3f} to {max(out):.3f}): mean {percent.mean():+.1f} "
        text += f"%, {percent.min():+.1f} to {percent.max():+.1f} %"
    percent = 100.0 * np.expm1(left)
    print(f"{name}, {len(left)} Megatron jobs: derate {derate:.3f}, sd {left.std(ddof=1):.3f}, "
          f"{percent.min():+.1f} to {percent.max():+.1f} %{text}")  # fmt: skip


def main():
    rng = np.random.default_rng(1)
    burn_in(rng)
    growth_by_body()
    step_effect(rng)
    with tempfile.TemporaryDirectory() as folder:
        derates(Path(folder))


if __name__ == "__main__":
    main()
