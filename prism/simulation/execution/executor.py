"""Say where work is done, and where finished chunks are kept, for a block of code.

A context variable holds it, as one `with` serves all analyses, whose arguments say nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prism.common.text import format_count
from prism.simulation.execution.chunks import ChunkStore
from prism.simulation.execution.context import Backend, chosen
from prism.simulation.execution.remote import TIMEOUT_S, Remote


@contextmanager
def run_on(
    scheduler: Any = None,
    *,
    scheduler_file: str | os.PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    resume: str | os.PathLike[str] | None = None,
    command: Mapping[str, Any] | None = None,
    seed: int | None = None,
    fresh_seed: Callable[[], int] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Backend]:
    """Run everything in this block on a Dask cluster, keep finished chunks, or both.

    Parameters
    ----------
    scheduler : str or distributed.Client, optional
        Address of a Dask scheduler, such as ``tcp://10.0.0.1:8786``, or a client, which stays open.
    scheduler_file : path, optional
        File with the address, written by ``dask scheduler --scheduler-file``.
    timeout_s : float
        How long to wait for a scheduler and for workers [s].
    resume : path, optional
        Folder of finished chunks; the same calls with the same seeds take up those of an
        interrupted block. Removed when the block ends well.
    command, seed, fresh_seed
        What the block does and under which seed, for `resume`: a folder of another command is
        refused, and a seed that was not given is taken from the interrupted one.
    tell : callable, optional
        Takes notes for the user.

    Yields
    ------
    Backend
        Where tasks run; seldom needed.

    Raises
    ------
    PrismError
        Nobody answers, workers run another program, or the folder is of another command.

    Examples
    --------
    >>> import prism
    >>> with prism.run_on(resume="parts"):  # or run_on("tcp://10.0.0.1:8786", resume="parts")
    ...     result = prism.simulate("pipeline-8x32", replicates=64, seed=1)
    """
    say = tell or (lambda text: None)
    store = None if resume is None else ChunkStore(resume, command, seed, fresh_seed, say)
    remote = token = None
    try:
        if scheduler is not None or scheduler_file is not None:
            remote = Remote(scheduler, scheduler_file, timeout_s, say)
        token = chosen.set(place := Backend(remote, store))
        yield place
    except BaseException:
        if store is not None and store.kept == 0:
            store.finish()
        raise
    finally:
        if token is not None:
            chosen.reset(token)
        if remote is not None:
            remote.close()
    if store is not None:
        if store.found:
            reused = format_count(store.found, "chunk")
            say(f"{store.directory}: {reused} reused, {store.computed} computed")
        store.finish()
