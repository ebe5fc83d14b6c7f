"""The answer of an estimate: how long a step and the run take, what delays them, how surely."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism import plots
from prism.common.errors import PrismError
from prism.common.text import (
    format_count,
    format_duration,
    format_energy,
    format_share,
    percent_change,
)
from prism.jobs.dimensions import COMMUNICATING
from prism.present.answer import Answer, Errors, Picture
from prism.present.answers.memory import fit_table, memory_table, memory_text
from prism.present.answers.runs import (
    DEPARTURE,
    FAILURES,
    completed_texts,
    framework_text,
    library_text,
)
from prism.present.answers.times import (
    READING,
    TITLES,
    UNKNOWN,
    errors_of,
    interval_text,
    mean_half_width,
    spread_table,
    time_figure,
    times_table,
)
from prism.present.cells import (
    Cell,
    Column,
    Figure,
    Json,
    Table,
    count,
    delay,
    duration,
    half_width,
    pairs_table,
    share,
    words,
)
from prism.present.tables import Rule, find
from prism.simulation.estimated import Estimate
from prism.simulation.labels import short_label
from prism.simulation.results import job_of
from prism.simulation.steps import EXPOSED_BLOCKS
from prism.simulation.summary import spread
from prism.workload.fitting import ways_to_fit
from prism.workload.memory import WARNED_P_FITS

SMALL_DELAY, SMALL_SHARE = 1e-4, 1e-3
"""Shares of the run and of its variance that a term is left out below, where both are less [1]."""
PARTS = {
    "compute": "compute, the mean stage",
    "bubble": "pipeline bubble",
    "stragglers": "stragglers and noise",
    **{f"exposed_{x}": f"exposed {x.upper()} communication" for x in COMMUNICATING},
}
LEAST_PART, LEAST_SAVED = 5e-4, 1e-3
"""Shares of the step and of the run below which a part and what could be saved are left out [1]."""


def part_name(part: str) -> str:
    """Say what a part of a step is."""
    return PARTS.get(part, part.replace("_", " "))


def estimate_answer(result: Estimate) -> Answer:
    """Make the answer of an estimate, of a job or of a model of step times."""
    numbers = result.figures()
    return Answer(
        title="Step time and time-to-train",
        subject=str(numbers["job"]),
        head=_head(numbers),
        question=_question(numbers),
        findings=find(numbers | {"in_time": _in_time(numbers, result)}, RULES),
        tables=tuple(table for table in _tables(numbers, result) if table.rows),
        figures=numbers,
        warnings=tuple(numbers.get("warnings") or ()),
        assumptions=completed_texts(numbers),
        facts=tuple(_facts(numbers)),
        pictures=tuple(_pictures(numbers, result)),
    )


def _head(numbers: Json) -> str:
    """Say what was simulated."""
    head = [""]
    if "world_size" in numbers:
        head.append(format_count(numbers["world_size"], "GPU"))
    if library := numbers.get("library"):
        head.append(library["name"])
    head.append(format_count(numbers["replicates"], "step replicate"))
    if numbers.get("run_replicates"):
        steps = f" of {format_count(numbers['steps'], 'step')}" if "steps" in numbers else ""
        head.append(f"{format_count(numbers['run_replicates'], 'run replicate')}{steps}")
    return ", ".join([*head, f"seed {numbers['seed']}"])


def _question(numbers: Json) -> str:
    on = f" on {format_count(numbers['world_size'], 'GPU')}" if "world_size" in numbers else ""
    text = f"How long does a step of {numbers['job']}{on} take"
    if "time_to_train" in numbers:
        text += f", and how long its run of {format_count(numbers['steps'], 'step')}"
    if numbers.get("finish_by"):
        deadline = format_duration(numbers["finish_by"]["deadline"])
        return f"{text}; with what probability is it done within {deadline}?"
    return f"{text}, with what probability?"


# ------------------------------------------------------------------------------ in sentences
def _in_time(numbers: Json, result: Estimate) -> dict[str, Cell]:
    """Write how likely the run is done in time; runs on one cluster are alike, and count as one."""
    found = numbers.get("finish_by")
    if not found:
        return {}
    cluster = result["run_cluster_idx"].to_numpy()
    done = (result["time_to_train"].to_numpy() <= found["deadline"]).astype(np.float64)
    n = np.unique(cluster).size
    half = half_width(spread(done, cluster)["mean_se"], n)
    return {
        "deadline": duration(found["deadline"]), "p": share(found["probability"], half),
        "unknown": f"{UNKNOWN}; " if half is None else "",
        # 3 / n: the 95 % bound on the probability of what was not seen in n draws
        "bound": format_share(min(1.0, 3.0 / n), 2), "clusters": count(n, "cluster draw"),
        "runs": count(numbers["run_replicates"], "simulated run"),
    }  # fmt: skip


def _chance(numbers: Json) -> float | None:
    return (numbers.get("finish_by") or {}).get("probability")


def _step(numbers: Json) -> dict[str, Cell]:
    """Hold the median step against the ideal one."""
    step, ideal = numbers["step_time"], float(numbers["ideal_step_time"])
    slower = step["p50"] / ideal - 1.0
    half = (mean_half_width(step) or 0.0) / ideal
    over = f"{format_share(abs(slower), half=half or None)} {'below' if slower < 0 else 'above'}"
    if half and abs(slower) <= half:
        over = f"within {format_share(half, 2)} of"
    return _times(step) | {"ideal": time_figure(step, ideal), "over": over}


def _times(numbers: Json, coarse: bool = False) -> dict[str, Cell]:
    return {p: time_figure(numbers, numbers[p], coarse) for p in ("p50", "p95")}


RULES = (
    Rule("finish_by", "answer", lambda n: _chance(n) == 0.0,
         "The run is not done within {deadline}: none of {runs} on {clusters} (less than {bound} "
         "likely, with 95 % confidence).", lambda n: n["in_time"]),
    Rule("finish_by", "answer", lambda n: _chance(n) == 1.0,
         "The run is done within {deadline}: all of {runs} on {clusters} (less than {bound} "
         "likely to be late, with 95 % confidence).", lambda n: n["in_time"]),
    Rule("finish_by", "answer", lambda n: _chance(n) not in (None, 0.0, 1.0),
         "P(done within {deadline}) is {p} ({unknown}{runs}).", lambda n: n["in_time"]),
    Rule("time_to_train", "answer", lambda n: "time_to_train" in n,
         "Median time-to-train {p50}; p95 {p95}.",
         lambda n: _times(n["time_to_train"], coarse=True)),
    *DEPARTURE,
    Rule("step_time", "answer", lambda n: True,
         "Median step {p50}, {over} the ideal step of {ideal}; p95 {p95}.", _step),
    Rule("framework", "info", lambda n: n.get("framework") and not n["framework"]["named"],
         "Framework: {framework}; parallelism.framework sets it.",
         lambda n: {"framework": framework_text(n["framework"])}),
    Rule("library", "info", lambda n: (n.get("library") or {}).get("others"), "{library}.",
         lambda n: {"library": library_text(n)}),
    *FAILURES,
    Rule("checkpoint_interval", "advice",
         lambda n: "best_checkpoint_interval" in n
         and n["checkpoint"]["costs_more"] >= LEAST_SAVED * n["time_to_train"]["mean"],
         "A checkpoint every {best} instead of every {now} would save {saved}.",
         lambda n: {"best": duration(n["best_checkpoint_interval"]),
                    "now": duration(n["checkpoint"]["interval"]),
                    "saved": duration(n["checkpoint"]["costs_more"])}),
)  # fmt: skip


def _facts(numbers: Json) -> list[tuple[str, Figure]]:
    """Pick the figures that stand out."""
    facts = [(f"step, {p}", time) for p, time in _times(numbers["step_time"]).items()]
    if "time_to_train" in numbers:
        run = _times(numbers["time_to_train"], coarse=True)
        facts += [(f"time-to-train, {p}", time) for p, time in run.items()]
    if numbers.get("finish_by"):
        found = numbers["finish_by"]
        within = f"done within {format_duration(found['deadline'])}"
        facts.append((within, share(found["probability"])))
    for key, label in (("ettr", "effective training (ETTR)"), ("mfu", "MFU")):
        facts.append((label, share(numbers.get(key))))
    return [(label, fact) for label, fact in facts if isinstance(fact, Figure)]


# --------------------------------------------------------------------------------- in tables
def _tables(numbers: Json, result: Estimate) -> list[Table]:
    memory = numbers.get("memory")
    return [
        times_table(numbers),
        pairs_table("Run", _run_rows(numbers)),
        terms_table(numbers),
        _loss_table(numbers),
        pairs_table("Step", _step_rows(numbers)),
        _path_table(numbers),
        memory_table(memory, details=True),
        fit_table(_ways_to_fit(memory, result)),
        pairs_table("Accuracy", _accuracy_rows(numbers)),
        spread_table(numbers),
        pairs_table("Sources and simulation", _engine_rows(numbers), details=True),
    ]


def _ways_to_fit(memory: Json | None, result: Estimate) -> list[dict[str, Any]]:
    """List what would make a job fit that is warned of, as long as its library is there."""
    if memory is None or memory.get("p_fits", 1.0) >= WARNED_P_FITS:
        return []
    try:
        return ways_to_fit(job_of(result.to_xarray()))
    except PrismError:  # a saved result outlives its library
        return []


def _level(past: Json) -> str:
    """Write how much slower completed steps were, with half of its 95 % interval."""
    level, half = past["level"] - 1.0, 1.96 * past["level_std"]
    return percent_change(level, (level - half, level + half))


def _run_rows(numbers: Json) -> list[tuple[str, Cell]]:
    """Say what the run as a whole comes to."""
    rows: list[tuple[str, Cell]] = []
    if past := numbers.get("completed"):
        text = f"{format_count(past['steps'])} in {format_duration(past['seconds'])}, part of the "
        text += f"time-to-train; steps take {_level(past)} "
        rows.append(("completed steps", f"{text}of what the job says"))
    if numbers.get("finish_date"):
        probability = format_share(numbers["finish_date"]["probability"])
        rows.append((f"done with {probability} by", str(numbers["finish_date"]["date"])))
    if numbers.get("cost") is not None:
        costs = {"cost, mean, in the currency of the price": "mean", "cost, p95": "p95"}
        for label, key in costs.items():
            price = numbers["cost"][key]
            rows.append((label, Figure(price, f"{price:,.0f}" if price >= 100 else f"{price:.3g}")))
    if energy := numbers.get("energy"):
        p50, p95 = (format_energy(3.6e9 * energy[key]) for key in ("gpu_mwh_p50", "gpu_mwh_p95"))
        text = f"{p50}, p95 {p95} ({energy['gpu_power_w']:.0f} W per GPU)"
        rows.append(("energy of the GPUs alone, p50", Figure(energy["gpu_mwh_p50"], text)))
        if "carbon" in numbers:
            p50, beside = energy["machines_mwh_p50"], format_share(energy["beside_gpus_share"])
            text = f"{format_energy(3.6e9 * p50)}, {beside} of it beside the GPUs"
            rows.append(("energy with hosts and switches, p50", Figure(p50, text)))
    if carbon := numbers.get("carbon"):
        tonnes, grid = carbon["operational_t"], f"{carbon['intensity_g_per_kwh']:g} g/kWh"
        text = f"{_tonnes(tonnes['p50'])} CO2e, p95 {_tonnes(tonnes['p95'])} ({grid}, PUE "
        text += f"{carbon['pue']:g}); making of the machines {_tonnes(carbon['embodied_t'])}"
        rows.append(("carbon, p50", Figure(tonnes["p50"], text)))
    rows.append(("effective training time ratio (ETTR)", share(numbers.get("ettr"))))
    if numbers.get("failures") is not None:
        rows.append(("failures, mean", Figure(numbers["failures"], f"{numbers['failures']:.4g}")))
    if c := numbers.get("checkpoint"):
        text = _steps(c["interval"], c["interval_steps"])
        if numbers.get("best_checkpoint_interval") is not None:
            best = _steps(numbers["best_checkpoint_interval"], c["best_interval_steps"])
            text += f"; shortest run at {best}"
        rows.append(("checkpoint interval", Figure(c["interval"], text)))
    return [row for row in rows if row[1] is not None]


def _tonnes(value: float) -> str:
    return f"{value:,.3g} t" if value < 1000.0 else f"{value:,.0f} t"


def _steps(seconds: float, steps: int) -> str:
    return f"{format_duration(seconds)} ({format_count(steps, 'step')})"


def terms_table(numbers: Json) -> Table:
    """Lay out what each term delays the run, and its share of the variance."""
    delays, shares = numbers.get("delay_by_term") or {}, numbers.get("variance_by_term") or {}
    mean = numbers["time_to_train"]["mean"] if delays else 0.0
    rows: list[tuple[Cell, ...]] = []
    for term, seconds in delays.items():
        part = shares.get(term)
        short = abs(seconds) < SMALL_DELAY * abs(mean)
        if short and abs(part or 0.0) < SMALL_SHARE:
            continue
        late, varies = (_half(numbers, f"{of}_by_term_se", term) for of in ("delay", "variance"))
        cell = Figure(seconds, "0") if short and not late else delay(seconds, late)
        of_run = share(seconds / mean, (late or 0.0) / mean)
        rows.append((short_label(term, "terms"), cell, of_run, share(part, varies)))
    columns = (
        Column(right=False), Column("mean delay, ± 95 %"), Column("of the run"),
        Column("variance, ± 95 %"),
    )  # fmt: skip
    return Table("What delays the run, and what makes it vary", columns, tuple(rows))


def _half(numbers: Json, key: str, term: str) -> float | None:
    """Half of the 95 % interval of a term's figure; None where its error is not known."""
    se = (numbers.get(key) or {}).get(term)
    return half_width(se, numbers["time_to_train"]["cluster_draws"])


