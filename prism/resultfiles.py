"""Files of results and fitted models: netCDF, written whole and read whole.

What is in an estimate is `prism.results`'s affair, what is in another kind that of its analysis.
Left out: libraries (`prism.library`).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from prism.errors import PrismError
from prism.files import read_netcdf, write_netcdf

if TYPE_CHECKING:
    import xarray as xr

KINDS = ("comparison", "measurement", "placement", "replay", "steps_estimate", "sweep", "timeline",
         "validation", "calibrated", "steps", "trace")  # fmt: skip
"""What ``kind`` says in a result or a model of `prism fit`; estimates and rankings have none."""


def save(dataset: "xr.Dataset", path: str | os.PathLike[str]) -> None:
    """Write a result as netCDF: to a temporary name first, then renamed."""
    write_netcdf(dataset, path)


def load(path: str | os.PathLike[str]) -> "xr.Dataset":
    """Read any result, or a model of ``prism fit``: a file, or the folder of its result.nc.

    Raises
    ------
    PrismError
        The file is missing or not a prism result.
    """
    file = Path(path) / "result.nc" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise PrismError(f"{file}: no such result; prism estimate JOB -o DIR writes result.nc")
    loaded = read_netcdf(file, "a result.nc, which prism estimate JOB -o DIR writes")
    kind = loaded.attrs.get("kind")
    if kind in KINDS or (kind is None and "job" in loaded.attrs):
        return loaded
    way = "; prism.load_library opens it" if "prism_schema" in loaded.attrs else ""
    raise PrismError(f"{file}: a netCDF file, but not a prism result (no kind, no job){way}")
