"""What is kept of compiled code: a file that is not whole, or not of the key, is not there."""

import errno
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import prism
from prism import __main__ as entry
from prism import engine
from prism.common import compiled
from prism.engine import cache, kept
from prism.engine.effects import draw_ranks, draw_stalls, fill_bank
from prism.engine.step import find_path, run_blocks, run_phase, start_block
from prism.jobs.job import load_job
from prism.simulation import prepare as preparing

SAMPLES = Path(__file__).parents[1] / "experiments" / "samples"
SIGNATURE = "int64(int64)"
DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"\x80garbage" * 9,
    "another's pickle": lambda data: pickle.dumps(("1", {})),
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
}


def twice(x):
    return 2 * x


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Compile `twice` as the engine's functions are, or load it: the dispatcher."""
    monkeypatch.setattr(cache, "engine_folder", lambda: str(tmp_path))

    def made(signature=SIGNATURE):
        with cache.kept_together():
            return numba.njit(signature, cache=True)(twice)

    return made


def hits(function):
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_written_anew(make, tmp_path, suffix, damage):
    assert hits(make()) == 0 and hits(make()) == 1
    [file] = tmp_path.rglob(f"*.{suffix}")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    again = make()
    assert hits(again) == 0 and again(21) == 42
    assert hits(make()) == 1


def test_what_was_compiled_for_another_key_is_a_miss(make, tmp_path):
    """Two processes that write one index at once can leave it so."""
    make()
    make("float64(float64)")
    first, second = sorted(tmp_path.rglob("*.nbc"))
    first.write_bytes(second.read_bytes())
    again = make()
    assert hits(again) == 0 and again(21) == 42
    assert hits(make("float64(float64)")) == 1


def test_a_disk_without_room_is_no_failure(make, tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # EFBIG, as ENOSPC
    try:
        assert make()(21) == 42
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.rglob("*.nb?")] and not [*tmp_path.rglob("*.tmp.*")]

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept.caching.UserProvidedCacheLocator, "ensure_cache_path", full)
    function = make()
    assert function(21) == 42 and isinstance(function._cache, numba.core.caching.NullCache)


def test_the_cache_of_others_functions_stays_numbas(make):
    make()
    assert numba.core.dispatcher.FunctionCache is numba.core.caching.FunctionCache