def _step_rows(numbers: Json) -> list[tuple[str, Cell]]:
    """Say what a step achieves, and how often it is much slower."""
    rows: list[tuple[str, Cell]] = []
    if numbers.get("tokens_per_s") is not None:
        rate, one = numbers["tokens_per_s"], numbers["tokens_per_s_per_gpu"]
        rows.append(("tokens/s", Figure(rate, f"{rate:,.0f} ({one:,.0f} per GPU)")))
        batch, tokens = numbers["global_batch"], numbers["tokens_per_step"]
        text = f"{format_count(batch, 'sequence')}, {format_count(tokens, 'token')}"
        rows.append(("global batch", Figure(batch, text)))
    if numbers.get("mfu") is not None:
        tera = f"{numbers['model_flops_per_gpu'] / 1e12:.1f} TFLOP/s per GPU"
        text = f"{words(share(numbers['mfu']))} ({tera})"
        rows.append(("model flops utilisation (MFU)", Figure(numbers["mfu"], text)))
    if memory := numbers.get("memory"):
        rows.append(("memory of the fullest GPU", Figure(memory["gib"], memory_text(memory))))
    for factor, probability in (numbers.get("slowdown") or {}).items():
        if probability > 0.0:
            rows.append((f"P(step > {factor} x ideal)", share(probability)))
    return rows


