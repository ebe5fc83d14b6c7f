"""Tasks: what tells contents apart, finished chunks on disk, and the same bits wherever run."""

import dataclasses
import errno
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple

import numpy as np
import pytest

import prism
from prism import engine
from prism.common import files
from prism.common.errors import PrismError
from prism.simulation.execution import chunks, tasks
from prism.simulation.execution.chunks import ChunkStore
from prism.simulation.execution.content import content_hash, identity
from prism.simulation.execution.place import run_on
from prism.simulation.execution.tasks import Shared, Task, run_tasks

JOB, SETS = "llama3-70b-fsdp-512", ("model.n_layers=20",)
KEY = "5" * 64  # of a chunk
simulate = importlib.import_module("prism.simulation.steps")  # prism.simulate is the function


@pytest.fixture
def short_tasks(monkeypatch):
    """Tasks of about ten blocks of `JOB`."""
    monkeypatch.setattr(simulate, "TASK_S", 0.026)


@pytest.fixture
def computed(monkeypatch):
    """Blocks that the engine runs in this process."""
    run_range, seen = engine.run_range, []

    def counted(first, keys, step, out):
        seen.extend(range(first, first + len(out[0])))
        run_range(first, keys, step, out)

    monkeypatch.setattr(engine, "run_range", counted)
    return seen


def squares(shared, first, n):
    """Give a task's arrays."""
    return (np.arange(first, first + n) ** 2 * shared["factor"],)


# ------------------------------------------------------------------------------------- content
def test_equal_content_has_equal_hashes_and_other_content_others():
    pair, other = namedtuple("pair", "a b"), namedtuple("other", "a b")
    values = [
        None, True, 1, 1.0, "1", b"1", (1,), [1], (1, (2, 3)), (1, 2, 3), {"a": 1}, range(3),
        np.arange(3), np.arange(3.0), np.arange(4)[::2], np.arange(4).reshape(2, 2),
        np.arange(4).reshape(4, 1), np.uint32(3), np.int64(3), pair(1, 2), other(1, 2),
        squares, content_hash,
    ]  # fmt: skip
    hashes = [content_hash(value) for value in values]
    assert len(set(hashes)) == len(values)
    assert hashes == [content_hash(value) for value in values]
    # layout in memory is no content
    assert content_hash(np.arange(6).reshape(2, 3).T) == content_hash(
        np.ascontiguousarray(np.arange(6).reshape(2, 3).T)
    )


def test_one_bit_of_a_program_is_another_content():
    step = simulate.prepare(prism.load_job("pipeline-8x32"), 1).program.arrays(False)
    tables = step.tables.copy()
    tables.view(np.uint32)[0, 0, 0] ^= 1
    assert content_hash(step) == content_hash(step._replace(tables=step.tables.copy()))
    assert content_hash(step) != content_hash(step._replace(tables=tables))


def test_what_has_no_content_is_refused():
    with pytest.raises(TypeError, match="object"):
        content_hash(object())


def test_differences_of_programs_are_said_in_words():
    here = identity()
    assert here.differences(here) == ""
    there = here._replace(numba="0.1", source="x")
    assert re.search(f"source.*, numba 0.1 .*{here.numba}", here.differences(there))
    newer = here._replace(prism="9", source="x")
    assert re.search(f"prism 9 .*{here.prism}", here.differences(newer))
    assert "source" not in here.differences(newer)


def wait_a_little(shared, i):
    """Take 10 ms."""
    time.sleep(0.01)
    return (np.zeros(1),)


# --------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize("threads", [1, 3])
def test_tasks_hand_over_what_they_give(threads):
    found, beats = {}, []
    shared = Shared({"factor": 2})
    work = [Task(squares, shared if i % 2 else lambda: shared, (i, 2)) for i in range(20)]
    run_tasks(work, found.__setitem__, threads, lambda: beats.append(1))
    assert {i: row[0].tolist() for i, row in found.items()} == {
        i: [2 * i**2, 2 * (i + 1) ** 2] for i in range(20)
    }
    assert beats


