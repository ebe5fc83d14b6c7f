"""What runs on the workers of a cluster: a task, after a look at whether they run the same program.

Nothing here needs or knows Dask.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from prism.common.errors import PrismError
from prism.simulation.execution.content import Identity, identity
from prism.simulation.execution.tasks import Arrays

KEPT_BYTES = 1 << 29
"""Shared data that a worker keeps unpacked [B]."""
_unpacked: OrderedDict[str, tuple[int, Any]] = OrderedDict()
_lock = threading.Lock()


def call(packed: bytes, content: str, work: bytes, expected: Sequence[str]) -> Arrays:
    """Run a task on a worker: unpack the shared data once, and call the task's function."""
    refuse_other(os.uname().nodename, Identity(*expected), identity())
    function, args = pickle.loads(work)
    with _lock:
        _, value = _unpacked.pop(content, (0, None))
        if value is None:
            value = pickle.loads(packed)
        _unpacked[content] = len(packed), value
        while len(_unpacked) > 1 and sum(size for size, _ in _unpacked.values()) > KEPT_BYTES:
            _unpacked.popitem(last=False)
    arrays: Arrays = function(value, *args)
    return arrays


def refuse_other(worker: str, expected: Identity, found: Identity) -> None:
    """Refuse a worker that runs another program."""
    apart = expected.differences(found)
    if apart:
        raise PrismError(
            f"worker {worker} runs another program: {apart}; results would not be the same to the "
            "bit; install the same versions on both"
        )


def make_probe() -> Callable[[], tuple[str, ...] | str]:
    """Return a function that says what a worker runs; it is sent whole, as prism may be missing."""

    def probe() -> tuple[str, ...] | str:
        try:
            from prism.simulation.execution.content import identity

            return tuple(identity())
        except Exception as error:
            try:
                import prism

                return f"it has prism {prism.__version__}"
            except Exception:
                return f"{type(error).__name__}: {error}"

    return probe
