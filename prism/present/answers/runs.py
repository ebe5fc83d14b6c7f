"""What answers say of a job and its run: parameters, framework, failures, changed steps."""

from __future__ import annotations

from prism.common.text import (
    format_count,
    format_duration,
    format_parameters,
    format_share,
    percent_change,
)
from prism.present.cells import Cell, Json, change
from prism.present.tables import Rule

NO_FAILURES = {
    "model.durations": ", as the job gives durations and no hardware; run.failures adds them",
    "gpus": ": a model of step times knows no GPUs; --gpus N adds those of N GPUs",
}
ASSUMED = "run.failures and run.checkpoint set them, run.failures=none leaves failures out"


def completed_texts(numbers: Json) -> tuple[str, ...]:
    """Say what was read as the step times of a run in progress."""
    taken = (numbers.get("completed") or {}).get("taken")
    if taken is None:
        return ()
    from prism.traces import say_taken  # slow to import

    return (say_taken(taken),)


def _outcome(numbers: Json) -> str:
    """Say what looking for a change of the step time came to; empty where none was looked for."""
    found = numbers.get("departure") or {"kind": ""}
    if found["kind"] is not None:
        return str(found["kind"])
    return "too few" if found["p_value"] is None else "none"


def _level(numbers: Json) -> dict[str, Cell]:
    past = numbers.get("completed") or numbers
    return {"off": change(past["level"] - 1.0), "std": format_share(past["level_expected_std"], 2)}


def _p(numbers: Json) -> str:
    p = numbers["departure"]["p_value"]
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _change(numbers: Json) -> dict[str, Cell]:
    found = numbers["departure"]
    early, late = map(format_count, found["step_range"])
    return {
        "size": percent_change(found["change"], found["change_ci"]).lstrip("+-"),
        "slower": "slower" if found["change"] > 0.0 else "faster",
        "step": format_count(found["step"]), "p": _p(numbers),
        "range": f" ({early} to {late})" if early != late else "",
    }  # fmt: skip


DEPARTURE = (
    Rule("departure", "warning", lambda n: _outcome(n) == "level",
         "All steps are {off} off the model (its standard deviation is {std}); is it of this job?",
         _level),
    Rule("departure", "info", lambda n: _outcome(n) == "too few",
         "Too few steps to detect a change."),
    Rule("departure", "answer", lambda n: _outcome(n) == "none",
         "No change of the step time detected ({p}, over all completed steps).",
         lambda n: {"p": _p(n)}),
    Rule("departure", "warning", lambda n: _outcome(n) == "change",
         "The step time changed: {size} {slower} from step {step} on{range}, {p}.", _change),
)  # fmt: skip
"""Whether the step time of a run in progress changed."""


def _rate(numbers: Json) -> float | None:
    return (numbers.get("failure_model") or {}).get("per_1000_node_days")


def _assumed(numbers: Json) -> dict[str, Cell]:
    found = numbers["failure_model"]
    every = format_duration(found["checkpoint_interval"])
    texts = {
        "rate": f"{_rate(numbers):.3g} failures per 1,000 node-days ({found['source']})",
        "down": f"{format_duration(found['down'])} until the job is back",
        "checkpoint": f"a checkpoint every {every} in the background",
        "write": f"{format_duration(found['write'])} to write a checkpoint",
    }
    how = ASSUMED if "world_size" in numbers else "--gpus sets their number"
    return {"assumed": ", ".join(texts[name] for name in found["assumed"]), "how": how}


FAILURES = (
    Rule("failures", "info", lambda n: _rate(n) == 0.0, "Failures are left out{why}.",
         lambda n: {"why": NO_FAILURES.get(n["failure_model"]["source"])}),
    Rule("failures", "info", lambda n: _rate(n) and n["failure_model"]["assumed"],
         "Assumed: {assumed}; {how}.", _assumed),
)  # fmt: skip
"""What is assumed of failures, or that there are none."""


def framework_text(found: Json) -> str:
    """Name a job's framework; where it is assumed, with the steps of the others over its own."""
    text = str(found["name"]) + " (assumed)" * (not found["named"])
    others = [f"{ratio:.2f} with {name}" for name, ratio in found["others"].items()]
    if not others:
        return text
    others[0] = others[0].replace(" with", " times as long with")
    return f"{text}; the step would take {', '.join(others)}"


def library_text(numbers: Json) -> str:
    """Say by how much p95 of the step changes with the other libraries of the job's device."""
    own, changes = numbers["step_time"]["p95"], []
    for other in sorted(numbers["library"]["others"], key=lambda row: row["p95"]):
        low, high = (end / own - 1.0 for end in other["p95_ci"])
        changes.append(f"{other['kind']} {percent_change(other['p95'] / own - 1.0, (low, high))}")
    return f"Library {numbers['library']['name']}; p95 with {', '.join(changes)}"


def parameters_text(found: Json) -> str:
    """Write the parameters of a model, and those that a token passes where they are fewer."""
    total, active = (format_parameters(found[key]) for key in ("total", "active"))
    return f"{total} parameters" + f", {active} active" * (active != total)
