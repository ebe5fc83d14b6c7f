"""Every command, output, file, link and picture of README.md and docs/, tried as a reader would.

Each page has a scratch folder of its own, in which its blocks are run in order; what a command
prints must be what the page shows. Left out: ```bash blocks (installation, other machines' tools),
addresses outside the repository, and whether the prose is right.

    python experiments/checks/documentation.py [--update] [--pictures] [-k NAME] [PAGE...]

What a page can hold:

* ```console: lines after ``$ `` are commands (a backslash goes on in the next line), what follows
  is what they print, standard error included. A line ``...`` stands for any number of lines.
* ``<!-- file: NAME -->`` before a block: the block is written to that file, for typing along.
* ``<!-- run -->`` before a ```python block: it is run, warnings being errors;
  ``<!-- output -->`` before the block after it: what it prints.
* ``<!-- status: 2 -->`` before a console block: the exit status of its last command.
* ``<!-- picture: FROM TO -->`` before a picture, which is the page's TO: FROM is a file of the
  scratch folder, which must be made (an .html is photographed); or ``python SCRIPT...``, run from
  the repository; or ``by hand``: nothing here makes it.

Pictures are compared by what they were made of (made.py): a stale one is an error, which --pictures
finds without running anything. --update copies those of the commands, runs the scripts of stale
ones, takes those by hand that are other files, and notes what they were made of.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import made
from pages import read_blocks, read_commands

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 600
WINDOW = "1240,2070"  # of a photographed page [px]
ANYTHING = "..."
SHELL = re.compile(r"[|&;<>$`*?~(){}\[\]#!\\\n]")  # what needs a shell
OWN = {"COLUMNS": "120", "NO_COLOR": "1", "MPLBACKEND": "Agg", "LC_ALL": "C.UTF-8"}

# What differs between machines and moments, and nothing else; all other figures are compared as
# they are printed. Each: a pattern, and what both sides are replaced by.
MASKS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        # how long a command took: "elapsed 57.9 s", "elapsed 1 min 2 s"
        (r"elapsed\s+\d.*$", "elapsed TIME"),
        # the engine's speed: "1.05e+10 in 21.84 s, 4.16 ns each on 2 threads"
        (r"in \S+ (s|ms), \S+ ns each on \d+ threads?", "in TIME, SPEED each on THREADS"),
        # the version of prism: "prism, version 0.1.0"
        (r"^prism, version \S+$", "prism, version VERSION"),
    )
)


# --------------------------------------------------------------------------------- comparing
def mask(line: str) -> str:
    """Bring a line to what every machine prints."""
    line = line.rstrip().replace(f"{ROOT}/", "")
    for pattern, instead in MASKS:
        line = pattern.sub(instead, line)
    return line


def _trimmed(lines: list[str]) -> list[str]:
    """Without empty lines at either end."""
    kept = list(lines)
    while kept and not kept[0].strip():
        kept.pop(0)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def _segments(shown: list[str]) -> list[list[str]]:
    """Split shown lines at the lines that stand for anything."""
    runs: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == ANYTHING:
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _find(segment: list[str], lines: list[str], start: int) -> int | None:
    """Where a run of lines begins at or after `start`; None where it does not occur."""
    for i in range(start, len(lines) - len(segment) + 1):
        if lines[i : i + len(segment)] == segment:
            return i
    return None


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are those shown, but for masks and lines left out by ``...``."""
    want = [[mask(line) for line in run] for run in _segments(_trimmed(shown))]
    got = [mask(line) for line in _trimmed(printed)]
    if len(want) == 1:
        return want[0] == got
    at = 0
    for i, run in enumerate(want):
        run = run if i == 0 or i == len(want) - 1 else _trimmed(run)
        if i == len(want) - 1:
            begin = len(got) - len(run)
            return begin >= at and got[begin:] == run
        found = _find(run, got, at)
        if found is None or (i == 0 and found != 0):
            return False
        at = found + len(run)
    return True


def _skeleton(line: str) -> str:
    """Strip a line of its figures and spacing, so that its successor is found."""
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,e+]*", "#", line)).strip()


def _successor(line: str, printed: list[str], start: int) -> int | None:
    """Find the printed line that stands where a shown one stood: same label, else most alike."""

    def likeness(i: int) -> tuple[bool, float]:
        labels = (re.split(r"\s{2,}", text.strip())[0] for text in (line, printed[i]))
        texts = _skeleton(line), _skeleton(printed[i])
        return len(set(labels)) == 1, difflib.SequenceMatcher(None, *texts).ratio()

    best = max(range(start, len(printed)), key=likeness, default=None)
    return None if best is None or not (likeness(best)[0] or likeness(best)[1] > 0.7) else best


