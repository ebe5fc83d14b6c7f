"""The answer of a sweep: the fastest and the robust setting, and all that are as good."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prism import plots
from prism.analyses.sweeps.swept import CHOICES, Sweep, key_name, label
from prism.common.text import format_count, format_like, format_share
from prism.present.answer import Answer, Errors, Picture
from prism.present.answers.sweepruns import RULES as RUN_RULES
from prism.present.answers.sweepruns import RUN_COLUMNS, break_even_table, by_run, run_cells
from prism.present.answers.times import NOT_INCLUDED
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    change,
    count,
    error,
    half_width,
    share,
    words,
)
from prism.present.tables import Rule, find

MOST_ROWS = 12  # settings in the first table, where not more of them are marked
MOST_NAMED = 3
MOST_REASONS = 5
SIGNIFICANT = 1.96
LEAST_SURE = 0.9  # probability of a right choice below which there is a warning [1]
KEY = "varied"  # group of the columns of varied keys, until they stand in a table
STEP = "step time"
TOLERANCE = 0.001  # share of a figure that does not matter
POWER_KEYS = {
    f"cluster.{key}"
    for key in ("power_limit_w", "clock_mhz", "throttled_share", "throttled_power_w")
}


def sweep_answer(result: Sweep) -> Answer:
    """Make the answer of a sweep."""
    numbers = result.figures()
    rows, keys, chosen = numbers["rows"], numbers["varied"], _chosen(numbers)
    shown = shown_rows(numbers)
    rest = [i for i, row in enumerate(rows) if row["p50"] is not None and i not in shown]
    made = (
        _settings_table("Settings", numbers, shown),
        _by_setting(numbers),
        break_even_table(numbers),
        _refused(numbers),
        _settings_table("Other simulated settings", numbers, rest, details=True),
        _why(numbers, [*shown, *rest]),
    )
    asked = _varied(json.loads(result.attrs["call"]), keys)
    aim = "run in the mean" if by_run(numbers) else "step, in the median and at p95"
    return Answer(
        title="Settings side by side",
        subject=str(numbers["job"]),
        head=_head(numbers),
        question=f"Which setting of {numbers['job']} has the shortest {aim}? "
        f"Varied: {asked}.",
        findings=find(numbers, (*RUN_RULES, *RULES)),
        tables=tuple(table for table in made if table.rows),
        figures=numbers,
        warnings=(*numbers["warnings"], *_unsure(numbers)),
        assumptions=tuple(numbers["notes"]),
        facts=tuple(
            (f"{label(rows[i], keys)}, {measure}", _time(rows[i], f"{measure}_same_work"))
            for i, measure in ((i, CHOICES[name]) for name, i in chosen.items())
        ),
        pictures=(Picture(
            "sweep", f"Settings of {numbers['job']}: p50 of the step against p95",
            lambda: plots.plot_sweep(result),
            "Down and to the left is better; nothing lies below and left of the frontier. Bars are "
            "two standard errors.",
            Errors(f"p95 of the first row ± {words(_error(rows[0]))} (95 %)", NOT_INCLUDED),
        ),),
    )  # fmt: skip


def _chosen(numbers: Json) -> dict[str, int]:
    """Return the rows of `CHOICES`; none where no setting is likely to fit."""
    return {name: numbers[name] for name in CHOICES if numbers[name] is not None}


def _head(numbers: Json) -> str:
    rows = numbers["rows"]
    run = sum(row["p50"] is not None for row in rows)
    simulated = f" ({format_count(run)} simulated)" if run < len(rows) else ""
    return f", {format_count(len(rows), 'setting')}{simulated}, seed {numbers['seed']}"


def _varied(call: Json, keys: Sequence[str]) -> str:
    """Say which keys took which values."""
    named = [f"{key} = {', '.join(values)}" for key, values in call.get("vary", {}).items()]
    if call.get("layouts"):
        named.append("all layouts that use its GPUs, keep its batch and fit the memory")
    return "; ".join(named) or ", ".join(keys)


# ------------------------------------------------------------------------------ in sentences
def _closest(numbers: Json) -> str:
    """Name the setting that is most likely to fit."""
    row = max(numbers["rows"], key=lambda row: (row.get("memory") or {}).get("p_fits", 0.0))
    return f"{label(row, numbers['varied'])}, {_memory(row)}"


def _ties(numbers: Json) -> list[str]:
    """Name the settings that are as good as the best."""
    rows, keys = numbers["rows"], numbers["varied"]
    return [label(row, keys) for row in rows if row.get("indistinguishable_from_best")]


def _faster(numbers: Json) -> list[str]:
    """Name those that are faster than the robust one but hardly fit, the fastest first."""
    rows, keys, p95 = numbers["rows"], numbers["varied"], "p95_same_work"
    least = rows[numbers["robust"]][p95]
    some = [r for r in rows if not _fits(r) and r["p95"] is not None and r[p95] < least]
    return [f"{label(row, keys)}, {_memory(row)}" for row in sorted(some, key=lambda r: r[p95])]


def _listed(names: Sequence[str], most: int) -> str:
    """List the first names, and say how many more there are."""
    more = len(names) - most
    return "; ".join(names[:most]) + f"; and {more} more" * (more > 0)


def _fits(row: Json) -> bool:
    """Whether a setting is likely to fit; so are all where the memory is not known."""
    return bool(row.get("likely_fits", True))


def _memory(row: Json) -> str:
    """Write the memory of a setting, of the GPU's, and the probability that it fits."""
    memory = row["memory"]
    text = f"{memory['gib']:.0f} of {memory['limit_gib']:.1f} GiB"
    return f"{text}, P(fits) {words(share(memory['p_fits']))}"


