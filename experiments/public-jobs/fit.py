"""Fit what the libraries take from published jobs and MLPerf logs; write fitted.csv.

    python experiments/public-jobs/fit.py     # then experiments/library/build.py reads fitted.csv

One after the other: how far GPUs differ (rank effect), from a burn-in and from growth with size;
what all ranks share in a step (step effect) and in a run (run effect), from MLPerf; what GEMMs
reach in training over what they reach alone (derate), from step times; what is still wrong then
(model error). Needs kernel_tables in the folder PRISM_DATA, or in ../shared/data beside the
checkout.
"""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import run
from scipy.optimize import brentq, minimize_scalar
from scipy.special import gammaln
from scipy.stats import norm, spearmanr

from prism.distributions.library import load_library, save_library

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[2] / "shared" / "data"))
EFFECT = "variability.effects."
STEADY = (f"{EFFECT}rank.lemon_fraction=0", f"{EFFECT}microbatch.cv=0", f"{EFFECT}step.cv=0")
BODIES = (0.002, 0.006, 0.010, 0.014)  # CV of the rank effect [1]
CONTENT = 0.01  # trial CV between microbatches [1]
DERATE, TRIAL = "nominal/training_gemm_derate", 1.0
TAIL, LEVEL = norm.ppf(0.95), 2.0 * norm.ppf(0.95)  # LEVEL: 90 % intervals, in standard errors
SYSTEMS = {"h100": ("h100",), "gb200": ("gb200", "b200")}


class Table:
    """The figures found, as they go into fitted.csv."""

    def __init__(self):
        self.rows = []

    def add(self, devices, entry, value, interval, n, source):
        """Print a figure, and keep it."""
        low, high = interval if interval is not None else (np.nan, np.nan)
        for device in devices:
            self.rows.append({"device": device, "entry": entry, "value": value, "low": low,
                              "high": high, "n": n, "source": source})  # fmt: skip
        print(f"* {' '.join(devices)}: {entry} {value:.5g} ({low:.5g} to {high:.5g}), "
              f"n {n}: {source}")  # fmt: skip


# ------------------------------------------------------------------------------------- rank effect
def burn_in(rng):
    """Give CV between GPUs and the share of nodes in it, with draws of both."""
    table = pd.read_csv(DATA / "kernel_tables" / "primus_mi3xx_nodes.csv")
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
    return 8 * n, parts(np.arange(n)), np.quantile(draws, [0.05, 0.95], axis=0)


def growth_by_body():
    """Find the CV that growth with size asks for; and growth over the CV, by series."""
    found = {}
    for cv in BODIES:
        rows = run.predict((*STEADY, f"{EFFECT}rank.cv={cv}"), ("h100 megatron bf16",))
        found[cv] = run.growth(rows)
    names = [f"{series[0]}, {series[2]}" for series in found[BODIES[0]]]
    published = np.array([series[5] for series in found[BODIES[0]]])
    grid = np.array([[series[6] for series in found[cv]] for cv in BODIES])  # [body, series]
    fine = np.linspace(BODIES[0], BODIES[-1], 601)
    curves = np.array([np.interp(fine, BODIES, column) for column in grid.T])
    squares = ((curves - published[:, None]) ** 2).sum(axis=0)
    best, variance = squares.argmin(), squares.min() / (len(names) - 1)
    inside = fine[squares <= squares.min() + 2.71 * variance]
    return fine[best], (inside[0], inside[-1]), (names, published, fine, curves)


