"""How time and memory grow with GPUs, microbatches, replicates and the length of a trace.

Each point is a process of its own: processor seconds of a call after a small one of the same kind,
so that compiling and loading are not counted, and the peak of its memory. Slopes are of the upper
half of the points, in logarithms: 1 is in proportion. The line beside the points is what the draws
alone take (Philox and a quantile table for each op-sample, `bench_engine.py`).

    python experiments/studies/benchmarks/growth.py [--rounds 1]

writes growth.png and growth.json beside this file.
"""

import argparse
import csv
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
JOB = "llama3-405b-16k"  # tp 8, pp 16: 128 GPUs a replica
AXES = {
    "GPUs": (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144),
    "microbatches of a replica": (16, 32, 64, 128, 256),
    "replicates": (256, 512, 1024, 2048, 4096),
    "rows of a trace": (2_000, 8_000, 32_000, 128_000),
}
REPLICATES = 256
DRAW_S = 1.27e-9  # of one op-sample: the floor of `bench_engine.py` on the same machine


def write_trace(path, rows):
    """Write a table of forward and backward ops of four replicas, one of them slow."""
    random.seed(1)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow("op_kind step dp_rank microbatch start_ms duration_ms".split())
        for step in range(rows // 64):
            shared = random.gauss(1.0, 0.01)
            for rank in range(4):
                clock = 0.0
                for microbatch in range(8):
                    content = random.gauss(1.0, 0.05) * shared * (1.3 if rank == 2 else 1.0)
                    for op, ms in (("forward", 20.0), ("backward", 40.0)):
                        table.writerow([op, step, rank, microbatch, clock, ms * content])
                        clock += ms * content


def call(axis, size):
    """Run one point; its op-samples."""
    import prism

    if axis == "rows of a trace":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.csv"
            write_trace(path, size)
            begin = time.process_time()
            prism.fit(path, seed=0)
            return 0, time.process_time() - begin
    job, replicates = prism.load_job(JOB), REPLICATES
    if axis == "GPUs":
        job = job.replace(f"parallelism.dp={size // 128}", f"cluster.nodes={size // 8}")
    elif axis == "microbatches of a replica":
        job = job.replace(f"parallelism.microbatches={size}")
    else:
        replicates = size
    begin = time.process_time()
    found = prism.simulate(job, replicates, seed=1, threads=1)
    seconds = time.process_time() - begin
    return int(found.attrs["engine_op_samples"]), seconds


def point(axis, size):
    """Measure one point in this process; the least of the sizes has been run before it."""
    call(axis, AXES[axis][0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    samples, seconds = call(axis, size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "mb": peak / 1024, "before_mb": before / 1024, "draws": samples}


def measure(rounds):
    """Points by axis, each the fastest of some rounds."""
    found = {}
    for axis, sizes in AXES.items():
        found[axis] = []
        for size in sizes:
            each = []
            for _ in range(rounds):
                command = [sys.executable, __file__, "--point", axis, str(size)]
                each.append(json.loads(subprocess.check_output(command)))
            found[axis].append({"size": size, **min(each, key=lambda row: row["seconds"])})
            print(axis, found[axis][-1], flush=True)
    return found


def slope(rows, what):
    """Growth of the upper half of the points, in logarithms."""
    upper = rows[len(rows) // 2 - 1 :]
    x, y = (np.log([row[name] for row in upper]) for name in ("size", what))
    return float(np.polyfit(x, y, 1)[0])


def draw(found):
    """Draw time and memory by axis."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    matplotlib.style.use("prism.plots.light")
    figure = Figure(figsize=(13, 6.5))
    figure.subplots_adjust(left=0.06, right=0.98, top=0.9, bottom=0.08, wspace=0.25)
    axes = figure.subplots(2, len(found), sharex="col")
    for (time_ax, memory_ax), (name, rows) in zip(axes.T, found.items(), strict=True):
        size = [row["size"] for row in rows]
        time_ax.loglog(size, [row["seconds"] for row in rows], "o-", label="call, one core")
        if rows[0]["draws"]:
            time_ax.loglog(size, [row["draws"] * DRAW_S for row in rows], "--", label="draws alone")
        memory_ax.loglog(size, [row["mb"] for row in rows], "o-")
        time_ax.set_title(f"{name}\ntime: slope {slope(rows, 'seconds'):.2f}")
        memory_ax.set_title(f"memory: slope {slope(rows, 'mb'):.2f}")
        memory_ax.set_xlabel(name)
        memory_ax.set_ylim(200, 4000)
        for ax in (time_ax, memory_ax):
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter(lambda value, _: f"{value:,g}")
                axis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("processor time [s]")
    axes[1, 0].set_ylabel("peak memory [MB]")
    axes[0, 0].legend()
    figure.savefig(HERE / "growth.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--draw", action="store_true", help="only draw growth.json again")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads((HERE / "growth.json").read_text()))
        return
    if options.point:
        print(json.dumps(point(options.point[0], int(options.point[1]))))
        return
    found = measure(options.rounds)
    (HERE / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found)


if __name__ == "__main__":
    main()
