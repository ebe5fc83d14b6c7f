"""What comes through a pipe is what the file says, whole, however long it is; read once."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest

JOB = """\
model: {durations: {forward_s: [1.0, 1.1], backward_s: 2.0}}
COMMENT
parallelism: {pp: 2, dp: 8, microbatches: 4}
cluster: {nodes: 2, gpus_per_node: 8}
variability: {effects: {rank: {cv: 0.02}, microbatch: {cv: 0.05}}}
run: {steps: 100}
""".replace("COMMENT", "# what stands here is longer than what is read at once\n" * 400)
# longer than what a pipe holds, 64 KiB, by digits: few steps are compared and resampled sooner
STEPS = "step_s\n" + "".join(f"{1.0 + 0.001 * (i * 37 % 11):.800f}\n" for i in range(100))
HOSTS = "n0 slots=8\nn1 slots=8\n"
PLACES = "slot,node,host,first_rank,stages,replicas\n0,1,,0,0,0-7\n1,0,,8,1,0-7\n"
NODES = "node,slowdown\n0,1.2\n1,1.05\n"
FEW = "--replicates", "64", "--seed", "1"
SLOW = "--slow-nodes", "1", "--slowdown", "1.2"
COMMANDS = {
    "estimate": (JOB, ("estimate", "{}", *FEW)),
    "show": (JOB, ("show", "{}")),
    "steps": (STEPS, ("show", "{}")),
    "validate": (STEPS, ("validate", "JOB", "--measured", "{}", "--bootstrap", "2", *FEW)),
    "compare": (STEPS, ("compare", "{}", "{}", *FEW[2:])),
    "hosts": (
        HOSTS,
        ("place", "JOB", "--slow-nodes", "1", "--slowdown", "1.2", "--hosts", "{}", *FEW[2:]),
    ),
    "inventory": (NODES, ("place", "JOB", "--measured-nodes", "{}", *FEW[2:])),
    "placement": (PLACES, ("estimate", "JOB", "--set", "cluster.hosts={}", *FEW)),
}


@pytest.fixture
def pipe():
    """Give the path of a pipe that brings a text."""
    threads, readers = [], []

    def opened(text):
        reader, writer = os.pipe()
        readers.append(reader)

        def write():
            with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as file:
                file.write(text)

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        return f"/dev/fd/{reader}"

    yield opened
    for reader in readers:
        os.close(reader)
    for thread in threads:
        thread.join()


FIGURES = {
    "estimate": {"step_time", "slowdown", "ideal_step_time"},
    "show": {"values"},
    "steps": {"n", "mean", "std"},
    "validate": {"ks", "p95_error", "baselines"},
    "compare": {"quantities"},
    "hosts": {"placements"},
    "inventory": {"placements", "slow_nodes"},
    "placement": {"step_time", "slowdown"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_is_read_as_the_file_is(tmp_path, run, pipe, name):
    text, words = COMMANDS[name]
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "file").write_text(text)
    answers = []
    for path in (str(tmp_path / "file"), pipe(text)):
        known = {"{}": path, "JOB": str(tmp_path / "job.yaml")}
        given = [known.get(word, word.replace("{}", path)) for word in words]
        status, out, err = run(*given, "--json", "-q")
        assert status == 0, err
        answers.append(json.loads(out))
    first, second = answers
    assert first.keys() == second.keys()
    same = {key for key in first if first[key] == second[key]}
    assert same >= FIGURES[name], same


def test_a_process_reads_its_standard_input_whole(tmp_path, run):
    (tmp_path / "job.yaml").write_text(JOB)
    words = [sys.executable, "-m", "prism", "show", "/dev/stdin", "--json"]
    done = subprocess.run(words, input=JOB, capture_output=True, text=True, check=True)
    status, out, err = run("show", tmp_path / "job.yaml", "--json")
    assert status == 0, err
    assert json.loads(done.stdout)["values"] == json.loads(out)["values"]


def test_pipes_of_one_number_are_read_one_after_the_other(run, pipe):
    """A process that reads one to its end and opens another gets the same number again."""
    jobs = [pipe(JOB), pipe(JOB.replace("steps: 100", "steps: 7"))]
    first, second = (int(path.rpartition("/")[2]) for path in jobs)
    steps = []
    for path in (jobs[0], jobs[0]):
        status, out, err = run("show", path, "--json")
        assert status == 0, err
        steps.append(json.loads(out)["values"]["run"]["steps"])
        os.dup2(second, first)
    assert steps == [100, 7]


def test_too_long_a_pipe_is_refused(tmp_path, run, pipe, monkeypatch):
    monkeypatch.setattr("prism.common.pipes.MOST", 1 << 20)
    status, _, err = run("show", pipe(JOB + "#" * (3 << 20)))
    assert status == 2 and "1 MiB" in err
    for path in (tmp_path / "none", tmp_path, "/dev/fd/999", "/dev/zero"):
        status, _, err = run("estimate", path)
        assert status == 2 and str(path) in err


def test_a_named_pipe_and_a_model_from_a_pipe_are_refused(tmp_path, run, pipe):
    os.mkfifo(tmp_path / "named")
    for path in (tmp_path / "named", pipe("\x89HDF\r\n\x1a\n".encode("latin-1").decode("latin-1"))):
        status, out, err = run("estimate", path)
        assert (status, out) == (2, "") and str(path) in err
