"""What is kept of compiled code, by classes of Numba's that no interface promises.

Numba's cache knows a function's own file only: what is called in another file would stay as it was
compiled. So the folder, `engine_folder`, is that of all sources of this package. And Numba believes
what it finds, where a changed bit is a crash: so each file ends with a hash of what is before it,
each compilation is kept with its key, and a file that fails either check is as one that is not
there.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from numba.core import caching

DIGEST = 16  # bytes of a file's hash


def hash_contents(data: bytes) -> bytes:
    """Hash that stands at the end of each file."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def is_intact(path: str) -> bool:
    """Say whether a file can be read and ends with the hash of what is before it."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    return len(data) > DIGEST and data[-DIGEST:] == hash_contents(data[:-DIGEST])


class CheckedFiles(caching.IndexDataCacheFile):
    """Numba's index and compilations, each with a hash; unpickling stops before it."""

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        with super()._open_for_write(filepath) as file:
            written = io.BytesIO()
            yield written
            file.write(written.getvalue() + hash_contents(written.getvalue()))

    def _load_index(self) -> dict[Any, str]:
        return super()._load_index() if is_intact(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        return super()._load_data(name) if is_intact(self._data_path(name)) else (None, None)

    def save(self, key: Any, data: Any) -> None:
        """Keep what was compiled for a key."""
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        """Find what was compiled for a key: two processes can write the same file for two keys."""
        found = super().load(key)
        return found[1] if found is not None and found[0] == key else None


class CheckedImpl(caching.CompileResultCacheImpl):
    """What Numba keeps of a function, in the folder that is named here and no other."""

    _locator_classes = [caching.UserProvidedCacheLocator]


class CheckedCache(caching.FunctionCache):
    """Numba's cache of a function, which a full disk does not stop."""

    _impl_class = CheckedImpl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file.__class__ = CheckedFiles

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, where there is room."""
        with suppress(OSError):
            super().save_overload(sig, data)


def make_cache(function: Callable[..., Any]) -> Any:
    """Keep what a function compiles to, or nothing where its folder cannot be written."""
    try:
        return CheckedCache(function)
    except RuntimeError:
        return caching.NullCache()
