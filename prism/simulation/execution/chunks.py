"""Finished chunks in a folder, so that an interrupted command goes on where it was.

A chunk is a file named after everything that its result depends on, written under another name
first, with a hash over its bytes: what is cut off or damaged is computed again. Beside them stands
which command they are of.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prism.common.errors import PrismError
from prism.common.files import OWN, atomic_write, check_directory
from prism.common.text import format_count
from prism.simulation.execution.content import Identity, identity
from prism.simulation.execution.tasks import Arrays

MANIFEST, LOCK, SUFFIX = "command.json", f"{OWN}lock", ".chunk"
_CHUNK = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")
MAGIC = b"prism chunk 1\n"


class Manifest(NamedTuple):
    """Which command the chunks of a folder are of, under which seed, by which program, and when."""

    command: dict[str, Any]
    seed: int | None
    identity: dict[str, str]
    started: str


class ChunkStore:
    """A folder of finished chunks of one command, locked while it is open.

    A folder of another command is refused; a seed that is None becomes that of the interrupted
    command, if there is one, or else what `fresh_seed` gives.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        command: Mapping[str, Any] | None = None,
        seed: int | None = None,
        fresh_seed: Callable[[], int] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.directory, self.tell = Path(directory), tell
        self.found = self.computed = 0  # chunks taken up, and made
        self._counts = threading.Lock()
        self._writes = True
        check_directory(self.directory, "--resume")
        self._is_own = (self.directory / LOCK).exists()
        self._descriptor = self._lock()
        try:
            self.seed = self._settle(dict(command or {}), seed, fresh_seed)
        except BaseException:
            if not self._is_own:
                (self.directory / LOCK).unlink(missing_ok=True)
            self.close()
            raise

    # ------------------------------------------------------------------------------- the folder
    def _lock(self) -> int:
        """Keep other commands out; the system ends the lock with the process, however it ends."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise PrismError(f"{self.directory}: cannot keep chunks: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise PrismError(
                f"{self.directory}: in use by another prism; wait for it, or choose "
                "another folder with --resume"
            ) from error
        except OSError:  # a file system without locks: two at once do no harm but to time
            pass
        return descriptor

    def _settle(
        self, command: dict[str, Any], seed: int | None, fresh: Callable[[], int] | None
    ) -> int | None:
        """Compare with the interrupted command, or note down this one; returns the seed."""
        for name in sorted(file.name for file in self.directory.iterdir()):
            own = _CHUNK.fullmatch(name) or (name == MANIFEST and self._is_own)
            if name[0] != "." and not own:
                raise PrismError(
                    f"{self.directory}: holds {name} and is not a folder of finished chunks; give "
                    "--resume its own folder"
                )
        command, before = json.loads(json.dumps(command)), self._manifest()
        if before is not None:
            self._refuse_other(before, command, seed)
            there, n = Identity(**before.identity), self.kept
            seed = before.seed if seed is None else seed
            under = "" if before.seed is None else f", seed {before.seed}"
            if there == identity():
                self.tell(
                    f"{self.directory}: going on after {format_count(n, 'finished chunk')}{under}"
                )
                return seed
            self.tell(
                f"{self.directory}: {format_count(n, 'finished chunk')} were computed by another "
                "program "
                f"({identity().differences(there)}); starting again{under}"
            )
        self._clear()
        if seed is None and fresh is not None:
            seed = fresh()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = Manifest(command, seed, identity()._asdict(), now)._asdict()
        with atomic_write(self.directory / MANIFEST) as file:
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return seed

    def _manifest(self) -> Manifest | None:
        """Read which command the chunks are of; None where there are none or they do not say."""
        try:
            text = (self.directory / MANIFEST).read_text(encoding="utf-8")
            found = Manifest(**json.loads(text))
            Identity(**found.identity)
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            self.tell(f"{self.directory}: {MANIFEST} is damaged; starting again")
            return None

    def _refuse_other(self, before: Manifest, command: dict[str, Any], seed: int | None) -> None:
        """Refuse the chunks of another command, naming what differs."""
        here, there = dict(command), dict(before.command)
        if seed is not None:
            here["seed"], there["seed"] = seed, before.seed
        apart = "; ".join(
            f"{key} {_said(there.get(key))}, here {_said(here.get(key))}"
            for key in {**there, **here}
            if there.get(key) != here.get(key)
        )
        if apart:
            raise PrismError(
                f"{self.directory}: holds finished chunks of another command, begun "
                f"{before.started} ({apart}); give that command again to go on with it, choose "
                "another folder with --resume, or remove this one"
            )

    @property
    def kept(self) -> int:
        """Number of chunks in the folder."""
        return sum(map(bool, map(_CHUNK.fullmatch, os.listdir(self.directory))))

    def _clear(self) -> None:
        """Remove the chunks, and what a killed process was writing; nothing else."""
        for file in self.directory.iterdir():
            half = file.name.startswith(OWN) and file.suffix in (SUFFIX, ".json")
            if file.name == MANIFEST or _CHUNK.fullmatch(file.name) or half:
                file.unlink(missing_ok=True)

    # -------------------------------------------------------------------------------- the chunks
    def load(self, key: str) -> Arrays | None:
        """Return what a finished chunk gave; None where it is not there, or damaged."""
        try:
            content = (self.directory / f"{key}{SUFFIX}").read_bytes()
        except OSError:
            return None
        found = unpack(content)
        if found is None:
            self.tell(f"{self.directory}: {key[:12]}...{SUFFIX} is damaged; computing it again")
        else:
            with self._counts:
                self.found += 1
        return found

    def save(self, key: str, arrays: Arrays) -> None:
        """Keep what a chunk gave; where there is no room, say so and go on without."""
        with self._counts:
            self.computed += 1
        if not self._writes:
            return
        try:
            with atomic_write(self.directory / f"{key}{SUFFIX}") as file:
                file.write_bytes(pack(arrays))
        except PrismError as error:
            with self._counts:
                first, self._writes = self._writes, False
            if first:
                self.tell(f"{error}; going on without keeping chunks")

    def finish(self) -> None:
        """Remove the chunks: their result is written."""
        self._clear()
        (self.directory / LOCK).unlink(missing_ok=True)
        try:
            self.directory.rmdir()
        except OSError:  # somebody else's folder, or files
            pass

    def close(self) -> None:
        """Let other commands in."""
        os.close(self._descriptor)


def _said(value: Any) -> str:
    return "not given" if value in (None, [], {}) else str(value)


def pack(arrays: Arrays) -> bytes:
    """Lay arrays into the bytes of a chunk, with a hash before them."""
    body = io.BytesIO()
    for array in arrays:  # one after the other: numpy before 2.2 has no archive without pickles
        np.save(body, array, allow_pickle=False)
    return MAGIC + hashlib.sha256(body.getvalue()).digest() + body.getvalue()


def unpack(content: bytes) -> Arrays | None:
    """Return the arrays of a chunk; None where its bytes are not those that were written."""
    n = len(MAGIC)
    digest, body = content[n : n + 32], content[n + 32 :]
    if content[:n] != MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    file, found = io.BytesIO(body), []
    while file.tell() < len(body):
        found.append(np.load(file, allow_pickle=False))
    return tuple(found)
