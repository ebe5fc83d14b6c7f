"""Run tasks on the workers of a Dask scheduler.

Shared data goes to the cluster once, as a task of its own; results come back through the scheduler,
so that only that has to be reachable. A worker that dies takes nothing with it: Dask runs its
tasks, and those that hold shared data, on another one.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import threading
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.simulation.execution.content import Identity, identity
from prism.simulation.execution.tasks import BEAT_S, Arrays, Shared, Take, Task
from prism.simulation.execution.worker import call, make_probe, refuse_other

if TYPE_CHECKING:
    from prism.simulation.execution.chunks import ChunkStore

TIMEOUT_S = 30.0
"""How long to wait for a scheduler, for a first worker, and for another one after the last [s]."""
KEPT_SHARED = 64
"""Shared data held on the cluster, the latest."""
_LOOK_S = 2.0  # between two looks at whether workers are there
_PING_S, _MOST_PINGED = 2.0, 64  # how long a worker may take to say that it lives; workers asked
_TRIES = 3  # of a task whose workers are lost


class Remote:
    """A Dask client, and what was sent to its cluster; parameters as those of `run_on`."""

    def __init__(
        self,
        scheduler: Any,
        scheduler_file: str | os.PathLike[str] | None,
        timeout_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.timeout_s, self.tell = timeout_s, tell
        self._shared: OrderedDict[str, Any] = OrderedDict()
        self._levels: dict[str, int] = {}
        self._own = scheduler is None or isinstance(scheduler, str)
        try:
            import distributed
        except ImportError as error:
            raise PrismError(
                "--scheduler needs Dask, which is not installed; pip install 'distributed>=2024.10'"
            ) from error
        self._distributed: Any = distributed
        try:
            if self._own:
                self._hush()
                if scheduler_file is not None:
                    scheduler = _address_in(Path(scheduler_file), timeout_s)
                scheduler = self._connect(scheduler)
            self.client = scheduler
            self.address = str(self.client.scheduler.address)
            tell(f"{self.address}: {self._check_workers()}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forget what was sent, and disconnect."""
        self._shared.clear()
        if self._own:
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

    # ----------------------------------------------------------------------------- the cluster
    def _connect(self, address: str) -> Any:
        client = self._distributed.Client.__new__(self._distributed.Client)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # versions are compared by us
                options = {"timeout": self.timeout_s, "set_as_default": False, "name": "prism"}
                _within(lambda: client.__init__(address, **options), self.timeout_s)
            return client
        except Exception as error:  # what answers may be anything
            client.status = "closed"  # or its end waits for a goodbye, and prints a traceback
            raise PrismError(
                f"--scheduler {address}: no Dask scheduler answers within {self.timeout_s:g} s "
                f"({' '.join(str(error).split())[:200]}); start one with `dask scheduler`, and "
                "check address and port"
            ) from error

    def _check_workers(self) -> str:
        """Wait for a worker, and compare what all of them run; returns how many there are."""
        try:
            self.client.wait_for_workers(1, timeout=self.timeout_s)
        except TimeoutError as error:
            raise PrismError(
                f"{self.address}: no worker within {self.timeout_s:g} s; start some with "
                f"`dask worker {self.address}`, or wait longer with --scheduler-timeout"
            ) from error
        try:
            ask = partial(self.client.run, make_probe(), on_error="return")
            probed = _within(ask, self.timeout_s)
        except TimeoutError as error:
            who = ", ".join(self.silent_workers()) or "one of them"
            raise PrismError(
                f"{self.address}: workers do not answer within {self.timeout_s:g} s: {who}; see "
                "whether they are stopped or cut off, and end them, or wait longer with "
                "--scheduler-timeout"
            ) from error
        for worker, found in probed.items():
            if not isinstance(found, tuple):
                raise PrismError(
                    f"worker {worker} cannot run tasks of prism {identity().prism}: {found}; "
                    "install it there, the same version as here"
                )
            refuse_other(worker, identity(), Identity(*found))
        n = len(self.client.nthreads())
        return f"{format_count(n, 'worker')}, {format_count(self.n_threads, 'thread')}"

    @property
    def n_threads(self) -> int:
        """Threads of all workers there are."""
        return sum(self.client.nthreads().values())

    def silent_workers(self) -> list[str]:
        """Find workers that do not say that they live, among the first `_MOST_PINGED`."""
        pinged = list(self.client.nthreads())[:_MOST_PINGED]
        with ThreadPoolExecutor(max_workers=len(pinged) or 1) as pool:
            lives = pool.map(self._lives, pinged)
            return [worker for worker, found in zip(pinged, lives, strict=True) if not found]

    def _lives(self, worker: str) -> bool:
        try:
            _within(lambda: self.client.run(os.getpid, workers=[worker]), _PING_S)
        except Exception:  # it may end meanwhile
            return False
        return True

    def send(self, shared: Shared) -> Any:
        """Bring shared data to the cluster, unless it is there; returns its future."""
        held = self._shared.pop(shared.content, None)
        if held is None or held.status not in ("pending", "finished"):
            # as bytes: unpacked, arrays are the workers' own and can be written; those over a
            # buffer of the network are read-only, for which numba compiles anew
            packed, name = pickle.dumps(shared.value, protocol=5), f"prism-{uuid.uuid4().hex}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its size
                held = self.client.submit(bytes, packed, key=name, pure=False)
        self._shared[shared.content] = held
        while len(self._shared) > KEPT_SHARED:
            self._shared.popitem(last=False)
        return held

    # ------------------------------------------------------------------------------- the tasks
    def run(
        self,
        tasks: Sequence[Task],
        take: Take,
        threads: int,
        store: ChunkStore | None,
        beat: Callable[[], None],
    ) -> None:
        """Run tasks as `run_tasks` does; those in the store are not sent."""
        batch = _Batch(self, take, store)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            opened = pool.map(lambda task: task.open(store), tasks)
            try:
                for i, (shared, key, found) in enumerate(opened):
                    if found is not None:
                        take(i, found)
                        continue
                    batch.submit(i, tasks[i], shared, key)
                    batch.collect(wait=False)
                    beat()
                while batch.waiting:
                    batch.collect(wait=True)
                    beat()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                batch.cancel()
                raise

    def lost(self) -> PrismError:
        """Return the error of a scheduler that is gone."""
        return PrismError(
            f"{self.address}: the scheduler is gone, and with it what was running; start it again, "
            "and give the same command once more (with --resume it goes on where it was)"
        )