def _setting(numbers: Json, name: str) -> dict[str, Cell]:
    """Name a chosen setting with p50 and p95, and their changes against the job's own."""
    row = numbers["rows"][numbers[name]]
    own = "the job's own setting, " if row["own"] else ""
    p50, p95 = (words(_time(row, f"{measure}_same_work")) for measure in ("p50", "p95"))
    text = f"{own}{label(row, numbers['varied'])}: p50 {p50}, p95 {p95}"
    if row.get("memory") and row["memory"]["p_fits"] < LEAST_SURE:
        text += f", {_memory(row)}"
    if row.get("p50_change") is not None:
        changes = " and ".join(words(_change(row, measure)) for measure in ("p50", "p95"))
        text += f" ({changes} against the job's own)"
    return {"setting": text}


RULES = (
    Rule("none_fits", "answer", lambda n: not _chosen(n),
         "No setting has P(fits) of {wanted} or more; closest is {closest}.",
         lambda n: {"wanted": format_share(n["min_p_fits"]), "closest": _closest(n)}),
    Rule("least_carbon", "answer",
         lambda n: bool(_chosen(n)) and n["objective"] == "carbon" and n["best"] is not None,
         "Least carbon is {setting}: {kg} of CO2e a step; the fastest emits {fastest}.",
         lambda n: {"setting": label(n["rows"][n["best"]], n["varied"]),
                    "kg": _carbon(n["rows"][n["best"]]),
                    "fastest": _carbon(n["rows"][n["fastest"]])}),
    Rule("done_by", "answer",
         lambda n: bool(_chosen(n)) and n["objective"] == "done_by" and n["best"] is not None,
         "Most likely done by its deadline is {setting}: P(done) {p}.",
         lambda n: {"setting": label(n["rows"][n["best"]], n["varied"]),
                    "p": share(n["rows"][n["best"]]["p_done"])}),
    Rule("fastest_and_robust", "answer",
         lambda n: bool(_chosen(n)) and n["fastest"] == n["robust"] and not by_run(n),
         "Fastest and robust (least p50 and p95) is {setting}.", lambda n: _setting(n, "robust")),
    Rule("fastest", "answer", lambda n: n["fastest"] != n["robust"] and not by_run(n),
         "Fastest (least p50) is {setting}.", lambda n: _setting(n, "fastest")),
    Rule("robust", "answer", lambda n: n["fastest"] != n["robust"] and not by_run(n),
         "Robust (least p95) is {setting}.", lambda n: _setting(n, "robust")),
    Rule("indistinguishable", "info",
         lambda n: bool(_chosen(n) and _ties(n) and not n.get("break_even")),
         "Statistically indistinguishable from the best in {objective}: {ties}.",
         lambda n: {"objective": n["objective"], "ties": _listed(_ties(n), MOST_NAMED)}),
    Rule("does_not_fit", "info", lambda n: bool(_chosen(n) and _faster(n)),
         "Faster, but P(fits) is too low: {faster}.", lambda n: {"faster": _listed(_faster(n), 1)}),
)  # fmt: skip


def _unsure(numbers: Json) -> list[str]:
    """Say which choice the simulated steps do not carry."""
    return [
        f"that no setting has a {measure} better by 0.1 % than the {name} one is certain to "
        f"{format_share(float(numbers['p_correct'][name]), 2)} only; raise --replicates"
        for name, measure in ((name, CHOICES[name]) for name in _chosen(numbers))
        if float(numbers["p_correct"][name]) < LEAST_SURE
    ]


