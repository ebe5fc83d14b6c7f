"""What is answered for a setting, stage by stage: the step first, then the run, then the ranking.

The first stage is few replicates, so that it is there about a second after a change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from prism.common.errors import PrismError
from prism.common.resultfiles import answer
from prism.common.results import Result, dataset_of
from prism.jobs.job import Job
from prism.present.answer import Answer, Column, Table
from prism.present.reports.estimates import overlays, summary_table
from prism.present.reports.inputs import differences
from prism.present.reports.page import render_answer

if TYPE_CHECKING:
    import xarray as xr

FIRST, REFINED = 64, 512
"""Replicates of the first answer, which is one cluster draw, and of the one that replaces it."""
REPORT_S = 0.2
"""Time between two reports of progress [s]."""
STAGES = {
    "step": f"step, {FIRST} replicates",
    "run": f"step and run, {REFINED} replicates",
    "ranking": "ranking",
}
"""Stages by name, in their order, and what each computes."""

Tell = Callable[[str, Any], None]


@dataclass(frozen=True)
class Question:
    """A setting whose answers are asked for.

    Attributes
    ----------
    job : Job
    seed : int
        Of all draws.
    threads : int, optional
        As of `prism.simulate`.
    pinned : xarray.Dataset, optional
        Result of the setting that this one is compared with.
    """

    job: Job
    seed: int
    threads: int | None = None
    pinned: xr.Dataset | None = None


@dataclass(frozen=True)
class Stage:
    """An answer to a question, laid out.

    Attributes
    ----------
    name : str
        One of `STAGES`.
    html : str
        The answer.
    beside : str
        The two settings side by side; empty where none is pinned.
    result : xarray.Dataset
        What it is made of.
    """

    name: str
    html: str
    beside: str
    result: xr.Dataset


def answer_stages(question: Question, tell: Tell) -> None:
    """Compute the stages of a question, and tell each as it is done.

    Given to `tell` are ``progress`` with the name of a stage and the share of it that is done, or
    ``stage`` with a `Stage`; in the end ``done``, or ``refused`` with prism's message.
    """
    begin = time.perf_counter()
    try:
        for name, made in _results(question, tell):
            result = dataset_of(made)
            found: Answer = answer(result)
            beside = "" if name == "ranking" else _beside(question, result)
            tell("stage", Stage(name, render_answer(found), beside, result))
    except PrismError as error:
        tell("refused", str(error))
    else:
        tell("done", time.perf_counter() - begin)


def warm_up(question: Question) -> None:
    """Load and compile what answers need, by one without its ranking, which takes longest."""
    with suppress(PrismError):
        for _, result in islice(_results(question, lambda word, value: None), 2):
            render_answer(answer(result))


def _results(question: Question, tell: Tell) -> Iterator[tuple[str, Result | xr.Dataset]]:
    from prism.analyses.estimate import estimate
    from prism.analyses.rank import rank
    from prism.simulation.prepare import prepare
    from prism.simulation.steps import settle_call, simulate_step

    job, seed = question.job, question.seed
    _, threads = settle_call(FIRST, seed, question.threads)
    yield "step", simulate_step(prepare(job, seed), FIRST, seed, threads, parts=False)
    report = _reporter("run", tell)
    yield "run", estimate(job, replicates=REFINED, seed=seed, threads=threads, progress=report)
    if job.variability.dependence != "none":
        report = _reporter("ranking", tell)
        yield "ranking", rank(job, seed=seed, threads=threads, progress=report)


def _reporter(name: str, tell: Tell) -> Callable[[int, int], None]:
    """Make a report of progress that is not made too often."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.perf_counter() - last > REPORT_S:
            last = time.perf_counter()
            tell("progress", (name, done / max(1, total)))

    tell("progress", (name, 0.0))
    return report


def _beside(question: Question, result: xr.Dataset) -> str:
    """Lay out a result and the pinned one side by side."""
    if question.pinned is None:
        return ""
    results = {"A": result, "B": question.pinned}
    figures = {label: answer(found).figures for label, found in results.items()}
    differs = differences(result, question.pinned, "B")
    tables = [_upright(summary_table(figures)), *([differs] if differs is not None else [])]
    both = Answer("Side by side", "A and B")
    return "".join((
        render_answer(replace(both, tables=tuple(tables))),
        render_answer(replace(both, pictures=tuple(overlays(results)))),
    ))  # fmt: skip


def _upright(table: Table) -> Table:
    """Turn a table of two settings, so that it fits beside the controls: a column for each."""
    names, *columns = table.columns
    labels = [f"{column.group}, {column.title}".removeprefix(", ") for column in columns]
    heads = (replace(names, title=""), *(Column(str(row[0])) for row in table.rows))
    rows = zip(labels, *(row[1:] for row in table.rows), strict=True)
    return replace(table, columns=heads, rows=tuple(rows))
