"""Entries put in order: who wrote them, where runs begin, steps that a value covers, the unit.

Entries are a table [entry] of step, seconds and clock [s]. Where these are known it also has the
line, the file that grep names, the rank or host that a launcher names, the steps that the job is
set to (total), the samples of a step (batch).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import list_values
from prism.traces.columns import Taken
from prism.traces.steps import StepTimes, covers, usual_gap
from prism.traces.table import LONGEST_S, SHORTEST_S

_FEWEST = 4  # values of a run: below, a fit cannot separate its spread from that between runs
_BLOCKS = 20  # parts of a log, each held against the clock: pauses are in a minority of them
_AT_ONCE = 0.1  # share of a step by which lines of one step differ at most
_UNITS = {1e-3: "a thousandth", 1e3: "a thousand times"}
_UNKNOWN = {"line": 0, "file": "", "rank": "", "total": 0, "batch": 0}


def to_seconds(value: object, source: str, line: int, unit: float = 1.0) -> float:
    """Check one value; `unit` is in seconds."""
    try:
        seconds = unit * float(value) if isinstance(value, str | int | float) else float("nan")
    except (ValueError, OverflowError):
        seconds = float("nan")
    if isinstance(value, bool) or not SHORTEST_S <= seconds <= LONGEST_S:
        raise PrismError(
            f"{source}:{line}: the step time is {str(value)[:40]!r}, expected {SHORTEST_S:g} "
            f"to {LONGEST_S:g} s; take the line out if the log was damaged there"
        )
    return seconds


def wanted_run(source: str, where: Mapping[str, str] | None) -> str | None:
    """Read the run that `where` chooses: what has no columns has nothing else."""
    others = sorted({*(where or {})} - {"run"})
    if others:
        raise PrismError(
            f"{source}: --where {others[0]}: no column {others[0]}; expected --where run=NAME, "
            "or leave it out"
        )
    return (where or {}).get("run")


def split_runs(
    entries: pd.DataFrame, source: str, wanted: str | None
) -> tuple[pd.DataFrame, list[str]]:
    """Name the run of each entry, and keep those of the wanted one.

    A step number that goes back starts a run; grep's files are runs. Of ranks that write the same
    steps one is kept. Runs that are interleaved, and runs of different jobs, are refused.
    """
    entries = entries.assign(**{n: x for n, x in _UNKNOWN.items() if n not in entries})
    notes: list[str] = []
    parts, starts, twice = [], [], 0
    for file, of_file in entries.groupby("file", sort=False):
        stream = _number_runs(_once(_of_one_rank(of_file, notes), notes), source)
        kept = stream[(stream["step"].diff() != 0) | (stream["run"].diff() != 0)]
        twice += len(stream) - len(kept)
        begins = kept[kept["run"].diff() > 0]
        starts += [f"{source}:{row.line}" if row.line else f"step {row.step}"
                   for row in begins.itertuples()]  # fmt: skip
        called = {n: f"{file}/{n}" if file and n else file or str(n) for n in kept["run"].unique()}
        parts.append(kept.assign(run=kept["run"].map(called)))
    out = pd.concat(parts, ignore_index=True)
    names = list(out["run"].unique())
    if twice:
        notes.append(f"{format_count(twice, 'line')} skipped that came twice in a row")
    if starts:
        notes.append(
            f"the step number goes back {format_count(len(starts), 'time')} (first at "
            f"{starts[0]}): read as {format_count(len(names), 'run')}, named {names[0]} to "
            f"{names[-1]}"
        )
    elif len(names) > 1:
        notes.append(f"{format_count(len(names), 'run')}: {list_values(names)}")
    else:
        out["run"] = ""
    out = out[rows_of_run(out["run"], wanted, source)].reset_index(drop=True)
    return out, notes + _check_one_job(out, source)


def _of_one_rank(entries: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Keep one of the ranks that write the same steps."""
    lines = entries.groupby("rank", sort=False).size()
    first = lines.idxmax()
    mine = entries["rank"] == first
    again = entries["step"][~mine].isin(entries["step"][mine])
    if len(lines) == 1 or 2 * again.sum() <= again.size:
        return entries
    notes.append(
        f"{format_count(len(lines), 'rank')} or hosts write the same steps: those of "
        f"{first or 'the first'} are read"
    )
    return entries[mine]


