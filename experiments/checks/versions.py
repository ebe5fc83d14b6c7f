"""The suite passes with other Pythons and other versions of the dependencies, from wheel and sdist.

    python experiments/checks/versions.py --python python3.13 --with newest --from wheel
    python experiments/checks/versions.py --lowest >lowest.txt

The first builds the archive, installs it with its extra `test` into a fresh environment of that
Python, and prints a row of a table; words after ``--`` go to pytest, the status is pytest's.
Dependencies are the lowest that pyproject.toml names, those of constraints.txt, or the newest there
are. From the sdist the suite runs as it is unpacked, examples of docstrings included; from the
wheel its tests run where no ``prism/`` lies beside them, so that what is installed is tested. The
second prints the constraints of the lowest versions. Ten to thirty minutes a row.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "dev"
"""The extra of what checks prism, not runs it: of no lowest version."""

OLD_WARN = ("matplotlib",)
"""Packages whose lowest version calls what newer ones of their own dependencies deprecate."""


def lowest() -> str:
    """Give constraints to the lowest version of every dependency, those of extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(x for k in extras if k != TOOLS for x in extras[k])]
    return "".join(f"{line.replace('>=', '==')}\n" for line in sorted(set(wanted), key=str.lower))


def run(*words, **more) -> int:
    """Run a command that sees nothing of this environment's own modules."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run([str(word) for word in words], env=env, **more).returncode


def environment(folder: Path, python: str, *requirements) -> Path:
    """Make an environment that holds what is asked for; give its Python."""
    made = folder / "bin" / "python"
    if run(python, "-m", "venv", folder) or run(made, "-m", "pip", "install", "-q", *requirements):
        sys.exit(f"{python}: cannot install {' '.join(map(str, requirements))}")
    return made


def counts(report: Path) -> str:
    """Give what pytest's report counts, as it says so."""
    suite = ET.parse(report).getroot().find("testsuite").attrib
    tests, *others = (int(suite[k]) for k in ("tests", "failures", "errors", "skipped"))
    names = ("passed", "failed", "errors", "skipped")
    found = zip(names, (tests - sum(others), *others), strict=True)
    return ", ".join(f"{n:,} {name}" for name, n in found if n or name == "passed")


def suite(scratch: Path, args: argparse.Namespace) -> int:
    """Build, install and test; print the row."""
    pinned = ROOT / "constraints.txt"
    builder = environment(scratch / "builder", sys.executable, "-c", pinned, "hatchling")
    if run(builder, "-m", "hatchling", "build", "-d", scratch / "dist", cwd=ROOT):
        return 1
    (sdist,), (wheel,) = scratch.glob("dist/*.tar.gz"), scratch.glob("dist/*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    tree = scratch / sdist.name.removesuffix(".tar.gz")
    if args.source == "wheel":
        shutil.rmtree(tree / "prism")

    wanted = ["--only-binary", ":all:", "--no-binary", "prism-trainsim"]
    (scratch / "lowest.txt").write_text(lowest(), "utf-8")
    files = {"lowest": scratch / "lowest.txt", "pinned": pinned}
    if args.versions in files:
        wanted += ["-c", files[args.versions]]
    archive = {"wheel": wheel, "sdist": sdist}[args.source]
    python = environment(scratch / "env", args.python, *wanted, f"{archive}[test]")

    words = ["-q", "-n", args.processes, "--junitxml", scratch / "report.xml", *args.words]
    if args.source == "wheel" and not any("test_" in word for word in args.words):
        words.append("tests")  # the docstrings of prism are not there
    if args.versions == "lowest":
        ignored = [f"ignore::DeprecationWarning:{package}" for package in OLD_WARN]
        words += ["-o", "\n".join(["filterwarnings=error", *ignored])]
    start = time.monotonic()
    status = run(python, "-m", "pytest", *words, cwd=tree)
    took = time.monotonic() - start
    version = subprocess.check_output([python, "--version"], text=True).split()[-1]
    print("\n| Python | dependencies | from | tests | s |\n|---|---|---|---|---|")
    found = counts(scratch / "report.xml")
    print(f"| {version} | {args.versions} | {args.source} | {found} | {took:,.0f} |")
    return status


def main() -> int:
    """Print the constraints, or run the suite."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__)[0])
    parser.add_argument("--lowest", action="store_true", help="print the lowest versions alone")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to test with")
    parser.add_argument("--with", dest="versions", choices=("lowest", "pinned", "newest"),
                        default="pinned", help="versions of the dependencies")  # fmt: skip
    parser.add_argument("--from", dest="source", choices=("wheel", "sdist"), default="wheel")
    parser.add_argument("--processes", "-n", default="2", help="pytest's workers")
    parser.add_argument("words", nargs="*", help="after --: options and files for pytest")
    args = parser.parse_args()
    if args.lowest:
        print(lowest(), end="")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        return suite(Path(scratch), args)


if __name__ == "__main__":
    sys.exit(main())