def whose(shared):
    """Give the thread that a task runs in."""
    return (np.array([threading.get_ident()]),)


@pytest.mark.parametrize(("seconds", "here"), [(0.1, True), (1.0, False)])
def test_little_work_stays_in_the_thread_that_asked(seconds, here):
    """The same work at a tenth and at all of what is worth threads."""
    found = {}
    work = [Task(whose, Shared({}), (), 0.5 * seconds * tasks.ALONE_S) for _ in range(2)]
    run_tasks(work, found.__setitem__, 2)
    assert all((row[0][0] == threading.get_ident()) == here for row in found.values())


@pytest.mark.parametrize("threads", [1, 3])
def test_what_goes_wrong_in_a_task_comes_out(threads):
    with pytest.raises(KeyError):
        run_tasks([Task(squares, Shared({}), (i, 2)) for i in range(20)], print, threads)


# Interrupted a hundred times while it waits for tasks of a moment: an interrupt ends the tasks.
INTERRUPTED = """
import random, signal, time
from prism.simulation.execution.tasks import Shared, Task, run_tasks
signal.signal(signal.SIGALRM, signal.default_int_handler)
work = [Task(lambda _: time.sleep(3e-4), Shared({}), (), 0.01) for _ in range(200)]
for i in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.Random(i).uniform(1e-3, 2e-2))
        run_tasks(work, lambda *found: None, 2)
    except KeyboardInterrupt:
        print(i)
"""


def test_an_interrupt_at_any_moment_leaves_no_lock():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) > 90


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_begun_gives_what_it_would_have(threads):
    with tasks.begun(lambda: 6 * 7, threads) as finish:
        assert finish() == 42
    with pytest.raises(ZeroDivisionError), tasks.begun(lambda: 1 / 0, threads) as finish:
        finish()


def test_what_is_begun_ends_where_what_follows_goes_wrong():
    done, started = [], threading.Event()
    work = [Task(wait_a_little, Shared({}), (i,)) for i in range(500)]

    def many():
        run_tasks(work, lambda i, _: done.append(i), 2, started.set)

    with pytest.raises(PrismError), tasks.begun(many, 2):
        assert started.wait(60)
        raise PrismError("no run")
    assert len(done) < len(work)


def test_a_place_holds_within_its_block_only(tmp_path):
    assert not tasks.keeps_tasks()
    with run_on(resume=tmp_path / "a") as place:
        assert tasks.current() is not None and tasks.keeps_tasks()
        assert place.store is tasks.current().store
    assert not tasks.keeps_tasks()
    with run_on():
        assert not tasks.keeps_tasks()


# -------------------------------------------------------------------------------------- chunks
def test_chunks_come_back_whole_and_damaged_ones_not_at_all():
    arrays = (
        np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 64), np.float32),
        np.array("text"), np.array(1.5),
    )  # fmt: skip
    whole = chunks.pack(arrays)
    for mine, kept in zip(arrays, chunks.unpack(whole), strict=True):
        assert kept.dtype == mine.dtype
        np.testing.assert_array_equal(kept, mine)
    for n in (0, 5, 40, len(whole) - 1):
        assert chunks.unpack(whole[:n]) is None
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    assert chunks.unpack(bytes(flipped)) is None


def interrupted_run(folder, seed, after=6):
    """Run `JOB` into a folder of chunks until some are there; returns the whole program."""
    step = simulate.prepare(prism.load_job(JOB, SETS), seed)

    def stop(done, n):
        if done >= after * 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), run_on(resume=folder):
        simulate.run_blocks(step.program, range(100), seed, 1, progress=stop)
    return step.program


