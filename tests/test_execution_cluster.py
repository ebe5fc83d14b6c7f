"""A real cluster of processes: the same bits as one machine, also when workers or clients die."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import prism

JOB = "llama3-70b-fsdp-512"
BLOCKS = 32
TASK_S = 0.025  # two blocks to a task: shorter ones would not be sent
CALL = {"replicates": 64 * BLOCKS, "seed": 4}
CLIENT = """
import importlib, sys
importlib.import_module("prism.simulation.steps").TASK_S = float(sys.argv.pop(1))
from prism.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def cluster():
    """Two workers, the first of which compiles what the second finds."""
    import dask
    from distributed import Client, LocalCluster
    from distributed.utils import get_mp_context

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    get_mp_context().set_forkserver_preload(["distributed", "prism.engine"])
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        with prism.run_on(cluster.scheduler_address, timeout_s=300.0):
            prism.simulate(JOB, 256, seed=4)
        cluster.scale(2)
        with Client(cluster) as client:
            client.wait_for_workers(2, timeout=300)
        yield cluster


@pytest.fixture
def short_tasks(monkeypatch):
    monkeypatch.setattr("prism.simulation.steps.TASK_S", TASK_S)


@pytest.fixture(scope="module")
def here():
    """What one machine gives."""
    return prism.simulate(JOB, **CALL).to_xarray().drop_attrs()


def workers(place):
    """Process of every worker."""
    return place.remote.client.run(os.getpid)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_many_workers_give_the_bits_of_one_machine(cluster, here, short_tasks):
    seen, said = [], []
    with prism.run_on(cluster.scheduler_address, tell=said.append):
        there = prism.simulate(JOB, **CALL, progress=lambda done, n: seen.append((done, n)))
    assert "2 workers, 2 threads" in said[0]
    assert seen[-1] == (BLOCKS, BLOCKS) and len({done for done, _ in seen}) > 10
    assert there.to_xarray().drop_attrs().identical(here)


@pytest.mark.parametrize("victims", [1, 2])
def test_workers_killed_in_mid_run_take_nothing_with_them(cluster, here, short_tasks, victims):
    killed, at = [], []
    # a nanny may need more than the default 30 s to start a worker on a machine under load
    with prism.run_on(cluster.scheduler_address, timeout_s=300.0) as place:

        def kill(done, n):
            if 0 < done and not killed:
                at.append(done)
                for process in list(workers(place).values())[:victims]:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)

        there = prism.simulate(JOB, **CALL, progress=kill)
        assert len(killed) == victims and at[0] < 0.8 * BLOCKS  # in mid-run
        assert not set(killed) & set(workers(place).values())
    assert not any(alive(process) for process in killed)
    assert there.to_xarray().drop_attrs().identical(here)


def test_analyses_are_those_of_one_machine(cluster):
    events = ("failures.per_1000_node_days=50", "checkpoint.interval=20min", "checkpoint.write_s=9")
    job = prism.load_job("pipeline-8x32", [f"run.{event}" for event in events])
    vary = {
        "parallelism.microbatches": [16, 20],
        "parallelism.schedule": ["1f1b", "gpipe", "interleaved"],  # refused with 20 over 8 stages
    }

    def figures(dataset):
        numbers = prism.summary(dataset)
        return {k: v for k, v in numbers.items() if k not in ("wall_seconds", "cpu_seconds")}

    def analyses():
        return (
            prism.estimate(job, replicates=2000, run_replicates=2000, seed=1),
            figures(prism.sweep(job, vary, replicates=1024, seed=1)),
            prism.rank(job, seed=1).to_xarray().drop_attrs(),
        )

    found, rows, ranks = analyses()
    assert len(rows["rows"]) == 5 and len(rows["refused"]) == 1
    with prism.run_on(cluster.scheduler_address):
        there, rows_there, ranks_there = analyses()
    assert found.to_xarray().drop_attrs().identical(there.to_xarray().drop_attrs())
    assert rows == rows_there and ranks.identical(ranks_there)


def test_the_client_killed_in_mid_run_goes_on_where_it_was(
    cluster, tmp_path, short_tasks, run, empty_pictures
):
    """No seed is given: that of the killed run is taken up."""
    parts, out = tmp_path / "parts", tmp_path / "out"
    asked = ["estimate", JOB, "--replicates", 64 * BLOCKS, "--run-replicates", 100]
    asked = [str(x) for x in [*asked, "--resume", parts, "-o", out, "--json"]]
    line = [sys.executable, "-c", CLIENT, str(TASK_S)]
    command = [*line, *asked, "--scheduler", cluster.scheduler_address]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while len(list(parts.glob("[!.]*.npz"))) < 3 and time.monotonic() < end:
        assert client.poll() is None
        time.sleep(0.01)
    client.kill()
    assert client.wait() == -signal.SIGKILL
    assert not out.exists()  # nothing half-written
    kept = len(list(parts.glob("[!.]*.npz")))
    seed = json.loads((parts / ".prism-command.json").read_text())["seed"]
    assert 3 <= kept

    status, answer, said = run(*asked)  # on this machine alone
    assert status == 0, said
    assert re.search(f" {kept} finished .*seed {seed}", said)
    assert re.search(rf"{kept} chunks? reused", said)
    assert json.loads(answer)["seed"] == seed
    reference = prism.estimate(JOB, replicates=64 * BLOCKS, run_replicates=100, seed=seed)
    found = prism.load(out / "result.nc")
    np.testing.assert_array_equal(found.step_time, reference.step_time)
    np.testing.assert_array_equal(found.time_to_train, reference.time_to_train)
    assert not parts.exists()


