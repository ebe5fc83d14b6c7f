"""Controls of the page: which keys of a job they set, what stands in them, and what was wrong.

Nothing here knows the page; what a control may hold, and its help, are the job file's.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.distributions.library import library_names
from prism.jobs.devices import LIBRARIES
from prism.jobs.dimensions import DIMENSIONS, REPLICA
from prism.jobs.dimensions import GPUS as GPUS_OF_JOB
from prism.jobs.job import Job, load_job, provenance
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.presets import PRESETS, SIZES
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.present.answers.job import DURATION_KEYS
from prism.present.jobtemplate import written

GPUS = "gpus"
"""The one control that is no key: dp and the number of nodes follow from it and the layout."""
GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "Model and cluster": (
        ("model.name", "Model"),
        ("model.seq_len", "Sequence length"),
        ("cluster.device", "GPU"),
        (GPUS, "Number of GPUs"),
        ("cluster.gpus_per_node", "GPUs per node"),
    ),
    "Layout": (
        *((f"parallelism.{d}", f"{DIMENSIONS[d].title} ({d})") for d in DIMENSIONS if d != "dp"),
        ("parallelism.data_parallel", "Data parallelism"),
        ("parallelism.schedule", "Pipeline schedule"),
        ("parallelism.microbatches", "Microbatches per replica"),
        ("parallelism.microbatch_size", "Microbatch size"),
        ("parallelism.recompute", "Recompute"),
        ("parallelism.precision", "Precision"),
        ("parallelism.overlap", "Overlap"),
    ),
    "Variability": (
        ("variability.library", "Distributions"),
        ("variability.dependence", "Dependence"),
        ("variability.effects.rank.cv", "GPUs, CV"),
        ("variability.effects.rank.lemon_fraction", "Share of lemons"),
        ("variability.effects.step.cv", "Steps, CV"),
        ("variability.model_error", "Model error"),
    ),
    "Run and failures": (
        ("run.steps", "Steps"),
        ("run.tokens", "Tokens"),
        ("run.deadline", "Deadline"),
        ("run.failures.per_1000_node_days", "Failures per 1,000 node-days"),
        ("run.failures.restart", "Restart after a failure"),
        ("run.checkpoint.interval", "Checkpoint interval"),
        ("run.price_per_gpu_hour", "Price of a GPU-hour"),
    ),
}
"""Controls by group: the key each one sets, and its label."""
KEYS = tuple(key for group in GROUPS.values() for key, _ in group)
_FOLLOWS = {"parallelism.dp": GPUS, "cluster.nodes": GPUS, "parallelism": GPUS, "cluster": GPUS,
            "parallelism.layer_split": "parallelism.pp"}  # fmt: skip
"""Keys and blocks without a control, and the control that can correct what is wrong with them."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Control:
    """What a control may hold."""

    key: str  # of the job; `GPUS` is none of its keys
    kind: str  # ``choice``, ``switch``, ``count``, ``number`` or ``text``
    choices: tuple[str, ...] = ()  # of a choice
    help: str = ""  # what the key means, with its unit and default


@cache
def control(key: str) -> Control:
    """Make a control of a key from what a job file may say."""
    if key == GPUS:
        replica = " * ".join(REPLICA)
        text = f"dp is this over {replica}, and the number of nodes this over the GPUs of each."
        return Control(key, "count", (), text)
    field = _field(key)
    about = field.description or ""
    if key == "model.name":
        return Control(key, "choice", tuple(PRESETS), about)
    if key == "variability.library":
        return Control(key, "choice", (*library_names(), "none"), about)
    kind = _inner(field.annotation)
    if get_origin(kind) is Literal:
        return Control(key, "choice", tuple(map(str, get_args(kind))), about)
    named = {bool: "switch", int: "count", float: "number"}
    # lengths of time are numbers of seconds, too, but people write 30min
    return Control(key, "text" if key in DURATION_KEYS else named.get(kind, "text"), (), about)


def _field(key: str) -> FieldInfo:
    block, *path, last = key.split(".")
    kind: type[BaseModel] = BLOCKS[block]
    for name in path:
        kind = _inner(kind.model_fields[name].annotation)
    return kind.model_fields[last]


def _inner(annotation: Any) -> Any:
    """Take the type of an optional or annotated value."""
    while get_args(annotation) and get_origin(annotation) is not Literal:
        args = [arg for arg in get_args(annotation) if arg is not type(None)]
        annotation = args[0]
    return annotation


# -------------------------------------------------------------------------------- job and values
def values_of(job: Job) -> dict[str, Any]:
    """Read what stands in each control for a job; None where the key is not set."""
    return {key: job.world_size if key == GPUS else _value(job, key) for key in KEYS}


def _value(job: Job, key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name, None)
    if key == "variability.library" and value is None:
        return "none" if job.variability.model is None else None
    return written(value, key)


def change(base: Job, changed: Values, key: str, value: Any) -> dict[str, Any]:
    """Change one more control; what it would be without that goes on to follow from the others."""
    others = {name: before for name, before in changed.items() if name != key}
    with suppress(PrismError):
        if values_of(build(base, others))[key] == value:
            return others
    return others | {key: value}


