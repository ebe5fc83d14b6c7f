"""What a library made of a recording looks like in a terminal: kernels, collectives, links.

Built from the mapping that the JSON is made of, as in `prism.present.views`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from prism.common.text import format_count, format_duration, format_share
from prism.present.views.tables import lines_view, table_view
from prism.present.views.trace import fit_view

Json = Mapping[str, Any]


def describe_table(what: str) -> tuple[dict[str, Any], RenderableType]:
    """Describe a table of kernels, or output of nccl-tests, by the library it makes."""
    from prism.models.fit import fit, summarize_fit

    numbers = summarize_fit(fit(what))
    found = {**numbers, "kind": "collectives" if "collectives" in numbers else "kernels"}
    return found, library_view(numbers)


def library_view(summary: Json) -> RenderableType:
    """Lay out a library that `prism fit` made."""
    if "collectives" in summary:
        return _collectives_view(summary)
    classes = [
        {
            "class": row["name"],
            "n": format_count(row["n"]),
            "CV over each kernel's mean": "" if row["cv"] is None else format_share(row["cv"]),
            "p99/p50": "" if row["p99_p50"] is None else f"{row['p99_p50']:.3f}",
            "share of time": format_share(row["step_share"]),
        }
        for row in sorted(summary.get("classes") or (), key=lambda row: -row["step_share"])
    ]
    right = ("n", "CV over each kernel's mean", "p99/p50", "share of time")
    return Group(fit_view(summary), "", table_view("Classes of kernels", classes, right))


def _collectives_view(summary: Json) -> RenderableType:
    """Lay out latency and bandwidth of collectives, and the links they suggest."""
    rows = [_collective(row) for row in summary["collectives"]]
    right = ("hosts", "GPUs", "times", "latency", "90 %", "bus GB/s", "90 % ", "CV of repeats")
    parts: list[RenderableType] = [
        Text(", ".join(map(str, summary["inputs"])), style="bold"), "",
        table_view("Collectives: time = latency + bytes of the bus / bandwidth", rows, right),
    ]  # fmt: skip
    lines = [
        f"    {tier}: {{{', '.join(f'{key}: {value:g}' for key, value in link.items())}}}"
        for tier, link in summary["links"].items()
    ]
    if lines:
        parts += ["", Text("For a job's file", style="bold"), Text("cluster:"), Text("  links:")]
        parts += [Text(line) for line in lines]
    parts += lines_view("Not to be learned from this input", summary.get("not_identifiable"))
    parts += lines_view("Notes", summary.get("notes"))
    return Group(*parts)


def _collective(row: Json) -> dict[str, str]:
    """One collective."""
    low, high = row["latency_ci"]
    slow, fast = row["bus_ci"]
    off = row["off_the_line"]
    return {
        "collective": row["name"], "hosts": str(row["hosts"]), "GPUs": str(row["gpus"] or ""),
        "times": format_count(row["n"]), "latency": format_duration(row["latency_s"]),
        "90 %": f"{1e6 * low:.3g} to {1e6 * high:.3g} us",
        "bus GB/s": "" if row["bus_bytes_per_s"] is None else f"{row['bus_bytes_per_s'] / 1e9:.4g}",
        "90 % ": "" if slow is None else f"{slow / 1e9:.4g} to {fast / 1e9:.4g}",
        "off the line": ", ".join(f"{name} {format_share(x)}" for name, x in off.items()),
        "CV of repeats": "" if row["repeat_cv"] is None else format_share(row["repeat_cv"]),
    }  # fmt: skip
