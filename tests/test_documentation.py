"""The checker of the documentation notices what it must, and only that."""

import ast
import importlib.util
import os
import pkgutil
import re
import shutil
import sys
from pathlib import Path

import pytest

import prism
import prism.plots

ROOT = Path(__file__).parents[1]


def script(name):
    file = ROOT / "experiments" / "checks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"checks_{name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


doc = script("documentation")

PRINTED = [
    "a job, 16 GPUs, seed 1",
    "",
    "mean   6.321 s ± 0.0018 s",
    "p95    6.450 s",
    "op-samples   1.05e+10 in 21.84 s, 4.16 ns each on 2 threads",
    "elapsed      57.9 s",
]


def test_the_same_output_matches():
    assert doc.matches(PRINTED, PRINTED)


@pytest.mark.parametrize("line", [2, 3])
def test_a_changed_digit_of_a_result_fails(line):
    shown = list(PRINTED)
    shown[line] = shown[line].replace("6.", "7.")
    assert not doc.matches(shown, PRINTED)
    assert not doc.matches(["...", shown[line], "..."], PRINTED)


@pytest.mark.parametrize(
    ("of_machine", "of_result"),
    [
        (("57.9", "3.1"), ("elapsed", "spent")),
        (("21.84", "5.3"), ("1.05e+10", "1.06e+10")),
        (("4.16 ns", "1.3 ns"), ("ns each", "us each")),
        (("on 2 threads", "on 1 thread"), ("each on", "each in")),
    ],
)
def test_a_mask_hides_the_machine_and_nothing_else(of_machine, of_result):
    assert doc.matches([line.replace(*of_machine) for line in PRINTED], PRINTED)
    assert not doc.matches([line.replace(*of_result) for line in PRINTED], PRINTED)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([PRINTED[0], "..."], True),
        (["...", PRINTED[3], "..."], True),
        ([PRINTED[0], "...", PRINTED[5]], True),
        (["..."], True),
        ([PRINTED[0]], False),  # the rest is missing
        ([PRINTED[2], "..."], False),  # not the beginning
        (["...", PRINTED[3], "...", PRINTED[2], "..."], False),  # not in this order
        (["...", PRINTED[2], PRINTED[4], "..."], False),  # a line between them
        ([*PRINTED, "more"], False),
        ([], False),
    ],
)
def test_dots_stand_for_lines_in_order(shown, expected):
    assert doc.matches(shown, PRINTED) is expected


def test_a_date_is_a_result():
    assert not doc.matches(["done by   2026-01-16T21:04:52"], ["done by   2026-01-16T21:04:53"])


def test_renewing_keeps_what_was_left_out():
    shown = ["a job, 16 GPUs, seed 1", "...", "p95  5.1 s", "..."]
    assert doc.renew(shown, PRINTED) == [PRINTED[0], "...", PRINTED[3], "..."]
    assert doc.renew(["another wording", "..."], PRINTED) == PRINTED


PAGE = """# A page

See [below](#what-it-says) and [that](other.md#two).

<!-- file: words.txt -->
```text
one
```

## What it says

```console
$ cat words.txt \\
    words.txt
one
one
$ echo error >&2
error
```

<!-- run -->
```python
print(6 * 7)
```

<!-- output -->
```text
42
```

<!-- status: 3 -->
```console
$ exit 3
```
"""


