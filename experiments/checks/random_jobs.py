"""Random job files through estimate, rank, place and sweep: what is taken, what is broken.

``python experiments/checks/random_jobs.py [N [SEED]]`` draws N (1,000) job files as
``tests/test_random_jobs.py`` draws 12, runs the four commands in this process with that test's
small budgets (``PRISM_FULL=1``: with their own), and prints every invariant that does not hold with
its file, which is kept, a digest of all answers, and what memory the process held after each tenth
of the files. It exits with 1 if there is one. Ctrl-C or SIGTERM ends it with what there is by then.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import hypothesis
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from job_files import job_files
from job_invariants import BUDGETS, check_job

from prism import __main__ as entry

PAGE = os.sysconf("SC_PAGE_SIZE")
TIMINGS = "wall_seconds|cpu_seconds|seconds|ns_per_op_sample"
PRINTED = hashlib.sha256()
"""Of all that was answered: the same under every PYTHONHASHSEED."""


def call(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = entry.main([str(argument) for argument in arguments])
    if status == 130:  # the command was interrupted, so all are
        raise KeyboardInterrupt
    PRINTED.update(re.sub(rf'"({TIMINGS})": [^,}}]+', "", out.getvalue()).encode())
    return status, out.getvalue(), err.getvalue()


def main(n: int, seed: int) -> int:
    if not os.environ.get("PRISM_FULL"):
        for place, value in BUDGETS.items():
            module, _, name = place.rpartition(".")
            assert hasattr(importlib.import_module(module), name), place
            setattr(importlib.import_module(module), name, value)
    folder = Path(tempfile.mkdtemp(prefix="random-jobs-"))
    taken, broken, slowest, begin = Counter(), [], Counter(), time.perf_counter()
    held: list[int] = []  # resident memory [MiB]

    @hypothesis.settings(
        max_examples=n, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.seed(seed)
    @hypothesis.given(job_files())
    def draw(tree):
        taken["files"] += 1
        if taken["files"] % max(1, n // 10) == 0:
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE // 2**20)
            print(f"{taken['files']} of {n} files, {len(broken)} broken", flush=True)
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                taken.update(k for k, done in check_job(call, tree, folder).items() if done)
        except Exception as error:
            kept = folder / f"broken-{len(broken)}.yaml"
            kept.write_text(yaml.safe_dump(tree, sort_keys=False))
            broken.append((kept, error))
            print(f"{kept}: {type(error).__name__}: {error}", flush=True)
        slowest[json.dumps(tree)] = time.perf_counter() - start

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what there is by then
        draw()
    print(", ".join(f"{name} {count}" for name, count in taken.items()))
    print(f"answers {PRINTED.hexdigest()[:16]}")
    print(f"resident memory {held} MiB")
    print(f"{len(broken)} broken; {time.perf_counter() - begin:.0f} s; slowest:")
    for tree, seconds in slowest.most_common(3):
        print(f"  {seconds:.1f} s {tree[:300]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(*(int(x) for x in (sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1 :])[:2])))