# --------------------------------------------------------------------------------- in tables
def shown_rows(numbers: Json) -> list[int]:
    """Choose the rows of the first table: the best ones, the frontier and the job's own."""
    rows = numbers["rows"]
    must = {*_chosen(numbers).values(), *numbers["frontier"]}
    must |= {numbers["best"]} - {None}
    must |= {i for i, row in enumerate(rows) if row["own"]}
    rest = [i for i, row in enumerate(rows) if i not in must and row["p50"] is not None]
    return sorted([*must, *rest[: max(0, MOST_ROWS - len(must))]])


def _keys(numbers: Json, which: Sequence[int]) -> tuple[Column, ...]:
    """Head the columns of the varied keys."""
    rows = numbers["rows"]
    return tuple(
        Column(key_name(key), KEY, all(isinstance(rows[i][key], int | float) for i in which))
        for key in numbers["varied"]
    )


def _settings_table(
    title: str, numbers: Json, which: Sequence[int], details: bool = False
) -> Table:
    """Lay out settings with their times."""
    rows = numbers["rows"]
    one_size = len({row["world_size"] for row in rows}) == 1
    columns = (
        *_keys(numbers, which), Column("GPUs"), Column("GiB"), Column("P(fits)"),
        *(Column(name, STEP) for name in ("p50", "p95", "± 95 %")),
        Column("p95 vs own"), *RUN_COLUMNS,
        Column("GPU energy"), Column("CO2e"), Column("P(done)"),
        Column(right=False),
    )  # fmt: skip
    made: list[tuple[Cell, ...]] = [
        (*(_value(row[key]) for key in numbers["varied"]),
         None if one_size else count(row["world_size"]), *_fit_cells(row),
         _time(row, "p50_same_work"), _time(row, "p95_same_work"), _error(row),
         _change(row, "p95"), *run_cells(row), _energy(row, numbers), _carbon(row),
         share(row.get("p_done")),
         _marks(i, row, numbers))
        for i, row in ((i, rows[i]) for i in which)
    ]  # fmt: skip
    return _table(title, columns, made, () if details else _notes(numbers), details)


def _table(
    title: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]],
    notes: tuple[str, ...], details: bool,
) -> Table:  # fmt: skip
    """Make a table without columns of nothing or zeros, and without keys that are all the same."""
    kept, same = [], []
    for k, column in enumerate(columns):
        values = {cell.value if isinstance(cell, Figure) else cell for cell in (r[k] for r in rows)}
        if column.group in (KEY, STEP) and len(values) == 1 < len(rows) and values != {None}:
            name = f"{column.group.removeprefix(KEY)} {column.title}".strip()
            same.append(f"{name} {words(rows[0][k])}")
        elif any(values):
            kept.append(k)
    heads = tuple(replace(columns[k], group=columns[k].group.removeprefix(KEY)) for k in kept)
    some = tuple(tuple(row[k] for k in kept) for row in rows)
    if same:
        notes = (f"in every row: {', '.join(same)}", *notes)
    return Table(title, heads, some, notes, details)


def _value(value: Any) -> Cell:
    return Figure(value, str(value)) if isinstance(value, int | float) else str(value)


def _fit_cells(row: Json) -> tuple[Cell, Cell]:
    if not (memory := row.get("memory")):
        return None, None
    return Figure(memory["gib"], f"{memory['gib']:.0f}"), share(memory["p_fits"])


def _energy(row: Json, numbers: Json) -> Cell:
    """Write the energy of a step's GPUs, for the same work, where their power is varied."""
    kwh = row.get("gpu_kwh")
    if kwh is None or not POWER_KEYS & set(numbers["varied"]):
        return None
    return Figure(kwh, f"{kwh / row['work']:,.4g} kWh")


def _carbon(row: Json) -> Cell:
    """Write what a step emits, for the same work, where the grid is stated."""
    kg = row.get("carbon_same_work")
    return None if kg is None else Figure(kg, f"{kg:,.4g} kg")


def _marks(i: int, row: Json, numbers: Json) -> str:
    """Say what a row is."""
    names = [name for name in CHOICES if numbers[name] == i and not by_run(numbers)]
    if not _fits(row):
        return ", ".join(["P(fits) too low", *["job's own"] * bool(row["own"])])
    least = {"mean": "least mean", "carbon": "least carbon", "done_by": "likeliest",
             "time_to_train": "shortest run"}  # fmt: skip
    if numbers["objective"] in least and numbers["best"] == i:
        names.append(least[numbers["objective"]])
    if row.get("indistinguishable_from_best"):
        names.append("indistinguishable")
    elif row.get("best_change") is not None and row["best_change"] <= TOLERANCE:
        names.append(f"within {format_share(TOLERANCE)}")
    if i in numbers["frontier"] and not names and not by_run(numbers):
        names.append("frontier")
    return ", ".join([*names, *["job's own"] * bool(row["own"])])


