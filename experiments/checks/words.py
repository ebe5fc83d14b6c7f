"""Words that readers meet, held against docs/glossary.md: one word per idea, the field's own.

    python experiments/checks/words.py [FILE...]

Reads comments, docstrings and other texts of Python files, prose and tables of pages and job files,
cells of notebooks; what stands in `backticks` or a code block is a name. Prints file:line of each
word that has a better one, exit status 1 if there is any. `tests/test_words.py` runs it.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("prism", "docs", "README.md", "experiments", "notebooks")
"""Files, and folders of files, that are held to these words."""

LEFT_OUT = {Path(__file__).resolve(), ROOT / "experiments" / "checks" / "faults"}
"""These words themselves, and the code of prism that is changed to wrong code."""

INSTEAD = {
    r"laws?": "distribution",
    r"in all(?=[^\w ]|$| (and|to|is|are|by|at|it) )": "total, elapsed, together",
    r"(cannot|hardly) be told|is hardly told": "statistically indistinguishable, not identifiable",
    r"told": "given, named, reported, distinguished",
    r"so many": "this many, n, a given number of",
    r"brought to": "calibrated, scaled to",
    r"far unit|way out(?= (of|is|are|to|in))|ways out": "uplink, site",
    r"way out": "how to correct it, remedy",
    r"doubts?": "warning",
    r"taken for granted": "assumed, assumptions",
    r"of no weight": "below 0.1 %, negligible",
    r"steps so far": "completed steps",
    r"under way": "in progress",
    r"(not|cannot) (to )?be learned": "not identifiable from this input",
    r"sets of GPUs": "GPU allocations",
    r"iterations?": "step",
    r"mistakes?": "error",
    r"mend(s|ed|ing)?": "correct, repair",
    r"likeliest": "most likely",
    r"for ever": "forever",
}
"""What not to say, as a pattern of whole words, and what to say instead."""

ALLOWED = (
    r"Amdahl's law",
    r"law of (large numbers|total variance)",
    r"power[- ]laws?",
    r"\w+ : \S+",
    r"\.?laws?(\(|: \w| = )",
)
"""Names of the field that hold such a word; parameters and keys."""

_RECORDED = (r"iterations?", "a name in what other tools write")
EXCEPTIONS = {
    "prism/traces/logs/tools.py": _RECORDED,
    "prism/traces/columns.py": _RECORDED,
    "prism/traces/kineto/stepmarks.py": _RECORDED,
    "prism/jobs/jobspec/othernames.py": _RECORDED,
    "prism/cli/commands/options.py": _RECORDED,
    "prism/analyses/watch.py": _RECORDED,
    "experiments/checks/watch.py": _RECORDED,
    "prism/models/kernellibraries/collectives.py": (r"iterations", "repeats of a test, not steps"),
}
"""By file: words that it may use, as a pattern, and why."""

_STRING_OR_COMMENT = re.compile(r"""(\"{3}|'{3}|\"|')(?:\\.|.)*?\1|#(?P<comment>[^\n]*)""", re.S)


def texts(path):
    """Give (line, text) of all that a reader meets in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        yield from python_texts(source)
    elif path.suffix == ".ipynb":
        for cell in json.loads(source)["cells"]:
            text = "".join(cell["source"])
            is_code = cell["cell_type"] == "code" and not text.startswith("%")
            first = json.dumps(text.split("\n")[0], ensure_ascii=False)[1:-1]
            above = source.count("\n", 0, source.find(first))
            for line, found in python_texts(text) if is_code else [(1, text)]:
                yield above + line, found
    elif path.suffix == ".yaml":
        lines = [line.partition("#")[2] for line in source.split("\n")]
        yield 1, "\n".join(lines)
    else:
        yield 1, re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), source, flags=re.S)


def python_texts(source):
    """Give docstrings, other texts of more than one word, and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    lines = [""] * (source.count("\n") + 1)
    for found in _STRING_OR_COMMENT.finditer(source):
        if found["comment"] is not None:
            lines[source.count("\n", 0, found.start())] = found["comment"]
    yield 1, "\n".join(lines)


def _whole(pattern):
    return rf"(?<![\w'\"-])({pattern})(?![\w'\"-])".replace(" ", r"\s+")


def check(path):
    """Give (line, word, instead) of each word of a file that has a better one."""
    own, _ = EXCEPTIONS.get(path.relative_to(ROOT).as_posix(), (None, None))
    skip = "|".join([r"``[^`]*``|`[^`]*`", *ALLOWED, *([own] if own else [])]).replace(" ", r"\s+")
    for line, text in texts(path):
        if not re.search(_whole("|".join(INSTEAD)), text, re.I):  # as most texts, and soon seen
            continue
        plain = re.sub(skip, lambda name: re.sub(r"[^\n]", "_", name[0]), text)
        for pattern, instead in INSTEAD.items():
            for found in re.finditer(_whole(pattern), plain, re.I):
                at = line + plain.count("\n", 0, found.start())
                yield at, " ".join(found[0].split()), instead
                plain = plain.replace(found[0], "_" * len(found[0]), 1)


def listed(names):
    """Find the files below the names."""
    kinds = {".py", ".pyi", ".md", ".yaml", ".ipynb"}
    for name in names:
        path = ROOT / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (p for p in found if p.suffix in kinds and not LEFT_OUT & {p, p.parent})


def main(names):
    """Print what is found, and give the exit status."""
    count = 0
    for path in listed(names or FILES):
        for line, word, instead in check(path):
            print(f"{path.relative_to(ROOT)}:{line}: {word!r}: say {instead}")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
