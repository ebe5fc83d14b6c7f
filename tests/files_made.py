"""Results compared, and texts that pretend to be files."""

import json

import xarray as xr


def same_result(a, b):
    """Check that two results hold the same bits; timings and where the job was may differ."""
    xr.testing.assert_identical(a.drop_attrs(deep=False), b.drop_attrs(deep=False))
    for name in set(a.attrs) - {"engine", "wall_seconds", "job", "job_sources", "job_name"}:
        assert a.attrs[name] == b.attrs[name], name
    one, other = (json.loads(made.attrs["job"]) for made in (a, b))
    for block in ("model", "parallelism", "cluster", "variability", "run"):
        assert one.get(block) == other.get(block)