def test_an_interrupted_run_goes_on_and_gives_the_same_bits(tmp_path, short_tasks, computed):
    folder = tmp_path / "parts"
    program = interrupted_run(folder, 4)
    kept = sorted(folder.glob("*.chunk"))
    there = set(computed)
    assert len(kept) >= 6 and 50 <= len(there) < 100
    kept[0].write_bytes(kept[0].read_bytes()[:-100])  # power failed
    kept[1].write_bytes(b"x" * kept[1].stat().st_size)
    kept[2].write_bytes(b"")
    computed.clear()
    said = []
    with run_on(resume=folder, tell=said.append) as place:
        resumed = simulate.run_blocks(program, range(100), 4, 3)
        assert place.store.found == len(kept) - 3
    again = set(computed) & there
    assert len(computed) == len(set(computed)) == 100 - len(there) + len(again)
    assert 0 < len(again) <= 3 * 9  # the damaged ones alone
    assert sum("damaged" in text for text in said) == 3
    assert not folder.exists()
    computed.clear()
    whole = simulate.run_blocks(program, range(100), 4, 2)
    assert len(computed) == 100
    for mine, reference in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(mine, reference)


def test_chunks_of_another_seed_or_program_are_not_taken(tmp_path, short_tasks, computed):
    program = interrupted_run(tmp_path / "parts", 4)
    tables = program.tables.copy()
    tables[0] *= np.float32(1.001)
    for other, seed in ((program, 5), (dataclasses.replace(program, tables=tables), 4)):
        computed.clear()
        with pytest.raises(KeyboardInterrupt), run_on(resume=tmp_path / "parts") as place:
            simulate.run_blocks(other, range(50), seed, 2)
            assert place.store.found == 0 and len(computed) == 50
            raise KeyboardInterrupt  # leaves the folder


def test_the_rest_of_an_estimate_is_kept_too(tmp_path, computed):
    """Cluster states, runs with events: a second time nothing is simulated but what is short."""
    job = prism.load_job(
        JOB, ("run.failures.per_1000_node_days=5", "run.checkpoint.interval=20min")
    )
    call = {"replicates": 640, "run_replicates": 2000, "seed": 3}
    plain = prism.estimate(job, **call)
    with pytest.raises(KeyboardInterrupt), run_on(resume=tmp_path / "a"):
        prism.estimate(job, **call)
        raise KeyboardInterrupt
    computed.clear()
    with run_on(resume=tmp_path / "a") as place:
        resumed = prism.estimate(job, **call)
        assert place.store.found >= 3 and place.store.computed == 0
    assert len(computed) < 20  # of 100 and more: the ideal step, the critical path
    assert plain.drop_attrs().identical(resumed.drop_attrs())


# ---------------------------------------------------------------------------------- the folder
def test_a_folder_of_another_command_is_told_apart(tmp_path):
    said = []
    store = ChunkStore(tmp_path / "a", {"job": "x", "steps": 3}, None, lambda: 77, said.append)
    assert store.seed == 77
    store.save(KEY, (np.arange(3),))
    store.close()
    with pytest.raises(PrismError, match="steps 3, here 4.*--resume"):
        ChunkStore(tmp_path / "a", {"job": "x", "steps": 4})
    with pytest.raises(PrismError, match="seed 77, here 78"):
        ChunkStore(tmp_path / "a", {"job": "x", "steps": 3}, 78)
    store = ChunkStore(tmp_path / "a", {"job": "x", "steps": 3}, None, lambda: 5, said.append)
    assert store.seed == 77 and re.search("1 finished .*seed 77", said[-1])
    with pytest.raises(PrismError, match="another prism"):
        ChunkStore(tmp_path / "a", {"job": "x", "steps": 3})
    store.finish()
    store.close()
    assert not (tmp_path / "a").exists()


