"""A made-up answer of `prism place`: three slow nodes of a job of 4 stages and 8 replicas."""


def row(name, label, p50, p95, **more):
    """One placement, as a summary holds it."""
    return {"name": name, "label": label, "stages": [3, 3, 3], "replicas": [0, 1, 2],
            "hosts_changed": 3, "mean": p50, "p50": p50, "p95": p95, "p99": p95 + 0.1,
            "p95_se": 0.004, "objective": p95, "objective_se": 0.004} | more  # fmt: skip


def place_of(slot, stage, replica):
    """Where a node is, as a summary says it."""
    return {"slot": slot, "stages": [stage], "replicas": [replica]}


def placement(**more):
    """Make a summary as ``prism.summary`` returns it."""
    nodes = [
        {"node": node, "compute": 1.2, "memory": None, "network": 1.0, "other": 1.0, "cv": 0.0,
         "before": place_of(node, 3, i), "after": place_of(i, 0, i)}
        for i, node in enumerate((24, 25, 26))
    ]  # fmt: skip
    slack = (0.31, 0.31, 0.08, 0.0)
    return {
        "job": "made-up", "seed": 3, "replicates": 640, "objective": "p95", "tolerance": 0.001,
        "placements": [
            row("p0", "3 on stage 3, replicas 0-2", 10.0, 10.4, saved=0.0, saved_ci=[0.0, 0.0]),
            row("p1", "3 on stage 0, replicas 0-2", 9.4, 9.8, saved=0.0577,
                saved_ci=[0.0567, 0.0587]),
            row("p2", "3 on stage 3, one replica", 10.1, 10.5, saved=-0.0096,
                saved_ci=[-0.0106, -0.0086]),
        ],
        "healthy": {"p50": 9.0, "p95": 9.36, "objective": 9.36, "saved": 0.1,
                    "saved_ci": [0.099, 0.101]},
        "current": "p0", "best": "p1", "worst": "p2", "worst_over_best_p50": 10.1 / 9.4,
        "worst_over_best_p95": 10.5 / 9.8, "p_correct": 0.97, "n_candidates": 120, "n_screened": 9,
        "method": "all placements up to symmetry", "slow_nodes": nodes,
        "stage_slack": [{"stage": i, "slack": x, "cost": 0.3 - x} for i, x in enumerate(slack)],
        "alike_step": 10.0, "slot_cost": [[0.01 * i + 0.001] * 8 for i in range(4)],
        "alternatives": {
            "drop_nodes": {"label": "without the slow nodes, 3 replicas fewer", "p50": 9.3,
                           "p95": 9.7, "objective": 9.7, "work": 0.625, "p50_same_work": 14.88,
                           "p95_same_work": 15.52, "objective_same_work": 15.52,
                           "saved": -0.492, "saved_ci": [-0.494, -0.490]},
            "spares": {"label": "3 spare nodes", "p50": 9.2, "p95": 9.6, "p95_se": 0.003,
                       "objective": 9.6, "saved": 0.0769, "saved_ci": [0.0759, 0.0779]},
            "random": {"p50": 9.8, "p95": 10.2, "objective": 10.2, "saved": 0.0192,
                       "n_placements": 256,
                       "p5_of_objective": 9.85, "p95_of_objective": 10.45},
            "fewer_layers": {"impossible": "explicit durations have no layers"},
        },
        "notes": [], "warnings": [], "findings": [], "wall_seconds": 4.2,
    } | more  # fmt: skip
