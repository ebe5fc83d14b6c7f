"""The machine: GPUs, links, tiers, which node holds which part of a job, and measured nodes."""

# what rooms above may import, by module
FACE = {
    "groups": "Ends Group count_replicas ends_of shard_size sync_units",
    "linkcongestion": "congested_links",
    "machine": "Cluster MEASURED_HOP build_cluster network_figures",
    "nccl": "bus_factor solve_link",
    "nodemap": "KINDS LEAST MOST NodeSlowdown Placement slow_node slowdown_keys",
    "nodes.hosts": "find_nodes read_host_list",
    "nodes.inventory": "Inventory read_inventory",
    "power":
        "CURVES Mix PowerState gpu_power kind_of mix_of position_slowdowns power_state silicon "
        "step_joules throttled_nodes",
    "transports": "TRANSPORTS",
    "wiring": "Wiring",
}  # fmt: skip