def overrides(base: Job, changed: Values) -> dict[str, Any]:
    """List the keys that controls which were changed set over a job, by dotted key.

    One that is at the job's value sets nothing, unless the others make it something else.
    """
    out = _moved(base, changed)
    if out:
        with suppress(PrismError):  # which building the job says
            now = values_of(load_job(base.source, override_texts(out)))
            out |= {key: v for key, v in changed.items() if key != GPUS and now[key] != v}
    return out


def _moved(base: Job, changed: Values) -> dict[str, Any]:
    shown = values_of(base)
    moved = {key: value for key, value in changed.items() if value != shown[key]}
    out = {key: value for key, value in moved.items() if key != GPUS}
    given = [key for key, place in provenance(base).items() if place not in ("default", "preset")]
    if "model.name" in moved:  # the sizes of the model before, and how its layers were split
        sizes = [key for key in given if key.startswith("model.") and key.split(".")[1] in SIZES]
        split = [key for key in given if key == "parallelism.layer_split"]
        out = dict.fromkeys([*sizes, *split]) | out
    usual = LIBRARIES.get(shown["cluster.device"]) == shown["variability.library"]
    if "cluster.device" in moved and "variability.library" not in moved and usual:
        out["variability.library"] = LIBRARIES.get(moved["cluster.device"], "none")
    now = shown | moved
    sizes_of = [now[f"parallelism.{key}"] for key in REPLICA]
    n, each = now[GPUS], now["cluster.gpus_per_node"]
    if not all(isinstance(x, int) and x > 0 for x in (*sizes_of, n, each)):
        return out
    dp, nodes = max(1, n // math.prod(sizes_of)), -(-n // each)
    if dp != base.parallelism.dp:
        out["parallelism.dp"] = dp
    if nodes != base.n_nodes or ("model.name" in moved and base.cluster.nodes is None):
        out["cluster.nodes"] = nodes
    return out


def build(base: Job, changed: Values) -> Job:
    """Make the job that the controls describe; raises PrismError with a line per fault."""
    now = values_of(base) | dict(changed)
    faults = list(_gpu_faults(now))
    try:
        texts = override_texts(overrides(base, changed))
        job = load_job(base.source, texts) if texts else base
    except PrismError as error:
        faults += [
            line for line in error.args if not (faults and f": {'*'.join(GPUS_OF_JOB)} = " in line)
        ]
    if faults:
        raise PrismError(*faults)
    return job


def _gpu_faults(now: Values) -> Iterator[str]:
    """Say where a number of GPUs is not of whole replicas and whole nodes."""
    n, each = now[GPUS], now["cluster.gpus_per_node"]
    if not isinstance(n, int) or n < 1:
        yield f"{GPUS}: expected a whole number of GPUs, at least 1, got {n}; give one"
        return
    sizes = [now[f"parallelism.{key}"] for key in REPLICA]
    if all(isinstance(x, int) and x > 0 for x in sizes):
        yield from _undivided(n, math.prod(sizes), f"replicas of {'*'.join(REPLICA)}")
    if isinstance(each, int) and each > 0:
        yield from _undivided(n, each, "nodes of gpus_per_node")


def _undivided(n: int, size: int, what: str) -> Iterator[str]:
    if n % size:
        low = n // size * size
        take = f"{low:,} or {low + size:,}" if low else f"{size:,}"
        yield f"{GPUS}: {format_count(n, 'GPU')} are not whole {what} = {size:,}; take {take}"


def override_texts(changed: Values) -> list[str]:
    """Write overrides as ``--set`` takes them."""
    return [f"{key}={_yaml(value)}" for key, value in changed.items()]


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def job_file(base: Job, changed: Values) -> str:
    """Write a job file of what differs from the job that was started from."""
    tree: dict[str, Any] = {}
    for key, value in changed.items():
        *path, last = key.split(".")
        block = tree
        for name in path:
            block = block.setdefault(name, {})
        block[last] = value
    return "\n".join([f"base: {_name(base)}", *_lines(tree, "")]) + "\n"


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    out = []
    for key, value in tree.items():
        if isinstance(value, dict):
            out += [f"{indent}{key}:", *_lines(value, f"{indent}  ")]
        else:
            out.append(f"{indent}{key}: {_yaml(value)}")
    return out


def command(verb: str, base: Job, changed: Values, *options: str) -> str:
    """Write the command that gives an answer of the page."""
    sets = [word for text in override_texts(changed) for word in ("--set", text)]
    return " ".join(map(shlex.quote, ["prism", verb, _name(base), *sets, *options]))


def _name(base: Job) -> str:
    """Return the name of a shipped job, or the path of another one's file."""
    shipped = base.name in shipped_jobs() and load_job(base.name).source == base.source
    return base.name if shipped else base.source


# ------------------------------------------------------------------------------------- messages
def place_messages(error: PrismError | str) -> dict[str, list[str]]:
    """Sort messages by the control that can correct them; those of no control are under ""."""
    found: dict[str, list[str]] = {}
    for line in str(error).splitlines():
        text = re.sub(r"^--set \S+: ", "", re.sub(r"^overrides \S+: ", "", line))
        key = next((k for k in (*KEYS, *_FOLLOWS) if text.startswith(f"{k}: ")), "")
        if not key:
            key = next((k for k in KEYS if re.search(rf"\b{re.escape(k)}\b", line)), "")
        found.setdefault(_FOLLOWS.get(key, key), []).append(text)
    return found
