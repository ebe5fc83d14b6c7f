"""Sections of what rests on recordings: a validation, a replay.

Words, tables and plots are those of the commands; what is added is the question, and both errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.analyses.replay import summarize_replay
from prism.analyses.validate import summarize_validation
from prism.common.text import format_count, format_like, format_share
from prism.plots.validation import draw_validation, plot_replay, plot_workers
from prism.present.answer import Errors, Picture
from prism.present.reports.sections import Section
from prism.present.views.trace import replay_view, validation_view, verdict

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

SPLITS = {"first-half": "the first half of its steps", "even": "every other of its steps"}


def validation_section(result: xr.Dataset) -> Section:
    """Make the section of a validation, what ``prism.validate`` returns."""
    numbers = summarize_validation(result)
    what = "time-to-train" if numbers.get("quantity") == "time_to_train" else "step time"
    subject = str(numbers.get("job") or _name(numbers.get("trace") or numbers.get("measured")))
    picture = Picture(
        "",
        f"Predicted and measured {what} of {subject}: distribution functions and quantiles",
        lambda: draw_validation(result),
        "On the left distribution functions, on the right predicted against measured quantiles; on "
        "the dashed line they agree. The band is what the prediction does over refits.",
        _validation_errors(numbers),
    )
    return Section(
        title="Predicted against measured",
        subject=subject,
        question=_validation_question(numbers, what, subject),
        answers=tuple(verdict(numbers)),
        pictures=(picture,),
        view=validation_view(numbers),
        captions=("The prediction beside the baselines",),
        warnings=tuple(numbers.get("warnings") or ()),
        numbers=numbers,
    )


def _name(path: Any) -> str:
    """Name of a recording: its file."""
    return Path(str(path)).name if path else "a recording"


def _validation_question(numbers: Json, what: str, subject: str) -> str:
    """Say what is held against what."""
    n = format_count(numbers["n_measured"])
    if numbers.get("trace"):
        train = str(numbers.get("train"))
        split = SPLITS.get(train, f"{train} of its steps")
        return (
            f"Fitted on {split}, can the prediction of {_name(numbers['trace'])} be told from the "
            f"{n} that were held out ({what})?"
        )
    source = _name(numbers.get("measured"))
    return f"Can the prediction of {subject} be told from {n} measured values of {source} ({what})?"


def _validation_errors(numbers: Json) -> Errors:
    """Write how far draws and the measurement itself may be off."""
    drawn = numbers.get("replicates")
    text = f"{format_count(drawn)} predicted values" if drawn else "that of the predicted values"
    if numbers.get("bootstrap"):
        least = 1.0 / (int(numbers["bootstrap"]) + 1)
        text += f"; p-value from {format_count(numbers['bootstrap'])} simulated repetitions, so no "
        text += f"less than {least:.2g}"
    data = f"{format_count(numbers['n_measured'])} measured values"
    if numbers.get("n_effective") is not None:
        data += f", worth {numbers['n_effective']:.1f} independent ones"
    if numbers.get("p95_measured_se") is not None:
        data += f": their p95 is known to {format_share(numbers['p95_measured_se'], 2)} (one "
        data += "standard error)"
    return Errors(text, data)


def replay_section(result: xr.Dataset) -> Section:
    """Make the section of a replay, what ``prism.replay`` returns."""
    numbers = summarize_replay(result)
    subject = _name(result.attrs.get("source"))
    errors = Errors("none: nothing is drawn", "as exact as the recording's clock")
    pictures = []
    if "replayed_step_time" in result:
        title = f"Replayed against measured step times of {subject}"
        note = "On the dashed line the graph reproduces the measured step."
        pictures.append(Picture("", title, lambda: plot_replay(result), note, errors))
    if "slowdown_by_worker" in result:
        title = f"Slowdown of the step by worker of {subject}"
        note = "Step time as measured over the step time with only this worker at its mean."
        pictures.append(Picture("", title, lambda: plot_workers(result), note, errors))
    return Section(
        title="Replay of a recording",
        subject=subject,
        question=f"Does the graph of {subject} reproduce its measured steps, and what do "
        "stragglers cost?",
        answers=tuple(_replay_answers(numbers)),
        pictures=tuple(pictures),
        view=replay_view(numbers),
        captions=("Measured, replayed and ideal step",),
        warnings=tuple(numbers.get("warnings") or ()),
        numbers=numbers,
    )


def _percent(error: float, sign: str = "") -> str:
    """Write a relative error in percent; what rounding makes is 0."""
    return f"{100.0 * error:{sign}.2g} %" if abs(error) > 1e-9 else "0 %"


def _replay_answers(numbers: Json) -> list[str]:
    """Say how well steps are reproduced, and how much slower than the ideal they are."""
    out = []
    if numbers.get("mean_error") is not None:
        text = "From its own durations the graph gives the measured steps to "
        text += f"{_percent(numbers['mean_error'], '+')} on average"
        if numbers.get("max_abs_error") is not None:
            text += f", and each to {_percent(numbers['max_abs_error'])}"
        out.append(f"{text}.")
    slowdown, ideal = numbers.get("slowdown_same_work"), numbers.get("ideal_mean")
    if slowdown is not None and ideal is not None:
        step = format_like(ideal, ideal, 1e-4 * ideal)
        out.append(
            f"With every effect at its mean a step would take {step}; stragglers and noise make it "
            f"{100.0 * (slowdown - 1.0):.2f} % longer."
        )
    return out
