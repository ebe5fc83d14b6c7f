"""What must hold of any job file through estimate, rank, place and sweep, whatever it says.

A job is taken or refused, never a traceback; what is answered is one JSON object whose figures
are in order. Used by the tests and by ``experiments/checks/random_jobs.py``.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from job_files import MANY, ONE_OF

import prism

REPLICATES, RUNS = 256, 20
SEED = 7
MEASURES = ("p5", "p50", "p90", "p95", "p99")
FLOAT = 1e-5  # relative error of a step in float32
SLACK = 1e-3  # by which the mean of something faster may be longer, on the same draws
LATE_SLACK, LATE = 5e-3, 0.01
"""The same of a split backward where launch gaps take a share: a late host catches up in one pass
what a link takes longer in the other, and the schedule may wait for the one alone (dualpipe-v: 0.16
%). With free launches it is held to the other bounds."""
FREE = ("--set", "variability.host_scale=1e-9")
LIBRARY_RANK_CV = 0.03  # of GPUs with their lemons, no shipped library has more

BUDGETS = {
    "prism.simulation.no_dependence.POOL_SAMPLES": 1 << 12,
    "prism.analyses.placements.answer.SAMPLES": 120_000_000,
    "prism.analyses.placements.answer.MOST_BLOCKS": 16,
    "prism.analyses.differences.QUIET_BATCHES": (1, 1),
    "prism.analyses.placements.answer.RANDOM_PLACEMENTS": 8,
    "prism.analyses.placements.search.LIMIT": 200,
    "prism.analyses.placements.search.LEAST": 50,
    "prism.simulation.runs.states.BLOCKS": 8,
    "prism.models.steptimes.likelihood._CELLS": 2_000,
}
"""Fewer samples and placements for the many jobs of a test; the code is the same."""

Call = Callable[..., tuple[int, str, str]]


class Broken(AssertionError):
    """An invariant that does not hold, with the command that showed it."""


def need(holds: Any, text: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise Broken(text)


def check_job(call: Call, tree: dict[str, Any], folder: Path) -> dict[str, bool]:
    """Run a job file through the commands, and check what they answer.

    `call` runs a command (status, stdout, stderr), `folder` holds the file. Gives which commands
    answered; raises `Broken` where something does not hold.
    """
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    common = ("--seed", SEED, "--threads", 1, "--json", "-q")
    sizes = ("--replicates", REPLICATES)
    found = answer(call, "estimate", path, *sizes, "--run-replicates", RUNS, *common)
    done = {"estimate": found is not None}
    if found is None:  # what it refuses, nothing else may take
        return done | {"rank": False, "place": False, "sweep": False}
    check_estimate(found, path)
    job = prism.load_job(path)
    check_work(found["ideal_step_time"], job)
    if job.parallelism.dp > MANY:
        some = answer(call, "estimate", path, *sizes, "--run-replicates", RUNS, *common,
                      "--engine", "exchangeable")  # fmt: skip
        need(some is not None, "estimate --engine exchangeable refuses what estimate takes")
        check_exchangeable(some, found)
    alone = answer(call, "estimate", path, *sizes, "--run-replicates", RUNS, *common,
                   "--dependence", "none")  # fmt: skip
    need(alone is not None, "estimate --dependence none refuses what estimate takes")
    ranked = answer(call, "rank", path, *common)
    if ranked is not None:
        check_rank(ranked, job)
    slow = () if tree["cluster"].get("node_slowdowns") else ("--slow-nodes", 1, "--slowdown", 1.2)
    placed = answer(call, "place", path, *slow, *common)
    if placed is not None:
        check_place(placed)
    key = "cluster.scale.compute.cv"
    own = job.cluster.scale.compute.cv
    vary = f"{key}={own!r},{own + 0.5!r}"
    swept = answer(call, "sweep", path, "--vary", vary, *sizes, *common)
    need(swept is not None, "sweep refuses what estimate takes")
    check_sweep(swept, found, key, own)
    gaps = [row["mean_share"] for row in found["time_loss"] if row["name"] == "launch_gaps"]
    late = LATE_SLACK if sum(gaps) > LATE and job.parallelism.splits else 0.0
    for key, values in [*speed_settings(job), *tier_settings(job)]:
        for own, more in ((late, ()), (0.0, FREE)) if late else ((0.0, ()),):
            words = ("--vary", f"{key}={values}", *more)
            swept = answer(call, "sweep", path, *words, *sizes, *common)
            need(swept is not None, f"sweep {words} refuses what estimate takes")
            by_setting = {repr(row[key]): row for row in swept["rows"]}  # the best come first
            # what zero-bubble schedules run next depends on durations
            slack = SLACK if key.startswith("cluster.scale.") else FLOAT
            rows = [by_setting[value] for value in values.split(",")]
            check_never_slower(rows, key, max(slack, own), max(SLACK, own))
    return done | {"rank": ranked is not None, "place": placed is not None, "sweep": True}


def answer(call: Call, *arguments: Any) -> dict[str, Any] | None:
    """Run a command; what it answers, or None where it refuses."""
    status, out, err = call(*arguments)
    words = " ".join(map(str, arguments))
    need(status in (0, 2), f"{words}: status {status}: {err}")
    need("Traceback" not in out + err, f"{words}: {err}")
    if status == 2:
        need(not out, f"{words}: refuses, and prints {out!r}")
        need(err.startswith(("prism: ", "Usage: ", "Error: ")), f"{words}: {err!r}")
        return None
    need(out.count("\n") == 1, f"{words}: more than one line on stdout: {out!r}")
    found = json.loads(out, parse_constant=lambda word: _no_constant(word, words))
    need(isinstance(found, dict), f"{words}: no object")
    return dict(found)


def _no_constant(word: str, words: str) -> float:
    raise Broken(f"{words}: {word} is no JSON")


def check_estimate(found: dict[str, Any], path: Path) -> None:
    """Check figures of a step and of a run, and that the same seed gives the same bits."""
    job = prism.load_job(path)
    again = prism.estimate(job, replicates=REPLICATES, run_replicates=RUNS, seed=SEED, threads=2)
    for name in ("step_time", "time_to_train"):
        row = found[name]
        values = again[name].values.astype(np.float64)
        figures = [row[m] for m in MEASURES]
        need(all(map(math.isfinite, figures)), f"{name}: {figures}")
        need(figures == sorted(figures), f"{name}: quantiles fall: {figures}")
        slack = FLOAT * abs(row["mean"])
        need(values.min() - slack <= row["mean"] <= values.max() + slack, f"{name}: mean outside")
        need(values.min() - slack <= figures[0], f"{name}: p5 below all")
        need(figures[-1] <= values.max() + slack, f"{name}: p99 above all")
        need(
            row["mean"] == float(again[name].mean())
            or math.isclose(row["mean"], values.mean(), rel_tol=1e-9),
            f"{name}: other bits",
        )
        need(row["std"] >= 0.0 and row["mean"] > 0.0, f"{name}: {row}")
    step, ideal = found["step_time"], found["ideal_step_time"]
    clusters = REPLICATES / 64
    # a lemon or two in twenty GPUs: where none was drawn, the steps do not tell how much is missing
    given = job.variability.effects.rank
    rank_cv = max(LIBRARY_RANK_CV, (given.cv or 0.0) if given else 0.0)
    spread = max(step["std"], ideal * rank_cv * max(1.0, job.cluster.scale.compute.cv))
    error = max(step["mean_se"] or 0.0, spread / math.sqrt(clusters))
    need(
        not any("below the ideal" in text for text in found.get("warnings", ()))
        and step["mean"] >= ideal * (1.0 - FLOAT) - 6.0 * error,
        f"mean step {step['mean']} < ideal {ideal} by more than its error {error}",
    )
    shares = [*found["slowdown"].values(), found["exposed_communication"]]
    shares += [found[k] for k in ("mfu", "ettr") if found.get(k) is not None]
    if found.get("finish_by"):
        shares.append(found["finish_by"]["probability"])
    need(all(-1e-9 <= share <= 1.0 + 1e-9 for share in shares), f"shares: {shares}")
    if found.get("variance_by_term"):
        total = [v for v in _numbers(found["variance_by_term"])]
        need(all(map(math.isfinite, total)), f"variance by term: {total}")


def _numbers(tree: Any) -> list[float]:
    """All numbers of an answer."""
    if isinstance(tree, dict):
        return [n for value in tree.values() for n in _numbers(value)]
    if isinstance(tree, list):
        return [n for value in tree for n in _numbers(value)]
    return [float(tree)] if isinstance(tree, int | float) and not isinstance(tree, bool) else []


def check_work(ideal: float, job: prism.Job) -> None:
    """Check an ideal step of given durations against its busiest stage, and all stages in turn."""
    given, p = job.model.durations, job.parallelism
    if given is None:
        return
    both = [np.broadcast_to(x, p.pp) for x in (given.forward_s, given.backward_s)]
    busy = p.microbatches * (both[0] + both[1]) * job.cluster.scale.compute.time
    need(ideal >= busy.max() * (1.0 - FLOAT), f"ideal step {ideal} < busiest stage {busy.max()}")
    clock = job.cluster.clock_mhz  # which may be lower than where products draw the TDP
    lowest = 1365.0 if job.cluster.device == "v100" else 1500.0
    if job.cluster.power_limit_w is not None:
        return
    whole = busy.sum() * max(1.0, lowest / clock if clock else 1.0)
    need(ideal <= whole * (1.0 + FLOAT), f"ideal step {ideal} > all stages in turn {whole}")


def check_exchangeable(found: dict[str, Any], exact: dict[str, Any]) -> None:
    """Check steps of which some replicas were drawn from a law against those with all of them."""
    need(
        math.isclose(found["ideal_step_time"], exact["ideal_step_time"], rel_tol=FLOAT),
        f"exchangeable: ideal {found['ideal_step_time']}, exact {exact['ideal_step_time']}",
    )
    row, other = found["step_time"], exact["step_time"]
    for name, errors in (("mean", 0.5), ("p50", 1.0), ("p95", 2.0)):
        error = errors * max(row["std"], other["std"]) + FLOAT * other[name]
        text = f"exchangeable: {name} {row[name]}, exact {other[name]}, std {other['std']}"
        need(abs(row[name] - other[name]) <= error, text)


def speed_settings(job: prism.Job) -> list[tuple[str, str]]:
    """Return factors on the time of compute and of links with two values each, the faster first."""
    # beside given durations links have no effect, and are refused
    parts = ["compute"] if job.model.durations else ["compute", "nvlink", "network"]
    slowdowns = job.cluster.node_slowdowns.values()
    if any(getattr(slow, "memory", None) is not None for slow in slowdowns):
        parts.remove(
            "compute"
        )  # slower compute bounds more kernels, which slow memory leaves alone
    own = ((part, getattr(job.cluster.scale, part).time) for part in parts)
    return [(f"cluster.scale.{part}.time", f"{time!r},{1.3 * time!r}") for part, time in own]


def tier_settings(job: prism.Job) -> list[tuple[str, str]]:
    """Return keys of the outermost tier with two values each, the faster one first."""
    if not job.cluster.tiers:
        return []
    name, tier = max(job.cluster.tiers.items(), key=lambda item: item[1].gpus)
    out, far = "oversubscription", "latency_us"
    out = next((key for key in ONE_OF[0] if getattr(tier, key) is not None), out)
    far = next((key for key in ONE_OF[1] if getattr(tier, key) is not None), "")
    own = getattr(tier, out) or 1.0
    low, high = (own, 4.0 * own) if out == "oversubscription" else (4.0 * own, own)
    found = [(f"cluster.tiers.{name}.{out}", f"{low!r},{high!r}")]
    if far:
        own = getattr(tier, far)
        found.append((f"cluster.tiers.{name}.{far}", f"{own!r},{4.0 * own + 100.0!r}"))
    return found


def check_never_slower(
    rows: list[dict[str, Any]], key: str, ideal_slack: float, mean_slack: float
) -> None:
    """Check that the first of two settings is not slower than the second, on the same draws."""
    fast, slow = rows
    for name, one, other, slack in (
        ("ideal step", fast["ideal_step_time"], slow["ideal_step_time"], ideal_slack),
        ("mean step", fast["step_time"]["mean"], slow["step_time"]["mean"], mean_slack),
    ):
        text = f"sweep {key}: {name} {one} at {fast[key]} > {other} at {slow[key]}"
        need(one <= other * (1.0 + slack), text)


def check_rank(found: dict[str, Any], job: prism.Job) -> None:
    """Check that shares are finite and, where they are of a whole, add up."""
    routed = "expert" in [row["name"] for row in found["effects"]]
    need(job.parallelism.ep > 1 or not routed, "rank: a row of experts of a job without any")
    rows = [*found["kernels"], *found["effects"]]
    need(all(map(math.isfinite, _numbers(rows))), f"rank: not finite: {rows}")
    for name in ("critical_path_share", "time_share"):
        shares = [row[name] for row in found["kernels"] if row.get(name) is not None]
        if shares:
            need(min(shares) >= -1e-6, f"rank: {name} {shares}")
            need(abs(sum(shares) - 1.0) < 1e-3, f"rank: {name} add up to {sum(shares)}")
    orders = [row["total_order"] for row in rows if row.get("total_order") is not None]
    need(all(order >= -1e-6 for order in orders), f"rank: total orders {orders}")


def check_place(found: dict[str, Any]) -> None:
    """Check that the best placement is not worse than the current one."""
    rows = {row["name"]: row for row in found["placements"]}
    best, current = rows[found["best"]], rows[found["current"]]
    measure = found["objective"]
    need(
        best[measure] <= current[measure] * (1.0 + found["tolerance"] + FLOAT),
        f"place: best {best[measure]} > current {current[measure]}",
    )
    need(
        found["healthy"]["mean"] <= current["mean"] * (1.0 + SLACK),
        f"place: healthy nodes {found['healthy']['mean']} > slow ones {current['mean']}",
    )
    for name in ("worst_over_best_p50", "worst_over_best_p95"):
        need(math.isfinite(found[name]) and found[name] > 0.0, f"place: {name} {found[name]}")
    need(0.0 <= found["p_correct"] <= 1.0, f"place: p_correct {found['p_correct']}")


def check_sweep(found: dict[str, Any], own: dict[str, Any], key: str, value: float) -> None:
    """Check that the row of the job's own setting is what estimate says."""
    rows = [row for row in found["rows"] if row["own"]]
    need(len(rows) == 1, f"sweep: {len(rows)} rows are the job's own")
    need(rows[0][key] == value, f"sweep: the own row has {rows[0][key]}")
    for row in found["rows"]:
        need(row["p50"] <= row["p95"] * (1.0 + FLOAT), f"sweep: p50 {row['p50']} > {row['p95']}")
    step = rows[0]["step_time"]
    need(
        math.isclose(step["mean"], own["step_time"]["mean"], rel_tol=FLOAT),
        f"sweep: own row {step['mean']}, estimate {own['step_time']['mean']}",
    )
    need(
        math.isclose(rows[0]["ideal_step_time"], own["ideal_step_time"], rel_tol=FLOAT),
        f"sweep: ideal {rows[0]['ideal_step_time']}, estimate {own['ideal_step_time']}",
    )
