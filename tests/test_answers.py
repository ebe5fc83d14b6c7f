"""Answers of all kinds of results: the terminal, JSON and the page show the same figures."""

import html
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import prism
from prism.cli.commands.terminal import to_json
from prism.common.resultfiles import KINDS
from prism.models.steptimes import likelihood
from prism.present.answer import Answer, Column, Figure, Finding, Table
from prism.present.terminal import render

SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"
SMALL = ["parallelism.pp=2", "parallelism.microbatches=4"]
SEVERITIES = {"answer", "advice", "info", "warning"}


def steps_file(folder):
    rng = np.random.default_rng(1)
    lines = [f"{r},{i},{s}" for r in range(2)
             for i, s in enumerate(1.0 + 0.02 * rng.standard_normal(60))]  # fmt: skip
    path = folder / "steps.csv"
    path.write_text("run,step,step_s\n" + "\n".join(lines))
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small result of every kind that needs no accelerator."""
    folder = tmp_path_factory.mktemp("answers")
    job = prism.load_job("pipeline-8x32", SMALL)
    steps = steps_file(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "_CELLS", 0)  # the fewest repetitions behind an interval
        model = prism.fit(steps, seed=1)
    prism.save(model, folder / "steps.nc")
    few = {"replicates": 128, "seed": 1}
    a = prism.estimate(job, run_replicates=20, **few)
    b = prism.estimate(prism.load_job("pipeline-8x32", [*SMALL, "model.durations.forward_s=0.5"]),
                       run_replicates=20, **few)  # fmt: skip
    two = prism.load_job("pipeline-8x32", ["parallelism.dp=2", "cluster.nodes=2"])
    trace = sorted((SAMPLES / "kineto").iterdir())[:2]  # two of its ranks
    return {
        "simulation": prism.simulate(job, **few),
        "estimate": a,
        "steps_estimate": prism.estimate(folder / "steps.nc", run_replicates=20, **few),
        "ranking": prism.rank(job, seed=1),
        "placement": prism.place(two, slow_nodes=1, slowdown=1.2, seed=1),
        "sweep": prism.sweep(job, {"parallelism.microbatches": [4, 8]}, **few),
        "comparison": prism.compare(a, b, seed=1),
        "validation": prism.validate(folder / "steps.nc", measured=steps, seed=1, bootstrap=19),
        "replay": prism.replay(trace),
        "timeline": prism.timeline(job, seed=1),
        "trace": prism.fit(trace, seed=0),
        "steps": model,
    }


MADE = ("simulation", "estimate", "steps_estimate", "ranking", "placement", "sweep", "comparison",
        "validation", "replay", "timeline", "trace", "steps")  # fmt: skip


def figures_of(answer):
    """All figures that an answer shows, with where they stand."""
    for table in answer.tables:
        for row in table.rows:
            for cell in row:
                if isinstance(cell, Figure):
                    yield f"{table.title}: {row[0]}", cell
    yield from answer.facts


def numbers_in(value):
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def plain(text):
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.mark.parametrize("kind", MADE)
def test_terminal_json_and_page_show_the_same_figures(results, kind):
    answer = prism.answer(results[kind])
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(answer, details=True))
    terminal = plain(console.export_text())
    page = plain(html.unescape(prism.report(results[kind])))
    known = sorted({abs(x) for x in numbers_in(json.loads(to_json(answer.json())))})
    for place, figure in figures_of(answer):
        assert plain(figure.text) in page, (place, figure)
        if place not in dict(answer.facts):
            assert plain(figure.text) in terminal, (place, figure)
        if figure.value is not None and math.isfinite(figure.value):
            assert in_json(abs(figure.value), known), (place, figure)
    for finding in answer.findings:
        assert plain(finding.text) in page
        assert finding.severity in SEVERITIES and finding.code.isidentifier()
    assert answer.findings or answer.tables
    lines = [line for line in console.export_text(clear=False).splitlines()]
    assert all("None" not in line and "nan" not in line.split() for line in lines)


def in_json(value, known):
    """Whether a number is in the JSON, or the ratio of two that are."""
    if value == 0.0 or any(math.isclose(value, x, rel_tol=1e-9) for x in known):
        return True
    return any(x and any(math.isclose(value * x, y, rel_tol=1e-9) for y in known) for x in known)


def test_every_kind_has_an_answer(results):
    assert {kind for kind in KINDS if not KINDS[kind].maker} == set()
    assert set(MADE) == set(results)


def test_a_screen_is_a_screen(results):
    """Without --details, an answer of a small job is about a screen high."""
    for kind, result in results.items():
        console = Console(width=110, record=True, file=io.StringIO())
        console.print(render(prism.answer(result)))
        assert len(console.export_text().splitlines()) <= 48, kind


def test_details_are_left_out_and_named():
    one, two = (Table(title, (Column(right=False), Column("x")), (("a", Figure(1.0, "1 s")),),
                      details=title == "more") for title in ("shown", "more"))  # fmt: skip
    answer = Answer("t", "job [b]", findings=(Finding("code", "50 % of it."),), tables=(one, two))
    texts = []
    for details in (False, True):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(render(answer, details))
        texts.append(console.export_text())
    assert "job [b]" in texts[0] and "--details" in texts[0] and "--details" not in texts[1]
    assert texts[1].count("1 s") == 2 and texts[0].count("1 s") == 1
    assert answer.json()["findings"] == [
        {"code": "code", "text": "50 % of it.", "severity": "info"}
    ]


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError):
        Answer("t", "s", warnings=(1.5,))


@pytest.mark.parametrize("width", [20, 30, 54, 120])
def test_no_word_of_a_table_is_lost_on_a_narrow_terminal(width):
    columns = (Column(right=False), *(Column(f"wide title {k}") for k in range(6)))
    rows = tuple(
        (f"kernel_{i} of a stage", *[f"{10 * i + k}.25 %" for k in range(6)]) for i in (1, 2)
    )
    console = Console(file=io.StringIO(), width=width, color_system=None)
    parts = console.render(render(Answer("a", "b", tables=(Table("t", columns, rows),))))
    lines = "".join(part.text for part in parts).splitlines()
    said = " ".join(lines).split()
    for row in rows:
        assert set(row[0].split()) <= set(said)
        assert any(all(cell in line for cell in row[1:]) for line in lines)  # with their units
    assert {"wide", "title"} <= set(said)
