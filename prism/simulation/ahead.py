"""A second process that compiles part of the engine while this one reads, builds and compiles.

Numba compiles in one thread at a time, and half of it is Python. What the other process keeps is
found when it is needed; where it is late or fails, it is compiled here as well.
"""

import atexit
import os
import subprocess
import sys

from prism import engine
from prism.jobs.job import job_from_dict
from prism.simulation.execution.tasks import cores, is_remote

SMALL = {  # any job would do: arrays have the same types in all
    "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
    "parallelism": {"pp": 2, "microbatches": 2},
    "variability": {"library": None},
}


_asked = False


def compile_ahead() -> None:
    """Start the other process, once, where it is of use."""
    global _asked
    if _asked or engine.is_compiled() or is_remote() or cores() < 2:
        return
    _asked = True
    none = subprocess.DEVNULL
    command = "from prism.simulation.ahead import compile_part; compile_part()"
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


def compile_part() -> None:
    """Compile the other process's part, in that process."""
    global _asked
    _asked = True
    from prism.simulation.prepare import prepare
    from prism.simulation.program import make_keys

    program = prepare(job_from_dict(SMALL), 0).program
    engine.compile_part(program.arrays(track=False), make_keys(0))
