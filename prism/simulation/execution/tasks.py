"""Run tasks in threads of this process, or where `prism.simulation.execution.place.run_on` says.

Which tasks there are never depends on how many threads or workers run them, so that results do not
either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.simulation.execution.task import BEAT_S, WORTH_S, Arrays, Take, Task

if TYPE_CHECKING:
    from prism.simulation.execution.chunks import ChunkStore
    from prism.simulation.execution.remote import Remote


@dataclass(frozen=True)
class Backend:
    """Where tasks are run: on workers if there is a remote; what is finished is kept in a store."""

    remote: Remote | None = None
    store: ChunkStore | None = None


_HERE = Backend()
_place: ContextVar[Backend] = ContextVar("prism_place", default=_HERE)


def current() -> Backend:
    """Return where tasks are run."""
    return _place.get()


def is_remote() -> bool:
    """Tell whether tasks are run on workers."""
    return current().remote is not None


def keeps_tasks() -> bool:
    """Tell whether tasks are sent away or kept, and should be `TASK_S` long for it."""
    return current() is not _HERE


def n_threads(threads: int) -> int:
    """Return how many threads do the work: the workers', or as many as given of this process."""
    remote = current().remote
    return min(threads, cores()) if remote is None else remote.n_threads


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def at_place(place: Backend) -> Iterator[None]:
    """Run the tasks of a block of code at a place."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def run_tasks(
    tasks: Sequence[Task], take: Take, threads: int = 1, beat: Callable[[], None] | None = None
) -> None:
    """Run tasks, and hand over what each gives as soon as it is done.

    Parameters
    ----------
    take : callable
        Called with a task's index and its arrays, in this thread, in any order.
    threads : int
        Threads of this process, where no workers are given.
    beat : callable, optional
        Called often while this waits.

    Raises
    ------
    PrismError
        The input is wrong, or workers are lost for good.
    """
    place = current()
    if place.remote is not None and sum(task.seconds for task in tasks) > WORTH_S:
        place.remote.run(tasks, take, threads, place.store, beat)
        return
    if threads == 1:  # in this thread, where Ctrl-C is heard at once
        for i, task in enumerate(tasks):
            take(i, perform(task, place.store))
            if beat is not None:
                beat()
        return
    with ThreadPoolExecutor(max_workers=threads) as pool:
        index = {pool.submit(perform, task, place.store): i for i, task in enumerate(tasks)}
        pending = set(index)
        try:
            while pending:
                done, pending = wait(pending, timeout=BEAT_S, return_when=FIRST_COMPLETED)
                for future in done:
                    take(index.pop(future), future.result())
                del done  # and with it what they gave
                if beat is not None:
                    beat()
        except BaseException:
            for future in pending:
                future.cancel()
            raise


def perform(task: Task, store: ChunkStore | None) -> Arrays:
    """Run a task here, unless what it gives is in the store."""
    shared = task.open()
    if store is None or task.seconds < WORTH_S:
        return task.run(shared)
    key = task.key(shared)
    found = store.load(key)
    if found is None:
        found = task.run(shared)
        store.save(key, found)
    return found