def _loss_table(numbers: Json) -> Table:
    """Lay out where the time of a step goes; parts that are nothing are left out."""
    rows = []
    n = min(numbers["step_time"]["cluster_draws"], EXPOSED_BLOCKS)
    for part in numbers.get("time_loss") or ():
        found = [part[f"{of}_share"] for of in ("mean", "variance")]
        if max(abs(value or 0.0) for value in found) >= LEAST_PART:
            halves = [half_width(part.get(f"{of}_share_se"), n) for of in ("mean", "variance")]
            rows.append((part_name(part["name"]), *map(share, found, halves)))
    columns = (
        Column(right=False), Column("of the mean, ± 95 %"), Column("of the variance, ± 95 %")
    )  # fmt: skip
    return Table("Where the time of a step goes", columns, tuple(rows))


def _path_table(numbers: Json) -> Table:
    """Lay out kernel classes by their mean time on the critical path, the smallest left out."""
    times = numbers.get("critical_path") or {}
    total = sum(times.values())
    rows = tuple(
        (name, duration(seconds, 1e-4 * total, total), share(seconds / total))
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])
        if seconds > 0.001 * total
    )
    columns = (Column(right=False), Column("mean"), Column("of the step"))
    return Table("Critical path by kernel class", columns, rows, details=True)


