"""`prism fit`: a model from a trace, with what it found, how well it fits and what it cannot know.

Reads, builds the graph, fits (`prism.models.pipelinetrace.fit`) and reports: kernels, components
with intervals, loadings, lemons, a cross-check without distributions, warnings. Step times alone go
to `prism.models.steptimes`, jobs with measured step times to `prism.models.calibration`.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import prism
from prism.common.errors import PrismError
from prism.common.text import format_count, percent_change
from prism.jobs.dimensions import STAGE
from prism.jobs.job import Job, load_job
from prism.models.calibration.fit import calibrate
from prism.models.changes.find import changes_of_trace, choose_steps, without_steps
from prism.models.changes.fit import fit_steps
from prism.models.changes.report import report_changes
from prism.models.fitted import Model
from prism.models.kernellibraries import library_of_table, library_of_trace, why_no_model
from prism.models.kerneltrace.model import fit_kernels
from prism.models.pipelinetrace.build import CLOSE, build_trace_graph
from prism.models.pipelinetrace.fit import NEGLIGIBLE, fit_with_components
from prism.models.pipelinetrace.reduce import resample
from prism.models.steptimes.model import model_to_dataset as step_model_to_dataset
from prism.models.variance.components import Components
from prism.simulation.execution.context import Progress, fresh_seed
from prism.simulation.tracemodel.file import model_to_dataset
from prism.simulation.tracemodel.graph import COMPUTE, TraceGraph, replay
from prism.simulation.tracemodel.model import (
    TraceModel,
    figures,
    ideal_graph,
    synthetic_graph,
)
from prism.traces import Trace, find_recording, read_step_times, read_totals, read_trace
from prism.traces.choose import rows_in_name

CHECK_STEPS = 2000  # simulated steps of the cross-check
CHECK_CELLS = 20_000_000  # durations drawn for it: fewer steps of a large graph, at least 40
FEW_STEPS, FEW_REPLICAS = 20, 4  # below, a fit says that it has few data

# What a trace of one job's pipeline cannot tell, and what is done about it.
NOT_IDENTIFIABLE = (
    "call: a forward or backward is one duration here; what its kernels share is in the residual",
    f"{' and '.join(STAGE)} ranks: one worker per dp_rank and stage is in the trace and shows its "
    "group's slowest; the job's other GPUs are not counted, and no distribution per GPU is derived",
    "node share of the rank effect: which workers share a node is not in the trace; taken as 0",
    "congestion and stalls per hour: steps with gaps between them show no rates; taken as none",
)
NAMES = {"content": "microbatch"}  # what components are called outside


def fit(
    inputs: str | Path | Sequence[str | Path],
    seed: int | None = None,
    *,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    totals: str | None = None,
    first_steps: int | None = None,
    step_range: str | None = None,
    skip: int | None = None,
    steps: str | None = None,
) -> Model:
    """Learn distributions and effects from a trace, or from step times alone.

    Parameters
    ----------
    inputs : path or sequence of paths
        A trace: a file, several files of one job's ranks, or their folder. Or one file of step
        times, of one or several runs; a table of kernels by HTA; output of nccl-tests.
    seed : int, optional
        Of the bootstraps and of the cross-check; fresh where None.
    column, unit, pattern, where, totals, first_steps
        Of step times only: the duration's column and its unit, the regular expression that finds
        them in a log's lines (`prism.traces.find_recording`), the rows to keep, "FILE:COLUMN" with
        measured totals per run, and how many first steps of each run the variation is learnt from.
    step_range : str, optional
        Of a profiler's trace: what its ranges that are steps are called (`read_trace`).
    skip : int, optional
        First steps to leave out, of each run.
    steps : str, optional
        ``A:B``, the numbers of the first and the last step to take.

    Returns
    -------
    Model
        A model of kind ``trace`` or ``steps``; `prism.save` writes it, `prism.estimate`
        and `prism.validate` take its file. Of what holds no steps, a ``library`` of
        distributions. `prism.summary` gives what the command prints.

    Raises
    ------
    PrismError
        The input cannot be read, or has too little to learn from.

    Examples
    --------
    >>> import prism
    >>> model = prism.fit("experiments/samples/trace.csv", seed=1)
    >>> [(row["name"], row["n"]) for row in prism.summary(model)["kernels"]]
    [('backward stage 0', 64), ('forward stage 0', 64)]
    >>> prism.save(model, "model.nc")
    >>> prism.estimate("model.nc", replicates=64, seed=1).step_time.size
    64
    """
    seed = fresh_seed() if seed is None else seed
    found = find_recording(inputs, pattern)
    if found.has_steps(column):
        times = read_step_times(found, column=column, where=where, unit=unit)
        times = choose_steps(times, skip, steps)
        known = None if totals is None else read_totals(totals, where=where)
        of_steps = fit_steps(times, known, first_steps, seed)
        return Model(step_model_to_dataset(of_steps, _provenance(times.source, seed)))
    for name, value in (
        ("column", column), ("unit", unit), ("where", where), ("totals", totals),
        ("first-steps", first_steps),
    ):  # fmt: skip
        if value is not None and value != {}:
            raise PrismError(f"--{name}: chooses among step times; a trace has none, leave it out")
    if found.holds in ("kernels", "collectives"):
        measured = found.read(step_range=step_range)
        library = library_of_table(measured, found.source)
        return Model(library.assign_attrs(_provenance(found.source, seed)))
    trace = read_trace(found, step_range)
    reason = why_no_model(trace)
    if reason is not None:
        library = library_of_trace(trace, reason)
        return Model(library.assign_attrs(_provenance(trace.source, seed)))
    trace = choose_steps(trace, skip, steps)
    rows, out = changes_of_trace(trace)
    kept = without_steps(trace, out)
    model = fit_kernels(kept) if trace.has_kernels else _fit_pipeline(kept, seed)
    seconds = model.measured_mean * int((np.unique(trace.ops["step"]) >= 0).sum())
    report = report_changes(model.report, rows, seconds, model.n_stages * model.n_replicas)
    model = replace(model, report=report)
    return Model(model_to_dataset(model, _provenance(trace.source, seed)))


def fit_calibrated(
    measured: Sequence[tuple[Job | str | Path, str | Path]],
    seed: int | None = None,
    *,
    column: str | None = None,
    unit: str | None = None,
    pattern: str | None = None,
    where: Mapping[str, str] | None = None,
    skip: int | None = None,
    steps: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Calibrate a job's library to the measured step times of one or several of its sizes.

    Parameters
    ----------
    measured : sequence of (job, path)
        Each size with its step times. ``FILE[key=value,...]`` keeps the rows of a wider table in
        which these columns have these values, beside those of `where`.
    seed, threads, progress
        As in `prism.simulate`.
    column, unit, pattern, where, skip, steps
        As in `fit`, of every size.

    Returns
    -------
    Model
        A model of kind ``calibrated``, which stands wherever a job does, and as
        ``variability.model`` of any job over the same library.

    Examples
    --------
    >>> import prism
    >>> small = {"model": {"name": "llama3-8b"}, "parallelism": {"dp": 8}, "cluster": {"nodes": 1}}
    >>> job = prism.load_job({"base": "llama3-70b-fsdp-512", **small})
    >>> model = prism.fit_calibrated([(job, "experiments/samples/steps.csv")], seed=1)
    >>> round(prism.summary(model)["factors"]["compute"]["value"], 1)
    1.0
    """
    seed = fresh_seed() if seed is None else seed
    sizes, seen = [], set()
    for job, source in measured:
        label = f"{job.name if isinstance(job, Job) else job}={source}"
        if label in seen:
            raise PrismError(
                f"--calibrate {label}: given twice; the same steps are no new evidence, give them "
                "once"
            )
        seen.add(label)
        job = job if isinstance(job, Job) else load_job(job)
        path, rows = rows_in_name(str(source), where or {}, "--calibrate: ")
        times = read_step_times(
            path, column=column, where=rows, unit=unit, per_step=job.work_per_step, pattern=pattern
        )
        times = choose_steps(times, skip, steps)
        sizes.append((job, replace(times, source=str(source))))
    sources = ", ".join(times.source for _, times in sizes)
    return Model(calibrate(sizes, _provenance(sources, seed), seed, threads, progress))


