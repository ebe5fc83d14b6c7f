"""However a command ends, its output folder holds the old results or the new ones, whole.

Ctrl-C, kill -9 and a full disk, each while the files are being written, for all four commands that
write a folder.
"""

import errno
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


def hidden(folder):
    """Whatever a command leaves for itself."""
    return [file for file in folder.iterdir() if file.name.startswith(".")]


def old_results(out, command):
    """Fill a folder with what a command wrote before, and something else."""
    out.mkdir(exist_ok=True)
    for name in ("result.nc", "summary.json", f"{PLOTS[command]}.png", "notes.txt"):
        (out / name).write_text(f"old {name}")
    return content(out)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_and_a_full_disk_while_writing(command, job, tmp_path, monkeypatch, run):
    out = tmp_path / "out"
    before = old_results(out, command)

    def interrupt(ax, path, *others):
        save_new(ax, path)
        raise KeyboardInterrupt

    def fill(ax, path, *others):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("prism.plots.save_figure", interrupt)
    status, answer, said = run(*asked(command, job, out))
    assert status == 130 and answer == "" and "interrupted" in said
    assert content(out) == before
    monkeypatch.setattr("prism.plots.save_figure", fill)
    for folder in (out, tmp_path / "new"):
        status, answer, said = run(*asked(command, job, folder))
        assert status == 2 and answer == "" and "Traceback" not in said
        assert f"{folder}: " in said and os.strerror(errno.ENOSPC) in said
    assert content(out) == before and not (tmp_path / "new").exists()
    monkeypatch.setattr("prism.plots.save_figure", save_new)
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
        (left,) = hidden(out)
        assert b"half" in [file.read_bytes() for file in left.iterdir()]  # it was writing
        assert {n: (out / n).read_bytes() for n in before} == before
    out = tmp_path / "estimate"
    other = out / ".download.part"  # of another program
    other.mkdir()
    monkeypatch.setattr("prism.plots.save_figure", save_new)
    status, _, said = run(*asked("estimate", job, out))
    assert status == 0, said
    assert hidden(out) == [other]
    assert json.loads((out / "summary.json").read_text())["seed"] == 1


def test_two_commands_may_write_into_one_folder(job, tmp_path, run, monkeypatch):
    """What one writes meanwhile stays, also in a folder that the other made and fails to fill."""
    out, inner = tmp_path / "out", []

    def another(ax, *paths):
        monkeypatch.setattr("prism.plots.save_figure", save_new)
        inner.append(run(*asked("rank", job, out))[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("prism.plots.save_figure", another)
    status, _, _ = run(*asked("estimate", job, out))
    assert (status, inner) == (130, [0])
    kept = content(out)
    assert {"result.nc", "ranking.svg"} <= set(kept) and "step_time.svg" not in kept


def test_a_file_that_cannot_be_replaced_leaves_the_others_as_they_were(job, tmp_path, run):
    out = tmp_path / "out"
    before = old_results(out, "estimate")
    (out / "summary.json").unlink()
    (out / "summary.json").mkdir()
    status, _, said = run(*asked("estimate", job, out))
    assert status == 2 and "summary.json" in said
    assert (out / "result.nc").read_bytes() == before["result.nc"]


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
    while not list(parts.glob("[!.]*.npz")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    answer, said = process.communicate(timeout=300)
    assert process.returncode == 130 and answer == ""
    assert str(parts) in said and "interrupted" in said and "Traceback" not in said
    assert not out.exists()
    assert len(hidden(parts)) == 1  # the note: nothing half-written


def test_no_lock_where_there_is_none(job, tmp_path, monkeypatch, run, empty_pictures):
    """File systems without locks."""

    def none(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    status, _, said = run(*asked("estimate", job, tmp_path / "out"))
    assert status == 0, said
    assert (tmp_path / "out" / "result.nc").exists()
