"""Where compiled code is kept, and the decorators that compile.

Numba's cache knows a function's own file only: what is called in another file would stay as it was
compiled. So the folder is named by a hash of all sources of this package.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numba

config: Any = numba.config  # its attributes are made as it is loaded

compiled: Callable[..., Any] = partial(numba.njit, cache=True, nogil=True)
jit = compiled()
inlined = compiled(inline="always")


def hash_sources(folder: Path) -> str:
    """Hash the names and contents of all sources in a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def can_write(path: str) -> bool:
    """Say whether a folder can be written, or made."""
    while not os.path.lexists(path) and path != (above := os.path.dirname(path)):
        path = above
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def folder_in_temp() -> str:
    """Folder below the system's temporary one: kept if it is ours and closed to others.

    Numba's index is a pickle: whoever writes it runs code here. Else it is for this process alone.
    """
    import stat
    import tempfile

    path = os.path.join(tempfile.gettempdir(), f"prism-{os.getuid()}")
    try:
        if not os.path.lexists(path):
            os.mkdir(path, 0o700)
        found = os.lstat(path)  # of a link itself
        if found.st_uid == os.getuid() and found.st_mode == stat.S_IFDIR | 0o700:
            return path
    except OSError:
        pass
    import atexit
    import shutil

    path = tempfile.mkdtemp(prefix="prism-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def choose_folder() -> str:
    """Find NUMBA_CACHE_DIR, a folder beside the sources, or one below the user's home or temp."""
    given = os.environ.get("NUMBA_CACHE_DIR", "")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [os.path.abspath(given)] * bool(given)
    places += [os.path.join(os.path.dirname(__file__), "__pycache__"), os.path.join(home, "prism")]
    path = next(filter(can_write, places), None) or folder_in_temp()
    if given and path != places[0]:
        said = f"NUMBA_CACHE_DIR {given!r} cannot be written; compiled code goes to {path}"
        print(f"prism: warning: {said}", file=sys.stderr)
    return path


@contextmanager
def kept_together() -> Iterator[None]:
    """Keep what is imported inside in one folder, named by the sources of this package."""
    before = config.CACHE_DIR
    name = f"engine-{hash_sources(Path(__file__).parent)}"
    config.CACHE_DIR = os.path.join(choose_folder(), name)
    try:
        yield
    finally:
        config.CACHE_DIR = before
