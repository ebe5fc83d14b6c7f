"""A `prism` command that starts at once: a fork of a process that has loaded everything.

Loading takes 1 to 3 s of processor time, which a page with ten commands pays ten times. `served`
gives a folder for the front of PATH whose `prism` sends its words, folder, environment and
streams to the process kept, and waits for the exit status. What is run is the same `main`; a
command that is killed takes its fork with it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CLIENT = """#!{python} -ISE
import array, json, os, socket, sys
there = socket.socket(socket.AF_UNIX)
there.connect({address!r})
words = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
streams = array.array("i", [0, 1, 2])
there.sendmsg([len(words).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
there.sendall(words)
status = there.recv(1)
sys.exit(status[0] if status else 1)
"""


@contextlib.contextmanager
def served(environment: dict[str, str]) -> Iterator[Path]:
    """Folder with a `prism` that is a fork of a process started in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        command = Path(folder) / "bin" / "prism"
        command.parent.mkdir()
        command.write_text(CLIENT.format(python=sys.executable, address=address))
        command.chmod(0o755)
        line = [sys.executable, __file__, address]
        with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as server:  # fmt: skip
            try:
                if server.stdout is None or server.stdout.readline() != b"ready\n":
                    raise RuntimeError("the process that commands are forks of did not start")
                yield command.parent
            finally:
                server.terminate()


def load() -> None:
    """Import what commands need, and the compiled engine."""
    import importlib
    import pkgutil

    import matplotlib.pyplot  # noqa: F401

    import prism

    for found in pkgutil.walk_packages(prism.__path__, "prism."):
        if not found.name.startswith(
            ("prism.present.explore", "prism.measuring", "prism.__main__")
        ):
            importlib.import_module(found.name)
    prism.simulate("pipeline-8x32", replicates=64, seed=1, threads=1)


def receive(connection: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """Words, folder, environment and streams of a command."""
    streams = array.array("i")
    head, rights, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * streams.itemsize))
    for _, _, data in rights:
        streams.frombytes(data)
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(connection.recv(min(left, 1 << 16)))
        left -= len(parts[-1])
    words, folder, environment = json.loads(b"".join(parts))
    return words, folder, environment, list(streams)


def run(words: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Be the command, to its end."""
    from prism.__main__ import main

    for own, given in enumerate(streams):
        os.dup2(given, own)
        os.close(given)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv = ["prism", *words]
    status = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def answer(connection: socket.socket) -> None:
    """Run a command in a fork, and send its status; end it where nobody waits for that."""
    asked = receive(connection)
    process = os.fork()
    if not process:
        connection.close()
        run(*asked)
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(bytes([status if status >= 0 else 128 - status]))


def end_answers(*_: object) -> None:
    """Wait for answers that were given, so that their processor time is counted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(address: str) -> None:
    """Answer until the process that started this one is gone."""
    load()
    signal.signal(signal.SIGCHLD, end_answers)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                answer(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
