"""Fit what the libraries take from published jobs and MLPerf logs; write fitted.csv.

    python experiments/validation/public-jobs/fit.py  # library/build.py reads fitted.csv

One after the other: how far GPUs differ (rank effect), from a burn-in and from growth with size;
what all ranks share in a step (step effect) and in a run (run effect), from MLPerf; how fast
products and attention are in training over their tables, one figure per device and one per older
release, from step times; what is still wrong then (model error). Needs kernel_tables in the folder
PRISM_DATA, or in ../shared/data beside the checkout.
"""

import os
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import run
from scipy.optimize import least_squares, minimize_scalar
from scipy.special import gammaln
from scipy.stats import norm, spearmanr

from prism.distributions.library import load_library, save_library
from prism.jobs.frameworks import family
from prism.simulation.effects.run import error_kind

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PRISM_DATA", HERE.parents[3] / "shared" / "data"))
EFFECT = "variability.effects."
STEADY = (f"{EFFECT}rank.lemon_fraction=0", f"{EFFECT}microbatch.cv=0", f"{EFFECT}step.cv=0")
BODIES = (0.002, 0.006, 0.010, 0.014)  # CV of the rank effect [1]
CONTENT = 0.01  # trial CV between microbatches [1]
# Figures of kernels in training, where they start, and (trial, what it changes them by).
START = {"derate": 1.0, "overlap_cost": 0.0, "fp8_backward": 1.0}
TRIALS = {"derate": (1.0 / 1.1, 0.1), "overlap_cost": (0.5, 0.5), "fp8_backward": (1.2, 0.2)}
DERATED = ("gb200", "b200", "gb300")  # whose jobs the tables do not meet
BEGIN = {"overlap_cost": 0.5, "fp8_backward": 1.05}  # where a fit starts; speeds: 0.95
# With a speed of their own, on all devices.
RELEASES = ("megatron-2022", "eager-2023", "compiled-2024", "nanotron")
DEVICES = ("h100", "a100", "gb200", "b200", "gb300")  # with dense jobs of their own
EXPERT_TRIAL = 1e-3  # added to a pass of a layer with experts [s]
LEAST_MODELS = 3  # that tell the error of a class
ROBUST = 0.05  # of logarithms: steps that are further off count less, so that few decide nothing
PRECISIONS = ("bf16", "fp8", "fp8_block", "mxfp8", "nvfp4")
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
    table.add(DEVICES, "rank/body_cv", body, (body - reach, body + reach), n + len(names), told)
    told = f"burn-in of {n} MI3xx GPUs (AMD-AGI/Primus)"
    table.add(DEVICES, "rank/node_share", share, (few, many), n, told)
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
    near = (start - 0.05, start + 0.05)
    return float(np.exp(minimize_scalar(loss, bounds=near, method="bounded").x))


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
            devices = [d for d in DEVICES if d == device or (d, device) == ("a100", "h100")]
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


# ------------------------------------------------------------------------------- speeds and errors
@cache
def dense_steps():
    """Give published steps without experts, and nanotron's of one node (layout_sweep)."""
    own = [entry for entry in run.published() if " moe" not in entry.group]
    return own + run.nanotron(DATA, (1,))


class Steps:
    """Predicted steps of a device and framework, and what each figure changes in them [s]."""

    def __init__(self, device, framework, folder, quiet):
        self.device, self.framework = device, framework
        chosen = self.entries = [
            entry for entry in dense_steps() if entry.group.split()[:2] == [device, framework]
        ]

        def ideal(**figures):
            library = _library(folder, device, START | figures)
            rows = run.ideal_steps(chosen, (*quiet, f"variability.library={library}"))
            return np.array([row["ideal_s"] for row in rows])

        self.rows = run.predict(quiet, entries=chosen)
        over_ideal = self.column("mean_s") / self.column("ideal_s")
        self.base = ideal() * over_ideal
        self.change = {
            name: (ideal(**{name: trial}) * over_ideal - self.base) / step
            for name, (trial, step) in TRIALS.items()
        }
        self.measured = self.column("measured_s")
        self.models = np.array([row["model"] for row in self.rows])
        self.sources = np.array([row["source"] for row in self.rows])
        self.held = self.column("held_out").astype(bool)

    @property
    def name(self):
        """Class of jobs."""
        return f"{self.device} {self.framework}"

    def column(self, key):
        """One figure of every row."""
        return np.array([row[key] for row in self.rows])

    def logs(self, speed, overlap_cost, fp8_backward):
        """Logarithms of predicted over published."""
        seconds = (
            self.base
            + self.change["derate"] * (1.0 / speed - 1.0)
            + self.change["overlap_cost"] * overlap_cost
            + self.change["fp8_backward"] * (fp8_backward - 1.0) / speed
        )
        return np.log(seconds / self.measured)


