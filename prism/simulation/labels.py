"""Names of kernel classes, effects and targets, as a performance engineer says them."""

from prism.jobs.dimensions import COMMUNICATING
from prism.jobs.jobspec.effects import WORDS

_NAMES = {
    "gemm_mlp": ("GEMM MLP", ""),
    "gemm_expert": ("GEMM experts", "routed"),
    "gemm_attention": ("GEMM attention projections", ""),
    "attention": ("attention", ""),
    "memory": ("norm and elementwise", ""),
    "loss": ("loss", "logits"),
    "embedding": ("embedding", ""),
    "optimizer": ("optimizer", ""),
    "compute": ("compute", "ops as given"),
    "p2p": ("p2p", "between stages"),
    "launch_gap": ("launch gaps", ""),
    "world_all_reduce": ("world all_reduce", "grad norm"),
}
_TERMS = {
    "slow_steps": "steps slower than the ideal",
    "step_noise": "noise of steps",
    "run_effect": "differences between runs",
    "congestion": "congestion beyond its mean",
    "fail_slow": "fail-slow episodes",
    "start_up": "start-up",
    "pauses": "periodic pauses",
    "lost_work": "work lost to failures",
    "restarts": "detection and restarts",
    "spares": "waiting for spare nodes",
}
TARGETS = {"step_time": "step time", "time_to_train": "time-to-train"}
_GROUPS = tuple(f"{name}_" for name in ("dp_cp", *COMMUNICATING, "world"))


def short_label(name: str, kind: str = "") -> str:
    """Name a cause as a performance engineer would.

    Parameters
    ----------
    name : str
        A kernel class or an effect.
    kind : str
        ``kernels``, ``effects`` or ``terms`` of a run; found from the name where empty.

    Examples
    --------
    >>> short_label("dp_reduce_scatter"), short_label("gemm_mlp"), short_label("rank")
    ('dp reduce_scatter', 'GEMM MLP', 'rank effect')
    """
    return _label(name, kind)[0]


def label(name: str, kind: str = "") -> str:
    """Name a cause with what it is.

    Examples
    --------
    >>> label("step"), label("p2p")
    ('step effect (all GPUs)', 'p2p (between stages)')
    """
    short, what = _label(name, kind)
    return f"{short} ({what})" if what else short


def _label(name: str, kind: str) -> tuple[str, str]:
    if kind == "terms":
        return _TERMS.get(name, name.replace("_", " ")), ""
    if name in _NAMES and kind != "effects":
        return _NAMES[name]
    if name in WORDS and kind != "kernels":
        return WORDS[name].name, WORDS[name].what
    group = next((g for g in _GROUPS if name.startswith(g)), "")
    if group:
        return f"{group[:-1].replace('_', '-')} {name.removeprefix(group)}", ""
    # a kernel of a profile keeps its own name
    return (f"{name.replace('_', ' ')} effect" if kind == "effects" else name), ""
