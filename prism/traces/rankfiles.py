"""The files of a trace's ranks read one by one, whatever profiler wrote them.

A file that somebody named has to be right; one that was only found in a folder is left out with a
note where it is not. Left out: how a file is read (kinetorank.py, nsys.py, chakra.py), and how
ranks are put together (`prism.traces.kineto.join_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from prism.common.errors import PrismError
from prism.traces.salvage import no_collection

Content = TypeVar("Content")


def read_each(
    paths: Sequence[str | Path], found: Collection[Path], read: Callable[[Path], Content]
) -> tuple[list[tuple[Path, Content]], list[str]]:
    """Read each file."""
    done: list[tuple[Path, Content]] = []
    notes: list[str] = []
    first: PrismError | None = None
    for path in map(Path, paths):
        try:
            with no_collection():
                done.append((path, read(path)))
        except PrismError as error:
            if path not in found or len(paths) == 1:
                raise
            first = first or error
            notes.append(f"left out: {error}")
    if first is not None and not done:
        raise first
    return done, notes