def rank_effect(rng, table):
    """Weigh burn-in and growth by their errors."""
    n, (own, share), ((low, few), (high, many)) = burn_in(rng)
    grown, interval, (names, published, fine, curves) = growth_by_body()
    print(f"burn-in: CV {100 * own:.2f} % ({100 * low:.2f} to {100 * high:.2f}); growth: CV "
          f"{100 * grown:.2f} % ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})")  # fmt: skip
    values = np.array([own, grown])
    errors = np.array([high - low, interval[1] - interval[0]]) / LEVEL
    weights = errors**-2.0
    body = float((weights * values).sum() / weights.sum())
    reach = 0.5 * LEVEL / np.sqrt(weights.sum())
    told = (
        f"burn-in of {n} MI3xx GPUs (AMD-AGI/Primus): {100 * own:.2f} %; growth of {len(names)} "
        f"H100 series with size: {100 * grown:.1f} %; weighed by their errors"
    )
    table.add(run.DEVICES, "rank/body_cv", body, (body - reach, body + reach), n + len(names), told)
    told = f"burn-in of {n} MI3xx GPUs (AMD-AGI/Primus)"
    table.add(run.DEVICES, "rank/node_share", share, (few, many), n, told)
    for name, measured, curve in zip(names, published, curves, strict=True):
        print(f"  {name:40s} published {100 * measured:+.1f} %, with a CV of {100 * body:.2f} % "
              f"{100 * np.interp(body, fine, curve):+.1f} %")  # fmt: skip
    return body


# ---------------------------------------------------------------------------- step and run effects
def predicted(table, step, content=0.0, seconds=0.0):
    """Give p95 less p50 [s] with a step effect [1], content [1], and an added time."""
    parts = [table.p95_less_p50_s, TAIL * step * table.p50_s, seconds]
    if content:
        parts.append(content * table.content_s)
    return np.sqrt(sum(np.asarray(part) ** 2 for part in parts))


def fit_step(table, content=False):
    """Fit one figure by least absolute deviations of logarithms."""
    own = SimpleNamespace(**{name: table[name].to_numpy() for name in table.columns})

    def loss(x):
        step, other = (0.0, np.exp(x)) if content else (np.exp(x), 0.0)
        return np.abs(np.log(own.measured_p95_less_p50_s / predicted(own, step, other))).sum()

    grid = np.linspace(np.log(1e-5), np.log(0.1), 400)
    start = grid[np.argmin([loss(x) for x in grid])]
    return float(np.exp(minimize_scalar(loss, (start - 0.05, start, start + 0.05)).x))


def fit_run(table):
    """Fit the spread between runs of a system, over their median: geometric mean."""
    return float(np.exp(np.log(table.measured_between_s / table.measured_p50_s).mean()))


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


def step_and_run(rng, table, body):
    """Fit both on all systems of a device, and try fits of some on the others."""
    systems = pd.DataFrame(run.predict_spread((*STEADY, f"{EFFECT}rank.cv={body}")))
    step = {}
    for device, members in SYSTEMS.items():
        own = systems[systems.device.isin(members)]
        told = f"{len(own)} systems of MLPerf ({', '.join(d.upper() for d in members)})"
        for entry, fit, what in (
            ("step/cv", fit_step, "p95 less p50 of steps within runs"),
            ("run/cv", fit_run, "spread between medians of a system's runs, geometric mean"),
        ):
            draws = [fit(own.sample(frac=1.0, replace=True, random_state=rng)) for _ in range(200)]
            value, interval = fit(own), np.quantile(draws, [0.05, 0.95])
            devices = [d for d in run.DEVICES if d == device or (d, device) == ("a100", "h100")]
            table.add(devices, entry, value, interval, len(own), f"{what}, {told}")
            if entry == "step/cv":
                step |= dict.fromkeys(devices, value)
    h100 = systems[systems.device == "h100"]
    judge("nothing but measured residuals", h100, 0.0)
    judge("step effect fitted", h100, step["h100"])
    for ms in (5.0, 10.0, 20.0):
        judge(f"step effect, and {ms:.0f} ms added", h100, step["h100"], 0.0, 1e-3 * ms)
    gpt = h100.job.str.startswith("gpt3")
    nvidia = ~h100.system.str.startswith(("coreweave", "64xSMC"))
    for name, train in (("GPT-3", gpt), ("Llama 3.1 405B", ~gpt), ("NVIDIA", nvidia)):
        cv, between = fit_step(h100[train]), fit_run(h100[train])
        judge(f"fitted on {name} ({100 * cv:.3f} %), the others", h100[~train], cv)
        ratio = between / (h100.measured_between_s / h100.measured_p50_s)[~train]
        print(f"    between runs {100 * between:.3f} %, over that of the others: median "
              f"{ratio.median():.2f}, {ratio.min():.2f} to {ratio.max():.2f}")  # fmt: skip
    gb200 = systems[systems.device.isin(SYSTEMS["gb200"])]
    judge("GB200 and B200, step effect fitted", gb200, step["gb200"])
    return step, systems


