"""Jobs for tests of rankings."""

from prism import load_job
from prism.analyses.rankings.shares import Sampler, list_inputs, sample_shares
from prism.simulation.causes import measure_residuals
from prism.simulation.classops import split_classes
from prism.simulation.prepare import prepare


def chain(m=4, dp=1, **effects):
    """One stage without neighbours: the step is the sum of its ops, the latest of dp sums."""
    return load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": m, "dp": dp},
        "variability": {"library": None, "effects": effects},
    })  # fmt: skip


def small(resolution="op", steps=1000, pp=2, data_parallel="ddp", **effects):
    """Build a job with tensor parallelism, a pipeline and every kind of kernel."""
    return load_job({
        "model": {
            "n_layers": 4, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16,
            "vocab_size": 32000, "seq_len": 4096,
        },
        "parallelism": {
            "tp": 2, "pp": pp, "dp": 2, "microbatches": 4, "data_parallel": data_parallel,
        },
        "cluster": {"nodes": 1, "gpus_per_node": 4 * pp}, "run": {"steps": steps},
        "variability": {"library": None, "resolution": resolution, "effects": effects},
    })  # fmt: skip


def sampled(job, seed=1):
    step = prepare(job, seed)
    residuals = measure_residuals(step, seed)
    ops = split_classes(step)
    sampler = Sampler(ops.program, step.program, seed, 2)
    found = sample_shares(sampler, list_inputs(step, residuals, ops))
    return {s.entry.name: s for s in found}, sampler
