"""`prism explain`: why one job takes more GPU time than another for the same work, term by term.

Two readings of the gap: where the time of either goes, and what each kind of change brings on the
way from one job to the other. Beside what was measured of either, what is left is not predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from prism.common.errors import PrismError, option
from prism.common.results import Columns, Field, Result, pack_figures, read_figures
from prism.jobs.dimensions import DIMENSIONS
from prism.jobs.job import Job, job_from_dict, load_job
from prism.jobs.jobspec.values import parse_duration
from prism.simulation.execution.context import Progress, RunContext, make_context
from prism.simulation.results import made_with
from prism.simulation.steps import simulate

if TYPE_CHECKING:
    import pandas as pd

Stage = tuple[str, str, Job]  # a change, its keys, and the job with it
KIND = "explanation"
REPLICATES = 2048
EXA = 1e18
SIDES = ("a", "b")
_RATE = re.compile(r"([\d.]+)\s*tflops?(?:/s)?(?:/gpu)?", re.IGNORECASE)

LAYOUT = frozenset({
    *DIMENSIONS, "expert_tp", "expert_node_limit", "data_parallel",
    "shard_size", "reshard_after_forward", "schedule", "p2p", "sequence_parallel", "bucket_layers",
    "prefetch", "layer_split",
})  # fmt: skip
BATCH = frozenset({"microbatches", "global_batch", "microbatch_size"})
SIZE = frozenset({"nodes", "hosts", "placement", "node_slowdowns", "gpu_slowdowns",
                  "gpu_temperatures", "leaf_nodes"})  # fmt: skip
CHANGES = ("model", "machine", "software", "batch", "layout and GPUs", "variability")
"""Kinds of changes, in the order in which they are made."""

_COST = "GPU time per exaflop of the model, all GPUs"
TERMS = Columns("term", (
    Field("name", "text", title="term"),
    Field("a", "s", _COST, "A"),
    Field("b", "s", _COST, "B"),
    Field("change", "s", "B less A", "B less A"),
    Field("gap_share", "1", "of the gap between A and B", "of the gap"),
))  # fmt: skip
STAGES = Columns("stage", (
    Field("change", "text", "what was changed on the way from A to B"),
    Field("keys", "text", "keys that were changed"),
    Field("gpus", "count", "GPUs of the job with it"),
    Field("step_s", "s", "mean step"),
    Field("flops_per_gpu", "flop/s", "model flop per second and GPU"),
    Field("gap_share", "1", "of the gap between A and B"),
), numbered=True, prefix="stage_")  # fmt: skip
SIDE = (
    Field("job", "text", "name"),
    Field("gpus", "count", "GPUs"),
    Field("step_s", "s", "mean step"),
    Field("flops_per_gpu", "flop/s", "model flop per second and GPU"),
    Field("mfu", "1", "model flops utilisation"),
    Field("cost", "s", _COST),
    Field("measured_flops_per_gpu", "flop/s", "the same as measured or claimed"),
    Field("measured_cost", "s", "measured or claimed GPU time per exaflop"),
)


def explain(
    a: Job | str | Path,
    b: Job | str | Path,
    *,
    measured_a: str | float | None = None,
    measured_b: str | float | None = None,
    replicates: int = REPLICATES,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Explain the gap between two jobs, or a claim and a measurement, term by term.

    Parameters
    ----------
    a, b : Job, str or path
        Jobs, their files, or names of shipped ones.
    measured_a, measured_b : str or float, optional
        What was claimed or measured of either: ``420TFLOP/s`` per GPU, or a step time (``9.1s``,
        or seconds as a number).
    replicates : int
        Simulated steps of each job on the way.
    seed, threads, progress
        As in `prism.simulate`; progress counts jobs.

    Returns
    -------
    Explanation
        Tables ``terms`` (GPU time per exaflop of useful work [s], by where a step's time goes) and
        ``stages`` (what each kind of change brings, in the order in which they are made).

    Raises
    ------
    PrismError
        A job gives durations and no sizes, so that its useful work is unknown; a measurement is
        neither a rate nor a time.

    Examples
    --------
    >>> import prism
    >>> found = prism.explain("llama3-405b-16k", "llama3-405b-64k", replicates=64, seed=1)
    >>> found.terms.change.idxmax()
    'bubble'
    """
    context = make_context(seed, threads, progress, replicates)
    jobs = [each if isinstance(each, Job) else load_job(each) for each in (a, b)]
    for job in jobs:
        if job.model.durations is not None:
            raise PrismError(
                f"{job.source or job.name}: gives durations of its ops, so that its useful work is "
                "not known; expected two jobs with the sizes of their models"
            )
    measured = _measured("measured_a", measured_a), _measured("measured_b", measured_b)
    way, found = _simulate(_way(*jobs), replicates, context)
    sides = {
        side: _side(job, figures, known)
        for side, job, figures, known in zip(
            SIDES, jobs, (found[0], found[-1]), measured, strict=True
        )
    }
    attrs = made_with() | {"kind": KIND, "seed": str(context.seed), "replicates": replicates}
    parts = [
        TERMS.pack(_terms(sides, found[0], found[-1])),
        STAGES.pack(_stages(way, found, sides)),
        *(pack_figures(SIDE, sides[side], f"{side}_") for side in SIDES),
    ]
    return Explanation(xr.merge(parts).assign_attrs(attrs))


