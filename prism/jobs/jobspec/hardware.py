"""Hardware variants in a job file (`cluster.scale`): factors on means and spreads, part by part.

Times are scaled in `prism.workload.kernels` and `prism.cluster.machine`, spreads in
`prism.simulation.variability`.
"""

from prism.jobs.jobspec.values import Block, NonNegative, Positive, key


class HardwarePart(Block):
    """One part of the hardware against what the device and the library say of it."""

    time: Positive = key("Factor on its nominal durations.", 1.0)
    cv: NonNegative = key("Factor on the spread of what it takes, about the same mean.", 1.0)


class HardwareScale(Block):
    """Another generation of hardware: means and spreads by part, each scaled apart."""

    compute: HardwarePart = key(
        "Compute-bound kernels. cv: their residuals, and the rank effect with its lemons and its "
        "limit; 0 takes the rank effect away altogether.",
        HardwarePart(),
    )
    memory: HardwarePart = key(
        "Memory-bound kernels. cv: their residuals, and how far they follow the rank effect.",
        HardwarePart(),
    )
    nvlink: HardwarePart = key(
        "Links inside an NVLink domain, latency and time per byte. cv: residuals of messages that "
        "stay inside.",
        HardwarePart(),
    )
    network: HardwarePart = key(
        "Links between NVLink domains, latency and time per byte. cv: residuals of messages that "
        "leave one (transfers between stages too, unless one domain has all GPUs), and congestion.",
        HardwarePart(),
    )