WITHOUT = """
import sys
from numba.core import {module}
del {module}.{name}
import numpy as np
from prism import engine
from prism.engine import cache
engine.compile_blocks()
engine.compile_rest()
assert not cache.KEPT and engine.run_range.__globals__["run_blocks"].signatures == []
out = np.empty((4, 1), np.uint32)
engine.philox_lanes(0, 0, 0, 0, np.zeros(2, np.uint32), out)
print(*out[:, 0])
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [("caching", "UserProvidedCacheLocator"), ("caching", "IndexDataCacheFile"),
     ("dispatcher", "FunctionCache")],
)  # fmt: skip
def test_without_a_private_name_of_numbas_nothing_is_kept_and_all_goes_on(module, name):
    code = WITHOUT.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of Random123
    assert [int(word) for word in done.stdout.split()] == words


def test_an_end_of_file_inside_is_not_an_interrupt(monkeypatch, capsys):
    from prism.cli import app

    def broken(*arguments, **names):
        raise EOFError("Ran out of input")

    monkeypatch.setattr(app.prism, "invoke", broken)
    assert entry.main(["show", "--jobs"]) == 1
    assert "EOFError" in capsys.readouterr().err


def test_what_another_process_compiles_is_what_a_run_asks_for(monkeypatch):
    """For other types of arguments all would be compiled twice."""
    monkeypatch.setattr(compiled, "_asked", True)
    prism.simulate("llama3-70b-fsdp-512", replicates=64, seed=1)
    many = load_job("pipeline-8x32", ["parallelism.dp=256", "cluster.nodes=256"])
    prism.simulate(many, replicates=64, seed=1, engine="exchangeable")  # a sample of the replicas
    engine.compile_blocks()
    engine.compile_rest()
    parts = run_phase, find_path, draw_ranks, fill_bank, start_block, draw_stalls
    for function in (run_blocks, *parts):
        assert len(function.signatures) == 1


@pytest.fixture
def unasked(monkeypatch, tmp_path):
    """No process was started, and nothing is compiled: the folder of compiled code."""
    monkeypatch.setattr(compiled, "_asked", False)
    monkeypatch.setattr(compiled, "_other", None)
    monkeypatch.setattr(compiled, "engine_folder", lambda: str(tmp_path))
    monkeypatch.setattr(compiled.atexit, "register", lambda *_: None)
    return tmp_path


@pytest.mark.parametrize(
    "at_hand, expected", [(False, 1), (True, 0)], ids=["empty cache", "all at hand"]
)
def test_another_process_is_started_once_where_it_is_of_use(
    monkeypatch, unasked, at_hand, expected
):
    if at_hand:  # under the names that Numba gives
        prism.simulate("pipeline-8x32", replicates=64, seed=1)
        index = Path(run_blocks._cache._cache_file._index_path)
        (unasked / index.parent.name).mkdir()
        (unasked / index.parent.name / index.name).touch()
    started = []
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *a, **k: started.append(a[0]) or 1)
    for _ in range(2):
        compiled.start_compiling()
        assert compiled.is_compiling() == bool(expected)
    assert len(started) == expected
    for command in started:  # a module that is not there would never be missed
        name = engine.compile_blocks.__name__
        assert f"from {engine.__name__} import {name}\n{name}()\n" in command[-1]


@pytest.mark.parametrize("where", ["nothing is compiled", "no Python", "a frozen application"])
def test_no_process_is_started_where_it_is_of_no_use(monkeypatch, unasked, where):
    if where == "nothing is compiled":
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    elif where == "no Python":
        monkeypatch.setattr(sys, "executable", None)
    else:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    compiled.start_compiling()
    assert not compiled.is_compiling()


def test_a_call_of_the_library_starts_no_process(monkeypatch, unasked):
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    prism.simulate("pipeline-8x32", replicates=64, seed=1)
    assert not compiled._asked


def test_a_process_that_cannot_be_started_is_done_without(monkeypatch, unasked):
    def refuse(*_, **__):
        raise OSError("no memory")

    ended = []
    monkeypatch.setattr(compiled.subprocess, "Popen", refuse)
    monkeypatch.setattr(compiled.atexit, "register", lambda *args: ended.append(args))
    compiled.start_compiling()
    assert not compiled.is_compiling()
    assert compiled._asked and not ended  # tried once; there is nothing to end


def test_the_other_process_is_waited_for_once_and_not_for_ever(monkeypatch):
    waited = []

    class Other:
        def wait(self, seconds):
            waited.append(seconds)
            raise subprocess.TimeoutExpired("python", seconds)

    monkeypatch.setattr(compiled, "_other", Other())
    for _ in range(2):
        compiled.finish_compiling()
    assert waited == [compiled.WAIT_S]


@pytest.fixture(params=["job", "trace model"])
def job(request, tmp_path):
    """A preset, and the model of a trace."""
    if request.param == "job":
        return "pipeline-8x32"
    path = tmp_path / "model.nc"
    prism.save(prism.fit(SAMPLES / "trace.csv", seed=1), path)
    return str(path)


@pytest.mark.parametrize("started", [False, True])
def test_whatever_is_prepared_waits_for_the_other_process(monkeypatch, job, started):
    """And compiles meanwhile what the other one waits for."""
    done = []
    monkeypatch.setattr(preparing, "is_compiling", lambda: started)
    monkeypatch.setattr(preparing, "compile_rest", lambda: done.append("rest"))
    monkeypatch.setattr(preparing, "finish_compiling", lambda: done.append("waited"))
    prism.simulate(job, replicates=64, seed=1)
    assert done == ["rest"] * started + ["waited"]


@pytest.mark.parametrize(("more", "expected"), [([], 1), (["--scheduler", "tcp://no:1"], 0)])
def test_a_command_starts_it_before_it_imports_anything(monkeypatch, more, expected):
    from prism.cli.commands import options

    started = []
    monkeypatch.setattr(options, "start_compiling", lambda: started.append(1))
    arguments = ["estimate", "none-of-this-name", "--scheduler-timeout", "0.1s", *more]
    assert entry.main(arguments) == 2
    assert len(started) == expected


@pytest.mark.parametrize(
    ("has", "name", "given", "found"),
    [
        ("+avx512f,+avx512fp16", None, None, "+avx512f,+avx512fp16,-prefer-256-bit"),
        ("+avx512f,-avx512fp16", None, None, None),
        ("+avx512f,+avx512fp16", "generic", None, None),
        ("+avx512f,+avx512fp16", None, "+avx2", "+avx2"),
    ],
)
def test_vectors_are_wide_where_that_was_measured_to_be_quicker(
    monkeypatch, has, name, given, found
):
    monkeypatch.setattr(numba.core.codegen, "get_host_cpu_features", lambda: has)
    monkeypatch.setattr(cache.config, "CPU_NAME", name)
    monkeypatch.setattr(cache.config, "CPU_FEATURES", given)
    assert cache.choose_features() == found
    with cache.kept_together():
        assert cache.config.CPU_FEATURES == found
    assert cache.config.CPU_FEATURES == given