def _accuracy_rows(numbers: Json) -> list[tuple[str, Cell]]:
    """Say how far the numbers above may be off."""
    rows: list[tuple[str, Cell]] = []
    for name, title in TITLES.items():
        if numbers.get(name):
            n = numbers[name]["cluster_draws"]
            interval = interval_text(numbers[name], "p95_ci")
            if interval is None:
                interval = UNKNOWN if n == 1 else f"unknown from {format_count(n, 'cluster draw')}"
            else:
                interval += f" (Monte Carlo, {format_count(n, 'cluster draw')})"
            rows.append((f"p95 {title}, 95 % interval", interval))
    wrong, data = numbers.get("model_error"), numbers.get("data_error")
    if wrong:
        text = f"{format_share(wrong['spread'])} standard deviation, in percentiles and P(done)"
        text += "; no such job was published" * (not wrong.get("measured", True))
        rows.append(("model error of run times", Figure(wrong["spread"], text)))
    if data:
        what = "of what was measured"
        if "library_share" in data:
            left = format_share(data["library_share"])
            what = f"calibrated; {left} of the library's variance is left"
        text = f"{format_share(data['mean'], 2)} ({what})"
        rows.append(("mean step, standard error", Figure(data["mean"], text)))
    elif rows and not wrong:
        text = "not included: prism show names their sources"
        rows.append(("distributions and nominal durations", text))
    return rows