@pytest.fixture(autouse=True)
def _own_python(monkeypatch):
    """Pages say `python`, which a machine may have as `python3` alone."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def check(tmp_path, text, other="# One\n## Two\n", update=False):
    (tmp_path / "other.md").write_text(other)
    (tmp_path / "page.md").write_text(text)
    return doc.check(tmp_path / "page.md", update)


def test_a_true_page_passes(tmp_path):
    page = check(tmp_path, PAGE)
    assert page.problems == [] and len(page.seconds) == 4


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("one\none", "one\ntwo", "+one"),
        ("\n42\n", "\n43\n", "+42"),
        ("$ exit 3", "$ exit 2", "status 2, not 3"),
        ("print(6", "print(6 +", "SyntaxError"),
        ("#what-it-says", "#what-it-said", "no such heading"),
        ("other.md#two", "nothing.md", "no such file"),
        ("text\none", "text\nanother", "-one"),
    ],
)
def test_a_false_page_fails(tmp_path, before, after, said):
    assert before in PAGE
    page = check(tmp_path, PAGE.replace(before, after, 1))
    assert page.problems and said in "\n".join(page.problems)


def test_update_makes_a_false_page_true(tmp_path):
    false = PAGE.replace("one\none", "one\ntwo").replace("\n42\n", "\n43\n")
    assert len(check(tmp_path, false, update=True).edits) == 2
    assert (tmp_path / "page.md").read_text() == PAGE


def test_the_page_of_the_job_file_has_every_key_as_it_is():
    keys = script("job_keys")
    page = (ROOT / "docs" / "job-file.md").read_text()
    assert keys.filled(page) == page
    assert "| `tp` | Tensor-parallel size (tp_size). | `1` |" in page
    assert keys.filled(page.replace("Tensor-parallel", "Tonsor-parallel")) == page
    assert keys.filled(page.replace("`num_attention_heads`", "`heads`")) == page
    page = (ROOT / "docs" / "import.md").read_text()
    assert keys.filled(page) == page and "| `tp_comm_overlap`," in page


def test_the_page_of_the_api_has_every_name_with_an_example():
    api = script("api")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == api.page()
    parts = re.split(r"^### ", page, flags=re.M)[1:]
    names = [f"prism.{name}" for _, name in api.public(prism)]
    names += [f"prism.plots.{name}" for _, name in api.public(prism.plots)]
    assert sorted(part.split("\n")[0] for part in parts) == sorted([*names, "prism.Job.replace"])
    assert [part for part in parts if "\n>>> " not in part] == []


def test_the_readme_is_a_front_door():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED_FILE = re.compile(r"\b(?:prism|tests|experiments|distributions|notebooks)/[\w./-]*\w/?")
NAMED_TEST = re.compile(r"(?<![\w/])test_\w+\.py")
NAMED_THING = re.compile(r"\bprism(?:\.[A-Za-z_]\w*)+")


def missing(text):
    """Give the files and the things of `prism` that a text names and that do not exist."""
    files = {name for name in NAMED_FILE.findall(text) if "NAME" not in name}
    files |= {f"tests/{name}" for name in NAMED_TEST.findall(text)}
    gone = {name for name in files if not (ROOT / name).exists()}
    for name in NAMED_THING.findall(text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            if not (ROOT / f"{name.replace('.', '/')}.mplstyle").exists():
                gone.add(name)
    return gone


source = pytest.mark.skipif(
    not (ROOT / "prism").is_dir(), reason="the source of prism is not beside the tests"
)


@source
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    assert missing(page.read_text()) == set()


@source
def test_the_path_of_a_job_has_at_most_twelve_stops_and_they_are_functions():
    page = (ROOT / "docs" / "contributing.md").read_text()
    path = page.split("## How a job becomes a distribution")[1].split("\n## ")[0]
    stops = re.findall(r"^(\d+)\. `(prism[\w.]+)`", path, re.MULTILINE)
    drawn = re.findall(r'\["(\d+) ', path)
    assert [n for n, _ in stops] == drawn == [str(i + 1) for i in range(len(stops))]
    assert 0 < len(stops) <= 12
    assert all(callable(pkgutil.resolve_name(name)) for _, name in stops)


NAMING = {"id", "attr", "arg", "name"}  # fields of what names something


def words_of(tree):
    """Words of the code itself, texts of a few words included, and its docstrings."""
    words, texts = set(), []
    for node in ast.walk(tree):
        words.update(x for x in map(vars(node).get, NAMING) if isinstance(x, str))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            words.update(re.findall(r"\w+", node.value))
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            texts.append(ast.get_docstring(node) or "")
    return words, " ".join(texts)


@source
def test_what_docstrings_name_exists():
    files = sorted((ROOT / "prism").rglob("*.py"))
    found = {path: words_of(ast.parse(path.read_text())) for path in files}
    known = set().union(*(words for words, _ in found.values()), (path.stem for path in files))
    gone = {}
    for path, (_, text) in found.items():
        named = re.findall(r"(?<!`)`([^`\s]+)`(?!`)", text)
        bare = {name for name in named if re.fullmatch(r"[A-Za-z_]\w*", name)}
        wrong = (bare - known) | missing(" ".join(named))
        if wrong - {"prism/_data"}:  # lies in what is installed alone
            gone[path.name] = wrong
    assert gone == {}


@pytest.mark.parametrize(
    "name",
    [
        "`prism/drift.py`",
        "`prism/run/`",
        "`test_drift.py`",
        "prism.plots.gantt.draw",
        "prism.drift",
    ],
)
def test_a_module_that_moved_is_noticed(name):
    assert missing(name) == {name.strip("`").replace("test_drift", "tests/test_drift")}


@source
def test_every_command_has_its_page():
    readme = (ROOT / "README.md").read_text()
    for command in Path(ROOT / "prism" / "cli" / "commands").glob("*.py"):
        if re.search(r"^@click\.(command|group)", command.read_text(), re.M):
            name = command.stem.removesuffix("_job")  # no module can be called import
            assert f"`prism {name}" in readme, name
            assert f"docs/{name}.md" in readme, name
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, page.name


made = doc.made
PICTURES = """# A page

