"""What the answer of `prism place` looks like in a terminal.

Built from the mapping that the JSON is made of, as in `prism.present.views.rank`: advice first,
then one table of placements and alternatives, then what it rests on. Nothing is computed here
beyond the choice of a unit and changes against as is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prism.analyses.texts.place import assumed, entry, findings, objective_name, rows
from prism.common.text import format_duration, format_like, percent_change
from prism.present.views.tables import bold

Json = Mapping[str, Any]

WIDTH = 110
LONGEST_LABEL = 58


def place_view(numbers: Json) -> RenderableType:
    """Lay out where slow nodes should go.

    Parameters
    ----------
    numbers : mapping
        What ``summarize_place`` returns, the JSON of ``prism place``.

    Returns
    -------
    rich.console.RenderableType
        Advice, the table, why some alternatives are impossible, and what was assumed.
    """
    found = rows(numbers)
    told = list(dict.fromkeys(numbers.get("findings") or findings(numbers)))
    parts: list[RenderableType] = [*_head(numbers), ""]
    parts += [_wrapped(f"- {line}") for line in told]
    parts += ["", _table(found, numbers)]
    objective = str(numbers.get("objective"))
    parts += [_wrapped(line) for line in _legend(found, objective)]
    impossible = [row for row in found if row.get("impossible")]
    if impossible:
        parts += ["", bold("Not possible")]
        parts += [_wrapped(f"- {row['label']}: {row['impossible']}") for row in impossible]
    if numbers.get("notes"):
        parts += ["", bold("Taken for granted")]
        parts += [_wrapped(f"- {note}") for note in numbers["notes"]]
    if numbers.get("wall_seconds") is not None:
        parts += ["", f"in all {format_duration(numbers['wall_seconds'], 0.1)}"]
    return Group(*parts)


def _head(numbers: Json) -> list[RenderableType]:
    """Say which nodes are slow, and what is sought."""
    head = ": where slow nodes should go"
    if numbers.get("seed") is not None:
        head += f", seed {numbers['seed']}"
    lines: list[RenderableType] = [bold(str(numbers["job"]), head)]
    lines += [_wrapped(line) for line in assumed(numbers)]
    return lines


def _table(found: Sequence[Json], numbers: Json) -> Table:
    """Lay out placements and alternatives side by side."""
    now = entry(numbers, "current")
    key = str(numbers.get("objective", "p95"))
    objective_only = key not in ("mean", "p50", "p95", "p99")
    keys = ["p50", "p95"] + [key] * (key in ("mean", "p99"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    titles = [objective_name({"objective": name}) for name in keys]
    titles += [objective_name(numbers)] * objective_only
    titles.append(f"{objective_name(numbers)}\nsame work")
    for title in titles:
        table.add_column(
            f"\n{title}" if "\n" not in title else title, justify="right", no_wrap=True
        )
    shown = [row for row in found if not row.get("impossible")]
    keys += ["objective"] * objective_only
    fine = {name: _resolution(shown, name) for name in keys}
    for row in shown:
        cells = [_time(row, name, fine[name], now) for name in keys]
        table.add_row(_cut(str(row["label"])), *cells, _change(row, now))
    return table


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 3] + "..."


def _resolution(found: Sequence[Json], key: str) -> float:
    """Choose the smallest difference worth showing in a column [s]."""
    values = [float(row[key]) for row in found if row.get(key) is not None]
    # others than p95 are known no worse
    errors = [float(row["p95_se"]) for row in found if row.get("p95_se") is not None]
    return max(2e-3 * max(values, default=0.0), 0.2 * min(errors, default=0.0))


def _time(row: Json, key: str, fine: float, like: Json) -> str:
    """Write a time with the digits of its column, in the unit of its row as is."""
    value = row.get(key)
    if value is None:
        return ""
    return format_like(float(value), float(like.get(key) or value), fine)


def _change(row: Json, now: Json) -> str:
    """Write the change of the objective against as is, for the same work."""
    if row.get("name") == now.get("name") or row.get("saved") is None:
        return ""
    return percent_change(-float(row["saved"]), row.get("saved_ci"))


def _legend(found: Sequence[Json], objective: str) -> list[str]:
    """Explain what is not plain."""
    text = "same work: against as is, per token where the batch is another; ± half of 95 %"
    random = next((row for row in found if row.get("name") == "random"), {})
    key = objective if f"p5_of_{objective}" in random else "objective"
    if random.get(f"p5_of_{key}") is not None:
        low, high = (float(random[f"{p}_of_{key}"]) for p in ("p5", "p95"))
        fine = max(1e-3 * low, 0.1 * (high - low))
        both = " to ".join(format_like(value, low, fine) for value in (low, high))
        text += f". Placed at random: the mean over placements; 90 % of them lie at {both}"
    return [text]


def _wrapped(text: str) -> RenderableType:
    """Text that breaks at the width of the table."""
    # a number keeps its unit
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    text = text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "))