def _once(entries: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Keep one line of a step that several ranks write without their names, at one moment."""
    each = int(entries.groupby("step").size().median())
    if each < 2:
        return entries
    at = pd.Series(np.arange(len(entries)), entries.index)
    first = entries.groupby("step")[["seconds", "clock"]].transform("first")
    gap = float(entries["clock"].drop_duplicates().sort_values().diff().quantile(0.9))
    late = (entries["clock"] - first["clock"]).abs() > _AT_ONCE * gap
    far = at - at.groupby(entries["step"]).transform("first") > 2 * each
    other = np.log(entries["seconds"] / first["seconds"]).abs() > _AT_ONCE
    again = entries["step"].duplicated() & ~far & ~late & ~other
    if again.sum() < (each - 1) * entries["step"].nunique() / 2:
        return entries
    notes.append(
        f"{format_count(each, 'line')} a step, written at once by ranks without names: the first "
        "of each is read"
    )
    return entries[~again]


def _number_runs(entries: pd.DataFrame, source: str) -> pd.DataFrame:
    """Split where the step number goes back; jobs of different length that are interleaved, too."""
    by_length = entries.iloc[np.argsort(pd.factorize(entries["total"])[0], kind="stable")]
    for rows in (entries, by_length):
        again = (rows["step"].diff() == 0) & (rows["seconds"].diff() == 0)
        back = (rows["step"].diff() <= 0) & ~again
        if rows is by_length:
            back |= rows["total"].diff().fillna(0) != 0
        n_runs = 1 + int(back.sum())
        if n_runs * _FEWEST <= len(rows) + _FEWEST:
            return rows.assign(run=back.cumsum())
    raise PrismError(
        f"{source}:{entries['line'].iloc[0]}: the step number goes back at {n_runs - 1} of "
        f"{format_count(len(entries), 'line')}: lines of several runs are interleaved, or a step "
        "has one for each microbatch, and nothing in them says which; expected one line a step and "
        "one run after the other; write each run to a file of its own"
    )


def rows_of_run(runs: pd.Series, wanted: str | None, source: str) -> pd.Series:
    """Choose the rows of a run; all where None is named."""
    keep = (runs == wanted) | (wanted in (None, "*"))
    if not keep.any():
        names = list_values([name for name in runs.unique() if name])
        raise PrismError(
            f"{source}: --where run={wanted}: "
            + (f"no such run; expected one of {names}" if names else "holds one run; leave it out")
        )
    return keep


def _check_one_job(entries: pd.DataFrame, source: str) -> list[str]:
    """Refuse runs of different jobs, which pooled would look like spread; notes of a longer one."""
    by_run = entries.groupby("run", sort=False)
    # a batch that grows in the course of a run is a schedule: runs may see parts of it
    batch, total = by_run["batch"].unique(), by_run["total"].last()

    def groups(of: pd.Series) -> str:
        return "; ".join(
            f"{n} (run {', '.join(x.index[:4])})" for n, x in of.groupby(of, sort=False)
        )

    if batch.map(len).max() == 1 and batch.map(min).nunique() > 1:
        raise PrismError(
            f"{source}: runs of several jobs, which pooled would look like spread; global batch "
            f"size: {groups(batch.map(min))}; choose with --where run={batch.index[0]}"
        )
    if total.nunique() > 1:
        return [f"runs are set to different numbers of steps: {groups(total)}; are they one job?"]
    return []


def in_order(
    entries: pd.DataFrame, what: Taken, source: str, notes: Sequence[str],
    interval: int | None = None,
) -> StepTimes:  # fmt: skip
    """Make step times of values whose steps ascend in each run, held against the clock.

    `interval` is the number of steps that a mean covers, where the log says it.
    """
    _check_unit(entries, source, what.column)
    run, step, seconds = (entries[name].to_numpy() for name in ("run", "step", "seconds"))
    what.check_size(seconds, source)
    sizes, usual = np.unique(np.diff(step)[run[1:] == run[:-1]]), usual_gap(run, step)
    told = list(notes)
    if not what.is_mean and usual > 1:
        told.append(f"each value is one step, of every {usual} that are logged")
    if what.is_mean and not sizes.size:
        usual = max(interval or 1, 1)
        told += ["only one value: the log interval is taken as 1"] * (interval is None)
    if what.is_mean and sizes.size > 1:
        told.append(
            f"successive values are {', '.join(map(str, sizes[:5]))} steps apart; each is "
            f"taken as the mean of {usual}, as most are"
        )
    mean_over = usual if what.is_mean else 1
    return StepTimes(
        seconds, step, run.astype(np.str_), source, what.column, mean_over,
        (*told, *covers(mean_over)), what.unit, what.why,
    )  # fmt: skip


def by_clock(entries: pd.DataFrame) -> pd.Series:
    """Step times from the clock between successive values [s]; not-a-number at a run's first."""
    gap = entries.groupby("run", sort=False)[["clock", "step"]].diff()
    return gap["clock"] / gap["step"]


def _check_unit(entries: pd.DataFrame, source: str, what: str) -> None:
    """Hold values against the clock; raises PrismError where another unit fits better.

    Units are a factor of 1000 apart: the border is halfway on a logarithmic scale. Pauses between
    steps make the clock's time longer, and lie in a minority of the parts that are compared.
    """
    gap = entries.groupby("run", sort=False)[["clock", "step"]].diff()
    gap = gap.assign(written=entries["seconds"] * gap["step"])[gap["clock"] >= 0.0]
    if len(gap) < _FEWEST:
        return
    part = np.arange(len(gap)) * min(_BLOCKS, len(gap)) // len(gap)
    sums = gap.groupby(part).sum()
    ratio = float((sums["clock"] / sums["written"]).median())
    unit = next((u for u in _UNITS if abs(np.log10(max(ratio, 1e-300) / u)) < 1.5), None)
    if unit is not None:
        raise PrismError(
            f"{source}: {what}: by the clock a step takes {ratio:.3g} times what is written: the "
            f"unit is off by {_UNITS[unit]}; name it with --unit, or write a table with a "
            "column step_s or step_ms"
        )
