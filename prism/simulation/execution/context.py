"""What a call draws and runs with: made once where users call, and handed down whole.

What only draws takes a seed, what runs tasks a `RunContext`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.common import sizes
from prism.common.errors import PrismError, option
from prism.common.sizes import check_size

if TYPE_CHECKING:
    from prism.simulation.execution.chunks import ChunkStore
    from prism.simulation.execution.remote import Remote

Progress = Callable[[int, int], None]
MAX_SEED = 1 << 63


@dataclass(frozen=True)
class Backend:
    """Where tasks are run: on workers if there is a remote; what is finished is kept in a store."""

    remote: Remote | None = None
    store: ChunkStore | None = None


_HERE = Backend()
chosen: ContextVar[Backend] = ContextVar("prism_backend", default=_HERE)
"""What `run_on` set, for calls within its block; read where a context is made, and only there."""


@dataclass(frozen=True)
class RunContext:
    """Seed of all draws, threads of this process, where progress goes, where tasks run."""

    seed: int
    threads: int = 1
    progress: Progress | None = None
    backend: Backend = field(default_factory=chosen.get)

    @property
    def quiet(self) -> RunContext:
        """The same for a part of the work, without progress."""
        return replace(self, progress=None)

    def under(self, seed: int) -> RunContext:
        """Return the same under another seed, quiet."""
        return replace(self, seed=seed, progress=None)

    def report(self, done: int, whole: int) -> None:
        """Say how much is done of the whole."""
        if self.progress is not None:
            self.progress(done, whole)

    @property
    def is_remote(self) -> bool:
        """Whether tasks are run on workers."""
        return self.backend.remote is not None

    @property
    def keeps_tasks(self) -> bool:
        """Whether tasks are sent away or kept, and should be long for it."""
        return self.is_remote or self.backend.store is not None

    @property
    def n_working(self) -> int:
        """Threads that do the work: the workers', or those of this process."""
        remote = self.backend.remote
        return min(self.threads, cores()) if remote is None else remote.n_threads


def make_context(
    seed: int | None = None, threads: int | None = None, progress: Progress | None = None,
    replicates: int = 1,
) -> RunContext:  # fmt: skip
    """Return the context of a call: a fresh seed, and as many threads as there are, if not given.

    Raises
    ------
    PrismError
        A number is out of range; it names the number and its range.
    """
    seed = fresh_seed() if seed is None else seed
    threads = cores() if threads is None else threads
    check_whole("replicates", replicates, 1)
    check_whole("seed", seed, 0, MAX_SEED - 1)
    check_whole("threads", threads, 1)
    name = option("replicates")
    check_size(name, {"replicates": (replicates, sizes.REPLICATE)}, name)
    return RunContext(seed, threads, progress)


def fresh_seed() -> int:
    """Return a seed from fresh entropy, below 2**53 so that every JSON reader keeps it whole."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(11))


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse an argument that is no whole number within its bounds."""
    text = f"at least {low}" if high is None else f"between {low} and {high:.0e}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise PrismError(f"{option(name)} = {value!r}: expected a whole number, {text}")
    if value < low or (high is not None and value > high):
        raise PrismError(f"{option(name)} = {value}: expected {text}")
