"""Run tasks on the workers of a Dask scheduler.

Shared data goes to the cluster once, under its content's hash, as a task of its own; results come
back through the scheduler, so that only that has to be reachable. A worker that dies takes nothing
with it: Dask runs its tasks, and those that hold shared data, on another one.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prism.common.errors import PrismError
from prism.simulation.execution.content import Identity, identity
from prism.simulation.execution.task import BEAT_S, WORTH_S, Arrays, Shared, Take, Task
from prism.simulation.execution.worker import call, make_probe, refuse_other

if TYPE_CHECKING:
    from prism.simulation.execution.chunks import ChunkStore

TIMEOUT_S = 30.0
"""How long to wait for a scheduler, for a first worker, and for another one after the last [s]."""
KEPT_SHARED = 64
"""Shared data held on the cluster, the latest."""
_LOOK_S = 2.0  # between two looks at whether workers are there


class Remote:
    """A Dask client, and what was sent to its cluster.

    Parameters
    ----------
    scheduler : str, distributed.Client or None
        Address, such as ``tcp://10.0.0.1:8786``, or a client, which stays open.
    scheduler_file : path, optional
        File that ``dask scheduler --scheduler-file`` writes.
    tell : callable, optional
        Takes notes for the user.

    Raises
    ------
    PrismError
        Dask is not installed, nobody answers, or workers run another program.
    """

    def __init__(
        self,
        scheduler: Any = None,
        scheduler_file: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._shared: OrderedDict[str, Any] = OrderedDict()
        self._levels: dict[str, int] = {}
        self._own = scheduler is None or isinstance(scheduler, str)
        with suppress(ImportError):
            import distributed

            self._distributed: Any = distributed
        if not hasattr(self, "_distributed"):
            raise PrismError(
                "--scheduler needs Dask, which is not installed; pip install 'distributed>=2024.10'"
            )
        if self._own:
            self._hush()
            address = scheduler
            if scheduler_file is not None:
                address = _address_in(Path(scheduler_file), timeout_s)
            self.client = self._connect(address)
        else:
            self.client = scheduler
        self.address = str(self.client.scheduler.address)
        try:
            workers = self._check_workers()
            if tell is not None:
                tell(f"{self.address}: {workers}")
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
                client.__init__(address, timeout=self.timeout_s, set_as_default=False, name="prism")
            return client
        except (OSError, TimeoutError, ValueError, TypeError) as error:
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
        for worker, found in self.client.run(make_probe(), on_error="return").items():
            if not isinstance(found, tuple):
                raise PrismError(
                    f"worker {worker} cannot run tasks of prism {identity().prism}: {found}; "
                    "install it there, the same version as here"
                )
            refuse_other(worker, identity(), Identity(*found))
        threads = self.client.nthreads()
        n = len(threads)
        return f"{n} worker{'s' * (n > 1)}, {sum(threads.values())} threads"

    @property
    def n_threads(self) -> int:
        """Threads of all workers there are."""
        return sum(self.client.nthreads().values())

    def send(self, shared: Shared) -> Any:
        """Bring shared data to the cluster, unless it is there; returns its future."""
        held = self._shared.pop(shared.content, None)
        if held is None or held.status not in ("pending", "finished"):
            name = f"prism-{shared.content[:32]}-{uuid.uuid4().hex[:8]}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its size
                held = self.client.submit(bytes, shared.packed, key=name, pure=False)
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
        beat: Callable[[], None] | None,
    ) -> None:
        """Run tasks as `run_tasks` does; those in the store are not sent."""
        batch = _Batch(self, tasks, take, store)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            opened = pool.map(lambda task: _open(task, store), tasks)
            try:
                for i, (key, shared, found) in enumerate(opened):
                    if found is not None:
                        take(i, found)
                        continue
                    batch.submit(_Sent(i, key, shared))
                    batch.collect(wait=False)
                    if beat is not None:
                        beat()
                while batch.waiting:
                    batch.collect(wait=True)
                    if beat is not None:
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

    def deserted(self) -> PrismError:
        """Return the error of a scheduler that has no workers any more."""
        return PrismError(
            f"{self.address}: no worker is left, for {self.timeout_s:g} s; start some, or wait "
            "longer with --scheduler-timeout"
        )


class _Sent(NamedTuple):
    """A task under way: its number, its key, and its shared data."""

    number: int
    key: str
    shared: Shared


class _Batch:
    """Tasks under way, by their futures."""

    def __init__(
        self, remote: Remote, tasks: Sequence[Task], take: Take, store: ChunkStore | None
    ) -> None:
        self.remote, self.tasks, self.take, self.store = remote, tasks, take, store
        self.waiting: dict[str, tuple[Any, _Sent]] = {}
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._looked = self._seen = time.monotonic()

    def submit(self, sent: _Sent) -> None:
        """Send a task."""
        task, name = self.tasks[sent.number], f"prism-task-{sent.key[:32]}-{uuid.uuid4().hex[:8]}"
        kind = f"{task.function.__module__}:{task.function.__qualname__}"
        work = pickle.dumps((kind, task.args), protocol=5)  # as bytes, see `Shared.packed`
        future = self.remote.client.submit(
            call, self.remote.send(sent.shared), sent.shared.content, work, tuple(identity()),
            key=name, pure=False,
        )  # fmt: skip
        self.waiting[name] = future, sent
        future.add_done_callback(lambda done: self._done.put(done.key))

    def collect(self, wait: bool) -> None:
        """Take what is done; wait a moment for it if asked to."""
        try:
            name = self._done.get(timeout=BEAT_S) if wait else self._done.get_nowait()
        except queue.Empty:
            self._look()
            return
        self._seen = time.monotonic()
        future, sent = self.waiting.pop(name)
        found = self._result(future)
        if self.store is not None:
            self.store.save(sent.key, found)
        self.take(sent.number, found)

    def _result(self, future: Any) -> Arrays:
        """Return what a task gave."""
        try:
            arrays: Arrays = future.result(timeout=self.remote.timeout_s)
            return arrays
        except PrismError:
            raise
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "prism":
                raise
            raise PrismError(
                f"a worker of {self.remote.address} has no prism; install it there, the same "
                "version as here"
            ) from error
        except self.remote._distributed.KilledWorker as error:
            raise PrismError(
                f"{self.remote.address}: workers died while at the same task, the last one at "
                f"{error.last_worker.address}; see their logs, and whether they have the memory "
                f"that this job takes here"
            ) from error
        except (CancelledError, TimeoutError) as error:
            raise self.remote.lost() from error

    def _look(self) -> None:
        """Give up where the scheduler, or the last worker, has been gone for long."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked, client = now, self.remote.client
        if client.status == "running" and client.nthreads():
            self._seen = now
        elif client.status == "closed":
            raise self.remote.lost()
        elif now - self._seen > self.remote.timeout_s:
            if client.status != "running":
                raise self.remote.lost()
            raise self.remote.deserted()

    def cancel(self) -> None:
        """Stop everything under way."""
        futures = [future for future, _ in self.waiting.values()]
        self.waiting.clear()
        with suppress(Exception):
            self.remote.client.cancel(futures, force=True)


def _open(task: Task, store: ChunkStore | None) -> tuple[str, Shared, Arrays | None]:
    """Build a task's shared data, and look for what it gave before."""
    shared = task.open()
    key = task.key(shared)
    kept = store is not None and task.seconds >= WORTH_S
    return key, shared, store.load(key) if kept and store is not None else None


def _address_in(file: Path, timeout_s: float) -> str:
    """Read the address that a scheduler wrote into a file, waiting for it to come."""
    end, found = time.monotonic() + timeout_s, "is not there"
    while True:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(file.read_text(encoding="utf-8"))["address"])
        if file.exists():
            found = "holds no address of a scheduler"
        if time.monotonic() > end:
            raise PrismError(
                f"--scheduler-file {file}: {found} after {timeout_s:g} s; start a scheduler with "
                f"`dask scheduler --scheduler-file {file}` on a file system that both see"
            )
        time.sleep(min(BEAT_S, timeout_s))
