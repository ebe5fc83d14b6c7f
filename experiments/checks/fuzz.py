"""Broken inputs of every kind to every command that reads them: what prism does that it must not.

``python experiments/checks/fuzz.py [N [SEED]]`` feeds N (10,000) inputs of
``tests/fuzz_inputs.py`` to the commands, each in a process of its own that is forked from this one,
which has prism imported and its kernels compiled. ``--only I ...`` makes inputs again, keeps their
files and prints what the command says; ``--kind KIND`` takes the inputs of one kind alone. It exits
with 1 where a bound is broken: a traceback, an internal error, a warning of Python, an answer that
is not one JSON object or holds a figure that is not finite, more than 1.5 GB of memory, more than
60 s of processor time.
"""

import argparse
import contextlib
import gc
import importlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fuzz_inputs import count_controls, find_faults, make_input, make_originals
from job_invariants import BUDGETS

from prism import __main__ as entry

MOST_MEMORY, MOST_SECONDS = 1.5e9, 60.0
ADDRESS_SPACE = 6 << 30  # what a child may reserve, so that a huge input ends that child alone
MOST_WALL = 240.0  # of a child that waits for something that never comes [s]
BROKEN = ("traceback", "internal error", "warning of Python", "refused without a word", "no JSON",
          "nonfinite figure", "memory", "time", "died", "whole, and refused")  # fmt: skip


