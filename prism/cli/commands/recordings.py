"""What commands that read recordings share: why a file is not one."""

from __future__ import annotations

from prism.common.errors import PrismError


def explained(inputs: tuple[str, ...], error: PrismError) -> PrismError:
    """Say what can be done with step times, where a trace of ops was expected."""
    from prism.traces import holds

    for name in inputs:
        if holds(name) == "step_times":
            return PrismError(
                f"{name}: holds step times, not ops, and there is nothing to replay; prism fit "
                f"{name} learns from them alone, prism validate JOB --measured {name} compares "
                "them with a prediction"
            )
    return error
