"""A resolved job as an answer: every value with where it came from, and the links of its cluster.

Nothing is simulated: what a message takes depends on who takes part (`prism.cluster.machine`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from prism.cluster.machine import build_cluster
from prism.common.text import format_count, format_duration, format_parameters, format_share
from prism.distributions.library import load_library
from prism.jobs.job import Job, flatten, layer_split, provenance
from prism.present.answer import Answer
from prism.present.answers.memory import fit_table, memory_table
from prism.present.answers.runs import framework_text, parameters_text
from prism.present.cells import Cell, Column, Figure, Json, Table, count, pairs_table
from prism.workload.build import nominal_library
from prism.workload.described import layer_figures, parameter_figures, step_figures
from prism.workload.fitting import ways_to_fit
from prism.workload.memory import memory_figures

DURATION_KEYS = {
    "run.deadline",
    "run.checkpoint.interval",
    "run.evaluation.duration",
    "run.start_up",
    *(f"run.failures.{key}" for key in ("detection", "restart", "repair")),
    *(f"variability.effects.fail_slow.{key}" for key in ("duration", "detection")),
}


def job_answer(job: Job) -> Answer:
    """Lay out a resolved job; values that nobody gave are details."""
    values = job.model_dump(mode="json", exclude={"name", "source"})
    if job.model.durations is not None:
        # the sizes say nothing where the durations are given
        values["model"] = {"durations": values["model"]["durations"]}
    sources = provenance(job)
    split = layer_split(job) if job.model.durations is None else []
    figures: dict[str, Any] = {
        "kind": "job",
        "job": job.name,
        "world_size": job.world_size,
        "layer_split": split,
        "values": values,
        "sources": sources,
    }
    source = str(job.source or "")
    layers = layer_figures(job)
    shown = values | ({"model": values["model"] | {"layers": None}} if layers else {})
    given, defaults = given_and_defaults(job_table("Values given", shown, _short(sources)))
    if split:
        runs = ", ".join(f"{n} of {layers}" for layers, n in _runs(split))
        given = replace(given, notes=(f"model chunks by layers, in virtual-stage order: {runs}",))
    tables, size = [given], parameter_figures(job)
    if size is not None:
        figures["parameters"] = size
    if layers:
        figures["layers"] = layers
        tables.append(_layers_table(layers))
    if (step := step_figures(job)) is not None:
        figures |= step
        tables.append(pairs_table("Step", _step_rows(step, job.cluster.device)))
    if (memory := memory_figures(job)) is not None:
        ways = ways_to_fit(job)
        figures |= {"memory": memory, "ways_to_fit": ways}
        tables += [table for table in (memory_table(memory), fit_table(ways)) if table.rows]
    if job.model.durations is None:
        figures["links"] = describe_links(job)
        tables.append(_links_table(figures["links"]))
    return Answer(
        title="Job",
        subject=job.name,
        head=f": {format_count(job.world_size, 'GPU')}"
        + (f", {parameters_text(size)}" if size is not None else "")
        + (f", {source}" if os.sep in source else ""),
        tables=(*tables, *(defaults,) * bool(defaults.rows)),
        figures=figures,
    )


def _layers_table(layers: Sequence[Json]) -> Table:
    """Lay out a job's own layers."""
    rows = tuple(
        (
            layer["layer"], layer["at"] or count(layer["repeat"]), count(layer["ops"]),
            Figure(layer["parameters"], format_parameters(layer["parameters"])),
            Figure(layer["flop"], f"{layer['flop'] / 1e12:,.4g} Tflop"),
            Figure(layer["bytes"], f"{layer['bytes'] / 1e9:,.4g} GB"),
            Figure(layer["kept_bytes"], f"{layer['kept_bytes'] / 1e9:,.4g} GB"),
        )
        for layer in layers
    )  # fmt: skip
    columns = (
        Column("layer", right=False), Column("times"), Column("ops"), Column("parameters"),
        Column("flop"), Column("memory traffic"), Column("kept"),
    )  # fmt: skip
    notes = (
        "parameters: of one layer, whole; the rest: of one GPU in a microbatch's forward and "
        "backward, kept: what backward needs",
    )
    return Table("Layers", columns, rows, notes)