def _simulate(
    way: Sequence[Stage], replicates: int, context: RunContext
) -> tuple[list[Stage], list[dict[str, Any]]]:
    """Simulate the jobs on the way; one that only shows then to be none goes with the next."""
    kept: list[Stage] = []
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for i, (change, keys, job) in enumerate(way):
        try:
            figures = simulate(job, replicates, context.seed, context.threads).figures()
        except PrismError:
            if i in (0, len(way) - 1):
                raise
            waiting.append((change, keys))
            continue
        finally:
            context.report(i + 1, len(way))
        names, changed = zip(*waiting, (change, keys), strict=True)
        kept.append((", ".join(names), ", ".join(changed), job))
        found.append(figures)
        waiting = []
    return kept, found


def _cost(figures: Mapping[str, Any]) -> float:
    return EXA / float(figures["model_flops_per_gpu"])


def _side(
    job: Job, figures: Mapping[str, Any], measured: tuple[str, float] | None
) -> dict[str, Any]:
    """Give what is said of a job; `measured` is a rate or a step time."""
    step, rate = figures["step_time"]["mean"], figures["model_flops_per_gpu"]
    side = {
        "job": job.name, "gpus": job.world_size, "step_s": step, "flops_per_gpu": rate,
        "mfu": figures["mfu"], "cost": _cost(figures),
    }  # fmt: skip
    if measured is not None:
        kind, value = measured
        known = value if kind == "rate" else rate * step / value
        side |= {"measured_flops_per_gpu": known, "measured_cost": EXA / known}
    return side


def _measured(name: str, value: str | float | None) -> tuple[str, float] | None:
    """Read a rate per GPU [flop/s] or a step time [s]."""
    if value is None:
        return None
    rate = _RATE.fullmatch(str(value).strip())
    try:
        if rate is not None and float(rate[1]) > 0.0:
            return "rate", 1e12 * float(rate[1])
        return "time", parse_duration(value)
    except ValueError:
        raise PrismError(
            f"{option(name)}: {value!r}: expected TFLOP/s of a GPU or a step time, such as "
            "420TFLOP/s or 9.1s"
        ) from None


