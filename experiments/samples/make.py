"""Write the samples of this folder: small recordings of made-up jobs, one of each format.

Run from anywhere: `python experiments/samples/make.py`. Nothing here was measured: times are drawn
from known distributions by the generators of the tests, so that what is read can be held against
them.
"""

from __future__ import annotations

import csv
import gzip
import random
import sys
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import chakra_synth  # noqa: E402
import kineto_synth  # noqa: E402
import nsys_synth  # noqa: E402
import profile_made  # noqa: E402
import tables_made  # noqa: E402


def main() -> None:
    program = kineto_synth.training_step(n_layers=2, kernels=2, mean_us=2_000.0)
    times = kineto_synth.simulate(program, *kineto_synth.draw(program, 6, 2, seed=7, cv=0.03))
    for name, write in (("nsys", nsys_synth.write), ("chakra", chakra_synth.write)):
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        write(folder, program, times)
    runs = [tables_made.nccl_tests(noise=0.01, seed=seed) for seed in range(3)]
    (HERE / "all_reduce.txt").write_text("\n".join(runs))
    kernels = tables_made.hta_table(tables_made.durations(seed=1), unit="ns")
    kernels.round(3).to_csv(HERE / "hta_kernels.csv", index=False)
    write_tables()
    trace = msgspec.json.encode(profile_made.profile())
    (HERE / "profile.json.gz").write_bytes(gzip.compress(trace, 9, mtime=0))
    (HERE / "nodelist.txt").write_text("NodeList=node[001-003,7]\n")


def write_tables() -> None:
    """Write the ops of 8 steps of two replicas, the second 10 % slow, and step times of a job."""
    random.seed(1)
    with open(HERE / "trace.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow("step dp_rank microbatch op_kind start_ms duration_ms".split())
        for step in range(8):
            for rank in range(2):
                clock = 0.0
                for microbatch in range(4):
                    for op, ms in (("forward", 20.0), ("backward", 40.0)):
                        ms *= (1.0, 1.1)[rank] * random.gauss(1.0, 0.02)
                        table.writerow([step, rank, microbatch, op, f"{clock:.3f}", f"{ms:.3f}"])
                        clock += ms
    with open(HERE / "steps.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "step_s"])
        table.writerows([n, f"{random.gauss(1.1, 0.01):.4f}"] for n in range(100))


if __name__ == "__main__":
    main()