def _library(folder, device, figures):
    """Write a device's library with other figures; older releases are as fast as the tables."""
    library = load_library(f"{device}-healthy")
    given = {f"nominal/{key}": value for key, value in figures.items()}
    given |= {name: 1.0 for name in library.entries if name.startswith("nominal/speed_")}
    like = library.entry("nominal/overlap_cost")
    changed = {
        name: replace(library.entries.get(name, like), name=name, number=value)
        for name, value in given.items()
    }
    path = folder / f"{device}-{'-'.join(map(str, figures.values()))}.nc"
    save_library(replace(library, entries={**library.entries, **changed}), path)
    return path


class Fit:
    """One speed per device, one per older release, and one cost: fitted to logarithms of steps."""

    def __init__(self, parts):
        self.parts = parts
        self.names = [("derate", device) for device in DERATED]
        self.names += [("speed", name) for name in RELEASES]
        self.names += [("overlap_cost", ""), ("fp8_backward", "h100")]

    def figures(self, x, part):
        """Speed of products over the tables, and the other two of `TRIALS`, that a vector says."""
        found = dict(zip(self.names, np.exp(x), strict=True))
        speed = found.get(("derate", part.device), 1.0)
        speed *= found.get(("speed", part.framework), 1.0)
        return speed, found["overlap_cost", ""], found.get(("fp8_backward", part.device), 1.0)

    def logs(self, x, part):
        """Logarithms of predicted over published of a class."""
        return part.logs(*self.figures(x, part))

    def solve(self, chosen):
        """Fit to some rows of each part."""

        def errors(x):
            parts = zip(self.parts, chosen, strict=True)
            # a figure that no row tells stays where it starts; each counts as one row of sd 0.2
            return np.concatenate(
                [*(self.logs(x, p)[rows] for p, rows in parts), 0.25 * (x - start)]
            )

        start = np.log([BEGIN.get(key, 0.95) for key, _ in self.names])
        most = [0.0 if key == "overlap_cost" else np.inf for key, _ in self.names]  # its own time
        return least_squares(errors, start, bounds=(-np.inf, most), loss="cauchy", f_scale=ROBUST).x

    def leave_out(self, chosen, names_of):
        """Leave each name out in turn: vectors, and logarithms of those left out by class."""
        names = np.unique(
            np.concatenate([names_of(p)[c] for p, c in zip(self.parts, chosen, strict=True)])
        )
        vectors, left = [], {part.name: [] for part in self.parts}
        for name in names:
            rest = [c & (names_of(p) != name) for p, c in zip(self.parts, chosen, strict=True)]
            x = self.solve(rest)
            vectors.append(x)
            for part, rows, kept in zip(self.parts, chosen, rest, strict=True):
                if (rows & ~kept).any():
                    left[part.name].append(self.logs(x, part)[rows & ~kept])
        found = {name: np.concatenate(v) if v else np.empty(0) for name, v in left.items()}
        return np.array(vectors), found


