"""What answers say of a job and its run: parameters, framework, failures, changed steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism.common.text import (
    format_count,
    format_duration,
    format_parameters,
    format_share,
    percent_change,
)
from prism.present.answer import Finding

Json = Mapping[str, Any]
NO_FAILURES = {
    "model.durations": ", as the job gives durations and no hardware; run.failures adds them",
    "gpus": ": a model of step times knows no GPUs; --gpus N adds those of N GPUs",
}
ASSUMED = "run.failures and run.checkpoint set them, run.failures=none leaves failures out"


def departure_finding(past: Json, found: Json) -> Finding:
    """Say whether the step time changed, from which step on, by how much, and how sure that is."""
    if found["kind"] == "level":
        ratio, sd = past["level"], format_share(past["level_expected_std"], 2)
        text = (
            f"All steps are {percent_change(ratio - 1.0)} off the model (its standard deviation is "
            f"{sd}); is it of this job?"
        )
        return Finding("departure", text, "warning")
    if found["p_value"] is None:
        return Finding("departure", "Too few steps to detect a change.", "info")
    p = "p < 0.001" if found["p_value"] < 0.001 else f"p = {found['p_value']:.2g}"
    if not found["departed"]:
        text = f"No change of the step time detected ({p}, over all completed steps)."
        return Finding("departure", text, "answer")
    size = percent_change(found["change"], found["change_ci"])
    slower = "slower" if found["change"] > 0.0 else "faster"
    early, late = (format_count(step) for step in found["step_range"])
    at = f"step {format_count(found['step'])}"
    text = f"The step time changed: {size.lstrip('+-')} {slower} from {at} on"
    text += f" ({early} to {late})" if early != late else ""
    return Finding("departure", f"{text}, {p}.", "warning")


def failure_findings(numbers: Json) -> list[Finding]:
    """Say what is assumed of failures, or that there are none."""
    found = numbers.get("failure_model")
    if found is None:
        return []
    if not found["per_1000_node_days"]:
        text = f"Failures are left out{NO_FAILURES.get(found['source'], '')}."
        return [Finding("failures", text)]
    rate = f"{found['per_1000_node_days']:.3g} failures per 1,000 node-days"
    texts = {
        "rate": f"{rate} ({found['source']})",
        "down": f"{format_duration(found['down'])} until the job is back",
        "checkpoint": "a checkpoint every "
        f"{format_duration(found['checkpoint_interval'])} in the background",
        "write": f"{format_duration(found['write'])} to write a checkpoint",
    }
    assumed = ", ".join(texts[name] for name in found["assumed"])
    how = "--gpus sets their number" if "world_size" not in numbers else ASSUMED
    return [Finding("failures", f"Assumed: {assumed}; {how}.")] if assumed else []


def framework_text(found: Json) -> str:
    """Name a job's framework; where it is assumed, with the steps of the others over its own."""
    text = str(found["name"]) + " (assumed)" * (not found["named"])
    others = [f"{ratio:.2f} with {name}" for name, ratio in found["others"].items()]
    if not others:
        return text
    others[0] = others[0].replace(" with", " times as long with")
    return f"{text}; the step would take {', '.join(others)}"


def parameters_text(found: Json) -> str:
    """Write the parameters of a model, and those that a token passes where they are fewer."""
    total, active = (format_parameters(found[key]) for key in ("total", "active"))
    return f"{total} parameters" + f", {active} active" * (active != total)
