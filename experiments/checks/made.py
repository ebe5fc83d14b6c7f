"""What pictures and tables were made of, and which are stale.

    python experiments/checks/made.py [--renew [NAME...]]

docs/made.json keeps, of every picture of README.md and docs/ and of every experiment's tables and
pictures, a hash of each thing it was made of: the commands of its page or its script, the files of
the repository that these name (job files, samples), the jobs' libraries, and the golden values of
tests/test_golden.py, which stand for all code that changes a number. Where one of them is another
now, or the picture is another file than was made, it is stale. Left out: data outside the
repository, and code that only draws.

Pictures of pages are renewed by documentation.py. An experiment takes minutes to hours, so that
stale ones are named with the pages that quote them, and --renew runs them: all that are stale, or
those whose name is given.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pages import read_blocks, read_commands

from prism.distributions.library import library_names
from prism.jobs.devices import DEVICES, LIBRARIES
from prism.jobs.job import load_job
from prism.jobs.jobspec.yaml import shipped_jobs

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path("docs") / "made.json"
GOLDEN = "golden values"
BY_HAND = "by hand, as the block above it says"
UPDATE = "python experiments/checks/documentation.py --update"
NO_RESULTS = ("front", "one-gpu")  # a picture of README.md, and what needs a GPU
WHOLE = ("experiments/samples/", "prism/")  # whose folders count with all that they hold
DRAWN = (".png", ".svg", ".md", ".pyc")


@dataclass(frozen=True)
class Made:
    """A picture, or an experiment's folder: what makes it, and hashes of what it is made of."""

    name: str
    command: str
    of: dict[str, str]


# ------------------------------------------------------------------------------ what it is made of
def hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def hash_file(path: Path) -> str:
    """Hash what counts of a file: of code and job files all but comments and docstrings."""
    if not path.is_file():
        return "missing"
    if path.suffix == ".py":
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(inside := getattr(node, "body", None), list):
                node.body = [part for part in inside if not _is_text(part)]
        return hash_text(ast.dump(tree))
    if path.suffix == ".yaml":
        lines = re.sub(r"(?m)(^|\s)#.*$", "", path.read_text(encoding="utf-8")).splitlines()
        return hash_text("\n".join(line.rstrip() for line in lines if line.strip()))
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _named(names: Iterable[str], text: str) -> set[str]:
    """Names that a text has as words."""
    return {name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)}


def _with_bases(jobs: set[str], root: Path) -> set[str]:
    """Shipped jobs, and those that their files name."""
    found = set[str]()
    while jobs:
        name = jobs.pop()
        found.add(name)
        path = root / "experiments" / "jobs" / f"{name}.yaml"
        if path.is_file():
            jobs |= _named(shipped_jobs(), re.sub("#.*", "", path.read_text("utf-8"))) - found
    return found


def made_of(text: str, root: Path = ROOT) -> dict[str, str]:
    """Hash what the commands or the code of a text take from the repository, by name."""
    jobs = _with_bases(_named(shipped_jobs(), text), root)
    libraries = _named(library_names(), text)
    libraries |= {str(load_job(job).variability.library) for job in jobs}
    libraries |= {str(LIBRARIES.get(device)) for device in _named(DEVICES, text)}
    files = {f"experiments/jobs/{job}.yaml" for job in jobs}
    files |= {f"distributions/{name}.nc" for name in libraries & set(library_names())}
    for name in re.findall(r"\b(?:experiments|prism)/[\w./-]*\w", text):
        path = root / name
        inside = [path, *(path.rglob("*") if name.startswith(WHOLE) else ())]
        files |= {str(p.relative_to(root)) for p in inside if p.is_file() and p.suffix not in DRAWN}
    found = {name: hash_file(root / name) for name in sorted(files)}
    golden = (root / "tests" / "test_golden.py").read_text(encoding="utf-8")
    return found | {GOLDEN: hash_text(" ".join(re.findall(r'"([0-9a-f]{16})"', golden)))}


def script_made(name: str, command: str, root: Path = ROOT) -> Made:
    """Describe a picture that a script makes."""
    script = next(word for word in command.split() if word.endswith(".py"))
    text = (root / script).read_text(encoding="utf-8")
    return Made(name, command, made_of(f"{command}\n{text}", root))


def experiments(record: dict, root: Path = ROOT) -> list[Made]:
    """Describe the experiments; their inputs are what they name, and files that are not made."""
    found = []
    kinds = ("studies", "validation")
    for folder in sorted(f for kind in kinds for f in (root / "experiments" / kind).iterdir()):
        if folder.name in NO_RESULTS or not (scripts := _scripts(folder)):
            continue
        name = str(folder.relative_to(root))
        made = record.get(name, {}).get("is", {})
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        inputs = [path for path in files if path.suffix not in DRAWN
                  and str(path.relative_to(root)) not in made]  # fmt: skip
        text = "\n".join(p.read_text("utf-8") for p in inputs if p.suffix in (".py", ".yaml"))
        of = made_of(text.replace("experiments/", ""), root)
        of |= {str(path.relative_to(root)): hash_file(path) for path in inputs}
        command = " && ".join(f"python {name}/{script}" for script in scripts)
        found.append(Made(name, command, of))
    return found


