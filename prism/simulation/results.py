"""Results: names, units and provenance of everything a simulation returns.

One flat `xarray.Dataset`, in memory and as netCDF. `VARIABLES` and `GROUPS` list all that is in it;
attrs carry what is needed to run the same call again.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import prism
from prism.common.results import Columns, Field, pack_figures, read_figures
from prism.distributions.library import library_path
from prism.jobs.job import Job, job_from_dict
from prism.jobs.job import provenance as value_sources
from prism.simulation.execution.content import identity
from prism.workload.memory import memory_figures

if TYPE_CHECKING:
    import xarray as xr

SCHEMA = 1
ENGINE = "engine_"
"""Begins the attributes that say what drawing cost: no part of what was found."""
TAIL_SAMPLES = 10  # independent samples beyond a quantile below which it is only a guess

PARTS = Columns("part", (
    Field("name", "text"),
    Field("mean_share", "1", "share of the mean step"),
    Field("mean_share_se", "1", "its standard error, by cluster draw"),
    Field("variance_share", "1", "share of the variance of the step"),
    Field("variance_share_se", "1", "its standard error, by cluster draw"),
), prefix="time_loss_")  # fmt: skip
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
    **{f"{PARTS.prefix}{f.name}": ((PARTS.dim,), f.unit, f.about) for f in PARTS.fields[1:]},
    "mfu": ((), "1", "model flop per second and GPU over the device's peak in its precision"),
    "model_flops_per_gpu": ((), "flop/s", "model flop per second and GPU"),
    "deadline": ((), "s", "time the run may take"),
    "run_term_time": (("run_replicate", "term"), "s", "time of the run by term; adds up to it"),
    "run_failures": (("run_replicate",), "1", "failures of the run"),
    "ettr": (("run_replicate",), "1", "effective training time ratio: steps that count, over all"),
    "progress_time": (("quantile", "progress"), "s", "when this share of the run is done"),
    "slowdown_probability": (("threshold",), "1", "P(step_time > threshold * ideal_step_time)"),
    "cost": (("run_replicate",), "1", "price of the run, in the job's currency"),
    "gpu_power": ((), "W", "mean power of a GPU over the run"),
    "gpu_energy": (("run_replicate",), "J", "energy of the run's GPUs, without hosts or cooling"),
    "host_energy": (
        ("run_replicate",), "J", "energy of the run's hosts and switches beside its GPUs"),
    "carbon": (("run_replicate",), "kg", "CO2e of the run's electricity, cooling included"),
    "carbon_embodied": (("run_replicate",), "kg", "CO2e of the machines' making, by their time"),
    "memory_gib": (("stage",), "GiB", "memory of a GPU, estimated"),
    "memory_ci_gib": (("end",), "GiB", "90 % interval of that of the fullest stage"),
    "memory_allocated_gib": (("stage",), "GiB", "of it allocated by the job's tensors"),
    "memory_parts": (("stage", "memory_part"), "GiB", "memory by part; -1: none"),
    "framework_others": (("framework",), "1", "nominal step with other frameworks over its own"),
    "library_p95": (("other_library",), "1", "p95 of the step with other libraries over its own"),
    "library_mean": (("other_library",), "1", "mean of the step with other libraries over its own"),
    "library_p95_half": (("other_library",), "1", "half of the 95 % interval of library_p95"),
}  # fmt: skip
OTHER_LIBRARIES = ("library_p95", "library_mean", "library_p95_half")
GROUPS = {
    "job": (
        Field("world_size", "count", "GPUs of the job"),
        Field("tokens_per_step", "count", "tokens of a step; 0: not known"),
        Field("global_batch", "count", "sequences of a step"),
    ),
    "memory": (
        Field("fullest", "count", "stage whose GPUs need the most memory"),
        Field("limit_gib", "GiB", "memory of a GPU that can be used"),
        Field("p_fits", "1", "P(the job fits)"),
    ),
    "replicas": (
        Field("engine", "text", "exact or exchangeable"),
        Field("replicas", "count", "data-parallel replicas of the job"),
        Field("simulated", "count", "of them simulated in each cluster draw"),
        Field("reason", "text", "why all were simulated though fewer were asked for"),
        Field("slowest_unseen", "1", "share of steps in which one not simulated is the slowest"),
        Field("beyond_sample", "1", "share of steps beyond all that the pilot saw"),
    ),
    "library": (
        Field("name", "text", "library of distributions"),
        Field("kind", "text", "cluster that a shipped one is of"),
    ),
    "framework": (
        Field("name", "text", "framework that the step is made with"),
        Field("named", "flag", "whether the job names it"),
    ),
    "model_error": (
        Field("spread", "1", "standard deviation of the model's relative error"),
        Field("class", "text", "class of jobs that it is of"),
        Field("measured", "flag", "whether a job of the class was measured"),
        Field("source", "text", "where it comes from"),
    ),
    "data_error": (
        Field("mean", "1", "relative error that the fit leaves in the mean"),
        Field("library_share", "1", "share of the library's own uncertainty that is left"),
        Field("std", "1", "relative error of the standard deviation of the total"),
        Field("std_at_most", "1", "times that it may be as large (95 %)"),
    ),
    "failure_model": (
        Field("per_1000_node_days", "1", "failures of 1,000 nodes in a day"),
        Field("nodes", "count", "nodes that may fail"),
        Field("source", "text", "where the rate comes from, or why there is none"),
        Field("down", "s", "mean time that a failure stops the run"),
        Field("assumed", "text", "what the job leaves open, as words"),
        Field("checkpoint_interval", "s", "time between two checkpoints"),
        Field("write", "s", "time to write one"),
    ),
    "checkpoint": (
        Field("interval", "s", "time between two checkpoints, without writing one"),
        Field("interval_steps", "count", "the same in steps"),
        Field("write", "s", "time to write a checkpoint"),
        Field("best_interval", "s", "the interval with the shortest expected run"),
        Field("best_interval_steps", "count", "the same in steps"),
        Field("costs_more", "s", "excess time of the present interval over the best"),
    ),
    "grid": (
        Field("g_per_kwh", "g/kWh", "CO2e of the electricity"),
        Field("pue", "1", "energy of the facility over that of the machines"),
    ),
    "completed": (
        Field("steps", "count", "steps done"),
        Field("seconds", "s", "time that they took"),
        Field("level", "1", "their level over the expected one"),
        Field("level_std", "1", "its standard deviation, given the steps"),
        Field("level_expected_std", "1", "the same before any step"),
        Field("last_step_time", "s", "mean of the last steps"),
    ),
    "reading": (
        Field("written", "text", "when the log was last written"),
        Field("column", "text", "what was read as step times"),
        Field("unit", "text", "its unit"),
        Field("why", "text", "how both were found"),
    ),
    "departure": (
        Field("departed", "flag", "whether steps deviate from those before or from the model"),
        Field("kind", "text", "change, or level: all steps do"),
        Field("false_alarm_rate", "1", "how often steps that do not deviate would be said to"),
        Field("p_value", "1", "p-value of no change in the whole run"),
        Field("change", "1", "relative change of the step time"),
        Field("change_low", "1", "lower end of its 90 % interval"),
        Field("change_high", "1", "upper end of its 90 % interval"),
        Field("step", "count", "step at which it begins"),
        Field("step_first", "count", "first step at which it may have begun"),
        Field("step_last", "count", "last step at which it may have begun"),
    ),
}
"""Groups of single figures; variables are named ``GROUP_FIGURE``."""


def make_dataset(
    values: dict[str, Any], coords: dict[str, Any], attrs: dict[str, Any]
) -> "xr.Dataset":
    """Assemble a dataset from arrays, as in `VARIABLES`, and figures, as in `GROUPS`."""
    import xarray as xr

    data: dict[Any, Any] = {}
    for name, value in values.items():
        if name in GROUPS:
            data |= pack_figures(GROUPS[name], value, f"{name}_").variables
            continue
        dims, units, long_name = VARIABLES[name]
        data[name] = (dims, value, {"units": units, "long_name": long_name})
    return xr.Dataset(data, coords=coords, attrs=attrs)


def read_group(dataset: "xr.Dataset", name: str) -> dict[str, Any]:
    """Give a group of figures as JSON has it; empty where there is none."""
    return read_figures(GROUPS[name], dataset, f"{name}_")


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


def job_values(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a job that its results are shown with, and saved with, and their coordinates."""
    layout, memory = job.parallelism, memory_figures(job)
    values: dict[str, Any] = {"job": {
        "world_size": job.world_size, "tokens_per_step": job.tokens_per_step,
        "global_batch": layout.dp * layout.microbatches * layout.microbatch_size,
    }}  # fmt: skip
    if memory is None:
        return values, {}
    stages = memory["stages"]
    parts = list(dict.fromkeys(name for stage in stages for name in stage["parts"]))
    return values | {
        "memory": {"fullest": memory["stage"]} | memory, "memory_ci_gib": memory["ci_gib"],
        "memory_gib": [stage["gib"] for stage in stages],
        "memory_allocated_gib": [stage["allocated_gib"] for stage in stages],
        "memory_parts": [[stage["parts"].get(name, -1.0) for name in parts] for stage in stages],
    }, {"stage": [stage["stage"] for stage in stages], "memory_part": parts}  # fmt: skip


