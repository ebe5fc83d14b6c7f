"""What a job file may say, schedules among it; where it is wrong, with file and line."""

# what rooms above may import, by module
FACE = {
    "devices": "DEVICES Device HOP_S LIBRARIES device_key find_device",
    "dimensions": "COMMUNICATING DIMENSIONS GPUS REPLICA STAGE TOKENS",
    "frameworks": "FRAMEWORKS FUSED_LOSS_BYTES Framework HELPER_PASSES family",
    "hostfiles": "COLUMNS as_ranges host_order launcher_files placement_csv slot_rows",
    "hostlists": "is_number looks_like_list read_hosts_text",
    "importing.imported": "Imported import_job",
    "importing.settings": "FORMATS said_by_name",
    "importing.topology": "Placed Topology place_job read_topology",
    "job": "Job flatten given_values job_from_dict layer_split load_job provenance",
    "jobspec.blocks": "BLOCKS ModelBlock ParallelismBlock",
    "jobspec.effects":
        "Effects FailSlowEffectBlock JitterEffectBlock StallEffectBlock "
        "StepEffectBlock WORDS",
    "jobspec.frommodel": "CALIBRATED is_step_model model_attrs",
    "jobspec.hardware": "HardwareScale",
    "jobspec.layers": "merge",
    "jobspec.machines": "ClusterBlock Link NetworkLink",
    "jobspec.modelcheck": "splits_over",
    "jobspec.messages": "dotted_key never_legal",
    "jobspec.ownlayers": "SizedLayer",
    "jobspec.ownops": "Cut OPS SizedOp",
    "jobspec.presets": "PRESETS SIZES",
    "jobspec.run":
        "CHECKPOINT_S FAILURES_PER_GPU_DAY FAILURES_SOURCE FailuresBlock REPAIR_S RESTART_S",
    "jobspec.tiers": "SECONDS_PER_KM TierBlock",
    "jobspec.values":
        "MAX_CV MAX_SLOWDOWN Slowness duration_or_date hosts_problem parse_date parse_duration",
    "jobspec.yaml": "ConfigLayer override_layer shipped_jobs",
    "layersplit": "is_even",
    "ops":
        "Attention BF16_BYTES Exchange Host Loss Norm Op Part Pointwise Product Scan Share "
        "TABLE_BYTES Table Timed share_of",
    "pipelineshape": "Action Schedule TRAITS VirtualStages play_rows",
    "regions": "REGIONS",
    "schedule":
        "Schedule Slots action_times format_schedule make_schedule play_schedule schedule_to_csv",
    "scheduleorders": "steady_share",
}  # fmt: skip
