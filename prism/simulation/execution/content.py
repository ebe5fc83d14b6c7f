"""What data and programs are, as hashes: names under which finished chunks are kept."""

from __future__ import annotations

import hashlib
import pickle
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prism
from prism.common.errors import PrismError

Identity = dict[str, str]


def content_hash(*values: Any) -> str:
    """Hash data: arrays, numbers, texts, tuples, mappings, dataclasses, functions by name.

    Hexadecimal SHA-256; a set has no order, and so no hash that lasts.

    Examples
    --------
    >>> content_hash(1, "a") == content_hash(1, "a")
    True
    >>> content_hash(("a", "b")) == content_hash(("ab",))
    False
    """
    digest = hashlib.sha256()
    pickler = pickle.Pickler(SimpleNamespace(write=digest.update), protocol=5)
    pickler.fast = True  # equal values have equal bytes, whichever of them are one object
    pickler.dump(values)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def identity() -> Identity:
    """Return the program that runs in this process: chunks of different ones are never mixed."""
    folder, digest = Path(prism.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    versions = {name: metadata.version(name) for name in ("numba", "numpy", "scipy")}
    return {"prism": prism.__version__, "source": digest.hexdigest()[:16], **versions}


def refuse_other(worker: str, expected: Identity) -> None:
    """Refuse to work for another program than runs here, on a worker."""
    here = identity()
    apart = [
        f"{name} {here[name]} instead of {version}"
        for name, version in expected.items()
        if here[name] != version
    ]
    if apart:
        raise PrismError(
            f"worker {worker} runs another program: {', '.join(apart)}; results would not be the "
            "same to the bit; install the same versions on both"
        )