def content_instead(systems, body):
    """Try differences between microbatches in place of the step effect."""
    varied = (*STEADY, f"{EFFECT}rank.cv={body}", f"{EFFECT}microbatch.cv={CONTENT}")
    more = pd.DataFrame(run.predict_spread(varied)).p95_less_p50_s ** 2
    more -= systems.p95_less_p50_s**2
    systems["content_s"] = np.sqrt(np.maximum(0.0, more)) / CONTENT
    h100 = systems[systems.device == "h100"]
    judge("content fitted in place of the step effect", h100, 0.0, fit_step(h100, content=True))


# ------------------------------------------------------------------------------- derate and errors
class Steps:
    """Predicted steps of a device as a part that the derate divides, and the rest."""

    def __init__(self, device, folder, quiet):
        library = load_library(f"{device}-healthy")
        entry = library.entry(DERATE)
        path = folder / f"{device}.nc"
        groups = [f"{device} {name} bf16" for name in ("megatron", "eager", "own")]
        shipped = run.predict(quiet, groups)
        entries = {**library.entries, DERATE: replace(entry, number=TRIAL)}
        save_library(replace(library, entries=entries), path)
        trial = run.predict((*quiet, f"variability.library={path}"), groups)
        a, b = (np.array([row["mean_s"] for row in rows]) for rows in (shipped, trial))
        self.part = (a - b) / (1.0 / entry.number - 1.0 / TRIAL)
        self.fixed = b - self.part / TRIAL
        self.measured = np.array([row["measured_s"] for row in shipped])
        self.gpus = np.array([row["gpus"] for row in shipped])
        self.models = np.array([row["job"].split(",")[0].split(" with")[0] for row in shipped])
        self.framework = np.array([row["class"].split()[1] for row in shipped])

    def logs(self, derate, chosen):
        """Logarithms of predicted over published."""
        return np.log((self.part / derate + self.fixed) / self.measured)[chosen]

    def solve(self, chosen):
        """Find the derate at which their geometric mean is that of the published times."""
        return brentq(lambda derate: self.logs(derate, chosen).mean(), 0.3, 3.0)

    def leave_out(self, chosen):
        """Leave each model out in turn: derates of the others, logarithms of those left out."""
        names = np.unique(self.models[chosen])
        if names.size < 2:
            return np.empty(0), np.empty(0)
        derates = np.array([self.solve(chosen & (self.models != name)) for name in names])
        pairs = zip(derates, names, strict=True)
        return derates, np.concatenate(
            [self.logs(d, chosen & (self.models == n)) for d, n in pairs]
        )


