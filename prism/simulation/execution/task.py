"""A task: a function of the package, large data that many tasks share, and a few arguments.

It gives arrays, and has a name by its content, under which they can be kept. Where and in which
order tasks are run is `prism.simulation.execution.tasks`.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism.simulation.execution.content import content_hash, identity

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
        Small, and of the kinds that `prism.simulation.execution.content.content_hash` knows.
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


def as_arrays(*values: Any) -> Arrays:
    """Turn numbers and arrays into what a task gives."""
    return tuple(np.asarray(value) for value in values)