def _terms(sides: Mapping[str, Any], *found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split the cost of both by where a step's time goes; the rest is what was measured."""
    costs = [
        {row["name"]: row["mean_share"] * _cost(figures) for row in figures["time_loss"]}
        for figures in found
    ]
    for side, cost in zip(SIDES, costs, strict=True):
        if "measured_cost" in sides[side]:
            cost["not_predicted"] = sides[side]["measured_cost"] - sides[side]["cost"]
    gap = sum(costs[1].values()) - sum(costs[0].values())
    rows = []
    for name in dict.fromkeys([*costs[0], *costs[1]]):
        a, b = (cost.get(name, 0.0) for cost in costs)
        share = (b - a) / gap if gap else None
        rows.append({"name": name, "a": a, "b": b, "change": b - a, "gap_share": share})
    return sorted(rows, key=lambda row: -abs(row["change"]))


def _stages(
    way: list[Stage], found: list[dict[str, Any]], sides: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Say what each change brings."""
    gap, rows = sides["b"]["cost"] - sides["a"]["cost"], []
    for i, ((change, keys, job), figures) in enumerate(zip(way, found, strict=True)):
        brings = _cost(figures) - _cost(found[i - 1]) if i else None
        rows.append({
            "change": change, "keys": keys, "gpus": job.world_size,
            "step_s": figures["step_time"]["mean"],
            "flops_per_gpu": figures["model_flops_per_gpu"],
            "gap_share": brings / gap if brings is not None and gap else None,
        })  # fmt: skip
    return rows


# ----------------------------------------------------------------------------- the way from A to B
def _way(a: Job, b: Job) -> list[Stage]:
    """Give the changes from A to B.

    The next is the first kind of change that makes a job; where none does, several go together.
    """
    first, last = _values(a), _values(b)
    differ = {key for key in {*first, *last} if first.get(key) != last.get(key)}
    by_kind = {kind: {k for k in differ if _kind(k, differ) == kind} for kind in CHANGES}
    left, now, way = [kind for kind in CHANGES if by_kind[kind]], first, [("A", "", a)]
    while left:
        for kinds in [[kind] for kind in left] + [left[:n] for n in range(2, len(left) + 1)]:
            keys = sorted(key for kind in kinds for key in by_kind[kind])
            changed = {k: v for k, v in now.items() if k not in keys}
            changed |= {key: last[key] for key in keys if key in last}
            job = b if kinds == left else _try(changed, b.name)
            if job is not None:
                way.append((", ".join(kinds), ", ".join(map(".".join, keys)), job))
                left, now = [kind for kind in left if kind not in kinds], changed
                break
    return way if len(way) > 1 else [*way, ("B", "", b)]


def _try(values: Mapping[tuple[str, str], Any], name: str) -> Job | None:
    """Make a job on the way; None where it is none until more is changed."""
    tree: dict[str, dict[str, Any]] = {}
    for (block, key), value in values.items():
        tree.setdefault(block, {})[key] = value
    try:
        return job_from_dict(tree, name)
    except PrismError:
        return None


def _kind(key: tuple[str, str], differ: set[tuple[str, str]]) -> str:
    """Tell what kind of change a key is."""
    block, name = key
    if block == "cluster":
        return "layout and GPUs" if name in SIZE else "machine"
    if block == "parallelism":
        return "layout and GPUs" if name in LAYOUT else "batch" if name in BATCH else "software"
    if block == "variability" and name == "library" and ("cluster", "device") in differ:
        return "machine"
    return block


def _values(job: Job) -> dict[tuple[str, str], Any]:
    """Give a job's values by block and key, but for those of the run, which no step depends on."""
    tree = job.model_dump(mode="json", exclude={"source", "run"}, exclude_unset=True)
    blocks = {name: block for name, block in tree.items() if isinstance(block, dict)}
    found = {(name, key): value for name, block in blocks.items() for key, value in block.items()}
    return found


class Explanation(Result):
    """The gap between two jobs: by where the time goes, and by what is changed."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        sides = {side: read_figures(SIDE, self.dataset, f"{side}_") for side in SIDES}
        return {
            "seed": int(self.attrs["seed"]), "replicates": int(self.attrs["replicates"]), **sides,
            "terms": TERMS.rows(self.dataset), "stages": STAGES.rows(self.dataset),
        }  # fmt: skip

    @cached_property
    def terms(self) -> pd.DataFrame:
        """GPU time per exaflop [s] of both, by where the time goes."""
        return TERMS.frame(self.figures()["terms"])

    @cached_property
    def stages(self) -> pd.DataFrame:
        """What each kind of change brings on the way from A to B."""
        return STAGES.frame(self.figures()["stages"])
