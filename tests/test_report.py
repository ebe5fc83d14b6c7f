"""The page of results: valid, whole without network or scripts, says what the results say."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import html5lib
import numpy as np
import pytest
import xarray as xr

import prism

NAME = "<script>alert('x')<script> & $co$"
JOB = """base: pipeline-8x32
run:
  deadline: 40h
  checkpoint: {interval: 10min, write_s: 20, mode: blocking}
  failures: {per_1000_node_days: 500, restart: 10min}
"""
SMALLER = ("pipeline-8x32", "--set", "parallelism.pp=2", "--set", "parallelism.microbatches=4")
SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"
ALL = ("first", "other", "ranking", "sweep", "placement", "validation.nc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of results: two estimates of a job with an evil name, a ranking, a sweep, ..."""
    root = tmp_path_factory.mktemp("results")
    (root / f"{NAME}.yaml").write_text(JOB)
    job, few = prism.load_job(root / f"{NAME}.yaml"), {"replicates": 128, "seed": 1}
    small = prism.load_job("pipeline-8x32", ["parallelism.pp=2", "parallelism.microbatches=4"])
    nodes = ["cluster={gpus_per_node: 1, nodes: 4}", "parallelism={pp: 2, dp: 2, microbatches: 4}"]
    rng = np.random.default_rng(5)
    steps = ["step_s", *(f"{x:.5f}" for x in 120.6 + 0.5 * rng.standard_normal(60))]
    (root / "steps.csv").write_text("\n".join(steps))
    for name, result in {
        "first": prism.estimate(job, run_replicates=30, **few),
        "other": prism.estimate(job.replace("model.durations.forward_s=0.3"), run_replicates=30,
                                **few),
        "ranking": prism.rank(small, seed=1),
        "sweep": prism.sweep(small, {"parallelism.microbatches": [4, 8]}, **few),
        "placement": prism.place(
            prism.load_job("pipeline-8x32", nodes), slow_nodes=1, slowdown=1.2, seed=1),
    }.items():  # fmt: skip
        (root / name).mkdir()
        prism.save(result, root / name / "result.nc")
    measured = prism.validate("pipeline-8x32", measured=root / "steps.csv", bootstrap=19, **few)
    prism.save(measured, root / "validation.nc")
    return root


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


def parsed(html):
    """Parse as a validator would: the first error raises."""
    parser = html5lib.HTMLParser(html5lib.getTreeBuilder("etree"), strict=True)
    return parser.parse(html)


def tags(tree, name):
    """Elements of a name, in any namespace."""
    return [e for e in tree.iter() if isinstance(e.tag, str) and e.tag.rpartition("}")[2] == name]


def drawn(img):
    """The picture in an image: SVG, without anything that it would load or run."""
    kind, _, content = img.get("src").partition(",")
    assert kind == "data:image/svg+xml"
    tree = ET.fromstring(unquote(content))
    assert not tags(tree, "script") and not tags(tree, "metadata")
    for element in tree.iter():
        link = element.get("{http://www.w3.org/1999/xlink}href", "#")
        assert link.startswith(("#", "data:"))
        assert not any(key.startswith("on") for key in element.attrib)
        assert all("url(" not in v or "url(#" in v for v in element.attrib.values())
    return tree


def text_of(element):
    """All text within, on one line, cells apart."""
    text = " ".join(" ".join(element.itertext()).split())
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_strict_parser_can_fail():
    with pytest.raises(html5lib.html5parser.ParseError):
        parsed("<!DOCTYPE html><title>x</title><p><table><p></table>")


def test_page_is_whole_by_itself(page):
    html, tree = page
    assert len(html.encode()) < 2_000_000
    assert not tags(tree, "script") and not tags(tree, "link") and not tags(tree, "iframe")
    outside = re.sub(r'src="data:[^"]*"', "", html)  # of the pictures, which are looked at below
    assert not re.findall(r"https?://[^\s\"'<]+", outside)
    assert "@import" not in html and "url(" not in outside
    for element in tree.iter():
        assert not any(str(key).startswith("on") for key in element.attrib)
        assert (element.get("src") or "data:").startswith("data:")


