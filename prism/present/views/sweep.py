"""What a sweep looks like in a terminal.

Built from the mapping that the JSON is made of: what is best, one table of settings, what was left
out and why. Nothing is computed here beyond the choice of a unit.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism.analyses.texts.sweep import change_text, findings, refusals, same_work_differs
from prism.common.text import format_count, format_duration, format_like, format_share
from prism.present.views.tables import bold

Json = Mapping[str, Any]

WIDTH = 110
MOST_ROWS = 16
"""Settings in the table; the summary has all."""


def sweep_view(numbers: Json) -> RenderableType:
    """Lay out a sweep.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_sweep`` returns, the JSON of ``prism sweep``.
    """
    rows = numbers["rows"]
    levels = Counter(row["figures"] for row in rows)
    run = levels["full"] + levels["screen"]
    head = f", {format_count(len(rows))} setting"
    head += "s" * (len(rows) != 1)
    head += f" ({format_count(run)} simulated)" if run < len(rows) else ""
    parts: list[RenderableType] = [
        bold(str(numbers["job"]), f"{head}, seed {numbers['seed']}"), "",
    ]  # fmt: skip
    parts += [_wrapped(f"- {line}") for line in numbers.get("findings") or findings(numbers)]
    parts += ["", _table(numbers)]
    parts += [_wrapped(line) for line in _legend(numbers, levels)]
    if numbers["refused"]:
        n_refused = len(numbers["refused"])
        asked = f"{format_count(n_refused)} of {format_count(n_refused + len(rows))} settings"
        parts += ["", bold(f"Refused: {asked}")]
        parts += [_wrapped(f"- {line}") for line in refusals(numbers)]
    if numbers["notes"]:
        parts += ["", bold("Taken for granted")]
        parts += [_wrapped(f"- {note}") for note in numbers["notes"]]
    parts += ["", f"in all {format_duration(numbers['wall_seconds'], 0.1)}"]
    return Group(*parts)


def shown_rows(numbers: Json) -> list[int]:
    """Choose the rows of the table: the best ones, the frontier and the job's own."""
    rows = numbers["rows"]
    must = {numbers["fastest"], numbers["robust"], numbers["best"], *numbers["frontier"]}
    must |= {i for i, row in enumerate(rows) if row["own"]}
    for row in numbers.get("by_setting") or ():
        must |= {row["fastest"], row["robust"]}
    rest = (i for i in range(len(rows)) if i not in must and rows[i]["p50"] is not None)
    filled = [*must, *(i for i, _ in zip(rest, range(max(0, MOST_ROWS - len(must))), strict=False))]
    return sorted(filled)


def _table(numbers: Json) -> Table:
    rows, varied = numbers["rows"], numbers["varied"]
    shown = [(i, rows[i]) for i in shown_rows(numbers)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for key in varied:
        name = key.rpartition(".")[2].replace("microbatches", "mb")
        table.add_column(name, justify="right" if _numeric(shown, key) else "left", overflow="fold")
    one_size = len({row["world_size"] for row in rows}) == 1
    memory = any(row["memory_gib"] is not None for row in rows)
    changes = any(row.get("p95_change") is not None for row in rows)
    titles = ["GPUs"] * (not one_size) + ["GiB"] * memory + ["ideal", "p50", "p95", "±"]
    titles += ["p95 change"] * changes + ["exposed"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for i, row in shown:
        cells = [str(row[key]) for key in varied]
        cells += [format_count(row["world_size"])] * (not one_size)
        cells += ["" if row["memory_gib"] is None else f"{row['memory_gib']:.0f}"] * memory
        cells += _times(row) + [change_text(row, "p95")] * changes
        cells.append(format_share(row["exposed_communication"] or 0.0, 2))
        table.add_row(*cells, _marks(i, row, numbers))
    return table


def _numeric(shown: Sequence[tuple[int, Json]], key: str) -> bool:
    return all(isinstance(row[key], int | float) for _, row in shown)


def _times(row: Json) -> list[str]:
    """Ideal, p50, p95 and the error of p95, for the same work."""
    work, like = float(row["work"]), float(row["p50_same_work"])
    error = float(row["p95_se"] or 0.0) / work
    fine = max(1e-3 * like, 0.3 * error)
    out = [format_like(float(row["ideal_step_time"]) / work, like, fine)]
    out += [format_like(float(row[f"{m}_same_work"]), like, fine) for m in ("p50", "p95")]
    return [*out, format_like(error, like, 0.099 * error or fine)]


def _marks(i: int, row: Json, numbers: Json) -> str:
    """Say what a row is."""
    names = [name for name in ("fastest", "robust") if numbers[name] == i]
    if i in numbers["frontier"] and not names:
        names.append("frontier")
    if row["own"]:
        names.append("the job's own")
    if row["figures"] == "screen":
        names.append("screened")
    return ", ".join(names)


def _legend(numbers: Json, levels: Mapping[str, int]) -> list[str]:
    """Explain what is not plain."""
    text = "±: standard error of p95, by cluster; exposed: exposed communication"
    if same_work_differs(numbers):
        text += "; times are for the tokens of one step of the job"
    if any(row.get("p95_change") is not None for row in numbers["rows"]):
        text += "; change: against the job's own under the same random numbers, ± half of 95 %"
    lines = [text + "."]
    if levels["screen"]:
        most = format_count(numbers["rank_clusters"])
        few = max(row["clusters"] for row in numbers["rows"] if row["figures"] == "screen")
        lines.append(
            f"screened: surely worse than another in p50 and p95 after {few} clusters or fewer; "
            f"rare slow GPUs, which those hardly meet, come from the ranks of {most} clusters."
        )
    bounds = levels["ideal"] + levels["work"]
    if bounds:
        lines.append(
            f"{_layouts(bounds)} not simulated: without any noise, or by what their stages compute "
            "alone, they take longer than the robust one at p95."
        )
    left = len(numbers["rows"]) - bounds - len(shown_rows(numbers))
    if left > 0:
        lines.append(f"{format_count(left)} more settings are in the summary (--json, -o).")
    return lines


def _layouts(n: int) -> str:
    return f"{format_count(n)} layouts were" if n > 1 else "1 layout was"


def _wrapped(text: str) -> RenderableType:
    """Text that breaks at the width of the table."""
    # a number keeps its unit
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "))