def renew(shown: list[str], printed: list[str]) -> list[str]:
    """Shown lines with the figures that were printed, shortened as they were.

    Where a shown line has no successor, the lines around it stand for it.
    """
    printed = _trimmed([line.rstrip().replace(f"{ROOT}/", "") for line in printed])
    if ANYTHING not in [line.strip() for line in shown]:
        return printed
    new: list[str] = []
    at = 0
    for line in _trimmed(shown):
        found = None if line.strip() == ANYTHING else _successor(line, printed, at)
        if found is not None:
            if found > at and ANYTHING not in new[-1:]:
                new.append(ANYTHING)
            new.append(printed[found])
            at = found + 1
        elif ANYTHING not in new[-1:]:
            new.append(ANYTHING)
    return new if matches(new, printed) and {*new} != {ANYTHING} else printed


def load() -> None:
    """Give what a reader's shell has, and load what most commands load: two seconds of each."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ.update(OWN, PATH=path)
    import prism

    for name in prism.__all__:
        getattr(prism, name)
    commands = [f"prism.cli.commands.{p.stem}" for p in ROOT.glob("prism/cli/commands/[a-z]*.py")]
    for module in ("prism.cli.app", *commands, "matplotlib.pyplot", "h5netcdf", "dask.distributed"):
        importlib.import_module(module)


def _prism(words: list[str], scratch: Path, out: int) -> None:
    """Run the prism command in this process, which is its own."""
    from prism.__main__ import run

    for stream in (1, 2):
        os.dup2(out, stream)
    os.chdir(scratch)
    os.environ["TMPDIR"], tempfile.tempdir = str(scratch.parent), None
    sys.argv = words
    run()


def run(text: str, scratch: Path) -> tuple[int, list[str]]:
    """Run a command in the scratch folder; its status and its lines, standard error included.

    One of prism that needs no shell runs in a fork of this process, where modules are loaded.
    """
    plain = text.replace("\\\n", " ")
    with tempfile.TemporaryFile(dir=scratch.parent) as printed:
        out = printed.fileno()
        if plain.startswith("prism ") and not SHELL.search(plain):
            child = multiprocessing.Process(target=_prism, args=(shlex.split(plain), scratch, out))
            child.start()
            child.join(TIME_LIMIT_S)
            status = child.exitcode
            child.kill()
        else:
            given = {**os.environ, "TMPDIR": str(scratch.parent)}
            status = subprocess.run(
                ["bash", "-c", text], cwd=scratch, env=given, stdout=out, stderr=out,
                stdin=subprocess.DEVNULL, timeout=TIME_LIMIT_S, check=False,
            ).returncode  # fmt: skip
        if status is None:
            raise subprocess.TimeoutExpired(text, TIME_LIMIT_S)
        printed.seek(0)
        return status, printed.read().decode("utf-8", "replace").splitlines()


@dataclass
class Page:
    """A page being checked: lines, what is wrong with it, seconds by command, copied pictures."""

    path: Path
    lines: list[str]
    update: bool = False
    problems: list[str] = field(default_factory=list)
    edits: list[tuple[int, int, list[str]]] = field(default_factory=list)
    seconds: list[tuple[float, str]] = field(default_factory=list)
    copied: set[str] = field(default_factory=set)

    def timed(self, text: str, scratch: Path) -> tuple[int, list[str]]:
        """Run a command and note how long it took."""
        start = time.perf_counter()
        try:
            return run(text, scratch)
        except subprocess.TimeoutExpired:
            return -1, [f"took more than {TIME_LIMIT_S} s"]
        finally:
            self.seconds.append((time.perf_counter() - start, text.splitlines()[0]))

    def compare(self, text: str, first: int, end: int, printed: list[str]) -> None:
        """Hold what was printed against the lines first to end, or put it there."""
        shown = self.lines[first:end]
        if matches(shown, printed):
            return
        if self.update:
            self.edits.append((first, end, renew(shown, printed)))
            return
        diff = difflib.unified_diff(
            [mask(line) for line in _trimmed(shown)],
            [mask(line) for line in _trimmed(printed)],
            "shown",
            "printed",
            lineterm="",
            n=2,
        )
        self.problems.append("\n".join([f"line {first}: $ {text}", *diff]))

    def apply(self) -> None:
        """Write the edits, last first."""
        for first, end, new in sorted(self.edits, reverse=True):
            self.lines[first:end] = new
        if self.edits:
            self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")


def check_blocks(page: Page, scratch: Path) -> None:
    """Write the page's files, run its commands and its Python, compare what they print."""
    printed: list[str] = []
    for block in read_blocks(page.lines):
        marks = block.marks
        if "file" in marks:
            target = scratch / marks["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
        if "run" in marks:
            script = scratch / "_block.py"
            script.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
            status, printed = page.timed("python -W error _block.py", scratch)
            if status:
                page.problems.append(f"line {block.first}: Python:\n" + "\n".join(printed[-15:]))
        elif "output" in marks:
            page.compare("python", block.first, block.first + len(block.lines), printed)
        elif "picture" in marks:
            if " " not in marks["picture"]:
                _check_picture(page, scratch / marks["picture"], page.path.parent / marks["to"])
        elif block.language == "console":
            commands = read_commands(block)
            for command in commands:
                status, printed = page.timed(command.text, scratch)
                want = int(marks.get("status", 0)) if command is commands[-1] else 0
                if status != want:
                    text = f"line {command.first}: $ {command.text}: status {status}, not {want}"
                    page.problems.append("\n".join([text, *printed[-15:]]))
                else:
                    page.compare(command.text, command.first, command.end, printed)


def _check_picture(page: Page, drawn: Path, shown: Path) -> None:
    """Check that a command of the page made its picture, and copy it."""
    if not drawn.is_file():
        page.problems.append(f"{drawn.name}: no command of the page makes this picture")
    elif page.update:
        if drawn.suffix == ".html":
            if (browser := shutil.which("chromium")) is None:
                page.problems.append(f"{shown.name}: needs chromium, which is not installed")
                return
            look = [browser, "--headless", "--no-sandbox", "--hide-scrollbars",
                    f"--window-size={WINDOW}", f"--screenshot={drawn}.png",
                    drawn.as_uri()]  # fmt: skip
            subprocess.run(look, check=True, capture_output=True, timeout=TIME_LIMIT_S)
            drawn = Path(f"{drawn}.png")
        shown.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, shown)
        page.copied.add(made.name_of(shown))


