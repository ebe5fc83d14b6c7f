"""Entries put in order: who wrote them, where runs begin, steps that a value covers, the unit."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.choose import list_values
from prism.traces.columns import Taken
from prism.traces.logs.lines import Entry
from prism.traces.steps import StepTimes, usual_gap

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Names = NDArray[np.str_]

FEWEST = 4  # values of a run: below, a fit cannot separate its spread from that between runs
_INTERVAL = re.compile(rb"^\W*log_interval \.+ (\d{1,9})\s*$", re.MULTILINE)
_BLOCKS = 20  # parts of a log, each held against the clock: pauses are in a minority of them
_UNITS = {1e-3: "a thousandth", 1e3: "a thousand times"}


def split_runs(entries: list[Entry], source: str) -> tuple[list[tuple[str, Entry]], list[str]]:
    """Name the run of each entry; raises PrismError where runs are interleaved.

    A step number that goes back starts a run; grep's files are runs. Of ranks that write the same
    steps one is kept.
    """
    notes: list[str] = []
    out: list[tuple[str, Entry]] = []
    files = list(dict.fromkeys(e.writer[0] for e in entries))
    twice = 0
    starts: list[str] = []
    for file in files:
        stream = _of_one_rank([e for e in entries if e.writer[0] == file], notes)
        for number, run in enumerate(_runs(stream, source)):
            kept = [e for i, e in enumerate(run) if not i or run[i - 1].step != e.step]
            twice += len(run) - len(kept)
            name = f"{file}/{number}" if file and number else file or str(number)
            out += [(name, e) for e in kept]
            if number:
                line, step = kept[0].line, kept[0].step
                starts.append(f"{source}:{line}" if line else f"step {step}")
    if twice:
        notes.append(f"{format_count(twice, 'line')} skipped that came twice in a row")
    n_runs = len(files) + len(starts)
    if starts:
        notes.append(
            f"the step number goes back {format_count(len(starts), 'time')} (first at "
            f"{starts[0]}): read as "
            f"{format_count(n_runs, 'run')}, named {out[0][0]} to {out[-1][0]}"
        )
    elif len(files) > 1:
        notes.append(f"{format_count(n_runs, 'run')}: {list_values(files)}")
    return ([("", e) for _, e in out] if n_runs == 1 else out), notes


def _of_one_rank(entries: list[Entry], notes: list[str]) -> list[Entry]:
    """Keep one of the ranks that write the same steps."""
    lines = Counter(e.writer[1] for e in entries)
    if len(lines) == 1:
        return entries
    first, _ = lines.most_common(1)[0]
    steps = {e.step for e in entries if e.writer[1] == first}
    others = [e.step in steps for e in entries if e.writer[1] != first]
    if 2 * sum(others) <= len(others):
        return entries
    notes.append(
        f"{format_count(len(lines), 'rank')} or hosts write the same steps: those of "
        f"{first or 'the first'} are "
        "read"
    )
    return [e for e in entries if e.writer[1] == first]


def _runs(entries: list[Entry], source: str) -> list[list[Entry]]:
    """Split where the step number goes back; jobs of different length that are interleaved, too."""
    runs = _split(entries)
    if len(runs) * FEWEST <= len(entries) + FEWEST:
        return runs
    apart = [_split([e for e in entries if e.total == n]) for n in {e.total: 0 for e in entries}]
    runs = [run for part in apart for run in part]
    if len(runs) * FEWEST > len(entries) + FEWEST:
        raise PrismError(
            f"{source}:{entries[0].line}: the step number goes back at {len(runs) - 1} of "
            f"{format_count(len(entries), 'line')}: lines of several runs are interleaved and "
            "nothing in them "
            "says which run each is of; expected one run after the other; write each run to a "
            "file of its own"
        )
    return runs


def _split(entries: list[Entry]) -> list[list[Entry]]:
    runs: list[list[Entry]] = []
    for e in entries:
        before = runs[-1][-1] if runs else None
        again = before is not None and (e.step, e.value) == (before.step, before.value)
        if before is None or (e.step <= before.step and not again):
            runs.append([])
        runs[-1].append(e)
    return runs


def check_one_job(runs: Names, entries: Sequence[Entry], source: str) -> list[str]:
    """Refuse runs of different jobs, which pooled would look like spread; notes of a longer one."""
    batch: dict[tuple[int, ...], list[str]] = {}
    total: dict[int, list[str]] = {}
    for run in dict.fromkeys(runs):
        mine = [e for name, e in zip(runs, entries, strict=True) if name == run]
        # a batch that grows in the course of a run is a schedule: runs may see parts of it
        batch.setdefault(tuple(sorted({e.batch for e in mine})), []).append(run)
        total.setdefault(mine[-1].total, []).append(run)
    if len(batch) > 1 and all(len(sizes) == 1 for sizes in batch):
        groups = "; ".join(f"{b[0]} (run {', '.join(names[:4])})" for b, names in batch.items())
        raise PrismError(
            f"{source}: runs of several jobs, which pooled would look like spread; global batch "
            f"size: {groups}; choose with --where run={runs[0]}"
        )
    if len(total) > 1:
        groups = "; ".join(f"{n} (run {', '.join(r[:4])})" for n, r in total.items())
        return [f"runs are set to different numbers of steps: {groups}; are they one job?"]
    return []


def rows_of_run(runs: Names, wanted: str | None, source: str) -> NDArray[np.bool_]:
    """Choose the rows of a run; all where None is named."""
    keep = np.full(runs.size, True) if wanted in (None, "*") else runs == wanted
    if not keep.any():
        names = list_values([name for name in dict.fromkeys(map(str, runs)) if name])
        raise PrismError(
            f"{source}: --where run={wanted}: "
            + (f"no such run; expected one of {names}" if names else "holds one run; leave it out")
        )
    return keep


def in_order(
    runs: Names, step: Index, seconds: Array, clock: Array, is_mean: bool, what: Taken,
    source: str, text: bytes = b"",
) -> StepTimes:  # fmt: skip
    """Make step times of values whose steps ascend in each run, held against the clock [s]."""
    check_unit(runs, step, seconds, clock, source, what.column)
    what.check_size(seconds, source)
    sizes, usual = np.unique(np.diff(step)[runs[1:] == runs[:-1]]), usual_gap(runs, step)
    notes = []
    if not is_mean and usual > 1:
        notes.append(f"each value is one step, of every {usual} that are logged")
    if is_mean and not sizes.size:
        found = _INTERVAL.search(text)
        usual = max(int(found[1]), 1) if found else 1
        notes += [] if found else ["only one value: the log interval is taken as 1"]
    if is_mean and sizes.size > 1:
        notes.append(
            f"successive values are {', '.join(map(str, sizes[:5]))} steps apart; each is "
            f"taken as the mean of {usual}, as most are"
        )
    if is_mean and usual > 1:
        notes.append(
            f"each value is the mean of {format_count(usual, 'step')}: the spread of single "
            "steps is larger, "
            f"by about sqrt({usual}) = {np.sqrt(usual):.2g} where steps are independent"
        )
    return StepTimes(
        seconds, step, runs, source, what.column, usual if is_mean else 1, tuple(notes), what.unit,
        what.why,
    )  # fmt: skip


def by_clock(runs: Names, step: Index, clock: Array) -> Array:
    """Step times from the clock between successive values [s]; not-a-number at a run's first."""
    out = np.full(step.size, np.nan)
    same = runs[1:] == runs[:-1]
    out[1:][same] = np.diff(clock)[same] / np.diff(step)[same]
    return out


def check_unit(
    runs: Names, step: Index, seconds: Array, clock: Array, source: str, what: str
) -> None:
    """Hold values against the clock; raises PrismError where another unit fits better.

    Notes
    -----
    Units are a factor of 1000 apart: the border is halfway on a logarithmic scale. Pauses between
    steps make the clock's time longer, and lie in a minority of the parts that are compared.
    """
    elapsed = by_clock(runs, step, clock)
    use = np.isfinite(elapsed) & (elapsed >= 0.0)
    if use.sum() < FEWEST:
        return
    parts = np.array_split(np.flatnonzero(use), min(_BLOCKS, int(use.sum())))
    gap = np.r_[0, np.diff(step)]
    ratio = float(np.median([(elapsed[p] * gap[p]).sum() / (seconds[p] * gap[p]).sum()
                             for p in parts]))  # fmt: skip
    unit = next((u for u in _UNITS if abs(np.log10(max(ratio, 1e-300) / u)) < 1.5), None)
    if unit is not None:
        raise PrismError(
            f"{source}: {what}: by the clock a step takes {ratio:.3g} times what is written: the "
            f"unit is off by {_UNITS[unit]}; name it with --unit, or write a table with a "
            "column step_s or step_ms"
        )
