"""Where compiled code is kept, and the decorators that compile.

Numba's cache knows a function's own file only: what is called in another file would stay as it was
compiled. So the folder is named by a hash of all sources of this package. And Numba believes what
it finds, where a changed bit is a crash: so each file ends with a hash of what is before it, each
compilation is kept with its key, and a file that fails either check is as one that is not there.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numba
from numba.core import caching, codegen

config: Any = numba.config  # its attributes are made as it is loaded
dispatcher: Any = numba.core.dispatcher  # not typed

# Without counts of references, half of the code: so no function makes an array, it is given room.
compiled: Callable[..., Any] = partial(
    numba.njit, cache=True, nogil=True, no_cfunc_wrapper=True, _nrt=False
)
DIGEST = 16  # bytes of a file's hash
jit = compiled()
inner = compiled(no_cpython_wrapper=True)  # for compiled callers: to unpack arrays takes seconds
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


def is_kept(function: Any) -> bool:
    """Say whether a function was compiled before, or nothing is kept of it."""
    file = getattr(getattr(function, "_cache", None), "_cache_file", None)
    return file is None or os.path.exists(file._index_path)


def compile_for(function: Any, *args: Any) -> None:
    """Compile a function, unless it is compiled, for arguments of these types, and keep it."""
    function.compile(tuple(map(numba.typeof, args)))


def choose_features() -> str | None:
    """Give the processor's features, and vectors as wide as it has them; None: Numba's own choice.

    LLVM uses half of AVX-512's width, since processors once slowed down for the whole. A block of
    64 replicates takes 12 to 20 % less with it on Xeons of 2023 (AVX-512 FP16), the same bits.
    """
    given: str | None = config.CPU_FEATURES
    if config.CPU_NAME is not None or given is not None:
        return given
    features: str = codegen.get_host_cpu_features()
    return f"{features},-prefer-256-bit" if "+avx512fp16" in features.split(",") else None


@contextmanager
def kept_together() -> Iterator[None]:
    """Keep what is imported inside in one folder, named by the sources of this package."""
    before = config.CACHE_DIR, dispatcher.FunctionCache, config.CPU_FEATURES
    config.CPU_FEATURES = choose_features()  # until the first function is made
    name = f"engine-{hash_sources(Path(__file__).parent)}"
    config.CACHE_DIR = os.path.join(choose_folder(), name)
    dispatcher.FunctionCache = make_cache
    try:
        yield
    finally:
        config.CACHE_DIR, dispatcher.FunctionCache, config.CPU_FEATURES = before
