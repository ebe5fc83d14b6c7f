"""What one step does: kernels, collectives, their nominal times, memory, the graph."""

# what rooms above may import, by module
FACE = {
    "build":
        "Collective Kernel Workload build_workload count_parameters nominal_library nominal_step",
    "carbon": "footprint",
    "collectivecost": "Hosts OPS OP_NAMES collective_cost lay_hosts",
    "described": "framework_figures layer_figures parameter_figures step_figures",
    "energy": "mean_power",
    "fitting": "ways_to_fit",
    "kernelcost": "BACKENDS GEMM_LARGE_S KINDS KernelCost NUMBER_BYTES kernel_cost",
    "kernels": "COMPUTE_CLASSES Kernel LOGNORMAL MEMORY_CLASSES MESSAGE_BYTES is_compute",
    "layers": "expert_width layer_ops loss_ops model_layers",
    "memory": "LEAST_P_FITS PARTS WARNED_P_FITS memory_figures",
    "opgraph": "Builder OpType START StepGraph build_arrays nominal_duration retime",
    "stepgraph": "job_graph",
    "work": "COMMUNICATION_FACTOR COMPUTE_FACTOR Collective Workload scaled",
}  # fmt: skip
