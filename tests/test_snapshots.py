"""One recorded JSON answer a command: names, structure and figures are as they were.

    python tests/test_snapshots.py          # records them anew; look at the difference

What commands print as text is recorded in README.md and docs/, which
`experiments/checks/documentation.py` runs and compares.
"""

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest

from prism import __main__ as entry

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTS = Path(__file__).parent / "snapshots"
INSTALLED = Path(entry.__file__).parent / "_data"  # where a wheel has the shipped jobs
SAMPLES = "experiments/samples"
OF_THE_MACHINE = {
    "wall_seconds", "cpu_seconds", "seconds", "ns_per_op_sample", "threads", "prism_version",
    "versions", "bytes", "created", "sha256", "library_sha256",
}  # fmt: skip
DATE = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\+00:00)?)?")  # watch: of the file
SMALL = ("pipeline-8x32", "--set", "parallelism={pp: 2, dp: 2, microbatches: 4}")
FEW = ("--replicates", "128", "--seed", "1")
TRACE, STEPS = f"{SAMPLES}/trace.csv", f"{SAMPLES}/steps.csv"
COMMANDS = {
    "import": ("import", "tests/snapshots/megatron.sh"),
    "estimate": ("estimate", *SMALL, *FEW, "--run-replicates", "20", "--deadline", "2h"),
    "rank": ("rank", *SMALL, "--seed", "1"),
    "place": (
        "place", *SMALL, "--set", "cluster={gpus_per_node: 1, nodes: 4}",
        "--slow-nodes", "1", "--slowdown", "1.2", "--seed", "1",
    ),
    "sweep": ("sweep", *SMALL, "--vary", "parallelism.microbatches=4,8", *FEW),
    "timeline": ("timeline", *SMALL, *FEW),
    "fit": ("fit", TRACE, "--seed", "1"),
    "fit, steps": ("fit", STEPS, "--seed", "1"),
    "replay": ("replay", TRACE),
    "replay, kineto": ("replay", f"{SAMPLES}/kineto"),
    "validate": ("validate", "--trace", TRACE, "--train", "first-half", *FEW, "--bootstrap", "19"),
    "compare": ("compare", STEPS, STEPS, "--seed", "1"),
    "watch": ("watch", STEPS, "--once", "--steps", "2000", "--seed", "1"),
    "schedule": (
        "schedule", "interleaved", "--stages", "2", "--microbatches", "4", "--chunks", "2",
    ),
    "kernel": ("kernel", "gemm", "--device", "h100", "--m", "4096", "--n", "4096", "--k", "8192"),
    "show, job": ("show", "llama3-70b-fsdp-512"),
    "show, trace": ("show", TRACE),
}  # fmt: skip


def answer_of(arguments):
    """Run a command in the checkout with --json; what it prints on stdout."""
    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        with contextlib.redirect_stderr(io.StringIO()):
            status = entry.main([*arguments, "--json"])
    assert status == 0, arguments
    return told(json.loads(out.getvalue()))


def told(value):
    """Leave out what differs by machine and day; paths within the checkout; 9 digits."""
    if isinstance(value, dict):
        return {key: told(x) for key, x in value.items() if key not in OF_THE_MACHINE}
    if isinstance(value, list):
        return [told(x) for x in value]
    if isinstance(value, str):
        value = value.replace(f"{INSTALLED}/", "experiments/").replace(f"{ROOT}/", "")
        return DATE.sub("DATE", value)
    return float(f"{value:.9g}") if isinstance(value, float) else value


def differences(was, now, place=""):
    """Where two answers differ, numbers by more than a millionth."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            if key in was and key in now:
                yield from differences(was[key], now[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}: {'gone' if key in was else 'new'}"
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, pair in enumerate(zip(was, now, strict=True)):
            yield from differences(*pair, f"{place}[{i}]")
    elif isinstance(was, int | float) and isinstance(now, int | float):
        if not math.isclose(was, now, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{place}: {was} -> {now}"
    elif was != now:
        yield f"{place}: {was!r} -> {now!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_answers_are_as_recorded(name):
    was = json.loads((SNAPSHOTS / f"{name}.json").read_text())
    assert list(differences(was, answer_of(COMMANDS[name]))) == []


def test_a_difference_is_found():
    was = json.loads((SNAPSHOTS / "schedule.json").read_text())
    assert list(differences(was, was | {"idle_fraction": 0.5, "more": 1})) != []


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for name, arguments in COMMANDS.items():
        text = json.dumps(answer_of(arguments), indent=1) + "\n"
        (SNAPSHOTS / f"{name}.json").write_text(text)
