"""Tasks: functions of the package over shared data, run in threads here or where `run_on` says.

Which tasks there are never depends on how many threads or workers run them, so that results do not
either. A task's key is its content, under which what it gives can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Self, TypeVar, cast

from numpy.typing import NDArray

from prism.simulation.execution.content import content_hash, identity
from prism.simulation.execution.context import RunContext

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


class Executor:
    """Runs tasks in threads of this process; those that are left end with its block."""

    def __init__(self, pool: futures.Executor) -> None:
        self._pool = pool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, task: Task) -> Future[Arrays]:
        """Begin a task."""
        return self._pool.submit(task.run)

    def check(self) -> None:
        """Raise PrismError where nobody is left to run tasks."""


def run_tasks(
    tasks: Sequence[Task], take: Take, context: RunContext, beat: Callable[[], None] = lambda: None
) -> None:
    """Run tasks, and hand over what each gives as soon as it is done.

    Parameters
    ----------
    take : callable
        Called with a task's index and its arrays, in this thread, in any order.
    beat : callable, optional
        Called often while this waits; what it raises ends the tasks.

    Raises
    ------
    PrismError
        The input is wrong, or workers are lost for good.
    """
    left = dict(enumerate(tasks))
    remote, store, keys = context.backend.remote, context.backend.store, dict[int, str]()
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
    if remote is not None and seconds > WORTH_S:
        _collect(remote.calls(), left, finish, beat)
    elif remote is None and context.threads > 1 and seconds >= ALONE_S:
        _collect(Executor(ThreadPoolExecutor(context.threads)), left, finish, beat)
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


def map_threads(
    function: Callable[[Any], Found], items: Sequence[Any], context: RunContext
) -> list[Found]:
    """Call a function for each item in threads of this process; results in order."""
    if context.threads == 1:
        return [function(item) for item in items]
    found: dict[int, Any] = {}
    tasks = {i: Task(cast(Any, function), Shared(item)) for i, item in enumerate(items)}
    _collect(Executor(ThreadPoolExecutor(context.threads)), tasks, found.__setitem__, lambda: None)
    return [found[i] for i in range(len(items))]


@contextmanager
def begun(
    function: Callable[[RunContext], Found], context: RunContext
) -> Iterator[Callable[[], Found]]:
    """Begin a function in a thread beside what follows; gives what returns its result.

    With one thread, or workers, it is called then. Where what follows raises, so does what the
    function's context has for progress.
    """
    if context.threads == 1 or context.is_remote:
        yield partial(function, context.quiet)
        return
    stopped, done, future = Event(), SimpleQueue[Future[Found]](), Future[Found]()
    future.add_done_callback(done.put)

    def check(*_: object) -> None:
        if stopped.is_set():
            raise CancelledError

    def run() -> None:
        try:
            future.set_result(function(replace(context, progress=check)))
        except BaseException as error:
            future.set_exception(error)

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            pool.submit(run)
            yield lambda: done.get().result()
        except BaseException:
            stopped.set()
            raise
