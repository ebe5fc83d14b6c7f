"""Run tasks on the workers of a Dask scheduler.

Shared data goes to the cluster once, under its content's hash, and stays there; results come back
through the scheduler, so that only that has to be reachable. A worker that dies takes nothing with
it: its tasks, and data that only it had, are sent again. On each machine one worker goes first, so
that code is compiled once. Left out: starting workers, and closing them.
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
MOST_TRIES = 20
"""Times that a task is sent, where what it needs was lost with a worker."""
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
        self._warm: set[tuple[str, str]] = set()  # kinds of task, and machines that have run them
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

    def cold_workers(self, kind: str) -> list[str]:
        """One worker of every machine that has not run this kind of task, as far as we know."""
        out: dict[str, str] = {}
        for worker in sorted(self.client.nthreads()):
            out.setdefault(worker.rsplit(":", 1)[0], worker)
        cold = [machine for machine in out if (kind, machine) not in self._warm]
        self._warm |= {(kind, machine) for machine in cold}
        return [out[machine] for machine in cold]

    def send(self, shared: Shared) -> Any:
        """Bring shared data to the cluster, unless it is there; returns its future."""
        held = self._shared.pop(shared.content, None)
        if held is None or held.status != "finished":
            name = f"prism-{shared.content[:32]}-{uuid.uuid4().hex[:8]}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                held = self.client.scatter({name: shared.packed}, direct=False)[name]
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
    """A task under way: its number, its key, its shared data, and how often it was sent before."""

    number: int
    key: str
    shared: Shared
    tries: int = 0


class _Batch:
    """Tasks under way, by their futures."""

    def __init__(
        self, remote: Remote, tasks: Sequence[Task], take: Take, store: ChunkStore | None
    ) -> None:
        self.remote, self.tasks, self.take, self.store = remote, tasks, take, store
        self.waiting: dict[str, tuple[Any, _Sent]] = {}
        self._cold: dict[str, list[str]] = {}  # workers that go first, by kind of task
        self._held: list[_Sent] = []  # until those are done
        self._first: set[str] = set()  # futures of those that go first
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._looked = self._seen = time.monotonic()

    def submit(self, sent: _Sent) -> None:
        """Send a task; of each kind one per machine first, the others when those are done."""
        kind = _kind(self.tasks[sent.number])
        if kind not in self._cold:
            self._cold[kind] = self.remote.cold_workers(kind)
        if self._cold[kind]:
            self._start(sent, worker=self._cold[kind].pop())
        elif self._first:
            self._held.append(sent)
        else:
            self._start(sent)

    def _start(self, sent: _Sent, worker: str | None = None) -> None:
        task, name = self.tasks[sent.number], f"prism-task-{sent.key[:32]}-{uuid.uuid4().hex[:8]}"
        work = pickle.dumps((_kind(task), task.args), protocol=5)  # as bytes, see `Shared.packed`
        where = {} if worker is None else {"workers": [worker], "allow_other_workers": True}
        data = self._send(sent.shared)
        future = self.remote.client.submit(
            call, data, sent.shared.content, work, tuple(identity()),
            key=name, pure=False, **where,
        )  # fmt: skip
        self.waiting[name] = future, sent
        if worker is not None:
            self._first.add(name)
        future.add_done_callback(lambda done: self._done.put(done.key))

    def _send(self, shared: Shared) -> Any:
        """Bring shared data to the cluster; where a worker dies with it, to another one."""
        end = time.monotonic() + self.remote.timeout_s
        while True:
            try:
                return self.remote.send(shared)
            except (OSError, CancelledError) as error:
                # the scheduler sends to a worker that died until it has taken note of that
                if self.remote.client.status != "running":
                    raise self.remote.lost() from error
                if time.monotonic() > end:
                    raise self.remote.deserted() from error
            time.sleep(BEAT_S)

    def collect(self, wait: bool) -> None:
        """Take what is done; wait a moment for it if asked to."""
        try:
            name = self._done.get(timeout=BEAT_S) if wait else self._done.get_nowait()
        except queue.Empty:
            self._look()
            return
        self._seen = time.monotonic()
        future, sent = self.waiting.pop(name)
        self._first.discard(name)
        found = self._result(future, sent)
        if found is None:
            self._again(sent)
        else:
            if self.store is not None:
                self.store.save(sent.key, found)
            self.take(sent.number, found)
        if not self._first and self._held:
            held, self._held = self._held, []
            for waiting in held:
                self._start(waiting)

    def _result(self, future: Any, sent: _Sent) -> Arrays | None:
        """Return what a task gave; None where it is to be sent again."""
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
        except (CancelledError, TimeoutError) as error:  # lost with a worker, or the scheduler
            if sent.tries >= MOST_TRIES or self.remote.client.status != "running":
                raise self.remote.lost() from error
            return None

    def _again(self, sent: _Sent) -> None:
        self.remote._shared.pop(sent.shared.content, None)
        again = sent._replace(tries=sent.tries + 1)
        self._start(again)

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


def _kind(task: Task) -> str:
    return f"{task.function.__module__}:{task.function.__qualname__}"


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