class _Sent(NamedTuple):
    """A task in progress."""

    future: Any
    number: int
    task: Task
    shared: Shared
    key: str
    tries: int


class _Batch:
    """Tasks in progress."""

    def __init__(self, remote: Remote, take: Take, store: ChunkStore | None) -> None:
        self.remote, self.take, self.store = remote, take, store
        self.waiting: dict[str, _Sent] = {}  # by its name
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._looked = self._seen = self._asked = time.monotonic()

    def submit(self, number: int, task: Task, shared: Shared, key: str, tries: int = 1) -> None:
        """Send a task."""
        work, name = pickle.dumps((task.function, task.args)), f"prism-task-{uuid.uuid4().hex}"
        future = self.remote.client.submit(
            call, self.remote.send(shared), shared.content, work, tuple(identity()),
            key=name, pure=False,
        )  # fmt: skip
        self.waiting[name] = _Sent(future, number, task, shared, key, tries)
        future.add_done_callback(lambda done: self._done.put(done.key))

    def collect(self, wait: bool) -> None:
        """Take what is done; wait a moment for it if asked to."""
        try:
            name = self._done.get(timeout=BEAT_S) if wait else self._done.get_nowait()
        except queue.Empty:
            self._look()
            return
        self._seen = self._asked = time.monotonic()
        sent = self.waiting.pop(name)
        found = self._result(sent)
        if found is None:
            self.submit(*sent[1:5], tries=sent.tries + 1)
            return
        if self.store is not None and sent.key:
            self.store.save(sent.key, found)
        self.take(sent.number, found)

    def _result(self, sent: _Sent) -> Arrays | None:
        """Return what a task gave; None where that is lost with its worker."""
        address = self.remote.address
        try:
            arrays: Arrays = sent.future.result(timeout=self.remote.timeout_s)
            return arrays
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "prism":
                raise
            raise PrismError(
                f"a worker of {address} has no prism; install it there, the same version as here"
            ) from error
        except self.remote._distributed.KilledWorker as error:
            raise PrismError(
                f"{address}: workers died while at the same task, the last one at "
                f"{error.last_worker.address}; see their logs, and whether they have the memory "
                "that this job takes here"
            ) from error
        except (CancelledError, TimeoutError) as error:
            if self.remote.client.status != "running":
                raise self.remote.lost() from error
            if sent.tries < _TRIES:
                return None
            raise PrismError(
                f"{address}: what a task gave was lost {_TRIES} times with its worker; see the "
                "logs of the workers"
            ) from error

    def _look(self) -> None:
        """Give up where the scheduler, or the last worker, has been gone for long."""
        now, client, timeout_s = time.monotonic(), self.remote.client, self.remote.timeout_s
        if now - self._looked < _LOOK_S:
            return
        self._looked, long = now, now - self._seen > timeout_s
        if client.status == "running" and client.nthreads():
            self._seen = now
            if now - self._asked > timeout_s:
                self._asked = now
                self._report_silent()
        elif client.status == "closed" or (long and client.status != "running"):
            raise self.remote.lost()
        elif long:
            raise PrismError(
                f"{self.remote.address}: no worker is left, for {timeout_s:g} s; start some, or "
                "wait longer with --scheduler-timeout"
            )

    def _report_silent(self) -> None:
        """Tell of workers that do not answer; give up where none does."""
        silent = self.remote.silent_workers()
        who = ", ".join(silent)
        if silent and len(silent) == len(self.remote.client.nthreads()):
            raise PrismError(
                f"{self.remote.address}: no worker answers any more: {who}; see whether they are "
                "stopped or cut off; with --resume the same command goes on where it was"
            )
        if silent:
            self.remote.tell(
                f"workers do not answer: {who}; Dask gives their tasks to others once they have "
                "been silent for its worker-ttl (5 min), or when they are ended"
            )

    def cancel(self) -> None:
        """Stop everything in progress."""
        futures = [sent.future for sent in self.waiting.values()]
        self.waiting.clear()
        with suppress(Exception):
            self.remote.client.cancel(futures, force=True)


def _within(work: Callable[[], Any], timeout_s: float) -> Any:
    """Do what waits for others, in a thread that is left behind when it takes too long.

    Raises
    ------
    TimeoutError
        It did.
    """
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def do() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # for who waits
            done.put((None, error))

    threading.Thread(target=do, daemon=True).start()
    try:
        found, error = done.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return found


def _address_in(file: Path, timeout_s: float) -> str:
    """Read the address that a scheduler wrote into a file, waiting for it to come."""
    end = time.monotonic() + timeout_s
    while True:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(file.read_text(encoding="utf-8"))["address"])
        if time.monotonic() > end:
            found = "holds no address of a scheduler" if file.exists() else "is not there"
            raise PrismError(
                f"--scheduler-file {file}: {found} after {timeout_s:g} s; start a scheduler with "
                f"`dask scheduler --scheduler-file {file}` on a file system that both see"
            )
        time.sleep(min(BEAT_S, timeout_s))
