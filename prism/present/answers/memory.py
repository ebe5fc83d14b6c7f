"""Where the memory of a job's GPUs goes, and what would make it fit: for several answers."""

from __future__ import annotations

from collections.abc import Sequence

from prism.common.text import format_share
from prism.present.cells import Cell, Column, Figure, Json, Table, change, share, words
from prism.workload.memory import LEAST_P_FITS, PARTS

MOST_STAGES = 6
LEAST_GIB = 0.05


def memory_text(memory: Json) -> str:
    """Write the memory of the fullest GPU with its interval, and whether it fits."""
    text = f"{memory['gib']:.0f}"
    if "ci_gib" in memory:  # saved by a version that knew it
        low, high = memory["ci_gib"]
        text += f" ({low:.0f} to {high:.0f})"
    text += f" of {memory['limit_gib']:.1f} GiB"
    return text + (f", P(fits) {words(share(memory['p_fits']))}" if "p_fits" in memory else "")


def memory_table(memory: Json | None, details: bool = False) -> Table:
    """Lay out the parts of what a GPU holds at its worst moment, by stage."""
    stages = (memory or {}).get("stages") or []
    chosen = _some(stages, (memory or {}).get("stage", 0))
    rows: list[tuple[Cell, ...]] = [
        (text, *(_gib(stage["parts"][name]) for stage in chosen))
        for name, text in PARTS.items()
        if any(stage["parts"][name] >= LEAST_GIB for stage in chosen)
    ]
    if rows:
        rows.append(("allocated by tensors", *(_gib(x["allocated_gib"]) for x in chosen)))
        rows.append(("all", *(_gib(stage["gib"]) for stage in chosen)))
    columns = [Column(right=False)]
    columns += [Column(f"stage {x['stage']}" if len(stages) > 1 else "GiB") for x in chosen]
    left = len(stages) - len(chosen)
    note = "GiB, at the worst moment of a step" + (
        f"; {left} stages between left out" if left else ""
    )
    return Table("Memory of a GPU", tuple(columns), tuple(rows), (note,), details)


def _some(stages: Sequence[Json], fullest: int) -> list[Json]:
    """Choose the first stages, the fullest and the last."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    first = [s for s in stages[: MOST_STAGES - 2] if s["stage"] != fullest][: MOST_STAGES - 3]
    chosen = {s["stage"] for s in (*first, *stages[-2:])} | {fullest}
    return [s for s in stages if s["stage"] in chosen]


def fit_table(ways: Sequence[Json]) -> Table:
    """Lay out what would make a job fit, the fastest first."""
    rows = tuple(
        (
            ", ".join(f"{key} {str(value).lower()}" for key, value in way["change"].items()),
            Figure(way["gib"], f"{way['gib']:.0f}"),
            share(way["p_fits"]),
            change(way["step_change"]),
        )
        for way in ways
    )
    columns = (Column("change", right=False), Column("GiB"), Column("P(fits)"), Column("step"))
    enough = any(way["p_fits"] >= LEAST_P_FITS for way in ways)
    note = "step: change of the ideal step; the global batch and the GPUs stay"
    if not enough:
        note += f"; none has P(fits) of {format_share(LEAST_P_FITS)} or more"
    return Table("What would make it fit", columns, rows, (note,))


def _gib(value: float) -> Cell:
    return Figure(value, f"{value:.1f}") if value >= LEAST_GIB else None
