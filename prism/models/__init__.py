"""From recordings to a model of a job: traces, step times, calibrations, variances."""

# modules that rooms above may import
FACE = (
    "calibration.model", "changes.find", "changes.fit", "changes.report",
    "fit", "fitted", "kernellibraries",
    "kerneltrace.graph", "kerneltrace.model", "kerneltrace.steps",
    "pipelinetrace.build", "pipelinetrace.fit", "pipelinetrace.reduce",
    "steptimes.blocks", "steptimes.estimate", "steptimes.fit", "steptimes.model",
    "steptimes.predict", "steptimes.runs", "steptimes.series",
)  # fmt: skip
