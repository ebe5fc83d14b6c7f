"""What all steps of a run share: runs differ on the same nodes, and the model may be wrong."""

import math
from typing import NamedTuple

from prism.distributions.library import Library
from prism.jobs.devices import device_key
from prism.jobs.frameworks import family
from prism.jobs.job import Job
from prism.simulation.effects.effect import Pick

UNMEASURED = "unmeasured"
"""Class of the model's error of jobs that nothing like was published."""


class RunSpread(NamedTuple):
    """Factors on a whole run."""

    cv: float = 0.0  # between runs
    model_error: float = 0.0  # standard deviation of the logarithm


def resolve(pick: Pick) -> RunSpread:
    """Return what the job or its library says."""
    return RunSpread(pick.value("run", "cv"), _model_error(pick))


def model_error_entry(job: Job, library: Library) -> str:
    """Name of a library's entry on the model's error of a job, without its effect."""
    same = device_key(library.device) in ("", job.cluster.device)
    kind = error_kind(job) if same else UNMEASURED
    return f"model_error_{kind if f'run/model_error_{kind}' in library else UNMEASURED}"


def error_kind(job: Job) -> str:
    """Class of a job by what was published: a framework, experts, or `UNMEASURED`.

    Published jobs of Megatron and nanotron do not gather their weights layer by layer, those of
    eager and compiled PyTorch do; experts are Megatron's, and there is no hybrid model
    (``experiments/validation/public-jobs``).
    """
    p, model = job.parallelism, job.model
    kind, again = family(p.framework), p.data_parallel in ("fsdp", "hsdp")
    if kind in ("megatron", "nanotron"):
        again = not (again and p.reshard_after_forward)
    if model.layers or model.layer_pattern or not again or (model.n_experts and kind != "megatron"):
        return UNMEASURED
    return "experts" if model.n_experts else kind


def _model_error(pick: Pick) -> float:
    """Error of the model: the job's, else that of the library for jobs of its kind and size."""
    job = pick.job
    if job.variability.model_error is not None:
        return job.variability.model_error
    if pick.library is None:
        return 0.0
    name = model_error_entry(job, pick.library)
    error = pick.value("run", name)
    if error == 0.0:
        return 0.0
    largest = pick.value("run", name.replace("model_error", "largest_gpus"), math.inf)
    beyond = math.log(max(1.0, job.world_size / largest))
    return math.hypot(error, pick.value("run", "model_error_growth") * beyond)