def _notes(numbers: Json) -> tuple[str, ...]:
    """Explain what is not plain, and say what was not simulated."""
    rows = numbers["rows"]
    bounds = sum(row["p50"] is None for row in rows)
    notes = {
        f"indistinguishable: {numbers['objective']} differs from the best by less than the error "
        "of the difference (95 %)": any(row.get("indistinguishable_from_best") for row in rows),
        "frontier: no setting is better in both p50 and p95":
            any("frontier" in _marks(i, row, numbers) for i, row in enumerate(rows)),
        "times are for the tokens of one step of the job":
            any(abs(row["work"] - 1.0) > 1e-9 for row in rows),
        f"P(fits) too low: below {format_share(numbers['min_p_fits'])} by the error of the memory "
        "estimate; not chosen": not all(map(_fits, rows)),
        f"{format_count(bounds)} not simulated: slower even without noise": bounds > 0,
    }  # fmt: skip
    said = "; ".join(note for note, holds in notes.items() if holds)
    return (said,) if said else ()


def _by_setting(numbers: Json) -> Table:
    """Lay out the best layout of each setting varied by hand."""
    rows, groups = numbers["rows"], numbers.get("by_setting") or ()
    hand = [key for key in numbers["varied"] if groups and key in groups[0]]
    rest = [key for key in numbers["varied"] if key not in hand]
    columns = [Column(key_name(key), right=False) for key in hand]
    columns += [Column("robust layout", right=False), Column("p50"), Column("p95")]
    made = []
    for group in groups:
        cells: tuple[Cell, ...] = ("none fits", None, None)
        if group["robust"] is not None:
            best = rows[group["robust"]]
            times = (_time(best, f"{measure}_same_work") for measure in ("p50", "p95"))
            cells = (label(best, rest), *times)
        made.append((*(_value(group[key]) for key in hand), *cells))
    return Table("Best layout of each setting", tuple(columns), tuple(made))


def _refused(numbers: Json) -> Table:
    """Lay out why settings were refused, the commonest reasons first."""
    refused = numbers["refused"]
    kinds = Counter(_kind(row["reason"]) for row in refused).most_common(MOST_REASONS)
    asked = len(refused) + len(numbers["rows"])
    title = f"Refused: {format_count(len(refused))} of {format_count(asked, 'setting')}"
    columns = (Column("settings"), Column("reason", right=False))
    return Table(title, columns, tuple((count(n), kind) for kind, n in kinds))


def _kind(reason: str) -> str:
    """Put reasons that differ in their numbers together."""
    if reason.startswith("needs ") and " GiB" in reason:
        return "need too much:" + reason[reason.index(":") + 1 :]
    return reason


def _why(numbers: Json, which: Sequence[int]) -> Table:
    """Lay out what the steps are made of, and on how many cluster draws they were simulated."""
    heads = ("ideal step", "exposed communication", "MFU", "cluster draws")
    columns = (*_keys(numbers, which), *map(Column, heads))
    made = [
        (*(_value(row[key]) for key in numbers["varied"]),
         Figure(row["ideal_step_time"], words(_time(row, "ideal_step_time", row["work"]))),
         share(row.get("exposed_communication")), share(row.get("mfu")), count(row["clusters"]))
        for row in (numbers["rows"][i] for i in which)
    ]  # fmt: skip
    note = (
        "settings that are worse than another in p50 and p95 are simulated on few cluster draws; "
        f"rare slow GPUs then come from the ranks of {format_count(numbers['rank_clusters'])}"
    )
    screened = any(row["figures"] == "screen" for row in numbers["rows"])
    return _table("Ideal step and communication", columns, made, (note,) * screened, True)


# ------------------------------------------------------------------------------- as figures
def _time(row: Json, key: str, work: float = 1.0) -> Figure:
    """Write a time of a setting [s], for the same work."""
    like = float(row["p50_same_work"])
    fine = max(1e-3 * like, 0.3 * float(row["p95_se"] or 0.0) / float(row["work"]))
    return Figure(row[key], format_like(float(row[key]) / work, like, fine))


def _error(row: Json) -> Cell:
    """Write half of the 95 % interval of p95, for the same work."""
    half = half_width(row["p95_se"], row["clusters"])
    if half is None:
        return None
    text = words(error(half / float(row["work"]), float(row["p95_same_work"])))
    return Figure(row["p95_se"], text)


def _change(row: Json, measure: str) -> Cell:
    """Write the change against the job's own setting, with half of its 95 % interval."""
    value, se = row.get(f"{measure}_change"), row.get(f"{measure}_change_se")
    half = SIGNIFICANT * (se or 0.0)
    return None if value is None else change(value, (value - half, value + half))
