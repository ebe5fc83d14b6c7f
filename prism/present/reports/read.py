"""Results that a page is made of, from files, output folders or memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prism.common.errors import PrismError
from prism.common.netcdf import read_netcdf, told_broken
from prism.common.resultfiles import KINDS, kind_of
from prism.common.results import Result, dataset_of
from prism.present.answer import Answer

if TYPE_CHECKING:
    import xarray as xr

RESULT = "result.nc"
EXPECTED = "a result of prism, which a command writes by -o"


@dataclass(frozen=True)
class Found:
    """A result with its answer."""

    file: str  # where it was read, or how it is called
    kind: str  # one of `KINDS`
    result: xr.Dataset
    answer: Answer


def read_results(results: object) -> list[Found]:
    """Read results and make their answers; PrismError names one that is none, broken or twice."""
    import xarray as xr

    one = isinstance(results, str | os.PathLike | Result | xr.Dataset)
    listed: Sequence[object] = [results] if one else list(results)  # type: ignore[call-overload]
    if not listed:
        raise PrismError("no result: expected output folders (-o DIR), result.nc files or models")
    found, seen = [], set()
    for i, item in enumerate(listed):
        if isinstance(item, Result | xr.Dataset):
            found.append(_found(f"result {i + 1}", dataset_of(item)))
            continue
        if not isinstance(item, str | os.PathLike):
            raise PrismError(f"result {i + 1}: {item!r}: expected a path or a result")
        path = _file(os.fspath(item))
        if path.resolve() in seen:
            raise PrismError(f"{item}: is given twice; leave one out")
        seen.add(path.resolve())
        found.append(_found(str(item), read_netcdf(path, EXPECTED)))
    return found


def _file(name: str) -> Path:
    """Find the file of a result that is named by itself or by its folder."""
    path = Path(name)
    if path.is_dir():
        if not (path / RESULT).is_file():
            raise PrismError(f"{name}: no {RESULT} in this folder; commands write it by -o {name}")
        return path / RESULT
    if not path.exists():
        raise PrismError(
            f"{name}: no such file or folder; expected what a command wrote by -o, a folder or its "
            f"{RESULT}"
        )
    return path


def _found(file: str, result: xr.Dataset) -> Found:
    """Make the answer of a result."""
    kind = kind_of(result)
    if kind is None:
        known = ", ".join(dict.fromkeys(f"prism {kind.command}" for kind in KINDS.values()))
        own = result.attrs.get("kind")
        what = f"a file of kind {own}" if own else f"holds {_some(result)}"
        raise PrismError(f"{file}: {what}; expected what one of these writes by -o: {known}")
    with told_broken(file, f"a result; write it again by prism {KINDS[kind].command}"):
        try:
            return Found(file, kind, result, KINDS[kind].answer(result))
        except PrismError as error:
            raise PrismError(f"{file}: {error}") from error


def _some(result: xr.Dataset) -> str:
    names = sorted(map(str, result.variables))
    return ", ".join(names[:5]) or "nothing"
