"""The page of results: valid, whole without network or scripts, says what the results say."""

import json
import math
import re
import shutil
from pathlib import Path

import html5lib
import matplotlib
import numpy as np
import pytest
import xarray as xr
from placement_made import placement

import prism
from prism.analyses.validation.hold import Call, Case, hold
from prism.common.errors import PrismError
from prism.common.resultfiles import save
from prism.common.text import format_share
from prism.distributions.library import library_path
from prism.plots.estimate import plot_step_time
from prism.present.answer import Column, Errors, Picture, Table
from prism.present.reports import figures
from prism.present.reports.figures import to_svg
from prism.present.reports.inputs import inputs_of
from prism.present.reports.page import _head
from prism.present.reports.read import read_results

NAME = "<script>alert('x')</script> & $co$"
JOB = """base: pipeline-8x32
run:
  deadline: 40h
  checkpoint: {interval: 10min, write_s: 20, mode: blocking}
  failures: {per_1000_node_days: 500, restart: 10min}
"""
SMALLER = ("pipeline-8x32", "--set", "parallelism.pp=2", "--set", "parallelism.microbatches=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of results: two estimates of a job with an evil name, a ranking, a sweep, ..."""
    from prism.__main__ import main

    root = tmp_path_factory.mktemp("results")
    # a name is a file's, which takes no slash
    evil = root / f"{NAME.replace('/', '')}.yaml"
    evil.write_text(JOB)
    small = ("--replicates", "128", "--seed", "1", "-q")
    runs = ("--run-replicates", "30")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        # the page draws anew
        patch.setattr(
            "prism.plots.save_figure", lambda ax, *paths: [Path(path).touch() for path in paths]
        )
        for command in (
            ("estimate", str(evil), *small, *runs, "-o", "first"),
            ("estimate", str(evil), *small, *runs, "--set", "model.durations.forward_s=0.3",
             "-o", "other"),
            ("rank", *SMALLER, "--seed", "1", "-q", "-o", "ranking"),
            ("sweep", *SMALLER, "--vary", "parallelism.microbatches=4,8", *small,
             "-o", "sweep"),
        ):  # fmt: skip
            assert main(list(command)) == 0, command
    attrs = {"kind": "placement", "summary": json.dumps(placement())}
    prism.save(xr.Dataset(attrs=attrs), root / "placement.nc")
    prism.save(validation(), root / "validation.nc")
    return root


def validation():
    """Make a validation of 40 measured values that the prediction fits."""
    rng = np.random.default_rng(5)
    measured, training = 2.0 + 0.1 * rng.standard_normal((2, 40))
    predicted, alone = 2.0 + 0.1 * rng.standard_normal((2, 2000))
    facts = {"measured": "steps.csv", "ks_p_value": 0.4, "notes": []}
    case = Case(measured, np.arange(40), predicted, alone, iter(()), facts, training=training)
    return hold(case, Call("step_time", None, 2000, 0, 1, None, None))


ALL = ("first", "other", "ranking/result.nc", "sweep", "placement.nc", "validation.nc")


@pytest.fixture(scope="module")
def page(folder):
    """Page of all of them, as text and as a strictly parsed tree."""
    html = prism.report([folder / name for name in ALL], folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8") == html
    return html, parsed(html)


@pytest.fixture(scope="module")
def alone(folder):
    """Page of one estimate."""
    return prism.report(folder / "first")


@pytest.fixture
def few_pictures(monkeypatch):
    """Draw those pictures of a page alone that are over all results."""

    def drawn(picture, name):
        return to_svg(picture, name) if name.startswith("all") else '<svg viewBox="0 0 9 9"/>'

    monkeypatch.setattr("prism.present.reports.page.to_svg", drawn)


def parsed(html):
    """Parse as a validator would: the first error raises."""
    parser = html5lib.HTMLParser(html5lib.getTreeBuilder("etree"), strict=True)
    return parser.parse(html)


def tags(tree, name):
    """Elements of a name, in any namespace."""
    return [e for e in tree.iter() if isinstance(e.tag, str) and e.tag.rpartition("}")[2] == name]


def text_of(element):
    """All text within, on one line, cells apart."""
    return " ".join(" ".join(element.itertext()).split())


def test_strict_parser_can_fail():
    with pytest.raises(html5lib.html5parser.ParseError):
        parsed("<!DOCTYPE html><title>x</title><p><table><p></table>")


def test_page_is_whole_by_itself(page):
    html, tree = page
    assert len(html.encode()) < 2_000_000
    assert not tags(tree, "script") and not tags(tree, "link") and not tags(tree, "iframe")
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    assert "@import" not in html
    for element in tree.iter():
        for key, value in element.attrib.items():
            assert not str(key).startswith("on")
            if "url(" in value:
                assert re.search(r"url\(#", value)


def test_ids_are_unique_and_all_references_lead_somewhere(page):
    _, tree = page
    ids = [e.get("id") for e in tree.iter() if e.get("id") is not None]
    assert len(ids) == len(set(ids))
    wanted = set()
    for element in tree.iter():
        for key in ("aria-labelledby", "aria-describedby"):
            wanted |= set((element.get(key) or "").split())
        for value in element.attrib.values():
            wanted |= set(re.findall(r"url\(#([^)]+)\)", value))
        if (element.get("href") or "").startswith("#"):
            wanted.add(element.get("href")[1:])
    assert wanted <= set(ids)
    assert len(wanted) > 20


def test_page_can_be_read_out(page):
    _, tree = page
    assert tags(tree, "html")[0].get("lang") == "en"
    assert any(e.get("name") == "viewport" for e in tags(tree, "meta"))
    levels = [int(e.tag[-1]) for e in tree.iter()
              if isinstance(e.tag, str) and re.search(r"\}h[1-6]$", e.tag)]  # fmt: skip
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    pictures = tags(tree, "svg")
    assert len(pictures) >= 10
    for svg in pictures:
        assert svg.get("role") == "img"
        assert [child.tag.rpartition("}")[2] for child in list(svg)[:2]] == ["title", "desc"]
        assert tags(svg, "text"), "text is text"
    for table in tags(tree, "table"):
        assert tags(table, "caption"), text_of(table)[:80]
        for head in tags(table, "th"):
            assert head.get("scope") in ("col", "row")


def test_names_are_escaped(page):
    html, tree = page
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    name = NAME.replace("/", "")
    assert any(name == text_of(e) for e in tags(tree, "h2"))
    # in pictures too, where a $ would have started a formula
    assert any(name in text_of(e) for svg in tags(tree, "svg") for e in tags(svg, "text"))


def test_page_says_what_the_results_say(folder, page):
    text = text_of(page[1]).replace("\N{NO-BREAK SPACE}", " ")
    numbers = json.loads((folder / "first" / "summary.json").read_text())
    step = numbers["step_time"]
    found = re.search(r"step, p50 ([\d.]+) s step, p95 ([\d.]+) s", text)
    assert float(found[1]) == pytest.approx(step["p50"], abs=0.05 * step["std"])
    assert float(found[2]) == pytest.approx(step["p95"], abs=0.05 * step["std"])
    assert "within 1 d 16 h" in text
    assert f"effective training (ETTR) {format_share(numbers['ettr'])}" in text
    for file in ("first", "ranking", "sweep"):
        told = json.loads((folder / file / "summary.json").read_text())
        findings = [x["text"] if isinstance(x, dict) else x for x in told.get("findings", ())]
        for sentence in [*told.get("warnings", ()), *findings]:
            assert " ".join(sentence.split()) in text
    for found in prism.answer(validation()).findings:
        assert " ".join(found.text.split()) in text
    assert "Move nodes 24, 25, 26" in text or "move nodes 24, 25, 26" in text.lower()
    n_pictures = len(tags(page[1], "figure"))
    assert n_pictures == len(tags(page[1], "svg"))
    assert text.count("Monte Carlo error") >= n_pictures
    assert text.count("Data error") >= n_pictures


def test_inputs_have_sources(page):
    text = text_of(page[1])
    assert "model.durations.forward_s" in text  # what the other estimate changed
    assert re.search(r"run\.deadline 1 d 16 h \S.*?\.yaml:3", text)
    assert "at their defaults" in text


def test_several_estimates_are_put_side_by_side(page, alone):
    text = text_of(page[1])
    assert "All estimates side by side" in text
    assert "Step times of 2 estimates" in text
    assert "Side by side" not in alone
    assert 'id="contents"' not in alone
    parsed(alone)


def test_datasets_are_taken_as_they_are(few_pictures):
    result = prism.estimate("pipeline-8x32", replicates=64, run_replicates=10, seed=2)
    html = prism.report(result, title="A & B")
    assert "<h1>A &amp; B</h1>" in html
    del result.attrs["job_sources"]  # of a version that did not record them
    assert "not recorded by" in prism.report([result])


def test_models_of_step_times_have_a_section(tmp_path, few_repeats):
    rng = np.random.default_rng(1)
    lines = [f"{r},{i},{s}" for r in range(2)
             for i, s in enumerate(1.0 + 0.02 * rng.standard_normal(30))]  # fmt: skip
    file = tmp_path / "steps.csv"
    file.write_text("run,step,step_s\n" + "\n".join(lines))
    model = prism.fit(file, seed=1)
    prism.save(model, tmp_path / "model.nc")
    drawn = prism.estimate(tmp_path / "model.nc", seed=1, replicates=128, run_replicates=50)
    html = prism.report([model, drawn])
    parsed(html)
    assert "Model of step times" in html
    assert "of what was measured" in html  # its data error


def test_what_is_no_result_is_told_by_name(run, folder, tmp_path):
    whole = (folder / "first" / "result.nc").read_bytes()
    files = {
        "missing.nc": None,
        "text.nc": b"not netCDF",
        "empty.nc": b"",
        "cut.nc": whole[: len(whole) // 2],
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    xr.Dataset({"x": ("y", [1.0])}).to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    odd = {"odd.nc": {"kind": "novel"}, "broken.nc": {"kind": "sweep", "summary": "{}"},
           "torn.nc": {"kind": "placement", "summary": "{"}}  # fmt: skip
    xr.load_dataset(folder / "first" / "result.nc", engine="h5netcdf").assign_attrs(
        warnings="[1.5]"
    ).to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    for name, attrs in odd.items():
        xr.Dataset(attrs=attrs).to_netcdf(tmp_path / name, engine="h5netcdf")
    (tmp_path / "hollow").mkdir()
    for name in (*files, "foreign.nc", *odd, "other.nc", "hollow"):
        page = tmp_path / "page.html"
        status, out, err = run("report", tmp_path / name, folder / "first", "-o", page)
        assert (status, out) == (2, ""), name
        assert name in err and "Traceback" not in err
        assert len(err.strip().splitlines()) == 1, err
        assert not page.exists()
    assert "prism sweep" in run("report", tmp_path / "odd.nc", "-o", page)[2]


def test_broken_sources_and_names_in_other_scripts(run, tmp_path):
    whole = prism.simulate("pipeline-8x32", replicates=64, seed=1)
    page = tmp_path / "page.html"
    for name, attrs in (("sources", {"job_sources": '{"run.steps": 1.5}'}),
                        ("script", {"job_name": "\ud7ff" * 400})):  # fmt: skip
        prism.save(whole.assign_attrs(attrs), tmp_path / f"{name}.nc")
    status, _, err = run("report", tmp_path / "sources.nc", "-o", page)
    assert status == 2 and "sources.nc" in err
    assert run("report", tmp_path / "script.nc", "-o", page)[0] == 0


@pytest.mark.parametrize("kind", ["figure for text", "list for a block", "replay"])
def test_what_cannot_be_shown_is_refused_and_warned_of_by_nobody(
    run, tmp_path, kind, recwarn, request
):
    result = prism.replay(Path(__file__).parents[1] / "experiments/samples/trace.csv")
    if kind == "figure for text":
        result = prism.estimate("pipeline-8x32", replicates=64, seed=1)
        result.attrs["model_error"] = json.dumps({"spread": 0.2, "source": -math.inf})
    elif kind == "list for a block":
        result.attrs |= {"job": json.dumps({"parallelism": {}, "model": [1]}), "call": "{}"}
    else:
        result = result.isel(dp_rank=slice(0))
    if kind != "replay":  # which a picture finds
        request.getfixturevalue("few_pictures")
    save(result, tmp_path / "x.nc")
    status, out, err = run("report", tmp_path / "x.nc", "-o", tmp_path / "x.html")
    assert status == 2 and str(tmp_path / "x.nc") in err and len(err.splitlines()) == 1
    assert not recwarn.list and not (tmp_path / "x.html").exists()


def test_command_writes_the_same_bytes_and_says_so(run, folder, tmp_path, alone, request):
    page = tmp_path / "page.html"
    status, out, err = run("report", folder / "first", "-o", page, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert page.read_bytes() == alone.encode()
    assert answer["bytes"] == page.stat().st_size
    assert answer["results"][0]["kind"] == "estimate"
    request.getfixturevalue("few_pictures")
    for wrong, said in ((tmp_path, "is a folder"), (tmp_path / "page.pdf", ".html"),
                        (tmp_path / "no" / "page.html", "page.html")):  # fmt: skip
        status, _, err = run("report", folder / "first", "-o", wrong)
        assert status == 2 and said in err
    twice = run("report", folder / "first", folder / "first" / "result.nc", "-o", page)
    assert twice[0] == 2 and "twice" in twice[2]


def test_no_results_and_other_things_are_refused():
    with pytest.raises(PrismError, match="no result"):
        prism.report([])
    with pytest.raises(PrismError, match="expected a path or a dataset"):
        read_results([3])


def test_grouped_columns_have_two_rows_of_heads():
    columns = (Column("what", right=False), Column("first", "share"), Column("total", "share"))
    top, below = _head(Table("t", columns, ()))
    assert [(c["text"], c["columns"], c["rows"]) for c in top] == [("what", 1, 2), ("share", 2, 1)]
    assert [c["text"] for c in below] == ["first", "total"]
    assert _head(Table("t", (Column(), Column()), ())) == []
    one = _head(Table("t", (Column(), Column("x")), ()))
    assert [(c["text"], c["rows"]) for c in one[0]] == [("", 1), ("x", 1)]


def test_pictures_take_the_colours_of_the_page(made_up_result):
    errors = Errors("none", "none")
    picture = Picture("one", "a < b", lambda: plot_step_time(made_up_result), "note", errors)
    one, two = to_svg(picture, "one"), to_svg(picture, "two")
    assert set(re.findall(r"stroke: ([^;\"]+)", one)) >= {"var(--c0)", "var(--c7)", "var(--grid)"}
    assert not re.findall("#[0-9a-f]{6}", one), "every colour is one of the style's"
    assert "a &lt; b" in one
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0] and not ids[0] & ids[1]
    assert "one-" not in two


def test_a_page_has_the_colours_of_both_styles():
    css = (Path(figures.__file__).parent / "templates" / "page.css").read_text()
    light, dark = re.findall(r"(?s):root \{(.*?)\}", css)[:2]
    for which, rules in (("light", light), ("dark", dark)):
        found = dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", rules))
        wanted = figures.colours(which)
        assert {name: found[name] for name in wanted} == wanted


def test_white_stays_white_where_paper_is_dark(made_up_result):
    def draw():
        ax = plot_step_time(made_up_result)
        ax.text(0.5, 0.5, "x", color="white")
        ax.axvspan(10.9, 11.0, color=matplotlib.rcParams["axes.facecolor"])
        return ax

    svg = to_svg(Picture("one", "t", draw, "note", Errors("none", "none")), "one")
    assert "#ffffff" in svg and "var(--card)" in svg


def test_long_names_of_files_leave_room_for_the_curves(folder, tmp_path, few_pictures):
    deep = tmp_path / ("a" * 90) / ("b" * 90)
    for name in ("first", "other"):
        shutil.copytree(folder / name, deep / name)
    html = prism.report([deep / "first", deep / "other"], title="two")
    curves = [svg for svg in re.findall(r"(?s)<svg.*?</svg>", html) if "(first)" in svg]
    assert curves and not any("aaaaaaaa" in svg for svg in curves)


def test_a_file_that_a_result_names_is_not_opened(tmp_path, monkeypatch):
    library = tmp_path / "own.nc"
    shutil.copy(library_path("h100-healthy"), library)
    result = prism.simulate("llama3-70b-fsdp-512", replicates=64, seed=1)
    values = json.loads(result.attrs["job"])
    assert inputs_of(result).library
    for key, other in (("library", "model"), ("model", "library")):
        values["variability"] |= {key: str(library), other: None}
        found = inputs_of(result.assign_attrs(job=json.dumps(values)))
        assert found.library == () and str(library) in found.notes[-1]