def _scripts(folder: Path) -> list[str]:
    """Scripts of an experiment, in their order."""
    names = {path.name for path in folder.glob("*.py")}
    first = ["run.py"] if "run.py" in names else sorted(names - {"figure.py"})
    return first + (["figure.py"] if "figure.py" in names else [])


# ------------------------------------------------------------------------------------- the record
def read_record(root: Path = ROOT) -> dict:
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def note(record: dict, made: Made, files: Iterable[str], root: Path = ROOT) -> None:
    """Put what was made now into the record, and write it."""
    record[made.name] = {
        "command": made.command, "of": made.of, "is": {f: hash_file(root / f) for f in files},
    }  # fmt: skip
    text = json.dumps(record, indent=1, sort_keys=True)
    (root / RECORD).write_text(f"{text}\n", encoding="utf-8")


def why_stale(made: Made, record: dict, root: Path = ROOT) -> str:
    """Say why something is stale; empty where it is not."""
    known = record.get(made.name)
    if known is None:
        return "nothing says what it was made of"
    other = [f for f, is_ in known["is"].items() if hash_file(root / f) != is_]
    if other:
        return f"not the file that was made: {', '.join(other)}"
    both = {*made.of, *known["of"]}
    changed = sorted(name for name in both if made.of.get(name) != known["of"].get(name))
    return f"changed since: {', '.join(changed)}" if changed else ""


# --------------------------------------------------------------------------- pictures, experiments
def name_of(path: Path, root: Path = ROOT) -> str:
    return os.path.relpath(path, root)


def pictures_of(path: Path, root: Path = ROOT) -> list[Made]:
    """Describe what a page's pictures are made of now."""
    found: list[Made] = []
    text: list[str] = []
    last = ""
    for block in read_blocks(path.read_text(encoding="utf-8").splitlines()):
        if "picture" not in block.marks:
            last = "\n".join(block.lines)
            if block.language == "console":
                text += [command.text for command in read_commands(block)]
            elif "file" in block.marks or "run" in block.marks:
                text += block.lines
            continue
        source, name = block.marks["picture"], name_of(path.parent / block.marks["to"], root)
        if source.startswith("python "):
            found.append(script_made(name, source, root))
        elif source == "by hand":
            found.append(Made(name, BY_HAND, {name_of(path, root): hash_text(last)}))
        else:
            commands = "\n".join(text)
            of = {name_of(path, root): hash_text(commands)} | made_of(commands, root)
            found.append(Made(name, f"{UPDATE} -k {path.stem}", of))
    return found


def renew_pictures(paths: list[Path], copied: set[str], root: Path = ROOT) -> None:
    """Run the scripts of stale pictures, and note what all that are new were made of."""
    record = read_record(root)
    for made in [made for path in paths for made in pictures_of(path, root)]:
        if made.command == BY_HAND:
            known = record.get(made.name, {"is": {}})["is"]
            new = known.get(made.name) != hash_file(root / made.name)
        elif made.command.startswith(UPDATE):
            new = made.name in copied
        else:
            new = bool(why_stale(made, record, root)) and _run(made)
        if new:
            note(record, made, [made.name], root)


def _run(made: Made) -> bool:
    """Run what makes something; whether that went well."""
    start = time.perf_counter()
    done = subprocess.run(["bash", "-ec", made.command], cwd=ROOT, check=False)
    print(f"{made.name}: status {done.returncode} after {time.perf_counter() - start:.0f} s")
    return done.returncode == 0


def stale_pictures(paths: list[Path], root: Path = ROOT) -> int:
    """Name the stale pictures of pages; how many they are."""
    record = read_record(root)
    stale = [(made, why) for path in paths for made in pictures_of(path, root)
             if (why := why_stale(made, record, root))]  # fmt: skip
    for made, why in stale:
        print(f"stale: {made.name}: {why}; to renew: {made.command}")
    return len(stale)


def name_experiments(root: Path = ROOT) -> None:
    """Name stale experiments, why they are, and the pages that quote them."""
    record = read_record(root)
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    for made in experiments(record, root):
        if why := why_stale(made, record, root):
            quoting = [p.name for p in pages if f"{made.name}/" in p.read_text(encoding="utf-8")]
            print(f"stale figures: {made.name} (in {', '.join(quoting) or 'no page'}): {why}")


def renew_experiment(made: Made) -> None:
    """Run an experiment, and note what it was made of."""
    begin = time.time()
    if not _run(made):
        return
    files = [p for p in (ROOT / made.name).rglob("*") if p.is_file() and p.stat().st_mtime >= begin]
    names = [name_of(path) for path in files if path.suffix not in (".md", ".pyc")]
    record = read_record()
    record[made.name] = {"is": dict.fromkeys(names)}  # what is made is no input
    [again] = [item for item in experiments(record) if item.name == made.name]
    note(record, again, names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", nargs="*", metavar="NAME", help="run these, or all stale ones")
    options = parser.parse_args()
    record = read_record()
    for made in experiments(record) if options.renew is not None else ():
        if made.name.rpartition("/")[2] in options.renew or (
            not options.renew and why_stale(made, record)
        ):
            renew_experiment(made)
    name_experiments()
    return 0


if __name__ == "__main__":
    sys.exit(main())
