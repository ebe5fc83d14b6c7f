"""Run tasks in threads of this process, or where `prism.execution.place.run_on` says.

A task is a function of the package, large data that many tasks share, and a few arguments; it
gives arrays. Which tasks there are never depends on how many threads or workers run them, so that
results do not either. Left out: Dask (`prism.execution.remote`), files (`prism.execution.chunks`).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prism.execution.content import content_hash, identity

if TYPE_CHECKING:
    from prism.execution.chunks import ChunkStore
    from prism.execution.remote import Remote

Arrays = tuple[NDArray[Any], ...]
Take = Callable[[int, Arrays], None]

TASK_S = 1.0
"""Length of a task that is sent away or kept [s]: long against what sending and writing take."""
WORTH_S = 0.02
"""Work shorter than this is neither sent nor kept [s]: doing it (again) costs less."""
BEAT_S = 0.2
"""Longest time between two reports of progress [s]."""


class Shared:
    """Data that tasks share: told apart by content, sent and unpacked once.

    Parameters
    ----------
    value
    content : str, optional
        Hash of what the value says, where it has kinds that `content_hash` does not know.
    """

    def __init__(self, value: Any, content: str | None = None) -> None:
        self.value = value
        self._given = content
        self._lock = threading.Lock()

    @cached_property
    def _content(self) -> str:
        return content_hash(self.value) if self._given is None else self._given

    @property
    def content(self) -> str:
        """Hash of the data."""
        with self._lock:  # tasks of several threads ask at once
            return self._content

    @property
    def packed(self) -> bytes:
        """The data as bytes, made anew, since they are needed once.

        Unpacked, arrays are the workers' own and can be written.
        Arrays over a buffer of the network are read-only, for which numba compiles anew.
        """
        return pickle.dumps(self.value, protocol=5)


@dataclass(frozen=True, eq=False)
class Task:
    """A piece of work.

    Attributes
    ----------
    function : callable
        Of a module of the package, by whose name workers find it; called with the shared data and
        the arguments, it gives a tuple of arrays.
    shared : Shared, or callable
        A callable builds it when the task's turn has come, in a thread.
    args : tuple
        Small, and of the kinds that `prism.execution.content.content_hash` knows.
    seconds : float
        About how long it takes [s].
    tell : callable, optional
        Given on to the function, if it is run in this process, to tell its share that is done.
    """

    function: Callable[..., Arrays]
    shared: Shared | Callable[[], Shared]
    args: tuple[Any, ...] = ()
    seconds: float = TASK_S
    tell: Callable[[float], None] | None = None

    def run(self, shared: Shared) -> Arrays:
        """Run it here."""
        options = {} if self.tell is None else {"tell": self.tell}
        return self.function(shared.value, *self.args, **options)

    def open(self) -> Shared:
        """Return the shared data, built where it is not yet."""
        return self.shared if isinstance(self.shared, Shared) else self.shared()

    def key(self, shared: Shared) -> str:
        """Name of the result: everything that it depends on."""
        return content_hash(identity(), self.function, shared.content, self.args)


@dataclass(frozen=True)
class Place:
    """Where tasks are run: on workers if there is a remote; what is finished is kept in a store."""

    remote: Remote | None = None
    store: ChunkStore | None = None


_HERE = Place()
_place: ContextVar[Place] = ContextVar("prism_place", default=_HERE)


def current() -> Place:
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
def at_place(place: Place) -> Iterator[None]:
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
    tasks : sequence of Task
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


def as_arrays(*values: Any) -> Arrays:
    """Turn numbers and arrays into what a task gives."""
    return tuple(np.asarray(value) for value in values)
