"""What a job's step is made with, and how long it would be with another framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prism.cluster.power import gpu_power
from prism.common.errors import PrismError
from prism.distributions.library import load_library
from prism.jobs.frameworks import FRAMEWORKS, family
from prism.jobs.job import provenance
from prism.jobs.ops import BF16_BYTES, Share, share_of
from prism.workload.build import build_workload, make_expander, nominal_library
from prism.workload.costs import attention_backend
from prism.workload.modelsize import count_parameters, weigh
from prism.workload.ownlayers import own_halves
from prism.workload.stepgraph import job_seconds
from prism.workload.work import Workload, busiest_s

if TYPE_CHECKING:
    from prism.distributions.library import Library
    from prism.jobs.job import Job


MOST_LAYERS = 100_000
"""Layers up to which a model is described; a job of more is refused where it is simulated."""


def parameter_figures(job: Job) -> dict[str, float] | None:
    """Parameters of a job's model, all and those that a token passes; None without sizes."""
    if not job.model.depth or not _describable(job):
        return None
    return {
        "total": count_parameters(job.model),
        "active": count_parameters(job.model, active=True),
    }


def layer_figures(job: Job) -> list[dict[str, Any]] | None:
    """Describe each table of a job's own layers; None of other jobs.

    `parameters` are those of one layer, whole; `flop` and `bytes` what the kernels of one GPU do in
    its forward and backward of a microbatch, without recomputation, `kept_bytes` what backward
    needs.
    """
    if job.model.layers is None or not _describable(job):
        return None
    expander = make_expander(job, nominal_library(job, _library(job)))
    share, out = share_of(job.parallelism), list[dict[str, Any]]()
    for i, layer in enumerate(job.model.sized(share.sequences)[0]):
        halves = own_halves(job.model, share, i)
        ops = tuple(op for half in halves for op in half)
        kernels = [*expander.forward(ops), *expander.backward(ops)]
        whole = weigh(tuple(op for half in own_halves(job.model, Share(), i) for op in half))
        out.append({
            "layer": layer.name, "at": layer.at, "repeat": layer.repeat, "ops": len(layer.ops),
            "parameters": whole.total + whole.spread,
            "flop": sum(k.flop for k in kernels),
            "bytes": sum(k.bytes for k in kernels if not k.group),
            "kept_bytes": sum(op.kept(BF16_BYTES) for op in ops),
        })  # fmt: skip
    return out


def framework_figures(job: Job, workload: Workload | None = None) -> dict[str, Any] | None:
    """Say which framework a job's step is made with, and whether the job names it.

    Where it does not, `others` are the nominal steps of the other frameworks, in their latest
    release, over its own; one that cannot run the job is left out. None of jobs whose durations are
    given or fitted.

    Parameters
    ----------
    workload : Workload, optional
        The job's own, if it is at hand.
    """
    if not _describable(job) or job.variability.model is not None:
        return None
    layout = job.parallelism
    named, others = "parallelism.framework" in _named(job), dict[str, float]()
    if not named:
        own = nominal_seconds(job, workload)
        for name in FRAMEWORKS:
            if layout.framework != name == family(name):
                try:
                    other = job.replace({"parallelism": {"framework": name}})
                    step = nominal_seconds(other)
                except PrismError:
                    continue
                others[name] = step / own
    return {"name": layout.framework, "named": named, "others": others}


def step_figures(job: Job) -> dict[str, Any] | None:
    """Say what a job's step is made with: framework, attention, power, host, gradients.

    None of jobs whose durations are given or fitted. `power` has the speed of products and of
    attention over that of their tables [1], the mean draw of a GPU at nominal durations and its
    limit [W]; `launch_gaps` is what the busiest stage waits for its host in a step [s]; `gradients`
    has the collective, its messages and their size [byte], and whether backward hides them.
    """
    if not _describable(job) or job.variability.model is not None:
        return None
    workload = build_workload(job, _library(job))
    found = framework_figures(job, workload) or {}
    state = workload.power
    figures: dict[str, Any] = {
        "framework": found | {"release": FRAMEWORKS[job.parallelism.framework].about},
        "attention": {
            "backend": attention_backend(job), "named": job.parallelism.attention is not None
        },
    }  # fmt: skip
    layout = job.parallelism
    figures["launch_gaps"] = layout.microbatches * max(
        sum(k.duration for chunk in row for k in chunk.gaps) for row in workload.chunks
    )
    reduces = [c for row in workload.reduces for chunk in row for c in chunk]
    if reduces:
        of_stage = [sum(c.messages for chunk in row for c in chunk) for row in workload.reduces]
        figures["gradients"] = {
            "op_kind": reduces[0].op_kind,
            "messages": max(of_stage),
            "bytes": max(c.bytes for c in reduces),
            "hidden": workload.hides_gradients,
        }
    if state is not None:
        figures["power"] = {
            "gemm_speed": 1.0 / state.gemm_slowdown,
            "attention_speed": 1.0 / state.attention_slowdown,
            "watts": state.watts,
            "limit_w": gpu_power(job).limit_w,
        }
    return figures


def nominal_seconds(job: Job, workload: Workload | None = None) -> float:
    """Step with every effect at 1 [s]; beyond two turns of a pipeline microbatches add alike."""
    workload, p = workload or build_workload(job, _library(job)), job.parallelism
    turns = job_seconds(job, workload, min(p.microbatches, 2 * p.pp))
    more = p.microbatches - 2 * p.pp
    if more <= 0:
        return turns
    each = busiest_s(workload)
    if p.data_parallel in ("fsdp", "hsdp"):  # parameters are gathered in each microbatch
        each = max(each, (job_seconds(job, workload, 3 * p.pp) - turns) / p.pp)
    return turns + more * each


def _describable(job: Job) -> bool:
    return job.model.durations is None and job.model.depth <= MOST_LAYERS


def _named(job: Job) -> set[str]:
    """Keys that a job, or a file below it, gives."""
    return {key for key, source in provenance(job).items() if source not in ("default", "preset")}


def _library(job: Job) -> Library | None:
    name = job.variability.library
    return None if name is None else load_library(name)
