"""Run tasks on the workers of a Dask scheduler.

Shared data goes to the cluster once, as a task of its own; results come back through the scheduler,
so that only that has to be reachable. A worker that dies takes nothing with it: Dask runs its
tasks, and those that hold shared data, on another one.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.simulation.execution.content import Identity, identity, refuse_other
from prism.simulation.execution.tasks import Arrays, Executor, Shared, Task

TIMEOUT_S = 30.0
"""How long to wait for a scheduler, for a first worker, and for another one after the last [s]."""


class Remote:
    """A Dask client; parameters as those of `run_on`."""

    def __init__(
        self,
        scheduler: Any,
        scheduler_file: str | os.PathLike[str] | None,
        timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._levels: dict[str, int] = {}
        self._own = scheduler is None or isinstance(scheduler, str)
        try:
            import distributed
        except ImportError as error:
            raise PrismError(
                "--scheduler needs Dask, which is not installed; pip install 'distributed>=2024.10'"
            ) from error
        self.client = scheduler
        warnings.filterwarnings("ignore", "Sending large graph")  # shared data
        try:
            if self._own:
                self._hush()
                self.client = _connect(distributed.Client, scheduler, scheduler_file, timeout_s)
            self.address = str(self.client.scheduler.address)
            try:
                self.client.wait_for_workers(1, timeout=timeout_s)
            except TimeoutError as error:
                raise self.deserted("no worker") from error
            n, threads = len(self.client.nthreads()), format_count(self.n_threads, "thread")
            tell(f"{self.address}: {format_count(n, 'worker')}, {threads}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        if self._own and hasattr(self.client, "close"):
            with suppress(Exception):  # a cluster that is gone needs no goodbye
                self.client.close(timeout=2)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def _hush(self) -> None:
        """Keep Dask from reporting what goes wrong: that is said in words, once."""
        for name in list(logging.root.manager.loggerDict):
            if name.split(".")[0] in ("distributed", "tornado", "asyncio"):
                self._levels[name] = logging.getLogger(name).level
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    @property
    def n_threads(self) -> int:
        """Threads of all workers there are."""
        return sum(self.client.nthreads().values())

    def calls(self) -> Calls:
        """Return an executor of tasks."""
        return Calls(self)

    def deserted(self, what: str) -> PrismError:
        """Return the error of a cluster without workers."""
        return PrismError(
            f"{self.address}: {what} within {self.timeout_s:g} s; start some with `dask worker "
            f"{self.address}`, or wait longer with --scheduler-timeout"
        )

    def lost(self) -> PrismError:
        """Return the error of a scheduler that is gone."""
        return PrismError(
            f"{self.address}: the scheduler is gone, and with it what was running; start it again, "
            "and give the same command once more (with --resume it goes on where it was)"
        )


class Calls(Executor):
    """Runs tasks on the workers, by Dask's own `concurrent.futures.Executor`."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote.client.get_executor(pure=False))
        self._remote = remote
        self._sent: tuple[Shared, Any] | None = None
        self._seen = time.monotonic()

    def __exit__(self, *raised: Any) -> None:
        """End what is left, and say what Dask's errors mean."""
        error, address = raised[1], self._remote.address
        with suppress(Exception):
            self._pool.shutdown(wait=False)
        if isinstance(error, CancelledError):  # not by us
            raise self._remote.lost() from error
        if isinstance(error, ImportError) or "deserialization" in str(error):
            raise PrismError(
                f"{address}: its scheduler or workers have another prism, or none; install it "
                f"there, the same version as here ({str(error).split('. ')[0]})"
            ) from error
        last = getattr(error, "last_worker", None)  # of distributed.KilledWorker
        if last is not None:
            raise PrismError(
                f"{address}: workers died while at the same task, the last one at {last.address}; "
                "see their logs, and whether they have the memory that this job takes here"
            ) from error

    def submit(self, task: Task) -> Future[Arrays]:
        """Send a task, after its data."""
        if self._sent is None or self._sent[0] is not task.shared:
            # as bytes, whose arrays are the workers' own: numba compiles anew for the read-only
            # ones of a message. What was sent before stays there as long as tasks wait for it.
            packed = pickle.dumps(task.shared.value, protocol=5)
            self._sent = task.shared, self._remote.client.submit(pickle.loads, packed, pure=False)
        work = task.function, task.args, identity()
        future: Future[Arrays] = self._pool.submit(call, self._sent[1], *work)
        return future

    def check(self) -> None:
        """Give up where the scheduler, or the last worker, has been gone for long."""
        client, now = self._remote.client, time.monotonic()
        if client.status != "running":
            raise self._remote.lost()
        if client.nthreads():
            self._seen = now
        elif now - self._seen > self._remote.timeout_s:
            raise self._remote.deserted("no worker is left, and none came")


def call(shared: Any, function: Callable[..., Arrays], args: Any, program: Identity) -> Arrays:
    """Run a task on a worker."""
    refuse_other(os.uname().nodename, program)
    return function(shared, *args)


def _connect(client_class: Any, address: Any, file: Any, timeout_s: float) -> Any:
    """Connect, in a thread that is left behind when that takes too long: anything may answer."""
    client, done = client_class.__new__(client_class), SimpleQueue[Exception | None]()
    options = {"timeout": timeout_s, "set_as_default": False, "name": "prism"}

    def connect() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # versions are compared by us
                client.__init__(address, scheduler_file=file, **options)
            done.put(None)
        except Exception as error:
            done.put(error)

    Thread(target=connect, daemon=True).start()
    try:
        error = done.get(timeout=timeout_s)
    except Empty:
        error = TimeoutError("no answer")
    if error is None:
        return client
    client.status = "closed"  # or its end waits for a goodbye, and prints a traceback
    where = f"--scheduler {address}" if file is None else f"--scheduler-file {file}"
    start = "dask scheduler" if file is None else f"dask scheduler --scheduler-file {file}"
    raise PrismError(
        f"{where}: no Dask scheduler answers within {timeout_s:g} s "
        f"({' '.join(str(error).split())[:200]}); start one with `{start}`, and check address and "
        "port"
    ) from error
