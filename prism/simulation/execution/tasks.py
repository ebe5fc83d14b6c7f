"""Tasks: functions of the package over shared data, run in threads here or where `run_on` says.

Which tasks there are never depends on how many threads or workers run them, so that results do not
either. A task's name is its content, under which what it gives can be kept.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from prism.simulation.execution.content import content_hash, identity

if TYPE_CHECKING:
    from prism.simulation.execution.chunks import ChunkStore
    from prism.simulation.execution.remote import Remote

Arrays = tuple[NDArray[Any], ...]
Take = Callable[[int, Arrays], None]
Found = TypeVar("Found")

TASK_S = 1.0
"""Length of a task that is sent away or kept [s]: long against what sending and writing take."""
WORTH_S = 0.02
"""Work shorter than this is neither sent nor kept [s]: doing it (again) costs less."""
ALONE_S = 0.005
"""Work shorter than this is done in one thread [s]: starting others takes 2 ms."""
BEAT_S = 0.2
"""Longest time between two reports of progress [s]."""


class Shared:
    """Data that tasks share, distinguished by a hash: that of the value where none is given."""

    def __init__(self, value: Any, content: str | None = None) -> None:
        self.value, self._content = value, content
        self._lock = threading.Lock()  # tasks of several threads ask at once

    @property
    def content(self) -> str:
        """Hash of the data."""
        with self._lock:
            if self._content is None:
                self._content = content_hash(self.value)
            return self._content


@dataclass(frozen=True, eq=False)
class Task:
    """A piece of work."""

    function: Callable[..., Arrays]  # of a module of the package, where workers find it
    shared: Shared | Callable[[], Shared]  # its first argument, or what builds it, in a thread
    args: tuple[Any, ...] = ()  # small, and of the kinds that `content_hash` knows
    seconds: float = TASK_S  # about
    tell: Callable[[float], None] | None = None  # takes the share that is done, in this process

    def run(self, shared: Shared) -> Arrays:
        """Run it here."""
        options = {} if self.tell is None else {"tell": self.tell}
        return self.function(shared.value, *self.args, **options)

    def open(self, store: ChunkStore | None) -> tuple[Shared, str, Arrays | None]:
        """Build its data, and look for what it gave before, under its name (empty: not kept)."""
        shared = self.shared if isinstance(self.shared, Shared) else self.shared()
        if store is None or self.seconds < WORTH_S:
            return shared, "", None
        key = content_hash(identity(), self.function, shared.content, self.args)
        return shared, key, store.load(key)


@dataclass(frozen=True)
class Backend:
    """Where tasks are run: on workers if there is a remote; what is finished is kept in a store."""

    remote: Remote | None = None
    store: ChunkStore | None = None


_HERE = Backend()
_place: ContextVar[Backend] = ContextVar("prism_place", default=_HERE)
_stop: ContextVar[threading.Event | None] = ContextVar("prism_stop", default=None)


def current() -> Backend:
    """Return where tasks are run."""
    return _place.get()


def is_remote() -> bool:
    """Tell whether tasks are run on workers."""
    return current().remote is not None


def keeps_tasks() -> bool:
    """Tell whether tasks are sent away or kept, and should be `TASK_S` long for it."""
    return current() != _HERE


def n_threads(threads: int) -> int:
    """Return how many threads do the work: the workers', or as many as given of this process."""
    remote = current().remote
    return min(threads, cores()) if remote is None else remote.n_threads


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def at_place(place: Backend) -> Iterator[Backend]:
    """Run the tasks of a block of code at a place."""
    token = _place.set(place)
    try:
        yield place
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
    place, stop, beat = current(), _stop.get(), beat or (lambda: None)
    seconds = sum(task.seconds for task in tasks)
    if place.remote is not None and seconds > WORTH_S:
        place.remote.run(tasks, take, threads, place.store, beat)
        return
    if threads == 1 or seconds < ALONE_S:  # in this thread, where Ctrl-C is heard at once
        for i, task in enumerate(tasks):
            take(i, _perform(task, place.store))
            beat()
        return
    # queues, as Ctrl-C while futures are waited for can leave one of them locked for good
    todo, found = deque(range(len(tasks))), SimpleQueue[tuple[int, Arrays | BaseException]]()

    def perform() -> None:
        while todo:
            with suppress(IndexError):  # another thread took the last one
                i = todo.popleft()
                found.put((i, _try(tasks[i], place.store)))

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for _ in range(min(threads, len(tasks))):
                pool.submit(perform)
            left = len(tasks)
            while left:
                try:
                    i, arrays = found.get(timeout=BEAT_S)
                except Empty:
                    pass
                else:
                    if isinstance(arrays, BaseException):
                        raise arrays
                    take(i, arrays)
                    left -= 1
                    del arrays  # before the next is waited for
                beat()
                if stop is not None and stop.is_set():
                    raise CancelledError
        except BaseException as error:
            todo.clear()
            if isinstance(error.__context__, KeyboardInterrupt):
                # Ctrl-C while a thread starts: its condition raises "release unlocked lock"
                raise error.__context__ from None
            raise


def _try(task: Task, store: ChunkStore | None) -> Arrays | BaseException:
    try:
        return _perform(task, store)
    except BaseException as error:
        return error


@contextmanager
def begun(function: Callable[[], Found], threads: int) -> Iterator[Callable[[], Found]]:
    """Begin a function in a thread beside what follows; gives what returns its result.

    With one thread, or workers, it is called then. Where what follows raises, its tasks end.
    """
    if threads == 1 or is_remote():
        yield function
        return
    context, stop = copy_context(), threading.Event()
    context.run(_stop.set, stop)
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(context.run, function)
        try:
            yield future.result
        except BaseException:
            stop.set()
            raise


def _perform(task: Task, store: ChunkStore | None) -> Arrays:
    shared, key, found = task.open(store)
    if found is None:
        found = task.run(shared)
        if store is not None and key:
            store.save(key, found)
    return found
