"""Finished chunks in a folder, so that an interrupted command goes on where it was.

A chunk is a file named after everything that its result depends on, written under another name
first. Beside them stands which command they are of, and its seed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prism.common.errors import PrismError
from prism.common.files import OWN, atomic_write, check_directory
from prism.common.text import format_count
from prism.simulation.execution.tasks import Arrays

NOTE, SUFFIX = f"{OWN}command.json", ".npz"
_CHUNK = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")


class ChunkStore:
    """A folder of finished chunks of one command.

    A folder of another command is refused; a seed that is None becomes that of the interrupted
    command, if there is one, or else what `fresh_seed` gives. Two at once do no harm but to time.
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
        self._writes = True
        check_directory(self.directory, "--resume")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PrismError(f"{self.directory}: cannot keep chunks: {error.strerror}") from error
        self.seed = self._settle(json.loads(json.dumps(command or {})), seed, fresh_seed)

    def _settle(
        self, command: dict[str, Any], seed: int | None, fresh: Callable[[], int] | None
    ) -> int | None:
        """Compare with the interrupted command, or note down this one; returns the seed."""
        for name in sorted(os.listdir(self.directory)):
            if name[0] != "." and not _CHUNK.fullmatch(name):
                raise PrismError(
                    f"{self.directory}: holds {name} and is not a folder of finished chunks; give "
                    "--resume its own folder"
                )
        before = self._noted()
        if before is not None:
            seed = before["seed"] if seed is None else seed
            self._refuse_other(before, {**command, "seed": seed})
            under = "" if seed is None else f", seed {seed}"
            self.tell(
                f"{self.directory}: going on after {format_count(self.kept, 'finished chunk')}"
                f"{under}"
            )
            return seed
        self._clear()
        if seed is None and fresh is not None:
            seed = fresh()
        with atomic_write(self.directory / NOTE) as file:
            file.write_text(json.dumps({**command, "seed": seed}) + "\n", encoding="utf-8")
        return seed

    def _noted(self) -> dict[str, Any] | None:
        """Read which command the chunks are of; None where there are none or they do not say."""
        try:
            found = json.loads((self.directory / NOTE).read_text(encoding="utf-8"))
            return {"seed": None, **found}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            self.tell(f"{self.directory}: {NOTE} is damaged; starting again")
            return None

    def _refuse_other(self, before: dict[str, Any], here: dict[str, Any]) -> None:
        """Refuse the chunks of another command, naming what differs."""
        apart = "; ".join(
            f"{key} {_said(before.get(key))}, here {_said(here.get(key))}"
            for key in {**before, **here}
            if before.get(key) != here.get(key)
        )
        if apart:
            raise PrismError(
                f"{self.directory}: holds finished chunks of another command ({apart}); give that "
                "command again to go on with it, choose another folder with --resume, or remove "
                "this one"
            )

    @property
    def kept(self) -> int:
        """Number of chunks in the folder."""
        return len(list(self.directory.glob(f"[!.]*{SUFFIX}")))

    def _clear(self) -> None:
        """Remove the chunks, and what a killed process was writing; nothing else."""
        for file in self.directory.iterdir():
            own = file.name.startswith(OWN) and file.suffix in (SUFFIX, ".json")
            if own or _CHUNK.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def load(self, key: str) -> Arrays | None:
        """Return what a finished chunk gave; None where it is not there, or damaged."""
        try:
            with (self.directory / f"{key}{SUFFIX}").open("rb") as file:
                archive = np.load(file)
                arrays = tuple(archive[f"arr_{i}"] for i in range(len(archive.files)))
        except FileNotFoundError:
            return None
        except Exception:  # of a damaged archive, anything
            self.tell(f"{self.directory}: {key[:12]}...{SUFFIX} is damaged; computing it again")
            return None
        self.found += 1
        return arrays

    def save(self, key: str, arrays: Arrays) -> None:
        """Keep what a chunk gave; where there is no room, say so and go on without."""
        self.computed += 1
        if not self._writes:
            return
        try:
            with atomic_write(self.directory / f"{key}{SUFFIX}") as file:
                np.savez(file, *arrays)
        except PrismError as error:
            self._writes = False
            self.tell(f"{error}; going on without keeping chunks")

    def finish(self) -> None:
        """Remove the chunks: their result is written."""
        try:
            self._clear()
            self.directory.rmdir()
        except OSError:  # somebody else's folder or files, or gone with another that ended
            pass


def _said(value: Any) -> str:
    return "not given" if value in (None, [], {}) else str(value)
