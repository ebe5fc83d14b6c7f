"""An imported configuration: the job file with where each value comes from, and the answer."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from prism.common.text import format_count
from prism.jobs.importing.settings import FORMATS, said_by_name
from prism.jobs.jobspec.blocks import BLOCKS
from prism.present.answer import Answer, Finding
from prism.present.answers.job import plain_text
from prism.present.answers.runs import parameters_text
from prism.present.cells import Column, Table
from prism.present.jobtemplate import flow
from prism.workload.described import parameter_figures

if TYPE_CHECKING:
    from prism.jobs.importing.imported import Imported
    from prism.jobs.importing.topology import Placed, Topology
    from prism.jobs.job import Job
    from prism.models.optables.table import OpTable

_ASKED = {"cluster.device": "--device"} | dict.fromkeys(
    ("cluster.nodes", "cluster.gpus_per_node", "parallelism.dp"), "--gpus"
)
_LONGEST = 100  # characters of a setting that a comment shows


def imported_yaml(found: Imported) -> str:
    """Write an imported job as YAML that loads to it, each value with the line of its source."""
    source, comments = found.source, dict[str, str]()
    for given in found.given:
        comments[given.key] = f"{source.place(given.line)}  {_short(given.shown)}"
    for assumed in found.assumed:
        place = f"{source.place(assumed.line)}, " if assumed.line else ""
        comments[assumed.key] = f"assumed: {place}{assumed.why}"
    size = parameter_figures(found.job)
    lines = [
        f"# {format_count(found.job.world_size, 'GPU')}"
        + (f", {parameters_text(size)}" if size is not None else "")
        + f", from {source.name}, {FORMATS[source.format]}.",
        "# Behind each value: the line it comes from, or why it is assumed.",
        "# Check this file with: prism show THIS_FILE",
    ]
    for block in BLOCKS:
        keys = [key for key in found.values if key.partition(".")[0] == block]
        lines += ["", f"{block}:"] if keys else []
        for key in keys:
            comment = comments.get(key, _ASKED.get(key, "--set"))
            lines.append(f"  {key.partition('.')[2]}: {flow(found.values[key])}  # {comment}")
    for title, rows in (
        ("Changes the step time, and is not in this job:", _unmodelled(found)),
        ("Not understood:", _unknown(found)),
    ):
        lines += ["", f"# {title}", *(f"#   {': '.join(row)}" for row in rows)] if rows else []
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _unmodelled(found: Imported) -> list[tuple[str, str, str]]:
    place = found.source.place
    return [(place(s.line), _short(s.shown), why) for s, why in found.unmodelled]


def _unknown(found: Imported) -> list[tuple[str, str]]:
    place = found.source.place
    notes = [(place(line), text) for line, text in found.source.notes]
    return notes + [(place(s.line), _short(s.shown)) for s in found.unknown]


def import_answer(found: Imported) -> Answer:
    """Lay out what was understood, assumed and left, each with its line."""
    job, place = found.job, found.source.place
    given = tuple((g.key, plain_text(g.value), _short(g.shown), place(g.line)) for g in found.given)
    assumed = tuple(
        (a.key, plain_text(a.value), a.why, place(a.line) if a.line else "") for a in found.assumed
    )
    unmodelled, unknown = tuple(_unmodelled(found)), tuple(_unknown(found))
    sizes = f"{format_count(len(given), 'value')} from the file, {len(assumed)} assumed"
    left = f"Settings not in the job: {len(unmodelled)} that change the step time, "
    left += f"{len(unknown)} not understood, {found.n_ignored} without effect on it"
    size, named = parameter_figures(job), said_by_name(found.source)
    told = f", {parameters_text(size)}" if size is not None else ""
    told += f"; its name says {named}" if named and size is not None else ""
    figures: dict[str, Any] = {
        "kind": "import", "source": found.source.name, "format": found.source.format,
        "job": job.name, "world_size": job.world_size, "parameters": size,
        "values": dict(found.values),
        "understood": [{"key": g.key, "value": g.value, "setting": g.shown,
                        **found.source.where(g.line)} for g in found.given],
        "assumed": [a._asdict() | found.source.where(a.line) for a in found.assumed],
        "not_modelled": [{"setting": s.shown, "why": w, **found.source.where(s.line)}
                         for s, w in found.unmodelled],
        "not_understood": [{"setting": s.shown, **found.source.where(s.line)}
                           for s in found.unknown],
        "lacking": [{"what": text, **found.source.where(line)} for line, text in
                    found.source.notes],
        "named": named, "ignored": found.n_ignored,
    }  # fmt: skip
    tables = (
        _table("Assumed", ("key", "value", "why", "line"), assumed),
        _table("Changes the step time, not in the job", ("line", "setting", "what"), unmodelled),
        _table("Not understood", ("line", "setting"), unknown),
        _table("From the file", ("key", "value", "setting", "line"), given),
    )
    doubtful = ("cluster.device", "parallelism.global_batch", "model.seq_len")
    warnings = tuple(
        f"{a.key}: {plain_text(a.value)}: {a.why}" for a in found.assumed if a.key in doubtful
    )
    warnings += tuple(f"{place(line)}: {text}" for line, text in found.source.notes)
    return Answer(
        title="Import", subject=found.source.name,
        head=f": {FORMATS[found.source.format]}, {format_count(job.world_size, 'GPU')}{told}",
        findings=(Finding("imported", f"{sizes}.", "answer"), Finding("left", f"{left}.")),
        tables=tuple(table for table in tables if table.rows), figures=figures, warnings=warnings,
    )  # fmt: skip


def table_yaml(found: OpTable) -> str:
    """Write a job with a table of ops as a YAML file, an op a line."""
    told = [
        line for note in found.notes
        for line in textwrap.wrap(f"{note}.", 98, initial_indent="# - ", subsequent_indent="#   ")
    ]  # fmt: skip
    size = parameter_figures(found.job)
    lines = [
        f"# Layers of {found.source}" + (f", {parameters_text(size)}." if size else "."),
        "# What the profile does not say:", *told,
    ]  # fmt: skip
    for block, keys in found.values.items():
        lines += ["", f"{block}:"]
        for key, value in keys.items():
            if key != "layers":
                lines.append(f"  {key}: {flow(value)}")
                continue
            lines.append("  layers:")
            for layer in value:
                own = {k: v for k, v in layer.items() if k != "ops"}
                first, *rest = (f"{k}: {flow(v)}" for k, v in own.items())
                lines += [f"  - {first}", *(f"    {text}" for text in rest), "    ops:"]
                lines += [f"    - {flow(op)}" for op in layer["ops"]]
    return "\n".join(lines) + "\n"


def table_answer(found: OpTable) -> Answer:
    """Lay out the layers that were found, and what the profile does not say."""
    rows = tuple(
        (
            name,
            f"{repeat:,}",
            str(len(ops)),
            ", ".join(f"{n} {op}" for op, n in Counter(ops).items()),
        )
        for name, repeat, ops in found.layers
    )
    most = max(repeat for _, repeat, _ in found.layers)
    size = parameter_figures(found.job)
    figures = {
        "kind": "import", "source": found.source, "format": "profile", "job": found.job.name,
        "parameters": size, "values": found.values, "notes": list(found.notes),
        "layers": [{"name": n, "repeat": r, "ops": len(ops)} for n, r, ops in found.layers],
    }  # fmt: skip
    return Answer(
        title="Import", subject=found.source,
        head=f": a profile, {parameters_text(size)}" if size else ": a profile",
        findings=(
            Finding("layers", f"{format_count(most, 'equal layer')} found.", "answer"),
            *(Finding("unknown", f"{note[0].upper()}{note[1:]}.") for note in found.notes),
        ),
        tables=(_table("Layers", ("layer", "times", "ops", "of which"), rows),), figures=figures,
    )  # fmt: skip


def topology_yaml(base: str, placed: Placed) -> str:
    """Write a job whose hosts stand where a topology says, over the job that it is based on."""
    lines = [f"base: {flow(base)}", "cluster:"]
    lines += [f"  {key}: {flow(value)}" for key, value in placed.keys.items()]
    return "\n".join(lines) + "\n"


def topology_answer(
    job: Job, placed: Placed, topology: Topology, source: str, hosts: str
) -> Answer:
    """Lay out the units that a job's hosts are in."""
    tiers = placed.keys.get("tiers", {})
    known = job.cluster.tiers
    costs = ("oversubscription", "bandwidth_gbytes_per_s", "total_gbits_per_s", "latency_us",
             "distance_km")  # fmt: skip
    free = [t for t in tiers if not any(getattr(known.get(t), cost, None) for cost in costs)]
    empty = sum(not name for name in placed.names)
    warnings = [
        f"{tier}: nothing says what leaving it costs; --set cluster.tiers.{tier}.oversubscription=X"
        for tier in free
    ]
    if empty:
        warnings.append(
            f"units hold different numbers of the job's hosts: {empty} positions have no host; "
            "spares of prism place are such positions"
        )
    rows = tuple((name, str(units), str(most)) for name, (units, most) in placed.sizes.items())
    n = len(placed.names) - empty
    findings = [Finding("placed", f"Hosts in rank order: {hosts}.", "answer")]
    if padding := topology.padding:
        text = f"{format_count(len(padding), 'node')} that only fill up blocks left out: "
        findings.append(
            Finding("padding", text + ", ".join(padding[:4]) + ", ..." * (len(padding) > 4) + ".")
        )
    return Answer(
        title="Import", subject=source, head=f": {format_count(n, 'host')} of {job.name}",
        findings=tuple(findings),
        tables=(_table("Units", ("level", "units", "hosts of the largest"), rows),),
        figures={"kind": "import", "source": source, "job": job.name, "hosts": list(placed.names),
                 "cluster": dict(placed.keys), "padding": list(topology.padding)},
        warnings=tuple(warnings),
    )  # fmt: skip


def _table(title: str, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(title, tuple(Column(name, right=False) for name in columns), rows)
