"""A job as a file to start from: every key with what it means, its unit and where it came from.

What the job sets stands as YAML, what follows from it (presets, defaults) as comments, so that
the file loads to the same job and shows what else could be said. Left out: the `base` chain, of
which the file is the sum, and the comments of the files it came from.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from prism.common.text import format_count
from prism.jobs.job import Job, provenance
from prism.jobs.jobspec.blocks import BLOCKS
from prism.present.answers.job import DURATION_KEYS

_WIDTH = 96
_UNITS = ((604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "min"))
# What a plain scalar may look like without being read as a number, a truth value or null.
_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|~)$)[A-Za-z/][\w./-]*", re.IGNORECASE)


def job_yaml(job: Job) -> str:
    """Write a job as a commented YAML file that loads back to the same job.

    Its values stand plainly, each with the file and line or the ``--set`` it came from; presets and
    defaults stand as comments.

    Examples
    --------
    >>> from prism.jobs.job import load_job
    >>> text = job_yaml(load_job("pipeline-8x32", ["run.deadline=2d"]))
    >>> [line for line in text.splitlines() if "deadline" in line]
    ['  deadline: 2d  # --set']
    """
    sources = provenance(job)
    lines = [
        f"# {job.name}: {format_count(job.world_size, 'GPU')}.",
        "# Lines without a # are the job; lines such as `# key: value` are derived values, presets",
        "# and defaults: remove the # to change them. [Units and defaults] are in brackets.",
        "# Check this file with: prism show THIS_FILE",
    ]
    for block in BLOCKS:
        description = type(job).model_fields[block].description
        lines += ["", f"# {description}", f"{block}:"]
        lines += _block(getattr(job, block), (block,), sources)
    return "\n".join(lines) + "\n"


def _block(block: BaseModel, path: tuple[str, ...], sources: dict[str, str]) -> Iterator[str]:
    """Lines of one block's keys, indented by their depth."""
    indent = "  " * len(path)
    for name, field in type(block).model_fields.items():
        value, here = getattr(block, name), (*path, name)
        dotted = ".".join(here)
        if dotted == "variability.library" and value is None:
            value = "none"  # null would be the default
        found = {s for key, s in sources.items() if key == dotted or key.startswith(f"{dotted}.")}
        origin = next((s for s in sorted(found) if s not in ("default", "preset")), None)
        if value is None and name == "durations":
            continue
        comment = textwrap.wrap(field.description or "", _WIDTH - len(indent) - 2)
        yield from (f"{indent}# {line}" for line in comment)
        if isinstance(value, BaseModel) and origin is not None:
            yield f"{indent}{name}:"
            yield from _block(value, here, sources)
        elif origin is not None:
            place = origin if origin.startswith("--") else re.split(r"[\\/]", origin)[-1]
            yield f"{indent}{name}: {flow(written(value, dotted))}  # {place}"
        else:
            from_preset = "  # the named model's" if "preset" in found else ""
            text = "" if value is None else f" {flow(written(value, dotted))}"
            yield f"{indent}# {name}:{text}{from_preset}"


def written(value: Any, dotted: str) -> Any:
    """Bring a value to what YAML holds; lengths of time to the largest whole unit."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if dotted in DURATION_KEYS and isinstance(value, float):
        whole = [f"{value / size:.0f}{unit}" for size, unit in _UNITS if value % size == 0]
        return whole[0] if whole else value
    if isinstance(value, dict):
        return {key: written(item, "") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [written(item, "") for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


def flow(value: Any) -> str:
    """Write a value on one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, str) and not (
        _PLAIN.fullmatch(value) or re.fullmatch(r"\d+(w|d|h|min)", value)
    ):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
