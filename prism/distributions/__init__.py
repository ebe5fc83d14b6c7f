"""Distributions of durations and effects, their tables, and the shipped libraries."""

# what rooms above may import, by module
FACE = {
    "distribution":
        "CONSTRUCTORS Distribution PARAM_NAMES POSITIVE bounded_body bounded_body_lemons constant "
        "empirical lognormal normal occasional quantile_table",
    "kerneltables": "KernelFit KernelTable fit_kernel",
    "library": "Entry Library library_names library_path load_library save_library to_dataset",
    "modelfile": "ModelFile Scalar Spec json_of",
    "ranges": "COUNT FINITE NON_NEGATIVE POSITIVE Range SAME SHARE TABLE_AXES",
    "samples": "sample_distribution",
    "sums": "Draws largest_of sum_of",
    "tables":
        "LEVELS N_CELLS quadrature sample_table table_edges table_of_quantiles table_row "
        "tail_panels",
}  # fmt: skip
