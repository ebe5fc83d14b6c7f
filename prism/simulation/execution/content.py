"""What data and programs are, as hashes: names under which finished chunks are kept and sent.

Equal content has equal hashes in every process and on every machine, which pickles do not promise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import prism


def content_hash(*values: Any) -> str:
    """Hash nested data: arrays, numbers, texts, tuples, mappings, dataclasses, functions by name.

    Hexadecimal SHA-256; a value of another kind is a TypeError.

    Examples
    --------
    >>> content_hash(1, "a") == content_hash(1, "a")
    True
    >>> content_hash(("a", "b")) == content_hash(("ab",))
    False
    """
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Add a value, with its kind and its length before it, so that no two run into each other."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        digest.update(f"array {array.dtype.str} {np.shape(value)} ".encode())
        digest.update(array.data if array.size else b"")
    elif value is None or isinstance(value, bool | int | float | range):
        digest.update(f"{type(value).__name__} {value!r} ".encode())
    elif isinstance(value, str | bytes | Path):
        raw = value if isinstance(value, bytes) else str(value).encode()
        digest.update(f"{type(value).__name__} {len(raw)} ".encode() + raw)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed_all(digest, value, [getattr(value, f.name) for f in dataclasses.fields(value)])
    elif isinstance(value, tuple | list):
        _feed_all(digest, value, list(value))
    elif isinstance(value, dict):
        _feed_all(digest, value, [part for item in value.items() for part in item])
    elif callable(value) and hasattr(value, "__qualname__"):
        digest.update(f"name {value.__module__}:{value.__qualname__} ".encode())
    else:
        raise TypeError(f"no content hash of {type(value).__name__}")


def _feed_all(digest: Any, value: Any, parts: list[Any]) -> None:
    digest.update(f"{type(value).__qualname__} {len(parts)} ".encode())
    for part in parts:
        _feed(digest, part)


class Identity(NamedTuple):
    """The program that computes: chunks of different ones are never mixed."""

    prism: str  # version
    source: str  # hash of the package's own files
    numba: str
    numpy: str
    scipy: str  # of which laws' quantiles are made, on workers too

    def differences(self, other: Identity) -> str:
        """Say in words what is different in the other, empty where nothing is."""
        names = [name for name in self._fields if getattr(self, name) != getattr(other, name)]
        if "prism" in names and "source" in names:  # of another version that goes without saying
            names.remove("source")
        return ", ".join(
            "other source files of prism"
            if name == "source"
            else f"{name} {getattr(other, name)} instead of {getattr(self, name)}"
            for name in names
        )


@lru_cache(maxsize=1)
def identity() -> Identity:
    """Return the identity of the program that runs in this process."""
    folder, digest = Path(prism.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    versions = (metadata.version(name) for name in ("numba", "numpy", "scipy"))
    return Identity(prism.__version__, digest.hexdigest()[:16], *versions)
