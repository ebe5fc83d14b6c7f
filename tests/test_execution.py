"""Kept chunks: an interrupted command goes on where it was, with the same bits, or says why not."""

import errno
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import prism

JOB = prism.load_job("llama3-70b-fsdp-512", ["model.n_layers=20", "run.failures=none"])
CALL = {"replicates": 6400, "seed": 4}
NOTE = ".prism-command.json"
SMALL = ("estimate", "pipeline-8x32", "--replicates", "64", "--run-replicates", "10")


@pytest.fixture(autouse=True)
def short_tasks(monkeypatch):
    """Tasks of about ten cluster draws of `JOB`."""
    monkeypatch.setattr("prism.simulation.steps.TASK_S", 0.026)


@pytest.fixture(scope="module")
def whole():
    return prism.simulate(JOB, **CALL)


def chunks_of(folder):
    return sorted(folder.glob("[!.]*.npz"))


def interrupted(folder, seed=4, after=50):
    """Simulate `JOB` into a folder of chunks until some are there."""

    def stop(done, n):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), prism.run_on(resume=folder):
        prism.simulate(JOB, CALL["replicates"], seed=seed, threads=1, progress=stop)
    return chunks_of(folder)


def resumed(folder, call=CALL, **where):
    """Simulate again: the result, chunks taken up and made, what was said."""
    said = []
    with prism.run_on(resume=folder, tell=said.append, **where) as place:
        found = prism.simulate(JOB, **call, threads=2)
        counts = place.store.found, place.store.computed
    return found, *counts, said


def test_an_interrupted_run_goes_on_and_gives_the_same_bits(tmp_path, whole):
    folder = tmp_path / "parts"
    kept = interrupted(folder)
    assert len(kept) >= 5
    kept[0].write_bytes(kept[0].read_bytes()[:-100])  # power failed
    kept[1].write_bytes(b"x" * kept[1].stat().st_size)
    flipped = bytearray(kept[2].read_bytes())
    flipped[-9] ^= 1
    kept[2].write_bytes(flipped)
    kept[3].write_bytes(b"")
    found, taken, computed, said = resumed(folder)
    assert found.to_xarray().drop_attrs().identical(whole.to_xarray().drop_attrs())
    assert taken == len(kept) - 4 and computed > 0
    assert sum("damaged" in text for text in said) == 4
    assert not folder.exists()


def test_chunks_of_another_seed_or_job_are_not_taken(tmp_path):
    folder = tmp_path / "parts"
    for other, seed in ((JOB, 5), (JOB.replace("variability.effects.rank.cv=0.011"), 4)):
        interrupted(folder)
        with prism.run_on(resume=folder) as place:
            again = prism.simulate(other, 640, seed=seed)
            assert place.store.found == 0
        assert (
            again.to_xarray()
            .drop_attrs()
            .identical(prism.simulate(other, 640, seed=seed).to_xarray().drop_attrs())
        )


def test_the_rest_of_an_estimate_is_kept_too(tmp_path):
    """Cluster states, runs with events: a second time nothing is simulated."""
    job = JOB.replace("run.failures.per_1000_node_days=5", "run.checkpoint.interval=20min")
    call = {"replicates": 640, "run_replicates": 2000, "seed": 3}
    plain = prism.estimate(job, **call)
    with pytest.raises(KeyboardInterrupt), prism.run_on(resume=tmp_path / "a"):
        prism.estimate(job, **call)
        raise KeyboardInterrupt
    with prism.run_on(resume=tmp_path / "a") as place:
        again = prism.estimate(job, **call)
        assert place.store.found >= 2 and place.store.computed == 0
    assert plain.to_xarray().drop_attrs().identical(again.to_xarray().drop_attrs())


def test_a_place_holds_within_its_block_only(tmp_path):
    with prism.run_on(resume=tmp_path / "a"):
        prism.simulate("pipeline-8x32", 64, seed=1)
    with prism.run_on():
        prism.simulate("pipeline-8x32", 64, seed=1)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------- the folder
def begun(folder, command, seed=77):
    """Leave a folder of a command that was interrupted once it had a chunk."""
    with pytest.raises(KeyboardInterrupt):
        with prism.run_on(resume=folder, command=command, seed=seed):
            prism.simulate(JOB, 640, seed=seed)
            raise KeyboardInterrupt


def test_a_folder_of_another_command_is_told_apart(tmp_path):
    begun(tmp_path / "a", {"job": "x", "steps": 3})
    for other in ({"command": {"job": "x", "steps": 4}},
                  {"command": {"job": "x", "steps": 3}, "seed": 78}):  # fmt: skip
        with pytest.raises(prism.PrismError, match="--resume"):
            with prism.run_on(resume=tmp_path / "a", **other):
                pass
    said = []
    same = {"command": {"job": "x", "steps": 3}, "fresh_seed": lambda: 5, "tell": said.append}
    with prism.run_on(resume=tmp_path / "a", **same) as place:
        assert place.store.seed == 77 and "77" in said[0]
    assert not (tmp_path / "a").exists()