# ------------------------------------------------------------------------------------- links
def heading_anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.*?)\s*$", bare, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links(page: Page) -> None:
    """Relative links and pictures lead to files, and their anchors to headings."""
    text = "\n".join(page.lines)
    bare = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", bare) + re.findall(r'(?:src|href)="([^"]+)"', bare)
    for target in targets:
        if (
            target.endswith(".png")
            and "/pictures/" in f"/{target}"
            and not re.search(rf"<!-- picture: .+ {re.escape(target)} -->", text)
        ):
            page.problems.append(f"{target}: no mark says what made this picture")
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            page.problems.append(f"link to {target}: no such file")
        elif anchor and anchor not in heading_anchors(path.read_text(encoding="utf-8")):
            page.problems.append(f"link to {target}: no such heading")


# -------------------------------------------------------------------------------------- main
def check(path: Path, update: bool = False) -> Page:
    """Check one page in a scratch folder, where `experiments` is the repository's."""
    page = Page(path, path.read_text(encoding="utf-8").splitlines(), update)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "work"
        scratch.mkdir()
        (scratch / "experiments").symlink_to(ROOT / "experiments")
        try:
            check_blocks(page, scratch)
        except ValueError as error:
            page.problems.append(str(error))
    page.apply()
    check_links(page)
    return page


def pages_of(names: list[str], key: str | None) -> list[Path]:
    """README and docs, or the pages named, of which `key` is a part of the name."""
    found = [Path(name).resolve() for name in names]
    found = found or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in found if key is None or key in path.stem]


def main() -> int:
    """Check the pages, two at a time, the longest first; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="instead of README.md and docs/*.md")
    parser.add_argument("--update", action="store_true", help="write what is printed into them")
    parser.add_argument("--pictures", action="store_true", help="only name stale pictures")
    parser.add_argument("-k", metavar="NAME", help="only pages with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="pages at a time (default: 2)")
    options = parser.parse_args()
    paths = sorted(pages_of(options.pages, options.k), key=lambda p: -p.stat().st_size)
    wrong = 0
    copied = set[str]()
    start = time.perf_counter()
    if options.pictures:
        return int(made.stale_pictures(paths) > 0)
    with ProcessPoolExecutor(options.workers, initializer=load) as pool:
        for page in pool.map(partial(check, update=options.update), paths):
            spent = sum(seconds for seconds, _ in page.seconds)
            state = f"{len(page.problems)} WRONG" if page.problems else "as shown"
            print(f"{page.path.name:24} {len(page.seconds):3} runs {spent:6.1f} s  {state}"
                  + (f", {len(page.edits)} renewed" if page.edits else ""), flush=True)  # fmt: skip
            for seconds, text in sorted(page.seconds, reverse=True)[:2]:
                if seconds > 10:
                    print(f"    {seconds:5.1f} s  $ {text}")
            for problem in page.problems:
                print("  " + problem.replace("\n", "\n  "))
            wrong += bool(page.problems)
            copied |= page.copied
    if options.update:
        made.renew_pictures(paths, copied)
    stale = made.stale_pictures(paths)
    if not (options.pages or options.k):
        made.name_experiments()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(paths)} pages, {wrong} wrong, {stale} stale pictures; "
          f"{time.perf_counter() - start:.0f} s, "
          f"{used.ru_utime + used.ru_stime:.0f} s of processor time")  # fmt: skip
    return 1 if wrong or stale else 0


if __name__ == "__main__":
    sys.exit(main())
