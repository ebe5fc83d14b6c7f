"""A second process that compiles most of the engine while this one reads, builds and compiles.

Numba compiles in one thread at a time, and half of it is Python. What the other process keeps is
found when it is needed; where it is late or fails, it is compiled here as well.
"""

import atexit
import os
import subprocess
import sys
from contextlib import suppress

from prism import engine
from prism.simulation.execution.tasks import is_remote

WAIT_S = 60.0  # for the other process, which is about as quick as this one
_asked = False
_other: "subprocess.Popen[bytes] | None" = None


def compile_ahead() -> None:
    """Start the other process, once, where it is of use, and compile what it waits for first."""
    global _asked, _other
    if _asked or engine.is_compiled() or is_remote():
        return
    _asked = True
    none = subprocess.DEVNULL
    command = f"from {engine.__name__} import compile_blocks; compile_blocks()"
    try:
        _other = subprocess.Popen(  # -P: modules of the folder it is in are not looked at
            [sys.executable, "-P", "-c", command], stdin=none, stdout=none, stderr=none,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
    except OSError:
        return
    atexit.register(_end, _other)
    engine.compile_rest()


def finish_ahead() -> None:
    """Wait for the other process, if one was started."""
    global _other
    if _other is not None:
        other, _other = _other, None
        with suppress(subprocess.TimeoutExpired):
            other.wait(WAIT_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