def derates(table, folder, body, step):
    """Fit the derate of each device to its Megatron jobs; leave each model out in turn."""
    left, n_models, gathered, hits = {}, {}, [], []
    for device in run.DEVICES:
        quiet = (*STEADY[:2], f"{EFFECT}rank.cv={body}", f"{EFFECT}step.cv={step[device]}")
        steps = Steps(device, folder, quiet)
        own, fsdp, beyond = (steps.framework == name for name in ("megatron", "eager", "own"))
        derate, (others, left[device]) = steps.solve(own), steps.leave_out(own)
        show(f"{device}, derate fitted", steps.logs(derate, own))
        interval, n, most = None, int(own.sum()), steps.gpus[own].max()
        n_models[device] = others.size
        if others.size:
            show("  models left out", left[device])
            error = np.sqrt((others.size - 1) * np.var(others)) * LEVEL / 2.0  # jackknife
            interval = derate - error, derate + error
            hits.append(held(steps, own))
        told = f"mean of {n} published Megatron steps of {max(1, others.size)} models"
        table.add([device], DERATE, derate, interval, n, told)
        told = "largest published Megatron job of experiments/public-jobs"
        table.add([device], "run/largest_gpus", float(most), None, n, told)
        if fsdp.any():
            gathered.append((steps.logs(derate, fsdp), steps.models[fsdp], steps.gpus[fsdp].max()))
            show("  FSDP", gathered[-1][0])
        if beyond.any():
            errors, far = steps.logs(derate, beyond), np.log(steps.gpus[beyond] / most)
            show("  larger jobs", errors)
            rest = np.maximum(0.0, errors**2 - rms(left[device]) ** 2)
            growth = float(np.sqrt((rest / far**2).mean()))
            told = f"Llama 3 405B on {' and '.join(map(str, steps.gpus[beyond]))} GPUs, beyond "
            told += f"{most}; per factor of e in GPUs"
            table.add(run.DEVICES, "run/model_error_growth", growth, None, int(beyond.sum()), told)
    pooled = np.concatenate(list(left.values()))
    for device, logs in left.items():
        told = "published Megatron steps, each model left out of the derate in turn"
        if not logs.size:
            logs, told = pooled, f"{told}; of other devices, since this one has a single model"
        error = unbiased(logs, n_models[device] or sum(n_models.values()))
        table.add([device], "run/model_error", error, None, logs.size, told)
    logs, models = (np.concatenate([part[i] for part in gathered]) for i in (0, 1))
    told = "published FSDP steps of H100 and A100, none of them fitted"
    error = unbiased(logs, np.unique(models).size)
    table.add(run.DEVICES, "run/model_error_fsdp", error, None, logs.size, told)
    told, most = (
        "largest published FSDP job of experiments/public-jobs",
        max(p[2] for p in gathered),
    )
    table.add(run.DEVICES, "run/largest_gpus_fsdp", float(most), None, logs.size, told)
    for name in np.unique(models):
        out = models == name
        spread = unbiased(logs[~out], np.unique(models[~out]).size)
        hits.append(np.abs(logs[out]) <= norm.ppf(0.9) * spread)
    hits = np.concatenate(hits)
    print(f"80 % intervals, models left out of mean and spread: hold {hits.sum()} of {hits.size} "
          f"steps, {hits.mean():.2f}")  # fmt: skip


def held(steps, chosen):
    """Say which steps lie in the 80 % interval that all other models of their class give."""
    hits = []
    for name in np.unique(steps.models[chosen]):
        others = chosen & (steps.models != name)
        logs = steps.logs(steps.solve(others), chosen & (steps.models == name))
        rates, unseen = steps.leave_out(others)
        hits.append(np.abs(logs) <= norm.ppf(0.9) * unbiased(unseen, rates.size))
    return np.concatenate(hits)


def show(name, logs):
    """Print mean, spread and extremes of predicted over published."""
    percent = 100.0 * np.expm1(logs)
    print(f"{name}: {logs.size} steps, mean {100.0 * np.expm1(logs.mean()):+.1f} %, sd "
          f"{logs.std(ddof=1):.3f}, {percent.min():+.1f} to {percent.max():+.1f} %")  # fmt: skip


def unbiased(logs, n_models):
    """Give the root mean square of errors without the bias of few models (c4 of a normal sample).

    Steps of one model err alike, so that models are what is counted.
    """
    half = 0.5 * (n_models - 1)
    return rms(logs) * float(np.sqrt(half) * np.exp(gammaln(half) - gammaln(half + 0.5)))


def rms(logs):
    return float(np.sqrt((logs**2).mean()))


def main():
    if not (DATA / "kernel_tables").is_dir():
        print(f"no burn-in in {DATA}; set PRISM_DATA to its folder", file=sys.stderr)
        return 2
    rng, table = np.random.default_rng(1), Table()
    body = rank_effect(rng, table)
    step, systems = step_and_run(rng, table, body)
    with tempfile.TemporaryDirectory() as folder:
        derates(table, Path(folder), body, step)
    run.write(HERE / "fitted.csv", table.rows)
    content_instead(systems, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
