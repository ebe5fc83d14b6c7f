"""Libraries, models, pipes and compiled code that are spoilt: refused, or answered as if whole.

``python experiments/checks/fuzz_loaded.py [N [SEED]]`` makes N (1,000) inputs: a library with
one figure, distribution or table spoilt, a model of a trace or of step times with one array or
scalar spoilt (each sealed anew, as a program writes it), a job, table or host list through a pipe,
and, one in fifty, a file of compiled code that is emptied, cut, overwritten or has one bit flipped,
in a process of its own. ``--kind KIND`` takes one kind. Faults, beside those of ``fuzz.py``: a mean
step below the ideal one without a warning, a pipe that is answered otherwise than its file, a
damaged cache that changes an answer or its status, a whole model or library that is refused. It
exits with 1 where there is any.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import numpy as np
import pipeline_synth
import steps_made
from fuzz_inputs import DURATIONS, JOB, find_faults

import prism
from prism import __main__ as entry
from prism.common.resultfiles import save
from prism.distributions.library import library_names, load_library, save_library, to_dataset

COMMON = "--seed", "7", "--threads", "1", "--json", "-q"
FEW = "--replicates", "128", "--run-replicates", "8"
VALUES = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e12, 1e99, 1e300, 0.5, 2.0)
ERRORS = 6.0  # standard errors of the mean step, as `prism.simulation.jobwarnings`
OTHERS = "figure", "distribution", "table", "trace_model", "steps_model", "pipe"


def call(*words):
    """Run a command in this process: status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = entry.main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def is_number(variable):
    """Whether a variable holds numbers."""
    return variable.dtype.kind in "if" and variable.size > 0


def spoil(dataset, names, rng):
    """Put another value into one number of one of the variables or attributes."""
    name, value = rng.choice(names), rng.choice(VALUES)
    if name in dataset.attrs:
        return dataset.assign_attrs({name: value})
    values = dataset[name].values.copy()
    if values.dtype.kind == "f" or math.isfinite(value):
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = rng.randrange(values.size) if rng.random() < 0.7 else slice(None)
            values.reshape(-1)[row] = np.array(value).astype(values.dtype)
    return dataset.assign({name: (dataset[name].dims, values, dataset[name].attrs)})


def make_library(kind, rng, path):
    """Write a shipped library with something spoilt."""
    library = load_library(rng.choice(library_names()))
    if kind == "figure":
        name = rng.choice([n for n, e in library.entries.items() if e.distribution is None])
        changed = dataclasses.replace(library.entries[name], number=rng.choice(VALUES))
        library = dataclasses.replace(library, entries={**library.entries, name: changed})
        return save_library(library, path)
    dataset = to_dataset(library)
    names = ["params", "quantile_probability", "quantile_value", "mean", "std", "n"]
    if kind == "table":
        names = [str(n) for n in dataset.variables if "_" in str(n) and n not in names]
        names = [n for n in names if is_number(dataset[n])] or ["mean"]
    return save(spoil(dataset, names, rng), path)


def make_models(folder):
    """Fit a small model of step times and one of a trace; datasets by kind."""
    seconds = steps_made.made(shape=(60, 3), stalls=0.05)
    rows = [f"{r},{s},{seconds[s, r]}" for r in range(3) for s in range(60)]
    (folder / "steps.csv").write_text("\n".join(["run,step,step_s", *rows]))
    layout = pipeline_synth.Layout(replicas=2, stages=2, microbatches=3, steps=6)
    frame, _ = pipeline_synth.make_trace(layout, pipeline_synth.Effects(rank_sd=0.02))
    pipeline_synth.as_production(frame).to_csv(folder / "trace.csv", index=False)
    return {
        "steps_model": prism.fit(folder / "steps.csv", seed=1),
        "trace_model": prism.fit(folder / "trace.csv", seed=1),
    }


def below_ideal(out, err):
    """Whether an answer's mean step is below the ideal one, and no warning says so."""
    found = json.loads(out)
    step, ideal = found.get("step_time"), found.get("ideal_step_time")
    if not step or not ideal or "below the ideal" in err:
        return False
    error = max(step["mean_se"] or 0.0, max(step["std"], 0.03 * ideal) / math.sqrt(2.0))
    return step["mean"] < ideal * (1.0 - 1e-5) - ERRORS * error


def judge(words, status, out, err):
    found = find_faults(words, status, out, err)
    if status == 0 and not found and below_ideal(out, err):
        found.append("mean below ideal")
    return found


