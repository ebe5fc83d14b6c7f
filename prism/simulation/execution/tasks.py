"""Tasks: functions of the package over shared data, run in threads here or where `run_on` says.

Which tasks there are never depends on how many threads or workers run them, so that results do not
either. A task's key is its content, under which what it gives can be kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

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


@dataclass(frozen=True, eq=False)
class Shared:
    """Data that tasks share."""

    value: Any

    @cached_property
    def content(self) -> str:
        """Hash of the data."""
        return content_hash(self.value)


@dataclass(frozen=True, eq=False)
class Task:
    """A call of a function of the package, where workers find it."""

    function: Callable[..., Arrays]
    shared: Shared  # its first argument
    args: tuple[Any, ...] = ()  # small
    seconds: float = TASK_S  # about
    tell: Callable[[float], None] | None = None  # takes the share that is done, in this process

    def run(self) -> Arrays:
        """Run it here."""
        options = {} if self.tell is None else {"tell": self.tell}
        return self.function(self.shared.value, *self.args, **options)

    @property
    def key(self) -> str:
        """Name under which its result is kept."""
        return content_hash(identity(), self.function, self.shared.content, self.args)


class Executor(Protocol):
    """Runs tasks; those that are left end with its block."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def submit(self, task: Task) -> Future[Arrays]:
        """Begin a task."""

    def check(self) -> None:
        """Raise PrismError where nobody is left to run tasks."""


class Threads:
    """Threads of this process."""

    def __init__(self, n: int) -> None:
        self._pool = ThreadPoolExecutor(n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, task: Task) -> Future[Arrays]:
        """Begin a task in a thread."""
        return self._pool.submit(task.run)

    def check(self) -> None:
        """Threads stay."""


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
        Called often while this waits; what it raises ends the tasks.

    Raises
    ------
    PrismError
        The input is wrong, or workers are lost for good.
    """
    place, beat, left = current(), beat or (lambda: None), dict(enumerate(tasks))
    store, keys = place.store, dict[int, str]()
    if store is not None:
        keys = {i: task.key for i, task in left.items() if task.seconds >= WORTH_S}
        for i, key in keys.items():
            if (kept := store.load(key)) is not None:
                take(i, kept)
                beat()
                del left[i]

    def finish(i: int, found: Arrays) -> None:
        if store is not None and i in keys:
            store.save(keys[i], found)
        take(i, found)

    seconds = sum(task.seconds for task in left.values())
    if place.remote is not None and seconds > WORTH_S:
        _collect(place.remote.calls(), left, finish, beat)
    elif place.remote is None and threads > 1 and seconds >= ALONE_S:
        _collect(Threads(threads), left, finish, beat)
    else:  # in this thread, where Ctrl-C is heard at once
        for i, task in left.items():
            finish(i, task.run())
            beat()


def _collect(
    executor: Executor, tasks: Mapping[int, Task], take: Take, beat: Callable[[], None]
) -> None:
    """Run tasks by an executor.

    Another thread begins them: Ctrl-C, which comes to the main one, can leave the lock of a future
    that this touches locked for good.
    """
    done, stopped = SimpleQueue[tuple[int, Future[Arrays]]](), Event()

    def begin() -> None:
        try:
            for i, task in tasks.items():
                if stopped.is_set():
                    return
                future = executor.submit(task)
                future.add_done_callback(lambda future, i=i: done.put((i, future)))  # type: ignore[misc]
        except BaseException as error:
            future = Future()
            future.set_exception(error)
            done.put((-1, future))

    with executor, ThreadPoolExecutor(max_workers=1) as other:
        try:
            other.submit(begin)
            left = len(tasks)
            while left:
                try:
                    i, future = done.get(timeout=BEAT_S)
                except Empty:
                    executor.check()
                else:
                    take(i, future.result())
                    left -= 1
                    del future  # before the next is waited for
                beat()
        except BaseException as error:
            stopped.set()
            if isinstance(error.__context__, KeyboardInterrupt):
                # Ctrl-C while a thread starts: its condition raises "release unlocked lock"
                raise error.__context__ from None
            raise


@contextmanager
def begun(
    function: Callable[[Callable[..., None] | None], Found], threads: int
) -> Iterator[Callable[[], Found]]:
    """Begin a function in a thread beside what follows; gives what returns its result.

    With one thread, or workers, it is called then. Where what follows raises, so does what the
    function is given to call, as a report of progress.
    """
    if threads == 1 or is_remote():
        yield partial(function, None)
        return
    stopped, done, future = Event(), SimpleQueue[Future[Found]](), Future[Found]()
    future.add_done_callback(done.put)

    def check(*_: object) -> None:
        if stopped.is_set():
            raise CancelledError

    def run() -> None:
        try:
            future.set_result(function(check))
        except BaseException as error:
            future.set_exception(error)

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            pool.submit(copy_context().run, run)
            yield lambda: done.get().result()
        except BaseException:
            stopped.set()
            raise
