"""What a pipe of this process brings (`<(command)`, `/dev/stdin`), read once and kept as a file."""

from __future__ import annotations

import atexit
import os
import re
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from prism.common.errors import PrismError

MOST = 2 << 30  # bytes, as of the largest file that is read
_OPEN = re.compile(r"/dev/(?:stdin|fd/(\d+))|/proc/(?:self|\d+)/fd/(\d+)")


def held(path: str | os.PathLike[str]) -> Path:
    """File with what a path holds: itself, or a copy of what an open pipe brings.

    Raises PrismError: the pipe cannot be read, or brings more than is read of any file.
    """
    found = _OPEN.fullmatch(os.fspath(path))
    if found is None:
        return Path(path)
    descriptor = int(found[1] or found[2] or 0)
    try:
        status = os.fstat(descriptor)
    except OSError:
        return Path(path)
    if not (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)):
        return Path(path)
    return _copy(descriptor, os.fspath(path), status.st_ino)


@lru_cache
def _copy(descriptor: int, source: str, which: int) -> Path:
    """Copy what a pipe brings to a file that goes when this process ends.

    `which` tells it from the pipe that had the descriptor before.
    """
    try:
        with (
            os.fdopen(os.dup(descriptor), "rb") as pipe,
            tempfile.NamedTemporaryFile(prefix="prism-", delete=False) as file,
        ):
            atexit.register(Path(file.name).unlink, missing_ok=True)
            while piece := pipe.read(1 << 20):
                file.write(piece)
                if file.tell() > MOST:
                    raise PrismError(
                        f"{source}: brings more than {MOST >> 20:,} MiB, the most that is read; "
                        "cut it, or record less"
                    )
    except OSError as error:
        raise PrismError(f"{source}: cannot be read: {error.strerror or error}") from error
    return Path(file.name)
