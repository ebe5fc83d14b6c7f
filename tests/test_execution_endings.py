"""However a command ends, its output folder holds the old results or the new ones, whole.

Ctrl-C, kill -9 and a full disk, each while the files are being written, for all four commands that
write a folder.
"""

import errno
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaign import some

from prism import plots
from prism.common import files
from prism.common.errors import PrismError
from prism.simulation.execution.chunks import LOCK

JOB = {
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "dp": 2, "microbatches": 4},
    "cluster": {"nodes": 2, "gpus_per_node": 2},
    "variability": {"library": "h100-healthy"},
}
COMMANDS = {
    "estimate": ["--replicates", 640, "--run-replicates", 100],
    "sweep": ["--vary", "parallelism.microbatches=4,8", "--replicates", 128],
    "rank": [],
    "place": ["--slow-nodes", 1, "--slowdown", 1.2],
}
PLOTS = {"estimate": "step_time", "sweep": "sweep", "rank": "ranking", "place": "alternatives"}
# A process that is killed while it writes a picture.
KILLED = """
import os, signal, sys
from prism import plots
from prism.__main__ import main
def save_figure(ax, path, *others):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
plots.save_figure = save_figure
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    file = tmp_path_factory.mktemp("job") / "small.yaml"
    file.write_text(json.dumps(JOB))
    return file


def asked(command, job, out, *more):
    return [str(x) for x in (command, job, *COMMANDS[command], "--seed", 1, "-o", out, *more)]


def save_new(ax, *paths):
    """Stand in for `plots.save_figure`: a picture is any file here."""
    for path in paths:
        path.write_bytes(b"new")


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def old_results(out, command):
    """Fill a folder with what a command wrote before, and something else."""
    out.mkdir(exist_ok=True)
    for name in ("result.nc", "summary.json", f"{PLOTS[command]}.png", "notes.txt"):
        (out / name).write_text(f"old {name}")
    return content(out)


@pytest.fixture
def simulated_once(command):
    """A command simulates once, and writes what came of that again and again."""
    importlib.import_module(f"prism.analyses.{command}")
    module = sys.modules[f"prism.analyses.{command}"]  # the package's name may be the function
    analysis, kept = getattr(module, command), []

    def once(*arguments, **options):
        if not kept:
            kept.append(analysis(*arguments, **options))
        return kept[0].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, command, once)
        yield
    assert len(kept) == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("simulated_once")
def test_ctrl_c_and_a_full_disk_while_writing(command, job, tmp_path, monkeypatch, run):
    out = tmp_path / "out"
    before = old_results(out, command)

    def interrupt(ax, path, *others):
        save_new(ax, path)
        raise KeyboardInterrupt

    def fill(ax, path, *others):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plots, "save_figure", interrupt)
    status, answer, said = run(*asked(command, job, out))
    assert status == 130 and answer == "" and "interrupted" in said
    assert content(out) == before
    monkeypatch.setattr(plots, "save_figure", fill)
    status, answer, said = run(*asked(command, job, out))
    assert status == 2 and answer == "" and "Traceback" not in said
    assert f"{out}: " in said and os.strerror(errno.ENOSPC) in said
    assert content(out) == before
    status, _, _ = run(*asked(command, job, tmp_path / "new"))
    assert status == 2 and not (tmp_path / "new").exists()
    monkeypatch.setattr(plots, "save_figure", save_new)
    status, _, said = run(*asked(command, job, out))
    assert status == 0, said
    after = content(out)
    assert after.pop("notes.txt") == before["notes.txt"]
    assert not any(text.startswith(b"old") or text == b"half" for text in after.values())
    assert {"result.nc", "summary.json", f"{PLOTS[command]}.svg"} <= set(after)


def test_kill_9_while_writing(job, tmp_path, run, monkeypatch):
    """What is left is a hidden folder, which the next command removes."""
    for command in some(COMMANDS, 4):  # all write by the same functions
        out = tmp_path / command
        before = old_results(out, command)
        line = [sys.executable, "-c", KILLED, *asked(command, job, out)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        (left,) = out.glob(f"{files.OWN}*{files.PART}")
        assert b"half" in [file.read_bytes() for file in left.iterdir()]  # it was writing
        assert {n: (out / n).read_bytes() for n in before} == before
    out = tmp_path / "estimate"
    monkeypatch.setattr(plots, "save_figure", save_new)
    status, _, said = run(*asked("estimate", job, out))
    assert status == 0, said
    assert not list(out.glob(f"{files.OWN}*{files.PART}"))
    assert json.loads((out / "summary.json").read_text())["seed"] == 1


def test_files_that_cannot_grow(job, tmp_path, run):
    """The nearest to a full disk without root."""
    out = tmp_path / "out"
    before = old_results(out, "estimate")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status, answer, said = run(*asked("estimate", job, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and answer == ""
    assert f"{out}/result.nc: " in said and os.strerror(errno.EFBIG) in said
    assert "Traceback" not in said
    assert content(out) == before


def test_an_answer_that_nobody_can_take():
    line = [sys.executable, "-m", "prism", "schedule", "1f1b", "--stages", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*line, "--microbatches", "4", "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("prism: ") and os.strerror(errno.ENOSPC) in last


def test_ctrl_c_in_mid_run_keeps_chunks_and_says_so(job, tmp_path):
    parts, out = tmp_path / "parts", tmp_path / "out"
    options = ["--replicates", "20000000", "--run-replicates", "10", "--resume", str(parts)]
    line = [Path(sys.executable).with_name("prism"), *asked("estimate", job, out, *options)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(parts.glob("[!.]*.chunk")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    answer, said = process.communicate(timeout=300)
    assert process.returncode == 130 and answer == ""
    assert str(parts) in said and "interrupted" in said and "Traceback" not in said
    assert not out.exists()
    assert [file.name for file in parts.glob(".*")] == [LOCK]  # nothing half-written


# ------------------------------------------------------------------------------ files themselves
def test_a_failure_among_the_moves_puts_the_old_files_back(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old a")
    (tmp_path / "c").mkdir()  # a file of this name is to come
    with pytest.raises(PrismError, match="c there .*folder"):
        with files.atomic_files(tmp_path) as folder:
            for name in "abc":
                (folder / name).write_text(f"new {name}")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "c"]
    assert (tmp_path / "a").read_text() == "old a"
    (tmp_path / "c").rmdir()
    replace, moves = Path.replace, []

    def interrupted(self, target):
        moves.append(target)
        if len(moves) == 3:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with files.atomic_files(tmp_path) as folder:
            for name in "abc":
                (folder / name).write_text(f"new {name}")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old a"


def test_a_folder_that_is_being_written_is_left_alone(tmp_path):
    with files.atomic_files(tmp_path) as first:
        (first / "a").write_text("a")
        with files.atomic_files(tmp_path) as second:
            (second / "b").write_text("b")
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}
    left, other = tmp_path / f"{files.OWN}killed{files.PART}", tmp_path / f".download{files.PART}"
    left.mkdir()
    other.mkdir()
    with files.atomic_files(tmp_path):
        assert not left.exists()
    assert other.exists()  # of another program


def test_a_run_that_fails_leaves_what_another_put_into_their_new_folder(tmp_path):
    out = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt), files.atomic_files(out) as first:
        (first / "a").write_text("a")
        with files.atomic_files(out) as second:
            (second / "b").write_text("b")
        raise KeyboardInterrupt
    assert [file.name for file in out.iterdir()] == ["b"]


def test_a_new_folder_that_another_run_removed_is_made_again(tmp_path, monkeypatch):
    out, lock, removed = tmp_path / "new", files.fcntl.flock, []

    def remove_once(descriptor, how):
        if not removed:
            removed.append(out)
            out.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", remove_once)
    with files.atomic_files(out) as folder:
        (folder / "a").write_text("a")
    assert removed and [file.name for file in out.iterdir()] == ["a"]


def test_no_lock_where_there_is_none(tmp_path, monkeypatch):
    """File systems without locks: temporary folders of others are not touched."""

    def none(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", none)
    left = tmp_path / f"{files.OWN}other{files.PART}"
    left.mkdir()
    with files.atomic_files(tmp_path) as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "a").read_text() == "a" and left.exists()
