"""Where the engine's compiled code is kept, and a second process that compiles most of it.

Numba compiles in one thread at a time, and half of it is Python. So where nothing is kept, a
command starts another process before it imports anything; each finds in the folder what the other
compiled. What is late or fails is compiled here as well. A call of the library starts none: the
program that it is in may be no Python, or not expect one beside it.
"""

import atexit
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "engine"
LAST = "run_blocks"  # the function that is compiled last
WAIT_S = 60.0  # for the other process, which is about as quick as this one
# no garbage collection, which finds little in a tenth of the time, and no SciPy for Numba, whose
# matrix products nothing here has
COMPILE = """
import gc, sys
gc.disable()
sys.modules["scipy.linalg.cython_blas"] = None
from prism.engine import compile_blocks
compile_blocks()
"""

_asked = False
_other: "subprocess.Popen[bytes] | None" = None


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
    import shutil

    path = tempfile.mkdtemp(prefix="prism-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def choose_folder() -> str:
    """Find NUMBA_CACHE_DIR, or a folder in the user's cache, or below the temporary one."""
    given = os.environ.get("NUMBA_CACHE_DIR", "")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [os.path.abspath(given)] * bool(given)
    places.append(os.path.join(home, "prism"))
    path = next(filter(can_write, places), None) or folder_in_temp()
    if given and path != places[0]:
        said = f"NUMBA_CACHE_DIR {given!r} cannot be written; compiled code goes to {path}"
        print(f"prism: warning: {said}", file=sys.stderr)
    return path


@lru_cache(maxsize=1)
def engine_folder() -> str:
    """Find the folder of the engine as its sources are now."""
    return os.path.join(choose_folder(), f"engine-{hash_sources(SOURCES)}")


def start_compiling() -> None:
    """Start the other process, once, where nothing is compiled."""
    global _asked, _other
    if not _asked:
        _asked = True
        kept = any(Path(engine_folder()).glob(f"*/*.{LAST}-*.nbi"))
        python = sys.executable and not getattr(sys, "frozen", False)
        if python and not kept and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0":
            none = subprocess.DEVNULL
            with suppress(OSError):
                _other = subprocess.Popen(  # -P: no modules of the folder that it is in
                    [sys.executable, "-P", "-c", COMPILE], stdin=none, stdout=none, stderr=none,
                    env=os.environ | {"PYTHONWARNINGS": "ignore"},
                )  # fmt: skip
                atexit.register(_end, _other)


def is_compiling() -> bool:
    """Tell whether another process was started that was not waited for."""
    return _other is not None


def finish_compiling() -> None:
    """Wait for the other process, if one was started."""
    global _other
    if _other is not None:
        other, _other = _other, None
        with suppress(subprocess.TimeoutExpired):
            other.wait(WAIT_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