def test_ids_are_unique_and_all_references_lead_somewhere(page):
    _, tree = page
    ids = [e.get("id") for e in tree.iter() if e.get("id") is not None]
    assert len(ids) == len(set(ids))
    wanted = set()
    for element in tree.iter():
        for key in ("aria-labelledby", "aria-describedby"):
            wanted |= set((element.get(key) or "").split())
        if (element.get("href") or "").startswith("#"):
            wanted.add(element.get("href")[1:])
    assert wanted <= set(ids)
    assert len(wanted) > 10


def test_page_can_be_read_out(page):
    _, tree = page
    assert tags(tree, "html")[0].get("lang") == "en"
    assert any(e.get("name") == "viewport" for e in tags(tree, "meta"))
    levels = [int(e.tag[-1]) for e in tree.iter()
              if isinstance(e.tag, str) and re.search(r"\}h[1-6]$", e.tag)]  # fmt: skip
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    figures = tags(tree, "figure")
    assert len(figures) >= 10
    for figure in figures:
        (img,) = tags(figure, "img")
        title = text_of(tags(figure, "strong")[0])
        note = text_of(tags(figure, "p")[0])
        assert img.get("alt").startswith(title) and len(img.get("alt")) > len(title)
        assert " ".join(img.get("alt").replace("\N{NO-BREAK SPACE}", " ").split()) == note
        assert tags(drawn(img), "text"), "text is text"
    for table in tags(tree, "table"):
        assert tags(table, "caption"), text_of(table)[:80]
        for head in tags(table, "th"):
            assert head.get("scope") in ("col", "row")


def test_pictures_stand_on_light_paper_on_a_dark_page_too(page):
    """The image and the place behind it, whatever the page's colours."""
    rule = re.search(r"\.picture img \{(.*?)\}", page[0])[1]
    assert "background: #ffffff" in rule and "prefers-color-scheme: dark" in page[0]
    paper = next(e for e in drawn(tags(page[1], "img")[0]).iter() if e.get("id") == "patch_1")
    assert "fill: #ffffff" in ET.tostring(paper, encoding="unicode")


def test_names_are_escaped(page):
    html, tree = page
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert any(text_of(e) == NAME for e in tags(tree, "h2"))
    # in pictures too, where a $ would have started a formula
    texts = [e for img in tags(tree, "img") for e in tags(drawn(img), "text")]
    assert any(NAME in text_of(e) for e in texts)


def test_page_says_what_the_results_say(folder, page):
    text = text_of(page[1])
    step = prism.summary(prism.load(folder / "first"))["step_time"]
    found = re.search(r"step, p50 ([\d.]+) s step, p95 ([\d.]+) s", text)
    assert float(found[1]) == pytest.approx(step["p50"], abs=0.05 * step["std"])
    assert float(found[2]) == pytest.approx(step["p95"], abs=0.05 * step["std"])
    for file in ALL:
        answer = prism.answer(prism.load(folder / file))
        for sentence in [*answer.warnings, *(found.text for found in answer.findings)]:
            assert " ".join(sentence.replace("\N{NO-BREAK SPACE}", " ").split()) in text
    n_pictures = len(tags(page[1], "figure"))
    assert text.count("Monte Carlo error") >= n_pictures
    assert text.count("Data error") >= n_pictures


def test_inputs_have_sources(page):
    text = text_of(page[1])
    assert "model.durations.forward_s" in text  # what the other estimate changed
    assert re.search(r"run\.deadline 1 d 16 h \S.*?\.yaml:3", text)


def test_several_estimates_are_put_side_by_side(folder, page, alone):
    assert 'id="contents"' in page[0] and 'id="contents"' not in alone
    parsed(alone)
    result = prism.load(folder / "first")
    html = prism.report(result, title="A & B")
    assert "<h1>A &amp; B</h1>" in html
    del result.attrs["job_sources"]  # of a version that did not record them
    parsed(prism.report([result, prism.load(folder / "other")]))


