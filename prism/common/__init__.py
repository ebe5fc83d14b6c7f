"""What every room uses: errors, files, units and numbers as text, statistics of samples."""

# modules that rooms above may import
FACE = (
    "agreement", "attribution", "cdf", "compiled", "errors", "files", "launchgaps",
    "means", "netcdf", "pipes", "resampling", "resultfiles", "results",
    "shipped", "sizes", "text",
)  # fmt: skip
