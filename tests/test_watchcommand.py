"""prism watch as a command: bad input, failures, its end, a folder that goes away."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from logs_made import lines, steps

import prism
from prism import Watch
from prism import __main__ as entry


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(lines(steps(200)))
    return path


@pytest.mark.parametrize(
    ("given", "said"),
    [(("no.log", "--once"), "no.log"), (("no.log",), "no.log"),
     (("train.log", "--once", "--steps", "100"), "--steps"),
     (("train.log", "--once", "--interval", "0"), "--interval"),
     (("train.log", "--once", "--set", "run.steps=9"), "--set"),
     (("train.log", "no-such-job", "--once"), "no-such-job"),
     (("train.log", "pipeline-8x32", "--once", "--gpus", "8"), "--gpus"),
     (("train.log", "--once", "--openmetrics", "no/x.prom"), "no folder")],
)  # fmt: skip
def test_bad_input_is_told(run, log, monkeypatch, given, said):
    monkeypatch.chdir(log.parent)
    code, out, err = run("watch", *given)
    assert (code, out) == (2, "") and said in err


def test_failures_of_a_log_are_those_of_its_gpus(log):
    found = [
        prism.summary(Watch(log, seed=1, gpus=n, deadline="1h").look()) for n in (None, 80_000)
    ]
    assert [row["failure_model"]["per_1000_node_days"] > 0.0 for row in found] == [False, True]
    assert found[0]["finish_by"]["probability"] == 1.0
    assert found[1]["time_left"]["mean"] > 1.05 * found[0]["time_left"]["mean"]


def test_a_run_that_is_done_ends_the_watch(run, log):
    log.write_text(lines(steps(50), total=50))
    code, out, _ = run("watch", log, "--seed", "1", "--json", "--interval", "1h")
    found = json.loads(out)
    assert code == 0 and found["departure"] is None and found["time_left"]["p90"] == 0.0


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for a child")
def test_an_interrupt_ends_it_quietly(log):
    log.write_text(lines(steps(60), total=100))
    command = [sys.executable, "-m", "prism", "watch", str(log), "--seed", "1", "--json",
               "--interval", "0.2"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = json.loads(process.stdout.readline())
        with log.open("a") as file:
            file.write(lines(steps(70)[60:], total=100, first=61))
        end = time.monotonic() + 20
        while first["completed_steps"] == 60 and time.monotonic() < end:
            first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        error = process.stderr.read()
        assert (process.wait(20), error) == (0, b"") and first["completed_steps"] == 70


def test_a_folder_that_is_away_does_not_end_it(log, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "metrics"
    folder.mkdir()
    looks = []

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            shutil.rmtree(folder)
        elif len(looks) == 2:
            folder.mkdir()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)
    words = ["watch", str(log), "--openmetrics", str(folder / "run.prom"), "--seed", "1"]
    assert entry.main(words) == 0
    assert len(looks) == 3 and (folder / "run.prom").stat().st_size > 0
    assert "metrics" in capfd.readouterr().err
