"""The section of an estimate: how long a step and the run take, in words and pictures.

Also what several estimates have in common: one table and one picture of them all. Nothing is
computed beyond the choice of a unit and of what to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.estimate import summarize_estimate
from prism.common.text import (
    format_count,
    format_duration,
    format_like,
    format_share,
    percent_change,
)
from prism.plots.estimate import plot_dependence, plot_step_time, plot_time_to_train
from prism.plots.run import plot_progress
from prism.present.reports.blocks import Block, Cell
from prism.present.reports.figures import Errors, Picture
from prism.present.reports.sections import Section
from prism.present.views.estimate import UNKNOWN, estimate_view
from prism.present.views.run import WORDS
from prism.simulation.summary import spread

if TYPE_CHECKING:
    import xarray as xr

Json = Mapping[str, Any]

LONGEST_NAME = 60  # of a curve, in a legend
MOST_CURVES = 8
"""Curves in one picture of several estimates."""
NOTABLE = 0.01
"""Share of the run, or of its variance, from which a term is worth a word [1]."""
READING = "A curve at 95 % over a time says that 95 of 100 take no longer."
NOT_INCLUDED = (
    "not included: laws and nominal durations are taken as they are; their sources and sample "
    "sizes are under Inputs"
)


def estimate_section(result: xr.Dataset) -> Section:
    """Make the section of an estimate, of a job or of a model of step times."""
    numbers = summarize_estimate(result)
    pictures = [
        Picture(
            f"Step time of {numbers['job']}: distribution function",
            lambda: plot_step_time(result),
            f"{READING} The band, where it can be seen, is two Monte Carlo standard errors.",
            errors_of(numbers, "step_time"),
        )
    ]
    if "time_to_train" in numbers:
        errors = errors_of(numbers, "time_to_train")
        pictures.append(
            Picture(
                f"Time-to-train of {numbers['job']}: distribution function",
                lambda: plot_time_to_train(result),
                "The height of the curve at a date is the probability that the run is done by "
                "then; the band is two Monte Carlo standard errors.",
                errors,
            )
        )
        if "progress_time" in result:
            note = "Steps done over time; the inset shows what the calendar is too long to show."
            title = f"Progress of {numbers['job']}: share of steps done over time"
            pictures.append(Picture(title, lambda: plot_progress(result), note, errors))
    return Section(
        title="Step time and time-to-train",
        subject=str(numbers["job"]),
        question=_question(numbers, result),
        answers=tuple(answers(numbers, result)),
        pictures=tuple(pictures),
        facts=tuple(_facts(numbers)),
        view=estimate_view(numbers, result),
        captions=("Step time and time-to-train", "What delays the run, and what makes it vary"),
        warnings=tuple(numbers.get("warnings") or ()),
        numbers=numbers,
    )


def _question(numbers: Json, result: xr.Dataset) -> str:
    """Say what was asked."""
    on = f" on {format_count(numbers['world_size'])} GPUs" if "world_size" in numbers else ""
    text = f"How long does a step of {numbers['job']}{on} take"
    if "time_to_train" not in numbers:
        return f"{text}, with what probability?"
    text += f", and how long its run of {format_count(numbers['steps'])} steps"
    if numbers.get("finish_by"):
        deadline = format_duration(numbers["finish_by"]["deadline"])
        return f"{text}; with what probability is it done within {deadline}?"
    return f"{text}, with what probability?"


def answers(numbers: Json, result: xr.Dataset) -> list[str]:
    """Say the answer in words, what matters most first."""
    step = numbers["step_time"]
    p50, p95, ideal = (
        _time(step, seconds) for seconds in (step["p50"], step["p95"], numbers["ideal_step_time"])
    )
    text = f"Half of the steps take no longer than {p50}, and 95 % no longer than {p95}"
    slower = percent_change(step["p50"] / numbers["ideal_step_time"] - 1.0)
    out = [f"{text}; with every effect at its mean a step would take {ideal} ({slower})."]
    if "time_to_train" in numbers:
        out += _run_answers(numbers, result)
    if numbers.get("exposed_communication") is not None:
        text = f"{format_share(numbers['exposed_communication'])} of a step is exposed "
        text += "communication"
        if numbers.get("mfu") is not None:
            text += f"; model flops utilisation (MFU) is {format_share(numbers['mfu'])}"
        out.append(f"{text}.")
    return out


def _run_answers(numbers: Json, result: xr.Dataset) -> list[str]:
    """Say when the run is done, what it costs, what delays it and what makes it vary."""
    run = numbers["time_to_train"]
    p50, p95 = (_time(run, run[key]) for key in ("p50", "p95"))
    out = []
    if numbers.get("finish_by"):
        out.append(_deadline(numbers, result))
        if not numbers["finish_by"].get("failures_modelled", True):
            out.append("No failures are modelled.")
    out.append(
        f"The run of {format_count(numbers['steps'])} steps takes {p50} in the median; with a "
        f"probability of 95 % it is done within {p95}."
    )
    if numbers.get("finish_date"):
        found = numbers["finish_date"]
        date = str(found["date"]).replace("T", " ")
        out.append(f"With a probability of {format_share(found['probability'])} it ends by {date}.")
    if isinstance(numbers.get("cost"), Mapping):
        cost, p95_cost = (format_count(numbers["cost"][key]) for key in ("mean", "p95"))
        out.append(f"It costs {cost} on average, p95 {p95_cost}, in the currency of the price.")
    if numbers.get("ettr") is not None:
        out.append(
            f"{format_share(numbers['ettr'])} of the time is effective training (ETTR), with "
            f"{numbers['failures']:.3g} failures a run on average."
        )
    return [*out, *_terms(numbers), *_checkpoints(numbers)]


def _deadline(numbers: Json, result: xr.Dataset) -> str:
    """Say how likely the run is done in time; where no run is, or all are, only a bound is known.

    Runs on the same cluster are alike, so clusters are what is counted.
    """
    found = numbers["finish_by"]
    deadline, p = format_duration(found["deadline"]), float(found["probability"])
    n, cluster = format_count(numbers["run_replicates"]), result["run_cluster_idx"].to_numpy()
    n_clusters = np.unique(cluster).size
    # 3 / n: the 95 % bound on the probability of what was not seen in n draws
    bound = format_share(min(1.0, 3.0 / n_clusters), 2)
    drawn = f"{n} simulated runs" + (f" on {n_clusters} cluster draws" if n_clusters < 1000 else "")
    if p == 0.0:
        text = f"The run is not done within {deadline}: none of {drawn} is"
        return f"{text} (less than {bound} likely, with 95 % confidence)."
    if p == 1.0:
        text = f"The run is done within {deadline}: all of {drawn} are"
        return f"{text} (less than {bound} likely to be late, with 95 % confidence)."
    done = (result["time_to_train"].to_numpy() <= found["deadline"]).astype(np.float64)
    found = spread(done, cluster)["mean_se"]
    error = UNKNOWN if found is None else f"± {format_share(found, 2)}, one standard error"
    return (
        f"The run is done within {deadline} with a probability of {format_share(p)} ({error}; "
        f"{drawn})."
    )


def _terms(numbers: Json) -> list[str]:
    """Say what delays the run most, and what makes it vary most."""
    out = []
    mean = numbers["time_to_train"]["mean"]
    delays = sorted((numbers.get("delay_by_term") or {}).items(), key=lambda item: -item[1])
    told = [
        f"{_word(name)} ({format_duration(delay)}, {format_share(delay / mean, 2)} of the run)"
        for name, delay in delays[:3]
        if delay > NOTABLE * mean
    ]
    if told:
        out.append(f"What delays the run most: {', '.join(told)}.")
    shares = sorted((numbers.get("variance_by_term") or {}).items(), key=lambda item: -item[1])
    told = [f"{_word(n)} ({format_share(s, 2)})" for n, s in shares[:3] if s > NOTABLE]
    if told:
        out.append(f"What makes runs differ, as a share of the variance: {', '.join(told)}.")
    return out


def _word(term: str) -> str:
    return WORDS.get(term, term.replace("_", " "))


def _checkpoints(numbers: Json) -> list[str]:
    """Say which interval of checkpoints would be best, where it would save time."""
    found = numbers.get("checkpoint") or {}
    saved = found.get("costs_more")
    if not saved or saved < 1e-3 * numbers["time_to_train"]["mean"]:
        return []
    best = format_duration(numbers["best_checkpoint_interval"])
    return [
        f"A checkpoint every {best} instead of every {format_duration(found['interval'])} would "
        f"save {format_duration(saved)}."
    ]


def _facts(numbers: Json) -> list[tuple[str, str]]:
    """Pick the figures that stand out."""
    step = numbers["step_time"]
    facts = [(f"step, {key}", _time(step, step[key])) for key in ("p50", "p95")]
    if "time_to_train" in numbers:
        run = numbers["time_to_train"]
        facts += [(f"time-to-train, {key}", _coarse(run, run[key])) for key in ("p50", "p95")]
    if numbers.get("finish_by"):
        found = numbers["finish_by"]
        label = f"done within {format_duration(found['deadline'])}"
        facts.append((label, format_share(found["probability"])))
    for key, label in (("ettr", "effective training (ETTR)"), ("mfu", "MFU")):
        if numbers.get(key) is not None:
            facts.append((label, format_share(numbers[key])))
    return facts


def _coarse(numbers: Json, seconds: float) -> str:
    """Write a long time with as few units as its spread allows."""
    return format_duration(seconds, max(0.3 * float(numbers["std"]), 1e-4 * seconds))


def _time(numbers: Json, seconds: float) -> str:
    """Write a time of a distribution, with the digits that its spread makes worth showing."""
    fine = max(0.05 * float(numbers["std"]), 1e-5 * abs(numbers["mean"]))
    return format_like(seconds, numbers["mean"], fine)


def _small(numbers: Json, seconds: float) -> str:
    """Write an error with two digits, in the unit of its distribution."""
    return format_like(seconds, numbers["mean"], max(0.0999 * seconds, 1e-9 * numbers["mean"]))


def _interval(numbers: Json) -> list[str]:
    """Write both ends of the interval of p95."""
    fine = max(0.005 * float(numbers["std"]), 1e-6 * numbers["mean"])
    return [format_like(bound, numbers["mean"], fine) for bound in numbers["p95_ci"]]


def errors_of(numbers: Json, name: str) -> Errors:
    """Write both errors of a step time or a time-to-train."""
    found = numbers[name]
    text = f"error {UNKNOWN}"
    if found["mean_se"] is not None:
        text = f"mean ± {_small(found, found['mean_se'])} (one standard error)"
    if found["p95_ci"] is not None:
        text += f"; p95 between {' and '.join(_interval(found))} (95 %)"
    n = numbers["replicates" if name == "step_time" else "run_replicates"]
    text += f"; from {format_count(n)} {'steps' if name == 'step_time' else 'runs'}"
    return Errors(text, data_text(numbers))


def data_text(numbers: Json) -> str:
    """Write what the data behind a job leave open, as far as a result knows."""
    found, wrong = numbers.get("data_error"), numbers.get("model_error")
    if not found and wrong:
        return f"run times ± {format_share(wrong['spread'])} (error of the model, in them)"
    if not found:
        return NOT_INCLUDED
    text = f"mean ± {format_share(found['mean'], 2)} (one standard error of what was measured)"
    if found.get("std"):
        text += f"; standard deviation ± {format_share(found['std'], 2)}"
    if found.get("std_at_most"):
        text += f", at most {found['std_at_most']:.3g} times as large (95 %)"
    if "library_share" in found:
        text += f"; {format_share(found['library_share'], 2)} of the library's variance is left"
    return text


def summary_table(sections: Sequence[tuple[str, str, Section]]) -> Block:
    """Put several estimates side by side."""
    runs = any("time_to_train" in _numbers(section) for _, _, section in sections)
    deadlines = any(_numbers(section).get("finish_by") for _, _, section in sections)
    step = ["mean, ± one standard error", "p50", "p95", "95 % interval of p95", "data error"]
    run = ["p50", "p95"] * runs
    top = [Cell("result", rows=2), Cell("GPUs", rows=2, right=True)]
    top += [Cell("step time", columns=len(step))]
    top += [Cell("time-to-train", columns=2)] * runs + [Cell("P(in time)", rows=2)] * deadlines
    rows = tuple(_summary_row(label, _numbers(s), runs, deadlines) for _, label, s in sections)
    return Block(
        "table",
        text="All estimates side by side",
        head=(tuple(top), tuple(Cell(text, right=True) for text in (*step, *run))),
        rows=rows,
        right=(False, *[True] * (len(rows[0]) - 1)),
        links=tuple(name for name, _, _ in sections),
    )


def _numbers(section: Section) -> Json:
    assert section.numbers is not None
    return section.numbers


def _summary_row(label: str, numbers: Json, runs: bool, deadlines: bool) -> tuple[str, ...]:
    """Write one estimate for the table of all."""
    step, run = numbers["step_time"], numbers.get("time_to_train")
    size = numbers.get("world_size")
    cells = [label, "" if size is None else format_count(size)]
    error = "" if step["mean_se"] is None else f" ± {_small(step, step['mean_se'])}"
    cells.append(_time(step, step["mean"]) + error)
    cells += [_time(step, step[key]) for key in ("p50", "p95")]
    cells.append("unknown" if step["p95_ci"] is None else " to ".join(_interval(step)))
    data = numbers.get("data_error")
    cells.append(f"± {format_share(data['mean'], 2)}" if data else "not included")
    if runs:
        cells += ["", ""] if run is None else [_coarse(run, run[key]) for key in ("p50", "p95")]
    if deadlines:
        found = numbers.get("finish_by")
        text = f"{format_share(found['probability'])} by {format_duration(found['deadline'])}" \
            if found else ""  # fmt: skip
        cells.append(text)
    return tuple(cells)


def overlays(results: Mapping[str, xr.Dataset]) -> list[Picture]:
    """Draw several estimates into one picture, their steps and, where two have one, their runs."""
    pictures = []
    for variable, title in (("step_time", "Step times"), ("time_to_train", "Times-to-train")):
        known = {label: found for label, found in results.items() if variable in found}
        shown = dict(list(known.items())[:MOST_CURVES])
        if len(shown) < 2:
            continue
        note = f"{READING} Bands are two Monte Carlo standard errors."
        if len(known) > len(shown):
            note += f" The first {len(shown)} of {len(known)}."
        errors = Errors("the bands; figures in the table above", "of each estimate, below")

        def draw(shown: dict[str, xr.Dataset] = shown, variable: str = variable) -> Any:
            # what tells results of one job apart stands at the end
            named = {
                label if len(label) <= LONGEST_NAME else f"...{label[-LONGEST_NAME:]}": found
                for label, found in shown.items()
            }
            return plot_dependence(named, variable=variable)

        pictures.append(Picture(f"{title} of {len(shown)} estimates", draw, note, errors))
    return pictures