def test_chunks_of_another_program_are_not_taken(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        other = "prism.simulation.execution.tasks.identity"
        patch.setattr(other, lambda: {"numba": "0.1"})
        begun(tmp_path / "a", {"job": "x"})
    with prism.run_on(resume=tmp_path / "a", command={"job": "x"}) as place:
        prism.simulate(JOB, 640, seed=place.store.seed)
        assert place.store.seed == 77 and place.store.found == 0 < place.store.computed


def test_a_damaged_note_begins_anew(tmp_path):
    begun(tmp_path / "a", {"job": "x"})
    note = tmp_path / "a" / NOTE
    note.write_text(note.read_text()[:9])
    assert chunks_of(tmp_path / "a")
    with prism.run_on(resume=tmp_path / "a", command={"job": "y"}, fresh_seed=lambda: 5) as place:
        assert place.store.seed == 5 and not chunks_of(tmp_path / "a")


def test_two_at_once_in_one_folder_do_no_harm(tmp_path, whole):
    """The first to end removes the chunks; the other ends without."""
    with prism.run_on(resume=tmp_path / "a") as place:
        found, *_ = resumed(tmp_path / "a")
        again = prism.simulate(JOB, **CALL)
        assert place.store.found == 0
    for one in (found, again):
        assert one.to_xarray().drop_attrs().identical(whole.to_xarray().drop_attrs())
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "command.json", "mine.npz", "lock"])
def test_folders_of_other_things_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("{}")
    for _ in range(2):  # the first try leaves nothing behind that changes the second
        with pytest.raises(prism.PrismError, match=f"{name}.*--resume"):
            with prism.run_on(resume=tmp_path, command={"job": "x"}, seed=3):
                pass
    assert [file.name for file in tmp_path.iterdir()] == [name]
    with pytest.raises(prism.PrismError, match=name):
        with prism.run_on(resume=tmp_path / name):
            pass


def test_hidden_files_of_others_outlive_a_resumed_command(tmp_path):
    hidden = [".notes.json", ".other.npz", ".git"]
    for name in hidden:
        (tmp_path / name).write_text("x")
    with prism.run_on(resume=tmp_path, command={"job": "x"}, seed=3):
        prism.simulate(JOB, 640, seed=3)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(hidden)


def test_a_full_disk_ends_keeping_but_not_the_work(tmp_path, monkeypatch, whole):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numpy.savez", full)
    found, _, _, said = resumed(tmp_path / "a")
    assert sum(os.strerror(errno.ENOSPC) in text for text in said) == 1
    assert found.to_xarray().drop_attrs().identical(whole.to_xarray().drop_attrs())


# --------------------------------------------------------------------------------- the command
def test_a_wrong_command_leaves_no_folder(tmp_path, run):
    status, _, err = run("estimate", "nosuch.yaml", "--resume", tmp_path / "a")
    assert status == 2 and "nosuch.yaml" in err
    assert not (tmp_path / "a").exists()


def test_options_that_contradict_each_other_are_refused(tmp_path, run):
    for options in (
        ("--scheduler", "tcp://a:1", "--scheduler-file", "b"),
        ("--scheduler-timeout", "3s"),
        ("-o", tmp_path, "--resume", tmp_path),
    ):
        status, _, err = run("estimate", "pipeline-8x32", *options)
        assert status == 2 and options[-2] in err


def test_content_of_input_files_is_part_of_the_command(tmp_path, run, monkeypatch):
    """A job file that was edited since is another command."""
    job, parts = tmp_path / "job.yaml", tmp_path / "parts"
    job.write_text("base: pipeline-8x32\n")
    asked = ("estimate", job, *SMALL[2:], "--resume", parts)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("prism.present.answers.estimate.estimate_answer", stop)
        assert run(*asked)[0] == 130
    seed = json.loads((parts / NOTE).read_text())["seed"]
    job.write_text("base: pipeline-8x32\nrun: {steps: 7}\n")
    status, _, err = run(*asked)
    assert status == 2 and str(job) in err
    job.write_text("base: pipeline-8x32\n")
    status, out, _ = run(*asked, "--json")
    assert status == 0 and json.loads(out)["seed"] == seed and not parts.exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads, whole):
    found = prism.simulate(JOB, **CALL, threads=threads)
    np.testing.assert_array_equal(found.step_time, whole.step_time)


# Interrupted forty times while it simulates: an interrupt ends the work and leaves no lock.
INTERRUPTED = """
import random, signal, prism
signal.signal(signal.SIGALRM, signal.default_int_handler)
prism.simulate("pipeline-8x32", 640, seed=1)
for i in range(40):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.Random(i).uniform(1e-3, 5e-2))
        prism.simulate("pipeline-8x32", 4_000_000, seed=1, threads=2)
    except KeyboardInterrupt:
        print(i)
"""


def test_an_interrupt_at_any_moment_leaves_no_lock():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 40


def test_an_interrupt_while_a_thread_starts_is_an_interrupt(monkeypatch):
    """`threading` makes a RuntimeError of it, where it comes between two of its lines."""

    def submit(*_):
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", submit)
    with pytest.raises(KeyboardInterrupt):
        prism.simulate("pipeline-8x32", 100_000, seed=1, threads=2)