```console
$ prism estimate llama3-70b-fsdp-512 --seed 1
$ touch one.png
```

<!-- picture: one.png pictures/one.png -->
![one](pictures/one.png)

<!-- picture: python experiments/studies/front/run.py pictures/front.png -->
![two](pictures/front.png)

```text
$ measure
3.1 s
```

<!-- picture: by hand pictures/hand.png -->
![three](pictures/hand.png)
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository of a page, with the shipped files that its pictures are made of."""
    for folder in ("distributions", "experiments/jobs", "experiments/studies/front"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_golden.py", tmp_path / "tests")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(PICTURES)
    for name in ("one", "front", "hand"):
        (tmp_path / "docs" / "pictures" / f"{name}.png").write_bytes(name.encode())
    monkeypatch.setattr(made, "_run", lambda made: True)
    return tmp_path


def stale(root):
    record = made.read_record(root)
    found = {Path(m.name).stem: made.why_stale(m, record, root)
             for m in made.pictures_of(root / "docs" / "page.md", root)}  # fmt: skip
    return {name: why for name, why in found.items() if why}


def test_a_picture_is_stale_where_what_it_was_made_of_is_another(clone, capsys):
    page, everything = clone / "docs" / "page.md", {"one", "front", "hand"}
    assert {*stale(clone)} == everything
    made.renew_pictures([page], {"docs/pictures/one.png"}, clone)
    assert stale(clone) == {} and made.stale_pictures([page], clone) == 0

    def other(name, change=lambda data: data + b"\n1", expected=()):
        file = clone / name
        before = file.read_bytes()
        file.write_bytes(change(before))
        found = stale(clone)
        assert {*found} == {*expected}
        assert made.stale_pictures([page], clone) == len(expected)
        file.write_bytes(before)
        return found

    found = other("distributions/h100-healthy.nc", expected={"one", "front"})
    assert "distributions/h100-healthy.nc" in found["one"]
    other("distributions/h100-stressed.nc")
    other("experiments/jobs/llama3-405b-16k.yaml", expected={"front"})
    other("experiments/jobs/llama3-405b-16k.yaml", lambda data: b"# a comment\n" + data)
    other("experiments/jobs/llama3-70b-fsdp-512.yaml", expected={"one", "front"})
    other("experiments/studies/front/run.py", expected={"front"})
    other("experiments/studies/front/run.py", lambda data: data + b"# a comment\n'text'\n")
    golden = "tests/test_golden.py"
    other(golden, lambda data: re.sub(rb'"[0-9a-f]{16}"', b'"%016x"' % 1, data), {"one", "front"})
    other("docs/page.md", lambda data: data.replace(b"seed 1", b"seed 2"), {"one"})
    for name in everything:
        other(f"docs/pictures/{name}.png", expected={name})
    assert stale(clone) == {}


def test_only_what_was_made_anew_counts_as_renewed(clone):
    page = clone / "docs" / "page.md"
    made.renew_pictures([page], set(), clone)
    assert {*stale(clone)} == {"one"}  # its command was not run
    page.write_text(PICTURES.replace("3.1 s", "3.2 s"))
    made.renew_pictures([page], {"docs/pictures/one.png"}, clone)
    assert "hand" in stale(clone)  # the file is the one of before


def test_every_picture_of_a_page_has_its_record_and_every_experiment():
    record = made.read_record()
    pictures = {m.name for page in PAGES for m in made.pictures_of(page)}
    assert pictures >= {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.png")}
    assert {m.name for m in made.experiments(record)} <= {*record}
