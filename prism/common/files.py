"""Output files that are either complete or not there, and inputs read within stated bounds."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prism.common.errors import PrismError
from prism.common.pipes import held

if TYPE_CHECKING:
    pass

OWN, PART = ".prism-", ".part"
"""How temporary names begin, and how those of folders end: nothing else is ever removed."""
GZIP = b"\x1f\x8b"
MOST_TRACE = 2 << 30
"""Bytes of a profiler's file, unpacked, at most: reading takes three times as much memory."""
MOST_TEXT = 256 << 20  # the same of a table or log: a million steps with 250 characters each
DENSEST = 100
"""Bytes that a packed one may stand for beyond `SMALL` ones: measured traces have 13 to 23."""
SMALL = 64 << 20
_PIECE = 1 << 16  # packed bytes at a time


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name of the same suffix beside ``path``, and rename it at the end."""
    path = Path(path)
    temporary = path.parent / f"{OWN}{secrets.token_hex(8)}{path.suffix}"
    try:
        # the system itself applies the umask, which belongs to the whole process
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        raise PrismError(_cannot_write(path, error)) from error
    try:
        yield temporary
        _to_disk(temporary)
        temporary.replace(path)
    except OSError as error:
        raise PrismError(_cannot_write(path, error)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Collect files in a temporary folder and move them into ``directory`` at the end.

    It is made where it does not exist; files of the same names are replaced, others left alone.
    What fails, or is interrupted, on the way puts back the files that were there. A process that is
    killed leaves its temporary folder, which the next one removes. Of several that write to one
    folder at once, the files are those of the last.
    """
    directory = Path(directory)
    check_directory(directory)
    made = not directory.exists()
    try:
        temporary, held = _make_temporary(directory)
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    done = False
    try:
        yield temporary
        with _locked(directory):
            _move_all(temporary, directory)
        done = True
    except OSError as error:
        raise PrismError(_cannot_write(directory, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)
        if made and not done:
            with suppress(OSError):  # others have put something there meanwhile
                directory.rmdir()


def _make_temporary(directory: Path) -> tuple[Path, int | None]:
    """Make a folder, and a temporary one in it that is marked as in use."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(directory):
                _remove_left(directory)
                temporary = Path(tempfile.mkdtemp(prefix=OWN, suffix=PART, dir=directory))
                return temporary, _hold(temporary)
        except FileNotFoundError:
            if directory.exists():
                raise
            # another process made the folder, failed, and removed it


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes from changing what is in a folder, where the file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
    for folder in directory.glob(f"{OWN}*{PART}"):
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

    Raises PrismError if the name is a file, or neither it nor the nearest folder above it is
    writable.
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
    path = Path(
        *(part for part in path.parts if not (part.startswith(OWN) and part.endswith(PART)))
    )
    return f"{path}: cannot write: {error.strerror or error}; choose another place, or make room"


def check_file(path: Path, source: str) -> int:
    """Size of a regular file; anything else is refused, since opening a pipe or device may hang.

    Raises PrismError: it is missing, a folder, a pipe, a socket or a device.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise PrismError(f"{source}: there is no such file; check the name") from error
    except (OSError, ValueError) as error:
        raise PrismError(f"{source}: cannot be read: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise PrismError(f"{source}: is a folder; expected a file")
    if not stat.S_ISREG(found.st_mode):
        raise PrismError(f"{source}: is a pipe, socket or device; expected a file, save it as one")
    return found.st_size


def read_bytes(
    path: Path, source: str, most: int = MOST_TEXT, way_out: str = "cut it, or record less"
) -> bytes:
    """Read a regular file, or an open pipe, of at most `most` bytes, as it stands.

    Raises PrismError: it is no regular file, too large, or cannot be read.
    """
    if check_file(held(path), source) > most:
        raise _too_large(source, most, way_out)
    data = read_head(path, source, most + 1)
    if len(data) > most:  # it grew, or a file of the system that tells no size
        raise _too_large(source, most, way_out)
    return data


def read_head(path: Path, source: str, most: int) -> bytes:
    """Read the first `most` bytes of a regular file or of an open pipe; raises PrismError."""
    path = held(path)
    check_file(path, source)
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise PrismError(f"{source}: cannot be read: {error.strerror or error}") from error


def unpack(data: bytes, source: str, most: int = MOST_TEXT) -> tuple[bytes, str]:
    """Unpack what is gzipped, as far as it is sound; the second value says what is damaged.

    Raises PrismError: it unpacks to more than ``most`` bytes, or to far more than any recording
    does.
    """
    if not data.startswith(GZIP):
        return data, ""
    most = min(most, max(SMALL, DENSEST * len(data)))
    parts: list[bytes] = []
    size, at, damage = 0, 0, ""
    while data.startswith(GZIP, at) and not damage:
        stream = zlib.decompressobj(31)
        try:
            while at < len(data) and not stream.eof:
                # in pieces, so that what comes before a damage is kept
                piece = data[at : at + _PIECE]
                parts.append(stream.decompress(piece))
                at += len(piece) - len(stream.unused_data)
                size += len(parts[-1])
                if size > most:
                    raise _too_large(source, most, unpacked=True)
            damage = "" if stream.eof else "is cut short"
        except zlib.error:
            damage = "is damaged"
    return b"".join(parts), damage


def _too_large(
    source: str, most: int, way_out: str = "cut it, or record less", unpacked: bool = False
) -> PrismError:
    what = "unpacks to" if unpacked else "has"
    return PrismError(
        f"{source}: {what} more than {most >> 20:,} MiB, the most that is read of such a file; "
        f"{way_out}"
    )