def _engine_rows(numbers: Json) -> list[tuple[str, Cell]]:
    """Say where the model error is from, and what the simulation cost."""
    rows: list[tuple[str, Cell]] = []
    if numbers.get("model_error"):
        rows.append(("model error", numbers["model_error"]["source"]))
    engine = numbers.get("engine") or {}
    if engine.get("op_samples"):
        text = f"{engine['op_samples']:.3g} in {format_duration(engine['seconds'], 0.01)}"
        if engine.get("ns_per_op_sample") is not None:
            text += f", {engine['ns_per_op_sample']:.2f} ns each"
        if engine.get("threads"):
            text += f" on {format_count(engine['threads'], 'thread')}"
        rows.append(("op-samples", text))
    replicas = numbers.get("replicas") or {"engine": "exact"}
    if replicas["engine"] != "exact":
        text = f"{replicas['simulated']} of {replicas['replicas']:,} in each cluster draw"
        rows.append(("replicas simulated", f"{text} (exchangeable)"))
        waits = format_share(replicas["slowest_unseen"])
        rows.append(("steps that wait for another replica", f"{waits} (from a pilot run)"))
    return rows


# ------------------------------------------------------------------------------- in pictures
def _pictures(numbers: Json, result: Estimate) -> list[Picture]:
    job = numbers["job"]
    pictures = [Picture(
        "step_time", f"Step time of {job}: distribution function",
        lambda: plots.plot_step_time(result),
        f"{READING} The band, where it can be seen, is two Monte Carlo standard errors.",
        errors_of(numbers, "step_time"),
    )]  # fmt: skip
    if "time_to_train" in numbers:
        pictures.append(Picture(
            "time_to_train", f"Time-to-train of {job}: distribution function",
            lambda: plots.plot_time_to_train(result),
            "The height of the curve at a date is the probability that the run is done by then; "
            "the band is two Monte Carlo standard errors.", errors_of(numbers, "time_to_train"),
        ))  # fmt: skip
    if (numbers.get("memory") or {}).get("stages"):
        pictures.append(Picture(
            "memory", f"Memory of {job}'s GPUs by stage",
            lambda: plots.plot_memory(numbers["memory"]),
            "What a GPU of each stage holds at its worst moment; the bar is the 90 % interval of "
            "the fullest stage's, calibrated on layouts that ran or ran out of memory.",
            Errors("an estimate, 90 % interval drawn", ""),
        ))  # fmt: skip
    if "progress_time" in result:
        pictures.append(Picture(
            "progress", f"Progress of {job}: share of steps done over time",
            lambda: plots.plot_progress(result),
            "Steps done over time; the inset shows what the calendar is too long to show.",
            errors_of(numbers, "time_to_train"),
        ))  # fmt: skip
    return pictures