def try_pipe(rng, folder):
    """Feed a text by a pipe and by a file: the answers' figures must be the same."""
    job = folder / "whole"
    pad = "# a line of a comment that makes the file long\n" * rng.choice((0, 1, 180, 2_000))
    if rng.random() < 0.5:
        text, words = DURATIONS + pad + "cluster.never: 1\n" * (rng.random() < 0.2), ["{}"]
        words = ["estimate", *words, *FEW]
    else:
        steps = "".join(f"{rng.uniform(1, 1.1):.6f}\n" for _ in range(rng.choice((10, 3000))))
        text, words = "step_s\n" + steps, ["show", "{}"]
    job.write_text(text)
    answers = []
    reader, writer = os.pipe()

    def write():
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as file:
            file.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    for path in (str(job), f"/dev/fd/{reader}"):
        given = [word.replace("{}", path) for word in words]
        seeded = COMMON if words[0] == "estimate" else COMMON[4:]
        status, out, err = call(*given, *seeded)
        answers.append((status, out, err, [*given, *seeded]))
    os.close(reader)
    thread.join()
    (status, out, _, _), (other, piped, err, given) = answers
    found = find_faults(given, other, piped, err)
    if status != other:
        found.append("pipe answered otherwise")
    elif status == 0:
        one, two = json.loads(out), json.loads(piped)
        keys = ("step_time", "time_to_train", "n", "mean", "p99")
        found += ["pipe answered otherwise"] * any(one.get(k) != two.get(k) for k in keys)
    return other, given, found, err


def run_apart(job, cache):
    """Run a command in a process of its own: status and its figures."""
    words = [sys.executable, "-m", "prism", "estimate", job, "--replicates", "64", *COMMON]
    done = subprocess.run(words, env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
                          capture_output=True, text=True)  # fmt: skip
    figures = json.loads(done.stdout)["step_time"] if done.returncode == 0 else None
    return done.returncode, figures, done.stderr


def damage(file, rng):
    """Empty, cut, overwrite or flip one bit of a file."""
    data = bytearray(file.read_bytes())
    how = rng.choice(("empty", "cut", "garbage", "bit", "bit", "bit"))
    if how == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        at = rng.randrange(len(data))
        data = {"empty": b"", "cut": data[:at], "garbage": rng.randbytes(900)}[how]
    file.write_bytes(data)


def check_whole(models, job, folder):
    """Answer models and shipped libraries as they are: how many are refused."""
    refused = 0
    for name, dataset in models.items():
        save(dataset, folder / "x.nc")
        status, _, err = call("estimate", folder / "x.nc", *FEW, "--steps", "50", *COMMON)
        refused += status != 0
        print(f"whole {name}: {status} {err.strip()[:300] if status else ''}")
    for name in library_names():
        library = "variability.library=" + name
        status, _, err = call("estimate", job, "--set", library, *FEW, *COMMON)
        refused += status != 0
        print(f"whole {name}: {status} {err.strip()[:300] if status else ''}")
    return refused


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("n", nargs="?", type=int, default=1_000)
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("--kind", choices=(*OTHERS, "cache"))
    asked = parser.parse_args()
    folder, begin = Path(tempfile.mkdtemp(prefix="prism-fuzz-")), time.perf_counter()
    job, cache = folder / "whole.yaml", folder / "cache"
    job.write_text(JOB)
    models, whole = make_models(folder), None
    rows, faults = defaultdict(Counter), check_whole(models, job, folder)
    for i in range(asked.n):
        rng = random.Random(f"{asked.seed}/{i}")
        kind = asked.kind or ("cache" if i % 50 == 49 else rng.choice(OTHERS))
        file, words, err = folder / "x.nc", ["estimate"], ""
        if kind == "cache":
            whole = whole or run_apart(job, cache)
            damage(rng.choice(sorted(cache.rglob("*.nb?"))), rng)
            status, figures, err = run_apart(job, cache)
            found = [] if (status, figures) == whole[:2] else ["cache changed the answer"]
        elif kind == "pipe":
            status, words, found, err = try_pipe(rng, folder)
        else:
            if kind in models:
                dataset = models[kind]
                names = [n for n in map(str, dataset.variables) if is_number(dataset[n])]
                names += [n for n, v in dataset.attrs.items() if isinstance(v, float | int)]
                save(spoil(dataset, names, rng), file)
                words = ["estimate", str(file), *FEW]
                words += ["--steps", "50"] if kind == "steps_model" else []
            else:
                make_library(kind, rng, file)
                words = ["estimate", str(job), "--set", f"variability.library={file}", *FEW]
            words += COMMON
            status, out, err = call(*words)
            found = judge(words, status, out, err)
        rows[kind].update(["n", status, *found])
        if found:
            faults += 1
            print(f"{i} {kind}: {', '.join(found)}: {' '.join(words)}\n    {err.strip()[:300]}")
    names = sorted({name for row in rows.values() for name in row if isinstance(name, str)} - {"n"})
    print(f"| kind | inputs | answered | refused | {' | '.join(names)} |")
    print("|---" * (4 + len(names)) + "|")
    for kind, row in sorted(rows.items()):
        cells = [kind, row["n"], row[0], row[2], *(row[name] for name in names)]
        print("| " + " | ".join(map(str, cells)) + " |")
    print(f"{asked.n} inputs, {time.perf_counter() - begin:.0f} s, {faults} with faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
