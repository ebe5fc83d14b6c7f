"""What a job file may say, schedules among it; where it is wrong, with file and line."""

# modules that rooms above may import
FACE = (
    "hostfiles", "hostlists", "importing.imported", "importing.settings", "importing.topology",
    "job", "jobspec.blocks", "jobspec.effects", "jobspec.frommodel", "jobspec.hardware",
    "jobspec.layers", "jobspec.messages", "jobspec.presets", "jobspec.run", "jobspec.tiers",
    "jobspec.values", "jobspec.yaml", "layersplit", "pipelineshape", "schedule", "scheduleorders",
)  # fmt: skip