def _fit_pipeline(trace: Trace, seed: int) -> TraceModel:
    graph = build_trace_graph(trace)
    model, parts = fit_with_components(graph, trace.source)
    report = report_of(graph, model, parts, seed)
    report["inputs"] = [trace.source]
    report["notes"] = [*trace.notes, *graph.notes]
    return replace(model, report=report, job=describe_job(model))


# ------------------------------------------------------------------------------------- report
def report_of(
    graph: TraceGraph, model: TraceModel, parts: Components | None, seed: int
) -> dict[str, Any]:
    """Collect what a fit found, as plain values."""
    return {
        "steps": int(graph.steps.size),
        "dp_size": graph.n_replicas,
        "stages": graph.n_stages,
        "workers": graph.n_replicas * graph.n_stages,
        "p2p": graph.p2p,
        "step_time": figures(graph.measured),
        "kernels": _kernels(model),
        "effects": effects_of(parts) if parts is not None else {},
        "loadings": _loadings(parts) if parts is not None else {},
        "lemons": [
            {"replica": r, "stage": s, "slowdown": x} for r, s, x in model.lemons
        ],
        "step_correlation_steps": model.correlation_steps or None,
        "cross_check": _cross_check(graph, model, seed),
        "not_identifiable": list(NOT_IDENTIFIABLE),
        "warnings": warnings_of(graph, model, parts),
        "edges_recorded": graph.edges_recorded,
        "edges_inferred": graph.edges_inferred,
    }  # fmt: skip


