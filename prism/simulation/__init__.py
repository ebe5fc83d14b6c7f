"""From a job or a model to replicates: effects, lowering, programs, runs, execution."""

# what rooms above may import, by module
FACE = {
    "classops": "ClassOps split_classes",
    "draws": "Lowered cluster_times end_blocks lower quiet_step run_lanes",
    "effects": "EFFECTS HeldTables Treatment hold_effect",
    "effects.run": "UNMEASURED model_error_entry",
    "estimated": "Estimate TERMS",
    "execution.context": "Progress RunContext check_whole fresh_seed make_context",
    "execution.executor": "run_on",
    "execution.remote": "TIMEOUT_S",
    "execution.tasks": "map_threads",
    "jobwarnings": "job_doubts mean_doubts replica_doubts",
    "labels": "TARGETS label short_label",
    "no_dependence": "pool_program",
    "othernodes": "relocate",
    "prepare": "Prepared prepare prepare_again treat_classes",
    "program": "Program global_ops ideal_program make_keys",
    "results":
        "OTHER_LIBRARIES SCHEMA TAIL_SAMPLES job_of made_with make_dataset provenance read_group",
    "runs.build":
        "PAUSES START_UP build_run_model describe_failures effective_share marks_of mean_step "
        "model_of_steps with_failures",
    "runs.checkpointing": "FailureDistribution best_steps expected_time",
    "runs.drift": "ar1 drift_variance",
    "runs.model": "NORMAL_STEPS simulate_runs",
    "runs.parts": "Drift HOUR_S OF_STEPS PER_TIME RunModel Runs StallProcess",
    "runs.ramp": "step_work",
    "runs.rates": "step_shares",
    "steps":
        "EXPOSED_BLOCKS Exposed REPLICATES Run find_exposed run_blocks run_each simulate "
        "simulate_step warm_up",
    "summary":
        "QUANTILES apart failure_model model_error_time run_end run_progress run_spread run_terms "
        "spread summarize_simulation",
    "tracemodel.arrays": "build_trace_graph_arrays build_trace_program earliest_lead",
    "tracemodel.devicetime": "device_time",
    "tracemodel.file": "load_model model_to_dataset",
    "tracemodel.graph":
        "ARRIVAL Array COMPUTE LATENCY LEAD REPLICA STAGE Scope TraceGraph TraceNode WORKER WORLD "
        "ends_of filled ops_of replay start_of with_lags_as_nodes",
    "tracemodel.model":
        "OpGroup SCORE_STD TraceModel conditioned figures ideal_graph independent_graph "
        "score_distribution settled steady synthetic_graph",
    "variability": "is_communication",
    "variance_inputs":
        "Input Residuals class_cvs measure_residuals nominal_seconds partition stall_bound "
        "swap_keys time_shares",
}  # fmt: skip
