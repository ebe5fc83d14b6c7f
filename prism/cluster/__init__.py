"""The machine: GPUs, links, tiers, which node holds which part of a job, and measured nodes."""

# modules that rooms above may import
FACE = (
    "devices", "groups", "linkcongestion", "machine", "nccl", "nodemap", "nodes.hosts",
    "nodes.inventory", "power", "transports", "wiring",
)  # fmt: skip
