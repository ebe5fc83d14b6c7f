"""Results: names, units and provenance of everything a simulation returns.

One flat `xarray.Dataset`, in memory and as netCDF. `VARIABLES` is the one list of result
variables; attrs carry what is needed to run the same call again.
"""

import hashlib
import json
import platform
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import prism
from prism.distributions.library import library_path
from prism.jobs.job import Job, job_from_dict
from prism.jobs.job import provenance as value_sources
from prism.simulation.execution.content import identity
from prism.workload.memory import memory_figures

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 1
TAIL_SAMPLES = 10  # independent samples beyond a quantile below which it is only a guess

# name: (dims, units, long name)
VARIABLES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "step_time": (("replicate",), "s", "time of one step, all ranks starting together"),
    "step_effect": (("replicate",), "1", "step effect, shared by all ranks"),
    "cluster_idx": (("replicate",), "1", "cluster a replicate belongs to"),
    "time_to_train": (("run_replicate",), "s", "time of the whole run"),
    "run_cluster_idx": (("run_replicate",), "1", "cluster a run is on"),
    "ideal_step_time": ((), "s", "step time with every effect at 1"),
    "time_left": (("run_replicate",), "s", "time until the last step of a run in progress is done"),
    "ideal_time_to_train": ((), "s", "time of the run with every step at the ideal step time"),
    "critical_path_time": (("kernel_class",), "s", "mean time on the critical path"),
    "ideal_critical_path_time": (("kernel_class",), "s", "the same with every effect at 1"),
    "idle_fraction": (("stage",), "1", "mean share of the step without forward and backward"),
    "exposed_communication": ((), "1", "share of the step that free communication would save"),
    "exposed_communication_se": ((), "1", "its standard error, by cluster"),
    "time_loss": (("part",), "1", "share of the mean step by where the time goes"),
    "time_loss_se": (("part",), "1", "its standard error, by cluster"),
    "time_loss_variance": (("part",), "1", "share of the step's variance due to it"),
    "time_loss_variance_se": (("part",), "1", "its standard error, by cluster"),
    "mfu": ((), "1", "model flop per second and GPU over the device's peak in its precision"),
    "model_flops_per_gpu": ((), "flop/s", "model flop per second and GPU"),
    "deadline": ((), "s", "time the run may take"),
    "run_term_time": (("run_replicate", "term"), "s", "time of the run by term; adds up to it"),
    "run_failures": (("run_replicate",), "1", "failures of the run"),
    "ettr": (("run_replicate",), "1", "effective training time ratio: steps that count, over all"),
    "progress_time": (("quantile", "progress"), "s", "when this share of the run is done"),
    "checkpoint_interval": ((), "s", "time between two checkpoints, without writing one"),
    "checkpoint_steps": ((), "1", "steps between two checkpoints"),
    "checkpoint_write_time": ((), "s", "time to write a checkpoint"),
    "best_checkpoint_interval": ((), "s", "the interval with the shortest expected run"),
    "best_checkpoint_steps": ((), "1", "the same in steps"),
    "checkpoint_excess": ((), "s", "excess time of the present interval over the best"),
    "slowdown_probability": (("threshold",), "1", "P(step_time > threshold * ideal_step_time)"),
    "cost": (("run_replicate",), "1", "price of the run, in the job's currency"),
    "gpu_power": ((), "W", "mean power of a GPU over the run"),
    "gpu_energy": (("run_replicate",), "J", "energy of the run's GPUs, without hosts or cooling"),
}  # fmt: skip


def make_dataset(
    values: dict[str, Any], coords: dict[str, Any], attrs: dict[str, Any]
) -> "xr.Dataset":
    """Assemble a dataset from plain arrays, with the units and long names of `VARIABLES`."""
    import xarray as xr

    data = {}
    for name, value in values.items():
        dims, units, long_name = VARIABLES[name]
        data[name] = (dims, value, {"units": units, "long_name": long_name})
    return xr.Dataset(data, coords=coords, attrs=attrs)


def provenance(job: Job, call: dict[str, Any]) -> dict[str, Any]:
    """Attributes that say how a result was made, and rebuild its call."""
    given = {key: source for key, source in value_sources(job).items() if source != "default"}
    # nothing of a job that was not read from a file, and so does not know
    sources = {"job_sources": json.dumps(given)} if set(given.values()) - {"preset"} else {}
    return {
        "schema": SCHEMA,
        **made_with(),
        "library_sha256": library_hash(job),
        "job_name": job.name,
        "job": job.model_dump_json(),
        "call": json.dumps(call),
        "seed": str(call["seed"]),
        **sources,
    }


def job_figures(job: Job) -> dict[str, Any]:
    """Figures of a job that its results are shown with, and saved with."""
    return {
        "world_size": job.world_size, "tokens_per_step": job.tokens_per_step,
        "global_batch": job.parallelism.dp * job.parallelism.microbatches
        * job.parallelism.microbatch_size,
        "memory": memory_figures(job),
    }  # fmt: skip


def made_with() -> dict[str, str]:
    """Attributes that say which code made a result."""
    return {
        "prism_version": prism.__version__,
        "source_sha256": identity().source,
        "versions": _versions(),
    }


@lru_cache(maxsize=1)  # each is read from a file
def _versions() -> str:
    libraries = ("numpy", "numba", "scipy", "xarray")
    return json.dumps({"python": platform.python_version()} | {n: version(n) for n in libraries})


def library_hash(job: Job) -> str:
    """Hash of the library's file, since a name alone does not say what is in it."""
    name = job.variability.library
    return hashlib.sha256(library_path(name).read_bytes()).hexdigest() if name else ""


def job_of(dataset: "xr.Dataset") -> Job:
    """Rebuild the job a result was made from."""
    values = json.loads(dataset.attrs["job"])
    values.pop("source", None)
    return job_from_dict(values, values.pop("name"))