def test_models_of_step_times_have_a_section(tmp_path, few_repeats):
    rng = np.random.default_rng(1)
    lines = [f"{r},{i},{s}" for r in range(2)
             for i, s in enumerate(1.0 + 0.02 * rng.standard_normal(30))]  # fmt: skip
    file = tmp_path / "steps.csv"
    file.write_text("run,step,step_s\n" + "\n".join(lines))
    model = prism.fit(file, seed=1)
    prism.save(model, tmp_path / "model.nc")
    drawn = prism.estimate(tmp_path / "model.nc", seed=1, replicates=128, run_replicates=50)
    tree = parsed(prism.report([model, drawn]))
    assert len(tags(tree, "h2")) >= 2 and len(tags(tree, "figure")) >= 2


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
    first = prism.load(folder / "first").to_xarray()
    first.drop_vars("job_world_size").to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    prism.save(first.assign_attrs(job_sources='{"run.steps": 1.5}'), tmp_path / "sources.nc")
    for name, attrs in odd.items():
        xr.Dataset(attrs=attrs).to_netcdf(tmp_path / name, engine="h5netcdf")
    (tmp_path / "hollow").mkdir()
    for name in (*files, "foreign.nc", *odd, "other.nc", "sources.nc", "hollow"):
        page = tmp_path / "page.html"
        status, out, err = run("report", tmp_path / name, "-o", page)
        assert (status, out) == (2, ""), name
        assert name in err and "Traceback" not in err
        assert len(err.strip().splitlines()) == 1, err
        assert not page.exists()


@pytest.mark.parametrize("kind", ["text for a figure", "list for a block", "nothing in it"])
def test_what_cannot_be_shown_is_refused_and_warned_of_by_nobody(
    run, folder, tmp_path, kind, recwarn
):
    result = prism.load(folder / "first")
    if kind == "text for a figure":
        result.attrs["call"] = json.dumps({"probability": "often"})
    elif kind == "list for a block":
        result.attrs.update({"job": json.dumps({"parallelism": {}, "model": [1]}), "call": "{}"})
    else:
        result = prism.replay(SAMPLES / "trace.csv").to_xarray().isel(dp_rank=slice(0))
    prism.save(result, tmp_path / "x.nc")
    status, out, err = run("report", tmp_path / "x.nc", "-o", tmp_path / "x.html")
    assert status == 2 and str(tmp_path / "x.nc") in err and len(err.splitlines()) == 1
    assert not recwarn.list and not (tmp_path / "x.html").exists()


def test_command_writes_the_same_bytes_and_says_so(run, folder, tmp_path, alone):
    page = tmp_path / "page.html"
    status, out, err = run("report", folder / "first", "-o", page, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert page.read_bytes() == alone.encode()
    assert answer["bytes"] == page.stat().st_size
    assert answer["results"][0]["kind"] == "estimate"
    for wrong in (tmp_path, tmp_path / "page.pdf", tmp_path / "no" / "page.html"):
        status, _, err = run("report", folder / "first", "-o", wrong)
        assert status == 2 and str(wrong) in err
    assert run("report", folder / "first", folder / "first" / "result.nc", "-o", page)[0] == 2
    for wrong in ([], [3]):
        with pytest.raises(prism.PrismError):
            prism.report(wrong)


def test_long_names_of_files_leave_room_for_the_curves(folder, tmp_path):
    deep = tmp_path / ("a" * 90) / ("b" * 90)
    for name in ("first", "other"):
        shutil.copytree(folder / name, deep / name)
    html = prism.report([deep / "first", deep / "other"], title="two")
    pictures = [text_of(drawn(img)) for img in tags(parsed(html), "img")]
    curves = [text for text in pictures if "(first)" in text]
    assert curves and not any("aaaaaaaa" in text for text in curves)


def test_a_file_that_a_result_names_is_not_opened(tmp_path):
    """Nor entries listed of a library that is not the one of before."""
    result = prism.simulate("llama3-70b-fsdp-512", replicates=64, seed=1)
    listed = "published"  # a word of the sources of a library's entries
    own = tmp_path / "own.nc"
    own.write_text("never read")
    values = json.loads(result.attrs["job"])
    values["variability"] |= {"library": str(own)}
    whole = text_of(parsed(prism.report(result)))
    for other in (
        result.to_xarray().assign_attrs(job=json.dumps(values)),
        result.to_xarray().assign_attrs(library_sha256="0" * 64),
    ):
        text = text_of(parsed(prism.report(other)))
        assert text.count(listed) < whole.count(listed) or len(text) < len(whole) - 500
