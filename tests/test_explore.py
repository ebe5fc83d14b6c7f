"""prism explore: controls and jobs, refusals at their controls, and the process that answers."""

import asyncio
import contextlib
import html
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest

import prism
from prism import PrismError, load_job
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.present.explore import controls
from prism.present.explore.computing import (
    FIRST,
    REFINED,
    EndedError,
    Question,
    Stage,
    answer_stages,
    compute,
)

SMALL = "pipeline-8x32"
BASE = "llama3-70b-fsdp-512"


@pytest.fixture(scope="module")
def unranked():
    """A job whose answer has no ranking and no run: it is there sooner."""
    return load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "variability": {"library": None, "dependence": "none"},
    })  # fmt: skip


def alive(mark):
    """Processes with a mark in their environment, also those whose parent has ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def gone(mark):
    """Wait until what was killed is taken away, which it is soon."""
    end = time.monotonic() + 2
    while alive(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(mark)


@pytest.mark.parametrize("name", shipped_jobs())
def test_controls_that_are_left_alone_change_nothing(name):
    job = load_job(name)
    shown = controls.values_of(job)
    assert controls.overrides(job, shown) == {} and controls.build(job, shown) is job
    assert shown["gpus"] == job.world_size and tuple(shown) == controls.KEYS


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [({"gpus": 1024}, (1, 1, 1024, 128)), ({"parallelism.tp": 8}, (8, 1, 64, 64)),
     ({"parallelism.tp": 4, "gpus": 256}, (4, 1, 64, 32)),
     ({"cluster.gpus_per_node": 4}, (1, 1, 512, 128))],
)  # fmt: skip
def test_replicas_and_nodes_follow_from_the_gpus(changed, sizes):
    job = controls.build(load_job(BASE), changed)
    p = job.parallelism
    assert (p.tp, p.pp, p.dp, job.n_nodes) == sizes


def test_what_follows_is_shown_as_it_is_simulated(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("base: llama31-405b-h100-512\nparallelism: {global_batch: 4608}\n")
    base, changed = load_job(file), {}
    assert controls.values_of(base)["parallelism.microbatches"] == 1152

    def turn(key, value):
        nonlocal changed
        changed = controls.change(base, changed, key, value)
        job = controls.build(base, changed)
        shown = controls.values_of(job) | changed
        assert shown == controls.values_of(job)  # what is shown is what is simulated
        return job

    assert turn("gpus", 2048).parallelism.microbatches == 288
    assert turn("parallelism.microbatches", 1152).parallelism.microbatches == 1152
    assert turn("parallelism.microbatches", 288).parallelism.global_batch == 4608
    assert turn("gpus", 1024).parallelism.microbatches == 576 and changed == {"gpus": 1024}
    assert turn("cluster.device", "b200").variability.library == "b200-healthy"
    assert turn("variability.library", "h100-healthy").variability.library == "h100-healthy"
    assert turn("variability.library", "b200-healthy").variability.library == "b200-healthy"
    assert turn("cluster.device", "h100").variability.library == "h100-healthy"
    assert turn("gpus", 512) is base and changed == {}


@pytest.mark.parametrize("changed", [
    {"gpus": 1024, "variability.effects.rank.cv": 0.02}, {"model.name": "llama3-8b"},
    {"cluster.device": "b200"}, {"run.checkpoint.interval": "10min", "run.steps": 100},
    {"parallelism.precision": "fp8", "variability.library": "none"}, {},
])  # fmt: skip
def test_the_job_file_and_the_command_give_the_same_job(changed, tmp_path):
    base = load_job(BASE)
    job, keys = controls.build(base, changed), controls.overrides(base, changed)
    file = tmp_path / "job.yaml"
    file.write_text(controls.job_file(base, keys))
    words = controls.command("estimate", base, keys, "--seed", "1").split()
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert words[:3] == ["prism", "estimate", BASE]
    for again in (load_job(file), load_job(BASE, sets)):
        for block in ("model", "cluster", "parallelism", "variability", "run"):
            assert getattr(again, block) == getattr(job, block)


@pytest.mark.parametrize(
    ("changed", "at"),
    [({"gpus": 100}, "gpus"), ({"parallelism.tp": 3}, "parallelism.tp"),
     ({"run.deadline": "soon"}, "run.deadline"), ({"gpus": None}, "gpus"),
     ({"variability.effects.rank.cv": -1.0}, "variability.effects.rank.cv"),
     ({"parallelism.pp": 1024}, "parallelism.pp")],
)  # fmt: skip
def test_what_is_wrong_is_said_at_its_control(changed, at):
    with pytest.raises(PrismError) as refused:
        controls.build(load_job(BASE), changed)
    assert at in controls.place_messages(refused.value)


def test_random_settings_make_a_job_or_are_refused():
    base, rng, found = load_job(BASE), random.Random(1), {True: 0, False: 0}
    wild = (None, 0, 1, 2, 3, 8, 64, 1000, 1 << 20, -1, 0.5, 1e9, "", "x", "10min", True)
    for _ in range(300):
        changed = {}
        for key in rng.sample(controls.KEYS, 2):
            choices = controls.control(key).choices
            changed[key] = rng.choice(choices or wild)
        try:
            controls.build(base, changed)
            found[True] += 1
        except PrismError as error:
            assert controls.place_messages(error)
            found[False] += 1
    assert min(found.values()) >= 30


def stages_of(question):
    return [told for told in answer_stages(question) if isinstance(told, Stage)]


def test_stages_are_those_of_the_commands():
    job = load_job(SMALL)
    first, second, ranking = stages_of(Question(job, 3, 1))
    assert (first.panel, second.panel, ranking.panel) == ("answer", "answer", "ranking")
    assert (first.replicates, second.replicates) == (FIRST, REFINED)

    p50 = prism.summary(prism.simulate(job, FIRST, seed=3))["step_time"]["p50"]
    assert f"{p50:.1f}" in first.html
    run = prism.estimate(job, replicates=REFINED, seed=3)
    assert np.array_equal(second.result.step_time, run.step_time)
    assert prism.summary(second.result)["step_time"] == prism.summary(run)["step_time"]
    assert "<img" in second.html
    found = prism.answer(prism.rank(job, seed=3)).findings[0]
    assert html.escape(" ".join(found.text.split()[:4])) in ranking.html
    other = load_job(SMALL, ["parallelism.pp=4"])
    panels = {told.panel: told.html for told in stages_of(Question(other, 3, 1, run))}
    compared = prism.compare(run, prism.estimate(other, replicates=REFINED, seed=3), seed=3)
    figures = prism.summary(compared)["quantities"]["step_time"]
    assert figures["paired_by"] == "cluster"  # the same random numbers
    assert "parallelism.pp" in panels["beside"]
    for found in prism.answer(compared).findings[:1]:
        assert html.escape(" ".join(found.text.split()[:6])) in panels["beside"]


def test_a_process_that_is_killed_is_noticed_and_another_answers(unranked):
    async def first(question, kill=()):
        told = []
        async for one in compute(question):
            told.append(one)
            for pid in kill and set(children()) - server:
                os.kill(pid, signal.SIGKILL)
        return told

    def children():
        return [process.pid for process in multiprocessing.active_children()]

    server = set(children())
    with pytest.raises(EndedError):
        asyncio.run(first(Question(load_job(BASE), 1, 1), kill=True))
    told = asyncio.run(first(Question(unranked, 1, 1)))
    assert [one.replicates for one in told if isinstance(one, Stage)] == [FIRST, REFINED]

    async def left():
        told = compute(Question(load_job(BASE), 1, 1))
        await anext(told)
        assert set(children()) - server
        await told.aclose()

    asyncio.run(left())
    assert not set(children()) - server


def test_what_is_refused_in_the_process_is_told(unranked):
    async def ask():
        return [told async for told in compute(Question(load_job(SMALL), -1, 1))]

    with pytest.raises(PrismError):
        asyncio.run(ask())


def test_a_page_needs_its_port_and_its_extra(run, monkeypatch):
    assert run("explore", SMALL, "--json")[0] == 2
    assert run("explore", "no-such-job")[0] == 2
    pytest.importorskip("nicegui", reason="needs the extra app")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("explore", SMALL, "--port", str(port), "--no-browser")
    assert code == 2 and f"--port {port}" in err


class Served:
    """A page served by a process of its own, and whatever that starts."""

    def __init__(self, job):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.mark = f"http://127.0.0.1:{self.port}", uuid.uuid4().hex
        command = [sys.executable, "-m", "prism", "explore", job, "--port", str(self.port)]
        env = os.environ | {"PRISM_TEST_MARK": self.mark}
        for name in [name for name in env if name.startswith("PYTEST")]:
            del env[name]  # by which NiceGUI would take itself to be tested
        self.process = subprocess.Popen(
            [*command, "--no-browser", "-q", "--threads", "1"], env=env, start_new_session=True
        )
        end = time.monotonic() + 60
        while self.status() != b"200":
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.1)

    def status(self, path="/", **headers):
        """Ask for a path: the status of the answer, None where there is no answer."""
        given = {"Host": f"127.0.0.1:{self.port}"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items()), "", ""]
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as asked:
                asked.sendall("\r\n".join(lines).encode())
                return asked.recv(64).split()[1]

    def end(self, number):
        """Send one signal: the status within 5 s, and whether nothing is left."""
        self.process.send_signal(number)
        return self.process.wait(5), gone(self.mark)


@pytest.fixture
def served():
    pytest.importorskip("nicegui", reason="needs the extra app")
    pages = []

    def serve(job):
        pages.append(Served(job))
        return pages[-1]

    yield serve
    for page in pages:
        for pid in alive(page.mark):
            os.kill(pid, signal.SIGKILL)
        page.process.wait()


UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13",
           "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport="


def test_pages_that_nobody_opens_cost_nothing_and_another_site_is_refused(served):
    page = served(SMALL)
    port, evil = page.port, "http://evil.example"
    for url in [page.url] * 60:
        assert urllib.request.urlopen(url, timeout=5).status == 200
    assert len(alive(page.mark)) <= 3  # itself, the one that is kept, Python's of semaphores
    own = {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"}
    for path, more in ((SOCKET + "polling", {}), (SOCKET + "websocket", UPGRADE)):
        good = b"101" if more else b"200"
        assert page.status(path, **more) == page.status(path, **more, **own) == good
        for origin in (evil, "null", "http://127.0.0.1", f"https://127.0.0.1:{port}"):
            assert page.status(path, **more, Origin=origin) == b"403"
        for host in ("evil.example", f"evil.example:{port}"):
            assert page.status(path, **more, Host=host, Origin=f"http://{host}") in (b"400", b"403")
    assert page.status(Origin=evil) == b"403"
    assert page.end(signal.SIGTERM) == (0, True)


def test_windows_are_answered_one_by_one_and_a_signal_ends_all(served):
    socketio = pytest.importorskip("socketio")
    pytest.importorskip("aiohttp")
    page, most = served(BASE), 0

    async def open_window():
        text = urllib.request.urlopen(page.url, timeout=5).read().decode()
        client = re.search(r"client_id[^\w]+([\w-]{20,})", text)[1]
        ids = f"client_id={client}&tab_id=t{client}&document_id=d{client}"
        window = socketio.AsyncClient()
        url = f"{page.url}?{ids}&implicit_handshake=true&next_message_id=0"
        await window.connect(
            url, socketio_path=SOCKET.split("?")[0], transports=["websocket"], wait_timeout=30
        )
        return window

    async def look():
        nonlocal most
        windows = [await open_window() for _ in range(4)]
        end = time.monotonic() + 120
        while most < 4 and time.monotonic() < end:
            await asyncio.sleep(0.1)
            most = max(most, len(alive(page.mark)))
        await asyncio.sleep(0.5)
        most = max(most, len(alive(page.mark)))
        ended = await asyncio.to_thread(page.end, signal.SIGINT)
        for window in windows:
            await window.disconnect()
        return ended

    assert asyncio.run(look()) == (0, True) and most == 4
