"""How long a distributed training run takes, with what probability, and why that varies.

Everything a command calls is here and is loaded when it is first used, so that
``import prism`` and ``prism --help`` stay fast. Results are :class:`xarray.Dataset`.
The names live in ``__init__.pyi``, which type checkers and the lazy loader both read.
"""

import os as _os

import lazy_loader as _lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)


def _can_write(path: str) -> bool:
    """Say whether a folder can be written, or made."""
    while not _os.path.lexists(path) and path != (above := _os.path.dirname(path)):
        path = above
    return _os.path.isdir(path) and _os.access(path, _os.W_OK | _os.X_OK)


def _cache_in_temp() -> str:
    """Folder for compiled code: kept if it is ours and closed to others, else for this process.

    Numba's index is a pickle: whoever writes it runs code here.
    """
    import stat
    import tempfile

    path = _os.path.join(tempfile.gettempdir(), f"prism-{__version__}-{_os.getuid()}")
    try:
        if not _os.path.lexists(path):
            _os.mkdir(path, 0o700)
        found = _os.lstat(path)  # of a link itself
        if found.st_uid == _os.getuid() and found.st_mode == stat.S_IFDIR | 0o700:
            return path
    except OSError:
        pass
    import atexit
    import shutil

    path = tempfile.mkdtemp(prefix="prism-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _place_cache() -> None:
    """Find a place for compiled code where numba finds none, and would refuse to run at all.

    It takes NUMBA_CACHE_DIR, else a folder beside the sources, else one below the user's home.
    """
    given = _os.environ.get("NUMBA_CACHE_DIR", "")
    home = _os.environ.get("XDG_CACHE_HOME") or _os.path.expanduser("~/.cache")
    places = [_os.path.join(_os.path.dirname(__file__), "__pycache__"), home]
    if any(map(_can_write, [_os.path.abspath(given)] * bool(given) + places)):
        return
    _os.environ["NUMBA_CACHE_DIR"] = path = _cache_in_temp()
    if given:
        import sys

        said = f"NUMBA_CACHE_DIR {given!r} cannot be written; compiled code goes to {path}"
        print(f"prism: warning: {said}", file=sys.stderr)


_place_cache()