def _kernels(model: TraceModel) -> list[dict[str, Any]]:
    """Every group of ops, the longest first."""
    total = np.zeros(len(model.groups))
    for i, g in enumerate(model.group):
        if g >= 0:
            total[g] += float(model.mean[i].mean())
    varies = np.ptp(model.profile, axis=2).max(axis=1) > NEGLIGIBLE  # with the step as a whole
    rows = []
    for g in np.argsort(-total, kind="stable"):
        group = model.groups[g]
        rows.append({
            "name": group.label, "op_kind": group.op_kind, "n": group.n, "mean": group.mean,
            "cv": group.cv, "p99_p50": group.p99_p50 if np.isfinite(group.p99_p50) else None,
            "distribution": "empirical" if group.residual.std > 0.0 or varies[g] else "constant",
            "ks": group.ks, "residual_cv": group.residual.std, "step_share": float(total[g]),
        })  # fmt: skip
    whole = sum(r["step_share"] for r in rows) or 1.0
    return [{**r, "step_share": r["step_share"] / whole} for r in rows]


def effects_of(parts: Components) -> dict[str, Any]:
    """Components pooled over op_kinds, and by op_kind: cv, interval, share of the variance."""
    out: dict[str, Any] = {}
    kinds = parts.by_op_kind
    totals = {k: sum(s.std**2 for s in spreads.values()) for k, spreads in kinds.items()}
    for name in next(iter(kinds.values())):
        rows = {k: spreads[name] for k, spreads in kinds.items()}
        n = len(rows)
        out[NAMES.get(name, name)] = {
            "cv": _root(sum(r.std**2 for r in rows.values()) / n),
            "ci": [
                _root(sum(getattr(r, end) ** 2 for r in rows.values()) / n) for end in ("lo", "hi")
            ],
            "share": sum(r.std**2 for r in rows.values()) / max(sum(totals.values()), 1e-300),
            "by_op_kind": {
                k: {"cv": r.std, "ci": [_finite(r.lo), _finite(r.hi)], "share": r.share}
                for k, r in rows.items()
            },
        }  # fmt: skip
    # see NOT_IDENTIFIABLE
    out["call"] = {"cv": None, "ci": [None, None], "share": None, "by_op_kind": {}}
    return out


