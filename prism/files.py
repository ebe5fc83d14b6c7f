"""Output files that are either complete or not there, and netCDF files read whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prism.errors import PrismError

if TYPE_CHECKING:
    import xarray as xr

PART = ".part"
"""Ending of temporary folders."""


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
        _to_disk(temporary)
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

    Notes
    -----
    What fails, or is interrupted, on the way puts back the files that were there. A process that
    is killed leaves its temporary folder, which the next one removes.
    """
    directory = Path(directory)
    check_directory(directory)
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_left(directory)
        temporary = Path(tempfile.mkdtemp(prefix=".", suffix=PART, dir=directory))
        held = _hold(temporary)
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    done = False
    try:
        yield temporary
        _move_all(temporary, directory)
        done = True
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)
        if made and not done:
            shutil.rmtree(directory, ignore_errors=True)


def _move_all(source: Path, directory: Path) -> None:
    """Move all files of a folder into another, or none: those moved before a failure go back."""
    files = sorted(file for file in source.iterdir() if file.is_file())
    for file in files:
        _to_disk(file)
    before = source / "before"
    before.mkdir()
    moved: list[str] = []
    try:
        for file in files:
            target = directory / file.name
            moved.append(file.name)
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{file.name} there is a folder")
            if target.exists():
                target.replace(before / file.name)
            file.replace(target)
    except BaseException:
        for name in reversed(moved):
            if (before / name).exists():
                (before / name).replace(directory / name)
            elif not (source / name).exists():
                (directory / name).unlink(missing_ok=True)
        raise


def _hold(folder: Path) -> int | None:
    """Mark a temporary folder as in use while this process lives; None where that is not to be."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _remove_left(directory: Path) -> None:
    """Remove the temporary folders of processes that were killed."""
    for folder in directory.glob(f".*{PART}"):
        held = _hold(folder) if folder.is_dir() else None
        if held is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def _to_disk(file: Path) -> None:
    """Have the system write a file out, so that a name never outlives its content."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_directory(directory: str | os.PathLike[str], option: str = "-o") -> None:
    """Refuse a folder of an option that cannot be written, before any work is done for it.

    Raises
    ------
    PrismError
        If the name is a file, or neither it nor the nearest folder above it is writable.
    """
    directory = Path(directory)
    try:
        if directory.exists() and not directory.is_dir():
            raise PrismError(
                f"{directory}: is a file; expected a folder, choose another with {option}"
            )
        above = directory.absolute()
        while not above.exists():
            above = above.parent
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    if not above.is_dir():
        raise PrismError(
            f"{directory}: {above} is a file, not a folder; choose another with {option}"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise PrismError(
            f"{directory}: no permission to write in {above}; choose another with {option}"
        )


def _cannot_write(path: Path, error: OSError) -> str:
    """Message for a failed write, under the name that a file was to get in the end."""
    path = Path(*(part for part in path.parts if not (part[0] == "." and part.endswith(PART))))
    return f"{path}: cannot write: {error.strerror or error}; choose another place, or make room"


def _umask() -> int:
    """Return the file mode mask of the process; the system only tells it by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_netcdf(path: str | os.PathLike[str], expected: str) -> xr.Dataset:
    """Read a netCDF file whole, and close it.

    Parameters
    ----------
    path : str or path
        The file.
    expected : str
        What it was to be, and how such a file is made.

    Raises
    ------
    PrismError
        It is no netCDF file, or is cut short.
    """
    import xarray as xr

    try:
        with xr.open_dataset(path, engine="h5netcdf") as dataset:
            return dataset.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise PrismError(
            f"{path}: not a netCDF file, or not a whole one; expected {expected}"
        ) from error
