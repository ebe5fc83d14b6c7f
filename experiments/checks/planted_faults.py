"""Plant wrong changes in copies of prism, one at a time, and see which the tests catch.

    python experiments/checks/planted_faults.py                      # all of them
    python experiments/checks/planted_faults.py --area runs -k repair
    python experiments/checks/planted_faults.py --tests tests/test_failures.py

A fault is a sentence about behaviour, text that stands exactly once in `prism/`, and what replaces
it (`faults/AREA.py`); the file is not named, so that moved code keeps its faults. One that no
longer applies is an error: it is to be planted anew, not dropped. Each is tried first with the test
that caught it last (`faults/AREA.json`), then with all tests. Left out are the tests that compare
bits or text with a record (`RECORDS`): they say that something changed, not that it is wrong.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).parent / "faults"
RECORDS = ("test_golden.py", "test_snapshots.py", "test_documentation.py", "test_words.py")
# compiled code is named by its sources: copies with the same engine share it
PLAIN = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "NUMBA_CACHE_DIR": str(Path(tempfile.gettempdir()) / "planted-faults-numba"),
}


class Fault(NamedTuple):
    """A wrong change: what it makes wrong, and the text it replaces."""

    area: str
    sentence: str
    old: str
    new: str


def read_faults(area: str | None, words: str) -> list[Fault]:
    """Read the faults of `faults/*.py`, each with a list FAULTS of (sentence, old, new)."""
    found = []
    for file in sorted(FAULTS.glob("*.py")):
        if area in (None, file.stem):
            found += [Fault(file.stem, *entry) for entry in runpy.run_path(str(file))["FAULTS"]]
    return [fault for fault in found if words.lower() in fault.sentence.lower()]


@cache
def sources() -> dict[Path, str]:
    """Read all of `prism/`."""
    files = sorted((ROOT / "prism").rglob("*.py"))
    return {file.relative_to(ROOT): file.read_text() for file in files}


def why_not(fault: Fault) -> str:
    """Say why a fault does not apply; empty where it does."""
    n = sum(text.count(fault.old) for text in sources().values())
    if n == 1 and fault.old != fault.new:
        return ""
    return (
        f"{fault.area}: {fault.sentence}: its text is {n} times in prism/, not once:\n{fault.old}"
    )


def find_anchor(fault: Fault) -> tuple[Path, str]:
    """Find the one file of `prism/` that holds the text; what it becomes."""
    path = next(path for path, text in sources().items() if fault.old in text)
    return path, sources()[path].replace(fault.old, fault.new)


def plant(fault: Fault, folder: Path) -> Path:
    """Make a checkout in which only `prism/` is a copy, with the fault in it."""
    copy = folder / "prism-checkout"
    copy.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in ("prism", ".git", ".venv"):
            (copy / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "prism", copy / "prism", ignore=shutil.ignore_patterns("__pycache__"))
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    path, text = find_anchor(fault)
    (copy / path).write_text(text)
    return copy


def run_tests(copy: Path, tests: list[str], workers: int) -> str | None:
    """Name the first test that fails, None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"--ignore=tests/{name}" for name in RECORDS] + ["--no-header", "-rfE", *tests]
    command += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    environment = os.environ | PLAIN | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None or done.returncode not in (1, 2):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return failed[1]


def attempts(last: str | None, tests: list[str]) -> Iterator[list[str]]:
    """Yield what to run, in turn: the test that caught it last, then the others."""
    if last:
        test = last.partition("[")[0]
        file, name = ROOT / test.partition("::")[0], test.rpartition("::")[2]
        # it may have another name by now
        if file.exists() and f"def {name}(" in file.read_text():
            yield [test]
    yield tests


def catch(fault: Fault, last: str | None, tests: list[str], workers: int) -> str | None:
    """Plant a fault; the first test that fails."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = plant(fault, Path(folder))
        for chosen in attempts(last, tests):
            if caught := run_tests(copy, chosen, workers):
                return caught
    return None


def main() -> int:
    """Try the chosen faults; a table of what was caught, by area."""
    parser = argparse.ArgumentParser(description="Which planted faults do the tests catch?")
    parser.add_argument("--area", help="one file of faults/")
    parser.add_argument("-k", default="", metavar="WORDS", help="faults whose sentence has them")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="FILE")
    parser.add_argument("--record", choices=("before", "after"), help="keep the answers under it")
    parser.add_argument("--list", action="store_true", help="only show whether each still applies")
    parser.add_argument("--at-once", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("-n", type=int, default=1, help="processes of each run of the tests")
    chosen = parser.parse_args()
    faults = read_faults(chosen.area, chosen.k)
    stray = [error for fault in faults if (error := why_not(fault))]
    if stray:
        raise SystemExit("\n".join([*stray, f"{len(stray)} faults do not apply: plant them anew"]))
    if chosen.list:
        print(*(f"{fault.area}: {fault.sentence}" for fault in faults), sep="\n")
        print(f"{len(faults)} faults apply")
        return 0
    records = {
        area: json.loads(file.read_text()) if file.exists() else {}
        for area in {fault.area for fault in faults}
        for file in [FAULTS / f"{area}.json"]
    }

    def attempt(fault: Fault) -> str | None:
        known = records[fault.area].setdefault(fault.sentence, {})
        caught = catch(fault, known.get("after"), chosen.tests, chosen.n)
        print(f"{fault.area}: {fault.sentence}\n    {caught or 'NOT CAUGHT'}", flush=True)
        if chosen.record:
            known[chosen.record] = caught
            text = json.dumps(records[fault.area], indent=1, sort_keys=True) + "\n"
            (FAULTS / f"{fault.area}.json").write_text(text)
        return caught

    with ThreadPoolExecutor(chosen.at_once) as pool:
        caught = list(pool.map(attempt, faults))
    for area in sorted(records):
        here = [
            test is not None
            for fault, test in zip(faults, caught, strict=True)
            if fault.area == area
        ]
        print(f"{area:12} {sum(here):3} of {len(here):3} caught")
    missed = sum(test is None for test in caught)
    print(f"{'all':12} {len(faults) - missed:3} of {len(faults):3} caught")
    return 0 if missed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
