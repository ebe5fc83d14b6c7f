"""Small jobs whose slow nodes are placed."""

from prism import load_job, slow_node
from prism.analyses.placements.answer import make_case
from prism.analyses.placements.problem import make_problem
from prism.analyses.selection import Runner
from prism.simulation.prepare import prepare


def small(dp=3, pp=4, tp=2, resolution="op", run=None, cluster=None, **parallelism):
    """Build a job of a small model, one (tp) group per node."""
    effects = {
        "rank": {"cv": 0.01}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02},
        "residual": {"law": "lognormal", "cv": 0.02},
    }  # fmt: skip
    return load_job({
        "model": {
            "n_layers": 8, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": 32_000, "seq_len": 4096,
        },
        "parallelism": {"tp": tp, "pp": pp, "dp": dp, "microbatches": 8} | parallelism,
        "cluster": {
            "nodes": dp * pp, "gpus_per_node": tp, "placement": "tp-cp-pp-dp", **(cluster or {})
        },
        "variability": {"library": None, "resolution": resolution, "effects": effects},
        "run": run or {},
    })  # fmt: skip


def problem_of(job, slow, threads=2, seed=1):
    """Pose the question for {node: factor or NodeSlowdown}."""
    slow = {n: slow_node(x) if isinstance(x, float) else x for n, x in slow.items()}
    return make_problem(prepare(job, seed), slow, threads)


def case_of(job, slow, objective="p95", tolerance=0.001, seed=1):
    return make_case(problem_of(job, slow, seed=seed), objective, tolerance, Runner(seed, 2))