def test_ctrl_c_stops_the_workers_too(cluster, short_tasks):
    def stop(done, n):
        if done > BLOCKS:
            waiting.append(left())
            raise KeyboardInterrupt

    def left():
        return len(sum(place.remote.client.processing().values(), ()))

    waiting = []
    with prism.run_on(cluster.scheduler_address) as place:
        with pytest.raises(KeyboardInterrupt):
            prism.simulate(JOB, 64 * 40 * BLOCKS, seed=4, progress=stop)
        assert waiting[0]
        end = time.monotonic() + 60
        while left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not left()


OTHER = """
import sys
from importlib import metadata
known = metadata.version
metadata.version = lambda name: "0.1" if name == "numba" else known(name)
from prism.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_workers_of_another_version_are_refused_in_words(cluster):
    asked = ["estimate", JOB, "--scheduler", cluster.scheduler_address]
    done = subprocess.run([sys.executable, "-c", OTHER, *asked], capture_output=True, text=True)
    assert done.returncode == 2 and re.search("numba .* 0.1", done.stderr)
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2


NO_ADDRESSES = ("nonsense://x:1", "tcp://127.0.0.1", "host", "")
OTHER_ANSWERS = (None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"400", b"\0" * 64)


@contextmanager
def listeners():
    """Listen at ports where something else answers; gives their addresses."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in OTHER_ANSWERS]
    stop = threading.Event()

    def serve(listener, answer):
        listener.settimeout(0.1)
        open_ones = []
        while not stop.is_set():
            with suppress(TimeoutError):
                open_ones.append(listener.accept()[0])
                if answer is not None:
                    open_ones[-1].sendall(answer)
        for connection in open_ones:
            connection.close()

    threads = [
        threading.Thread(target=serve, args=x) for x in zip(listening, OTHER_ANSWERS, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in listening]
    finally:
        stop.set()
        for thread, listener in zip(threads, listening, strict=True):
            thread.join()
            listener.close()


@pytest.fixture(scope="module")
def said():
    """What is said of each address that is no scheduler's, by one process, to its end.

    Dask's threads go on until then, and must not hold it up.
    """
    code = (
        "import sys; from prism.__main__ import main\n"
        "for address in sys.argv[1:]:\n"
        "    print(main('estimate pipeline-8x32 --scheduler-timeout 0.3s --scheduler'.split()\n"
        "               + [address]))"
    )
    with listeners() as others:
        addresses = [*NO_ADDRESSES, *others]
        command = [sys.executable, "-c", code, *addresses]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout.split() == ["2"] * len(addresses), done.stderr
    assert len(lines) == len(addresses), done.stderr
    return dict(zip(addresses, lines, strict=True))


def test_an_address_that_is_none_leaves_one_line_to_the_end(said):
    """Also when the process ends, where Dask would say goodbye to nobody."""
    for address in NO_ADDRESSES:
        assert f"--scheduler {address}: " in said[address]


def test_a_scheduler_that_does_not_answer_is_told_in_words(run, tmp_path):
    options = ("estimate", "pipeline-8x32", "--scheduler-timeout", "0.3s")
    begin = time.monotonic()
    status, _, err = run(*options, "--scheduler", "tcp://127.0.0.1:9")
    assert status == 2 and "tcp://127.0.0.1:9" in err and " 0.3 s" in err
    assert "Traceback" not in err and len(err.splitlines()) == 1
    status, _, err = run(*options, "--scheduler-file", tmp_path / "none.json")
    assert status == 2 and "none.json" in err and " 0.3 s" in err
    (tmp_path / "bad.json").write_text("{}")
    status, _, err = run(*options, "--scheduler-file", tmp_path / "bad.json")
    assert status == 2 and "bad.json" in err and "address" in err
    status, _, err = run(*options, "--scheduler", "nonsense://x")
    assert status == 2 and "nonsense" in err and "Traceback" not in err
    assert time.monotonic() - begin < 15


def test_a_scheduler_without_workers_is_told_in_words(run):
    from distributed import LocalCluster

    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty:
        status, _, err = run(
            "estimate", "pipeline-8x32", "--scheduler-timeout", "1s",
            "--scheduler", empty.scheduler_address,
        )  # fmt: skip
    assert status == 2 and "no worker" in err and "dask worker inproc://" in err


def test_a_port_of_something_else_is_told_within_the_timeout(said):
    others = said.keys() - set(NO_ADDRESSES)
    assert len(others) == len(OTHER_ANSWERS)
    assert all(address in said[address] for address in others)


def test_a_stopped_worker_takes_nothing_with_it(here, short_tasks):
    """Dask ends workers that have been silent for its worker-ttl."""
    import dask
    from distributed import LocalCluster

    stopped = []

    def stop(done, n):
        if 0 < done and not stopped:
            stopped.append(next(iter(workers(place).values())))
            os.kill(stopped[0], signal.SIGSTOP)

    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "5s"}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        prism.run_on(cluster.scheduler_address, timeout_s=300.0) as place,
    ):
        try:
            there = prism.simulate(JOB, **CALL, progress=stop)
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped[0], signal.SIGCONT)
    assert there.to_xarray().drop_attrs().identical(here)
