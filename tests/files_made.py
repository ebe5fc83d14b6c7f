"""Results compared, and texts that pretend to be files."""

import json

import xarray as xr


def same_result(a, b):
    """Check that two results hold the same bits; timings and what a job was given may differ."""
    a, b = (getattr(made, "to_xarray", lambda made=made: made)() for made in (a, b))
    a, b = (x.drop_vars([n for n in x if n.startswith("framework_")]) for x in (a, b))
    a, b = (x.drop_dims("framework", errors="ignore") for x in (a, b))
    xr.testing.assert_identical(a.drop_attrs(deep=False), b.drop_attrs(deep=False))
    given = {"job", "job_sources", "job_name"}
    for name in set(a.attrs) - given - {"wall_seconds"}:
        if name.startswith("engine_"):
            continue
        assert a.attrs[name] == b.attrs[name], name
    one, other = (json.loads(made.attrs["job"]) for made in (a, b))
    for block in ("model", "parallelism", "cluster", "variability", "run"):
        assert one.get(block) == other.get(block)