def in_training(table, folder, body, step):
    """Fit speeds in training; leave each model, source and class out in turn."""
    parts = []
    for framework in ("megatron", *RELEASES):
        for device in DEVICES:
            effects = step.get(device, step["gb200"])
            quiet = (*STEADY[:2], f"{EFFECT}rank.cv={body}", f"{EFFECT}step.cv={effects}")
            if any(entry.group.split()[:2] == [device, framework] for entry in dense_steps()):
                parts.append(Steps(device, framework, folder, quiet))
    fit = Fit(parts)
    own = [~part.held for part in parts]
    x = fit.solve(own)
    vectors, left = fit.leave_out(own, lambda part: part.models)
    _, apart = fit.leave_out(own, lambda part: part.sources)
    _, classes = fit.leave_out(own, lambda part: np.full(part.models.size, part.name))
    record(table, fit, x, vectors, own)
    errors, hits, largest = {}, [], {}
    for part, rows in zip(parts, own, strict=True):
        logs = fit.logs(x, part)
        if rows.any():
            show(f"{part.name}, fitted", logs[rows])
        ways = (("models", left), ("sources", apart), ("whole classes", classes))
        for text, some in ways:
            if some[part.name].size:
                show(f"  {text} left out", some[part.name])
        if part.held.any():
            show("  held out", logs[part.held])
        hits.append(covered(left[part.name], part.models[rows]))
        kind, alike = family(part.framework), part.held & [in_class(e) for e in part.entries]
        largest[part.device, kind] = max(
            largest.get((part.device, kind), 0.0), *part.column("gpus")
        )
        n_models = np.unique(part.models[rows | alike]).size
        found = np.concatenate([left[part.name], logs[alike]])
        errors.setdefault(kind, []).append((part.device, found, n_models))
    h100 = next(part for part in parts if part.name == "h100 megatron")
    quiet = (*STEADY[:2], f"{EFFECT}rank.cv={body}", f"{EFFECT}step.cv={step['h100']}")
    beyond(table, folder, quiet, fit, x, left[h100.name], max(h100.column("gpus")))
    errors["experts"] = experts(table, folder, body, step, fit, x, largest)
    model_errors(table, errors, largest)
    hits = np.concatenate(hits)
    print(f"80 % intervals, models left out of mean and spread: hold {hits.sum()} of {hits.size} "
          f"steps, {hits.mean():.2f}")  # fmt: skip


def record(table, fit, x, vectors, own):
    """Put fitted figures into the table, with the jackknife's interval over models."""
    for i, (key, of) in enumerate(fit.names):
        parts = [(p, rows) for p, rows in zip(fit.parts, own, strict=True)
                 if key == "overlap_cost" or of in (p.device, p.framework)]  # fmt: skip
        drawn, value = vectors[:, i], float(np.exp(x[i]))
        error = np.sqrt((len(drawn) - 1) * np.var(drawn)) * LEVEL / 2.0
        interval = tuple(np.exp([x[i] - error, x[i] + error]))
        n = sum(int(rows.sum()) for _, rows in parts)
        told = f"{n} published steps of {len({m for p, r in parts for m in p.models[r]})} models"
        devices = [of] if key in ("derate", "fp8_backward") else DEVICES
        name = f"nominal/{key}" + f"_{of}" * (key == "speed")
        table.add(devices, name, value, interval, n, told)


def experts(table, folder, body, step, fit, x, largest):
    """Fit by what a host without CUDA graphs holds up a layer with experts; leave each model out.

    Give (no device, errors of models left out, held out and with CUDA graphs, number of models), as
    `model_errors` takes them.
    """
    rows, change = [], []
    for device in (*DEVICES, "b300"):
        groups = [f"{device} megatron {precision} moe" for precision in PRECISIONS]
        chosen = [entry for entry in run.published() if entry.group in groups]
        owner = {"b300": "b200"}.get(device, device)  # as build.py carries over
        part = SimpleNamespace(device=owner, framework="megatron")
        figures = dict(zip(START, fit.figures(x, part), strict=True))
        effects = step.get(owner, step["gb200"])
        quiet = (*STEADY[:2], f"{EFFECT}rank.cv={body}", f"{EFFECT}step.cv={effects}")
        ideal = []
        for value in (0.0, EXPERT_TRIAL):
            library = _library(folder, device, figures | {"expert_layer_s": value})
            own = run.ideal_steps(chosen, (*quiet, f"variability.library={library}"))
            ideal.append(np.array([row["ideal_s"] for row in own]))
        own = run.predict(quiet, groups)
        over = np.array([row["mean_s"] / row["ideal_s"] for row in own])
        rows += [row | {"mean_s": s} for row, s in zip(own, ideal[0] * over, strict=True)]
        change.extend((ideal[1] - ideal[0]) * over / EXPERT_TRIAL)
        if own:
            largest[device, "experts"] = max(row["gpus"] for row in own)
    base, measured = (np.array([row[key] for row in rows]) for key in ("mean_s", "measured_s"))
    models = np.array([row["model"] for row in rows])
    held, change = np.array([bool(row["held_out"]) for row in rows]), np.array(change)
    graphs = change == 0.0
    own = ~graphs & ~held
    weight = 1.0 / np.array([(models[own] == m).sum() or 1 for m in models])  # each model as much

    def logs(value):
        return np.log((base + change * value) / measured)

    def solve(some):
        return minimize_scalar(lambda x: (weight * logs(x) ** 2)[some].sum(), (0.0, 1e-3)).x

    value, left = solve(own), logs(0.0)
    drawn = {model: solve(own & (models != model)) for model in np.unique(models[own])}
    for model, other in drawn.items():
        out = own & (models == model)
        left[out] = logs(other)[out]
    left[held & ~graphs] = logs(value)[held & ~graphs]
    for model in drawn:
        out = own & (models == model)
        show(f"  {model}, left out", left[out])
    error = np.sqrt((len(drawn) - 1) * np.var(list(drawn.values()))) * LEVEL / 2.0
    told = f"{own.sum()} published steps without CUDA graphs of {len(drawn)} models, each as much"
    interval = max(0.0, value - error), value + error
    table.add(DEVICES, "nominal/expert_layer_s", value, interval, int(own.sum()), told)
    for name, some in (("fitted", own), ("held out", ~graphs & held), ("CUDA graphs", graphs)):
        show(f"experts, {name}, nothing added", logs(0.0)[some])
        show(f"experts, {name}", logs(value)[some])
    for model in np.unique(models[graphs]):
        show(f"  {model}, CUDA graphs", logs(0.0)[graphs & (models == model)])
    keys = [(row["job"], row["precision"], row["gpus"]) for row in rows]
    twins = [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]
    apart = [np.log(measured[i]) - np.log(measured[i]).mean() for i in twins if len(i) > 1]
    sd = np.sqrt(sum((part**2).sum() for part in apart) / sum(part.size - 1 for part in apart))
    print(f"  releases of one configuration differ by {sd:.3f} (sd of the logarithm, "
          f"{len(apart)} configurations)")  # fmt: skip
    return [("", left, np.unique(models).size)]


