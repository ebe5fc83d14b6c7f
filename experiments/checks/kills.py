"""What is killed with SIGKILL at random times goes on where it was, with the same bits.

    python experiments/checks/kills.py [N [SEED]]

kills N (20) commands ``prism estimate --resume``, each at a random time of its work, and begins
them again until they end; then the workers of a Dask cluster, N / 4 of them, in the middle of the
same command. It exits with 1 where a figure of the result is not that of the command left alone.
Minutes; needs distributed.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import prism

COMMAND = [sys.executable, "-m", "prism", "estimate", "llama3-70b-fsdp-512", "--replicates",
           "12800", "--run-replicates", "20000", "--seed", "4", "--quiet"]  # fmt: skip


def begin(out: Path, *more) -> subprocess.Popen:
    """Begin the command."""
    words = [*COMMAND, "-o", out, *more]
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL)


def figures(out: Path) -> dict[str, np.ndarray]:
    """Arrays of the result that hold no time of the machine."""
    found = prism.load(out).to_xarray()
    return {str(name): found[name].values for name in (*found.data_vars, *found.coords)}


def apart(wanted: dict[str, np.ndarray], out: Path) -> list[str]:
    """Names of arrays that are not the same to the bit."""
    found = figures(out)
    return [
        name for name in wanted.keys() | found.keys()
        if name not in wanted or name not in found
        or wanted[name].tobytes() != found[name].tobytes()
    ]  # fmt: skip


def kill_commands(n: int, draw: random.Random, folder: Path, wanted: dict, whole_s: float) -> int:
    """Kill commands until n died; how many that were begun again gave another result."""
    killed = wrong = ended = 0
    out, chunks = folder / "killed", folder / "chunks"
    while killed < n:
        process = begin(out, "--resume", chunks)
        try:
            process.wait(timeout=draw.uniform(0.2, 1.0) * whole_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            continue
        ended += 1
        wrong += bool(process.returncode or apart(wanted, out))
    process = begin(out, "--resume", chunks)  # the last one is left alone
    wrong += bool(process.wait() or apart(wanted, out))
    print(f"{killed} commands killed, {ended + 1} ended, {wrong} with other bits; "
          f"chunks left: {chunks.exists()}", flush=True)  # fmt: skip
    return wrong


def kill_workers(n: int, draw: random.Random, folder: Path, wanted: dict, whole_s: float) -> int:
    """Kill a worker of two at a random time of each of n commands; how many gave other bits."""
    from distributed import Client, LocalCluster

    wrong = 0
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        address = cluster.scheduler_address
        with Client(cluster) as client:
            for i in range(n):
                out = folder / f"workers-{i}"
                process = begin(out, "--scheduler", address, "--scheduler-timeout", "120")
                time.sleep(draw.uniform(0.3, 0.9) * whole_s)
                pids = client.run(os.getpid)
                os.kill(draw.choice(sorted(pids.values())), signal.SIGKILL)
                wrong += bool(process.wait() or apart(wanted, out))
    print(f"{n} commands whose worker was killed, {wrong} with other bits", flush=True)
    return wrong


def main() -> int:
    """Kill commands, then workers."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    draw = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        begin(folder / "first").wait()  # compiles
        start = time.monotonic()
        begin(folder / "whole").wait()
        whole_s, wanted = time.monotonic() - start, figures(folder / "whole")
        print(f"left alone: {whole_s:.1f} s, {len(wanted)} arrays", flush=True)
        wrong = kill_commands(n, draw, folder, wanted, whole_s)
        wrong += kill_workers(max(1, n // 4), draw, folder, wanted, whole_s)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