def read_libraries(dataset: "xr.Dataset", own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List steps with other libraries [s], from their ratios to a job's own step."""
    if "other_library" not in dataset.dims:
        return []
    columns = (dataset[name].values.tolist() for name in ("other_library", *OTHER_LIBRARIES))
    return [
        {
            "name": name, "kind": name.partition("-")[2], "mean": own["mean"] * mean,
            "p95": own["p95"] * p95, "p95_ci": [own["p95"] * (p95 + x) for x in (-half, half)],
        }
        for name, p95, mean, half in zip(*columns, strict=True)
    ]  # fmt: skip


def read_memory(dataset: "xr.Dataset") -> dict[str, Any] | None:
    """Give the memory of `prism.workload.memory.memory_figures`; None where there is none."""
    if "memory_gib" not in dataset:
        return None
    figures, names = read_group(dataset, "memory"), dataset.memory_part.values.tolist()
    fullest = figures.pop("fullest")
    columns = (dataset[x].values.tolist() for x in ("stage", "memory_gib", "memory_allocated_gib"))
    stages = [
        {
            "stage": stage, "gib": gib, "allocated_gib": allocated,
            "parts": {name: x for name, x in zip(names, parts, strict=True) if x >= 0.0},
        }
        for stage, gib, allocated, parts in zip(*columns, dataset.memory_parts.values.tolist(),
                                                strict=True)
    ]  # fmt: skip
    of_it = next(stage for stage in stages if stage["stage"] == fullest)
    return of_it | {"ci_gib": dataset.memory_ci_gib.values.tolist()} | figures | {"stages": stages}


def made_with() -> dict[str, str]:
    """Attributes that say which code made a result."""
    return {
        "prism_version": prism.__version__,
        "source_sha256": identity()["source"],
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
