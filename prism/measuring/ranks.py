"""Several processes that meet through torch.distributed: started, watched, ended together.

Each rank is a Python process of its own, as in training; the first one tells how far it is on its
standard output. Under a launcher (torchrun, srun with MASTER_ADDR) this process is a rank itself,
so that several machines can take part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prism
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.measuring.session import Progress
from prism.measuring.torchlib import load_torch

Spec = dict[str, Any]

_POLL_S = 0.05
_GRACE_S = 3.0
_PROGRESS = "progress "
_TIMEOUT_S = 600.0  # of one collective: ranks of a loaded machine may be late, not forever


def under_launcher() -> bool:
    """Tell whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launch(spec: Spec, progress: Progress | None = None) -> bool:
    """Run a task on all its ranks and wait for them."""
    if under_launcher():
        rank = int(os.environ["RANK"])
        run_rank(spec | {"rendezvous": "env://", "ranks": int(os.environ["WORLD_SIZE"])}, rank,
                 progress if rank == 0 else None)  # fmt: skip
        return rank == 0
    with tempfile.TemporaryDirectory(prefix="prism-ranks-") as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec | {"rendezvous": f"file://{folder}/rendezvous"}))
        errors = [Path(folder) / f"rank{rank}.err" for rank in range(spec["ranks"])]
        with _started(path, errors, spec) as processes:
            _watch(processes, errors, progress)
    return True


@contextmanager
def _started(path: Path, errors: list[Path], spec: Spec) -> Iterator[list[subprocess.Popen[str]]]:
    """Start all ranks, and leave none behind."""
    env = dict(os.environ)
    root = str(Path(prism.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    env["OMP_NUM_THREADS"] = str(spec["threads"])
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine, whatever its name
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, error in enumerate(errors):
            command = [sys.executable, "-m", "prism.measuring.rankprocess", str(path), str(rank)]
            with error.open("w") as stderr:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
                    env=env, text=True, start_new_session=True,
                )  # fmt: skip
            processes.append(process)
        yield processes
    finally:
        _end(processes)


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """End what still runs: first asked, which lets the first rank keep its samples, then killed."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _watch(
    processes: list[subprocess.Popen[str]], errors: list[Path], progress: Progress | None
) -> None:
    """Pass progress on until all ranks are done; one that fails ends all."""
    reader = threading.Thread(target=_read, args=(processes[0], progress), daemon=True)
    reader.start()
    while any(process.poll() is None for process in processes):
        failed = [i for i, process in enumerate(processes) if process.poll()]
        if failed:
            time.sleep(4.0 * _POLL_S)  # the others fail of the first one's failure
            break
        time.sleep(_POLL_S)
    codes = [process.poll() for process in processes]
    reader.join(_GRACE_S if not any(codes) else 0.0)
    for rank, code in enumerate(codes):
        if code:
            lines = [x for x in errors[rank].read_text(errors="replace").splitlines() if x.strip()]
            why = lines[-1] if lines else f"it ended with status {code}"
            raise PrismError(f"rank {rank} of {len(processes)} failed: {why}")


def _read(process: subprocess.Popen[str], progress: Progress | None) -> None:
    """Read the first rank's output to its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if progress is not None and line.startswith(_PROGRESS):
            done, total = line[len(_PROGRESS) :].split()
            progress(int(done), int(total))


def tell_progress(done: int, total: int) -> None:
    """Tell the process that started this one how far it is."""
    print(f"{_PROGRESS}{done} {total}", flush=True)


def run_rank(spec: Spec, rank: int, progress: Progress | None) -> None:
    """Take part in a task as one of its ranks."""
    from datetime import timedelta

    torch = load_torch()
    torch.set_num_threads(int(spec["threads"]))
    given: dict[str, Any] = {"timeout": timedelta(seconds=_TIMEOUT_S)}
    if spec["device"] == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        given["device_id"] = torch.device("cuda", local)
    torch.distributed.init_process_group(
        spec["backend"], init_method=spec["rendezvous"], rank=rank, world_size=spec["ranks"],
        **given,
    )  # fmt: skip
    try:
        from prism.measuring.collectives import measure_rank

        measure_rank(spec, rank, torch, progress)
    finally:
        torch.distributed.destroy_process_group()


def choose_backend(device: str, ranks: int) -> str:
    """Return ``nccl`` where every rank has a GPU, ``gloo`` on processors."""
    if device != "cuda":
        return "gloo"
    found = int(load_torch().cuda.device_count())
    if ranks > found and not under_launcher():
        raise PrismError(
            f"--ranks {ranks}: this machine has {format_count(found, 'GPU')}, and NCCL takes "
            f"one rank each; use --ranks {found}, or --device cpu"
        )
    return "nccl"