def call(*arguments):
    """Run a command in this process: status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = entry.main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


def warm_up(originals, seed, folder):
    """Read a whole file of each kind by each command here: children share what is compiled."""
    seen = set()
    for index in range(-count_controls(originals), 0):
        place = folder / str(index)
        place.mkdir(parents=True)
        _, words = make_input(originals, seed, index, place)
        kind = Path(next(word for word in words if str(place) in word)).name
        if (words[0], kind) not in seen:
            seen.add((words[0], kind))
            call(*words)


def run_child(originals, seed, index, folder):
    """Make an input and run its command in this process, a child; never returns."""
    code = 9
    try:
        folder.mkdir()
        kind, words = make_input(originals, seed, index, folder)
        (folder / "words").write_text("\0".join([kind, *words]))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the command's, not the input's
        used = resource.getrusage(resource.RUSAGE_SELF)
        begin = used.ru_utime + used.ru_stime
        (folder / "begin").write_text(str(begin))
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), stream)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        limit = int(begin + MOST_SECONDS + 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        code = entry.main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            (folder / "crash").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def judge(folder, status, usage):
    """Read what a child left: its kind, the command, its faults, what it said."""
    if not (folder / "words").exists():
        return "?", [], ["died"], _text(folder / "crash"), 0, 0
    kind, *words = (folder / "words").read_text().split("\0")
    out, err = (
        (folder / name).read_text(errors="replace") if (folder / name).exists() else ""
        for name in ("out", "err")
    )
    seconds = usage.ru_utime + usage.ru_stime - float((folder / "begin").read_text())
    memory = usage.ru_maxrss * 1024
    faults = []
    if os.WIFSIGNALED(status):
        faults.append("time" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "died")
    else:
        faults += find_faults(words, os.WEXITSTATUS(status), out, err)
        if kind == "whole" and os.WEXITSTATUS(status) != 0:
            faults.append("whole, and refused")
    if (folder / "crash").exists():
        faults.append("traceback")
        err += (folder / "crash").read_text()
    if memory > MOST_MEMORY:
        faults.append("memory")
    if seconds > MOST_SECONDS and "time" not in faults:
        faults.append("time")
    return kind, words, faults, err, seconds, memory


def _text(path):
    return path.read_text() if path.exists() else ""


def run_all(originals, seed, indices, folder, workers, report):
    """Run inputs in a few children at a time."""
    left, running = iter(indices), {}
    while True:
        while len(running) < workers and (index := next(left, None)) is not None:
            place = folder / str(index)
            shutil.rmtree(place, ignore_errors=True)
            child = os.fork()
            if child == 0:
                run_child(originals, seed, index, place)
            running[child] = index, place, time.monotonic()
        if not running:
            return
        child, status, usage = os.wait4(-1, os.WNOHANG)
        if child == 0:
            for pid, (_, _, begin) in running.items():
                if time.monotonic() - begin > MOST_WALL:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            continue
        index, place, _ = running.pop(child)
        report(index, place, os.waitstatus_to_exitcode(status), *judge(place, status, usage))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("n", nargs="?", type=int, default=10_000)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", default=[])
    parser.add_argument("--kind", help="inputs of this kind alone, such as import")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="folder of whole files, made where it is not")
    parser.add_argument("--times", action="store_true", help="print every input's")
    asked = parser.parse_args()
    for place, value in BUDGETS.items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)
    folder = Path(tempfile.mkdtemp(prefix="prism-fuzz-"))
    begin = time.perf_counter()
    originals = make_originals(asked.keep or folder / "whole", call)
    originals = [o for o in originals if asked.kind in (None, o.kind)]
    print(f"{len(originals)} whole files: {time.perf_counter() - begin:.0f} s", flush=True)
    warm_up(originals, asked.seed, folder / "warm")
    print(f"kernels compiled: {time.perf_counter() - begin:.0f} s", flush=True)
    gc.freeze()  # a collection in a child would copy all that it shares with this process
    statuses, faults, slowest = defaultdict(Counter), defaultdict(Counter), Counter()
    largest, spent = Counter(), defaultdict(Counter)

    def report(index, place, status, kind, words, found, err, seconds, memory):
        statuses[kind][status] += 1
        statuses[kind]["n"] += 1
        faults[kind].update(found)
        slowest[index], largest[index] = seconds, memory
        if index > 0 and index % 500 == 0:
            spoilt = sum(sum(row.values()) for row in faults.values())
            print(f"{index} inputs: {spoilt} faults", flush=True)
        spent[words[0] if words else "?"].update({"n": 1, "s": seconds})
        if asked.times:
            print(
                f"{index} {seconds:.1f} s {memory / 1e9:.2f} GB {' '.join(words)[:150]}", flush=True
            )
        if found or asked.only:
            last = err.strip().splitlines()[:3]
            print(f"{index} {kind}: {', '.join(found)}: prism {' '.join(words)}\n    "
                  + "\n    ".join(line[:300] for line in last), flush=True)  # fmt: skip
            if asked.only:
                print(err)
                with contextlib.suppress(OSError):
                    print((place / "out").read_text()[:3000])
        else:
            shutil.rmtree(place, ignore_errors=True)

    first = asked.first
    indices = asked.only or [
        *range(-count_controls(originals) if first == 0 else 0, 0), *range(first, first + asked.n),
    ]  # fmt: skip
    workers = asked.workers
    with contextlib.suppress(KeyboardInterrupt):
        run_all(originals, asked.seed, indices, folder, workers, report)
    names = [name for name in BROKEN if any(row[name] for row in faults.values())]
    print(f"| kind | inputs | answered | refused | {' | '.join(names)} |")
    print("|---" * (4 + len(names)) + "|")
    for kind in sorted(statuses):
        row = statuses[kind]
        cells = [kind, row["n"], row[0], row[2], *(faults[kind][name] for name in names)]
        print("| " + " | ".join(map(str, cells)) + " |")
    total = sum((row for row in faults.values()), Counter())
    n = sum(row["n"] for row in statuses.values())
    print(f"{n} inputs, {time.perf_counter() - begin:.0f} s; faults: {dict(total) or 'none'}")
    print("mean:", ", ".join(f"{k} {c['s'] / c['n']:.2f} s" for k, c in sorted(spent.items())))
    print(f"largest {max(largest.values(), default=0) / 1e9:.2f} GB, slowest:",
          ", ".join(f"{i} ({s:.1f} s)" for i, s in slowest.most_common(3)))  # fmt: skip
    if total:
        print(f"again: python {sys.argv[0]} {asked.n} {asked.seed} --only INDEX; files: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
