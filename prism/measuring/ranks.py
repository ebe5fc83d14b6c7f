"""Several processes that meet through torch.distributed: started, watched, ended together.

Each rank is a Python process of its own, as in training (this module, run by its name); the first
one tells how far it is on its standard output, and what a user can correct comes out as the last
line of a rank's stderr. Under a launcher (torchrun, srun with MASTER_ADDR) this process is a rank
itself, so that several machines can take part.
"""

from __future__ import annotations

import os
import signal
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
from prism.measuring.collectives import measure_rank
from prism.measuring.machine import load_torch
from prism.measuring.samples import Samples, load_samples, save_samples
from prism.measuring.session import Progress

_POLL_S = 0.05
_GRACE_S = 3.0
_PROGRESS = "progress "
_TIMEOUT_S = 600.0  # of one collective: ranks of a loaded machine may be late, not forever


def under_launcher() -> bool:
    """Tell whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def world_size(ranks: int) -> int:
    """Ranks that meet: as many as a launcher started, else as many as asked for."""
    world = int(os.environ["WORLD_SIZE"]) if under_launcher() else ranks
    if world < 2:
        raise PrismError(f"--ranks {world}: a collective needs 2 or more")
    return world


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


def measure_ranks(samples: Samples, file: Path | None, progress: Progress | None) -> Samples | None:
    """Measure collectives between as many processes as the cases say, and wait for them.

    None on ranks that leave the result to the first; samples are kept in a file where one is named.
    """
    if under_launcher():
        rank = int(os.environ["RANK"])
        found = run_rank(samples, rank, "env://", file, progress)
        return found if rank == 0 else None
    ranks = int(samples.cases[0].settings["ranks"])
    with tempfile.TemporaryDirectory(prefix="prism-ranks-") as folder:
        start, target = Path(folder) / "start.nc", file or Path(folder) / "samples.nc"
        save_samples(samples, start)
        files = [str(start), str(target.absolute()), f"file://{folder}/rendezvous"]
        errors = [Path(folder) / f"rank{rank}.err" for rank in range(ranks)]
        with _started(files, errors, samples.attrs["threads"]) as processes:
            _watch(processes, errors, progress)
        return load_samples(target)


@contextmanager
def _started(
    files: list[str], errors: list[Path], threads: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start all ranks, and leave none behind."""
    env = dict(os.environ)
    root = str(Path(prism.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH", ""))))
    env["OMP_NUM_THREADS"] = str(threads)
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine, whatever its name
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, error in enumerate(errors):
            command = [sys.executable, "-m", "prism.measuring.ranks", *files, str(rank)]
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
        if any(process.poll() for process in processes):
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


def run_rank(
    samples: Samples, rank: int, rendezvous: str, file: Path | None, progress: Progress | None
) -> Samples:
    """Meet the other ranks and measure with them; the first keeps the samples."""
    from datetime import timedelta

    torch, settings = load_torch(), samples.cases[0].settings
    torch.set_num_threads(int(samples.attrs["threads"]))
    given: dict[str, Any] = {"timeout": timedelta(seconds=_TIMEOUT_S)}
    if settings["backend"] == "nccl":
        local = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        given["device_id"] = torch.device("cuda", local)
    torch.distributed.init_process_group(
        settings["backend"], init_method=rendezvous, rank=rank, world_size=settings["ranks"],
        **given,
    )  # fmt: skip
    try:
        keep = None if rank or file is None else lambda now: save_samples(now, file)
        return measure_rank(samples, rank, torch, None if rank else progress, keep)
    finally:
        torch.distributed.destroy_process_group()


def _tell(done: int, total: int) -> None:
    """Tell the process that started this one how far it is."""
    print(f"{_PROGRESS}{done} {total}", flush=True)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _main(start: str, target: str, rendezvous: str, rank: str) -> int:
    """Run one rank; 0 when done, 2 where the user can correct what went wrong."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        run_rank(load_samples(start), int(rank), rendezvous, Path(target), _tell)
    except PrismError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    status = _main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # without torch's teardown: threads of its backend may still run, and end the process with
    # "terminate called without an active exception" after all work is done
    os._exit(status)
