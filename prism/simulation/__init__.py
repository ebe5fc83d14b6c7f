"""From a job or a model to replicates: effects, lowering, programs, runs, execution."""

# modules that rooms above may import
FACE = (
    "causes", "classops", "draws", "effects", "effects.run", "estimated", "execution.place",
    "execution.remote", "independent", "jobwarnings", "labels", "othernodes", "prepare", "program",
    "results", "runs.build", "runs.checkpointing", "runs.drift", "runs.model", "runs.parts",
    "runs.ramp", "runs.rates", "steps", "summary", "tracemodel.arrays",
    "tracemodel.devicetime", "tracemodel.file", "tracemodel.graph", "tracemodel.model",
    "variability",
)  # fmt: skip
