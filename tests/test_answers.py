"""Answers of all kinds of results: the terminal, JSON and the page show the same figures."""

import html
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import prism
from prism import __main__ as entry

SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"
SMALL = ["parallelism.pp=2", "parallelism.microbatches=4"]
SEVERITIES = {"answer", "advice", "info", "warning"}
KINDS = (
    "simulation", "estimate", "steps_estimate", "ranking", "placement", "sweep", "comparison",
    "validation", "replay", "timeline", "trace", "steps", "kernel",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small result of every kind that needs no accelerator."""
    folder = tmp_path_factory.mktemp("answers")
    job = prism.load_job("pipeline-8x32", SMALL)
    rng, steps = np.random.default_rng(1), folder / "steps.csv"
    lines = [f"{r},{i},{1.0 + 0.02 * rng.standard_normal()}" for r in range(2) for i in range(60)]
    steps.write_text("\n".join(["run,step,step_s", *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism.models.steptimes.likelihood._CELLS", 0)  # the fewest repetitions
        model = prism.fit(steps, seed=1)
    prism.save(model, folder / "steps.nc")
    few = {"replicates": 128, "seed": 1}
    a, b = (
        prism.estimate(prism.load_job("pipeline-8x32", SMALL + more), run_replicates=20, **few)
        for more in ([], ["model.durations.forward_s=0.5"])
    )
    two = prism.load_job("pipeline-8x32", ["parallelism.dp=2", "cluster.nodes=2"])
    trace = sorted((SAMPLES / "kineto").iterdir())[:2]  # two of its ranks
    found = (
        prism.simulate(job, **few), a,
        prism.estimate(folder / "steps.nc", run_replicates=20, **few), prism.rank(job, seed=1),
        prism.place(two, slow_nodes=1, slowdown=1.2, seed=1),
        prism.sweep(job, {"parallelism.microbatches": [4, 8]}, **few), prism.compare(a, b, seed=1),
        prism.validate(folder / "steps.nc", measured=steps, seed=1, bootstrap=19),
        prism.replay(trace), prism.timeline(job, seed=1), prism.fit(trace, seed=0), model,
        kernel_of(folder),
    )  # fmt: skip
    kinds = dict(zip(KINDS, found, strict=True))
    for kind, result in kinds.items():
        assert result.attrs["kind"] == kind
        prism.save(result, folder / f"{kind}.nc")
    return folder, kinds


def kernel_of(folder):
    """What the command writes about a product."""
    sizes = (word for name in "mnk" for word in (f"--{name}", "4096"))
    assert not entry.main(["kernel", "gemm", "--device", "h100", *sizes, "-o", f"{folder}/gemm"])
    return prism.load(folder / "gemm")


def figures_of(answer):
    """All figures that an answer shows, with where they are."""
    for table in answer.tables:
        for row in table.rows:
            for cell in row:
                if hasattr(cell, "value"):
                    yield f"{table.title}: {row[0]}", cell
    yield from answer.facts


def numbers_in(value):
    """All numbers of a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def plain(text):
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


def known(value, numbers):
    """Whether a number is in the JSON, or the ratio of two that are."""
    if value == 0.0 or any(math.isclose(value, x, rel_tol=1e-9) for x in numbers):
        return True
    return any(
        x and any(math.isclose(value * x, y, rel_tol=1e-9) for y in numbers) for x in numbers
    )


@pytest.mark.parametrize("kind", KINDS)
def test_terminal_json_and_page_show_the_same_figures(results, run, monkeypatch, kind):
    folder, made = results
    answer, page = prism.answer(made[kind]), plain(html.unescape(prism.report(made[kind])))
    monkeypatch.setenv("COLUMNS", "400")
    status, shown, _ = run("show", folder / f"{kind}.nc", "--details")
    terminal = plain(shown)
    numbers = sorted({abs(x) for x in numbers_in(json.loads(json.dumps(answer.json())))})
    assert status == 0 and json.loads(run("show", folder / f"{kind}.nc", "--json")[1])
    for place, figure in figures_of(answer):
        assert plain(figure.text) in page, (place, figure)
        if place not in dict(answer.facts):
            assert set(plain(figure.text).split()) <= set(terminal.split()), (place, figure)
        if figure.value is not None and math.isfinite(figure.value):
            assert known(abs(figure.value), numbers), (place, figure)
    for finding in answer.findings:
        assert plain(finding.text) in page and plain(finding.text) in terminal
        assert finding.severity in SEVERITIES and finding.code.isidentifier()
    assert answer.findings or answer.tables
    assert not {"nan", "None"} & set(terminal.split())


def test_a_screen_is_a_screen_and_details_are_more(results, run, monkeypatch):
    """Without --details, an answer of a small job is about a screen high."""
    monkeypatch.setenv("COLUMNS", "110")
    longer = 0
    for kind in KINDS:
        short, long = (
            run("show", results[0] / f"{kind}.nc", *more)[1].splitlines()
            for more in ((), ("--details",))
        )
        assert len(short) <= 48, kind
        assert len(long) >= len(short) - 1
        longer += len(long) > len(short)
    assert longer >= 4


@pytest.mark.parametrize("width", [20, 30, 54, 120])
def test_no_word_of_a_table_is_lost_on_a_narrow_terminal(results, run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    words = set(run("show", results[0] / "ranking.nc")[1].split())
    for table in prism.answer(results[1]["ranking"]).tables:
        if not table.details:
            for row in table.rows:
                for cell in row:
                    text = cell if isinstance(cell, str) else getattr(cell, "text", "")
                    assert set(text.replace("\N{NO-BREAK SPACE}", " ").split()) <= words


def test_errors_stand_below_their_numbers_where_a_terminal_is_narrow(results):
    answer = prism.answer(results[1]["ranking"])
    table = next(table for table in answer.tables if len(table.columns) > 6)
    number = next(cell for cell in table.rows[0] if hasattr(cell, "text"))
    row = ("dp all_gather", *[number._replace(text="+0.01 ± 0.01 %")] * (len(table.columns) - 1))
    answer = replace(answer, findings=(), tables=(replace(table, rows=(row,), notes=()),))
    counts = {}
    for width in (80, 120):
        out = io.StringIO()
        Console(file=out, width=width).print(answer)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        counts[width] = [line.count("±") for line in lines if "0.01" in line]
    assert counts[120] == [6]
    assert len(counts[80]) == 2 and counts[80][1] >= 5  # a text breaks where it has room


def test_long_names_are_broken_where_a_terminal_is_narrow(results):
    """No character of a name and no number is lost."""
    answer = prism.answer(results[1]["ranking"])
    table = next(table for table in answer.tables if len(table.columns) > 6)
    number = next(cell for cell in table.rows[0] if hasattr(cell, "text"))
    name = "".join(f"kernel_{k}_" for k in range(8))
    row = (name, *[number._replace(text="1.23 %")] * (len(table.columns) - 1))
    answer = replace(answer, findings=(), tables=(replace(table, rows=(row,), notes=()),))
    out = io.StringIO()
    Console(file=out, width=80).print(answer)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 < len(name) + 6 * 6
    shown = next(k for k, line in enumerate(lines) if line.startswith("kernel_0"))
    assert "".join(line.split(" ")[0] for line in lines[shown:]).startswith(name)
    assert lines[shown].count("1.23 %") >= 5
