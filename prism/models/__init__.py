"""From recordings to a model of a job: traces, step times, calibrations, variances."""

# what rooms above may import, by module
FACE = {
    "calibration.model": "Calibration communication_share is_calibrated load_calibration",
    "changes.find": "changes_of_trace choose_steps find_changes select_steps without_steps",
    "changes.fit": "fit_steps",
    "changes.report": "Row warn",
    "fit": "fit fit_calibrated warnings_of",
    "fitted": "Model",
    "kernellibraries": "why_no_model",
    "kerneltrace.graph": "KernelGraph step_graph",
    "kerneltrace.model": "fit_kernel_graph fit_kernels redrawn",
    "kerneltrace.steps": "KernelSteps split_steps",
    "optables.table": "OpTable op_table",
    "pipelinetrace.build": "CLOSE build_trace_graph",
    "pipelinetrace.fit": "fit_graph fit_with_components",
    "pipelinetrace.reduce": "simplify",
    "steptimes.blocks": "as_blocks in_blocks",
    "steptimes.estimate": "LANES StepsEstimate estimate_steps lay_out",
    "steptimes.fit": "MIN_VALUES fit_step_times",
    "steptimes.model": "StepModel load_step_model",
    "steptimes.predict": "draw_runs draw_steps generator no_dependence run_model",
    "steptimes.runs":
        "Fitted LAST NOMINAL_ERROR ProgressPosterior UNKNOWN_LEVEL update_on_progress "
        "without_changes",
    "steptimes.series": "clock_grain elapsed_steps",
}  # fmt: skip
