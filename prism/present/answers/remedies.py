"""What a cause of variance is in words, and what to do about it."""

from __future__ import annotations

from prism.common.labels import short_label

_REMEDIES = {
    "rank": ("GPUs' own speed", "replace or regroup the slowest GPUs (prism place)"),
    "step": ("variation common to all GPUs of a step",
             "look at what they share: power, cooling, fabric, storage"),
    "microbatch": ("uneven work of microbatches", "pack sequences to microbatches of equal work"),
    "expert": ("uneven routing to experts", "balance it: auxiliary loss, capacity factor"),
    "call": ("variation common to the kernels of a forward or backward",
             "look at the host: launch delays, other processes"),
    "rank_step": ("variation of single GPUs between steps",
                  "look at clocks, throttling and the host"),
    "regime": ("congestion of links", "keep other traffic off them"),
    "stall": ("stalling", "find what stops ranks: data loading, garbage collection, storage"),
    "jitter": ("time added between steps", "look at data loading, logging and synchronisation"),
    "launch_gap": ("variation of launch gaps", "launch fewer kernels, as with CUDA graphs"),
}  # fmt: skip
_TERM_REMEDIES = {
    "model_error": "calibrate it on measured steps (prism fit --calibrate)",
    "run_effect": "look at what changes from run to run: nodes, software, neighbours",
    "fail_slow": "find and replace slow nodes sooner",
    "evaluations": "evaluate less often, or beside the training",
    "checkpoints": "write checkpoints in the background",
    "lost_work": "write checkpoints more often",
    "restarts": "detect failures and restart sooner",
    "spares": "keep more spare nodes",
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
    if cause in _REMEDIES:
        return f"{_REMEDIES[cause][0]} ({short})"
    return f"noise of {short}" if kind == "kernels" else f"the {short}"


def remedy_text(cause: str, kind: str) -> str:
    """Say what to do about a cause."""
    if kind == "terms":
        return _TERM_REMEDIES.get(cause, "look at what the run does beside its steps")
    if cause in _REMEDIES:
        return _REMEDIES[cause][1]
    if kind == "effects":
        return "look for what the ranks that it acts on have in common"
    return _OVERLAP if any(word in cause.lower() for word in _COMMUNICATION) else _STEADIER
