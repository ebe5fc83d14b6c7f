"""netCDF files: written with a hash behind them, read whole, refused where they are not."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.common.errors import PrismError
from prism.common.files import atomic_write, check_file

if TYPE_CHECKING:
    import xarray as xr

MOST_ARRAYS = 1 << 30
"""Bytes of a file's arrays, as it declares them, at most."""
LARGEST = 1e100
"""The largest magnitude in a file: figures are made of its powers up to the third."""
SEAL = b"\nprism sha256 "
"""What stands behind a file that prism wrote, before the hash of all in front of it."""
_DEFLATE = 1032  # the most that deflate packs into a byte: no sound file declares more
_OF_HDF5 = {"CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "_Netcdf4Dimid",
            "_Netcdf4Coordinates", "_nc3_strict", "_NCProperties"}  # fmt: skip
_PIECE = 1 << 16  # bytes hashed at a time


@contextmanager
def wrap_corrupt_file(path: str | os.PathLike[str], expected: str) -> Iterator[None]:
    """Say of whatever fails while a netCDF file is read or understood that the file is broken."""
    try:
        with warnings.catch_warnings():
            # the arithmetic of what is whole warns of nothing, nor do its pictures
            for category in (RuntimeWarning, UserWarning):
                warnings.simplefilter("error", category)
            yield
    except PrismError:
        raise
    except Exception as error:  # h5py, xarray and what is in the attributes raise almost anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PrismError(
            f"{path}: cannot be read as netCDF of prism ({reason}); expected {expected}"
        ) from error


def write_netcdf(dataset: xr.Dataset, path: str | os.PathLike[str]) -> None:
    """Write a dataset with the hash of the file behind it, whole or not at all."""
    import h5netcdf
    from xarray.backends import H5NetCDFStore

    buffer = io.BytesIO()  # in memory: HDF5 dies of a full disk
    with h5netcdf.File(buffer, "w") as file:  # to_netcdf loads dask.distributed where it can
        dataset.dump_to_store(H5NetCDFStore(file))
    content = buffer.getvalue()
    with atomic_write(path) as temporary:
        # HDF5 passes over what is behind its end, and drops it from a file that it changes
        temporary.write_bytes(content + SEAL + hashlib.sha256(content).hexdigest().encode())


def check_sealed(path: str | os.PathLike[str], expected: str) -> int:
    """Size of a netCDF file; one that is not what `write_netcdf` wrote any more is refused.

    Raises PrismError: it is no regular file, or its hash is not the one behind it.
    """
    size = check_file(Path(path), str(path))
    with wrap_corrupt_file(path, expected), open(path, "rb") as file:
        end = max(size - len(SEAL) - 64, 0)
        file.seek(end)
        seal, digest = file.read(len(SEAL)), file.read()
        if seal != SEAL:
            return size
        file.seek(0)
        found = hashlib.sha256()
        while file.tell() < end:
            found.update(file.read(min(_PIECE, end - file.tell())))
        if found.hexdigest().encode() != digest:
            raise ValueError("the hash is another")
    return size


def read_netcdf(path: str | os.PathLike[str], expected: str) -> xr.Dataset:
    """Read a netCDF file whole, as xarray or prism writes them, and close it.

    `expected` is what it was to be, and how such a file is made, for the error where it is no
    netCDF file, is damaged, or holds values in other files, which HDF5 would open.
    """
    import h5py
    import numpy as np
    import xarray as xr

    most = min(MOST_ARRAYS, _DEFLATE * check_sealed(path, expected))
    with wrap_corrupt_file(path, expected), h5py.File(path) as file:
        held = {name: _find_in(file, name) for name in file}
        arrays = {name: of for name, of in held.items() if isinstance(of, h5py.Dataset)}
        declared = sum(array.nbytes for array in arrays.values())
        if declared > most:
            raise ValueError(f"{declared} bytes declared, {most} possible")
        columns = {name: _read_variable(file, array) for name, array in arrays.items()}
        found = xr.Dataset({k: v for k, v in columns.items() if v is not None}, attrs=_notes(file))
        dataset = xr.decode_cf(found)
        for name, values in {**dataset.variables, **dataset.attrs}.items():
            values = np.asarray(values)
            if values.dtype.kind == "f" and (np.abs(values) > LARGEST).any():
                raise ValueError(f"{name} holds a value beyond {LARGEST:g}")
        dataset.encoding["source"] = str(path)
        return dataset


def _find_in(file: Any, name: str) -> Any:
    """Find what an HDF5 file holds under a name; ValueError where it is in another file."""
    import h5py

    held = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if held is None or (isinstance(held, h5py.Dataset) and (held.external or held.is_virtual)):
        raise ValueError(f"{name} is kept in another file")
    return held


def _read_variable(file: Any, array: Any) -> tuple[list[str], Any, dict[str, Any]] | None:
    """Read an array's dimensions, values and notes; None of a dimension alone."""
    import h5py
    import numpy as np

    name, own = array.name.rsplit("/", 1)[-1], array.attrs
    if bytes(own.get("NAME", b"")).startswith(b"This is a netCDF dimension but not"):
        return None
    if "DIMENSION_LIST" in own:
        dims = [file[scales[-1]].name.rsplit("/", 1)[-1] for scales in own["DIMENSION_LIST"]]
    else:
        dims = [name] * ("CLASS" in own)
    if len(dims) != array.ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions, of which {len(dims)} have names")
    text = h5py.check_string_dtype(array.dtype)
    if text is None or text.length is not None:  # characters are put together by xarray
        return dims, array[()], _notes(array)
    return dims, np.asarray(array.asstr()[()], str), _notes(array)


def _notes(of: Any) -> dict[str, Any]:
    """Attributes of a file or an array, but for HDF5's own; texts of a fixed length, too."""
    notes = {name: of.attrs[name] for name in of.attrs if name not in _OF_HDF5}
    notes = {k: v.reshape(-1)[0] if getattr(v, "size", 0) == 1 else v for k, v in notes.items()}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in notes.items()}
