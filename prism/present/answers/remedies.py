"""What a cause of variance is in words, and what to do about it."""

from __future__ import annotations

from prism.jobs.jobspec.effects import WORDS
from prism.simulation.labels import short_label

_TERM_REMEDIES = {
    "model_error": "calibrate it on measured steps (prism fit --calibrate)",
    "run_effect": "look at what changes from run to run: nodes, software, neighbours",
    "fail_slow": "find and replace slow nodes sooner",
    "evaluations": "evaluate less often, or beside the training",
    "checkpoints": "write checkpoints in the background",
    "lost_work": "write checkpoints more often",
    "restarts": "detect failures and restart sooner",
    "spares": "keep more spare nodes",
    "fewer_replicas": "keep more spare nodes",
}
_STEADIER = "look for what disturbs these kernels: clocks, power limits, other processes"
_OVERLAP = "overlap it with compute, or look for what disturbs its links"
_COMMUNICATION = "p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "nccl"
"""Words in the names of kernel classes that communicate."""


def cause_text(cause: str, kind: str) -> str:
    """Name a cause by what it is, with the name that tables give it."""
    short = short_label(cause, kind)
    if kind == "terms":
        return short
    if cause in WORDS:
        return f"{WORDS[cause].cause} ({short})"
    return f"noise of {short}" if kind == "kernels" else f"the {short}"


def remedy_text(cause: str, kind: str) -> str:
    """Say what to do about a cause."""
    if kind == "terms":
        return _TERM_REMEDIES.get(cause, "look at what the run does beside its steps")
    if cause in WORDS:
        return WORDS[cause].remedy
    if cause == "launch_gap":
        return "launch fewer kernels, as with CUDA graphs"
    return _OVERLAP if any(word in cause.lower() for word in _COMMUNICATION) else _STEADIER