def beyond(table, folder, quiet, fit, x, left, most):
    """Say how the error grows on more GPUs than any fitted job has."""
    part = next(part for part in fit.parts if part.name == "h100 compiled-2024")
    figures = dict(zip(START, fit.figures(x, part), strict=True))
    own = f"variability.library={_library(folder, 'h100', figures)}"
    rows = run.predict((*quiet, own), ("h100 own bf16",))
    logs = np.log([row["mean_s"] / row["measured_s"] for row in rows])
    show("  larger jobs", logs)
    far = np.log([row["gpus"] / most for row in rows])
    growth = float(np.sqrt((np.maximum(0.0, logs**2 - rms(left) ** 2) / far**2).mean()))
    told = f"Llama 3 405B on {' and '.join(str(row['gpus']) for row in rows)} GPUs, beyond {most}; "
    told += "per factor of e in GPUs"
    table.add(DEVICES, "run/model_error_growth", growth, None, len(rows), told)


def in_class(entry):
    """Whether a job is of its framework's class: which weights are gathered, layer by layer."""
    return error_kind(run.job_of(entry)) == family(entry.row["framework"])


def model_errors(table, errors, largest):
    """Give each class with published jobs what its models were wrong by when left out.

    A class is a device and a framework, or a device and experts; of less than three models all
    classes of frameworks, or all devices, tell it.
    """
    dense = [part for kind, found in errors.items() if kind != "experts" for part in found]
    for kind, found in errors.items():
        for device in (device for device, of in largest if of == kind):
            own = [part for part in found if part[0] == device]
            told = "published steps, each model left out of the derate in turn, and those held out"
            if sum(n for *_, n in own) < LEAST_MODELS:
                own = found if kind == "experts" else dense
                told += "; of all devices" + " and frameworks" * (kind != "experts")
            logs = np.concatenate([left for _, left, _ in own])
            error = unbiased(logs, sum(n for *_, n in own))
            table.add([device], f"run/model_error_{kind}", error, None, logs.size, told)
            told = "largest published job of experiments/validation/public-jobs"
            most = float(largest[device, kind])
            table.add([device], f"run/largest_gpus_{kind}", most, None, logs.size, told)


def covered(left, models):
    """Say which steps of a model lie in the 80 % interval that the errors of the others give."""
    hits = []
    order = np.sort(np.unique(models, return_inverse=True)[1])  # as models were left out
    for i in np.unique(order) if left.size == order.size else ():
        others = left[order != i]
        n_models = np.unique(order).size - 1
        if n_models > 1:
            hits.append(np.abs(left[order == i]) <= norm.ppf(0.9) * unbiased(others, n_models))
    return np.concatenate(hits) if hits else np.empty(0, bool)


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
        in_training(table, Path(folder), body, step)
    run.write(HERE / "fitted.csv", table.rows)
    content_instead(systems, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
