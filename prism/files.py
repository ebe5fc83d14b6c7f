"""Output files that are either complete or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prism.errors import PrismError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name beside ``path`` and rename it to ``path`` at the end.

    Parameters
    ----------
    path : str or os.PathLike
        The file to write; an existing one is replaced only by a complete new one.

    Yields
    ------
    Path
        The name to write to, with the same suffix.

    Raises
    ------
    PrismError
        If the place cannot be written.
    """
    path = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
        os.close(descriptor)
    except OSError as error:
        raise PrismError(_cannot_write(path, error)) from error
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise PrismError(_cannot_write(path, error)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Collect files in a temporary folder and move them into ``directory`` at the end.

    Parameters
    ----------
    directory : str or os.PathLike
        Where the files go; made where it does not exist. Files of the same names are replaced,
        others are left alone.

    Yields
    ------
    Path
        The folder to write to.

    Raises
    ------
    PrismError
        If the place cannot be written.
    """
    directory = Path(directory)
    check_directory(directory)
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=directory))
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    done = False
    try:
        yield temporary
        for file in sorted(temporary.iterdir()):
            file.replace(directory / file.name)
        done = True
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and not done:
            shutil.rmtree(directory, ignore_errors=True)


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Refuse an output folder that cannot be written, before any work is done for it.

    Raises
    ------
    PrismError
        If the name is a file, or neither it nor the nearest folder above it is writable.
    """
    directory = Path(directory)
    try:
        if directory.exists() and not directory.is_dir():
            raise PrismError(f"{directory}: is a file; expected a folder, choose another with -o")
        above = directory.absolute()
        while not above.exists():
            above = above.parent
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    if not above.is_dir():
        raise PrismError(f"{directory}: {above} is a file, not a folder; choose another with -o")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PrismError(f"{directory}: no permission to write in {above}; choose another with -o")


def _cannot_write(path: Path, error: OSError) -> str:
    """Message for a failed write."""
    return f"{path}: cannot write: {error.strerror or error}; choose another place, or make room"


def _umask() -> int:
    """Return the file mode mask of the process; the system only tells it by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