def test_chunks_of_another_version_are_begun_anew_with_the_same_seed(tmp_path):
    store = ChunkStore(tmp_path / "a", {"job": "x"}, None, lambda: 77)
    store.save(KEY, (np.arange(3),))
    store.close()
    manifest = tmp_path / "a" / chunks.MANIFEST
    noted = json.loads(manifest.read_text())
    noted["identity"]["numba"] = "0.1"
    manifest.write_text(json.dumps(noted))
    said = []
    store = ChunkStore(tmp_path / "a", {"job": "x"}, None, lambda: 5, said.append)
    assert store.seed == 77 and store.load(KEY) is None
    assert "numba 0.1 " in said[0] and "again" in said[0]
    store.close()


def test_folders_of_other_things_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PrismError, match=r"thesis.tex.*--resume"):
        ChunkStore(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "x"
    (tmp_path / "file").write_text("x")
    with pytest.raises(PrismError, match=f"{tmp_path}/file"):
        ChunkStore(tmp_path / "file")


@pytest.mark.parametrize("name", ["command.json", "mine.chunk", "lock"])
def test_files_like_those_of_chunks_are_refused_where_prism_wrote_none(tmp_path, name):
    (tmp_path / name).write_text("{}")
    for _ in range(2):  # the first try leaves nothing behind that changes the second
        with pytest.raises(PrismError, match=f"{name}.*--resume"):
            ChunkStore(tmp_path, {"job": "x"}, 3)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_hidden_files_of_others_outlive_a_resumed_command(tmp_path):
    hidden = [".notes.json", ".other.chunk", ".git"]
    for name in hidden:
        (tmp_path / name).write_text("x")
    half = tmp_path / f"{files.OWN}0123.chunk"  # of a process that was killed
    half.write_text("x")
    store = ChunkStore(tmp_path, {"job": "x"}, 3)
    store.save(KEY, (np.arange(3),))
    assert store.kept == 1 and not half.exists()
    store.finish()
    store.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(hidden)


def test_a_damaged_note_of_the_command_starts_again(tmp_path):
    ChunkStore(tmp_path / "a", {"job": "x"}, 3).close()
    (tmp_path / "a" / chunks.MANIFEST).write_text('{"command"')
    said = []
    ChunkStore(tmp_path / "a", {"job": "y"}, 4, None, said.append).close()
    assert "damaged" in said[0]


def test_a_full_disk_ends_keeping_but_not_the_work(tmp_path, monkeypatch, short_tasks):
    program = simulate.prepare(prism.load_job(JOB, SETS), 4).program
    said = []
    with run_on(resume=tmp_path / "a", tell=said.append) as place:

        def full(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files.Path, "write_bytes", full)
        times = simulate.run_blocks(program, range(40), 4, 2)[0]
        assert place.store.kept == 0
    assert sum(os.strerror(errno.ENOSPC) in text for text in said) == 1
    np.testing.assert_array_equal(times, simulate.run_blocks(program, range(40), 4, 2)[0])


def test_a_wrong_command_leaves_no_folder(tmp_path, run):
    status, _, err = run("estimate", "nosuch.yaml", "--resume", tmp_path / "a")
    assert status == 2 and "nosuch.yaml" in err
    assert not (tmp_path / "a").exists()


def test_options_that_contradict_each_other_are_refused(tmp_path, run):
    for options, words in (
        (("--scheduler", "tcp://a:1", "--scheduler-file", "b"), "leave one out"),
        (("--scheduler-timeout", "3s"), "belongs to --scheduler"),
        (("-o", tmp_path, "--resume", tmp_path), "its own folder"),
    ):
        status, _, err = run("estimate", "pipeline-8x32", *options)
        assert status == 2 and words in err


def test_content_of_input_files_is_part_of_the_command(tmp_path, run):
    job = tmp_path / "job.yaml"
    job.write_text("base: pipeline-8x32\n")
    parts, asked = tmp_path / "parts", ("--replicates", "64", "--resume")
    store = ChunkStore(parts, {"command": "estimate", "replicates": 64, "job": str(job)}, 1)
    store.save(KEY, (np.arange(3),))
    store.close()
    status, _, err = run("estimate", job, *asked, parts)
    assert status == 2 and f"content of {job} not given" in err