def _root(x: float) -> float | None:
    return float(np.sqrt(x)) if np.isfinite(x) else None


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _loadings(parts: Components) -> dict[str, dict[str, float]]:
    """Tabulate each effect's spread of log duration by op_kind and stage."""
    out = {}
    for c, column in enumerate(parts.columns):
        chunk = f" chunk {column.chunk}" if column.chunk > 0 else ""
        out[f"{column.name or column.op_kind} stage {column.stage}{chunk}"] = {
            "step": float(parts.step.loadings[c] * parts.step.scale),
            "rank_step": float(parts.rank_step.loadings[c] * parts.rank_step.scale),
            "microbatch": float(parts.content.loadings[c] * parts.content.scale),
            "residual": float(parts.residual_std[c]),
        }
    return out


def _cross_check(graph: TraceGraph, model: TraceModel, seed: int) -> dict[str, Any]:
    """Hold the model against resampled microbatches and steps, and against the measurement."""
    rng = np.random.Generator(np.random.Philox(seed))
    fitting = CHECK_CELLS // (len(model.nodes) * model.n_replicas)
    n = min(CHECK_STEPS, max(CHECK_STEPS // 50, fitting))
    apart = np.arange(n, dtype=np.int64) * 10**6  # too far to remember each other
    simulated = synthetic_graph(model, apart, rng).measured
    resampled = resample(graph, n, rng)
    return {
        "measured": figures(graph.measured),
        "model": figures(simulated),
        "resampled": figures(resampled),
        "ideal": float(ideal_graph(model).measured[0]),
    }


def warnings_of(graph: TraceGraph, model: TraceModel, parts: Components | None) -> list[str]:
    """List what is estimated from few data, and which workers are no part of the body."""
    out = []
    if graph.steps.size < FEW_STEPS:
        out.append(
            f"step effect: only {format_count(graph.steps.size, 'step')}, {FEW_STEPS} or more "
            "needed; steps far apart determine it better than many replicas"
        )
    if graph.n_replicas < FEW_REPLICAS:
        out.append(
            f"rank effect: only {format_count(graph.n_replicas, 'dp replica')}, {FEW_REPLICAS} or "
            "more needed"
        )
    off = float(replay(graph).mean() / graph.measured.mean()) - 1.0
    if abs(off) > CLOSE:
        out.append(
            f"replayed steps are {percent_change(off)} off the measured ones: ops of one worker "
            "overlap, come in another order than usual, or are missing; the model is of the replay"
        )
    if parts is None:
        out.append("no op repeats over microbatches: effects were not separated")
    else:
        out += [w.replace("content", "microbatch") for w in parts.warnings]
        if parts.rank_step_apart:
            out.append("rank_step: the stages of a replica drift apart; drawn for each worker")
    for replica, stage, slowdown in model.lemons:
        out.append(
            f"worker (replica {replica}, stage {stage}) is {slowdown:.2f}x slower than its peers; "
            "simulated as measured, excluded from the rank effect"
        )
    return out


def describe_job(model: TraceModel) -> dict[str, Any]:
    """Blocks of a job file that describe the traced job."""
    seconds: dict[str, list[float]] = {}
    n_mb = 1 + max((n.microbatch for n in model.nodes if n.op_kind in COMPUTE), default=0)
    for kind in ("forward", "backward"):
        per_stage = np.zeros(model.n_stages)
        for i, node in enumerate(model.nodes):
            if node.kind == "op" and node.op_kind == kind:
                per_stage[node.stages[0]] += float(model.mean[i].mean())
        seconds[f"{kind}_s"] = [float(x) / n_mb for x in per_stage]
    parallelism: dict[str, Any] = {
        "pp": model.n_stages, "dp": model.n_replicas, "microbatches": n_mb,
    }  # fmt: skip
    if model.p2p != "none" and model.n_stages > 1:
        parallelism["p2p"] = model.p2p
    return {
        "model": {"durations": seconds},
        "parallelism": parallelism,
        "cluster": {"gpus_per_node": 1},
        "variability": {"library": None},
    }


def _provenance(source: str, seed: int) -> dict[str, Any]:
    versions = {n: version(n) for n in ("numpy", "scipy", "pandas")}
    return {
        "prism_version": prism.__version__, "seed": str(seed), "inputs": source,
        "versions": json.dumps({"python": platform.python_version()} | versions),
    }  # fmt: skip
