"""The machine: GPUs, links, tiers, which node holds which part of a job, and measured nodes."""