def _step_rows(step: Json, device: str) -> list[tuple[str, Cell]]:
    """Say what a step is made with."""
    framework, attention, power = step["framework"], step["attention"], step.get("power")
    whose = "" if attention["named"] else f" (the framework's on {device})"
    rows: list[tuple[str, Cell]] = [
        ("framework", framework_text(framework)),
        ("release", framework["release"]),
        ("attention", f"{attention['backend']}{whose}"),
    ]
    if power is not None:
        text = f"{power['watts']:.0f} of {power['limit_w']:.0f} W; products at "
        text += f"{format_share(power['gemm_speed'])} of the speed in their tables, attention at "
        rows.append(("power of a GPU", f"{text}{format_share(power['attention_speed'])}"))
    rows.append(("waits for the host", f"{format_duration(step['launch_gaps'])} of a step"))
    if (sent := step.get("gradients")) is not None:
        text = f"{sent['op_kind']}, {format_count(round(sent['messages']), 'message')} of up to "
        text += f"{sent['bytes'] / 1e6:.4g} MB, {'beside' if sent['hidden'] else 'after'} "
        rows.append(("gradients", f"{text}the last backward"))
    return rows


def _short(sources: Mapping[str, str]) -> dict[str, str]:
    """Leave out the folders of files, unless two files have one name."""
    files = {place.rpartition(":")[0] for place in sources.values() if os.sep in place}
    if len({os.path.basename(file) for file in files}) < len(files):
        return dict(sources)
    return {key: os.path.basename(x) if os.sep in x else x for key, x in sources.items()}


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Count equal neighbours: value and how many."""
    return [(value, len(list(equal))) for value, equal in groupby(numbers)]


def job_table(title: str, values: Json, sources: Mapping[str, str]) -> Table:
    """Lay out a resolved job: every key, its value, and where the value came from."""
    rows = []
    for key, value in flatten(values):
        long = key in DURATION_KEYS and isinstance(value, float)
        text = format_duration(value) if long and value else plain_text(value)
        rows.append((key, text, _source(key, sources)))
    columns = tuple(Column(title, right=False) for title in ("key", "value", "from"))
    return Table(title, columns, tuple(rows))


def given_and_defaults(table: Table) -> tuple[Table, Table]:
    """Part the values of a job that a job, a preset or a command line gives from its defaults."""
    given = tuple(row for row in table.rows if row[-1] != "default")
    left = tuple(row[:-1] for row in table.rows if row[-1] == "default")
    columns = table.columns[:-1]
    return replace(table, rows=given), Table("Defaults", columns, left, details=True)


def plain_text(value: Any) -> str:
    """Write a value as it would stand in a job file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(plain_text(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain_text(item)}" for key, item in value.items()) + "}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def value_text(value: Any, longest: int) -> str:
    """Write a value that a job may lack; of a long one the beginning."""
    text = "not set" if value is None else plain_text(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Find where a key, or the nearest key above it, came from."""
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        found = sources.get(".".join(parts[:n]))
        if found is not None:
            return found
    return "default"


def describe_links(job: Job) -> list[dict[str, Any]]:
    """List the links of a job's cluster, the innermost first; rates as large messages reach."""
    name = job.variability.library
    cluster = build_cluster(job, nominal_library(job, None if name is None else load_library(name)))
    nvlink, network = cluster.nvlink, cluster.network
    rows = [_link("nvlink", None, nvlink.bytes_per_s, nvlink.latency_s)]
    rows.append(_link("network", cluster.nvlink_gpus, network.bytes_per_s, network.latency_s))
    for tier in cluster.tiers:
        rate = network.bytes_per_s / tier.oversubscription
        rows.append(_link(tier.name, tier.gpus, rate, tier.latency_s, tier.hierarchical))
    return rows


def _link(
    tier: str, gpus: int | None, bytes_per_s: float, latency_s: float, hierarchical: bool = False
) -> dict[str, Any]:
    return {
        "tier": tier,
        "gpus": gpus,
        "gbytes_per_s_per_gpu": 1e-9 * bytes_per_s,
        "gbits_per_s": None if gpus is None else 8e-9 * bytes_per_s * gpus,
        "latency_us": 1e6 * latency_s,
        "collectives": "hierarchical" if hierarchical else "ring",
    }


def _in_unit(value: float, unit: str) -> Figure:
    return Figure(value, f"{format_count(value)} {unit}")


def _links_table(links: Sequence[Json]) -> Table:
    """Lay out what `describe_links` returns."""
    rows = tuple(
        (
            link["tier"],
            count(link["gpus"], "GPU"),
            Figure(link["gbytes_per_s_per_gpu"], f"{link['gbytes_per_s_per_gpu']:.4g} GB/s"),
            None if link["gpus"] is None else _in_unit(link["gbits_per_s"], "Gbit/s"),
            _in_unit(link["latency_us"], "us"),
            link["collectives"],
        )
        for link in links
    )
    columns = (
        Column("tier", right=False), Column("of units of"), Column("per GPU"), Column("per unit"),
        Column("latency"), Column("collectives", right=False),
    )  # fmt: skip
    notes = ("bandwidth that large messages reach, in one direction",)
    return Table("Links", columns, rows, notes)
