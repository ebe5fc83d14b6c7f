"""What is answered for a setting, stage by stage, in a process that a further change ends.

The step comes first, of few replicates, then the command's answer, the comparison with what is
pinned, and the ranking. Each process is a fork of one that has loaded and compiled everything.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from threading import Thread
from typing import Any

from prism.common.errors import PrismError
from prism.common.resultfiles import answer
from prism.common.results import Result
from prism.jobs.job import Job
from prism.present.cells import Column, Table
from prism.present.reports.estimates import summary_table
from prism.present.reports.page import render_answer

FIRST, REFINED = 64, 512
"""Replicates of the first answer, which is one cluster draw, and of the one that replaces it."""
POLL_S = 0.05  # time between two looks at what was answered [s]
_TURN = asyncio.Semaphore(1)  # a process takes all threads: further windows wait


@dataclass(frozen=True)
class Question:
    """A setting whose answers are asked for."""

    job: Job
    seed: int  # of all draws
    threads: int | None = None  # as of `prism.simulate`
    pinned: Result | None = None  # the setting that this one is compared with


@dataclass(frozen=True)
class Stage:
    """An answer to a question, laid out."""

    panel: str  # where it is shown: ``answer``, ``beside`` or ``ranking``
    html: str
    replicates: int | None = None  # of an estimate
    result: Result | None = None  # the estimate, whole


def answer_stages(question: Question) -> Iterator[str | Stage]:
    """Say what is computed next, and give it; raises PrismError where a setting is refused."""
    from prism.analyses.estimate import estimate
    from prism.analyses.rank import rank
    from prism.simulation.execution.context import make_context
    from prism.simulation.prepare import prepare
    from prism.simulation.steps import simulate_step

    job, seed = question.job, question.seed
    threads = question.threads
    yield f"step, {FIRST} replicates"
    step = simulate_step(prepare(job, seed), FIRST, make_context(seed, threads), parts=False)
    yield Stage("answer", render_answer(answer(step)), FIRST)
    yield f"step and run, {REFINED} replicates"
    run = estimate(job, replicates=REFINED, seed=seed, threads=threads)
    yield Stage("answer", render_answer(answer(run)), REFINED, run)
    if question.pinned is not None:
        yield "A and B"
        yield Stage("beside", _beside(question.pinned, run, seed))
    if job.variability.dependence != "none":
        yield "ranking"
        yield Stage("ranking", render_answer(answer(rank(job, seed=seed, threads=threads))))


def _beside(pinned: Result, result: Result, seed: int) -> str:
    """Compare a result with the pinned one; the same seed gave both the same random numbers."""
    from prism.analyses.compare import compare

    figures = {name: answer(of).figures for name, of in (("A", pinned), ("B", result))}
    found = answer(compare(pinned.to_xarray(), result.to_xarray(), seed=seed))
    return render_answer(replace(found, tables=(_upright(summary_table(figures)), *found.tables)))


def _upright(table: Table) -> Table:
    """Turn a table of two settings, so that it fits beside the controls: a column for each."""
    names, *columns = table.columns
    labels = [f"{column.group}, {column.title}".removeprefix(", ") for column in columns]
    heads = (replace(names, title=""), *(Column(str(row[0])) for row in table.rows))
    rows = zip(labels, *(row[1:] for row in table.rows), strict=True)
    return replace(table, columns=heads, rows=tuple(rows))


# ------------------------------------------------------------------------------ in a process
class EndedError(Exception):
    """The computing process ended by itself, or was killed."""


async def compute(question: Question) -> AsyncIterator[str | Stage]:
    """Answer a question in a process of its own, which ends where nobody waits for it any more.

    Raises
    ------
    PrismError
        The setting is refused.
    EndedError
        The process ended before it was done.
    """
    if _TURN.locked():
        yield "waits for another window"
    async with _TURN:
        warming = warm_up()
        while warming.is_alive():
            await asyncio.sleep(POLL_S)
        here, there = multiprocessing.Pipe(duplex=False)
        process = _in_process(_answer, there, question)
        there.close()
        try:
            while True:
                while not here.poll():
                    await asyncio.sleep(POLL_S)
                told = here.recv()
                if isinstance(told, PrismError):
                    raise told
                yield told
        except (EOFError, ConnectionResetError):
            process.join()
            if process.exitcode:
                raise EndedError(f"status {process.exitcode}") from None
        finally:
            process.kill()
            process.join()
            here.close()


def warm_up() -> Thread:
    """Start the process whose forks answer where there is none; it is there as the thread ends."""
    warming = Thread(target=lambda: _in_process(int).join(), daemon=True)
    warming.start()
    return warming


def _in_process(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["prism.present.explore.warmed"])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _answer(there: Connection, question: Question) -> None:
    """Answer a question; any other error than prism's is seen as the end of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page, which ends this
    with suppress(BrokenPipeError):
        try:
            for told in answer_stages(question):
                there.send(told)
        except PrismError as error:
            there.send(error)
