"""A second process that compiles part of the engine while this one reads, builds and compiles.

Numba compiles in one thread at a time, and half of it is Python. What the other process keeps is
found when it is needed; where it is late or fails, it is compiled here as well.
"""

import atexit
import os
import subprocess
import sys

from prism import engine
from prism.simulation.execution.tasks import cores, is_remote

_asked = False


def compile_ahead() -> None:
    """Start the other process, once, where it is of use."""
    global _asked
    if _asked or engine.is_compiled() or is_remote() or cores() < 2:
        return
    _asked = True
    none = subprocess.DEVNULL
    command = f"from {engine.__name__} import compile_part; compile_part()"
    try:
        process = subprocess.Popen(  # -P: modules of the folder it is in are not looked at
            [sys.executable, "-P", "-c", command], stdin=none, stdout=none, stderr=none,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
    except OSError:
        return
    atexit.register(_end, process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
