"""What a sweep says of runs: time-to-train by setting, and the failure rates of break-even."""

from __future__ import annotations

from prism.analyses.sweeps.swept import label
from prism.present.cells import (
    Cell,
    Column,
    Json,
    Table,
    duration,
    error,
    half_width,
    number,
    words,
)
from prism.present.tables import Rule

RUN_COLUMNS = tuple(Column(name, "time-to-train") for name in ("mean", "± 95 %", "p95"))


def by_run(numbers: Json) -> bool:
    """Tell whether settings are compared by the time-to-train."""
    return bool(numbers["objective"] == "time_to_train")


def run_cells(row: Json) -> tuple[Cell, Cell, Cell]:
    """Write mean, half of its 95 % interval and p95 of the time-to-train [s]."""
    run = row.get("time_to_train")
    if run is None:
        return None, None, None
    half = half_width(run["mean_se"], run["cluster_draws"])
    mean, p95 = (duration(run[name], half and 0.0999 * half) for name in ("mean", "p95"))
    return mean, error(half, run["mean"]), p95


def _shortest(numbers: Json) -> dict[str, Cell]:
    """Name the setting with the shortest mean run."""
    row = numbers["rows"][numbers["best"]]
    mean, half, _ = run_cells(row)
    return {
        "setting": label(row, numbers["varied"]),
        "time": words(mean) + (f" ± {words(half)} (95 %)" if half else ""),
    }


def _evens(numbers: Json) -> list[str]:
    """Say at which rates another setting becomes the best."""
    said = []
    for even in numbers.get("break_even", ()):
        low, high = (words(number(even[f"rate_{end}"], ".3g")) for end in ("low", "high"))
        within = f"{low} to {high}" if low else f"at most {high}"
        below, above, rate = even["below"], even["above"], words(number(even["rate"], ".3g"))
        said.append(
            f"Below {rate} failures per 1,000 node-days ({within}; MTTF of the job "
            f"{words(duration(even['mttf']))}) the shortest mean run is {below}, above {above}"
            if rate else f"No break-even from {low} to {high} failures per 1,000 node-days: "
            f"nothing is clearly shorter in the mean than {below}"
        )  # fmt: skip
    return said


RULES = (
    Rule("break_even", "answer", lambda n: bool(n.get("break_even")),
         "{evens}.", lambda n: {"evens": "; ".join(_evens(n))}),
    Rule("shortest_run", "answer",
         lambda n: by_run(n) and n["best"] is not None and not n.get("break_even"),
         "Shortest mean run is {setting}: {time}.", _shortest),
)  # fmt: skip


def break_even_table(numbers: Json) -> Table:
    """Lay out at which failure rates another setting becomes the best."""
    columns = (
        *(Column(name, right=False) for name in ("shortest mean run below", "above")),
        *map(Column, ("rate", "95 % from", "to", "MTTF of the job")),
    )
    made = tuple(
        (even["below"], even["above"], *(number(even[key], ".3g") for key in
         ("rate", "rate_low", "rate_high")), duration(even["mttf"]))
        for even in numbers.get("break_even", ()) if even["rate"] is not None
    )  # fmt: skip
    return Table("Break-even", columns, made, ("rates: failures per 1,000 node-days",))
