"""What every room uses: errors, files, units and numbers as text, statistics of samples."""

# what rooms above may import, by module
FACE = {
    "agreement": "effective_n",
    "arrays": "Array Flags Index",
    "attribution":
        "ClusterControl Estimate PathShares PickFreeze Resamples Variance control_slope "
        "partial_variances path_shares recurrence resample_runs run_variance share_interval",
    "compiled": "engine_folder finish_compiling is_compiling start_compiling",
    "errors": "PrismError as_typed is_typed option",
    "files":
        "GZIP MOST_TEXT MOST_TRACE OWN atomic_files atomic_write check_directory check_file "
        "read_bytes read_head unpack",
    "launchgaps": "LaunchGaps launch_gaps",
    "means": "finite_mean median poisson_interval",
    "netcdf": "check_sealed read_netcdf wrap_corrupt_file write_netcdf",
    "pipes": "held",
    "resampling":
        "Distance FAR FIGURES LEAST_STEPS LEVELS Pairing Resampled SHIFT_LEVELS Sample "
        "distance in_blocks resample",
    "resultfiles": "GONE KINDS answer dataset_of kind_of load_dataset save",
    "results": "Columns Field Result pack_figures pack_texts read_figures read_texts",
    "shipped": "data_path",
    "sizes": "check_size",
    "text":
        "NO_CHANGE format_count format_duration format_energy format_like format_parameters "
        "format_share one_line percent_change plural time_unit visible",
}  # fmt: skip
